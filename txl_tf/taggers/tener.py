"""TENER: computes hidden states of characters from characters and bigrams, with attention to both sides (Yan 2019).

Shapes:
    B: batch      L: characters      E: d_model
"""

from collections.abc import Sequence
from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.config import TenerConfig
from txl_tf.kernels.dropout import split
from txl_tf.kernels.dtypes import at_least_float32, wide_dtype
from txl_tf.kernels.shapes import Tensor, shape_of
from txl_tf.nn.arguments import LayerOptions, takes
from txl_tf.nn.checks import checked_length
from txl_tf.nn.masks import with_mask
from txl_tf.nn.ops import Linear
from txl_tf.nn.positions import positional_embedding, tensor2tensor_frequencies
from txl_tf.taggers.sentence_network import AttendingNetwork, SentenceNetwork
from txl_tf.taggers.tener_layers import TenerLayer

__all__ = ["SentenceNetwork", "Tener"]  # users' networks also import `SentenceNetwork` from here


@keras.saving.register_keras_serializable("txl_tf")
class Tener(AttendingNetwork):
    """The encoder of TENER.

    ```python
    network = txl_tf.Tener(n_token=100, n_layer=1, d_model=32, n_head=4, d_inner=64)
    hidden = network({"chars": tf.constant([[5, 7, 2, 4], [3, 3, 0, 0]])})  # [2, 4, 32]
    ```

    Args:
        n_token, n_bigram: number of ids of characters and of bigrams; id 0 is padding, id 1 is unknown. With an
            `n_bigram` of 0, the network does not use bigrams.
        n_layer, d_model, n_head, d_inner: layers, width, attention heads, width inside the feed-forward nets.
        d_embed, d_bigram: widths of the embeddings.
        max_seq_len: most characters of a sentence in data, in `TextTagger` and in export. The network itself accepts
            longer sentences, unless `pos_embed` is "fix".
        attn_type, scale, key_position_term: see `TenerAttn`.
        pos_embed: absolute positions to add: "none", "sin" (sinusoids, from position 1 on) or "fix" (learned).
        after_norm: see `TenerLayer`.
        dropout, dropatt: dropout rates in the feed-forward nets and of the attention probabilities.
        embed_dropout: dropout rate of the embeddings.
        token_dropout: probability with which training replaces an id by the unknown id.
        seed: int from which dropout derives, unless the call gets a key.

    Call arguments:
        inputs: `{"chars": int [batch, length], "bigrams": int [batch, length]}`. `bigrams` may be missing if `n_bigram`
            is 0.
        training, dropout_key: see `txl_tf.nn.dropping`.

    Returns:
        `[batch, length, d_model]`, with Keras's mask of the characters. The values at padding have no meaning.

    Raises:
        ParameterError: an argument is out of its range, or an input is missing or has another shape.

    Reference:
        Yan et al. 2019; `TENER` of fastnlp/TENER.
    """

    copied_settings = {"dropout": ("stacked.dropout",), "dropatt": ("stacked.dropatt",)}

    @takes(TenerConfig)
    def __init__(
        self, *, n_token: int, d_model: int, n_layer: int, n_head: int, d_inner: int, n_bigram: int = 0,
        d_embed: int = 50, d_bigram: int = 50, max_seq_len: int = 512, token_dropout: float = 0.0, scale: bool = False,
        dropout: float = 0.0, dropatt: float = 0.0, embed_dropout: float = 0.0, attn_type: str = "adatrans",
        pos_embed: str = "none", after_norm: bool = True, key_position_term: bool = True, seed: int | None = None,
        **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(seed, **kwargs)
        self.in_fc = Linear(self.d_model, dtype=self.dtype_policy, name="in_fc")
        seed_of_layer: Any = self.draw_key  # in place of a seed: the layers get their dropout keys from this network
        self.stacked = [
            TenerLayer(
                self.d_model, self.n_head, self.d_inner, self.after_norm, self.dropout, self.attn_type, self.scale,
                self.key_position_term, self.dropatt, seed_of_layer, dtype=self.dtype_policy, name=f"layer{i}",
            )
            for i in range(self.n_layer)
        ]  # fmt: skip

    def build(self, inputs_shape: Any = None, **_: Any) -> None:
        self.build_tables()
        self.in_fc.build((None, None, self.token_width))
        self.pos_table = None
        if self.pos_embed == "fix":  # the original program's name of learned positions
            rows = self.max_seq_len + 1  # positions begin with 1; row 0 is not used
            self.add_table("pos_table", (rows, self.d_model), "random_normal")
        for layer in self.stacked:
            layer.build((None, None, self.d_model))

    def embed(self, inputs: dict[str, Tensor], keys: Sequence[Tensor | None] = (None, None, None, None)) -> Tensor:
        """The input of the first layer: `[batch, length, d_model]`. `keys`: see `embed_tokens`."""
        x = self.in_fc(self.embed_tokens(inputs, keys))
        return x if self.pos_embed == "none" else x + tf.cast(self.absolute_positions(self.mask_of(inputs)), x.dtype)

    def absolute_positions(self, mask: Tensor) -> Tensor:
        """Embeddings of the positions 1, 2, ... of characters, and zeros at padding: `[batch, length, d_model]`.

        Positions count only characters. So padding before a character does not change its position.

        Raises ParameterError if rows are longer than the table of learned positions. A length that is not static is
        checked when the graph runs, see `checked_length`.
        """
        length = shape_of(mask)[1]
        is_element = tf.cast(mask, tf.int32)
        if self.pos_embed == "sin":
            dtype = wide_dtype(self.compute_dtype)
            positions = tf.range(0.0, length + 1, dtype=dtype)
            table = positional_embedding(positions, tensor2tensor_frequencies(self.d_model, dtype))[0]
        else:
            length = checked_length("inputs", length, self.max_seq_len, f"at most max_seq_len={self.max_seq_len} long")
            if not isinstance(length, int):
                is_element = is_element[:, :length]  # waits for the check
            table = at_least_float32(self.pos_table)
        return tf.gather(table, tf.cumsum(is_element, 1)) * tf.cast(is_element, table.dtype)[..., None]

    def call(self, inputs: Any, training: bool | None = None, dropout_key: Tensor | None = None) -> Tensor:
        inputs = self.checked(inputs)
        keys = split(self.key_of_call(inputs["chars"], training, dropout_key), 4 + self.n_layer)
        mask = self.mask_of(inputs)
        x = self.embed(inputs, keys[:4])
        for layer, key in zip(self.stacked, keys[4:], strict=True):
            x = layer(x, mask, dropout_key=key)
        return with_mask(x, mask)
