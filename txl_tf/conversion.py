"""Checkpoints of the original program and folders of runs, turned into one another.

What a model is follows from the shapes of its variables, see `model_arguments`. What it was trained on is in the
original's corpus files, see `read_corpus`. Three things are in neither: mem_len, same_length and clamp_len.
"""

import dataclasses
import json
import os
import re
import tempfile

import tensorflow as tf

from txl_tf.cache_pkl import read_cache_pkl
from txl_tf.checkpoint import checkpoint_step, load_weights, save_tf1_checkpoint, weight_shapes
from txl_tf.corpus import INFO_FILE, load_corpus
from txl_tf.datasets import DATASETS, PAPER_DATASETS
from txl_tf.download import LM1B_VOCAB
from txl_tf.language_model import TransformerXLLM
from txl_tf.runs import (
    VOCAB_FILE,
    check_new,
    create_run,
    find_checkpoint,
    load_lm,
    load_vocab,
    read_config,
    write_json,
)
from txl_tf.token_files import TokenWriter, is_remote
from txl_tf.vocabulary import Vocab, escape

CACHE_FILE = "cache.pkl"

# --------------------------------------------------------------------------------------------- TF1 -> run folder


def tf1_to_run(
    tf1_checkpoint,
    corpus,
    model_dir,
    *,
    mem_len,
    same_length=False,
    clamp_len=-1,
    dataset=None,
    data_dir=None,
    **expected,
):
    """Makes the folder of a run out of a checkpoint of the original program and its vocabulary.

    Args:
        tf1_checkpoint: prefix of the checkpoint, or the folder that it is in.
        corpus: see `read_corpus`.
        model_dir: the new folder. Its checkpoint has the step of the old one.
        mem_len, same_length, clamp_len: those of `TransformerXLLM`. No variable tells them.
        dataset: see `read_corpus`.
        data_dir: folder for the tokens of a cache.pkl, which `corpus.load_corpus` opens; `None`: they are left.
        **expected: other arguments of `TransformerXLLM`, which must be what the checkpoint says.

    Returns:
        `(lm, vocab, checkpoint)`: the language model, its `Vocab`, and the path of the new checkpoint.

    Raises:
        ValueError: checkpoint, corpus and arguments are not there or contradict one another. Says both sides.
    """
    if mem_len is None:
        raise ValueError("mem_len is needed: no variable of a checkpoint tells it. See the command that trained it")
    check_new(model_dir)
    path = find_tf1_checkpoint(tf1_checkpoint)
    model = model_arguments(path, **expected)
    source = read_corpus(corpus, dataset)
    _check_corpus(path, model, source)
    lm = TransformerXLLM(**model, mem_len=mem_len, same_length=same_length, clamp_len=clamp_len, **_UNTRAINED)
    load_weights(lm, path)

    names = "init init_std proj_init_std init_range"
    model = {
        "mem_len": mem_len, "same_length": same_length, "clamp_len": clamp_len, **model, **_UNTRAINED,
        **{name: getattr(lm.network, name) for name in names.split()},
    }  # fmt: skip
    data = {"dataset": source.dataset, "data_path": None, "level": source.vocab.level, "cutoffs": model["cutoffs"]}
    if data_dir:
        write_corpus(data_dir, source)
        data = {**data, "data_dir": os.fspath(data_dir)}
    checkpoint = create_run(model_dir, {"data": data, "model": model}, source.vocab, lm, _step(path))
    return lm, source.vocab, checkpoint


_UNTRAINED = {"dropout": 0.0, "dropatt": 0.0}  # as in the original's commands that evaluate


def find_tf1_checkpoint(path):
    """The prefix of a checkpoint, of which `path` may be the prefix, one of its files or the folder.

    Raises:
        ValueError: there is none, or there are several in the folder and no file named checkpoint says which.
    """
    path = os.fspath(path).rstrip("/")
    prefix = re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", path)
    if tf.io.gfile.exists(f"{prefix}.index"):
        return prefix
    if not tf.io.gfile.isdir(path):
        raise ValueError(f"no checkpoint at {path}: {prefix}.index does not exist")
    state = tf.train.get_checkpoint_state(path)
    found = [name.removesuffix(".index") for name in sorted(tf.io.gfile.glob(f"{path}/*.index"))]
    if state:  # names the folder where it was trained, perhaps
        latest = os.path.join(path, os.path.basename(state.model_checkpoint_path))
        found = [latest] if latest in found else found
    if len(found) != 1:
        names = ": " + ", ".join(map(os.path.basename, found)) if found else ""
        raise ValueError(f"{path} holds {len(found) or 'no'} checkpoints{names}" + (". Name one" if found else ""))
    return found[0]


