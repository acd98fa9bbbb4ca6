"""Where generated text ends: at a token, or with a stop string, which may begin in one token and end in another.

A stop string is compared unit by unit. A unit is a token at the levels of words, characters and bytes. It is a byte at
the level of subwords, whose tokens are several bytes long:

    stop string  "r:\\n"    as units      r  :  \\n
    tokens       "Use"     units so far  U  s  e
                 "r"                     U  s  e  r
                 ":\\n\\n"                 U  s  e  r  :  \\n  \\n        ended, with 1 unit too many

All of it is numbers, so that it runs wherever the model does.

Shapes:
    B: batch, or 1 for all rows alike      V: n_token      P: units of the longest token
    S: stop strings      L: units of the longest stop string
"""

from collections.abc import Iterable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from txl_tf.data.text_files import plain_text
from txl_tf.errors import ParameterError, brief
from txl_tf.language.sampling import check_integer

NONE = -1  # no unit
_CANNOT_SPELL = "the vocabulary of {} symbols cannot spell the stop string {!r}"
BEFORE = -2  # a unit of the prompt, which is no part of a stop string


class Stops(NamedTuple):
    """A stop token and stop strings, as tensors of int32."""

    token: tf.Tensor  # scalar: id that ends a row; -1 for none
    strings: tf.Tensor  # [B, S, L], units of stop strings, NONE before shorter ones
    units: tf.Tensor  # [V, P], units of tokens, NONE after shorter ones
    tail: tf.Tensor  # [B, L], the last units of the text, BEFORE where there are fewer new ones


def no_stops(n_token, token=-1):
    """`Stops` of rows that end nowhere, or at a token."""
    units, strings, tail = np.arange(n_token)[:, None], np.zeros([1, 0, 0]), np.zeros([1, 0])
    return Stops(*(tf.constant(part, tf.int32) for part in (token, strings, units, tail)))


def aligned(strings, lengths):
    """Rows `[..., L]` that begin with `lengths` `[...]` units, moved so that they end with them, NONE before."""
    most = keras.ops.shape(strings)[-1]
    column = tf.range(most) - (most - lengths)[..., None]
    moved = tf.gather(strings, tf.maximum(column, 0), batch_dims=len(strings.shape) - 1, axis=-1)
    return tf.where(column >= 0, moved, NONE)


def add_token(stops, token):
    """One more token, int32 `[B]`, at the end of every row.

    Returns:
        `(ended, excess, tail)`: bool `[B]`, whether a stop string is complete now; int32 `[B]`, how many units of the
        token come after it; and the next `tail`.
    """
    units = tf.gather(stops.units, token)  # [B, P]
    most, length = keras.ops.shape(units)[1], keras.ops.shape(stops.tail)[1]
    count = tf.reduce_sum(tf.cast(units != NONE, tf.int32), -1)
    recent = tf.concat([stops.tail, units], 1)
    place, column = tf.range(most), tf.range(length)
    # The last L units up to each place of the token: [B, P, L]
    endings = tf.gather(recent, place[:, None] + 1 + column, axis=1)
    strings = stops.strings[:, None]  # [B, 1, S, L]
    equal = tf.reduce_all((endings[:, :, None] == strings) | (strings == NONE), -1)
    complete = tf.reduce_any(equal & tf.reduce_any(strings != NONE, -1), -1) & (place < count[:, None])  # [B, P]
    first = tf.reduce_min(tf.where(complete, place, most), 1)
    ended = tf.reduce_any(complete, 1)
    tail = tf.gather(recent, count[:, None] + column, batch_dims=1)
    return ended, tf.where(ended, count - first - 1, 0), tail


def token_units(vocab):
    """The units of every token: int32 array `[V, P]`, filled up with NONE."""
    if vocab.level != "subword":
        return np.arange(len(vocab), dtype=np.int32)[:, None]
    rows = [list(data) or [256 + i] for i, data in enumerate(vocab.token_bytes)]  # a symbol that is no text is a unit
    return filled_up(rows)


def filled_up(rows):
    """Lists of units as an int32 array, NONE after shorter ones."""
    table = np.full([len(rows), max(map(len, rows), default=0)], NONE, np.int32)
    for row, units in zip(table, rows, strict=True):
        row[: len(units)] = units
    return table


