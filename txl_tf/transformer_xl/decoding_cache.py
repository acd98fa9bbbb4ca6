"""The decoding cache of Transformer-XL: it reads a prompt as one segment or in pieces, then one token at a time."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.schema import keywords_of, takes_keyword
from txl_tf.transformer_xl.cache import aligned, cached_forward, initial_state, precompute, resized, whole_segments
from txl_tf.transformer_xl.inference import writable_copy


class DecodingCache:
    """Base class of decoding caches. A subclass defines `initial_state`, `read_prompt`, `read` and `read_token`.

    Args:
        lm: the language model whose `outputs` are computed.
        static_shapes: whether `read_prompt` and `read_token` are for XLA.
    """

    def __init__(self, lm: Any, static_shapes: bool = False) -> None:
        self.lm = lm
        self.network = lm.network
        self.static_shapes = static_shapes

    @property
    def context_len(self) -> int:
        """The number of tokens in a window, with absolute positions."""
        return self.lm.context_len

    def precompute(self) -> Any:
        """Values for `read_token` that depend only on the weights."""
        return ()

    def aligned(self, state: Any) -> Any:
        """The same state in a form in which rows of several states can be joined."""
        return state


def padded_left(prompt: Tensor, lengths: Tensor) -> Any:
    """Prompts, int32 `[B, n]`, with their padding on the left instead of on the right, so that all end together."""
    n = shape_of(prompt)[1]
    shifted: Any = tf.gather(prompt, (tf.range(n) - (n - lengths)[:, None]) % n, batch_dims=1)
    shifted.set_shape(prompt.shape)
    return shifted


class RingCache(DecodingCache):
    """The decoding cache of Transformer-XL. It reads every segment with the memory of the text before it."""

    def precompute(self) -> Any:
        return precompute(self.network)

    def initial_state(self, batch_size: Size) -> Any:
        """The state before a text."""
        return initial_state(self.network, batch_size)

    def aligned(self, state: Any) -> Any:
        return aligned(state)

    def read_prompt(self, prompt: Tensor, lengths: Tensor, segment: int | None = None) -> tuple[Any, Any]:
        """Reads the prompts, each from the beginning of a text.

        Args:
            prompt: int32 `[B, n]`.
            lengths: int32 `[B]`, the number of tokens in each row; padding follows them.
            segment: the number of tokens in a piece. A longer prompt is read in pieces, each with the memory of the
                piece before it. Pieces are counted from the end of a row and only the first may be shorter, so the
                results of a row do not depend on the other rows. `None`: a prompt is one segment.

        Returns:
            `(hidden, state)`: `[B, E]`, the model's `outputs` for the last token of each row, and a state that
            `read_token` may write into.
        """
        network = self.network
        static_shapes = self.static_shapes
        batch, n = shape_of(prompt)
        prompt = padded_left(prompt, lengths)  # the first new token of every row goes to the same slot
        max_segment = segment or (whole_segments(network.mem_len, n) if static_shapes else n)
        weights = precompute(network, max_segment)

        def read_piece(tokens: Tensor, lengths: Tensor, state: Any) -> tuple[Any, Any]:
            """See `in_pieces`."""
            hidden, state = cached_forward(
                network, weights, tokens, state, lengths, static_shapes=static_shapes, call=self.lm.outputs
            )
            return hidden[:, -1], state

        state = initial_state(network, batch, max_segment, first_slot=0 if static_shapes else network.mem_len)
        if segment is None:
            hidden, state = read_piece(prompt, lengths, state)
        else:
            hidden, state = in_pieces(read_piece, prompt, lengths, segment, state)
        state = resized(network, state)
        return hidden, state if static_shapes else writable_copy(state)

    def read(self, tokens: Tensor, state: Any) -> tuple[Any, Any]:
        """Reads `tokens`, int32 `[B, n]`.

        Returns:
            `(hidden, state)`: `[B, n, E]`, and a state that `read_token` may write into.
        """
        n: Any = tf.shape(tokens)[1]
        state = resized(self.network, state, n)
        hidden, state = cached_forward(self.network, precompute(self.network, n), tokens, state, call=self.lm.outputs)
        return hidden, writable_copy(resized(self.network, state))

    def read_token(self, weights: Any, token: Tensor, state: Any) -> tuple[Any, Any]:
        """Reads one token for each row, int32 `[B]`. The `weights` are the result of `precompute`.

        Afterwards, use only the returned state: without `static_shapes`, the given one is overwritten.

        Returns:
            `(hidden, state)`: `[B, E]`, and the state for the next token.
        """
        hidden, state = cached_forward(
            self.network,
            weights,
            token[:, None],
            state,
            in_place=not self.static_shapes,  # XLA cannot write in place
            static_shapes=self.static_shapes,
            call=self.lm.outputs,
        )
        return hidden[:, 0], state


def in_pieces(
    read_piece: Callable[..., Any], prompt: Tensor, lengths: Tensor, segment: int, state: Any
) -> tuple[Any, Any]:
    """Reads prompts in pieces of `segment` tokens, in a loop.

    Args:
        read_piece: function of tokens, int32 `[B, segment]`, of the number of the last of these tokens that belong to
            each row, int32 `[B]`, and of the state before them. Returns the output for the last token, `[B, E]`, and
            the state after it.
        prompt: int32 `[B, n]`, with padding on the left.
        lengths: int32 `[B]`, the number of tokens in each row.
        segment: int.
        state: the state before a text. Its shapes do not change.

    Returns:
        `(output, state)` after the last tokens.
    """
    batch, n = shape_of(prompt)
    pieces = (n + segment - 1) // segment
    whole = tf.pad(prompt, [[0, 0], [pieces * segment - n, 0]])

    def read(i: Any, output: Tensor, state: Any) -> tuple[Any, Any, Any]:
        """Reads piece i. Returns its output in place of the given one, which is not used."""
        tokens: Any = tf.slice(whole, [0, i * segment], [batch, segment])
        tokens = tf.ensure_shape(tokens, [prompt.shape[0], segment])
        own = tf.clip_by_value(lengths - (pieces - 1 - i) * segment, 0, segment)
        return i + 1, *read_piece(tokens, own, state)

    # The first piece is read outside of the loop, because only its output shows the shapes that the loop needs.
    # `prompt` takes the place of an output.
    first = read(0, prompt, state)
    _, output, state = tf.while_loop(lambda i, *_: i < pieces, read, first, parallel_iterations=1)
    return output, state


class HiddenStateCache(DecodingCache):
    """Replaces `RingCache` for a model whose keys and values cannot be cached. The memory is hidden states.

    Its layers project the whole memory again for every token.

    The state is a tuple with the memory of every layer.
    """

    def initial_state(self, batch_size: Size) -> Any:
        """The state before a text."""
        return tuple(self.lm.first_mems(batch_size))

    def read_prompt(self, prompt: Tensor, lengths: Tensor, segment: int | None = None) -> Any:
        """Reads the prompts, each from the beginning of a text. Arguments and results: see `RingCache.read_prompt`.

        If the network takes a `padding_mask`, and the model has no call of its own, one call reads all prompts.
        Otherwise, a call reads each prompt.

        Raises:
            ParameterError: `segment` or static shapes are requested, but one call cannot read all prompts.
        """
        batch, n = shape_of(prompt)
        mems = list(self.initial_state(batch))
        call = self.lm.network.call
        # With static shapes, the call must name the argument: Keras allows no tensor next to a bool in **kwargs.
        takes_mask = "padding_mask" in keywords_of(call) or (
            takes_keyword(call, "padding_mask") and not self.static_shapes
        )
        takes_mask = takes_mask and not self.lm.has_own_call
        if segment is not None:
            if not takes_mask:
                allowed = "None for a call without padding_mask"
                raise ParameterError("segment", segment, allowed)
            return in_pieces(self._read_piece, padded_left(prompt, lengths), lengths, segment, tuple(mems))
        if takes_mask:
            index: Any = tf.range(n)
            mask = index < lengths[:, None]
            outputs, mems = self.lm.outputs(prompt, mems, static_shapes=self.static_shapes, padding_mask=mask)
            return tf.gather(outputs, lengths - 1, batch_dims=1), tuple(mems)
        if self.static_shapes:
            allowed = "False for a call without padding_mask, which prompts of unequal length need"
            raise ParameterError("static_shapes", True, allowed)

        @tf.autograph.experimental.do_not_convert  # eager `map_fn` would convert all that it calls
        def read_row(b: Any) -> tuple[Any, Any]:
            """Reads the prompt of row b. Returns the output for its last token, and the row's memory."""
            outputs, new_mems = self.lm.outputs(prompt[b : b + 1, : lengths[b]], [mem[b : b + 1] for mem in mems])
            return outputs[0, -1], tuple(mem[0] for mem in new_mems)

        no_outputs = self.lm.no_outputs(1)  # has the width and the dtype of the outputs
        specs = (
            tf.TensorSpec([no_outputs.shape[2]], no_outputs.dtype),
            tuple(tf.TensorSpec(mem.shape[1:], mem.dtype) for mem in mems),
        )
        return tf.map_fn(read_row, tf.range(batch), fn_output_signature=specs, parallel_iterations=1)

    def _read_piece(self, tokens: Tensor, own: Tensor, state: Any) -> tuple[Any, Any]:
        """Reads the last `own[b]` tokens of each row b. Returns `(output, state)`, see `in_pieces`."""
        n = shape_of(tokens)[1]
        index: Any = tf.range(n)
        mask = index >= (n - own)[:, None]
        outputs, mems = self.lm.outputs(tokens, list(state), padding_mask=mask)
        return outputs[:, -1], tuple(mems)

    def read(self, tokens: Tensor, state: Any) -> tuple[Any, Any]:
        """Reads `tokens`, int32 `[B, n]`. Returns `(outputs, state)`: `[B, n, any]`, and the memory after them."""
        outputs, mems = self.lm.outputs(tokens, list(state))
        return outputs, tuple(mems)

    def read_token(self, weights: Any, token: Tensor, state: Any) -> tuple[Any, Any]:
        """Reads one token for each row. Arguments and results: see `RingCache.read_token`."""
        outputs, state = self.read(token[:, None], state)
        return outputs[:, 0], state
