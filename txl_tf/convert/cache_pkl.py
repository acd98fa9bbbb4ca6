"""Reads cache.pkl, the original's corpus file, as plain data. Nothing in it is run, see `pickles`.

Of its arrays only the bytes are copied, together as many as the file has.
"""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.convert.pickles import (
    BoundedFile,
    Instance,
    PlainUnpickler,
    RefusedError,
    StandIn,
    are_sizes,
    described,
    shown,
    text,
    texts_of,
)
from txl_tf.data.text.datasets import SPLITS
from txl_tf.files import is_remote

MAX_NAME = 100  # characters of a dataset's or dtype's name
INTEGER = "[iu][1248]"  # a dtype's name


@dataclasses.dataclass
class CachedCorpus:
    """What a cache.pkl holds, as plain data.

    Attributes:
        symbols: the vocabulary in id order.
        dataset: the original's `--dataset`, if known.
        cutoffs: first ids of the adaptive softmax's bins, without 0 and the number of symbols, if known.
        lower_case: whether text is lower-cased, if known.
        splits: `"train"`, `"valid"` or `"test"` -> int array `[n]`. The file of lm1b has no `"train"`.
    """

    symbols: list[str]
    dataset: str | None
    cutoffs: list[int] | None
    lower_case: bool | None
    splits: dict


def read_cache_pkl(path: str) -> CachedCorpus:
    """Reads a cache.pkl of Python 2 or 3 and of any pickle protocol as plain data.

    Its classes may be those of the modules `data_utils` and `vocabulary` or of a script (`__main__`).

    Raises:
        RefusedError: the file names another class or function. The error says which; it was not called.
        ValueError: the file is no cache.pkl.
        OSError: it cannot be read.
    """
    if not tf.io.gfile.exists(path):
        raise FileNotFoundError(f"there is no file {path}")
    if is_remote(path):
        with tf.io.gfile.GFile(path, "rb") as remote:
            file = io.BytesIO(remote.read())
    else:
        file = open(path, "rb")
    with file:
        try:
            bounded = BoundedFile(file)
            known = _stand_ins(bounded.size)
            return _plain(PlainUnpickler(bounded, path, known, "no corpus is made of").load(), bounded.size)
        except RefusedError:
            raise
        except Exception as error:  # of any kind, where the bytes are no pickle or no corpus
            message = f"{path} cannot be read as the original's cache.pkl: {described(error)}"
    raise ValueError(message)  # here, without the error, whose own message may be as long as the file


def _plain(corpus: Any, size: int) -> CachedCorpus:
    """The corpus in a file of `size` bytes."""
    corpus = corpus.attributes if isinstance(corpus, Instance) else {}
    vocab = corpus.get("vocab")
    vocab = vocab.attributes if isinstance(vocab, Instance) else {}
    symbols = texts_of(vocab.get("idx2sym"))
    dataset, lower_case, cutoffs = corpus.get("dataset"), vocab.get("lower_case"), corpus.get("cutoffs")
    if type(dataset) in (str, bytes) and len(dataset) > MAX_NAME:
        raise ValueError(f"dataset must have at most {MAX_NAME} characters, got {shown(dataset)}")
    if cutoffs is not None and not are_sizes(cutoffs, len(symbols)):
        raise ValueError(f"cutoffs must be integers from 0 to the {len(symbols)} symbols, got {shown(cutoffs)}")
    arrays = {split: corpus[split] for split in SPLITS if isinstance(corpus.get(split), _Array)}
    n_token = sum(array.length() for array in arrays.values())
    if n_token > size:  # several splits in the same bytes, which would become int64 each
        raise ValueError(f"{n_token} tokens in a file of {size} bytes")
    return CachedCorpus(
        symbols=symbols,
        dataset=text(dataset) if type(dataset) in (str, bytes) else None,
        cutoffs=None if cutoffs is None else list(cutoffs[1:-1]),
        lower_case=lower_case if type(lower_case) is bool else None,
        splits={split: array.tokens() for split, array in arrays.items()},
    )


# ------------------------------------------------------------------------------------------------------- stand-ins


class _Dict(StandIn):
    """A `Counter` or `OrderedDict`, of which nothing is kept: the symbols are in a list too."""

    def __init__(self, *_):
        pass


