"""Adaptive embedding: wide vectors for frequent words, narrow vectors for rare words (Baevski and Auli 2019).

The vocabulary, sorted by frequency, is divided into clusters. Cluster i contains the ids `ends[i] <= id < ends[i + 1]`
where `ends = [0, *cutoffs, n_token]`, and its embeddings have the width `d_embed // div_val**i`.

Shapes:
    B, T: batch, tgt_len    N: n_token, n_i: words of cluster i    E: d_embed, e_i: width of cluster i    P: d_proj

The layers have the same variables as the original. The softmax (`nn/adaptive.py`) shares `tables` and `projs`. If
`div_val` is 1, there is one table `[N, E]`; otherwise every cluster has a table `[n_i, e_i]`. A projection is
`[e_i, P]`, or `None` if the widths are equal and nothing is projected.

There are two ways to compute the clusters, with the same weights and results. By default, a cluster computes exactly
its own tokens. TPUs and XLA need shapes that do not depend on the data: for them, the embedding looks up every token in
every cluster, and the softmax gives every cluster but the first a fixed capacity. See `kernels/routing.py`.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import keras
import numpy as np
import tensorflow as tf

from txl_config.models import Bin, bins
from txl_tf.config import check_bins
from txl_tf.equations import Cluster, embed
from txl_tf.errors import ParameterError
from txl_tf.kernels.routing import every_row, own_rows_only
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Layer
from txl_tf.nn.checks import as_ids, check_sizes
from txl_tf.nn.ops import own_initializer
from txl_tf.nn.tied import Shared


def id_error(name: str, n_token: int) -> str:
    """The beginning of an error message about ids outside the vocabulary. The first such id follows it."""
    return f"{name} must hold ids between 0 and n_token - 1 = {n_token - 1}, found"


def check_ids(name: str, ids: Any, n_token: int) -> None:
    """Raises ParameterError if one of the int `ids` is not in the vocabulary. The error names the first such id.

    In a `tf.function`, it adds an assertion. Running the graph raises an InvalidArgumentError, but not under XLA.
    """
    if not tf.is_symbolic_tensor(ids):
        ids = np.asarray(ids)
        outside = ids[(ids < 0) | (ids >= n_token)]
        if outside.size:
            allowed = f"ids between 0 and n_token - 1 = {n_token - 1}"
            raise ParameterError(name, outside[0], allowed, f"{id_error(name, n_token)} {outside[0]}")
        return
    tf.debugging.Assert(*check_of_ids(name, ids, n_token))


def check_of_ids(name: str, ids: Tensor, n_token: int) -> tuple[Tensor, list[Any]]:
    """The arguments of `tf.debugging.Assert` for ids in a graph: all of them are in the vocabulary."""
    smallest: Any = tf.reduce_min(ids)
    largest: Any = tf.reduce_max(ids)
    outside = tf.where(smallest < 0, smallest, largest)
    return (smallest >= 0) & (largest < n_token), [id_error(name, n_token), outside]


def mask_adaptive_embedding_lookup(
    x: Tensor, tables: Sequence[Tensor], projs: Sequence[Tensor | None], cutoffs: Sequence[int], d_proj: int,
    dtype: Any = "float32", static_shapes: bool = False,
) -> Any:  # fmt: skip
    """Embeddings of the tokens `x`, times `sqrt(d_proj)`.

    The batch is the first axis. The original's function takes sizes, initializers and `div_val`, creates the variables,
    and returns `(y, ret_params)`. This one takes the variables as arguments.

    Args:
        x: int `[B, T]`, token ids.
        tables, projs: lists of weights, see the top of `txl_tf/nn/embedding.py`.
        cutoffs: ends of all clusters but the last.
        d_proj: P, width of the result.
        dtype: dtype of the products and the result.
        static_shapes: whether to look up every token in every cluster and keep the right result. Vectors of rare words
            are narrow, so this costs little.

    Returns:
        `[B, T, P]` in `dtype`.
    """
    x = as_ids("tokens", x)
    starts = [0, *cutoffs] if len(tables) > 1 else [0]
    clusters = [Cluster(*fields) for fields in zip(starts, tables, projs, strict=True)]
    route = every_row if static_shapes else own_rows_only
    # Flatten to one row for each token. For a product with `[B, T, e]`, TensorFlow's gradient would make one matrix for
    # every row of the batch.
    y: Any = embed(tf.reshape(x, [-1]), clusters, d_proj, dtype, route)
    return tf.reshape(y, tf.concat([tf.shape(x), [d_proj]], 0))


class AdaptiveBins(Layer):
    """Base class of embedding and softmax: the clusters of the vocabulary, and which of them are projected.

    The weights have `autocast=False`, because the pure functions cast only the parts that they use.
    """

    n_token: int
    d_embed: int
    d_proj: int
    proj_same_dim: bool
    initializer: Any
    tables: Any
    projs: Any
    free_settings = {}

    @stored
    def __init__(
        self, n_token: int, d_embed: int, d_proj: int, cutoffs: Sequence[int] = (), div_val: int = 1,
        proj_same_dim: bool = True, proj_initializer: Any = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_bins(n_token, d_embed, cutoffs, div_val)
        check_sizes(d_proj=d_proj)
        self.cutoffs = tuple(cutoffs)
        self.div_val = div_val if cutoffs else 1  # div_val has no effect on a single cluster
        self.proj_initializer = keras.initializers.get(proj_initializer or "glorot_uniform")

    @property
    def bins(self) -> list[Bin]:
        """The clusters."""
        return bins(self.n_token, self.d_embed, self.d_proj, self.cutoffs, self.div_val, self.proj_same_dim)

    @property
    def bin_sizes(self) -> list[int]:
        """The number of words of every cluster."""
        return [cluster.words for cluster in self.bins]

    def bin_width(self, i: int) -> int:
        """The width of the embeddings of cluster i."""
        return self.bins[i].width

    def is_projected(self, i: int) -> bool:
        """Whether cluster i has a projection."""
        return self.bins[i].is_projected

    def make_tables(self) -> list[Any]:
        """Makes the tables: one for each cluster or, if `div_val` is 1, one for all clusters."""
        sizes = self.bin_sizes if self.div_val > 1 else [self.n_token]  # numbers of words, one table for each
        return [
            self.add_table(
                f"lookup_table_{i}", (size, self.bin_width(i)), own_initializer(self.initializer), autocast=False
            )
            for i, size in enumerate(sizes)
        ]

    def add_projection(self, i: int, name: str) -> Any:
        """Makes a projection for cluster i, a weight with this name."""
        shape = (self.bin_width(i), self.d_proj)
        return self.add_table(name, shape, own_initializer(self.proj_initializer), autocast=False)


@keras.saving.register_keras_serializable("txl_tf")
class AdaptiveEmbedding(Shared, AdaptiveBins):
    """Embedding with wide vectors for frequent words and narrow ones for rare words, all projected to `d_proj`.

    ```python
    embedding = txl_tf.layers.AdaptiveEmbedding(n_token=1000, d_embed=64, d_proj=32, cutoffs=[100, 400], div_val=4)
    vectors = embedding(tf.constant([[3, 250, 999]]))  # [1, 3, 32]
    ```

    Args:
        n_token: size of the vocabulary.
        d_embed: width of the first cluster.
        d_proj: width of the result.
        cutoffs: ends of all clusters but the last, increasing, between 0 and `n_token`.
        div_val: cluster i has the width `d_embed // div_val**i`.
        proj_same_dim: whether a cluster with the width `d_proj` has a projection, too (if `div_val` > 1).
        initializer, proj_initializer: of the tables and of the projections.

    Call arguments:
        tokens: int `[batch, tgt_len]`. Float tensors with whole numbers are accepted.
        static_shapes: whether to look up every token in every cluster, for TPUs and XLA.

    Returns:
        `[batch, tgt_len, d_proj]`, times `sqrt(d_proj)`.

    Raises:
        ParameterError: `cutoffs` do not increase or exceed `n_token`, or a cluster would have the width 0.

    Reference:
        Baevski and Auli 2019; `mask_adaptive_embedding_lookup` of the original.
    """

    @stored
    def __init__(
        self, n_token: int, d_embed: int, d_proj: int, *, cutoffs: Sequence[int] = (), div_val: int = 1,
        proj_same_dim: bool = True, proj_initializer: Any = None, initializer: Any = "uniform",
        **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(n_token, d_embed, d_proj, cutoffs, div_val, proj_same_dim, proj_initializer, **kwargs)
        self.autocast = False  # float16 and bfloat16 cannot represent all ids exactly
        self.initializer = keras.initializers.get(initializer)

    def build(self, tokens_shape: Any = None) -> None:
        self.tables = self.make_tables()
        self.projs = [
            self.add_projection(i, f"proj_W_{i}") if self.is_projected(i) else None for i in range(len(self.tables))
        ]

    def call(self, tokens: Tensor, static_shapes: bool = False) -> Tensor:
        return mask_adaptive_embedding_lookup(
            tokens, self.tables, self.projs, self.cutoffs, self.d_proj, self.compute_dtype, static_shapes
        )

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        return (*self.named_shapes(shapes, named)["tokens"], self.d_proj)
