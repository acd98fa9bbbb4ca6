"""Transformer-XL, the equations: functions of arrays and weights (Dai et al. 2019; Grave et al. 2017).

A formula does not say which kernel computes it, in which dtype and in how many passes. `txl_tf/kernels` decides that.
Besides its segment, a layer attends to a *memory*: hidden states in training, cached keys and values in inference. The
equations are the same for all kinds of memory.

Shapes:
    B: batch      T: tgt_len, the segment      M: mem_len, the memory      K: keys, M + T
    H: n_head     D: d_head      E: d_model     F: d_inner      N: words of a cluster      R: rows of a table
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import tensorflow as tf

import txl_tf.kernels as ops
from txl_tf.kernels.attending import attend
from txl_tf.kernels.dropout import NO_DROP, Drop
from txl_tf.kernels.routing import rows_of
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.kernels.watching import current_record

# --------------------------------------------------------------------------------------------------- positions, masks


def sinusoids(positions: Tensor, frequencies: Tensor) -> Tensor:
    """R of the paper (section 3.3): the sines of all angles `position * frequency`, then their cosines.

    Args:
        positions: `[n]`.
        frequencies: `[E / 2]`.

    Returns:
        `[n, E]`.
    """
    angles = tf.einsum("i,j->ij", positions, frequencies)  # [n, E / 2]
    return tf.concat([tf.sin(angles), tf.cos(angles)], -1)  # [n, E]


def causal(tgt_len: Size, mem_len: Size, same_length: bool = False, zero: Size = 0) -> Tensor:
    """The causal mask, bool `[T, K]`, true where a query sees a key.

    Query i sees the memory and the segment up to itself; with `same_length`, only the last M + 1 of these keys.

    Args:
        tgt_len, mem_len: T and M.
        same_length: whether every query sees the same number of keys.
        zero: 0, or a tensor that is 0, see `unknown_zero` of `transformer_xl/network.py`.

    For a ring of cached keys, `_max_distance` of `transformer_xl/cache.py` applies the same rule.
    """
    klen = mem_len + tgt_len
    return visible_keys(zero + tf.range(mem_len, klen), zero + tf.range(klen), mem_len, same_length)


def visible_keys(query: Tensor, key: Tensor, mem_len: Size, same_length: bool = False) -> Tensor:
    """The rule of `causal` for queries whose indices among the keys are known: bool `[..., T, K]`.

    Args:
        query: int32 `[..., T]`, the indices of the queries.
        key: int32 `[K]`, the indices of the keys.
        mem_len, same_length: see `causal`.
    """
    query = query[..., None]
    visible = key <= query
    return visible & (key >= query - mem_len) if same_length else visible


def rel_shift(x: Tensor, first: Size) -> Tensor:
    """Shifts row i of a matrix by i columns to the right: `out[..., i, j] = x[..., i, first + j - i]` (appendix B).

    Row i of `x` contains the scores of query i, ordered by distance. Attention needs them ordered by key, and the
    distance of a key grows by one from each query to the next. If the same numbers are read as rows that are one
    shorter, every row starts one column later than the row before it. With 2 queries and `first` 2:

        0 a b c    without the first 2,    b c 0
        0 d e f    as rows of 3: ----->    d e f

    Where the column `first + j - i` does not exist in `x`, the result contains a score of another row. In
    Transformer-XL, this happens only for keys in the future, which are masked.

    Args:
        x: `[..., T, R]`.
        first: int or int scalar tensor in `[0, T]`.

    Returns:
        `[..., T, R - 1]`.
    """
    *lead, qlen, width = shape_of(x)
    x = tf.reshape(x, [-1, qlen * width])
    x = tf.slice(x, [0, first], [-1, qlen * (width - 1)])  # the gradient of x[:, first:] is ten times slower
    return tf.reshape(x, [*lead, qlen, width - 1])


def shifted_scores(q: Tensor, r: Tensor, first: Size) -> Tensor:
    """Scores of the queries for every distance in a table, shifted so that column j is the score of key j.

    Query i and key j use row `first + j - i` of the table. The table has `K + 1` rows for distances in one direction
    (Transformer-XL), and `2 * T` rows for distances in both directions (TENER).

    Args:
        q: `[H, ..., T, D]`, queries.
        r: `[H, R, D]`, the table.
        first: int or int scalar tensor in `[0, T]`, the row that the first query and the first key use.

    Returns:
        `[H, ..., T, R - 1]`. See `rel_shift` for columns whose row is outside the table.
    """
    n_head, *rows, d_head = shape_of(q)
    scores = tf.matmul(tf.reshape(q, [n_head, -1, d_head]), r, transpose_b=True)
    return rel_shift(tf.reshape(scores, [n_head, *rows, shape_of(r)[1]]), first)


# ---------------------------------------------------------------------------------------------------------- attention


class Zeros(NamedTuple):
    """Keys and values of a zero memory with `pre_lnorm`, where layer norm turns zeros into beta.

    Attention subtracts `k` and `v` from all keys and values. Then the key and the value of a zero memory are zeros, as
    without `pre_lnorm`: so caches can begin with zeros, and documents that have ended can be replaced by zeros.

    The probabilities do not change, because all scores of a query fall by the same number. If the scheme turns keys,
    the scores fall by a number that depends on the distance. Attention adds this number again, as a score by position.

    The result of attention falls by `v`, because the probabilities sum to 1. So `v` is added to the result.
    """

    k: Tensor  # broadcasts to the keys
    v: Tensor  # broadcasts to the values
    output: Tensor | None = None  # [E], `v` after the output projection: inference adds it to the output


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KeyPositions:
    """The positions of keys as some queries see them, and which of the keys the queries see.

    A subclass knows the order of the keys, and defines the two methods.
    """

    klen: Size  # K
    visible: Tensor | None = None  # bool, broadcasts to [H, ..., T, K]; `None` for all
    # A key for every distance, in the order in which the subclass needs them: projected sinusoids in the relative
    # scheme. In a scheme that turns keys, the key of a zero memory, if there are `Zeros`. In others, `None`.
    r: Tensor | None = None
    # Arguments of `attend` for keys and values that count as zeros.
    content: Tensor | None = None
    zero_keys: Size = 0
    zero_value: Tensor | None = None

    def distances(self, q: Tensor) -> Tensor:
        """int32 `[T, K]`: the distance from each query of `[..., T, D]` back to each key that it sees."""

    def scores_by_distance(self, q: Tensor) -> Tensor:
        """`[H, ..., T, K]`: products of queries `[H, ..., T, D]` with the row of `r` for the distance of each key."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OrderedKeyPositions(KeyPositions):
    """`KeyPositions` of keys in the order of the text."""

    # `r` is [H, R, D].
    first: Size = 0  # see `shifted_scores`
    query_indices: Tensor | None = None  # int32 [T], the queries' indices among the keys; `None`: the last T keys

    def distances(self, q: Tensor) -> Tensor:
        """As `KeyPositions.distances`; negative for keys in a query's future."""
        tgt_len = shape_of(q)[-2]
        last = self.klen - tgt_len + tf.range(tgt_len)
        query_indices = last if self.query_indices is None else self.query_indices
        return query_indices[:, None] - tf.range(self.klen)

    def scores_by_distance(self, q: Tensor) -> Tensor:
        return shifted_scores(q, self.r, self.first)


