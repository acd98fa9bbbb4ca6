"""Reads cache.pkl, the original's corpus file, as plain data. Nothing in it is run, see `pickles`.

Several arrays of a file may share its bytes. So all splits together may have at most as many tokens as the file has
bytes, and all arrays together are decoded from at most as many characters.
"""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from txl_tf.convert.pickles import (
    BoundedFile,
    Named,
    PlainUnpickler,
    StandIn,
    are_sizes,
    instance,
    is_text,
    raises_file_error,
    shown,
    text,
    texts_of,
    unneeded,
)
from txl_tf.data.text.datasets import SPLITS
from txl_tf.files import is_remote

MAX_NAME = 100  # characters of a dataset's or dtype's name; bytes if Python 2 has written it
INTEGER = "[iu][1248]"  # pattern of the names of integer dtypes, such as "i8"


@dataclasses.dataclass
class CachedCorpus:
    """The corpus of a cache.pkl, as plain data.

    Attributes:
        symbols: the vocabulary in id order.
        dataset: the original's `--dataset`, if known.
        cutoffs: first ids of the adaptive softmax's clusters, without 0 and the size of the vocabulary, if known.
        lower_case: whether text is lower-cased, if known.
        splits: `"train"`, `"valid"` or `"test"` -> tokens, int64 `[n]`. Splits that are not in the file are left out:
            that of lm1b has no `"train"`.
    """

    symbols: list[str]
    dataset: str | None
    cutoffs: list[int] | None
    lower_case: bool | None
    splits: dict[str, np.ndarray]


@raises_file_error("the original's cache.pkl", remote=True)
def read_cache_pkl(path: str) -> CachedCorpus:
    """Reads a cache.pkl of Python 2 or 3 and of any pickle protocol as plain data. The path may be remote.

    The classes `Corpus` and `Vocab` of the file may be in the modules `data_utils` and `vocabulary`, or in a script
    (`__main__`).

    Raises:
        RefusedError: the file names another class or function. The error names it; it was not called.
        FileError: the file is no cache.pkl, or a remote file cannot be read.
        OSError: a local file cannot be read.
    """
    with _opened(path) as file:
        bounded = BoundedFile(file)
        unpickler = PlainUnpickler(bounded, path, _stand_ins(bounded.size), "no corpus is made of")
        return _checked_corpus(unpickler.load(), bounded.size)


def _opened(path: str) -> BinaryIO:
    """Opens a local file. Reads all bytes of a remote one: `BoundedFile` seeks in the file, to find its size."""
    if not is_remote(path):
        return open(path, "rb")
    with tf.io.gfile.GFile(path, "rb") as file:
        return io.BytesIO(file.read())


def _checked_corpus(unpickled: Any, size: int) -> CachedCorpus:
    """Returns the corpus in the object of a pickle of `size` bytes. Raises ValueError if the object is no corpus."""
    corpus = unpickled.attributes if isinstance(unpickled, Named) else {}
    vocab = corpus.get("vocab")
    vocab = vocab.attributes if isinstance(vocab, Named) else {}
    symbols = texts_of(vocab.get("idx2sym"))
    dataset = corpus.get("dataset")
    cutoffs = corpus.get("cutoffs")
    lower_case = vocab.get("lower_case")
    if is_text(dataset) and len(dataset) > MAX_NAME:
        raise ValueError(f"dataset must have at most {MAX_NAME} characters, got {shown(dataset)}")
    if cutoffs is not None and not are_sizes(cutoffs, len(symbols)):
        raise ValueError(f"cutoffs must be integers from 0 to the {len(symbols)} symbols, got {shown(cutoffs)}")
    arrays = {split: corpus[split] for split in SPLITS if isinstance(corpus.get(split), _Array)}
    n_token = sum(array.length() for array in arrays.values())
    if n_token > size:  # several splits share bytes of the file, and each would become an int64 array
        raise ValueError(f"{n_token} tokens in a file of {size} bytes")
    return CachedCorpus(
        symbols=symbols,
        dataset=text(dataset) if is_text(dataset) else None,
        cutoffs=None if cutoffs is None else list(cutoffs[1:-1]),
        lower_case=lower_case if type(lower_case) is bool else None,
        splits={split: array.tokens() for split, array in arrays.items()},
    )


# ------------------------------------------------------------------------------------------------------- stand-ins


