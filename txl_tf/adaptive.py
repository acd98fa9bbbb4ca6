"""Adaptive embedding and softmax, with tied weights (Baevski and Auli 2019; Grave et al. 2017).

The vocabulary, most frequent words first, is cut into bins: bin i holds the ids `ends[i] <= id < ends[i + 1]` where
`ends = [0, *cutoffs, n_token]`, and its embeddings are `d_embed // div_val**i` wide. The softmax first chooses among
the words of bin 0 and one *cluster* for every later bin, then, within a cluster, among its words.

Shapes:
    B, T: batch, tgt_len      N: n_token, n_i: words of bin i      E: d_embed, e_i: width of bin i      P: d_proj

Both layers hold the original's variables, one for one. `tables` and `projs` below are those of the embedding, shared
with the softmax: `[N, E]` alone where `div_val` is 1, else one `[n_i, e_i]` per bin; a projection is `[e_i, P]`, or
`None` where the widths agree and nothing is projected.

Tokens are sorted into their bins in one of two ways, with the same weights and results. By default a bin takes as many
tokens as it has, `boolean_mask` and `scatter_nd`. TPUs and XLA want shapes that do not depend on the data: there, the
embedding looks up every token in every bin, and the softmax gives every bin but the first a fixed capacity.
"""

import itertools
import numbers

import keras
import tensorflow as tf

from txl_tf.primitives import cross_entropy


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


def id_error(name, n_token):
    """What an error says of ids that no table has; the first of them follows."""
    return f"{name} must hold ids between 0 and n_token - 1 = {n_token - 1}, found"


def check_ids(name, ids, n_token):
    """Raises ValueError if one of the array `ids` is not in the vocabulary."""
    outside = ids[(ids < 0) | (ids >= n_token)]
    if outside.size:
        raise ValueError(f"{id_error(name, n_token)} {outside[0]}")


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


def mask_adaptive_embedding_lookup(x, tables, projs, cutoffs, d_proj, dtype="float32", static_shapes=False):
    """Embeddings of the tokens `x`, times `sqrt(d_proj)`.

    Batch first; otherwise the documents' function, with the variables passed in.

    Args:
        x: int `[B, T]`, token ids.
        tables, projs: lists of weights, see above.
        cutoffs: ends of the bins but the last.
        d_proj: P, width of the result.
        dtype: of the products and the result.
        static_shapes: look up every token in every bin and keep the right one; rare bins are narrow, so it costs
            little.

    Returns:
        `[B, T, P]` in `dtype`.
    """
    if not x.dtype.is_integer:
        raise ValueError(f"tokens must be integers, got {x.dtype.name}")
    shape = tf.shape(x)
    # One row a token: the gradient of a product with `[B, T, e]` would first be one matrix for every row of the batch.
    x = tf.cast(tf.reshape(x, [-1]), tf.int32)

    def embed(ids, table, proj):
        y = tf.cast(embedding_lookup(tf.convert_to_tensor(table), ids), dtype)
        return y if proj is None else tf.matmul(y, tf.cast(proj, dtype))

    if len(tables) == 1:
        y = embed(x, tables[0], projs[0])
    else:
        starts, ends = [0, *cutoffs], [*cutoffs, tf.int32.max]
        y = tf.zeros([tf.size(x), d_proj], dtype)
        for start, end, table, proj in zip(starts, ends, tables, projs, strict=True):
            mask = (x >= start) & (x < end)
            if static_shapes:
                ids = tf.clip_by_value(x - start, 0, table.shape[0] - 1)
                y = tf.where(mask[:, None], embed(ids, table, proj), y)
            else:
                cur_y = embed(tf.boolean_mask(x, mask) - start, table, proj)
                y += tf.scatter_nd(tf.cast(tf.where(mask), tf.int32), cur_y, tf.shape(y))
    return tf.reshape(y * d_proj**0.5, tf.concat([shape, [d_proj]], 0))


def bin_logits(hidden, weight, bias, proj):
    """float32 `[..., n]`: products in the dtype of `hidden`, sums and the softmax after them in float32."""
    if proj is not None:
        hidden = tf.matmul(hidden, tf.cast(proj, hidden.dtype), transpose_b=True)
    product = tf.matmul(hidden, tf.cast(weight, hidden.dtype), transpose_b=True)
    return tf.cast(product, tf.float32) + tf.cast(bias, tf.float32)


def split_bins(tables, biases):
    """The weights of every bin, `[n_i, e_i]` each. One table is split, whose gradient is then one concatenation."""
    if len(tables) == len(biases):
        return [tf.convert_to_tensor(table) for table in tables]
    return tf.split(tables[0], [bias.shape[0] for bias in biases])


def head_of(weights, biases, clusters):
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
    shape = tf.shape(target)
    hidden, target = _flatten(hidden, target)
    weights = split_bins(tables, biases)
    nll, bin_of = _head_nll(hidden, target, weights, projs, biases, clusters)
    for i, start in enumerate(_starts(biases)[1:], 1):
        mask = bin_of == i
        tail_nll = cross_entropy(
            tf.boolean_mask(target, mask) - start,
            bin_logits(tf.boolean_mask(hidden, mask), weights[i], biases[i], projs[i]),
        )
        nll += tf.scatter_nd(tf.cast(tf.where(mask), tf.int32), tail_nll, tf.shape(target))
    return tf.reshape(nll, shape)


