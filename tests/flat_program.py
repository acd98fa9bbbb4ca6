"""FLAT with the options of its original program that txl_tf does not have: a port for the golden cases of the program.

They are the values of `fusion` but "ff" and "ff_two"; `q_proj`, `v_proj` or `r_proj` false; `attn_ff`; `pre`; `post`
but "an"; and `activation="leaky"`. With their defaults, these layers compute what those of txl_tf compute.

Shapes: see `txl_tf/taggers/flat.py` and `txl_tf/taggers/lattice.py`.
"""

import tensorflow as tf

import txl_tf
from txl_tf.equations import FeedForward, feed_forward
from txl_tf.nn.arguments import stored
from txl_tf.nn.base import Layer
from txl_tf.nn.ops import LayerNorm, Linear
from txl_tf.taggers.flat_layers import EPSILON, FlatLayer, LatticeAttn, split_heads
from txl_tf.taggers.lattice import PositionFusion

FUSIONS = ("ff", "ff_two", "ff_linear", "attn", "gate")
ACTIVATIONS = {"relu": tf.nn.relu, "leaky": lambda x: tf.nn.leaky_relu(x, 0.01)}  # PyTorch's slope
OF_ATTENTION = ("q_proj", "v_proj", "r_proj", "attn_ff")
OF_LAYER = ("pre", "post", "activation")


class ProgramFusion(PositionFusion):
    """A `PositionFusion` with every `kind` of the program's fusions.

    "ff_linear" leaves out the relu. "attn" and "gate" project the distances and add them up, weighted by the softmax of
    a net of two layers: one weight for a distance, or one for each of its components.
    """

    @stored
    def __init__(self, d_model, kind="ff", **kwargs):
        super().__init__(d_model, **{"fusion": "ff_two" if kind == "ff_two" else "ff", **kwargs})
        if kind in ("attn", "gate"):
            self.forward = None
            inner, scores = (2 * d_model, 4 * d_model) if kind == "gate" else (4 * d_model, 4)
            self.w_r = Linear(d_model, dtype=self.dtype_policy, name="w_r")
            self.score_0 = Linear(inner, dtype=self.dtype_policy, name="score_0")
            self.score_2 = Linear(scores, dtype=self.dtype_policy, name="score_2")

    def build(self, *_, **__):
        if self.kind not in ("attn", "gate"):
            super().build()
            return
        self.w_r.build((None, self.d_model))
        self.score_0.build((None, 4 * self.d_model))
        self.score_2.build((None, self.score_0.units))

    def fuse(self, pairs, table):
        if self.kind == "ff_linear":
            return self.linear_of(self.forward, pairs, table)
        if self.kind not in ("attn", "gate"):
            return super().fuse(pairs, table)
        projected = self.w_r(table)
        rows = [tf.gather(projected, distance + pairs.places - 1) for distance in pairs.distances]
        scores = self.score_2(tf.nn.relu(self.linear_of(self.score_0, pairs, table)))
        scores = tf.reshape(scores, [-1, 4, self.d_model if self.kind == "gate" else 1])
        return tf.reduce_sum(tf.stack(rows, 1) * tf.nn.softmax(scores, 1), 1)


