"""Compares this library with values that other programs computed, for example the original Transformer-XL.

    python tests/check_reference.py tests/goldens/model tests/goldens/vanilla

A folder is a case or holds cases. Each case gives one line with the worst relative difference per kind of array: the
largest difference of any entry over the largest expected entry of the same array. Every segment's loss and every number
of the training trajectory counts as an array of its own. Arrays out of tolerance follow by name. The exit status is 1
where an array is out of tolerance or a case cannot be compared.

To add a family of models, write a function like `compare_model` and enter it in `COMPARISONS`.
"""

import argparse
import json
import os
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors come as exceptions; the rest is noise
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
import pytorch_arrays
import tagger_arrays
import tensorflow as tf
import vanilla_arrays

import txl_tf
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.tagged.tags import prf, spans_of


class Tolerance(NamedTuple):
    """An entry may differ by `rtol` |expected| + `atol` + `of_largest` max |expected|; if all are 0, by no bit."""

    rtol: float = 0.0
    atol: float = 0.0
    of_largest: float = 0.0

    def __str__(self):
        terms = [(self.rtol, " of the entry"), (self.atol, " absolute"), (self.of_largest, " of the largest entry")]
        return " + ".join(f"{value:g}{unit}" for value, unit in terms if value) or "none, bit for bit"


EXACT = Tolerance()


class Difference(NamedTuple):
    """`relative`: largest difference over largest expected entry, `inf` if incomparable. `problem`: "" in tolerance."""

    array: str
    relative: float
    problem: str = ""


