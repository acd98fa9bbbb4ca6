"""The baseline of both papers: bidirectional LSTMs over characters and bigrams (Huang et al. 2015).

Shapes:
    B: batch      L: characters      E: d_model
"""

from typing import Any, Unpack

import keras

from txl_tf.config import BiLSTMConfig
from txl_tf.kernels.dropout import split
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.arguments import LayerOptions, takes
from txl_tf.nn.masks import with_mask
from txl_tf.taggers.sentence_network import SentenceNetwork


@keras.saving.register_keras_serializable("txl_tf")
class BiLSTM(SentenceNetwork):
    """Keras's bidirectional LSTMs over embeddings of characters and bigrams, as `Tener` has them.

    ```python
    network = txl_tf.BiLSTM(n_token=100, n_layer=1, d_model=32)
    hidden = network({"chars": tf.constant([[5, 7, 2, 4], [3, 3, 0, 0]])})  # [2, 4, 32]
    ```

    Args:
        n_token, n_bigram, d_embed, d_bigram, max_seq_len, embed_dropout, token_dropout, seed: see `Tener`.
        n_layer: number of layers.
        d_model: even, width of a layer; each direction has half of it.

    Call arguments, returns, raises: see `Tener`.

    Reference:
        Huang et al. 2015 (arXiv 1508.01991), with a CRF on top; the baseline of Yan et al. 2019 and of Li et al. 2020.
    """

    # A served model estimates the memory of a request from these sizes.
    n_head = 0
    d_inner = 0

    @takes(BiLSTMConfig)
    def __init__(
        self, *, n_token: int, d_model: int, n_layer: int, n_bigram: int = 0, d_embed: int = 50, d_bigram: int = 50,
        max_seq_len: int = 512, token_dropout: float = 0.0, embed_dropout: float = 0.0, seed: int | None = None,
        **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(seed, **kwargs)
        self.stacked: list[Any] = []
        for i in range(self.n_layer):
            options: dict[str, Any] = {"dtype": self.dtype_policy}
            lstm = keras.layers.LSTM(self.d_model // 2, return_sequences=True, name="lstm", **options)
            self.stacked.append(keras.layers.Bidirectional(lstm, name=f"layer{i}", **options))

    def build(self, inputs_shape: Any = None, **_: Any) -> None:
        self.build_tables()
        for i, layer in enumerate(self.stacked):
            layer.build((None, None, self.d_model if i else self.token_width))

    def call(self, inputs: Any, training: bool | None = None, dropout_key: Tensor | None = None) -> Tensor:
        inputs = self.checked(inputs)
        mask = self.mask_of(inputs)
        x: Any = self.embed_tokens(inputs, split(self.key_of_call(inputs["chars"], training, dropout_key), 4))
        for layer in self.stacked:
            x = layer(x, mask=mask)
        return with_mask(x, mask)
