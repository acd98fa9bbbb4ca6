"""Clips the gradient of the whole batch: the base class of the optimizers in `txl_tf.training.optimization`."""

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from txl_tf.config import at_least
from txl_tf.config.checks import is_number
from txl_tf.errors import ParameterError
from txl_tf.kernels.dtypes import scalar, wide_dtype
from txl_tf.training.distribution import sum_over_replicas


def global_norm(gradients: Iterable[Any]) -> tf.Tensor:
    """The global norm of gradients, in float32, or in float64 if one of them is float64."""
    dtype = wide_dtype(*gradients)
    return tf.linalg.global_norm([tf.cast(gradient, dtype) for gradient in gradients])


if TYPE_CHECKING:
    MixedIntoOptimizer = keras.optimizers.Optimizer
else:
    MixedIntoOptimizer = object


class Slots:
    """The variables that an optimizer has for each weight, such as the first moment of Adam.

    Args:
        weights: the Keras variables that the optimizer updates.
    """

    def __init__(self, weights: Iterable[keras.Variable]) -> None:
        self.weights = list(weights)
        self._weights = {id(x): weight for weight in self.weights for x in (weight, weight.value)}
        self._variables: dict[tuple[int, str | None], Any] = {}

    def __contains__(self, weight: Any) -> bool:
        return id(weight) in self._weights

    def add(self, weight: keras.Variable, name: str | None, variable: Any) -> None:
        """Adds a variable under the name that was given to `add_variable_from_reference`."""
        self._variables[id(weight), name] = variable

    def of(self, weight: Any, name: str) -> Any:
        """The variable for a weight.

        Args:
            weight: a Keras variable or its TensorFlow variable; in `update_step`, the latter on one replica.
            name: see `add`: such as "momentum" and "velocity", the two moments of Adam; "average", the moving average;
                or "total", the sum of gradients.
        """
        return self._variables[self._id_of(weight), name]

    def has(self, weight: Any, name: str) -> bool:
        """Whether a weight has a variable of this name. See `of` for the arguments."""
        return (self._id_of(weight), name) in self._variables

    def _id_of(self, weight: Any) -> int:
        """The id of the Keras variable of a weight."""
        key = id(weight)
        if key not in self._weights:  # on one of several replicas, `weight` is another object with the same handle
            key = id(weight.handle)
            if key not in self._weights:  # the first time on this replica, where `value.handle` is its own handle
                self._weights.update({id(other.value.handle): other for other in self.weights})
        return id(self._weights[key])


