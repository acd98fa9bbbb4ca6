"""One layer of the vanilla language model: attention without relative positions, then a feed-forward net.

It is the layer of Transformer-XL, with neither position scores nor their weights: what it knows of positions is in its
input. So the two language models differ in nothing else (paper, sections 3.1 and 4.2).
"""

import keras

from txl_tf.equations import Attention, Places, attention, attention_block
from txl_tf.kernels.dropout import Drop, split
from txl_tf.layers.common.ops import norm_of
from txl_tf.layers.transformer_xl.attention import SegmentAttention, visible_keys
from txl_tf.layers.transformer_xl.layer import TransformerXLLayer
from txl_tf.layers.transformer_xl.memory import HiddenStates, Memory


def multihead_attn(w, attn_mask, mems, qkv_kernel, o_kernel, n_head, dropatt=0.0, dropout_key=None):
    """Attention `softmax(q.k / sqrt(d_head))` with its projections; residual and layer norm are `MultiHeadAttn`'s.

    Args: as in `rel_multihead_attn`, without positions, and `n_head`, the number of heads.

    Returns:
        `[batch, tgt_len, d_model]`.
    """
    memory, weights = absolute_parts(w, attn_mask, mems, qkv_kernel, o_kernel, n_head)
    return attention(w, memory, weights, Drop(dropatt, dropout_key))


def absolute_parts(w, attn_mask, mems, qkv_kernel, o_kernel, n_head):
    """`(memory, weights)` of `txl_tf.equations.attention`, of the arguments of `multihead_attn`."""
    places = Places(None, visible=visible_keys(attn_mask, w, mems))
    return HiddenStates(mems, places), Attention(qkv_kernel, o_kernel, n_head, (o_kernel.shape[0] // n_head) ** -0.5)


@keras.saving.register_keras_serializable("txl_tf")
class MultiHeadAttn(SegmentAttention):
    """`RelMultiHeadAttn` without relative positions: no `r_kernel`, and calls without `r`, `r_w_bias`, `r_r_bias`.

    ```python
    w, mems = tf.random.normal([2, 5, 32]), tf.random.normal([2, 3, 32])  # a segment of 5, a memory of 3
    attention = txl_tf.layers.MultiHeadAttn(d_model=32, n_head=4, d_head=8)
    output = attention(w, mems=mems)  # [2, 5, 32]
    output = attention(w, tf.zeros([5, 5]))  # [2, 5, 32]
    ```

    Args: as in `RelMultiHeadAttn`.

    Call arguments: `w`, `attn_mask`, `mems`, `training` and `dropout_key` of `RelMultiHeadAttn`.

    Returns:
        `[batch, tgt_len, d_model]`.

    Reference:
        Vaswani et al. 2017, section 3.2; `MultiHeadAttn` of the original's PyTorch program.
    """

    relative = False

    def call(self, w, attn_mask=None, mems=None, training=None, dropout_key=None):
        dropatt_key, output_key = split(self.key_of_call(w, training, dropout_key), 2)
        if isinstance(mems, Memory):
            mems.check(self, w, attn_mask)
            memory, weights = mems, mems.weights_of_attention()
        else:
            visible, mems = self.segment_of(w, attn_mask, mems)
            w, mems, *kernels = self.computed(w, mems, self.qkv_kernel, self.o_kernel)
            memory, weights = absolute_parts(w, visible, mems, *kernels, self.n_head)
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

    def call(self, w, attn_mask=None, mems=None, training=None, dropout_key=None):
        attn_key, ff_key = split(self.key_of_call(w, training, dropout_key), 2)
        output = self.rel_attn(w=w, attn_mask=attn_mask, mems=mems, dropout_key=attn_key)
        return self.ff(output, dropout_key=ff_key)
