"""The layer of Transformer-XL without a table of distances: attention, then a feed-forward net.

Positions come from its input, if they are absolute, as in the vanilla language model; or from a scheme that needs no
table of distances, such as ALiBi and rotary. So networks with different positions are the same in everything else
(paper, sections 3.1 and 4.2).
"""

from typing import Any, Unpack

import keras

from txl_tf.equations import attention
from txl_tf.errors import ParameterError
from txl_tf.kernels.dropout import Drop, split
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.position_schemes import scheme_of
from txl_tf.transformer_xl.attention import SegmentAttention, memory_and_weights
from txl_tf.transformer_xl.layer import TransformerXLLayer


def multihead_attn(
    w: Tensor, attn_mask: Tensor | None, mems: Tensor | None, qkv_kernel: Tensor, o_kernel: Tensor, n_head: int,
    dropatt: float = 0.0, dropout_key: Tensor | None = None, positions: Any = None,
    content_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention `softmax(q.k / sqrt(d_head))` with its projections.

    `positions` may add scores, or turn queries and keys. `MultiHeadAttn` adds the residual connection and layer norm.

    Args: as in `rel_multihead_attn`, without `r`, `r_w_bias`, `r_r_bias` and `r_kernel`, and
        n_head: the number of heads.
        positions: see `MultiHeadAttn`.

    Returns:
        `[batch, tgt_len, d_model]`.
    """
    scheme = scheme_of(positions)
    memory, weights = memory_and_weights(w, attn_mask, mems, qkv_kernel, o_kernel, n_head, scheme, content_mask)
    return attention(w, memory, weights, Drop(dropatt, dropout_key))


@keras.saving.register_keras_serializable("txl_tf")
class MultiHeadAttn(SegmentAttention):
    """`RelMultiHeadAttn` without relative positions: it has no `r_kernel`, and its call has no `r` and no biases.

    ```python
    w, mems = tf.random.normal([2, 5, 32]), tf.random.normal([2, 3, 32])  # a segment of 5, a memory of 3
    attention = txl_tf.layers.MultiHeadAttn(d_model=32, n_head=4, d_head=8)
    output = attention(w, mems=mems)  # [2, 5, 32]
    # A mask of zeros hides no key, so tokens also see later tokens.
    output = attention(w, tf.zeros([5, 5]))  # [2, 5, 32]
    turned = txl_tf.layers.MultiHeadAttn(d_model=32, n_head=4, d_head=8, positions="rotary")
    output = turned(w, mems=mems)  # [2, 5, 32]
    ```

    Args: as in `RelMultiHeadAttn`, and
        positions: "alibi", "rotary" or the name of another scheme that a layer can use without a network; or `None`.

    Call arguments: as in `RelMultiHeadAttn`, without `r`, `r_w_bias` and `r_r_bias`. `content_mask` is 0 where a key
        lies before the query's document: its content then counts as zeros.

    Returns:
        `[batch, tgt_len, d_model]`.

    Reference:
        Vaswani et al. 2017, section 3.2; `MultiHeadAttn` of the original's PyTorch program.
    """

    relative = False

    @stored
    def __init__(
        self, d_model: int, n_head: int, d_head: int, dropout: float = 0.0, dropatt: float = 0.0,
        kernel_initializer: Any = "glorot_uniform", layer_norm_epsilon: float = 1e-12, seed: int | None = None,
        positions: Any = None, pre_lnorm: bool = False, norm: str = "layer", **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(
            d_model, n_head, d_head, dropout, dropatt, kernel_initializer, layer_norm_epsilon, seed, pre_lnorm, norm,
            **kwargs,
        )  # fmt: skip
        self.scheme = scheme_of(positions)
        if self.scheme.overrides("enter"):
            allowed = f"a scheme that {type(self).__name__} can use without a network"
            raise ParameterError("positions", positions, allowed)
        self.scheme.check(self)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "positions": self.scheme.known_as}

    def build(self, w_shape: Any = None, **_: Any) -> None:
        super().build(w_shape)
        if self.positions is not None:  # a network makes the weights of its own scheme
            self.scheme.make_weights(self)

    def call(
        self, w: Tensor, attn_mask: Any = None, mems: Any = None, content_mask: Tensor | None = None,
        training: bool | None = None, dropout_key: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self.attend_segment(w, attn_mask, mems, content_mask, training, dropout_key)


@keras.saving.register_keras_serializable("txl_tf")
class TransformerLMLayer(TransformerXLLayer):
    """`MultiHeadAttn`, then `PositionwiseFF`.

    ```python
    layer = txl_tf.layers.TransformerLMLayer(d_model=32, n_head=4, d_head=8, d_inner=64)
    output = layer(tf.random.normal([2, 5, 32]))  # [2, 5, 32]
    ```

    Args: as in the two layers.

    Call arguments: as in `MultiHeadAttn`.

    Returns:
        `[batch, tgt_len, d_model]`.
    """

    attention_class = MultiHeadAttn

    @stored
    def __init__(
        self, d_model: int, n_head: int, d_head: int, d_inner: int, dropout: float = 0.0, dropatt: float = 0.0,
        kernel_initializer: Any = "glorot_uniform", layer_norm_epsilon: float = 1e-12, seed: int | None = None,
        positions: Any = None, pre_lnorm: bool = False, activation: str = "relu", norm: str = "layer",
        **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(
            d_model, n_head, d_head, d_inner, dropout, dropatt, kernel_initializer, layer_norm_epsilon, seed,
            pre_lnorm, activation, norm, **kwargs,
        )  # fmt: skip

    def options_of_attention(self) -> dict[str, Any]:
        options = super().options_of_attention()
        return options if self.positions is None else {**options, "positions": self.positions}

    def get_config(self) -> dict[str, Any]:
        scheme = getattr(self.rel_attn, "scheme", None)
        return {**super().get_config(), "positions": None if scheme is None else scheme.known_as}

    def call(  # pyright: ignore[reportIncompatibleMethodOverride]  # without the arguments about distances
        self, w: Tensor, attn_mask: Any = None, mems: Any = None, content_mask: Tensor | None = None,
        training: bool | None = None, dropout_key: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        attn_key, ff_key = split(self.key_of_call(w, training, dropout_key), 2)
        output = self.rel_attn(w=w, attn_mask=attn_mask, mems=mems, content_mask=content_mask, dropout_key=attn_key)
        return self.ff(output, dropout_key=ff_key)
