"""Reads cache.pkl, the original's corpus file, without running anything in it.

A pickle is a program: it names functions of any module and calls them. For the few names that a corpus is made of,
this reader substitutes stand-ins that only hold data. It refuses every other name.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import re
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from txl_tf.data.datasets import SPLITS
from txl_tf.files import is_remote


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


class RefusedError(ValueError):
    """A pickle names something that no corpus is made of."""


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
            return _plain(_Unpickler(file, path).load())
        except RefusedError:
            raise
        except Exception as error:  # of any kind, where the bytes are no pickle or no corpus
            raise ValueError(f"{path} cannot be read as the original's cache.pkl: {error!r}") from error


def _plain(corpus: Any) -> CachedCorpus:
    corpus = _attributes(corpus)
    vocab = _attributes(corpus.get("vocab"))
    symbols = vocab.get("idx2sym")
    if type(symbols) is not list or not all(type(symbol) in (str, bytes) for symbol in symbols):
        raise ValueError("there is no corpus with a vocabulary (vocab.idx2sym) in it")
    dataset, lower_case, cutoffs = corpus.get("dataset"), vocab.get("lower_case"), corpus.get("cutoffs")
    return CachedCorpus(
        symbols=[_text(symbol) for symbol in symbols],
        dataset=_text(dataset) if type(dataset) in (str, bytes) else None,
        cutoffs=None if cutoffs is None else [int(cutoff) for cutoff in cutoffs[1:-1]],
        lower_case=lower_case if type(lower_case) is bool else None,
        splits={split: corpus[split].tokens() for split in SPLITS if isinstance(corpus.get(split), _Array)},
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, path: str):
        super().__init__(file, encoding="bytes")  # str of Python 2
        self._path = path
        self._known = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        """A pickle gets every class and function here: a stand-in of `self._known`, never something importable."""
        if (module, name) not in self._known:
            raise RefusedError(
                f"{self._path} is refused: it names {module}.{name}, which no corpus is made of. Nothing of it was run"
            )
        return self._known[module, name]


class _Instance:
    """A `Corpus` or `Vocab`: only attributes."""


class _Dtype:
    def __init__(self, name: str | bytes, *_):
        self.name = _text(name)
        self.order = "="

    def __setstate__(self, state: tuple) -> None:
        self.order = _text(state[1])


class _Array:
    def __setstate__(self, state: tuple) -> None:
        _, self.shape, self.dtype, _, self.data = state

    def tokens(self) -> np.ndarray:
        """int64 `[n]`."""
        if len(self.shape) != 1 or not re.fullmatch("[iu][1248]", self.dtype.name):
            raise ValueError(f"tokens must be a 1-D integer array, got {self.dtype.name} of shape {self.shape}")
        dtype = np.dtype(self.dtype.name).newbyteorder(self.dtype.order if self.dtype.order in "<>" else "=")
        return np.frombuffer(self.data, dtype, self.shape[0]).astype(np.int64, copy=False)


def _stand_ins() -> dict[tuple[str, str], Any]:
    """`{(module, name): stand-in}`, new for each file: a pickle can set attributes, even those of a class."""
    bases = (_Instance, dict, _Dtype, _Array, object, object)  # the last two are named but never made
    Instance, Dict, Dtype, Array, Ndarray, Object = (type(base.__name__, (base,), {}) for base in bases)

    def scalar(dtype, data):
        return int(np.frombuffer(data, dtype.name)[0]) if re.fullmatch("[iu][1248]", dtype.name) else None

    def from_buffer(data, dtype, shape, *_):
        array = Array()
        array.__setstate__((1, shape, dtype, False, data))
        return array

    def reconstruct_instance(cls, *_):
        """Instances in protocols 0 and 1."""
        if cls is not Instance:
            raise ValueError(f"an instance of {cls}")
        return Instance()

    def encode(text, encoding):
        """Bytes of Python 3 in protocol 2."""
        if _text(encoding) != "latin1":
            raise ValueError(f"encoding must be latin1, got {encoding!r}")
        return text.encode("latin1")

    known = {
        ("collections", "Counter"): Dict,
        ("collections", "OrderedDict"): Dict,
        ("numpy", "ndarray"): Ndarray,
        ("numpy", "dtype"): Dtype,
        ("_codecs", "encode"): encode,
    }
    for module in ("data_utils", "vocabulary", "__main__"):
        known[module, "Corpus"] = known[module, "Vocab"] = Instance
    for module in ("numpy.core", "numpy._core"):
        known[f"{module}.multiarray", "_reconstruct"] = lambda *_: Array()
        known[f"{module}.multiarray", "scalar"] = scalar
        known[f"{module}.numeric", "_frombuffer"] = from_buffer
    for module, builtins in (("copy_reg", "__builtin__"), ("copyreg", "builtins")):
        known[module, "_reconstructor"] = reconstruct_instance
        known[builtins, "object"] = Object
    return known


def _attributes(instance: Any) -> dict:
    """The attributes of a stand-in; Python 2 wrote their names as bytes."""
    return {_text(name): value for name, value in vars(instance).items()} if isinstance(instance, _Instance) else {}


def _text(value: Any) -> Any:
    """A str of Python 3, or of Python 2: UTF-8 bytes."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
