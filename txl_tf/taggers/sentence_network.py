"""Base classes of the networks that read sentences: `Tener`, `Flat` and `BiLSTM`."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from txl_tf.data.tagged.batches import PADDING, UNKNOWN_ID
from txl_tf.errors import ParameterError
from txl_tf.kernels.dropout import dropout
from txl_tf.kernels.shapes import Tensor, shape_of
from txl_tf.nn.base import Layer, watch_layers
from txl_tf.nn.checks import as_ids, check_layer, check_tensors, checked_sizes, shown
from txl_tf.nn.embedding import check_ids
from txl_tf.nn.settings import FREE_SEED


class SentenceNetwork(Layer):
    """Base class of `Tener`, `Flat` and `BiLSTM`: named inputs, embedding tables and dropout keys.

    It reads characters and bigrams, unless a subclass has other `input_dims`. The constructor of a subclass sets the
    other attributes below.

    Attributes:
        n_token, n_bigram, d_embed, d_bigram, d_model, embed_dropout, token_dropout: see `Tener`.
        input_dims: `{name of an input: its dimensions}`, in the form that `check_tensors` reads.
    """

    free_settings = {"seed": FREE_SEED}
    input_dims = {"chars": "batch length", "bigrams": "batch length"}
    n_token: int
    n_bigram: int
    d_embed: int
    d_bigram: int
    d_model: int
    embed_dropout: float
    token_dropout: float

    def __init__(self, seed: int | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.autocast = False  # float16 cannot represent ids above 2048 exactly
        self.start_keys(seed, always=True)

    @property
    def reads_lattice(self) -> bool:
        """Whether the network reads words of a lexicon in addition to the characters."""
        return "lattice" in self.input_dims

    @property
    def input_shapes(self) -> dict[str, tuple]:
        """The shapes of the inputs by name, for any batch and length: every dimension is `None`."""
        return {name: (None,) * len(self.input_dims[name].split()) for name in self._input_names}

    @property
    def _input_names(self) -> list[str]:
        """The names of the inputs that the network needs."""
        return [name for name in self.input_dims if name != "bigrams" or self.needs_bigrams]

    def shapes_of_inputs(self, shapes: tuple, named: dict[str, Any]) -> dict[str, Any]:
        """The shapes of the inputs by name, from the arguments of `compute_output_shape`.

        Without arguments, they are `input_shapes`.
        """
        named_only = {name: shape for name, shape in named.items() if name.strip("_")}  # see `named_shapes`
        return self.named_shapes(shapes, named_only)["inputs"] if shapes or named_only else self.input_shapes

    def build_at_once(self) -> None:
        """Creates the weights if they do not exist, as the first call does."""
        if not self.built:
            self.build(self.input_shapes)

    def build_tables(self) -> None:
        """Adds the embedding tables; that of bigrams is `None` with an `n_bigram` of 0. Row 0 is for padding."""

        def table(name: str, rows: int, width: int) -> Any:
            bound = (3 / width) ** 0.5  # as in fastNLP
            initializer = keras.initializers.RandomUniform(-bound, bound)
            return self.add_weight(name=name, shape=(rows, width), initializer=initializer, autocast=False)

        self.embedding = table("embedding", self.n_token, self.d_embed)
        self.bigram_embedding = table("bigram_embedding", self.n_bigram, self.d_bigram) if self.n_bigram else None

    def lookup(self, table: Any, ids: Tensor, dropout_key: Tensor | None = None) -> Tensor:
        """The rows of a table for `ids`, `[batch, any]`: `[batch, any, width]` in the compute dtype.

        With a `dropout_key`, each id except padding is replaced by the unknown id with the probability `token_dropout`.
        """
        if dropout_key is not None and self.token_dropout:
            # The mask of `dropout` depends only on the key and the number of the sentence in the global batch, so
            # replicas draw as one device would.
            is_known = dropout(tf.ones(shape_of(ids)), self.token_dropout, dropout_key) > 0
            ids = tf.where(is_known | (ids == PADDING), ids, UNKNOWN_ID)
        return tf.cast(tf.gather(table, ids), self.compute_dtype)

    def checked(self, inputs: Any) -> dict[str, Tensor]:
        """The inputs by name, as int32, without `bigrams` if the network does not need them.

        Raises:
            ParameterError: an input is missing, unknown or has another shape; or, outside of graphs, an id is not in
                its table.
        """
        names = self._input_names
        if not isinstance(inputs, dict) or set(names) - set(inputs):
            got = f"a dictionary with {', '.join(map(str, inputs))}" if isinstance(inputs, dict) else shown(inputs)
            allowed = f"a dictionary with {', '.join(names)}"
            raise ParameterError("inputs", inputs, allowed, f"inputs must be {allowed}, got {got}")
        for name in inputs:
            if name not in self.input_dims:
                message = f"inputs has {name!r}, which the network does not read: it reads {', '.join(names)}"
                raise ParameterError("inputs", name, list(self.input_dims), message)
        ranks = {name: len(self.input_dims[name].split()) for name in names}
        ids_of = {name: as_ids(f"inputs[{name!r}]", inputs[name], ranks[name]) for name in names}
        named = {f"inputs[{name!r}]": (ids, self.input_dims[name]) for name, ids in ids_of.items()}
        check_tensors({}, **{name: (ids, f"int {dims}") for name, (ids, dims) in named.items()})
        tensors = dict(zip(names, checked_sizes(**named), strict=True))
        if tf.executing_eagerly():  # in graphs, a GPU would have to wait for the CPU to check them
            self.check_values(tensors)
        return tensors

    def check_values(self, inputs: dict[str, Tensor]) -> None:
        """Raises ParameterError if an id of the result of `checked` is not in its table.

        In a `tf.function`, it adds assertions, see `check_ids`.
        """
        n_rows = {"chars": self.n_token, "lattice": self.n_token, "bigrams": self.n_bigram}
        for name, ids in inputs.items():
            if n_rows.get(name):  # without a table, FLAT only needs the shape of the bigrams
                check_ids(f"inputs[{name!r}]", ids, n_rows[name])

    def embed_tokens(self, inputs: dict[str, Tensor], keys: Sequence[Tensor | None]) -> Tensor:
        """The concatenated embeddings of tokens and bigrams: `[batch, length, token_width]`.

        `keys` are the dropout keys of the ids of tokens, the ids of bigrams, the embeddings of tokens and the
        embeddings of bigrams; `None` means no dropout.
        """
        id_key, bigram_id_key, char_key, bigram_key = keys
        embedded = [dropout(self.lookup(self.embedding, inputs["chars"], id_key), self.embed_dropout, char_key)]
        if self.n_bigram:
            bigrams = self.lookup(self.bigram_embedding, inputs["bigrams"], bigram_id_key)
            embedded.append(dropout(bigrams, self.embed_dropout, bigram_key))
        return tf.concat(embedded, -1)

    @property
    def needs_bigrams(self) -> bool:
        """Whether the inputs must contain bigrams."""
        return bool(self.n_bigram)

    @property
    def token_width(self) -> int:
        """Width of the concatenated embeddings of a token and its bigram."""
        return self.d_embed + (self.d_bigram if self.n_bigram else 0)

    def mask_of(self, inputs: dict[str, Tensor]) -> Tensor:
        """bool `[batch, length]`, true at characters."""
        return inputs["chars"] != PADDING

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        return (*self.shapes_of_inputs(shapes, named)["chars"], self.d_model)


class AttendingNetwork(SentenceNetwork):
    """Base class of `Tener` and `Flat`, whose layers attend to all items of a sentence."""

    n_layer: int
    stacked: Any  # list of the layers

    def attention_probs(self, inputs: Any, layer: int) -> Tensor:
        """The attention probabilities of one layer, without dropout.

        Args:
            inputs: see the call.
            layer: number of the layer, from 0 on. A negative number counts from the last layer.

        Returns:
            `[n_head, batch, items, items]`. Each row sums to 1 over the keys, and is 0 at keys that are padding. The
            rows of padding have no meaning.
        """
        layer = check_layer(layer, self.n_layer)
        return watch_layers(self, "stacked", self.stacked, self.checked(inputs))[0].probs[layer]
