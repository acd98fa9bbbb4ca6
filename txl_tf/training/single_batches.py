"""`train_on_batch` and `test_on_batch` of a model with memory.

    lm.train_on_batch(tokens, labels)    # the first segment of a text
    lm.train_on_batch(tokens, labels)    # the next segment
    lm.reset_memory()                    # another text begins

Each method has its own memory. A call is one step of the loop of `fit` or `evaluate`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.data.text.checked_batches import Batches, check_batch
from txl_tf.errors import ParameterError
from txl_tf.training.distribution import to_replicas
from txl_tf.training.keras_arguments import refuse
from txl_tf.training.loop import LoopState


class SingleBatches:
    """Mixin of `MemoryModel`: its methods for one batch at a time, each with its own memory.

    `self` is `Any` for type checkers, because the methods use all of `MemoryModel`, which inherits this class.
    """

    _loop_states: dict[str, LoopState]  # for each method, the state after its last call

    def train_on_batch(
        self: Any, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """One step of training on the next segments of a text.

        The memory starts from zeros and is carried from call to call, until `reset_memory`. `test_on_batch` has its own
        memory. `fit` and `evaluate` neither use nor change these memories. One call is one step, whatever
        `steps_per_execution` is. Calls from several threads run one after the other.

        Args:
            x, y: tokens and labels of the whole batch, int `[batch, tgt_len]` each. Its rows are split over the
                replicas. A label of -100 does not count. Or `x` is `{"tokens": tokens, "done": done}`, with bool `done`
                of the same shape, see `LanguageModel.score`.
            sample_weight: weights of the labels, `[batch, tgt_len]`, or of the rows, `[batch]`; `None` for 1. The loss
                is the sum of weight times nll, divided by the sum of the weights.
            class_weight: not supported.
            return_dict: whether to return all logs of the step as a dictionary.

        Returns:
            float: the mean nll of this batch in nats. With metrics, a list of the nll and the metrics, which are those
            of this batch alone. With `return_dict`, a dictionary.

        Raises:
            ParameterError: the model has no optimizer; `class_weight` is given; an argument has another type or shape;
                an id is outside the vocabulary; a weight is negative or not finite; the batch has another number of
                rows than the memory, or one that replicas and parts do not divide; or `fit` runs in another thread.
        """
        self.check_compiled("train_on_batch")
        refuse("train_on_batch", {"class_weight": class_weight})
        self._ready_to_train("train_on_batch")
        with self._method_locks["training"]("train_on_batch"):
            self.make_train_function()
            logs = self._run_batch("train_on_batch", self.train_function, self._log_names(), x, y, sample_weight)
        return self._result(logs, return_dict)

    def test_on_batch(self: Any, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """The mean nll of the next segments of a text, without training.

        For arguments, results and errors, see `train_on_batch`. It has no `class_weight`. Unlike `train_on_batch`, it
        may run while `fit` runs in another thread, unless the user has added metrics, which `fit` updates, too.
        """
        self.check_compiled("test_on_batch")
        self._check_hooks()
        self._check_metric_names()
        names = tuple(self.metrics_names)
        # `fit` updates the user's metrics, too.
        lock = self._method_locks["training" if self.user_metrics else "test_on_batch"]
        with lock("test_on_batch"):
            self.make_test_function()
            logs = self._run_batch("test_on_batch", self.test_function, names, x, y, sample_weight)
        return self._result(logs, return_dict)

    def reset_memory(self) -> None:
        """Resets the memory of `train_on_batch` and `test_on_batch` to zeros, for batches of any number of rows."""
        self._loop_states = {"train_on_batch": LoopState(), "test_on_batch": LoopState()}

    def _run_batch(
        self: Any, method: str, function: Callable, log_names: tuple[str, ...], x: Any, y: Any, sample_weight: Any
    ) -> dict[str, float]:
        """Checks a batch, calls `Steps` for it, and stores the new memory. Returns logs as floats.

        Args:
            method: "train_on_batch" or "test_on_batch", whose memory is used.
            function: `Steps`, or a function that replaces it.
            log_names: see `LoopState`.
            x, y, sample_weight: see `train_on_batch`.
        """
        batch = check_batch(x, y, self.network.n_token, sample_weight, self.static_shapes)
        rows, tgt_len = batch[0].shape
        self.network.check_segment(tgt_len)
        tgt_len = tgt_len if self.static_shapes else None  # the next batch may have another length
        batches = Batches(None, rows, tgt_len, tf.data.UNKNOWN_CARDINALITY)  # no dataset: `function` gets the one batch
        before = self._loop_states[method]
        self._check_rows(rows, self.parts_of_batch if method == "train_on_batch" else 1)
        if before.batches is None or not self.network.mem_len:
            mems = self._on_replicas(self.initial_mems, rows)
        elif before.batches.rows == rows:
            mems = before.mems
        else:
            expected = before.batches.rows
            message = (
                f"x must have as many rows as the memory of {method} carries, {expected}, got {rows}: "
                "reset_memory() begins another text"
            )
            raise ParameterError("x", batch[0], f"of {expected} rows, as the memory of {method}", message)
        strategy = self.distribute_strategy
        replicas = strategy.num_replicas_in_sync
        data = tuple(to_replicas(strategy, np.split(array, replicas), array.dtype) for array in batch)
        state = LoopState(log_names, batches, mems)
        with self.using_loop(state):
            self.reset_metrics()
            logs = function(iter([data]))
        self._loop_states[method] = state
        return {name: float(value) for name, value in logs.items()}
