"""Reads the command line: one short line for every mistake, and the nearest flag for an unknown one."""

from __future__ import annotations

import difflib
import io
import itertools
import locale
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags

from txl_config.environment import is_pipe
from txl_config.errors import shortened, visible
from txl_programs.flag_values import FLAGS, changed, given
from txl_programs.printing import on_one_line, program_name

# Flags that name a file, a folder or an address: `refuse_empty` refuses "" as a name. Hyper-parameters are left out,
# because `txl_config` checks them.
_NAMES = (
    "ckpt_path", "corpus", "data_dir", "download_url", "ensemble", "figures", "font", "host", "input", "json_schema",
    "lexicon", "output", "output_dir", "prompt_file", "pytorch_checkpoint", "text_path", "tf1_checkpoint",
)  # fmt: skip

# Flag -> its names in other programs.
_ALSO_CALLED = {
    "learning_rate": ("lr", "max_lr", "base_lr"),
    "train_steps": ("epochs", "num_epochs", "max_epochs", "num_train_epochs", "max_step", "max_steps", "max_iters"),
    "warmup_steps": ("warmup", "warmup_step", "warmup_iters"),
    "train_batch_size": ("batch_size", "bsz", "train_bsz", "per_device_train_batch_size"),
    "batch_size": ("bsz", "train_bsz", "train_batch_size", "per_device_train_batch_size"),
    "eval_batch_size": ("eval_bsz", "per_device_eval_batch_size"),
    "gradient_accumulation_steps": ("accumulation_steps", "accumulate_grad_batches", "batch_chunk"),
    "clip": ("grad_clip", "max_grad_norm", "clip_norm", "gradient_clip_val"),
    "schedule": ("scheduler", "lr_scheduler", "lr_scheduler_type"),
    "optimizer": ("optim",),
    "weight_decay": ("wd",),
    "iterations": ("log_interval", "logging_steps"),
    "save_steps": ("save_interval", "eval_interval", "eval_steps"),
    "patience": ("early_stopping_patience",),
    "mixed_precision": ("fp16", "bf16", "amp", "precision"),
    "strategy": ("gpu", "gpus", "device"),
    "init_from": ("pretrained", "pretrained_model"),
    "ckpt_path": ("checkpoint", "ckpt", "checkpoint_path"),
    "model_dir": (
        "resume", "resume_from_checkpoint", "restart", "restart_dir", "work_dir", "save_dir", "out_dir", "output_dir",
        "logdir", "model_name_or_path",
    ),
    "data_path": ("data", "train_file", "train_data"),
    "train_path": ("data", "train_file", "train_data", "data_path"),
    "valid_path": ("validation_file", "dev_path", "eval_file"),
    "tgt_len": ("seq_len", "seq_length", "bptt", "block_size", "context_length"),
    "n_layer": ("n_layers", "num_layers", "num_hidden_layers", "layers"),
    "num_layers": ("n_layer", "n_layers", "num_hidden_layers", "layers"),
    "d_model": ("hidden_size", "n_embd", "embed_dim"),
    "n_head": ("n_heads", "num_heads", "num_attention_heads", "heads"),
    "num_heads": ("n_head", "n_heads", "num_attention_heads", "heads"),
    "d_inner": ("intermediate_size", "ffn_dim", "dim_feedforward", "dff"),
    "dff": ("intermediate_size", "ffn_dim", "dim_feedforward", "d_inner"),
    "max_new_tokens": ("max_length", "length", "max_tokens"),
    "num_return_sequences": ("num_samples", "nsamples"),
    "beam_size": ("num_beams", "beam", "beams"),
    "prompt": ("text",),
    "input": ("file", "input_file"),
    "output": ("output_file", "out"),
}  # fmt: skip


def parse(argv: Sequence[str]) -> list[str]:
    """Reads the flags. Returns the name of the program, and the words of the command line that belong to no flag.

    --help and similar flags, such as --helpfull, end the program with status 0. A mistake ends it with one short line
    and status 1.
    """
    flag_files = _flag_files(argv)
    if "" in flag_files:  # absl would read no file, in silence
        end("--flagfile must not be empty: name a file, or leave it out", argv)
    if pipes := list(filter(is_pipe, flag_files)):  # reading from one would wait for ever
        end(f"--flagfile={', '.join(pipes)} must be a file, and is a named pipe or a socket", argv)
    try:
        return FLAGS(argv)
    except SystemExit:  # absl ends --help with status 1
        sys.exit(0)
    except UnicodeDecodeError:
        files = [path for path in flag_files if not _is_text(path)]
        end(f"--flagfile={', '.join(files)} must be a text file in {locale.getpreferredencoding(False)}", argv)
    except flags.UnrecognizedFlagError as error:
        end(f"unknown flag --{error.flagname}.{_suggestion(error.flagname)} --help lists all flags", argv)
    except (flags.Error, ValueError) as error:  # ValueError: a negated switch with a value, such as --nountie_r=true
        end(_plain(str(error)), argv)
    except RecursionError:  # absl compares a very long unknown flag with all others, letter by letter
        end(f"unknown flag among {' '.join(argv[1:])}. --help lists all flags", argv)


def end(message: str, argv: Sequence[str]) -> NoReturn:
    """Ends the program with status 1 and one line: the name of the program, and the message, shortened if it is long.

    Args:
        message: the message.
        argv: the command line. Its first word names the program.
    """
    sys.exit(f"{program_name(argv[0])}: {shortened(visible(on_one_line(message)), 400)}")


