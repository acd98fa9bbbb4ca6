"""The vanilla language model of the paper's comparison: absolute positions, and normally no memory (section 3.1).

Embedding, layers, softmax, training and evaluation are those of `TransformerXLLM`. So the results of the two models
differ only because of positions and memory.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import keras

from txl_tf.config import DecoderConfig, SoftmaxConfig, TransformerLMConfig
from txl_tf.language.language_model import LanguageModel
from txl_tf.nn.arguments import LayerOptions, takes, values_of
from txl_tf.nn.parts import checked_config
from txl_tf.nn.position_schemes import Sinusoids
from txl_tf.transformer_xl.network import TransformerXL

SCHEME_OF = {"sin": "sinusoids", "learned": "learned"}  # `pos_embed` -> `positions` of the network


@keras.saving.register_keras_serializable("txl_tf")
class AbsoluteTransformer(TransformerXL):
    """`TransformerXL` whose default is positions="sinusoids".

    It is the network of a `TransformerLM`. Files contain its weights under the name of this class.
    """

    def __init__(self, **arguments: Any) -> None:
        arguments.setdefault("positions", "sinusoids")
        super().__init__(**arguments)


@keras.saving.register_keras_serializable("txl_tf")
class TransformerLM(LanguageModel):
    """The vanilla language model: `TransformerXL` with absolute positions, and an adaptive softmax.

    ```python
    lm = txl_tf.TransformerLM(n_token=256, n_layer=6, d_model=256, d_embed=256, n_head=4, d_head=64, d_inner=1024)
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10000))
    lm.fit(dataset)                     # batches (tokens, labels), int [batch, tgt_len]; segments are independent
    nll, _ = lm.score(tokens, labels)   # nats a token
    lm.generate(prompt, max_new_tokens=100)
    ```

    It has the methods of `TransformerXLLM`. Without memory, `mems` is a list of empty tensors, and a token sees only
    the tokens before it in its segment. With `sliding_window_nll`, every token sees a full window, except at the
    beginning of the text.

    The constructor creates the weights.

    Args: those of `TransformerXLLM`, without `clamp_len`, `untie_r` and `reset_token`, and
        mem_len: positions of memory, normally 0. With more, the hidden states in the memory keep the positions of their
            own segment. The paper compares with such a model in its ablation, but it is not a good model.
        context_len: number of tokens that `generate` sees, at least 2. The length of the training segments is a good
            choice. Scores do not depend on it.
        pos_embed: "sin" for sinusoids, or "learned" for a table of `context_len` rows. No segment may be longer than
            this table.

    Call arguments and returns: those of `TransformerXLLM`.

    Raises:
        ParameterError: an argument is out of its range.

    Reference:
        Dai et al. 2019, section 3.1; Al-Rfou et al. 2018, without its auxiliary losses.
    """

    fixed_settings = {name: f"it {reason}" for name, reason in Sinusoids.refused.items()}
    copied_settings = {name: (f"network.{name}",) for name in DecoderConfig.names()}

    @takes(TransformerLMConfig)
    def __init__(
        self, *, n_token: int, n_layer: int, d_model: int, d_embed: int, n_head: int, d_head: int, d_inner: int,
        dropout: float = 0.1, dropatt: float = 0.0, mem_len: int = 0, same_length: bool = False,
        cutoffs: Sequence[int] = (), div_val: int = 1, proj_share_all_but_first: bool = False,
        tie_weight: bool = True, label_smoothing: float = 0.0, z_loss: float = 0.0,
        proj_same_dim: bool = True, init: Any = "normal",
        init_std: float = 0.02, proj_init_std: float = 0.01, init_range: float = 0.1, pos_embed: str = "sin",
        context_len: int = 512, layer_norm_epsilon: float = 1e-12, pre_lnorm: bool = False, activation: str = "relu",
        norm: str = "layer", lora_rank: int = 0, lora_alpha: float | None = None, recompute: bool = False,
        seed: int | None = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        arguments = values_of(self, [*DecoderConfig.names(), "recompute", "seed"])
        arguments["positions"] = SCHEME_OF[self.pos_embed]
        super().__init__(AbsoluteTransformer, arguments, **values_of(self, SoftmaxConfig.names()), **kwargs)

    def get_config(self) -> dict[str, Any]:
        refused = ["positions", *Sinusoids.refused]  # `pos_embed` stands for the positions
        config = {name: value for name, value in super().get_config().items() if name not in refused}
        return checked_config(self, config)
