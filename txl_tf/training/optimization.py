"""The optimizer of the original: Adam with clipping after averaging over replicas, warm-up and cosine decay."""

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from txl_tf.config import OptimizerConfig, at_least
from txl_tf.config.checks import is_integer, is_number
from txl_tf.errors import ParameterError
from txl_tf.kernels.dtypes import scalar, wide_dtype
from txl_tf.nn.arguments import arguments_of, stored
from txl_tf.schema import checked_call
from txl_tf.training.distribution import sum_over_replicas


def global_norm(gradients: Iterable[Any]) -> tf.Tensor:
    """The global norm of gradients, in float32, or in float64 if one of them is float64."""
    dtype = wide_dtype(*gradients)
    return tf.linalg.global_norm([tf.cast(gradient, dtype) for gradient in gradients])


if TYPE_CHECKING:
    MixedIntoOptimizer = keras.optimizers.Optimizer
else:
    MixedIntoOptimizer = object


class ClipAfterAverage(MixedIntoOptimizer):
    """Mixin for Keras optimizers that clips the sum of the gradients over all replicas, by value or by global norm.

    Keras's `global_clipnorm` clips the gradients of each replica before it sums them, so two replicas train differently
    from one. If the loss is divided by the number of replicas, the sum is the average.

    With `gradient_accumulation_steps=n`, every n-th batch updates the weights with the mean of the gradients of n
    batches. The mean is clipped. `iterations`, schedules and the moving average count updates. Each batch sums its
    gradients over the replicas, so that a checkpoint between two updates contains all of them.

    Args:
        clip: the largest global norm; `None` for no limit.
        clip_value: the largest absolute value, applied before `clip`; `None` for no limit.
        *args, **kwargs: arguments of the Keras optimizer.

    Attributes:
        gradient_norm: the global norm of the last update before clipping.
    """

    # Attributes of Keras's optimizers whose own type hints are missing or wrong.
    _iterations: Any
    _learning_rate: Any
    _accumulated_gradients: Any
    _model_variables_moving_average: Any
    gradient_norm: Any

    def __init__(self, *args: Any, clip: float | None = None, clip_value: float | None = None, **kwargs: Any) -> None:
        for name, value in (("clip", clip), ("clip_value", clip_value)):
            if value is not None and not (is_number(value) and value > 0):
                raise ParameterError(name, value, "positive, or None for no clipping")
        super().__init__(*args, **kwargs)
        self.batches_per_update = self.gradient_accumulation_steps or 1
        self.clip = clip
        self.clip_value = clip_value

    @property
    def iterations(self) -> Any:
        """The number of updates so far."""
        return self._iterations if self.batches_per_update == 1 else self._iterations // self.batches_per_update

    @property
    def learning_rate(self) -> Any:
        """The rate of the next update. Keras's own property would call a schedule with the number of the batch."""
        rate = self._learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return rate(self.iterations)
        return super().learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        keras_property: Any = keras.optimizers.Optimizer.learning_rate
        keras_property.fset(self, rate)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        dtype = "float64" if wide_dtype(*variables) == tf.float64 else None  # else Keras's default
        self.gradient_norm = self.add_variable(
            shape=(), dtype=dtype, name="gradient_norm", aggregation="only_first_replica"
        )
        super().build(variables)
        self.start_average(variables)

    def start_average(self, variables: Iterable[keras.Variable]) -> None:
        """Starts the moving average, if there is one, with these weights.

        Keras starts it with the first step, but not if loss scaling skips that step.
        """
        if self.use_ema:
            for variable, average in zip(variables, self._model_variables_moving_average, strict=True):
                average.assign(variable)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Keras's method. It counts every batch. Before Keras 3.10, Keras itself would count the updates alone."""
        if self.batches_per_update == 1 or not len(grads):
            super().apply(grads, trainable_variables)
            return
        batches = tf.identity(self._iterations.value)
        super().apply(grads, trainable_variables)
        self._iterations.assign(batches + 1)

    def _backend_apply_gradients(self, grads, trainable_variables) -> None:
        """Keras's method: updates the weights or, between two updates, only adds the gradients to the sums."""
        if self.batches_per_update == 1:
            super()._backend_apply_gradients(grads, trainable_variables)
            return
        totals = [self._accumulated_gradients[self._get_variable_index(x)] for x in trainable_variables]
        grads = [tf.convert_to_tensor(grad) for grad in grads]  # sparse ones, too
        if not tf.distribute.in_cross_replica_context():
            grads = sum_over_replicas(grads)
        sums = [tf.cast(grad, total.dtype) + total for grad, total in zip(grads, totals, strict=True)]

        def keep_or_update(strategy, sums, on_replicas=None):
            """Updates the weights in every `batches_per_update`-th call. In the others, it stores the sums in `totals`.

            It may run in the cross-replica context, where code for each replica must be called by `on_replicas`.

            Args:
                sums: gradients summed over replicas and over the batches since the last update.
                on_replicas: function that calls a function of `sums` on every replica. `None` makes one for the
                    cross-replica context.
            """
            on_replicas = on_replicas or (
                lambda function: strategy.extended.call_for_each_replica(function, args=(sums,))
            )
            is_update = (self._iterations + 1) % self.batches_per_update == 0
            update = functools.partial(self._update_with_sums, trainable_variables, totals)
            keep = functools.partial(_assign_all, totals)
            keras.ops.cond(is_update, lambda: on_replicas(update), lambda: on_replicas(keep))

        if _is_together():
            keep_or_update(tf.distribute.get_strategy(), sums, on_replicas=lambda function: function(sums))
        else:
            tf.distribute.get_replica_context().merge_call(keep_or_update, args=(sums,))

    def _update_with_sums(self, variables, totals, sums) -> None:
        """Updates the weights once with the mean gradient. `sums` are sums over replicas and batches."""
        self.gradient_accumulation_steps = None  # so that Keras updates the weights in this call
        try:
            super()._backend_apply_gradients([total / self.batches_per_update for total in sums], variables)
        finally:
            self.gradient_accumulation_steps = self.batches_per_update
        _assign_all(totals, [tf.zeros_like(total) for total in sums])

    def _all_reduce_sum_gradients(self, grads_and_vars) -> list[tuple[Any, Any]]:
        """Keras's method: sums the gradients over the replicas. Also stores their norm and clips them."""
        grads, variables = zip(*grads_and_vars, strict=True)
        if self.batches_per_update == 1 and not tf.distribute.in_cross_replica_context():
            grads = sum_over_replicas(grads)
        grads = [tf.convert_to_tensor(grad) for grad in grads]  # dense, because rows of a sparse gradient may repeat
        if len({grad.dtype for grad in grads}) > 1:  # for example, a float64 network in a float32 model
            grads = [tf.cast(grad, wide_dtype(*grads)) for grad in grads]
        norm = tf.linalg.global_norm(grads)
        self.gradient_norm.assign(norm)
        if self.clip_value is not None:
            grads = [tf.clip_by_value(grad, -self.clip_value, self.clip_value) for grad in grads]
        if self.clip is not None:
            norm = norm if self.clip_value is None else tf.linalg.global_norm(grads)
            grads, _ = tf.clip_by_global_norm(grads, self.clip, use_norm=norm)
        return list(zip(grads, variables, strict=True))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "clip": self.clip, "clip_value": self.clip_value}