def spell(vocab, text):
    """The units of a stop string: list of int.

    A symbol of the vocabulary such as `<eos>` stands for itself. At level "word", a text is the words that it splits
    into, and a newline is `eos` (`bos`, too, where text follows).

    Raises:
        ValueError: the vocabulary cannot spell it, or it is empty.
    """
    if not isinstance(text, str) or not text:
        raise ValueError(f"stop_strings must be strings that are not empty, got {brief(text)}")
    if vocab.level == "subword":
        return _spell_bytes(vocab, text)
    if text in vocab.ids:
        return [vocab.ids[text]]
    message = _CANNOT_SPELL.format(len(vocab), text)
    try:
        units = vocab.encode(text).tolist()[bool(vocab.bos) :]  # it need not begin a line
    except ValueError as error:
        raise ValueError(message) from error
    if not units or units.count(vocab.ids.get(vocab.unk)) != text.split().count(vocab.unk):
        raise ValueError(message)
    return units


def _spell_bytes(vocab, text):
    data, read = vocab.token_bytes, plain_text(text) if vocab.has_plain_text else text
    if text in vocab.ids and not data[vocab.ids[text]]:
        return [256 + vocab.ids[text]]
    single = {token[0] for token in data if len(token) == 1}
    for character in read:
        spelled = character.encode("utf-8", "surrogateescape")
        if not single.issuperset(spelled) and not any(spelled in token for token in data):
            raise ValueError(_CANNOT_SPELL.format(len(vocab), text))
    if not read:
        raise ValueError(_CANNOT_SPELL.format(len(vocab), text))
    return list(read.encode("utf-8", "surrogateescape"))


def check_stops(n_token, stop_token=None, stop_strings=None, stop_at_newline=False, vocab=None):
    """Checks a stop token and stop strings, see `generate`, and makes `Stops` of them, before any new token."""
    if stop_token is not None:
        check_integer("stop_token", stop_token, 0, n_token - 1)
    if stop_strings is not None and (isinstance(stop_strings, str) or not isinstance(stop_strings, Iterable)):
        raise ParameterError("stop_strings", stop_strings, "a list of strings")
    texts = [*(stop_strings or ()), *(["\n"] if stop_at_newline else [])]
    token = -1 if stop_token is None else stop_token
    if not texts:
        return no_stops(n_token, token)
    if vocab is None:
        raise ValueError(f"vocab must be the model's vocabulary where text ends at {texts}, got None")
    if len(vocab) != n_token:
        raise ValueError(f"vocab must hold the {n_token} symbols of the model, got {len(vocab)}")
    rows = [spell(vocab, text) for text in texts]
    lengths = np.array([len(row) for row in rows])
    strings = aligned(tf.constant(filled_up(rows)), tf.constant(lengths, tf.int32))[None]
    tail = tf.fill([1, lengths.max()], BEFORE)
    return Stops(tf.constant(token, tf.int32), strings, tf.constant(token_units(vocab)), tail)


def spec_of(stops):
    """`tf.TensorSpec`s for any stop strings, of as many rows and tokens."""
    return Stops(*(tf.TensorSpec([*part.shape[:1], *[None] * (part.shape.rank - 1)], tf.int32) for part in stops))


def with_room(stops):
    """`Stops` of few shapes, for graphs that have static ones: strings and their units get room, if there are any."""
    number, length = stops.strings.shape[1:]
    if number == 0:
        return stops
    more, longer = max(4, 1 << (number - 1).bit_length()) - number, max(16, 1 << (length - 1).bit_length()) - length
    strings = tf.pad(stops.strings, [[0, 0], [0, more], [longer, 0]], constant_values=NONE)
    return stops._replace(strings=strings, tail=tf.pad(stops.tail, [[0, 0], [longer, 0]], constant_values=BEFORE))


def tail_of(stops, tokens):
    """The `tail` `[1, L]` of a text whose new tokens so far are the ids `tokens`, a list."""
    length = stops.strings.shape[2]
    units = stops.units.numpy()[tokens[-length:] if length else []]
    units = [BEFORE] * length + units[units != NONE].tolist()
    return tf.constant(units[len(units) - length :], tf.int32)[None]
