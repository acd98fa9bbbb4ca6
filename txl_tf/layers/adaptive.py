"""Adaptive softmax over the clusters of an adaptive embedding, with tied weights (Grave et al. 2017).

The softmax first chooses among the words of cluster 0 and one entry for each later cluster, then, within that cluster,
among its words. Clusters, shapes, tables and projections: see `layers/embedding.py`.
"""

import itertools

import keras
import tensorflow as tf

from txl_tf.config.checks import is_integer
from txl_tf.errors import ParameterError
from txl_tf.layers.common.arguments import stored
from txl_tf.layers.common.base import check_tensors
from txl_tf.layers.common.dtypes import at_least_float32
from txl_tf.layers.common.ops import cross_entropy
from txl_tf.layers.common.precision import matmul
from txl_tf.layers.embedding import AdaptiveBins, AdaptiveEmbedding, embedding_lookup
from txl_tf.layers.mixins.tied import Tied


def bin_logits(hidden, weight, bias, proj):
    """`[..., n]`: products in the dtype of `hidden`, sums and the softmax after them in float32 or float64."""
    if proj is not None:
        hidden = matmul(hidden, tf.cast(proj, hidden.dtype), transpose_b=True)
    product = at_least_float32(matmul(hidden, tf.cast(weight, hidden.dtype), transpose_b=True))
    return product + tf.cast(bias, product.dtype)


def split_bins(tables, biases):
    """The weights of every cluster, `[n_i, e_i]` each. One table is split, whose gradient is then one concatenation."""
    if len(tables) == len(biases):
        return [tf.convert_to_tensor(table) for table in tables]
    return tf.split(tables[0], [bias.shape[0] for bias in biases])


def head_of(weights, biases, clusters):
    """Weight and bias of the first softmax: the words of cluster 0, then the entries of the later clusters."""
    if clusters is None:
        return weights[0], biases[0]
    cluster_w, cluster_b = clusters
    return tf.concat([weights[0], cluster_w], 0), tf.concat([biases[0], cluster_b], 0)


def mask_adaptive_logsoftmax(hidden, target, tables, projs, biases, clusters=None):
    """Negative log-likelihood of every target, each in its place.

    Batch first. The original's function takes sizes, initializers and `params`, the `ret_params` of the embedding, and
    creates biases, clusters and its own projections; here they are passed in, and there is no `return_mean`. The head's
    column of cluster i is `n_0 + i - 1`, as in the original.

    Args:
        hidden: `[B, T, P]`.
        target: int `[B, T]`.
        tables: the embedding's tables.
        projs: the projection of every cluster, or `None`s.
        biases: one `[n_i]` per cluster.
        clusters: weight `[n, E]` and bias `[n]` of the entries of the n later clusters; `None` where there are none.

    Returns:
        `[B, T]`, nats: float32, or float64 if `hidden` is float64.
    """
    shape = tf.shape(target)
    hidden, target = _flatten(hidden, target)
    weights = split_bins(tables, biases)
    nll, bin_of = _head_nll(hidden, target, weights, projs, biases, clusters)
    for i, start in enumerate(_starts(biases)[1:], 1):
        places = tf.cast(tf.where(bin_of == i), tf.int32)  # how many there are, a GPU has to tell the host
        rows = places[:, 0]
        tail_nll = cross_entropy(
            tf.gather(target, rows) - start, bin_logits(tf.gather(hidden, rows), weights[i], biases[i], projs[i])
        )
        nll += tf.scatter_nd(places, tail_nll, tf.shape(target))
    return tf.reshape(nll, shape)


def static_adaptive_logsoftmax(hidden, target, tables, projs, biases, clusters, bin_capacities):
    """`mask_adaptive_logsoftmax` with static shapes: neither they nor those of the gradient depend on the data.

    Every cluster but the first has a capacity: its first tokens, in order, are predicted, and those past the capacity
    are left out, from the gradient too. A capacity of `B * T` or more leaves out none.

    Args:
        hidden: `[B, T, P]`, B and T known.
        target: int `[B, T]`; -1 where there is no token.
        tables, projs, biases, clusters: see `mask_adaptive_logsoftmax`.
        bin_capacities: list of int, of every cluster but the first; see `choose_bin_capacities`.

    Returns:
        `(nll, kept)`: as of `mask_adaptive_logsoftmax`, and bool `[B, T]`, false for the tokens left out, whose nll
        is 0.

    Raises:
        ValueError: `bin_capacities` are not one positive integer for every cluster but the first.
    """
    check_capacities(bin_capacities, len(biases) - 1)
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
        capacity = min(int(bin_capacities[i - 1]), n)
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


def check_capacities(bin_capacities, n):
    """Raises ValueError unless they are one for each of the `n` clusters but the first."""
    given = list(bin_capacities) if hasattr(bin_capacities, "__len__") else [bin_capacities]
    if len(given) != n or not all(is_integer(capacity) and capacity > 0 for capacity in given):
        allowed = f"one positive integer for each of the {n} clusters but the first"
        raise ParameterError("bin_capacities", given, allowed)


def _starts(biases):
    """The first id of every cluster."""
    return list(itertools.accumulate([bias.shape[0] for bias in biases[:-1]], initial=0))


def _flatten(hidden, target):
    """`[B * T, P]` and int32 `[B * T]`. Otherwise, gradients of products would be one matrix for every row of B."""
    return tf.reshape(hidden, [-1, hidden.shape[-1]]), tf.cast(tf.reshape(target, [-1]), tf.int32)


