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

import txl_tf.kernels as ops
from txl_tf.kernels.dropout import NO_DROP
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


class Attention(NamedTuple):
    """Weights of a layer's attention, and what it knows of positions."""

    qkv: tf.Tensor  # [E, 3 * H * D]: of queries, then keys, then values
    o: tf.Tensor  # [H * D, E]
    n_head: int
    scale: float  # of the queries, D**-0.5; 1 where the weights have it already
    positions: object  # a scheme, see `txl_tf/nn/position_schemes.py`
    u: tf.Tensor | None = None  # of the relative scheme; broadcasts to the queries; the original's r_w_bias
    v: tf.Tensor | None = None  # the same; the original's r_r_bias


class Places(NamedTuple):
    """Where the keys of some queries stand, and which of them the queries see.

    Other kinds of memory may have places of their own, with the same attributes and functions.
    """

    klen: tf.Tensor | int  # K
    visible: tf.Tensor | None = None  # bool, broadcasts to [H, ..., T, K]; `None` for all
    r: tf.Tensor | None = None  # [H, R, D], of the relative scheme: the projected table of distances
    first: tf.Tensor | int = 0  # see `shifted_scores`
    special: dict = {}  # other arguments of `attend`, of keys and values that count as zeros
    slots: tf.Tensor | None = None  # int32 [T], of the queries among the keys; `None` for the last T ones

    def distances(self, q):
        """int32 `[T, K]`: how far back each key lies from each of the queries `[..., T, D]`; below 0 in the future."""
        tgt_len = keras.ops.shape(q)[-2]
        slots = self.klen - tgt_len + tf.range(tgt_len) if self.slots is None else self.slots
        return slots[:, None] - tf.range(self.klen)

    def scores_by_distance(self, q):
        """`[H, ..., T, K]`: products of queries `[H, ..., T, D]` with the row of `r` for the distance of each key."""
        return shifted_scores(q, self.r, self.first)


def project_distances(r, r_kernel, n_head):
    """The keys of distances: `[1, K, E]` to `[H, K, D]`."""
    (r_k,) = ops.project_heads(r, r_kernel, 1, n_head)
    return tf.squeeze(r_k, 1)


def attention(h, memory, w, drop=NO_DROP):
    """Attention of a segment to its memory and itself (section 3.3).

    The score of a query i and a key j has four terms. (a) and (c) are one product, and so are (b) and (d):

        A_ij = q_i.k_j + q_i.r_(i-j) + u.k_j + v.r_(i-j)        (a), (b), (c), (d)
             = (q_i + u).k_j + (q_i + v).r_(i-j)                each times D**-0.5

    That is the relative scheme. Other schemes of positions add other scores, or turn queries and keys, or do neither.

    Args:
        h: `[B, T, E]`.
        memory: an object with `project(h, w)`, which returns the queries of the segment and the keys and values of
            all that it sees; with `numbers(k)`, how many tokens stand before each key; with `attend(block, ...)`, which
            calls `block` for all queries or part by part; and with `output(heads, w)`, the last projection.
        w: `Attention`.
        drop: `Drop`, of the probabilities.

    Returns:
        `[B, T, E]`.
    """
    q, k, v = memory.project(h, w)  # [H, B, T, D], [H, B, K, D] twice; or batch first
    if w.positions.turns:
        numbers = memory.numbers(k)  # [K]; the queries are the last ones
        q, k = w.positions.turn(q, numbers[..., -keras.ops.shape(h)[1] :]), w.positions.turn(k, numbers)

    def block(content_q, position_q, k, v, places):
        if watched() is not None:
            watched().parts.append((q, k, places))
        position = w.positions.scores(position_q, places)  # (b) + (d): [H, ..., T, K]
        # (a) + (c), the softmax of the sum over the keys that a query sees, times the values: [H, ..., T, D]
        return ops.attend(content_q, k, v, position, places.visible, 1.0, *drop, **places.special)

    content_q, position_q = w.positions.queries(q, w)
    return memory.output(memory.attend(block, content_q, position_q, k, v), w)  # [B, T, E]


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


