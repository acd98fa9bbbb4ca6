"""Attention: one core for every family of models, and Transformer-XL's relative attention on top of it.

    probs = attention_probs(q, k, position_scores, visible)     softmax over keys of q.k + position_scores
    out = attend(q, k, v, position_scores, visible)             probs times values

What the families differ in is `position_scores`:

    shifted_scores(q, r, first)     scores against a table of distances, moved to the keys by `rel_shift`
    pairwise_scores(q, r)           scores against a vector of its own for every pair of query and key

Shapes:
    B: batch        T: qlen, the queries        M: mlen, the memory        K: klen, the keys, M + T in Transformer-XL
    H: n_head       D: d_head                   E: d_model                 R: rows of a table of distances

Inside, heads come first: with `[H, B * T, D]` the position scores of a head are one matrix product for the whole
batch, where `[B, H, T, D]` would need one for every row.
"""

import keras
import tensorflow as tf

from txl_tf.layers.common.base import Layer, as_bool, check_sizes, check_tensors, check_width, mask_of, seen_by_article
from txl_tf.layers.common.dropout import dropout, split
from txl_tf.layers.common.gradients import custom_gradient
from txl_tf.layers.common.ops import LayerNorm, config_of, own_initializer, project

# ------------------------------------------------------------------------------------------------------------ core


def attend(q, k, v, position_scores=None, visible=None, scale=1.0, dropatt=0.0, dropout_key=None, content=None):
    """Attention: `softmax((q.k + position_scores) * scale)` over the keys, times the values.

    Args:
        q: `[H, ..., T, D]`, queries.
        k, v: `[H, ..., K, D]`, keys and values.
        position_scores: `[H, ..., T, K]`, see `shifted_scores` and `pairwise_scores`; `None` for none.
        visible: bool, `[T, K]` or what broadcasts to `[H, ..., T, K]`: which keys a query sees; `None` for all.
        scale: float. Transformer-XL scales its queries once, before both kinds of scores, and leaves this at 1.
        dropatt: dropout rate of the probabilities. Rows of the batch are axis 1.
        dropout_key: int `[3]`, see `dropout`, or `None` for no dropout.
        content: in the dtype of `q`, broadcasts to `[H, ..., T, K]`: 0 where key and value count as zeros, at their
            distance, for a query; else 1. `None` for 1 everywhere.

    Returns:
        `[H, ..., T, D]`, in the dtype of `q`.
    """
    probs = dropout(attention_probs(q, k, position_scores, visible, scale, content), dropatt, dropout_key, row_axis=1)
    return head_matmul(probs if content is None else probs * content, v)


def attention_probs(q, k, position_scores=None, visible=None, scale=1.0, content=None):
    """The probabilities of `attend`: `[H, ..., T, K]`, in the dtype of `q`; each row sums to 1."""
    if scale != 1.0:
        q = q * scale  # the queries are fewer than the scores
        position_scores = None if position_scores is None else position_scores * scale
    scores = head_matmul(q, k, transpose_b=True)
    if content is not None:
        scores *= content
    if position_scores is not None:
        scores += position_scores
    # Half precision holds neither -1e30 nor the sum of many small probabilities: the softmax is in float32.
    scores = tf.cast(scores, tf.float32)
    if visible is not None:
        scores -= 1e30 * tf.cast(~visible, tf.float32)
    if q.shape[-2] == 1:  # TensorFlow's softmax takes three times as long for so few numbers
        probs = tf.exp(scores - tf.reduce_max(scores, -1, keepdims=True))
        probs /= tf.reduce_sum(probs, -1, keepdims=True)
    else:
        probs = tf.nn.softmax(scores)
    return tf.cast(probs, q.dtype)


def head_matmul(a, b, transpose_b=False):
    """`tf.matmul` of `a` `[H, ..., T, any]`; of one query `[H, 1, any]` head by head, twice as fast.

    `b` may then be a list of its heads.
    """
    if a.shape[-2] != 1 or len(a.shape) > 3:
        return tf.matmul(a, b, transpose_b=transpose_b)
    heads = b if isinstance(b, list) else tf.unstack(b)
    return tf.stack([tf.matmul(x, y, transpose_b=transpose_b) for x, y in zip(tf.unstack(a), heads, strict=True)])


