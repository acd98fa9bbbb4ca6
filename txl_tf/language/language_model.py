"""The language model: the network, its softmax, and memory carried through `fit` and `evaluate`."""

import functools
from collections.abc import Sequence
from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.config import ModelConfig, NetworkConfig
from txl_tf.data.text.checked_batches import IGNORED, check_weights, check_weights_fit, weights_of_labels
from txl_tf.errors import FixedAttributeError, ParameterError
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.language import generation
from txl_tf.language.sampling import check_integer, uniform_draws
from txl_tf.language.window import RereadWindow, WindowCache
from txl_tf.nn.adaptive import AdaptiveSoftmax
from txl_tf.nn.arguments import LayerOptions, arguments_of, takes, values_of
from txl_tf.nn.base import OutputSpecs
from txl_tf.nn.embedding import check_ids
from txl_tf.nn.parts import (
    checked_config,
    choosing,
    chosen_class,
    is_library,
    registered_classes,
    why_not_cached,
)
from txl_tf.nn.settings import FREE_SEED, FREE_SWITCH, Settings, compiled_method
from txl_tf.schema import keywords_of, takes_keyword
from txl_tf.training.memory_model import OF_COMPILE, MemoryModel
from txl_tf.transformer_xl.cache import (
    cached_forward,
    initial_state,
    position_keys,
    precompute,
    whole_segments,
)
from txl_tf.transformer_xl.decoding_cache import HiddenStateCache, MemoryCache
from txl_tf.transformer_xl.first_segment import first_segment
from txl_tf.transformer_xl.inference import weights_with, writable_copy
from txl_tf.transformer_xl.network import DRAWN_ONCE, TransformerXL

_NO_PREDICT = (
    "{} would neither take nor return the memory, use instead: lm.log_probs(tokens, mems), "
    "lm.score(tokens, labels, mems) or lm.generate(prompt, max_new_tokens)"
)


