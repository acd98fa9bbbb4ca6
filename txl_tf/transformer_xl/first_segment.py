"""The first segment of a text: the network's numbers after zero memories, without a product with them.

Zero memories have zero keys and values. Of their scores only those of their positions are left, and they add nothing to
what the heads find; they only take their share of the softmax. So many short texts side by side cost little more than
their own tokens, however long the memory is.

Shapes:
    B: batch      T: tgt_len      H: n_head      D: d_head      E: d_model      M: mem_len      K: M + T
"""

import tensorflow as tf

from txl_tf.equations import Places, causal
from txl_tf.transformer_xl.inference import projected_positions, read, weights_with
from txl_tf.transformer_xl.memory import Memory, NetworkMemory


class NothingYet(NetworkMemory):
    """The memory before the first segment of a text: zeros, which are not computed.

    Args:
        network: `TransformerXL`.
        tgt_len: int scalar tensor, T.
    """

    def __init__(self, network, tgt_len):
        # A row of zeros, which `rel_shift` cuts off.
        distances = projected_positions(network, network.mem_len + tgt_len)
        weights = weights_with(network, [tf.pad(r_k, [[0, 0], [0, 1], [0, 0]]) for r_k in distances])
        visible = causal(tgt_len, network.mem_len, network.same_length)
        zeros, klen = {"zero_keys": network.mem_len}, network.mem_len + tgt_len
        self.layers = [
            ZerosOfLayer(layer, of_layer, Places(klen, visible, of_layer.position_keys, tgt_len - 1, zeros))
            for layer, of_layer in zip(network.decoder_layers, weights, strict=True)
        ]

    def finish(self):
        """There is no state afterwards."""
        self.checked()


class ZerosOfLayer(Memory):
    """The zeros before the keys and values of one layer."""

    def __init__(self, layer, weights, places):
        super().__init__(layer, weights)
        self.places = places

    def attend(self, block, content_q, position_q, k, v):
        """To the zeros and the segment."""
        heads_first = [tf.transpose(x, [1, 0, 2, 3]) for x in (content_q, position_q, k, v)]
        return tf.transpose(block(*heads_first, self.places), [1, 0, 2, 3])


def first_segment(network, tokens, model=None):
    """`network(tokens, network.initial_mems(B))`, without the new memory.

    Args:
        network: `TransformerXL`.
        tokens: int `[B, T]`. What stands to the right of a token does not count for it, so that rows of unequal length
            may be filled up.
        model: see `cached_forward`.

    Returns:
        `[B, T, E]`.

    Raises:
        NotCacheable: see `cached_forward`.
    """
    return read(model or network, tokens, NothingYet(network, tf.shape(tokens)[1]))[0]