def difference(name, expected, found, tolerance):
    """The `Difference` of two arrays. `nan` is always out of tolerance."""
    expected, found = np.asarray(expected), np.asarray(found)
    if found.shape != expected.shape:
        return Difference(name, np.inf, f"shape {list(found.shape)}, expected {list(expected.shape)}")
    size = np.abs(expected, dtype=np.float64)
    largest = np.max(size, initial=0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        distance = np.abs(np.subtract(found, expected, dtype=np.float64))
        worst = np.max(distance, initial=0.0)
        rounding = max(worst, largest) <= tolerance.atol  # both are 0 but for it, and have no size to compare
        relative = 0.0 if worst == 0 or rounding else worst / largest
        within = np.all(distance <= tolerance.rtol * size + tolerance.atol + tolerance.of_largest * largest)
    if tolerance == EXACT:
        within &= found.dtype == expected.dtype and found.tobytes() == expected.tobytes()
    return Difference(name, relative, "" if within else f"relative difference {relative:.1e}, tolerance {tolerance}")


def differences(expected, found, tolerance):
    """A `Difference` for every name of two dictionaries of arrays. `EXACT` asks for the same order of names, too."""
    rows = [difference(name, expected[name], found[name], tolerance) for name in expected if name in found]
    rows += [Difference(name, np.inf, "not computed by txl_tf") for name in expected if name not in found]
    rows += [Difference(name, np.inf, "not among the expected arrays") for name in found if name not in expected]
    if tolerance == EXACT and found.keys() == expected.keys():
        moved = [(name, right) for name, right in zip(found, expected, strict=True) if name != right]
        rows += [Difference(name, np.inf, f"stands where {right} should") for name, right in moved]
    return rows


# Transformer-XL

# kind: (how the names of its arrays begin, tolerance)
MODEL_KINDS = {
    "variables": ("var/", EXACT),
    "losses": ("loss", Tolerance(rtol=1e-5)),
    "memories": ("mems/", Tolerance(atol=1e-5)),
    "gradients": ("grad/", Tolerance(of_largest=1e-4)),
    "gradient norm": ("grad_norm", Tolerance(rtol=1e-5)),
    "trajectory": (("train/loss", "train/lr", "train/grad_norm"), Tolerance(rtol=1e-5)),
    # Weights move by up to 8e-3. Adam divides by the gradient's size: rounding shows where that is near 0.
    "final weights": ("train/var/", Tolerance(rtol=1e-5, atol=2e-5)),
}
SERIES = ["loss", "train/loss", "train/lr", "train/grad_norm", "out/nll", "out/sgd_losses"]


def compare_model(folder):
    """`{kind: [Difference]}` of a case of the original Transformer-XL; `goldens/README.md` describes its files."""
    with np.load(folder / "golden.npz") as file:
        golden = dict(file)
    found = model_arrays(folder, golden)
    return {
        kind: differences(of_kind(golden, start), of_kind(found, start), tolerance)
        for kind, (start, tolerance) in MODEL_KINDS.items()
    }


def of_kind(arrays, start):
    """Arrays whose names begin like this. Makes `loss[0]`, `loss[1]`, ... of `loss`: each is compared by itself."""
    arrays = {name: array for name, array in arrays.items() if name.startswith(start)}
    entries = {f"{name}[{i}]": entry for name in SERIES if name in arrays for i, entry in enumerate(arrays[name])}
    return {name: array for name, array in arrays.items() if name not in SERIES} | entries


def model_arrays(folder, golden):
    """What txl_tf computes for each of the golden arrays, under its name and with its shape."""
    config = json.loads((folder / "config.json").read_text())
    tokens, labels = golden["inputs"].astype(np.int32), golden["labels"].astype(np.int32)
    lm = start_model(folder, config)
    found = {f"var/{name}": array for name, array in txl_tf.tf1_variables(lm).items()}

    found["loss"], mems = [], lm.initial_mems(config["batch"])
    for segment in range(len(tokens)):
        nll, mems = lm.score(tokens[segment], labels[segment], mems)
        found["loss"].append(np.mean(nll))
        found |= {f"mems/{segment}/{layer}": np.transpose(mem, [1, 0, 2]) for layer, mem in enumerate(mems)}

    before_last = [golden[f"mems/{len(tokens) - 2}/{layer}"] for layer in range(config["n_layer"])]
    found |= gradients(lm, tokens[-1], labels[-1], [mem.transpose(1, 0, 2) for mem in before_last])
    found |= trajectory(lm, tokens, labels, config)  # changes the weights
    return found | {f"train/var/{name}": array for name, array in txl_tf.tf1_variables(lm).items()}


def start_model(folder, config):
    """The language model that `config` describes, with the start weights of the case."""
    sizes = ["n_token", "n_layer", "d_model", "d_embed", "n_head", "d_head", "d_inner"]
    options = ["untie_r", "cutoffs", "div_val", "proj_same_dim", "same_length", "clamp_len"]
    lm = txl_tf.TransformerXLLM(
        **{name: config[name] for name in sizes},
        **{name: config[name] for name in options if name in config},
        mem_len=config["mem"],
        dropout=0.0,
        proj_share_all_but_first=any(config["tie_projs"]),
    )
    txl_tf.load_tf1_checkpoint(lm, str(folder / "model.ckpt-0"))
    return lm


def gradients(lm, tokens, labels, mems):
    """`grad/<variable>` of a segment's mean loss, and `grad_norm`, their global norm."""
    with tf.GradientTape() as tape:
        nll, _ = lm.score(tokens, labels, mems)
        loss = tf.reduce_mean(nll)
    values = [tf.convert_to_tensor(value) for value in tape.gradient(loss, lm.trainable_variables)]
    found = {f"grad/{name}": value.numpy() for name, value in zip(original_names(lm), values, strict=True)}
    return found | {"grad_norm": tf.linalg.global_norm(values).numpy()}


def original_names(lm):
    """The original's names of `lm.trainable_variables`: fills each with its index, and looks where that shows up."""
    before = lm.get_weights()
    for i, variable in enumerate(lm.trainable_variables):
        variable.assign(np.full(variable.shape, i))
    names = {int(array.flat[0]): name for name, array in txl_tf.tf1_variables(lm).items()}
    lm.set_weights(before)
    return [names[i] for i in range(len(names))]


def trajectory(lm, tokens, labels, config):
    """Trains by `fit`, memory carried through all steps. Three series `[train_steps]`: rate, nats, unclipped norm."""
    settings = ["learning_rate", "warmup_steps", "train_steps", "min_lr_ratio", "clip"]
    lm.compile(txl_tf.make_optimizer(**{name: config[name] for name in settings}))
    rows = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rows.append([float(lm.optimizer.learning_rate)]),
        on_train_batch_end=lambda batch, logs: rows[-1].extend([logs["loss"], logs["grad_norm"]]),
    )
    dataset = tf.data.Dataset.from_tensor_slices((tokens, labels)).repeat().take(config["train_steps"])
    lm.fit(dataset, verbose=0, callbacks=[record])
    return dict(zip(["train/lr", "train/loss", "train/grad_norm"], np.transpose(rows), strict=True))


