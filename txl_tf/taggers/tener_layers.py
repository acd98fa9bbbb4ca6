"""TENER: self-attention that is aware of the direction of a distance (Yan et al. 2019).

    scores = (q_i + u) . k_j + (q_i + v) . R_{j-i} + k_j . R_{i-j}

R are sinusoids with the width of a head. They are the same for all heads, and not projected. The last term is in the
original program, but not in the paper. In Transformer-XL, a query sees only itself and earlier keys. Here it also sees
later keys, so distances have both signs.

The paper's distance is query minus key, `R_{i-j}`. That is the same model: `R_{-d}` is `R_d` with negated sines, and
the weights can negate the same dimensions of q, k, u and v.

Shapes:
    B: batch      T: length      H: n_head      D: d_head, E / H      E: d_model
"""

from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.config import ATTN_TYPES, one_of
from txl_tf.equations import score_scale, shifted_scores
from txl_tf.errors import ParameterError
from txl_tf.kernels import join_heads, project_heads
from txl_tf.kernels.attending import attend
from txl_tf.kernels.dropout import dropout, split
from txl_tf.kernels.dtypes import wide_dtype
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Attending, Layer
from txl_tf.nn.checks import check_heads, check_sizes, check_tensors, checked_sizes
from txl_tf.nn.feed_forward import PositionWiseFFN
from txl_tf.nn.masks import keys_seen_by_all, mask_of_call
from txl_tf.nn.ops import LayerNorm, Linear
from txl_tf.nn.positions import positional_embedding, tensor2tensor_frequencies
from txl_tf.nn.settings import FREE_RATE, FREE_SEED

EPSILON = 1e-5  # of the layer norms, PyTorch's


def two_way_positions(length: Size, d_head: int, dtype: Any = "float32") -> Tensor:
    """The sinusoids of the distances in both directions, `-length ... length - 1`.

    No pair has the distance `-length`, but `shifted_scores` needs a table of `2 * length` rows.

    Args:
        length: int or int scalar tensor, the length of the sentence.
        d_head: int, the width of a head: even, and at least 4.
        dtype: float32 or float64.

    Returns:
        `[2 * length, d_head]` in `dtype`. Row `length + d` belongs to the distance d. See `tensor2tensor_frequencies`.
    """
    length = tf.cast(length, dtype)
    return positional_embedding(tf.range(-length, length), tensor2tensor_frequencies(d_head, dtype))[0]


def two_way_scores(q: Tensor, r: Tensor) -> Tensor:
    """The products of every query i with the vector of its distance to every key j, `q_i . r_{j-i}`.

    Args:
        q: `[H, B, T, D]`, queries.
        r: `[2 * T, D]`, the vectors of the distances `-T ... T - 1`, see `two_way_positions`.

    Returns:
        `[H, B, T, T]`.
    """
    length = shape_of(q)[2]
    # All heads share the table. So `shifted_scores` gets a single head whose rows are [H, B, T], and one matrix product
    # computes all scores.
    scores: Any = shifted_scores(q[None], r[None], first=length)[0]  # [H, B, T, 2 * T - 1]
    return scores[..., :length]  # the other columns belong to no key


def tener_position_scores(q: Tensor, k: Tensor, v_bias: Tensor, key_position_term: bool = True) -> Tensor:
    """The terms of TENER's scores that depend on positions: `(q_i + v) . R_{j-i} + k_j . R_{i-j}`.

    ```python
    q, k, v = (tf.random.normal([2, 1, 5, 8]) for _ in range(3))  # 2 heads of width 8, one sentence of length 5
    u_bias, v_bias = tf.zeros([2, 8]), tf.zeros([2, 8])
    scores = txl_tf.layers.tener_position_scores(q, k, v_bias)  # [2, 1, 5, 5]
    vectors = txl_tf.layers.attend(q + u_bias[:, None, None], k, v, scores)  # [2, 1, 5, 8]
    ```

    Args:
        q, k: `[H, B, T, D]`, queries and keys.
        v_bias: `[H, D]`, the `r_w_bias` of the original program.
        key_position_term: whether to add the second term, which the paper does not have.

    Returns:
        `[H, B, T, T]`, not scaled: `attend` takes them as `position_scores`, adds its own scores and scales the sum.
    """
    r = tf.cast(two_way_positions(shape_of(q)[2], q.shape[-1], wide_dtype(q)), q.dtype)  # [2 * T, D]
    scores = two_way_scores(q + v_bias[:, None, None], r)
    # Row j, column i of the second term is k_j . R_{i-j}. Scores have the queries i as rows.
    return scores + tf.linalg.matrix_transpose(two_way_scores(k, r)) if key_position_term else scores


