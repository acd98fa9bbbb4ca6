"""The first segment of a text: the same numbers as with zero memories, without multiplying by them.

Zero memories have zero keys and values. Their scores come only from positions. They add nothing to the results of the
heads, but get their share of the softmax. So a batch of many short texts costs little more than the texts' own tokens,
however long the memory is.

Shapes:
    B: batch      T: tgt_len      H: n_head      D: d_head      E: d_model      M: mem_len      K: M + T
"""

import dataclasses
from typing import Any

import tensorflow as tf

from txl_tf.equations import Block, KeyPositions, OrderedKeyPositions, causal
from txl_tf.kernels.shapes import Size, Tensor
from txl_tf.transformer_xl.inference import call_with_cache, projected_positions, swap_rows_and_heads, weights_of_layers
from txl_tf.transformer_xl.memory import LayerMemory, NetworkMemory


class ZeroMemory(NetworkMemory):
    """The memory before the first segment of a text: zeros, by which nothing is multiplied.

    Args:
        network: `TransformerXL`.
        tgt_len: int scalar tensor, T.
    """

    def __init__(self, network: Any, tgt_len: Size) -> None:
        klen = network.mem_len + tgt_len
        # Add a row, so that there are K + 1 for `shifted_scores`. With the `first` below, no visible key uses it.
        tables = [tf.pad(r_k, [[0, 0], [0, 1], [0, 0]]) for r_k in projected_positions(network, klen)]
        weights = weights_of_layers(network, tables)
        visible = causal(tgt_len, network.mem_len, network.same_length)
        # The first query and the first key have the distance M, which is row T - 1 of the table.
        positions = OrderedKeyPositions(klen=klen, visible=visible, first=tgt_len - 1, zero_keys=network.mem_len)
        self.layers = [
            ZerosOfLayer(layer, layer_weights, dataclasses.replace(positions, r=layer_weights.position_keys))
            for layer, layer_weights in zip(network.decoder_layers, weights, strict=True)
        ]

    def finish(self) -> None:
        """Returns `None`: no state is kept. Raises NotCacheable unless every layer has attended to its memory."""
        self.checked()


class ZerosOfLayer(LayerMemory):
    """The zeros before the keys and values of one layer.

    Args:
        layer, weights: see `LayerMemory`.
        key_positions: positions of the zeros and of the segment's keys.
    """

    def __init__(self, layer: Any, weights: Any, key_positions: KeyPositions) -> None:
        super().__init__(layer, weights)
        self.key_positions = key_positions

    def attend(self, block: Block, content_q: Tensor, position_q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Attends to the zeros and to the segment."""
        content_q, position_q, k, v = map(swap_rows_and_heads, (content_q, position_q, k, v))
        return swap_rows_and_heads(block(content_q, position_q, k, v, self.key_positions))


def first_segment(network: Any, tokens: Tensor, model: Any = None) -> Any:
    """`network(tokens, network.initial_mems(B))`, without the new memory.

    Args:
        network: `TransformerXL`.
        tokens: int `[B, T]`. Tokens do not depend on the tokens to their right, so shorter rows may be padded there.
            Only the first token of a row may be `reset_token`: no other token begins a document here.
        model: the function that is called with the tokens and the memory; by default, the network.

    Returns:
        `[B, T, E]`.

    Raises:
        NotCacheable: a part of the network needs hidden states as memory. It may also raise another error, if it
            computes with the memory as if it were tensors.
    """
    return call_with_cache(model or network, tokens, ZeroMemory(network, tf.shape(tokens)[1]))[0]
