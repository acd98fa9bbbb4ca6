"""FLAT's lattice: the characters and words of a sentence, and the positions of their pairs (Li et al. 2020).

Every item of a sentence, a character or a word, has the positions of its first and its last character. The original
program calls them s and e, the paper head and tail. A pair of items has four distances, query minus key:

    program     ss = s_i - s_j      se = s_i - e_j      es = e_i - s_j      ee = e_i - e_j
    paper       hh                  ht                  th                  tt

The fusion computes one vector from their sinusoids, `R_ij = relu(W_r [p_hh, p_ht, p_th, p_tt])`. Pairs with the same
four distances have the same vector. It is computed only once: a batch has about a hundred times as many pairs as
different vectors.

Shapes:
    B: batch      T: most items of a sentence      E: d_model      S: positions, from the smallest s to the largest e
    U: pairs with different distances              P: number of values of a distance, from -(S - 1) to S - 1
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import keras
import tensorflow as tf

from txl_tf.config import FUSIONS, one_of
from txl_tf.errors import ParameterError
from txl_tf.kernels import add_bias
from txl_tf.kernels.precision import matmul
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Layer
from txl_tf.nn.checks import check_sizes, check_tensors, shown
from txl_tf.nn.masks import as_bool
from txl_tf.nn.ops import Linear
from txl_tf.nn.positions import positional_embedding, tensor2tensor_frequencies

DISTANCES = ("ss", "se", "es", "ee")


class Pairs(NamedTuple):
    """The different pairs of items in a batch, from `distinct_pairs`: the input of `PositionFusion`.

    Attributes:
        distances: list of int32 `[U]`, one tensor for each name of a distance, such as "ss".
        index: int32 `[B, T, T]`, the number of each pair of items among the U different pairs, an argument of
            `LatticeAttn` and `FlatLayer`. It has no meaning at padding.
        places: int32 scalar, the number of positions from the smallest to the largest of the batch, an argument of
            `distance_table`.
    """

    distances: list
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]: the name is public; `tuple.index` is not used
    places: Tensor


def span_distances(pos_s: Tensor, pos_e: Tensor) -> dict[str, Tensor]:
    """The four distances of every pair of items: the position of the query minus the position of the key.

    ```python
    # Three characters and the word of the first two, which begins at character 0 and ends at character 1.
    pos_s, pos_e = tf.constant([[0, 1, 2, 0]]), tf.constant([[0, 1, 2, 1]])
    distances = txl_tf.layers.span_distances(pos_s, pos_e)
    of_third_character = distances["se"][0, 2]  # to the ends of all items: 2, 1, 0 and 1
    ```

    Args:
        pos_s, pos_e: int `[B, T]`, the positions of the first and of the last character of every item: head and tail.

    Returns:
        `{"ss": ..., "se": ..., "es": ..., "ee": ...}`, int `[B, T, T]` each. "se" is the distance between the first
        character of the query and the last character of the key.
    """
    places = {"s": pos_s, "e": pos_e}
    return {name: places[name[0]][:, :, None] - places[name[1]][:, None] for name in DISTANCES}


def distinct_pairs(pos_s: Tensor, pos_e: Tensor, mask: Tensor | None = None, names: Any = DISTANCES) -> Any:
    """Numbers the pairs of items in a batch: pairs with the same distances have the same number.

    The arguments may also be symbolic inputs of Keras.

    Args:
        pos_s, pos_e: int `[B, T]`, the positions of the first and of the last character of every item.
        mask: bool, or integers 0 and 1, `[B, T]`, true at items; `None` without padding.
        names: names of the distances to compare, such as "ss". A `PositionFusion` needs those in its attribute `names`.

    Returns:
        `Pairs`.
    """
    if any(keras.backend.is_keras_tensor(x) for x in (pos_s, pos_e, mask)):
        return _DistinctPairs(names)(pos_s, pos_e, mask)
    is_item: Any = tf.ones_like(pos_s, tf.bool) if mask is None else as_bool("mask", mask)
    # int64, because the code of a pair below can be as large as the fourth power of `base`.
    pos_s, pos_e = (tf.cast(x, tf.int64) for x in (pos_s, pos_e))
    # Only distances matter, so positions may begin anywhere. On a GPU, TensorFlow has no `reduce_min` of int64.
    first = -tf.reduce_max(tf.where(is_item, -pos_s, -tf.int64.max))
    pos_s, pos_e = (tf.where(is_item, x - first, 0) for x in (pos_s, pos_e))
    places = tf.reduce_max(pos_e) + 1
    # The code of a pair is a number whose digits are its distances, shifted so that the smallest is 0.
    base = 2 * places - 1
    distances_by_name = span_distances(pos_s, pos_e)
    code = tf.zeros_like(distances_by_name["ss"])
    for name in names:
        code = code * base + distances_by_name[name] + places - 1
    # Pairs with padding get an existing code, so that they do not increase the number of different pairs.
    code = tf.where(is_item[:, :, None] & is_item[:, None], code, tf.reduce_max(code))
    codes, index = tf.unique(tf.reshape(code, [-1]))  # [U], [B * T * T]
    distances = []
    for _ in names:  # the last digit first
        distances.append(tf.cast(codes % base - places + 1, tf.int32))
        codes //= base
    return Pairs(distances[::-1], tf.reshape(index, tf.shape(code)), tf.cast(places, tf.int32))


@keras.saving.register_keras_serializable("txl_tf")
class _DistinctPairs(Layer):
    """`distinct_pairs` as a layer, for symbolic inputs of Keras."""

    @stored
    def __init__(self, names: Sequence[str] = DISTANCES, **kwargs: Unpack[LayerOptions]) -> None:
        super().__init__(**kwargs)

    def call(self, pos_s: Tensor, pos_e: Tensor, mask: Tensor | None = None) -> Any:
        return distinct_pairs(pos_s, pos_e, mask, self.names)


def distance_table(places: Tensor, d_model: int, shift: int = 0, dtype: Any = "float32") -> Any:
    """The sinusoids of all distances that occur in sentences, `-(places - 1) ... places - 1`.

    Args:
        places: int or int scalar tensor, the number of positions in a sentence, such as `Pairs.places` of a batch. It
            may also be a symbolic tensor of Keras.
        d_model: int, the width of the sinusoids: even, and at least 4.
        shift: number that is added to each distance.
        dtype: float32 or float64.

    Returns:
        `[2 * places - 1, d_model]` in `dtype`, see `tensor2tensor_frequencies`. Row `places - 1 + d` belongs to the
        distance d.
    """
    if keras.backend.is_keras_tensor(places):
        return _DistanceTable(d_model, shift, tf.as_dtype(dtype).name)(places)
    last = tf.cast(places, dtype) - 1
    return positional_embedding(tf.range(-last, last + 1) + shift, tensor2tensor_frequencies(d_model, dtype))[0]


@keras.saving.register_keras_serializable("txl_tf")
class _DistanceTable(Layer):
    """`distance_table` as a layer, for symbolic inputs of Keras.

    Its argument `table_dtype` is the `dtype` of `distance_table`. Files that were saved before it existed have float32.
    """

    @stored
    def __init__(
        self, d_model: int, shift: int = 0, table_dtype: str = "float32", **kwargs: Unpack[LayerOptions]
    ) -> None:
        super().__init__(**kwargs)

    def call(self, places: Tensor) -> Any:
        return distance_table(places, self.d_model, self.shift, self.table_dtype)


def fused_sum(pairs: Any, table: Tensor, kernel: Tensor) -> Tensor:
    """The product `[p_ss, p_se, ...] kernel` for every different pair: `[U, any]`.

    Each name of a distance has its own part of the kernel. So the table of all distances is multiplied by each part
    once, and the result of a pair is the sum of one row from each product.

    Args:
        pairs: `Pairs`.
        table: `[P, E]`, see `distance_table`.
        kernel: `[E * len(pairs.distances), any]`, one block of E rows for each name, such as "ss".
    """
    parts = tf.split(kernel, len(pairs.distances))
    rows = [distance + pairs.places - 1 for distance in pairs.distances]
    return tf.add_n([tf.gather(matmul(table, part), row) for part, row in zip(parts, rows, strict=True)])


def checked_pairs(pairs: Any, names: Any) -> Pairs:
    """Checks and returns the `Pairs` of a call. A Keras file makes them a list of their three fields.

    Only the number of distances is checked, because `Pairs` do not have the names of the distances.
    """
    if isinstance(pairs, (tuple, list)) and len(pairs) == 3 and isinstance(pairs[0], (tuple, list)):
        pairs = Pairs(*pairs)
    if isinstance(pairs, Pairs) and len(pairs.distances) == len(names):
        return pairs
    allowed = f"Pairs of the distances {', '.join(names)}, which txl_tf.layers.distinct_pairs makes"
    got = f"{len(pairs.distances)} distances" if isinstance(pairs, Pairs) else shown(pairs)
    raise ParameterError("pairs", pairs, allowed, f"pairs must be {allowed}, got {got}")


@keras.saving.register_keras_serializable("txl_tf")
class PositionFusion(Layer):
    """One vector for the distances of a pair (`Four_Pos_Fusion_Embedding` of the original program).

    ```python
    # Three characters and the word of the first two, which begins at character 0 and ends at character 1.
    pairs = txl_tf.layers.distinct_pairs(pos_s=tf.constant([[0, 1, 2, 0]]), pos_e=tf.constant([[0, 1, 2, 1]]))
    table = txl_tf.layers.distance_table(pairs.places, 32)  # [5, 32]
    r = txl_tf.layers.PositionFusion(d_model=32)(pairs, table)  # [12, 32]
    ```

    Args:
        d_model: width of the sinusoids and of the vectors.
        fusion: "ff" is the paper's `relu(W_r [p_hh, p_ht, p_th, p_tt])` with a bias, as in the original program.
            "ff_two" is the same with only hh and tt, the original program's default.

    Call arguments:
        pairs: `Pairs` of the distances in `names`, from `distinct_pairs`.
        table: `[P, d_model]`, from `distance_table`.

    Returns:
        `[U, d_model]`, a vector for every different pair: the argument `r` of `LatticeAttn` and `FlatLayer`.

    Attributes:
        names: tuple of str, the distances that `pairs` must have.

    Raises:
        ParameterError: the fusion does not exist, or `pairs` are not such `Pairs`.

    Reference:
        Li et al. 2020, section 3.2.
    """

    free_settings = {}
    weight_parts = ("forward",)

    @stored
    def __init__(self, d_model: int, fusion: str = "ff", **kwargs: Unpack[LayerOptions]) -> None:
        super().__init__(**kwargs)
        check_sizes(d_model=d_model)
        one_of(FUSIONS)("fusion", fusion)
        self.names = ("ss", "ee") if fusion == "ff_two" else DISTANCES
        self.forward = Linear(d_model, dtype=self.dtype_policy, name="forward")

    def build(self, *_: Any, **__: Any) -> None:
        self.forward.build((None, len(self.names) * self.d_model))

    def call(self, pairs: Any, table: Tensor) -> Any:
        check_tensors({"d_model": self.d_model}, table=(table, "float distances d_model"))
        return self.fuse(checked_pairs(pairs, self.names), tf.cast(table, self.compute_dtype))

    def fuse(self, pairs, table):
        """R_ij of the paper for every different pair: `[U, E]`. The arguments are those of the call, checked.

        A subclass can override it to fuse distances in another way. `linear_of` applies a linear layer to them. The
        name of another fusion for the argument `fusion` also goes into `FUSIONS` of `txl_config/models.py`.
        """
        return tf.nn.relu(self.linear_of(self.forward, pairs, table))

    def linear_of(self, linear: Any, pairs: Any, table: Tensor) -> Tensor:
        """Applies a linear layer to the concatenated sinusoids of each pair: `[U, any]`."""
        kernel, bias = self.in_compute_dtype(linear.kernel, linear.bias)
        return add_bias(fused_sum(pairs, table, kernel), bias)

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        pairs = self.named_shapes(shapes, named if shapes else {"pairs_shape": None, **named})["pairs"]
        return (pairs.distances[0][0] if hasattr(pairs, "distances") else None), self.d_model
