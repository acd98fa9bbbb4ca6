"""Language models: a network and its softmax, with memory from segment to segment."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.calls import known_names
from txl_tf.config import ModelConfig, NetworkConfig, SoftmaxConfig
from txl_tf.config.checks import check_integer
from txl_tf.data.text.checked_batches import IGNORED, check_weights, check_weights_fit, is_ignored
from txl_tf.equations import only_gradient
from txl_tf.errors import FixedAttributeError, ParameterError, UnsupportedError, brief
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.language import generation
from txl_tf.language.sampling import uniform_draws
from txl_tf.language.session import Session
from txl_tf.language.window import RereadWindow, WindowCache
from txl_tf.nn.adaptive import AdaptiveSoftmax
from txl_tf.nn.arguments import LayerOptions, arguments_of, check_own_arguments, takes, values_of
from txl_tf.nn.base import CheckedCalls, OutputSpecs
from txl_tf.nn.checks import as_ids, tensor_error
from txl_tf.nn.embedding import check_ids
from txl_tf.nn.lora import freeze_others, thaw
from txl_tf.nn.masks import as_bool_like
from txl_tf.nn.parts import (
    NotCacheable,
    check_methods,
    checked_config,
    choosing,
    chosen_class,
    is_library,
    is_overridden,
    registered_classes,
    why_not_cached,
)
from txl_tf.nn.settings import FREE_SEED, FREE_SWITCH, Settings, compiled_method
from txl_tf.schema import keywords_of, takes_keyword
from txl_tf.training.distribution import replica_tensors
from txl_tf.training.memory_model import COMPILE_ARGUMENTS, MemoryModel
from txl_tf.training.weighting import weights_of_labels
from txl_tf.transformer_xl.cache import cached_forward, initial_state, position_keys, precompute, whole_segments
from txl_tf.transformer_xl.decoding_cache import HiddenStateCache, RingCache
from txl_tf.transformer_xl.first_segment import first_segment
from txl_tf.transformer_xl.inference import weights_of_layers, writable_copy
from txl_tf.transformer_xl.network import DRAWN_ONCE, TransformerXL, refuse_own_mems


class LanguageModel(CheckedCalls, Settings, OutputSpecs, MemoryModel):
    """Base class of language models: a network, and the adaptive softmax that shares its embeddings.

    A subclass chooses the network and its arguments.

    Args:
        network_class: `TransformerXL`, or a subclass of it.
        arguments: arguments of the network, without dtype and name.
        proj_share_all_but_first: whether every cluster of the softmax but the first uses the embedding's projection.
        tie_weight: whether the softmax uses the tables of the embedding.
        label_smoothing, z_loss: see `TransformerXLLM`.
        **kwargs: arguments of `keras.Model`.
    """

    mem_len: int
    context_len: int
    network: Any  # a user's network may have other methods than `TransformerXL`
    softmax: Any

    free_settings = {"recompute": FREE_SWITCH, "seed": FREE_SEED}
    fixed_settings = {
        **dict.fromkeys(DRAWN_ONCE, ""), **dict.fromkeys(COMPILE_ARGUMENTS, "give it to compile()"),
        "activity_regularizer": "fit calls the parts of the model, such as lm.network, not the model",
    }  # fmt: skip
    copied_settings = {"recompute": ("network.recompute",), "seed": ("network.seed",)}

    def __init__(
        self, network_class: type[TransformerXL], arguments: dict[str, Any], proj_share_all_but_first: bool,
        tie_weight: bool = True, label_smoothing: float = 0.0, z_loss: float = 0.0, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        if self.activity_regularizer is not None and not self.has_own_call:
            allowed = f"None, because {LanguageModel.fixed_settings['activity_regularizer']}"
            raise ParameterError("activity_regularizer", self.activity_regularizer, allowed)
        self.proj_share_all_but_first = proj_share_all_but_first
        self.tie_weight = tie_weight
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        network_class = chosen_class("network_class", network_class)
        softmax_class = chosen_class("softmax_class", AdaptiveSoftmax)
        self.network = network = network_class(**arguments, dtype=self.dtype_policy, name="transformer")
        self.seed = network.seed
        self.init = network.init
        # A user's softmax need not have arguments for tables of its own.
        own_tables: dict[str, Any] = {} if tie_weight else {"tie_weight": False, "initializer": network.initializer}
        self.softmax = softmax_class(
            **own_tables,
            **values_of(network, ("n_token", "d_embed", "cutoffs", "div_val", "proj_same_dim")),
            d_proj=network.d_model,
            proj_share_all_but_first=proj_share_all_but_first,
            proj_initializer=network.projection_initializer(),
            dtype=self.dtype_policy,
            name="adaptive_softmax",
        )
        self.build_at_once((None, None))

    def build(self, tokens_shape: Any = None) -> None:
        if not self.network.built:
            self.network.build_at_once()
            self.softmax.build((None, None, self.network.d_model))
            if getattr(self.network, "lora_rank", 0):
                freeze_others(self)

    def enable_lora(
        self, rank: int, lora_alpha: float | None = None, a_initializer: Any = "he_uniform",
        b_initializer: Any = "zeros",
    ) -> None:  # fmt: skip
        """Adds low-rank updates to the kernels of the layers; see `TransformerXL.enable_lora`.

        From now on, only the updates are trained: compile the model again. Files and runs contain them. `merge_lora`
        adds them to the kernels.
        """
        self.network.enable_lora(rank, lora_alpha, a_initializer, b_initializer)
        freeze_others(self)
        self._lora_changed()

    def merge_lora(self) -> None:
        """Adds the low-rank updates to the kernels, and makes trainable again what `enable_lora` has frozen.

        The kernels become trainable even if they were frozen before `enable_lora`. Compile the model again to train.
        """
        self.network.merge_lora()
        thaw(self)
        self._lora_changed()

    def _lora_changed(self) -> None:
        """Copies the network's settings of LoRA. Forgets the optimizer, whose variables belong to other weights."""
        self.store("lora_rank", self.network.lora_rank)
        self.store("lora_alpha", self.network.lora_alpha)
        if getattr(self, "optimizer", None) is not None:
            self.optimizer = None
            self.compiled = False

    def check_setting(self, name: str, value: Any) -> Any:
        """Returns the value of a setting as it is stored. While `fit` or `evaluate` runs, `mem_len` cannot change."""
        if name == "mem_len" and self.running_method:
            message = (
                f"mem_len cannot change to {value} while {self.running_method} runs, whose memory has {self.mem_len}"
            )
            raise FixedAttributeError(name, value, "set before or after it", message)
        value = super().check_setting(name, value)
        return self.network.check_setting(name, value) if hasattr(self.network, name) else value

    def settings_changed(self, names: Iterable[str]) -> None:
        super().settings_changed(names)
        if "mem_len" in names:
            self.reset_memory()

    def get_config(self) -> dict[str, Any]:
        check_methods(self)
        check_own_arguments(self)
        classes = registered_classes(network_class=self.network, softmax_class=self.softmax)
        config = {**arguments_of(self), **self.network.get_config(), **super().get_config(), **classes}
        return checked_config(self, config)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        with choosing(config) as without_classes:
            return super().from_config(without_classes, custom_objects)

    # ------------------------------------------------------------------------------------------------- inference

    def call(
        self, tokens: Tensor | None = None, mems: Any = None, inputs_embeds: Tensor | None = None,
        done: Tensor | None = None, output_hidden_states: bool = False,
    ) -> Any:  # fmt: skip
        tokens = tokens if tokens is None or hasattr(tokens, "shape") else as_ids("tokens", tokens)
        options = {"inputs_embeds": inputs_embeds, "done": done, "output_hidden_states": output_hidden_states}
        # A user's network need not take them.
        options = {name: value for name, value in options.items() if value is not None and value is not False}
        mems = self.with_own_mems(inputs_embeds if tokens is None else tokens, mems)
        if self.has_own_call:  # it calls this method, so `outputs` would call it again
            hidden, new_mems, *hidden_states = self.network(tokens, mems=mems, **options)
            return self.softmax(hidden, embedding=self.network.embedding), new_mems, *hidden_states
        outputs, new_mems, *hidden_states = self.outputs(tokens, mems, **options)
        return self.log_probs_of(outputs), new_mems, *hidden_states

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        given = self.named_shapes(shapes, named)
        options = {name: given[name] for name in ("tokens", "mems", "output_hidden_states")}
        if options["tokens"] is None:
            options["tokens"] = given["inputs_embeds"][:2]
        hidden_shape, *others = self.network.compute_output_shape(**options)
        return (*hidden_shape[:-1], self.network.n_token), *others

    # Which memory is the first one of a text:
    # - `segment_nll` gets `self.initial_mems`, in `fit`, `evaluate` and `first_nll`.
    # - `outputs`, and so all other methods, gets `first_mems`: a user's `initial_mems`, or else that of the network. If
    #   the user has also overridden `segment_nll`, it is that of the network, because then the user's memory may have a
    #   form that only this `segment_nll` understands.

    @known_names
    def initial_mems(self, batch_size: Size) -> list[Tensor]:
        """The memory before the first segment: list of `n_layer` zeros `[batch_size, mem_len, d_model]`.

        If you override it, in the model or in its network, keys and values are not cached. `done` and `reset_token`,
        which reset the memory to zeros, are errors then.
        """
        return self.network.initial_mems(batch_size)

    @property
    def has_own_mems(self) -> bool:
        """Whether a user has overridden `initial_mems` but not `segment_nll`: see the comment above `initial_mems`."""
        return is_overridden(self, "initial_mems") and not is_overridden(self, "segment_nll")

    def first_mems(self, batch_size: Size) -> Any:
        """The memory before the first segment, for `outputs`: see the comment above `initial_mems`."""
        return (self if self.has_own_mems else self.network).initial_mems(batch_size)

    def with_own_mems(self, tokens: Any, mems: Any) -> Any:
        """Replaces `None` by the memory of a user's `initial_mems`. Otherwise returns `mems`.

        `tokens` is `[batch, ...]`. Without tokens, or without an `initial_mems` of the user, `None` stays `None`.
        """
        if mems is not None or tokens is None or not self.has_own_mems:
            return mems
        return self.initial_mems(shape_of(tokens)[0])

    def mems_of_call(self, tokens: Tensor, mems: Any) -> list[Any]:
        """Checks `mems` and returns one tensor per layer; `None` becomes the first memory."""
        return self.network.memory_of_call(tokens, self.with_own_mems(tokens, mems))

    @known_names
    def score(
        self, tokens: Tensor, labels: Tensor, mems: Any = None, sample_weight: Any = None, done: Any = None,
        lengths: Any = None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """The negative log-likelihood of every label, at its position.

        Args:
            tokens: int `[batch, tgt_len]`.
            labels: int `[batch, tgt_len]`, the tokens shifted by one. A label of -100 does not count: its nll is 0.
            mems: list of `n_layer` tensors `[batch, any, d_model]`, or one tensor of them, `[n_layer, batch, any,
                d_model]`; `None` for `initial_mems`.
            sample_weight: weights of the labels, `[batch, tgt_len]`, or of the rows, `[batch]`. The nll of a label is
                multiplied by its weight; `None`: all are 1. `evaluate` reports the sum of the result, divided by that
                of the weights.
            done: bool `[batch, tgt_len]`, true at the last token of a document or an episode: the tokens after it do
                not see it, as at the beginning of a text. `None`: no document ends.
            lengths: int `[batch]`, the number of tokens of each row, for rows of unequal length: tokens and labels
                after them do not count and may have any value. Then `mems` must have at least `mem_len` positions.
                `None`: all rows have `tgt_len` tokens.

        Returns:
            `(nll, new_mems)`: float32 (float64 if the dtype is) `[batch, tgt_len]` in nats, and the memory for the next
            segment, which does not depend on `sample_weight`.

        Raises:
            ParameterError: shapes do not fit together. In eager execution also: an id is outside the vocabulary, or a
                weight is negative or not finite.
        """
        tokens = _segment_of_ids("tokens", tokens)
        labels = _segment_of_ids("labels", labels)
        if tokens.shape != labels.shape:
            message = f"labels must have the shape of tokens, {tokens.shape}, got {labels.shape}"
            raise ParameterError("labels", labels, f"of the shape of tokens, {tokens.shape}", message)
        padding_mask = None
        if lengths is not None:
            tokens, labels, padding_mask = self._without_padding(tokens, labels, lengths)
        self._check_in_vocabulary("tokens", tokens)
        self._check_in_vocabulary("labels", labels)
        mems = self.mems_of_call(tokens, mems)
        if padding_mask is not None:
            self.network.check_padding(padding_mask, tokens=tokens, mem=mems[0])
        if done is not None:
            done = as_bool_like("done", done, tokens)
        if tf.executing_eagerly() and check_weights(sample_weight, labels.numpy()) is None:
            return self._score(tokens, labels, mems, done, None, padding_mask)
        if sample_weight is not None:
            sample_weight = tf.convert_to_tensor(sample_weight)
            check_weights_fit(sample_weight, labels)
        weights = weights_of_labels(sample_weight, tf.cast(~is_ignored(labels), tf.float32))
        return self._score(tokens, labels, mems, done, weights, padding_mask)

    def _without_padding(self, tokens: Tensor, labels: Tensor, lengths: Any) -> tuple[Any, Any, Any]:
        """The arguments of `score` with 0 for tokens and `IGNORED` for labels after the end of their row.

        Args:
            tokens, labels: int `[batch, tgt_len]`, tensors of the same shape.
            lengths: see `score`.

        Returns:
            `(tokens, labels, mask)`: the mask is true before the end.

        Raises:
            ParameterError: a length is wrong, or the call that computes the nll takes no `padding_mask`.
        """
        most = shape_of(tokens)[1]
        allowed = f"integers [batch={tokens.shape[0]}] from 0 to {most}"
        message = f"lengths must be {allowed}, got {brief(lengths)}"
        try:
            rows = tf.convert_to_tensor(lengths)
        except (TypeError, ValueError):  # no tensor can be made of it
            raise ParameterError("lengths", lengths, allowed, message) from None
        fits = rows.dtype.is_integer and rows.shape.is_compatible_with(tokens.shape[:1])
        if not fits or (tf.executing_eagerly() and not all(0 <= length <= most for length in rows.numpy())):
            raise ParameterError("lengths", lengths, allowed, message)
        if not takes_keyword((self if self.has_own_call else self.network).call, "padding_mask"):
            allowed = "left out for a call without padding_mask"
            raise ParameterError("lengths", lengths, allowed, f"lengths must be {allowed}")
        if labels.dtype.min >= 0:  # an unsigned integer cannot be `IGNORED`
            labels = tf.cast(labels, tf.int64)
        mask = tf.range(most) < tf.cast(rows, tf.int32)[:, None]
        return tf.where(mask, tokens, 0), tf.where(mask, labels, IGNORED), mask

    @known_names
    def log_probs(self, tokens: Tensor, mems: Any = None) -> tuple[Tensor, list[Tensor]]:
        """The log-probability of every word of the vocabulary as the next token. Arguments and errors: see `score`.

        Returns:
            `(log_probs, new_mems)`: float32 (float64 if the dtype is) `[batch, tgt_len, n_token]` in the order of the
            vocabulary, and the memory for the next segment. The exponentials sum to 1 over the vocabulary.
        """
        tokens = _segment_of_ids("tokens", tokens)
        self._check_in_vocabulary("tokens", tokens)
        return self._log_probs(tokens, self.mems_of_call(tokens, mems))

    @known_names
    def alternatives(self, tokens: Tensor, number: int, mems: Any = None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The most likely next tokens after every token.

        Args:
            tokens, mems: see `score`.
            number: how many, from 1 to `n_token`.

        Returns:
            `(ids, log_probs, new_mems)`: int32 and float32 (float64 if the dtype is) `[batch, tgt_len, number]`, the
            most likely first; and the memory for the next segment.

        Raises:
            ParameterError: as `score`, or `number` is out of its range.
        """
        tokens = _segment_of_ids("tokens", tokens)
        self._check_in_vocabulary("tokens", tokens)
        check_integer("number", number, 1, self.network.n_token)
        return self._alternatives(tokens, tf.constant(number), self.mems_of_call(tokens, mems))

    @known_names
    def attention(self, tokens: Tensor, mems: Any = None, padding_mask: Any = None) -> tuple[Tensor, list[Tensor]]:
        """The attention probabilities of every layer and head in a segment. Errors: see `score`.

        Args:
            tokens, mems: see `score`.
            padding_mask: bool `[batch, tgt_len]`, true at tokens and false at padding; `None` if there is no padding.
                Padding may be anywhere, with any ids. Then `mems` must have at least `mem_len` positions.

        Returns:
            `(probs, new_mems)`: float32 (float64 if the dtype is) `[n_layer, n_head, batch, tgt_len, keys]`, and the
            memory for the next segment. The keys are the positions of `mems`, then those of the segment; the
            probabilities sum to 1 over the keys. With a `padding_mask`, every row has the probabilities of its tokens
            without the padding, and zeros where the query or the key is padding.
        """
        tokens = _segment_of_ids("tokens", tokens)
        if padding_mask is not None:
            mems = self.mems_of_call(tokens, mems)
            padding_mask = self.network.check_padding(padding_mask, tokens, mems[0])
            tokens = tf.where(padding_mask, tokens, 0)
        self._check_in_vocabulary("tokens", tokens)
        return self._attention(tokens, self.mems_of_call(tokens, mems), padding_mask)

    generate = generation.generate

    @known_names
    def session(self, batch_size: int = 1) -> Session:
        """A `Session`: it reads and generates a text in turns, and keeps the memory inside.

        ```python
        session = lm.session()
        session.read(prompt)  # int [1, n]
        tokens, _ = session.write(8, temperature=0.8)  # the next 8 tokens, int32 [1, 8]
        ```

        Args:
            batch_size: number of texts that advance together.
        """
        return Session(self, batch_size)

    @compiled_method()
    def _generate_tokens(self, number: int, static_shapes: bool, **arguments: Any) -> Any:
        """`generate_tokens` as a graph.

        A TPU has the weights only on its replicas. So with static shapes, every replica generates, all the same texts.
        The result contains those of the first replica.
        """
        generate = functools.partial(generation.generate_tokens, self, number=number, static_shapes=static_shapes)
        if not static_shapes:
            return generate(**arguments)
        strategy = self.distribute_strategy
        texts = strategy.run(generate, kwargs=arguments)
        return tf.nest.map_structure(lambda per_replica: replica_tensors(per_replica)[0], texts)

    _search_tokens = compiled_method()(generation.search_tokens)

    @compiled_method(reduce_retracing=True)
    def _uniform_draws(self, seeds: Tensor, n_tokens: Size) -> Tensor:
        """`uniform_draws` for the first `n_tokens` tokens, as a graph."""
        return uniform_draws(seeds, 0, n_tokens)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        raise self._no_predict("predict")

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        raise self._no_predict("predict_on_batch")

    def _no_predict(self, method: str) -> UnsupportedError:
        """The error of a method that would lose the memory."""
        instead = "lm.log_probs(tokens, mems), lm.score(tokens, labels, mems) or lm.generate(prompt, max_new_tokens)"
        message = f"{method} would neither take nor return the memory. Use instead: {instead}"
        return UnsupportedError(method, self, instead, message)

    def export(self, *args: Any, **kwargs: Any) -> Any:
        instead = "txl_tf.export_saved_model(lm, directory, vocab)"
        message = f"export would know neither texts nor memory. Use instead: {instead}"
        raise UnsupportedError("export", self, instead, message)

    @property
    def _default_save_signature(self) -> Any:
        """The function that `tf.saved_model.save(lm, folder)` writes: `log_probs` of texts, without memory."""
        tokens = tf.TensorSpec([None, None], tf.int32, "tokens")
        return tf.function(lambda tokens: {"log_probs": self(tokens)[0]}, autograph=False, input_signature=[tokens])

    # The methods that compute the nll of labels, who calls them, and the memory before the segment:
    #
    #     nll_of             all others, sessions, generation and served models    none: it computes from `outputs`
    #     _nll_and_counted   `segment_nll`, `evaluation_nll`                       none: it calls `nll_of`, or with
    #                                                                              static shapes `static_nll`
    #     score              users, programs                                       `mems`, or the first memory
    #     segment_nll        `fit`; `evaluation_nll` and `first_nll`, see there    `mems`, hidden states
    #     evaluation_nll     `evaluate`, `Scorer` of tools/score.py                `carried`, cached or hidden states
    #     first_nll          `Scorer`, for texts of one segment                    the first memory
    #     _last_nll          `sliding_window_nll`                                  the first memory

    def segment_nll(
        self, tokens: Tensor, labels: Tensor, mems: Any, *, static_shapes: bool = False, bin_capacities: Any = None,
        **training: Any,
    ) -> tuple[Tensor, Tensor | None, Any]:  # fmt: skip
        """Computes the nll of a segment.

        `fit` calls it. `evaluate` calls `evaluation_nll`, which calls it in two cases: if an evaluation does not read
        from a cache, see `evaluates_with_ring`; or if you have overridden this method or `initial_mems`. If you have
        also overridden `evaluation_nll`, `evaluate` calls only your `evaluation_nll`.

        Args:
            tokens, labels: int `[batch, tgt_len]`, not checked. With static shapes, a negative label does not count.
            mems: list of `n_layer` tensors `[batch, any, d_model]`.
            static_shapes, bin_capacities: see `compile`.
            **training: `training` and `dropout_key` of the network; and `done`, if the dataset has it.

        Returns:
            `(nll, is_counted, new_mems)`: the nll in nats, `[batch, tgt_len]`; bool `[batch, tgt_len]`, true where a
            label counts, or `None` if all labels count; and the memory for the next segment.
        """
        outputs, new_mems = self.outputs(tokens, mems, static_shapes=static_shapes, **training)
        objective = self.training_objective() if training.get("training") else {}
        return *self._nll_and_counted(outputs, labels, static_shapes, bin_capacities, **objective), new_mems

    def training_objective(self) -> dict[str, float]:
        """`label_smoothing` and `z_loss`, if they are not 0. They change the gradient of the nll, not its value.

        Raises:
            ParameterError: a user has overridden the `call` of the model or of its softmax, and `z_loss` is not 0.
        """
        both = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        if self.z_loss and self.has_own_probabilities:
            allowed = "0 for a call of your own, which returns log-probabilities without their normalizer"
            raise ParameterError("z_loss", self.z_loss, allowed)
        return {name: value for name, value in both.items() if value}

    def outputs(
        self, tokens: Tensor, mems: Any = None, *, static_shapes: bool = False, **options: Any
    ) -> tuple[Tensor, Any]:
        """The outputs from which every method computes its results.

        They are hidden states; or log-probabilities, if a user has overridden `call`.

        Args:
            tokens: int `[batch, tgt_len]`.
            mems: list of `n_layer` tensors `[batch, any, d_model]`, or `None` for `initial_mems`; or a `NetworkMemory`,
                in inference.
            static_shapes: whether no shape may depend on the data, for TPUs and XLA.
            **options: other arguments of the network's call, such as `training` and `padding_mask`. An argument that
                the call does not take is left out, unless it raises an error, see below.

        Returns:
            `(outputs, new_mems)`: `[batch, tgt_len, d_model]`, or `[batch, tgt_len, n_token]` if a user has overridden
            `call`.

        Raises:
            ParameterError: the call takes no `done`, `inputs_embeds` or `output_hidden_states`; the call of the network
                takes no `static_shapes`; or documents end, and a user has overridden `initial_mems`.
        """
        model = self if self.has_own_call else self.network
        mems = self.with_own_mems(tokens, mems)
        taken = self._options_of_call(model, static_shapes, options)
        dropout_key = options.get("dropout_key")
        if dropout_key is None or "dropout_key" in taken:
            return model(tokens, mems=mems, **taken)
        # A user's call that does not take the key: its layers draw their keys from this one.
        with self.network.drawing(dropout_key):
            return model(tokens, mems=mems, **{**taken, "training": True})

    def _options_of_call(self, model: Any, static_shapes: bool, options: dict[str, Any]) -> dict[str, Any]:
        """The options of `outputs` that the call of `model` takes, without those that are `None`.

        Args:
            model: this model, if a user has overridden its call; or its network.
            static_shapes, options: as in `outputs`, which also lists the errors.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if static_shapes:
            given["static_shapes"] = True
        taken = {name: value for name, value in given.items() if takes_keyword(model.call, name)}
        if "dropout_key" not in keywords_of(model.call):  # Keras allows no tensor next to a bool in **kwargs
            taken.pop("dropout_key", None)
        for name in ("done", "inputs_embeds", "output_hidden_states"):
            if name in given and name not in taken:
                allowed = f"left out, because the call of {type(model).__name__} does not take it"
                raise ParameterError(name, given[name], allowed, f"{name} must be {allowed}")
        documents_end = "done" in given or getattr(self.network, "reset_token", None) is not None
        if documents_end and self.has_own_mems:
            refuse_own_mems(self)
        if static_shapes and "static_shapes" not in taken and model is self.network:
            message = f"static_shapes needs a network whose call takes it, got {type(model).__name__}"
            raise ParameterError("static_shapes", True, [False], message)
        return taken

    @property
    def has_own_call(self) -> bool:
        """Whether a user has overridden `call`, which then returns log-probabilities."""
        return not is_library(self, LanguageModel)

    @property
    def has_own_probabilities(self) -> bool:
        """Whether a user has overridden `log_probs_of`, or the `call` of the model or of its softmax."""
        own = self.has_own_call or is_overridden(self, "log_probs_of")
        return own or not is_library(self.softmax, AdaptiveSoftmax)

    def no_outputs(self, batch_size: Size) -> Tensor:
        """`outputs` of no tokens, the start value of loops: `[batch_size, 0, d_model]`.

        If a user has overridden `call`, the last size is `n_token`.
        """
        if self.has_own_call:
            return tf.zeros([batch_size, 0, self.network.n_token], self.loss_dtype)
        return tf.zeros([batch_size, 0, self.network.d_model], self.network.compute_dtype)

    def log_probs_of(self, outputs: Tensor) -> Tensor:
        """Log-probabilities of all words, `[batch, tgt_len, n_token]`, from `outputs`."""
        if self.has_own_call:
            return outputs
        return self.softmax(outputs, embedding=self.network.embedding)

    def nll_of(self, outputs: Tensor, labels: Tensor, **objective: float) -> Tensor:
        """The nll of labels from `outputs`: `[batch, tgt_len]`, nats.

        Args:
            outputs: the result of `outputs`, without the memory.
            labels: int `[batch, tgt_len]`, ids of the vocabulary.
            **objective: the result of `training_objective`, in training.
        """
        if not self.has_own_probabilities:
            return self.softmax.nll(outputs, labels, self.network.embedding, **objective)
        log_probs = self.log_probs_of(outputs)
        nll = -tf.gather(log_probs, tf.cast(labels, tf.int32), batch_dims=2)
        smoothing = objective.get("label_smoothing")
        return nll if smoothing is None else nll - only_gradient(smoothing * (tf.reduce_mean(log_probs, -1) + nll))

    def why_not_cached(self) -> Exception | None:
        """The error of a part that cannot be computed from cached keys and values, or `None` if every part can."""

        def one_cached_step():
            """Decodes one dummy token. It is only traced: an error means that the model cannot be cached."""
            for name in ("initial_mems", "memory_of_call"):
                if is_overridden(self.network, name) or (name == "initial_mems" and self.has_own_mems):
                    raise NotCacheable(f"{name} is overridden, and returns hidden states")
            cache = self._key_value_cache()
            return cache.read_token(cache.precompute(), tf.zeros([1], tf.int32), cache.initial_state(1))[0]

        def cached_and_whole():
            """The outputs for each token of a window, from cached keys and values, and from one call."""
            tokens: Any = tf.range(min(3, self.context_len))[None] % self.network.n_token
            cache = self._key_value_cache()
            weights = cache.precompute()
            state = cache.initial_state(1)
            cached = []
            for i in range(tokens.shape[1]):
                output, state = cache.read_token(weights, tokens[:, i], state)
                cached.append(output)
            return tf.stack(cached, 1), self.outputs(tokens, self.first_mems(1))[0]

        # A ring is not compared: with a memory, a text may be cut into segments of any length, also of one token.
        return why_not_cached(self, one_cached_step, cached_and_whole if self.has_window else None)

    @property
    def cached_by(self) -> str | None:
        """How keys and values are cached: in a "ring" or in a "window", see `Positions`.

        It is `None` if the network has no scheme of positions. Then every token gets the memory that the call for the
        token before it returned.
        """
        scheme = getattr(self.network, "scheme", None)
        return None if scheme is None else scheme.cached_by

    @property
    def has_window(self) -> bool:
        """Whether positions count from the beginning of a segment, so that the cache contains a window of the text."""
        return self.cached_by == "window"

    @property
    def has_cache(self) -> bool:
        """Whether texts are read with cached keys and values."""
        return self.cached_by is not None and self.why_not_cached() is None

    @property
    def evaluates_with_ring(self) -> bool:
        """Whether `evaluate` and `first_nll` read keys and values from a ring. A window is only for generation.

        Otherwise, their memory is hidden states.
        """
        return self.cached_by == "ring" and self.has_cache

    def decoding_cache(self, static_shapes: bool = False) -> Any:
        """The cache of `generate`: of keys and values, or of the hidden states or tokens that they come from."""
        if self.has_cache:
            return self._key_value_cache(static_shapes)
        return (RereadWindow if self.has_window else HiddenStateCache)(self, static_shapes)

    def _key_value_cache(self, static_shapes: bool = False) -> Any:
        """The cache of keys and values, without a check that every part of the model can be cached."""
        return (WindowCache if self.has_window else RingCache)(self, static_shapes)

    def first_nll(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The nll of the first segments of texts, which have no memory before them: `[batch, tgt_len]`, see `score`.

        Tokens and labels are not checked. Only the first token of a row may be `reset_token`.
        """
        if self.evaluates_with_ring:
            return self.nll_of(first_segment(self.network, tokens, self.outputs), labels)
        return self.segment_nll(tokens, labels, self.initial_mems(shape_of(tokens)[0]))[0]

    def start_evaluation(self, batch_size: int, tgt_len: int) -> Any:
        """The memory before the first segment of an evaluation: `(precomputed, state)`, or `initial_mems`.

        The state is the memory as keys and values. With static shapes, `precomputed` contains no weights: XLA would
        copy them, and while a model is trained on a TPU, there may be no room for a copy.
        """
        if not self.evaluates_with_ring:
            return self.initial_mems(batch_size)
        if self.static_shapes:
            max_segment = whole_segments(self.network.mem_len, tgt_len)
            return position_keys(self.network, max_segment), initial_state(self.network, batch_size, max_segment)
        state = initial_state(self.network, batch_size, tgt_len)
        return precompute(self.network, tgt_len), writable_copy(state)

    def evaluation_nll(
        self, tokens: Tensor, labels: Tensor, carried: Any, done: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Any]:
        """The nll of a segment of an evaluation. Returns `(nll, is_counted, carried)`, see `segment_nll`.

        Args:
            tokens, labels: see `segment_nll`.
            carried: the result of `start_evaluation`, or the memory after the previous segment; it is overwritten. Or
                a list of tensors, see `initial_mems`; then the result has such a list, too.
            done: see `score`.
        """
        if isinstance(carried, list):
            ends = {} if done is None else {"done": done}
            return self.segment_nll(tokens, labels, carried, static_shapes=self.static_shapes, **ends)
        precomputed, state = carried
        weights = weights_of_layers(self.network, precomputed) if self.static_shapes else precomputed
        outputs, state = cached_forward(
            self.network, weights, tokens, state, static_shapes=self.static_shapes, in_place=not self.static_shapes,
            call=self.outputs, done=done,
        )  # fmt: skip
        return *self._nll_and_counted(outputs, labels, self.static_shapes), (precomputed, state)

    def _nll_and_counted(
        self, outputs: Tensor, labels: Tensor, static_shapes: bool, bin_capacities: Any = None, **objective: float
    ) -> tuple[Tensor, Tensor | None]:
        """The nll of labels from `outputs`, and bool where labels count, or `None` if all do; see `segment_nll`.

        `objective` is that of `nll_of`.
        """
        if not static_shapes:
            return self.nll_of(outputs, labels, **objective), None
        own_nll = is_overridden(self.softmax, "nll") and not is_overridden(self.softmax, "static_nll")
        if self.has_own_probabilities or own_nll or is_overridden(self, "nll_of"):
            is_label = labels >= 0
            return tf.where(is_label, self.nll_of(outputs, tf.maximum(labels, 0), **objective), 0), is_label
        if bin_capacities is None:
            bin_capacities = [labels.shape.num_elements()] * len(self.softmax.cutoffs)
        return self.softmax.static_nll(outputs, labels, self.network.embedding, bin_capacities, **objective)

    @compiled_method(reduce_retracing=True)
    def _score(
        self, tokens: Tensor, labels: Tensor, mems: Any, done: Tensor | None, weights: Tensor | None,
        padding_mask: Tensor | None,
    ) -> Any:  # fmt: skip
        """The graph of `score`. `padding_mask` is that of `outputs`, or `None`.

        The weights are `[batch, tgt_len]`, or `None` if all are 1. A label of weight 0 may be any number.
        """
        outputs, new_mems = self.outputs(tokens, mems, done=done, padding_mask=padding_mask)
        if weights is None:
            return self.nll_of(outputs, labels), new_mems
        nll = self.nll_of(outputs, tf.where(weights > 0, labels, 0))
        return tf.math.multiply_no_nan(nll, tf.cast(weights, nll.dtype)), new_mems

    @compiled_method(reduce_retracing=True)
    def _log_probs(self, tokens: Tensor, mems: Any) -> Any:
        """The graph of `log_probs`."""
        outputs, new_mems = self.outputs(tokens, mems)
        return self.log_probs_of(outputs), new_mems

    @compiled_method(reduce_retracing=True)
    def _alternatives(self, tokens: Tensor, number: Tensor, mems: Any) -> Any:
        """The graph of `alternatives`."""
        outputs, new_mems = self.outputs(tokens, mems)
        log_probs, ids = tf.math.top_k(self.log_probs_of(outputs), number)
        return ids, log_probs, new_mems

    @compiled_method(reduce_retracing=True)
    def _attention(self, tokens: Tensor, mems: Any, padding_mask: Any) -> Any:
        """The graph of `attention`."""
        probs, new_mems = self.network.attention(tokens, mems, padding_mask)
        return at_least_float32(probs), new_mems

    @compiled_method(reduce_retracing=True)
    def _last_nll(self, tokens: Tensor, labels: Tensor) -> Any:
        """The nll of `labels`, int `[B, S]`, the tokens that follow the last S of `tokens`, `[B, T]`: `[B, S]`."""
        outputs, _ = self.outputs(tokens)
        return self.nll_of(outputs[:, -tf.shape(labels)[1] :], labels)

    def _check_in_vocabulary(self, name: str, ids: Tensor) -> None:
        """Raises ParameterError in eager execution if an id is not in the vocabulary. Labels may also be -100."""
        if tf.executing_eagerly():
            array = ids.numpy()
            check_ids(name, array[array != IGNORED] if name == "labels" else array, self.network.n_token)


def _segment_of_ids(name: str, ids: Any) -> Tensor:
    """`ids` as an int tensor `[batch, tgt_len]`. Raises ParameterError if they have another type or shape."""
    allowed = "integers [batch, tgt_len]"
    try:
        ids = tf.convert_to_tensor(ids)
    except (TypeError, ValueError):  # no tensor can be made of it
        raise tensor_error(name, ids, allowed) from None
    if not ids.dtype.is_integer or ids.shape.rank != 2 or 0 in ids.shape:
        raise tensor_error(name, ids, allowed)
    return ids


@keras.saving.register_keras_serializable("txl_tf")
class TransformerXLLM(LanguageModel):
    """The Transformer-XL language model: `TransformerXL`, and an adaptive softmax that shares its embeddings.

    ```python
    lm = txl_tf.TransformerXLLM(n_token=256, n_layer=6, d_model=256, d_embed=256, n_head=4, d_head=64, d_inner=1024,
                                mem_len=128)
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10000))
    lm.fit(dataset)                         # batches (tokens, labels), int [batch, tgt_len]
    nll, mems = lm.score(tokens, labels)    # nats a token; mems continue the text in the next call
    ```

    The constructor creates the weights.

    Args: those of `TransformerXL`, of which `mem_len` is required, and
        proj_share_all_but_first: whether the softmax shares all projections of the embedding except the first, see
            `AdaptiveSoftmax`.
        tie_weight: whether the softmax uses the tables of the embedding, as in the original. If not, it has its own.
        label_smoothing: share of the probability that the loss of `fit` distributes evenly over all words.
        z_loss: factor of `log(Z)^2` in the loss of `fit`, where Z is the normalizer of each softmax of a label. Both
            change only gradients: `loss` in the logs is the nll, as in `score` and `evaluate`.

    Call arguments:
        tokens: int `[batch, tgt_len]`.
        mems: see `score`.
        inputs_embeds, done, output_hidden_states: as in the call of `TransformerXL`.

    Returns:
        `(log_probs, new_mems)`: see `log_probs`. With `output_hidden_states`, also a list of `n_layer + 1` tensors, as
        `TransformerXL` returns it.

    Raises:
        ParameterError: an argument is out of its range.

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
        tie_weight: bool = True, label_smoothing: float = 0.0, z_loss: float = 0.0,
        proj_same_dim: bool = True, init: Any = "normal",
        init_std: float = 0.02, proj_init_std: float = 0.01, init_range: float = 0.1, positions: str = "relative",
        context_len: int = 512, layer_norm_epsilon: float = 1e-12, pre_lnorm: bool = False, activation: str = "relu",
        norm: str = "layer", lora_rank: int = 0, lora_alpha: float | None = None, recompute: bool = False,
        seed: int | None = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        arguments = values_of(self, [*NetworkConfig.names(), "recompute", "seed"])
        super().__init__(TransformerXL, arguments, **values_of(self, SoftmaxConfig.names()), **kwargs)
