"""The base class of all models: their own loss, stopping after a step, exact resume."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config.checks import at_least
from txl_tf.errors import ParameterError
from txl_tf.kernels.dtypes import wide_dtype
from txl_tf.nn.bases import MixedIntoModel
from txl_tf.nn.frozen import freeze, frozen_in
from txl_tf.nn.quantization import Unquantized
from txl_tf.training.clipping import ClipAfterAverage, count_of_batches
from txl_tf.training.distribution import sum_over_replicas

# Key in a checkpoint: the sums of the current interval of steps. Further sums are in "window:...". The first versions
# called an interval a window, and their checkpoints must stay readable.
SUMS = "window"

# Arguments of `keras.Model.compile` that become attributes of the model.
_KERAS_ARGUMENTS = ("optimizer", "run_eagerly", "steps_per_execution", "jit_compile", "auto_scale_loss")


class MethodLock:
    """A lock for methods of a model that share state, such as metrics. One thread at a time has it; others wait.

    ```python
    with lock("evaluate"):     # the same thread may enter again, as `fit` does for its validation
        ...
    ```

    Because `fit` takes long, other threads do not wait for it. While it runs, they get a ParameterError.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # The thread and the name of the outermost method that runs; `None` if none runs.
        self._thread: int | None = None
        self._method: str | None = None

    @contextlib.contextmanager
    def __call__(self, method: str) -> Iterator[None]:
        thread = threading.get_ident()
        with self._changed:
            while self._thread not in (None, thread):
                if self._method == "fit":
                    message = f"{method} cannot run: fit of the same model runs in another thread"
                    raise ParameterError(method, "fit", "called when no other thread runs fit", message)
                self._changed.wait()
            before = (self._thread, self._method)
            self._thread = thread
            self._method = self._method or method
        try:
            yield
        finally:
            with self._changed:
                self._thread, self._method = before
                self._changed.notify_all()