class _Dtype(StandIn):
    """Stands for `numpy.dtype`. Keeps the name and the byte order."""

    def __init__(self, name: str | bytes, *_):
        self.name = _short_text("the name of a dtype", name)
        self.order = "="

    def set_state(self, state: Any) -> None:
        """Takes the byte order from the state, `(version, byte order, ...)`."""
        if type(state) is not tuple or len(state) < 2:
            raise ValueError(f"the state of a dtype must be a tuple, got {shown(state)}")
        self.order = _short_text("the byte order of a dtype", state[1])

    def as_numpy(self) -> np.dtype:
        """The dtype of an integer, in its byte order."""
        return np.dtype(self.name).newbyteorder(self.order if self.order in ("<", ">") else "=")


class _Array(StandIn):
    """Stands for `numpy.ndarray`. The file can set any attributes, so `length` and `tokens` check them."""

    shape: Any = None
    dtype: Any = None
    data: Any = None

    def set_state(self, state: Any) -> None:
        """Takes the state, `(version, shape, dtype, whether the order is Fortran's, bytes)`."""
        if type(state) is not tuple or len(state) != 5:
            raise ValueError(f"the state of an array must be 5 values, got {shown(state)}")
        _, self.shape, self.dtype, _, self.data = state

    def length(self) -> int:
        """The number of tokens. Raises ValueError unless this is a 1-D integer array whose data has the right size."""
        shape = self.shape
        dtype = self.dtype.name if isinstance(self.dtype, _Dtype) else None
        if not are_sizes(shape, 2**62) or len(shape) != 1 or dtype is None or not re.fullmatch(INTEGER, dtype):
            raise ValueError(f"tokens must be a 1-D integer array, got {dtype}, its shape {shown(shape)}")
        if type(self.data) is not bytes or len(self.data) != shape[0] * int(dtype[1]):
            raise ValueError(f"{shape[0]} tokens of {dtype} in {shown(self.data)}")
        return shape[0]

    def tokens(self) -> np.ndarray:
        """The tokens, int64 `[n]`. Raises ValueError as `length` does."""
        length = self.length()
        return np.frombuffer(self.data, self.dtype.as_numpy(), length).astype(np.int64, copy=False)


def _scalar(dtype: Any, data: Any) -> int | None:
    """Stands for NumPy's `scalar`, which makes a number: an int, or `None` if the dtype is no integer."""
    is_integer = isinstance(dtype, _Dtype) and re.fullmatch(INTEGER, dtype.name)
    return int(np.frombuffer(data, dtype.as_numpy(), 1)[0]) if is_integer else None


def _from_buffer(data: Any, dtype: Any, shape: Any, *_: Any) -> _Array:
    """Stands for NumPy's `_frombuffer`, which makes an array in protocol 5. Its last argument is the order."""
    array = _Array()
    array.set_state((1, shape, dtype, False, data))  # version and order have no effect: tokens are 1-D
    return array


def _stand_ins(size: int) -> dict[tuple[str, str], Any]:
    """The stand-ins for a file of `size` bytes: `{(module, name): stand-in}`, by the names in the pickle."""
    encoded = 0  # characters that `encode` has encoded so far

    def encode(characters, encoding):
        """Stands for `_codecs.encode`, which Python 3 calls in protocol 2 to make bytes from text.

        Raises ValueError if the calls of one file encode more characters than the file has bytes.
        """
        nonlocal encoded
        if type(characters) is not str or not is_text(encoding) or text(encoding) != "latin1":
            raise ValueError(f"encoding must be latin1, got {shown(encoding)} for {shown(characters)}")
        encoded += len(characters)
        if encoded > size:
            raise ValueError(f"{encoded} bytes of arrays in a file of {size}")
        return characters.encode("latin1")

    known = {
        ("collections", "Counter"): unneeded,  # the symbols are in a list, too
        ("collections", "OrderedDict"): unneeded,
        ("numpy", "ndarray"): unneeded,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): encode,
    }
    for module in ("data_utils", "vocabulary", "__main__"):
        known[module, "Corpus"] = known[module, "Vocab"] = Named
    for module in ("numpy.core", "numpy._core"):
        known[f"{module}.multiarray", "_reconstruct"] = lambda *_: _Array()
        known[f"{module}.multiarray", "scalar"] = _scalar
        known[f"{module}.numeric", "_frombuffer"] = _from_buffer
    for module, builtins in (("copy_reg", "__builtin__"), ("copyreg", "builtins")):
        known[module, "_reconstructor"] = instance
        known[builtins, "object"] = unneeded
    return known


def _short_text(what: str, value: Any) -> str:
    """Returns `value` as str. Raises ValueError unless it is text no longer than `MAX_NAME`. The error names `what`."""
    if not is_text(value) or len(value) > MAX_NAME:
        raise ValueError(f"{what} must be a text of at most {MAX_NAME} characters, got {shown(value)}")
    return text(value)