class LanguageModel(Settings, OutputSpecs, MemoryModel):
    """Base of language models: a network, and the adaptive softmax that shares its embeddings.

    A subclass says which network, and with which arguments.

    Args:
        network_class: `TransformerXL`, or a subclass of it.
        arguments: arguments of the network, without dtype and name.
        proj_share_all_but_first: see `AdaptiveSoftmax`.
        **kwargs: of `keras.Model`.
    """

    free_settings = {"recompute": FREE_SWITCH, "seed": FREE_SEED}
    fixed_settings = {**dict.fromkeys(DRAWN_ONCE, ""), **dict.fromkeys(OF_COMPILE, "give it to compile()")}
    copied_settings = {"recompute": ("network.recompute",), "seed": ("network.seed",)}

    def __init__(self, network_class, arguments, proj_share_all_but_first, **kwargs):
        super().__init__(**kwargs)
        self.proj_share_all_but_first = proj_share_all_but_first
        network_class = chosen_class("network_class", network_class)
        softmax_class = chosen_class("softmax_class", AdaptiveSoftmax)
        self.network = network = network_class(**arguments, dtype=self.dtype_policy, name="transformer")
        self.seed, self.init = network.seed, network.init
        self.softmax = softmax_class(
            **values_of(network, "n_token d_embed cutoffs div_val proj_same_dim"), d_proj=network.d_model,
            proj_share_all_but_first=proj_share_all_but_first,
            proj_initializer=network.projection_initializer(), dtype=self.dtype_policy, name="adaptive_softmax",
        )  # fmt: skip
        self.build_at_once((None, None))

    def build(self, tokens_shape=None):
        if not self.network.built:
            self.network.build_at_once()
            self.softmax.build((None, None, self.network.d_model))

    def check_setting(self, name, value):
        if name == "mem_len" and self.running_method:
            message = (
                f"mem_len cannot change to {value} while {self.running_method} runs, whose memory has {self.mem_len}"
            )
            raise FixedAttributeError(name, value, "set before or after it", message)
        value = super().check_setting(name, value)
        return self.network.check_setting(name, value) if hasattr(self.network, name) else value

    def settings_changed(self, names):
        super().settings_changed(names)
        if "mem_len" in names:
            self.reset_memory()

    def get_config(self):
        classes = registered_classes(network_class=self.network, softmax_class=self.softmax)
        config = {**arguments_of(self), **self.network.get_config(), **super().get_config(), **classes}
        return checked_config(self, config)

    @classmethod
    def from_config(cls, config):
        with choosing(config) as others:
            return super().from_config(others)

    # ------------------------------------------------------------------------------------------------- inference

    def call(self, tokens, mems=None):
        hidden, new_mems = self.network(tokens, mems=mems)
        return self.softmax(hidden, embedding=self.network.embedding), new_mems

    def compute_output_shape(self, *shapes, **named):
        hidden_shape, mems_shapes = self.network.compute_output_shape(**self.named_shapes(shapes, named))
        return (*hidden_shape[:-1], self.network.n_token), mems_shapes

    def initial_mems(self, batch_size):
        """The memory before the first segment: list of `n_layer` zeros `[batch_size, mem_len, d_model]`."""
        return self.network.initial_mems(batch_size)

    def score(self, tokens, labels, mems=None, sample_weight=None):
        """Negative log-likelihood of every label, in place.

        Args:
            tokens: int `[batch, tgt_len]`.
            labels: int `[batch, tgt_len]`, the tokens shifted by one. A label of -100 does not count: its nll is 0.
            mems: list of `n_layer` tensors `[batch, any, d_model]`, or one tensor of them, `[n_layer, batch, any,
                d_model]`; `None` for `initial_mems`.
            sample_weight: weights of the labels, `[batch, tgt_len]`, or of the rows, `[batch]`, by which their nll is
                multiplied; `None` for 1. The sum of the result over the sum of the weights is what `evaluate` reports.

        Returns:
            `(nll, new_mems)`: float32 (float64 if the dtype is) `[batch, tgt_len]`, nats, and the memory for the next
            segment, which weights do not change.

        Raises:
            ValueError: shapes that do not belong together; in eager execution alone, an id outside the vocabulary, or
                a weight that is negative or not finite.
        """
        tokens, labels = self._check_ids("tokens", tokens), self._check_ids("labels", labels)
        if tokens.shape != labels.shape:
            raise ValueError(f"labels must have the shape of tokens, {tokens.shape}, got {labels.shape}")
        mems = self._check_mems(tokens, mems)
        if tf.executing_eagerly() and check_weights(sample_weight, labels.numpy()) is None:
            return self._score(tokens, labels, mems)
        if sample_weight is not None:
            sample_weight = tf.convert_to_tensor(sample_weight)
            check_weights_fit(sample_weight, labels)
        return self._weighted_score(tokens, labels, mems, weights_of_labels(sample_weight, labels))

    def log_probs(self, tokens, mems=None):
        """Log-probability of every word of the vocabulary as the next token. Arguments and errors: see `score`.

        Returns:
            `(log_probs, new_mems)`: float32 (float64 if the dtype is) `[batch, tgt_len, n_token]` in vocabulary order,
            whose exponentials sum to 1 over the whole vocabulary, and the memory for the next segment.
        """
        tokens = self._check_ids("tokens", tokens)
        return self._log_probs(tokens, self._check_mems(tokens, mems))

    def alternatives(self, tokens, number, mems=None):
        """The likeliest next tokens after every token.

        Args:
            tokens, mems: see `score`.
            number: how many, from 1 to `n_token`.

        Returns:
            `(ids, log_probs, new_mems)`: int32 and float32 (float64 if the dtype is) `[batch, tgt_len, number]`, the
            likeliest first; and the memory for the next segment.

        Raises:
            ValueError: as `score`, or `number` is out of its range.
        """
        tokens = self._check_ids("tokens", tokens)
        check_integer("number", number, 1, self.network.n_token)
        return self._alternatives(tokens, tf.constant(number), self._check_mems(tokens, mems))

    def attention(self, tokens, mems=None, padding_mask=None):
        """Where every layer and head looks while it reads a segment. Errors: see `score`.

        Args:
            tokens, mems: see `score`.
            padding_mask: bool `[batch, tgt_len]`, true at tokens, wherever they are; `None`: there is no padding. The
                ids at padding may be anything. `mems` must hold `mem_len` positions or more.

        Returns:
            `(probs, new_mems)`: float32 (float64 if the dtype is) `[n_layer, n_head, batch, tgt_len, keys]`, keys being
            the positions of `mems` and then those of the segment; they sum to 1 over the keys. With a `padding_mask`,
            every row of the batch gets what its tokens alone would get; there are zeros where query or key is padding.
            And the memory for the next segment.
        """
        if padding_mask is not None:
            tokens = tf.convert_to_tensor(tokens)
            mems = self._check_mems(tokens, mems)
            padding_mask = self.network.check_padding(padding_mask, tokens, mems[0])
            tokens = tf.where(padding_mask, tokens, 0)
        tokens = self._check_ids("tokens", tokens)
        return self._attention(tokens, self._check_mems(tokens, mems), padding_mask)

    generate = generation.generate

    @compiled_method(autograph=False)
    def _generate_tokens(self, number, static_shapes, **arguments):
        """`generate_tokens`; with static shapes on every replica, where a TPU has its weights: all find one text."""
        write = functools.partial(generation.generate_tokens, self, number=number, static_shapes=static_shapes)
        if not static_shapes:
            return write(**arguments)
        strategy = self.distribute_strategy
        texts = strategy.run(write, kwargs=arguments)
        return tf.nest.map_structure(lambda found: strategy.experimental_local_results(found)[0], texts)

    @compiled_method(autograph=False)
    def _uniform_draws(self, seeds, n_tokens):
        return uniform_draws(seeds, 0, n_tokens)

    def predict(self, *args, **kwargs):
        raise NotImplementedError(_NO_PREDICT.format("predict"))

    def predict_on_batch(self, *args, **kwargs):
        raise NotImplementedError(_NO_PREDICT.format("predict_on_batch"))

    def export(self, *args, **kwargs):
        raise NotImplementedError(
            "export would know neither texts nor memory, use instead: txl_tf.export_saved_model(lm, directory, vocab)"
        )

    @property
    def _default_save_signature(self):
        """What `tf.saved_model.save(lm, folder)` serves: `log_probs` of texts, from their beginning on."""
        tokens = tf.TensorSpec([None, None], tf.int32, "tokens")
        return tf.function(lambda tokens: {"log_probs": self(tokens)[0]}, autograph=False, input_signature=[tokens])

    def segment_nll(self, tokens, labels, mems, *, static_shapes=False, bin_capacities=None, **training):
        """The nll of a segment, as `fit` and `evaluate` use it.

        Args:
            tokens, labels: int `[batch, tgt_len]`, not checked.
            mems: list of `n_layer` tensors `[batch, any, d_model]`.
            static_shapes, bin_capacities: see `compile`.
            **training: `training` and `dropout_key` of the network.

        Returns:
            `(nll, kept, new_mems)`: `[batch, tgt_len]`, nats, as of `score`; bool `[batch, tgt_len]`, which labels
            count, or `None` where all do; and the memory for the next segment.
        """
        outputs, new_mems = self.outputs(tokens, mems, static_shapes=static_shapes, **training)
        return *self._nll(outputs, labels, static_shapes, bin_capacities), new_mems

    def outputs(self, tokens, mems=None, *, static_shapes=False, **options):
        """What every method computes its results from: hidden states, or log-probabilities of an own `call`.

        Args:
            tokens: int `[batch, tgt_len]`.
            mems: list of `n_layer` tensors `[batch, any, d_model]`; or a `NetworkMemory`, in inference.
            static_shapes: see `segment_nll`.
            **options: other arguments of the network's call, such as `training` and `padding_mask`.

        Returns:
            `(outputs, new_mems)`: `[batch, tgt_len, d_model]`, or `[batch, tgt_len, n_token]` where `call` is not that
            of this library.
        """
        model = self if self.has_own_call else self.network
        options = {**options, "static_shapes": True} if static_shapes else options
        known = {name: value for name, value in options.items() if takes_keyword(model.call, name)}
        if "dropout_key" not in keywords_of(model.call):  # Keras takes no tensor beside a bool in **kwargs
            known.pop("dropout_key", None)
        if "static_shapes" in options and "static_shapes" not in known and model is self.network:
            message = f"static_shapes needs a network whose call takes it, got {type(model).__name__}"
            raise ParameterError("static_shapes", True, [False], message)
        if options.get("dropout_key") is None or "dropout_key" in known:
            return model(tokens, mems=mems, **known)
        with self.network.drawing(options["dropout_key"]):  # `call` does not take the key
            return model(tokens, mems=mems, **{**known, "training": True})

    @property
    def has_own_call(self):
        """Whether `call` is a user's, which gives log-probabilities by itself."""
        return not is_library(self, LanguageModel)

    @property
    def has_own_probabilities(self):
        """Whether the words' probabilities come from a user's `call`, of the model or of its softmax."""
        return self.has_own_call or not is_library(self.softmax, AdaptiveSoftmax)

    def no_outputs(self, batch_size):
        """`outputs` of no tokens: `[batch_size, 0, any]`."""
        if self.has_own_call:
            return tf.zeros([batch_size, 0, self.network.n_token], self.loss_dtype)
        return tf.zeros([batch_size, 0, self.network.d_model], self.network.compute_dtype)

    def log_probs_of(self, outputs):
        """Log-probabilities of all words, `[batch, tgt_len, n_token]`, of `outputs`."""
        if self.has_own_call:
            return outputs
        return self.softmax(outputs, embedding=self.network.embedding)

    def nll_of(self, outputs, labels):
        """The nll of labels, `[batch, tgt_len]`, of `outputs`: `[batch, tgt_len]`."""
        if not self.has_own_probabilities:
            return self.softmax.nll(outputs, labels, self.network.embedding)
        labels = tf.cast(labels, tf.int32)
        return -tf.gather(self.log_probs_of(outputs), labels, batch_dims=2)

    def why_not_cached(self):
        """The error of a part that cannot be computed from cached keys and values; `None` where there is none."""

        def read():
            cache = self.cached_decoding()
            return cache.read_token(cache.precompute(), tf.zeros([1], tf.int32), cache.initial_state(1))[0]

        return why_not_cached(self, read)

    @property
    def cached_by(self):
        """How keys and values are cached, in a "ring" or a "window": see `Positions`. `None` where the network has no
        scheme of positions: then every token is given the memory that the call of the token before returned.
        """
        scheme = getattr(self.network, "scheme", None)
        return None if scheme is None else scheme.cached_by

    @property
    def has_window(self):
        """Whether places count from the beginning of a segment, so that a cache holds a window of the text."""
        return self.cached_by == "window"

    @property
    def has_cache(self):
        """Whether texts are read with cached keys and values."""
        return self.cached_by is not None and self.why_not_cached() is None

    @property
    def reads_from_cache(self):
        """Whether an evaluation reads keys and values from a cache. Otherwise its memory is hidden states."""
        return self.cached_by == "ring" and self.has_cache

    def decoding_cache(self, static_shapes=False):
        """The cache that `generate` reads a text with: keys and values, or what they are computed from."""
        if not self.has_cache:
            return (RereadWindow if self.has_window else HiddenStateCache)(self, static_shapes)
        return self.cached_decoding(static_shapes)

    def cached_decoding(self, static_shapes=False):
        """The cache of keys and values."""
        if self.has_window:
            return WindowCache(self.network, self.context_len, static_shapes, self)
        return MemoryCache(self.network, static_shapes, self.outputs)

    def first_nll(self, tokens, labels):
        """`score` without `mems`, the nll alone, for first segments. Tokens and labels are not checked; no token but
        the first of a row may be `reset_token`.
        """
        if self.reads_from_cache:
            return self.nll_of(first_segment(self.network, tokens, self.outputs), labels)
        return self.segment_nll(tokens, labels, self.initial_mems(keras.ops.shape(tokens)[0]))[0]

    def start_evaluation(self, batch_size, tgt_len):
        """What the first segment of an evaluation is given: `(precomputed, state)`, or the memory as of `initial_mems`.

        The state is the memory as keys and values. XLA copies what goes in and out. With static shapes, that is not the
        weights, which fill a TPU in training.
        """
        if not self.reads_from_cache:
            return self.initial_mems(batch_size)
        if self.static_shapes:
            max_segment = whole_segments(self.network.mem_len, tgt_len)
            return position_keys(self.network, max_segment), initial_state(self.network, batch_size, max_segment)
        state = initial_state(self.network, batch_size, tgt_len)
        return precompute(self.network, tgt_len), writable_copy(state)

    def evaluation_nll(self, tokens, labels, carried):
        """`segment_nll` of an evaluation.

        Args:
            tokens, labels: see `segment_nll`.
            carried: of `start_evaluation` or of the segment before; it is overwritten. Or the memory as a list of
                tensors, see `initial_mems`; the result has its like then.
        """
        if isinstance(carried, list):
            return self.segment_nll(tokens, labels, carried, static_shapes=self.static_shapes)
        precomputed, state = carried
        weights = weights_with(self.network, precomputed) if self.static_shapes else precomputed
        how = {"static_shapes": self.static_shapes, "in_place": not self.static_shapes, "model": self.outputs}
        outputs, state = cached_forward(self.network, weights, tokens, state, **how)
        return *self._nll(outputs, labels, self.static_shapes), (precomputed, state)

    def _nll(self, outputs, labels, static_shapes, bin_capacities=None):
        """`(nll, kept)` of `segment_nll`."""
        if not static_shapes:
            return self.nll_of(outputs, labels), None
        if self.has_own_probabilities:
            kept = labels >= 0
            return tf.where(kept, self.nll_of(outputs, tf.maximum(labels, 0)), 0), kept
        if bin_capacities is None:
            bin_capacities = [labels.shape.num_elements()] * len(self.softmax.cutoffs)
        return self.softmax.static_nll(outputs, labels, self.network.embedding, bin_capacities)

    @compiled_method(reduce_retracing=True)
    def _score(self, tokens, labels, mems):
        outputs, new_mems = self.outputs(tokens, mems)
        return self.nll_of(outputs, labels), new_mems

    @compiled_method(reduce_retracing=True, autograph=False)
    def _weighted_score(self, tokens, labels, mems, weights):
        nll, new_mems = self._score(tokens, tf.where(weights > 0, labels, 0), mems)
        return nll * tf.cast(weights, nll.dtype), new_mems

    @compiled_method(reduce_retracing=True)
    def _log_probs(self, tokens, mems):
        return self(tokens, mems)

    @compiled_method(reduce_retracing=True, autograph=False)
    def _alternatives(self, tokens, number, mems):
        log_probs, new_mems = self(tokens, mems)
        log_probs, ids = tf.math.top_k(log_probs, number)
        return ids, log_probs, new_mems

    @compiled_method(reduce_retracing=True, autograph=False)
    def _attention(self, tokens, mems, padding_mask):
        probs, new_mems = self.network.attention(tokens, mems, padding_mask)
        return at_least_float32(probs), new_mems

    @compiled_method(reduce_retracing=True, autograph=False)
    def _last_nll(self, tokens, labels):
        """The nll of `labels`, int `[B, S]`, which follow the last S of `tokens`, `[B, T]`: `[B, S]`."""
        outputs, _ = self.outputs(tokens)
        return self.nll_of(outputs[:, -tf.shape(labels)[1] :], labels)

    def _check_ids(self, name, ids):
        """`ids` as an int tensor `[batch, tgt_len]` whose every id the vocabulary has."""
        ids = tf.convert_to_tensor(ids)
        if not ids.dtype.is_integer or ids.shape.rank != 2 or 0 in ids.shape:
            raise ValueError(f"{name} must be integers [batch, tgt_len], got {ids.dtype.name} {list(ids.shape)}")
        if not tf.executing_eagerly():
            return ids
        array = ids.numpy()
        check_ids(name, array[array != IGNORED] if name == "labels" else array, self.network.n_token)
        return ids

    def _check_mems(self, tokens, mems):
        return self.network.memory_of_call(tokens, mems)


