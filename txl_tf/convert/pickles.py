"""Reads pickles without running anything in them.

A pickle is a program: it names functions of any module and calls them. For the names that a kind of file is made of,
this reader substitutes stand-ins that only hold data. It refuses every other name.

A pickle of a few bytes can also fill the memory. So there are limits, and some depend on the size of the file:

    index in the memo      any, because the memo is a dictionary, not an array of that length
    length of a string     at most the length of the file
    small objects          at most 10,000, and one more for every 8 bytes of the file
    error messages         show 200 characters of a text and 10 numbers of a list or tuple, else only the length
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, TypeGuard

import tensorflow as tf

from txl_tf.errors import ParameterError, named
from txl_tf.files import is_remote

MAX_MARKS = 100  # lists, tuples and dictionaries that are open at a time; files of our kinds need fewer than 20
MAX_NAMES = 1000  # classes that a file may name in the `packages` of `PlainUnpickler`
MAX_ARGS = 100  # arguments of a call: many calls with the same long arguments would take long
OBJECTS = 10_000  # small objects that every file may make, in addition to one for every 8 bytes
KEY_LIMIT = 1 << 31  # an integer that is a key of a dictionary must be smaller


class FileError(ParameterError):
    """A file is not of its kind. The message names the file.

    Attributes:
        name, value: "path", and the path.
        allowed: what the file should be.
    """


class RefusedError(FileError):
    """A pickle names a class or function that files of its kind do not need."""


def raises_file_error(kind: str, remote: bool = False) -> Callable:
    """Decorator of a function that reads the file `path`. Every error except OSError becomes a `FileError`.

    Before the call, it checks that the file exists.

    Args:
        kind: what the file should be, for messages.
        remote: whether the file may be remote.
    """

    def decorate(read):
        @functools.wraps(read)
        def reading(path: str | os.PathLike, *args):
            """Checks that the file exists, and reads it. The message of a `FileError` names the file."""
            path = os.fspath(path)
            if is_remote(path) and not remote:
                message = f"{named(path)} must be a local file, whose parts can be mapped into memory: copy it first"
                raise FileError("path", path, "a local file", message)
            if not (tf.io.gfile.exists(path) if is_remote(path) else os.path.isfile(path)):
                raise FileNotFoundError(f"there is no file {named(path)}")
            try:
                return read(path, *args)
            except (FileError, OSError):
                raise
            except Exception as error:  # bytes of another kind of file may cause any error
                message = f"{path} cannot be read as {kind}: {described(error)}"
            # After the `except` block, because the other error, whose message may be as long as the file, would be the
            # context of this one.
            raise FileError("path", path, kind, message)

        return reading

    return decorate


class BoundedFile:
    """A file whose `read` raises ValueError for more bytes than the file has: Python would reserve memory for them."""

    def __init__(self, file: BinaryIO):
        position = file.tell()
        self.size = file.seek(0, os.SEEK_END)
        file.seek(position)
        self._read = file.read
        self.readline = file.readline

    def read(self, n: int) -> bytes:
        if n > self.size:
            raise ValueError(f"a string of {n} bytes in a file of {self.size}")
        return self._read(n)


class StandIn:
    """Stands for an object of another program. It ignores the state and the items that the pickle gives to it."""

    def set_state(self, state: Any) -> None:
        """Takes the state of the operation BUILD."""

    def set_items(self, items: list) -> None:
        """Takes a list in which keys and values alternate."""

    def extend(self, items: Iterable) -> None:
        """Takes further items of a list or set."""

    append = extend


class Named(StandIn):
    """Stands for an instance of a class: the name of the class, and the state that the pickle gives it."""

    state: Any = None

    def __init__(self, name: str = ""):
        self.name = name

    def set_state(self, state: Any) -> None:
        self.state = state

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes, if the state is a dictionary; otherwise an empty dictionary."""
        return items_with_text_keys(self.state)  # not kept: many instances may have one state


def unneeded(*_: Any) -> StandIn:
    """Stands for a class or function whose result is not needed."""
    return StandIn()


def instance(kind: Any, *_: Any) -> Any:
    """Stands for `copyreg._reconstructor`, which makes an instance of a class in protocols 0 and 1.

    `kind` is the stand-in of the class.
    """
    if not callable(kind):
        raise ValueError(f"an instance of {shown(kind)}")
    return kind()


if TYPE_CHECKING:

    class _PythonUnpickler:
        """The parts of `pickle._Unpickler` that are used here. Python's stubs do not have them."""

        stack: list[Any]
        metastack: list[list[Any]]
        memo: dict[int, Any]
        dispatch: ClassVar[dict[int, Callable[[Any], Any]]]

        def __init__(self, file: Any, *, encoding: str = "ASCII") -> None: ...
        def load(self) -> Any: ...
        def load_mark(self) -> None: ...
        def pop_mark(self) -> list[Any]: ...
        def append(self, value: Any) -> None: ...
        def read(self, n: int) -> bytes: ...

