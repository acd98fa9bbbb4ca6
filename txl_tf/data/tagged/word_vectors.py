"""Initial embeddings from word vectors; see vector_files.py for the files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from txl_tf.data.tagged.vector_files import open_vectors


def read_vectors(path: str, wanted: Collection[str], option: str = "path") -> tuple[dict[str, np.ndarray], int]:
    """Reads the vectors of some words. If a word has several vectors, the first one is used.

    Args:
        path: path of the file, in any format that `open_vectors` reads.
        wanted: the words; a set or dictionary is fastest.
        option: name of the argument for the file, for errors.

    Returns:
        `(vectors, dim)`: `{word: float32 [dim]}` of the words found, and the width of the vectors.

    Raises:
        ParameterError, FileNotFoundError: as `open_vectors`.
    """
    dim, pairs = open_vectors(path, wanted, option)
    vectors = {}
    for word, vector in pairs:
        vectors.setdefault(word, vector)
    return vectors, dim


def embedding_matrix(
    symbols: Sequence[str], vectors: Mapping[str, np.ndarray], dim: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns initial embeddings, float32 `[len(symbols), dim]`.

    The row of a symbol with a vector is this vector; other rows are uniform in +-sqrt(3 / dim). Row 0, padding, is
    zero. A random row does not depend on which other symbols have a vector.
    """
    bound = np.sqrt(3 / dim)
    matrix = rng.uniform(-bound, bound, [len(symbols), dim]).astype(np.float32)
    matrix[:1] = 0
    for i, symbol in enumerate(symbols):
        if i and symbol in vectors:
            matrix[i] = vectors[symbol]
    return matrix