def checked_mask(x: Tensor, mask: Tensor, d_model: int) -> Tensor | None:
    """Checks `x` and `mask` of a call. Returns the mask, bool `[B, T]`, true at elements; `None` without padding."""
    mask = mask_of_call(x, mask)
    check_tensors({"d_model": d_model}, x=(x, "float batch length d_model"), mask=(mask, "bool? batch length"))
    return None if mask is None else checked_sizes(x=(x, "batch length"), mask=(mask, "batch length"))[1]


@keras.saving.register_keras_serializable("txl_tf")
class TenerAttn(Attending, Layer):
    """The attention of TENER: `RelativeMultiHeadAttn` of the original program or, with "transformer", `MultiHeadAttn`.

    ```python
    attention = txl_tf.layers.TenerAttn(d_model=32, n_head=4)
    ids = tf.constant([[5, 7, 2, 4], [3, 3, 0, 0]])  # 0 is padding
    output = attention(tf.random.normal([2, 4, 32]), mask=ids != 0)  # [2, 4, 32]
    ```

    Args:
        d_model: width.
        n_head: number of heads.
        attn_type: "adatrans" is direction-aware. "transformer", for comparison, is the attention of the vanilla
            Transformer: it has no relative positions, and projects its output.
        scale: whether to divide the scores by `sqrt(d_head)`. In the paper, results are better without.
        key_position_term: see `tener_position_scores`.
        dropatt: dropout rate of the attention probabilities.
        seed: int from which dropout derives, unless the call gets a key. `None` draws one.

    Call arguments:
        x: `[batch, length, d_model]`.
        mask: bool, or numbers 0 and 1, `[batch, length]`, true at elements. By default, the mask that Keras passes on
            with `x`; without any, there is no padding.
        training, dropout_key: see `txl_tf.nn.dropping`.

    Returns:
        `[batch, length, d_model]`.

    Raises:
        ParameterError: `d_model` is not a multiple of `n_head`; the width of a head is odd or below 4, with "adatrans";
            or a tensor or the mask has another shape.

    Reference:
        Yan et al. 2019, section 3.3.
    """

    free_settings = {"dropatt": FREE_RATE, "seed": FREE_SEED}
    fixed_settings = {"score_scale": ""}  # follows from d_model, n_head and scale

    @stored
    def __init__(
        self, d_model: int, n_head: int, attn_type: str = "adatrans", scale: bool = False,
        key_position_term: bool = True, dropatt: float = 0.0, seed: int | None = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_heads(d_model, "n_head", n_head)
        self.start_keys(seed, dropatt=dropatt)
        one_of(ATTN_TYPES)("attn_type", attn_type)
        if attn_type == "adatrans" and (d_model // n_head % 2 or d_model // n_head < 4):
            raise ParameterError("d_model", d_model, f"n_head={n_head} times an even number from 4 on")
        self.score_scale = score_scale(d_model // n_head) if scale else 1.0
        self.fc = Linear(d_model, dtype=self.dtype_policy, name="fc") if attn_type == "transformer" else None

    def build(self, x_shape: Any = None, **_: Any) -> None:
        self.build_parts(x_shape)
        shape = (self.d_model, 3 * self.d_model)
        self.qkv_kernel = self.add_weight(name="qkv_kernel", shape=shape, initializer="glorot_uniform")
        if self.fc is not None:
            self.fc.build((None, None, self.d_model))
            return
        # u and v of the equation. The original program has swapped the names: `r_r_bias` belongs to the content.
        for name in ("r_r_bias", "r_w_bias"):
            self.add_table(name, (self.n_head, self.d_model // self.n_head), "glorot_normal")

    def call(
        self, x: Tensor, mask: Tensor | None = None, training: bool | None = None, dropout_key: Tensor | None = None
    ) -> Any:
        visible = keys_seen_by_all(checked_mask(x, mask, self.d_model))
        q, k, v, position_scores = self.parts(*self.in_compute_dtype(x))
        dropout_key = self.key_of_call(x, training, dropout_key)
        vectors = join_heads(attend(q, k, v, position_scores, visible, self.score_scale, self.dropatt, dropout_key))
        return vectors if self.fc is None else self.fc(vectors)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """`(q + u, k, v, position_scores)`, the arguments of `attend`; with "transformer", `(q, k, v, None)`."""
        q, k, v = project_heads(x, tf.cast(self.qkv_kernel, x.dtype), 3, self.n_head)
        if self.attn_type == "transformer":
            return q, k, v, None
        u_bias = tf.cast(self.r_r_bias, q.dtype)
        v_bias = tf.cast(self.r_w_bias, q.dtype)
        return q + u_bias[:, None, None], k, v, tener_position_scores(q, k, v_bias, self.key_position_term)


@keras.saving.register_keras_serializable("txl_tf")
class TenerLayer(Layer):
    """Attention and a feed-forward net, each with residual and layer norm (`TransformerLayer` of the original program).

    ```python
    layer = txl_tf.layers.TenerLayer(d_model=32, n_head=4, d_inner=64, dropout=0.1)
    output = layer(tf.random.normal([2, 4, 32]))  # [2, 4, 32]
    ```

    Args:
        d_model, n_head, d_inner: width, number of heads, width inside the feed-forward net.
        after_norm: with `True`, a sublayer f computes `norm(x + f(x))`; with `False`, `x + f(norm(x))`, and there is no
            norm after the last layer.
        dropout: dropout rate after the relu and at the end of the feed-forward net.
        attn_type, scale, key_position_term, dropatt, seed: see `TenerAttn`.

    Call arguments, returns, raises: see `TenerAttn`. `d_inner` must be positive.
    """

    free_settings = {"dropout": FREE_RATE, "dropatt": FREE_RATE, "seed": FREE_SEED}
    copied_settings = {"dropout": ("ffn.rate",), "dropatt": ("self_attn.dropatt",)}

    @stored
    def __init__(
        self, d_model: int, n_head: int, d_inner: int, after_norm: bool = True, dropout: float = 0.0,
        attn_type: str = "adatrans", scale: bool = False, key_position_term: bool = True, dropatt: float = 0.0,
        seed: int | None = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_sizes(d_inner=d_inner)
        self.start_keys(seed, dropout=dropout, dropatt=dropatt)
        options: dict[str, Any] = {"dtype": self.dtype_policy}
        seed_of_part: Any = self.draw_key  # in place of a seed: the parts get their dropout keys from this layer
        self.self_attn = TenerAttn(
            d_model, n_head, attn_type, scale, key_position_term, dropatt, seed_of_part, **options, name="self_attn"
        )
        self.ffn = PositionWiseFFN(d_inner, d_model, dropout, seed_of_part, **options, name="ffn")
        self.norm1 = LayerNorm(EPSILON, **options, name="norm1")
        self.norm2 = LayerNorm(EPSILON, **options, name="norm2")

    def build(self, x_shape: Any = None, **_: Any) -> None:
        self.build_parts(x_shape, self.self_attn, self.ffn, self.norm1, self.norm2)

    def call(
        self, x: Tensor, mask: Tensor | None = None, training: bool | None = None, dropout_key: Tensor | None = None
    ) -> Any:
        mask = checked_mask(x, mask, self.d_model)
        attention_key, inner_key, output_key = split(self.key_of_call(x, training, dropout_key), 3)

        def feed_forward(y):
            return dropout(self.ffn(y, dropout_key=inner_key), self.dropout, output_key)

        (x,) = self.in_compute_dtype(x)  # wrappers such as `TimeDistributed` call without Keras's casts
        x = self._residual(x, self.norm1, lambda y: self.self_attn(y, mask=mask, dropout_key=attention_key))
        return self._residual(x, self.norm2, feed_forward)

    def _residual(self, x: Tensor, norm: Any, sublayer: Any) -> Tensor:
        """Applies a sublayer, a function of `x`, with a residual connection and layer norm, see `after_norm`."""
        return norm(x + sublayer(x)) if self.after_norm else x + sublayer(norm(x))
