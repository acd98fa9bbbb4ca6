"""Answers the lines of --input: one file or the standard input as a stream, several files block by block.

Blocks are answered in this process or on a Ray cluster. The answers to several files go to a folder, into files of the
same names.
"""

import collections
import contextlib
import functools
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import PurePosixPath
from typing import Any

import tensorflow as tf
from absl import flags

from txl_config import ClusterConfig
from txl_config.errors import ParameterError
from txl_programs.answering.lines import (
    check_not_read,
    check_output,
    input_lines,
    progress_bar,
    say_how_many,
    say_missing,
    write_answers,
)
from txl_programs.flag_values import FLAGS, cluster_of
from txl_programs.opening import vocab_of, with_checkpoint
from txl_tf.cluster.blocks import answer_on_cluster, count_workers
from txl_tf.cluster.connection import connected
from txl_tf.data import inputs
from txl_tf.data.line_files import Answering, Block, LineFile, Plan, Tally, answer_block
from txl_tf.data.text.texts import find_named_files, folder_around
from txl_tf.files import absolute, check_scheme, lock, naming_write_errors, real, same_path, sha256
from txl_tf.runs.ensemble import members_of
from txl_tf.runs.folder import RunFolder, check_spares_runs

MakeAnswering = Callable[[RunFolder, str], Answering]  # takes the folder of a run and the path of a checkpoint

_FILES = ("lexicon", "json_schema")  # flags that name a file whose content affects the answers
# Flags that do not affect the answers.
_OTHER_FLAGS = {"model_dir", "ckpt_path", "input", "output", "strict", *ClusterConfig.names()}


def answer_input(
    folder: RunFolder, make_answering: MakeAnswering, program: str, together: int | None, raw: bool = False
) -> tuple[Tally, float | None]:
    """Answers the lines of --input, and writes the answers to --output or the standard output.

    The lines of one file or of the standard input are answered as they arrive. Several files, or any files if the flags
    ask for a Ray cluster, are answered block by block.

    Args:
        folder: folder of the run.
        make_answering: function that takes `folder` and the path of a checkpoint, and returns an `Answering` as the
            flags describe it.
        program: name of the module that defines `make_answering`.
        together: number of lines in a block; `None`: a block is a whole file.
        raw: see `write_answers`.

    Returns:
        `(tally, seconds)`: the `Tally` of all lines, and the time that they took; `None` instead of the time if an
        earlier run of the program answered some of the lines.

    Raises:
        ParameterError: --input or --output cannot be used.
        ValueError: a line has no answer, with --strict.
        OSError: a file cannot be read or written.
    """
    if cluster_of(ClusterConfig).given or is_several(FLAGS.input):
        answer = functools.partial(_answer_files, folder, make_answering, program, together, _named_files())
        return with_checkpoint(folder, answer)
    check_output()
    lines, name = input_lines(_is_plain_text(folder))
    answering = with_checkpoint(folder, functools.partial(make_answering, folder))
    started = time.perf_counter()
    answers = answering.answers(lines, name, FLAGS.strict, numbers=itertools.count(1))
    tally = write_answers(answers, answering.text, answering.numbers, raw)
    return tally, time.perf_counter() - started


def _is_plain_text(folder: RunFolder) -> bool:
    """Whether any end of a line counts, and no byte order mark. For models of bytes or raw text, both are text."""
    return folder.task != "language_model" or vocab_of(folder).has_plain_text


def is_several(path: str | None) -> bool:
    """Whether --input is a folder, a pattern, or several files. An existing file may have , * ? or [ in its name."""
    if path in (None, "-"):
        return False
    inputs.check_readable("input", path)
    return inputs.is_folder(path) or (any(c in path for c in ",*?[") and not inputs.exists(path))


def _answer_files(
    folder: RunFolder,
    make_answering: MakeAnswering,
    program: str,
    together: int | None,
    files: list[tuple[str, str]],
    path: str,
) -> tuple[Tally, float | None]:
    """Answers files block by block. See `answer_input` for the result.

    Args:
        folder, make_answering, program, together: see `answer_input`.
        files: `(path, name)` of each file.
        path: path of the checkpoint.
    """
    started = time.perf_counter()
    cluster = cluster_of(ClusterConfig)
    answer_blocks = functools.partial(_answer_here, make_answering, folder, path)
    flag_values: dict[str, Any] = {flag.name: flag.value for flag in _own_flags() if flag.name not in _OTHER_FLAGS}
    # The content of a file counts, not its path.
    flag_values |= {name: sha256(flag_values[name]) for name in _flags_of_files(flag_values)}
    if flag_values.pop("ensemble", None):
        members = members_of(folder, FLAGS.ensemble)
        flag_values["ensemble"] = [[sha256(run.config_file), sha256(f"{other}.index")] for run, other in members]
    key = [program, flag_values, sha256(folder.config_file), sha256(f"{path}.index"), together]
    with naming_write_errors(FLAGS.output):
        tf.io.gfile.makedirs(FLAGS.output)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock(FLAGS.output, f"another program writes its answers to {FLAGS.output}"))
        if cluster.given:
            count_workers(stack.enter_context(connected(cluster.ray_address)), cluster)  # fails before files are read
            answer_blocks = functools.partial(_answer_on_cluster, cluster, program, folder, path)
        plain_text = _is_plain_text(folder)
        plan = Plan([LineFile(file, name, FLAGS.output, key, plain_text) for file, name in files], together)
        total = Tally()
        if plan.before:
            print(f"lines answered before: {plan.before:,}", file=sys.stderr)
        for tally in plan.answer(functools.partial(_with_progress, answer_blocks)):
            if FLAGS.strict and tally.messages:
                raise _as_error(tally)
            say_missing(tally)
            total.add(tally)
    say_how_many(total)
    if FLAGS.strict and total.missing:  # in files that an earlier run completed: their messages are not stored
        message = f"{total.missing:,} line(s) of files that were answered before have no answer"
        raise ParameterError("strict", True, "left out, or give an empty --output", message)
    return total, None if plan.before else time.perf_counter() - started