def _step(path):
    reader = tf.train.load_checkpoint(path)
    return int(reader.get_tensor("global_step")) if reader.has_tensor("global_step") else checkpoint_step(path)


def model_arguments(path, **expected):
    """The arguments of `TransformerXLLM` that follow from the shapes of a checkpoint's variables.

    Three of them need not follow, and are then without effect: the model has the same variables either way and
    computes the same. That is `div_val` with a single bin, or where widths that are rounded down leave a choice;
    `proj_same_dim` unless `div_val` is above 1 and a bin is as wide as `d_model`; and `proj_share_all_but_first`
    unless a bin but the first is projected. Then the value is that of `expected`, or else the simplest.

    Args:
        path: prefix of the checkpoint.
        **expected: arguments that must be what the shapes say. `None` for any.

    Returns:
        dict.

    Raises:
        ValueError: a variable is missing, or the shapes say otherwise than `expected`. Names them.
    """
    shapes = weight_shapes(path)
    if not shapes:
        raise ValueError(f"{path} holds no variable of the original program: none begins with transformer/")
    expected = {name: value for name, value in expected.items() if value is not None}
    found = _Shapes(path, shapes)
    r_w_bias = found["r_w_bias"]
    if len(r_w_bias) not in (2, 3):
        raise ValueError(f"{path} does not fit any model: transformer/r_w_bias is {r_w_bias}")
    d_model, d_inner = found["layer_0/ff/layer_1/kernel"]
    d_embed, widths, sizes = _bins(found)
    cutoffs = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]

    div_vals = _div_vals(widths, len(sizes))
    div_val = _choose(expected.get("div_val"), div_vals)
    projected = [found.has(f"adaptive_embed/cutoff_{i}/proj_W") for i in range(len(widths))]
    by_choice = [is_projected for width, is_projected in zip(widths, projected, strict=True) if width == d_model]
    same_dim = {any(by_choice)} if len(widths) > 1 and by_choice else {True, False}
    tail = projected[1:] if len(widths) > 1 else [d_embed != d_model] * len(cutoffs)
    own = [found.has(f"adaptive_softmax/cutoff_{i}/proj") for i in range(1, len(sizes))]
    share = {not any(own)} if any(tail) else {False, True}

    arguments = {
        "n_token": sum(sizes),
        "n_layer": found.count("layer_{}/"),
        "d_model": d_model,
        "d_embed": d_embed,
        "n_head": r_w_bias[-2],
        "d_head": r_w_bias[-1],
        "d_inner": d_inner,
        "untie_r": len(r_w_bias) == 3,
        "cutoffs": cutoffs,
        "div_val": div_val,
        "proj_same_dim": _choose(expected.get("proj_same_dim"), sorted(same_dim, reverse=True)),
        "proj_share_all_but_first": _choose(expected.get("proj_share_all_but_first"), sorted(share)),
    }
    problems = [
        f"{name}={value} was given, but the shapes of its variables say {name}={arguments[name]}"
        for name, value in expected.items()
        if value != arguments[name]
    ]
    if problems:
        raise ValueError(f"{path} contradicts the arguments:\n  " + "\n  ".join(problems))
    return arguments


class _Shapes:
    """Shapes by variable name without its first scope; an error for one that is missing."""

    def __init__(self, path, shapes):
        self.path = path
        self.shapes = {name.removeprefix("transformer/"): list(shape) for name, shape in shapes.items()}

    def __getitem__(self, name):
        if name not in self.shapes:
            raise ValueError(f"{self.path} does not fit any model: transformer/{name} is missing from the checkpoint")
        return self.shapes[name]

    def has(self, name):
        return name in self.shapes

    def count(self, scope):
        """The highest number that stands for {} in the scope, plus 1."""
        pattern = re.escape(scope).replace(r"\{\}", r"(\d+)")
        return max((int(match[1]) + 1 for match in map(re.compile(pattern).match, self.shapes) if match), default=0)


def _bins(found):
    """`d_embed`, the width of each table and the size of each bin."""
    n_bin = max(found.count("adaptive_softmax/cutoff_{}/"), found.count("adaptive_embed/cutoff_{}/"))
    if n_bin and not found.has("adaptive_softmax/bias"):
        sizes = [found[f"adaptive_softmax/cutoff_{i}/b"][0] for i in range(n_bin)]
    else:
        sizes = found["adaptive_softmax/bias"]
    if found.has("adaptive_embed/lookup_table") or not found.count("adaptive_embed/cutoff_{}/"):
        widths = [found["adaptive_embed/lookup_table"][1]]
    else:
        widths = [found[f"adaptive_embed/cutoff_{i}/lookup_table"][1] for i in range(len(sizes))]
    return widths[0], widths, sizes


