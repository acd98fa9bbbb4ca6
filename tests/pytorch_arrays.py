"""Computes the golden arrays of a PyTorch checkpoint, after a conversion by `tools/convert_checkpoint.py`."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

import txl_tf

TOOL = Path(__file__).parents[1] / "tools" / "convert_checkpoint.py"
OTHERS = ("cache.pt", "vocab.bin")  # files of PyTorch without a model


def checkpoints_in(folder):
    """The checkpoints in a case's folder; shards count as one."""
    found = sorted(path for path in folder.iterdir() if path.suffix in (".pt", ".bin", ".safetensors"))
    indexes = sorted(folder.glob("*.index.json"))
    return indexes or [path for path in found if path.name not in OTHERS]


def convert(checkpoint, model_dir):
    """Runs the program. What a bare state_dict does not say, or a folder without a vocabulary, is given as flags."""
    case = json.loads((checkpoint.parent / "case.json").read_text())
    command = [sys.executable, TOOL, f"--pytorch_checkpoint={checkpoint}", f"--model_dir={model_dir}"]
    if checkpoint.name.startswith("state_dict"):
        told = case["config"]
        command += [f"--{name}={told[name]}" for name in ("mem_len", "same_length", "clamp_len")]
        command += [f"--cutoffs={','.join(map(str, told['cutoffs']))}"] if told["cutoffs"] else []
    options = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": str(TOOL.parents[1])}}
    done = subprocess.run(command, **options)
    if "corpus" in done.stderr:
        command += [f"--corpus={checkpoint.parent / 'words.txt'}"]
        done = subprocess.run(command, **options)
    if done.returncode:
        raise ValueError(done.stderr.strip()[-500:])
    return done.stdout


def arrays_of(checkpoint, golden, convert=convert, served=True):
    """`(expected, found)`: `{name: array}` of the golden file, and of the run that the checkpoint becomes."""
    scratch = Path(tempfile.mkdtemp())
    try:
        convert(checkpoint, scratch / "run")
        lm, vocab = txl_tf.load_run(scratch / "run")
        words = (checkpoint.parent / "words.txt").read_bytes(), "".join(f"{word}\n" for word in vocab.symbols).encode()
        expected, found = ({"words": np.frombuffer(text, np.uint8)} for text in words)
        segments = np.split(golden["tokens"], golden["segments"], 1), np.split(golden["labels"], golden["segments"], 1)
        for start in ("", "_zeros", "_empty"):
            if f"nll{start}" not in golden or (start == "_empty" and lm.network.same_length):
                continue  # with same_length, it takes a memory of full length, see docs/migration.md
            expected |= golden_arrays(golden, start, lm.network.mem_len)
            found |= scored(lm, *segments, start)
        expected["nll/cached"] = golden["nll" if "nll" in golden else "nll_zeros"]
        found["nll/cached"] = cached(lm, *segments)
        if served:
            txl_tf.export_saved_model(lm, str(scratch / "served"), vocab)
            expected["nll/served"], found["nll/served"] = (
                expected["nll/cached"],
                by_server(scratch / "served", *segments),
            )
        return expected, found
    finally:
        shutil.rmtree(scratch)


def golden_arrays(golden, start, mem_len):
    """Of a memory, the newest `mem_len` positions: with same_length, programs keep one that they never look at."""
    mems = golden["mems"] if not start else [golden[f"mems{start}_{i}"] for i in range(golden["segments"])]
    arrays = {f"nll{start}": golden[f"nll{start}"], f"log_probs{start}": golden[f"log_probs{start}"]}
    return arrays | {f"mems{start}/{i}": mem[:, :, max(mem.shape[2] - mem_len, 0) :] for i, mem in enumerate(mems)}


def scored(lm, tokens, labels, start):
    """By `score` and `log_probs`, segment by segment, from a memory of zeros or, where start is "_empty", from none."""
    network, batch = lm.network, len(tokens[0])
    empty = [np.zeros([batch, 0, network.d_model], np.float32)] * network.n_layer
    mems, nlls, log_probs, arrays = empty if start == "_empty" else None, [], [], {}
    for i, segment in enumerate(zip(tokens, labels, strict=True)):
        log_probs.append(lm.log_probs(segment[0], mems)[0])
        nll, mems = lm.score(*segment, mems)
        nlls.append(nll)
        arrays[f"mems{start}/{i}"] = np.stack(mems)
    return {f"nll{start}": np.stack(nlls), f"log_probs{start}": np.stack(log_probs), **arrays}


def cached(lm, tokens, labels):
    """As `evaluate` does it: with keys and values for memory."""
    carried, nlls = lm.start_evaluation(*tokens[0].shape), []
    for segment in zip(tokens, labels, strict=True):
        nll, _, carried = lm.evaluation_nll(*map(tf.constant, segment), carried)
        nlls.append(nll)
    return np.stack(nlls)


def by_server(folder, tokens, labels):
    """By the signatures of a SavedModel."""
    signatures = tf.saved_model.load(str(folder)).signatures
    state, nlls = signatures["initial_state"](batch_size=tf.constant(len(tokens[0])))["state"], []
    for segment in zip(tokens, labels, strict=True):
        answer = signatures["score"](tokens=tf.constant(segment[0]), labels=tf.constant(segment[1]), state=state)
        state = answer["state"]
        nlls.append(answer["nll"])
    return np.stack(nlls)