class ClipAfterAverage(MixedIntoOptimizer):
    """Mixin for Keras optimizers that sums the gradients over all replicas, then clips them by value or global norm.

    Keras's `global_clipnorm` clips the gradients of each replica before it sums them, so two replicas train differently
    from one. (If the loss is divided by the number of replicas, the sum is the average.)

    With `gradient_accumulation_steps=n`, every n-th batch updates the weights with the mean of the gradients of n
    batches, which is clipped. `iterations`, schedules and the moving average count updates. Each batch sums its
    gradients over the replicas, so that a checkpoint between two updates contains all of them. (Keras's own
    accumulation sums them over the replicas only in the update, so it stays off.)

    Args:
        clip: the largest global norm; `None` for no limit.
        clip_value: the largest absolute value, applied before `clip`; `None` for no limit.
        gradient_accumulation_steps: number of batches for an update; `None` for 1.
        *args, **kwargs: arguments of the Keras optimizer.

    Attributes:
        batches_per_update: number of batches for an update.
        batches: int variable, the number of batches so far; `None` if each of them is an update.
        gradient_norm: float variable, the global norm of the gradients of the last update, before clipping.
        schedule: the learning rate as a function of the number of updates; `None` if it is a number.
        slots: the variables for each weight, from `build` on.
    """

    batches: Any = None
    gradient_norm: Any
    slots: Slots
    not_decayed: tuple[frozenset[int], tuple[str, ...]] = (frozenset(), ())  # ids and names of weights

    def __init__(
        self,
        *args: Any,
        clip: float | None = None,
        clip_value: float | None = None,
        gradient_accumulation_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in (("clip", clip), ("clip_value", clip_value)):
            if value is not None and not (is_number(value) and value > 0):
                raise ParameterError(name, value, "positive, or None for no clipping")
        if gradient_accumulation_steps is not None:
            at_least(1)("gradient_accumulation_steps", gradient_accumulation_steps)
        for name in ("clipnorm", "clipvalue", "global_clipnorm"):
            if kwargs.get(name) is not None:
                raise ParameterError(name, kwargs[name], "left out: use clip or clip_value")
        super().__init__(*args, **kwargs)
        self.batches_per_update = gradient_accumulation_steps or 1
        self.clip = clip
        self.clip_value = clip_value
        self._note_schedule(args[0] if args else kwargs.get("learning_rate"))

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the next update."""
        return super().learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        keras_property: Any = keras.optimizers.Optimizer.learning_rate
        keras_property.fset(self, rate)
        self._note_schedule(rate)

    def _note_schedule(self, rate: Any) -> None:
        """Sets the attribute `schedule` from a learning rate: a number, a schedule, or the configuration of one."""
        if isinstance(rate, dict):  # from the configuration of a saved optimizer
            rate = keras.optimizers.schedules.deserialize(rate)
        self.schedule = rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None

    # ---------------------------------------------------------------------------------------------------- variables

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Keras's method: makes the variables. Without an effect if they exist."""
        if self.built:
            return
        dtype = "float64" if wide_dtype(*variables) == tf.float64 else None  # else Keras's default
        self.gradient_norm = self.add_variable(
            shape=(), dtype=dtype, name="gradient_norm", aggregation="only_first_replica"
        )
        self.slots = Slots(variables)
        if self.batches_per_update > 1:
            self.batches = self.add_variable(shape=(), dtype="int64", name="batches", aggregation="only_first_replica")
            for variable in variables:
                self.add_variable_from_reference(variable, name="total")
        super().build(variables)
        self.start_average(variables)

    def add_variable_from_reference(self, reference_variable: Any, name: str | None = None, *args, **kwargs) -> Any:
        """Keras's method, which makes a variable of the optimizer for a weight. Adds it to `slots`."""
        variable: Any = super().add_variable_from_reference(reference_variable, name, *args, **kwargs)
        self.slots.add(reference_variable, name, variable)
        return variable

    def start_average(self, variables: Iterable[keras.Variable]) -> None:
        """Sets the moving average, if there is one, to these weights.

        Keras itself sets it at the first update. If loss scaling skips the first steps, it would be zeros until then.
        """
        if self.use_ema:
            for variable in variables:
                self.slots.of(variable, "average").assign(variable)

    # ------------------------------------------------------------------------------------------------------- updates

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Keras's method: updates the weights with gradients or, between updates, adds the gradients to stored sums.

        Sums the gradients over the replicas and then clips them; Keras would clip first. An update calls Keras's
        `update_step`, or that of a subclass, for each weight. With an empty list of gradients, nothing happens.

        Args:
            grads: gradients of this replica; in the cross-replica context, their sums over all replicas.
            trainable_variables: the weights; by default those of `build`.

        Raises:
            ParameterError: the weights are not known, their number is not that of the gradients, or see `_dense`.
        """
        if not len(grads):
            return
        if not self.built:
            if trainable_variables is None:
                allowed = "the weights, because the optimizer was not built for any"
                raise ParameterError("trainable_variables", None, allowed)
            self.build(list(trainable_variables))
        weights = self.slots.weights if trainable_variables is None else list(trainable_variables)
        if len(grads) != len(weights):
            allowed = f"{len(weights)}, one for each weight"
            raise ParameterError("grads", len(grads), allowed, f"grads must be {allowed}, got {len(grads)}")
        grads, weights = self._dense(grads, weights)
        if not tf.distribute.in_cross_replica_context():
            grads = sum_over_replicas(grads)
        if self.batches is None:
            self._update(weights, grads)
            return
        totals = [self.slots.of(weight, "total") for weight in weights]
        sums = [tf.cast(grad, total.dtype) + total for grad, total in zip(grads, totals, strict=True)]

        def keep_or_update(strategy, sums, on_replicas=None):
            """Updates the weights in every `batches_per_update`-th call of `apply`. Else stores the sums in `totals`.

            Args:
                strategy: strategy that has the replicas.
                sums: gradients summed over replicas and over the batches since the last update.
                on_replicas: `on_replicas(function)` calls `function(sums)`; by default, on every replica.
            """
            on_replicas = on_replicas or (
                lambda function: strategy.extended.call_for_each_replica(function, args=(sums,))
            )
            is_update = (self.batches + 1) % self.batches_per_update == 0
            update = functools.partial(self._update_with_sums, weights, totals)
            keep = functools.partial(_assign_all, totals)
            keras.ops.cond(is_update, lambda: on_replicas(update), lambda: on_replicas(keep))

        if tf.distribute.in_cross_replica_context():
            keep_or_update(tf.distribute.get_strategy(), sums, on_replicas=lambda function: function(sums))
        else:
            tf.distribute.get_replica_context().merge_call(keep_or_update, args=(sums,))
        self.batches.assign_add(1)

    def _dense(self, grads: Any, weights: Any) -> tuple[list[Any], list[Any]]:
        """`(gradients, weights)`: the gradients as dense tensors, divided by the loss scale, and their weights.

        Weights without a gradient are left out, after a warning.

        Raises:
            ParameterError: no weight has a gradient, or the optimizer was not built for a weight.
        """
        missing = [weight.path for grad, weight in zip(grads, weights, strict=True) if grad is None]
        pairs = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
        unknown = [weight.path for _, weight in pairs if weight not in self.slots]
        if unknown or not pairs:
            allowed = "with a gradient, and among the weights that the optimizer was built for"
            raise ParameterError("trainable_variables", unknown or missing, allowed)
        if missing:
            warnings.warn(f"Gradients do not exist for variables {missing} when minimizing the loss.", stacklevel=3)
        dense = [tf.convert_to_tensor(grad) for grad, _ in pairs]  # rows of a sparse gradient may repeat
        if self.loss_scale_factor:
            dense = [grad / self.loss_scale_factor for grad in dense]
        return dense, [weight for _, weight in pairs]

    def _update_with_sums(self, weights, totals, sums) -> None:
        """Updates the weights once with the mean gradient of the batches, and sets `totals` to zeros.

        `sums` are sums over replicas and batches.
        """
        self._update(weights, [total / self.batches_per_update for total in sums])
        _assign_all(totals, [tf.zeros_like(total) for total in sums])

    def _update(self, weights: Sequence[Any], grads: Sequence[Any]) -> None:
        """Clips gradients and updates weights once. Then, in Keras's order, moves the averages and applies constraints.

        `grads` must be the same on every replica.
        """
        rate = tf.convert_to_tensor(self.learning_rate)

        def update(strategy, grads):
            directions = self._directions(strategy, weights, grads)
            for weight, direction in zip(weights, directions, strict=True):
                update_weight = functools.partial(self._update_weight, self._decays(weight))
                strategy.extended.update(weight.value, update_weight, args=(direction, rate), group=False)

        _on_all_replicas(update, self._clipped(grads))
        if self.use_ema:
            self._move_averages(weights)
        for weight in weights:
            if weight.constraint is not None:
                weight.assign(weight.constraint(weight))
        iterations: Any = self.iterations
        iterations.assign_add(1)

    def _directions(self, strategy: Any, weights: Sequence[Any], grads: Sequence[Any]) -> Sequence[Any]:
        """Returns what `update_step` gets for each weight: here its gradient. Called in the cross-replica context."""
        return grads

    def _update_weight(self, decays: bool, weight: tf.Variable, direction: Any, rate: Any) -> None:
        """Updates a weight on one replica. If `decays`, weight decay first makes the weight smaller."""
        if decays:
            weight.assign_sub(weight * tf.cast(self.weight_decay, weight.dtype) * tf.cast(rate, weight.dtype))
        self.update_step(direction, weight, rate)

    def _clipped(self, grads: Sequence[Any]) -> Sequence[Any]:
        """The gradients after clipping. Sets `gradient_norm` to their norm before clipping."""
        if len({grad.dtype for grad in grads}) > 1:  # for example, a float64 network in a float32 model
            grads = [tf.cast(grad, wide_dtype(*grads)) for grad in grads]
        norm = tf.linalg.global_norm(grads)
        self.gradient_norm.assign(norm)
        if self.clip_value is not None:
            grads = [tf.clip_by_value(grad, -self.clip_value, self.clip_value) for grad in grads]
        if self.clip is not None:
            norm = norm if self.clip_value is None else tf.linalg.global_norm(grads)
            grads, _ = tf.clip_by_global_norm(grads, self.clip, use_norm=norm)
        return grads

    def _move_averages(self, updated: Sequence[keras.Variable]) -> None:
        """Moves all averages towards the weights. The first update sets them to the weights.

        In every `ema_overwrite_frequency`-th update, it then sets the `updated` weights, which are not frozen, to their
        averages.
        """
        iterations: Any = self.iterations
        for weight in self.slots.weights:
            average = self.slots.of(weight, "average")
            momentum = tf.cast(iterations != 0, weight.dtype) * scalar(self.ema_momentum, weight.dtype)
            average.assign(momentum * average + (1 - momentum) * weight)
        if self.ema_overwrite_frequency:
            is_due = (iterations + 1) % self.ema_overwrite_frequency == 0
            for weight in updated:  # without `cond`, in which replicas cannot assign
                weight.assign(tf.where(is_due, self.slots.of(weight, "average"), weight))

    def finalize_variable_values(self, var_list: Iterable[keras.Variable]) -> None:
        """Keras's method: sets weights to their moving averages, if there are any.

        Keras pairs weights and averages by position, which is wrong if some weights were frozen after `build`.
        """
        if self.use_ema:
            for weight in var_list:
                weight.assign(self.slots.of(weight, "average"))

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Keras's method. Also stores the exclusions for `_decays`."""
        super().exclude_from_weight_decay(var_list, var_names)
        self.not_decayed = frozenset(map(id, var_list or ())), tuple(var_names or ())

    def _decays(self, weight: keras.Variable) -> bool:
        """Whether weight decay applies to a weight."""
        ids, names = self.not_decayed
        excluded = id(weight) in ids or any(re.search(name, weight.name) for name in names)
        return self.weight_decay is not None and not excluded

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "clip": self.clip,
            "clip_value": self.clip_value,
            "gradient_accumulation_steps": self.batches_per_update if self.batches_per_update > 1 else None,
        }


def count_of_batches(optimizer: keras.optimizers.Optimizer) -> Any:
    """The variable in which an optimizer counts batches.

    With gradient accumulation, it is not `iterations`, which counts updates of several batches: our optimizers count
    batches in `batches`, and Keras's optimizers in the variable from which they compute `iterations`.
    """
    own = getattr(optimizer, "batches", None)
    if own is not None:
        return own
    counters = (variable for variable in optimizer.variables if variable.name == "iteration")
    return next(counters, optimizer.iterations)


def _on_all_replicas(function: Callable[..., None], values: Any) -> None:
    """Calls `function(strategy, values)` in the cross-replica context, where it can update variables everywhere."""
    if tf.distribute.in_cross_replica_context():
        function(tf.distribute.get_strategy(), values)
    else:
        tf.distribute.get_replica_context().merge_call(function, args=(values,))


def _assign_all(variables, values) -> None:
    """Assigns values, which are the same on every replica, to the variables of all replicas."""

    def assign(strategy, values):
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(variable.value, lambda x, new: x.assign(new), args=(value,), group=False)

    _on_all_replicas(assign, values)
