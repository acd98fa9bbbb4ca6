"""What a layer of Transformer-XL attends to besides its segment.

In training that is a tensor of hidden states, which the call of a layer takes as `mems`. In inference it is an object
of a subclass of `Memory`, such as a ring of cached keys and values, which stands for all arguments of the call that
are about positions, masks and memory. A layer hands it on to its attention, and the attention asks it.

A layer that does anything else with it, such as to normalise the memory, cannot be computed from cached keys and
values. It raises `NotCacheable`, and the model is computed from hidden states, as in training.
"""

import keras
import tensorflow as tf

import txl_tf.kernels as ops
from txl_tf.equations import Attention
from txl_tf.nn.base import CachedMemory, NotCacheable, memories_by_name


class HiddenStates:
    """The memory of training: hidden states, which are projected for every segment, as the weights change.

    Args:
        mems: `[B, M, E]`, or `None` for no memory.
        places: `Places` of the keys of memory and segment.
    """

    def __init__(self, mems, places):
        self.mems, self.places = mems, places

    def project(self, h, w):
        """`[H, B, T, D]`, and `[H, B, M + T, D]` twice: queries of the segment, keys and values of all."""
        # Memory and segment by themselves: of the memory no gradient is computed unless somebody asks for it.
        q, k, v = ops.project_heads(h, w.qkv, 3, w.n_head)
        if self.mems is None:
            return q, k, v
        kv_kernel = tf.slice(w.qkv, [0, w.qkv.shape[1] // 3], [-1, -1])
        mem_k, mem_v = ops.project_heads(self.mems, kv_kernel, 2, w.n_head)
        return q, tf.concat([mem_k, k], 2), tf.concat([mem_v, v], 2)

    def numbers(self, k):
        """int32 `[K]`: how many tokens stand before each of the keys `[H, B, K, D]`."""
        return tf.range(keras.ops.shape(k)[2])

    def attend(self, block, content_q, position_q, k, v):
        """All queries at once."""
        return block(content_q, position_q, k, v, self.places)

    def output(self, attn_vec, w):
        """`[H, B, T, D]` to `[B, T, E]`."""
        return ops.project_output(attn_vec, w.o)


class Memory(CachedMemory):
    """Cached memory of one layer, for one segment. It is no tensor, and whoever takes it for one gets an error.

    A subclass has `attend` as `HiddenStates` has it, for queries, keys and values `[B, H, any, D]`.

    Args:
        layer: of the network.
        weights: `LayerWeights`, of inference.

    Attributes:
        used: how often the attention of the layer has asked for it; 1 after the layer was called.
    """

    def __init__(self, layer, weights):
        self.layer, self.weights, self.used = layer, weights, 0
        self.input = None  # what the layer was given

    def check(self, attention, w, *arguments):
        """Called by an `attention`. Raises NotCacheable unless it got what the network gave the layer.

        Args:
            w: the segment, `[B, T, E]`.
            *arguments: all others of the call that are about positions, masks and memory.
        """
        if attention is not getattr(self.layer, "rel_attn", None):
            raise NotCacheable(f"the memory of {self.layer.name} is for its rel_attn, not for {attention.name}")
        if w is not self.input:
            raise NotCacheable(f"{attention.name} of {self.layer.name} reads something else than the layer's input")
        if not all(argument is self for argument in arguments):
            raise NotCacheable(f"{self.layer.name} gives its attention other positions, or another mask or memory")
        if self.used:
            raise NotCacheable(f"{self.layer.name} attends to its memory twice")
        self.used = 1

    def weights_of_attention(self):
        """The weights of the layer's attention, which have the scale already."""
        w = self.weights
        u, v = (None if bias is None else bias[:, None] for bias in (w.r_w_bias, w.r_r_bias))
        attention = self.layer.rel_attn
        return Attention(w.qkv, w.o, attention.n_head, 1.0, attention.scheme, u, v)

    def project(self, h, w):
        """Queries, keys and values of the segment, `[B, H, T, D]` each."""
        batch, tgt_len, _ = keras.ops.shape(h)
        heads = tf.reshape(ops.project(h, w.qkv), [batch, tgt_len, 3, w.n_head, w.qkv.shape[1] // (3 * w.n_head)])
        return tf.unstack(tf.transpose(heads, [2, 0, 3, 1, 4]))

    def numbers(self, k):
        """How many tokens stand before each of the keys `[B, H, T, D]`: int32, broadcasts to `[B, H, T]`."""
        return tf.range(keras.ops.shape(k)[2])

    def output(self, attn_vec, w):
        """`[B, H, T, D]` to `[B, T, E]`."""
        rows = ops.project(tf.transpose(attn_vec, [0, 2, 1, 3]), w.o)
        return tf.reshape(rows, tf.shape(self.input))

    def read(self, h):
        """The layer's output for its input `h`, `[B, T, E]`: a call of the layer with this memory."""
        self.input = h
        n_positions = 3 if self.weights.r_w_bias is not None else 0  # r, r_w_bias and r_r_bias
        args, kwargs = memories_by_name(self.layer, (h, *(self,) * (n_positions + 2)), {})  # attn_mask and mems
        return self.layer(*args, **kwargs)


class CachedKeys(Memory):
    """Cached keys and values of one layer, which the segment is written into.

    Args:
        layer, weights: see `Memory`.
        segment: the `NetworkMemory` of the segment.
        keys, values: `[B, H, K, D]`, before the segment.

    Attributes:
        after: keys and values after the segment.
    """

    def __init__(self, layer, weights, segment, keys, values):
        super().__init__(layer, weights)
        self.segment, self.keys, self.values, self.after = segment, keys, values, None


class NetworkMemory(CachedMemory):
    """A memory of cached keys and values, as a network takes it for `mems`: it is no list of tensors.

    A subclass sets `layers`, a `Memory` for every layer, and has `finish`, which returns the state after the segment.
    """

    layers = ()

    def added(self):
        """What the scheme of positions adds to the embeddings, `[B, T, E]`; `None` for nothing."""

    def checked(self):
        """Raises NotCacheable unless every layer has attended to its memory."""
        for memory in self.layers:
            if not memory.used:
                raise NotCacheable(f"{memory.layer.name} does not attend to its memory")
        return self

    def keys_and_values(self):
        """Those of all layers after the segment, where the layers have `CachedKeys`: two tuples."""
        return zip(*(layer.after for layer in self.checked().layers), strict=True)
