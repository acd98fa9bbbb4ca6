"""Where generated text ends: at a token, or with a stop string, which may begin in one token and end in another.

A stop string is compared unit by unit. A unit is a token at the levels of words, characters and bytes. It is a byte at
the level of subwords, whose tokens are several bytes long:

    stop string  "r:\\n"    as units      r  :  \\n
    tokens       "Use"     units so far  U  s  e
                 "r"                     U  s  e  r
                 ":\\n\\n"                 U  s  e  r  :  \\n  \\n        ended, with 1 unit too many

Units are numbers, so that the comparison is part of the model's graph.

Shapes:
    B: batch, or 1 if all rows have the same stops      V: n_token      P: units of the longest token
    S: number of stop strings      L: units of the longest stop string
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from txl_tf.calls import check_true_or_false
from txl_tf.config.checks import check_integer
from txl_tf.data.batching import next_power_of_two
from txl_tf.data.text_files import plain_text
from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Tensor, shape_of

NONE = -1  # padding of units
BEFORE = -2  # a unit of the prompt, which cannot be part of a stop string


class Stops(NamedTuple):
    """A stop token and stop strings, as tensors of int32."""

    token: Any  # scalar: id that ends a row; -1 for none
    strings: Any  # [B, S, L], units of stop strings, padded with NONE at the beginning
    units: Any  # [V, P], units of tokens, padded with NONE at the end
    tail: Any  # [B, L], the last units of the text; BEFORE for units of the prompt


def no_stops(n_token: int, token: int = -1) -> Stops:
    """`Stops` without stop strings: rows end at a token, or only at their limits."""
    units = tf.range(n_token)[:, None]
    return Stops(tf.constant(token, tf.int32), tf.zeros([1, 0, 0], tf.int32), units, tf.zeros([1, 0], tf.int32))


def aligned(strings: Tensor, lengths: Tensor) -> Tensor:
    """Moves the first `lengths` units of each row to the end of the row, and puts NONE before them.

    Args:
        strings: int32 `[..., L]`, rows of units.
        lengths: int32 `[...]`.
    """
    width = shape_of(strings)[-1]
    column = tf.range(width) - (width - lengths)[..., None]
    moved = tf.gather(strings, tf.maximum(column, 0), batch_dims=len(strings.shape) - 1, axis=-1)
    return tf.where(column >= 0, moved, NONE)


def add_token(stops: Stops, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a token, int32 `[B]`, to the end of every row.

    Returns:
        `(ended, excess, tail)`: bool `[B]`, true if the token completes a stop string; int32 `[B]`, the number of units
        of the token after the stop string; and the next `tail`.
    """
    units = tf.gather(stops.units, token)  # [B, P]
    max_units = shape_of(units)[1]
    length = shape_of(stops.tail)[1]
    count = tf.reduce_sum(tf.cast(units != NONE, tf.int32), -1)  # units of the token
    recent = tf.concat([stops.tail, units], 1)
    position = tf.range(max_units)
    column = tf.range(length)
    # The last L units of the text that ends at each unit of the token: [B, P, L]
    endings = tf.gather(recent, position[:, None] + 1 + column, axis=1)
    strings = stops.strings[:, None]  # [B, 1, S, L]
    equal = tf.reduce_all((endings[:, :, None] == strings) | (strings == NONE), -1)  # [B, P, S]
    not_empty = tf.reduce_any(strings != NONE, -1)
    complete = tf.reduce_any(equal & not_empty, -1) & (position < count[:, None])  # [B, P]
    first = tf.reduce_min(tf.where(complete, position, max_units), 1)  # the unit that completes a stop string
    ended = tf.reduce_any(complete, 1)
    tail = tf.gather(recent, count[:, None] + column, batch_dims=1)
    return ended, tf.where(ended, count - first - 1, 0), tail


def token_units(vocab: Any) -> np.ndarray:
    """The units of every token: int32 array `[V, P]`, padded with NONE."""
    if vocab.level != "subword":
        return np.arange(len(vocab), dtype=np.int32)[:, None]
    # Bytes are the units 0 to 255; a special symbol is the unit 256 + its id.
    rows = [list(data) or [256 + i] for i, data in enumerate(vocab.token_bytes)]
    return keras.utils.pad_sequences(rows, padding="post", value=NONE)


def spell(vocab: Any, text: str) -> list[int]:
    """The units of a stop string.

    A symbol of the vocabulary such as `<eos>` stands for itself. At level "word", the units are the words of the text,
    and a newline is `eos`, or `eos` and `bos` if text follows.

    Raises:
        ParameterError: the text is empty or no string, or the vocabulary cannot spell it.
    """
    if not isinstance(text, str) or not text:
        raise ParameterError("stop_strings", text, "strings that are not empty")
    if vocab.level == "subword":
        return _spell_bytes(vocab, text)
    if text in vocab.ids:
        return [vocab.ids[text]]
    try:
        units = vocab.encode(text).tolist()[bool(vocab.bos) :]  # without `bos`: the string may be inside a line
    except ValueError as error:
        raise _cannot_spell(vocab, text) from error
    symbols = text.split() if vocab.level == "word" else list(text)
    if not units or units.count(vocab.ids.get(vocab.unk)) != symbols.count(vocab.unk):
        raise _cannot_spell(vocab, text)
    return units