class _Dtype(StandIn):
    def __init__(self, name: str | bytes, *_):
        self.name = _short_text("the name of a dtype", name)
        self.order = "="

    def set_state(self, state: Any) -> None:
        if type(state) is not tuple or len(state) < 2:
            raise ValueError(f"the state of a dtype must be a tuple, got {shown(state)}")
        self.order = _short_text("the byte order of a dtype", state[1])


class _Array(StandIn):
    shape: Any = None
    dtype: Any = None
    data: Any = None

    def set_state(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise ValueError(f"the state of an array must be 5 values, got {shown(state)}")
        _, self.shape, self.dtype, _, self.data = state

    def length(self) -> int:
        """Number of tokens."""
        shape, dtype = self.shape, self.dtype.name if isinstance(self.dtype, _Dtype) else None
        if not are_sizes(shape, 2**62) or len(shape) != 1 or not re.fullmatch(INTEGER, dtype or ""):
            raise ValueError(f"tokens must be a 1-D integer array, got {dtype}, its shape {shown(shape)}")
        if type(self.data) is not bytes or len(self.data) != shape[0] * int(dtype[1]):
            raise ValueError(f"{shape[0]} tokens of {dtype} in {shown(self.data)}")
        return shape[0]

    def tokens(self) -> np.ndarray:
        """int64 `[n]`."""
        order = self.dtype.order if self.dtype.order in ("<", ">") else "="
        dtype = np.dtype(self.dtype.name).newbyteorder(order)
        return np.frombuffer(self.data, dtype, self.length()).astype(np.int64, copy=False)


def _stand_ins(size: int) -> dict[tuple[str, str], Any]:
    """`{(module, name): stand-in}`, new for each file, which may encode as many characters as it has bytes."""
    bases = (Instance, _Dict, _Dtype, _Array, object, object)  # the last two are named but never made
    Corpus, Dict, Dtype, Array, Ndarray, Object = (type(base.__name__, (base,), {}) for base in bases)
    encoded = 0

    def scalar(dtype, data):
        is_integer = isinstance(dtype, _Dtype) and re.fullmatch(INTEGER, dtype.name)
        return int(np.frombuffer(data, dtype.name, 1)[0]) if is_integer else None

    def from_buffer(data, dtype, shape, *_):
        array = Array()
        array.set_state((1, shape, dtype, False, data))
        return array

    def reconstruct_instance(cls, *_):
        """Instances in protocols 0 and 1."""
        if cls is not Corpus:
            raise ValueError(f"an instance of {shown(cls)}")
        return Corpus()

    def encode(characters, encoding):
        """Bytes of Python 3 in protocol 2."""
        nonlocal encoded
        if type(characters) is not str or type(encoding) not in (str, bytes) or encoding not in ("latin1", b"latin1"):
            raise ValueError(f"encoding must be latin1, got {shown(encoding)} for {shown(characters)}")
        encoded += len(characters)
        if encoded > size:
            raise ValueError(f"{encoded} bytes of arrays in a file of {size}")
        return characters.encode("latin1")

    known = {
        ("collections", "Counter"): Dict,
        ("collections", "OrderedDict"): Dict,
        ("numpy", "ndarray"): Ndarray,
        ("numpy", "dtype"): Dtype,
        ("_codecs", "encode"): encode,
    }
    for module in ("data_utils", "vocabulary", "__main__"):
        known[module, "Corpus"] = known[module, "Vocab"] = Corpus
    for module in ("numpy.core", "numpy._core"):
        known[f"{module}.multiarray", "_reconstruct"] = lambda *_: Array()
        known[f"{module}.multiarray", "scalar"] = scalar
        known[f"{module}.numeric", "_frombuffer"] = from_buffer
    for module, builtins in (("copy_reg", "__builtin__"), ("copyreg", "builtins")):
        known[module, "_reconstructor"] = reconstruct_instance
        known[builtins, "object"] = Object
    return known


def _short_text(what: str, value: Any) -> str:
    if type(value) not in (str, bytes) or len(value) > MAX_NAME:
        raise ValueError(f"{what} must be at most {MAX_NAME} characters, got {shown(value)}")
    return text(value)