else:
    _PythonUnpickler = pickle._Unpickler


class PlainUnpickler(_PythonUnpickler):
    """Python's unpickler, without the operations that plain data does not need.

    The base class is the unpickler in Python, because the one in C has an array as memo, of any length that a file
    asks for.

    Args:
        file: the file to read. Its size bounds what the pickle makes.
        path: the name of the file in error messages.
        known: `{(module, name): stand-in}` of the classes and functions that a file may name.
        refusal: end of the error message about any other name, such as "no corpus is made of".
        packages: packages of which a file may name every class. An instance becomes a `Named`.
    """

    def __init__(self, file: BoundedFile, path: str, known: dict, refusal: str, packages: Iterable[str] = ()):
        super().__init__(file, encoding="bytes")  # a str of Python 2 becomes bytes, see `text`
        self._path = path
        self._known = dict(known)
        self._refusal = refusal
        self._packages = frozenset(packages)
        self._n_known = len(known)
        self._size = file.size
        self._objects = 0

    def find_class(self, module: str, name: str) -> Any:
        """Returns the stand-in of a class or function.

        The pickle gets classes and functions only from this method, so never those of Python.

        Raises:
            RefusedError: the file must not name this class or function.
            ValueError: the file names more than `MAX_NAMES` classes of `packages`.
        """
        if (module, name) not in self._known:
            if module.partition(".")[0] not in self._packages:
                refused = f"{cut(module)}.{cut(name)}"
                message = f"{self._path} is refused: it names {refused}, which {self._refusal}. Nothing in it was run"
                raise RefusedError("path", self._path, "a file of plain data", message)
            if len(self._known) - self._n_known >= MAX_NAMES:
                raise ValueError(f"more than {MAX_NAMES} classes")
            self._known[module, name] = lambda *_: Named(name)
        return self._known[module, name]

    def count_object(self) -> None:
        """Counts one more object that the pickle makes. Raises ValueError if there are too many for the file's size."""
        self._objects += 1
        max_objects = OBJECTS + self._size // 8
        if self._objects > max_objects:
            raise ValueError(f"more than {max_objects} objects in a file of {self._size} bytes")

    # The methods of operations. `_dispatch` puts them in the place of Python's methods of the same names.

    def load_mark(self) -> None:
        if len(self.metastack) >= MAX_MARKS:
            raise ValueError(f"more than {MAX_MARKS} lists, tuples and dictionaries in one another")
        super().load_mark()

    def load_bytearray8(self) -> None:
        """Reads the bytes of an array in protocol 5. Python's method reserves memory for as many as the pickle says."""
        self.append(self.read(int.from_bytes(self.read(8), "little")))

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        set_items(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        set_items(self.stack[-1], items)

    def load_dict(self) -> None:
        """Makes a dictionary of the items since the last mark: the operation DICT."""
        items = self.pop_mark()
        dictionary: dict = {}
        set_items(dictionary, items)
        self.append(dictionary)

    def load_empty_set(self) -> None:
        """Makes a stand-in for a set, because to hash the elements of a set could take forever."""
        self.append(StandIn())

    def load_additems(self) -> None:
        items = self.pop_mark()
        self.stack[-1].extend(items)

    def load_reduce(self) -> None:
        """Calls a stand-in."""
        args = self.stack.pop()
        stand_in = self.stack.pop()
        if type(args) is not tuple or len(args) > MAX_ARGS:
            raise ValueError(f"the arguments of a call are {shown(args)}")
        self.append(stand_in(*args))

    def load_newobj(self) -> None:
        """Calls a stand-in. Python's method accepts only classes."""
        self.load_reduce()

    def load_build(self) -> None:
        """Gives a stand-in its state. Python's method copies the state, and also sets attributes of classes."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, StandIn):
            target.set_state(state)
        elif type(target) is not dict:  # a dict stands for an `OrderedDict`, whose attributes are ignored
            raise ValueError(f"attributes of {shown(target)}")


def set_items(target: Any, items: list) -> None:
    """Puts items into a dictionary or stand-in.

    Args:
        target: the dictionary or stand-in.
        items: list in which keys and values alternate.

    Raises:
        ValueError: `target` is something else, or a key of a dictionary is neither text nor a small integer.
    """
    if isinstance(target, StandIn):
        target.set_items(items)
    elif type(target) is not dict:
        raise ValueError(f"items of {shown(target)}")
    elif not all(map(is_key, items[::2])):
        raise ValueError("the keys of a dictionary must be text or small numbers")  # to hash others may take long
    else:
        target.update(zip(items[::2], items[1::2], strict=True))


def is_key(value: Any) -> bool:
    """Whether `value` can be a key of a dictionary: text or a small integer, which are hashed fast."""
    return is_text(value) or (type(value) is int and abs(value) < KEY_LIMIT)


def _dispatch() -> dict[int, Callable]:
    """Returns `{code of an operation: its method}`. Operations that plain data does not need raise ValueError."""

    def refused(code):
        def refuse(unpickler):
            raise ValueError(f"the operation {code:#04x} is not one that plain data needs")

        return refuse

    def counted(load):
        return lambda unpickler: (unpickler.count_object(), load(unpickler))

    # Operations that are not counted: each makes at most one number or string, some ten times as large as its bytes.
    uncounted = (
        "PROTO", "FRAME", "NONE", "NEWFALSE", "NEWTRUE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1",
        "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "BINBYTES8",
        "SHORT_BINBYTES", "UNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE", "BYTEARRAY8", "EMPTY_TUPLE",
        "GLOBAL", "STACK_GLOBAL", "POP", "POP_MARK", "DUP", "MARK", "STOP", "GET", "BINGET", "LONG_BINGET", "BINPUT",
        "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD",
    )  # fmt: skip
    # Operations of a few bytes that make a larger object.
    counted_operations = (
        "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "EMPTY_DICT", "DICT", "EMPTY_SET", "INST", "OBJ",
        "NEWOBJ", "REDUCE", "PUT", "LONG_BINPUT", "MEMOIZE", "BINPERSID",
    )  # fmt: skip
    own_methods = {method.__name__: method for method in vars(PlainUnpickler).values() if callable(method)}
    dispatch: dict[int, Callable[[Any], Any]] = {code: refused(code) for code in range(256)}
    for name in (*uncounted, *counted_operations):
        (code,) = getattr(pickle, name)
        load = _PythonUnpickler.dispatch[code]
        load = own_methods.get(load.__name__, load)
        dispatch[code] = counted(load) if name in counted_operations else load
    return dispatch


PlainUnpickler.dispatch = _dispatch()


# ------------------------------------------------------------------------------------- values of the file in messages


def is_text(value: Any) -> TypeGuard[str | bytes]:
    return type(value) in (str, bytes)


def text(value: str | bytes) -> str:
    """Returns text as str. Bytes are a str of Python 2 in UTF-8; bytes that are not UTF-8 become escapes."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def cut(value: str | bytes, quote: str = "") -> str:
    """At most 200 characters of a text, escaped and between `quote`s. If that is not all, the text's length follows."""
    escaped = repr(value[:200]).removeprefix("b")[1:-1]
    is_all = len(value) <= 200 and len(escaped) <= 200
    return f"{quote}{escaped[:200]}{quote}" + ("" if is_all else f"... ({len(value)} characters)")


def shown(value: Any) -> str:
    """`value` for a message: text, a number or a short list of numbers; for anything else, the type and the length."""
    if is_text(value):
        return cut(value, "'")
    if type(value) in (int, float, bool, type(None)):
        return str(value) if type(value) is not int or value.bit_length() < 200 else f"{value.bit_length()} bits"
    if type(value) in (list, tuple) and len(value) <= 10 and all(map(_is_small, value)):
        return str(list(value))
    if type(value) in (list, tuple, dict):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"


def _is_small(value: Any) -> bool:
    return type(value) in (float, bool) or (type(value) is int and value.bit_length() < 64)


def items_with_text_keys(value: Any) -> dict[str, Any]:
    """The items whose keys are text, which Python 2 wrote as bytes; `{}` if `value` is no dictionary."""
    items = value.items() if isinstance(value, dict) else ()
    return {text(key): item for key, item in items if is_text(key)}


def described(error: Exception) -> str:
    """The type and the message of an error, cut short. The `repr` of an error may contain the whole file."""
    message = error.args[0] if error.args and type(error.args[0]) is str else ""
    if isinstance(error, ParameterError):
        message = str(error)
    if isinstance(error, UnicodeError) and len(error.args) == 5:
        message = f"{message} cannot be decoded: {error.args[4]}"
    return f"{type(error).__name__}: {message[:500]}" if message else type(error).__name__


def are_sizes(values: Any, largest: int) -> bool:
    """Whether `values` is a list or tuple of integers from 0 to `largest`."""
    return type(values) in (list, tuple) and all(type(value) is int and 0 <= value <= largest for value in values)


def texts_of(symbols: Any) -> list[str]:
    """Returns the symbols of a vocabulary, `idx2sym` of a pickled object, as str.

    Raises:
        ValueError: `symbols` is not a list of texts, or a text occurs twice.
    """
    if type(symbols) is not list or not all(map(is_text, symbols)):
        raise ValueError("there is no corpus with a vocabulary (vocab.idx2sym) in it")
    words: dict[str, None] = {}
    # One by one: a pickle can refer many times to the same long bytes. Decoding them all would fill the memory.
    for i, symbol in enumerate(symbols):
        word = text(symbol)
        if word in words:
            raise ValueError(f"vocab.idx2sym holds {shown(symbol)} twice, the second time at {i}")
        words[word] = None
    return list(words)