class TrainedModel(Unquantized, MixedIntoModel):
    """Mixin for Keras models with their own `compile`, which sets `auto_scale_loss`.

    A saved model contains the arguments of `compile` and the state of the optimizer. After loading, training resumes as
    if the model had never been saved.

    Attributes:
        seed: int that decides the dropout masks in training. The subclass sets it.
        stop_requested: set it to `True`, for example in a signal handler, to request that `fit` stops after the current
            step. The subclass then sets `stop_agreed` on all workers at the same step.
        carried_names: keys of `carried_arrays`.
        smaller: how to get a smaller model, for a message about quantization.
    """

    fixed_settings = {
        "loss": "the model has its own loss", "loss_weights": "the model has one loss, its own",
        "auto_scale_loss": "give it to compile()",
    }  # fmt: skip

    seed: Any
    optimizer: Any
    smaller = 'txl_tf.export_saved_model(model, directory, weights="bfloat16") writes a model of half the size'
    stop_requested = False
    auto_scale_loss = True
    carried_names: tuple[str, ...] = ()
    _steps_per_execution = 1
    _hooks_of: dict[str, list[Any]] | None = None  # `{compiled function: what it was made with}`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["_made_under"] = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope the model was made; without one, that of the caller."""
        return vars(self).get("_made_under") or tf.distribute.get_strategy()

    @property
    def has_all_weights(self) -> bool:
        """Whether all weights exist, so that the optimizer can create its variables. Some models need a call first."""
        return True

    @property
    def steps_per_execution(self) -> int:
        """Number of steps in one call of the compiled graph. A new value counts in the next `fit`."""
        return self._steps_per_execution

    @steps_per_execution.setter
    def steps_per_execution(self, steps: int) -> None:
        at_least(1)("steps_per_execution", steps)
        self._steps_per_execution = steps

    def build_at_once(self, inputs_shape: Any) -> None:
        """`build` for a constructor. Afterwards, a subclass may still add layers, which Keras forbids after `build`."""
        self.build(inputs_shape)
        self._tracker.unlock()

    # --------------------------------------------------------------------------------------------- saving of `compile`

    def compile_arguments(self) -> dict[str, Any]:
        """The arguments that `compile` was given, by name."""
        return {name: getattr(self, name) for name in _KERAS_ARGUMENTS}

    def get_compile_config(self) -> dict[str, Any] | None:
        """Keras's method: the arguments of `compile`, what is frozen, and the weights of the optimizer, for a file.

        `None` if the model is not compiled.
        """
        if not self.compiled:
            return None
        arguments: Any = keras.saving.serialize_keras_object(self.compile_arguments())
        optimizer, weights = vars(self).get("_optimized", (None, []))  # see `build_optimizer`
        optimized = weights if optimizer is self.optimizer else []
        return {**arguments, "frozen": frozen_in(self), "optimized_weights": optimized}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Keras's method: freezes and compiles a model from a file as it was, and builds its optimizer.

        Args:
            config: from `get_compile_config`.
        """
        freeze(self, config.pop("frozen", None))
        optimized = config.pop("optimized_weights", ())  # files of older versions do not have it
        arguments: Any = keras.saving.deserialize_keras_object(config)
        self.compile(**arguments)
        self.build_optimizer([self.weights[i] for i in optimized])

    def build_optimizer(self, weights: Iterable[keras.Variable] = ()) -> None:
        """Creates the optimizer's variables, unless the model has no optimizer or not all of its weights.

        A step would create them, too. But if it fails, it may have created only some.

        Args:
            weights: what the optimizer is for; by default the trainable weights. In a model from a file, these may be
                fewer, because some were frozen after the optimizer was built.
        """
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and not optimizer.built and self.has_all_weights:
            weights = list(weights) or self.trainable_variables
            with self.distribute_strategy.scope():  # some strategies cannot create variables within a step
                optimizer.build(weights)
            places = {id(weight): i for i, weight in enumerate(self.weights)}
            self.__dict__["_optimized"] = (optimizer, [places[id(weight)] for weight in weights])

    def check_averages(self) -> None:
        """Raises ParameterError if an optimizer of Keras cannot set the weights to their moving averages.

        At the end of `fit`, it pairs the trainable weights with its averages by position. So after some weights were
        frozen, it would set weights to the averages of others. Replicas fail to set weights during `fit`. Optimizers of
        the library have neither limit.
        """
        inner = self.inner_optimizer
        if inner is None or not inner.use_ema or isinstance(inner, ClipAfterAverage):
            return
        if inner.ema_overwrite_frequency and self.distribute_strategy.num_replicas_in_sync > 1:
            message = (
                "ema_overwrite_frequency must be None for an optimizer of Keras and several replicas, got "
                f"{inner.ema_overwrite_frequency}: Keras cannot set the weights of replicas during fit"
            )
            raise ParameterError("ema_overwrite_frequency", inner.ema_overwrite_frequency, [None], message)
        optimizer, places = vars(self).get("_optimized", (None, []))  # see `build_optimizer`
        if optimizer is not self.optimizer:
            return
        averaged = [self.weights[i] for i in places]
        if [*map(id, averaged)] != [*map(id, self.trainable_variables)]:
            frozen = [weight.path for weight in averaged if not weight.trainable]
            message = (
                "trainable must stay as it was when the optimizer was built, because it averages weights, but "
                f"{frozen[0] if frozen else 'a weight'} has changed: compile again, or use "
                "txl_tf.make_optimizer(ema=...)"
            )
            raise ParameterError("trainable", frozen, "as it was when the optimizer was built", message)

    def check_weights(self) -> None:
        """Raises ParameterError if trainable weights are float16 or bfloat16, which lose small updates.

        In bfloat16, Adam's `beta_2` of 0.999 is rounded to 1, so its steps are 0. In float16, its epsilon is 0.
        """
        dtypes = {variable.dtype: variable.path for variable in self.trainable_variables}
        for dtype in ("float16", "bfloat16"):
            if self.dtype_policy.variable_dtype == dtype or dtype in dtypes:
                where = f" for {dtypes[dtype]}" if dtype in dtypes else ""
                message = (
                    f"dtype must be mixed_{dtype} in training, which keeps the weights in float32, got {dtype}{where}"
                )
                raise ParameterError("dtype", dtype, [f"mixed_{dtype}", "float32", "float64"], message)

    @property
    def loss_dtype(self) -> str:
        """The dtype of the loss and of sums over labels: float64 if the model computes in float64, else float32."""
        return wide_dtype(self.compute_dtype).name

    def check_compiled(self, method: str) -> None:
        """Raises ParameterError if `compile` was not called before `method`."""
        if not self.compiled:
            raise ParameterError("compile", None, f"called before {method}", f"call compile() before {method}()")

    def check_steps(self, name: str, steps: int | None) -> None:
        """Raises ParameterError if the last call of the graph, of `steps_per_execution` steps, would exceed `steps`.

        Args:
            name: the argument of `fit` or `evaluate` that has the number of steps.
            steps: its value; `None` for all batches.
        """
        if (steps or 0) % self.steps_per_execution:
            allowed = f"a multiple of steps_per_execution={self.steps_per_execution}"
            raise ParameterError(name, steps, allowed)

    def hooks_changed(self, function: str, *names: str) -> bool:
        """Whether what a compiled function was made with has changed since the last check of that function.

        That is: the methods that it calls, `run_eagerly`, `jit_compile` and `steps_per_execution`; for training also
        the optimizer, which weights are trainable, and the regularizers and constraints of weights and layers.

        Args:
            function: name of the compiled function, such as "train_function". Its first check returns `False`.
            *names: names of the methods, which a user may override.
        """
        methods = [getattr(self, name) for name in names]
        # Functions instead of bound methods, which would keep the model alive.
        made_with = [getattr(method, "__func__", method) for method in methods]
        made_with += [self.run_eagerly, self.jit_compile, self.steps_per_execution]
        if function == "train_function":
            # `id`, because `==` of two variables compares their values.
            made_with.append(getattr(self, "optimizer", None))
            made_with += [x for w in self.trainable_variables for x in (id(w), w.regularizer, w.constraint)]
            made_with += [layer.activity_regularizer for layer in self._flatten_layers()]
        self._hooks_of = self._hooks_of or {}
        before = self._hooks_of.get(function, made_with)
        self._hooks_of[function] = made_with
        return made_with != before

    # ------------------------------------------------------------------------------------------------------- one step

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer, without the wrapper of Keras that scales the loss; `None` if there is no optimizer."""
        optimizer = getattr(self, "optimizer", None)
        return getattr(optimizer, "inner_optimizer", optimizer)

    def step_key(self, rows: Any) -> tf.Tensor:
        """The dropout key of the current step on this replica: int32 `[3]`, see `dropout`.

        It has the seed, the number of batches so far, and the index of the first row of this replica.

        Args:
            rows: number of rows of this replica.
        """
        step = tf.convert_to_tensor(count_of_batches(self.inner_optimizer))
        return tf.stack([self.seed % 2**31, tf.cast(step, tf.int32), self.first_row(rows)])

    def first_row(self, rows: Any) -> tf.Tensor:
        """The index of this replica's first row in the batch, if every replica has `rows` rows."""
        return tf.distribute.get_replica_context().replica_id_in_sync_group * rows

    def with_penalties(self, loss: tf.Tensor, parts: int = 1, fraction: tf.Tensor | None = None) -> tf.Tensor:
        """Adds the regularizers and the losses of `add_loss` to the loss.

        Args:
            loss: the loss of one part of this replica's rows. It gets its share of the other losses: they are divided
                by the number of parts and by the number of replicas.
            parts: number of parts.
            fraction: also multiplies the other losses; `None` for 1.
        """
        if not self.losses:
            return loss
        penalties = tf.add_n([tf.cast(penalty, loss.dtype) for penalty in self.losses])
        penalties /= parts * self.distribute_strategy.num_replicas_in_sync
        return loss + (penalties if fraction is None else penalties * fraction)

    # -------------------------------------------------------------------- contents of a checkpoint other than weights

    def training_logs(self) -> dict[str, float]:
        """The logs of the current epoch, aggregated over its training steps."""
        return {name: float(value) for name, value in self.get_metrics_result().items()}

    @property
    def metric_totals(self) -> dict[str, np.ndarray]:
        """`{key in a checkpoint: float64 array}` of the sums from which the logs of this epoch are computed.

        All workers must call it.
        """
        raise NotImplementedError

    def set_metric_totals(self, sums: dict[str, np.ndarray]) -> None:
        """Restores sums from `metric_totals`.

        Callbacks call it after an epoch has begun, and after an evaluation, which resets metrics.
        """
        raise NotImplementedError

    def carried_arrays(self) -> dict[str, np.ndarray]:
        """`{name: array}` of the state that is carried from batch to batch, without weights and optimizer.

        All workers must call it.
        """
        return {}

    def set_carried_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Restores the state from `carried_arrays`. A callback calls it after `fit` has begun."""


class _Whole(keras.Layer):
    """A layer that contains a model and returns its input. See `clear_losses`."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(name="whole")
        self.model = model
        self.built = True

    def call(self, x: Any) -> Any:
        return x


