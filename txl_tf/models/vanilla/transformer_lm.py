"""The vanilla language model of the paper's comparison: absolute positions, and normally no memory (section 3.1).

Everything else is as in `TransformerXLLM`: embedding, layers and softmax, fit and evaluation. What differs between the
results of the two comes from positions and memory.
"""

import keras
import tensorflow as tf

from txl_tf.config import NetworkConfig, TransformerLMConfig, at_least
from txl_tf.kernels.dropout import dropout
from txl_tf.kernels.dtypes import at_least_float32, wide_dtype
from txl_tf.layers.common.arguments import takes
from txl_tf.layers.common.ops import own_initializer
from txl_tf.layers.positions import inverse_frequencies, positional_embedding
from txl_tf.layers.transformer_xl.memory import NetworkMemory
from txl_tf.layers.vanilla.language_model_layer import TransformerLMLayer
from txl_tf.models.language_model import LanguageModel
from txl_tf.models.transformer_xl.network import TransformerXL
from txl_tf.models.vanilla.window import RereadWindow, WindowCache

# Arguments of `TransformerXL` that have no meaning here, and why.
REFUSED = {
    **dict.fromkeys(("clamp_len", "untie_r"), "is about distances, of which absolute positions have none"),
    "reset_token": "resets the memory within a segment, whose absolute positions would go on",
}


@keras.saving.register_keras_serializable("txl_tf")
class AbsoluteTransformer(TransformerXL):
    """`TransformerXL` with absolute positions: sinusoids of the places in the segment are added to the embeddings.

    The positions of a segment are `0 ... tgt_len - 1`. Its memory holds hidden states that carry the positions of their
    own segment: a key of the memory and one of the segment may have the same, and nothing tells which is older. That is
    what relative positions mend.

    Args: those of `TransformerXL`, without `clamp_len`, `untie_r` and `reset_token`, and
        n_position: rows of a learned table of positions, the most tokens of a segment then; 0 for sinusoids.
        `dropout` drops from the sum of embeddings and positions. Call arguments and returns: those of `TransformerXL`.

    Attributes:
        r_w_bias, r_r_bias: `None`; there are none.
        pos_table: learned positions `[n_position, d_model]`, or `None`.

    Reference:
        Dai et al. 2019, sections 3.1 and 3.3; Vaswani et al. 2017, section 3.5.
    """

    layer_class = TransformerLMLayer
    fixed_settings = {"n_position": "", **{name: f"it {reason}" for name, reason in REFUSED.items()}}

    def __init__(self, n_position=0, **arguments):
        for name, reason in REFUSED.items():
            if name in arguments:
                raise ValueError(f"{name} {reason}: leave it out")
        super().__init__(**arguments)
        at_least(0)("n_position", n_position)
        self.n_position = n_position

    def build_biases(self):
        if self.n_position:
            self.add_table("pos_table", (self.n_position, self.d_model), own_initializer(self.initializer))
        return None, None

    def positions(self, length, zero=0):
        """Rows of the positions `0 ... length - 1`: float `[1, length, d_model]`.

        Raises:
            ValueError: the learned table has fewer.
        """
        if self.n_position:
            if isinstance(length, int) and length > self.n_position:
                raise ValueError(f"a segment must have at most n_position={self.n_position} tokens, got {length}")
            return at_least_float32(tf.convert_to_tensor(self.pos_table)[None, :length])
        dtype = wide_dtype(self.compute_dtype)
        pos_seq = tf.range(tf.cast(length, dtype)) + tf.cast(zero, dtype)
        return positional_embedding(pos_seq, inverse_frequencies(self.d_model, dtype))

    def embed(self, tokens, mlen, dropout_keys, static_shapes, zero):
        """The sum of embeddings and positions, `[batch, tgt_len, d_model]`; the layers know nothing of positions."""
        if isinstance(mlen, NetworkMemory):
            return self.embedding(tokens, static_shapes=static_shapes) + mlen.positions(), None
        pos_emb = tf.cast(self.positions(keras.ops.shape(tokens)[1], zero), self.compute_dtype)
        embeddings = self.embedding(tokens, static_shapes=static_shapes)
        return dropout(embeddings + pos_emb, self.dropout, dropout_keys[0]), None

    def positions_of_layer(self, i, pos_emb):
        return ()

    def get_config(self):
        config = {name: value for name, value in super().get_config().items() if name not in REFUSED}
        return {**config, "n_position": self.n_position}


@keras.saving.register_keras_serializable("txl_tf")
class TransformerLM(LanguageModel):
    """Vanilla language model: `AbsoluteTransformer`, and the adaptive softmax that shares its embeddings.

    ```python
    lm = txl_tf.TransformerLM(n_token=256, n_layer=6, d_model=256, d_embed=256, n_head=4, d_head=64, d_inner=1024)
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10000))
    lm.fit(dataset)                     # batches (tokens, labels), int [batch, tgt_len], each segment by itself
    nll, _ = lm.score(tokens, labels)   # nats a token
    lm.generate(prompt, max_new_tokens=100)
    ```

    It is used as `TransformerXLLM` is. Without memory, `mems` is a list of empty tensors, and every segment is a text
    of its own: a token sees those before it in the segment. `sliding_window_nll` gives every token a full window.

    The weights exist from construction on.

    Args: those of `TransformerXLLM`, without `clamp_len`, `untie_r` and `reset_token`, and
        mem_len: positions of memory, normally 0. With more, the memory carries the positions of its own segment, which
            makes the comparison of the paper's ablation, but no good model.
        context_len: most tokens that `generate` has in view, at least 2; as many as the segments it is trained on is a
            good choice. Scores do not depend on it.
        pos_embed: "sin", sinusoids of the positions, or "learned", a table of `context_len` rows, which no segment may
            exceed.

    Call arguments and returns: those of `TransformerXLLM`.

    Raises:
        ValueError: an argument is out of its range; the message names it.

    Reference:
        Dai et al. 2019, section 3.1; Al-Rfou et al. 2018, without its auxiliary losses.
    """

    fixed_settings = {name: f"it {reason}" for name, reason in REFUSED.items()}
    copied_settings = {name: (f"network.{name}",) for name in NetworkConfig.names() if name not in REFUSED}

    @takes(TransformerLMConfig, required=["n_token"])
    def __init__(self, *, recompute=False, seed=None, **kwargs):
        names = [name for name in NetworkConfig.names() if name not in REFUSED]
        arguments = {name: getattr(self, name) for name in [*names, "recompute", "seed"]}
        arguments["n_position"] = self.context_len if self.pos_embed == "learned" else 0
        super().__init__(AbsoluteTransformer, arguments, self.proj_share_all_but_first, **kwargs)

    def get_config(self):
        config = super().get_config()
        del config["n_position"]  # follows from pos_embed
        return config

    def decoding_cache(self, static_shapes=False):
        """The cache that `generate` reads a text with: the window as keys and values, or as tokens."""
        if self.why_not_cached() is not None:
            return RereadWindow(self, static_shapes)
        return self.cached_decoding(static_shapes)

    def cached_decoding(self, static_shapes=False):
        """The cache of keys and values."""
        return WindowCache(self.network, self.context_len, static_shapes, self)
