"""Compares the code of four articles with the library, on the same weights and inputs, and prints the differences.

    python examples/articles.py                     all comparisons
    python examples/articles.py rel_shift flat      the comparisons whose names contain one of these words

docs/articles.md lists the contents of each article. The code of the articles is rewritten in plain TensorFlow, with the
axes in the order of the articles: time first in article 1, batch first in the others. Dropout is off on both sides. The
program prints the largest difference of each comparison. It ends with status 1 if one is above 1e-5.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
WORDS: list[str] = []
if __name__ == "__main__":  # before TensorFlow's import, which takes seconds
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of checks")
    WORDS = parser.parse_args().words

import numpy as np
import tensorflow as tf

from txl_tf import layers

TOLERANCE = 1e-5
CHECKS: dict[Callable, int] = {}  # function: number of its article
rng = np.random.default_rng(0)


def check_of_article(number):
    """Decorator that registers a check of one article: a function that yields pairs of results that should be equal.

    A pair is the result of the article's code, and that of the library.
    """

    def register(function):
        CHECKS[function] = number
        return function

    return register


def numbers(*shape):
    """Random numbers, float32 of this shape."""
    return tf.constant(rng.normal(size=shape), tf.float32)


def randomised(layer, *shape):
    """Builds a layer for inputs of this shape, and draws all its weights: zeros and ones would hide mistakes."""
    layer.build(shape)
    for weight in layer.trainable_weights:
        weight.assign(rng.normal(0, 0.3, weight.shape))
    return layer


def swapped(x):
    """Swaps the first two axes: time first becomes batch first, and the other way round."""
    return tf.transpose(x, [1, 0, *range(2, len(x.shape))])


def layer_norm(x, norm):
    """Layer normalisation of the last axis, with the weights of the layer `norm`."""
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) / tf.sqrt(variance + norm.epsilon) * norm.gamma + norm.beta


# ------------------------------------------------------------------- article 1: Transformer-XL, adaptive embedding


def plain_rel_shift(x):
    """The article's shift, time first: `[T, K, B, H]`.

    It puts a column of zeros in front of the K columns, drops the first T entries, and reads the rest as rows of K.
    """
    qlen, klen, *rest = x.shape
    padded = tf.concat([tf.zeros([qlen, 1, *rest]), x], 1)
    return tf.reshape(tf.reshape(padded, [klen + 1, qlen, *rest])[1:], x.shape)


def plain_mask(qlen, mlen, same_length):
    """The article's mask, `[qlen, mlen + qlen]`: 1 where a query does not see a key.

    These are the keys above the diagonal of the segment; with `same_length`, also those below the diagonal of the first
    `qlen` keys.
    """
    ones, eye = tf.ones([qlen, qlen]), tf.eye(qlen)
    mask = tf.concat([tf.zeros([qlen, mlen]), tf.linalg.band_part(ones, 0, -1) - eye], 1)
    below = tf.pad(tf.linalg.band_part(ones, -1, 0) - eye, [[0, 0], [0, mlen]])
    return mask + below if same_length else mask


@check_of_article(1)
def positional_embedding():
    distances = tf.range(8.0, -1, -1)
    inv_freq = 1 / 10000 ** (tf.range(0, 12, 2.0) / 12)
    angles = distances[:, None] * inv_freq[None]
    expected = tf.concat([tf.sin(angles), tf.cos(angles)], -1)[:, None]
    for bsz in (None, 3):
        got = layers.positional_embedding(layers.relative_positions(9), layers.inverse_frequencies(12), bsz)
        yield tf.tile(expected, [1, bsz or 1, 1]), swapped(got)


@check_of_article(1)
def rel_shift():
    x = numbers(3, 5, 2, 4)
    yield plain_rel_shift(x), layers.rel_shift(x, time_major=True)
    yield tf.transpose(plain_rel_shift(x), [2, 3, 0, 1]), layers.rel_shift(tf.transpose(x, [2, 3, 0, 1]))


@check_of_article(1)
def create_mask():
    for qlen, mlen in ((3, 3), (3, 5), (4, 1), (3, 0)):
        for same_length in (False, True):
            yield plain_mask(qlen, mlen, same_length), layers.create_mask(qlen, mlen, same_length)


def plain_relative_attention(layer, w, r, u, v, mask, mems):
    """Equation (6) of the article with residual connection and layer norm, time first.

    Args:
        layer: our layer, whose weights are used.
        w: the segment, `[T, B, E]`.
        r: the encodings of the distances K - 1, ..., 0.
        u, v: the biases of content and of position.
        mask: `[T, K]`, 1 where a query does not see a key.
        mems: the memory, `[K - T, B, E]`, or `None`.
    """
    qlen = w.shape[0]
    heads = [layer.n_head, layer.d_head]
    cat = w if mems is None else tf.concat([mems, w], 0)
    q, k, values = tf.split(cat @ layer.qkv_kernel, 3, -1)
    q, k, values = (tf.reshape(x, [*x.shape[:2], *heads]) for x in (q[-qlen:], k, values))
    r_k = tf.reshape(r @ layer.r_kernel, [r.shape[0], *heads])
    content = tf.einsum("ibnd,jbnd->ijbn", q + u, k)  # terms (a) and (c)
    position = plain_rel_shift(tf.einsum("ibnd,jnd->ijbn", q + v, r_k))  # terms (b) and (d)
    scores = (content + position) / math.sqrt(layer.d_head) - 1e30 * mask[:, :, None, None]
    vectors = tf.einsum("ijbn,jbnd->ibnd", tf.nn.softmax(scores, 1), values)
    output = tf.reshape(vectors, [*w.shape[:2], -1]) @ layer.o_kernel
    return layer_norm(w + output, layer.layer_norm)


@check_of_article(1)
def rel_multihead_attn():
    """Equation (6), with and without memory: the plain computation against our layer and our function."""
    layer = randomised(layers.RelMultiHeadAttn(8, 2, 3))
    w, u, v = numbers(4, 2, 8), numbers(2, 3), numbers(2, 3)
    for mlen, same_length in ((0, False), (3, False), (6, True)):
        mems = numbers(mlen, 2, 8) if mlen else None
        mask = plain_mask(4, mlen, same_length)
        r = layers.positional_embedding(layers.relative_positions(mlen + 4), layers.inverse_frequencies(8))
        expected = plain_relative_attention(layer, w, r[0], u, v, mask, mems)
        arguments = swapped(w), r, u, v, mask, None if mems is None else swapped(mems)
        yield expected, swapped(layer(*arguments))
        output = layers.rel_multihead_attn(*arguments, layer.qkv_kernel, layer.r_kernel, layer.o_kernel)
        yield expected, layer_norm(w + swapped(output), layer.layer_norm)


BINS = [  # arguments of `AdaptiveEmbedding`: n_token, d_embed, d_proj, and others by name
    (50, 8, 8, {}),
    (50, 8, 6, {}),
    (50, 8, 8, {"cutoffs": [10, 25], "div_val": 1}),
    (50, 8, 8, {"cutoffs": [10, 25], "div_val": 2}),
    (50, 16, 8, {"cutoffs": [10, 25], "div_val": 2, "proj_same_dim": False}),
]


def plain_embedding(layer, x):
    """The original's adaptive embedding of ids, cluster by cluster, with the weights of our `layer`."""
    if len(layer.tables) == 1:
        y = tf.gather(layer.tables[0], x)
        proj = layer.projs[0]
        return (y if proj is None else y @ proj) * math.sqrt(layer.d_proj)
    y = tf.zeros([*x.shape, layer.d_proj])
    ends = [0, *layer.cutoffs, layer.n_token]
    for first, last, table, proj in zip(ends[:-1], ends[1:], layer.tables, layer.projs, strict=True):
        mask = (x >= first) & (x < last)
        bin_rows = tf.gather(table, tf.boolean_mask(x, mask) - first)
        y += tf.scatter_nd(tf.where(mask), bin_rows if proj is None else bin_rows @ proj, tf.shape(y, tf.int64))
    return y * math.sqrt(layer.d_proj)


