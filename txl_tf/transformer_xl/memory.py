"""The memory to which a layer of Transformer-XL attends, besides its segment.

In training, the memory is a tensor of hidden states, the argument `mems` of a layer's call. In inference, it is an
instance of a subclass of `LayerMemory`, such as a ring of cached keys and values. This object replaces all arguments of
the call that are about positions, masks and memory. A layer passes it on to its attention, which calls its methods.

A layer that uses its memory in another way, for example normalises it, cannot be computed from cached keys and values.
With this object, its call raises an error: `NotCacheable` if a check of this file finds the reason, else one of Python,
TensorFlow or Keras. After any error, the model is computed from hidden states, as in training: see `why_not_cached`.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import txl_tf.kernels as ops
from txl_tf.equations import Attention, Block, KeyPositions
from txl_tf.kernels.shapes import Tensor, shape_of
from txl_tf.nn.base import CachedMemory, memories_by_name
from txl_tf.nn.parts import NotCacheable, is_overridden


class HiddenStates:
    """The memory in training: hidden states. They are projected for every segment, because the weights change.

    Args:
        mems: `[B, M, E]`, or `None` for no memory.
        key_positions: the positions of the keys of memory and segment, and which of them a query sees.
    """

    def __init__(self, mems: Tensor | None, key_positions: KeyPositions) -> None:
        self.mems = mems
        self.key_positions = key_positions

    def project(self, h: Tensor, w: Attention) -> tuple[Any, Any, Any]:
        """Queries of the segment `[H, B, T, D]`; keys and values of memory and segment, `[H, B, M + T, D]` each."""
        # Project memory and segment separately, so that no gradient is computed for the memory.
        q, k, v = ops.project_heads(h, w.qkv, 3, w.n_head)
        if self.mems is None:
            return q, k, v
        kv_kernel = tf.slice(w.qkv, [0, w.qkv.shape[1] // 3], [-1, -1])
        mem_k, mem_v = ops.project_heads(self.mems, kv_kernel, 2, w.n_head)
        return q, tf.concat([mem_k, k], 2), tf.concat([mem_v, v], 2)

    def token_positions(self, k: Tensor) -> Any:
        """int32 `[K]`: how many tokens precede each of the keys `[H, B, K, D]`."""
        return tf.range(shape_of(k)[2])

    def attend(self, block: Block, content_q: Tensor, position_q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Calls `block` once, for all rows and queries.

        (`RingOfLayer.attend` calls it for some queries of one row at a time.)
        """
        return block(content_q, position_q, k, v, self.key_positions)

    def output(self, attn_vec: Tensor, w: Attention) -> Any:
        """`[H, B, T, D]` to `[B, T, E]`."""
        return ops.project_output(attn_vec, w.o)


