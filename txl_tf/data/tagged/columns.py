"""From the lines of a tagged file to tokens and tags: finds the lines of tokens, the comments and the columns.

A line that begins with "#" may be a token or a comment. Each of these lines is the first one of a sentence:

    # O                       a token and its tag, where all lines have two columns
    # text = The cat sat      a comment, as in CoNLL-U
    # id 5239d808	domain=en   a comment, as in MultiCoNER

A line that begins with "#", before the first token of a sentence, is a comment if it begins with "# name =", or if it
does not look like the lines of tokens: it has another number of columns, or no tag in the column of the tags. In files
whose first column numbers the tokens, all these lines are comments. `ColumnsConfig.comments` overrides these rules.
After the first line that does not begin with "#", a line that begins with "#" is a token. A comment after a token such
as "# O", and "# name =" within a sentence, are errors, unless `comments` is false.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from txl_tf.config import ColumnsConfig
from txl_tf.data.tagged.tags import NONE, kind_of
from txl_tf.data.text_files import numbered_lines
from txl_tf.errors import ParameterError, brief

BLANK = "␣"  # replaces a space or a tab in a token, which would end its column
BLANKS = str.maketrans(" \t", 2 * BLANK)
OTHER_COLUMNS = "--token_column and --tag_column name other columns"  # advice of an error
_ADVICE = "put an empty line before it, or --nocomments makes it a token"

_NAMED = re.compile(r"#[ \t]+\S+[ \t]+=([ \t]|$)")  # "# text = ...", "# sent_id = ..."
_MULTICONER_COMMENT = re.compile(r"#[ \t]+id[ \t]+\S")
_GAP = re.compile("[ \t]+")
_NUMBER = re.compile(r"\d+([-.]\d+)?")  # in the first column of CoNLL-U: 3, or 3-4 or 5.1, which are no tokens
_TOKEN_NUMBER = re.compile(r"\d+")

logger = logging.getLogger("txl_tf")

Line = tuple[int, str]  # its number and its text


class TaggedSentence(NamedTuple):
    """Tokens and a tag for each."""

    tokens: list[str]
    tags: list[str]
    line: int  # line number of the first token; a `TokenLines` if the tokens are not in consecutive lines


class TokenLines(int):
    """The line number of the first token of a sentence.

    Attributes:
        each: the line number of every token.
    """

    each: list[int]

    @classmethod
    def of(cls, lines: list[int]) -> int:
        """Returns a `TokenLines` of the line numbers of the tokens; if they are consecutive, the first as plain int."""
        first = cls(lines[0])
        first.each = lines
        return first if lines[-1] - lines[0] >= len(lines) else lines[0]


def line_of(sentence: TaggedSentence, i: int) -> int:
    """Returns the line number of token `i`, counted from 0."""
    return sentence.line.each[i] if isinstance(sentence.line, TokenLines) else sentence.line + i


def tags_of(*texts: list[TaggedSentence]) -> set[str]:
    """Returns the different tags in the sentences of several files."""
    return {tag for text in texts for sentence in text for tag in sentence.tags}


def numbered_tags(text: list[TaggedSentence]) -> Iterator[tuple[int, str]]:
    """Yields the line number of every tag, and the tag."""
    for sentence in text:
        first = sentence.line
        lines = first.each if isinstance(first, TokenLines) else range(first, first + len(sentence.tags))
        yield from zip(lines, sentence.tags, strict=True)


def with_blanks(tokens: Sequence[str]) -> Sequence[str]:
    """Returns tokens in the form of a tagged file: "␣" replaces a space or a tab."""
    text = "".join(tokens)
    return [token.translate(BLANKS) for token in tokens] if " " in text or "\t" in text else tokens


def read_sentences(
    path: str, columns: ColumnsConfig, scheme: str | None = None, labels: Iterable[str] = ()
) -> list[TaggedSentence]:
    """Reads the sentences of a file; an empty list if it has no tokens. Logs how many comments are left out, if any.

    Args:
        path: path of a UTF-8 file. An empty line ends a sentence.
        columns: the columns of the tokens and of the tags, and whether there are comments.
        scheme: with "none", any text is a tag. Otherwise it has no effect.
        labels: texts that are known to be tags. With the scheme "none", a line with such a tag is not a comment.

    Raises:
        FileNotFoundError: the file does not exist.
        ParameterError: a line has no token or no tag, the columns are ambiguous, ...: names file and line.
    """
    blocks = _blocks(path)
    # The first lines of each block, as many as `heads` says, may be comments. The others are certainly tokens.
    heads = [_head_of(block) if columns.comments is not False else 0 for block in blocks]
    lines = [line for block, head in zip(blocks, heads, strict=True) for line in block[head:]]
    if not lines and not columns.comments:  # for example, all tokens are "#"
        heads = [0] * len(blocks)
        lines = sum(blocks, [])
    if not lines:
        return []
    _check_first_line(path, lines[0])
    for number, line in lines if columns.comments is not False else ():
        if _NAMED.match(line):
            where = f"{path}, line {number}"
            message = f"{where} is a comment within a sentence: {_ADVICE}, got {brief(line)}"
            raise ParameterError(where, line, "a token and a tag", message)
    table = _Table(path, lines, columns, scheme)
    table.tags |= {*labels}
    sentences = []
    comments = []
    for block, head in zip(blocks, heads, strict=True):
        new_comments = [line for line in block[:head] if columns.comments or table.is_comment(line)]
        tokens = [line for line in block[:head] if line not in new_comments] + block[head:]
        if new_comments and tokens and tokens[0] < new_comments[-1]:  # compares the line numbers
            raise table.error(new_comments[-1], f"is a comment within a sentence: {_ADVICE}")
        comments += new_comments
        sentences.append(table.sentence(tokens))
    if comments:
        number, text = comments[0]
        logger.info(f"{path}: comments left out: {len(comments):,}; the first is line {number}, {brief(text)}")
    table.check_first_column(sentences)
    return [sentence for sentence in sentences if sentence.tokens]


def columns_in(path: str, columns: ColumnsConfig) -> ColumnsConfig:
    """Returns `columns`; or the default columns if all lines of a file have two columns, and `columns` needs others.

    So a model can read the output of tools/tag.py, which has two columns, even if its training files have more.
    """
    token, tag = places_in(2, columns)
    if None not in (token, tag) and token != tag:
        return columns
    widths = {len(_by_spaces(line)) for _, line in numbered_lines(path) if line.strip(" \t")}
    return ColumnsConfig(comments=columns.comments) if widths == {2} else columns


def places_in(width: int, columns: ColumnsConfig) -> tuple[int | None, int | None]:
    """Returns the indices of token and tag in rows of `width` columns; `None` for a column that does not exist."""
    return place_of(range(width), columns.token_column or 1), place_of(range(width), columns.tag_column or -1)


def _blocks(path: str) -> list[list[Line]]:
    """Returns the groups of lines between empty lines. A line of -DOCSTART- before a group is left out."""
    blocks: list[list[Line]] = [[]]
    for number, line in numbered_lines(path):
        is_empty = not line.strip(" \t")
        if is_empty or (not blocks[-1] and _by_spaces(line)[0] == "-DOCSTART-"):
            blocks.append([])
        else:
            blocks[-1].append((number, line))
    return [block for block in blocks if block]


def _head_of(block: list[Line]) -> int:
    """Returns how many lines at the start of a block begin with "#"."""
    return next((i for i, (_, line) in enumerate(block) if not line.startswith("#")), len(block))


def _check_first_line(path: str, line: Line) -> None:
    """Raises ParameterError if the first line of tokens is a JSON object or list."""
    number, text = line
    if text.lstrip(" \t")[:1] not in ("{", "["):
        return
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return
    where = f"{path}, line {number}"
    message = f"{where} is JSON: a tagged file has a token and a tag a line, got {brief(text)}"
    raise ParameterError(where, text, "a token and a tag", message)


def _by_spaces(line: str) -> list[str]:
    """Returns the columns of a line that are separated by spaces and tabs, any number of them."""
    return _GAP.split(line.strip(" \t"))


def _by_tabs(line: str) -> list[str]:
    """Returns the columns of a line that are separated by single tabs. A column of spaces alone keeps them."""
    return [field.strip(" ") or field for field in line.rstrip(" \t").split("\t")]


def _splitter(lines: list[Line]) -> tuple[Callable[[str], list[str]], list[list[str]]]:
    """Returns the function that splits the lines of a file into columns, and the columns of `lines`.

    It is `_by_spaces`; but `_by_tabs` if only that gives all lines equally many columns, none of them empty.
    """
    by_spaces = [_by_spaces(line) for _, line in lines]
    if len({len(row) for row in by_spaces}) == 1:
        return _by_spaces, by_spaces
    by_tabs = [_by_tabs(line) for _, line in lines]
    has_one_width = len({len(row) for row in by_tabs}) == 1 and len(by_tabs[0]) > 1
    return (_by_tabs, by_tabs) if has_one_width and all(map(all, by_tabs)) else (_by_spaces, by_spaces)


class _Table:
    """The columns of a file: how to split lines, and the positions of tokens and tags.

    Args:
        path: path of the file, for messages.
        lines: the lines that are certainly tokens; at least one.
        columns, scheme: see `read_sentences`.

    Attributes:
        split: function of a line that returns its columns.
        rows: line number -> columns, for `lines`.
        widths: number of columns -> the first line that has so many.
        numbered: whether the first column numbers the tokens, as in CoNLL-U.
        token_column, tag_column: numbers of columns, from 1, or negative from the end.
        tags: the different tags in `lines`, and `labels` of `read_sentences`.

    Raises:
        ParameterError: the columns are ambiguous.
    """

    def __init__(self, path: str, lines: list[Line], columns: ColumnsConfig, scheme: str | None):
        self.path = path
        self.columns = columns
        self.scheme = scheme
        self.split, rows = _splitter(lines)
        self.rows = {}
        self.widths = {}
        for row, line in zip(rows, lines, strict=True):
            self.rows[line[0]] = row
            self.widths.setdefault(len(row), line)
        n_numbered = sum(_NUMBER.fullmatch(row[0]) is not None for row in rows) if min(self.widths) > 2 else 0
        self.numbered = columns.token_column != 1 and n_numbered > 0.9 * len(rows)
        self.token_column = columns.token_column or (2 if self.numbered else 1)
        self.tag_column = columns.tag_column or -1
        if self.numbered and not columns.tag_column:
            what = (
                "the first column numbers the tokens, as in CoNLL-U: give --tag_column, such as 4 for parts of speech"
            )
            message = f"{path}, line {lines[0][0]}: {what}; tokens are in column 2, or in --token_column"
            raise ParameterError("tag_column", None, "the number of a column", message)
        if scheme == NONE and not columns.tag_column and len(self.widths) > 1:
            (width, (first, _)), (other, line), *_ = self.widths.items()
            raise self.error(line, f"has {other} columns, and line {first} has {width}: {OTHER_COLUMNS}")
        tag_index = {width: place_of(range(width), self.tag_column) for width in self.widths}
        rows_and_indices = ((row, tag_index[len(row)]) for row in rows)
        self.tags = {row[i] for row, i in rows_and_indices if i is not None}
        self._checked_tags: set[str] = set()
        self._indices: dict[int, tuple[int, int]] = {}  # number of columns -> indices of token and tag

    def error(self, line: Line, what: str) -> ParameterError:
        """Returns the error for a line; `what` is wrong with it, such as "has 3 columns"."""
        where = f"{self.path}, line {line[0]}"
        return ParameterError(where, line[1], "a token and a tag", f"{where} {what}, got {brief(line[1])}")

    def is_comment(self, line: Line) -> bool:
        """Whether a line that begins with "#", before the first token of a sentence, is a comment.

        Raises:
            ParameterError: in the scheme "none", this cannot be decided.
        """
        row = self.split(line[1])
        i = place_of(row, self.tag_column)
        if _NAMED.match(line[1]) or self.numbered or len(row) not in self.widths or i is None:
            return True
        if self.scheme == NONE:
            if row[i] in self.tags:
                return False
            if _MULTICONER_COMMENT.match(line[1]):
                return True
            raise self.error(line, "may be a comment, or a token and its tag: --comments or --nocomments decides")
        try:
            kind_of(row[i])
        except ValueError:
            return True
        return False

    def sentence(self, lines: list[Line]) -> TaggedSentence:
        """Returns the sentence of some lines, without lines 3-4 (token of two words) and 5.1 (empty node) of CoNLL-U.

        Raises:
            ParameterError: a line has no token or no tag, or a tag that is not of the scheme. Names the line.
        """
        tokens = []
        tags = []
        numbers = []
        for line in lines:
            number, text = line
            row = self.rows.get(number) or self.split(text)
            if self.numbered and not _TOKEN_NUMBER.fullmatch(row[0]):
                if not _NUMBER.fullmatch(row[0]):
                    raise self.error(line, "must begin with the number of its token, as the other lines")
                continue
            token_index, tag_index = self._indices.get(len(row)) or self._indices_in(row, line)
            token = row[token_index]
            tag = row[tag_index]
            if tag not in self._checked_tags:
                self._check_tag(tag, row, number)
            tokens.append(token.translate(BLANKS) if self.split is _by_tabs else token)
            tags.append(tag)
            numbers.append(number)
        return TaggedSentence(tokens, tags, TokenLines.of(numbers) if numbers else 0)

    def _check_tag(self, tag: str, row: list[str], number: int) -> None:
        """Raises ParameterError, which names the line, if a tag is not of the scheme."""
        try:
            kind_of(tag, self.scheme)
        except ParameterError as error:
            hint = f"; {OTHER_COLUMNS}" if len(row) > 2 else ""
            message = f"{self.path}, line {number}: {error}{hint}"
            raise ParameterError("tag", tag, error.allowed, message) from error
        self._checked_tags.add(tag)

    def _indices_in(self, row: list[str], line: Line) -> tuple[int, int]:
        """Returns the indices of token and tag in a row, and stores them in `_indices`.

        Raises:
            ParameterError: one of them is missing, or both are equal.
        """
        if len(row) < 2:
            raise self.error(line, "must have a token and a tag, separated by a space or a tab")
        where = f"{self.path}, line {line[0]}, which has {len(row)} columns"
        indices = []
        for name, column in (("token_column", self.token_column), ("tag_column", self.tag_column)):
            index = place_of(row, column)
            if index is None:
                message = f"{name} must be a column of {where}, got {column}"
                raise ParameterError(name, column, f"a column from 1 to {len(row)}, or from {-len(row)} to -1", message)
            indices.append(index)
        token, tag = indices
        if token == tag:
            message = f"tag_column must be another column than token_column={self.token_column} in {where}, got "
            raise ParameterError("tag_column", self.tag_column, "another column", f"{message}{self.tag_column}")
        self._indices[len(row)] = (token, tag)
        return token, tag

    def check_first_column(self, sentences: Iterable[TaggedSentence]) -> None:
        """Raises ParameterError if the first column, the default for tokens, seems to have names of documents.

        That is: `token_column` is not given, the first column does not number the tokens, lines have at least three
        columns, at least two sentences have several tokens, and in each of these sentences all lines have the same
        first column.
        """
        if self.columns.token_column or self.numbered or min(self.widths) < 3:
            return
        several = [{*sentence.tokens} for sentence in sentences if len(sentence.tokens) > 1]
        if len(several) > 1 and all(len(tokens) == 1 for tokens in several):
            message = f"{self.path}: the first column is the same in all lines of a sentence: give --token_column"
            raise ParameterError("token_column", None, "the number of a column", message)


def place_of(row: Sequence, column: int) -> int | None:
    """Returns the index of a column that is counted from 1, or from the end if negative; `None` if it is missing."""
    i = column - 1 if column > 0 else len(row) + column
    return i if 0 <= i < len(row) else None
