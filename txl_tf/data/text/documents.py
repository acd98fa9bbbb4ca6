"""Documents of a text of token ids, in a new order every epoch. One id ends each document."""

from __future__ import annotations

import numpy as np

from txl_tf.data.token_files import StoredTokens
from txl_tf.errors import ParameterError

_AT_ONCE = 1 << 22  # tokens


class Documents:
    """The documents of a text and their orders.

    An order depends only on the seed and the number of the epoch, so that a run can resume anywhere.

    Args:
        tokens: integer array or `StoredTokens`, `[n]`.
        document_id: id of the token at the end of each document.
        seed: seed of the orders.

    Raises:
        ParameterError: there is only one document.
    """

    def __init__(self, tokens: np.ndarray | StoredTokens, document_id: int, seed: int):
        self.tokens = tokens
        self.seed = seed
        self.ends = document_ends(tokens, document_id)  # [documents]
        if len(self.ends) < 2:
            message = f"the text must have at least two documents to be shuffled, got {len(self.ends)}"
            raise ParameterError("tokens", len(self.ends), "a text of at least two documents", message)

    def order(self, epoch: int) -> DocumentOrder:
        """Returns the text with its documents in the order of an epoch, counted from 0."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.ends))
        return DocumentOrder(self.tokens, self.ends, order)


class DocumentOrder:
    """A text with its documents in another order, read when it is sliced: `tokens[begin:end]`, `len(tokens)`.

    Args:
        tokens: integer array or `StoredTokens` `[n]`.
        ends: int `[documents]`, the position in `tokens` after each document, which is where the next one begins.
        order: int `[documents]`, the numbers of the documents in the new order.
    """

    def __init__(self, tokens: np.ndarray | StoredTokens, ends: np.ndarray, order: np.ndarray):
        self.tokens = tokens
        self.dtype = tokens.dtype
        self._begins = np.concatenate([[0], ends[:-1]])[order]  # in `tokens`
        self._ends = np.cumsum(ends[order] - self._begins)  # in the reordered text

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: slice) -> np.ndarray:
        position, last, _ = index.indices(len(self))  # in the reordered text
        pieces = []
        document = int(np.searchsorted(self._ends, position, side="right"))  # which has the token at `position`
        while position < last:
            end = min(int(self._ends[document]), last)
            begin_of_document = int(self._ends[document - 1]) if document else 0
            shift = int(self._begins[document]) - begin_of_document  # from the reordered text to `tokens`
            pieces.append(self.tokens[position + shift : end + shift])
            position = end
            document += 1
        return np.concatenate(pieces) if pieces else np.zeros([0], self.dtype)


def document_ends(tokens: np.ndarray | StoredTokens, document_id: int) -> np.ndarray:
    """Returns the position after each document, int64 `[documents]`.

    A document ends with `document_id`. The last one may also end at the end of the text without it.
    """
    ends = [
        np.flatnonzero(np.asarray(tokens[start : start + _AT_ONCE]) == document_id) + start + 1
        for start in range(0, len(tokens), _AT_ONCE)
    ]
    ends = np.concatenate(ends) if ends else np.zeros([0], np.int64)
    return ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))
