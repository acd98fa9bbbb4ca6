"""The layers as inference computes them: weights cast and scaled once, activations as rows of a matrix.

Where keys and values come from is the caller's: a ring (`cache.py`), zero memories (`first_segment.py`), a window
(`models/vanilla/window.py`).

Shapes:
    B: batch      T: tgt_len      H: n_head      D: d_head      E: d_model
"""

from typing import NamedTuple

import keras
import tensorflow as tf

from txl_tf.layers.attention import project_heads
from txl_tf.layers.common.precision import matmul
from txl_tf.layers.feed_forward import positionwise_ff

# Rows of a batch whose attention is written out one by one. More of them, or an unknown number, go through a loop.
MAX_UNROLLED_ROWS = 16


class LayerWeights(NamedTuple):
    """Weights of a layer in the type they are used in."""

    qkv: tf.Tensor  # [E, 3 * H * D], the queries' part times D**-0.5
    o: tf.Tensor  # [H * D, E]
    ff: tuple  # kernels and biases, as `positionwise_ff` takes them
    # Of relative attention alone:
    r_w_bias: tf.Tensor | None = None  # [H, D], u times D**-0.5
    r_r_bias: tf.Tensor | None = None  # [H, D], v times D**-0.5
    position_keys: tf.Tensor | None = None  # [H, any, D], projected sinusoids in the order that attention takes them in


def layer_weights(layer, dtype, *position_weights):
    """`LayerWeights` of a layer, the last three given where attention is relative."""
    attn, ff = layer.rel_attn, layer.ff
    width = attn.n_head * attn.d_head
    q_kernel, kv_kernel = tf.split(tf.convert_to_tensor(attn.qkv_kernel), [width, 2 * width], 1)
    return LayerWeights(
        tf.cast(tf.concat([q_kernel * attn.d_head**-0.5, kv_kernel], 1), dtype),
        tf.cast(attn.o_kernel, dtype),
        tuple(tf.cast(weight, dtype) for weight in (ff.kernel_1, ff.bias_1, ff.kernel_2, ff.bias_2)),
        *position_weights,
    )


def weights_with(network, position_keys):
    """`LayerWeights` of all layers of a `TransformerXL`, where the position keys are there already."""
    dtype = network.compute_dtype

    def of_layer(i, layer):
        r_w_bias, r_r_bias = (tf.cast(bias * network.d_head**-0.5, dtype) for bias in network.biases(i))
        return layer_weights(layer, dtype, r_w_bias, r_r_bias, position_keys[i])

    return tuple(of_layer(i, layer) for i, layer in enumerate(network.decoder_layers))


def projected_positions(network, klen):
    """The keys of the distances `klen - 1, ..., 0` in every layer: a list of `[H, klen, D]`."""
    pos_emb = tf.cast(network.positions(klen), network.compute_dtype)

    def of_layer(layer):
        (r_k,) = project_heads(pos_emb, tf.cast(layer.rel_attn.r_kernel, pos_emb.dtype), 1, network.n_head)
        return tf.squeeze(r_k, 1)

    return [of_layer(layer) for layer in network.decoder_layers]


def run_layers(network, weights, hidden, attention):
    """The layers of a network, one after the other.

    Args:
        weights: `n_layer` `LayerWeights`.
        hidden: `[B, T, E]`, what enters the first.
        attention: `attention(i, q, k, v)`, of layer i: scaled queries, keys and values of the segment, `[B, H, T, D]`
            each, to what the heads find, the same.

    Returns:
        `[B, T, E]`.
    """
    batch, tgt_len, _ = keras.ops.shape(hidden)
    heads = [batch, tgt_len, 3, network.n_head, network.d_head]
    # Rows of a matrix from here on: a product of rank 3 with a kernel is one for every row of the batch.
    output = tf.reshape(hidden, [-1, network.d_model])
    for i, (layer, of_layer) in enumerate(zip(network.decoder_layers, weights, strict=True)):
        qkv = tf.reshape(matmul(output, of_layer.qkv), heads)
        attn_vec = attention(i, *tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4])))
        attn_vec = tf.reshape(tf.transpose(attn_vec, [0, 2, 1, 3]), [-1, network.n_head * network.d_head])
        output = layer.rel_attn.layer_norm(output + matmul(attn_vec, of_layer.o))
        output = layer.ff.layer_norm(output + positionwise_ff(output, *of_layer.ff))
    return tf.reshape(output, [batch, tgt_len, network.d_model])


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
