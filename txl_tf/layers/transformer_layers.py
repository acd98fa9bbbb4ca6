"""Encoder and decoder layers of the vanilla Transformer (document 001; Vaswani et al. 2017, section 3.1).

    post-norm, as in the documents      x = LayerNorm(x + dropout(sublayer(x)))
    pre-norm, `norm_first`              x = x + dropout(sublayer(LayerNorm(x)))

Pre-norm trains without a long warm-up. It leaves the last output as it is: the stack of layers normalises it.
"""

import keras
import tensorflow as tf

from txl_tf.layers.dropout import dropout, split
from txl_tf.layers.feed_forward import PositionWiseFFN
from txl_tf.layers.multi_head_attention import MultiHeadAttention
from txl_tf.layers.ops import LayerNorm, config_of

EPSILON = 1e-6  # of the documents' layer norms


class _TransformerLayer(keras.layers.Layer):
    """What both layers have: sublayers, each with a layer norm and a dropout."""

    def __init__(self, d_model, num_heads, dff, rate=0.1, norm_first=False, dropatt=0.0, dropact=0.0, **kwargs):
        super().__init__(**kwargs)
        self.d_model = d_model
        self.num_heads = num_heads
        self.dff = dff
        self.rate = rate
        self.norm_first = norm_first
        self.dropatt = dropatt
        self.dropact = dropact
        self.ffn = PositionWiseFFN(dff, d_model, dropact, dtype=self.dtype_policy, name="ffn")

    def _attention(self, name):
        return MultiHeadAttention(self.d_model, self.num_heads, self.dropatt, dtype=self.dtype_policy, name=name)

    def _norm(self, name):
        return LayerNorm(EPSILON, dtype=self.dtype_policy, name=name)

    def _build(self, *layers):
        for layer in layers:
            layer.build((None, None, self.d_model))

    def _residual(self, x, norm, sublayer, dropout_key=None):
        """`x` after a sublayer, a function of the (normalised) input, its residual, dropout and norm."""
        output = dropout(sublayer(norm(x) if self.norm_first else x), self.rate, dropout_key)
        return x + output if self.norm_first else norm(x + output)

    def get_config(self):
        return {**super().get_config(), **config_of(self, "d_model num_heads dff rate norm_first dropatt dropact")}


@keras.saving.register_keras_serializable("txl_tf")
class EncoderLayer(_TransformerLayer):
    """Self-attention, then the feed-forward net.

    Args:
        d_model, num_heads, dff: width, number of heads, width inside the feed-forward net.
        rate: dropout rate of both outputs.
        norm_first: pre-norm; the document's layer is post-norm.
        dropatt, dropact: dropout rates of the attention weights and after the relu; the document has neither.

    Call arguments:
        x: `[batch, length, d_model]`.
        mask: float, broadcasts to `[batch, num_heads, length, length]`, 1 where forbidden; `None` for none.
        dropout_key: int `[3]` draws the dropout masks, see `dropout`; `None` for inference.

    Returns:
        `[batch, length, d_model]`.
    """

    def __init__(self, d_model, num_heads, dff, rate=0.1, **kwargs):
        super().__init__(d_model, num_heads, dff, rate, **kwargs)
        self.mha = self._attention("mha")
        self.layernorm1, self.layernorm2 = self._norm("layernorm1"), self._norm("layernorm2")

    def build(self, x_shape=None, **_):
        self._build(self.mha, self.ffn, self.layernorm1, self.layernorm2)

    def call(self, x, mask=None, dropout_key=None):
        keys = split(dropout_key, 4)
        x = tf.cast(x, self.compute_dtype)
        x = self._residual(x, self.layernorm1, lambda y: self.mha.attention(y, y, y, mask, keys[0])[0], keys[1])
        return self._residual(x, self.layernorm2, lambda y: self.ffn(y, dropout_key=keys[2]), keys[3])


