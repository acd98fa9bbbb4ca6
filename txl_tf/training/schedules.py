"""Schedules of the learning rate: a warm-up, and then the original's cosine decay, a linear decay or others."""

from typing import Any

import keras
import tensorflow as tf

from txl_tf.config import OptimizerConfig, at_least
from txl_tf.config.checks import NOT_NEGATIVE, POSITIVE, SHARE, is_integer
from txl_tf.errors import ParameterError
from txl_tf.nn.arguments import arguments_of, stored


def check_warmup(warmup_steps: int, train_steps: int) -> None:
    """Raises ParameterError if `train_steps` is less than 1, or `warmup_steps` is not in [0, train_steps)."""
    at_least(1)("train_steps", train_steps)
    if not is_integer(warmup_steps) or not 0 <= warmup_steps < train_steps:
        message = (
            f"warmup_steps must be an integer in [0, train_steps={train_steps}), got {warmup_steps}: give another one, "
            f"such as warmup_steps={train_steps // 10}, or a larger train_steps"
        )
        raise ParameterError("warmup_steps", warmup_steps, f"an integer in [0, {train_steps})", message)


def make_schedule(
    learning_rate: float, warmup_steps: int, train_steps: int, min_lr_ratio: float
) -> keras.optimizers.schedules.LearningRateSchedule:
    """Linear warm-up from 0 to `learning_rate`, then cosine decay to `min_lr_ratio * learning_rate` at `train_steps`.

    It is the original's schedule, up to the rounding of float32.

    Raises:
        ParameterError: a number is out of its range, see `OptimizerConfig` and `check_warmup`.
    """
    if not tf.is_tensor(learning_rate):
        POSITIVE("learning_rate", learning_rate)
    SHARE("min_lr_ratio", min_lr_ratio)
    check_warmup(warmup_steps, train_steps)
    decay = {"decay_steps": train_steps - warmup_steps, "alpha": min_lr_ratio}
    if warmup_steps == 0:
        return keras.optimizers.schedules.CosineDecay(learning_rate, **decay)
    return keras.optimizers.schedules.CosineDecay(0.0, warmup_target=learning_rate, warmup_steps=warmup_steps, **decay)


@keras.saving.register_keras_serializable("txl_tf")
class NoamSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """`scale * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)`.

    The rate rises linearly from 0 at step 0 until step `warmup_steps`, and then falls as `step**-0.5`.

    Reference:
        Vaswani et al. 2017, section 5.3.

    Raises:
        ParameterError: a number is not positive.
    """

    d_model: int
    warmup_steps: int
    scale: float

    @stored
    def __init__(self, d_model: int, warmup_steps: int = 4000, scale: float = 1.0) -> None:
        super().__init__()
        for name, value in (("d_model", d_model), ("warmup_steps", warmup_steps), ("scale", scale)):
            POSITIVE(name, value)

    def __call__(self, step: Any) -> tf.Tensor:
        step = tf.cast(step, tf.float32)
        slope = tf.minimum(tf.maximum(step, 1.0) ** -1.5, self.warmup_steps**-1.5)
        return self.scale * self.d_model**-0.5 * step * slope

    def get_config(self) -> dict[str, Any]:
        return arguments_of(self)


@keras.saving.register_keras_serializable("txl_tf")
class LinearSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up to `learning_rate`, then linear decay to 0 or, if `constant`, no decay.

    It is the schedule of fastNLP's `WarmupCallback`. With a warm-up, the first step has the rate `learning_rate /
    warmup_steps`.

    Raises:
        ParameterError: `learning_rate` is not positive, a number of steps is negative, or `warmup_steps` is, unless
            `constant`, not less than `train_steps`.
    """

    learning_rate: float
    warmup_steps: int
    train_steps: int
    constant: bool

    @stored
    def __init__(self, learning_rate: float, warmup_steps: int, train_steps: int, constant: bool = False) -> None:
        super().__init__()
        POSITIVE("learning_rate", learning_rate)
        NOT_NEGATIVE("warmup_steps", warmup_steps)
        NOT_NEGATIVE("train_steps", train_steps)
        if not (constant or warmup_steps < train_steps):
            raise ParameterError("warmup_steps", warmup_steps, f"less than train_steps={train_steps}")

    def __call__(self, step: Any) -> tf.Tensor:
        done = tf.cast(step, tf.float32) + 1
        rise = done / max(self.warmup_steps, 1)
        left = 1.0 if self.constant else (self.train_steps - done) / (self.train_steps - self.warmup_steps)
        return self.learning_rate * tf.where(done < self.warmup_steps, rise, tf.maximum(left, 0.0))

    def get_config(self) -> dict[str, Any]:
        return arguments_of(self)


def schedule_of(settings: OptimizerConfig, train_steps: int) -> keras.optimizers.schedules.LearningRateSchedule:
    """The schedule of the learning rate in `settings`, for a training of `train_steps` steps.

    To add a schedule: add its name to `SCHEDULES` of `txl_config/training.py`, add the settings that it does not use to
    `OptimizerConfig.unused` there, and add a branch here.

    Raises:
        ParameterError: the numbers of steps do not fit the schedule.
    """
    warmup_steps = settings.warmup_steps
    if settings.schedule == "noam":
        at_least(1)("warmup_steps", warmup_steps)
        # With this scale, the highest rate, at the end of the warm-up, is `learning_rate`.
        return NoamSchedule(1, warmup_steps, scale=settings.learning_rate * warmup_steps**0.5)
    if settings.schedule == "cosine":
        return make_schedule(settings.learning_rate, warmup_steps, train_steps, settings.min_lr_ratio)
    if settings.schedule in ("linear", "constant"):
        check_warmup(warmup_steps, train_steps)
        constant = settings.schedule == "constant"
        return LinearSchedule(settings.learning_rate, warmup_steps, train_steps, constant=constant)
    raise NotImplementedError(f"schedule={settings.schedule} has no branch in schedule_of")
