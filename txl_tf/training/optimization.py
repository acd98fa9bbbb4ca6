"""The optimizers: Adam, AdamW, Lamb, SGD and Muon, which clip the gradient of the whole batch (`ClipAfterAverage`).

The defaults of `make_optimizer` are the original's recipe: Adam, clipping by global norm, warm-up and cosine decay.
"""

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from txl_tf.calls import checked_call
from txl_tf.config import PRECISIONS, OptimizerConfig, at_least, one_of
from txl_tf.errors import ParameterError
from txl_tf.kernels.dtypes import scalar
from txl_tf.kernels.shapes import Tensor
from txl_tf.schema import check_left_out
from txl_tf.training import muon
from txl_tf.training.clipping import ClipAfterAverage
from txl_tf.training.schedules import schedule_of


@keras.saving.register_keras_serializable("txl_tf")
class Adam(ClipAfterAverage, keras.optimizers.Adam):
    """`keras.optimizers.Adam` with `clip`, see `ClipAfterAverage`.

    One operation updates a weight. With `amsgrad`, Keras's own operations do.
    """

    def update_step(self, gradient, variable, learning_rate) -> None:
        """Keras's method: updates a variable, by `_apply_adam`."""
        if self.amsgrad:
            return super().update_step(gradient, variable, learning_rate)
        _apply_adam(self, gradient, variable, learning_rate)


def _apply_adam(optimizer: Any, gradient: Tensor, variable: tf.Variable, learning_rate: Tensor) -> None:
    """Adam's update of a variable, whose slots are "momentum" and "velocity", as one operation.

    Keras itself uses 15 operations and takes three times as long.
    """
    dtype = variable.dtype
    step: Any = tf.convert_to_tensor(optimizer.iterations) + 1
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=optimizer.slots.of(variable, "momentum").value.handle,
        v=optimizer.slots.of(variable, "velocity").value.handle,
        beta1_power=scalar(optimizer.beta_1, dtype) ** tf.cast(step, dtype),
        beta2_power=scalar(optimizer.beta_2, dtype) ** tf.cast(step, dtype),
        lr=tf.cast(learning_rate, dtype),
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        epsilon=optimizer.epsilon,
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
            allowed = "False: this optimizer has only PyTorch's form of momentum, without Nesterov's"
            raise ParameterError("nesterov", nesterov, allowed)
        super().__init__(*args, nesterov=nesterov, **kwargs)

    def update_step(self, gradient, variable, learning_rate) -> None:
        """Keras's method: updates a variable. One operation computes momentum in PyTorch's form."""
        if not self.momentum:
            super().update_step(gradient, variable, learning_rate)
            return
        dtype = variable.dtype
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=self.slots.of(variable, "momentum").value.handle,
            lr=tf.cast(learning_rate, dtype),
            grad=tf.cast(gradient, dtype),
            momentum=scalar(self.momentum, dtype),
        )


@keras.saving.register_keras_serializable("txl_tf")
class Muon(ClipAfterAverage, keras.optimizers.Optimizer):
    """Muon for the matrices of linear maps, see `txl_tf.training.muon`; AdamW for all other weights.

    A weight is such a matrix if it has two dimensions and no expression of `left_to_adamw` is found in its path. In our
    models, these are the kernels, without that of the last layer of a `Transformer` or a `Tagger`.

    Args:
        learning_rate: a number or a schedule, for both kinds of weights.
        beta_1, beta_2, epsilon: those of AdamW.
        product_dtype: type of Muon's products, such as "bfloat16"; `None` for the type of the weights.
        left_to_adamw: regular expressions, for lower and upper case alike. They replace the default.
        **kwargs: arguments of `ClipAfterAverage` and `keras.optimizers.Optimizer`.

    Raises:
        ParameterError: `left_to_adamw` is not a list of strings.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        product_dtype: str | None = None,
        left_to_adamw: Sequence[str] = ("embedding", "final_layer", "out_fc"),
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        if isinstance(left_to_adamw, str) or not all(isinstance(name, str) for name in left_to_adamw):
            raise ParameterError("left_to_adamw", left_to_adamw, "a list of regular expressions")
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.product_dtype = product_dtype
        self.left_to_adamw = list(left_to_adamw)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Keras's method: makes the variables. A matrix gets no second moment."""
        if self.built:
            return
        super().build(variables)
        for variable in variables:
            self.add_variable_from_reference(variable, "momentum")
            is_named = any(re.search(name, variable.path, re.IGNORECASE) for name in self.left_to_adamw)
            if len(variable.shape) != 2 or is_named:
                self.add_variable_from_reference(variable, "velocity")

    def _directions(self, strategy: Any, weights: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
        """Returns the orthogonal updates of the matrices, and the gradients of the other weights.

        With a mirrored strategy, the replicas take turns: each computes the updates of some matrices for all. On a TPU,
        each core computes all updates.
        """
        directions: list[Any] = []
        turn = 0
        for weight, grad in zip(weights, grads, strict=True):
            if self.slots.has(weight, "velocity"):
                directions.append(grad)
            else:
                directions.append(self._orthogonal_update(strategy, weight, grad, turn))
                turn += 1
        return directions

    def _orthogonal_update(self, strategy: Any, weight: keras.Variable, grad: Any, turn: int) -> Any:
        """Adds the gradient of a matrix to its momentum on all replicas. Returns the orthogonal update of the matrix.

        The momentum is the same on all replicas, so one replica of this machine computes the update for all.

        Args:
            strategy: the strategy that has the replicas.
            weight: the matrix.
            grad: its gradient, on all replicas.
            turn: the number of matrices before this one, which decides the replica.
        """
        momentum = self.slots.of(weight, "momentum").value
        strategy.extended.update(momentum, _add_to_momentum, args=(grad,), group=False)
        if not isinstance(grad, tf.distribute.DistributedValues):
            return self._direction(momentum, grad)
        replica = turn % len(grad.values)
        own_momentum = momentum.values[replica]
        with tf.device(own_momentum.device):
            return self._direction(own_momentum, grad.values[replica])

    def _direction(self, momentum: tf.Variable, grad: Tensor) -> Any:
        """Returns Nesterov's momentum, made orthogonal and scaled. `momentum` contains the gradient already."""
        ahead: Any = muon.MOMENTUM * momentum + tf.cast(grad, momentum.dtype)
        update = muon.orthogonalized(ahead, self.product_dtype or momentum.dtype)
        return muon.size_of_update(*ahead.shape) * update

    def update_step(self, gradient, variable, learning_rate) -> None:
        """Keras's method: updates a variable. The `gradient` of a matrix is its `_orthogonal_update`."""
        if self.slots.has(variable, "velocity"):
            _apply_adam(self, gradient, variable, learning_rate)
        else:
            variable.assign_sub(tf.cast(learning_rate, variable.dtype) * gradient)

    def get_config(self) -> dict[str, Any]:
        names = ("beta_1", "beta_2", "epsilon", "product_dtype", "left_to_adamw")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def _add_to_momentum(momentum: tf.Variable, gradient: Tensor) -> None:
    """Adds a gradient to Muon's momentum on one replica."""
    momentum.assign(muon.MOMENTUM * momentum + tf.cast(gradient, momentum.dtype))


OPTIMIZERS = {"adam": Adam, "adamw": AdamW, "lamb": Lamb, "sgd": SGD, "muon": Muon}


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
    product_dtype: str | None = None,
) -> keras.optimizers.Optimizer:
    """The original's recipe: Adam (0.9, 0.999, 1e-8) with warm-up and cosine decay, clipped by global norm.

    Args:
        learning_rate: the highest learning rate.
        warmup_steps: steps of the linear warm-up, if it is not 0. Its first step has the rate 0 or, with the schedules
            "linear" and "constant", `learning_rate / warmup_steps`.
        train_steps: the number of all steps, including the warm-up. The schedules "cosine" and "linear" end there.
        min_lr_ratio: the last rate of the schedule "cosine", divided by the highest. Other schedules do not take it.
        clip: the largest global norm of the gradients; `None` for no limit.
        optimizer: "adam", as in the original, "adamw", "lamb", "sgd" or "muon".
        weight_decay: weight decay of "adamw", "lamb" and "muon".
        ema: momentum of an exponential moving average of the weights, which replaces the weights at the end of `fit`;
            0 for none.
        schedule: "cosine"; "linear" or "constant", see `LinearSchedule`; or "noam", see `NoamSchedule`, which needs a
            warm-up.
        beta_2: decay of the second moments, which "sgd" does not have; 0.98 in the vanilla Transformer.
        clip_value: the largest absolute value in the gradients; `None` for no limit. It is applied before `clip`.
        momentum: momentum of "sgd", see `SGD`.
        gradient_accumulation_steps: number of batches for an update, which clips and uses the mean of their gradients.
            The steps above then count updates. (The argument of `compile` divides one batch into parts instead.)
        product_dtype: "float32", "bfloat16" or "float16", the type of the products by which "muon" makes updates
            orthogonal; `None` for the type of the weights. Choose the type in which the model computes.

    Raises:
        ParameterError: an argument is out of its range, or has no effect on this optimizer and schedule.
    """
    settings = OptimizerConfig(  # checks the arguments
        learning_rate=learning_rate, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio, clip=clip,
        optimizer=optimizer, weight_decay=weight_decay, ema=ema, schedule=schedule, beta_2=beta_2,
        clip_value=clip_value, momentum=momentum,
    )  # fmt: skip
    at_least(1)("gradient_accumulation_steps", gradient_accumulation_steps)
    if product_dtype is not None:
        one_of(PRECISIONS)("product_dtype", product_dtype)
        if optimizer != "muon":
            check_left_out({"product_dtype": product_dtype}, f"it is for optimizer=muon, not {optimizer}")
    rate = schedule_of(settings, train_steps)
    options: dict[str, Any] = {"use_ema": True, "ema_momentum": ema} if ema else {}
    if gradient_accumulation_steps > 1:
        options["gradient_accumulation_steps"] = gradient_accumulation_steps
    if weight_decay or optimizer == "adamw":  # which decays by default
        options["weight_decay"] = weight_decay
    if optimizer == "sgd":
        options |= {"momentum": float(momentum)}
    else:
        options |= {"beta_1": 0.9, "beta_2": beta_2, "epsilon": 1e-8}
    if optimizer == "muon":
        options["product_dtype"] = product_dtype
    return OPTIMIZERS[optimizer](rate, clip=clip, clip_value=clip_value, **options)