class ProgramAttn(LatticeAttn):
    """A `LatticeAttn` that can leave out every projection, and can project its output."""

    @stored
    def __init__(self, d_model, n_head, scale=False, q_proj=True, v_proj=True, r_proj=True, attn_ff=False, **kwargs):
        super().__init__(d_model, n_head, scale, **kwargs)
        self.w_q = self.w_q if q_proj else None
        self.w_v = self.w_v if v_proj else None
        self.w_r = self.w_r if r_proj else None
        self.ff_final = Linear(d_model, dtype=self.dtype_policy, name="ff_final") if attn_ff else None

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def build(self, x_shape=None, **_):
        super().build(x_shape)
        if self.ff_final is not None:
            self.ff_final.build((None, None, self.d_model))

    def call(self, *args, **kwargs):
        vectors = super().call(*args, **kwargs)
        return vectors if self.ff_final is None else self.ff_final(vectors)

    def heads(self, x):
        linears = (self.w_q, self.w_k, self.w_v)
        return [split_heads(x if linear is None else linear(x), self.n_head) for linear in linears]

    def positions(self, r):
        return super().positions(r) if self.r_proj else tf.reshape(r, [-1, self.n_head, self.d_model // self.n_head])


class LatticeProcess(Layer):
    """Operations before or after a sublayer (`Layer_Process` of the program).

    Args:
        sequence: the operations in order: "a" adds, "n" normalises. "an" is `LayerNorm(y + added)`.
    """

    @stored
    def __init__(self, sequence, **kwargs):
        super().__init__(**kwargs)
        self.layer_norm = LayerNorm(EPSILON, dtype=self.dtype_policy, name="layer_norm") if "n" in sequence else None

    def build(self, y_shape, **_):
        if self.layer_norm is not None:
            self.layer_norm.build(y_shape)

    def call(self, y, added):
        for operation in self.sequence:
            y = y + added if operation == "a" else self.layer_norm(y)
        return y


class ProgramLayer(FlatLayer):
    """A `FlatLayer` with other operations around the sublayers, another activation and a `ProgramAttn`."""

    @stored
    def __init__(
        self, d_model, n_head, d_inner, pre="", post="an", activation="relu", of_attention=None, seed=None, **kwargs
    ):
        super().__init__(d_model, n_head, d_inner, seed=seed, **kwargs)
        options = {"dtype": self.dtype_policy}
        arguments = {**(of_attention or {}), **self.attention}
        self.attn = ProgramAttn(d_model, n_head, **arguments, seed=self.draw_key, **options, name="attn")
        self.ff_0 = Linear(d_inner, **options, name="ff_0")  # again, so that weights are in the order of `FlatLayer`
        self.ff_1 = Linear(d_model, **options, name="ff_1")
        self.preprocess = LatticeProcess(pre, **options, name="preprocess")
        self.postprocess = LatticeProcess(post, **options, name="postprocess")

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def build(self, x_shape=None, *_, **__):
        super().build(x_shape)
        self.preprocess.build((None, None, self.d_model))

    def _sublayer(self, x, function):
        y = function(self.preprocess(x, x))
        return self.postprocess(y, x if self.residual == "input" else y)

    def feed_forward(self, x, inner_key=None, output_key=None):
        if self.activation == "relu":
            return super().feed_forward(x, inner_key, output_key)
        x, *weights = self.in_compute_dtype(x, *self.ff_0.weights, *self.ff_1.weights)
        return feed_forward(x, FeedForward(*weights), activation=ACTIVATIONS[self.activation])


class ProgramFlat(txl_tf.Flat):
    """A `Flat` of these layers. `kind` is the program's fusion."""

    @stored
    def __init__(
        self, *, kind="ff", q_proj=True, v_proj=True, r_proj=True, attn_ff=False, pre="", post="an", activation="relu",
        **kwargs,
    ):  # fmt: skip
        super().__init__(**{"fusion": "ff_two" if kind == "ff_two" else "ff", **kwargs})
        options = {"dtype": self.dtype_policy}
        self.fusions = [
            ProgramFusion(self.d_model, kind, **options, name=f"fusion{i}") for i in range(len(self.fusions))
        ]
        of_attention = {"q_proj": q_proj, "v_proj": v_proj, "r_proj": r_proj, "attn_ff": attn_ff}
        self.stacked = [
            ProgramLayer(
                self.d_model, self.n_head, self.d_inner, pre, post, activation, of_attention, residual=self.residual,
                dropout=self.dropout, attention=dict(layer.attention), seed=self.draw_key, **options,
                name=f"layer{i}",
            )
            for i, layer in enumerate(self.stacked)
        ]  # fmt: skip
        self.last = LatticeProcess(pre.replace("a", ""), **options, name="last")

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def build(self, inputs_shape=None, **_):
        super().build(inputs_shape)
        self.last.build((None, None, self.d_model))

    def call(self, inputs, training=None, dropout_key=None):
        x = super().call(inputs, training, dropout_key)
        mask = x._keras_mask
        x = self.last(x, x)
        x._keras_mask = mask
        return x

    def attention_probs(self, inputs, layer):
        x, items = self.embed(inputs), self.items_of(inputs)
        fused, index = self.positions(inputs)
        for i in range(layer):
            x = self.stacked[i](x, fused[i % len(fused)], index, items)
        attended = self.stacked[layer]
        return attended.attn.attention_probs(attended.preprocess(x, x), fused[layer % len(fused)], index, items)
