"""One layer of the network: relative attention, then a feed-forward net at every position."""

import keras

from txl_tf.attention import RelMultiHeadAttn
from txl_tf.dropout import dropout, split
from txl_tf.primitives import LayerNorm


@keras.saving.register_keras_serializable("txl_tf")
class PositionwiseFF(keras.layers.Layer):
    """Two dense layers at every position, with residual and layer norm (`positionwise_FF` of the original).

    Args:
        d_model: width of input and output.
        d_inner: width between the two, where the activation is relu.
        dropout: rate after each of the two.
        kernel_initializer: of both kernels.

    Call arguments:
        inp: `[batch, tgt_len, d_model]`.
        seed: int `[3]` draws the dropout masks, see `dropout`; `None` for inference.

    Returns:
        `[batch, tgt_len, d_model]`.
    """

    def __init__(self, d_model, d_inner, dropout=0.0, kernel_initializer="glorot_uniform", **kwargs):
        super().__init__(**kwargs)
        self.d_model = d_model
        self.d_inner = d_inner
        self.dropout = dropout
        self.kernel_initializer = keras.initializers.get(kernel_initializer)

        def dense(units, **arguments):
            initializer = self.kernel_initializer.clone()
            return keras.layers.Dense(units, kernel_initializer=initializer, dtype=self.dtype_policy, **arguments)

        self.layer_1 = dense(d_inner, activation="relu", name="layer_1")
        self.layer_2 = dense(d_model, name="layer_2")
        self.layer_norm = LayerNorm(dtype=self.dtype_policy)

    def build(self, inp_shape=None):
        self.layer_1.build((None, None, self.d_model))
        self.layer_2.build((None, None, self.d_inner))
        self.layer_norm.build((None, None, self.d_model))

    def call(self, inp, seed=None):
        seed_1, seed_2 = split(seed, 2)
        output = dropout(self.layer_1(inp), self.dropout, seed_1)
        output = dropout(self.layer_2(output), self.dropout, seed_2)
        return self.layer_norm(output + inp)

    def get_config(self):
        return {
            **super().get_config(),
            "d_model": self.d_model,
            "d_inner": self.d_inner,
            "dropout": self.dropout,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }


@keras.saving.register_keras_serializable("txl_tf")
class DecoderLayer(keras.layers.Layer):
    """`RelMultiHeadAttn`, then `PositionwiseFF`.

    Args: those of the two layers. Call arguments and returns: those of `RelMultiHeadAttn`.
    """

    def __init__(
        self, d_model, n_head, d_head, d_inner, dropout=0.0, dropatt=0.0,
        kernel_initializer="glorot_uniform", **kwargs,
    ):  # fmt: skip
        super().__init__(**kwargs)
        self.d_model = d_model
        self.n_head = n_head
        self.d_head = d_head
        self.d_inner = d_inner
        self.dropout = dropout
        self.dropatt = dropatt
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        shared = {"kernel_initializer": self.kernel_initializer, "dtype": self.dtype_policy}
        self.rel_attn = RelMultiHeadAttn(d_model, n_head, d_head, dropout, dropatt, name="rel_attn", **shared)
        self.ff = PositionwiseFF(d_model, d_inner, dropout, name="ff", **shared)

    def build(self, w_shape=None, **_):
        self.rel_attn.build()
        self.ff.build()

    def call(self, w, r, r_w_bias, r_r_bias, attn_mask, mems, seed=None):
        attn_seed, ff_seed = split(seed, 2)
        output = self.rel_attn(w, r, r_w_bias, r_r_bias, attn_mask, mems, seed=attn_seed)
        return self.ff(output, seed=ff_seed)

    def get_config(self):
        return {
            **super().get_config(),
            "d_model": self.d_model,
            "n_head": self.n_head,
            "d_head": self.d_head,
            "d_inner": self.d_inner,
            "dropout": self.dropout,
            "dropatt": self.dropatt,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }
