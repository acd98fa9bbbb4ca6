"""Adaptive softmax over the clusters of an adaptive embedding, with tied weights (Grave et al. 2017).

The softmax first chooses among the words of cluster 0 and one entry for each later cluster, then, within that cluster,
among its words. Clusters, shapes, tables and projections: see `nn/embedding.py`.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.config.checks import is_integer
from txl_tf.equations import Cluster, log_probs, nll
from txl_tf.errors import ParameterError
from txl_tf.kernels.routing import ByNumber, BySlots
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import check_tensors
from txl_tf.nn.embedding import AdaptiveBins, AdaptiveEmbedding
from txl_tf.nn.tied import Tied


def clusters_of(tables, projs, biases):
    """The `Cluster`s of weights. One table is split, whose gradient is then one concatenation."""
    sizes = [bias.shape[0] for bias in biases]
    if len(tables) != len(biases):
        tables = tf.split(tables[0], sizes)
    starts = itertools.accumulate(sizes[:-1], initial=0)
    tables = [tf.convert_to_tensor(table) for table in tables]
    return [Cluster(*of_cluster) for of_cluster in zip(starts, tables, projs, biases, strict=True)]


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
    return tf.reshape(nll(hidden, target, clusters_of(tables, projs, biases), clusters, ByNumber()), shape)


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
    kept, slots = target >= 0, BySlots(bin_capacities)
    found = nll(hidden, tf.maximum(target, 0), clusters_of(tables, projs, biases), clusters, slots)
    kept = kept if slots.left_out is None else kept & ~slots.left_out
    return tf.reshape(tf.where(kept, found, 0), shape), tf.reshape(kept, shape)


def check_capacities(bin_capacities, n):
    """Raises ValueError unless they are one for each of the `n` clusters but the first."""
    given = list(bin_capacities) if hasattr(bin_capacities, "__len__") else [bin_capacities]
    if len(given) != n or not all(is_integer(capacity) and capacity > 0 for capacity in given):
        allowed = f"one positive integer for each of the {n} clusters but the first"
        raise ParameterError("bin_capacities", given, allowed)


def _flatten(hidden, target):
    """`[B * T, P]` and int32 `[B * T]`. Otherwise, gradients of products would be one matrix for every row of B."""
    return tf.reshape(hidden, [-1, hidden.shape[-1]]), tf.cast(tf.reshape(target, [-1]), tf.int32)


def adaptive_log_probs(hidden, tables, projs, biases, clusters=None):
    """The full distribution over the vocabulary, normalised over all clusters.

    Args: see `mask_adaptive_logsoftmax`.

    Returns:
        `[B, T, N]`, log-probabilities in vocabulary order: float32, or float64 if `hidden` is float64.
    """
    return log_probs(hidden, clusters_of(tables, projs, biases), clusters)


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
            `txl_tf.nn.tied`: then files and clones of the functional model have one table for both, and
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

    clusters: Any  # `(weight, bias)`, or `None` where there is one cluster
    embedding_class, shared_sizes = AdaptiveEmbedding, ("n_token", "d_embed", "d_proj", "cutoffs", "div_val")

    @stored
    def __init__(
        self, n_token: int, d_embed: int, d_proj: int, *, cutoffs: Sequence[int] = (), div_val: int = 1,
        proj_same_dim: bool = True, proj_initializer: Any = None, proj_share_all_but_first: bool = False,
        **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(n_token, d_embed, d_proj, cutoffs, div_val, proj_same_dim, proj_initializer, **kwargs)

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