@keras.saving.register_keras_serializable("txl_tf")
class DecoderLayer(_TransformerLayer):
    """Self-attention, attention to the encoder's output, then the feed-forward net.

    Args: as of `EncoderLayer`.

    Call arguments:
        x: `[batch, length, d_model]`.
        enc_output: `[batch, source, d_model]`.
        look_ahead_mask: float, broadcasts to `[batch, num_heads, length, length]`, 1 where forbidden.
        padding_mask: float, broadcasts to `[batch, num_heads, length, source]`, 1 where forbidden.
        dropout_key: int `[3]` draws the dropout masks, see `dropout`; `None` for inference.

    Returns:
        `(output, attn_weights_block1, attn_weights_block2)`: `[batch, length, d_model]`, and the weights of both
        attentions, `[batch, num_heads, length, length]` and `[batch, num_heads, length, source]`.
    """

    def __init__(self, d_model, num_heads, dff, rate=0.1, **kwargs):
        super().__init__(d_model, num_heads, dff, rate, **kwargs)
        self.mha1, self.mha2 = self._attention("mha1"), self._attention("mha2")
        self.layernorm1, self.layernorm2, self.layernorm3 = (self._norm(f"layernorm{i}") for i in (1, 2, 3))

    def build(self, x_shape=None, **_):
        self._build(self.mha1, self.mha2, self.ffn, self.layernorm1, self.layernorm2, self.layernorm3)

    def call(self, x, enc_output, look_ahead_mask=None, padding_mask=None, dropout_key=None):
        keys, weights = split(dropout_key, 6), []

        def self_attention(y):
            output, probs = self.mha1.attention(y, y, y, look_ahead_mask, keys[0])
            weights.append(probs)
            return output

        def cross_attention(y):
            output, probs = self.mha2.attention(enc_output, enc_output, y, padding_mask, keys[2])
            weights.append(probs)
            return output

        x, enc_output = tf.cast(x, self.compute_dtype), tf.cast(enc_output, self.compute_dtype)
        x = self._residual(x, self.layernorm1, self_attention, keys[1])
        x = self._residual(x, self.layernorm2, cross_attention, keys[3])
        x = self._residual(x, self.layernorm3, lambda y: self.ffn(y, dropout_key=keys[4]), keys[5])
        return x, *(tf.transpose(probs, [1, 0, 2, 3]) for probs in weights)

    def step(self, x, place, cache, source, padding_mask=None):
        """The call for one more element, from the keys and values of those before it.

        Args:
            x: `[batch, 1, d_model]`.
            place: int scalar tensor, the number of the element.
            cache: `(keys, values)`, `[num_heads, batch, most, depth]` each, of the elements before it.
            source: `(keys, values)` of the encoder's output, see `source_heads`.
            padding_mask: as in the call.

        Returns:
            `(output, cache)`: `[batch, 1, d_model]`, and the cache with the new element.
        """
        most = keras.ops.shape(cache[0])[2]
        new_cache = []

        def self_attention(y):
            q, k, v = self.mha1.project(y, self.mha1.wq, self.mha1.wk, self.mha1.wv)
            here = tf.cast(tf.range(most) == place, y.dtype)[:, None]
            new_cache.extend(old * (1 - here) + new * here for old, new in zip(cache, (k, v), strict=True))
            ahead = tf.cast(tf.range(most) > place, tf.float32)[None]
            return self.mha1.attend(q, *new_cache, ahead)[0]

        def cross_attention(y):
            (q,) = self.mha2.project(y, self.mha2.wq)
            return self.mha2.attend(q, *source, padding_mask)[0]

        x = self._residual(x, self.layernorm1, self_attention)
        x = self._residual(x, self.layernorm2, cross_attention)
        return self._residual(x, self.layernorm3, self.ffn), tuple(new_cache)

    def source_heads(self, enc_output):
        """Keys and values of the encoder's output, which are the same at every step."""
        return tuple(self.mha2.project(enc_output, self.mha2.wk, self.mha2.wv))