def shifted_scores(q, r, first):
    """Scores of the queries against a table of distances, moved so that they stand at their keys.

    Row x of the table belongs to the key j of the query i for which `x = first + j - i`. Distances in one direction
    (Transformer-XL) are a table of `K + 1` rows, distances in both (TENER) one of `2 * T` rows.

    Args:
        q: `[H, ..., T, D]`, queries.
        r: `[H, R, D]`, the table.
        first: int or int scalar tensor in `[0, T]`, the row of the first query and the first key.

    Returns:
        `[H, ..., T, R - 1]`; see `rel_shift` for columns that have no row.
    """
    n_head, *rows, d_head = keras.ops.shape(q)
    scores = tf.matmul(tf.reshape(q, [n_head, -1, d_head]), r, transpose_b=True)
    return rel_shift(tf.reshape(scores, [n_head, *rows, keras.ops.shape(r)[1]]), first)


def pairwise_scores(q, r, index=None):
    """Scores of the queries against a vector for every pair: `q_i . r_ij` (FLAT).

    Args:
        q: `[H, B, T, D]`.
        r: `[H, B, T, K, D]`. With `index`, the vectors that differ, `[U, H, D]`.
        index: int32 `[B, T, K]`, which of the vectors each pair has.

    Returns:
        `[H, B, T, K]`.
    """
    if index is None:
        return tf.linalg.matvec(r, q)
    return _indexed_scores(q, r, index)


@custom_gradient
def _indexed_scores(q, r, index):
    """`pairwise_scores` of vectors that many pairs share. Those of the pairs are made twice, but never kept.

    The heads of a vector stay side by side, `[T * K, H * D]`: with the query as a matrix `[H * D, H]` that holds each
    head in its own rows and column, the scores of all heads are one product.
    """
    n_head, batch, qlen, d_head = keras.ops.shape(q)
    rows = tf.reshape(r, [-1, n_head * d_head])
    pairs = tf.reshape(index, [batch * qlen, -1])
    queries = tf.reshape(tf.transpose(q, [1, 2, 0, 3]), [batch * qlen, n_head, d_head])
    by_head = tf.eye(n_head, dtype=q.dtype)[:, None]
    blocks = tf.reshape(queries[..., None] * by_head, [batch * qlen, n_head * d_head, n_head])
    scores = tf.matmul(tf.gather(rows, pairs), blocks)  # [B * T, K, H]

    def grad(upstream):
        upstream = tf.reshape(tf.transpose(upstream, [1, 2, 3, 0]), [batch * qlen, -1, n_head])
        of_blocks = tf.matmul(tf.gather(rows, pairs), upstream, transpose_a=True)  # [B * T, H * D, H]
        of_queries = tf.reduce_sum(tf.reshape(of_blocks, [batch * qlen, n_head, d_head, n_head]) * by_head, -1)
        of_pairs = tf.reshape(tf.matmul(upstream, blocks, transpose_b=True), [-1, n_head * d_head])
        of_rows = tf.math.unsorted_segment_sum(of_pairs, tf.reshape(pairs, [-1]), tf.shape(rows)[0])
        of_q = tf.transpose(tf.reshape(of_queries, [batch, qlen, n_head, d_head]), [2, 0, 1, 3])
        return of_q, tf.reshape(of_rows, tf.shape(r)), None

    return tf.transpose(tf.reshape(scores, [batch, qlen, -1, n_head]), [3, 0, 1, 2]), grad


