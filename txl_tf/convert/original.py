"""Converts checkpoints of the original program to folders of runs, and back.

The shapes of a checkpoint's variables define the model, see `model_arguments`. The original's corpus files define its
vocabulary, see `read_corpus`. Neither contains mem_len, same_length and clamp_len, so the caller gives them. Neither
contains the rates of dropout, so they become 0.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable

import tensorflow as tf

from txl_config.data import INFO_FILE
from txl_tf.config import ModelConfig
from txl_tf.convert.corpus_files import read_corpus, written_corpus
from txl_tf.data.subwords import vocab_file
from txl_tf.data.text.prepared_folder import read_info
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError, named
from txl_tf.files import (
    absolute,
    check_no_pattern,
    check_not_overwritten,
    is_remote,
    json_text,
    lock,
    naming_read_errors,
    naming_write_errors,
    remove_leftovers,
    removed_on_error,
    write_atomic,
)
from txl_tf.language.language_model import TransformerXLLM
from txl_tf.runs.families.language_model import TRANSFORMER_XL
from txl_tf.runs.folder import RunFolder, check_spares_runs
from txl_tf.runs.weights import (
    CheckpointReader,
    checkpoint_step,
    load_tf1_checkpoint,
    save_tf1_checkpoint,
    weight_shapes,
)
from txl_tf.schema import check_names, keywords_of

# --------------------------------------------------------------------------------------------- TF1 -> run folder


def tf1_to_run(
    tf1_checkpoint: str,
    corpus: str,
    model_dir: str,
    *,
    mem_len: int | None,
    same_length: bool = False,
    clamp_len: int = -1,
    dataset: str | None = None,
    data_dir: str | None = None,
    **expected,
) -> tuple[TransformerXLLM, Vocab, str]:
    """Makes a run folder from a checkpoint of the original program and its vocabulary.

    Args:
        tf1_checkpoint: prefix of the checkpoint, or its folder.
        corpus: see `read_corpus`.
        model_dir: the new folder. Its checkpoint has the step of `tf1_checkpoint`.
        mem_len, same_length, clamp_len: as in `TransformerXLLM`. The checkpoint does not contain them.
        dataset: see `read_corpus`.
        data_dir: folder to write the tokens of a cache.pkl to, for `load_corpus`; `None`: they are not written.
        **expected: other arguments of `TransformerXLLM`, which must agree with the checkpoint, see `model_arguments`.

    Returns:
        `(lm, vocab, checkpoint)`: the language model, its `Vocab`, and the path of the new checkpoint.

    Raises:
        ValueError: checkpoint, corpus or an argument is missing, two of them contradict each other, or a folder is not
            new.
        OSError: a file cannot be read or written.
    """
    if mem_len is None:
        message = "mem_len is needed: no variable of a checkpoint contains it. See the command that trained the model"
        raise ParameterError("mem_len", None, "that of the training", message)
    folder = RunFolder(model_dir)
    folder.check_new()  # before the checkpoint and the corpus are read, which takes long
    path = find_tf1_checkpoint(tf1_checkpoint)
    memory = {"mem_len": mem_len, "same_length": same_length, "clamp_len": clamp_len}
    model = ModelConfig(**model_arguments(path, **expected), **memory, dropout=0.0, dropatt=0.0).to_dict()
    source = read_corpus(corpus, dataset)
    folder.check_new([source.vocab], TRANSFORMER_XL)
    source.check_size(path, model["n_token"])
    for file, cutoffs in source.cutoffs.items():
        if cutoffs != model["cutoffs"]:
            message = f"{file} has cutoffs {cutoffs}, but by the shapes of its variables {path} has {model['cutoffs']}"
            raise ParameterError("cutoffs", cutoffs, [model["cutoffs"]], message)
    reader = CheckpointReader(path)
    step = int(reader.get("global_step")) if "global_step" in reader.shapes else checkpoint_step(path)
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(written_corpus(data_dir, source, model["cutoffs"], folder.is_unfinished()))
        lm = TransformerXLLM(**model)
        load_tf1_checkpoint(lm, path)
        return lm, source.vocab, folder.create(data, model, [source.vocab], lm, step, finish=stack.close)


def find_tf1_checkpoint(path: str) -> str:
    """Returns the prefix of a checkpoint. `path` is this prefix, one of the checkpoint's files or its folder.

    Raises:
        ValueError: there is no checkpoint; or the folder has several, and no file `checkpoint` that names one.
        OSError: the file `checkpoint` cannot be read.
    """
    path = os.fspath(path).rstrip("/")
    prefix = re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", path)
    if tf.io.gfile.exists(f"{prefix}.index"):
        return prefix
    if not tf.io.gfile.isdir(path):
        message = f"no checkpoint at {named(path)}: {named(prefix)}.index does not exist"
        raise ParameterError("tf1_checkpoint", path, "a checkpoint or its folder", message)
    with naming_read_errors(os.path.join(path, "checkpoint")):
        state = tf.train.get_checkpoint_state(path)
    names = sorted(name for name in tf.io.gfile.listdir(path) if name.endswith(".index"))
    prefixes = [os.path.join(path, name.removesuffix(".index")) for name in names]
    if state:  # the path in `state` may be from another machine, where the model was trained
        latest = os.path.join(path, os.path.basename(state.model_checkpoint_path))
        prefixes = [latest] if latest in prefixes else prefixes
    if len(prefixes) != 1:
        names = ": " + ", ".join(map(os.path.basename, prefixes)) if prefixes else ""
        message = f"{path} contains {len(prefixes) or 'no'} checkpoints{names}" + (". Name one" if prefixes else "")
        raise ParameterError("tf1_checkpoint", path, "the folder of one checkpoint", message)
    return prefixes[0]


def model_arguments(path: str, **expected) -> dict:
    """The arguments of `TransformerXLLM` that follow from the shapes of a checkpoint's variables.

    Several values of these arguments may fit the variables, and then give the same results:

        div_val                     with a single cluster, or if several values round to the same widths
        proj_same_dim               unless `div_val` is above 1 and a cluster is as wide as `d_model`
        proj_share_all_but_first    unless a cluster after the first is projected

    The value in `expected` is chosen, else the simplest one that fits.

    Args:
        path: prefix of the checkpoint.
        **expected: arguments that must agree with the shapes. `None` counts as not given.

    Raises:
        ValueError: a variable is missing, an argument is unknown, or the shapes contradict `expected`. The message
            names the variable or the arguments.
    """
    shapes = _Shapes(path)
    if not shapes:
        message = f"{path} contains no variable of the original program: no name begins with transformer/"
        raise ParameterError("tf1_checkpoint", path, "a checkpoint of the original program", message)
    expected = {name: value for name, value in expected.items() if value is not None}
    r_w_bias = shapes["r_w_bias"]
    if len(r_w_bias) not in (2, 3):
        message = f"{path} does not fit any model: transformer/r_w_bias is {r_w_bias}"
        raise ParameterError("transformer/r_w_bias", r_w_bias, "of 2 or 3 dimensions", message)
    d_model, d_inner = shapes["layer_0/ff/layer_1/kernel"]
    widths, sizes = _widths_and_sizes(shapes)
    same_dim, share = _projection_choices(shapes, d_model, widths, len(sizes))

    def choose(name, possible):
        """The expected value of an argument if it is possible, else the simplest one, which is first."""
        return expected[name] if expected.get(name) in possible else possible[0]

    arguments = {
        "n_token": sum(sizes),
        "n_layer": count_scopes(shapes, "layer_{}/"),
        "d_model": d_model,
        "d_embed": widths[0],
        "n_head": r_w_bias[-2],
        "d_head": r_w_bias[-1],
        "d_inner": d_inner,
        "untie_r": len(r_w_bias) == 3,
        "cutoffs": list(itertools.accumulate(sizes[:-1])),
        "div_val": choose("div_val", div_vals(widths, len(sizes))),
        "proj_same_dim": choose("proj_same_dim", same_dim),
        "proj_share_all_but_first": choose("proj_share_all_but_first", share),
    }
    check_names("tf1_to_run", expected, [*keywords_of(tf1_to_run), *arguments])
    wrong = [name for name, value in expected.items() if value != arguments[name]]
    if wrong:
        problems = [
            f"{name}={expected[name]} was given, but by the shapes of its variables, it has {name}={arguments[name]}"
            for name in wrong
        ]
        message = f"{path} contradicts the arguments:\n  " + "\n  ".join(problems)
        raise ParameterError(wrong[0], expected[wrong[0]], [arguments[wrong[0]]], message)
    return arguments


class _Shapes(dict):
    """Shapes of a checkpoint's weights, by name without the scope transformer/. A missing name raises an error."""

    def __init__(self, path: str):
        shapes = weight_shapes(path).items()
        super().__init__({name.removeprefix("transformer/"): list(shape) for name, shape in shapes})
        self.path = path

    def __missing__(self, name: str) -> list[int]:
        message = f"{self.path} does not fit any model: transformer/{name} is missing from the checkpoint"
        raise ParameterError("tf1_checkpoint", self.path, f"a checkpoint with transformer/{name}", message)


