"""Variants of FLAT that its program offers and its paper does not have. Goldens of the program need them.

They are the values of `fusion` but "ff", `q_proj`, `k_proj`, `v_proj` or `r_proj` false, `attn_ff`, `pre`, `post` but
"an", `residual="own"` and `activation="leaky"`. With their defaults, these functions are what the paper has.

Shapes: see `flat.py` and `lattice.py`.
"""

from typing import Unpack

import keras
import tensorflow as tf

from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Layer
from txl_tf.nn.ops import LayerNorm
from txl_tf.vanilla.multi_head_attention import heads_of

EPSILON = 1e-5  # of the layer norms, PyTorch's
ACTIVATION = {"relu": tf.nn.relu, "leaky": lambda x: tf.nn.leaky_relu(x, 0.01)}  # PyTorch's slope


# -------------------------------------------------------------------------------------------------------- the fusion


def products_of(fusion, d_model):
    """`{name: (width of the input, width of the output)}` of the linear layers of a fusion."""
    if fusion.startswith("ff"):
        return {"forward": ((2 if fusion == "ff_two" else 4) * d_model, d_model)}
    inner, scores = (2 * d_model, 4 * d_model) if fusion == "gate" else (4 * d_model, 4)
    return {"w_r": (d_model, d_model), "score_0": (4 * d_model, inner), "score_2": (inner, scores)}


def fuse(layer, pairs, table):
    """The call of a `PositionFusion` whose fusion is not the paper's: `[U, E]`.

    "ff_linear" leaves out the relu. "attn" and "gate" project the distances and add them up, weighted by the softmax of
    a net of two layers: one weight for a distance, or one for each of its components.
    """
    if layer.fusion.startswith("ff"):
        fused = layer.linear_of(layer.forward, pairs, table)
        return fused if layer.fusion == "ff_linear" else tf.nn.relu(fused)
    projected = layer.w_r(table)
    rows = [tf.gather(projected, distance + pairs.places - 1) for distance in pairs.distances]
    scores = layer.score_2(tf.nn.relu(layer.linear_of(layer.score_0, pairs, table)))
    scores = tf.reshape(scores, [-1, 4, layer.d_model if layer.fusion == "gate" else 1])
    return tf.reduce_sum(tf.stack(rows, 1) * tf.nn.softmax(scores, 1), 1)


# ----------------------------------------------------------------------------------------------------- the attention


def heads_of_some(x, linears, n_head):
    """Heads of `x`, `[H, B, T, D]`, for each of `linears`: projected by it or, where it is `None`, as they are."""
    used = [linear for linear in linears if linear is not None]
    kernels = [tf.cast(linear.kernel, x.dtype) for linear in used]
    biases = [tf.cast(linear.bias, x.dtype) for linear in used]
    projected = heads_of(x, kernels, biases, n_head) if used else []
    if len(used) == len(linears):
        return projected
    batch, length, _ = keras.ops.shape(x)
    own = tf.transpose(tf.reshape(x, [batch, length, n_head, -1]), [2, 0, 1, 3])
    return [own if linear is None else projected.pop(0) for linear in linears]


# --------------------------------------------------------------------------------------------------------- the layer


@keras.saving.register_keras_serializable("txl_tf")
class LatticeProcess(Layer):
    """Operations before or after a sublayer (`Layer_Process` of the program).

    Args:
        sequence: the operations in order: "a" adds, "n" normalises. "an" is `LayerNorm(x + y)`.

    Call arguments:
        y: `[..., d_model]`.
        added: what "a" adds, a tensor like `y`.
    """

    free_settings = {}

    @stored
    def __init__(self, sequence: str, **kwargs: Unpack[LayerOptions]) -> None:
        super().__init__(**kwargs)
        check_sequence("sequence", sequence)
        self.layer_norm = LayerNorm(EPSILON, dtype=self.dtype_policy, name="layer_norm") if "n" in sequence else None

    def build(self, y_shape, **_):
        if self.layer_norm is not None:
            self.layer_norm.build(y_shape)

    def call(self, y, added):
        for operation in self.sequence:
            y = y + added if operation == "a" else self.layer_norm(y)
        return y


def check_sequence(name, value):
    """Raises ValueError unless `value` is a string of operations of `LatticeProcess`."""
    if set(value) - set("an"):
        raise ValueError(f"{name} must be made of a (add) and n (normalise), got {value!r}")
