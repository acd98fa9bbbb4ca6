"""The steps of `fit`, `evaluate` and single batches, on all replicas.

Memory and sums pass from step to step as tensors that stay on their devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.kernels.fusion import fusing
from txl_tf.nn.parts import is_overridden
from txl_tf.training.distribution import any_worker, replica_tensors
from txl_tf.training.keras_arguments import METRICS


class Totals(NamedTuple):
    """The sums over the steps of an epoch, in the order in which a tensor and checkpoints have them."""

    nll: Any  # of weight * nll
    tokens: Any  # of the weights
    overflow: Any  # of the numbers of tokens left out
    grad_norm: Any
    steps: Any  # the number of steps


NO_TOTALS = np.zeros(len(Totals._fields))


@dataclasses.dataclass
class LoopState:
    """The state between two calls of the loop. Every `fit`, `evaluate` and single batch has its own.

    Attributes:
        log_names: names of the logs that every step has. A user's own step may have additional ones.
        batches: `Batches`; `None` before the first `fit` or single batch.
        mems: the memory, of which every replica has its share of the rows; `None` until it is made. `fit` makes it at
            its start, an evaluation in its first step.
        start: function of a number of rows that makes the first memory; `None` for a single batch.
        steps_left: how many steps an evaluation may still run; `None` if their number is not limited.
        totals: the sums over the steps since `begin`, see `Totals`.
        begun: whether `begin` was called. If it was not when a step starts, a user's `reset_metrics` does not call the
            model's.
        own_sums: `{name: (sum, number of steps)}` of the additional logs of a user's own step.
        other_mems: `{number of rows: memory}` for batches with other numbers of rows than the first. Only models
            without memory have them, so their memory is empty.
    """

    log_names: tuple[str, ...] = ()
    batches: Any = None
    mems: Any = None
    start: Any = None
    steps_left: int | None = None
    totals: tf.Tensor = dataclasses.field(default_factory=lambda: tf.constant(NO_TOTALS))
    begun: bool = False
    own_sums: dict = dataclasses.field(default_factory=dict)
    other_mems: dict = dataclasses.field(default_factory=dict)

    def begin(self) -> None:
        """Resets the sums at the beginning of an epoch or an evaluation."""
        self.totals = tf.constant(NO_TOTALS)
        self.own_sums = {}
        self.begun = True

    def mems_of(self, rows: int) -> Any:
        """The memory for a batch with this number of rows.

        Only models without memory have batches of another size than the first; their memory is empty.

        In an evaluation, the memory is made here, in the first step, and not earlier: it may depend on the weights, and
        callbacks at the start of `evaluate` may set them.
        """
        if rows != self.batches.rows:
            if rows not in self.other_mems:
                self.other_mems[rows] = self.start(rows)
            return self.other_mems[rows]
        if self.mems is None:
            self.mems = self.start(rows)
        return self.mems

    def after_step(self, logs: dict[str, tf.Tensor], rows: int, mems: Any, totals: tf.Tensor) -> None:
        """Stores the results of a call of the graph for a batch, or for several batches, of this number of rows."""
        self.totals = totals
        if rows == self.batches.rows:
            self.mems = mems
        else:
            self.other_mems[rows] = mems
        for name in logs.keys() - {*self.log_names}:
            total, steps = self.own_sums.get(name, (0.0, 0))
            self.own_sums[name] = total + logs[name], steps + 1

    def take_steps(self, steps_per_execution: int) -> int:
        """Takes the steps of the next call from `steps_left`, and returns their number.

        They are `steps_per_execution` steps, or all that are left, if these are fewer.
        """
        if self.steps_left is None:
            return steps_per_execution
        steps = min(steps_per_execution, self.steps_left)
        self.steps_left -= steps
        return steps

    def logs(self) -> dict[str, float]:
        """The logs since `begin`: those in `log_names`, and the additional ones of a user's own step.

        The loss is the weighted mean over all tokens, 0 without tokens, and the metrics are computed from it.
        `overflow` is the number of tokens left out. The gradient norm and the additional logs are means over the steps.
        """
        sums = Totals(*self.totals.numpy())
        loss = sums.nll / sums.tokens if sums.tokens else 0.0
        logs = {"loss": loss, "grad_norm": sums.grad_norm / max(sums.steps, 1), "overflow": sums.overflow}
        logs |= metrics_of(tf.constant(loss), self.log_names)
        means = {name: float(total) / steps for name, (total, steps) in self.own_sums.items()}
        return {**{name: float(logs[name]) for name in self.log_names}, **means}


def metrics_of(nll: tf.Tensor, log_names: tuple[str, ...]) -> dict[str, tf.Tensor]:
    """The metrics in `log_names`, computed from a mean nll."""
    return {name: METRICS[name](nll) for name in log_names if name in METRICS}


class Steps:
    """The steps of one call of the graph, on all replicas: `steps(iterator)` takes an iterator of batches.

        __call__            the next `steps_per_execution` steps
        one_step            one step of all replicas, and the sums of the logs: a graph
        several_steps       a loop of `one_step` in one graph, for several steps in one call

    The call returns the logs of the last step with the results of the user's metrics. It reads and changes
    `model.loop`, and sets `model.stop_agreed`.

    `strategy.run` takes and returns values of all replicas. `mems` is such a value, which never leaves its replica. The
    logs of a step are the same on every replica, so those of the first replica are used. For additional logs of a
    user's own step, the mean over the replicas of this worker is used.

    Args:
        model: a `MemoryModel`.
        step_name: "train_step" or "test_step".
        log_names: names of the logs.
    """

    def __init__(self, model: Any, step_name: str, log_names: tuple[str, ...]) -> None:
        self.model = model
        self.step_name = step_name
        self.log_names = log_names
        self.strategy = model.distribute_strategy
        self.step = model.step_with_memory(step_name)
        self.zero = np.zeros([], model.loss_dtype)
        self.one_step: Callable[..., Any] = self._one_step
        self.several_steps: Callable[..., Any] = self._several_steps
        if not model.run_eagerly:
            # Steps are traced as they are written. AutoGraph is not needed, and would also rewrite a user's own step.
            self.one_step = tf.function(self._one_step, reduce_retracing=True, autograph=False)
            self.several_steps = tf.function(self._several_steps, reduce_retracing=True, autograph=False)

    def __call__(self, iterator: Any) -> dict[str, Any]:
        """Runs the steps of one call. Returns the logs of the last one. Raises StopIteration if no batch is left."""
        model = self.model
        stop = any_worker(self.strategy, model.stop_requested)
        logs = None
        state = model.loop
        if not state.begun and is_overridden(model, "reset_metrics"):
            allowed = "a method that calls super().reset_metrics(), which begins an epoch or an evaluation"
            raise ParameterError("reset_metrics", model.reset_metrics, allowed)
        replicas = self.strategy.num_replicas_in_sync
        usual_rows = state.batches.rows // replicas  # rows of a replica in most batches
        # Whether the length is static must not depend on the first segment or on the number of remaining steps.
        # Otherwise a resumed run would round differently from one that was not interrupted.
        tgt_len = state.batches.tgt_len if model.static_shapes or model.steps_per_execution == 1 else None
        for n in state.batches.calls(iterator, state.take_steps(model.steps_per_execution)):
            if n == 1:
                data = next(iterator, None)
                if data is None:
                    break
                rows, length, data = shape_and_data(data)
                known_rows = rows if model.static_shapes or rows == usual_rows else None
                run = functools.partial(self.one_step, (known_rows, tgt_len if length == tgt_len else None), data)
            else:
                rows = usual_rows
                run = functools.partial(self.several_steps, tf.constant(n), (rows, tgt_len), iterator)
            with model.stepping:
                logs, mems, totals = run(state.mems_of(rows * replicas), state.totals)
            state.after_step(logs, rows * replicas, mems, totals)
        if logs is None:
            raise StopIteration
        model.stop_agreed = stop
        return {**model.results_of_user_metrics(), **logs}

    def _one_step(self, shape: Any, data: Any, mems: Any, totals: Any) -> tuple[dict[str, Any], Any, Any]:
        """Returns `(logs, mems, totals)` after one step of all replicas.

        Args:
            shape: `(rows, length)` of a replica's share of the batch.
            data: the batch.
            mems, totals: as in `LoopState`.
        """

        def replica_step(data, mems):
            """The step of one replica."""
            for x in data:
                x.set_shape(shape)  # because tf.distribute loses it
            # If the shape may vary, XLA compiles no parts of the step: it would compile them for every shape.
            with fusing(False) if None in shape else contextlib.nullcontext():
                return self.step(data, mems)

        results, mems = self.strategy.run(replica_step, args=(data, mems))
        names = ("loss", "tokens", "overflow", "grad_norm")
        logs: dict[str, Any] = {"overflow": self.zero, "grad_norm": self.zero}
        own_logs = {}
        for name, value in results.items():
            values = replica_tensors(value)
            if name in (*names, *self.log_names):
                logs[name] = values[0]
            else:
                own_logs[name] = tf.reduce_mean(tf.stack(values), 0)
        loss, tokens, overflow, grad_norm = (tf.cast(logs[name], totals.dtype) for name in names)
        totals += tf.stack(Totals(loss * tokens, tokens, overflow, grad_norm, steps=1.0))
        logs |= metrics_of(logs["loss"], self.log_names)
        return {**{name: tf.cast(logs[name], self.zero.dtype) for name in self.log_names}, **own_logs}, mems, totals

    def _several_steps(self, n: Any, shape: Any, iterator: Any, mems: Any, totals: Any) -> list[Any]:
        """Returns `[logs, mems, totals]` after `n` steps, with the logs of the last one. Arguments: see `_one_step`.

        Raises:
            ParameterError: a step has other logs than `log_names`. A loop in a graph must start with values of the same
                names as its results, but the names of other logs are known only after a step.
        """

        def body(i, _, mems, totals):
            logs, mems, totals = self.one_step(shape, iterator.get_next(), mems, totals)
            extra_names = sorted(logs.keys() - {*self.log_names})
            if extra_names:
                what = f"{self.step_name} logs {', '.join(extra_names)} besides"
                raise ParameterError("steps_per_execution", self.model.steps_per_execution, f"1 where {what}")
            return [i + 1, logs, mems, totals]

        # An evaluation overwrites its memory: no step may begin before the previous one has read it.
        values = [tf.constant(0), dict.fromkeys(self.log_names, self.zero), mems, totals]
        return tf.while_loop(lambda i, *_: i < n, body, values, parallel_iterations=1)[1:]


def shape_and_data(data: tuple) -> tuple[int, int, tuple]:
    """`(rows, length, data)` of a distributed batch: the shape of a replica's share, and the batch.

    The batch is `(tokens, labels)`, `(tokens, labels, weights)` or `(tokens, labels, weights, done)`, see
    `data/text/checked_batches.py`. Weights of the shape `[rows, 0]` are left out. They mean that all labels count.
    """
    shapes = [replica_tensors(x)[0].shape for x in data]
    return *shapes[0], data if len(data) < 3 or shapes[2][1] else data[:2]