class Scheme(Protocol):
    """How attention uses positions. `Positions` of `txl_tf/nn/position_schemes.py` has more about these functions."""

    @property
    def turns(self) -> bool:
        """Whether the scheme rotates queries and keys."""
        ...

    def turn(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Rotates queries or keys `[..., n, D]`. `numbers` says how many tokens precede each: int32 `[..., n]`."""
        ...

    def queries(self, q: Tensor, w: "Attention") -> tuple[Tensor, Tensor]:
        """The queries for the content of the keys, and those for their positions; scaled."""
        ...

    def scores(self, q: Tensor, places: KeyPositions) -> Tensor | None:
        """Scores to add to the products of queries and keys: `[H, ..., T, K]`; `None` if there are none."""
        ...


def score_scale(d_head: int) -> float:
    """The factor of all scores, `1 / sqrt(D)`.

    Training, cached keys and values, and pictures of the terms use this function.
    """
    return d_head**-0.5


class Attention(NamedTuple):
    """Weights of a layer's attention, and its scheme of positions."""

    # The kernels of queries, keys and values, side by side: [E, 3 * H * D]. With cached keys and values, a tuple of
    # the three, [E, H * D] each.
    qkv: Any
    o: Tensor  # [H * D, E]
    n_head: int
    scale: float  # of the queries: `score_scale(D)`, or 1 if the weights contain it already
    scheme: Scheme  # of positions
    # Only the relative scheme has u and v, r_w_bias and r_r_bias of the original. They broadcast to the queries.
    u: Tensor | None = None
    v: Tensor | None = None
    zeros: Zeros | None = None  # `None`: the key and the value of a zero memory are zeros, or nothing counts as zeros


# Attention of some queries: `block(content_q, position_q, k, v, key_positions)` returns `[H, ..., T, D]`. The content
# queries `[H, ..., T, D]`, keys and values may be `RowsFirst`, see `attend`.
Block: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, KeyPositions], Tensor]