# The vanilla Transformer

VANILLA_KINDS = {
    "results": ("out/", Tolerance(of_largest=1e-5)),
    "gradients": ("g/", Tolerance(of_largest=1e-4, atol=1e-6)),  # that of a bias of the keys is 0 but for rounding
}


def compare_vanilla(folder):
    """`{kind: [Difference]}` of a case of the vanilla Transformer, see `vanilla_arrays.py`."""
    with np.load(folder / "golden.npz") as file:
        golden = dict(file)
    found = vanilla_arrays.arrays_of(json.loads((folder / "config.json").read_text()), golden)
    kinds = {
        kind: differences(of_kind(golden, start), of_kind(found, start), tolerance)
        for kind, (start, tolerance) in VANILLA_KINDS.items()
    }
    return {kind: rows for kind, rows in kinds.items() if rows}


# TENER and FLAT

TAGGER_KINDS = {
    "results": ("out/", Tolerance(rtol=1e-4, atol=2e-5)),
    "gradients": ("g/", Tolerance(of_largest=1e-4, atol=1e-6)),
}


def compare_tagger(folder, arrays_of):
    """`{kind: [Difference]}` of a case of TENER or FLAT, see `tagger_arrays.py`."""
    with np.load(folder / "golden.npz") as file:
        golden = dict(file)
    expected, found = arrays_of(json.loads((folder / "config.json").read_text()), golden)
    return {
        kind: differences(of_kind(expected, start), of_kind(found, start), tolerance)
        for kind, (start, tolerance) in TAGGER_KINDS.items()
    }


def compare_tener(folder):
    config = json.loads((folder / "config.json").read_text())
    return compare_spans(config) if "encodings" in config else compare_tagger(folder, tagger_arrays.tener_arrays)


def compare_flat(folder):
    config = json.loads((folder / "config.json").read_text())
    return compare_lexicon(config) if "sentences" in config else compare_tagger(folder, tagger_arrays.flat_arrays)


def compare_spans(config):
    """Entities of tags, exactly; fastNLP lower-cases their kinds."""
    rows = []
    for scheme, case in config["encodings"].items():
        counts = np.zeros(3, int)
        for i, sequence in enumerate(case["sequences"]):
            found = {name: [[s.kind.lower(), [s.start, s.end]] for s in spans_of(sequence[name])] for name in PATHS}
            wrong = [name for name in PATHS if found[name] != sequence[f"{name}_spans"]]
            gold, pred = ({(kind, *place) for kind, place in found[name]} for name in PATHS)
            counts += [len(gold & pred), len(pred), len(gold)]
            expected = {name: sequence[f"{name}_spans"] for name in wrong}
            problem = f"spans are {[found[name] for name in wrong]}, expected {[*expected.values()]}" if wrong else ""
            rows.append(Difference(f"{scheme}[{i}]", float(bool(wrong)), problem))
        scores = dict(zip(("pre", "rec", "f"), prf(*counts), strict=True))
        expected = {name: np.float64(case["result"][name]) for name in scores}
        rows += differences(expected, scores, Tolerance(atol=1e-6))
    return {"spans": rows}


PATHS = ("gold", "pred")


def compare_lexicon(config):
    """Words that a lexicon finds, exactly; the lexicon is jieba's (pip install jieba)."""
    lexicon, rows = Lexicon.load("jieba"), []
    for case in config["sentences"]:
        found = [[*match] for match in lexicon.matches(case["sentence"])]
        problem = "" if found == case["words"] else f"words {found}, expected {case['words']}"
        rows.append(Difference(case["sentence"], float(bool(problem)), problem))
    return {"words": rows}


# PyTorch checkpoints

