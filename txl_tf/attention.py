"""Relative multi-head attention over memory and segment (paper, section 3.3; equation 6 of the documents).

Shapes:
    B: batch        T: qlen, the segment        M: mlen, the memory        K: klen = M + T, the keys
    H: n_head       D: d_head                   E: d_model

Inside, heads come first: with `[H, B * T, D]` the position scores of a head are one matrix product for the whole
batch, where `[B, H, T, D]` would need one for every row.
"""

import keras
import tensorflow as tf

from txl_tf.dropout import dropout, split
from txl_tf.primitives import LayerNorm, project


def rel_shift(x):
    """Moves row i of a `[qlen, klen]` matrix `qlen - 1 - i` places to the left (equation 9 to 8 of the documents).

    Row i of `x` holds the scores of query i against the distances `klen - 1, ..., 0`; attention wants them against
    the keys `0, ..., klen - 1`, whose distance falls with i. A column of zeros in front makes a row one longer than
    the row length it is read back with, and so every row starts one place later than the one before it. With
    qlen 2, klen 3:

        a b c    pad     0 a b c    read without the first    b c 0
        d e f   ----->   0 d e f    qlen, as rows of klen     d e f
                                    -------------------->

    What arrives to the right of the diagonal belongs to keys in the future and is masked.

    Batch first: the original's `x` is `[qlen, klen, batch, n_head]`.

    Args:
        x: `[..., qlen, klen]`, at least two dimensions.

    Returns:
        A tensor like `x`.
    """
    return _shift_padded(tf.pad(x, [[0, 0]] * (len(x.shape) - 1) + [[1, 0]]))


def _shift_padded(x):
    """`rel_shift` of `[..., qlen, 1 + klen]` that has its column of zeros already."""
    *lead, qlen, padded = keras.ops.shape(x)
    x = tf.reshape(x, [-1, qlen * padded])
    x = tf.slice(x, [0, qlen], [-1, -1])  # the gradient of x[:, qlen:] is ten times slower
    return tf.reshape(x, [*lead, qlen, padded - 1])


def create_mask(qlen, mlen, same_length=False):
    """Which keys a query must not see: 1 where masked, 0 where seen.

    Query i sees the keys `0 ... mlen + i`, and with `same_length` only the last `mlen + 1` of them,
    `i ... mlen + i`. With qlen 3, mlen 2, without and with `same_length`:

        0 0 0 1 1        0 0 0 1 1
        0 0 0 0 1        1 0 0 0 1
        0 0 0 0 0        1 1 0 0 0

    Args:
        qlen, mlen: ints or int scalar tensors, the lengths of segment and memory.
        same_length: every query sees the same number of keys (the original's evaluation settings).

    Returns:
        float32 `[qlen, mlen + qlen]`.
    """
    query = tf.range(qlen)[:, None]
    key = tf.range(mlen + qlen)[None, :]
    masked = key > query + mlen
    if same_length:
        masked |= key < query
    return tf.cast(masked, tf.float32)


def rel_attention(q, k, v, r_k, r_w_bias, r_r_bias, attn_mask, dropatt=0.0, seed=None):
    """Softmax of equation (6) over the keys, times the values.

    Args:
        q: `[H, B, T, D]`, projected queries.
        k, v: `[H, B, K, D]`, projected keys and values of memory and segment.
        r_k: `[H, K, D]`, projected position embeddings, farthest distance first.
        r_w_bias, r_r_bias: `[H, D]`, the paper's u and v.
        attn_mask: `[T, K]`, 1 where masked.
        dropatt: dropout rate of the attention probabilities.
        seed: int `[3]`, see `dropout`, or `None` for no dropout.

    Returns:
        `[H, B, T, D]`, in the dtype of `q`.
    """
    n_head, batch, qlen, d_head = keras.ops.shape(q)
    klen = keras.ops.shape(k)[2]
    scale = d_head**-0.5  # on the queries, which are fewer than the scores
    rw_q = (q + r_w_bias[:, None, None]) * scale
    rr_q = (q + r_r_bias[:, None, None]) * scale
    # The zero column of rel_shift as a zero key: the product leaves it in place and no copy is needed for it.
    r_k = tf.pad(r_k, [[0, 0], [1, 0], [0, 0]])

    ac = tf.matmul(rw_q, k, transpose_b=True)  # terms (a) and (c), [H, B, T, K]
    bd = tf.matmul(tf.reshape(rr_q, [n_head, batch * qlen, d_head]), r_k, transpose_b=True)  # (b) and (d)
    bd = _shift_padded(tf.reshape(bd, [n_head, batch, qlen, klen + 1]))
    # Half precision holds neither -1e30 nor the sum of many small probabilities: the softmax is in float32.
    attn_score = tf.cast(ac + bd, tf.float32) - 1e30 * tf.cast(attn_mask, tf.float32)
    attn_prob = dropout(tf.cast(tf.nn.softmax(attn_score), q.dtype), dropatt, seed, row_axis=1)
    return tf.matmul(attn_prob, v)


