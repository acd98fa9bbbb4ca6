"""FLAT: self-attention over a lattice, in which every pair of items has its own position (Li et al. 2020).

    scores = (q_i + u) . k_j + (q_i + v) . W_(k,R) R_ij         `LatticeAttn`; R_ij: see `lattice.py`
    x = LayerNorm(x + attention(x))                             `FlatLayer`
    x = LayerNorm(x + feed_forward(x))

Other options of the original program are in `flat_variants.py`.

Shapes:
    B: batch      T: items      H: n_head      D: d_head, E / H      E: d_model      U: different pairs
"""

import types
from collections.abc import Iterable
from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.config import ACTIVATIONS, RESIDUALS, one_of
from txl_tf.errors import ParameterError
from txl_tf.kernels import attend, attention_probs, join_heads, pairwise_scores
from txl_tf.kernels.dropout import dropout, split
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Layer, check_heads, check_sizes, check_tensors
from txl_tf.nn.feed_forward import feed_forward
from txl_tf.nn.masks import mask_of_call
from txl_tf.nn.ops import Linear
from txl_tf.nn.settings import FREE_RATE, FREE_SEED
from txl_tf.taggers.flat_variants import ACTIVATION, LatticeProcess, heads_of_some
from txl_tf.taggers.tener_layers import visible_keys


def items(x: Tensor, r: Tensor, index: Tensor, mask: Tensor, d_model: int):
    """Checks the arguments of a call. Returns the mask, bool `[B, T]`, true at items, or `None` without padding."""
    mask = mask_of_call(x, mask)
    sizes = {"d_model": d_model}
    check_tensors(sizes, x=(x, "float batch items d_model"), r=(r, "float pairs d_model"))
    check_tensors(sizes, index=(index, "int batch items items"), mask=(mask, "bool? batch items"))
    return mask