def _div_vals(widths, n_bin):
    """The values of div_val that give tables of these widths, the simplest first."""
    if len(widths) == 1:
        return [1] if n_bin > 1 else range(1, widths[0] + 1)
    fit = [v for v in range(2, widths[0] + 1) if all(width == widths[0] // v**i for i, width in enumerate(widths))]
    if not fit:
        raise ValueError(f"no div_val gives embeddings of the widths {widths} of transformer/adaptive_embed/cutoff_*")
    return sorted(fit, key=lambda v: any(widths[0] % v**i for i in range(len(widths))))


def _choose(wanted, possible):
    return wanted if wanted in possible else possible[0]


# ------------------------------------------------------------------------------------------------------- corpora


@dataclasses.dataclass
class SourceCorpus:
    """What the files beside a checkpoint say about its text.

    Attributes:
        path: the file that the vocabulary is from.
        dataset: name, which sets how text becomes symbols.
        vocab: `Vocab`.
        cutoffs: `{file: list of int}`, without 0 and the number of symbols, of the files that have cutoffs.
        splits: dict, split -> int array `[n]`, where the file has them.
    """

    path: str
    dataset: str
    vocab: Vocab
    cutoffs: dict
    splits: dict


def read_corpus(path, dataset=None):
    """Reads the corpus files of the original, or of `save_tf1`, or a plain vocabulary.

    Args:
        path: a cache.pkl, or a vocabulary file with one word a line in id order; or the folder of either, or the
            corpus-info.json in it. The corpus-info.json of the same folder is read in any case.
        dataset: one of `PAPER_DATASETS`, whose rules turn text into words, where no corpus file says.

    Returns:
        `SourceCorpus`.

    Raises:
        ValueError, OSError: a file is missing or not what it should be, or two contradict one another.
    """
    path = _vocabulary_in(os.fspath(path))
    info_path = os.path.join(os.path.dirname(path), INFO_FILE)
    info = _read_json(info_path) if tf.io.gfile.exists(info_path) else {}
    cutoffs = {info_path: list(info["cutoffs"])[1:-1]} if "cutoffs" in info else {}
    cache = read_cache_pkl(path) if path.endswith(".pkl") else None
    if cache and cache.cutoffs is not None:
        cutoffs[path] = cache.cutoffs

    said = {"dataset": dataset, info_path: info.get("dataset"), path: cache and cache.dataset}
    said = {who: name for who, name in said.items() if name is not None}
    known = {who: name for who, name in said.items() if name in DATASETS}
    if len(set(known.values())) > 1:
        raise ValueError(
            "it is not clear what dataset this is: " + ", ".join(f"{n} by {who}" for who, n in said.items())
        )
    dataset = next(iter(known.values()), None)
    if dataset not in PAPER_DATASETS and "vocab" not in info:
        found = f"; {', '.join(map(repr, said.values()))} is none of them" if said else ""
        names = ", ".join(PAPER_DATASETS)
        raise ValueError(f"dataset is needed, to tell how text becomes the words of {path}: one of {names}{found}")
    options = info["vocab"] if "vocab" in info else dict(PAPER_DATASETS[dataset][0])
    if cache:
        if cache.lower_case is not None:
            options["lower_case"] = cache.lower_case
        vocab = _make_vocab(cache.symbols, options)
    else:
        vocab = Vocab.load(path, **options)
    if info.get("vocab_size", len(vocab)) != len(vocab):
        raise ValueError(f"{path} has {len(vocab)} symbols, but {info_path} says vocab_size {info['vocab_size']}")
    return SourceCorpus(path, dataset, vocab, cutoffs, cache.splits if cache else {})


def _vocabulary_in(path):
    """The file with the vocabulary, where `path` is its folder or the corpus-info.json there."""
    if not tf.io.gfile.exists(path):
        raise FileNotFoundError(f"there is no corpus file or folder {path}")
    is_info = os.path.basename(path) == INFO_FILE
    if not is_info and not tf.io.gfile.isdir(path):
        return path
    folder = os.path.dirname(path) if is_info else path
    names = (CACHE_FILE, VOCAB_FILE, LM1B_VOCAB)
    for name in names:
        if tf.io.gfile.exists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    beside = f". {INFO_FILE} has no words" if is_info else ""
    raise FileNotFoundError(f"there is no vocabulary in {folder or '.'}: none of {', '.join(names)}{beside}")


def _read_json(path):
    with tf.io.gfile.GFile(path) as file:
        try:
            return dict(json.load(file))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is not a JSON object: {error}") from error


def _make_vocab(symbols, options):
    """A `Vocab` of symbols in id order. White space, which Python 2 left in a word, is escaped: no text has it."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, VOCAB_FILE)
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            for symbol in symbols:
                file.write("".join(escape(c) if c.isspace() else c for c in symbol) + "\n")
        return Vocab.load(path, **options)


def _check_corpus(path, model, source):
    if len(source.vocab) != model["n_token"]:
        raise ValueError(
            f"the vocabulary {source.path} has {len(source.vocab)} symbols, but {path} is of n_token={model['n_token']}"
        )
    for file, cutoffs in source.cutoffs.items():
        if cutoffs != model["cutoffs"]:
            raise ValueError(
                f"{file} has cutoffs {cutoffs}, but by the shapes of its variables {path} has {model['cutoffs']}"
            )


def write_corpus(data_dir, source):
    """Writes the tokens of a cache.pkl as a prepared corpus, which `corpus.load_corpus` opens.

    Args:
        data_dir: local folder; made where it is missing. It may be that of the cache.pkl.
        source: `SourceCorpus`.

    Raises:
        ValueError: `source` has no tokens.
    """
    if not source.splits:
        raise ValueError(f"{source.path} has no tokens to write to data_dir {data_dir}: it is a vocabulary alone")
    info_path = os.path.join(data_dir, INFO_FILE)
    if is_remote(data_dir) or (os.path.exists(info_path) and "format" in _read_json(info_path)):
        raise ValueError(f"data_dir must be a local folder without a prepared corpus, got {data_dir}")
    os.makedirs(data_dir, exist_ok=True)
    for split, tokens in source.splits.items():
        writer = TokenWriter(os.path.join(data_dir, f"{split}.npy"), len(source.vocab))
        writer.add(tokens)
        writer.close()
    source.vocab.save(os.path.join(data_dir, VOCAB_FILE))
    cutoffs = next(iter(source.cutoffs.values()), [])
    info = {
        **_corpus_info(source.vocab, cutoffs, source.dataset),
        "format": 1,
        "n_tokens": {split: len(tokens) for split, tokens in source.splits.items()},
        "files": {split: [f"{split}.npy"] for split in source.splits},
        "options": {"cutoffs": None},
        "inputs": {},
    }
    write_json(info_path, info)
    load_corpus(data_dir)  # raises if that is not what it opens


def _corpus_info(vocab, cutoffs, dataset):
    """The original's corpus-info.json, and the rules of the vocabulary."""
    ends = [0, *cutoffs, len(vocab)] if cutoffs else []
    return {"vocab_size": len(vocab), "cutoffs": ends, "dataset": dataset, "vocab": vocab.get_config()}


# --------------------------------------------------------------------------------------------- run folder -> TF1


def run_to_tf1(model_dir, tf1_checkpoint, ckpt_path=None):
    """Writes a checkpoint that the original program evaluates, its corpus-info.json, and vocab.txt.

    Args:
        model_dir: folder of a run.
        tf1_checkpoint: prefix of the new checkpoint, with `.ckpt` in its name; or else a folder for
            `model.ckpt-<step>`.
        ckpt_path: the run's checkpoint, by default the latest.

    Returns:
        the prefix of the new checkpoint.

    Raises:
        ValueError: the folder is not that of a run, or there is no such checkpoint.
    """
    config, vocab = read_config(model_dir), load_vocab(model_dir)
    ckpt_path = find_checkpoint(model_dir, ckpt_path)
    path = os.fspath(tf1_checkpoint)
    if ".ckpt" not in os.path.basename(path):
        path = os.path.join(path, f"model.ckpt-{checkpoint_step(ckpt_path)}")
    save_tf1_checkpoint(load_lm(model_dir, ckpt_path), path)
    folder = os.path.dirname(path)
    vocab.save(os.path.join(folder, VOCAB_FILE))
    info = _corpus_info(vocab, config["model"]["cutoffs"], _dataset_of(config["data"]))
    write_json(os.path.join(folder, INFO_FILE), info)
    return path


def _dataset_of(data):
    """The name of the dataset that a run is of; `None` where its data_dir, which knows, is no longer there."""
    info_path = os.path.join(data.get("data_dir", ""), INFO_FILE)
    if "dataset" in data or not tf.io.gfile.exists(info_path):
        return data.get("dataset")
    return _read_json(info_path).get("dataset")
