"""Plain ports of TENER's and FLAT's programs, their way: what the benchmark compares the library with.

Stock Keras layers and Keras's `fit`. FLAT looks up and fuses the sinusoids of all distances for every pair of items;
TENER shifts padded scores. The CRF is a loop over time that TensorFlow differentiates.
"""

import keras
import numpy as np
import tensorflow as tf


def sinusoids(positions, width):
    angles = positions[:, None] * np.exp(np.arange(width // 2) * -np.log(10000) / (width // 2 - 1))
    return tf.constant(np.concatenate([np.sin(angles), np.cos(angles)], 1), tf.float32)


class PlainCRF(keras.layers.Layer):
    def __init__(self, n_tag):
        super().__init__()
        self.n_tag = n_tag

    def build(self, *_):
        self.transitions = self.add_weight(shape=(self.n_tag, self.n_tag), initializer="zeros")

    def nll(self, emissions, tags, lengths):
        first, rest = emissions[:, 0], tf.transpose(emissions[:, 1:], [1, 0, 2])
        alive = tf.transpose(tf.sequence_mask(lengths, tf.shape(tags)[1])[:, 1:])[..., None]

        def step(alpha, element):
            emission, mask = element
            new = tf.reduce_logsumexp(alpha[:, :, None] + self.transitions + emission[:, None], 1)
            return tf.where(mask, new, alpha)

        alphas = tf.concat([first[None], tf.scan(step, (rest, alive), first)], 0)
        mask = tf.sequence_mask(lengths, tf.shape(tags)[1], tf.float32)
        score = tf.reduce_sum(tf.gather(emissions, tags, batch_dims=2) * mask, 1)
        steps = tf.gather_nd(self.transitions, tf.stack([tags[:, :-1], tags[:, 1:]], -1))
        return tf.reduce_logsumexp(alphas[-1], 1) - score - tf.reduce_sum(steps * mask[:, 1:], 1)

    def decode(self, emissions, lengths):
        first, rest = emissions[:, 0], tf.transpose(emissions[:, 1:], [1, 0, 2])
        alive = tf.transpose(tf.sequence_mask(lengths, tf.shape(emissions)[1])[:, 1:])[..., None]

        def step(state, element):
            (score, _), (emission, mask) = state, element
            ways = score[:, :, None] + self.transitions + emission[:, None]
            best, pointers = tf.reduce_max(ways, 1), tf.argmax(ways, 1, output_type=tf.int32)
            return tf.where(mask, best, score), tf.where(mask, pointers, tf.range(self.n_tag))

        scores, pointers = tf.scan(step, (rest, alive), (first, tf.zeros_like(first, tf.int32)))
        last = tf.argmax(tf.concat([first[None], scores], 0)[-1], 1, output_type=tf.int32)
        before = tf.scan(lambda tag, p: tf.gather(p, tag, batch_dims=1), pointers, last, reverse=True)
        return tf.transpose(tf.concat([before, last[None]], 0))


class PlainTagger(keras.Model):
    """Emissions of a network and a CRF; `inputs` are those of `txl_tf.Flat` or `txl_tf.Tener`."""

    def __init__(self, network, n_tag, rate):
        super().__init__()
        self.network, self.drop = network, keras.layers.Dropout(rate)
        self.out, self.crf = keras.layers.Dense(n_tag), PlainCRF(n_tag)
        self.crf.build()
        self.loss_mean = keras.metrics.Mean("loss")

    def call(self, inputs, training=False):
        return self.out(self.drop(self.network(inputs, training=training), training=training))

    def lengths(self, inputs):
        return inputs["seq_len"] if "seq_len" in inputs else tf.reduce_sum(tf.cast(inputs["chars"] != 0, tf.int32), 1)

    def train_step(self, data):
        inputs, tags = data
        with tf.GradientTape() as tape:
            emissions = self(inputs, training=True)
            loss = tf.reduce_mean(self.crf.nll(emissions, tags, self.lengths(inputs)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.loss_mean.update_state(loss)
        return {"loss": self.loss_mean.result()}

    @tf.function(reduce_retracing=True)
    def tag(self, inputs):
        return self.crf.decode(self(inputs), self.lengths(inputs))


def heads(x, n_head):
    x = tf.reshape(x, [tf.shape(x)[0], tf.shape(x)[1], n_head, x.shape[-1] // n_head])
    return tf.transpose(x, [0, 2, 1, 3])


def joined(x):
    x = tf.transpose(x, [0, 2, 1, 3])
    return tf.reshape(x, [tf.shape(x)[0], tf.shape(x)[1], x.shape[2] * x.shape[3]])


def softmax(scores, mask):
    return tf.nn.softmax(tf.where(mask[:, None, None], scores, -1e15))


class PlainTener(keras.layers.Layer):
    def __init__(self, n_token, n_bigram, d_embed, n_layer, d_model, n_head, d_inner, dropout, embed_dropout):
        super().__init__()
        self.n_head, self.rate = n_head, dropout
        self.char, self.bigram = keras.layers.Embedding(n_token, d_embed), keras.layers.Embedding(n_bigram, d_embed)
        self.drop, self.in_fc = keras.layers.Dropout(embed_dropout), keras.layers.Dense(d_model)
        self.stacked = [PlainTenerLayer(d_model, n_head, d_inner, dropout) for _ in range(n_layer)]

    def call(self, inputs, training=False):
        mask = inputs["chars"] != 0
        x = tf.concat([self.char(inputs["chars"]), self.bigram(inputs["bigrams"])], -1)
        x = self.in_fc(self.drop(x, training=training))
        for layer in self.stacked:
            x = layer(x, mask, training=training)
        return x


class PlainTenerLayer(keras.layers.Layer):
    def __init__(self, d_model, n_head, d_inner, rate):
        super().__init__()
        self.d_model, self.n_head = d_model, n_head
        self.qkv = keras.layers.Dense(3 * d_model, use_bias=False)
        self.ffn = [keras.layers.Dense(d_inner, activation="relu"), keras.layers.Dense(d_model)]
        self.norms = [keras.layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]
        self.drops = [keras.layers.Dropout(rate) for _ in range(3)]

    def build(self, *_):
        shape = (self.n_head, 1, self.d_model // self.n_head)
        self.u, self.v = (self.add_weight(shape=shape, initializer="glorot_normal") for _ in range(2))

    def call(self, x, mask, training=False):
        length, depth = tf.shape(x)[1], self.d_model // self.n_head
        q, k, v = (heads(part, self.n_head) for part in tf.split(self.qkv(x), 3, -1))
        positions = tf.range(-tf.cast(length, tf.float32), tf.cast(length, tf.float32))
        angles = positions[:, None] * np.exp(np.arange(depth // 2) * -np.log(10000) / (depth // 2 - 1)).astype("f")
        r = tf.concat([tf.sin(angles), tf.cos(angles)], 1)
        scores = tf.einsum("bnqd,bnkd->bnqk", q + self.u, k)
        scores += self.shift(tf.einsum("bnqd,ld->bnql", q + self.v, r), length)
        scores += tf.transpose(self.shift(tf.einsum("bnqd,ld->bnql", k, r), length), [0, 1, 3, 2])
        y = joined(self.drops[0](softmax(scores, mask), training=training) @ v)
        x = self.norms[0](x + y)
        y = self.ffn[1](self.drops[1](self.ffn[0](x), training=training))
        return self.norms[1](x + self.drops[2](y, training=training))

    def shift(self, x, length):
        batch = tf.shape(x)[0]
        x = tf.reshape(tf.pad(x, [[0, 0]] * 3 + [[0, 1]]), [batch, self.n_head, 2 * length + 1, length])
        return tf.reshape(x[:, :, :-1], [batch, self.n_head, length, 2 * length])[..., length:]


class PlainFlat(keras.layers.Layer):
    """One layer, as the program's default; the sinusoids of all pairs are looked up and fused."""

    def __init__(self, n_token, n_bigram, d_embed, d_model, n_head, d_inner, fusion, dropout, embed_dropout, most):
        super().__init__()
        self.d_model, self.n_head, self.most, self.fusion = d_model, n_head, most, fusion
        self.item, self.bigram = keras.layers.Embedding(n_token, d_embed), keras.layers.Embedding(n_bigram, d_embed)
        self.table = sinusoids(np.arange(-most, most + 1), d_model)
        dense = keras.layers.Dense
        self.char_proj, self.lex_proj = dense(d_model), dense(d_model)
        self.fuse, self.w_r = dense(d_model, activation="relu"), dense(d_model)
        self.w_q, self.w_v = dense(d_model), dense(d_model)
        self.ffn = [dense(d_inner, activation="relu"), dense(d_model)]
        self.norm = keras.layers.LayerNormalization(epsilon=1e-5)
        self.drops = [keras.layers.Dropout(rate) for rate in (embed_dropout, embed_dropout, dropout, dropout)]

    def build(self, *_):
        shape = (self.n_head, 1, self.d_model // self.n_head)
        self.u, self.v = (self.add_weight(shape=shape, initializer="glorot_uniform") for _ in range(2))

    def call(self, inputs, training=False):
        lattice, length = inputs["lattice"], tf.shape(inputs["bigrams"])[1]
        n_items = tf.shape(lattice)[1]
        chars = tf.sequence_mask(inputs["seq_len"], n_items)
        items = tf.sequence_mask(inputs["seq_len"] + inputs["lex_num"], n_items)
        found = self.item(lattice)
        bigrams = tf.pad(self.bigram(inputs["bigrams"]), [[0, 0], [0, n_items - length], [0, 0]])
        of_chars = self.char_proj(self.drops[0](tf.concat([found, bigrams], -1), training=training))
        of_words = self.lex_proj(self.drops[1](found, training=training))
        x = tf.where(chars[..., None], of_chars, 0.0) + tf.where((items & ~chars)[..., None], of_words, 0.0)
        q, k, v = heads(self.w_q(x), self.n_head), heads(x, self.n_head), heads(self.w_v(x), self.n_head)
        r = self.w_r(self.positions(inputs["pos_s"], inputs["pos_e"]))  # [B, T, T, d_model]
        r = tf.reshape(r, [tf.shape(x)[0], n_items, n_items, self.n_head, self.d_model // self.n_head])
        scores = tf.einsum("bnqd,bnkd->bnqk", q + self.u, k) + tf.einsum("bnqd,bqknd->bnqk", q + self.v, r)
        y = joined(softmax(scores, items) @ v)
        y = self.norm(y + y)
        y = self.drops[3](self.ffn[1](self.drops[2](self.ffn[0](y), training=training)), training=training)
        return self.norm(y + y)[:, :length]

    def positions(self, s, e):
        pairs = [(s, s), (s, e), (e, s), (e, e)]
        if self.fusion == "ff_two":
            pairs = [pairs[0], pairs[3]]
        rows = [tf.gather(self.table, i[:, :, None] - j[:, None] + self.most) for i, j in pairs]
        return self.fuse(tf.concat(rows, -1))
