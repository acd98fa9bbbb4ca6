"""Keras's `compile`, `fit` and `evaluate` for a model with memory, on one device and on many.

    fit -> the loop over steps, training/loop.py -> one step, training/segment_step.py -> segment_nll of the subclass

This file is the adapter to Keras: it checks what the methods are given, and starts, carries and saves the memory. Rows
are divided among the replicas in order: replica r of R holds the rows `[r * B / R, (r + 1) * B / R)` of every batch,
and the memory of these rows.
"""

import contextlib
import functools
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import at_least
from txl_tf.data.order import is_shuffled
from txl_tf.data.text.batches import Segments
from txl_tf.data.text.checked_batches import Batches, check_batches, plain_messages
from txl_tf.errors import ParameterError
from txl_tf.kernels.dtypes import at_least_float32
from txl_tf.nn.adaptive import check_capacities
from txl_tf.nn.checkpointed import Checkpointed
from txl_tf.schema import known_names
from txl_tf.training.distribution import all_rows, divided, num_workers, own_rows, rows_of_this_worker
from txl_tf.training.keras_arguments import (
    HOOKS_OF_MEMORY_MODEL,
    IN_ORDER,
    by_name,
    check_steps_take,
    is_own,
    metric_names,
    refuse,
    refuse_hooks,
)
from txl_tf.training.loop import LoopState, make_loop
from txl_tf.training.segment_step import SegmentStep
from txl_tf.training.single_batches import SingleBatches
from txl_tf.training.trained_model import Turns, results_of

# Arguments of `compile` that are attributes, besides Keras's.
OF_COMPILE = ("gradient_accumulation_steps", "static_shapes", "bin_capacities")