class AttentionMemory(Protocol):
    """The memory of an attention for one segment: hidden states, or cached keys and values."""

    def project(self, h: Tensor, w: Attention) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the segment `h`, and keys and values.

        They are the keys and values of memory and segment, `[H, B, K, D]`, if the memory is hidden states. They are
        those of the segment, `[B, H, T, D]`, if keys and values are cached.
        """
        ...

    def token_positions(self, k: Tensor) -> Tensor:
        """How many tokens precede each of these keys: int32 `[K]`; if cached, `[T]` or `[B, 1, T]`."""
        ...

    def attend(self, block: Block, content_q: Tensor, position_q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Adds cached keys and values, and calls `block` for all queries, or for one part of them after the other."""
        ...

    def output(self, attn_vec: Tensor, w: Attention) -> Tensor:
        """Joins and projects the results of the heads: `[B, T, E]`."""
        ...


def project_distances(r: Tensor, r_kernel: Tensor, n_head: int) -> Tensor:
    """Projects the sinusoids of the distances, as keys are projected: `[1, K, E]` to `[H, K, D]`."""
    (r_k,) = ops.project_heads(r, r_kernel, 1, n_head)
    return tf.squeeze(r_k, 1)


def attention(h: Tensor, memory: AttentionMemory, w: Attention, drop: Drop = NO_DROP) -> Tensor:
    """Attention from a segment to its memory and to itself (section 3.3).

    The score of a query i and a key j has four terms. (a) and (c) are one product, and so are (b) and (d):

        A_ij = q_i.k_j + q_i.r_(i-j) + u.k_j + v.r_(i-j)        (a), (b), (c), (d)
             = (q_i + u).k_j + (q_i + v).r_(i-j)                each times D**-0.5

    This is the relative scheme. Other schemes of positions add other scores, or rotate queries and keys, or do neither.

    Args:
        h: `[B, T, E]`, the segment.
        memory: the memory, which says how queries, keys and values are projected, and in how many parts they attend.
        w: the weights.
        drop: dropout of the probabilities.

    Returns:
        `[B, T, E]`.
    """
    q, k, v = memory.project(h, w)
    if w.zeros is not None:
        k = k - w.zeros.k
        v = v - w.zeros.v
    unturned_q = q
    if w.scheme.turns:
        positions = memory.token_positions(k)
        q = w.scheme.turn(q, positions[..., -shape_of(h)[1] :])  # the queries are the last tokens
        k = w.scheme.turn(k, positions)
    content_q, position_q = w.scheme.queries(q, w)
    restores_zeros = w.zeros is not None and w.scheme.turns
    if restores_zeros:
        # `Zeros.k` was subtracted from all keys. As keys turn, its score depends on the distance: `block` adds it. The
        # keys of a zero memory in `KeyPositions.r` are turned by minus their distance, so the query stands at 0.
        zero_positions = tf.zeros([shape_of(h)[1]], tf.int32)
        position_q, _ = w.scheme.queries(w.scheme.turn(unturned_q, zero_positions), w)
    record = current_record()

    def block(content_q: Tensor, position_q: Tensor, k: Tensor, v: Tensor, key_positions: KeyPositions) -> Tensor:
        """Attention of some queries, see `Block`."""
        if record is not None:
            record.parts.append((q, k, key_positions))  # `q` before u and v are added, not this block's queries
        # (b) + (d): [H, ..., T, K]; `None` if there are none.
        if restores_zeros:
            position = key_positions.scores_by_distance(position_q)
        else:
            position = w.scheme.scores(position_q, key_positions)
        # (a) + (c), the softmax of the sum over the keys that a query sees, times the values: [H, ..., T, D]. The
        # queries are scaled already.
        return attend(
            content_q, k, v, position, key_positions.visible, dropatt=drop.rate, dropout_key=drop.key,
            content=key_positions.content, zero_keys=key_positions.zero_keys, zero_value=key_positions.zero_value,
        )  # fmt: skip

    return memory.output(memory.attend(block, content_q, position_q, k, v), w)  # [B, T, E]