def rel_shift(x, first=None, time_major=False):
    """`[..., T, K]` by distance to `[..., T, K]` by key; with `time_major`, the original's `[T, K, B, H]` (appendix B).

    Moves row i of a matrix i places to the right: `out[..., i, j] = x[..., i, first + j - i]`.

    Row i of `x` holds the scores of query i by distance; attention wants them by key, and the distance of a key falls
    from one query to the next. Read with rows one shorter, every row starts one place later than the one before it.
    With 2 queries, `first` 2:

        0 a b c    without the first 2,    b c 0
        0 d e f    as rows of 3: ----->    d e f

    A column whose index lies outside of its row of `x` holds what stands there in memory, some other row's score. In
    Transformer-XL those are the keys to the right of the diagonal, which lie in the future and are masked.

    Args:
        x: `[..., T, R]`, at least two dimensions; with `time_major`, float `[T, R, B, H]`.
        first: int or int scalar tensor in `[0, T]`. `None` is the original's function: `x` is `[..., T, K]` with the
            distances `K - 1, ..., 0` of the last query; a column of zeros is put in front, and `first` is T.
        time_major: whether queries and keys come first, in `x` and in the result, as in the original.

    Returns:
        `[..., T, R - 1]`, or `[T, R - 1, B, H]`; where `first` is `None`, a tensor like `x`.
    """
    if time_major:
        check_tensors({}, x=(x, "float qlen klen batch n_head"))
        return tf.transpose(rel_shift(tf.transpose(x, [2, 3, 0, 1]), first), [2, 3, 0, 1])
    if first is None:
        x = tf.pad(x, [[0, 0]] * (len(x.shape) - 1) + [[1, 0]])
        first = keras.ops.shape(x)[-2]
    *lead, qlen, width = keras.ops.shape(x)
    x = tf.reshape(x, [-1, qlen * width])
    x = tf.slice(x, [0, first], [-1, qlen * (width - 1)])  # the gradient of x[:, first:] is ten times slower
    return tf.reshape(x, [*lead, qlen, width - 1])


# -------------------------------------------------------------------------------------------------- Transformer-XL


def create_mask(qlen, mlen, same_length=False, first=0):
    """Which keys a query must not see: 1 where masked, 0 where seen (`_create_mask` of the original).

    The arguments are the original's. Query i sees the keys `0 ... mlen + i`, and with `same_length` only the last
    `mlen + 1` of them, `i ... mlen + i`. With qlen 3, mlen 2, without and with `same_length`:

        0 0 0 1 1        0 0 0 1 1
        0 0 0 0 1        1 0 0 0 1
        0 0 0 0 0        1 1 0 0 0

    Args:
        qlen, mlen: ints or int scalar tensors, the lengths of segment and memory.
        same_length: every query sees the same number of keys (the original's evaluation settings).
        first: number of the first query and of the first key, which the mask does not depend on. Of a tensor that the
            compiler does not know, it makes no constant of its program, megabytes of it.

    Returns:
        float32 `[qlen, mlen + qlen]`.
    """
    query = first + tf.range(qlen)[:, None]
    key = first + tf.range(mlen + qlen)[None, :]
    masked = key > query + mlen
    if same_length:
        masked |= key < query
    return tf.cast(masked, tf.float32)


def rel_multihead_attn(
    w, r, r_w_bias, r_r_bias, attn_mask, mems, qkv_kernel, r_kernel, o_kernel, dropatt=0.0, dropout_key=None,
    content_mask=None,
):  # fmt: skip
    """Relative attention with its projections (paper, section 3.3); residual and layer norm are `RelMultiHeadAttn`'s.

    Batch first: the original's `w` and `mems` are `[T, B, E]` and `[M, B, E]`, its `r` is `[K, 1, E]`. Queries are
    projected for the segment alone; the original projects the memory's too and throws them away.

    Args: those of the call of `RelMultiHeadAttn`, and
        qkv_kernel: `[E, 3 * H * D]`, queries, then keys, then values.
        r_kernel, o_kernel: `[E, H * D]` and `[H * D, E]`.
        dropatt, dropout_key: of the attention probabilities, see `attend`.

    Returns:
        `[B, T, E]`.
    """
    q, k, v, position_scores = _scores(w, r, r_w_bias, r_r_bias, mems, qkv_kernel, r_kernel)
    drop = {"dropatt": dropatt, "dropout_key": dropout_key}
    attn_vec = attend(q, k, v, position_scores, attn_mask == 0, content=content_mask, **drop)
    return project_output(attn_vec, o_kernel)


def _scores(w, r, r_w_bias, r_r_bias, mems, qkv_kernel, r_kernel):
    """Arguments of `attend`: q + u, scaled, keys, values, and the position scores of q + v. Shapes as there."""
    n_head, d_head = r_w_bias.shape
    q, k, v = project_segment(w, mems, qkv_kernel, n_head)
    (r_k,) = project_heads(r, r_kernel, 1, n_head)

    scale = d_head**-0.5
    rw_q = (q + r_w_bias[:, None, None]) * scale
    rr_q = (q + r_r_bias[:, None, None]) * scale
    # The zero column of rel_shift as a zero key: the product leaves it in place and no copy is needed for it.
    r_k = tf.pad(tf.squeeze(r_k, 1), [[0, 0], [1, 0], [0, 0]])
    return rw_q, k, v, shifted_scores(rr_q, r_k, first=keras.ops.shape(q)[2])


