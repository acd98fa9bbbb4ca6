"""Documents of a tokenised text, each ended by one id, in a new order every epoch."""

from __future__ import annotations

import numpy as np

from txl_tf.data.token_files import StoredTokens

_AT_ONCE = 1 << 22  # tokens


class Documents:
    """The documents of a text and their orders.

    An order is a function of the seed and the number of the epoch alone, so that a run can go on anywhere.

    Args:
        tokens: integer array or `StoredTokens` `[n]`.
        document_id: id of the token that ends each document.
        seed: of the orders.

    Raises:
        ValueError: there is only one document.
    """

    def __init__(self, tokens: np.ndarray | StoredTokens, document_id: int, seed: int):
        self.tokens, self.seed = tokens, seed
        self.ends = document_ends(tokens, document_id)  # [documents]
        if len(self.ends) < 2:
            raise ValueError(f"the text must have two documents at least to be shuffled, got {len(self.ends)}")

    def order(self, epoch: int) -> DocumentOrder:
        """The text as it is in an epoch, from 0."""
        chosen = np.random.default_rng([self.seed, epoch]).permutation(len(self.ends))
        return DocumentOrder(self.tokens, self.ends, chosen)


class DocumentOrder:
    """A text with its documents in another order, read when it is sliced: `tokens[begin:end]`, `len(tokens)`.

    Args:
        tokens: integer array or `StoredTokens` `[n]`.
        ends: int `[documents]`, where each document ends in `tokens`; it begins where the one before it ends.
        chosen: int `[documents]`, the number of the document in each place.
    """

    def __init__(self, tokens: np.ndarray | StoredTokens, ends: np.ndarray, chosen: np.ndarray):
        self.tokens, self.dtype = tokens, tokens.dtype
        self._begins = np.concatenate([[0], ends[:-1]])[chosen]  # in `tokens`
        self._ends = np.cumsum(ends[chosen] - self._begins)  # in this order

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: slice) -> np.ndarray:
        place, last, _ = index.indices(len(self))
        pieces = []
        document = int(np.searchsorted(self._ends, place, side="right"))
        while place < last:
            end = min(int(self._ends[document]), last)
            before = int(self._ends[document - 1]) if document else 0
            begin = int(self._begins[document]) - before  # where place 0 would be, if the document reached so far
            pieces.append(self.tokens[begin + place : begin + end])
            place, document = end, document + 1
        return np.concatenate(pieces) if pieces else np.zeros([0], self.dtype)


def document_ends(tokens: np.ndarray | StoredTokens, document_id: int) -> np.ndarray:
    """Where each document ends, int64 `[documents]`: after its `document_id`, or at the end of the text."""
    ends = [
        np.flatnonzero(np.asarray(tokens[start : start + _AT_ONCE]) == document_id) + start + 1
        for start in range(0, len(tokens), _AT_ONCE)
    ]
    ends = np.concatenate(ends) if ends else np.zeros([0], np.int64)
    return ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))
