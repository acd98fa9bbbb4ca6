"""Adaptive softmax over the clusters of an adaptive embedding, with tied weights (Grave et al. 2017).

The first softmax is over the words of cluster 0 and one entry for each later cluster. The second is over the words of
that cluster. For clusters, shapes, tables and projections, see `nn/embedding.py`.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Unpack

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config.checks import NOT_NEGATIVE, RATE, is_integer
from txl_tf.equations import Cluster, log_probs, nll
from txl_tf.errors import ParameterError
from txl_tf.kernels.routing import BySlots, own_rows_only
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.checks import as_ids, check_tensors
from txl_tf.nn.embedding import AdaptiveBins, AdaptiveEmbedding, check_ids
from txl_tf.nn.tied import Tied
from txl_tf.schema import check_type


def clusters_of(tables: Sequence[Tensor], projs: Sequence[Tensor | None], biases: Sequence[Tensor]) -> list[Cluster]:
    """The clusters with these weights. A table that several clusters share is split, so its gradient is concatenated.

    Args: lists with one item for every cluster; `tables` may also be a list with a single table.
    """
    sizes: list[int] = [bias.shape[0] for bias in biases]
    if len(tables) != len(biases):
        tables = tf.split(tables[0], sizes)
    starts = itertools.accumulate(sizes[:-1], initial=0)
    tables = [tf.convert_to_tensor(table) for table in tables]
    return [Cluster(*fields) for fields in zip(starts, tables, projs, biases, strict=True)]


def mask_adaptive_logsoftmax(
    hidden: Tensor, target: Tensor, tables: Sequence[Tensor], projs: Sequence[Tensor | None], biases: Sequence[Tensor],
    clusters: tuple[Tensor, Tensor] | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
) -> Any:  # fmt: skip
    """Negative log-likelihood of every target.

    The batch is the first axis. The original's function takes sizes, initializers and `params`, the `ret_params` of the
    embedding, and creates biases, clusters and its own projections. This one takes them as arguments, and has no
    `return_mean`. The entry of cluster i is the column `n_0 + i - 1` of the first softmax, as in the original.

    Args:
        hidden: `[B, T, P]`.
        target: int `[B, T]`.
        tables: the embedding's tables.
        projs: the projection of every cluster, or `None`s.
        biases: one `[n_i]` per cluster.
        clusters: weight `[n, E]` and bias `[n]` of the entries of the n later clusters; `None` if there are none.
        label_smoothing, z_loss: change the gradient of the result, but not its value, see `nll` of the equations. With
            `label_smoothing`, every cluster is computed for every target.

    Returns:
        `[B, T]`, nats: float32, or float64 if `hidden` is float64.
    """
    shape = tf.shape(target)
    hidden, target = _flatten(hidden, target)
    rows_nll = nll(
        hidden, target, clusters_of(tables, projs, biases), entries=clusters, route=own_rows_only,
        label_smoothing=label_smoothing, z_loss=z_loss,
    )  # fmt: skip
    return tf.reshape(rows_nll, shape)


def static_adaptive_logsoftmax(
    hidden: Tensor, target: Tensor, tables: Sequence[Tensor], projs: Sequence[Tensor | None], biases: Sequence[Tensor],
    clusters: tuple[Tensor, Tensor] | None, bin_capacities: Any, label_smoothing: float = 0.0, z_loss: float = 0.0,
) -> tuple[Any, Any]:  # fmt: skip
    """`mask_adaptive_logsoftmax` with static shapes: no shape depends on the data, also in the gradient.

    Every cluster but the first has a capacity. It computes its first tokens, in order, up to the capacity. The other
    tokens are left out, also in the gradient. With a capacity of `B * T` or more, no token is left out.

    Args:
        hidden: `[B, T, P]`, B and T known.
        target: int `[B, T]`; -1 where there is no token.
        tables, projs, biases, clusters, label_smoothing, z_loss: see `mask_adaptive_logsoftmax`.
        bin_capacities: list of int, one for every cluster but the first; see `choose_bin_capacities`.

    Returns:
        `(nll, is_counted)`: the result of `mask_adaptive_logsoftmax`, and bool `[B, T]`, false for tokens that are left
        out, whose nll is 0.

    Raises:
        ParameterError: `bin_capacities` does not have one positive integer for every cluster but the first.
    """
    check_capacities(bin_capacities, len(biases) - 1)
    shape = target.shape
    hidden, target = _flatten(hidden, target)
    is_counted = target >= 0
    slots = BySlots(bin_capacities)
    losses = nll(
        hidden, tf.maximum(target, 0), clusters_of(tables, projs, biases), entries=clusters, route=slots,
        label_smoothing=label_smoothing, z_loss=z_loss,
    )  # fmt: skip
    is_counted = is_counted if slots.left_out is None else is_counted & ~slots.left_out
    return tf.reshape(tf.where(is_counted, losses, 0), shape), tf.reshape(is_counted, shape)


def check_capacities(bin_capacities: Any, n: int) -> None:
    """Raises ParameterError unless there is one positive integer for each of the `n` later clusters."""
    is_list = hasattr(bin_capacities, "__len__") and not isinstance(bin_capacities, (set, frozenset))
    capacities: list[Any] = list(bin_capacities) if is_list else [bin_capacities]
    if len(capacities) != n or not all(is_integer(capacity) and capacity > 0 for capacity in capacities):
        allowed = f"a list with one positive integer for each of the {n} clusters but the first"
        raise ParameterError("bin_capacities", capacities, allowed)


def _flatten(hidden: Tensor, target: Tensor) -> tuple[Any, Any]:
    """`[B * T, P]` and int32 `[B * T]`.

    Without this, TensorFlow's gradients of products would make one matrix for every row of the batch.
    """
    return tf.reshape(hidden, [-1, hidden.shape[-1]]), tf.cast(tf.reshape(target, [-1]), tf.int32)


def adaptive_log_probs(
    hidden: Tensor, tables: Sequence[Tensor], projs: Sequence[Tensor | None], biases: Sequence[Tensor],
    clusters: tuple[Tensor, Tensor] | None = None,
) -> Any:  # fmt: skip
    """The distribution over the whole vocabulary, normalised over all clusters.

    Args: see `mask_adaptive_logsoftmax`.

    Returns:
        `[B, T, N]`, log-probabilities in vocabulary order: float32, or float64 if `hidden` is float64.
    """
    return log_probs(hidden, clusters_of(tables, projs, biases), entries=clusters)


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
        proj_share_all_but_first: whether every cluster but the first uses the projection of the embedding. If not,
            each has its own. Without cutoffs, the single projection is always shared, as in the original.
        tie_weight: whether to use the tables of the embedding. If not, the softmax has its own.
        initializer: initializer of its own tables. Leave it out with `tie_weight`.

    Call arguments:
        hidden: `[batch, tgt_len, d_proj]`.
        embedding: the `AdaptiveEmbedding`, with the same clusters. A symbolic call ties the softmax to it, see
            `txl_tf.nn.tied`. Then files and clones of the functional model have one table for both, and further calls
            do not need the argument.

    Returns:
        float32 (float64 if the layer's dtype is) `[batch, tgt_len, n_token]`, normalised log-probabilities in
        vocabulary order.

    Raises:
        ParameterError: `embedding` has other sizes; or it is not the embedding of the first symbolic call; or a layer
            of the functional model contains it, and `hidden` does not come from this layer.

    Reference:
        Grave et al. 2017; `mask_adaptive_logsoftmax` of the original.
    """

    clusters: Any  # `(weight, bias)` of the entries, or `None` if there is one cluster
    biases: Any
    embedding_class = AdaptiveEmbedding
    shared_sizes = ("n_token", "d_embed", "d_proj", "cutoffs", "div_val")

    @stored
    def __init__(
        self, n_token: int, d_embed: int, d_proj: int, *, cutoffs: Sequence[int] = (), div_val: int = 1,
        proj_same_dim: bool = True, proj_initializer: Any = None, proj_share_all_but_first: bool = False,
        tie_weight: bool = True, initializer: Any = "uniform", **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(n_token, d_embed, d_proj, cutoffs, div_val, proj_same_dim, proj_initializer, **kwargs)
        check_type("tie_weight", tie_weight, bool)
        if not tie_weight:
            # Only here: a new initializer draws a seed from Python's `random`, which changes the weights made after it.
            self.initializer = keras.initializers.get(initializer)
        elif initializer != "uniform":
            message = "initializer must be left out with tie_weight=True: the softmax has no tables of its own"
            raise ParameterError("initializer", initializer, "left out with tie_weight=True", message)

    def shares_projection(self, i: int) -> bool:
        """Whether cluster i uses the projection of the embedding."""
        return not self.cutoffs or (self.proj_share_all_but_first and i > 0)

    @property
    def needs_embedding(self) -> bool:
        """Whether a call computes with weights of the embedding."""
        shared = [self.shares_projection(i) and self.is_projected(i) for i in range(len(self.bin_sizes))]
        return self.tie_weight or any(shared)

    def tie(self, hidden: Any, embedding: Any = None) -> None:
        """See `Tied`. Does nothing if the call computes only with weights of this layer."""
        if self.needs_embedding:
            super().tie(hidden, embedding)

    def embedding_of_call(self, given: Any) -> Any:
        """See `Tied`. `None` if the call computes only with weights of this layer."""
        return super().embedding_of_call(given) if self.needs_embedding else None

    def build(self, hidden_shape: Any = None) -> None:
        if not self.tie_weight:
            self.tables = self.make_tables()
        self.biases = [
            self.add_weight(name=f"bias_{i}", shape=(size,), initializer="zeros", autocast=False)
            for i, size in enumerate(self.bin_sizes)
        ]
        self.projs = [
            self.add_projection(i, f"proj_{i}") if self.is_projected(i) and not self.shares_projection(i) else None
            for i in range(len(self.bin_sizes))
        ]
        self.clusters = None
        if self.cutoffs:
            n_cluster = len(self.cutoffs)
            self.clusters = (
                self.add_table("cluster_W", (n_cluster, self.d_embed), "zeros", autocast=False),
                self.add_weight(name="cluster_b", shape=(n_cluster,), initializer="zeros", autocast=False),
            )

    def weights_with(self, embedding: Any) -> tuple[Any, Any, Any, Any]:
        """Arguments of the pure functions: tables, projections, biases, and the entries of the later clusters."""
        projs = list(self.projs)
        for i in range(len(projs)):
            if self.shares_projection(i) and self.is_projected(i):
                projs[i] = embedding.projs[i if self.div_val > 1 else 0]  # without `div_val`, there is one for all
        return embedding.tables if self.tie_weight else self.tables, projs, self.biases, self.clusters

    def call(self, hidden: Tensor, embedding: Any = None) -> Tensor:
        check_tensors({"d_proj": self.d_proj}, hidden=(hidden, "float batch tgt_len d_proj"))
        return adaptive_log_probs(hidden, *self.weights_with(self.embedding_of_call(embedding)))

    @property
    def output_dtype(self) -> Any:
        return keras.backend.result_type(self.compute_dtype, "float32")

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        return (*self.named_shapes(shapes, named)["hidden"][:-1], self.n_token)

    def nll(self, hidden: Tensor, labels: Tensor, embedding: Any, **objective: float) -> Tensor:
        """Negative log-likelihood of every label: `[batch, tgt_len]`, nats.

        Args:
            hidden: as in the call.
            embedding: as in the call.
            labels: int `[batch, tgt_len]`.
            **objective: `label_smoothing` and `z_loss`, see `mask_adaptive_logsoftmax`.

        Raises:
            ParameterError: a tensor or the embedding has other sizes, a number is out of its range, or, outside of
                graphs, a label is not in the vocabulary.
        """
        labels, embedding = self._checked(hidden, labels, embedding, objective)
        return mask_adaptive_logsoftmax(hidden, labels, *self.weights_with(embedding), **objective)

    def _checked(
        self, hidden: Any, labels: Any, embedding: Any, objective: dict[str, Any], may_be_left_out: bool = False
    ) -> Any:
        """Checks arguments of `nll` or `static_nll`. Returns the labels as a tensor of integers, and the embedding.

        A graph gets no operations for labels that are integers.

        Args:
            hidden, labels, embedding, objective: the arguments.
            may_be_left_out: whether labels may be negative, where there is no token.
        """
        if not self.built:  # these methods do not use Keras's call, which would build the layer
            self.build()
        if not (tf.is_tensor(labels) and labels.dtype.is_integer):
            labels = as_ids("labels", labels, 2)
        tensors = {"hidden": (hidden, "float batch tgt_len d_proj"), "labels": (labels, "int batch tgt_len")}
        check_tensors({"d_proj": self.d_proj}, **tensors)
        checks = {"label_smoothing": RATE, "z_loss": NOT_NEGATIVE}
        for name, value in objective.items():
            if name in checks and not tf.is_tensor(value):
                checks[name](name, value)
        if tf.executing_eagerly():
            check_ids("labels", np.maximum(labels, 0) if may_be_left_out else np.asarray(labels), self.n_token)
        return labels, self.embedding_of_call(embedding)

    def static_nll(
        self, hidden: Tensor, labels: Tensor, embedding: Any, bin_capacities: Sequence[int], **objective: float
    ) -> tuple[Any, Any]:
        """`nll` with static shapes, for TPUs and XLA. Returns `(nll, is_counted)`, see `static_adaptive_logsoftmax`."""
        labels, embedding = self._checked(hidden, labels, embedding, objective, may_be_left_out=True)
        return static_adaptive_logsoftmax(hidden, labels, *self.weights_with(embedding), bin_capacities, **objective)
