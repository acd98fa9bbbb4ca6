"""The decoding cache of Transformer-XL: it reads a prompt as one segment, and then one token at a time."""

from typing import Any

import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.schema import keywords_of, takes_keyword
from txl_tf.transformer_xl.cache import (
    aligned,
    cached_forward,
    initial_state,
    precompute,
    resized,
    whole_segments,
)
from txl_tf.transformer_xl.inference import writable_copy


class MemoryCache:
    """The decoding cache of Transformer-XL. It reads every segment with the memory of the text before it.

    Args:
        network: `TransformerXL`.
        static_shapes: whether `read_prompt` and `read_token` are for XLA.
        model: see `cached_forward`.
    """

    def __init__(self, network: Any, static_shapes: bool = False, model: Any = None) -> None:
        self.network = network
        self.model = model
        self.static_shapes = static_shapes

    def precompute(self) -> Any:
        """Values for `read_token` that depend only on the weights."""
        return precompute(self.network)

    def initial_state(self, batch_size: Size) -> Any:
        """The state before a text."""
        return initial_state(self.network, batch_size)

    def aligned(self, state: Any) -> Any:
        """The same state in a form in which rows of several states can be joined."""
        return aligned(state)

    def read_prompt(self, prompt: Tensor, lengths: Tensor) -> tuple[Any, Any]:
        """Reads the prompts, each from the beginning of a text.

        Args:
            prompt: int32 `[B, n]`.
            lengths: int32 `[B]`, the number of tokens in each row; padding follows them.

        Returns:
            `(hidden, state)`: `[B, E]` after each row's last token, and a state that `read_token` may write into.
        """
        network = self.network
        static_shapes = self.static_shapes
        batch, n = shape_of(prompt)
        # Move the padding to the left. Then all prompts end together, and the first new token of every row goes to the
        # same slot.
        shifted: Any = tf.gather(prompt, (tf.range(n) - (n - lengths)[:, None]) % n, batch_dims=1)
        shifted.set_shape(prompt.shape)
        max_segment = whole_segments(network.mem_len, n) if static_shapes else n
        state = initial_state(network, batch, max_segment)
        weights = precompute(network, max_segment)
        hidden, state = cached_forward(network, weights, shifted, state, lengths, False, static_shapes, self.model)
        state = resized(network, state)
        return hidden[:, -1], state if static_shapes else writable_copy(state)

    def read(self, tokens: Tensor, state: Any) -> tuple[Any, Any]:
        """Reads `tokens`, int32 `[B, n]`.

        Returns:
            `(hidden, state)`: `[B, n, E]`, and a state that `read_token` may write into.
        """
        n: Any = tf.shape(tokens)[1]
        state = resized(self.network, state, n)
        hidden, state = cached_forward(self.network, precompute(self.network, n), tokens, state, model=self.model)
        return hidden, writable_copy(resized(self.network, state))

    def read_token(self, weights: Any, token: Tensor, state: Any) -> tuple[Any, Any]:
        """Reads one token for each row, int32 `[B]`.

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
            model=self.model,
        )
        return hidden[:, 0], state


class HiddenStateCache:
    """Replaces `MemoryCache` for a model that cannot be cached. The memory is hidden states, projected for every token.

    It has the methods of `MemoryCache`. The state is a tuple with the memory of every layer.

    Args:
        lm: `TransformerXLLM`.
        static_shapes: see `MemoryCache`.
    """

    def __init__(self, lm: Any, static_shapes: bool = False) -> None:
        self.lm = lm
        self.static_shapes = static_shapes

    def precompute(self) -> Any:
        """Nothing can be computed before."""
        return ()

    def initial_state(self, batch_size: Size) -> Any:
        """The state before a text."""
        return tuple(self.lm.initial_mems(batch_size))

    def aligned(self, state: Any) -> Any:
        """As `MemoryCache.aligned`."""
        return state

    def read_prompt(self, prompt: Tensor, lengths: Tensor) -> Any:
        """As `MemoryCache.read_prompt`."""
        batch, n = shape_of(prompt)
        mems = list(self.initial_state(batch))
        call = self.lm.network.call
        takes_mask = "padding_mask" in keywords_of(call) or (
            takes_keyword(call, "padding_mask") and not self.static_shapes
        )
        if takes_mask and not self.lm.has_own_call:
            index: Any = tf.range(n)
            mask = index < lengths[:, None]
            outputs, mems = self.lm.outputs(prompt, mems, static_shapes=self.static_shapes, padding_mask=mask)
            return tf.gather(outputs, lengths - 1, batch_dims=1), tuple(mems)
        if self.static_shapes:
            allowed = "False for a call without padding_mask, which prompts of unequal length need"
            raise ParameterError("static_shapes", True, allowed)

        def read_row(b: Any) -> tuple[Any, Any]:
            outputs, new_mems = self.lm.outputs(prompt[b : b + 1, : lengths[b]], [mem[b : b + 1] for mem in mems])
            return outputs[0, -1], tuple(mem[0] for mem in new_mems)

        nothing = self.lm.no_outputs(1)  # has the shape and dtype of the outputs
        specs = (
            tf.TensorSpec([nothing.shape[2]], nothing.dtype),
            tuple(tf.TensorSpec(m.shape[1:], m.dtype) for m in mems),
        )
        return tf.map_fn(read_row, tf.range(batch), fn_output_signature=specs, parallel_iterations=1)

    def read(self, tokens: Tensor, state: Any) -> tuple[Any, Any]:
        """As `MemoryCache.read`."""
        outputs, mems = self.lm.outputs(tokens, list(state))
        return outputs, tuple(mems)

    def read_token(self, weights: Any, token: Tensor, state: Any) -> tuple[Any, Any]:
        """As `MemoryCache.read_token`."""
        outputs, state = self.read(token[:, None], state)
        return outputs[:, 0], state
