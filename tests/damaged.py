"""Damages each file of a folder in each way, runs programs on it, each in a fork, and prints what became of it.

    python tests/damaged.py FOLDER [NUMBER]

FOLDER is what `make_folder` makes. NUMBER is how many damages each file gets; 0 is all. A line of output is a JSON
list: the program, the file, the damage, seconds, status, the end of its standard output, its standard error, and the
files that are lost or changed though they should not be.
"""

import contextlib
import json
import os
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
from absurd import LM, attempt, contents, import_all, stub

TRAINED = f"{LM} --train_batch_size=4 --eval_batch_size=2 --iterations=3 --save_steps=6"
TRAIN = f"{TRAINED} --data_dir={{here}}/data --train_steps"
EXPORT = "--model_dir={here}/whole/run --nowarmup --output={folder}"
SPARE = ("log.csv", "events.", "best", "checkpoint")  # what a program that trains may write anew, in a run
# Program, the folder that it opens, its flags, and whether it may write there.
PROGRAMS = {
    "evaluate": ("train", "run", "--do_train=False --do_eval --model_dir={folder} --data_dir={here}/data", False),
    "evaluate the best": (
        "train", "run", "--do_eval_only --eval_ckpt_path=best --model_dir={folder} --data_dir={here}/data", False,
    ),
    "score": ("score", "run", "--model_dir={folder} --input={here}/lines.txt", False),
    "generate": ("generate", "run", "--model_dir={folder} --prompt=the --max_new_tokens=3 --seed=1", False),
    "plot": ("plot", "run", "--kind=curves --model_dir={folder} --output={out}/a.png", False),
    "average": (
        "average-checkpoints", "run", "--model_dir={folder} --num_last_checkpoints=2 --output_dir={out}/a", False,
    ),
    "export": ("export-saved-model", "run", "--model_dir={folder} --output={out}/served --nowarmup", False),
    "to tf1": ("convert-checkpoint", "run", "--to_tf1 --model_dir={folder} --tf1_checkpoint={out}/tf1", False),
    "resume": ("train", "run", f"--model_dir={{folder}} {TRAIN}=15", True),
    "start from": ("train", "run", "--init_from={folder} --model_dir={out}/new --train_steps=1 "
                   "--data_path={here}/text.txt --level=word", False),
    "verify": ("prepare-data", "data", "--data_dir={folder} --verify", False),
    "train on": ("train", "data", f"--data_dir={{folder}} {TRAINED} --train_steps=1 --model_dir={{out}}/run", False),
    "prepare again": ("prepare-data", "data", "--dataset=text --data_path={here}/text.txt --level=word "
                      "--data_dir={folder}", True),
    "from tf1": ("convert-checkpoint", "tf1", "--tf1_checkpoint={folder} --corpus={folder} --mem_len=4 "
                 "--model_dir={out}/run", False),
    "export a version": ("export-saved-model", "served", f"{EXPORT} --version=2", True),
    "export the same": ("export-saved-model", "served", f"{EXPORT} --version=1", False),
}  # fmt: skip


def put(path, make):
    """What `make` makes takes the place of a file."""
    path.unlink()
    make(path)


def linked(make):
    """A link, by `os.symlink` or `os.link`, to a file outside with the same content."""

    def damage(path, outside):
        shutil.copy(path, outside / "file")
        put(path, lambda path: make(outside / "file", path))

    return damage


def random_bytes(path, outside):
    path.write_bytes(np.random.default_rng(path.stat().st_size).bytes(path.stat().st_size))


def to_a_folder(path, outside):
    put(path, lambda path: path.symlink_to(outside))


DAMAGES = {
    "empty": lambda path, outside: path.write_bytes(b""),
    "half": lambda path, outside: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "random": random_bytes,
    "missing": lambda path, outside: path.unlink(),
    "folder": lambda path, outside: put(path, os.mkdir),
    "pipe": lambda path, outside: put(path, os.mkfifo),
    "dangling": lambda path, outside: put(path, lambda path: path.symlink_to("nothing")),
    "link": linked(os.symlink),
    "hard link": linked(os.link),
    "link to a folder": to_a_folder,
    "unreadable": lambda path, outside: path.chmod(0),
}
if os.getuid() == 0:  # who may read everything
    del DAMAGES["unreadable"]
UNHARMED = ("link", "hard link")  # the content is right


def make_folder(folder):
    """Writes `whole`: a run of 12 steps, a prepared folder, a checkpoint of the original program, a served model."""
    from helpers import TEXT, train_run

    import txl_tf
    from txl_tf.convert.original import run_to_tf1

    whole = folder / "whole"
    whole.mkdir()
    (folder / "text.txt").write_text(TEXT)
    (folder / "lines.txt").write_text("the cat sat\non the mat, and\n")
    for data in (folder / "data", whole / "data"):
        txl_tf.prepare(data_dir=str(data), dataset="text", data_path=str(folder / "text.txt"), level="word")
    sizes = {"d_model": 8, "d_embed": 8, "d_head": 4, "d_inner": 8, "mem_len": 4}
    source = {"data_dir": str(folder / "data"), "dataset": None, "data_path": None}
    train_run(whole / "run", None, data=source, model=sizes, training={"tgt_len": 4})
    run_to_tf1(str(whole / "run"), str(whole / "tf1"))
    lm, vocab = txl_tf.load_run(whole / "run")
    txl_tf.export_saved_model(lm, str(whole / "served" / "1"), vocab, warmup=False)


def cases_of(program, files, number):
    """`(file, damage)`: first none, then so many damages of each file, chosen by their names; all if it is 0."""
    yield "", ""
    for file in files:
        start = zlib.crc32(f"{program} {file}".encode())
        step = max(len(DAMAGES) // number, 1) if number else 1
        for i in range(number or len(DAMAGES)):
            yield file, list(DAMAGES)[(start + i * step) % len(DAMAGES)]


def main(folder, number="3"):
    here, scratch = Path(folder), Path(folder) / "scratch"
    scratch.mkdir(exist_ok=True)
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TMPDIR": str(scratch)}
    import_all({program for program, *_ in PROGRAMS.values()})
    stub(training=True)
    os.chdir(scratch)
    for name, (program, part, flags, writes) in PROGRAMS.items():
        whole = here / "whole" / part
        files = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
        for file, damage in cases_of(name, files, int(number)):
            case, out, outside = scratch / "case", scratch / "out", scratch / "outside"
            for path in (case, out, outside):
                shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(whole, case)
            for path in (out, outside):
                path.mkdir()
            (outside / "keep").write_text("keep")
            if file:
                DAMAGES[damage](case / file, outside)
            before = contents(case, outside, here / "data", here / "whole")
            words = flags.format(here=here, folder=case, out=out).split()
            seconds, status, errors = attempt(program, words, scratch)
            now = contents(case, outside, here / "data", here / "whole")
            spared = [str(case / name) for name in SPARE] if writes else []
            lost = [path for path in before if path not in now and not (writes and path == str(case / file))]
            changed = [path for path, text in before.items() if now.get(path, text) != text]
            if writes:
                changed = [path for path in changed if not path.startswith(str(case))]
                lost = [path for path in lost if not any(path.startswith(name) for name in spared)]
            output = (scratch / "stdout").read_text(errors="replace")[-3000:]
            print(json.dumps([name, file, damage, seconds, status, output, errors[:5000], lost + changed]), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
