"""Adaptive embedding, whose frequent words are wide and whose rare words are narrow (Baevski and Auli 2019).

The vocabulary, most frequent words first, is cut into clusters. Cluster i holds the ids `ends[i] <= id < ends[i + 1]`
where `ends = [0, *cutoffs, n_token]`, and its embeddings are `d_embed // div_val**i` wide.

Shapes:
    B, T: batch, tgt_len    N: n_token, n_i: words of cluster i    E: d_embed, e_i: width of cluster i    P: d_proj

The layers hold the original's variables, one for one. `tables` and `projs` are shared with the softmax
(`nn/adaptive.py`): `[N, E]` alone where `div_val` is 1, else one `[n_i, e_i]` for each cluster; a projection is
`[e_i, P]`, or `None` where the widths agree and nothing is projected.

Tokens are sorted into clusters in one of two ways, with the same weights and results. By default a cluster takes as
many tokens as it has, by `where`, `gather` and `scatter_nd`. TPUs and XLA want shapes that do not depend on the data:
there the embedding looks up every token in every cluster, and the softmax gives every cluster but the first a fixed
capacity.
"""

import functools
from collections.abc import Sequence
from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.config import check_bins
from txl_tf.equations import Cluster, embed
from txl_tf.errors import ParameterError, brief
from txl_tf.kernels.routing import ByNumber, EveryRow, rows_of
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Layer, as_ids, check_sizes
from txl_tf.nn.ops import own_initializer
from txl_tf.nn.tied import Shared


def id_error(name, n_token):
    """The message of an error about ids outside the vocabulary; the first such id follows it."""
    return f"{name} must hold ids between 0 and n_token - 1 = {n_token - 1}, found"


def check_ids(name, ids, n_token):
    """Raises ValueError if one of the array `ids` is not in the vocabulary."""
    outside = ids[(ids < 0) | (ids >= n_token)]
    if outside.size:
        raise ValueError(f"{id_error(name, n_token)} {outside[0]}")


def mask_adaptive_embedding_lookup(x, tables, projs, cutoffs, d_proj, dtype="float32", static_shapes=False):
    """Embeddings of the tokens `x`, times `sqrt(d_proj)`.

    Batch first. The original's function takes sizes, initializers and `div_val`, creates the variables, and returns
    `(y, ret_params)`; here they are passed in.

    Args:
        x: int `[B, T]`, token ids.
        tables, projs: lists of weights, see above.
        cutoffs: ends of the clusters but the last.
        d_proj: P, width of the result.
        dtype: of the products and the result.
        static_shapes: look up every token in every cluster and keep the right one. Rare words are narrow, so it costs
            little.

    Returns:
        `[B, T, P]` in `dtype`.
    """
    x = as_ids("tokens", x)
    starts = [0, *cutoffs] if len(tables) > 1 else [0]
    clusters = [Cluster(*of_cluster) for of_cluster in zip(starts, tables, projs, strict=True)]
    route = EveryRow() if static_shapes else ByNumber()
    # One row a token: the gradient of a product with `[B, T, e]` would first be one matrix for every row of the batch.
    y = embed(tf.reshape(x, [-1]), clusters, d_proj, functools.partial(rows_of, dtype=dtype), route)
    return tf.reshape(y, tf.concat([tf.shape(x), [d_proj]], 0))


class AdaptiveBins(Layer):
    """Common to embedding and softmax: the clusters of the vocabulary, and which of them are projected.

    The weights have `autocast=False`: the pure functions cast them, only the parts they use.
    """

    free_settings = {}

    def __new__(cls, *args, **kwargs):
        if len(args) > 3 and cls.__module__.startswith("txl_tf."):  # another subclass may have other arguments
            allowed, sizes, cutoffs = "given by name", ", ".join(map(brief, args[:3])), brief(args[3])
            message = f"cutoffs must be {allowed}, got {cutoffs}; write {cls.__name__}({sizes}, cutoffs={cutoffs})"
            raise ParameterError("cutoffs", args[3], allowed, message)
        return super().__new__(cls, *args, **kwargs)

    @stored
    def __init__(
        self, n_token: int, d_embed: int, d_proj: int, cutoffs: Sequence[int] = (), div_val: int = 1,
        proj_same_dim: bool = True, proj_initializer: Any = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_bins(n_token, d_embed, cutoffs, div_val)
        check_sizes(d_proj=d_proj)
        self.cutoffs = tuple(cutoffs)
        self.div_val = div_val if cutoffs else 1  # a single cluster has nothing to divide
        self.proj_initializer = keras.initializers.get(proj_initializer or "glorot_uniform")

    @property
    def bin_sizes(self):
        ends = [0, *self.cutoffs, self.n_token]
        return [right - left for left, right in zip(ends, ends[1:], strict=False)]

    def bin_width(self, i):
        return self.d_embed // self.div_val**i

    def is_projected(self, i):
        """Whether cluster i has a projection: where widths differ, or `div_val` is above 1 with `proj_same_dim`."""
        return self.bin_width(i) != self.d_proj or (self.div_val > 1 and self.proj_same_dim)

    def add_projection(self, i, name):
        shape = (self.bin_width(i), self.d_proj)
        return self.add_table(name, shape, own_initializer(self.proj_initializer), autocast=False)


@keras.saving.register_keras_serializable("txl_tf")
class AdaptiveEmbedding(Shared, AdaptiveBins):
    """Embedding whose frequent words are wide and rare ones narrow, all projected to `d_proj`.

    ```python
    embedding = txl_tf.layers.AdaptiveEmbedding(n_token=1000, d_embed=64, d_proj=32, cutoffs=[100, 400], div_val=4)
    vectors = embedding(tf.constant([[3, 250, 999]]))  # [1, 3, 32]
    ```

    Args:
        n_token: size of the vocabulary.
        d_embed: width of the first cluster.
        d_proj: width of the result.
        cutoffs: ends of the clusters but the last, increasing, between 0 and `n_token`.
        div_val: cluster i is `d_embed // div_val**i` wide.
        proj_same_dim: whether a cluster as wide as `d_proj` is projected all the same (where `div_val` > 1).
        initializer, proj_initializer: of the tables and of the projections.

    Call arguments:
        tokens: int `[batch, tgt_len]`; whole numbers of another type are taken for what they are.
        static_shapes: whether to look up every token in every cluster, for TPU and XLA.

    Returns:
        `[batch, tgt_len, d_proj]`, times `sqrt(d_proj)`.

    Raises:
        ValueError: `cutoffs` do not increase or pass `n_token`, or a cluster would be 0 wide.

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
        self.autocast = False  # half precision does not hold ids
        self.initializer = keras.initializers.get(initializer)

    def build(self, tokens_shape=None):
        sizes = self.bin_sizes if self.div_val > 1 else [self.n_token]
        self.tables = [
            self.add_table(
                f"lookup_table_{i}", (size, self.bin_width(i)), own_initializer(self.initializer), autocast=False
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

    def compute_output_shape(self, *shapes, **named):
        return (*self.named_shapes(shapes, named)["tokens"], self.d_proj)
