"""FLAT: computes hidden states of characters from a lattice of characters and words (Li et al. 2020).

The items of a sentence are its characters, then directly the words that a lexicon finds in it, then padding.

Shapes:
    B: batch      L: most characters of a sentence in the batch      T: most items of a sentence      E: d_model
"""

from collections.abc import Sequence
from typing import Any, Unpack

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import FlatConfig
from txl_tf.errors import ParameterError
from txl_tf.kernels.dropout import dropout, split
from txl_tf.kernels.dtypes import wide_dtype
from txl_tf.kernels.shapes import Tensor, shape_of
from txl_tf.nn.arguments import LayerOptions, takes
from txl_tf.nn.masks import with_mask
from txl_tf.nn.ops import Linear
from txl_tf.taggers.flat_layers import FlatLayer
from txl_tf.taggers.lattice import PositionFusion, distance_table, distinct_pairs
from txl_tf.taggers.sentence_network import AttendingNetwork


@keras.saving.register_keras_serializable("txl_tf")
class Flat(AttendingNetwork):
    """The encoder of FLAT.

    ```python
    matches = txl_tf.Lexicon(["ab", "bcd"]).matches("abc")  # one: "ab", from character 0 to character 1
    network = txl_tf.Flat(n_token=100, n_layer=1, d_model=32, n_head=4, d_inner=64)
    inputs = {
        "lattice": tf.constant([[5, 7, 2, 42]]),  # the ids of a, b, c and ab
        "bigrams": tf.constant([[0, 0, 0]]),
        "seq_len": tf.constant([3]),
        "lex_num": tf.constant([1]),
        "pos_s": tf.constant([[0, 1, 2, 0]]),
        "pos_e": tf.constant([[0, 1, 2, 1]]),
    }
    hidden = network(inputs)  # [1, 3, 32]
    ```

    Args:
        n_token, n_bigram: number of ids of the lattice's items and of bigrams; id 0 is padding, id 1 is unknown. With
            an `n_bigram` of 0, the network does not use the ids of bigrams.
        n_layer, d_model, n_head, d_inner: layers, width, attention heads, width inside the feed-forward nets.
        d_embed, d_bigram: widths of the embeddings.
        max_seq_len: most characters of a sentence in data, in `TextTagger` and in export. The network itself accepts
            longer sentences, and uses the number only with a `rel_pos_init` of 0.
        fusion: see `PositionFusion`.
        fusion_shared: whether all layers share one fusion.
        rel_pos_init: with 1, distances are used as they are; with 0, `max_seq_len` is added to each, as in the
            original program.
        scale, k_proj: see `LatticeAttn`. The original program does not project keys.
        residual: see `FlatLayer`.
        dropout, dropatt: dropout rates in the feed-forward nets and of the attention probabilities.
        embed_dropout: dropout rate of the embeddings of characters and words.
        token_dropout: probability with which training replaces an id by the unknown id.
        seed: int from which dropout derives, unless the call gets a key.

    Call arguments:
        inputs: dictionary of int tensors:
            lattice: `[batch, items]`, characters, then words, then 0.
            bigrams: `[batch, length]`. It is needed even with an `n_bigram` of 0, because its shape gives `length`.
            seq_len, lex_num: `[batch]`, number of characters and of words.
            pos_s, pos_e: `[batch, items]`, positions of the first and of the last character of each item.
        training, dropout_key: see `txl_tf.nn.dropping`.

    Returns:
        `[batch, length, d_model]`, hidden states of the characters, with Keras's mask of the characters. The values at
        padding have no meaning.

    Raises:
        ParameterError: an argument is out of its range, an input is missing or has another shape, or numbers of items
            contradict each other.

    Reference:
        Li et al. 2020; `Lattice_Transformer_SeqLabel` of LeeSureman/Flat-Lattice-Transformer, V0.
    """

    input_dims = {
        "lattice": "batch items", "bigrams": "batch length", "seq_len": "batch", "lex_num": "batch",
        "pos_s": "batch items", "pos_e": "batch items",
    }  # fmt: skip

    copied_settings = {"dropout": ("stacked.dropout",), "dropatt": ("stacked.attn.dropatt",)}

    @property
    def needs_bigrams(self) -> bool:
        """Always true, because the shape of `bigrams` gives the number of characters."""
        return True

    @takes(FlatConfig)
    def __init__(
        self, *, n_token: int, d_model: int, n_layer: int, n_head: int, d_inner: int, n_bigram: int = 0,
        d_embed: int = 50, d_bigram: int = 50, max_seq_len: int = 512, token_dropout: float = 0.0, scale: bool = False,
        dropout: float = 0.0, dropatt: float = 0.0, embed_dropout: float = 0.0, fusion: str = "ff",
        fusion_shared: bool = True, rel_pos_init: int = 1, k_proj: bool = True, residual: str = "input",
        seed: int | None = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(seed, **kwargs)
        options: dict[str, Any] = {"dtype": self.dtype_policy}
        self.char_proj = Linear(self.d_model, **options, name="char_proj")
        self.lex_proj = Linear(self.d_model, **options, name="lex_proj")
        n_fusion = 1 if self.fusion_shared else self.n_layer
        self.fusions = [
            PositionFusion(self.d_model, self.fusion, **options, name=f"fusion{i}") for i in range(n_fusion)
        ]
        attention = {"scale": self.scale, "k_proj": self.k_proj, "dropatt": self.dropatt}
        seed_of_layer: Any = self.draw_key  # in place of a seed: the layers get their dropout keys from this network
        self.stacked = [
            FlatLayer(
                self.d_model, self.n_head, self.d_inner, residual=self.residual, dropout=self.dropout,
                attention=attention, seed=seed_of_layer, **options, name=f"layer{i}",
            )
            for i in range(self.n_layer)
        ]  # fmt: skip

    @classmethod
    def from_config(cls, config: dict[str, Any]):
        return cls(**FlatConfig.without_removed(config))

    def build(self, inputs_shape: Any = None, **_: Any) -> None:
        self.build_tables()
        width = (None, None, self.d_model)
        self.char_proj.build((None, None, self.token_width))
        self.lex_proj.build((None, None, self.d_embed))
        for layer in [*self.fusions, *self.stacked]:
            layer.build(width)

    def checked(self, inputs: Any) -> dict[str, Tensor]:
        """As `SentenceNetwork.checked`. It also raises ParameterError if there are more bigrams than items."""
        tensors = super().checked(inputs)
        width, length = tensors["lattice"].shape[1], tensors["bigrams"].shape[1]
        if None not in (width, length) and width < length:
            allowed = f"at most as wide as inputs['lattice'], {width}"
            message = f"inputs['bigrams'] must be {allowed}, got a width of {length}"
            raise ParameterError("inputs['bigrams']", length, allowed, message)
        return tensors

    def check_values(self, inputs: dict[str, Tensor]) -> None:
        """As `SentenceNetwork.check_values`, and also `check_items`."""
        super().check_values(inputs)
        check_items(inputs)

    def mask_of(self, inputs: dict[str, Tensor]) -> Tensor:
        """bool `[batch, length]`, true at characters."""
        return tf.sequence_mask(inputs["seq_len"], shape_of(inputs["bigrams"])[1])

    def items_of(self, inputs: dict[str, Tensor]) -> Tensor:
        """bool `[batch, items]`, true at characters and words."""
        return tf.sequence_mask(inputs["seq_len"] + inputs["lex_num"], shape_of(inputs["lattice"])[1])

    def embed(self, inputs: dict[str, Tensor], keys: Sequence[Tensor | None] = (None, None, None, None)) -> Tensor:
        """The input of the first layer: `[batch, items, d_model]`, with zeros at padding.

        `keys` are the dropout keys of the ids of items, the ids of bigrams, the embeddings of characters and the
        embeddings of words; `None` means no dropout.
        """
        item_key, bigram_key, char_key, word_key = keys
        chars = self.mask_of(inputs)
        is_item = self.items_of(inputs)
        length = shape_of(chars)[1]
        n_items = shape_of(is_item)[1]
        embedded = self.lookup(self.embedding, inputs["lattice"], item_key)  # [B, T, d_embed]
        # Sentences have different lengths, so a column can have a character in one row and a word in another. Each of
        # the two projections computes all items of its columns, and a mask keeps its own items.
        char_rows = embedded[:, :length]
        if self.n_bigram:
            bigrams = self.lookup(self.bigram_embedding, inputs["bigrams"], bigram_key)
            char_rows = tf.concat([char_rows, bigrams], -1)
        char_rows = self.char_proj(dropout(char_rows, self.embed_dropout, char_key))  # [B, L, E]
        char_rows *= tf.cast(chars, char_rows.dtype)[..., None]
        words = is_item & tf.logical_not(tf.pad(chars, [[0, 0], [0, n_items - length]]))  # [B, T]
        word_rows = self.lex_proj(dropout(embedded, self.embed_dropout, word_key))  # [B, T, E]
        word_rows *= tf.cast(words, word_rows.dtype)[..., None]
        return word_rows + tf.pad(char_rows, [[0, 0], [0, n_items - length], [0, 0]])

    def positions(self, inputs: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """The position vectors of all pairs of items.

        Returns:
            `(fused, index)`. `fused` is a list of tensors `[U, d_model]`, the vectors of the U different pairs: one
            tensor that all layers share, or one for each layer. `index`, int32 `[batch, items, items]`, is the row of
            each pair of items in such a tensor.
        """
        pairs = distinct_pairs(inputs["pos_s"], inputs["pos_e"], self.items_of(inputs), self.fusions[0].names)
        shift = 0 if self.rel_pos_init else self.max_seq_len
        table = distance_table(pairs.places, self.d_model, shift, wide_dtype(self.compute_dtype))
        return [fusion(pairs, table) for fusion in self.fusions], pairs.index

    def call(self, inputs: Any, training: bool | None = None, dropout_key: Tensor | None = None) -> Tensor:
        inputs = self.checked(inputs)
        keys = split(self.key_of_call(inputs["lattice"], training, dropout_key), 4 + self.n_layer)
        x = self.embed(inputs, keys[:4])
        fused, index = self.positions(inputs)  # one `fused` for all layers, or one for each
        is_item = self.items_of(inputs)
        for i, (layer, key) in enumerate(zip(self.stacked, keys[4:], strict=True)):
            x = layer(x, fused[i % len(fused)], index, is_item, dropout_key=key)
        x = x[:, : shape_of(inputs["bigrams"])[1]]
        return with_mask(x, self.mask_of(inputs))

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        return (*self.shapes_of_inputs(shapes, named)["bigrams"], self.d_model)


def check_items(inputs: dict[str, Tensor]) -> None:
    """Checks that the inputs of `Flat` do not contradict each other. `inputs` are those of its call.

    In a `tf.function`, it adds assertions. Running the graph raises an InvalidArgumentError, but not under XLA.

    Raises:
        ParameterError: a number of characters or items is negative or larger than the width of its tensor, or an item
            ends before it begins.
    """
    _, width = shape_of(inputs["lattice"])
    _, length = shape_of(inputs["bigrams"])
    most_items, most_characters = (
        f"the width of {name}" + ("" if inputs[name].shape[1] is None else f", {inputs[name].shape[1]}")
        for name in ("lattice", "bigrams")
    )
    seq_len: Any = inputs["seq_len"]
    lex_num: Any = inputs["lex_num"]
    is_item = tf.range(width) < (seq_len + lex_num)[:, None]
    for name, wrong, allowed in (
        ("seq_len", (seq_len < 0) | (seq_len > length), f"from 0 to {most_characters}"),
        ("lex_num", (lex_num < 0) | (lex_num > width - seq_len), f"from 0 to {most_items}, minus seq_len"),
        ("pos_e", is_item & (inputs["pos_e"] < inputs["pos_s"]), "at least pos_s"),
    ):
        argument = f"inputs[{name!r}]"
        if tf.is_symbolic_tensor(wrong):
            # Not int64: for other types than int32 and text, `Assert` makes a graph for each branch of a `cond`.
            places = tf.cast(tf.where(wrong), tf.int32)
            tf.debugging.Assert(tf.size(places) == 0, [f"{argument} must be {allowed}, but is not at", places])
        elif tf.reduce_any(wrong):
            place = tuple(np.argwhere(wrong)[0])
            raise ParameterError(f"{argument}{[*map(int, place)]}", int(inputs[name][place]), allowed)
