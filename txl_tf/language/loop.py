"""The loop of decoding: adds a token to every row, until all rows have ended.

A decoder is a state and a function `step`, which calls the model:

    token, state = step(i, stopped, state)      # the tokens number `i` of all rows, int32 [B]

Shapes:
    B: batch      room: largest number of new tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.language.stopping import Stops, add_token


class NewTokens(NamedTuple):
    """The new tokens of every row, and the state of decoding after the last step."""

    tokens: Tensor  # int32 [B, room], padded with `filler`
    lengths: Tensor  # int32 [B], the number of new tokens
    ended: Tensor  # bool [B], true if a stop string ended the row
    excess: Tensor  # int32 [B], units of the last token after the stop string; 0 without one
    state: Any  # after the last step of all rows: a row that ended sooner has read other tokens in its later steps


def decode_until_ended(
    step: Callable, state: Any, room: Size, limits: Tensor, stops: Stops, filler: int | Tensor,
    state_shapes: Any = None,
) -> NewTokens:  # fmt: skip
    """Calls `step` until every row has ended.

    Args:
        step: function of the number of the token, of bool `[B]`, true for rows that have ended, and of the state that
            the previous step returned. Its result is `(token, state)`. Tokens of rows that have ended are ignored.
        state: the state before the first step, nested tensors.
        room: the largest number of new tokens.
        limits: int32 `[B]`, the largest number of new tokens of each row, at most `room`.
        stops: `Stops`, which can end a row sooner.
        filler: token that pads the rows.
        state_shapes: static shapes of the state that hold in every step; by default those before the first step.

    Returns:
        `NewTokens`. The last token of a row may be the stop token, or the token that completes a stop string.
    """
    (batch,) = shape_of(limits)
    zeros = tf.zeros_like(limits)
    rows = tf.range(batch)
    has_strings = tf.reduce_any(stops.strings >= 0)

    def add_if_stop_strings(token, tail):
        """The result of `add_token`. Without stop strings, it ends no row and does not change `tail`."""
        no_end = zeros > 0, zeros, tail
        if stops.strings.shape[1] == 0:  # no stop strings, as the static shape says
            return no_end
        return tf.cond(has_strings, lambda: add_token(stops._replace(tail=tail), token), lambda: no_end)

    def body(i, stopped, tail, new):
        """Adds token i to all texts, and notes which texts it ends."""
        token, state = step(i, stopped, new.state)
        token = tf.where(stopped, filler, token)
        completes, excess, tail = add_if_stop_strings(token, tail)
        new = NewTokens(
            with_column(new.tokens, rows, i, token),
            tf.where(stopped, new.lengths, i + 1),
            tf.where(stopped, new.ended, completes),
            tf.where(stopped, new.excess, excess),
            state,
        )
        stopped |= completes | (token == stops.token) | (new.lengths >= limits)
        return i + 1, stopped, tail, new

    tail = tf.broadcast_to(stops.tail, [batch, shape_of(stops.tail)[1]])
    new = NewTokens(tf.fill([batch, room], filler), zeros, zeros > 0, zeros, state)
    loop_vars = tf.constant(0), zeros >= limits, tail, new
    shapes = None
    if state_shapes is not None:
        shapes = *static_shapes(loop_vars[:-1]), static_shapes(new)._replace(state=state_shapes)
    return tf.while_loop(
        lambda i, stopped, *_: ~tf.reduce_all(stopped), body, loop_vars, shape_invariants=shapes, parallel_iterations=1
    )[-1]


def static_shapes(tensors: Any) -> Any:
    """The static shapes of nested tensors."""
    return tf.nest.map_structure(lambda x: x.shape, tensors)


def where_rows(condition: Tensor, new: Any, old: Any) -> Any:
    """`new` in the rows where the condition, bool `[B]`, is true, else `old`: structures of tensors `[B, ...]`."""

    def choose(x, y):
        return tf.where(tf.reshape(condition, [-1] + [1] * (x.shape.rank - 1)), x, y)

    return tf.nest.map_structure(choose, new, old)


def with_column(table: Tensor, rows: Tensor, i: Tensor, column: Tensor) -> Tensor:
    """Replaces column `i` of `table` `[B, any]` with `column` `[B]`; `rows` is `tf.range(B)`."""
    return tf.tensor_scatter_nd_update(table, tf.stack([rows, tf.fill(tf.shape(rows), i)], -1), column)
