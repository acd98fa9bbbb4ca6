"""The folder of a run: `config.json` (data, model and vocabulary), `vocab.txt`, checkpoints `ckpt-<step>`, `best`."""

import json
import os

import tensorflow as tf

from txl_tf.checkpoint import find_best, load_weights, save_weights, saved_steps
from txl_tf.folders import write_whole
from txl_tf.language_model import TransformerXLLM
from txl_tf.vocabulary import Vocab

CONFIG_FILE = "config.json"
VOCAB_FILE = "vocab.txt"


def read_config(model_dir):
    """`config.json` of a run's folder.

    Returns:
        dict: `"data"`, what it was trained on; `"model"`, arguments of `TransformerXLLM`; `"vocab"`, those of `Vocab`.

    Raises:
        ValueError: there is none.
    """
    path = os.path.join(model_dir, CONFIG_FILE)
    if not tf.io.gfile.exists(path):
        raise ValueError(f"model_dir {model_dir} is not the folder of a run: {path} does not exist")
    with tf.io.gfile.GFile(path) as file:
        return json.load(file)


def load_vocab(model_dir):
    """The `Vocab` of a run."""
    return Vocab.load(os.path.join(model_dir, VOCAB_FILE), **read_config(model_dir)["vocab"])


def checkpoints_of(model_dir):
    """Paths of the checkpoints in the folder of a run, or of the original program, from oldest to newest."""
    steps = saved_steps(model_dir)
    if steps:
        return [os.path.join(model_dir, f"ckpt-{step}") for step in steps]
    state = tf.train.get_checkpoint_state(model_dir)
    return list(state.all_model_checkpoint_paths) if state else []


def find_checkpoint(model_dir, ckpt_path=None):
    """`ckpt_path`, which may also be the name of a checkpoint in the folder, or `"best"`; by default the latest.

    Raises:
        ValueError: there is none.
    """
    if ckpt_path is None:
        if not checkpoints_of(model_dir):
            raise ValueError(f"model_dir {model_dir} holds no checkpoint")
        return checkpoints_of(model_dir)[-1]
    if ckpt_path == "best":
        best = find_best(model_dir)
        if best is None:
            raise ValueError(f"model_dir {model_dir} holds no best checkpoint: there was no validation yet")
        return best["path"]
    for path in (ckpt_path, os.path.join(model_dir, ckpt_path)):
        if tf.io.gfile.exists(f"{path}.index"):
            return path
    raise ValueError(f"no checkpoint at {ckpt_path}, nor in {model_dir}: {ckpt_path}.index does not exist")


def load_lm(model_dir, ckpt_path=None, **changes):
    """The language model of a run, not compiled.

    Args:
        model_dir: the run's folder.
        ckpt_path: see `find_checkpoint`.
        **changes: arguments of `TransformerXLLM` to use instead of the run's own, such as `mem_len`.

    Returns:
        `TransformerXLLM`.

    Raises:
        ValueError: it is no run's folder, there is no such checkpoint or it is of another model.
    """
    config = read_config(model_dir)
    path = find_checkpoint(model_dir, ckpt_path)
    lm = TransformerXLLM(**{**config["model"], **changes})
    load_weights(lm, path)
    return lm


def check_new(model_dir):
    """Raises ValueError if the folder holds a run."""
    if tf.io.gfile.exists(os.path.join(model_dir, CONFIG_FILE)) or checkpoints_of(model_dir):
        raise ValueError(f"{model_dir} already holds a run: choose a new folder")


def create_run(model_dir, config, vocab, lm, step):
    """Writes the folder of a run that was not trained here. Training can start from its weights, not go on.

    Args:
        model_dir: a folder without a run; made where it is missing.
        config: dict, `"data"` and `"model"` of `read_config`.
        vocab: `Vocab`.
        lm: `TransformerXLLM`.
        step: the number of its checkpoint.

    Returns:
        path of the checkpoint.
    """
    check_new(model_dir)
    tf.io.gfile.makedirs(model_dir)
    vocab.save(os.path.join(model_dir, VOCAB_FILE))
    checkpoint = save_weights(lm, model_dir, step)
    config = {"data": config["data"], "model": config["model"], "vocab": vocab.get_config()}
    write_json(os.path.join(model_dir, CONFIG_FILE), config)
    return checkpoint


def write_json(path, values):
    """Writes a file that appears in one go, whole."""
    write_whole(path, json.dumps(values, indent=2) + "\n")
