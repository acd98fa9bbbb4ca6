"""Reads cache.pkl, the original's corpus file, without running anything in it.

A pickle is a program: it names functions of any module and calls them. For the few names that a corpus is made of,
this reader substitutes stand-ins that only hold data. It refuses every other name.

Such a program can also fill the memory with a few bytes. So what it makes is bounded by the size of its file:

    place in the memo      the memo is a dictionary, not an array of that length
    length of a string     at most that of the file
    small objects          one for every 8 bytes of the file
    copies                 only the bytes of arrays are copied, together as many as the file has
    messages               show 200 characters of a text, and of a list or tuple only the length
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import re
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from txl_tf.data.datasets import SPLITS
from txl_tf.files import is_remote

MAX_MARKS = 100  # lists, tuples and dictionaries that are open at a time; a corpus needs fewer than 10
MAX_NAME = 100  # characters of a dataset's or dtype's name
OBJECTS = 10_000  # small objects of any file, before those for every 8 bytes
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
            bounded = _BoundedFile(file)
            return _plain(_CorpusUnpickler(bounded, path).load(), bounded.size)
        except RefusedError:
            raise
        except Exception as error:  # of any kind, where the bytes are no pickle or no corpus
            message = f"{path} cannot be read as the original's cache.pkl: {_described(error)}"
    raise ValueError(message)  # here, without the error, whose own message may be as long as the file


def _plain(corpus: Any, size: int) -> CachedCorpus:
    """The corpus in a file of `size` bytes."""
    corpus = _attributes(corpus)
    vocab = _attributes(corpus.get("vocab"))
    symbols = _symbols(vocab.get("idx2sym"))
    dataset, lower_case, cutoffs = corpus.get("dataset"), vocab.get("lower_case"), corpus.get("cutoffs")
    if type(dataset) in (str, bytes) and len(dataset) > MAX_NAME:
        raise ValueError(f"dataset must have at most {MAX_NAME} characters, got {_shown(dataset)}")
    if cutoffs is not None and not _are_sizes(cutoffs, len(symbols)):
        raise ValueError(f"cutoffs must be integers from 0 to the {len(symbols)} symbols, got {_shown(cutoffs)}")
    arrays = {split: corpus[split] for split in SPLITS if isinstance(corpus.get(split), _Array)}
    n_token = sum(array.length() for array in arrays.values())
    if n_token > size:  # several splits in the same bytes, which would become int64 each
        raise ValueError(f"{n_token} tokens in a file of {size} bytes")
    return CachedCorpus(
        symbols=symbols,
        dataset=_text(dataset) if type(dataset) in (str, bytes) else None,
        cutoffs=None if cutoffs is None else list(cutoffs[1:-1]),
        lower_case=lower_case if type(lower_case) is bool else None,
        splits={split: array.tokens() for split, array in arrays.items()},
    )


def _symbols(symbols: Any) -> list[str]:
    if type(symbols) is not list or not all(type(symbol) in (str, bytes) for symbol in symbols):
        raise ValueError("there is no corpus with a vocabulary (vocab.idx2sym) in it")
    _check_unique(symbols)  # before they are decoded: the same bytes many times would be as many texts
    symbols = list(map(_text, symbols))
    _check_unique(symbols)
    return symbols


def _check_unique(symbols: list) -> None:
    seen = set()
    for i, symbol in enumerate(symbols):
        if symbol in seen:
            raise ValueError(f"vocab.idx2sym holds {_shown(symbol)} twice, the second time at {i}")
        seen.add(symbol)


def _are_sizes(values: Any, most: int) -> bool:
    """Whether `values` is a list or tuple of integers from 0 to `most`."""
    return type(values) in (list, tuple) and all(type(value) is int and 0 <= value <= most for value in values)


# ------------------------------------------------------------------------------------------------- the file's program


class _BoundedFile:
    """A file of which no more is asked for than it has: a read of n bytes first makes room for them."""

    def __init__(self, file: BinaryIO):
        self.size = file.seek(0, os.SEEK_END)
        file.seek(0)
        self._read = file.read
        self.readline = file.readline

    def read(self, n: int) -> bytes:
        if n > self.size:
            raise ValueError(f"a string of {n} bytes in a file of {self.size}")
        return self._read(n)


class _CorpusUnpickler(pickle._Unpickler):
    """Python's own unpickler in Python, for the operations that a corpus needs. The one in C has an array as memo."""

    def __init__(self, file: _BoundedFile, path: str):
        super().__init__(file, encoding="bytes")  # str of Python 2
        self._path = path
        self._known = _stand_ins(file.size)
        self._size = file.size
        self._objects = 0

    def find_class(self, module: str, name: str) -> Any:
        """A pickle gets every class and function here: a stand-in of `self._known`, never something importable."""
        if (module, name) not in self._known:
            named = f"{_cut(module)}.{_cut(name)}"
            raise RefusedError(
                f"{self._path} is refused: it names {named}, which no corpus is made of. Nothing of it was run"
            )
        return self._known[module, name]

    def count_object(self) -> None:
        self._objects += 1
        most = OBJECTS + self._size // 8
        if self._objects > most:
            raise ValueError(f"more than {most} objects in a file of {self._size} bytes")

    def load_mark(self) -> None:
        if len(self.metastack) >= MAX_MARKS:
            raise ValueError(f"more than {MAX_MARKS} lists, tuples and dictionaries in one another")
        super().load_mark()

    def load_bytearray8(self) -> None:
        """Arrays in protocol 5. Python's method first makes as many bytes as it is told."""
        self.append(self.read(int.from_bytes(self.read(8), "little")))

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _set_items(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        _set_items(self.stack[-1], items)

    def load_dict(self) -> None:
        items, made = self.pop_mark(), {}
        _set_items(made, items)
        self.append(made)

    def load_build(self) -> None:
        """Hands a stand-in its state. Python's method copies it, and sets attributes of classes too."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _StandIn):
            raise ValueError(f"attributes of {_shown(self.stack[-1])}")
        self.stack[-1].set_state(state)


def _set_items(target: Any, items: list) -> None:
    if isinstance(target, _Dict):
        return
    if type(target) is not dict or not all(type(key) in (str, bytes) for key in items[::2]):
        raise ValueError("the keys of a dictionary must be text")  # the hash of tuples of tuples may take for ever
    target.update(zip(items[::2], items[1::2], strict=True))


def _dispatch() -> dict[int, Callable]:
    """The method of every operation. Those that a corpus does without are refused: sets, extensions and others."""

    def refused(code):
        def refuse(unpickler):
            raise ValueError(f"the operation {code:#04x} is none that a corpus needs")

        return refuse

    def counted(load):
        return lambda unpickler: (unpickler.count_object(), load(unpickler))

    plain = """PROTO FRAME NONE NEWFALSE NEWTRUE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING
        BINSTRING SHORT_BINSTRING BINBYTES BINBYTES8 SHORT_BINBYTES UNICODE BINUNICODE BINUNICODE8 SHORT_BINUNICODE
        BYTEARRAY8 EMPTY_TUPLE GLOBAL STACK_GLOBAL POP POP_MARK DUP MARK STOP GET BINGET LONG_BINGET BINPUT APPEND
        APPENDS SETITEM SETITEMS BUILD"""
    small = """TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST EMPTY_DICT DICT INST OBJ NEWOBJ REDUCE PUT LONG_BINPUT
        MEMOIZE"""
    own = {load.__name__: load for load in vars(_CorpusUnpickler).values() if callable(load)}
    dispatch = {code: refused(code) for code in range(256)}
    for name in (plain + " " + small).split():
        (code,) = getattr(pickle, name)
        load = pickle._Unpickler.dispatch[code]
        load = own.get(load.__name__, load)
        dispatch[code] = counted(load) if name in small.split() else load
    return dispatch


_CorpusUnpickler.dispatch = _dispatch()


# ------------------------------------------------------------------------------------------------------- stand-ins


class _StandIn:
    def set_state(self, state: Any) -> None:
        """Takes what the operation BUILD hands over."""


class _Instance(_StandIn):
    """A `Corpus` or `Vocab`: only attributes."""

    attributes: Any = None

    def set_state(self, state: Any) -> None:
        self.attributes = state


class _Dict(_StandIn):
    """A `Counter` or `OrderedDict`, of which nothing is kept: the symbols are in a list too."""

    def __init__(self, *_):
        pass


class _Dtype(_StandIn):
    def __init__(self, name: str | bytes, *_):
        self.name = _short_text("the name of a dtype", name)
        self.order = "="

    def set_state(self, state: Any) -> None:
        if type(state) is not tuple or len(state) < 2:
            raise ValueError(f"the state of a dtype must be a tuple, got {_shown(state)}")
        self.order = _short_text("the byte order of a dtype", state[1])


class _Array(_StandIn):
    shape: Any = None
    dtype: Any = None
    data: Any = None

    def set_state(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise ValueError(f"the state of an array must be 5 values, got {_shown(state)}")
        _, self.shape, self.dtype, _, self.data = state

    def length(self) -> int:
        """Number of tokens."""
        shape, dtype = self.shape, self.dtype.name if isinstance(self.dtype, _Dtype) else None
        if not _are_sizes(shape, 2**62) or len(shape) != 1 or not re.fullmatch(INTEGER, dtype or ""):
            raise ValueError(f"tokens must be a 1-D integer array, got {dtype}, its shape {_shown(shape)}")
        if type(self.data) is not bytes or len(self.data) != shape[0] * int(dtype[1]):
            raise ValueError(f"{shape[0]} tokens of {dtype} in {_shown(self.data)}")
        return shape[0]

    def tokens(self) -> np.ndarray:
        """int64 `[n]`."""
        order = self.dtype.order if self.dtype.order in ("<", ">") else "="
        dtype = np.dtype(self.dtype.name).newbyteorder(order)
        return np.frombuffer(self.data, dtype, self.length()).astype(np.int64, copy=False)


def _stand_ins(size: int) -> dict[tuple[str, str], Any]:
    """`{(module, name): stand-in}`, new for each file, which may encode as many characters as it has bytes."""
    bases = (_Instance, _Dict, _Dtype, _Array, object, object)  # the last two are named but never made
    Instance, Dict, Dtype, Array, Ndarray, Object = (type(base.__name__, (base,), {}) for base in bases)
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
        if cls is not Instance:
            raise ValueError(f"an instance of {_shown(cls)}")
        return Instance()

    def encode(text, encoding):
        """Bytes of Python 3 in protocol 2."""
        nonlocal encoded
        if type(text) is not str or type(encoding) not in (str, bytes) or encoding not in ("latin1", b"latin1"):
            raise ValueError(f"encoding must be latin1, got {_shown(encoding)} for {_shown(text)}")
        encoded += len(text)
        if encoded > size:
            raise ValueError(f"{encoded} bytes of arrays in a file of {size}")
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
    attributes = instance.attributes if isinstance(instance, _Instance) else {}
    return {_text(name): value for name, value in attributes.items()} if type(attributes) is dict else {}


def _text(value: str | bytes) -> str:
    """A str of Python 3, or of Python 2: UTF-8 bytes."""
    return value.decode("utf-8", "backslashreplace") if type(value) is bytes else value


def _short_text(what: str, value: Any) -> str:
    if type(value) not in (str, bytes) or len(value) > MAX_NAME:
        raise ValueError(f"{what} must be at most {MAX_NAME} characters, got {_shown(value)}")
    return _text(value)


# ------------------------------------------------------------------------------------- values of the file in messages


def _cut(text: str | bytes, quote: str = "") -> str:
    """The first 200 characters of `text`, escaped, and how many there are if that is not all."""
    shown = repr(text[:200]).removeprefix("b")[1:-1]
    is_all = len(text) <= 200 and len(shown) <= 200
    return f"{quote}{shown[:200]}{quote}" + ("" if is_all else f"... ({len(text)} characters)")


def _shown(value: Any) -> str:
    """`value` for a message: text and numbers cut short, of anything else the type and the length."""
    if type(value) in (str, bytes):
        return _cut(value, "'")
    if type(value) in (int, float, bool, type(None)):
        return str(value) if type(value) is not int or value.bit_length() < 200 else f"{value.bit_length()} bits"
    if type(value) in (list, tuple, dict):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"


def _described(error: Exception) -> str:
    """The kind and the message of an error. The error itself may hold all that was read, and so its `repr`."""
    message = error.args[0] if error.args and type(error.args[0]) is str else ""
    if isinstance(error, UnicodeError) and len(error.args) == 5:
        message = f"{message} cannot be decoded: {error.args[4]}"
    return f"{type(error).__name__}: {message[:500]}" if message else type(error).__name__