@check_of_article(1)
def adaptive_embedding():
    x = tf.constant(rng.integers(0, 50, [7, 3]))
    for *sizes, options in BINS:
        layer = randomised(layers.AdaptiveEmbedding(*sizes, **options))
        yield plain_embedding(layer, x), swapped(layer(swapped(x)))
        yield plain_embedding(layer, x), swapped(layer(swapped(x), static_shapes=True))


@check_of_article(1)
def adaptive_softmax():
    """The log-probability of every word.

    In cluster 0 it is that of the word's own entry. In another cluster it is the log-probability of the cluster, plus
    that of the word within the cluster.
    """
    hidden = numbers(2, 7, 8)
    target = tf.constant(rng.integers(0, 50, [2, 7]))
    options = {"cutoffs": [10, 25], "div_val": 2}
    embedding = randomised(layers.AdaptiveEmbedding(50, 8, 8, **options))
    softmax = randomised(layers.AdaptiveSoftmax(50, 8, 8, **options))
    cluster_w, cluster_b = softmax.clusters
    ours, (table, *_) = softmax(hidden, embedding=embedding), embedding.tables
    head_w, head_b = tf.concat([table, cluster_w], 0), tf.concat([softmax.biases[0], cluster_b], 0)
    head = tf.nn.log_softmax(tf.matmul(hidden @ tf.transpose(softmax.projs[0]), head_w, transpose_b=True) + head_b)
    parts = [head[..., :10]]
    for i in (1, 2):
        narrow = hidden @ tf.transpose(softmax.projs[i])
        tail = tf.nn.log_softmax(tf.matmul(narrow, embedding.tables[i], transpose_b=True) + softmax.biases[i])
        parts.append(head[..., 9 + i, None] + tail)
    expected = tf.concat(parts, -1)
    yield expected, ours
    yield -tf.gather(expected, target, batch_dims=2), softmax.nll(hidden, target, embedding)