def rel_multihead_attn(
    w, r, r_w_bias, r_r_bias, attn_mask, mems, qkv_kernel, r_kernel, o_kernel, dropatt=0.0, seed=None
):
    """Projections of equation (6) around `rel_attention`; residual and layer norm are `RelMultiHeadAttn`'s.

    Batch first: the original's `w` and `mems` are `[T, B, E]` and `[M, B, E]`, its `r` is `[K, 1, E]`. Queries are
    projected for the segment alone; the original projects the memory's too and throws them away.

    Args:
        w: `[B, T, E]`, hidden states of the segment.
        r: `[1, K, E]`, position embeddings, farthest distance first.
        r_w_bias, r_r_bias: `[H, D]`, the paper's u and v.
        attn_mask: `[T, K]`, 1 where masked.
        mems: `[B, M, E]`, hidden states of the memory.
        qkv_kernel: `[E, 3 * H * D]`, queries, then keys, then values.
        r_kernel: `[E, H * D]`.
        o_kernel: `[H * D, E]`.
        dropatt: dropout rate of the attention probabilities.
        seed: int `[3]`, see `dropout`, or `None` for no dropout.

    Returns:
        `[B, T, E]`.
    """
    n_head, d_head = r_w_bias.shape
    batch, qlen, _ = keras.ops.shape(w)
    # Memory and segment by themselves: of the memory no gradient is computed unless somebody asks for it.
    q, k, v = _project_heads(w, qkv_kernel, 3, n_head)
    mem_k, mem_v = _project_heads(mems, tf.slice(qkv_kernel, [0, n_head * d_head], [-1, -1]), 2, n_head)
    k, v = tf.concat([mem_k, k], 2), tf.concat([mem_v, v], 2)
    (r_k,) = _project_heads(r, r_kernel, 1, n_head)

    attn_vec = rel_attention(q, k, v, tf.squeeze(r_k, 1), r_w_bias, r_r_bias, attn_mask, dropatt, seed)
    attn_vec = tf.reshape(tf.transpose(attn_vec, [1, 2, 0, 3]), [batch, qlen, n_head * d_head])
    return tf.reshape(project(attn_vec, o_kernel), [batch, qlen, o_kernel.shape[1]])


def _project_heads(x, kernel, n, n_head):
    """The `n` projections of `x` `[B, any, E]` that stand side by side in `kernel`, `[H, B, any, D]` each."""
    batch, length, _ = keras.ops.shape(x)
    heads = tf.reshape(project(x, kernel), [batch, length, n, n_head, kernel.shape[1] // (n * n_head)])
    return tf.unstack(tf.transpose(heads, [2, 3, 0, 1, 4]))


@keras.saving.register_keras_serializable("txl_tf")
class RelMultiHeadAttn(keras.layers.Layer):
    """Relative multi-head attention with its residual and layer norm: `LayerNorm(w + dropout(attention))`.

    Args:
        d_model: width of the hidden states.
        n_head, d_head: number of heads and the width of each.
        dropout: rate on the attention's output.
        dropatt: rate on the attention probabilities.
        kernel_initializer: of the three projections.

    Call arguments:
        w: `[batch, tgt_len, d_model]`, the segment.
        r: `[1, mem_len + tgt_len, d_model]`, position embeddings, farthest distance first.
        r_w_bias, r_r_bias: `[n_head, d_head]`; given by the caller, since layers share them unless `untie_r`.
        attn_mask: `[tgt_len, mem_len + tgt_len]`, 1 where masked, see `create_mask`.
        mems: `[batch, mem_len, d_model]`; `mem_len` may be 0.
        seed: int `[3]` draws the dropout masks, see `dropout`; `None` for inference.

    Returns:
        `[batch, tgt_len, d_model]`.

    Reference:
        Dai et al. 2019, section 3.3; `rel_multihead_attn` of the original.
    """

    def __init__(
        self, d_model, n_head, d_head, dropout=0.0, dropatt=0.0, kernel_initializer="glorot_uniform", **kwargs
    ):
        super().__init__(**kwargs)
        self.d_model = d_model
        self.n_head = n_head
        self.d_head = d_head
        self.dropout = dropout
        self.dropatt = dropatt
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.layer_norm = LayerNorm(dtype=self.dtype_policy)

    def build(self, w_shape=None, **_):
        def kernel(name, shape):
            # A Keras initializer draws the same numbers every time; a clone of it draws its own.
            return self.add_weight(name=name, shape=shape, initializer=self.kernel_initializer.clone())

        width = self.n_head * self.d_head
        self.qkv_kernel = kernel("qkv_kernel", (self.d_model, 3 * width))
        self.r_kernel = kernel("r_kernel", (self.d_model, width))
        self.o_kernel = kernel("o_kernel", (width, self.d_model))
        self.layer_norm.build((None, None, self.d_model))

    def call(self, w, r, r_w_bias, r_r_bias, attn_mask, mems, seed=None):
        dropatt_seed, dropout_seed = split(seed, 2)
        attn_out = rel_multihead_attn(
            w, r, r_w_bias, r_r_bias, attn_mask, mems,
            self.qkv_kernel, self.r_kernel, self.o_kernel, self.dropatt, dropatt_seed,
        )  # fmt: skip
        return self.layer_norm(w + dropout(attn_out, self.dropout, dropout_seed))

    def get_config(self):
        return {
            **super().get_config(),
            "d_model": self.d_model,
            "n_head": self.n_head,
            "d_head": self.d_head,
            "dropout": self.dropout,
            "dropatt": self.dropatt,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }
