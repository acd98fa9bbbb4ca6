"""Initial embeddings out of word vectors, see vector_files.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from txl_tf.data.tagged.vector_files import open_vectors


def read_vectors(path: str, wanted: Collection[str], option: str = "path") -> tuple[dict[str, np.ndarray], int]:
    """Reads the vectors of some words. The first vector of a word counts.

    Args:
        path: of the file, of any format that `open_vectors` reads.
        wanted: the words, best a set or dictionary.
        option: what errors call the argument that names the file.

    Returns:
        `(vectors, dim)`: `{word: float32 [dim]}` of the words found, and the width of the file.

    Raises: as `open_vectors`.
    """
    dim, found = open_vectors(path, wanted, option)
    vectors = {}
    for word, vector in found:
        vectors.setdefault(word, vector)
    return vectors, dim


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