def static_adaptive_logsoftmax(hidden, target, tables, projs, biases, clusters, capacities):
    """`mask_adaptive_logsoftmax` whose shapes, those of the gradient too, do not depend on the data.

    Every bin but the first has a capacity: its first tokens, in order, are predicted, and those past the capacity are
    left out, from the gradient too. A capacity of `B * T` or more leaves out none.

    Args:
        hidden: `[B, T, P]`, B and T known.
        target: int `[B, T]`; -1 where there is no token.
        tables, projs, biases, clusters: those of `mask_adaptive_logsoftmax`.
        capacities: list of int, of every bin but the first; see `corpus.get_bin_sizes`.

    Returns:
        `(nll, kept)`: float32 `[B, T]`, nats, and bool `[B, T]`, false for the tokens left out, whose nll is 0.

    Raises:
        ValueError: `capacities` are not one positive integer for every bin but the first.
    """
    _check_capacities(capacities, len(biases) - 1)
    shape = target.shape
    hidden, target = _flatten(hidden, target)
    kept = target >= 0
    target = tf.maximum(target, 0)
    weights = split_bins(tables, biases)
    nll, bin_of = _head_nll(hidden, target, weights, projs, biases, clusters)

    n = target.shape[0]
    # Slots that no token fills hold a row of zeros, number n: neither its nll nor its gradient goes anywhere.
    padded_hidden, padded_target = tf.pad(hidden, [[0, 1], [0, 0]]), tf.pad(target, [[0, 1]])
    for i, start in enumerate(_starts(biases)[1:], 1):
        capacity = min(int(capacities[i - 1]), n)
        in_bin = bin_of == i
        count = tf.cumsum(tf.cast(in_bin, tf.int32))
        kept &= ~(in_bin & (count > capacity))
        slots = tf.searchsorted(count, tf.range(1, capacity + 1))  # where the count first reaches 1, 2, ...; else n
        tail_nll = cross_entropy(
            tf.maximum(tf.gather(padded_target, slots) - start, 0),
            bin_logits(embedding_lookup(padded_hidden, slots), weights[i], biases[i], projs[i]),
        )
        nll += tf.slice(tf.scatter_nd(slots[:, None], tail_nll, [n + 1]), [0], [n])
    return tf.reshape(tf.where(kept, nll, 0), shape), tf.reshape(kept, shape)


def _check_capacities(capacities, n):
    integers = all(isinstance(capacity, numbers.Integral) and capacity > 0 for capacity in capacities)
    if len(capacities) != n or not integers:
        raise ValueError(
            f"capacities must be one positive integer for each of the {n} bins but the first, got {list(capacities)}"
        )


def _starts(biases):
    """The first id of every bin."""
    return list(itertools.accumulate([bias.shape[0] for bias in biases[:-1]], initial=0))


def _flatten(hidden, target):
    """`[B * T, P]` and int32 `[B * T]`. Otherwise, gradients of products would be one matrix for every row of B."""
    return tf.reshape(hidden, [-1, hidden.shape[-1]]), tf.cast(tf.reshape(target, [-1]), tf.int32)


def _head_nll(hidden, target, weights, projs, biases, clusters):
    """nll of every target's first choice, a word of bin 0 or a cluster, and the bin it is in: `[B * T]` each."""
    bin_of = tf.searchsorted(_starts(biases), target, side="right") - 1
    head_target = tf.where(bin_of == 0, target, biases[0].shape[0] + bin_of - 1)
    logits = bin_logits(hidden, *head_of(weights, biases, clusters), projs[0])
    return cross_entropy(head_target, logits), bin_of


def adaptive_log_probs(hidden, tables, projs, biases, clusters=None):
    """The full distribution over the vocabulary, normalised over all bins.

    Args: those of `mask_adaptive_logsoftmax`.

    Returns:
        float32 `[B, T, N]`, log-probabilities in vocabulary order.
    """
    weights = split_bins(tables, biases)
    head = tf.nn.log_softmax(bin_logits(hidden, *head_of(weights, biases, clusters), projs[0]))
    n_0 = biases[0].shape[0]
    log_probs = [head[..., :n_0]]
    for i in range(1, len(biases)):
        tail = tf.nn.log_softmax(bin_logits(hidden, weights[i], biases[i], projs[i]))
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
        static_shapes: whether to look up every token in every bin, for TPU and XLA.

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

    def call(self, tokens, static_shapes=False):
        return mask_adaptive_embedding_lookup(
            tokens, self.tables, self.projs, self.cutoffs, self.d_proj, self.compute_dtype, static_shapes
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

    def weights_with(self, embedding):
        """Arguments of the pure functions: tables, projections, biases and clusters."""

        def tied(i):
            return embedding.projs[i if self.div_val > 1 else 0]

        projs = [tied(i) if self.shares_projection(i) else proj for i, proj in enumerate(self.projs)]
        return embedding.tables, projs, self.biases, self.clusters

    def call(self, hidden, embedding):
        return adaptive_log_probs(hidden, *self.weights_with(embedding))

    def nll(self, hidden, labels, embedding):
        """Negative log-likelihood of every label, in place: float32 `[batch, tgt_len]`, nats."""
        return mask_adaptive_logsoftmax(hidden, labels, *self.weights_with(embedding))

    def static_nll(self, hidden, labels, embedding, capacities):
        """`nll` for TPU and XLA: `(nll, kept)`, see `static_adaptive_logsoftmax`."""
        return static_adaptive_logsoftmax(hidden, labels, *self.weights_with(embedding), capacities)

    def get_config(self):
        return {**super().get_config(), "proj_share_all_but_first": self.proj_share_all_but_first}
