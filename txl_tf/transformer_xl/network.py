"""The network: tokens and memory in, hidden states and new memory out (paper, sections 3.2 and 3.3).

`TransformerXL.forward` is the paper's model. `call` handles padding before and after it (`kernels/packing.py`). Loops
for XLA and recomputation are in `apply_layers.py`. Documents that reset the memory change the mask (`documents.py`).
"""

from collections.abc import Sequence
from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.config import NetworkConfig, at_least
from txl_tf.config.checks import as_int, keras_initializer
from txl_tf.equations import new_memory
from txl_tf.errors import ParameterError, UnsupportedError
from txl_tf.kernels.dropout import dropout, split
from txl_tf.kernels.packing import pack, unpack, unpack_pairs
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.nn.arguments import LayerOptions, takes, values_of
from txl_tf.nn.base import CheckedCalls, KerasHabits, watch_layers
from txl_tf.nn.checks import as_ids, check_layer, check_length, check_tensors, shown
from txl_tf.nn.dropping import Dropping
from txl_tf.nn.embedding import AdaptiveEmbedding
from txl_tf.nn.lora import freeze_others, low_rank_parts, thaw
from txl_tf.nn.masks import as_bool, as_bool_like, mask_of, with_mask
from txl_tf.nn.ops import for_many_weights
from txl_tf.nn.parts import (
    NotCacheable,
    accepts,
    checked_config,
    choosing,
    chosen_class,
    deciding_call,
    is_overridden,
    registered_classes,
)
from txl_tf.nn.position_schemes import Learned, Positions, Relative, checked_scheme
from txl_tf.nn.quantization import Unquantized
from txl_tf.nn.settings import FREE_SEED, FREE_SWITCH, OF_CLASS
from txl_tf.transformer_xl.absolute_layer import TransformerLMLayer
from txl_tf.transformer_xl.apply_layers import apply_layers
from txl_tf.transformer_xl.attention import create_mask
from txl_tf.transformer_xl.documents import Mask, document_mask
from txl_tf.transformer_xl.layer import TransformerXLLayer
from txl_tf.transformer_xl.memory import NetworkMemory
from txl_tf.transformer_xl.score_terms import terms_of

# Arguments that only decide how the initial weights are drawn. They have no effect after the network is made.
DRAWN_ONCE = ("init", "init_std", "proj_init_std", "init_range")


def cache_mems(hidden: Tensor, mems: Tensor, mem_len: int, lengths: Tensor | None = None) -> Any:
    """The memory for the next segment: the last `mem_len` positions of memory and segment, without gradient.

    Args:
        hidden: `[batch, tgt_len, d_model]`, the input of a layer for this segment.
        mems: `[batch, any, d_model]`, the memory of the layer for this segment.
        mem_len: the number of positions to keep; 0 keeps none.
        lengths: int `[batch]`, the number of positions in each row of `hidden` that count; padding follows them. With
            it, `mems` must have `mem_len` positions or more. `None`: all positions count.

    Returns:
        `[batch, min(any + tgt_len, mem_len), d_model]`.
    """
    if mem_len == 0:
        return hidden[:, :0]
    if lengths is not None:
        first = shape_of(mems)[1] + lengths - mem_len
        positions = first[:, None] + tf.range(mem_len)
        return tf.stop_gradient(tf.gather(tf.concat([mems, hidden], 1), positions, batch_dims=1))
    is_enough = hidden.shape[1] is not None and hidden.shape[1] >= mem_len
    new_mems = new_memory(None if is_enough else mems, hidden, mem_len)
    if (mems.shape[1] or 0) >= mem_len:
        new_mems.set_shape([None, mem_len, None])  # known even if tgt_len is not
    return new_mems


def refuse_own_mems(part: Any) -> None:
    """Raises ParameterError if a user has overridden `initial_mems` of a network or model whose documents end.

    The memory of a new document is zeros, so the document would not begin like a text.
    """
    if is_overridden(part, "initial_mems"):
        allowed = "left as it is with done or reset_token, which reset the memory to zeros"
        message = f"initial_mems of {type(part).__name__} must be {allowed}"
        raise ParameterError("initial_mems", part.initial_mems, allowed, message)


def unknown_zero(tokens: Tensor, static_shapes: bool) -> Any:
    """With static shapes, an int32 zero whose value XLA does not know when it compiles; else 0.

    If XLA knew the mask and the table of positions, it would write these megabytes into its program at every use.
    """
    if not static_shapes:
        return 0
    first = tokens[0, 0]  # an id, or a vector
    return tf.where(first < 0 if first.dtype.is_integer else tf.math.is_nan(first[0]), 1, 0)


