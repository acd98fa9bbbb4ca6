"""Word embeddings and absolute positions of a vanilla Transformer (Vaswani et al. 2017, sections 3.4 and 3.5).

Shapes:
    B: batch      T: tokens      E: d_model
"""

from collections.abc import Iterable
from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.config import at_least
from txl_tf.config.checks import is_integer, is_number
from txl_tf.errors import ParameterError
from txl_tf.kernels.dropout import dropout
from txl_tf.kernels.dtypes import at_least_float32, wide_dtype
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.nn.arguments import LayerOptions, refusing, stored
from txl_tf.nn.base import Layer
from txl_tf.nn.checks import as_ids, check_sizes, check_tensors, checked_length
from txl_tf.nn.positions import positional_encoding
from txl_tf.nn.settings import FREE_RATE, FREE_SEED, FREE_SWITCH
from txl_tf.nn.tied import Shared, Tied


def _refuse_width_first(_name: str, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Raises ParameterError for the order `Embeddings(d_model, vocab)`: the first argument is smaller."""
    if len(args) > 1 and all(map(is_integer, args[:2])) and args[0] < args[1]:
        message = (
            f"vocab={args[0]} and d_model={args[1]} by position must be vocab first, which is not smaller: "
            "write vocab= and d_model="
        )
        raise ParameterError("vocab", args[0], f"not smaller than d_model={args[1]} by position", message)


@keras.saving.register_keras_serializable("txl_tf")
class Embeddings(Shared, Layer):
    """Looks up ids in a table, and multiplies the rows by `sqrt(d_model)` (Vaswani et al. 2017, section 3.4).

    A softmax can share the table, see `logits`. It needs small values in the table. The factor makes the embeddings as
    large as the positions that are added to them.

    ```python
    embeddings = txl_tf.layers.Embeddings(vocab=1000, d_model=32, mask_zero=True)
    vectors = embeddings(tf.constant([[3, 7, 0]]))  # [1, 3, 32]
    logits = embeddings.logits(vectors)  # [1, 3, 1000]
    ```

    Args:
        vocab: number of rows of the table.
        d_model: width. Because `Embeddings(d_model, vocab)` is another common order, it is an error if the second of
            two positional arguments is larger. With keywords, any sizes are possible.
        embeddings_initializer: initializer of the table; by default a normal distribution with the standard deviation
            `d_model**-0.5`.
        mask_zero: whether id 0 is padding. Then the layer passes on a mask, as Keras's `Embedding` does.

    Call arguments:
        ids: int `[batch, length]`. Float tensors with integer values are accepted.

    Returns:
        `[batch, length, d_model]`.

    Raises:
        ParameterError: `vocab` or `d_model` is not positive, or they seem to be in the other order.
    """

    free_settings = {"mask_zero": FREE_SWITCH}

    lut: Any

    @refusing(_refuse_width_first)
    @stored
    def __init__(
        self, vocab: int, d_model: int, embeddings_initializer: Any = None, mask_zero: bool = False,
        **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        self.autocast = False  # float16 cannot represent ids above 2048 exactly
        check_sizes(vocab=vocab, d_model=d_model)
        self.embeddings_initializer = keras.initializers.get(
            embeddings_initializer or keras.initializers.RandomNormal(stddev=d_model**-0.5)
        )

    def build(self, ids_shape: Any = None) -> None:
        self.add_table("lut", (self.vocab, self.d_model), self.embeddings_initializer, autocast=False)

    def call(self, ids: Tensor) -> Any:
        return tf.cast(tf.gather(self.lut, as_ids("ids", ids)) * self.d_model**0.5, self.compute_dtype)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        return (*self.named_shapes(shapes, named)["ids"], self.d_model)

    def logits(self, hidden: Tensor) -> Tensor:
        """The products of vectors with every row of the table, for a softmax that shares the table.

        Args:
            hidden: `[..., d_model]`. It may be a symbolic tensor of Keras: then the functional model gets a layer that
                is tied to this one, see `nn/tied.py`.

        Returns:
            `[..., vocab]`: float32, or float64 if `hidden` is float64.
        """
        if keras.backend.is_keras_tensor(hidden):
            layer: Any = EmbeddingLogits(self.vocab, self.d_model, dtype=self.dtype_policy)
            return layer(hidden, embedding=self)
        if not self.built:
            self.build()
        return at_least_float32(tf.matmul(hidden, tf.cast(self.lut, hidden.dtype), transpose_b=True))


@keras.saving.register_keras_serializable("txl_tf")
class EmbeddingLogits(Tied, Layer):
    """`Embeddings.logits` as a layer of a functional model."""

    embedding_class = Embeddings
    shared_sizes = ("vocab", "d_model")

    @stored
    def __init__(self, vocab: int, d_model: int, **kwargs: Unpack[LayerOptions]) -> None:
        super().__init__(**kwargs)
        self.autocast = False  # the product is in the dtype of hidden

    def call(self, hidden: Tensor, embedding: Any = None) -> Any:
        check_tensors({"d_model": self.d_model}, hidden=(hidden, "float ... d_model"))
        owner: Any = self.embedding_of_call(embedding)
        return owner.logits(hidden)

    def compute_output_shape(self, hidden_shape: Any, *_: Any, **__: Any) -> Any:
        return (*hidden_shape[:-1], self.vocab)


def _refuse_rate_second(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ParameterError for the arguments of another common constructor, `(d_model, dropout, max_len)`."""
    if len(args) > 1 and ("max_len" in kwargs or (is_number(args[1]) and 0 <= args[1] < 1)):
        argument, rate, allowed = "max_len", args[1], "a positive integer, given once"
    elif "dropout" in kwargs:
        argument, rate, allowed = "dropout", kwargs["dropout"], "given as rate="
    else:
        return
    width = args[0] if args else kwargs.get("d_model")
    message = (
        f"{argument} must be {allowed}, got {rate}; the order (d_model, dropout, max_len) is written "
        f"{name}({width}, rate={rate}, max_len=...)"
    )
    raise ParameterError(argument, rate, allowed, message)


@keras.saving.register_keras_serializable("txl_tf")
class PositionalEncoding(Layer):
    """Adds sinusoids of the positions, then applies dropout (Vaswani et al. 2017, section 3.5).

    The table is a constant, not a weight. To add a vector for each position to the output of a linear layer is the same
    as to append a one-hot position to its input: the vectors are then rows of the layer's matrix.

    ```python
    positions = txl_tf.layers.PositionalEncoding(d_model=32, max_len=512, rate=0.1)
    x = positions(tf.random.normal([2, 5, 32]))  # [2, 5, 32]
    later = positions(tf.random.normal([2, 1, 32]), first=5)  # [2, 1, 32]
    ```

    Args:
        d_model: width.
        max_len: number of positions. Because `(d_model, dropout, max_len)` is another common order, a rate as the
            second positional argument and the name `dropout` are errors.
        rate: dropout rate.
        seed: int from which dropout derives, unless the call gets a key. `None` draws one.

    Call arguments:
        x: `[batch, length, d_model]`.
        first: int or int scalar tensor, the position of the first element.
        training, dropout_key: see `txl_tf.nn.dropping`.

    Returns:
        A tensor like `x`.

    Raises:
        ParameterError: an argument is out of its range, or positions of `x` are beyond the table. If a graph does not
            know the length of `x` or `first`, it raises an InvalidArgumentError when it runs; under XLA, it does not
            check them.
    """

    free_settings = {"max_len": at_least(1), "rate": FREE_RATE, "seed": FREE_SEED}
    fixed_settings = {"pe": "override make_table in a subclass"}  # a file does not contain the table

    @refusing(_refuse_rate_second)
    @stored
    def __init__(
        self, d_model: int, max_len: int = 5000, rate: float = 0.0, seed: int | None = None,
        **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_sizes(d_model=d_model, max_len=max_len)
        self.start_keys(seed, rate=rate)
        self.pe = self.make_table()

    def make_table(self) -> Any:
        """The vectors of all positions, `[1, max_len, d_model]`."""
        table = positional_encoding(self.max_len, self.d_model, wide_dtype(self.compute_dtype))
        return table.numpy()  # an array belongs to no graph, so all graphs can use it

    def settings_changed(self, names: Iterable[str]) -> None:
        super().settings_changed(names)
        if "max_len" in names:
            self.store("pe", self.make_table())

    def build(self, x_shape: Any = None) -> None:
        self.build_parts(x_shape)

    def call(self, x: Tensor, first: Size = 0, training: bool | None = None, dropout_key: Tensor | None = None) -> Any:
        check_tensors({"d_model": self.d_model}, x=(x, "float batch length d_model"))
        allowed = f"at most max_len={self.max_len} long"
        length = checked_length("x", shape_of(x)[1], self.max_len, allowed)
        known = tf.get_static_value(first)
        if isinstance(length, int) and known is not None and not 0 <= known <= self.max_len - length:
            allowed = f"from 0 to {self.max_len - length} for x of length {length}"
            raise ParameterError("first", int(known), allowed)
        end = first + length
        if known is None or (known and not isinstance(length, int)):
            end = checked_length("x", end, self.max_len, allowed, f"first plus the length of x must be {allowed}")
        return dropout(self.with_positions(x, first, end), self.rate, self.key_of_call(x, training, dropout_key))

    def with_positions(self, x: Tensor, first: Size, end: Size) -> Any:
        """`x` plus the vectors of the positions from `first` to `end`."""
        return x + tf.cast(tf.convert_to_tensor(self.pe)[:, first:end], x.dtype)


@keras.saving.register_keras_serializable("txl_tf")
class PositionEmbedding(PositionalEncoding):
    """Adds a learned row for every position, then applies dropout (Vaswani et al. 2017, table 3, row E).

    There are no positions beyond `max_len`. The row of a position that never occurs in training is random.

    ```python
    x = txl_tf.layers.PositionEmbedding(d_model=32, max_len=512)(tf.random.normal([2, 5, 32]))  # [2, 5, 32]
    ```

    Args, call arguments, returns, raises: see `PositionalEncoding`.
    """

    fixed_settings = {"max_len": ""}  # the number of rows of a weight

    def make_table(self) -> Any:
        shape = (1, self.max_len, self.d_model)
        initializer = keras.initializers.RandomNormal(stddev=self.d_model**-0.5)
        return self.add_weight(name="pe", shape=shape, initializer=initializer, autocast=False)


class NoPositions(PositionalEncoding):
    """Only checks the length and applies dropout. The attention knows the positions, see `Transformer`."""

    def make_table(self) -> Any:
        return None

    def with_positions(self, x: Tensor, first: Size, end: Size) -> Any:
        return x
