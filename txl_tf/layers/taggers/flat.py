"""FLAT: self-attention over a lattice, in which every pair of items has a position of its own (Li et al. 2020).

    scores = (q_i + u) . k_j + (q_i + v) . W_r R_ij

Shapes:
    B: batch      T: items      H: n_head      D: d_head, E / H      E: d_model      U: pairs that differ
"""

import keras
import tensorflow as tf

from txl_tf.config import ACTIVATIONS, RESIDUALS
from txl_tf.layers.attention import attend, attention_probs, join_heads, pairwise_scores
from txl_tf.layers.common.base import Layer, as_bool, check_heads, check_sizes, check_tensors, check_width, mask_of
from txl_tf.layers.common.dropout import dropout, split
from txl_tf.layers.common.ops import LayerNorm, Linear, config_of
from txl_tf.layers.taggers.tener import EPSILON
from txl_tf.layers.vanilla.multi_head_attention import heads_of

LEAKY_SLOPE = 0.01  # PyTorch's


def items(x, r, index, mask, d_model):
    """The mask of a call, bool `[B, T]`, true at items; `None` where all are. Raises ValueError on other shapes."""
    mask = mask_of(x) if mask is None else mask
    mask = None if mask is None else as_bool("mask", mask)
    sizes = {"d_model": d_model}
    check_tensors(sizes, x=(x, "float batch items d_model"), r=(r, "float pairs d_model"))
    check_tensors(sizes, index=(index, "int batch items items"), mask=(mask, "bool? batch items"))
    return mask