def project_segment(w, mems, qkv_kernel, n_head):
    """Queries of the segment, keys and values of memory and segment: `[H, B, T, D]`, and `[H, B, K, D]` twice."""
    # Memory and segment by themselves: of the memory no gradient is computed unless somebody asks for it.
    q, k, v = project_heads(w, qkv_kernel, 3, n_head)
    mem_k, mem_v = project_heads(mems, tf.slice(qkv_kernel, [0, qkv_kernel.shape[1] // 3], [-1, -1]), 2, n_head)
    return q, tf.concat([mem_k, k], 2), tf.concat([mem_v, v], 2)


def project_output(attn_vec, o_kernel):
    """What the heads found, `[H, B, T, D]`, side by side and projected: `[B, T, E]`."""
    attn_vec = join_heads(attn_vec)
    batch, qlen, _ = keras.ops.shape(attn_vec)
    return tf.reshape(project(attn_vec, o_kernel), [batch, qlen, o_kernel.shape[1]])


def join_heads(x):
    """Heads `[H, B, T, D]` side by side: `[B, T, H * D]`."""
    n_head, batch, length, d_head = keras.ops.shape(x)
    return tf.reshape(tf.transpose(x, [1, 2, 0, 3]), [batch, length, n_head * d_head])


def project_heads(x, kernel, n, n_head):
    """The `n` projections of `x` `[B, any, E]` that stand side by side in `kernel`, `[H, B, any, D]` each."""
    batch, length, _ = keras.ops.shape(x)
    heads = tf.reshape(project(x, kernel), [batch, length, n, n_head, kernel.shape[1] // (n * n_head)])
    return tf.unstack(tf.transpose(heads, [2, 3, 0, 1, 4]))


@keras.saving.register_keras_serializable("txl_tf")
class RelMultiHeadAttn(Layer):
    """Relative multi-head attention with its residual and layer norm: `LayerNorm(w + dropout(attention))`.

    Args:
        d_model: width of the hidden states.
        n_head, d_head: number of heads and the width of each.
        dropout: rate on the attention's output.
        dropatt: rate on the attention probabilities.
        kernel_initializer: of the three projections.
        layer_norm_epsilon: added to the variance in layer norm.
        seed: int that dropout derives from where no key is given; drawn where it is `None`.

    Call arguments:
        w: `[batch, tgt_len, d_model]`, the segment. Where Keras handed a mask on with it, that hides keys, too.
        r: `[1, mem_len + tgt_len, d_model]`, position embeddings, farthest distance first.
        r_w_bias, r_r_bias: `[n_head, d_head]`; given by the caller, since layers share them unless `untie_r`.
        attn_mask: `[tgt_len, mem_len + tgt_len]`, or with a batch in front: numbers, 1 where masked, see `create_mask`;
            or bool, true where a key is seen. `None`: that of `create_mask`.
        mems: `[batch, mem_len, d_model]`; `mem_len` may be 0, and `None` is no memory.
        content_mask: `[batch, tgt_len, mem_len + tgt_len]`, 0 where what is at a key counts as zeros; `None` for none.
        training, dropout_key: see `txl_tf.layers.common.base`.

    Returns:
        `[batch, tgt_len, d_model]`.

    Raises:
        ValueError: an argument is out of its range, a tensor or a mask of another shape; the message names it.

    Reference:
        Dai et al. 2019, section 3.3; `rel_multihead_attn` of the original.
    """

    relative = True  # whether there is an r_kernel

    def __init__(
        self, d_model, n_head, d_head, dropout=0.0, dropatt=0.0, kernel_initializer="glorot_uniform",
        layer_norm_epsilon=1e-12, seed=None, **kwargs,
    ):  # fmt: skip
        super().__init__(**kwargs)
        check_sizes(d_model=d_model, n_head=n_head, d_head=d_head)
        self.start_keys(seed, dropout=dropout, dropatt=dropatt)
        self.d_model = d_model
        self.n_head = n_head
        self.d_head = d_head
        self.dropout = dropout
        self.dropatt = dropatt
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.layer_norm_epsilon = layer_norm_epsilon
        self.layer_norm = LayerNorm(layer_norm_epsilon, dtype=self.dtype_policy, name="layer_norm")

    def build(self, w_shape=None, **_):
        check_width("w", w_shape, "d_model", self.d_model)

        def kernel(name, shape):
            return self.add_weight(name=name, shape=shape, initializer=own_initializer(self.kernel_initializer))

        width = self.n_head * self.d_head
        self.qkv_kernel = kernel("qkv_kernel", (self.d_model, 3 * width))
        self.r_kernel = kernel("r_kernel", (self.d_model, width)) if self.relative else None
        self.o_kernel = kernel("o_kernel", (width, self.d_model))
        self.layer_norm.build((None, None, self.d_model))

    def call(
        self, w, r, r_w_bias, r_r_bias, attn_mask=None, mems=None, content_mask=None, training=None, dropout_key=None
    ):
        attn_mask, mems = self.segment_of(w, attn_mask, mems, r=r, r_w_bias=r_w_bias, r_r_bias=r_r_bias)
        dropatt_key, output_key = split(self.key_of_call(w, training, dropout_key), 2)
        w, r, r_w_bias, r_r_bias, mems, *kernels = self.computed(
            w, r, r_w_bias, r_r_bias, mems, self.qkv_kernel, self.r_kernel, self.o_kernel
        )
        content_mask = None if content_mask is None else tf.cast(content_mask, w.dtype)
        attn_out = rel_multihead_attn(
            w, r, r_w_bias, r_r_bias, attn_mask, mems, *kernels, self.dropatt, dropatt_key, content_mask
        )
        return self.layer_norm(w + dropout(attn_out, self.dropout, output_key))

    def computed(self, *tensors):
        """Tensors and weights in the dtype that the layer computes in."""
        return [tf.cast(x, self.compute_dtype) for x in tensors]

    def segment_of(self, w, attn_mask=None, mems=None, **positions):
        """`(attn_mask, mems)` of a call, checked: numbers, 1 where masked, and `[batch, mem_len, d_model]`.

        Args:
            **positions: `r`, `r_w_bias` and `r_r_bias` of the call.

        Raises:
            ValueError: a tensor or a mask has another shape; the message names it.
        """
        sizes = {"d_model": self.d_model, "n_head": self.n_head, "d_head": self.d_head, "1": 1}
        check_tensors(sizes, w=(w, "float batch tgt_len d_model"), mems=(mems, "float? batch mem_len d_model"))
        mems = w[:, :0] if mems is None else mems
        qlen, mlen = keras.ops.shape(w)[1], keras.ops.shape(mems)[1]
        sizes["keys"] = mlen + qlen if isinstance(mlen + qlen, int) else None
        shapes = {"r": "float 1 keys d_model", "r_w_bias": "float n_head d_head", "r_r_bias": "float n_head d_head"}
        check_tensors(sizes, **{name: (x, shapes[name]) for name, x in positions.items()})
        if attn_mask is None:
            attn_mask = create_mask(qlen, mlen)
        elif attn_mask.dtype == tf.bool or attn_mask.shape.rank not in (2, 3):
            visible = seen_by_article("attn_mask", attn_mask, sizes, ["batch", "tgt_len", "keys"])
            attn_mask = tf.cast(~visible, tf.float32)
        else:
            seen_by_article("attn_mask", attn_mask, sizes, ["batch", "tgt_len", "keys"])
        if mask_of(w) is not None:
            padding = tf.cast(~as_bool("mask", mask_of(w)), attn_mask.dtype)
            attn_mask = tf.maximum(attn_mask, tf.pad(padding, [[0, 0], [mlen, 0]])[:, None])
        return attn_mask, mems

    def attention_probs(self, w, r, r_w_bias, r_r_bias, attn_mask, mems, content_mask=None):
        """The probabilities of the call, without dropout: `[n_head, batch, tgt_len, mem_len + tgt_len]`."""
        arguments = w, r, r_w_bias, r_r_bias, mems, self.qkv_kernel, self.r_kernel
        q, k, _, position_scores = _scores(*(tf.cast(x, self.compute_dtype) for x in arguments))
        content = None if content_mask is None else tf.cast(content_mask, q.dtype)
        return attention_probs(q, k, position_scores, attn_mask == 0, content=content)

    def get_config(self):
        names = "d_model n_head d_head dropout dropatt kernel_initializer layer_norm_epsilon seed"
        return {**super().get_config(), **config_of(self, names)}
