"""Transformer-XL, the equations: functions of arrays and weights (Dai et al. 2019; Grave et al. 2017).

A formula leaves open which kernel computes it, in which type and in how many passes: `kernels` decides that. What a
layer attends to besides its segment is a *memory*: hidden states in training, cached keys and values in inference. The
equations are the same for all of them.

Shapes:
    B: batch      T: tgt_len, the segment      M: mem_len, the memory      K: keys, M + T
    H: n_head     D: d_head      E: d_model     F: d_inner      N: words of a cluster      R: rows of a table
"""

from typing import NamedTuple

import keras
import tensorflow as tf

from txl_tf import kernels as ops
from txl_tf.kernels.dropout import dropout
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.kernels.precision import matmul
from txl_tf.kernels.watching import watched

# --------------------------------------------------------------------------------------------------- positions, masks


def sinusoids(positions, frequencies):
    """R of the paper: the sines of all angles `position * frequency`, then their cosines (section 3.3)."""
    angles = tf.einsum("i,j->ij", positions, frequencies)  # [n, E / 2]
    return tf.concat([tf.sin(angles), tf.cos(angles)], -1)  # [n, E]


def causal(tgt_len, mem_len, same_length=False, first=0):
    """bool `[T, K]`: query i sees the memory and the segment up to itself; with `same_length` the last M + 1 of them.

    `first` is the number of the first query and of the first key. The result does not depend on it.
    """
    query, key = first + tf.range(tgt_len)[:, None], first + tf.range(mem_len + tgt_len)
    seen = key <= query + mem_len
    return seen & (key >= query) if same_length else seen


def rel_shift(x, first):
    """Moves row i of a matrix i places to the right: `out[..., i, j] = x[..., i, first + j - i]` (appendix B).

    Row i of `x` holds the scores of query i by distance; attention wants them by key, and the distance of a key grows
    from one query to the next. Read with rows one shorter, every row starts one place later than the one before it.
    With 2 queries, `first` 2:

        0 a b c    without the first 2,    b c 0
        0 d e f    as rows of 3: ----->    d e f

    A column whose index lies outside of its row of `x` holds the score of some other row. In Transformer-XL those are
    the keys in the future, which are masked.

    Args:
        x: `[..., T, R]`.
        first: int or int scalar tensor in `[0, T]`.

    Returns:
        `[..., T, R - 1]`.
    """
    *lead, qlen, width = keras.ops.shape(x)
    x = tf.reshape(x, [-1, qlen * width])
    x = tf.slice(x, [0, first], [-1, qlen * (width - 1)])  # the gradient of x[:, first:] is ten times slower
    return tf.reshape(x, [*lead, qlen, width - 1])


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


# ---------------------------------------------------------------------------------------------------------- attention


def attention_probs(q, k, position_scores=None, visible=None, scale=1.0, content=None, zero_keys=0):
    """`softmax((q.k + position_scores) * scale)` over the keys that a query sees: `[H, ..., T, K]`.

    Args: as in `attend`.
    """
    q, position_scores = _scaled(q, position_scores, scale)
    scores = ops.head_matmul(q, k, transpose_b=True)  # [H, ..., T, K]
    scores = scores if content is None else scores * content
    if zero_keys:
        of_zeros, of_others = position_scores[..., :zero_keys], position_scores[..., zero_keys:]
        scores, position_scores = tf.concat([of_zeros, of_others + scores], -1), None
    return ops.masked_softmax(scores, visible, position_scores)