class MemoryModel(SingleBatches, SegmentStep, Checkpointed, keras.Model):
    """Keras model that is trained on consecutive segments of text.

    A subclass has a `network` with `n_token` and `cutoffs`, a `seed`, and four functions of one replica, see
    `TransformerXLLM`. For training: `initial_mems` and `segment_nll`. For evaluation, which may carry the memory in
    another form: `start_evaluation` and `evaluation_nll`; the latter must also take the memory of `initial_mems`, which
    `test_on_batch` carries.

    Threads: every `evaluate` has a memory and sums of its own, so several may run at once, also while `fit` runs. Steps
    of one model run one after the other. Two methods that train do not mix: see `Turns`.

    Attributes:
        loop: `LoopState` of what this thread runs; else of the last `fit`.
        stepping: held while a step runs.
        stop_agreed: whether the step that just ran should be the last, the same on every worker.
    """

    carried_names = ("mems",)
    stop_agreed = False
    gradient_accumulation_steps: int = 1  # of `compile`, as the next two
    static_shapes: bool = False
    bin_capacities: list[int] | None = None
    _metric_names: tuple[str, ...] = ()
    _validation_batches: Batches | None = None

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._fitted = LoopState()
        self._running = threading.local()  # its `loop` is the state of the method that this thread runs
        self._methods: list[str] = []  # that run in any thread
        self._carried = threading.local()  # the memory of a step with Keras's signature, see `SegmentStep`
        self._turns = {"training": Turns(), "test_on_batch": Turns()}
        self.stepping = threading.RLock()
        self.reset_memory()

    @property
    def loop(self):
        return getattr(self._running, "loop", None) or self._fitted

    @loop.setter
    def loop(self, state):
        self._fitted = state

    @contextlib.contextmanager
    def running(self, state):
        """Within it, `state` is the `loop` of this thread."""
        before = getattr(self._running, "loop", None)
        self._running.loop = state
        try:
            yield
        finally:
            self._running.loop = before

    @known_names
    def compile(
        self, optimizer=None, loss=None, loss_weights=None, metrics=None, weighted_metrics=None, run_eagerly=False,
        steps_per_execution=1, jit_compile=False, auto_scale_loss=True,
        *, gradient_accumulation_steps=1, static_shapes=False, bin_capacities=None,
    ):  # fmt: skip
        """Configures `fit` and `evaluate`. The loss is the model's own.

        Args:
            optimizer: from `make_optimizer`, or any Keras optimizer (which does not clip as the original's does).
                `None` is enough to evaluate.
            loss, loss_weights, weighted_metrics: none; Keras's names. Weights of labels weigh loss and metrics alike.
            metrics: list of `"perplexity"` (the exponential of the mean nll) and `"bits"` (the mean nll in bits): what
                the logs have besides `loss`, of the same tokens.
            run_eagerly: run the steps without a graph, for debugging.
            steps_per_execution: training steps in one call of the compiled graph.
            jit_compile: compile forward and backward pass with XLA.
            auto_scale_loss: scale the loss where the model computes in float16 with weights in float32.
            gradient_accumulation_steps: parts of a batch, each with its share of the rows, that are computed one after
                the other to save memory; the result is that of the whole.
            static_shapes: whether all tensors of a step, and of `generate`, have static shapes, as TPUs need.
            bin_capacities: list of int, with static shapes: most tokens of each bin but the first, in one part of a
                batch on one replica, see `txl_tf.choose_bin_capacities`. Tokens beyond are left out of loss and count,
                and the logs have their number, `overflow`. `None`: none is left out, as in evaluation.

        Raises:
            ValueError: an argument is out of its range, or the model has a hook of Keras that it would pass over, such
                as a `compute_loss` of its own. Steps of its own are used, see `SegmentStep`.
        """
        self._check_hooks()
        refuse("compile", {"loss": loss, "loss_weights": loss_weights, "weighted_metrics": weighted_metrics})
        metrics = metric_names(metrics)
        at_least(1)("steps_per_execution", steps_per_execution)
        at_least(1)("gradient_accumulation_steps", gradient_accumulation_steps)
        if bin_capacities is not None:
            if not static_shapes:
                raise ParameterError("bin_capacities", bin_capacities, "None without static_shapes")
            check_capacities(bin_capacities, len(self.network.cutoffs))
        super().compile(
            optimizer, jit_compile=jit_compile, steps_per_execution=steps_per_execution, run_eagerly=run_eagerly,
            auto_scale_loss=auto_scale_loss,
        )  # fmt: skip
        self._metric_names, self.auto_scale_loss = metrics, auto_scale_loss
        own = gradient_accumulation_steps, bool(static_shapes), bin_capacities
        self.__dict__.update(zip(OF_COMPILE, own, strict=True))  # only `compile` can set these attributes

    def compile_arguments(self):
        own = {name: getattr(self, name) for name in OF_COMPILE}
        return {**super().compile_arguments(), **own, "metrics": list(self._metric_names)}

    def _check_hooks(self):
        """Raises ParameterError where the model has a hook of Keras that it would pass over."""
        passed_over = dict(HOOKS_OF_MEMORY_MODEL)
        if is_own(self, "predict") and is_own(self, "predict_on_batch"):
            del passed_over["predict_step"], passed_over["make_predict_function"]
        refuse_hooks(self, passed_over)
        check_steps_take(self, "train_step", "test_step")

    def fit(self, x=None, *args, allow_shuffled=False, **kwargs):
        """Trains on batches of consecutive segments, the memory carried from batch to batch.

        Row r of a batch continues row r of the batch before it. The memory starts from zeros, and is kept at the end
        of an epoch, where the text starts again, as in the original.

        Args:
            x: `tf.data.Dataset` of `(tokens, labels)`, int `[batch, tgt_len]` each, the batch over all replicas; every
                worker gives the whole of it. Or of `(tokens, labels, weights)`: numbers, not below 0, of every label,
                `[batch, tgt_len]`, or of every row, `[batch]`. A label of -100 has the weight 0. The loss is the sum of
                weight times nll over the sum of the weights, whatever replicas and parts there are. `tgt_len` may vary
                unless shapes are static; the rows may vary if the model has no memory and its shapes are not static.
                Or `txl_tf.Segments`, of which every worker reads its own rows alone.
            *args, **kwargs: of `keras.Model.fit`, such as `epochs`, `steps_per_epoch`, `callbacks`, `validation_data`
                (a dataset of the same kind). Those for samples that are independent of each other are refused.
            allow_shuffled: whether to train on a dataset whose segments are shuffled, where each row gets the memory of
                another text. Without memory, this is always allowed. What counts as shuffled: `txl_tf/data/order.py`.

        Returns:
            The Keras `History`. The logs of a batch are the step's `loss` (mean nll in nats), metrics, `grad_norm`
            (global norm before clipping) and, with static shapes, `overflow`. In those of an epoch, `loss` and metrics
            are of all its tokens, `grad_norm` is the mean and `overflow` the sum. What a step of your own logs besides
            is reported, too, of an epoch its mean over the steps; and so are Keras metrics that are attributes of the
            model.

        Raises:
            ValueError: `x` is not such a dataset, its segments are shuffled, an argument cannot be used, or another
                thread runs `fit`.
            tf.errors.InvalidArgumentError: an id outside the vocabulary, a weight that is negative or not finite, or a
                batch of other rows than the first.
        """
        self._assert_compile_called("fit")
        kwargs = {"steps_per_epoch": None, **by_name(super().fit, x, *args, **kwargs)}
        with self._turns["training"]("fit"), plain_messages(), self._run("fit"):
            batches = self._prepare(kwargs.pop("x", None), allow_shuffled=allow_shuffled)
            refuse("fit", kwargs)
            self.check_steps(kwargs["steps_per_epoch"])
            self._ready_to_train("fit")
            start = functools.partial(self._on_replicas, self.initial_mems)
            self.loop = LoopState(self._log_names(), batches, start(batches.rows), start)
            if batches.repeated:
                kwargs["steps_per_epoch"] = kwargs["steps_per_epoch"] or batches.count
            if kwargs.get("validation_data") is not None:
                validation = self._prepare(kwargs["validation_data"], True, "validation_data", allow_shuffled)
                self._validation_batches, kwargs["validation_data"] = validation, validation.dataset
                if validation.repeated:
                    kwargs["validation_steps"] = kwargs.get("validation_steps") or validation.count
            return super().fit(batches.dataset, **{**kwargs, "shuffle": False})

    def evaluate(self, x=None, *args, allow_shuffled=False, **kwargs):
        """The mean nll of a text, in nats a token. The memory starts from zeros and is carried from batch to batch.

        Several threads may call it at once, also while `fit` runs: it takes the weights as they are at each step.

        Args:
            x, allow_shuffled: as in `fit`.
            *args, **kwargs: of `keras.Model.evaluate`, as in `fit`.

        Returns:
            float: the sum of weight times nll over the sum of the weights, of all batches; without weights, the nll of
            all tokens over their number. With metrics, a list of it and them; with `return_dict=True`,
            `{"loss": ...}` and the metrics.
        """
        self._assert_compile_called("evaluate")
        kwargs = by_name(super().evaluate, x, *args, **kwargs)
        x, return_dict = kwargs.pop("x", None), kwargs.pop("return_dict", False)
        if kwargs.get("_use_cached_eval_dataset"):  # the validation_data of `fit`
            batches: Any = self._validation_batches
        else:
            self._check_hooks()
            batches = self._prepare(x, evaluation=True, allow_shuffled=allow_shuffled)
            refuse("evaluate", kwargs)
            if batches.repeated:
                kwargs["steps"] = kwargs.get("steps") or batches.count
        state = LoopState(tuple(self.metrics_names), batches, start=self._start_evaluation(batches))
        # Metrics of the user's are not in the loop's state: `fit` counts in the same ones.
        turn = self._turns["training"]("evaluate") if self.own_metrics else contextlib.nullcontext()
        with turn, self.running(state), plain_messages(), self._run("evaluate"):
            logs = super().evaluate(batches.dataset, return_dict=True, **kwargs)
        return self._result(logs, return_dict)

    def _start_evaluation(self, batches):
        """A function of a number of rows that makes the memory of an evaluation.

        It is plain where the user has made other what a segment is computed from: `evaluation_nll` then takes that.
        """
        own = is_own(self, "segment_nll") or is_own(self, "initial_mems")
        if own and not is_own(self, "evaluation_nll"):
            return functools.partial(self._on_replicas, self.initial_mems)
        return lambda rows: self._on_replicas(self.start_evaluation, rows, batches.tgt_len)

    @contextlib.contextmanager
    def _run(self, method):
        self._methods.append(method)
        try:
            yield
        finally:
            self._methods.remove(method)

    @property
    def running_method(self):
        """ "fit" or "evaluate" while it runs in any thread, else `None`."""
        return self._methods[0] if self._methods else None

    def _result(self, logs, return_dict):
        """Logs as Keras returns them: a dictionary; or loss and metrics in order, then others; or the loss alone."""
        logs = {name: logs[name] for name in (*self.metrics_names, *sorted(logs.keys() - {*self.metrics_names}))}
        if return_dict:
            return logs
        results = [value for name, value in logs.items() if name not in ("grad_norm", "overflow")]
        return results if len(results) > 1 else results[0]

    # ------------------------------------------------------------------------------------- what Keras calls, and when

    def make_train_function(self, force=False):
        force = self.hooks_changed("train_function", "train_step", "segment_nll", "call") or force
        if self.train_function is None or force:
            jitted = tf.function(self._loss_and_gradients, jit_compile=True) if self.jit_compile else None
            self._compiled_gradients = jitted
            self.train_function = make_loop(self, "train_step", self._log_names())

    def make_test_function(self, force=False):
        force = self.hooks_changed("test_function", "test_step", "segment_nll", "evaluation_nll", "call") or force
        if self.test_function is None or force:
            self.test_function = make_loop(self, "test_step", tuple(self.metrics_names))

    def _log_names(self):
        names = (*self.metrics_names, "grad_norm")
        return (*names, "overflow") if self.static_shapes else names

    @property
    def metrics_names(self):
        """Names of what `evaluate` returns, in order."""
        return ["loss", *self._metric_names]

    @property
    def own_metrics(self):
        """Metrics of the user's: attributes of the model and of its layers, or what an own `metrics` returns."""
        if is_own(self, "metrics"):
            return self.metrics
        return [metric for metric in self.metrics if metric.name not in self._log_names()]  # Keras has a "loss"

    def results_of_own_metrics(self):
        """`{name: result}` of `own_metrics`."""
        return results_of(self.own_metrics)

    def reset_metrics(self):
        for metric in self.metrics:
            metric.reset_state()
        self.loop.begin()

    def get_metrics_result(self):
        return {**self.loop.logs(), **self.results_of_own_metrics()}

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Nothing: the model is built. Keras would take a batch off the dataset, and fails under several workers."""

    # ---------------------------------------------------------------------------------------- before the first step

    def _ready_to_train(self, method):
        """Builds the optimizer. Raises ValueError where `method` cannot train with what `compile` was given."""
        if self.optimizer is None:
            message = f"{method} needs an optimizer, got None: compile with txl_tf.make_optimizer(...)"
            raise ParameterError("optimizer", None, "given to compile", message)
        self._check_hooks()
        self.check_weights()
        self.build_optimizer()

    def _check_rows(self, rows, parts):
        replicas = self.distribute_strategy.num_replicas_in_sync
        if rows % (replicas * parts):
            got = f"{rows} rows on {replicas} replicas"
            if parts > 1:
                got += f" with gradient_accumulation_steps={parts}"
            message = f"the batch must divide by the number of replicas, got {got}"
            raise ParameterError("batch", rows, f"a multiple of {replicas * parts} rows", message)

    def _prepare(self, x, evaluation=False, name="x", allow_shuffled=False):
        """The checked dataset as `Batches`: of several workers, each has its own rows."""
        if not isinstance(allow_shuffled, bool):
            raise ParameterError("allow_shuffled", allow_shuffled, [True, False])
        strategy = self.distribute_strategy
        parts = 1 if evaluation else self.gradient_accumulation_steps
        options: dict[str, Any] = {"weighs": "always" if self.steps_per_execution > 1 else "where needed"}
        dataset = x
        rows = None
        if isinstance(x, Segments):
            rows = x.batch_size
            self._check_rows(rows, parts)
            # Another worker may have other labels, but all must run the same step.
            dataset, options = x.dataset(rows_of_this_worker(strategy, rows)), {"weighs": "never"}
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
            return batches
        if batches.count == tf.data.UNKNOWN_CARDINALITY:
            allowed = "of a known number of batches where several workers train together"
            raise ParameterError(name, x, allowed, f"{name} must be {allowed}")
        mine = own_rows(batches.dataset, strategy) if dataset is x else batches.dataset
        mine = divided(mine.repeat(), strategy)
        return Batches(mine, rows, batches.tgt_len, batches.count, batches.count > 0, batches.any_rows)

    def _on_replicas(self, function, rows, *args):
        """`function(share, *args)` on every replica, for its share of the `rows`."""
        strategy = self.distribute_strategy
        share = rows // strategy.num_replicas_in_sync
        with self.stepping:
            if strategy.num_replicas_in_sync == 1 and not self.static_shapes:  # a TPU computes within `run` alone
                return function(share, *args)
            return tf.function(strategy.run)(function, args=(share, *args))

    # --------------------------------------------------------------------------------------------- what is resumed

    @property
    def metric_totals(self):
        """float64 array, the sums that the logs of this epoch are computed from."""
        return self.loop.totals.numpy()

    def set_metric_totals(self, array):
        """Continues with sums from `metric_totals`. Call it once an epoch has begun, from a callback."""
        self.loop.totals = tf.constant(array, tf.float64)

    def carried_arrays(self):
        """`{"mems": ...}`, the memory: `[n_layer, batch, mem_len, d_model]`, rows of all replicas.

        It is float32, or float64 if the model is.
        """
        mems = all_rows(self.distribute_strategy, self.loop.mems)
        return {"mems": np.stack([at_least_float32(mem) for mem in mems])}

    def set_carried_arrays(self, arrays):
        mems, shape = arrays["mems"], self.carried_arrays()["mems"].shape
        if mems.shape != shape:
            allowed = f"[n_layer, batch, mem_len, d_model] = {list(shape)}"
            raise ParameterError("mems", mems, allowed, f"mems must be {allowed}, got {list(mems.shape)}")
        shares = np.split(mems, self.distribute_strategy.num_replicas_in_sync, axis=1)
        layers = range(len(mems))
        self.loop.mems = [self._to_replicas([share[i] for share in shares], self.compute_dtype) for i in layers]

    def _to_replicas(self, arrays, dtype):
        """A value of all replicas, of which replica r has `arrays[r]`, on its device."""
        return self.distribute_strategy.experimental_distribute_values_from_function(
            lambda context: tf.cast(arrays[context.replica_id_in_sync_group], dtype)
        )