def _is_together() -> bool:
    """Whether this context can change the variables of all replicas without a merge call."""
    return tf.distribute.in_cross_replica_context() or tf.__internal__.distribute.strategy_supports_no_merge_call()


def _assign_all(variables, values) -> None:
    """Assigns values, which are the same on every replica, to the variables of all replicas."""

    def assign(strategy, values):
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(variable.value, lambda x, new: x.assign(new), args=(value,), group=False)

    if _is_together():
        assign(tf.distribute.get_strategy(), values)
    else:
        tf.distribute.get_replica_context().merge_call(assign, args=(values,))


@keras.saving.register_keras_serializable("txl_tf")
class Adam(ClipAfterAverage, keras.optimizers.Adam):
    """`keras.optimizers.Adam` with `clip`, see `ClipAfterAverage`. One operation updates a variable."""

    def update_step(self, gradient, variable, learning_rate) -> None:
        """Keras's update as one operation. Keras itself uses 15 operations and takes three times as long."""
        if self.amsgrad:
            return super().update_step(gradient, variable, learning_rate)
        dtype = variable.dtype
        step = self.iterations + 1
        index = self._get_variable_index(variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._momentums[index].value.handle,
            v=self._velocities[index].value.handle,
            beta1_power=scalar(self.beta_1, dtype) ** tf.cast(step, dtype),
            beta2_power=scalar(self.beta_2, dtype) ** tf.cast(step, dtype),
            lr=tf.cast(learning_rate, dtype),
            beta1=self.beta_1,
            beta2=self.beta_2,
            epsilon=self.epsilon,
            grad=tf.cast(gradient, dtype),
        )