def score_terms(
    q: Tensor, k: Tensor, key_positions: KeyPositions, u: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four terms of the scores, separately. Their sum, masked, is the input of the softmax.

        (a) q . k     content: the query against the key
        (b) q . r     position: the query against the distance of the key
        (c) u . k     content, the same for every query: how important the key is
        (d) v . r     position, the same for every query: how important the distance is

    Args:
        q, k: `[H, B, T, D]` and `[H, B, K, D]`.
        key_positions: the positions of the keys.
        u, v: `[H, D]`.
        scale: factor of all terms, see `score_scale`.

    Returns:
        `(a, b, c, d)`, `[H, B, T, K]` each. At keys in the future, (b) and (d) contain the score of another distance.
        (a) and (c) are 0 where a key counts as zeros.
    """
    q, u, v = (tf.broadcast_to(x, tf.shape(q)) * scale for x in (q, u[:, None, None], v[:, None, None]))
    a = tf.matmul(q, k, transpose_b=True)
    b = key_positions.scores_by_distance(q)
    c = tf.matmul(u, k, transpose_b=True)
    d = key_positions.scores_by_distance(v)
    content = key_positions.content
    return (a, b, c, d) if content is None else (a * content, b, c * content, d)


# ---------------------------------------------------------------------------------------------- feed-forward net, layer


class FeedForward(NamedTuple):
    """Weights of the net that follows attention."""

    kernel_1: Tensor  # [E, F], or [E, 2 F] for a gated activation
    bias_1: Tensor  # [F], or [2 F]
    kernel_2: Tensor  # [F, E]
    bias_2: Tensor  # [E]


def feed_forward(
    x: Tensor, w: FeedForward, drop: Drop = NO_DROP, activation: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """`drop(activation(x kernel_1 + bias_1)) kernel_2 + bias_2`, at every position separately.

    Args:
        x: `[..., E]`.
        w: the weights.
        drop: dropout after the activation.
        activation: function of a tensor; `None` for relu. The result of a gated one, such as `swiglu`, has half the
            width.

    Returns:
        A tensor like `x`.
    """
    *rows, _ = shape_of(x)
    if activation is None:
        inner = ops.relu_layer(x, w.kernel_1, w.bias_1, drop)  # [..., F]
    else:
        inner = activation(ops.add_bias(ops.project(x, w.kernel_1), w.bias_1))  # [any, F]
        inner = drop(tf.reshape(inner, [*rows, w.kernel_2.shape[0]]))
    output = ops.add_bias(ops.project(inner, w.kernel_2), w.bias_2)
    return tf.reshape(output, [*rows, w.kernel_2.shape[1]])


def swiglu(x: Tensor) -> Tensor:
    """The first half of the last axis, through silu, times the second half (Shazeer 2020): `[..., 2 F]` to `[..., F]`.

    With it, `kernel_1` is `[E, 2 F]`: the kernel of the gates and that of the values, side by side.
    """
    gates, values = tf.split(x, 2, -1)
    return tf.nn.silu(gates) * values


def normalized(x: Tensor, norm: Any) -> Tensor:
    """`x` `[..., E]`, normalised by `norm`: `(gamma, beta, epsilon)` of layer norm, or a function of a tensor."""
    return norm(x) if callable(norm) else ops.layer_norm(x, *norm)


def attention_block(
    h: Tensor, memory: AttentionMemory, w: Attention, norm: Any, drop_probs: Drop = NO_DROP,
    drop_output: Drop = NO_DROP, pre_lnorm: bool = False,
) -> Tensor:  # fmt: skip
    """Attention with its residual connection and layer norm: `[B, T, E]`.

        norm(h + drop(attention(h)))        without `pre_lnorm`, as in the paper
        h + drop(attention(norm(h)))        with `pre_lnorm`; the caller has normalised the memory

    Args:
        h, memory, w: see `attention`.
        norm: see `normalized`.
        drop_probs: dropout of the probabilities.
        drop_output: dropout of the attention's output, before the residual connection.
        pre_lnorm: whether to normalise before attention, not after the residual connection.
    """
    if pre_lnorm:
        return h + drop_output(attention(normalized(h, norm), memory, w, drop_probs))
    return ops.residual_norm(h, attention(h, memory, w, drop_probs), norm, drop_output)


def feed_forward_block(
    h: Tensor, w: FeedForward, norm: Any, drop_inner: Drop = NO_DROP, drop_output: Drop = NO_DROP,
    pre_lnorm: bool = False, activation: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The feed-forward net with its residual connection and layer norm, see `attention_block` and `feed_forward`."""
    if pre_lnorm:
        return h + drop_output(feed_forward(normalized(h, norm), w, drop_inner, activation))
    return ops.residual_norm(h, feed_forward(h, w, drop_inner, activation), norm, drop_output)


# ------------------------------------------------------------------------------------------------------- the new memory


def new_memory(memory: Tensor | None, h: Tensor, mem_len: int) -> Tensor:
    """The last `mem_len` positions of memory and segment, without gradient (section 3.2, SG).

    Whoever changes this rule must also change its other forms: for rows that end with padding, `cache_mems` of
    `transformer_xl/network.py`; for shapes, `_new_mem_len` of its `TransformerXL`; for documents that have ended,
    `Mask.forget` of `transformer_xl/documents.py`; for a ring of cached keys, which a segment overwrites,
    `_max_distance` of `transformer_xl/cache.py`.

    Args:
        memory: `[B, any, E]`, or `None` if the segment alone is long enough.
        h: `[B, T, E]`, the layer's input for the segment.
        mem_len: M, 1 or more.

    Returns:
        `[B, min(any + T, mem_len), E]`.
    """
    h = h if memory is None else tf.concat([memory, h], 1)
    return tf.stop_gradient(h[:, -mem_len:])


# ------------------------------------------------------------------------------------- adaptive embedding and softmax


class Cluster(NamedTuple):
    """Words `first <= id < first + N` of the vocabulary."""

    first: int
    table: Tensor  # [N, width of the cluster]; embedding and softmax share it
    projection: Tensor | None  # [width of the cluster, E]; `None`: nothing is projected
    bias: Tensor = None  # [N]; only the softmax has one


def embed(ids: Tensor, clusters: Sequence[Cluster], width: int, dtype: Any, route: Callable[..., Tensor]) -> Tensor:
    """Rows of the clusters' tables, projected, times `sqrt(width)` (Baevski and Auli 2019).

    Args:
        ids: int `[n]`.
        clusters: list of `Cluster`.
        width: E.
        dtype: dtype of the products and the result.
        route: see `kernels/routing.py`; it computes each cluster for the tokens that belong to it.

    Returns:
        `[n, E]` in `dtype`.
    """
    first, *later = clusters
    if not later:
        return rows_of(first.table, first.projection, ids, dtype) * width**0.5
    # The number of the cluster of each id. An id below 0 is in the first cluster, so that its lookup raises an error.
    cluster_of = tf.reduce_sum(tf.cast(ids[:, None] >= [cluster.first for cluster in later], tf.int32), 1)
    parts: list[Tensor] = []
    for i, cluster in enumerate(clusters):

        def embed_words(ids: Tensor, cluster: Cluster = cluster) -> Tensor:
            return rows_of(cluster.table, cluster.projection, ids - cluster.first, dtype)  # [any, E]

        parts.append(route(cluster_of == i, embed_words, cluster.first, ids))  # [n, E]
    return sum(parts[1:], parts[0]) * width**0.5  # a token has zeros in all parts but one


def head_of(first: Cluster, entries: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Table and bias of the first softmax: the words of the first cluster, then one entry for each later cluster.

    `entries` are the weight and the bias of these entries, see `nll`; `None` if there is one cluster.
    """
    if entries is None:
        return first.table, first.bias
    return tf.concat([first.table, entries[0]], 0), tf.concat([first.bias, entries[1]], 0)


def nll(
    h: Tensor, labels: Tensor, clusters: Sequence[Cluster], entries: tuple[Tensor, Tensor] | None,
    route: Callable[..., Tensor], label_smoothing: float = 0.0, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """Negative log-likelihood of every label (Grave et al. 2017).

        p(word) = p(word | head)                                      for words of the first cluster
        p(word) = p(entry of its cluster | head) p(word | cluster)    for all other words

    Args:
        h: `[n, E]`.
        labels: int32 `[n]`.
        clusters: list of `Cluster`.
        entries: weight `[n_cluster, width of the first cluster]` and bias `[n_cluster]` of the entries that stand for
            the `n_cluster` later clusters in the first softmax; `None` if there is one cluster.
        route: see `embed`.
        label_smoothing, z_loss: s and z of another objective, whose gradient the result has: `(1 - s)` times the nll, s
            times the mean nll of all words, and z times the sum of `log(Z)^2`, where Z is the normalizer of each
            softmax above (Szegedy et al. 2016; Chowdhery et al. 2022). The value of the result is the nll.

    Returns:
        `[n]`, nats.
    """

    def penalized(nll: Tensor, logits: Tensor) -> Tensor:
        """The value of `nll`, with the gradient of `z_loss` added. `logits` are the logits of its softmax."""
        if not z_loss:
            return nll
        # Divide by 1 - s, because the smoothing below multiplies the gradient of the total by 1 - s.
        log_z: Any = tf.reduce_logsumexp(logits, -1)
        return nll + only_gradient(z_loss / (1 - label_smoothing) * log_z**2)

    first, *later = clusters
    n_first = first.bias.shape[0]
    cluster_of = tf.searchsorted([cluster.first for cluster in clusters], labels, side="right") - 1
    head_labels = tf.where(cluster_of <= 0, labels, n_first + cluster_of - 1)
    head_logits = ops.logits(h, *head_of(first, entries), first.projection)
    total = penalized(ops.cross_entropy(head_labels, head_logits), head_logits)
    for i, cluster in enumerate(later, 1):

        def word_nll(h: Tensor, labels: Tensor, cluster: Cluster = cluster) -> Tensor:
            word_logits = ops.logits(h, cluster.table, cluster.bias, cluster.projection)  # [any, N]
            return penalized(ops.cross_entropy(labels - cluster.first, word_logits), word_logits)

        total += route(cluster_of == i, word_nll, cluster.first, h, labels)
    if label_smoothing:
        nll_of_all = -tf.reduce_mean(_log_probs(h, head_logits, clusters), -1)
        total += only_gradient(label_smoothing * (nll_of_all - total))
    return total


def only_gradient(x: Tensor) -> Any:
    """Zeros with the gradient of `x`."""
    return x - tf.stop_gradient(x)


def log_probs(h: Tensor, clusters: Sequence[Cluster], entries: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Log-probabilities of all words, in the order of the vocabulary, `[..., n_token]`.

    Args:
        h: hidden states, `[..., E]`.
        clusters: the clusters of the vocabulary, the most frequent words first.
        entries: see `nll`.
    """
    first = clusters[0]
    return _log_probs(h, ops.logits(h, *head_of(first, entries), first.projection), clusters)


def _log_probs(h: Tensor, head_logits: Tensor, clusters: Sequence[Cluster]) -> Tensor:
    """As `log_probs`, with the logits of the first softmax, `[..., words of the first cluster + later clusters]`."""
    first, *later = clusters
    head = tf.nn.log_softmax(head_logits)
    n_first = first.bias.shape[0]
    parts = [head[..., :n_first]]
    for i, cluster in enumerate(later):
        tail = tf.nn.log_softmax(ops.logits(h, cluster.table, cluster.bias, cluster.projection))
        parts.append(head[..., n_first + i, None] + tail)
    return tf.concat(parts, -1)
