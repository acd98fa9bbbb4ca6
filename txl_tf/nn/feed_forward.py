"""The feed-forward net that follows attention, the same at every position (paper, section 3.3)."""

from collections.abc import Callable
from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.config import ACTIVATIONS, GATED_ACTIVATIONS, one_of
from txl_tf.config.checks import NOT_NEGATIVE
from txl_tf.equations import FeedForward, feed_forward, feed_forward_block, swiglu
from txl_tf.kernels.dropout import Drop, dropout, split
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Layer
from txl_tf.nn.bound import bound_weights
from txl_tf.nn.checks import check_sizes, check_tensors, check_width, width_of
from txl_tf.nn.lora import LowRank
from txl_tf.nn.ops import Linear, for_weights_of_layer, make_norm, norm_of, own_initializer
from txl_tf.nn.settings import FREE_EPSILON, FREE_RATE, FREE_SEED
from txl_tf.schema import check_type

# Functions for the argument `activation`. `None` is relu, which has its own kernel.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor] | None] = {"relu": None, "gelu": tf.nn.gelu, "swiglu": swiglu}


def positionwise_ff(
    inp: Tensor, kernel_1: Tensor, bias_1: Tensor, kernel_2: Tensor, bias_2: Tensor, rate: float = 0.0,
    dropout_key: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`relu(inp kernel_1 + bias_1) kernel_2 + bias_2`, with dropout after the relu and at the end.

    Args:
        inp: `[..., E]`.
        kernel_1, bias_1: `[E, F]` and `[F]`.
        kernel_2, bias_2: `[F, E]` and `[E]`.
        rate: dropout rate.
        dropout_key: int `[3]`, see `dropout`, or `None` for no dropout.

    Returns:
        A tensor like `inp`.
    """
    inner_key, output_key = split(dropout_key, 2)
    output = feed_forward(inp, FeedForward(kernel_1, bias_1, kernel_2, bias_2), Drop(rate, inner_key))
    return dropout(output, rate, output_key)


@keras.saving.register_keras_serializable("txl_tf")
class PositionwiseFF(LowRank, Layer):
    """The feed-forward net of Transformer-XL, with its residual connection and layer norm.

    It computes `layer_norm(inp + positionwise_ff(inp))`, as `positionwise_FF` of the original. With `pre_lnorm`, it is
    `inp + positionwise_ff(layer_norm(inp))`.

    ```python
    ff = txl_tf.layers.PositionwiseFF(d_model=32, d_inner=128, dropout=0.1)
    output = ff(tf.random.normal([2, 5, 32]), training=True)  # [2, 5, 32]
    ```

    Args:
        d_model: width of input and output.
        d_inner: width between the two products.
        dropout: dropout rate after the activation and after the second product.
        kernel_initializer: initializer of both kernels. With a seed, each draws other numbers.
        layer_norm_epsilon: added to the variance in layer norm, or to the mean square in `RMSNorm`.
        seed: int from which dropout keys derive, for calls without a key. `None` draws one.
        pre_lnorm: whether to normalise the input, instead of the sum after the residual connection.
        activation: "relu"; "gelu", the exact one; or "swiglu", `silu(gates) * values`, where gates and values are two
            products side by side: `kernel_1` is then `[d_model, 2 * d_inner]`.
        norm: "layer" for layer norm, "rms" for `RMSNorm`.

    Call arguments:
        inp: `[batch, tgt_len, d_model]`.
        training, dropout_key: see `txl_tf.nn.dropping`.

    Returns:
        `[batch, tgt_len, d_model]`.

    Raises:
        ParameterError: an argument is outside its range, or `inp` has another width.

    Reference:
        Dai et al. 2019, section 3.3; Vaswani et al. 2017, section 3.3; Shazeer 2020 for swiglu.
    """

    lora_kernels = ("kernel_1", "kernel_2")
    free_settings = {"dropout": FREE_RATE, "layer_norm_epsilon": FREE_EPSILON, "seed": FREE_SEED}
    copied_settings = {"layer_norm_epsilon": ("layer_norm.epsilon",)}

    @stored
    def __init__(
        self, d_model: int, d_inner: int, dropout: float = 0.0, kernel_initializer: Any = "glorot_uniform",
        layer_norm_epsilon: float = 1e-12, seed: int | None = None, pre_lnorm: bool = False, activation: str = "relu",
        norm: str = "layer", **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_sizes(d_model=d_model, d_inner=d_inner)
        check_type("pre_lnorm", pre_lnorm, bool)
        one_of(ACTIVATIONS)("activation", activation)
        NOT_NEGATIVE("layer_norm_epsilon", layer_norm_epsilon)
        self.start_keys(seed, dropout=dropout)
        self.kernel_initializer = for_weights_of_layer(keras.initializers.get(kernel_initializer))
        self.initializers = [own_initializer(self.kernel_initializer) for _ in range(2)]
        self.layer_norm = make_norm(norm, layer_norm_epsilon, dtype=self.dtype_policy, name="layer_norm")

    def build(self, inp_shape: Any = None) -> None:
        check_width("inp", inp_shape, "d_model", self.d_model)
        width = self.d_inner * (2 if self.activation in GATED_ACTIVATIONS else 1)
        for i, shape in ((1, (self.d_model, width)), (2, (self.d_inner, self.d_model))):
            kernel = self.add_weight(name=f"kernel_{i}", shape=shape, initializer=self.initializers[i - 1])
            bias = self.add_weight(name=f"bias_{i}", shape=shape[1:], initializer="zeros")
            setattr(self, f"kernel_{i}", kernel)
            setattr(self, f"bias_{i}", bias)
        self.layer_norm.build((None, None, self.d_model))
        self.restore_lora()

    def computed_weights(self) -> tuple[Tensor, ...]:
        """The weights of the two products, in the dtype in which the layer computes."""
        return tuple(self.in_compute_dtype(self.kernel("kernel_1"), self.bias_1, self.kernel("kernel_2"), self.bias_2))

    def call(self, inp: Tensor, training: bool | None = None, dropout_key: Tensor | None = None) -> Tensor:
        check_tensors({"d_model": self.d_model}, inp=(inp, "float batch length d_model"))
        (inp,) = self.in_compute_dtype(inp)
        weights = FeedForward(*(bound_weights(self) or self.computed_weights()))
        inner_key, output_key = split(self.key_of_call(inp, training, dropout_key), 2)
        return feed_forward_block(
            inp, weights, norm_of(self.layer_norm), Drop(self.dropout, inner_key), Drop(self.dropout, output_key),
            self.pre_lnorm, _ACTIVATIONS[self.activation],
        )  # fmt: skip


@keras.saving.register_keras_serializable("txl_tf")
class PositionWiseFFN(Layer):
    """The feed-forward net of the vanilla Transformer: `dense2(relu(dense1(X)))`.

    The layers of encoder and decoder add the residual connection and layer norm.

    ```python
    ffn = txl_tf.layers.PositionWiseFFN(ffn_num_hiddens=128, ffn_num_outputs=16)
    output = ffn(tf.random.normal([2, 5, 32]))  # [2, 5, 16]
    ```

    Args:
        ffn_num_hiddens: width between the two products.
        ffn_num_outputs: width of the output.
        rate: dropout rate after the relu. The article has no dropout.
        seed: int from which dropout keys derive, for calls without a key. `None` draws one.

    Call arguments:
        X: `[batch, length, any]`.
        training, dropout_key: see `txl_tf.nn.dropping`.

    Returns:
        `[batch, length, ffn_num_outputs]`.

    Raises:
        ParameterError: a size or a rate is outside its range, or `X` has another width than in the first call.

    Reference:
        Vaswani et al. 2017, section 3.3.
    """

    free_settings = {"rate": FREE_RATE, "seed": FREE_SEED}
    weight_parts = ("dense1", "dense2")

    @stored
    def __init__(
        self, ffn_num_hiddens: int, ffn_num_outputs: int, rate: float = 0.0, seed: int | None = None,
        **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_sizes(ffn_num_hiddens=ffn_num_hiddens, ffn_num_outputs=ffn_num_outputs)
        self.start_keys(seed, rate=rate)
        self.dense1 = Linear(ffn_num_hiddens, dtype=self.dtype_policy, name="dense1")
        self.dense2 = Linear(ffn_num_outputs, dtype=self.dtype_policy, name="dense2")

    def build(self, X_shape: Any) -> None:
        width_of("X", X_shape)
        self.dense1.build(X_shape)
        self.dense2.build((*X_shape[:-1], self.ffn_num_hiddens))

    def call(self, X: Tensor, training: bool | None = None, dropout_key: Tensor | None = None) -> Tensor:
        check_tensors({"width": self.dense1.kernel.shape[0]}, X=(X, "float ... width"))
        x, *weights = self.in_compute_dtype(X, *self.dense1.weights, *self.dense2.weights)
        inner_key, _ = split(self.key_of_call(x, training, dropout_key), 2)
        return feed_forward(x, FeedForward(*weights), Drop(self.rate, inner_key))

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        return (*self.named_shapes(shapes, named)["X"][:-1], self.ffn_num_outputs)


def point_wise_feed_forward_network(d_model: int, dff: int) -> PositionWiseFFN:
    """`PositionWiseFFN` under the name and with the arguments that the article's `EncoderLayer` uses."""
    return PositionWiseFFN(dff, d_model)
