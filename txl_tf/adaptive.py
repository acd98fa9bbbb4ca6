"""Adaptive embedding and softmax, with tied weights (Baevski and Auli 2019; Grave et al. 2017).

The vocabulary, most frequent words first, is cut into bins: bin i holds the ids `ends[i] <= id < ends[i + 1]` where
`ends = [0, *cutoffs, n_token]`, and its embeddings are `d_embed // div_val**i` wide. The softmax first chooses among
the words of bin 0 and one *cluster* for every later bin, then, within a cluster, among its words.

Shapes:
    B, T: batch, tgt_len      N: n_token, n_i: words of bin i      E: d_embed, e_i: width of bin i      P: d_proj

Both layers hold the original's variables, one for one. `tables` and `projs` below are those of the embedding, shared
with the softmax: `[N, E]` alone where `div_val` is 1, else one `[n_i, e_i]` per bin; a projection is `[e_i, P]`, or
`None` where the widths agree and nothing is projected.
"""

import numbers

import keras
import tensorflow as tf


def check_bins(n_token, d_embed, cutoffs, div_val):
    """Raises ValueError unless `cutoffs` and `div_val` cut the vocabulary into bins that hold something."""
    for name, value in {"n_token": n_token, "div_val": div_val}.items():
        if not isinstance(value, numbers.Integral):
            raise ValueError(f"{name} must be an integer, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not all(isinstance(cutoff, numbers.Integral) for cutoff in cutoffs):
        raise ValueError(f"cutoffs must be integers, got {list(cutoffs)}")
    ends = [0, *cutoffs, n_token]
    if any(left >= right for left, right in zip(ends, ends[1:], strict=False)):
        raise ValueError(f"cutoffs must increase and lie between 0 and n_token={n_token}, got {list(cutoffs)}")
    last = len(cutoffs)
    if d_embed // div_val**last < 1:
        raise ValueError(
            f"div_val={div_val} divides d_embed={d_embed} down to width 0 in bin {last} of {last + 1}: "
            f"d_embed must be at least {div_val**last}, or div_val smaller"
        )


@tf.custom_gradient
def embedding_lookup(table, ids):
    """Rows of `table` `[n, e]` at the integer `ids`, with a dense gradient.

    TensorFlow's own gradient of a lookup is sparse, and adding it to the dense one of the softmax that shares the
    table concatenates the two into rows of both: many times the size of the table, and a wrong norm to clip by.
    """

    def grad(upstream):
        rows = tf.reshape(upstream, [-1, table.shape[1]])
        return tf.math.unsorted_segment_sum(rows, tf.reshape(ids, [-1]), table.shape[0]), None

    return tf.gather(table, ids), grad


def mask_adaptive_embedding_lookup(x, tables, projs, cutoffs, d_proj, dtype="float32"):
    """Embeddings of the tokens `x`, times `sqrt(d_proj)`.

    Batch first; otherwise the documents' function, with the variables passed in.

    Args:
        x: int `[B, T]`, token ids.
        tables, projs: lists of weights, see above.
        cutoffs: ends of the bins but the last.
        d_proj: P, width of the result.
        dtype: of the products and the result.

    Returns:
        `[B, T, P]` in `dtype`.
    """
    if not x.dtype.is_integer:
        raise ValueError(f"tokens must be integers, got {x.dtype.name}")
    x = tf.cast(x, tf.int32)

    def embed(ids, table, proj):
        y = tf.cast(embedding_lookup(tf.convert_to_tensor(table), ids), dtype)
        return y if proj is None else tf.matmul(y, tf.cast(proj, dtype))

    if len(tables) == 1:
        y = embed(x, tables[0], projs[0])
    else:
        starts, ends = [0, *cutoffs], [*cutoffs, tf.int32.max]
        shape = tf.concat([tf.shape(x), [d_proj]], 0)
        y = tf.zeros(shape, dtype)
        for start, end, table, proj in zip(starts, ends, tables, projs, strict=True):
            mask = (x >= start) & (x < end)
            cur_y = embed(tf.boolean_mask(x, mask) - start, table, proj)
            y += tf.scatter_nd(tf.cast(tf.where(mask), tf.int32), cur_y, shape)
    return y * d_proj**0.5


def _logits(hidden, weight, bias, proj):
    """float32 `[..., n]`: products in the dtype of `hidden`, sums and the softmax after them in float32."""
    if proj is not None:
        hidden = tf.matmul(hidden, tf.cast(proj, hidden.dtype), transpose_b=True)
    product = tf.matmul(hidden, tf.cast(weight, hidden.dtype), transpose_b=True)
    return tf.cast(product, tf.float32) + tf.cast(bias, tf.float32)


def _split_bins(tables, biases):
    """The weights of every bin, `[n_i, e_i]` each. One table is split, whose gradient is then one concatenation."""
    if len(tables) == len(biases):
        return [tf.convert_to_tensor(table) for table in tables]
    return tf.split(tables[0], [bias.shape[0] for bias in biases])


def _head(weights, biases, clusters):
    """Weight and bias of the first softmax: the words of bin 0, then the clusters."""
    if clusters is None:
        return weights[0], biases[0]
    cluster_w, cluster_b = clusters
    return tf.concat([weights[0], cluster_w], 0), tf.concat([biases[0], cluster_b], 0)


def mask_adaptive_logsoftmax(hidden, target, tables, projs, biases, clusters=None):
    """Negative log-likelihood of every target, each in its place.

    Batch first; otherwise the original's function with `return_mean=False` and the variables passed in. The head's
    column of bin i is `n_0 + i - 1`, as in the original.

    Args:
        hidden: `[B, T, P]`.
        target: int `[B, T]`.
        tables: the embedding's tables.
        projs: the projection of every bin, or `None`s.
        biases: one `[n_i]` per bin.
        clusters: weight `[bins - 1, E]` and bias `[bins - 1]` of the clusters; `None` for a single bin.

    Returns:
        float32 `[B, T]`, nats.
    """
    weights = _split_bins(tables, biases)
    head_weight, head_bias = _head(weights, biases, clusters)
    ends = tf.cumsum([bias.shape[0] for bias in biases])
    target = tf.cast(target, tf.int32)
    bin_of = tf.searchsorted(ends, tf.reshape(target, [-1]), side="right")
    bin_of = tf.reshape(bin_of, tf.shape(target))

    head_target = tf.where(bin_of == 0, target, ends[0] + bin_of - 1)
    nll = tf.nn.sparse_softmax_cross_entropy_with_logits(head_target, _logits(hidden, head_weight, head_bias, projs[0]))
    for i in range(1, len(biases)):
        mask = bin_of == i
        tail_nll = tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.boolean_mask(target, mask) - ends[i - 1],
            _logits(tf.boolean_mask(hidden, mask), weights[i], biases[i], projs[i]),
        )
        nll += tf.scatter_nd(tf.cast(tf.where(mask), tf.int32), tail_nll, tf.shape(target))
    return nll


