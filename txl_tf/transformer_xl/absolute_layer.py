"""The layer of Transformer-XL without the table of distances: attention, then a feed-forward net.

It knows of positions what is in its input (absolute positions, as in the vanilla language model), or what a scheme
without a table of distances tells its attention (ALiBi, rotary). So networks with different positions differ in nothing
else (paper, sections 3.1 and 4.2).
"""

from typing import Any, Unpack

import keras

from txl_tf.equations import Attention, Places, attention, attention_block
from txl_tf.errors import ParameterError
from txl_tf.kernels.dropout import Drop, split
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.ops import norm_of
from txl_tf.nn.position_schemes import scheme_of
from txl_tf.transformer_xl.attention import SegmentAttention, keys_of, visible_keys, zeros_of
from txl_tf.transformer_xl.layer import TransformerXLLayer
from txl_tf.transformer_xl.memory import HiddenStates, Memory


def multihead_attn(
    w, attn_mask, mems, qkv_kernel, o_kernel, n_head, dropatt=0.0, dropout_key=None, positions=None, content_mask=None
):  # fmt: skip
    """Attention `softmax(q.k / sqrt(d_head))` with its projections; residual and layer norm are `MultiHeadAttn`'s.

    Args: as in `rel_multihead_attn`, without the arguments of distances, and
        n_head: the number of heads.
        positions: see `MultiHeadAttn`.

    Returns:
        `[batch, tgt_len, d_model]`.
    """
    scheme = scheme_of(positions)
    memory, weights = attention_parts(w, attn_mask, mems, qkv_kernel, o_kernel, n_head, scheme, content_mask)
    return attention(w, memory, weights, Drop(dropatt, dropout_key))


def attention_parts(w, attn_mask, mems, qkv_kernel, o_kernel, n_head, scheme, content_mask=None):
    """`(memory, weights)` of `txl_tf.equations.attention`, of the arguments of `multihead_attn` and a `Positions`."""
    places = Places(keys_of(w, mems), visible_keys(attn_mask, w, mems), special=zeros_of(content_mask, w))
    scale = (o_kernel.shape[0] // n_head) ** -0.5
    return HiddenStates(mems, places), Attention(qkv_kernel, o_kernel, n_head, scale, scheme)


@keras.saving.register_keras_serializable("txl_tf")
class MultiHeadAttn(SegmentAttention):
    """`RelMultiHeadAttn` without relative positions: no `r_kernel`, and calls without `r`, `r_w_bias`, `r_r_bias`.

    ```python
    w, mems = tf.random.normal([2, 5, 32]), tf.random.normal([2, 3, 32])  # a segment of 5, a memory of 3
    attention = txl_tf.layers.MultiHeadAttn(d_model=32, n_head=4, d_head=8)
    output = attention(w, mems=mems)  # [2, 5, 32]
    output = attention(w, tf.zeros([5, 5]))  # [2, 5, 32]
    turned = txl_tf.layers.MultiHeadAttn(d_model=32, n_head=4, d_head=8, positions="rotary")
    output = turned(w, mems=mems)  # [2, 5, 32]
    ```

    Args: as in `RelMultiHeadAttn`, and
        positions: "alibi", "rotary" or the name of another scheme that needs attention alone; `None` for none.

    Call arguments: those of `RelMultiHeadAttn`, without `r`, `r_w_bias` and `r_r_bias`.

    Returns:
        `[batch, tgt_len, d_model]`.

    Reference:
        Vaswani et al. 2017, section 3.2; `MultiHeadAttn` of the original's PyTorch program.
    """

    relative = False

    @stored
    def __init__(
        self, d_model: int, n_head: int, d_head: int, dropout: float = 0.0, dropatt: float = 0.0,
        kernel_initializer: Any = "glorot_uniform", layer_norm_epsilon: float = 1e-12, seed: int | None = None,
        positions: Any = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(
            d_model, n_head, d_head, dropout, dropatt, kernel_initializer, layer_norm_epsilon, seed, **kwargs
        )
        self.scheme = scheme_of_attention(positions, type(self).__name__)
        self.scheme.check(self)

    def get_config(self):
        return {**super().get_config(), "positions": self.scheme.known_as}

    def build(self, w_shape=None, **_):
        super().build(w_shape)
        if self.positions is not None:  # else it is a network's scheme, whose weights the network makes
            self.scheme.make_weights(self)

    def call(self, w, attn_mask=None, mems=None, content_mask=None, training=None, dropout_key=None):
        dropatt_key, output_key = split(self.key_of_call(w, training, dropout_key), 2)
        if isinstance(mems, Memory):
            mems.check(self, w, attn_mask)
            memory, weights = mems, mems.weights_of_attention()
        else:
            visible, mems = self.segment_of(w, attn_mask, mems)
            w, mems, *kernels = self.computed(w, mems, self.qkv_kernel, self.o_kernel)
            memory, weights = attention_parts(w, visible, mems, *kernels, self.n_head, self.scheme, content_mask)
        drops = Drop(self.dropatt, dropatt_key), Drop(self.dropout, output_key)
        return attention_block(w, memory, weights, norm_of(self.layer_norm), *drops)


@keras.saving.register_keras_serializable("txl_tf")
class TransformerLMLayer(TransformerXLLayer):
    """`MultiHeadAttn`, then `PositionwiseFF`.

    ```python
    layer = txl_tf.layers.TransformerLMLayer(d_model=32, n_head=4, d_head=8, d_inner=64)
    output = layer(tf.random.normal([2, 5, 32]))  # [2, 5, 32]
    ```

    Args: as in the two layers. Call arguments and returns: as in `MultiHeadAttn`.
    """

    attention_class = MultiHeadAttn

    @stored
    def __init__(
        self, d_model: int, n_head: int, d_head: int, d_inner: int, dropout: float = 0.0, dropatt: float = 0.0,
        kernel_initializer: Any = "glorot_uniform", layer_norm_epsilon: float = 1e-12, seed: int | None = None,
        positions: Any = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(
            d_model, n_head, d_head, d_inner, dropout, dropatt, kernel_initializer, layer_norm_epsilon, seed, **kwargs
        )

    def options_of_attention(self):
        return {} if self.positions is None else {"positions": self.positions}

    def get_config(self):
        scheme = getattr(self.rel_attn, "scheme", None)
        return {**super().get_config(), "positions": None if scheme is None else scheme.known_as}

    def call(self, w, attn_mask=None, mems=None, content_mask=None, training=None, dropout_key=None):
        attn_key, ff_key = split(self.key_of_call(w, training, dropout_key), 2)
        output = self.rel_attn(
            w=w, attn_mask=attn_mask, mems=mems, content_mask=content_mask, dropout_key=attn_key
        )  # fmt: skip
        return self.ff(output, dropout_key=ff_key)


def scheme_of_attention(positions, owner):
    """The scheme of the argument `positions` of an attention. Raises ParameterError for one that needs a network."""
    scheme = scheme_of(positions)
    if scheme.overrides("enter"):
        raise ParameterError("positions", positions, f"a scheme that {owner} can use without a network")
    return scheme