def count_scopes(names: Iterable[str], scope: str) -> int:
    """The number of scopes like `scope`, such as "layer_{}/", which are numbered from 0.

    It is 1 + the highest number, of at most six digits, in the place of {} in `names`. It is 0 if no name begins with
    the scope.
    """
    pattern = re.compile(re.escape(scope).replace(r"\{\}", r"(\d{1,6})"))
    return max((int(match[1]) + 1 for match in map(pattern.match, names) if match), default=0)


def _widths_and_sizes(shapes: _Shapes) -> tuple[list[int], list[int]]:
    """`(widths, sizes)`: the width of each table, and the number of words of each cluster.

    A single table contains the words of all clusters. Without clusters, all words count as one cluster.
    """
    n_table = count_scopes(shapes, "adaptive_embed/cutoff_{}/")
    n_cluster = max(count_scopes(shapes, "adaptive_softmax/cutoff_{}/"), n_table)
    if n_cluster and "adaptive_softmax/bias" not in shapes:
        sizes = [shapes[f"adaptive_softmax/cutoff_{i}/b"][0] for i in range(n_cluster)]
    else:
        sizes = shapes["adaptive_softmax/bias"]
    if "adaptive_embed/lookup_table" in shapes or not n_table:
        widths = [shapes["adaptive_embed/lookup_table"][1]]
    else:
        widths = [shapes[f"adaptive_embed/cutoff_{i}/lookup_table"][1] for i in range(len(sizes))]
    return widths, sizes