# ------------------------------------------------------------------------------------- article 2: the Transformer


def plain_encoding(length, d_model):
    """The article's encodings of positions, `[1, length, d_model]`: sines and cosines alternate."""
    angles = np.arange(length)[:, None] * np.exp(-math.log(10000) * np.arange(0, d_model, 2) / d_model)
    return tf.constant(np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, d_model)[None], tf.float32)


def plain_attention(q, k, v, mask):
    """The article's attention: its output, and the attention weights. The mask is 1 at keys that are not seen."""
    logits = tf.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
    weights = tf.nn.softmax(logits if mask is None else logits - 1e9 * mask)
    return weights @ v, weights


def plain_multi_head(layer, v, k, q, mask):
    """The article's multi-head attention with the weights of our `layer`: the output, and the attention weights."""

    def heads(x, dense):
        x = x @ dense.kernel + dense.bias
        return tf.transpose(tf.reshape(x, [*x.shape[:2], layer.num_heads, -1]), [0, 2, 1, 3])

    vectors, weights = plain_attention(heads(q, layer.wq), heads(k, layer.wk), heads(v, layer.wv), mask)
    joined = tf.reshape(tf.transpose(vectors, [0, 2, 1, 3]), q.shape)
    return joined @ layer.dense.kernel + layer.dense.bias, weights


def plain_ffn(layer, x):
    """The article's feed-forward network, with the weights of our `layer`."""
    return tf.nn.relu(x @ layer.dense1.kernel + layer.dense1.bias) @ layer.dense2.kernel + layer.dense2.bias


def source_and_masks():
    """A source `[2, 5, 8]`, a target `[2, 4, 8]`, the padding mask of the source, the look-ahead mask of the target."""
    padding = layers.create_padding_mask(tf.constant([[3, 4, 1, 0, 0], [5, 2, 2, 7, 0]]))
    return numbers(2, 5, 8), numbers(2, 4, 8), padding, layers.create_look_ahead_mask(4)


