"""The loop over steps and replicas: memory and sums go from one step to the next as tensors, on their devices."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.data.text.batches import Batches
from txl_tf.layers.common.fusion import fusing
from txl_tf.training.distribution import any_worker
from txl_tf.training.keras_arguments import METRICS

NO_TOTALS = np.zeros(5)  # nll, tokens counted, tokens left out, gradient norm, steps: sums over an epoch


@dataclasses.dataclass
class LoopState:
    """All that goes from one call of the loop to the next. `fit`, `evaluate` and single batches have one each."""

    log_names: tuple[str, ...] = ()
    batches: Batches | None = None
    mems: Any = None  # memory, a share of the rows on every replica
    start: Callable | None = None  # makes the memory where there is none: of an evaluation
    totals: tf.Tensor = dataclasses.field(default_factory=lambda: tf.constant(NO_TOTALS))

    def begin(self) -> None:
        """An epoch or an evaluation begins. Callbacks have been told, and may have set the weights."""
        self.totals = tf.constant(NO_TOTALS)
        if self.start is not None:
            self.mems = self.start()

    def logs(self) -> dict[str, float]:
        """The logs of an epoch: mean nll and metrics of it, mean gradient norm, sum of the tokens left out."""
        nll, tokens, overflow, grad_norm, steps = self.totals.numpy()
        logs = {"loss": nll / max(tokens, 1), "grad_norm": grad_norm / max(steps, 1), "overflow": overflow}
        logs |= metrics_of(tf.constant(logs["loss"]), self.log_names)
        return {name: float(logs[name]) for name in self.log_names}


def metrics_of(nll: tf.Tensor, log_names: tuple[str, ...]) -> dict[str, tf.Tensor]:
    """The metrics among `log_names`, of a mean nll."""
    return {name: METRICS[name](nll) for name in log_names if name in METRICS}


def make_loop(model: Any, step: Callable, log_names: tuple[str, ...]) -> Callable:
    """The function that Keras calls for the next `steps_per_execution` steps.

        replica_step        one step of one replica, on its share of the rows
        one_step            one step of all replicas, and the sums of the logs: a graph
        several_steps       a loop of `one_step` in one graph, for more steps a call

    `strategy.run` takes and returns values of all replicas. `mems` is such a value: it goes in and out without ever
    leaving its replica. The logs of a step are the same on every replica, so the first replica's count. The function
    reads and changes `model.loop`; `step` is `train_step` or `test_step`.
    """
    strategy, zero = model.distribute_strategy, np.zeros([], model.loss_dtype)

    def one_step(shape, data, mems, totals):
        @tf.autograph.experimental.do_not_convert
        def replica_step(data, mems):
            for ids in data:
                ids.set_shape(shape)  # tf.distribute forgets it
            # Of a length that may vary, nothing is compiled.
            with contextlib.nullcontext() if shape[1] else fusing(False):
                return step(data, mems)

        logs, mems = strategy.run(replica_step, args=(data, mems))
        logs = {name: strategy.experimental_local_results(value)[0] for name, value in logs.items()}
        logs = {"overflow": zero, "grad_norm": zero, **logs}
        exact = {name: tf.cast(value, totals.dtype) for name, value in logs.items()}
        nll = exact["loss"] * exact["tokens"]
        totals += tf.stack([nll, *(exact[name] for name in ("tokens", "overflow", "grad_norm")), 1.0])
        logs |= metrics_of(logs["loss"], log_names)
        return {name: logs[name] for name in log_names}, mems, totals

    def several_steps(n, shape, iterator, mems, totals):
        logs = dict.fromkeys(log_names, zero)
        for _ in tf.range(n):
            # An evaluation writes to its memory in place: no step may begin before the last one has read it.
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            logs, mems, totals = one_step(shape, next(iterator), mems, totals)
        return logs, mems, totals

    if not model.run_eagerly:
        one_step = tf.function(one_step, reduce_retracing=True)
        several_steps = tf.function(several_steps, reduce_retracing=True)

    def function(iterator):
        stop, logs, state = any_worker(strategy, model.stop_requested), None, model.loop
        rows = state.batches.rows // strategy.num_replicas_in_sync
        # Whether a length is known must depend neither on which segment comes first nor on how many steps are left: a
        # resumed run would round otherwise than one without a break.
        tgt_len = state.batches.tgt_len if model.static_shapes or model.steps_per_execution == 1 else None
        for n in state.batches.calls(iterator, model.steps_per_execution):
            if n > 1:
                results = several_steps(tf.constant(n), (rows, tgt_len), iterator, state.mems, state.totals)
            else:
                data = next(iterator, None)
                if data is None:
                    break
                length = strategy.experimental_local_results(data[0])[0].shape[1]
                shape = (rows, tgt_len if length == tgt_len else None)
                results = one_step(shape, data, state.mems, state.totals)
            logs, state.mems, state.totals = results
        if logs is None:
            raise StopIteration
        model.stop_agreed = stop
        return logs

    return function