def clear_losses(model: keras.Model) -> None:
    """Clears the losses that layers of a model have added by `add_loss`.

    A step that calls only parts of the model must call it. Otherwise losses of the previous step would count again.
    """
    _Whole(model)(None)  # Keras clears the losses of a layer and of its parts when an outermost call begins


# ------------------------------------------------------------------------------------------------------------ updates


def agree_on_overflow(gradients: list[tf.Tensor], optimizer: Any) -> list[tf.Tensor]:
    """With loss scaling, replaces the gradients by NaN on all replicas if the gradients of one are not finite.

    So all replicas skip the update. Keras's `LossScaleOptimizer` would check only the gradients of each replica, or of
    the first, before they are summed. Without loss scaling, or with one replica, the gradients do not change.
    """
    context = tf.distribute.get_replica_context()
    if not is_scaled(optimizer) or context.num_replicas_in_sync == 1:
        return gradients
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
    n_finite = sum_over_replicas(tf.cast(finite, tf.float32))
    factor = tf.where(n_finite < context.num_replicas_in_sync, float("nan"), 1.0)
    return [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]


def apply_gradients(optimizer: Any, gradients: list[tf.Tensor], variables: Iterable[keras.Variable]) -> None:
    """Calls `optimizer.apply_gradients`. A step must call this function on every replica.

    A step counts even if float16 overflows and loss scaling skips the update, because its batch is not repeated. With
    gradient accumulation, a skipped batch does not count: `iterations` counts updates, not batches. So the next batch
    uses the dropout key of the skipped one.

    Keras sums gradients with `ReplicaContext.all_reduce`, even on one replica. That keeps the graph in memory for ever
    (see `kernels/gradients.py`). So without a strategy, the optimizer is called in the cross-replica context instead.
    `LossScaleOptimizer` refuses this context. With it, and under a strategy, even of one replica, the optimizer is
    called as Keras calls it. Then the graph stays in memory, unless the (inner) optimizer is from `make_optimizer`.
    """
    with _naming_unknown_weights(optimizer):
        gradients = agree_on_overflow(gradients, optimizer)
        if is_scaled(optimizer):
            step = tf.convert_to_tensor(optimizer.iterations)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            inner = optimizer.inner_optimizer
            accumulates = inner.gradient_accumulation_steps or getattr(inner, "batches", None) is not None
            if not accumulates:
                optimizer.iterations.assign(step + 1)
        elif tf.distribute.has_strategy():
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            context = tf.distribute.get_replica_context()
            context.merge_call(lambda strategy: optimizer.apply_gradients(zip(gradients, variables, strict=True)))


@contextlib.contextmanager
def _naming_unknown_weights(optimizer: Any) -> Iterator[None]:
    """Replaces the error of an optimizer that was built before the model got other weights.

    Raises:
        ParameterError: the optimizer was built for other weights. It names one that is new.
    """
    try:
        yield
    except ValueError as error:
        unknown = re.search(r"Unknown variable: .*?path=([^,>]+)", str(error))
        if unknown is None:
            raise
        message = f"the optimizer was built before the model got the weight {unknown[1]}: compile the model again"
        raise ParameterError("optimizer", optimizer, "built for the weights of the model", message) from error


def is_scaled(optimizer: Any) -> bool:
    """Whether an optimizer is Keras's wrapper that scales the loss for another optimizer."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
