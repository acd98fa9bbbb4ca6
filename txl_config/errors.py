"""The errors of the library. Their fields say which value of the caller is wrong, so that code can read it."""

from __future__ import annotations

import os
import re
import reprlib
from typing import Any, cast

MOST_CHARACTERS = 500  # of a message
# Control characters except newline and tab; separators of lines; characters that change the direction of text; and
# surrogates, by which `surrogateescape` represents bytes that are not UTF-8.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 200


def brief(value: Any) -> str:
    """Returns `repr(value)` for a message. Long lists and strings are cut, so it has at most 200 characters.

    `repr` escapes control characters in strings, so a value from an unknown source can be shown on a terminal.
    """
    try:
        return shortened(_brief.repr(value), 200)
    except ValueError:  # Python does not write an int of more than 4,300 digits
        return f"a {type(value).__name__} that is too long to print"


def shortened(message: str, max_characters: int = MOST_CHARACTERS) -> str:
    """Returns a message in at most `max_characters`: a longer message loses its middle.

    The end stays, because it often says what to do.
    """
    if len(message) <= max_characters:
        return message
    gap = f" ... ({len(message) - max_characters:,} characters and more are left out) ... "
    rest = max(max_characters - len(gap), 0)
    end = rest * 2 // 5
    return (message[: rest - end] + gap + message[len(message) - end :])[:max_characters]


def named(value: Any) -> str:
    """Returns a path, an address or another value of the user as text for a message.

    A text of more than 180 characters loses its middle.
    """
    path = cast("os.PathLike[str]", value)
    return shortened(os.fspath(path) if isinstance(value, os.PathLike) else str(value), 180)


def visible(text: str) -> str:
    r"""Returns text that is safe to show on a terminal: ESC -> `\x1b`. Newlines and tabs stay."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class ParameterError(ValueError):
    """A value that the caller gave cannot be used.

    ```python
    try:
        txl_tf.TransformerXLLM(n_token=10, n_layer=0, d_model=8, ...)
    except txl_tf.ParameterError as error:
        error.name, error.value, error.allowed      # "n_layer", 0, "at least 1"
    ```

    Args:
        name: the argument, attribute, method or key that has the value, as the caller writes it; or the file, perhaps
            with a line, that has the value.
        value: the value.
        allowed: the values that can be used: a list of choices, or text that can follow "must be".
        message: the whole message. By default "<name> must be <allowed>, got <value>".

    Attributes:
        name, value, allowed: as above, not shortened. `str(error)` shortens the message to 500 characters.
    """

    # Keras and AutoGraph replace an exception from a layer or a graph by a new exception that has only the message.
    # These two attributes keep the exception itself, with its fields.
    _keras_call_info_injected = True
    ag_pass_through = True

    def __init__(self, name: str, value: Any, allowed: Any, message: str | None = None) -> None:
        super().__init__(name, value, allowed, message)
        self.name = name
        self.value = value
        self.allowed = allowed
        choices = allowed if isinstance(allowed, str) else f"one of {', '.join(map(str, allowed))}"
        self._message = message or f"{name} must be {choices}, got {brief(value)}"

    def __str__(self) -> str:
        return shortened(self._message)


def located(error: ValueError, where: str) -> ParameterError:
    """Returns an error with the same fields and a message that begins with `where`, such as a file and a line.

    A ValueError that is no ParameterError has no fields. The new error then has `where` as its name.
    """
    message = f"{where}: {error}"
    if isinstance(error, ParameterError):
        return ParameterError(error.name, error.value, error.allowed, message)
    return ParameterError(where, None, "valid", message)


class FixedAttributeError(ParameterError, AttributeError):
    """The attribute of a model or layer cannot be changed any more. The message says what to do instead."""


class UnknownNameError(ParameterError, AttributeError):
    """A module does not have the name that was asked for. The message says what to write instead, where it is known.

    Attributes:
        name: the module and the name, such as `txl_tf.rel_shift`.
        value: the name alone.
        allowed: what to write instead, or the public names.
    """


class ArgumentTypeError(ParameterError, TypeError):
    """An argument has another type than the function takes."""


class UnknownArgumentError(ParameterError, TypeError):
    """A function was called with an argument that it does not have.

    Attributes:
        name, value: name and value of the unknown argument.
        allowed: list of the arguments that the function takes.
    """


class CallError(ParameterError, TypeError):
    """A function was called without an argument that it needs, or with too many by position.

    Attributes:
        name: name of the class or function.
        value: list of the arguments that were given by position.
        allowed: list of the arguments that the function takes.
    """


class UnsupportedError(ParameterError, NotImplementedError):
    """A method of Keras was called that the models of this library do not support.

    Attributes:
        name: name of the method.
        value: value of the argument that makes the call unsupported, or else the model.
        allowed: what to use instead.
    """
