"""The vanilla Transformer's attention (document 001; Vaswani et al. 2017, section 3.2), on the common core.

Masks are those of the document: 1 where a key is forbidden, 0 where it is seen, of a shape that broadcasts to
`[batch, heads, queries, keys]`. A query whose keys are all forbidden sees all of them alike.

Shapes:
    B: batch      H: num_heads      T: queries      K: keys      D: depth, the width of a head      E: d_model
"""

import keras
import tensorflow as tf

from txl_tf.layers.attention import attention_probs, head_matmul, join_heads
from txl_tf.layers.dropout import dropout
from txl_tf.layers.ops import Linear, config_of, project


def create_padding_mask(ids, padding=0):
    """1 where `ids` `[B, K]` are `padding`: float32 `[B, 1, 1, K]`."""
    return tf.cast(tf.equal(ids, padding), tf.float32)[:, None, None]


def create_look_ahead_mask(size):
    """1 above the diagonal, where the keys of the future are: float32 `[size, size]`."""
    places = tf.range(size)
    return tf.cast(places[None] > places[:, None], tf.float32)


def scaled_dot_product_attention(q, k, v, mask=None):
    """`softmax(q k^T / sqrt(D)) v` of the document.

    Args:
        q: `[..., T, D]`.
        k: `[..., K, D]`.
        v: `[..., K, any]`.
        mask: float, broadcasts to `[..., T, K]`, 1 where forbidden; `None` for none.

    Returns:
        `(output, attention_weights)`: `[..., T, any]` and `[..., T, K]`.
    """
    visible = None if mask is None else mask == 0
    probs = attention_probs(q[None], k[None], visible=visible, scale=q.shape[-1] ** -0.5)
    return head_matmul(probs, v[None])[0], probs[0]


def multi_head_attention(q, k, v, mask, o_kernel, o_bias, rate=0.0, dropout_key=None):
    """Attention of all heads, joined and projected.

    Args:
        q, k, v: `[H, B, any, D]`, see `heads_of`.
        mask: float, broadcasts to `[B, H, T, K]`; `None` for none.
        o_kernel, o_bias: `[H * D, E]` and `[E]`.
        rate, dropout_key: of the attention weights, see `dropout`.

    Returns:
        `(output, weights)`: `[B, T, E]`, and the weights before dropout, `[H, B, T, K]`.
    """
    visible = None
    if mask is not None:
        visible = (mask == 0) if mask.shape.rank == 2 else tf.transpose(mask == 0, [1, 0, 2, 3])
    probs = attention_probs(q, k, visible=visible, scale=q.shape[-1] ** -0.5)
    vectors = join_heads(head_matmul(dropout(probs, rate, dropout_key, row_axis=1), v))
    batch, length, _ = keras.ops.shape(vectors)
    output = tf.nn.bias_add(project(vectors, o_kernel), o_bias)
    return tf.reshape(output, [batch, length, o_kernel.shape[1]]), probs


def heads_of(x, kernels, biases, num_heads):
    """The projections of `x` `[B, any, E]` by each kernel `[E, H * D]` and bias, as heads: `[H, B, any, D]` each.

    All of them are one product.
    """
    batch, length, _ = keras.ops.shape(x)
    n, depth = len(kernels), kernels[0].shape[1] // num_heads
    kernel, bias = (kernels[0], biases[0]) if n == 1 else (tf.concat(kernels, 1), tf.concat(biases, 0))
    heads = tf.reshape(tf.nn.bias_add(project(x, kernel), bias), [batch, length, n, num_heads, depth])
    return tf.unstack(tf.transpose(heads, [2, 3, 0, 1, 4]))


@keras.saving.register_keras_serializable("txl_tf")
class MultiHeadAttention(keras.layers.Layer):
    """Multi-head attention of document 001: projections `wq`, `wk`, `wv` and `dense`, all with biases.

    Args:
        d_model: width, a multiple of `num_heads`.
        num_heads: number of heads.
        rate: dropout rate of the attention weights; the document has none.

    Call arguments:
        v, k: `[batch, keys, d_model]`, in this order.
        q: `[batch, queries, d_model]`.
        mask: float, broadcasts to `[batch, num_heads, queries, keys]`, 1 where forbidden; `None` for none.
        dropout_key: int `[3]` draws the dropout mask, see `dropout`; `None` for inference.

    Returns:
        `(output, attention_weights)`: `[batch, queries, d_model]` and `[batch, num_heads, queries, keys]`.

    Raises:
        ValueError: `num_heads` does not divide `d_model`.
    """

    def __init__(self, d_model, num_heads, rate=0.0, **kwargs):
        super().__init__(**kwargs)
        if d_model % num_heads:
            raise ValueError(f"d_model must be a multiple of num_heads={num_heads}, got {d_model}")
        self.d_model = d_model
        self.num_heads = num_heads
        self.depth = d_model // num_heads
        self.rate = rate
        self.wq, self.wk, self.wv, self.dense = (
            Linear(d_model, dtype=self.dtype_policy, name=name) for name in ("wq", "wk", "wv", "dense")
        )

    def build(self, v_shape=None, **_):
        for layer in (self.wq, self.wk, self.wv, self.dense):
            layer.build((None, None, self.d_model))

    def call(self, v, k, q, mask=None, dropout_key=None):
        output, weights = self.attention(v, k, q, mask, dropout_key)
        return output, tf.transpose(weights, [1, 0, 2, 3])

    def attention(self, v, k, q, mask=None, dropout_key=None):
        """As the call, with the weights as they are computed, `[num_heads, batch, queries, keys]`."""
        if q is k and k is v:
            q, k, v = self.project(q, self.wq, self.wk, self.wv)
        else:
            (q,) = self.project(q, self.wq)
            k, v = self.project(k, self.wk, self.wv) if k is v else self.project(k, self.wk) + self.project(v, self.wv)
        return self.attend(q, k, v, mask, dropout_key)

    def project(self, x, *layers):
        """Heads of `x` by some of `wq`, `wk` and `wv`: a list of `[num_heads, batch, any, depth]`."""
        x = tf.cast(x, self.compute_dtype)
        kernels = [tf.cast(layer.kernel, x.dtype) for layer in layers]
        return heads_of(x, kernels, [tf.cast(layer.bias, x.dtype) for layer in layers], self.num_heads)

    def attend(self, q, k, v, mask=None, dropout_key=None):
        """`(output, weights)` of heads."""
        o_kernel, o_bias = (tf.cast(w, self.compute_dtype) for w in (self.dense.kernel, self.dense.bias))
        return multi_head_attention(q, k, v, mask, o_kernel, o_bias, self.rate, dropout_key)

    def get_config(self):
        return {**super().get_config(), **config_of(self, "d_model num_heads rate")}
