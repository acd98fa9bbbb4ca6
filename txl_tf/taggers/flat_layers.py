"""FLAT: self-attention over a lattice, in which every pair of items has its own position (Li et al. 2020).

    scores = (q_i + u) . k_j + (q_i + v) . W_(k,R) R_ij         `LatticeAttn`; R_ij: see `lattice.py`
    x = LayerNorm(x + attention(x))                             `FlatLayer`
    x = LayerNorm(x + feed_forward(x))

The library also has the options with which the original program got its published results: two distances
(`lattice.py`), keys that are not projected, and layers without a residual connection.

Shapes:
    B: batch      T: items      H: n_head      D: d_head, E / H      E: d_model      U: different pairs
"""

import types
from collections.abc import Iterable
from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.config import RESIDUALS, FlatConfig, one_of
from txl_tf.equations import FeedForward, feed_forward, score_scale
from txl_tf.errors import ParameterError
from txl_tf.kernels import join_heads, pairwise_scores
from txl_tf.kernels.attending import attend
from txl_tf.kernels.dropout import Drop, dropout, split
from txl_tf.kernels.shapes import Tensor, shape_of
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Attending, Layer
from txl_tf.nn.checks import check_heads, check_sizes, check_tensors, checked_sizes
from txl_tf.nn.masks import keys_seen_by_all, mask_of_call
from txl_tf.nn.ops import LayerNorm, Linear
from txl_tf.nn.settings import FREE_RATE, FREE_SEED
from txl_tf.vanilla.multi_head_attention import heads_of

EPSILON = 1e-5  # of the layer norms: PyTorch's default


def checked_arguments(
    x: Tensor, r: Tensor, index: Tensor, mask: Tensor | None, d_model: int
) -> tuple[Tensor, Tensor | None]:
    """Checks the tensors of a call. Returns `(index, mask)`, where `mask` is bool `[B, T]`, true at items, or `None`.

    `None` means that there is no padding.
    """
    mask = mask_of_call(x, mask)
    sizes = {"d_model": d_model}
    check_tensors(sizes, x=(x, "float batch items d_model"), r=(r, "float pairs d_model"))
    check_tensors(sizes, index=(index, "int batch items items"), mask=(mask, "bool? batch items"))
    tensors = {"x": (x, "batch items"), "index": (index, "batch items items"), "mask": (mask, "batch items")}
    _, index, *masks = checked_sizes(**{name: pair for name, pair in tensors.items() if pair[0] is not None})
    return index, masks[0] if masks else None


