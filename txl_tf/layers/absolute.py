"""Word embeddings and absolute positions: what enters a vanilla Transformer (documents 001 and 003).

Shapes:
    B: batch      T: tokens      E: d_model
"""

import keras
import tensorflow as tf

from txl_tf.layers.dropout import dropout
from txl_tf.layers.ops import config_of
from txl_tf.layers.positions import positional_encoding


@keras.saving.register_keras_serializable("txl_tf")
class Embeddings(keras.layers.Layer):
    """Rows of a table, times `sqrt(d_model)` (document 003; Vaswani et al. 2017, section 3.4).

    A lookup is the product of a one-hot vector with the table. The factor keeps the embedding, whose table is also that
    of the softmax where the two are shared, as large as the positions that are added to it.

    Args:
        vocab: rows of the table.
        d_model: width.
        embeddings_initializer: of the table; by default a normal distribution of `d_model**-0.5`.

    Call arguments:
        ids: int `[batch, length]`.

    Returns:
        `[batch, length, d_model]`.
    """

    def __init__(self, vocab, d_model, embeddings_initializer=None, **kwargs):
        super().__init__(**kwargs)
        self.vocab = vocab
        self.d_model = d_model
        self.embeddings_initializer = keras.initializers.get(
            embeddings_initializer or keras.initializers.RandomNormal(stddev=d_model**-0.5)
        )

    def build(self, ids_shape=None):
        shape = (self.vocab, self.d_model)
        self.lut = self.add_weight(name="lut", shape=shape, initializer=self.embeddings_initializer, autocast=False)

    def call(self, ids):
        return tf.cast(tf.gather(self.lut, ids) * self.d_model**0.5, self.compute_dtype)

    def logits(self, hidden):
        """The product with every row of the table, for a softmax that shares it: `[..., vocab]`, float32."""
        return tf.cast(tf.matmul(hidden, tf.cast(self.lut, hidden.dtype), transpose_b=True), tf.float32)

    def get_config(self):
        return {**super().get_config(), **config_of(self, "vocab d_model embeddings_initializer")}


@keras.saving.register_keras_serializable("txl_tf")
class PositionalEncoding(keras.layers.Layer):
    """Adds sinusoids of the positions, then drops (document 003). The table is a constant, no weight.

    To concatenate a one-hot position before a linear layer is the same as to add an embedding after it.

    Args:
        d_model: width.
        max_len: most positions.
        rate: of dropout.

    Call arguments:
        x: `[batch, length, d_model]`.
        first: int or int scalar tensor, the position of the first element.
        dropout_key: int `[3]` draws the dropout mask, see `dropout`; `None` for inference.

    Returns:
        A tensor like `x`.

    Raises:
        ValueError: `x` is longer than the table, where its length is static.
    """

    def __init__(self, d_model, max_len=5000, rate=0.0, **kwargs):
        super().__init__(**kwargs)
        self.d_model = d_model
        self.max_len = max_len
        self.rate = rate
        self.pe = positional_encoding(max_len, d_model).numpy()  # not a tensor: it goes into any graph

    def call(self, x, first=0, dropout_key=None):
        length = keras.ops.shape(x)[1]
        if isinstance(length, int) and length > self.max_len:
            raise ValueError(f"x must be at most max_len={self.max_len} long, got {length}")
        positions = tf.cast(tf.constant(self.pe)[:, first : first + length], x.dtype)
        return dropout(x + positions, self.rate, dropout_key)

    def get_config(self):
        return {**super().get_config(), **config_of(self, "d_model max_len rate")}
