"""Answers to files of lines, block by block, in files of the same names. Finished blocks are not answered again.

    files = [LineFile(path, name, "answers", key) for path, name in find_named_files("corpus")]
    plan = Plan(files, most=2000)
    for tally in plan.answer(run):       # `run(blocks)` calls `answer_block` for each block, in any process
        print(*tally.messages)           # the messages come in the order of the lines

The folder of the output files also contains the answers to the blocks that are finished:

    .answers/<name>/<fingerprint>/<block>.txt    the answers to a block
    .answers/<name>/<fingerprint>/<block>.json   their `Tally`, written after the answers: they are complete
    .answers/<name>/done.json                    its `Done`: the output file is complete, and the blocks are removed

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
from txl_tf.data.encodings import without_wrong_advice
from txl_tf.data.lines import LineError, in_blocks, joined_lines, lines_in, without_mark
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
    """Default for `Answering.numbers`: an answer has no numbers to sum."""
    return ()


class Answering(NamedTuple):
    """The functions that answer lines.

    Attributes:
        answers: function of lines, their name, `strict` and, by keyword, the `numbers` of the lines, as in
            `txl_tf.data.lines.answers`. Returns an iterator of answers, with a `LineError` for a line that has no
            answer.
        text: function of an answer or a `LineError`, and of the number of its line. Returns the text for the output
            file.
        numbers: function of an answer. Returns numbers that are summed over all answers, always equally many.
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
        sums: sums of the numbers that `Answering.numbers` returned; empty without any.
        messages: why lines have no answer, one message for each, in the order of the lines.
        notes: what can be done about the missing answers, each note once.
    """

    lines: int = 0
    missing: int = 0
    sums: list[float] = dataclasses.field(default_factory=list)
    messages: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def count(self, answer: Any, numbers: Callable[..., Any]) -> None:
        """Adds an answer or a `LineError`; `numbers` is `Answering.numbers`."""
        self.lines += 1
        if isinstance(answer, LineError):
            self.add(Tally(missing=1, messages=[str(answer)], notes=getattr(answer, "__notes__", [])))
        else:
            self._add_numbers(numbers(answer))

    def add(self, other: Tally) -> None:
        """Adds the counts, sums, messages and notes of other answers."""
        self.lines += other.lines
        self.missing += other.missing
        self._add_numbers(other.sums)
        self.messages += other.messages
        self.notes = without_wrong_advice(list(dict.fromkeys([*self.notes, *other.notes])))

    def _add_numbers(self, numbers: Iterable[float]) -> None:
        """Adds numbers to the sums, one to each. A missing sum or number is 0."""
        self.sums = [total + number for total, number in itertools.zip_longest(self.sums, numbers, fillvalue=0)]


@dataclasses.dataclass(kw_only=True)
class Done(Tally):
    """The tally of a complete output file, without messages.

    Attributes:
        fingerprint: as in `LineFile`.
        size: size of the output file, in bytes.
    """

    fingerprint: str
    size: int


class Block(NamedTuple):
    """A block of whole lines of a file."""

    path: str
    name: str  # of the file, for messages
    start: int  # position in the file, in bytes
    length: int  # in bytes
    first: int  # number of its first line, from 1
    lines: int  # number of its lines
    part: str  # a path: <part>.txt has the answers to the block, <part>.json their tally
    plain_text: bool = False  # see `LineFile`

    @property
    def tally_path(self) -> str:
        return f"{self.part}.json"

    @property
    def answers_path(self) -> str:
        return f"{self.part}.txt"


def answer_block(answering: Answering, block: Block) -> None:
    """Writes the answers to a block, and then its `Tally`."""
    tally = Tally()
    texts = []
    pieces = pieces_of_block(block)
    if block.plain_text and not block.start:
        pieces = without_mark(pieces)
    lines = lines_in(pieces, any_end=block.plain_text)
    answers = answering.answers(lines, block.name, False, numbers=itertools.count(block.first))
    for number, answer in enumerate(answers, block.first):
        texts.append(answering.text(answer, number))
        tally.count(answer, answering.numbers)
    write_atomic(block.answers_path, "".join(texts).encode("utf-8", "surrogateescape"))
    write_json(block.tally_path, dataclasses.asdict(tally))


def pieces_of_block(block: Block) -> Iterator[bytes]:
    """Yields the bytes of a block in pieces."""
    n_left = block.length
    with naming_read_errors(block.path), inputs.opened(block.path) as file:
        file.seek(block.start)
        while n_left > 0 and (piece := file.read(min(n_left, _READ_BYTES))):
            n_left -= len(piece)
            yield piece


def _lines_with_ends(pieces: Iterable[bytes], any_end: bool) -> Iterator[bytes]:
    """Yields the lines in the pieces of a file, each with its end: a newline or, with `any_end`, any end of a line.

    The last line may have no end.
    """
    return joined_lines(_at_any_ends(pieces) if any_end else map(_after_newlines, pieces))


def _after_newlines(piece: bytes) -> tuple[list[bytes], bytes]:
    """Cuts a piece after its newlines: `(lines, rest)`, see `joined_lines`."""
    *lines, rest = piece.split(b"\n")
    return [line + b"\n" for line in lines], rest


def _at_any_ends(pieces: Iterable[bytes]) -> Iterator[tuple[list[bytes], bytes]]:
    r"""Cuts each piece after its `\n`, `\r\n` and `\r`: yields `(lines, rest)`, see `joined_lines`."""
    held = b""  # \r at the end of a piece: the next piece may begin with the \n of a \r\n
    for piece in pieces:
        piece = held + piece
        held = b"\r" if piece.endswith(b"\r") else b""
        lines = piece.removesuffix(b"\r").splitlines(keepends=True)
        rest = b"" if not lines or lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        yield lines, rest
    yield [], held


class LineFile:
    """A file of lines and the file of its answers.

    Args:
        path: path of the file of lines.
        name: name of the output file, the file of its answers, as a path below `folder`.
        folder: folder of the output files of all files.
        key: everything else that determines the answers, as a value for JSON.
        plain_text: whether a carriage return also ends a line, and a byte order mark at the beginning of the file is
            left out.

    Attributes:
        output: path of the output file.
        state: folder of the blocks of answers and of done.json, see the top of this file.
        fingerprint: changes with `key` and with the size or the time of the file.
        parts: folder of the answers to the blocks.
        done_file: path of done.json.

    Raises:
        OSError: the file cannot be read, or a folder below `folder` is a symbolic link.
    """

    def __init__(self, path: str, name: str, folder: str, key: Any, plain_text: bool = False):
        self.path = path
        self.output = os.path.join(folder, name)
        self.plain_text = plain_text
        self.state = os.path.join(folder, STATE, name)
        self.key = key
        self.fingerprint = self._fingerprint()
        self.parts = os.path.join(self.state, self.fingerprint)
        self.done_file = os.path.join(self.state, "done.json")
        check_no_link(folder, os.path.dirname(name), os.path.join(STATE, name, self.fingerprint))

    def _fingerprint(self) -> str:
        """Returns the fingerprint of the file as it is now."""
        with naming_read_errors(self.path):
            described = json.dumps([self.key, *inputs.stamp(self.path)], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def done(self) -> Done | None:
        """Returns the tally of the output file; `None` if the file does not exist, is incomplete or is out of date."""
        if not (tf.io.gfile.exists(self.done_file) and tf.io.gfile.exists(self.output)):
            return None
        done = Done(**read_json(self.done_file, lambda values: check_values(values, Done)))
        current = (self.fingerprint, tf.io.gfile.stat(self.output).length)
        return done if current == (done.fingerprint, done.size) else None

    def blocks(self, most: int | None) -> list[Block]:
        """Cuts the file into blocks. It reads the whole file.

        Args:
            most: lines of a block; a block of long lines has fewer, see `in_blocks`. `None`: the file is one block.

        Raises:
            ParameterError: the file is empty.
        """
        lengths: collections.deque[int] = collections.deque()  # bytes of the lines that `sizes` has not summed yet
        has_cr = False  # whether a line ends with \r alone

        def lines_without_ends():
            """Yields the lines. Adds the bytes of each, with its end, to `lengths`; sets `has_cr`."""
            nonlocal has_cr
            for line in _lines_with_ends(blocks_of(self.path), self.plain_text):
                lengths.append(len(line))
                has_cr = has_cr or (self.plain_text and line.endswith(b"\r"))
                yield line.rstrip(b"\r\n") if self.plain_text else line.removesuffix(b"\n")

        # (bytes, lines) of each block
        sizes = [(sum(lengths.popleft() for _ in lines), len(lines)) for lines in in_blocks(lines_without_ends(), most)]
        sizes = [tuple(map(sum, zip(*sizes, strict=True)))] if most is None else sizes
        ending = "-cr" if has_cr else ""  # another name, because earlier versions cut such a file into other lines
        blocks = []
        start = 0
        first = 1
        for i, (length, lines) in enumerate(sizes):
            part = os.path.join(absolute(self.parts), f"{i:06}{ending}")
            blocks.append(Block(absolute(self.path), self.path, start, length, first, lines, part, self.plain_text))
            start += length
            first += lines
        return blocks

    def missing(self, blocks: list[Block]) -> list[Block]:
        """Returns those of the `blocks` whose answers are not complete: their tally does not exist."""
        existing = set(tf.io.gfile.listdir(self.parts)) if tf.io.gfile.isdir(self.parts) else set()
        return [block for block in blocks if os.path.basename(block.tally_path) not in existing]

    def join(self, blocks: list[Block], tally: Tally) -> None:
        """Writes the output file from the answers to all blocks, then done.json. Empties `state` except for done.json.

        Args:
            blocks: all blocks of the file.
            tally: tally of all answers, without messages.

        Raises:
            OSError: the size or the time of the input file has changed since this `LineFile` was made; or a file cannot
                be read or written.
        """
        if self._fingerprint() != self.fingerprint:
            raise OSError(f"{self.path} has changed while it was answered: start again")
        joined = os.path.join(self.state, "joined")
        with new_file(joined) as file:
            for block in blocks:
                whole_file = block._replace(path=block.answers_path, start=0, length=1 << 62)
                for piece in pieces_of_block(whole_file):
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
        work: `(file, done, blocks)` of each file. If its output file is complete, `done` is its tally and there are no
            blocks. Otherwise `done` is `None`, and these are all blocks of the file.
        missing: `Block`s without answers.
        before: number of lines that had been answered when the plan was made.
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
        """Yields the tally of each block, in the order of files and blocks, as soon as it exists.

        A file that was complete before has one tally. An output file appears when all of its blocks have answers.

        Args:
            run: function of the missing blocks. It answers them, and yields `Block.part` of each as soon as the block
                is answered, in any order.
        """
        for parts in {os.path.dirname(block.part) for block in self.missing}:
            with naming_write_errors(parts):
                tf.io.gfile.makedirs(parts)
        waiting = {block.part for block in self.missing}
        with contextlib.closing(run(self.missing)) as answered:
            for file, done, blocks in self.work:
                total = done or Tally()
                for block in blocks:
                    while block.part in waiting:  # blocks may be answered in another order
                        waiting.remove(next(answered))
                    tally = Tally(**read_json(block.tally_path, lambda values: check_values(values, Tally)))
                    total.add(dataclasses.replace(tally, messages=[]))
                    yield tally
                if done:
                    yield done
                else:
                    file.join(blocks, total)
