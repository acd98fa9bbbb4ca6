"""Word embeddings and absolute positions: what enters a vanilla Transformer (Vaswani et al. 2017, sections 3.4, 3.5).

Shapes:
    B: batch      T: tokens      E: d_model
"""

import numbers

import keras
import tensorflow as tf

from txl_tf.config import at_least
from txl_tf.layers.common.arguments import stored
from txl_tf.layers.common.base import Layer, as_ids, check_sizes, check_tensors
from txl_tf.layers.common.dropout import dropout
from txl_tf.layers.common.settings import FREE_RATE, FREE_SEED, FREE_SWITCH
from txl_tf.layers.positions import positional_encoding


@keras.saving.register_keras_serializable("txl_tf")
class Embeddings(Layer):
    """Rows of a table, times `sqrt(d_model)` (Vaswani et al. 2017, section 3.4).

    A lookup is the product of a one-hot vector with the table. The factor keeps the embedding, whose table is also that
    of the softmax where the two are shared, as large as the positions that are added to it.

    Args:
        vocab: rows of the table.
        d_model: width. `Embeddings(d_model, vocab)` is another common order: two arguments by position whose second is
            the larger are an error. By name any table can be had.
        embeddings_initializer: of the table; by default a normal distribution of `d_model**-0.5`.
        mask_zero: whether id 0 is padding, which the mask that is passed on hides, as with Keras's `Embedding`.

    Call arguments:
        ids: int `[batch, length]`; whole numbers of another type are taken for what they are.

    Returns:
        `[batch, length, d_model]`.

    Raises:
        ValueError: `vocab` or `d_model` is not positive, or they seem to be in the other order.
    """

    free_settings = {"mask_zero": FREE_SWITCH}

    def __new__(cls, *args, **kwargs):
        if len(args) > 1 and all(isinstance(size, numbers.Integral) for size in args[:2]) and args[0] < args[1]:
            raise ValueError(
                f"vocab={args[0]} and d_model={args[1]} by position must be vocab first, the larger number: "
                "write vocab= and d_model="
            )
        return super().__new__(cls, *args, **kwargs)

    @stored
    def __init__(self, vocab, d_model, embeddings_initializer=None, mask_zero=False, **kwargs):
        super().__init__(**kwargs)
        self.autocast = False  # half precision does not hold ids
        check_sizes(vocab=vocab, d_model=d_model)
        self.embeddings_initializer = keras.initializers.get(
            embeddings_initializer or keras.initializers.RandomNormal(stddev=d_model**-0.5)
        )

    def build(self, ids_shape=None):
        shape = (self.vocab, self.d_model)
        self.lut = self.add_weight(name="lut", shape=shape, initializer=self.embeddings_initializer, autocast=False)

    def call(self, ids):
        return tf.cast(tf.gather(self.lut, as_ids("ids", ids)) * self.d_model**0.5, self.compute_dtype)

    def compute_mask(self, inputs, previous_mask):
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, ids_shape):
        return (*ids_shape, self.d_model)

    def logits(self, hidden):
        """The product with every row of the table, for a softmax that shares it: `[..., vocab]`, float32."""
        return tf.cast(tf.matmul(hidden, tf.cast(self.lut, hidden.dtype), transpose_b=True), tf.float32)


@keras.saving.register_keras_serializable("txl_tf")
class PositionalEncoding(Layer):
    """Adds sinusoids of the positions, then drops (Vaswani et al. 2017, section 3.5).

    The table is a constant, no weight. To concatenate a one-hot position before a linear layer is the same as to add an
    embedding after it.

    Args:
        d_model: width.
        max_len: most positions. `(d_model, dropout, max_len)` is another common order: a rate here is an error.
        rate: of dropout.
        seed: int that dropout derives from where no key is given; drawn where it is `None`.

    Call arguments:
        x: `[batch, length, d_model]`.
        first: int or int scalar tensor, the position of the first element.
        training, dropout_key: see `txl_tf.layers.common.base`.

    Returns:
        A tensor like `x`.

    Raises:
        ValueError: `x` is longer than the table from `first` on, where both are static; or an argument is out of its
            range.
    """

    free_settings = {"max_len": at_least(1), "rate": FREE_RATE, "seed": FREE_SEED}

    @stored
    def __init__(self, d_model, max_len=5000, rate=0.0, seed=None, **kwargs):
        super().__init__(**kwargs)
        if isinstance(max_len, numbers.Real) and 0 <= max_len < 1:
            raise ValueError(
                f"max_len must be a positive integer, got {max_len}; the order (d_model, dropout, max_len) is written "
                f"PositionalEncoding({d_model}, rate={max_len}, max_len=...)"
            )
        check_sizes(d_model=d_model, max_len=max_len)
        self.start_keys(seed, rate=rate)
        self.pe = self.make_table()

    def make_table(self):
        """The rows, `[1, max_len, d_model]`."""
        return positional_encoding(self.max_len, self.d_model).numpy()  # not a tensor: it goes into any graph

    def settings_changed(self, names):
        super().settings_changed(names)
        if "max_len" in names:
            self.pe = self.make_table()

    def build(self, x_shape=None):
        self.build_parts(x_shape)

    def call(self, x, first=0, training=None, dropout_key=None):
        check_tensors({"d_model": self.d_model}, x=(x, "float batch length d_model"))
        length, known = keras.ops.shape(x)[1], tf.get_static_value(first)
        if isinstance(length, int) and length > self.max_len:
            raise ValueError(f"x must be at most max_len={self.max_len} long, got {length}")
        if isinstance(length, int) and known is not None and not 0 <= known <= self.max_len - length:
            raise ValueError(f"first must lie in [0, {self.max_len - length}] for x of length {length}, got {known}")
        positions = tf.cast(tf.convert_to_tensor(self.pe)[:, first : first + length], x.dtype)
        return dropout(x + positions, self.rate, self.key_of_call(x, training, dropout_key))


@keras.saving.register_keras_serializable("txl_tf")
class PositionEmbedding(PositionalEncoding):
    """Adds a learned row for every position, then drops (Vaswani et al. 2017, table 3, row E).

    No position beyond `max_len` has a row, and one that training never reached has a row of noise.

    Args, call arguments, returns, raises: as of `PositionalEncoding`.
    """

    fixed_settings = {"max_len": ""}  # rows of the table

    def make_table(self):
        shape = (1, self.max_len, self.d_model)
        initializer = keras.initializers.RandomNormal(stddev=self.d_model**-0.5)
        return self.add_weight(name="pe", shape=shape, initializer=initializer, autocast=False)