@keras.saving.register_keras_serializable("txl_tf")
class LatticeAttn(Layer):
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
        q_proj, k_proj, v_proj, r_proj: whether queries, keys, values and positions are projected.
        attn_ff: whether the output is projected.
        dropatt: dropout rate of the attention probabilities.
        seed: int from which dropout derives, unless the call gets a key. `None` draws one.

    Call arguments:
        x: `[batch, items, d_model]`.
        r: `[U, d_model]`, a vector for every different pair, from `PositionFusion`.
        index: int32 `[batch, items, items]`, the number of each pair among the different ones: `Pairs.index`.
        mask: bool, or numbers 0 and 1, `[batch, items]`, true at items. By default, the mask that Keras passes on with
            `x`; without any, there is no padding.
        training, dropout_key: see `txl_tf.nn.base`.

    Returns:
        `[batch, items, d_model]`.

    Raises:
        ParameterError: `d_model` is not a multiple of `n_head`, or a tensor or the mask has another shape.

    Reference:
        Li et al. 2020, section 3.2.
    """

    free_settings = {"dropatt": FREE_RATE, "seed": FREE_SEED}

    w_q: Any  # this projection and the others: a `Linear`, or `None` without projection
    w_k: Any
    w_v: Any
    w_r: Any

    @stored
    def __init__(
        self, d_model: int, n_head: int, scale: bool = False, q_proj: bool = True, k_proj: bool = True,
        v_proj: bool = True, r_proj: bool = True, attn_ff: bool = False, dropatt: float = 0.0, seed: int | None = None,
        **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_heads("d_model", d_model, "n_head", n_head)
        self.start_keys(seed, dropatt=dropatt)
        self.score_scale = (d_model // n_head) ** -0.5 if scale else 1.0

        def linear(wanted, name):
            return Linear(d_model, dtype=self.dtype_policy, name=name) if wanted else None

        self.w_q = linear(q_proj, "w_q")
        self.w_k = linear(k_proj, "w_k")
        self.w_v = linear(v_proj, "w_v")
        self.w_r = linear(r_proj, "w_r")
        self.ff_final = linear(attn_ff, "ff_final")

    def build(self, x_shape: Any = None, **_: Any) -> None:
        linears = self.w_q, self.w_k, self.w_v, self.w_r, self.ff_final
        self.build_parts(x_shape, *(linear for linear in linears if linear is not None))
        for name in ("u", "v"):
            self.add_table(name, (self.n_head, self.d_model // self.n_head), "glorot_uniform")

    def call(
        self,
        x: Tensor,
        r: Tensor,
        index: Tensor,
        mask: Tensor | None = None,
        training: bool | None = None,
        dropout_key: Tensor | None = None,
    ) -> Any:
        visible = visible_keys(items(x, r, index, mask, self.d_model))
        q, k, v, position_scores = self.parts(*self.computed(x, r), index)
        dropout_key = self.key_of_call(x, training, dropout_key)
        vectors = join_heads(attend(q, k, v, position_scores, visible, self.score_scale, self.dropatt, dropout_key))
        return vectors if self.ff_final is None else self.ff_final(vectors)

    def parts(self, x: Tensor, r: Tensor, index: Tensor):
        """`(q + u, k, v, position_scores)`, the arguments of `attend`."""
        q, k, v = heads_of_some(x, (self.w_q, self.w_k, self.w_v), self.n_head)
        u_bias, v_bias = (tf.cast(bias, q.dtype)[:, None, None] for bias in (self.u, self.v))
        r = r if self.w_r is None else self.w_r(r)
        r = tf.reshape(r, [-1, self.n_head, self.d_model // self.n_head])
        return q + u_bias, k, v, pairwise_scores(q + v_bias, r, tf.cast(index, tf.int32))

    def attention_probs(self, x: Tensor, r: Tensor, index: Tensor, mask: Tensor | None = None):
        """The probabilities of the call, without dropout: `[n_head, batch, items, items]`."""
        visible = visible_keys(items(x, r, index, mask, self.d_model))
        q, k, _, position_scores = self.parts(*self.computed(x, r), index)
        return attention_probs(q, k, position_scores, visible, self.score_scale)


@keras.saving.register_keras_serializable("txl_tf")
class FlatLayer(Layer):
    """Attention and a feed-forward net (`Transformer_Encoder_Layer` of the original program).

    Both sublayers share one layer norm before and one after them, as in the original program.

    ```python
    characters = keras.Input([None, 32])  # of characters and words
    pos_s, pos_e = keras.Input([None], dtype="int32"), keras.Input([None], dtype="int32")
    pairs = txl_tf.layers.distinct_pairs(pos_s, pos_e)
    r = txl_tf.layers.PositionFusion(d_model=32)(pairs, txl_tf.layers.distance_table(pairs.places, 32))
    output = txl_tf.layers.FlatLayer(d_model=32, n_head=4, d_inner=64)(characters, r, pairs.index)
    model = keras.Model([characters, pos_s, pos_e], output)
    ```

    Args:
        d_model, n_head, d_inner: width, number of heads, width inside the feed-forward net.
        pre, post: operations of the `LatticeProcess` before and after each sublayer: "a" adds, "n" normalises. The
            paper has "" and "an".
        residual: the tensor that "a" of `post` adds. "input" is the input of the sublayer, as in the paper. "own" is
            its output again, as in the original program, whose layers have no residual connection: "an" is `LN(y + y)`.
        activation: "relu", as in the paper, or "leaky".
        dropout: dropout rate after the activation and at the end of the feed-forward net.
        attention: dictionary of arguments of `LatticeAttn`.
        seed: int from which dropout derives, unless the call gets a key. `None` draws one.

    Call arguments, returns: see `LatticeAttn`.

    Raises:
        ParameterError: an argument is out of its range.
    """

    free_settings = {"dropout": FREE_RATE, "seed": FREE_SEED}

    @stored
    def __init__(
        self, d_model: int, n_head: int, d_inner: int, pre: str = "", post: str = "an", residual: str = "input",
        activation: str = "relu", dropout: float = 0.0, attention: dict[str, Any] | None = None,
        seed: int | None = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_sizes(d_inner=d_inner)
        one_of(RESIDUALS)("residual", residual)
        one_of(ACTIVATIONS)("activation", activation)
        if not isinstance(attention, dict | types.MappingProxyType | None):
            raise ParameterError("attention", attention, "a dictionary of arguments of LatticeAttn")
        self.attention = types.MappingProxyType(dict(attention or {}))
        self.start_keys(seed, dropout=dropout, dropatt=self.attention.get("dropatt", 0.0))
        options: dict[str, Any] = {"dtype": self.dtype_policy}
        of_attention: dict[str, Any] = {**self.attention, "seed": self.draw_key}
        self.attn = LatticeAttn(d_model, n_head, **of_attention, **options, name="attn")
        self.ff_0 = Linear(d_inner, **options, name="ff_0")
        self.ff_1 = Linear(d_model, **options, name="ff_1")
        self.preprocess = LatticeProcess(pre, **options, name="preprocess")
        self.postprocess = LatticeProcess(post, **options, name="postprocess")

    def rates(self):
        return [self.dropout, self.attn.dropatt]

    def settings_changed(self, names: Iterable[str]) -> None:
        super().settings_changed(names)
        if self.attn.dropatt != self.attention.get("dropatt", 0.0):  # set by `Flat`
            self.store("attention", types.MappingProxyType({**self.attention, "dropatt": self.attn.dropatt}))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "attention": dict(self.attention)}

    def build(self, x_shape: Any = None, *_: Any, **__: Any) -> None:
        self.build_parts(x_shape, self.attn, self.ff_0, self.preprocess, self.postprocess)
        self.ff_1.build((None, None, self.d_inner))

    def call(
        self,
        x: Tensor,
        r: Tensor,
        index: Tensor,
        mask: Tensor | None = None,
        training: bool | None = None,
        dropout_key: Tensor | None = None,
    ) -> Any:
        mask = items(x, r, index, mask, self.d_model)
        attention_key, inner_key, output_key = split(self.key_of_call(x, training, dropout_key), 3)
        x, r = self.computed(x, r)
        x = self._sublayer(x, lambda y: self.attn(y, r, index, mask, dropout_key=attention_key))
        return self._sublayer(x, lambda y: self.feed_forward(y, inner_key, output_key))

    def _sublayer(self, x: Tensor, function: Any):
        """Computes `LayerNorm(x + function(x))` in the paper's configuration."""
        y = function(self.preprocess(x, x))
        return self.postprocess(y, x if self.residual == "input" else y)

    def feed_forward(self, x: Tensor, inner_key: Tensor | None = None, output_key: Tensor | None = None):
        """The feed-forward net without residual connection and layer norm."""
        x, *weights = self.computed(x, *self.ff_0.weights, *self.ff_1.weights)
        output = feed_forward(x, *weights, ACTIVATION[self.activation], self.dropout, inner_key)
        return dropout(output, self.dropout, output_key)
