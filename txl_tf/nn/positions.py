"""Sinusoids of positions: two conventions, each with one of two kinds of frequencies; and rotation by positions.

    "halves"         [sin 0, sin 1, ..., cos 0, cos 1, ...]    `positional_embedding`
    "interleaved"    [sin 0, cos 0, sin 1, cos 1, ...]         `positional_encoding`, as Vaswani et al. 2017

    family                                convention     frequencies of i = 0 ... d_model / 2 - 1
    Transformer-XL, TransformerLM         halves         `inverse_frequencies`: 10000^(-2i / d_model)
    Transformer                           interleaved    the same
    TENER, FLAT                           halves         `tensor2tensor_frequencies`: 10000^(-i / (d_model / 2 - 1))

A model that multiplies the sinusoids by learned matrices can learn the same function with both conventions, because
another order of the dimensions is another order of the rows of a matrix. But weights that were trained with one
convention do not work with the other.

Shapes:
    K: klen, the number of keys, mem_len + tgt_len      T: tgt_len, the queries
    E: d_model, even                                    R: distances that scores are computed for
"""

import math
from typing import Any

import numpy as np
import tensorflow as tf

import txl_tf.equations as equations
from txl_tf.config.checks import is_number
from txl_tf.errors import ParameterError
from txl_tf.kernels.dtypes import wide_dtype
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.nn.checks import check_length, check_sizes, check_tensors, shown

CONVENTIONS = ("halves", "interleaved")


def inverse_frequencies(d_model: int, dtype: Any = "float32") -> Any:
    """The frequencies of the sinusoids, `1 / 10000^(2i / d_model)`.

    Args:
        d_model: even int, the width of the embedding.
        dtype: float32 or float64.

    Returns:
        `[d_model / 2]` in `dtype`.

    Raises:
        ParameterError: `d_model` is odd. Half of the dimensions are sines, and half are cosines.
    """
    check_length("d_model", d_model, 1)
    if d_model % 2:
        raise ParameterError("d_model", d_model, "even (half sines, half cosines)")
    return 1 / (10000 ** (tf.range(0, d_model, 2.0, dtype) / d_model))


def tensor2tensor_frequencies(d_model: int, dtype: Any = "float32") -> Any:
    """The frequencies of tensor2tensor, which TENER and FLAT use: `10000^(-i / (d_model / 2 - 1))`.

    They go from 1 to exactly 1 / 10000. The last of `inverse_frequencies` is a little larger.

    Args:
        d_model: even int, 4 or more.
        dtype: float32 or float64.

    Returns:
        `[d_model / 2]` in `dtype`.

    Raises:
        ParameterError: `d_model` is odd or too small.
    """
    if d_model % 2 or d_model < 4:
        allowed = "even and at least 4"
        raise ParameterError("d_model", d_model, allowed, f"the width of sinusoids must be {allowed}, got {d_model}")
    half = d_model // 2
    return tf.constant(np.exp(np.arange(half) * -np.log(10000) / (half - 1)), dtype)


def relative_positions(klen: Size, clamp_len: float = -1, dtype: Any = "float32") -> Any:
    """Distances from a query to its keys, farthest first: `klen - 1, ..., 1, 0`.

    Args:
        klen: int or int scalar tensor, the number of keys.
        clamp_len: greater distances are replaced by `clamp_len`. No limit unless it is positive.
        dtype: float32 or float64.

    Returns:
        `[klen]` in `dtype`.

    Raises:
        ParameterError: `klen` is negative or not an integer, or `clamp_len` is not a number.
    """
    check_length("klen", klen)
    if not is_number(clamp_len):
        raise ParameterError("clamp_len", clamp_len, "a number")
    length: Any = tf.cast(klen, dtype)
    pos_seq = tf.range(length - 1, -1, -1.0)
    return tf.minimum(pos_seq, clamp_len) if clamp_len > 0 else pos_seq


def positional_embedding(pos_seq: Tensor, inv_freq: Tensor, bsz: int | None = None, convention: str = "halves") -> Any:
    """Sinusoids of the given positions (`positional_embedding` of the original).

    Batch first: the original returns `[K, 1, E]` or `[K, bsz, E]`.

    Args:
        pos_seq: float `[K]`, positions.
        inv_freq: `[E / 2]`, see `inverse_frequencies`, in the dtype of `pos_seq`.
        bsz: int, repeats the embedding for every row of a batch.
        convention: "halves", all sines before all cosines, as in the original; or "interleaved", sines and cosines in
            turn, as in `positional_encoding`.

    Returns:
        `[1, K, E]`, or `[bsz, K, E]` if `bsz` is given, in the dtype of `pos_seq`.

    Raises:
        ParameterError: there is no such convention, or a tensor has another shape.
    """
    if convention not in CONVENTIONS:
        raise ParameterError("convention", convention, list(CONVENTIONS))
    pos_seq = tf.convert_to_tensor(pos_seq)
    inv_freq = tf.convert_to_tensor(inv_freq)
    check_tensors({}, pos_seq=(pos_seq, "float positions"), inv_freq=(inv_freq, "float frequencies"))
    pos_emb = equations.sinusoids(pos_seq, inv_freq)[None]
    if convention == "interleaved":
        _, length, width = shape_of(pos_emb)
        pos_emb = tf.reshape(tf.stack(tf.split(pos_emb, 2, -1), -1), [1, length, width])
    return pos_emb if bsz is None else tf.tile(pos_emb, [bsz, 1, 1])


