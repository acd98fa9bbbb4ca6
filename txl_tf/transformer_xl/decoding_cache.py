"""The decoding cache of Transformer-XL: a prompt is read as one segment, then token by token."""

import keras
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.schema import keywords_of, takes_keyword
from txl_tf.transformer_xl.cache import (
    cached_forward,
    initial_state,
    precompute,
    resized,
    whole_segments,
)
from txl_tf.transformer_xl.inference import writable_copy


class MemoryCache:
    """The decoding cache of Transformer-XL: every segment is read with the memory of the text before it.

    Args:
        network: `TransformerXL`.
        static_shapes: whether `read_prompt` and `read_token` are for XLA.
        model: see `cached_forward`.
    """

    def __init__(self, network, static_shapes=False, model=None):
        self.network, self.model = network, model
        self.static_shapes = static_shapes

    def precompute(self):
        """Values that `read_token` needs and that depend on the weights alone."""
        return precompute(self.network)

    def initial_state(self, batch_size):
        """The state before a text."""
        return initial_state(self.network, batch_size)

    def read_prompt(self, prompt, lengths):
        """Reads the first `lengths[b]` tokens of each row of `prompt`, int32 `[B, n]` and `[B]`, from the start.

        Returns:
            `(hidden, state)`: `[B, E]` after each row's last token, and a state that `read_token` may write into.
        """
        network, static_shapes, (batch, n) = self.network, self.static_shapes, keras.ops.shape(prompt)
        # All prompts end together, so that a row's first new token is everybody's.
        shifted = tf.gather(prompt, (tf.range(n) - (n - lengths)[:, None]) % n, batch_dims=1)
        shifted.set_shape(prompt.shape)
        max_segment = whole_segments(network.mem_len, n) if static_shapes else n
        state, weights = initial_state(network, batch, max_segment), precompute(network, max_segment)
        hidden, state = cached_forward(network, weights, shifted, state, lengths, False, static_shapes, self.model)
        state = resized(network, state)
        return hidden[:, -1], state if static_shapes else writable_copy(state)

    def read(self, tokens, state):
        """Reads `tokens`, int32 `[B, n]`: hidden states `[B, n, E]`, and a state that `read_token` may write into."""
        n = tf.shape(tokens)[1]
        state = resized(self.network, state, n)
        hidden, state = cached_forward(self.network, precompute(self.network, n), tokens, state, model=self.model)
        return hidden, writable_copy(resized(self.network, state))

    def read_token(self, weights, token, state):
        """Reads one token a row, int32 `[B]`, and writes into `state`: `[B, E]`, and the state for the next one."""
        in_place = not self.static_shapes
        hidden, state = cached_forward(
            self.network, weights, token[:, None], state, None, in_place, self.static_shapes, self.model
        )
        return hidden[:, 0], state


class HiddenStateCache:
    """The decoding cache of a model that cannot be cached: its memory is hidden states, which every token projects.

    It has the functions of `MemoryCache`. The state is the list of memories.

    Args:
        lm: `TransformerXLLM`.
        static_shapes: see `MemoryCache`.
    """

    def __init__(self, lm, static_shapes=False):
        self.lm, self.static_shapes = lm, static_shapes

    def precompute(self):
        """Nothing is known before."""
        return ()

    def initial_state(self, batch_size):
        """The state before a text."""
        return tuple(self.lm.initial_mems(batch_size))

    def read_prompt(self, prompt, lengths):
        """As `MemoryCache.read_prompt`."""
        batch, n = keras.ops.shape(prompt)
        mems = list(self.initial_state(batch))
        call = self.lm.network.call
        takes_mask = "padding_mask" in keywords_of(call) or (
            takes_keyword(call, "padding_mask") and not self.static_shapes
        )
        if takes_mask and not self.lm.has_own_call:
            mask = tf.range(n) < lengths[:, None]
            outputs, mems = self.lm.outputs(prompt, mems, static_shapes=self.static_shapes, padding_mask=mask)
            return tf.gather(outputs, lengths - 1, batch_dims=1), tuple(mems)
        if self.static_shapes:
            allowed = "False for a call without padding_mask, as prompts of unequal length need"
            raise ParameterError("static_shapes", True, allowed)

        def read_row(b):
            outputs, new_mems = self.lm.outputs(prompt[b : b + 1, : lengths[b]], [mem[b : b + 1] for mem in mems])
            return outputs[0, -1], tuple(mem[0] for mem in new_mems)

        nothing = self.lm.no_outputs(1)
        specs = (
            tf.TensorSpec([nothing.shape[2]], nothing.dtype),
            tuple(tf.TensorSpec(m.shape[1:], m.dtype) for m in mems),
        )
        return tf.map_fn(read_row, tf.range(batch), fn_output_signature=specs, parallel_iterations=1)

    def read(self, tokens, state):
        """As `MemoryCache.read`."""
        outputs, mems = self.lm.outputs(tokens, list(state))
        return outputs, tuple(mems)

    def read_token(self, weights, token, state):
        """As `MemoryCache.read_token`."""
        outputs, state = self.read(token[:, None], state)
        return outputs[:, 0], state
