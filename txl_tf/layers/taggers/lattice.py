"""FLAT's lattice: characters and words of a sentence side by side, and the positions of their pairs (Li et al. 2020).

Every item of a sentence, a character or a word, has the places of its first and its last character, s and e, as the
program calls them: head and tail in the paper. A pair of items has four distances, query minus key:

    program     ss = s_i - s_j      se = s_i - e_j      es = e_i - s_j      ee = e_i - e_j
    paper       hh                  ht                  th                  tt

The fusion makes one vector of their sinusoids, `R_ij = relu(W_r [p_hh, p_ht, p_th, p_tt])`. Pairs with the same four
distances are fused once: a batch of sentences has a hundred times as many pairs as it has different distances.

Shapes:
    B: batch      T: items of the longest sentence      E: d_model      S: places, 1 + the largest e
    U: pairs that differ in their distances              P: distances, 2 * S - 1, from -(S - 1) on
"""

from typing import NamedTuple

import keras
import tensorflow as tf

from txl_tf.config import FUSIONS, one_of
from txl_tf.layers.common.arguments import stored
from txl_tf.layers.common.base import Layer, check_sizes, check_tensors
from txl_tf.layers.common.ops import Linear, add_bias
from txl_tf.layers.common.precision import matmul
from txl_tf.layers.positions import positional_embedding, tensor2tensor_frequencies
from txl_tf.layers.taggers import flat_variants

DISTANCES = ("ss", "se", "es", "ee")


class Pairs(NamedTuple):
    """The pairs of a batch that differ.

    Attributes:
        distances: list of int32 `[U]`, one for each name that was asked for.
        index: int32 `[B, T, T]`, which of them each pair is. Of pairs with padding it means nothing.
        places: int scalar, S.
    """

    distances: list
    index: tf.Tensor
    places: tf.Tensor


def span_distances(pos_s, pos_e):
    """`{"ss": ..., "se": ..., "es": ..., "ee": ...}`: int `[B, T, T]` each, query minus key.

    Args:
        pos_s, pos_e: int `[B, T]`, places of the first and of the last character of every item: head and tail.
    """
    places = {"s": pos_s, "e": pos_e}
    return {name: places[name[0]][:, :, None] - places[name[1]][:, None] for name in DISTANCES}


def distinct_pairs(pos_s, pos_e, mask, names=DISTANCES):
    """The `Pairs` of a batch that differ in the distances of these names.

    Args:
        pos_s, pos_e: int `[B, T]`.
        mask: bool `[B, T]`, true at items.
    """
    pos_s, pos_e = (tf.where(mask, tf.cast(x, tf.int64), 0) for x in (pos_s, pos_e))
    places = tf.reduce_max(pos_e) + 1
    base, found = 2 * places - 1, span_distances(pos_s, pos_e)
    code = tf.zeros_like(found["ss"])
    for name in names:
        code = code * base + found[name] + places - 1
    code = tf.where(mask[:, :, None] & mask[:, None], code, tf.reduce_max(code))
    codes, index = tf.unique(tf.reshape(code, [-1]))
    distances = []
    for _ in names:
        distances.append(tf.cast(codes % base - places + 1, tf.int32))
        codes //= base
    return Pairs(distances[::-1], tf.reshape(index, tf.shape(code)), tf.cast(places, tf.int32))


def distance_table(places, d_model, shift=0):
    """Sinusoids of all distances of sentences: float32 `[2 * places - 1, d_model]`; `shift` is added to each."""
    last = tf.cast(places, tf.float32) - 1
    return positional_embedding(tf.range(-last, last + 1) + shift, tensor2tensor_frequencies(d_model))[0]


def fused_sum(pairs, table, kernel):
    """`[p_ss, p_se, ...] kernel`, for every pair that differs: `[U, any]`.

    The product of a distance with its part of the kernel is the same wherever the distance occurs. So the table of all
    distances is multiplied once, and each pair adds up rows of the products.

    Args:
        pairs: `Pairs`.
        table: `[P, E]`, see `distance_table`.
        kernel: `[E * number of distances, any]`.
    """
    parts = tf.split(kernel, len(pairs.distances))
    rows = [distance + pairs.places - 1 for distance in pairs.distances]
    return tf.add_n([tf.gather(matmul(table, part), row) for part, row in zip(parts, rows, strict=True)])


@keras.saving.register_keras_serializable("txl_tf")
class PositionFusion(Layer):
    """One vector for the distances of a pair (`Four_Pos_Fusion_Embedding` of the program).

    Args:
        d_model: width of the sinusoids and of the vectors.
        fusion: "ff", the paper's `relu(W_r [p_hh, p_ht, p_th, p_tt])`, with a bias, as in the program. For the others,
            "ff_two" (of hh and tt alone), "ff_linear", "attn" and "gate", see `flat_variants.py`.

    Call arguments:
        pairs: `Pairs` of the distances in `names`.
        table: `[P, d_model]`, see `distance_table`.

    Returns:
        `[U, d_model]`.

    Raises:
        ValueError: there is no such fusion.

    Reference:
        Li et al. 2020, section 3.2.
    """

    free_settings = {}

    @stored
    def __init__(self, d_model, fusion="ff", **kwargs):
        super().__init__(**kwargs)
        check_sizes(d_model=d_model)
        one_of(FUSIONS)("fusion", fusion)
        self.names = ("ss", "ee") if fusion == "ff_two" else DISTANCES
        for name, (_, units) in flat_variants.products_of(fusion, d_model).items():  # of "ff", `forward` alone
            setattr(self, name, Linear(units, dtype=self.dtype_policy, name=name))

    def build(self, *_, **__):
        for name, (width, _) in flat_variants.products_of(self.fusion, self.d_model).items():
            getattr(self, name).build((None, width))

    def call(self, pairs, table):
        check_tensors({"d_model": self.d_model}, table=(table, "float distances d_model"))
        if len(pairs.distances) != len(self.names):
            raise ValueError(f"pairs must have the distances {', '.join(self.names)}, got {len(pairs.distances)}")
        table = tf.cast(table, self.compute_dtype)
        if self.fusion != "ff":
            return flat_variants.fuse(self, pairs, table)
        return tf.nn.relu(self.linear_of(self.forward, pairs, table))

    def linear_of(self, linear, pairs, table):
        """The sinusoids of each pair's distances side by side, through a linear layer: `[U, any]`."""
        kernel, bias = self.computed(linear.kernel, linear.bias)
        return add_bias(fused_sum(pairs, table, kernel), bias)

    def compute_output_shape(self, *_, **__):
        return None, self.d_model