def _cannot_spell(vocab: Any, text: str) -> ParameterError:
    """The error for a stop string that the vocabulary cannot spell."""
    message = f"the vocabulary of {len(vocab)} symbols cannot spell the stop string {text!r}"
    return ParameterError("stop_strings", text, "text that the vocabulary can spell", message)


def _spell_bytes(vocab: Any, text: str) -> list[int]:
    """The units of a stop string at the level of subwords: its bytes, or the unit of a special symbol.

    Raises ParameterError if no token has one of the characters, or the text becomes empty.
    """
    data = vocab.token_bytes
    read = plain_text(text) if vocab.has_plain_text else text
    try:
        read_bytes = read.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise _cannot_spell(vocab, text) from error
    if text in vocab.ids and not data[vocab.ids[text]]:
        return [256 + vocab.ids[text]]
    single = {token[0] for token in data if len(token) == 1}
    for character in read:
        spelled = character.encode("utf-8", "surrogateescape")
        if not single.issuperset(spelled) and not any(spelled in token for token in data):
            raise _cannot_spell(vocab, text)
    if not read:
        raise _cannot_spell(vocab, text)
    return list(read_bytes)


def token_of(vocab: Any, text: str) -> int | None:
    """The id of the one token that spells a stop string.

    Returns:
        `None` if the string has several tokens, or if another token contains it.

    Raises:
        ParameterError: the vocabulary cannot spell the string.
    """
    units = spell(vocab, text)
    if vocab.level != "subword":
        return units[0] if len(units) == 1 else None
    if units[0] > 255:
        return units[0] - 256
    data = bytes(units)
    having = [i for i, token in enumerate(vocab.token_bytes) if data in token]
    if any(vocab.token_bytes[i] != data for i in having):
        return None
    if len(having) > 1:  # a byte and a piece of the same text: the one that occurs in texts
        having = vocab.encode(text).tolist()
    return having[0] if len(having) == 1 else None


def check_stops(
    n_token: int, stop_token: int | None = None, stop_strings: Iterable[str] | None = None,
    stop_at_newline: bool = False, vocab: Any = None,
) -> Stops:  # fmt: skip
    """Checks a stop token and stop strings. Returns the initial `Stops`, for a text without a new token.

    Args:
        n_token: number of symbols of the model.
        stop_token, stop_strings, stop_at_newline: see `generate`.
        vocab: the model's vocabulary, which stop strings need.

    Raises:
        ParameterError: an argument is out of its range, `vocab` is missing or has another number of symbols, or it
            cannot spell a stop string.
    """
    if stop_token is not None:
        check_integer("stop_token", stop_token, 0, n_token - 1)
    check_stop_strings(stop_strings)
    check_true_or_false(stop_at_newline=stop_at_newline)
    texts = [*(stop_strings or ()), *(["\n"] if stop_at_newline else [])]
    token = -1 if stop_token is None else stop_token
    if vocab is None and texts:
        raise ParameterError("vocab", None, f"the model's vocabulary, which the stop strings {texts} need")
    if vocab is not None and not hasattr(vocab, "level"):
        raise ParameterError("vocab", vocab, "the model's vocabulary")
    if vocab is not None and len(vocab) != n_token:
        message = f"vocab must have the {n_token} symbols of the model, got {len(vocab)}"
        raise ParameterError("vocab", vocab, f"a vocabulary of the {n_token} symbols of the model", message)
    if not texts:
        return no_stops(n_token, token)
    strings: Any = keras.utils.pad_sequences([spell(vocab, text) for text in texts], value=NONE)  # padded on the left
    tail = tf.fill([1, strings.shape[1]], BEFORE)
    return Stops(tf.constant(token, tf.int32), tf.constant(strings[None]), tf.constant(token_units(vocab)), tail)


def check_stop_strings(stop_strings: Any) -> None:
    """Raises ParameterError if `stop_strings` is a single string, or is neither a list nor another iterable."""
    if stop_strings is not None and (isinstance(stop_strings, str) or not isinstance(stop_strings, Iterable)):
        raise ParameterError("stop_strings", stop_strings, "a list of strings")


def spec_of(stops: Stops) -> Stops:
    """A `tf.TensorSpec` for each tensor: any stop strings, for the same number of rows and tokens."""
    return Stops(*(tf.TensorSpec([*part.shape[:1], *[None] * (part.shape.rank - 1)], tf.int32) for part in stops))


def with_room(stops: Stops) -> Stops:
    """Pads the stop strings in number and length to powers of two, at least 4 and 16.

    So there are few shapes, and XLA compiles few graphs. Without stop strings, nothing changes.
    """
    number, length = stops.strings.shape[1:]
    if number == 0:
        return stops
    n_padding = next_power_of_two(number, 4) - number
    longer = next_power_of_two(length, 16) - length
    strings = tf.pad(stops.strings, [[0, 0], [0, n_padding], [longer, 0]], constant_values=NONE)
    return stops._replace(strings=strings, tail=tf.pad(stops.tail, [[0, 0], [longer, 0]], constant_values=BEFORE))


def tail_of(stops: Stops, tokens: list[int]) -> Tensor:
    """The `tail` of one text, int32 `[1, L]`, after these new tokens. BEFORE stands for the units before them."""
    length = stops.strings.shape[2]
    units = stops.units.numpy()[tokens[-length:] if length else []]
    units = [BEFORE] * length + units[units != NONE].tolist()
    return tf.constant(units[len(units) - length :], tf.int32)[None]