def _projection_choices(
    shapes: _Shapes, d_model: int, widths: list[int], n_cluster: int
) -> tuple[list[bool], list[bool]]:
    """Values of `proj_same_dim` and of `proj_share_all_but_first` that fit the variables. The simplest is first."""
    projected = [f"adaptive_embed/cutoff_{i}/proj_W" in shapes for i in range(len(widths))]
    of_same_width = [is_projected for width, is_projected in zip(widths, projected, strict=True) if width == d_model]
    same_dim = [any(of_same_width)] if len(widths) > 1 and of_same_width else [True, False]
    # For each cluster after the first: whether it is projected, and whether the softmax has its own projection for it.
    later = projected[1:] if len(widths) > 1 else [widths[0] != d_model for _ in range(1, n_cluster)]
    own = [f"adaptive_softmax/cutoff_{i}/proj" in shapes for i in range(1, n_cluster)]
    return same_dim, [not any(own)] if any(later) else [False, True]


def div_vals(widths: list[int], n_cluster: int) -> list[int]:
    """Values of `div_val` that give tables of these widths. The simplest is first.

    With a single table, only 1 fits several clusters, and every value up to the width fits a single cluster.

    Raises:
        ParameterError: no value gives these widths.
    """
    if len(widths) == 1:
        return [1] if n_cluster > 1 else list(range(1, widths[0] + 1))
    fit = [v for v in range(2, widths[0] + 1) if all(width == widths[0] // v**i for i, width in enumerate(widths))]
    if not fit:
        message = f"no div_val gives embeddings of the widths {widths} of transformer/adaptive_embed/cutoff_*"
        raise ParameterError("div_val", widths, "widths that fall by one factor", message)
    # Values that divide the first width without remainder are the simplest.
    return sorted(fit, key=lambda v: any(widths[0] % v**i for i in range(len(widths))))


# --------------------------------------------------------------------------------------------- run folder -> TF1


def run_to_tf1(model_dir: str, tf1_checkpoint: str, ckpt_path: str | None = None) -> str:
    """Writes a checkpoint for the original program, its corpus-info.json and vocabulary. Returns its prefix.

    Args:
        model_dir: folder of a run.
        tf1_checkpoint: prefix of the new checkpoint, with `.ckpt` in its name; or a folder for `model.ckpt-<step>`. The
            folder is new, or contains an earlier conversion of the same run.
        ckpt_path: the run's checkpoint, by default the latest.

    Raises:
        ValueError: the folder is not a run of Transformer-XL, there is no such checkpoint, or a file with another
            content would be overwritten.
        OSError: a file cannot be read or written.
    """
    folder = RunFolder(model_dir, "language_model")
    config = folder.read_config()
    vocab = folder.load_vocab()
    if folder.family is not TRANSFORMER_XL:
        message = f"the original program has only Transformer-XL, but {folder} is of the family {folder.family.name}"
        raise ParameterError("model_dir", str(folder), "a run of Transformer-XL", message)
    if not os.fspath(tf1_checkpoint):
        message = "tf1_checkpoint must name the new checkpoint, or its folder"
        raise ParameterError("tf1_checkpoint", tf1_checkpoint, "a path", message)
    check_no_pattern("tf1_checkpoint", absolute(os.fspath(tf1_checkpoint)))
    data = config["data"]
    cutoffs = config["model"].get("cutoffs")
    prepared = os.path.join(data.get("data_dir", ""), INFO_FILE)
    if "dataset" not in data and tf.io.gfile.exists(prepared):
        data = read_info(prepared)
    info = {
        "vocab_size": len(vocab),
        "cutoffs": [0, *cutoffs, len(vocab)] if cutoffs else [],
        "dataset": data.get("dataset"),
        "vocab": vocab.get_config(),
        "model_dir": absolute(os.fspath(model_dir)),  # so `_check_target` refuses to overwrite another run's conversion
    }
    files = {vocab_file("vocab", vocab.level): vocab.get_data(), INFO_FILE: json_text(info)}

    def write(source):
        """Writes the checkpoint `source` of the run in the original's format. Returns the prefix of its files."""
        path = os.fspath(tf1_checkpoint)
        if ".ckpt" not in os.path.basename(path):
            path = os.path.join(path, f"model.ckpt-{checkpoint_step(source)}")
        _check_target(path, files)
        model = folder.load_model(source)
        target_dir = os.path.dirname(path) or "."
        with naming_write_errors(path):
            tf.io.gfile.makedirs(target_dir)
        with contextlib.ExitStack() as stack:
            if not is_remote(target_dir):
                stack.enter_context(lock(target_dir, f"another program is writing {path}"))
                remove_leftovers(target_dir)
            # These files come first: after a kill, they show the next start that the checkpoint is of the same run.
            for name, text in files.items():
                file = os.path.join(target_dir, name)
                stack.enter_context(removed_on_error(file))
                write_atomic(file, text)
            save_tf1_checkpoint(model, path)
        return path

    return folder.with_checkpoint(ckpt_path, write)


def _check_target(path: str, files: dict[str, str | bytes]) -> None:
    """Raises ParameterError if a new checkpoint would overwrite another one, or lie in the folder or a part of a run.

    It may overwrite the checkpoint of an earlier conversion of the same run.

    Args:
        path: prefix of the checkpoint.
        files: `{name: content}` of the files that are written to the same folder. They may exist with this content.
    """
    target_dir = os.path.dirname(path) or "."
    if RunFolder(target_dir).has_config():
        allowed = "outside of the folders of runs"
        message = f"tf1_checkpoint must lie {allowed}, got {path}: {target_dir} has a config.json"
        raise ParameterError("tf1_checkpoint", path, allowed, message)
    check_spares_runs("tf1_checkpoint", target_dir)
    for name, data in files.items():
        check_not_overwritten(os.path.join(target_dir, name), data)
    if not tf.io.gfile.exists(os.path.join(target_dir, INFO_FILE)):  # then no conversion of this run is in the folder
        for file in (f"{path}.index", os.path.join(target_dir, "checkpoint")):
            if tf.io.gfile.exists(file):
                message = f"tf1_checkpoint {path} would overwrite {file}: choose a new folder"
                raise ParameterError("tf1_checkpoint", path, "in a new folder", message)
