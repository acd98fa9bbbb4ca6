"""Several encoder-decoders that generate targets together.

    ensemble = txl_tf.Ensemble([first, second])
    ids, scores = ensemble.generate(source, start=1, end=2, beam_size=4)

The next symbol has the mean of the probabilities that the models give it. Models of one configuration that were trained
with different seeds make different errors, so the mean is right more often than one of them.

Shapes:
    B: batch      V: target_vocab_size
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.settings import add_user
from txl_tf.vanilla import generation
from txl_tf.vanilla.transformer import Transformer


class Ensemble:
    """Encoder-decoders that generate targets by the mean of their probabilities.

    Args:
        models: at least two `Transformer` with the same vocabularies and the same `max_len`. All else may differ.

    Raises:
        ParameterError: there are fewer than two models, one is no `Transformer`, or their sizes differ.
    """

    def __init__(self, models: Sequence[Transformer]) -> None:
        self.models = [*models] if isinstance(models, (list, tuple)) else []
        if len(self.models) < 2 or not all(isinstance(model, Transformer) for model in self.models):
            raise ParameterError("models", models, "a list of at least two Transformers")
        first = self.models[0]
        for name in ("input_vocab_size", "target_vocab_size", "max_len"):
            sizes = [getattr(model, name) for model in self.models]
            if len({*sizes}) > 1:
                allowed = f"Transformers with one {name}"
                raise ParameterError("models", models, allowed, f"models must be {allowed}, got {sizes}")
        self.input_vocab_size = first.input_vocab_size
        self.target_vocab_size = first.target_vocab_size
        self.loss_dtype = first.loss_dtype
        self._graphs: dict[Any, Any] = {}
        for model in self.models:
            add_user(model, self)

    def drop_graphs(self) -> None:
        """Drops the compiled graphs. A model calls it when one of its settings or parts changes."""
        self._graphs.clear()

    @property
    def max_len(self) -> int:
        """The most tokens of a source or of a target."""
        return min(model.max_len for model in self.models)

    @property
    def target_lengths(self) -> Sequence[int] | None:
        """Those of the first model, see `Transformer`."""
        return self.models[0].target_lengths

    generate = generation.generate

    def _beam_search(self, *args: Any, **options: Any) -> Any:
        return self._graph_of(generation.beam_search)(*args, **options)

    def _sample(self, *args: Any, **options: Any) -> Any:
        return self._graph_of(generation.sample_sequences)(*args, **options)

    def _graph_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled graph of `function` of `self` and other arguments."""
        if function not in self._graphs:
            graph = tf.function(functools.partial(function, self), autograph=False, reduce_retracing=True)
            self._graphs[function] = graph
        return self._graphs[function]

    def start_decoding(self, source: Tensor, rows_each: int, max_new_tokens: int) -> tuple[Any, ...]:
        """The state before the first `decode_step`: each element has that of every model, see `Transformer`."""
        return tuple(
            zip(*(model.start_decoding(source, rows_each, max_new_tokens) for model in self.models), strict=True)
        )

    def decode_step(self, ids: Tensor, position: Tensor, caches: Any, sources: Any, seen: Any) -> tuple[Tensor, Any]:
        """Reads the token `ids` `[B]` at `position` of each target, see `Transformer.decode_step`.

        Returns:
            `(log_probs, caches)`: the logarithms of the mean probabilities of the next token, `[B, V]`, and the caches.
        """
        states = zip(self.models, caches, sources, seen, strict=True)
        steps = [model.decode_step(ids, position, *state) for model, *state in states]
        log_probs = tf.stack([tf.cast(log_probs, self.loss_dtype) for log_probs, _ in steps])  # [models, B, V]
        return tf.reduce_logsumexp(log_probs, 0) - math.log(len(steps)), tuple(caches for _, caches in steps)