@keras.saving.register_keras_serializable("txl_tf")
class AdamW(Adam, keras.optimizers.AdamW):
    """`keras.optimizers.AdamW` with `clip`, see `ClipAfterAverage`."""


@keras.saving.register_keras_serializable("txl_tf")
class Lamb(ClipAfterAverage, keras.optimizers.Lamb):
    """`keras.optimizers.Lamb` with `clip`, see `ClipAfterAverage`."""


@keras.saving.register_keras_serializable("txl_tf")
class SGD(ClipAfterAverage, keras.optimizers.SGD):
    """SGD with momentum in PyTorch's form: `v = momentum v + g`, then `p = p - rate v`.

    In Keras's form, the velocity contains the rate, `v = momentum v - rate g`, so a step also depends on the rates of
    earlier steps. The two forms differ when the rate changes.
    """

    def __init__(self, *args, nesterov=False, **kwargs) -> None:
        if nesterov:
            raise ParameterError("nesterov", nesterov, "False, because PyTorch's form of momentum is without it here")
        super().__init__(*args, nesterov=nesterov, **kwargs)

    def update_step(self, gradient, variable, learning_rate) -> None:
        """Keras's method: updates a variable, with momentum in PyTorch's form, which one operation computes."""
        if not self.momentum:
            super().update_step(gradient, variable, learning_rate)
            return
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=self.momentums[self._get_variable_index(variable)].value.handle,
            lr=tf.cast(learning_rate, variable.dtype),
            grad=tf.cast(gradient, variable.dtype),
            momentum=scalar(self.momentum, variable.dtype),
        )


OPTIMIZERS = {"adam": Adam, "adamw": AdamW, "lamb": Lamb, "sgd": SGD}


def make_schedule(
    learning_rate: float, warmup_steps: int, train_steps: int, min_lr_ratio: float
) -> keras.optimizers.schedules.LearningRateSchedule:
    """Linear warm-up from 0 to `learning_rate`, then cosine decay. It equals the original's schedule within 1e-7."""
    at_least(1)("train_steps", train_steps)
    if not is_integer(warmup_steps) or not 0 <= warmup_steps < train_steps:
        allowed = f"lie in [0, train_steps={train_steps})"
        message = (
            f"warmup_steps must {allowed}, got {warmup_steps}: give a shorter one, such as "
            f"warmup_steps={train_steps // 10}, or a larger train_steps"
        )
        raise ParameterError("warmup_steps", warmup_steps, f"an integer in [0, {train_steps})", message)
    decay = {"decay_steps": train_steps - warmup_steps, "alpha": min_lr_ratio}
    if warmup_steps == 0:
        return keras.optimizers.schedules.CosineDecay(learning_rate, **decay)
    return keras.optimizers.schedules.CosineDecay(0.0, warmup_target=learning_rate, warmup_steps=warmup_steps, **decay)


@keras.saving.register_keras_serializable("txl_tf")
class NoamSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """`scale * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)`: up, then slowly down; 0 at step 0.

    Reference:
        Vaswani et al. 2017, section 5.3.
    """

    d_model: int
    warmup_steps: int
    scale: float

    @stored
    def __init__(self, d_model: int, warmup_steps: int = 4000, scale: float = 1.0) -> None:
        super().__init__()

    def __call__(self, step: Any) -> tf.Tensor:
        step = tf.cast(step, tf.float32)
        slope = tf.minimum(tf.maximum(step, 1.0) ** -1.5, self.warmup_steps**-1.5)
        return self.scale * self.d_model**-0.5 * step * slope

    def get_config(self) -> dict[str, Any]:
        return arguments_of(self)