class LayerMemory(CachedMemory):
    """Cached memory of one layer, for one segment. It is not a tensor: using it as one is an error.

    Args:
        layer: a layer of the network.
        weights: `LayerWeights` of the layer.

    Attributes:
        used: whether the attention of the layer has used the memory.
        input: the input of the layer, `[B, T, E]`; `None` before the layer was called.
    """

    def __init__(self, layer: Any, weights: Any) -> None:
        self.layer = layer
        self.weights = weights
        self.used = False
        self.input: Any = None

    def check(self, attention: Any, segment: Tensor, *arguments: Any) -> None:
        """Called by an attention. Raises NotCacheable unless its arguments are those that the network gave the layer.

        It also raises this error if a user has overridden a method of the attention that only hidden states need.

        Args:
            attention: the layer that calls this method.
            segment: the segment of its call, `[B, T, E]`.
            *arguments: the other arguments of its call that are about positions, masks and memory.
        """
        if attention is not getattr(self.layer, "rel_attn", None):
            raise NotCacheable(f"the memory of {self.layer.name} is for its rel_attn, not for {attention.name}")
        if segment is not self.input:
            raise NotCacheable(f"{attention.name} of {self.layer.name} does not read the layer's input")
        if not all(argument is self for argument in arguments):
            raise NotCacheable(f"{self.layer.name} gives its attention other positions, or another mask or memory")
        for name in ("memory_of", "segment_of"):
            if is_overridden(attention, name):
                raise NotCacheable(f"{attention.name} of {self.layer.name} has its own {name}")
        if self.used:
            raise NotCacheable(f"{self.layer.name} attends to its memory twice")
        self.used = True

    def weights_of_attention(self) -> Attention:
        """The weights of the layer's attention. They contain the scale already, so `scale` is 1."""
        w = self.weights
        attention = self.layer.rel_attn
        return Attention(
            qkv=w.qkv, o=w.o, n_head=attention.n_head, scale=1.0, scheme=attention.scheme, u=w.scaled_u,
            v=w.scaled_v, zeros=w.zeros or None,
        )  # fmt: skip

    def project(self, h: Tensor, w: Attention) -> Any:
        """Queries, keys and values of the segment, `[B, H, T, D]` each."""
        batch, tgt_len, _ = shape_of(h)
        depth = w.o.shape[0] // w.n_head
        heads = [tf.reshape(ops.project(h, kernel), [batch, tgt_len, w.n_head, depth]) for kernel in w.qkv]
        return [_swap_heads_and_tokens(x) for x in heads]

    def token_positions(self, k: Tensor) -> Any:
        """How many tokens precede each of the keys `[B, H, T, D]`: int32, broadcasts to `[B, H, T]`."""
        return tf.range(shape_of(k)[2])

    def attend(self, block: Block, content_q: Tensor, position_q: Tensor, k: Tensor, v: Tensor) -> Any:
        """The results for all queries. Queries, keys, values and results are `[B, H, T, D]`. A subclass defines it."""

    def output(self, attn_vec: Tensor, w: Attention) -> Any:
        """`[B, H, T, D]` to `[B, T, E]`."""
        rows = ops.project(_swap_heads_and_tokens(attn_vec), w.o)
        rows = rows if w.zeros is None else ops.add_bias(rows, w.zeros.output)
        return tf.reshape(rows, tf.shape(self.input))

    def call_layer(self, h: Tensor) -> Any:
        """Calls the layer with this memory. Returns its output for the input `h`, `[B, T, E]`."""
        self.input = h
        n_arguments = 2 if self.weights.scaled_u is None else 5  # attn_mask, mems; and r, r_w_bias, r_r_bias
        args, kwargs = memories_by_name(self.layer, (h, *[self] * n_arguments), {})
        return self.layer(*args, **kwargs)


def _swap_heads_and_tokens(x: Tensor) -> Any:
    """Swaps the axes of heads and tokens: axes 1 and 2 of `[B, any, any, D]`. For a single token, it copies nothing."""
    batch, first, second, depth = shape_of(x)
    if 1 in (x.shape[1], x.shape[2]):
        return tf.reshape(x, [batch, second, first, depth])
    return tf.transpose(x, [0, 2, 1, 3])


class CachedKeys(LayerMemory):
    """Cached keys and values of one layer. Attention writes those of the segment to the cache.

    Args:
        layer, weights: see `LayerMemory`.
        network_memory: the `NetworkMemory` whose part for the layer this object is.
        keys, values: `[B, H, K, D]`, before the segment.

    Attributes:
        keys_and_values_after: a pair, those after the segment; `None` before the layer was called.
    """

    def __init__(self, layer: Any, weights: Any, network_memory: Any, keys: Tensor, values: Tensor) -> None:
        super().__init__(layer, weights)
        self.network_memory = network_memory
        self.keys = keys
        self.values = values
        self.keys_and_values_after: Any = None


class NetworkMemory(CachedMemory):
    """The memory of a network in inference. The network takes it for `mems`, instead of a list of tensors.

    Attributes:
        layers: a `LayerMemory` for every layer. A subclass sets it.
    """

    layers: Sequence[Any] = ()

    def added(self) -> Any:
        """The absolute positions that are added to the embeddings, `[B, T, E]`; `None` if nothing is added."""

    def finish(self) -> Any:
        """The state after the segment. A subclass defines it."""

    def checked(self) -> Any:
        """Returns this memory. Raises NotCacheable unless every layer has attended to its memory."""
        for memory in self.layers:
            if not memory.used:
                raise NotCacheable(f"{memory.layer.name} does not attend to its memory")
        return self

    def keys_and_values(self) -> Any:
        """The keys and the values of all layers after the segment, two tuples. The layers must have `CachedKeys`."""
        return zip(*(layer.keys_and_values_after for layer in self.checked().layers), strict=True)
