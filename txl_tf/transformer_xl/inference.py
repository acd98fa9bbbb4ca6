"""What inference reads from the weights once, before a loop, and how a model reads a segment with it.

Shapes:
    B: batch      T: tgt_len      H: n_head      D: d_head      E: d_model
"""

from typing import NamedTuple

import keras
import tensorflow as tf

from txl_tf.equations import project_distances
from txl_tf.nn.base import NotCacheable
from txl_tf.nn.bound import bound
from txl_tf.nn.feed_forward import PositionwiseFF
from txl_tf.transformer_xl.attention import SegmentAttention

# Rows of a batch whose attention is written out one by one. More of them, or an unknown number, go through a loop.
MAX_UNROLLED_ROWS = 16


class LayerWeights(NamedTuple):
    """Weights of a layer in the type they are used in."""

    qkv: tf.Tensor  # [E, 3 * H * D], the queries' part times D**-0.5
    o: tf.Tensor  # [H * D, E]
    ff: tuple  # kernels and biases of the feed-forward net; nothing for a net of another class
    # Of relative attention alone:
    r_w_bias: tf.Tensor | None = None  # [H, D], u times D**-0.5
    r_r_bias: tf.Tensor | None = None  # [H, D], v times D**-0.5
    position_keys: tf.Tensor | None = None  # [H, any, D], projected sinusoids in the order that attention takes them in


def layer_weights(layer, dtype, *position_weights):
    """`LayerWeights` of a layer, the last three given where attention is relative.

    Raises:
        NotCacheable: the layer's attention is not one whose keys and values are products of the hidden states.
    """
    attn, ff = getattr(layer, "rel_attn", None), getattr(layer, "ff", None)
    if not isinstance(attn, SegmentAttention):
        raise NotCacheable(f"{layer.name} has no rel_attn of the kind of RelMultiHeadAttn")
    width = attn.n_head * attn.d_head
    q_kernel, kv_kernel = tf.split(tf.convert_to_tensor(attn.qkv_kernel), [width, 2 * width], 1)
    of_ff = ff.computed_weights() if isinstance(ff, PositionwiseFF) else ()
    return LayerWeights(
        tf.cast(tf.concat([q_kernel * attn.d_head**-0.5, kv_kernel], 1), dtype),
        tf.cast(attn.o_kernel, dtype),
        tuple(tf.cast(weight, dtype) for weight in of_ff),
        *position_weights,
    )


def weights_with(network, position_keys):
    """`LayerWeights` of all layers of a `TransformerXL`.

    Args:
        position_keys: one for every layer; nothing where the positions are not relative.
    """
    dtype = network.compute_dtype

    def of_layer(i, layer):
        if network.r_w_bias is None:
            return layer_weights(layer, dtype)
        r_w_bias, r_r_bias = (tf.cast(bias * network.d_head**-0.5, dtype) for bias in network.biases(i))
        return layer_weights(layer, dtype, r_w_bias, r_r_bias, position_keys[i])

    return tuple(of_layer(i, layer) for i, layer in enumerate(network.decoder_layers))


def projected_positions(network, klen):
    """The keys of the distances `klen - 1, ..., 0` in every layer: a list of `[H, klen, D]`.

    The list is empty where the positions are not relative.
    """
    if network.r_w_bias is None:
        return []
    pos_emb = tf.cast(network.position_table(klen), network.compute_dtype)

    def of_layer(layer):
        attn = getattr(layer, "rel_attn", None)
        if getattr(attn, "r_kernel", None) is None:
            raise NotCacheable(f"{layer.name} has no rel_attn of the kind of RelMultiHeadAttn")
        return project_distances(pos_emb, tf.cast(attn.r_kernel, pos_emb.dtype), attn.n_head)

    return [of_layer(layer) for layer in network.decoder_layers]


def read(model, tokens, memory, static_shapes=False):
    """What a model gives for a segment, and the state after it.

    Args:
        model: `TransformerXL`, or a function like its call, see `LanguageModel.outputs`.
        tokens: int `[B, T]`.
        memory: `NetworkMemory`.
        static_shapes: as in the call.
    """
    parts = [(view.layer.ff, view.weights.ff) for view in memory.layers if view.weights.ff]
    with bound(parts):
        return model(tokens, memory, static_shapes=static_shapes)


def row_by_row(attend_row, q):
    """`attend_row(b)`, `[H, T, D]`, of all rows of the queries `[B, H, T, D]`: a row at a time fits the CPU's cache."""
    batch = q.shape[0]
    if batch is not None and batch <= MAX_UNROLLED_ROWS:
        return tf.stack([attend_row(b) for b in range(batch)])
    rows, spec = tf.range(keras.ops.shape(q)[0]), tf.TensorSpec(q.shape[1:], q.dtype)
    return tf.map_fn(attend_row, rows, fn_output_signature=spec, parallel_iterations=1)


def zero_keys(network, batch_size, klen):
    """Zeros as the keys, or the values, of all layers: a tuple of `n_layer` tensors `[batch_size, H, klen, D]`."""
    shape = [batch_size, network.n_head, klen, network.d_head]
    return tuple(tf.zeros(shape, network.compute_dtype) for _ in range(network.n_layer))


def writable_copy(state):
    """A copy that nothing else refers to, not even a constant of the graph, so that it may be written in place."""
    return tf.nest.map_structure(lambda tensor: tf.raw_ops.DeepCopy(x=tensor), state)