def _suggestion(name: str) -> str:
    """Returns " Did you mean --x?" with the flag that was probably meant, and a note; empty if no flag is similar.

    Args:
        name: the unknown flag, without --.
    """
    name = name.replace("-", "_")
    meant = [flag for flag, names in _ALSO_CALLED.items() if flag in FLAGS and name in names]
    meant = meant or difflib.get_close_matches(name[:100], list(FLAGS), 1)
    if not meant:
        return ""
    note = ""
    if "epochs" in name and meant[0].endswith("_steps"):
        note = " It counts steps, not epochs."
    elif name.startswith(("resume", "restart")) and meant[0] == "model_dir" and "train_steps" in FLAGS:
        note = " Training resumes by itself if this folder has checkpoints."
    return f" Did you mean --{meant[0]}?{note}"


# Pattern of a message of absl about a wrong value -> message that the program prints instead. The first match counts.
_PLAIN = (
    (r"--(\w+)=None: Flag --\1 must have a value other than None\.", r"--\1 must be given"),
    (r"--(\w+)=.*: invalid literal for int\(\) with base 10: (.*)", r"--\1 must be an integer, got \2"),
    (r"--(\w+)=.*: could not convert string to float: (.*)", r"--\1 must be a number, got \2"),
    (r"--(\w+)=(.*): \('Non-boolean argument to boolean flag', .*\)", r"--\1 must be True or False, got '\2'"),
    (r"--(\w+)=(.*): \S* ?is not (an? .*)", r"--\1 must be \3, got \2"),
    (r"--(\w+)=(.*): \S* ?is not (.*)", r"--\1 must be an \3, got \2"),  # integer >= 2
    (r"--(\w+)=(.*): (must .*)", r"--\1 \3, got \2"),
)


def _plain(message: str) -> str:
    """Returns a message of absl in the words of the other errors. A message about several flags has several lines."""
    return "; ".join(map(_plain_part, message.removeprefix("flag ").split("\nflag ")))


def _plain_part(message: str) -> str:
    """Returns a message of absl about one flag in the words of the other errors; unchanged if no pattern matches."""
    match = re.fullmatch(r"--(\w+)=(.*): value should be one of <(.*)>", message, re.S)
    if match:
        name, value, choices = match.groups()
        return f"--{name} must be one of {choices.replace('|', ', ')}, got '{value}'"
    for pattern, plain in _PLAIN:
        match = re.fullmatch(pattern, message, re.S)
        if match:
            return match.expand(plain)
    return message


def refuse_stray(argv: Sequence[str]) -> None:
    """Ends the program if the command line has words that belong to no flag."""
    _, *stray = argv
    if stray:
        end(f"unexpected arguments: {' '.join(stray)}", argv)


def refuse_empty() -> None:
    """Ends the program if one of the flags `_NAMES` is empty. In a shell, an unset variable has this effect."""
    for name in given(_NAMES):
        if FLAGS[name].value in ("", [""]):
            end(f"--{name} must not be empty: name a file, or leave it out", sys.argv)


# ------------------------------------------------------------------------------------------------------- flag files


def outside_flag_files(names: Sequence[str]) -> list[str]:
    """Returns those of the `names` that the command line of this process gives itself, not only in a flag file.

    If the command line names no flag file, these are all `names`.
    """
    if not _flag_files(sys.argv):
        return list(names)
    words = {word.lstrip("-").partition("=")[0] for word in sys.argv[1:] if word.startswith("-")}
    return [name for name in names if words & {name, f"no{name}"}]


def newly_given(names: Iterable[str], recorded: Mapping[str, Any]) -> list[str]:
    """Returns those of the `names` that the command line itself sets, to other values than the defaults and the run's.

    So flags that a user only repeats, from a flag file or from the first command of the run, are not refused.

    Args:
        names: names of flags.
        recorded: the values in the `config.json` of the run.
    """
    new = [name for name in changed(names) if FLAGS[name].value != recorded.get(name, FLAGS[name].default)]
    return outside_flag_files(new)


def _flag_files(argv: Sequence[str], known: Sequence[str] = ()) -> list[str]:
    """Returns the paths of all flag files, each once: those that `argv` names, and those that flag files name.

    Args:
        argv: words of the command line, or lines of a flag file.
        known: paths that were found before. The result begins with them, and their files are not read again.
    """
    paths = list(known)
    for word, following in itertools.pairwise([*argv, ""]):
        match = re.fullmatch(r"--?flagfile(?:=(.*))?", word, re.S)
        if match:
            path = os.path.expanduser(following if match[1] is None else match[1].strip())
            if path not in paths:
                paths = _flag_files(_lines_of(path), [*paths, path])
    return paths


def _lines_of(path: str) -> list[str]:
    """Returns the lines of a flag file; an empty list if it cannot be read, or is not an ordinary file.

    A pipe such as /dev/stdin can be read only once, and absl has to read it.
    """
    try:
        with open(path, errors="replace") if os.path.isfile(path) else io.StringIO() as file:
            return [line.strip() for line in file]
    except (OSError, ValueError):
        return []


def _is_text(path: str) -> bool:
    """Whether a file is text in the encoding of the locale."""
    try:
        with open(path) as file:
            file.read()
    except UnicodeDecodeError:
        return False
    return True
