"""Reads a PyTorch checkpoint as large as transfo-xl-wt103 here and by `torch.load`, in turns, each in a new process.

    python tests/read_speed.py --torch=/other/venv/bin/python --rounds=7

Both end with every number in memory: the arrays that are mapped here are copied, without the huge pages that NumPy asks
for, because torch does not and they take longer on some machines. Prints seconds and, in MB, the largest
resident memory above that after the imports, as medians; then the conversion of the checkpoint to a run.
"""

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROGRAMS = {
    "txl_tf": """
import numpy as np
from txl_tf.convert.torch_file import read_tensors
read = lambda path: {name: np.array(tensor.array()) for name, tensor in read_tensors(path).items()}
""",
    "torch": """
import torch
read = lambda path: torch.load(path, map_location="cpu", weights_only=True)
""",
    "conversion": """
from txl_tf.convert.pytorch import pytorch_to_run
read = lambda path: pytorch_to_run(path, path + ".run")
""",
}
MEASURE = """
import re, sys, time
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
before, start = peak(), time.perf_counter()
tensors = read(sys.argv[1])
print(time.perf_counter() - start, peak() - before)
"""
SIZES = {
    "n_token": 267735,
    "d_embed": 1024,
    "d_model": 1024,
    "n_layer": 18,
    "n_head": 16,
    "d_head": 64,
    "d_inner": 4096,
}
OPTIONS = {"cutoffs": [20000, 40000, 200000], "div_val": 4, "untie_r": True, "proj_share_all_but_first": True}


def write(folder, sizes):
    """The two layouts of torch.save: `{layout: path}`, with what a conversion needs beside them."""
    from pytorch_models import hf_config, tensors_of
    from torch_files import write_legacy, write_zip

    import txl_tf

    lm = txl_tf.TransformerXLLM(**sizes, **OPTIONS, mem_len=1600)
    tensors = tensors_of(lm, "hf")
    tensors = {name if name.startswith("crit.") else f"transformer.{name}": array for name, array in tensors.items()}
    paths = {}
    for layout, writer in {"zip": write_zip, "legacy": write_legacy}.items():
        (folder / layout).mkdir()
        (folder / layout / "config.json").write_text(json.dumps(hf_config(lm)))
        words = ["<eos>", "<unk>", *map(str, range(sizes["n_token"] - 2))]
        (folder / layout / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
        paths[layout] = writer(folder / layout / "pytorch_model.bin", tensors)
    return paths


def measure(python, program, path):
    """Seconds and MB of one process."""
    command = [python, "-c", PROGRAMS[program] + MEASURE, path]
    environment = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=environment)
    return [float(value) for value in done.stdout.split()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="a Python that has torch; without it, txl_tf alone is measured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--n_layer", type=int, default=SIZES["n_layer"], help="fewer, for a try")
    arguments = parser.parse_args()
    pythons = {"txl_tf": sys.executable} | ({"torch": arguments.torch} if arguments.torch else {})
    with tempfile.TemporaryDirectory() as folder:
        paths = write(Path(folder), SIZES | {"n_layer": arguments.n_layer})
        found = collections.defaultdict(list)
        for _ in range(arguments.rounds):
            for layout, path in paths.items():
                for program, python in pythons.items():
                    found[layout, program].append(measure(python, program, path))
        for (layout, program), values in found.items():
            seconds, megabytes = (statistics.median(column) for column in zip(*values, strict=True))
            print(f"{layout:<7} {program:<7} {seconds:.2f} s   {megabytes:,.0f} MB")
            if program == "torch":
                pairs = zip(found[layout, "torch"], found[layout, "txl_tf"], strict=True)
                print(f"{layout:<7} torch's time over ours: {statistics.median(a[0] / b[0] for a, b in pairs):.2f}")
        seconds, megabytes = measure(sys.executable, "conversion", paths["zip"])
        print(f"conversion to a run: {seconds:.1f} s   {megabytes:,.0f} MB")
        size = Path(paths["zip"]).stat().st_size / 2**20
        print(f"the file has {size:,.0f} MB, its largest tensor {20000 * 1024 * 4 / 2**20:.0f} MB")


if __name__ == "__main__":
    main()
