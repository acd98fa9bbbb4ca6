"""The loop of decoding: one more token of every row, until all rows have ended.

A decoder is a state and a function `step`, which knows the model:

    token, state = step(i, stopped, state)      # the tokens `i` of all rows, int32 [B]

Shapes:
    B: batch      room: most new tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from txl_tf.language.stopping import Stops, add_token


class Written(NamedTuple):
    """The new tokens of every row, and the state of decoding after them."""

    tokens: tf.Tensor  # int32 [B, room], filled up with `filler`
    lengths: tf.Tensor  # int32 [B], how many there are
    ended: tf.Tensor  # bool [B], whether with a stop string
    excess: tf.Tensor  # int32 [B], units of the last token after the stop string
    state: Any


def write_tokens(
    step: Callable, state: Any, room: int | tf.Tensor, limits: tf.Tensor, stops: Stops, filler: int | tf.Tensor
) -> Written:
    """Calls `step` until every row has ended.

    Args:
        step: function of `(i, stopped, state)`: the number of the token, bool `[B]`, and what the step before returned.
            What it returns as the token of a row that has stopped does not count.
        state: of the first step, nested tensors.
        limits: int32 `[B]`: most tokens of each row, at most `room`.
        stops: `Stops`, which end a row sooner.
        filler: token that fills rows up after their last one.
    """
    (batch,) = keras.ops.shape(limits)
    zeros, rows = tf.zeros_like(limits), tf.range(batch)
    has_strings = tf.reduce_any(stops.strings >= 0)

    def ends(token, tail):
        """`add_token`, where there is a stop string."""
        nothing = zeros > 0, zeros, tail
        if stops.strings.shape[1] == 0:  # known to have none
            return nothing
        return tf.cond(has_strings, lambda: add_token(stops._replace(tail=tail), token), lambda: nothing)

    def body(i, stopped, tail, written):
        token, state = step(i, stopped, written.state)
        token = tf.where(stopped, filler, token)
        complete, after, tail = ends(token, tail)
        written = Written(
            with_column(written.tokens, rows, i, token),
            tf.where(stopped, written.lengths, i + 1),
            tf.where(stopped, written.ended, complete),
            tf.where(stopped, written.excess, after),
            state,
        )
        stopped |= complete | (token == stops.token) | (written.lengths >= limits)
        return i + 1, stopped, tail, written

    tail = tf.broadcast_to(stops.tail, [batch, keras.ops.shape(stops.tail)[1]])
    written = Written(tf.fill([batch, room], filler), zeros, zeros > 0, zeros, state)
    return tf.while_loop(
        lambda i, stopped, *_: ~tf.reduce_all(stopped), body, (0, zeros >= limits, tail, written), parallel_iterations=1
    )[-1]


def with_column(table: tf.Tensor, rows: tf.Tensor, i: tf.Tensor, column: tf.Tensor) -> tf.Tensor:
    """`table` `[B, any]` with `column` `[B]` in place `i` of its rows, `tf.range(B)`."""
    return tf.tensor_scatter_nd_update(table, tf.stack([rows, tf.fill(tf.shape(rows), i)], -1), column)