PYTORCH_KINDS = {
    "words": ("words", EXACT),
    "nll": ("nll", Tolerance(atol=2e-5)),
    "log-probabilities": ("log_probs", Tolerance(atol=5e-5)),
    "memories": ("mems", Tolerance(atol=1e-5)),
}


def compare_pytorch(folder, **options):
    """`{kind: [Difference]}` of all checkpoints in a folder, see `pytorch_arrays.py`; the losses three ways."""
    with np.load(folder / "golden.npz") as file:
        golden = dict(file)
    kinds = {kind: [] for kind in PYTORCH_KINDS}
    for checkpoint in pytorch_arrays.checkpoints_in(folder):
        expected, found = pytorch_arrays.arrays_of(checkpoint, golden, **options)
        for kind, (start, tolerance) in PYTORCH_KINDS.items():
            rows = differences(
                *({n: a for n, a in of.items() if n.startswith(start)} for of in (expected, found)), tolerance
            )
            kinds[kind] += [row._replace(array=f"{checkpoint.name}: {row.array}") for row in rows]
    return kinds


# Families, folders and the report

COMPARISONS = {
    "model": compare_model, "vanilla": compare_vanilla, "tener": compare_tener, "flat": compare_flat,
    "pytorch": compare_pytorch,
}  # fmt: skip
MARKS = ["golden.npz", "config.json", "case.json", "model.ckpt-0.index"]


def family_of(folder):
    """The family that a case's files tell: model, pytorch, vanilla, tener or flat; `None` if it is no case."""
    files = {path.name for path in folder.iterdir()}
    if {"golden.npz", "config.json", "model.ckpt-0.index"} <= files:
        return "model"
    if {"golden.npz", "case.json"} <= files and any(name.endswith((".pt", ".bin", ".safetensors")) for name in files):
        return "pytorch"
    config = json.loads((folder / "config.json").read_text()) if "config.json" in files else {}
    if "golden.npz" in files and {"model", "arrays"} <= config.keys():
        return {"FLAT": "flat", "TENER": "tener"}.get(config["model"].split()[0], "vanilla")
    # Without arrays: the words of a lexicon in sentences, the spans that tags encode.
    return "flat" if "sentences" in config else "tener" if "encodings" in config else None


def cases_in(folder):
    """`[folder]` or its subfolders, those with any file of a case: an incomplete case is not passed over."""
    marked = [path for path in [folder, *sorted(folder.glob("*"))] if any((path / mark).exists() for mark in MARKS)]
    return [folder] if folder in marked else marked


def compare(case):
    """`(kinds, error)` of a case: `{kind: [Difference]}`, or why it cannot be compared."""
    try:
        family = family_of(case)
        if family in COMPARISONS:
            return COMPARISONS[family](case), ""
        unknown = "no case: its files are of no reference format"
        return {}, f"{family}: no such model in txl_tf yet" if family else unknown
    except (KeyError, OSError, ValueError, tf.errors.OpError, zipfile.BadZipFile) as error:
        return {}, f"{type(error).__name__}: {error}"


def report(case, width=0):
    """`(ok, lines)`: the case's worst relative difference of each kind, then each array that is out of tolerance."""
    kinds, error = compare(case)
    worst = {kind: np.max([row.relative for row in rows]) for kind, rows in kinds.items()}
    figures = "   ".join(f"{kind} {f'{value:.1e}' if value else '0':<7}" for kind, value in worst.items())
    wrong = [f"  {case.name}: {kind}: {name}: {text}" for kind in kinds for name, _, text in kinds[kind] if text]
    ok = not (error or wrong)
    return ok, [f"{case.name:<{width}}   {error or figures}   {'ok' if ok else 'FAILED'}", *wrong]


def main(arguments=None):
    """Prints the report and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a case, or a folder of cases")
    status = 0
    for folder in parser.parse_args(arguments).folders:
        cases = cases_in(folder.resolve())
        if not cases:
            print(f"{folder}   {'no case in it' if folder.is_dir() else 'no such folder'}   FAILED")
            status = 1
        for case in cases:
            ok, lines = report(case, width=max(len(case.name) for case in cases))
            print("\n".join(lines), flush=True)
            status = status if ok else 1
    return status


if __name__ == "__main__":
    sys.exit(main())
