"""One layer of Transformer-XL: relative attention, then a feed-forward net at every position."""

from typing import Any, Unpack

import keras

from txl_tf.errors import ParameterError
from txl_tf.kernels.dropout import split
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Layer
from txl_tf.nn.feed_forward import PositionwiseFF
from txl_tf.nn.lora import low_rank_parts
from txl_tf.nn.ops import for_weights_of_layer
from txl_tf.nn.parts import checked_config, choosing, chosen_class, owner_of, registered_classes
from txl_tf.nn.settings import FREE_EPSILON, FREE_RATE, FREE_SEED, OF_CLASS
from txl_tf.transformer_xl.attention import RelMultiHeadAttn


@keras.saving.register_keras_serializable("txl_tf")
class TransformerXLLayer(Layer):
    """`RelMultiHeadAttn`, then `PositionwiseFF`.

    ```python
    tokens = tf.constant([[5, 7, 0, 4, 9], [3, 3, 8, 6, 2]])  # token 0 begins another document
    w, mems = tf.random.normal([2, 5, 32]), tf.random.normal([2, 3, 32])
    distances, frequencies = txl_tf.layers.relative_positions(3 + 5), txl_tf.layers.inverse_frequencies(32)
    r, u, v = txl_tf.layers.positional_embedding(distances, frequencies), tf.zeros([4, 8]), tf.zeros([4, 8])
    layer = txl_tf.layers.TransformerXLLayer(d_model=32, n_head=4, d_head=8, d_inner=64)
    output = layer(w, r, u, v, mems=mems)  # [2, 5, 32]
    mems = tf.stop_gradient(tf.concat([mems, w], 1)[:, -3:])  # [2, 3, 32]

    # Token 0 and the tokens after it do not see the text before token 0. The next memory does not contain it either.
    mask = txl_tf.layers.document_mask(txl_tf.layers.create_mask(5, 3), tokens, reset_token=0)
    output = layer(w, r, u, v, mask.attn_mask, mems, mask.content)  # [2, 5, 32]
    (mems,) = mask.forget([tf.concat([mems, w], 1)[:, -3:]])  # [2, 3, 32]
    ```

    Args: as in the two layers.

    Call arguments: as in `RelMultiHeadAttn`.

    Returns:
        `[batch, tgt_len, d_model]`.

    Reference:
        Dai et al. 2019, section 3.3.
    """

    attention_class: Any = RelMultiHeadAttn
    restores_parts = True
    free_settings = {
        "dropout": FREE_RATE, "dropatt": FREE_RATE, "layer_norm_epsilon": FREE_EPSILON, "seed": FREE_SEED,
    }  # fmt: skip
    fixed_settings = {"attention_class": OF_CLASS}
    copied_settings = {
        "dropout": ("rel_attn.dropout", "ff.dropout"),
        "dropatt": ("rel_attn.dropatt",),
        "layer_norm_epsilon": ("rel_attn.layer_norm_epsilon", "ff.layer_norm_epsilon"),
    }

    @stored
    def __init__(
        self, d_model: int, n_head: int, d_head: int, d_inner: int, dropout: float = 0.0, dropatt: float = 0.0,
        kernel_initializer: Any = "glorot_uniform", layer_norm_epsilon: float = 1e-12, seed: int | None = None,
        pre_lnorm: bool = False, activation: str = "relu", norm: str = "layer", **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        self.start_keys(seed, dropout=dropout, dropatt=dropatt)
        self.kernel_initializer = for_weights_of_layer(keras.initializers.get(kernel_initializer))
        shared = {
            "kernel_initializer": self.kernel_initializer,
            "layer_norm_epsilon": layer_norm_epsilon,
            "seed": self.draw_key,
            "dtype": self.dtype_policy,
        }
        attention_class = chosen_class("attention_class", self.attention_class)
        options = self.options_of_attention()
        self.rel_attn = attention_class(d_model, n_head, d_head, dropout, dropatt, name="rel_attn", **shared, **options)
        self.ff = PositionwiseFF(
            d_model, d_inner, dropout, name="ff", **shared, pre_lnorm=pre_lnorm, activation=activation, norm=norm
        )

    def options_of_attention(self) -> dict[str, Any]:
        """More arguments for the attention's constructor. Those with default values are left out.

        A user's attention need not have them.
        """
        options: dict[str, Any] = {"pre_lnorm": True} if self.pre_lnorm else {}
        return options if self.norm == "layer" else {**options, "norm": self.norm}

    def get_config(self) -> dict[str, Any]:
        # Only the configuration of a network contains the rank of the updates.
        parts = [part.name for part in low_rank_parts([self]) if part.lora_enabled]
        if parts and owner_of(self) is None:
            message = f"merge_lora of {', '.join(parts)} must come before {self.name} is saved or cloned"
            raise ParameterError("enable_lora", parts, "merged before the layer is saved or cloned", message)
        config = {**super().get_config(), **registered_classes(attention_class=self.rel_attn)}
        return checked_config(self, config)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        with choosing(config) as without_classes:
            return super().from_config(without_classes)

    def build(self, w_shape: Any = None, **_: Any) -> None:
        self.build_parts(w_shape, self.rel_attn, self.ff)

    def call(
        self, w: Tensor, r: Tensor, r_w_bias: Tensor, r_r_bias: Tensor, attn_mask: Any = None, mems: Any = None,
        content_mask: Tensor | None = None, training: bool | None = None, dropout_key: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        attn_key, ff_key = split(self.key_of_call(w, training, dropout_key), 2)
        output = self.rel_attn(
            w=w, r=r, r_w_bias=r_w_bias, r_r_bias=r_r_bias, attn_mask=attn_mask, mems=mems, content_mask=content_mask,
            dropout_key=attn_key,
        )  # fmt: skip
        return self.ff(output, dropout_key=ff_key)