@check_of_article(2)
def positional_encoding():
    yield plain_encoding(50, 512), layers.positional_encoding(50, 512)
    pos, i = np.arange(50)[:, None], np.arange(512)[None]
    yield pos / 10000 ** (2 * (i // 2) / 512), layers.get_angles(pos, i, 512)


@check_of_article(2)
def scaled_dot_product_attention():
    q, k, v = numbers(2, 3, 4, 6), numbers(2, 3, 5, 6), numbers(2, 3, 5, 7)
    for mask in (None, source_and_masks()[2]):
        yield from zip(plain_attention(q, k, v, mask), layers.scaled_dot_product_attention(q, k, v, mask), strict=True)


@check_of_article(2)
def multi_head_attention():
    layer = randomised(layers.MultiHeadAttention(8, 2), None, None, 8)  # built for the input shape [None, None, 8]
    source, target, padding, _ = source_and_masks()
    value = key = source
    expected = plain_multi_head(layer, value, key, target, padding)
    yield from zip(expected, layer(value, key, target, padding), strict=True)
    keras_mask = padding[:, 0, 0] == 0  # true where a token is not padding; the article's mask is 1 at padding
    yield from zip(expected, layer(value, key, target, mask=keras_mask), strict=True)


@check_of_article(2)
def feed_forward():
    x = numbers(2, 4, 8)
    for ours in (layers.PositionWiseFFN(16, 8), layers.point_wise_feed_forward_network(8, 16)):
        yield plain_ffn(randomised(ours, None, None, 8), x), ours(x)


@check_of_article(2)
def encoder_layer():
    layer = randomised(layers.EncoderLayer(8, 2, 16))
    x, _, padding, _ = source_and_masks()
    y = layer_norm(x + plain_multi_head(layer.mha, x, x, x, padding)[0], layer.layernorm1)
    yield layer_norm(y + plain_ffn(layer.ffn, y), layer.layernorm2), layer(x, training=False, mask=padding)


@check_of_article(2)
def decoder_layer():
    """The article's decoder layer, step by step: its output, and the weights of both attentions."""
    layer = randomised(layers.DecoderLayer(8, 2, 16))
    source, x, padding, look_ahead = source_and_masks()
    own, own_weights = plain_multi_head(layer.mha1, x, x, x, look_ahead)
    y = layer_norm(x + own, layer.layernorm1)
    cross, cross_weights = plain_multi_head(layer.mha2, source, source, y, padding)
    y = layer_norm(y + cross, layer.layernorm2)
    expected = layer_norm(y + plain_ffn(layer.ffn, y), layer.layernorm3), own_weights, cross_weights
    yield from zip(expected, layer(x, source, look_ahead, padding), strict=True)


# -------------------------------------------------------------------------------- article 3: what enters the model


@check_of_article(3)
def embeddings_and_positions():
    embeddings = randomised(layers.Embeddings(vocab=9, d_model=8))
    positions = layers.PositionalEncoding(d_model=8, rate=0.1, max_len=20)
    ids = tf.constant(rng.integers(0, 9, [2, 6]))
    one_hot = tf.one_hot(ids, 9) @ embeddings.lut * math.sqrt(8)
    yield one_hot, embeddings(ids)
    yield one_hot + plain_encoding(20, 8)[:, :6], positions(embeddings(ids))


@check_of_article(3)
def concatenated_one_hot():
    """To concatenate a one-hot position before a linear layer is to add a position embedding after it."""
    x, kernel, position_rows = numbers(6, 4), numbers(4, 5), numbers(6, 5)
    yield tf.concat([x, tf.eye(6)], 1) @ tf.concat([kernel, position_rows], 0), x @ kernel + position_rows


# ------------------------------------------------------------------------- article 4: relative positions and FLAT


@check_of_article(4)
def rotation():
    """Two properties of sinusoidal encodings, with `w_i = 10000 ** (-2i / 8)`.

    The encoding of `pos + k` is the encoding of `pos` with each (sine, cosine) pair rotated by the angle `k w_i`. The
    dot product of the two encodings is the sum of `cos(k w_i)`, for every `pos`, and the same for `k` and `-k`.
    """
    table = layers.positional_encoding(40, 8)[0]
    k = 7
    sines, cosines = table[:, 0::2], table[:, 1::2]
    angle = k / 10000 ** (tf.range(0, 8, 2.0) / 8)
    cos, sin = tf.cos(angle), tf.sin(angle)
    yield cos * sines[:-k] + sin * cosines[:-k], sines[k:]
    yield cos * cosines[:-k] - sin * sines[:-k], cosines[k:]
    products = tf.matmul(table, table, transpose_b=True)
    yield tf.fill([40 - k], tf.reduce_sum(cos)), tf.linalg.diag_part(products, k=k)
    yield tf.linalg.diag_part(products, k=-k), tf.linalg.diag_part(products, k=k)


@check_of_article(4)
def tener_scores():
    """TENER's attention: every pair has a vector for its signed distance, which no matrix projects."""
    layer = randomised(layers.TenerAttn(8, 2, key_position_term=False))
    x = numbers(2, 5, 8)
    length = 5
    q, k, _ = (tf.reshape(part, [2, length, 2, 4]) for part in tf.split(x @ layer.qkv_kernel, 3, -1))
    distance = tf.cast(tf.range(length)[None] - tf.range(length)[:, None], tf.float32)  # key minus query
    angles = distance[..., None] * layers.tensor2tensor_frequencies(4)
    r = tf.concat([tf.sin(angles), tf.cos(angles)], -1)
    # u and v of the equation. The original program has swapped the names: `r_r_bias` belongs to the content.
    scores = tf.einsum("bind,bjnd->nbij", q + layer.r_r_bias, k) + tf.einsum("bind,ijd->nbij", q + layer.r_w_bias, r)
    yield tf.nn.softmax(scores), layer.attention_probs(x)


# First and last characters of the items of two lattices: four characters and two words; three characters and one word.
HEADS = tf.constant([[0, 1, 2, 3, 0, 2], [0, 1, 2, 1, 0, 0]])
TAILS = tf.constant([[0, 1, 2, 3, 1, 3], [0, 1, 2, 2, 0, 0]])
ITEMS = tf.constant([[True] * 6, [True] * 4 + [False] * 2])  # False at padding


def plain_fusion(fusion):
    """`R_ij = ReLU(W_r [p_hh, p_ht, p_th, p_tt])` for every pair, with the article's sinusoids: `[B, T, T, E]`."""
    distances = [i[:, :, None] - j[:, None] for i in (HEADS, TAILS) for j in (HEADS, TAILS)]  # hh, ht, th, tt
    table = plain_encoding(4, 8)[0]
    rows = [
        tf.gather(table, abs(d)) * tf.where(tf.expand_dims(d, -1) < 0, [-1.0, 1.0] * 4, [1.0] * 8) for d in distances
    ]
    return tf.nn.relu(tf.concat(rows, -1) @ fusion.forward.kernel + fusion.forward.bias)


def our_fusion(fusion):
    """Our fusion, from a table of the distances -3 ... 3.

    Returns:
        `(R, index)`: the vectors of the distinct pairs of distances, and for every pair of items the row of `R`.
    """
    pairs = layers.distinct_pairs(HEADS, TAILS, ITEMS)
    distances = tf.range(-3.0, 4.0)
    frequencies = layers.inverse_frequencies(8)
    return fusion(pairs, layers.positional_embedding(distances, frequencies, convention="interleaved")[0]), pairs.index


@check_of_article(4)
def flat_fusion():
    fusion = randomised(layers.PositionFusion(8, "ff"))
    r, index = our_fusion(fusion)
    both = ITEMS[:, :, None] & ITEMS[:, None]  # leave out pairs with padding: their index points to an arbitrary row
    yield plain_fusion(fusion)[both], tf.gather(r, index)[both]


@check_of_article(4)
def flat_scores():
    """The attention of FLAT: the four terms (a) to (d), with `R_ij` in place of `R_{i-j}`."""
    fusion = randomised(layers.PositionFusion(8, "ff"))
    layer = randomised(layers.LatticeAttn(8, 2))
    x = numbers(2, 6, 8)
    q, k, r = (
        tf.reshape(y @ dense.kernel + dense.bias, [*y.shape[:-1], 2, 4])
        for y, dense in ((x, layer.w_q), (x, layer.w_k), (plain_fusion(fusion), layer.w_r))
    )
    content = tf.einsum("bind,bjnd->bnij", q, k) + tf.einsum("nd,bjnd->bnj", layer.u, k)[:, :, None]  # (a), (c)
    position = tf.einsum("bind,bijnd->bnij", q, r) + tf.einsum("nd,bijnd->bnij", layer.v, r)  # (b), (d)
    expected = tf.nn.softmax(content + position - 1e9 * tf.cast(tf.logical_not(ITEMS), tf.float32)[:, None, None])
    ours = tf.transpose(layer.attention_probs(x, *our_fusion(fusion), ITEMS), [1, 0, 2, 3])
    is_item = tf.cast(ITEMS, tf.float32)[:, None, :, None]
    yield expected * is_item, ours * is_item


# ------------------------------------------------------------------------------------------------------ the program


def main(words=()):
    """Prints a line for every check whose name contains one of the words, or for all checks.

    Returns:
        The exit status: 1 if a difference is too large, or no name contains a word.
    """
    known = [function.__name__ for function in CHECKS]
    unknown = [word for word in words if not any(word in name for name in known)]
    if unknown:
        print(f"articles.py: unknown checks: {', '.join(unknown)}. The checks are {', '.join(known)}")
        return 1
    failed = 0
    for function, article in CHECKS.items():
        if words and not any(word in function.__name__ for word in words):
            continue
        difference = 0.0
        for expected, ours in function():
            expected, ours = np.asarray(expected), np.asarray(ours)
            same = expected.shape == ours.shape
            difference = np.maximum(difference, np.abs(expected - ours).max()) if same else math.inf
        wrong = not difference <= TOLERANCE
        failed |= wrong
        print(f"article {article}  {function.__name__:<30}{difference:.1e}{'  too large' if wrong else ''}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(WORDS))