@keras.saving.register_keras_serializable("txl_tf")
class LatticeAttn(Attending, Layer):
    """Attention over a lattice (`MultiHead_Attention_Lattice_rel_save_gpumm` of the original program).

    ```python
    # Three characters and the word of the first two, which begins at character 0 and ends at character 1.
    pairs = txl_tf.layers.distinct_pairs(pos_s=tf.constant([[0, 1, 2, 0]]), pos_e=tf.constant([[0, 1, 2, 1]]))
    table = txl_tf.layers.distance_table(pairs.places, 32)  # [5, 32]
    r = txl_tf.layers.PositionFusion(d_model=32)(pairs, table)  # [12, 32]

    attention = txl_tf.layers.LatticeAttn(d_model=32, n_head=4)
    output = attention(tf.random.normal([1, 4, 32]), r, pairs.index)  # [1, 4, 32]
    ```

    Args:
        d_model, n_head: width, and number of heads.
        scale: whether to divide the scores by `sqrt(d_head)`.
        k_proj: whether keys are projected, as in the paper. In the original program, they are the hidden states.
        dropatt: dropout rate of the attention probabilities.
        seed: int from which dropout derives, unless the call gets a key. `None` draws one.

    Call arguments:
        x: `[batch, items, d_model]`.
        r: `[U, d_model]`, a vector for every different pair, from `PositionFusion`.
        index: int `[batch, items, items]`, the row of `r` for each pair of query and key: `Pairs.index`.
        mask: bool, or numbers 0 and 1, `[batch, items]`, true at items. By default, the mask that Keras passes on with
            `x`; without any, there is no padding.
        training, dropout_key: see `txl_tf.nn.dropping`.

    Returns:
        `[batch, items, d_model]`.

    Raises:
        ParameterError: `d_model` is not a multiple of `n_head`, or a tensor or the mask has another shape.

    Reference:
        Li et al. 2020, section 3.2.
    """

    free_settings = {"dropatt": FREE_RATE, "seed": FREE_SEED}
    fixed_settings = {"score_scale": ""}  # follows from d_model, n_head and scale
    weight_parts = ("w_q", "w_k", "w_v", "w_r")

    w_k: Any  # `Linear`, or `None` without projection

    @stored
    def __init__(
        self, d_model: int, n_head: int, scale: bool = False, *, k_proj: bool = True, dropatt: float = 0.0,
        seed: int | None = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_heads(d_model, "n_head", n_head)
        self.start_keys(seed, dropatt=dropatt)
        self.score_scale = score_scale(d_model // n_head) if scale else 1.0
        options: dict[str, Any] = {"dtype": self.dtype_policy}
        self.w_q = Linear(d_model, **options, name="w_q")
        self.w_k = Linear(d_model, **options, name="w_k") if k_proj else None
        self.w_v = Linear(d_model, **options, name="w_v")
        self.w_r = Linear(d_model, **options, name="w_r")

    @classmethod
    def from_config(cls, config: dict[str, Any]):
        return cls(**FlatConfig.without_removed(config))

    def build(self, x_shape: Any = None, **_: Any) -> None:
        self.build_parts(x_shape, *(w for w in (self.w_q, self.w_k, self.w_v, self.w_r) if w is not None))
        for name in ("u", "v"):
            self.add_table(name, (self.n_head, self.d_model // self.n_head), "glorot_uniform")

    def call(
        self, x: Tensor, r: Tensor, index: Tensor, mask: Tensor | None = None, training: bool | None = None,
        dropout_key: Tensor | None = None,
    ) -> Any:  # fmt: skip
        index, mask = checked_arguments(x, r, index, mask, self.d_model)
        x, r = self.in_compute_dtype(x, r)
        q, k, v, position_scores = self.parts(x, r, index)
        visible = keys_seen_by_all(mask)
        dropout_key = self.key_of_call(x, training, dropout_key)
        return join_heads(attend(q, k, v, position_scores, visible, self.score_scale, self.dropatt, dropout_key))

    def heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values: `[H, B, T, D]` each. If `w_k` is `None`, the keys are `x`, split into heads."""
        linears = [linear for linear in (self.w_q, self.w_k, self.w_v) if linear is not None]
        heads = heads_of(x, linears, self.n_head)
        if self.w_k is None:
            heads.insert(1, split_heads(x, self.n_head))
        return heads

    def positions(self, r: Tensor) -> Tensor:
        """The vectors of the pairs, projected and split into heads: `[U, H, D]`."""
        return tf.reshape(self.w_r(r), [-1, self.n_head, self.d_model // self.n_head])

    def parts(self, x: Tensor, r: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(q + u, k, v, position_scores)`, the arguments of `attend`."""
        q, k, v = self.heads(x)
        u_bias, v_bias = (tf.cast(bias, q.dtype)[:, None, None] for bias in (self.u, self.v))
        r = self.positions(r)  # [U, H, D]
        return q + u_bias, k, v, pairwise_scores(q + v_bias, r, tf.cast(index, tf.int32))


def split_heads(x: Tensor, n_head: int) -> Tensor:
    """`[B, T, E]` to `[H, B, T, D]`."""
    batch, length, _ = shape_of(x)
    return tf.transpose(tf.reshape(x, [batch, length, n_head, -1]), [2, 0, 1, 3])


@keras.saving.register_keras_serializable("txl_tf")
class AddAndNorm(Layer):
    """`LayerNorm(y + added)`.

    It is a layer only because files of earlier versions store the weights of the norm under the name of this layer.
    """

    free_settings = {}

    def __init__(self, **kwargs: Unpack[LayerOptions]) -> None:
        super().__init__(**kwargs)
        self.layer_norm = LayerNorm(EPSILON, dtype=self.dtype_policy, name="layer_norm")

    def build(self, y_shape: Any, **_: Any) -> None:
        self.layer_norm.build(y_shape)

    def call(self, y: Tensor, added: Tensor) -> Any:
        return self.layer_norm(y + added)


@keras.saving.register_keras_serializable("txl_tf")
class FlatLayer(Layer):
    """Attention and a feed-forward net (`Transformer_Encoder_Layer` of the original program).

    Both sublayers share one layer norm, which comes after each of them, as in the original program.

    ```python
    x = keras.Input([None, 32])  # hidden states of characters and words
    pos_s, pos_e = keras.Input([None], dtype="int32"), keras.Input([None], dtype="int32")
    pairs = txl_tf.layers.distinct_pairs(pos_s, pos_e)
    r = txl_tf.layers.PositionFusion(d_model=32)(pairs, txl_tf.layers.distance_table(pairs.places, 32))
    output = txl_tf.layers.FlatLayer(d_model=32, n_head=4, d_inner=64)(x, r, pairs.index)
    model = keras.Model([x, pos_s, pos_e], output)
    ```

    Args:
        d_model, n_head, d_inner: width, number of heads, width inside the feed-forward net.
        residual: the tensor that is added to the output of a sublayer. "input" is the input of the sublayer, as in the
            paper. "own" is its output again, as in the original program, whose layers have no residual connection:
            `LN(y + y)`.
        dropout: dropout rate after the activation and at the end of the feed-forward net.
        attention: dictionary of arguments of `LatticeAttn`.
        seed: int from which dropout derives, unless the call gets a key. `None` draws one.

    Call arguments, returns: see `LatticeAttn`.

    Raises:
        ParameterError: an argument is out of its range, or a tensor or the mask has another shape.
    """

    free_settings = {"dropout": FREE_RATE, "seed": FREE_SEED}
    weight_parts = ("ff_0", "ff_1")

    @stored
    def __init__(
        self, d_model: int, n_head: int, d_inner: int, *, residual: str = "input", dropout: float = 0.0,
        attention: dict[str, Any] | None = None, seed: int | None = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_sizes(d_inner=d_inner)
        one_of(RESIDUALS)("residual", residual)
        if not isinstance(attention, dict | types.MappingProxyType | None):
            raise ParameterError("attention", attention, "a dictionary of arguments of LatticeAttn")
        if {"seed", "dtype", "name"} & {*(attention or ())}:
            raise ParameterError("attention", attention, "without seed, dtype and name, which the layer sets")
        self.attention = types.MappingProxyType(dict(attention or {}))
        self.start_keys(seed, dropout=dropout, dropatt=self.attention.get("dropatt", 0.0))
        options: dict[str, Any] = {"dtype": self.dtype_policy}
        attention_arguments: dict[str, Any] = {**self.attention, "seed": self.draw_key}
        self.attn = LatticeAttn(d_model, n_head, **attention_arguments, **options, name="attn")
        self.ff_0 = Linear(d_inner, **options, name="ff_0")
        self.ff_1 = Linear(d_model, **options, name="ff_1")
        self.postprocess = AddAndNorm(**options, name="postprocess")

    def rates(self) -> list[float]:
        return [self.dropout, self.attn.dropatt]

    def settings_changed(self, names: Iterable[str]) -> None:
        super().settings_changed(names)
        # `Flat` sets the rate of `attn` directly. The configuration must contain the new rate.
        if self.attn.dropatt != self.attention.get("dropatt", 0.0):
            self.store("attention", types.MappingProxyType({**self.attention, "dropatt": self.attn.dropatt}))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "attention": dict(self.attention)}

    @classmethod
    def from_config(cls, config: dict[str, Any]):
        config = FlatConfig.without_removed(config)
        if config.get("attention"):
            config["attention"] = FlatConfig.without_removed(config["attention"])
        return cls(**config)

    def build(self, x_shape: Any = None, *_: Any, **__: Any) -> None:
        self.build_parts(x_shape, self.attn, self.ff_0, self.postprocess)
        self.ff_1.build((None, None, self.d_inner))

    def call(
        self, x: Tensor, r: Tensor, index: Tensor, mask: Tensor | None = None, training: bool | None = None,
        dropout_key: Tensor | None = None,
    ) -> Any:  # fmt: skip
        index, mask = checked_arguments(x, r, index, mask, self.d_model)
        attention_key, inner_key, output_key = split(self.key_of_call(x, training, dropout_key), 3)
        x, r = self.in_compute_dtype(x, r)
        x = self._sublayer(x, lambda y: self.attn(y, r, index, mask, dropout_key=attention_key))
        return self._sublayer(x, lambda y: self.feed_forward(y, inner_key, output_key))

    def _sublayer(self, x: Tensor, function: Any) -> Tensor:
        """Computes `LayerNorm(x + y)` for `y = function(x)`; with `residual="own"`, `LayerNorm(y + y)`."""
        y = function(x)
        return self.postprocess(y, x if self.residual == "input" else y)

    def feed_forward(self, x: Tensor, inner_key: Tensor | None = None, output_key: Tensor | None = None) -> Tensor:
        """The feed-forward net without residual connection and layer norm."""
        x, *weights = self.in_compute_dtype(x, *self.ff_0.weights, *self.ff_1.weights)
        output = feed_forward(x, FeedForward(*weights), Drop(self.dropout, inner_key))
        return dropout(output, self.dropout, output_key)