def attend(
    q, k, v, position_scores=None, visible=None, scale=1.0, dropatt=0.0, dropout_key=None, *, content=None, zero_keys=0
):
    """Attention: `softmax((q.k + position_scores) * scale)` over the keys, times the values.

    Args:
        q: `[H, ..., T, D]`, queries.
        k, v: `[H, ..., K, D]`, keys and values.
        position_scores: `[H, ..., T, K]`, see `shifted_scores` and `pairwise_scores`; `None` for none. Of one query
            also a list of the heads.
        visible: bool, `[T, K]` or what broadcasts to `[H, ..., T, K]`: which keys a query sees; `None` for all.
        scale: float. Transformer-XL scales its queries once, before both kinds of scores, and leaves this at 1.
        dropatt: dropout rate of the probabilities. Rows of the batch are axis 1.
        dropout_key: int `[3]`, see `dropout`, or `None` for no dropout.
        content: `[H, ..., T, K]` or what broadcasts to it, 0 where key and value count as zeros for a query, else 1.
        zero_keys: int; as many keys and values of zeros stand in front of `k` and `v`, without being computed.

    Returns:
        `[H, ..., T, D]`, in the dtype of `q`.
    """
    is_plain = dropout_key is None and content is None and not zero_keys and watched() is None
    if is_plain and ops.takes_one_query(q, visible):
        q, position_scores = _scaled(q, position_scores, scale)
        return ops.attend_with_one_query(q, k, v, position_scores, visible)
    position_scores = tf.stack(position_scores) if isinstance(position_scores, list) else position_scores
    probs = attention_probs(q, k, position_scores, visible, scale, content, zero_keys)
    if watched() is not None:
        watched().probs.append(probs)
    probs = dropout(probs, dropatt, dropout_key, row_axis=1)
    probs = probs if content is None else probs * content
    return ops.head_matmul(probs[..., zero_keys:] if zero_keys else probs, v)


def _times(x, scale):
    return x if scale == 1.0 else x * scale


def _scaled(q, position_scores, scale):
    """`(q * scale, position_scores * scale)`. To scale `q` is cheaper than to scale `q.k`."""
    if scale == 1.0:
        return q, position_scores
    return q * scale, None if position_scores is None else tf.multiply(position_scores, scale)


class Attention(NamedTuple):
    """Weights of a layer's attention."""

    qkv: tf.Tensor  # [E, 3 * H * D]: of queries, then keys, then values
    o: tf.Tensor  # [H * D, E]
    n_head: int
    scale: float  # of the queries, D**-0.5; 1 where the weights have it already
    u: tf.Tensor | None = None  # broadcasts to the queries; the original's r_w_bias
    v: tf.Tensor | None = None  # the same; the original's r_r_bias


class Places(NamedTuple):
    """Where the keys of some queries stand, and which of them the queries see.

    Other kinds of memory may have places of their own, with the same attributes and `position_scores`.
    """

    r: tf.Tensor | None  # [H, R, D], the projected table of distances; `None` for absolute positions
    first: tf.Tensor | int = 0  # see `shifted_scores`
    visible: tf.Tensor | None = None  # see `attend`
    content: tf.Tensor | None = None  # see `attend`
    zero_keys: int = 0  # see `attend`

    def position_scores(self, q):
        """`[H, ..., T, K]` of queries `[H, ..., T, D]`: terms (b) and (d) of `attention`."""
        return shifted_scores(q, self.r, self.first)


def project_distances(r, r_kernel, n_head):
    """The keys of distances: `[1, K, E]` to `[H, K, D]`."""
    (r_k,) = ops.project_heads(r, r_kernel, 1, n_head)
    return tf.squeeze(r_k, 1)


def attention(h, memory, w, dropatt=0.0, dropout_key=None):
    """Attention of a segment to its memory and itself (section 3.3).

    The score of a query i and a key j has four terms, of which (a) and (c) are one product, and (b) and (d):

        A_ij = q_i.k_j + q_i.r_(i-j) + u.k_j + v.r_(i-j)        (a), (b), (c), (d)
             = (q_i + u).k_j + (q_i + v).r_(i-j)                each times D**-0.5

    With absolute positions, the score is `q_i.k_j` alone.

    Args:
        h: `[B, T, E]`.
        memory: an object with `project(h, w)`, which returns the queries of the segment and the keys and values of
            all that it sees, and `attend(block, q, k, v)`, which calls `block` for all of them or part by part.
        w: `Attention`.
        dropatt, dropout_key: see `attend`.

    Returns:
        `[B, T, E]`.
    """
    q, k, v = memory.project(h, w)  # [H, B, T, D], [H, B, K, D] twice; or batch first

    def block(content_q, position_q, k, v, places):
        if watched() is not None:
            watched().parts.append((q, k, places))
        position = None if position_q is None else places.position_scores(position_q)  # (b) + (d): [H, ..., T, K]
        return attend(
            content_q, k, v, position, places.visible, 1.0, dropatt, dropout_key,  # (a) + (c), softmax, values
            content=places.content, zero_keys=places.zero_keys,
        )  # fmt: skip

    if w.u is None:
        queries = _times(q, w.scale), None
    else:
        queries = _times(q + w.u, w.scale), _times(q + w.v, w.scale)
    return memory.output(memory.attend(block, *queries, k, v), w)  # [B, T, E]


