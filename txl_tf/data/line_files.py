"""Answers to files of lines, block by block, in files of the same names. Finished blocks are not answered again.

    files = [LineFile(path, name, "answers", key) for path, name in find_named_files("corpus")]
    plan = Plan(files, most=2000)
    for tally in plan.answer(run):       # `run(blocks)` calls `answer_block` for each block, in any process
        print(*tally.messages)           # in the order of the lines

The folder of the output files also has the answers so far:

    .answers/<name>/<fingerprint>/<block>.txt    the answers to a block
    .answers/<name>/<fingerprint>/<block>.json   their `Tally`, written after the answers: they are complete
    .answers/<name>/done.json                    the output file is complete, and the blocks are removed

The fingerprint depends on the input and on everything that determines the answers. Answers with another fingerprint are
not used.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from txl_tf.data import inputs
from txl_tf.data.lines import LineError, in_blocks, lines_in, without_mark
from txl_tf.data.text_files import blocks_of
from txl_tf.files import (
    absolute,
    check_no_link,
    naming_read_errors,
    naming_write_errors,
    new_file,
    read_json,
    remove,
    write_atomic,
    write_json,
)
from txl_tf.schema import check_values

STATE = ".answers"
_READ_BYTES = 1 << 20


def nothing(answer: Any) -> tuple:
    """Default for `Answering.numbers`: no sums."""
    return ()


class Answering(NamedTuple):
    """The functions that answer lines.

    Attributes:
        answers: function of lines, their name, `strict` and, by keyword, `numbers`, as in `txl_tf.data.lines.answers`.
            Returns an iterator of answers, with a `LineError` for a line that has no answer.
        text: function of an answer or a `LineError`, and of its number. Returns the text for the output file.
        numbers: function of an answer. Returns numbers that are summed over all lines.
    """

    answers: Callable[..., Any]
    text: Callable[..., Any]
    numbers: Callable[..., Any] = nothing


@dataclasses.dataclass(kw_only=True)
class Tally:
    """Counts and sums of answers.

    Attributes:
        lines: number of lines.
        missing: number of lines without an answer.
        sums: sums of the numbers of `Answering.numbers`.
        messages: why lines have no answer, in the order of the lines.
        notes: what can be done about it, each note once.
    """

    lines: int = 0
    missing: int = 0
    sums: list[float] = dataclasses.field(default_factory=list)
    messages: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def count(self, answer: Any, numbers: Callable[..., Any]) -> None:
        """Adds one answer."""
        self.lines += 1
        if isinstance(answer, LineError):
            self.add(Tally(missing=1, messages=[str(answer)], notes=getattr(answer, "__notes__", [])))
        else:
            self._add_numbers(numbers(answer))

    def add(self, other: Tally) -> None:
        """Adds the counts and sums of other answers."""
        self.lines += other.lines
        self.missing += other.missing
        self._add_numbers(other.sums)
        self.messages += other.messages
        self.notes += [note for note in other.notes if note not in self.notes]

    def _add_numbers(self, numbers):
        """Adds the numbers of an answer to the sums."""
        if self.sums and numbers:
            self.sums = [total + number for total, number in zip(self.sums, numbers, strict=True)]
        else:
            self.sums = [*self.sums, *numbers]


@dataclasses.dataclass(kw_only=True)
class Done(Tally):
    """The tally of an output file of `size` bytes, without messages."""

    fingerprint: str
    size: int


class Block(NamedTuple):
    """Whole lines of a file."""

    path: str
    name: str  # of the file, for messages
    start: int  # position in the file, in bytes
    length: int  # in bytes
    first: int  # number of its first line
    lines: int
    part: str  # <part>.txt has its answers, <part>.json their tally
    any_end: bool = False  # whether a carriage return also ends a line

    @property
    def tally(self) -> str:
        return f"{self.part}.json"

    @property
    def answers(self) -> str:
        return f"{self.part}.txt"


def answer_block(answering: Answering, block: Block) -> None:
    """Writes the answers to a block, and then its `Tally`."""
    tally = Tally()
    texts = []
    pieces = pieces_of(block) if block.start else without_mark(pieces_of(block))
    lines = lines_in(pieces, block.any_end)
    answers = answering.answers(lines, block.name, False, numbers=itertools.count(block.first))
    for number, answer in enumerate(answers, block.first):
        texts.append(answering.text(answer, number))
        tally.count(answer, answering.numbers)
    write_atomic(block.answers, "".join(texts).encode("utf-8", "surrogateescape"))
    write_json(block.tally, dataclasses.asdict(tally))


def pieces_of(block: Block) -> Iterator[bytes]:
    """Yields the bytes of a block in pieces."""
    n_left = block.length
    with naming_read_errors(block.path), inputs.opened(block.path) as file:
        file.seek(block.start)
        while n_left > 0 and (piece := file.read(min(n_left, _READ_BYTES))):
            n_left -= len(piece)
            yield piece


def _lines_with_ends(pieces: Iterable[bytes], any_end: bool) -> Iterator[bytes]:
    """Yields the lines in the pieces of a file, each with its end: a newline or, with `any_end`, any end of a line."""
    rest = b""
    for piece in pieces:
        if any_end:
            lines = (rest + piece).splitlines(keepends=True)
            rest = b"" if lines[-1].endswith(b"\n") else lines.pop()  # a \n may follow a \r
        else:
            *lines, rest = (rest + piece).split(b"\n")
            lines = [line + b"\n" for line in lines]
        yield from lines
    if rest:
        yield rest


class LineFile:
    """A file of lines and the file of its answers.

    Args:
        path: of the file.
        name: of the file of answers, below `folder`.
        folder: of the answers to all files.
        key: everything else that determines the answers, as a value for JSON.
        any_end: whether a carriage return also ends a line, and not only a newline.

    Raises:
        OSError: the file cannot be read, or a folder below `folder` is a symbolic link.
    """

    def __init__(self, path: str, name: str, folder: str, key: Any, any_end: bool = False):
        self.path = path
        self.output = os.path.join(folder, name)
        self.any_end = any_end
        self.state = os.path.join(folder, STATE, name)
        self.key = key
        self.fingerprint = self._fingerprint()
        self.parts = os.path.join(self.state, self.fingerprint)
        self.done_file = os.path.join(self.state, "done.json")
        check_no_link(folder, os.path.dirname(name), os.path.join(STATE, name, self.fingerprint))

    def _fingerprint(self) -> str:
        with naming_read_errors(self.path):
            described = json.dumps([self.key, *inputs.stamp(self.path)], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def done(self) -> Done | None:
        """Returns the tally of the output file; `None` if it does not exist or has another fingerprint."""
        if not (tf.io.gfile.exists(self.done_file) and tf.io.gfile.exists(self.output)):
            return None
        done = Done(**read_json(self.done_file, lambda values: check_values(values, Done)))
        current = (self.fingerprint, tf.io.gfile.stat(self.output).length)
        return done if current == (done.fingerprint, done.size) else None

    def blocks(self, most: int | None) -> list[Block]:
        """Cuts the file into blocks of `most` lines, or fewer if the lines are long; one block if `most` is `None`.

        Raises:
            ParameterError: the file is empty.
        """
        lengths: collections.deque[int] = collections.deque()  # bytes of the lines that follow
        has_cr = False  # whether a line ends with \r alone

        def lines_without_ends():
            """Yields the lines. Notes the bytes of each with its end, and whether an end is \\r alone."""
            nonlocal has_cr
            for line in _lines_with_ends(blocks_of(self.path), self.any_end):
                lengths.append(len(line))
                has_cr = has_cr or (self.any_end and line.endswith(b"\r"))
                yield line.rstrip(b"\r\n") if self.any_end else line.removesuffix(b"\n")

        sizes = [(sum(lengths.popleft() for _ in lines), len(lines)) for lines in in_blocks(lines_without_ends(), most)]
        sizes = [tuple(map(sum, zip(*sizes, strict=True)))] if most is None else sizes
        kind = "-cr" if has_cr else ""  # earlier versions cut such a file into other lines
        blocks = []
        start = 0
        first = 1
        for i, (length, lines) in enumerate(sizes):
            part = os.path.join(absolute(self.parts), f"{i:06}{kind}")
            blocks.append(Block(absolute(self.path), self.path, start, length, first, lines, part, self.any_end))
            start += length
            first += lines
        return blocks

    def missing(self, blocks: list[Block]) -> list[Block]:
        """Returns the blocks that have no answers."""
        existing = set(tf.io.gfile.listdir(self.parts)) if tf.io.gfile.isdir(self.parts) else set()
        return [block for block in blocks if os.path.basename(block.tally) not in existing]

    def join(self, blocks: list[Block], tally: Tally) -> None:
        """Writes the output file from the answers to all blocks, and removes these answers.

        Raises:
            OSError: the input file has changed since the first block was answered.
        """
        if self._fingerprint() != self.fingerprint:
            raise OSError(f"{self.path} has changed while it was answered: start again")
        joined = os.path.join(self.state, "joined")
        with new_file(joined) as file:
            for block in blocks:
                for piece in pieces_of(block._replace(path=block.answers, start=0, length=1 << 62)):
                    file.write(piece)
        with naming_write_errors(self.output):
            size = tf.io.gfile.stat(joined).length
            tf.io.gfile.makedirs(os.path.dirname(self.output))
            tf.io.gfile.rename(joined, self.output, overwrite=True)
        write_json(self.done_file, {**dataclasses.asdict(tally), "fingerprint": self.fingerprint, "size": size})
        for name in tf.io.gfile.listdir(self.state):
            path = os.path.join(self.state, name.rstrip("/"))
            if path != self.done_file:
                remove(path)


class Plan:
    """The blocks of files that still have to be answered.

    Args:
        files: `LineFile`s.
        most: lines of a block, see `LineFile.blocks`.

    Attributes:
        work: `(file, tally if it is finished, blocks)` of each file.
        missing: `Block`s without answers.
        before: number of lines that have answers.
    """

    def __init__(self, files: Iterable[LineFile], most: int | None):
        self.work: list[tuple[LineFile, Done | None, list[Block]]] = []
        for file in files:
            done = file.done()
            self.work.append((file, done, [] if done else file.blocks(most)))
        self.missing = [block for file, _, blocks in self.work for block in file.missing(blocks)]
        lines = sum(done.lines if done else sum(block.lines for block in blocks) for _, done, blocks in self.work)
        self.before = lines - sum(block.lines for block in self.missing)

    def answer(self, run: Callable[[list[Block]], Generator[str]]) -> Iterator[Tally]:
        """Yields the tally of each block, in order, as soon as it exists; for a finished file, one tally.

        An output file appears when all of its blocks have answers.

        Args:
            run: answers blocks, and yields `Block.part` of each as soon as it is done, in any order.
        """
        for parts in {os.path.dirname(block.part) for block in self.missing}:
            with naming_write_errors(parts):
                tf.io.gfile.makedirs(parts)
        waiting = {block.part for block in self.missing}
        with contextlib.closing(run(self.missing)) as answered:
            for file, done, blocks in self.work:
                total = done or Tally()
                for block in blocks:
                    while block.part in waiting:
                        waiting.remove(next(answered))
                    tally = Tally(**read_json(block.tally, lambda values: check_values(values, Tally)))
                    total.add(dataclasses.replace(tally, messages=[]))
                    yield tally
                if done:
                    yield done
                else:
                    file.join(blocks, total)