def _head_nll(hidden, target, weights, projs, biases, clusters):
    """nll of the first choice of every target, a word of cluster 0 or an entry, and its cluster: `[B * T]` each."""
    bin_of = tf.searchsorted(_starts(biases), target, side="right") - 1
    head_target = tf.where(bin_of <= 0, target, biases[0].shape[0] + bin_of - 1)
    logits = bin_logits(hidden, *head_of(weights, biases, clusters), projs[0])
    return cross_entropy(head_target, logits), bin_of


def adaptive_log_probs(hidden, tables, projs, biases, clusters=None):
    """The full distribution over the vocabulary, normalised over all clusters.

    Args: see `mask_adaptive_logsoftmax`.

    Returns:
        `[B, T, N]`, log-probabilities in vocabulary order: float32, or float64 if `hidden` is float64.
    """
    weights = split_bins(tables, biases)
    head = tf.nn.log_softmax(bin_logits(hidden, *head_of(weights, biases, clusters), projs[0]))
    n_0 = biases[0].shape[0]
    log_probs = [head[..., :n_0]]
    for i in range(1, len(biases)):
        tail = tf.nn.log_softmax(bin_logits(hidden, weights[i], biases[i], projs[i]))
        log_probs.append(head[..., n_0 + i - 1, None] + tail)
    return tf.concat(log_probs, -1)


@keras.saving.register_keras_serializable("txl_tf")
class AdaptiveSoftmax(Tied, AdaptiveBins):
    """Softmax over the clusters of an `AdaptiveEmbedding`, whose tables it shares.

    ```python
    sizes = {"n_token": 1000, "d_embed": 64, "d_proj": 32, "cutoffs": [100, 400], "div_val": 4}
    embedding, softmax = txl_tf.layers.AdaptiveEmbedding(**sizes), txl_tf.layers.AdaptiveSoftmax(**sizes)
    hidden = embedding(tf.constant([[3, 250, 999]]))
    log_probs = softmax(hidden, embedding=embedding)  # [1, 3, 1000]
    nll = softmax.nll(hidden, tf.constant([[250, 999, 7]]), embedding)  # [1, 3]
    tokens = keras.Input([None], dtype="int32")
    network = txl_tf.TransformerXL(n_token=1000, n_layer=2, d_model=64, d_embed=64, n_head=4, d_head=16, d_inner=128)
    hidden, _ = network(tokens)
    log_probs = txl_tf.layers.AdaptiveSoftmax(1000, 64, 64)(hidden, embedding=network.embedding)
    model = keras.Model(tokens, log_probs)      # has one table; so have its files and clones
    ```

    Args: see `AdaptiveEmbedding`, and
        proj_share_all_but_first: every cluster but the first uses the embedding's projection too. Otherwise each has
            its own. Without cutoffs the single projection is shared in any case, as in the original.

    Call arguments:
        hidden: `[batch, tgt_len, d_proj]`.
        embedding: the `AdaptiveEmbedding`, of the same clusters. A symbolic call ties the softmax to it, see
            `txl_tf.layers.mixins.tied`: then files and clones of the functional model have one table for both, and
            further calls may leave it out.

    Returns:
        float32 (float64 if the layer's dtype is) `[batch, tgt_len, n_token]`, normalised log-probabilities in
        vocabulary order.

    Raises:
        ParameterError: `embedding` has other sizes, is not the one of the first symbolic call, or is a part of a layer
            of the functional model from which `hidden` does not come.

    Reference:
        Grave et al. 2017; `mask_adaptive_logsoftmax` of the original.
    """

    embedding_class, shared_sizes = AdaptiveEmbedding, ("n_token", "d_embed", "d_proj", "cutoffs", "div_val")

    @stored
    def __init__(self, n_token, d_embed, d_proj, *, proj_share_all_but_first=False, **kwargs):
        super().__init__(n_token, d_embed, d_proj, **kwargs)

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
                self.add_table("cluster_W", (n_cluster, self.d_embed), "zeros", autocast=False),
                self.add_weight(name="cluster_b", shape=(n_cluster,), initializer="zeros", autocast=False),
            )

    def weights_with(self, embedding):
        """Arguments of the pure functions: tables, projections, biases and clusters."""

        def tied(i):
            return embedding.projs[i if self.div_val > 1 else 0]

        projs = [tied(i) if self.shares_projection(i) else proj for i, proj in enumerate(self.projs)]
        return embedding.tables, projs, self.biases, self.clusters

    def call(self, hidden, embedding=None):
        check_tensors({"d_proj": self.d_proj}, hidden=(hidden, "float batch tgt_len d_proj"))
        return adaptive_log_probs(hidden, *self.weights_with(self.embedding_of_call(embedding)))

    @property
    def output_dtype(self):
        return keras.backend.result_type(self.compute_dtype, "float32")

    def compute_output_shape(self, *shapes, **named):
        return (*self.named_shapes(shapes, named)["hidden"][:-1], self.n_token)

    def nll(self, hidden, labels, embedding):
        """Negative log-likelihood of every label, in place: `[batch, tgt_len]`, nats."""
        return mask_adaptive_logsoftmax(hidden, labels, *self.weights_with(embedding))

    def static_nll(self, hidden, labels, embedding, bin_capacities):
        """`nll` for TPU and XLA: `(nll, kept)`, see `static_adaptive_logsoftmax`."""
        return static_adaptive_logsoftmax(hidden, labels, *self.weights_with(embedding), bin_capacities)