@keras.saving.register_keras_serializable("txl_tf")
class TransformerXL(CheckedCalls, Unquantized, KerasHabits, Dropping, keras.Model):
    """Transformer-XL without its softmax, for language models and for other Keras models.

    ```python
    network = txl_tf.TransformerXL(
        n_token=256, n_layer=2, d_model=32, d_embed=32, n_head=4, d_head=8, d_inner=64, mem_len=4
    )
    hidden, mems = network(tf.constant([[5, 7, 2]]))  # [1, 3, 32]
    hidden, mems = network(tf.constant([[4, 9]]), mems)  # [1, 2, 32]
    ```

    Args:
        n_token: size of the vocabulary.
        n_layer: number of decoder layers.
        d_model: width of the hidden states, even.
        d_embed: width of the embeddings in the first cluster.
        n_head, d_head: number of attention heads and the width of each.
        d_inner: width inside the feed-forward nets.
        dropout: dropout rate of embeddings, position embeddings, attention output, feed-forward nets and final hidden
            states.
        dropatt: dropout rate of the attention probabilities.
        mem_len: number of positions in the memory from earlier segments; 0 for no memory.
        positions: the scheme of positions: "relative", as in the paper; "sinusoids" or "learned", which are absolute
            positions in the segment; "alibi" or "rotary"; or a name that was given to
            `txl_tf.layers.register_positions`. See `txl_tf/nn/position_schemes.py`.
        context_len: with learned positions, the maximum number of tokens in a segment. With learned positions or
            sinusoids, also the number of tokens that `generate` sees. Other positions accept only the default.
        same_length: whether every token attends to `mem_len + 1` positions, instead of to the whole memory and segment.
        clamp_len: with relative positions, greater distances are replaced by `clamp_len`. If it is 0 or -1, there is
            no limit.
        untie_r: with relative positions, whether every layer has its own u and v. If not, all layers share them.
        reset_token: id of the first token of a document. The memory is reset before it: the document gets the results
            that it would get at the beginning of a text, see `transformer_xl/documents.py`. `None`: no resets.
        layer_norm_epsilon: added to the variance in layer norm. The original uses 1e-12, PyTorch 1e-5.
        pre_lnorm: whether layers normalise the inputs of attention and of the feed-forward net, as `pre_lnorm` of the
            original's PyTorch program, instead of the sums after their residual connections. There is no norm after
            the last layer, as in that program.
        activation: activation of the feed-forward nets: "relu", "gelu" or "swiglu", see `txl_tf.layers.PositionwiseFF`.
        norm: "layer" for layer norm, "rms" for `txl_tf.layers.RMSNorm`.
        lora_rank, lora_alpha: low-rank updates of the layers' kernels, see `enable_lora`; 0 for none.
        cutoffs, div_val, proj_same_dim: clusters of the embedding, see `AdaptiveEmbedding`.
        init: "normal", with standard deviation `init_std` (`proj_init_std` for the projections of embedding and
            softmax), or "uniform" in `[-init_range, init_range]`. Or a Keras initializer for all these weights, as an
            object, its name (such as "he_normal") or its configuration. Each weight draws its own numbers: with a
            seed s, the weights have the seeds s, s + 1, ... in the order in which they are made.
        recompute: whether training keeps only every layer's input, and computes the rest again in the backward pass.
            It takes less memory and about a third more time, and gives the same gradients.
        seed: int from which dropout keys derive. `None` draws one.

    Call arguments:
        tokens: int `[batch, tgt_len]`, any `tgt_len`. Float tensors with whole numbers are accepted.
        mems: list of `n_layer` tensors `[batch, any, d_model]`, usually those that the call for the previous segment
            returned; or one tensor, `[n_layer, batch, any, d_model]`. `None`: `initial_mems`.
        padding_mask: bool or numbers 0 and 1, `[batch, tgt_len]`, true at tokens. Padding may be anywhere. `mems` must
            then have `mem_len` positions or more, as `initial_mems` has. Every row gets the hidden states, and the
            memory, that its tokens alone would get. Ids at padding have no effect, and the hidden states there are
            zeros. The returned hidden states carry the mask as their Keras mask.
        training: whether to use dropout. `None`: dropout is used if there is a `dropout_key`, see `txl_tf.nn.dropping`.
        dropout_key: int `[3]` that decides the dropout masks: two words of key, and the number of the first row of
            `tokens` in the global batch (0 if left out). Parts of a batch with the same key, each with the number of
            its first row, get the masks of the whole batch. `None` in training: the network draws a key.
        static_shapes: for TPUs and XLA, see `AdaptiveEmbedding`. The layers are then computed in a loop.
        inputs_embeds: float `[batch, tgt_len, d_model]`, given in place of `tokens`: `network.embedding(tokens)`, or
            features of any kind. The network applies dropout and absolute positions to them, as to its own embeddings.
            A mask that Keras passed on with it is the `padding_mask`.
        done: bool `[batch, tgt_len]`, true at the last token of a document or an episode. The tokens after it, also
            those of the next segment, get the results that they would get at the beginning of a text, see
            `transformer_xl/documents.py`. Absolute positions do not restart, so they do not accept it.
        output_hidden_states: whether to return the hidden states of all layers, too.

    Returns:
        `(hidden, new_mems)`: `[batch, tgt_len, d_model]`, and the memory for the next segment. With
        `output_hidden_states`, `(hidden, new_mems, hidden_states)`: a list of `n_layer + 1` tensors, the input of
        every layer, and `hidden`.

    Raises:
        ParameterError: an argument is outside its range, or a tensor has another shape.

    Reference:
        Dai et al. 2019; `transformer` of the original.
    """

    # The stored arguments, for type checkers.
    n_token: int
    n_layer: int
    d_model: int
    n_head: int
    d_head: int
    d_inner: int
    dropout: float
    dropatt: float
    mem_len: int
    same_length: bool
    clamp_len: int
    untie_r: bool
    reset_token: int | None
    cutoffs: Sequence[int]
    init: Any
    init_std: float
    proj_init_std: float
    init_range: float
    context_len: int
    pre_lnorm: bool
    activation: str
    norm: str
    lora_rank: int
    lora_alpha: float | None
    recompute: bool
    scheme: Any

    # A user's class must be a `TransformerXLLayer` if positions are relative, and else a `TransformerLMLayer`.
    layer_class: Any = TransformerXLLayer  # the default stands for the class that fits the positions
    restores_parts = True
    r_w_bias: Any = None  # only with relative positions
    r_r_bias: Any = None  # the same
    pos_table: Any = None  # only with learned positions
    free_settings = {"recompute": FREE_SWITCH, "seed": FREE_SEED}
    fixed_settings = {"layer_class": OF_CLASS, **dict.fromkeys(DRAWN_ONCE, "")}
    copied_settings = {
        name: (f"decoder_layers.{name}",) for name in ("dropout", "dropatt", "layer_norm_epsilon")
    }  # fmt: skip

    @takes(NetworkConfig)
    def __init__(
        self, *, n_token: int, n_layer: int, d_model: int, d_embed: int, n_head: int, d_head: int, d_inner: int,
        dropout: float = 0.1, dropatt: float = 0.0, mem_len: int = 0, same_length: bool = False,
        clamp_len: int = -1, untie_r: bool = False, reset_token: int | None = None,
        cutoffs: Sequence[int] = (), div_val: int = 1, proj_same_dim: bool = True, init: Any = "normal",
        init_std: float = 0.02, proj_init_std: float = 0.01, init_range: float = 0.1, positions: str = "relative",
        context_len: int = 512, layer_norm_epsilon: float = 1e-12, pre_lnorm: bool = False, activation: str = "relu",
        norm: str = "layer", lora_rank: int = 0, lora_alpha: float | None = None, recompute: bool = False,
        seed: int | None = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        self.scheme = checked_scheme(self.positions, self)
        self.supports_masking = True
        self.autocast = False  # float16 and bfloat16 cannot represent all ids exactly
        self.cutoffs = tuple(self.cutoffs)
        if self.reset_token is not None:
            self.check_setting("reset_token", self.reset_token)

        if not isinstance(self.init, str):
            self.init = keras_initializer(self.init)
        self.initializer = make_initializer(self.init, self.init_std, self.init_range)
        self.embedding = AdaptiveEmbedding(
            **values_of(self, ("n_token", "d_embed", "cutoffs", "div_val", "proj_same_dim")), d_proj=self.d_model,
            initializer=self.initializer,
            proj_initializer=self.projection_initializer(), dtype=self.dtype_policy, name="adaptive_embed",
        )  # fmt: skip
        names = ("d_model", "n_head", "d_head", "d_inner", "dropout", "dropatt", "layer_norm_epsilon")
        layer_arguments = values_of(self, names)
        variants = values_of(self, ("pre_lnorm", "activation", "norm"))
        # A user's layer need not have arguments for them.
        layer_arguments |= {name: value for name, value in variants.items() if value != getattr(NetworkConfig, name)}
        layer_arguments |= {"kernel_initializer": self.initializer, "seed": self.draw_key, "dtype": self.dtype_policy}
        default = self.layer_class
        if self.layer_class is TransformerXLLayer and not isinstance(self.scheme, Relative):
            default = TransformerLMLayer
        layer_class = chosen_class("layer_class", default)
        self.decoder_layers = [layer_class(**layer_arguments, name=f"layer_{i}") for i in range(self.n_layer)]
        for layer in self.decoder_layers:
            self.scheme.join(layer)
        self._check_classes()
        if self.pre_lnorm and self.norm == "layer" and self.scheme.turns and self.scheme.scores_positions:
            allowed = "a scheme that turns keys or adds scores, but not both, with pre_lnorm and norm='layer'"
            raise ParameterError("positions", self.positions, allowed)
        # Start the keys after the layers are made. The order of draws decides the initial weights for a given seed.
        self.start_keys(seed, always=True)

    def _check_classes(self) -> None:
        """Raises ParameterError if the layers, or their attention, do not accept the arguments of the scheme.

        Nothing is checked if a user's network or scheme passes other arguments.
        """
        of_layer = type(self.scheme).of_layer
        own_calls = any(is_overridden(self, name) for name in ("call", "forward", "enter"))
        if own_calls or of_layer not in (Positions.of_layer, Relative.of_layer):
            return
        distances = ("r", "r_w_bias", "r_r_bias") if of_layer is Relative.of_layer else ()
        layer_class = TransformerXLLayer if distances else TransformerLMLayer
        attention_class = layer_class.attention_class
        with_positions = f"with positions={self.positions!r}"
        for layer in self.decoder_layers:
            arguments = ("w", *distances, "attn_mask", "mems")
            if not accepts(layer, *arguments, dropout_key=None):
                allowed = f"a subclass of txl_tf.layers.{layer_class.__name__} {with_positions}"
                raise ParameterError("layer_class", type(layer).__name__, allowed)
            if deciding_call(layer) is not layer_class.call:
                continue  # it may call its attention with other arguments
            if not accepts(layer.rel_attn, **dict.fromkeys((*arguments, "content_mask", "dropout_key"))):
                allowed = f"a subclass of txl_tf.layers.{attention_class.__name__} {with_positions}"
                raise ParameterError("attention_class", type(layer.rel_attn).__name__, allowed)

    def get_config(self) -> dict[str, Any]:
        layer = self.decoder_layers[0]
        classes = registered_classes(layer_class=layer, attention_class=getattr(layer, "rel_attn", None))
        return checked_config(self, {**super().get_config(), **classes})

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        with choosing(config) as without_classes:
            return super().from_config(without_classes)

    def check_setting(self, name: str, value: Any) -> Any:
        """Checks a new value of a setting, and returns the value to store. See `Settings.check_setting`.

        Raises:
            ParameterError: also if the scheme of positions does not accept the value.
        """
        self.scheme.check_refused(name, value)
        if name == "reset_token" and value is not None:
            at_least(0, self.n_token - 1)(name, value)
        return super().check_setting(name, value)

    def build(self, tokens_shape: Any = None, **_: Any) -> None:
        self.scheme.make_weights(self)
        self.embedding.build((None, None))
        for layer in self.decoder_layers:
            layer.build((None, None, self.d_model))
        if self.lora_rank:
            self._add_lora(self.lora_rank, self.lora_alpha)

    def enable_lora(
        self, rank: int, lora_alpha: float | None = None, a_initializer: Any = "he_uniform",
        b_initializer: Any = "zeros",
    ) -> None:  # fmt: skip
        """Adds low-rank updates to the kernels of attention and of the feed-forward nets. Only they are trained then.

        Args: see `txl_tf.layers.PositionwiseFF.enable_lora`.

        Raises:
            ParameterError: an argument is out of its range, no layer has such kernels, or there are updates already.
        """
        self.build_at_once()
        self._add_lora(rank, lora_alpha, a_initializer=a_initializer, b_initializer=b_initializer)
        self.store("lora_rank", as_int(rank))
        self.store("lora_alpha", as_int(lora_alpha))

    def _add_lora(self, rank: int, lora_alpha: float | None, **initializers: Any) -> None:
        """Adds the updates to the layers, and freezes all other weights. Raises ParameterError, see `enable_lora`."""
        parts = low_rank_parts(self.decoder_layers)
        if not parts:
            allowed = "0 for layers without RelMultiHeadAttn, MultiHeadAttn and PositionwiseFF"
            raise ParameterError("lora_rank", rank, allowed)
        for part in parts:
            part.enable_lora(rank, lora_alpha, **initializers)
        freeze_others(self)

    def merge_lora(self) -> None:
        """Adds the low-rank updates to the kernels, and makes trainable again what `enable_lora` has frozen.

        The kernels become trainable even if they were frozen before `enable_lora`.
        """
        for part in low_rank_parts(self.decoder_layers):
            part.merge_lora()
        thaw(self)
        self.store("lora_rank", 0)
        self.store("lora_alpha", None)

    def build_at_once(self) -> None:
        """Makes the weights, as the first call does, if they do not exist yet."""
        if not self.built:
            self.build((None, None))

    def summary(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.summary`, after the weights are made."""
        self.build_at_once()
        return super().summary(*args, **kwargs)

    def projection_initializer(self) -> Any:
        """The initializer for the projections of the embedding and of the softmax, see the argument `init`."""
        if self.init in ("normal", "uniform"):
            return make_initializer(self.init, self.proj_init_std, self.init_range)
        return self.initializer

    def initial_mems(self, batch_size: Size) -> list[Any]:
        """The memory before the first segment: `n_layer` tensors of zeros, `[batch_size, mem_len, d_model]`.

        Tokens attend to these zeros, as in the original. If you override it, keys and values are not cached, and `done`
        and `reset_token`, which reset the memory to zeros, are errors.
        """
        check_length("batch_size", batch_size)
        shape = [batch_size, self.mem_len, self.d_model]
        return [tf.zeros(shape, self.compute_dtype) for _ in range(self.n_layer)]

    def call(
        self, tokens: Tensor | None = None, mems: Any = None, padding_mask: Tensor | None = None,
        training: bool | None = None, dropout_key: Tensor | None = None, static_shapes: bool = False,
        inputs_embeds: Tensor | None = None, done: Tensor | None = None, output_hidden_states: bool = False,
    ) -> Any:  # fmt: skip
        if isinstance(mems, NetworkMemory):
            options = {"inputs_embeds": inputs_embeds, "done": done, "output_hidden_states": output_hidden_states}
            for name, value in options.items():
                if value is not None and value is not False:
                    raise NotCacheable(f"{name} is not for a cached memory")
            return self.forward(as_ids("tokens", tokens), mems, static_shapes=static_shapes)
        inputs: Any = self._inputs_of(tokens, inputs_embeds, done)
        mems = self.memory_of_call(inputs, mems)
        mask: Any = mask_of(inputs_embeds) if padding_mask is None else padding_mask
        lengths: Any = None
        if mask is not None:  # move the padding of every row after its tokens, and replace it by zeros
            mask = self.check_padding(mask, inputs, mems[0])
            is_token = mask[..., None] if len(inputs.shape) == 3 else mask
            _, inputs = pack(mask, tf.where(is_token, inputs, tf.zeros([], inputs.dtype)))
            lengths = tf.reduce_sum(tf.cast(mask, tf.int32), 1)
        done = self._done_of(done, inputs, mask)
        dropout_key = self.key_of_call(inputs, training, dropout_key)
        recompute = bool(training) and self.recompute
        hidden, *others = self.forward(
            inputs, mems, dropout_key, lengths, static_shapes, recompute, done, output_hidden_states
        )
        if mask is not None:
            hidden = with_mask(unpack(mask, hidden), mask)
        if not output_hidden_states:
            return hidden, *others
        new_mems, inputs_of_layers = others
        if mask is not None:
            inputs_of_layers = [unpack(mask, x) for x in inputs_of_layers]
        return hidden, new_mems, [*inputs_of_layers, hidden]

    def _inputs_of(self, tokens: Any, inputs_embeds: Any, done: Any) -> Any:
        """Checks the inputs of a call. Returns `tokens` as int32, or `inputs_embeds` in the compute dtype."""
        if (tokens is None) == (inputs_embeds is None):
            got = "neither" if tokens is None else "both"
            message = f"inputs_embeds must be given in place of tokens, got {got}"
            raise ParameterError("inputs_embeds", inputs_embeds, "given in place of tokens", message)
        if inputs_embeds is None:
            tokens = as_ids("tokens", tokens, 2)
            check_tensors({}, tokens=(tokens, "int batch tgt_len"))
            return tokens
        if self.reset_token is not None and done is None:
            allowed = f"given with done, because reset_token={self.reset_token} is the id of a token"
            raise ParameterError("inputs_embeds", inputs_embeds, allowed, f"inputs_embeds must be {allowed}")
        check_tensors({"d_model": self.d_model}, inputs_embeds=(inputs_embeds, "float batch tgt_len d_model"))
        return tf.cast(inputs_embeds, self.compute_dtype)

    def _done_of(self, done: Any, tokens: Tensor, padding_mask: Tensor | None) -> Any:
        """`done` of a call as bool, packed like `tokens`; or `None` if it is not given.

        Raises:
            ParameterError: `done` has another shape than the tokens, or the positions are absolute.
        """
        if done is None:
            return None
        reason = self.scheme.refused.get("reset_token")
        if reason is not None:
            message = f"done {reason}: leave it out with positions={self.scheme.known_as!r}"
            raise ParameterError("done", done, f"left out with positions={self.scheme.known_as!r}", message)
        done = as_bool_like("done", done, tokens)
        return done if padding_mask is None else pack(padding_mask, done)[1]

    def forward(
        self, tokens: Tensor, mems: Any, dropout_key: Tensor | None = None, lengths: Tensor | None = None,
        static_shapes: bool = False, recompute: bool = False, done: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> Any:  # fmt: skip
        """The paper's model, for tokens and memory that are checked:

            h = drop(E[x])    R = drop(sinusoids of the distances)
            h' = layer(h, R, u, v, mask, mem)    for every layer
            new mem = the last mem_len of [mem, h]

        Args:
            tokens: int `[B, T]`; or float `[B, T, E]`, their embeddings.
            mems: list of `n_layer` tensors `[B, M, E]`; or a `NetworkMemory` with cached keys and values.
            dropout_key, static_shapes: as in the call.
            lengths: int32 `[B]`, the number of tokens in each row; padding follows them. `None`: T.
            recompute: see `apply_layers`.
            done: bool `[B, T]`, as in the call; or `None`.
            output_hidden_states: whether to return the inputs of all layers, too.

        Returns:
            `(hidden, new_mems)`, as the call, and the inputs of the layers, a list, if they were requested. For a
            `NetworkMemory`, `(hidden, state)` after the segment.
        """
        if isinstance(mems, NetworkMemory):
            # Keys and values are cached: no dropout, no mask.
            hidden, layers, _ = self.enter(tokens, mems, static_shapes=static_shapes)
            for layer_memory in layers:
                hidden = layer_memory.call_layer(hidden)
            return hidden, mems.finish()
        embed_key, pos_key, out_key, *layer_keys = split(dropout_key, 3 + self.n_layer)
        options = {} if done is None else {"done": done}  # a user's `enter` need not take it
        hidden, arguments, mask = self.enter(tokens, mems, (embed_key, pos_key), lengths, static_shapes, **options)
        hidden, inputs = apply_layers(
            self.decoder_layers, hidden, arguments, layer_keys, as_loop=static_shapes, recompute=recompute
        )
        new_mems = [cache_mems(h, mem, self.mem_len, lengths) for h, mem in zip(inputs, mems, strict=True)]
        hidden = dropout(hidden, self.dropout, out_key)
        new_mems = mask.forget(new_mems, lengths)
        return (hidden, new_mems, inputs) if output_hidden_states else (hidden, new_mems)

    def enter(
        self, tokens: Tensor, mems: Any, dropout_keys: Any = (None, None), lengths: Tensor | None = None,
        static_shapes: bool = False, done: Tensor | None = None,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """The inputs of the layers. For the arguments, see `forward`.

        Returns:
            `(hidden, arguments, mask)`: `[B, T, E]`; a tuple with the other arguments of the call for every layer; and
            the `Mask`. For a `NetworkMemory`, `arguments` is its `layers`, and `mask` is `None`.
        """
        if isinstance(mems, NetworkMemory):
            hidden, positions = self.embed(tokens, mems, dropout_keys, static_shapes, 0)
            if positions is not None and positions is not mems:  # `==` would compare the elements of tensors
                raise NotCacheable(f"embed of {type(self).__name__} returns positions of its own")
            return hidden, mems.layers, None
        mlen = shape_of(mems[0])[1]
        are_ids = tf.as_dtype(tokens.dtype).is_integer
        zero = unknown_zero(tokens, static_shapes)
        if are_ids:
            hidden, pos_emb = self.embed(tokens, mlen, dropout_keys, static_shapes, zero)
        else:
            hidden, pos_emb = self.scheme.enter(self, tokens, mlen, dropout_keys, zero)
        mask = Mask(create_mask(shape_of(tokens)[1], mlen, self.same_length, zero))
        if self.reset_token is not None or done is not None:
            refuse_own_mems(self)
            reset_token = self.reset_token if are_ids else None
            mask = document_mask(mask.attn_mask, tokens, reset_token, self.same_length, lengths, done)
        arguments = [
            (*self.scheme.of_layer(self, i, pos_emb), *mask.layer_arguments(mem)) for i, mem in enumerate(mems)
        ]
        return hidden, arguments, mask

    def embed(
        self, tokens: Tensor, mlen: Size | NetworkMemory, dropout_keys: Any, static_shapes: bool, zero: Size
    ) -> tuple[Any, Any]:
        """The embeddings of the tokens, with absolute positions and dropout.

        Args:
            tokens: int `[B, T]`.
            mlen: M; or a `NetworkMemory`, which knows the positions of the tokens. With it, there is no dropout.
            dropout_keys, zero: see `Positions.enter`.
            static_shapes: as in the call.

        Returns:
            `(hidden, shared)`, see `Positions.enter`. For a `NetworkMemory`, `shared` is the memory.

        Raises:
            NotCacheable: there is a `NetworkMemory`, and the scheme is a user's that overrides `enter` or `of_layer`.
        """
        embeddings = self.embedding(tokens, static_shapes=static_shapes)
        if isinstance(mlen, NetworkMemory):
            if self.scheme.has_own_entrance:
                raise NotCacheable(f"positions={self.scheme.known_as!r} has its own enter or of_layer")
            added = mlen.added()
            return embeddings if added is None else embeddings + added, mlen
        return self.scheme.enter(self, embeddings, mlen, dropout_keys, zero)

    def position_table(self, length: Size, zero: Size = 0) -> Any:
        """The table of the scheme: rows for `length` distances, farthest first, or for `length` positions in a segment.

        A subclass may override it.

        Returns:
            `[1, length, d_model]`, float32, or float64 if the network computes in it.
        """
        return type(self).positions(self, length, zero)  # `self.positions` is the name of the scheme

    def positions(self, length: Size, zero: Size = 0) -> Any:
        """The name of `position_table` before 0.1.0. An override of it in a subclass still works."""
        return self.scheme.table(self, length, zero)

    def biases(self, i: int) -> tuple[Any, ...]:
        """`(r_w_bias, r_r_bias)` of layer i, the paper's u and v: `[n_head, d_head]` each."""
        # Convert them to tensors, because `gradients.recompute` does not accept variables.
        return tuple(tf.convert_to_tensor(bias[i] if self.untie_r else bias) for bias in (self.r_w_bias, self.r_r_bias))

    def check_segment(self, length: int | None) -> None:
        """Raises ParameterError if a segment of a known length is longer than the library's table of positions."""
        cls = type(self)
        own_table = (cls.position_table, cls.positions) != (TransformerXL.position_table, TransformerXL.positions)
        if length is None or own_table or not isinstance(self.scheme, Learned):
            return
        if not self.scheme.overrides("enter", "table", base=Learned):
            self.scheme.checked_segment(self, length)

    def memory_of_call(self, tokens: Tensor, mems: Any) -> list[Any]:
        """Returns the memory of a call as a list with one tensor per layer, in the compute dtype.

        If `mems` is `None`, it is `initial_mems`.

        Raises:
            ParameterError: `mems` is not a memory of the network's layers, or there are too many tokens, see
                `check_segment`. A graph that was traced for unknown lengths could only check them when it runs.
        """
        self.check_segment(tokens.shape[1])
        if mems is None:
            return self.initial_mems(shape_of(tokens)[0])
        memories: Any = mems
        if not isinstance(mems, (list, tuple)) and tf.TensorShape(getattr(mems, "shape", [])).rank == 4:
            is_whole = tf.TensorShape(mems.shape)[0] in (None, self.n_layer)
            memories = tf.unstack(tf.convert_to_tensor(mems), self.n_layer) if is_whole else []
        is_list = isinstance(memories, (list, tuple)) and len(memories) == self.n_layer
        if not is_list or not all(hasattr(mem, "shape") for mem in memories):
            got = ", ".join(map(shown, mems)) or "an empty list" if isinstance(mems, (list, tuple)) else shown(mems)
            one = f"[n_layer={self.n_layer}, batch, mem_len, d_model={self.d_model}]"
            allowed = f"a list of n_layer={self.n_layer} tensors, or one tensor {one}"
            raise ParameterError("mems", mems, allowed, f"mems must be {allowed}, got {got}")
        sizes: dict[str, Any] = {"batch": tokens.shape[0], "d_model": self.d_model}
        for i, mem in enumerate(memories):
            check_tensors(sizes, **{f"mems[{i}]": (mem, "float batch mem_len d_model")})
        return [tf.cast(mem, self.compute_dtype) for mem in memories]

    def check_padding(self, padding_mask: Any, tokens: Tensor, mem: Tensor) -> Any:
        """`padding_mask` as bool. Raises ParameterError if it does not fit tokens and memory."""
        padding_mask = as_bool_like("padding_mask", padding_mask, tokens)
        allowed = f"memories of mem_len={self.mem_len} positions or more, as initial_mems makes them"
        message = f"with a padding_mask, mems must be {allowed}, got"
        length = shape_of(mem)[1]
        if not isinstance(length, int):  # the graph checks it when it runs
            with tf.control_dependencies([tf.debugging.Assert(length >= self.mem_len, [message, length])]):
                return tf.identity(padding_mask)
        if length < self.mem_len:
            raise ParameterError("mems", mem, allowed, f"{message} {shown(mem)}")
        return padding_mask

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        given = self.named_shapes(shapes, named)
        tokens = given["inputs_embeds"] if given["tokens"] is None else given["tokens"]
        batch, length = tokens[:2]
        new_mem_len = self.mem_len if given["mems"] is None else self._new_mem_len(given["mems"][0][1], length)
        hidden = (batch, length, self.d_model)
        mems = [(batch, new_mem_len, self.d_model)] * self.n_layer
        return (hidden, mems, [hidden] * (self.n_layer + 1)) if given["output_hidden_states"] else (hidden, mems)

    def _new_mem_len(self, mlen: int | None, length: int | None) -> int | None:
        """The length of the memory that `cache_mems` returns; `None` if it is not known."""
        if self.mem_len <= max(mlen or 0, length or 0):
            return self.mem_len
        return None if mlen is None or length is None else min(mlen + length, self.mem_len)

    def attention_probs(
        self, tokens: Tensor, mems: Any = None, layer: int = 0, padding_mask: Tensor | None = None
    ) -> Any:
        """The attention probabilities of one layer, without dropout.

        Args:
            tokens, mems, padding_mask: as in the call.
            layer: number of the layer, from 0 on. A negative one counts from the last layer.

        Returns:
            `[n_head, batch, tgt_len, mem_len + tgt_len]`. The keys are the positions of `mems`, then those of the
            segment. For every query, the sum over the keys is 1. With a `padding_mask`, every row of the batch gets the
            probabilities that it would get without its padding. They are zeros where the query or the key is padding.
            The sum over the keys is then 1 only for queries that are not padding.
        """
        self.build_at_once()
        number = check_layer(layer, self.n_layer)
        record, padding_mask, _ = self._watch(tokens, mems, padding_mask)
        return unpack_pairs(padding_mask, record.probs[number])

    def attention_terms(
        self, tokens: Tensor, mems: Any = None, layer: int = 0, padding_mask: Tensor | None = None
    ) -> tuple[Any, ...]:
        """The four terms of the attention scores of one layer, see `txl_tf.layers.score_terms`.

        Args: as in `attention_probs`.

        Returns:
            `(a, b, c, d)`, each with the shape of the probabilities.

        Raises:
            ParameterError: the positions are not relative, so the scores have other terms.
        """
        self.build_at_once()
        if self.r_w_bias is None:
            message = (
                f"positions={self.scheme.known_as!r} has no terms u.k and v.r in its scores: only 'relative' has them"
            )
            raise ParameterError("positions", self.scheme.known_as, ["relative"], message)
        number = check_layer(layer, self.n_layer)
        record, padding_mask, _ = self._watch(tokens, mems, padding_mask)
        u, v = (tf.cast(bias, self.compute_dtype) for bias in self.biases(number))
        return tuple(unpack_pairs(padding_mask, term) for term in terms_of(record, u, v, number))

    def attention(self, tokens: Tensor, mems: Any = None, padding_mask: Tensor | None = None) -> tuple[Any, Any]:
        """`attention_probs` of all layers in one pass, and the memory for the next segment.

        Args: as in the call.

        Returns:
            `(probs, new_mems)`: `[n_layer, n_head, batch, tgt_len, mem_len + tgt_len]`, and the memory for the next
            segment.
        """
        self.build_at_once()
        record, padding_mask, new_mems = self._watch(tokens, mems, padding_mask)
        return unpack_pairs(padding_mask, tf.stack(record.probs)), new_mems

    def _watch(self, tokens: Tensor, mems: Any, padding_mask: Tensor | None) -> tuple[Any, Any, Any]:
        """Calls the network and records what its attentions compute.

        Returns:
            `(record, padding_mask, new_mems)`: an `AttentionRecord` whose rows are packed, the mask as bool or `None`,
            and the memory for the next segment.
        """
        options = {}
        if padding_mask is not None:
            padding_mask = options["padding_mask"] = as_bool("padding_mask", padding_mask)
        tokens = as_ids("tokens", tokens)
        record, (_, new_mems) = watch_layers(self, "layer_class", self.decoder_layers, tokens, mems, **options)
        return record, padding_mask, new_mems

    @property
    def _default_save_signature(self) -> Any:
        """The signature for `tf.saved_model.save(network, folder)`: `hidden`, computed with `initial_mems`."""
        tokens = tf.TensorSpec([None, None], tf.int32, "tokens")
        return tf.function(lambda tokens: {"hidden": self(tokens)[0]}, autograph=False, input_signature=[tokens])

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedError, which says what to do instead."""
        instead = "keras.Model(tokens, network(tokens)[0]).export(path)"
        message = (
            "export is not supported for a network with memory. Use instead, with tokens = keras.Input([None], "
            f"dtype='int32'): {instead}"
        )
        raise UnsupportedError("export", self, instead, message)


def make_initializer(init: Any, init_std: float, init_range: float) -> Any:
    """The initializer for the arguments `init`, `init_std` and `init_range` of a network."""
    if init == "uniform":
        return keras.initializers.RandomUniform(-init_range, init_range)
    if init == "normal":
        return keras.initializers.RandomNormal(stddev=init_std)
    return for_many_weights(keras_initializer(init))