def adaptive_log_probs(hidden, tables, projs, biases, clusters=None):
    """The full distribution over the vocabulary, normalised over all bins.

    Args: those of `mask_adaptive_logsoftmax`.

    Returns:
        float32 `[B, T, N]`, log-probabilities in vocabulary order.
    """
    weights = _split_bins(tables, biases)
    head = tf.nn.log_softmax(_logits(hidden, *_head(weights, biases, clusters), projs[0]))
    n_0 = biases[0].shape[0]
    log_probs = [head[..., :n_0]]
    for i in range(1, len(biases)):
        tail = tf.nn.log_softmax(_logits(hidden, weights[i], biases[i], projs[i]))
        log_probs.append(head[..., n_0 + i - 1, None] + tail)
    return tf.concat(log_probs, -1)


class _Bins(keras.layers.Layer):
    """What embedding and softmax have in common: the bins, and which of them are projected.

    Keras does not cast the weights (`autocast=False`): the pure functions do, what they use and where they use it.
    """

    def __init__(
        self, n_token, d_embed, d_proj, cutoffs=(), div_val=1, proj_same_dim=True, proj_initializer=None, **kwargs
    ):
        super().__init__(**kwargs)
        check_bins(n_token, d_embed, cutoffs, div_val)
        self.n_token = n_token
        self.d_embed = d_embed
        self.d_proj = d_proj
        self.cutoffs = tuple(cutoffs)
        self.div_val = div_val if cutoffs else 1  # a single bin has nothing to divide
        self.proj_same_dim = proj_same_dim
        self.proj_initializer = keras.initializers.get(proj_initializer or "glorot_uniform")

    @property
    def bin_sizes(self):
        ends = [0, *self.cutoffs, self.n_token]
        return [right - left for left, right in zip(ends, ends[1:], strict=False)]

    def bin_width(self, i):
        return self.d_embed // self.div_val**i

    def is_projected(self, i):
        """Whether bin i needs a projection: always where widths differ, and for bins that divide by choice."""
        return self.bin_width(i) != self.d_proj or (self.div_val > 1 and self.proj_same_dim)

    def add_projection(self, i, name):
        return self.add_weight(
            name=name, shape=(self.bin_width(i), self.d_proj), initializer=self.proj_initializer.clone(), autocast=False
        )

    def get_config(self):
        return {
            **super().get_config(),
            "n_token": self.n_token,
            "d_embed": self.d_embed,
            "d_proj": self.d_proj,
            "cutoffs": self.cutoffs,
            "div_val": self.div_val,
            "proj_same_dim": self.proj_same_dim,
            "proj_initializer": keras.initializers.serialize(self.proj_initializer),
        }