def feed_forward(x, w, drop=NO_DROP, activation=None):
    """`drop(activation(x kernel_1 + bias_1)) kernel_2 + bias_2`, at every position by itself.

    Args:
        x: `[..., E]`.
        w: `FeedForward`.
        drop: `Drop`.
        activation: function of a tensor; `None` for relu.

    Returns:
        A tensor like `x`.
    """
    *rows, _ = keras.ops.shape(x)
    if activation is None:
        inner = ops.relu_layer(x, w.kernel_1, w.bias_1, drop)  # [..., F]
    else:
        inner = activation(ops.add_bias(ops.project(x, w.kernel_1), w.bias_1))  # [any, F]
        inner = drop(tf.reshape(inner, [*rows, w.kernel_1.shape[1]]))
    output = ops.add_bias(ops.project(inner, w.kernel_2), w.bias_2)
    return tf.reshape(output, [*rows, w.kernel_2.shape[1]])


def attention_block(h, memory, w, norm, drop_probs=NO_DROP, drop_output=NO_DROP):
    """Attention with its residual and layer norm: `[B, T, E]`.

    Args:
        norm: `(gamma, beta, epsilon)`, or another function of a tensor.
    """
    return ops.residual_norm(h, attention(h, memory, w, drop_probs), norm, drop_output)


def feed_forward_block(h, w, norm, drop_inner=NO_DROP, drop_output=NO_DROP):
    """The feed-forward net with its residual and layer norm, see `attention_block`."""
    return ops.residual_norm(h, feed_forward(h, w, drop_inner), norm, drop_output)


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


def embed(ids, clusters, width, rows_of, route):
    """Rows of the clusters' tables, projected, times `sqrt(width)` (Baevski and Auli 2019).

    Args:
        ids: int `[n]`.
        clusters: list of `Cluster`.
        width: E.
        rows_of: function of `(table, projection, ids)`: rows of the table, projected.
        route: how tokens reach their clusters, see `kernels/routing.py`.

    Returns:
        `[n, E]`.
    """
    first, *others = clusters
    if not others:
        return rows_of(first.table, first.projection, ids) * width**0.5
    parts = []
    for cluster, after in zip(clusters, [*others, None], strict=True):
        here = ids >= cluster.first if cluster is not first else ids < after.first  # an id below 0 has no row
        here = here & (ids < after.first) if after is not None else here

        def embed_words(ids, cluster=cluster):
            return rows_of(cluster.table, cluster.projection, ids - cluster.first)  # [any, E]

        parts.append(route(here, embed_words, cluster.first, ids))  # [n, E]
    return sum(parts[1:], parts[0]) * width**0.5


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
    total = ops.cross_entropy(of_head, ops.logits(h, *head_of(first, entries), first.projection))
    for i, cluster in enumerate(others, 1):

        def word_nll(h, labels, cluster=cluster):
            of_words = ops.logits(h, cluster.table, cluster.bias, cluster.projection)  # [any, N]
            return ops.cross_entropy(labels - cluster.first, of_words)

        total += route(cluster_of == i, word_nll, cluster.first, h, labels)
    return total


def log_probs(h, clusters, entries=None):
    """Log-probabilities of all words in the order of the vocabulary: `[..., E]` to `[..., n_token]`."""
    first, *others = clusters
    head = tf.nn.log_softmax(ops.logits(h, *head_of(first, entries), first.projection))
    n_first = first.bias.shape[0]
    found = [head[..., :n_first]]
    for i, cluster in enumerate(others):
        tail = tf.nn.log_softmax(ops.logits(h, cluster.table, cluster.bias, cluster.projection))
        found.append(head[..., n_first + i, None] + tail)
    return tf.concat(found, -1)
