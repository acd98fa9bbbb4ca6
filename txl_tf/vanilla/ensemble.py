"""Several encoder-decoders that generate targets together.

    ensemble = txl_tf.Ensemble([first, second])
    ids, scores = ensemble.generate(source, start=1, end=2, beam_size=4)

In each step, the probability of a token is the mean of the probabilities that the models give it. Models that were
trained with different seeds make different errors, so together they usually make fewer.

Shapes:
    B: batch      V: target_vocab_size
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.settings import Settings, add_user, compiled_method
from txl_tf.vanilla import generation
from txl_tf.vanilla.transformer import Transformer


class Ensemble:
    """Encoder-decoders that generate targets by the mean of their probabilities.

    Its method `generate` is that of `Transformer`.

    Args:
        models: at least two `Transformer` with the same vocabularies and the same `max_len`. All else may differ. A
            model that is given twice counts twice.

    Attributes:
        models: the models, a tuple.

    Raises:
        ParameterError: there are fewer than two models, an element is not a `Transformer`, or their sizes differ.
    """

    def __init__(self, models: Sequence[Transformer]) -> None:
        self._models: tuple[Transformer, ...] = tuple(models) if isinstance(models, (list, tuple)) else ()
        if len(self._models) < 2 or not all(isinstance(model, Transformer) for model in self._models):
            raise ParameterError("models", models, "a list of at least two Transformers")
        for name in ("input_vocab_size", "target_vocab_size", "max_len"):
            sizes = [getattr(model, name) for model in self._models]
            if len({*sizes}) > 1:
                allowed = f"Transformers with one {name}"
                raise ParameterError("models", models, allowed, f"models must be {allowed}, got {sizes}")
        for model in self._models:
            add_user(model, self)

    def __reduce__(self) -> tuple[Any, ...]:
        """For `copy` and `pickle`: a new ensemble of the models, without compiled graphs."""
        return type(self), (self._models,)

    @property
    def models(self) -> tuple[Transformer, ...]:
        return self._models

    @property
    def input_vocab_size(self) -> int:
        return self._models[0].input_vocab_size

    @property
    def target_vocab_size(self) -> int:
        return self._models[0].target_vocab_size

    @property
    def max_len(self) -> int:
        """The most tokens of a source or of a target."""
        # The models began with one `max_len`, but that of each can be set.
        return min(model.max_len for model in self._models)

    @property
    def target_lengths(self) -> Sequence[int] | None:
        """The `target_lengths` of the first model."""
        return self._models[0].target_lengths

    @property
    def loss_dtype(self) -> Any:
        """The dtype of the scores, that of the first model."""
        return self._models[0].loss_dtype

    # A model drops the graphs of its ensembles when one of its settings or parts changes, see `add_user`.
    cached_result = Settings.cached_result
    drop_graphs = Settings.drop_graphs

    generate = generation.generate
    _beam_search = compiled_method(reduce_retracing=True)(generation.beam_search)
    _sample = compiled_method(reduce_retracing=True)(generation.sample_sequences)

    def start_decoding(self, source: Tensor, rows_each: int, max_new_tokens: int) -> tuple[Any, ...]:
        """The state before the first `decode_step`, see `Transformer.start_decoding`.

        Each of its elements is a tuple with one entry for each model.
        """
        starts = (model.start_decoding(source, rows_each, max_new_tokens) for model in self._models)
        return tuple(zip(*starts, strict=True))

    def decode_step(self, ids: Tensor, position: Tensor, caches: Any, sources: Any, seen: Any) -> tuple[Tensor, Any]:
        """Reads the token `ids` `[B]` at `position` of each target, see `Transformer.decode_step`.

        Returns:
            `(log_probs, caches)`: the logarithms of the mean probabilities of the next token, `[B, V]`, and the caches
            of the models.
        """
        states = zip(self._models, caches, sources, seen, strict=True)
        steps = [model.decode_step(ids, position, *state) for model, *state in states]
        log_probs = tf.stack([tf.cast(log_probs, self.loss_dtype) for log_probs, _ in steps])  # [models, B, V]
        return tf.reduce_logsumexp(log_probs, 0) - math.log(len(steps)), tuple(caches for _, caches in steps)