@keras.saving.register_keras_serializable("txl_tf")
class TransformerXLLM(LanguageModel):
    """Transformer-XL language model: `TransformerXL`, and the adaptive softmax that shares its embeddings.

    ```python
    lm = txl_tf.TransformerXLLM(n_token=256, n_layer=6, d_model=256, d_embed=256, n_head=4, d_head=64, d_inner=1024,
                                mem_len=128)
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10000))
    lm.fit(dataset)                         # batches (tokens, labels), int [batch, tgt_len]
    nll, mems = lm.score(tokens, labels)    # nats a token; mems continue the text in the next call
    ```

    The weights exist from construction on.

    Args: see `TransformerXL`; `mem_len` must be given; and
        proj_share_all_but_first: the softmax shares the embedding's projections but the first, see
            `AdaptiveSoftmax`.

    Call arguments:
        tokens: int `[batch, tgt_len]`.
        mems: as of `score`.

    Returns:
        `(log_probs, new_mems)`, as `log_probs`.

    Reference:
        Dai et al. 2019; `transformer` and `train` of the original.
    """

    copied_settings = {name: (f"network.{name}",) for name in NetworkConfig.names() if name != "positions"}

    @takes(ModelConfig)
    def __init__(
        self, *, n_token: int, n_layer: int, d_model: int, d_embed: int, n_head: int, d_head: int, d_inner: int,
        dropout: float = 0.1, dropatt: float = 0.0, mem_len: int, same_length: bool = False,
        clamp_len: int = -1, untie_r: bool = False, reset_token: int | None = None,
        cutoffs: Sequence[int] = (), div_val: int = 1, proj_share_all_but_first: bool = False,
        proj_same_dim: bool = True, init: Any = "normal",
        init_std: float = 0.02, proj_init_std: float = 0.01, init_range: float = 0.1, positions: str = "relative",
        context_len: int = 512, layer_norm_epsilon: float = 1e-12, recompute: bool = False, seed: int | None = None,
        **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        arguments = {name: getattr(self, name) for name in [*NetworkConfig.names(), "recompute", "seed"]}
        super().__init__(TransformerXL, arguments, self.proj_share_all_but_first, **kwargs)