def get_angles(pos: Any, i: Any, d_model: int) -> Any:
    """The angle of dimension `i` at position `pos`, `pos / 10000^(2 * (i // 2) / d_model)`.

    Vaswani et al. 2017, section 3.5.

    Args:
        pos, i: arrays that broadcast, positions and dimensions.
        d_model: int.

    Returns:
        float64 array of their broadcast shape.
    """
    return pos / np.power(10000.0, 2 * (np.asarray(i) // 2) / d_model)


def positional_encoding(position: int, d_model: int, dtype: Any = "float32") -> Any:
    """Sinusoids of the positions `0 ... position - 1`, sines in the even dimensions, cosines in the odd dimensions.

    See Vaswani et al. 2017, section 3.5. From each position to the next, the pair of dimensions `2i` and `2i + 1` turns
    by the same angle. So the encoding of `pos + k` is a rotation of the encoding of `pos`. The dot product of
    the two encodings depends only on `k`, and not on its sign. If `d_model` is odd, this is not true of the last
    dimension, a sine without a cosine.

    Args:
        position: int, number of positions.
        d_model: int, width.
        dtype: dtype of the result.

    Returns:
        `[1, position, d_model]` in `dtype`.

    Raises:
        ParameterError: a size is below 1 or no integer.
    """
    check_sizes(position=position, d_model=d_model)
    angles = get_angles(np.arange(position)[:, None], np.arange(d_model)[None], d_model)
    angles[:, 0::2] = np.sin(angles[:, 0::2])
    angles[:, 1::2] = np.cos(angles[:, 1::2])
    return tf.constant(angles[None], dtype)


def rotate(x: Tensor, numbers: Tensor) -> Any:
    """Rotates dimensions d and `d + D / 2` of queries or keys by the angle `n * 10000^(-2d / D)` (Su et al. 2021).

    Args:
        x: `[..., any, D]` with an even D.
        numbers: int32 `[..., any]`, the positions n.

    Returns:
        A tensor like `x`.
    """
    angles = _angles_of_turns(x.shape[-1], numbers, wide_dtype(x))
    cos: Any = tf.cos(angles)
    sin: Any = tf.sin(angles)
    halves: Any = tf.split(tf.cast(x, cos.dtype), 2, -1)
    left, right = halves
    return tf.cast(tf.concat([left * cos - right * sin, right * cos + left * sin], -1), x.dtype)


def _angles_of_turns(width: int, numbers: Tensor, dtype: Any) -> Any:
    """The angles `n * 10000^(-2d / D)` of the positions n, `[..., any, D / 2]`."""
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / width)
    if dtype == tf.float64:
        return tf.cast(numbers[..., None], dtype) * frequencies
    # float32 has too few digits for large angles. So an angle is an int32, in 2^-32 of a full turn. An overflow of
    # int32 subtracts whole turns.
    fractions = np.round(frequencies / (2 * np.pi) * 2**32).astype("int32") * numbers[..., None]
    return tf.cast(fractions, dtype) * (2 * math.pi / 2**32)


def rel_shift(x: Tensor, first: Size | None = None, time_major: bool = False) -> Any:
    """Shifts scores that are ordered by distance, so that they are ordered by key (Dai et al. 2019, appendix B).

    The equation, with an example, is `rel_shift` of `txl_tf/equations.py`.

    Args:
        x: `[..., T, R]`, at least two dimensions; with `time_major`, float `[T, R, B, H]`.
        first: int or int scalar tensor in `[0, T]`. `None` is the original's function: `x` is `[..., T, K]` with the
            distances `K - 1, ..., 0` of the last query; the function adds a column of zeros in front, and `first` is T.
        time_major: whether queries and keys are the first axes of `x` and of the result, as in the original.

    Returns:
        `[..., T, R - 1]`, or `[T, R - 1, B, H]`. If `first` is `None`, a tensor like `x`.

    Raises:
        ParameterError: `first` is `None`, and there are fewer keys than queries, if both are known. This finds a
            forgotten `time_major` only if there are fewer heads than rows. Or with `time_major`, `x` is not a float
            tensor of four dimensions.
    """
    if time_major:
        check_tensors({}, x=(x, "float qlen klen batch n_head"))
    if first is None:
        qlen, klen = x.shape[:2] if time_major else x.shape[-2:]
        if None not in (qlen, klen) and klen < qlen:
            layout = "[qlen, klen, batch, n_head]" if time_major else "[..., qlen, klen]"
            allowed = f"{layout} with klen of qlen or more"
            hint = "" if time_major else ": did you mean time_major=True?"
            raise ParameterError("x", x, allowed, f"x must be {allowed}, got {shown(x)}{hint}")
    if time_major:
        by_head = tf.transpose(x, [2, 3, 0, 1])  # [B, H, T, K]
        return tf.transpose(rel_shift(by_head, first), [2, 3, 0, 1])
    if first is None:
        x = tf.pad(x, [[0, 0]] * (len(x.shape) - 1) + [[1, 0]])
        first = shape_of(x)[-2]
    return equations.rel_shift(x, first)
