"""Files of lines, each with a file of answers of the same name: answered in this process or on a Ray cluster."""

import collections
import contextlib
import functools
import importlib
import itertools
import sys
import time
from pathlib import PurePosixPath

import tensorflow as tf

from txl_programs.answering.lines import (
    check_output,
    input_lines,
    progress_bar,
    say_how_many,
    say_missing,
    write_answers,
)
from txl_programs.program import FLAGS, cluster_of, with_checkpoint
from txl_tf.cluster.blocks import answer_on_cluster, count_workers
from txl_tf.cluster.connection import connected
from txl_tf.config import ClusterConfig
from txl_tf.data.line_files import LineFile, Plan, Tally, answer_block
from txl_tf.data.text.texts import find_named_files, folder_around
from txl_tf.files import absolute, lock, same_path, sha256, writing
from txl_tf.runs.folder import RunFolder

_FILES = ("lexicon",)  # flags that name a file, on whose content answers depend
# Flags that no answer depends on.
_OTHER_FLAGS = {"model_dir", "ckpt_path", "input", "output", "strict", *ClusterConfig.names()}


def answer_input(folder, make_answering, program, together, raw=False):
    """Answers the lines of --input: as they come, or file by file, on a Ray cluster where the flags say so.

    Args:
        folder: `RunFolder`.
        make_answering: function of `folder` and the path of a checkpoint that gives an `Answering`, by the flags.
        program: name of the module that has it.
        together: lines that are answered together where files are cut into blocks; `None` for whole files.
        raw: see `write_answers`.

    Returns:
        The `Tally` of all lines, and the seconds that they took; `None` where some were answered before.
    """
    if cluster_of(ClusterConfig).given or _is_several(FLAGS.input):
        answer = functools.partial(_answer_files, folder, make_answering, program, together, _named_files())
        return with_checkpoint(folder, answer)
    check_output(FLAGS.input)
    lines, name = input_lines(_has_any_end(folder))
    answering = with_checkpoint(folder, functools.partial(make_answering, folder))
    started = time.perf_counter()
    answers = answering.answers(lines, name, FLAGS.strict, numbers=itertools.count(1))
    tally = write_answers(answers, answering.text, answering.numbers, raw)
    return tally, time.perf_counter() - started


def _has_any_end(folder):
    r"""Whether `\r\n` and `\r` end lines as `\n` does: to a language model of bytes or of raw text they are text."""
    return folder.task != "language_model" or folder.load_vocab().has_plain_text


def _is_several(inputs):
    """Whether --input is a folder, a pattern, or several files."""
    if inputs in (None, "-"):
        return False
    return tf.io.gfile.isdir(inputs) or (any(c in inputs for c in ",*?[") and not tf.io.gfile.exists(inputs))


def _answer_files(folder, make_answering, program, together, files, path):
    """`answer_input` of several files, `(path, name)` each, or on a cluster, with the checkpoint at `path`."""
    cluster, started = cluster_of(ClusterConfig), time.perf_counter()
    run = functools.partial(_here, make_answering, folder, path)
    flags = {flag.name: flag.value for flag in _own_flags() if flag.name not in _OTHER_FLAGS}
    flags |= {name: sha256(flags[name]) for name in _named_by(flags)}
    key = [program, flags, sha256(folder.config_file), sha256(f"{path}.index"), together]
    with writing(FLAGS.output):
        tf.io.gfile.makedirs(FLAGS.output)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock(FLAGS.output, f"another program writes its answers to {FLAGS.output}"))
        if cluster.given:
            count_workers(stack.enter_context(connected(cluster.ray_address)), cluster)  # before files are read
            run = functools.partial(_on_cluster, cluster, program, folder, path)
        any_end = _has_any_end(folder)
        plan, whole = Plan([LineFile(*file, FLAGS.output, key, any_end) for file in files], together), Tally()
        if plan.before:
            print(f"lines answered before: {plan.before:,}", file=sys.stderr)
        for tally in plan.answer(functools.partial(_with_progress, run)):
            if FLAGS.strict and tally.messages:
                raise _as_error(tally)
            say_missing(tally)
            whole.add(tally)
    say_how_many(whole)
    if FLAGS.strict and whole.missing:  # without messages: of files that were answered before
        raise ValueError(f"of files that were answered before, {whole.missing:,} line(s) have no answer")
    return whole, None if plan.before else time.perf_counter() - started