def score_terms(q, k, r, u, v, scale, first, content=None):
    """The four terms of the scores one by one; their sum is what the softmax gets, before the mask.

        (a) q . k     content: what the query holds against what is at the key
        (b) q . r     position, by what the query holds: against the distance of the key
        (c) u . k     content for every query alike: how much the key is worth looking at
        (d) v . r     position for every query alike: how much the distance is worth looking at

    Args:
        q, k: `[H, B, T, D]` and `[H, B, K, D]`.
        r, first: see `shifted_scores`.
        u, v: `[H, D]`.
        scale: of all terms, D**-0.5.
        content: see `attend`.

    Returns:
        `(a, b, c, d)`, `[H, B, T, K]` each. (b) and (d) have some other distance's score at keys in the future.
    """
    q, u, v = (tf.broadcast_to(x, tf.shape(q)) * scale for x in (q, u[:, None, None], v[:, None, None]))
    a, c = (tf.matmul(x, k, transpose_b=True) for x in (q, u))
    b, d = (shifted_scores(x, r, first) for x in (q, v))
    return (a, b, c, d) if content is None else (a * content, b, c * content, d)


# ---------------------------------------------------------------------------------------------- feed-forward net, layer


class FeedForward(NamedTuple):
    """Weights of the net that follows attention."""

    kernel_1: tf.Tensor  # [E, F]
    bias_1: tf.Tensor  # [F]
    kernel_2: tf.Tensor  # [F, E]
    bias_2: tf.Tensor  # [E]


def feed_forward(x, w, activation=None, rate=0.0, dropout_key=None):
    """`dropout(activation(x kernel_1 + bias_1)) kernel_2 + bias_2`, at every position by itself.

    Args:
        x: `[..., E]`.
        w: `FeedForward`.
        activation: function of a tensor; `None` for relu.
        rate, dropout_key: see `dropout`.

    Returns:
        A tensor like `x`.
    """
    *rows, _ = keras.ops.shape(x)
    if activation is None:
        inner = ops.relu_layer(x, w.kernel_1, w.bias_1, rate, dropout_key)  # [..., F]
    else:
        inner = activation(ops.add_bias(ops.project(x, w.kernel_1), w.bias_1))  # [any, F]
        inner = dropout(tf.reshape(inner, [*rows, w.kernel_1.shape[1]]), rate, dropout_key)
    output = ops.add_bias(ops.project(inner, w.kernel_2), w.bias_2)
    return tf.reshape(output, [*rows, w.kernel_2.shape[1]])


def add_norm(x, y, norm, rate=0.0, dropout_key=None):
    """`layer_norm(x + dropout(y))`, `[B, T, E]`. `norm` is `(gamma, beta, epsilon)`."""
    return ops.residual_norm(x, y, *norm, rate, dropout_key)


# -------------------------------------------------------------------------------------------------------- the network


def in_turn(layers, h):
    """Every layer reads what the one before it gives (section 3.2).

    Args:
        layers: functions of `[B, T, E]`, each of which has its own memory.
        h: `[B, T, E]`, the embeddings.

    Returns:
        `(h, inputs)`: what the last layer gives, and what each layer was given.
    """
    inputs = []
    for layer in layers:
        inputs.append(h)
        h = layer(h)  # [B, T, E]
    return h, inputs


def new_memory(memory, h, mem_len):
    """The last `mem_len` positions of memory and segment, without gradient (section 3.2, SG).

    Args:
        memory: `[B, any, E]`, or `None` where the segment alone is long enough.
        h: `[B, T, E]`, what the layer was given for the segment.

    Returns:
        `[B, min(any + T, mem_len), E]`.
    """
    h = h if memory is None else tf.concat([memory, h], 1)
    return tf.stop_gradient(h[:, -mem_len:])


