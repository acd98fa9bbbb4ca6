#!/usr/bin/env python3
"""Runs every installed command once on a small example, in a folder of its own.

    python .ci/smoke.py BIN

BIN is the folder of the commands: `bin` of an environment in which the wheel is installed. This file imports only
Python's own modules. A command that lacks an extra must end with one line that names the package to install. The last
line is `N passed, N failed`; the status is 1 if a command failed.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = "the cat sat on the mat. the dog lay on the rug.\n" * 200
SECONDS = 300  # most seconds of a command
HINT = "\n(--verbosity=1 shows where)"  # the line that follows the line of an error
NARROW = "--n_layer=1 --d_model=16 --n_head=2 --d_inner=16".split()
STEPS = "--train_steps=4 --iterations=2 --save_steps=2 --warmup_steps=1".split()

# For each command: name, arguments, standard input, a pattern of its output, and a package that it may lack, or `None`.
# A command that reads a file comes after the command that writes it.
COMMANDS = [
    ("prepare-data", "--dataset=text --data_path=text.txt --level=char --data_dir=prepared", "", "train", None),
    (
        "train",
        "--data_dir=prepared --n_layer=1 --d_model=16 --d_embed=16 --n_head=2 --d_head=8 --d_inner=16 "
        "--tgt_len=8 --mem_len=8 --train_batch_size=2 --train_steps=4 --iterations=2 --save_steps=2 --model_dir=lm",
        "",
        "step 4/4 ",
        None,
    ),
    ("generate", "--model_dir=lm --prompt=the --max_new_tokens=5 --seed=1", "", "^the", None),
    ("generate", "--model_dir=lm --prompt=the --regex=[a-z]{4} --seed=1", "", r"^the[a-z]{4}$", "outlines-core"),
    ("score", "--model_dir=lm", "the cat\n", r"\d", None),
    ("embed", "--model_dir=lm", "the cat\n", r"\d", None),
    ("average-checkpoints", "--model_dir=lm --num_last_checkpoints=2 --output_dir=mean", "", "the average of", None),
    ("convert-checkpoint", "--to_tf1 --model_dir=lm --tf1_checkpoint=original", "", "", None),
    ("estimate", "--model_dir=lm --train_batch_size=4", "", "together", None),
    ("export-saved-model", "--model_dir=lm --output=served/lm", "", "", None),
    ("export-saved-model", "--model_dir=lm --output=lm.onnx --format=onnx", "", "", "tf2onnx"),
    ("plot", "--kind=curves --model_dir=lm --output=curves.png", "", "", "matplotlib"),
    (
        "train-seq2seq",
        "--dataset=dates --n_pairs=200 --model_dir=dates --num_layers=1 --d_model=16 --num_heads=2 --dff=16 "
        "--max_len=64 --batch_size=8 " + " ".join(STEPS),
        "",
        "step 4/4 ",
        None,
    ),
    ("translate", "--model_dir=dates --max_new_tokens=5", "Sat the 21st of Nov 2026\n", "\n$", None),
    (
        "train-ner",
        "--dataset=towns --model=tener --model_dir=towns --batch_size=8 " + " ".join((*NARROW, *STEPS)),
        "",
        "step 4/4 ",
        None,
    ),
    ("tag", "--model_dir=towns", "高山昨天在听说白石住。\n", '"entities"', None),
    ("plot-ner", "--kind=direction --model_dir=towns --output=direction.png", "", "", "matplotlib"),
]


def run(folder, environment, name, arguments, given, pattern, missing):
    """Runs a command. Returns what is wrong, or `None` if it is right.

    Args:
        folder: the working directory.
        environment: the environment variables. `SMOKE_BIN` is the folder of the commands.
        name, arguments, given, pattern, missing: an item of `COMMANDS`.
    """
    command = [environment["SMOKE_BIN"] + f"/txl-{name}", *arguments.split()]
    done = subprocess.run(
        command, cwd=folder, env=environment, input=given, capture_output=True, text=True, timeout=SECONDS
    )
    if missing and done.returncode == 1 and "pip install" in done.stderr and missing in done.stderr:
        lines = done.stderr.strip().removesuffix(HINT).splitlines()
        return None if len(lines) == 1 else f"its error has more than one line:\n{done.stderr}"
    if done.returncode or not re.search(pattern, done.stdout):
        return f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return None


def serve(folder, environment, name="demo", missing="gradio", part=b"<html"):
    """Runs txl-demo or txl-serve until its page answers. Returns what is wrong, or `None` if it is right.

    Args:
        folder, environment, name: see `run`.
        missing: a package that the command may lack. Then it must name it.
        part: bytes that the page must contain.
    """
    command = [environment["SMOKE_BIN"] + f"/txl-{name}", "--model_dir=lm", "--port=0"]
    shown = folder / f"{name}.txt"
    with shown.open("w") as output:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        for _ in range(SECONDS):
            time.sleep(1)
            said = shown.read_text()
            if server.poll() is not None:
                return None if server.returncode == 1 and missing in said and "pip install" in said else said
            address = re.search(r"http://127\.0\.0\.1:\d+\S*", said)
            if address:
                with urllib.request.urlopen(address[0], timeout=60) as page:
                    return None if part in page.read() else f"its page has no {part.decode()}"
        return f"no page after {SECONDS} s:\n{said}"
    finally:
        server.terminate()
        server.wait(60)


def main(folder, bin_folder):
    """Runs all commands of `bin_folder` in `folder`, and prints what is wrong. Returns whether a command failed."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "SMOKE_BIN": os.path.abspath(bin_folder),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    (folder / "text.txt").write_text(TEXT)
    problems = {f"{name} {rest[0]}": run(folder, environment, name, *rest) for name, *rest in COMMANDS}
    problems["demo"] = serve(folder, environment)
    problems["serve"] = serve(folder, environment, "serve", "starlette", b"AVAILABLE")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name in {name.removeprefix("txl-") for name in scripts} - {command.split()[0] for command in problems}:
        problems[name] = "this file has no example of it"
    failed = {name: problem for name, problem in problems.items() if problem is not None}
    for name, problem in failed.items():
        print(f"txl-{name}: {problem}")
    print(f"{len(problems) - len(failed)} passed, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(temporary), sys.argv[1]))