def _as_error(tally):
    """The ValueError of the first line without an answer."""
    error = ValueError(tally.messages[0])
    for note in tally.notes:
        error.add_note(note)
    return error


def _named_files():
    """`(path, name)` of the files of --input. Raises ValueError unless each can have a file of its name in --output."""
    if FLAGS.input in (None, "-"):
        raise ValueError("--ray_address and --ray_workers need --input: files, folders or patterns")
    if not FLAGS.output or (tf.io.gfile.exists(FLAGS.output) and not tf.io.gfile.isdir(FLAGS.output)):
        raise ValueError(f"--output must be a folder, for a file for each of --input, got {FLAGS.output}")
    files, output = find_named_files(FLAGS.input), f"{absolute(FLAGS.output)}/"
    names = collections.Counter(name for _, name in files)
    for name in names:
        if names[name] > 1 or any(str(folder) in names for folder in PurePosixPath(name).parents):
            raise ValueError(f"--input must not name two files whose answers both go to {output}{name}, or into it")
    for path, name in files:
        if absolute(path).startswith(output) or same_path(path, f"{output}{name}"):
            raise ValueError(f"--output must hold no file of --input, got {FLAGS.output}, which holds {path}")
    if around := folder_around([output, *(f"{output}{name}" for name in names)], FLAGS.input):
        raise ValueError(f"--output must lie outside of {around}, all of which is --input, got {FLAGS.output}")
    return files


def _own_flags():
    """The flags of the program itself."""
    return FLAGS.get_key_flags_for_module(FLAGS.find_module_defining_flag("model_dir"))


def _named_by(flags):
    """Those of `flags`, `{name: value}`, that name a file which answers depend on."""
    paths = {name: flags[name] for name in _FILES if flags.get(name)}
    return [name for name, path in paths.items() if tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path)]


def _with_progress(run, blocks):
    """The parts that `run` yields for blocks, with a progress bar on a terminal."""
    bar, lines = progress_bar(sum(block.lines for block in blocks)), {block.part: block.lines for block in blocks}
    for part in run(blocks):
        if bar:
            bar.add(lines[part])
        yield part


def _here(make_answering, folder, path, blocks):
    """Answers blocks in this process; yields their parts."""
    answering = make_answering(folder, path)
    for block in blocks:
        answer_block(answering, block)
        yield block.part


def _on_cluster(cluster, program, folder, path, blocks):
    """Has blocks answered by the workers of a cluster; yields their parts."""
    given = {flag.name: flag.value for flag in _own_flags() if flag.present}
    given |= {"model_dir": absolute(folder.path), "ckpt_path": absolute(path)}
    given |= {name: absolute(given[name]) for name in _named_by(given)}
    make = functools.partial(make_in_worker, program, folder.task, given)
    return answer_on_cluster(blocks, make, cluster)


def make_in_worker(program, task, given):
    """The `Answering` of a program in a process that has not read its flags.

    Args:
        program: name of its module.
        task: of its runs.
        given: `{name: value}` of the flags that its command line gives.
    """
    module = importlib.import_module(program)
    FLAGS.mark_as_parsed()
    for name, value in given.items():
        FLAGS[name].value, FLAGS[name].present = value, 1
    folder = RunFolder(FLAGS.model_dir, task)
    return module.make_answering(folder, folder.find_checkpoint(FLAGS.ckpt_path))