def _as_error(tally: Tally) -> ValueError:
    """Returns a ValueError with the first message and all notes of a tally. A line of the tally must lack an answer."""
    error = ValueError(tally.messages[0])
    for note in tally.notes:
        error.add_note(note)
    return error


def _named_files() -> list[tuple[str, str]]:
    """Returns `(path, name)` of each file of --input, where `name` is the path of its output file below --output.

    Raises:
        ParameterError: --input names no files, --output is not a folder or is that of a run, two files would have the
            same output file, or an output file would be a file that is read.
    """
    if FLAGS.input in (None, "-"):
        message = "--ray_address and --ray_workers need --input: files, folders or patterns"
        raise ParameterError("input", FLAGS.input, "files, folders or patterns", message)
    check_scheme("output", FLAGS.output or "")
    if not FLAGS.output or (tf.io.gfile.exists(FLAGS.output) and not tf.io.gfile.isdir(FLAGS.output)):
        message = f"--output must be a folder, with a file for each file of --input, got {FLAGS.output}"
        raise ParameterError("output", FLAGS.output, "a folder", message)
    files = find_named_files(FLAGS.input, "input")
    output = f"{absolute(FLAGS.output)}/"
    names = collections.Counter(name for _, name in files)
    for name in names:
        if names[name] > 1 or any(str(folder) in names for folder in PurePosixPath(name).parents):
            message = f"--input must not name two files whose output files, or their folders, are both {output}{name}"
            raise ParameterError("input", FLAGS.input, "files of different names", message)
    real_output = f"{real(output)}/"
    for path, name in files:
        if real(path).startswith(real_output) or same_path(path, f"{output}{name}"):
            message = f"--output must not contain a file of --input, got {FLAGS.output}, which contains {path}"
            raise ParameterError("output", FLAGS.output, "a folder without files of --input", message)
    outputs = [f"{output}{name}" for name in names]
    check_not_read(*outputs)
    for path in (FLAGS.output, *outputs):
        check_spares_runs("output", path)
    if around := folder_around([output, *outputs], FLAGS.input):
        message = f"--output must be outside of {around}, all files of which --input names, got {FLAGS.output}"
        raise ParameterError("output", FLAGS.output, f"a folder outside of {around}", message)
    return files


def _own_flags() -> list[flags.Flag]:
    """Returns the flags that --help lists for the program, without those of absl."""
    return FLAGS.get_key_flags_for_module(FLAGS.find_module_defining_flag("model_dir"))


def _flags_of_files(flag_values: dict[str, Any]) -> list[str]:
    """Returns those names in `_FILES` whose flag names an existing file. A lexicon may also be another word: jieba.

    Args:
        flag_values: `{name: value}`.
    """
    paths = {name: flag_values[name] for name in _FILES if flag_values.get(name)}
    return [name for name, path in paths.items() if tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path)]


def _with_progress(answer_blocks: Callable[[list[Block]], Iterable[str]], blocks: list[Block]) -> Generator[str]:
    """Answers blocks, and shows a progress bar if the standard output is a terminal.

    Args:
        answer_blocks: function that answers blocks, and yields the `part` of each answered `Block`.
        blocks: the blocks.

    Yields:
        What `answer_blocks` yields.
    """
    bar = progress_bar(sum(block.lines for block in blocks))
    lines = {block.part: block.lines for block in blocks}
    for part in answer_blocks(blocks):
        if bar:
            bar.add(lines[part])
        yield part


def _answer_here(make_answering: MakeAnswering, folder: RunFolder, path: str, blocks: list[Block]) -> Generator[str]:
    """Answers blocks in this process, and yields the `part` of each answered `Block`."""
    answering = make_answering(folder, path)
    for block in blocks:
        answer_block(answering, block)
        yield block.part


def _answer_on_cluster(
    cluster: ClusterConfig, program: str, folder: RunFolder, path: str, blocks: list[Block]
) -> Generator[str]:
    """Answers blocks on the workers of a Ray cluster, and yields the `part` of each answered `Block`."""
    flag_values: dict[str, Any] = {flag.name: flag.value for flag in _own_flags() if flag.present}
    flag_values |= {"model_dir": absolute(folder.path), "ckpt_path": absolute(path)}
    flag_values |= {name: absolute(flag_values[name]) for name in _flags_of_files(flag_values)}
    make = functools.partial(make_in_worker, program, folder.task, flag_values)
    return answer_on_cluster(blocks, make, cluster)


def make_in_worker(program: str, task: str | None, given: dict[str, Any]) -> Answering:
    """Makes the `Answering` of a program in a worker of Ray, a process without a command line. Sets its flags first.

    Args:
        program: name of the program's module.
        task: task of the run, see `RunFolder`.
        given: `{name: value}` of the flags that the command line of the program gives.
    """
    module = importlib.import_module(program)  # defines the flags
    FLAGS.mark_as_parsed()  # otherwise, reading a flag would be an error
    for name, value in given.items():
        FLAGS[name].value = value
        FLAGS[name].present = 1
    folder = RunFolder(FLAGS.model_dir, task)
    return module.make_answering(folder, folder.find_checkpoint(FLAGS.ckpt_path))