# ------------------------------------------------------------------------------------- adaptive embedding and softmax


class Cluster(NamedTuple):
    """Words `first <= id < first + N` of the vocabulary."""

    first: int
    table: tf.Tensor  # [N, width of the cluster], of embedding and softmax
    projection: tf.Tensor | None  # [width of the cluster, E]; `None` where nothing is projected
    bias: tf.Tensor | None = None  # [N], of the softmax


def embed(ids, clusters, width, dtype, route):
    """Rows of the clusters' tables, projected, times `sqrt(width)` (Baevski and Auli 2019).

    Args:
        ids: int `[n]`.
        clusters: list of `Cluster`.
        width: E.
        dtype: of products and result.
        route: how tokens reach their clusters, see `kernels/routing.py`.

    Returns:
        `[n, E]`.
    """

    def rows_of(cluster, ids):
        row = tf.cast(ops.embedding_lookup(tf.convert_to_tensor(cluster.table), ids - cluster.first), dtype)
        return row if cluster.projection is None else matmul(row, tf.cast(cluster.projection, dtype))  # [any, E]

    if len(clusters) == 1:
        return rows_of(clusters[0], ids) * width**0.5
    h = tf.zeros([tf.size(ids), width], dtype)
    for cluster, after in zip(clusters, [*clusters[1:], None], strict=True):
        here = (ids >= cluster.first) if cluster.first else tf.ones_like(ids, tf.bool)  # ids below 0 have no row
        here = here if after is None else here & (ids < after.first)
        h += route(here, lambda ids, cluster=cluster: rows_of(cluster, ids), cluster.first, ids)
    return h * width**0.5


def logits(h, table, bias, projection=None):
    """`[..., N]`: products in the dtype of `h`, sums in float32 or float64."""
    if projection is not None:
        h = matmul(h, tf.cast(projection, h.dtype), transpose_b=True)
    product = at_least_float32(matmul(h, tf.cast(table, h.dtype), transpose_b=True))
    return product + tf.cast(bias, product.dtype)


def head_of(first, entries):
    """Table and bias of the first softmax: the words of the first cluster, then an entry for each later cluster."""
    if entries is None:
        return first.table, first.bias
    return tf.concat([first.table, entries[0]], 0), tf.concat([first.bias, entries[1]], 0)


def nll(h, labels, clusters, entries, route):
    """Negative log-likelihood of every label (Grave et al. 2017).

        p(word) = p(word | head)                                  of a word of the first cluster
        p(word) = p(entry of its cluster | head) p(word | cluster)       of the others

    Args:
        h: `[n, E]`.
        labels: int32 `[n]`.
        clusters: list of `Cluster`.
        entries: weight `[n_cluster, E]` and bias `[n_cluster]` of the later clusters, or `None`.
        route: see `embed`.

    Returns:
        `[n]`, nats.
    """
    first, *others = clusters
    n_first = first.bias.shape[0]
    cluster_of = tf.searchsorted([cluster.first for cluster in clusters], labels, side="right") - 1
    of_head = tf.where(cluster_of <= 0, labels, n_first + cluster_of - 1)
    total = ops.cross_entropy(of_head, logits(h, *head_of(first, entries), first.projection))
    for i, cluster in enumerate(others, 1):

        def word_nll(h, labels, cluster=cluster):
            of_words = logits(h, cluster.table, cluster.bias, cluster.projection)  # [any, N]
            return ops.cross_entropy(labels - cluster.first, of_words)

        total += route(cluster_of == i, word_nll, cluster.first, h, labels)
    return total


def log_probs(h, clusters, entries=None):
    """Log-probabilities of all words in the order of the vocabulary: `[..., E]` to `[..., n_token]`."""
    first, *others = clusters
    head = tf.nn.log_softmax(logits(h, *head_of(first, entries), first.projection))
    n_first = first.bias.shape[0]
    found = [head[..., :n_first]]
    for i, cluster in enumerate(others):
        tail = tf.nn.log_softmax(logits(h, cluster.table, cluster.bias, cluster.projection))
        found.append(head[..., n_first + i, None] + tail)
    return tf.concat(found, -1)
