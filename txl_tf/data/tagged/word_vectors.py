"""Word vectors in the text format of word2vec: a word and its numbers a line, perhaps after a header "words dim"."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from txl_tf.data.text_files import numbered_lines
from txl_tf.schema import brief

_HEADER = re.compile(r"[0-9]+[ \t]+[0-9]+[ \t]*")


def is_header(line: str) -> bool:
    """Whether the first line of a file is word2vec's header: two integers."""
    return bool(_HEADER.fullmatch(line))


def read_vectors(path: str, wanted: Collection[str]) -> tuple[dict[str, np.ndarray], int]:
    """Reads the vectors of some words.

    Only " " parts a line, so that other white space, as U+3000, can be a word. The first vector of a word counts.

    Args:
        path: of the file, which is read line by line.
        wanted: the words, best a set or dictionary.

    Returns:
        `(vectors, dim)`: `{word: float32 [dim]}` of the words found, and the width of the file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a line of another width or with something that is not a finite number (only looked at for wanted
            words), a file that is empty, has no vectors or is not UTF-8. Names file and line.
    """
    vectors, dim, n_vectors = {}, None, 0
    for number, line in numbered_lines(path):
        line = line.rstrip(" ")
        if not line:
            continue
        if number == 1 and is_header(line):
            dim = int(line.split()[1])
            continue
        found = line.count(" ")
        if dim is None:
            dim = found
        if found != dim or not dim:
            expected = f"{dim} numbers" if dim else "numbers"
            raise ValueError(f"{path}, line {number} must have a word and {expected}, got {found}: {brief(line)}")
        n_vectors += 1
        word, _, numbers = line.partition(" ")
        if word in wanted and word not in vectors:
            vectors[word] = _parse(numbers, path, number)
    if not n_vectors:
        raise ValueError(f"{path} has no vectors")
    return vectors, dim


def _parse(numbers: str, path: str, line_number: int) -> np.ndarray:
    try:
        vector = np.array(numbers.split(" "), np.float32)
    except ValueError as error:
        raise ValueError(f"{path}, line {line_number}: {error}") from error
    if not np.all(np.isfinite(vector)):
        raise ValueError(f"{path}, line {line_number}: numbers must be finite, got {brief(numbers)}")
    return vector


def embedding_matrix(
    symbols: Sequence[str], vectors: Mapping[str, np.ndarray], dim: int, rng: np.random.Generator
) -> np.ndarray:
    """Initial embeddings, float32 `[len(symbols), dim]`: the vectors of words that have one, others uniform in
    +-sqrt(3 / dim); row 0, padding, is zero.

    What a row without a vector is does not depend on which others have one.
    """
    bound = np.sqrt(3 / dim)
    matrix = rng.uniform(-bound, bound, [len(symbols), dim]).astype(np.float32)
    matrix[:1] = 0
    for i, symbol in enumerate(symbols):
        if i and symbol in vectors:
            matrix[i] = vectors[symbol]
    return matrix
