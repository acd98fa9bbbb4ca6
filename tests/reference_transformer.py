"""A plain port of the tutorial's Transformer: stock Keras layers, Keras's `fit`, decoding without a cache.

It is what the benchmark compares the library with. It follows TensorFlow's tutorial and article 2 of docs/articles.md:
post-norm, masks that are added, one Dense layer for every projection. `keras_attention` takes `keras.layers.
MultiHeadAttention` in place of theirs.
"""

import keras
import numpy as np
import tensorflow as tf


def positional_encoding(position, d_model):
    angles = np.arange(position)[:, None] / np.power(10000, 2 * (np.arange(d_model) // 2) / d_model)
    angles[:, 0::2], angles[:, 1::2] = np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])
    return tf.cast(angles[None], tf.float32)


class TutorialAttention(keras.layers.Layer):
    def __init__(self, d_model, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.num_heads, self.depth = num_heads, d_model // num_heads
        self.wq, self.wk, self.wv, self.dense = (keras.layers.Dense(d_model) for _ in range(4))

    def heads(self, x):
        x = tf.reshape(x, [tf.shape(x)[0], -1, self.num_heads, self.depth])
        return tf.transpose(x, [0, 2, 1, 3])

    def call(self, q, k, mask):
        q, v, k = self.heads(self.wq(q)), self.heads(self.wv(k)), self.heads(self.wk(k))
        logits = tf.matmul(q, k, transpose_b=True) / tf.math.sqrt(tf.cast(self.depth, q.dtype))
        weights = tf.nn.softmax(tf.cast(logits, tf.float32) + tf.cast(mask, tf.float32) * -1e9)
        joined = tf.transpose(tf.matmul(tf.cast(weights, v.dtype), v), [0, 2, 1, 3])
        return self.dense(tf.reshape(joined, [tf.shape(q)[0], -1, self.num_heads * self.depth]))


class StockAttention(keras.layers.Layer):
    def __init__(self, d_model, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(num_heads, d_model // num_heads)

    def call(self, q, k, mask):
        return self.attention(q, k, attention_mask=tf.squeeze(mask, 1) == 0)


class Sublayers(keras.layers.Layer):
    """An encoder layer, or with `cross` a decoder layer."""

    def __init__(self, attention, d_model, num_heads, dff, rate, cross, **kwargs):
        super().__init__(**kwargs)
        self.attentions = [attention(d_model, num_heads) for _ in range(1 + cross)]
        self.ffn = keras.Sequential([keras.layers.Dense(dff, activation="relu"), keras.layers.Dense(d_model)])
        self.norms = [keras.layers.LayerNormalization(epsilon=1e-6) for _ in range(2 + cross)]
        self.dropouts = [keras.layers.Dropout(rate) for _ in range(2 + cross)]

    def call(self, x, mask, enc_output=None, padding_mask=None, training=False):
        outputs = [lambda x: self.attentions[0](x, x, mask), self.ffn]
        if enc_output is not None:
            outputs.insert(1, lambda x: self.attentions[1](x, enc_output, padding_mask))
        for output, norm, drop in zip(outputs, self.norms, self.dropouts, strict=True):
            x = norm(x + drop(output(x), training=training))
        return x


class ReferenceTransformer(keras.Model):
    def __init__(
        self,
        num_layers,
        d_model,
        num_heads,
        dff,
        input_vocab_size,
        target_vocab_size,
        rate,
        keras_attention=False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        attention = StockAttention if keras_attention else TutorialAttention
        self.d_model, self.pos = d_model, positional_encoding(1000, d_model)
        self.embeddings = [keras.layers.Embedding(n, d_model) for n in (input_vocab_size, target_vocab_size)]
        self.encoders, self.decoders = (
            [Sublayers(attention, d_model, num_heads, dff, rate, cross) for _ in range(num_layers)] for cross in (0, 1)
        )
        self.dropouts = [keras.layers.Dropout(rate) for _ in range(2)]
        self.final_layer = keras.layers.Dense(target_vocab_size, dtype="float32")

    def embed(self, ids, side, training):
        x = self.embeddings[side](ids)
        x = x * tf.cast(self.d_model**0.5, x.dtype) + tf.cast(self.pos[:, : tf.shape(ids)[1]], x.dtype)
        return self.dropouts[side](x, training=training)

    def call(self, inputs, training=False):
        source, target = inputs
        padding_mask = tf.cast(source == 0, tf.float32)[:, None, None]
        size = tf.shape(target)[1]
        ahead = 1 - tf.linalg.band_part(tf.ones([size, size]), -1, 0)
        ahead = tf.maximum(ahead, tf.cast(target == 0, tf.float32)[:, None, None])
        x = self.embed(source, 0, training)
        # keras.layers.MultiHeadAttention wants a mask of whole rows.
        of_source = tf.broadcast_to(padding_mask, [tf.shape(source)[0], 1, tf.shape(source)[1], tf.shape(source)[1]])
        of_target = tf.broadcast_to(padding_mask, [tf.shape(source)[0], 1, size, tf.shape(source)[1]])
        for layer in self.encoders:
            x = layer(x, of_source, training=training)
        y = self.embed(target, 1, training)
        for layer in self.decoders:
            y = layer(y, ahead, x, of_target, training=training)
        return self.final_layer(y)

    def greedy(self, source, start, number):
        """int32 `[B, number]`, the whole target again for every symbol, as the tutorial does."""
        target = tf.fill([tf.shape(source)[0], 1], start)
        for _ in range(number):
            last = self.step((source, target))
            target = tf.concat([target, last[:, None]], 1)
        return target[:, 1:]

    @tf.function(reduce_retracing=True)
    def step(self, inputs):
        return tf.argmax(self(inputs)[:, -1], -1, output_type=tf.int32)


def masked_loss(labels, logits):
    """Mean cross entropy of the labels that are no padding."""
    labels = tf.cast(labels, tf.int32)
    nll = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    kept = tf.cast(labels != 0, tf.float32)
    return tf.reduce_sum(nll * kept) / tf.reduce_sum(kept)
