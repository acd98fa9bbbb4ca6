"""The loop over steps and replicas: memory and sums go from one step to the next as tensors, on their devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.data.batches import Batches
from txl_tf.training.distribution import any_worker

NO_TOTALS = np.zeros(5)  # nll, tokens counted, tokens left out, gradient norm, steps: sums over an epoch


@dataclasses.dataclass
class LoopState:
    """All that goes from one call of `fit`'s or `evaluate`'s loop to the next. An evaluation has a state of its own.

    Attributes:
        batches: what is read.
        mems: memory, a share of the rows on every replica.
        totals: float64 `[5]`, see `NO_TOTALS`; the logs of an epoch are computed from them.
        log_names: names of these logs.
    """

    batches: Batches | None = None
    mems: Any = None
    totals: tf.Tensor = dataclasses.field(default_factory=lambda: tf.constant(NO_TOTALS))
    log_names: tuple[str, ...] = ()

    def logs(self) -> dict[str, float]:
        """The logs of an epoch: mean nll, mean gradient norm, sum of the tokens left out."""
        nll, tokens, overflow, grad_norm, steps = self.totals.numpy()
        logs = {"loss": nll / max(tokens, 1), "grad_norm": grad_norm / max(steps, 1), "overflow": overflow}
        return {name: float(logs[name]) for name in self.log_names}


def make_loop(model: Any, step: Callable, log_names: tuple[str, ...]) -> Callable:
    """The function that Keras calls for the next `steps_per_execution` steps.

    There are three functions, one inside the other:

        replica_step        one step of one replica, on its share of the rows
        one_step            one step of all replicas, and the sums of the logs: a graph
        several_steps       a loop of `one_step` in one graph, for `steps_per_execution` above 1

    What `tf.distribute` hands out are values of all replicas ("per replica"). `mems` is such a value: it goes into
    `strategy.run` and comes out of it without ever leaving its replica. The logs of a step are the same on every
    replica, so the first replica's count.

    Args:
        model: `MemoryModel`, whose `loop` is the state that the function reads and replaces.
        step: function of `((tokens, labels), mems)` that returns `(logs, new_mems)`, for one replica.
        log_names: names of the logs that it returns, `loss` the first.
    """
    strategy = model.distribute_strategy
    missing = {"overflow": 0.0, "grad_norm": 0.0}

    def one_step(shape, data, mems, totals):
        @tf.autograph.experimental.do_not_convert
        def replica_step(data, mems):
            for ids in data:
                ids.set_shape(shape)  # tf.distribute forgets it
            return step(data, mems)

        logs, mems = strategy.run(replica_step, args=(data, mems))
        logs = {name: strategy.experimental_local_results(value)[0] for name, value in logs.items()}
        exact = {name: tf.cast(value, totals.dtype) for name, value in {**missing, **logs}.items()}
        nll = exact["loss"] * exact["tokens"]
        totals += tf.stack([nll, exact["tokens"], exact["overflow"], exact["grad_norm"], 1.0])
        return {name: logs[name] for name in log_names}, mems, totals

    def several_steps(n, shape, iterator, mems, totals):
        logs = dict.fromkeys(log_names, 0.0)
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
        shape = (rows, state.batches.tgt_len if model.static_shapes else None)
        for n in state.batches.calls(iterator, model.steps_per_execution):
            if n > 1:
                results = several_steps(tf.constant(n), shape, iterator, state.mems, state.totals)
            else:
                data = next(iterator, None)
                if data is None:
                    break
                results = one_step(shape, data, state.mems, state.totals)
            logs, state.mems, state.totals = results
        if logs is None:
            raise StopIteration
        state.log_names, model.stop_agreed = log_names, stop
        return logs

    return function