@keras.saving.register_keras_serializable("txl_tf")
class AdaptiveEmbedding(_Bins):
    """Embedding whose frequent words are wide and rare ones narrow, all projected to `d_proj`.

    Args:
        n_token: size of the vocabulary.
        d_embed: width of the first bin.
        d_proj: width of the result.
        cutoffs: ends of the bins but the last, increasing, between 0 and `n_token`.
        div_val: bin i is `d_embed // div_val**i` wide.
        proj_same_dim: whether a bin as wide as `d_proj` is projected all the same (where `div_val` > 1).
        initializer, proj_initializer: of the tables and of the projections.

    Call arguments:
        tokens: int `[batch, tgt_len]`.

    Returns:
        `[batch, tgt_len, d_proj]`, times `sqrt(d_proj)`.

    Raises:
        ValueError: `cutoffs` do not increase or pass `n_token`, or a bin would be 0 wide.

    Reference:
        Baevski and Auli 2019; `mask_adaptive_embedding_lookup` of the original.
    """

    def __init__(self, n_token, d_embed, d_proj, *, initializer="uniform", **kwargs):
        super().__init__(n_token, d_embed, d_proj, **kwargs)
        self.initializer = keras.initializers.get(initializer)

    def build(self, tokens_shape=None):
        sizes = self.bin_sizes if self.div_val > 1 else [self.n_token]
        self.tables = [
            self.add_weight(
                name=f"lookup_table_{i}",
                shape=(size, self.bin_width(i)),
                initializer=self.initializer.clone(),
                autocast=False,
            )
            for i, size in enumerate(sizes)
        ]
        self.projs = [
            self.add_projection(i, f"proj_W_{i}") if self.is_projected(i) else None for i in range(len(sizes))
        ]

    def call(self, tokens):
        return mask_adaptive_embedding_lookup(
            tokens, self.tables, self.projs, self.cutoffs, self.d_proj, self.compute_dtype
        )

    def get_config(self):
        return {**super().get_config(), "initializer": keras.initializers.serialize(self.initializer)}


@keras.saving.register_keras_serializable("txl_tf")
class AdaptiveSoftmax(_Bins):
    """Softmax over the bins of an `AdaptiveEmbedding`, whose tables it shares.

    Args: those of the embedding, and
        proj_share_all_but_first: every bin but the first uses the embedding's projection too. Otherwise each bin has
            its own. Without cutoffs the single projection is shared in any case, as in the original.

    Call arguments:
        hidden: `[batch, tgt_len, d_proj]`.
        embedding: the built `AdaptiveEmbedding`.

    Returns:
        float32 `[batch, tgt_len, n_token]`, normalised log-probabilities in vocabulary order.

    Reference:
        Grave et al. 2017; `mask_adaptive_logsoftmax` of the original.
    """

    def __init__(self, n_token, d_embed, d_proj, *, proj_share_all_but_first=False, **kwargs):
        super().__init__(n_token, d_embed, d_proj, **kwargs)
        self.proj_share_all_but_first = proj_share_all_but_first

    def shares_projection(self, i):
        return not self.cutoffs or (self.proj_share_all_but_first and i > 0)

    def build(self, hidden_shape=None):
        bins = range(len(self.bin_sizes))
        self.biases = [
            self.add_weight(name=f"bias_{i}", shape=(size,), initializer="zeros", autocast=False)
            for i, size in enumerate(self.bin_sizes)
        ]
        self.projs = [
            self.add_projection(i, f"proj_{i}") if self.is_projected(i) and not self.shares_projection(i) else None
            for i in bins
        ]
        self.clusters = None
        if self.cutoffs:
            n_cluster = len(self.cutoffs)
            self.clusters = (
                self.add_weight(name="cluster_W", shape=(n_cluster, self.d_embed), initializer="zeros", autocast=False),
                self.add_weight(name="cluster_b", shape=(n_cluster,), initializer="zeros", autocast=False),
            )

    def _weights(self, embedding):
        """Arguments of the pure functions: tables, projections, biases and clusters."""

        def tied(i):
            return embedding.projs[i if self.div_val > 1 else 0]

        projs = [tied(i) if self.shares_projection(i) else proj for i, proj in enumerate(self.projs)]
        return embedding.tables, projs, self.biases, self.clusters

    def call(self, hidden, embedding):
        return adaptive_log_probs(hidden, *self._weights(embedding))

    def nll(self, hidden, labels, embedding):
        """Negative log-likelihood of every label, in place: float32 `[batch, tgt_len]`, nats."""
        return mask_adaptive_logsoftmax(hidden, labels, *self._weights(embedding))

    def get_config(self):
        return {**super().get_config(), "proj_share_all_but_first": self.proj_share_all_but_first}