@keras.saving.register_keras_serializable("txl_tf")
class LatticeAttn(Layer):
    """Attention over a lattice (`MultiHead_Attention_Lattice_rel_save_gpumm` of the program).

    Args:
        d_model, n_head: width, and number of heads.
        scale: whether to divide the scores by `sqrt(d_head)`.
        q_proj, k_proj, v_proj, r_proj: whether queries, keys, values and positions are projected.
        attn_ff: whether the output is.
        dropatt: dropout rate of the attention probabilities.
        seed: int that dropout derives from where no key is given; drawn where it is `None`.

    Call arguments:
        x: `[batch, items, d_model]`.
        r: `[U, d_model]`, fused positions of the pairs that differ.
        index: int32 `[batch, items, items]`, which of them each pair is.
        mask: bool, or integers 0 and 1, `[batch, items]`, true at items; without one, that which Keras handed on with
            `x`, or else all are.
        training, dropout_key: see `txl_tf.layers.common.base`.

    Returns:
        `[batch, items, d_model]`.

    Raises:
        ValueError: `n_head` does not divide `d_model`; a tensor or the mask has another shape.

    Reference:
        Li et al. 2020, section 3.2.
    """

    def __init__(
        self, d_model, n_head, scale=False, q_proj=True, k_proj=True, v_proj=True, r_proj=True, attn_ff=False,
        dropatt=0.0, seed=None, **kwargs,
    ):  # fmt: skip
        super().__init__(**kwargs)
        check_heads("d_model", d_model, "n_head", n_head)
        self.start_keys(seed, dropatt=dropatt)
        self.d_model = d_model
        self.n_head = n_head
        self.scale = scale
        self.q_proj, self.k_proj, self.v_proj, self.r_proj = q_proj, k_proj, v_proj, r_proj
        self.attn_ff = attn_ff
        self.dropatt = dropatt

        def linear(wanted, name):
            return Linear(d_model, dtype=self.dtype_policy, name=name) if wanted else None

        self.w_q, self.w_k, self.w_v = linear(q_proj, "w_q"), linear(k_proj, "w_k"), linear(v_proj, "w_v")
        self.w_r, self.ff_final = linear(r_proj, "w_r"), linear(attn_ff, "ff_final")

    def build(self, x_shape=None, **_):
        check_width("x", x_shape, "d_model", self.d_model)
        for layer in (self.w_q, self.w_k, self.w_v, self.w_r, self.ff_final):
            if layer is not None:
                layer.build((None, None, self.d_model))
        shape = (self.n_head, self.d_model // self.n_head)
        self.u, self.v = (self.add_weight(name=name, shape=shape, initializer="glorot_uniform") for name in ("u", "v"))

    def call(self, x, r, index, mask=None, training=None, dropout_key=None):
        mask = items(x, r, index, mask, self.d_model)
        *arguments, v = self.parts(x, r, index, mask)
        q, k, position_scores, visible, scale = arguments
        dropout_key = self.key_of_call(x, training, dropout_key)
        vectors = join_heads(attend(q, k, v, position_scores, visible, scale, self.dropatt, dropout_key))
        return vectors if self.ff_final is None else self.ff_final(vectors)

    def parts(self, x, r, index, mask):
        """Arguments of `attention_probs`, then the values: `(q, k, position_scores, visible, scale, v)`."""
        q, k, v = self._heads(x)
        u_bias, v_bias = (tf.cast(bias, q.dtype)[:, None, None] for bias in (self.u, self.v))
        r = r if self.w_r is None else self.w_r(r)
        r = tf.reshape(r, [-1, self.n_head, self.d_model // self.n_head])
        scale = (self.d_model // self.n_head) ** -0.5 if self.scale else 1.0
        visible = None if mask is None else mask[None, :, None]
        return q + u_bias, k, pairwise_scores(q + v_bias, r, index), visible, scale, v

    def _heads(self, x):
        """Queries, keys and values, `[H, B, T, D]` each: those that are projected as one product."""
        linears = {"q": self.w_q, "k": self.w_k, "v": self.w_v}
        projected = {name: linear for name, linear in linears.items() if linear is not None}
        heads = {}
        if len(projected) < len(linears):
            batch, length, _ = keras.ops.shape(x)
            own = tf.transpose(tf.reshape(x, [batch, length, self.n_head, -1]), [2, 0, 1, 3])
            heads = dict.fromkeys(linears, own)
        if projected:
            kernels = [tf.cast(linear.kernel, x.dtype) for linear in projected.values()]
            biases = [tf.cast(linear.bias, x.dtype) for linear in projected.values()]
            heads |= dict(zip(projected, heads_of(x, kernels, biases, self.n_head), strict=True))
        return heads["q"], heads["k"], heads["v"]

    def attention_probs(self, x, r, index, mask=None):
        """The probabilities of the call, without dropout: `[n_head, batch, items, items]`."""
        mask = items(x, r, index, mask, self.d_model)
        x, r = tf.cast(x, self.compute_dtype), tf.cast(r, self.compute_dtype)
        return attention_probs(*self.parts(x, r, index, mask)[:-1])

    def get_config(self):
        names = "d_model n_head scale q_proj k_proj v_proj r_proj attn_ff dropatt seed"
        return {**super().get_config(), **config_of(self, names)}


@keras.saving.register_keras_serializable("txl_tf")
class LatticeProcess(Layer):
    """What stands before or after a sublayer (`Layer_Process` of the program).

    Args:
        sequence: its operations in their order: "a" adds, "n" normalises. "an" is `LayerNorm(x + y)`.

    Call arguments:
        y: `[..., d_model]`.
        added: what "a" adds, a tensor like `y`.
    """

    def __init__(self, sequence, **kwargs):
        super().__init__(**kwargs)
        check_sequence("sequence", sequence)
        self.sequence = sequence
        self.layer_norm = LayerNorm(EPSILON, dtype=self.dtype_policy, name="layer_norm") if "n" in sequence else None

    def build(self, y_shape, **_):
        if self.layer_norm is not None:
            self.layer_norm.build(y_shape)

    def call(self, y, added):
        for operation in self.sequence:
            y = y + added if operation == "a" else self.layer_norm(y)
        return y

    def get_config(self):
        return {**super().get_config(), "sequence": self.sequence}


def check_sequence(name, value):
    """Raises ValueError unless `value` is a string of operations of `LatticeProcess`."""
    if set(value) - set("an"):
        raise ValueError(f"{name} must be made of a (add) and n (normalise), got {value!r}")


@keras.saving.register_keras_serializable("txl_tf")
class FlatLayer(Layer):
    """Attention, then a feed-forward net (`Transformer_Encoder_Layer` of the program).

    Both sublayers share one layer norm before and one after them, as in the program.

    Args:
        d_model, n_head, d_inner: width, number of heads, width inside the feed-forward net.
        pre, post: `LatticeProcess` before and after each sublayer; "" and "an" are the paper's.
        residual: what "a" of `post` adds: "input", the input of the sublayer, as the paper says; or "own", what it
            stands behind, as the program does. The program's layers have no residual connection: "an" is `LN(y + y)`.
        activation: "relu" or "leaky".
        dropout: rate after the activation and at the end of the feed-forward net.
        attention: arguments of `LatticeAttn`.
        seed: int that dropout derives from where no key is given; drawn where it is `None`.

    Call arguments, returns: those of `LatticeAttn`.

    Raises:
        ValueError: an argument is out of its range; the message names it.
    """

    def __init__(
        self, d_model, n_head, d_inner, pre="", post="an", residual="input", activation="relu", dropout=0.0,
        attention=None, seed=None, **kwargs,
    ):  # fmt: skip
        super().__init__(**kwargs)
        check_sizes(d_inner=d_inner)
        for name, value, choices in (("residual", residual, RESIDUALS), ("activation", activation, ACTIVATIONS)):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        self.d_model = d_model
        self.n_head = n_head
        self.d_inner = d_inner
        self.pre, self.post = pre, post
        self.residual = residual
        self.activation = activation
        self.dropout = dropout
        self.attention = dict(attention or {})
        self.start_keys(seed, dropout=dropout, dropatt=self.attention.get("dropatt", 0.0))
        options = {"dtype": self.dtype_policy}
        self.attn = LatticeAttn(d_model, n_head, **self.attention, seed=self.draw_key, **options, name="attn")
        self.ff_0, self.ff_1 = Linear(d_inner, **options, name="ff_0"), Linear(d_model, **options, name="ff_1")
        self.preprocess = LatticeProcess(pre, **options, name="preprocess")
        self.postprocess = LatticeProcess(post, **options, name="postprocess")

    def build(self, x_shape=None, *_, **__):
        check_width("x", x_shape, "d_model", self.d_model)
        width = (None, None, self.d_model)
        for layer in (self.attn, self.ff_0, self.preprocess, self.postprocess):
            layer.build(width)
        self.ff_1.build((None, None, self.d_inner))

    def call(self, x, r, index, mask=None, training=None, dropout_key=None):
        mask = items(x, r, index, mask, self.d_model)
        attention_key, inner_key, output_key = split(self.key_of_call(x, training, dropout_key), 3)
        x = self._sublayer(x, lambda y: self.attn(y, r, index, mask, dropout_key=attention_key))
        return self._sublayer(x, lambda y: self.feed_forward(y, inner_key, output_key))

    def _sublayer(self, x, function):
        y = function(self.preprocess(x, x))
        return self.postprocess(y, x if self.residual == "input" else y)

    def feed_forward(self, x, inner_key=None, output_key=None):
        """The feed-forward net alone."""
        inner = self.ff_0(x)
        inner = tf.nn.relu(inner) if self.activation == "relu" else tf.nn.leaky_relu(inner, LEAKY_SLOPE)
        return dropout(self.ff_1(dropout(inner, self.dropout, inner_key)), self.dropout, output_key)

    def get_config(self):
        names = "d_model n_head d_inner pre post residual activation dropout attention seed"
        return {**super().get_config(), **config_of(self, names)}
