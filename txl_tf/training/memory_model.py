"""`compile`, `fit` and `evaluate` of Keras for a model with memory, on one device and on many.

    fit                 checks the arguments, and starts the memory
        fitting.fit     the loop over epochs and calls of the graph, with callbacks; training/fitting.py
        Steps           the steps of one call, on all replicas; training/loop.py
        train_step      one step on one replica; training/segment_step.py
        segment_nll     a method of the subclass

The replicas divide the rows in order: replica r of R has the rows `[r * B / R, (r + 1) * B / R)` of every batch, and
their memory.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.calls import known_names
from txl_tf.config import at_least
from txl_tf.config.checks import check_parallel_parts
from txl_tf.data.order import is_shuffled
from txl_tf.data.text.batches import Segments
from txl_tf.data.text.checked_batches import Batches, check_batches, plain_messages
from txl_tf.errors import ParameterError
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.nn.adaptive import check_capacities
from txl_tf.nn.checkpointed import Checkpointed
from txl_tf.nn.part_list import KerasList, fix_list
from txl_tf.schema import check_names, keywords_of
from txl_tf.training import fitting
from txl_tf.training.compiled_metrics import numbers_in, refuse_taken_names, results_of, set_numbers
from txl_tf.training.distribution import (
    all_rows,
    divided,
    is_default,
    num_workers,
    own_rows,
    rows_of_this_worker,
    to_replicas,
)
from txl_tf.training.keras_arguments import (
    IN_ORDER,
    UNUSED_HOOKS,
    by_name,
    check_steps_take,
    check_switches,
    checked_metric_names,
    is_overridden,
    refuse,
    refuse_hooks,
)
from txl_tf.training.loop import LoopState, Steps
from txl_tf.training.segment_step import CarriedByParts, SegmentStep
from txl_tf.training.single_batches import SingleBatches
from txl_tf.training.trained_model import SUMS, MethodLock

logger = logging.getLogger("txl_tf")

# Arguments of `compile` that become attributes, except Keras's own.
COMPILE_ARGUMENTS = ("gradient_accumulation_steps", "parallel_parts", "static_shapes", "bin_capacities")

# Keys of `metric_totals`, besides `SUMS`.
_OWN_LOG = f"{SUMS}:log:"  # beginning of the key of an additional log of a user's own step
_USER_METRIC = f"{SUMS}:metric:"  # beginning of the key of a metric that the user has compiled or set


class MemoryModel(SingleBatches, SegmentStep, Checkpointed, keras.Model):
    """A Keras model that is trained on consecutive segments of text.

    A subclass has a `network` with `n_token` and `cutoffs`, a `seed`, and four methods that run on one replica, see
    `TransformerXLLM`: `initial_mems` and `segment_nll` for training, `start_evaluation` and `evaluation_nll` for
    evaluation, which may have the memory in another form. `evaluation_nll` must also take the memory of `initial_mems`,
    which `test_on_batch` uses.

    Threads: every `evaluate` has its own memory and sums, so several can run at the same time, also during `fit`. Steps
    of one model run one after the other. Two methods that train cannot run at the same time, see `MethodLock`.

    Attributes:
        loop: the `LoopState` of the method that this thread runs, or of the last `fit`.
        stepping: a lock that is held while a step runs.
        stop_agreed: whether the current step should be the last. It is the same on every worker.
        running_method: "fit" or "evaluate" while one of them runs in any thread, else `None`.
        user_metrics: metrics that the user has added.
    """

    carried_names = ("mems",)
    stop_agreed = False
    gradient_accumulation_steps: int = 1  # this and the next three are arguments of `compile`
    parallel_parts: int = 1
    static_shapes: bool = False
    bin_capacities: list[int] | None = None
    _metric_names: tuple[str, ...] = ()
    _validation: tuple[Any, Any] = (None, None)  # the `validation_data` of `fit`, as it was given and as `Batches`

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._fitted = LoopState()  # the state of the last `fit`
        self._this_thread = threading.local()  # its `loop` is the state of the method that this thread runs
        self._methods: list[str] = []  # names of the methods that run in any thread
        self._carried = threading.local()  # see `SegmentStep`
        self._method_locks = {"training": MethodLock(), "test_on_batch": MethodLock()}
        self.stepping = threading.RLock()
        self.reset_memory()

    @property
    def loop(self) -> LoopState:
        return getattr(self._this_thread, "loop", None) or self._fitted

    @loop.setter
    def loop(self, state: LoopState) -> None:
        self._fitted = state

    @contextlib.contextmanager
    def using_loop(self, state: Any) -> Iterator[None]:
        """In this block, `state` is the `loop` of this thread. So evaluations in several threads have their own."""
        before = getattr(self._this_thread, "loop", None)
        self._this_thread.loop = state
        try:
            yield
        finally:
            self._this_thread.loop = before

    @known_names
    def compile(
        self, optimizer: Any = None, loss: None = None, loss_weights: Any = None, metrics: Any = None,
        weighted_metrics: Any = None, run_eagerly: bool = False, steps_per_execution: int = 1,
        jit_compile: bool | str = False, auto_scale_loss: bool = True, *, gradient_accumulation_steps: int = 1,
        parallel_parts: int = 1, static_shapes: bool = False, bin_capacities: Any = None,
    ) -> None:  # fmt: skip
        """Configures `fit` and `evaluate`. The loss is the model's own.

        Args:
            optimizer: from `make_optimizer`, or any Keras optimizer (which clips in another way than the original).
                Evaluation needs none.
            loss, loss_weights, weighted_metrics: not supported. Weights of labels apply to loss and metrics.
            metrics: list with `"perplexity"` (the exponential of the mean nll), `"bits"` (the mean nll in bits) or
                both. The logs contain them in addition to `loss`.
            run_eagerly: whether to run the steps without a graph, for debugging.
            steps_per_execution: number of steps in one call of the compiled graph.
            jit_compile: whether to compile forward and backward pass with XLA, or "auto", see Keras.
            auto_scale_loss: whether to scale the loss if the model computes in float16 with weights in float32.
            gradient_accumulation_steps: number of parts of a batch, each with its share of the rows, which are computed
                one after the other to save memory. The result is the same as for the whole batch.
            parallel_parts: number of parts of a batch (or of each of the parts above) that are computed at the same
                time: a processor is faster if each of its cores computes a part. Call `txl_tf.set_threads` before. The
                result is the same as for the whole batch. In training, each part holds gradients of all weights. An
                evaluation has as many parts, or the largest divisor of this number that also divides the rows. Steps
                that you override have parts only if they call those of this class in training; own `test_step`s and
                `test_on_batch` have none.
            static_shapes: whether all tensors of a step, and of `generate`, have static shapes, as TPUs need.
            bin_capacities: list of int, with static shapes: the largest number of tokens of each cluster except the
                first, in one part of a batch on one replica, see `txl_tf.choose_bin_capacities`. Further tokens are
                left out of loss and count; the logs contain their number, `overflow`. With `None`, as in evaluation, no
                token is left out.

        Raises:
            ParameterError: an argument is out of its range, or the model overrides a hook of Keras that it does not
                use, such as `compute_loss`. It does use overridden steps, see `SegmentStep`.
        """
        self._check_hooks()
        refuse("compile", {"loss": loss, "loss_weights": loss_weights, "weighted_metrics": weighted_metrics})
        metrics = checked_metric_names(metrics)
        check_switches(
            jit_compile, run_eagerly=run_eagerly, auto_scale_loss=auto_scale_loss, static_shapes=static_shapes
        )
        at_least(1)("steps_per_execution", steps_per_execution)
        at_least(1)("gradient_accumulation_steps", gradient_accumulation_steps)
        at_least(1)("parallel_parts", parallel_parts)
        check_parallel_parts(parallel_parts, static_shapes, jit_compile)
        if bin_capacities is not None:
            if not static_shapes:
                raise ParameterError("bin_capacities", bin_capacities, "None without static_shapes")
            check_capacities(bin_capacities, len(self.network.cutoffs))
            bin_capacities = fix_list("bin_capacities", KerasList(bin_capacities))
        super().compile(
            optimizer, jit_compile=jit_compile, steps_per_execution=steps_per_execution, run_eagerly=run_eagerly,
            auto_scale_loss=auto_scale_loss,
        )  # fmt: skip
        self._metric_names = metrics
        self.__dict__.update(  # only `compile` can set these attributes
            gradient_accumulation_steps=gradient_accumulation_steps, parallel_parts=parallel_parts,
            static_shapes=static_shapes, bin_capacities=bin_capacities, auto_scale_loss=auto_scale_loss,
        )  # fmt: skip

    def compile_arguments(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in COMPILE_ARGUMENTS}
        return {**super().compile_arguments(), **own, "metrics": list(self._metric_names)}

    def _check_hooks(self) -> None:
        """Raises ParameterError if the model overrides a hook of Keras that it does not use.

        Hooks of `predict` are allowed if `predict` and `predict_on_batch` are both overridden, too.
        """
        unused = dict(UNUSED_HOOKS)
        if is_overridden(self, "predict") and is_overridden(self, "predict_on_batch"):
            del unused["predict_step"], unused["make_predict_function"]
        refuse_hooks(self, unused)
        check_steps_take(self, "train_step", "test_step")

    def _check_metric_names(self) -> None:
        """Raises ParameterError if a user's metric has the name of a log: it would not be reported."""
        refuse_taken_names(self, (), self._log_names())

    def fit(
        self, x: tf.data.Dataset | Segments | None = None, *args: Any, allow_shuffled: bool = False, **kwargs: Any
    ) -> Any:
        """Trains on batches of consecutive segments, and carries the memory from batch to batch.

        Row r of a batch continues row r of the previous batch. The memory starts from zeros. As in the original, it is
        kept at the end of an epoch, where the text starts again.

        Args:
            x: `tf.data.Dataset` of `(tokens, labels)`, int `[batch, tgt_len]` each. A batch is divided among all
                replicas, and every worker must be given the whole dataset. Or of `(tokens, labels, weights)`, where
                weights are not negative, `[batch, tgt_len]` for every label or `[batch]` for every row. A label of -100
                has the weight 0. The loss is the sum of weight times nll, divided by the sum of the weights, for any
                number of replicas and of `gradient_accumulation_steps`. `tgt_len` may vary unless shapes are static.
                The number of rows may vary if the model has no memory and its shapes are not static. Or
                `txl_tf.Segments`, of which every worker reads only its own rows. In place of tokens, the dataset may
                have a dictionary `{"tokens": ..., "done": ...}`: `done`, bool `[batch, tgt_len]`, is true at the last
                token of a document or an episode, see `LanguageModel.score`.
            *args, **kwargs: arguments of `keras.Model.fit`, such as `epochs`, `steps_per_epoch`, `callbacks` and
                `validation_data` (a dataset of the same kind). Arguments that assume independent samples, such as
                `shuffle`, are not supported.
            allow_shuffled: whether to train on a dataset with shuffled segments, where each row gets the memory of
                another text. Without memory, this is always allowed. `txl_tf/data/order.py` defines what is shuffled.

        Returns:
            The Keras `History`. The logs of a batch are `loss` (the mean nll in nats), metrics, `grad_norm` (the global
            norm before clipping) and, with static shapes, `overflow`. In the logs of an epoch, `loss` and metrics are
            those of all its tokens, `grad_norm` is the mean over the steps and `overflow` the sum. Other logs of a step
            that you have overridden are reported as their mean over the steps. Keras metrics that are attributes of the
            model are reported, too.

        Raises:
            ParameterError: `x` is not such a dataset, its segments are shuffled, an argument cannot be used, a metric
                of yours has the name of a log, or another thread runs `fit`.
            tf.errors.InvalidArgumentError: an id is outside the vocabulary, a weight is negative or not finite, labels
                have another shape than their tokens, or a batch has another number of rows than the first or, where
                that is allowed, one that the replicas and parts do not divide.
        """
        self.check_compiled("fit")
        kwargs = {"steps_per_epoch": None, **by_name(super().fit, x, *args, **kwargs)}
        with self._method_locks["training"]("fit"), plain_messages(), self._marked_as_running("fit"):
            batches = self._prepare(kwargs.pop("x", None), allow_shuffled=allow_shuffled)
            refuse("fit", kwargs)
            self.check_steps("steps_per_epoch", kwargs["steps_per_epoch"])
            self._ready_to_train("fit")
            self.check_averages()
            start = functools.partial(self._on_replicas, self.initial_mems)
            self.loop = LoopState(self._log_names(), batches, start(batches.rows), start)
            epochs = self._epochs(batches, kwargs["steps_per_epoch"])
            validation = kwargs.get("validation_data")
            if validation is not None:
                prepared = self._prepare(validation, True, "validation_data", allow_shuffled)
                self._validation = (validation, prepared)
            options = {"steps": kwargs.get("validation_steps"), "allow_shuffled": allow_shuffled, "return_dict": True}

            def validate(callbacks):
                return self.evaluate(validation, callbacks=callbacks, **options)

            self.make_train_function()
            run_call = self._current("train_function")
            try:
                return fitting.fit(self, run_call, epochs, kwargs, None if validation is None else validate)
            finally:
                self._validation = (None, None)

    def evaluate(
        self, x: tf.data.Dataset | Segments | None = None, *args: Any, allow_shuffled: bool = False, **kwargs: Any
    ) -> Any:
        """The mean nll of a text in nats per token. The memory starts from zeros and is carried from batch to batch.

        Several threads may call it at the same time, also during `fit`. Each step uses the current weights. If the user
        has added metrics, evaluations run one after the other.

        Args:
            x, allow_shuffled: see `fit`.
            *args, **kwargs: arguments of `keras.Model.evaluate`, see `fit`.

        Returns:
            float: the sum of weight times nll over all batches, divided by the sum of the weights. Without weights, it
            is the mean over all tokens. With metrics, a list of the loss and the metrics. With `return_dict=True`, a
            dictionary of them.

        Raises:
            ParameterError: as `fit`. That another thread runs `fit` is an error only if the user has added metrics,
                which both methods update.
            tf.errors.InvalidArgumentError: as `fit`.
        """
        self.check_compiled("evaluate")
        kwargs = by_name(super().evaluate, x, *args, **kwargs)
        check_names("evaluate", kwargs, keywords_of(super().evaluate))  # also names with `_`
        x = kwargs.pop("x", None)
        return_dict = kwargs.pop("return_dict", False)
        self._check_hooks()
        self._check_metric_names()
        given, prepared = self._validation
        if x is given and prepared is not None:  # `fit` calls this method, and has prepared the dataset
            batches: Any = dataclasses.replace(prepared)  # a copy, which counts its own batches
        else:
            batches = self._prepare(x, evaluation=True, allow_shuffled=allow_shuffled)
        refuse("evaluate", kwargs)
        steps = kwargs.get("steps")
        start = self._start_evaluation(batches)
        state = LoopState(tuple(self.metrics_names), batches, start=start, steps_left=steps)
        # A user's metrics are shared with `fit`, because they are not part of the loop's state.
        lock = self._method_locks["training"]("evaluate") if self.user_metrics else contextlib.nullcontext()
        with lock, self.using_loop(state), plain_messages(), self._marked_as_running("evaluate"):
            self.make_test_function()
            epochs = self._epochs(batches, steps)
            logs = fitting.evaluate(self, self._current("test_function"), epochs, kwargs)
        return self._result(logs, return_dict)

    def _epochs(self, batches: Batches, steps: int | None) -> fitting.Epochs:
        """Divides epochs of `steps` steps into calls; with `None`, epochs of all batches."""
        count = batches.count
        if batches.repeated:  # the dataset itself has no end
            steps = steps or count
            count = tf.data.INFINITE_CARDINALITY
        return fitting.Epochs(batches.dataset, count, steps, self.steps_per_execution)

    def _current(self, function: str) -> Callable[[Any], dict[str, Any]]:
        """A function that calls the current value of the attribute `function`, which a callback may have replaced."""
        return lambda iterator: getattr(self, function)(iterator)

    def _start_evaluation(self, batches: Any) -> Callable[[int], Any]:
        """A function of a number of rows that returns the first memory of an evaluation.

        It is the memory of training if a user has overridden `segment_nll` or `initial_mems`, but not `evaluation_nll`.
        """
        own = is_overridden(self, "segment_nll") or is_overridden(self, "initial_mems")
        if own and not is_overridden(self, "evaluation_nll"):
            return functools.partial(self._on_replicas, self.initial_mems)
        # An own step calls `evaluation_nll` itself, for all rows.
        parts = 1 if is_overridden(self, "test_step") else self.parallel_parts

        def start(rows: int, tgt_len: int) -> Any:
            """The first memory of the rows of a replica, or of each of their parts."""
            n = math.gcd(parts, rows)
            if n == 1:
                return self.start_evaluation(rows, tgt_len)
            return CarriedByParts(tuple(self.start_evaluation(rows // n, tgt_len) for _ in range(n)))

        return lambda rows: self._on_replicas(start, rows, batches.tgt_len)

    @contextlib.contextmanager
    def _marked_as_running(self, method: str) -> Iterator[None]:
        """In this block, `running_method` knows that `method` runs."""
        self._methods.append(method)
        try:
            yield
        finally:
            self._methods.remove(method)

    @property
    def running_method(self) -> str | None:
        """ "fit" or "evaluate" while one of them runs in any thread, else `None`."""
        return self._methods[0] if self._methods else None

    def _result(self, logs: Any, return_dict: bool) -> Any:
        """Logs in Keras's form: a dictionary or, without `return_dict`, a list of the values, or the loss alone.

        The list has the loss, the metrics and then other values, without `grad_norm` and `overflow`.
        """
        logs = {name: logs[name] for name in (*self.metrics_names, *sorted(logs.keys() - {*self.metrics_names}))}
        if return_dict:
            return logs
        results = [value for name, value in logs.items() if name not in ("grad_norm", "overflow")]
        return results if len(results) > 1 else results[0]

    # ------------------------------------------------------------------------------------- what the loops call

    def make_train_function(self, force: bool = False) -> None:
        """Keras's method. Makes the function again if a user has replaced a method that it calls, or with `force`."""
        force = self.hooks_changed("train_function", "train_step", "segment_nll", "call") or force
        if self.train_function is None or force:
            jitted = tf.function(self._loss_and_gradients, jit_compile=True) if self.jit_compile else None
            self._compiled_gradients = jitted
            self.train_function = Steps(self, "train_step", self._log_names())

    def make_test_function(self, force: bool = False) -> None:
        """See `make_train_function`."""
        force = self.hooks_changed("test_function", "test_step", "segment_nll", "evaluation_nll", "call") or force
        if self.test_function is None or force:
            self.test_function = Steps(self, "test_step", tuple(self.metrics_names))

    def _log_names(self) -> tuple[str, ...]:
        """Names of the logs of every training step. A user's own step may have additional ones."""
        names = (*self.metrics_names, "grad_norm")
        return (*names, "overflow") if self.static_shapes else names

    @property
    def metrics_names(self) -> list[str]:
        """Names of the results of `evaluate`, in order."""
        return ["loss", *self._metric_names]

    @property
    def user_metrics(self) -> list[keras.metrics.Metric]:
        """The user's metrics: attributes of the model and of its layers, or the result of an overridden `metrics`.

        Those of layers that are Keras models themselves do not count.
        """
        if is_overridden(self, "metrics"):
            return self.metrics
        # `metrics` also contains Keras's own metric "loss", whose name is among the logs.
        return [metric for metric in self.metrics if metric.name not in self._log_names()]

    def results_of_user_metrics(self) -> dict[str, Any]:
        """`{name: result}` of `user_metrics`."""
        return results_of(self.user_metrics)

    def reset_metrics(self) -> None:
        for metric in self.metrics:
            metric.reset_state()
        self.loop.begin()

    def get_metrics_result(self) -> dict[str, Any]:
        return {**self.loop.logs(), **self.results_of_user_metrics()}

    # ---------------------------------------------------------------------------------------- before the first step

    def _ready_to_train(self, method: str) -> None:
        """Builds the optimizer. Raises ParameterError if `method` cannot train the model.

        It cannot without an optimizer, with weights of a dtype that loses small updates, if a user has overridden a
        hook that it would not use, or if a user's metric has the name of a log.
        """
        if self.optimizer is None:
            message = f"{method} needs an optimizer, got None: compile with txl_tf.make_optimizer(...)"
            raise ParameterError("optimizer", None, "given to compile", message)
        self._check_hooks()
        self._check_metric_names()
        self.check_weights()
        self.build_optimizer()

    def _check_rows(self, rows: int, parts: int) -> None:
        """Raises ParameterError unless the rows can be divided among the replicas, and on each into `parts` parts."""
        replicas = self.distribute_strategy.num_replicas_in_sync
        if rows % (replicas * parts):
            got = f"{rows} rows on {replicas} replicas"
            if parts > 1:
                got += f" in {parts} parts (gradient_accumulation_steps times parallel_parts)"
            message = f"the number of rows of the batch must be divisible by the number of replicas, got {got}"
            raise ParameterError("batch", rows, f"a multiple of {replicas * parts} rows", message)

    def _prepare(
        self, x: tf.data.Dataset | Segments | None, evaluation: bool = False, name: str = "x",
        allow_shuffled: bool = False,
    ) -> Batches:  # fmt: skip
        """The checked dataset as distributed `Batches`. With several workers, it has only the rows of this worker.

        Args:
            x: the dataset, see `fit`.
            evaluation: whether it is for an evaluation.
            name: name of the argument, for messages.
            allow_shuffled: see `fit`.
        """
        if not isinstance(allow_shuffled, bool):
            raise ParameterError("allow_shuffled", allow_shuffled, [True, False])
        strategy = self.distribute_strategy
        parts = 1 if evaluation else self.parts_of_batch
        # Several steps in one graph need batches of one form.
        options: dict[str, Any] = {"weighs": "always" if self.steps_per_execution > 1 else "where needed"}
        dataset: Any = x  # `check_batches` checks it
        rows = None
        if isinstance(x, Segments):
            rows = x.batch_size
            self._check_rows(rows, parts)
            dataset = x.dataset(rows_of_this_worker(strategy, rows))
            options = {"weighs": "never"}  # all workers must run the same step, whichever labels their rows have
        elif not self.network.mem_len and not self.static_shapes:
            options["rows_divide_by"] = strategy.num_replicas_in_sync * parts
        batches = check_batches(dataset, self.network.n_token, self.static_shapes, evaluation, name, **options)
        if self.network.mem_len and not allow_shuffled and is_shuffled(dataset):
            message = (
                f"{name} must not be shuffled: {IN_ORDER}, whose memory it is given. Shuffle documents before they are "
                "cut into segments, or allow it on purpose by allow_shuffled=True"
            )
            raise ParameterError(name, x, "a dataset of segments in the order of the text", message)
        if rows is None:
            rows = batches.rows
            self._check_rows(rows, parts)
        if num_workers(strategy) == 1:
            if not is_default(strategy):
                batches.dataset = divided(batches.dataset, strategy)
            return batches
        if batches.count == tf.data.UNKNOWN_CARDINALITY:
            allowed = "of a known number of batches where several workers train together"
            raise ParameterError(name, x, allowed, f"{name} must be {allowed}")
        # The dataset that was made of `Segments` has only the rows of this worker.
        mine = own_rows(batches.dataset, strategy) if dataset is x else batches.dataset
        mine = divided(mine.repeat(), strategy)
        return Batches(mine, rows, batches.tgt_len, batches.count, batches.count > 0, batches.any_rows)

    def _on_replicas(self, function: Any, rows: int, *args: Any) -> Any:
        """Calls `function(share, *args)` on every replica, where `share` is the number of rows of the replica.

        Returns the results as a value of all replicas.
        """
        strategy = self.distribute_strategy
        share = rows // strategy.num_replicas_in_sync
        with self.stepping:
            # Models on TPUs have static shapes, and a TPU computes only inside `run`.
            if strategy.num_replicas_in_sync == 1 and not self.static_shapes:
                return function(share, *args)
            return tf.function(strategy.run, autograph=False)(function, args=(share, *args))

    # --------------------------------------------------------------------------------------------- what is resumed

    @property
    def metric_totals(self) -> dict[str, np.ndarray]:
        own = {f"{_OWN_LOG}{name}": np.array([float(x) for x in pair]) for name, pair in self.loop.own_sums.items()}
        of_user = {f"{_USER_METRIC}{metric.name}": numbers_in([metric]) for metric in self.user_metrics}
        return {SUMS: self.loop.totals.numpy(), **own, **of_user}

    def set_metric_totals(self, sums: dict[str, np.ndarray]) -> None:
        self.loop.totals = tf.constant(sums[SUMS], tf.float64)
        own = {key.removeprefix(_OWN_LOG): pair for key, pair in sums.items() if key.startswith(_OWN_LOG)}
        self.loop.own_sums = {name: (float(total), int(steps)) for name, (total, steps) in own.items()}
        for metric in self.user_metrics:
            try:
                set_numbers([metric], sums.get(f"{_USER_METRIC}{metric.name}", []))
            except ParameterError:
                logger.warning("metric %s starts from zero: the checkpoint does not have its sums", metric.name)

    def carried_arrays(self) -> dict[str, np.ndarray]:
        """`{"mems": ...}`: the memory of all replicas, `[n_layer, batch, mem_len, d_model]`.

        It is float32, or float64 if the model is float64.
        """
        mems = all_rows(self.distribute_strategy, self.loop.mems)
        return {"mems": np.stack([at_least_float32(mem) for mem in mems])}

    def set_carried_arrays(self, arrays: Any) -> None:
        """Restores the memory from `carried_arrays`. A callback calls it after `fit` has begun.

        Raises:
            ParameterError: the memory has another shape.
        """
        mems = arrays["mems"]
        shape = self.carried_arrays()["mems"].shape
        if mems.shape != shape:
            allowed = f"[n_layer, batch, mem_len, d_model] = {list(shape)}"
            raise ParameterError("mems", mems, allowed, f"mems must be {allowed}, got {list(mems.shape)}")
        shares = np.split(mems, self.distribute_strategy.num_replicas_in_sync, axis=1)
        layers = range(len(mems))
        self.loop.mems = [
            to_replicas(self.distribute_strategy, [share[i] for share in shares], self.compute_dtype) for i in layers
        ]