@keras.saving.register_keras_serializable("txl_tf")
class LinearSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up to `learning_rate`, then linearly to 0, or constant (fastNLP's `WarmupCallback`).

    With a warm-up, its first step has the rate `learning_rate / warmup_steps`, above 0.
    """

    learning_rate: float
    warmup_steps: int
    train_steps: int
    constant: bool

    @stored
    def __init__(self, learning_rate: float, warmup_steps: int, train_steps: int, constant: bool = False) -> None:
        super().__init__()

    def __call__(self, step: Any) -> tf.Tensor:
        done = tf.cast(step, tf.float32) + 1
        rise = done / max(self.warmup_steps, 1)
        left = 1.0 if self.constant else (self.train_steps - done) / (self.train_steps - self.warmup_steps)
        return self.learning_rate * tf.where(done < self.warmup_steps, rise, tf.maximum(left, 0.0))

    def get_config(self) -> dict[str, Any]:
        return arguments_of(self)


@checked_call
def make_optimizer(
    learning_rate: float = 2.5e-4,
    warmup_steps: int = 0,
    train_steps: int = 100_000,
    min_lr_ratio: float = 0.004,
    clip: float | None = 0.25,
    optimizer: str = "adam",
    weight_decay: float = 0.0,
    ema: float = 0.0,
    schedule: str = "cosine",
    beta_2: float = 0.999,
    clip_value: float | None = None,
    momentum: float = 0.9,
    gradient_accumulation_steps: int = 1,
) -> keras.optimizers.Optimizer:
    """The original's recipe: Adam (0.9, 0.999, 1e-8) with warm-up and cosine decay, clipped by global norm.

    Args:
        learning_rate: the highest learning rate.
        warmup_steps: steps of the linear warm-up. The first step has the rate 0 or, with the schedules "linear" and
            "constant", `learning_rate / warmup_steps`.
        train_steps: the number of all steps, including the warm-up.
        min_lr_ratio: the last rate of the cosine, divided by the highest.
        clip: the largest global norm of the gradients; `None` for no limit.
        optimizer: "adam", as in the original, "adamw", "lamb" or "sgd".
        weight_decay: weight decay of "adamw" and "lamb".
        ema: momentum of an exponential moving average of the weights, which replaces the weights at the end of `fit`;
            0 for none.
        schedule: "cosine"; "linear" or "constant", see `LinearSchedule`; or "noam", see `NoamSchedule`, which needs a
            warm-up.
        beta_2: decay of the second moments; 0.98 in the vanilla Transformer.
        clip_value: the largest absolute value in the gradients; `None` for no limit. It is applied before `clip`.
        momentum: momentum of "sgd", see `SGD`.
        gradient_accumulation_steps: number of batches for an update, which clips and uses the mean of their gradients.
            The steps above then count updates. (The argument of `compile` divides one batch into parts instead.)

    Raises:
        ParameterError: an argument is out of its range.
    """
    OptimizerConfig(  # checks the arguments
        learning_rate=learning_rate, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio, clip=clip,
        optimizer=optimizer, weight_decay=weight_decay, ema=ema, schedule=schedule, beta_2=beta_2,
        clip_value=clip_value, momentum=momentum,
    )  # fmt: skip
    at_least(1)("gradient_accumulation_steps", gradient_accumulation_steps)
    options: dict[str, Any] = {"use_ema": True, "ema_momentum": ema} if ema else {}
    if gradient_accumulation_steps > 1:
        options["gradient_accumulation_steps"] = gradient_accumulation_steps
    if weight_decay or optimizer == "adamw":  # which decays by default
        options["weight_decay"] = weight_decay
    if schedule == "noam":
        at_least(1)("warmup_steps", warmup_steps)
        rate = NoamSchedule(1, warmup_steps, scale=learning_rate * warmup_steps**0.5)
    else:
        rate = make_schedule(learning_rate, warmup_steps, train_steps, min_lr_ratio)
        if schedule != "cosine":
            rate = LinearSchedule(learning_rate, warmup_steps, train_steps, constant=schedule == "constant")
    if optimizer == "sgd":
        options |= {"momentum": float(momentum)}
    else:
        options |= {"beta_1": 0.9, "beta_2": beta_2, "epsilon": 1e-8}
    return OPTIMIZERS[optimizer](rate, clip=clip, clip_value=clip_value, **options)
