"""The feed-forward net that follows attention, the same at every position (paper, section 3.3)."""

from typing import Any, Unpack

import keras
import tensorflow as tf

import txl_tf.equations as equations
from txl_tf.config.checks import NOT_NEGATIVE
from txl_tf.equations import FeedForward, feed_forward_block
from txl_tf.kernels.dropout import Drop, dropout, split
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Layer, check_sizes, check_tensors, check_width, width_of
from txl_tf.nn.bound import bound_weights
from txl_tf.nn.ops import LayerNorm, Linear, norm_of, own_initializer
from txl_tf.nn.settings import FREE_EPSILON, FREE_RATE, FREE_SEED


def feed_forward(x, kernel_1, bias_1, kernel_2, bias_2, activation=tf.nn.relu, rate=0.0, dropout_key=None):
    """`dropout(activation(x kernel_1 + bias_1)) kernel_2 + bias_2`: the net of all layers.

    Args:
        x: `[..., E]`.
        kernel_1, bias_1: `[E, F]` and `[F]`.
        kernel_2, bias_2: `[F, E]` and `[E]`.
        activation: function of a tensor.
        rate, dropout_key: see `dropout`.

    Returns:
        A tensor like `x`.
    """
    activation = None if activation is tf.nn.relu else activation
    weights = FeedForward(kernel_1, bias_1, kernel_2, bias_2)
    return equations.feed_forward(x, weights, Drop(rate, dropout_key), activation)


def positionwise_ff(inp, kernel_1, bias_1, kernel_2, bias_2, rate=0.0, dropout_key=None):
    """`relu(inp kernel_1 + bias_1) kernel_2 + bias_2`, with dropout after the relu and at the end.

    Args:
        inp, kernel_1, bias_1, kernel_2, bias_2: see `feed_forward`.
        rate: of dropout.
        dropout_key: int `[3]`, see `dropout`, or `None` for no dropout.

    Returns:
        A tensor like `inp`.
    """
    inner_key, output_key = split(dropout_key, 2)
    output = feed_forward(inp, kernel_1, bias_1, kernel_2, bias_2, rate=rate, dropout_key=inner_key)
    return dropout(output, rate, output_key)


@keras.saving.register_keras_serializable("txl_tf")
class PositionwiseFF(Layer):
    """Transformer-XL's: `positionwise_ff` with its residual and layer norm (`positionwise_FF` of the original).

    ```python
    ff = txl_tf.layers.PositionwiseFF(d_model=32, d_inner=128, dropout=0.1)
    output = ff(tf.random.normal([2, 5, 32]), training=True)  # [2, 5, 32]
    ```

    Args:
        d_model: width of input and output.
        d_inner: width between the two products, where the activation is relu.
        dropout: rate after each of the two.
        kernel_initializer: of both kernels.
        layer_norm_epsilon: added to the variance in layer norm.
        seed: int that dropout derives from where no key is given; drawn where it is `None`.

    Call arguments:
        inp: `[batch, tgt_len, d_model]`.
        training, dropout_key: see `txl_tf.nn.base`.

    Returns:
        `[batch, tgt_len, d_model]`.
    """

    free_settings = {"dropout": FREE_RATE, "layer_norm_epsilon": FREE_EPSILON, "seed": FREE_SEED}
    copied_settings = {"layer_norm_epsilon": ("layer_norm.epsilon",)}

    @stored
    def __init__(
        self, d_model: int, d_inner: int, dropout: float = 0.0, kernel_initializer: Any = "glorot_uniform",
        layer_norm_epsilon: float = 1e-12, seed: int | None = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_sizes(d_model=d_model, d_inner=d_inner)
        NOT_NEGATIVE("layer_norm_epsilon", layer_norm_epsilon)
        self.start_keys(seed, dropout=dropout)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.initializers = [own_initializer(self.kernel_initializer) for _ in range(2)]
        self.layer_norm = LayerNorm(layer_norm_epsilon, dtype=self.dtype_policy, name="layer_norm")

    def build(self, inp_shape=None):
        check_width("inp", inp_shape, "d_model", self.d_model)
        for i, shape in ((1, (self.d_model, self.d_inner)), (2, (self.d_inner, self.d_model))):
            kernel = self.add_weight(name=f"kernel_{i}", shape=shape, initializer=self.initializers[i - 1])
            bias = self.add_weight(name=f"bias_{i}", shape=shape[1:], initializer="zeros")
            setattr(self, f"kernel_{i}", kernel)
            setattr(self, f"bias_{i}", bias)
        self.layer_norm.build((None, None, self.d_model))

    def computed_weights(self):
        """The weights of the two products, in the dtype that the layer computes in."""
        return tuple(self.computed(self.kernel_1, self.bias_1, self.kernel_2, self.bias_2))

    def call(self, inp, training=None, dropout_key=None):
        check_tensors({"d_model": self.d_model}, inp=(inp, "float batch length d_model"))
        (inp,), weights = self.computed(inp), bound_weights(self) or self.computed_weights()
        inner_key, output_key = split(self.key_of_call(inp, training, dropout_key), 2)
        drops = Drop(self.dropout, inner_key), Drop(self.dropout, output_key)
        return feed_forward_block(inp, FeedForward(*weights), norm_of(self.layer_norm), *drops)


@keras.saving.register_keras_serializable("txl_tf")
class PositionWiseFFN(Layer):
    """The vanilla Transformer's net, without residual and layer norm: `dense2(relu(dense1(X)))`.

    ```python
    ffn = txl_tf.layers.PositionWiseFFN(ffn_num_hiddens=128, ffn_num_outputs=16)
    output = ffn(tf.random.normal([2, 5, 32]))  # [2, 5, 16]
    ```

    Args:
        ffn_num_hiddens: width between the two products.
        ffn_num_outputs: width of the output.
        rate: dropout rate after the relu; the article has none.
        seed: int that dropout derives from where no key is given; drawn where it is `None`.

    Call arguments:
        X: `[batch, length, any]`.
        training, dropout_key: see `txl_tf.nn.base`.

    Returns:
        `[batch, length, ffn_num_outputs]`.
    """

    free_settings = {"rate": FREE_RATE, "seed": FREE_SEED}

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

    def build(self, X_shape):
        width_of("X", X_shape)
        self.dense1.build(X_shape)
        self.dense2.build((*X_shape[:-1], self.ffn_num_hiddens))

    def call(self, X, training=None, dropout_key=None):
        check_tensors({"width": self.dense1.kernel.shape[0]}, X=(X, "float ... width"))
        X, *weights = self.computed(X, *self.dense1.weights, *self.dense2.weights)
        inner_key, _ = split(self.key_of_call(X, training, dropout_key), 2)
        return feed_forward(X, *weights, rate=self.rate, dropout_key=inner_key)

    def compute_output_shape(self, *shapes, **named):
        return (*self.named_shapes(shapes, named)["X"][:-1], self.ffn_num_outputs)


def point_wise_feed_forward_network(d_model, dff):
    """`PositionWiseFFN` by the name and arguments that the article's `EncoderLayer` calls it with."""
    return PositionWiseFFN(dff, d_model)
