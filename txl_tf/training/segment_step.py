"""One step of a model with memory on one replica. The memory is an argument and a result.

So the memory stays on its device, and the same step runs in eager mode, under XLA, several times in one call and under
every strategy of `tf.distribute`.

    train_step                  computes loss and gradients of a segment, updates the weights, returns new memory
        segment_nll             a method of the model: the nll of every label, and new memory
        part_by_part            with gradient accumulation, computes the rows in parts, one after the other
        side_by_side            with `parallel_parts`, computes the rows in parts, at the same time
    test_step                   the same without gradients
        evaluation_nll          a method of the model, called for the parts at the same time
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.kernels.fusion import fusing
from txl_tf.kernels.shapes import Tensor, shape_of
from txl_tf.kernels.threads import at_the_same_time
from txl_tf.nn.parts import is_overridden
from txl_tf.training.clipping import global_norm
from txl_tf.training.distribution import sum_over_replicas
from txl_tf.training.keras_arguments import takes_by_position
from txl_tf.training.trained_model import TrainedModel, apply_gradients, clear_losses


class CarriedByParts(NamedTuple):
    """The memory of an evaluation, one for each part of the rows; see `evaluation_nll`."""

    parts: tuple[Any, ...]


def any_signature(method: Callable) -> Callable[..., Any]:
    """Decorator of a step, for type checkers: an override may have Keras's signature, or also take the memory."""
    return method


class SegmentStep(TrainedModel):
    """The steps of `MemoryModel`, which its loop calls on every replica.

    A subclass may override `train_step(self, data, mems)` and `test_step(self, data, carried)`, which return
    `(logs, new_mems)`. Or it may use Keras's signature, `train_step(self, data)`, which returns logs; then
    `super().train_step(data)` takes the memory from the loop and returns the new memory to it. `data` is
    `(tokens, labels)` or `(tokens, labels, weights)`; or `(tokens, labels, weights, done)`, if the dataset has `done`.
    `logs` must contain `loss`. `tokens` is the sum of weights over which the loss is a mean, by default the number of
    labels. Both must be the same on every replica. Other logs are reported as means over the steps of an epoch.
    """

    network: Any
    gradient_accumulation_steps: int
    parallel_parts: int
    static_shapes: bool
    bin_capacities: list[int] | None
    _carried: threading.local  # the memory before and after a step with Keras's signature
    _compiled_gradients: Callable[..., Any] | None = None  # `_loss_and_gradients` under XLA, with `jit_compile`

    def segment_nll(self, *args: Any, **kwargs: Any) -> Any:
        """The nll of every label of a segment in training; see `LanguageModel.segment_nll`."""
        raise NotImplementedError

    def evaluation_nll(self, tokens: Any, labels: Any, carried: Any, done: Any = None) -> Any:
        """The nll of every label of a segment in an evaluation; see `LanguageModel.evaluation_nll`."""
        raise NotImplementedError

    @any_signature
    def train_step(self, data: Any, mems: Any = None) -> Any:
        """One step of training on one replica's share of a batch: `((tokens, labels), mems)` -> `(logs, new_mems)`.

        Args:
            data: `(tokens, labels)`, int `[batch, tgt_len]` each, not checked; or `(tokens, labels, weights)`, with
                float32 weights of the same shape. A label of the weight 0 may be any number. Or `(tokens, labels,
                weights, done)`, with bool `done` of the same shape, see `LanguageModel.score`.
            mems: the memory. `None` in Keras's form, `train_step(data)`: the step uses the memory of the loop, and
                returns only logs.

        The logs are those of the whole batch, and the same on every replica: `loss`; `tokens`, the number of labels
        that count or, with weights, the sum of their weights; `grad_norm`; and, with static shapes, `overflow`, the
        number of labels left out for lack of room in a cluster.
        """
        if mems is None:
            return self._with_carried(SegmentStep.train_step, data)
        tokens, labels, weights, *done = self._with_valid_labels(*data)
        # Without weights, `_loss_and_gradients` computes the total from the shape of the labels.
        total = None if weights is None else self._num_tokens(labels, weights)
        loss_and_gradients = self._compiled_gradients or self._loss_and_gradients
        key = self.step_key(shape_of(tokens)[0])
        sums, gradients, new_mems = loss_and_gradients(tokens, labels, weights, total, mems, key, *done)
        nll_sum, weight_sum, *left_out = tf.unstack(sum_over_replicas(sums))
        logs = {"loss": tf.math.divide_no_nan(nll_sum, weight_sum), "tokens": weight_sum}
        if self.static_shapes:
            logs["overflow"] = left_out[0]
        if self._may_leave_out:  # the mean is over the labels that were not left out
            total = self._num_labels(labels) if total is None else total
            factor = tf.math.divide_no_nan(total, weight_sum)
            gradients = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        return {**logs, "grad_norm": self._update(gradients)}, new_mems

    @any_signature
    def test_step(self, data: Any, carried: Any = None) -> Any:
        """One step of evaluation: `((tokens, labels), carried)` -> `(logs, carried)`, see `evaluation_nll`.

        The logs are `loss` and `tokens`. `data` and a `carried` of `None` are as in `train_step`.
        """
        if carried is None:
            return self._with_carried(SegmentStep.test_step, data)
        clear_losses(self)
        tokens, labels, weights, *done = self._with_valid_labels(*data)
        nll, is_counted, carried = self._evaluation_nll(tokens, labels, carried, *done)
        sums = weighted_sums(tf.cast(nll, self.loss_dtype), is_counted, weights)
        nll_sum, weight_sum = tf.unstack(sum_over_replicas(tf.stack(sums)))
        return {"loss": tf.math.divide_no_nan(nll_sum, weight_sum), "tokens": weight_sum}, carried

    def _evaluation_nll(self, tokens: Tensor, labels: Tensor, carried: Any, *done: Tensor) -> tuple[Any, Any, Any]:
        """`evaluation_nll`, which is called for the parts of the rows at the same time if `carried` has parts."""
        if not isinstance(carried, CarriedByParts):
            return self.evaluation_nll(tokens, labels, carried, *done)
        rows = [tf.split(x, len(carried.parts)) for x in (tokens, labels, *done)]
        arguments = zip(rows[0], rows[1], carried.parts, *rows[2:], strict=True)
        nll, is_counted, carried_by_parts = zip(*at_the_same_time(self.evaluation_nll, arguments), strict=True)
        is_counted = None if is_counted[0] is None else tf.concat(is_counted, 0)
        return tf.concat(nll, 0), is_counted, CarriedByParts(carried_by_parts)

    # ---------------------------------------------------------------------------------- steps with Keras's signature

    def step_with_memory(self, name: str) -> Callable[..., Any]:
        """A step as a function `(data, mems) -> (logs, new_mems)`, whichever of the two signatures it has.

        If it is a user's own, the function checks the results, and adds `tokens` to the logs if they have none.
        """
        step = getattr(self, name)
        if not is_overridden(self, name):
            return step
        has_keras_signature = not takes_by_position(step, 2)

        def own_step(data, mems):
            if not has_keras_signature:
                logs, new_mems = step(data, mems)
            else:
                self._carried.before = mems
                self._carried.after = None
                try:
                    logs = step(data)
                    new_mems = self._carried.after
                finally:
                    self._carried.before = self._carried.after = None
                if new_mems is None and self.network.mem_len:
                    allowed = f"a method that calls super().{name}(data), or one that takes and returns the memory"
                    raise ParameterError(name, step, allowed, f"{name} must be {allowed}: {name}(self, data, mems)")
                new_mems = mems if new_mems is None else new_mems
            if not isinstance(logs, dict) or "loss" not in logs:
                raise ParameterError(name, logs, "a method whose logs, a dictionary, have 'loss'")
            return logs if "tokens" in logs else {**logs, "tokens": self._num_tokens(*data[1:3])}, new_mems

        return own_step

    def _with_carried(self, step: Any, data: Any) -> dict[str, Any]:
        """Calls a step of this class with the memory that `step_with_memory` holds for this thread. Returns its logs.

        Stores the new memory for `step_with_memory`.
        """
        mems = getattr(self._carried, "before", None)
        if mems is None:
            allowed = "the memory before the segment, unless fit or evaluate calls the step"
            raise ParameterError("mems", None, allowed)
        logs, self._carried.after = step(self, data, mems)
        return logs

    # ------------------------------------------------------------------------------------------------ loss and update

    def _with_valid_labels(self, tokens: Tensor, labels: Tensor, weights: Any = None, *done: Tensor) -> tuple[Any, ...]:
        """`(tokens, labels, weights, *done)` of a batch, in which a label with the weight 0 is replaced.

        Such a label may be any number. It becomes the valid label 0 or, with static shapes, -1, which `segment_nll`
        leaves out. Without weights, all labels stay, and `weights` is `None`.
        """
        if weights is not None:
            labels = tf.where(weights > 0, labels, -1 if self.static_shapes else 0)
        return tokens, labels, weights, *done

    @property
    def parts_of_batch(self) -> int:
        """The number of parts into which a training step divides the rows of a replica."""
        return self.gradient_accumulation_steps * self.parallel_parts

    @property
    def _may_leave_out(self) -> bool:
        """Whether `segment_nll` may leave out labels, so that the number of the others is known only after it."""
        return self.static_shapes or is_overridden(self, "segment_nll")

    def _loss_and_gradients(
        self, tokens: Tensor, labels: Tensor, weights: Any, total: Any, mems: Any, dropout_key: Tensor,
        done: Tensor | None = None,
    ) -> tuple[Any, list[Any], Any]:  # fmt: skip
        """Computes this replica's share of a training step, in parts with gradient accumulation or `parallel_parts`.

        Args:
            tokens, labels: int `[batch, tgt_len]`, the rows of this replica.
            weights: float32 `[batch, tgt_len]`, or `None`.
            total: the sum of the weights of the whole batch. `None` without weights: it is the number of labels.
            mems, dropout_key: see `segment_nll`.
            done: bool `[batch, tgt_len]`, or `None`.

        Returns:
            `(sums, gradients, new_mems)`: `sums` are the results of `weighted_sums` for this replica's rows and, with
            static shapes, the number of labels that were left out; `gradients` are those of the rows' share of the
            loss: the sum of the nll divided by `total`, plus penalties, times the loss scale. If labels may be left
            out, `train_step` corrects the divisor.
        """
        total = self._num_labels(labels) if weights is None else total
        step: Step = functools.partial(self._gradients_of_part, total)
        if self.parallel_parts > 1:
            step = side_by_side(step, self.parallel_parts)
        if self.gradient_accumulation_steps > 1:
            zero_sums = tf.zeros([3 if self.static_shapes else 2], self.loss_dtype)
            variables = self.trainable_variables
            step = part_by_part(step, self.gradient_accumulation_steps, variables, zero_sums)
        return step(tokens, labels, weights, mems, dropout_key, done)

    def _gradients_of_part(
        self, total: Tensor, tokens: Tensor, labels: Tensor, weights: Any, mems: Any, dropout_key: Tensor,
        done: Tensor | None,
    ) -> tuple[Any, list[Any], Any]:  # fmt: skip
        """`_loss_and_gradients` for one part of the rows. `total` is the sum of the weights of the whole batch."""
        parts = self.parts_of_batch
        compiled_whole = self.static_shapes or self._compiled_gradients is not None
        optional = {} if done is None else {"done": done}
        clear_losses(self)  # of the last step; Keras clears them only if the model itself is called
        with fusing(not compiled_whole), tf.GradientTape() as tape:
            nll, is_counted, new_mems = self.segment_nll(
                tokens, labels, mems, training=True, dropout_key=dropout_key,
                static_shapes=self.static_shapes, bin_capacities=self.bin_capacities, **optional,
            )  # fmt: skip
            nll_sum, weight_sum = weighted_sums(tf.cast(nll, self.loss_dtype), is_counted, weights)
            loss = nll_sum / total if weights is None else tf.math.divide_no_nan(nll_sum, total)
            fraction = None
            if self._may_leave_out:
                # `train_step` multiplies the gradients by total / weight_sum of the batch. The fractions of all parts
                # and replicas sum up so that this factor cancels out for the penalties.
                replicas = self.distribute_strategy.num_replicas_in_sync
                fraction = tf.math.divide_no_nan(weight_sum * parts * replicas, total)
            loss = self.optimizer.scale_loss(self.with_penalties(loss, parts, fraction))
            # In eager execution, TensorFlow cannot make zeros like a Keras variable, but like a tensor.
            weights_of_model = [weight.value for weight in self.trainable_variables]
            gradients = tape.gradient(loss, weights_of_model, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        sums = [nll_sum, weight_sum]
        if self.static_shapes:
            sums.append(tf.math.count_nonzero((labels >= 0) & ~is_counted, dtype=self.loss_dtype))
        return tf.stack(sums), gradients, new_mems

    def _num_tokens(self, labels: Tensor, weights: Any = None) -> Any:
        """The sum of the weights of a batch or, without weights, the number of labels that count; over all replicas."""
        if weights is None and not self.static_shapes:
            return self._num_labels(labels)
        weights = labels >= 0 if weights is None else weights
        return sum_over_replicas(tf.reduce_sum(tf.cast(weights, self.loss_dtype)))

    def _num_labels(self, labels: Tensor) -> Any:
        """The number of labels of a batch on all replicas, whether they count or not."""
        return tf.cast(tf.size(labels) * self.distribute_strategy.num_replicas_in_sync, self.loss_dtype)

    def _update(self, gradients: Any) -> Any:
        """Updates the weights. Returns the global norm of the gradients, before clipping and without the loss scale.

        Args:
            gradients: this replica's gradients. Their sum over the replicas is the gradient of the (scaled) loss.
        """
        if not gradients:  # all weights are frozen
            return tf.zeros([], self.loss_dtype)
        inner_optimizer = self.inner_optimizer
        norm = None
        if not hasattr(inner_optimizer, "gradient_norm"):  # Keras's own optimizers do not have this attribute
            norm = global_norm(sum_over_replicas(gradients))
            norm /= self.optimizer.scale_loss(tf.ones([], norm.dtype))  # 1, or the loss scale in float16
        apply_gradients(self.optimizer, gradients, self.trainable_variables)
        return tf.convert_to_tensor(inner_optimizer.gradient_norm) if norm is None else norm


def weighted_sums(nll: Tensor, is_counted: Tensor | None, weights: Any = None) -> tuple[Any, Any]:
    """`(sum of weight * nll, sum of the weights)` of a segment, in the dtype of `nll`.

    Args:
        nll: `[batch, tgt_len]`, 0 where a label does not count.
        is_counted: bool `[batch, tgt_len]`, true where a label counts; `None` if all labels count.
        weights: float32 `[batch, tgt_len]`; `None` for 1 everywhere.
    """
    if weights is not None:
        weights = tf.cast(weights, nll.dtype)
        weights = weights if is_counted is None else tf.where(is_counted, weights, 0.0)
        return tf.reduce_sum(tf.math.multiply_no_nan(nll, weights)), tf.reduce_sum(weights)
    count = tf.size(nll) if is_counted is None else tf.math.count_nonzero(is_counted, dtype=tf.int32)
    return tf.reduce_sum(nll), tf.cast(count, nll.dtype)


# (tokens, labels, weights, mems, dropout_key, done) -> (sums, gradients, new_mems), see `_loss_and_gradients`
Step = Callable[..., tuple[Any, Any, Any]]


def part_by_part(step: Step, parts: int, variables: Any, no_sums: Any) -> Step:
    """A function like `step` that calls it for parts of the rows, one after the other.

    So the device needs room for only one part at a time.

    Args:
        step: computes some rows. In the `dropout_key` of a part, the last number is the index of its first row.
        parts: number of parts, a divisor of the rows.
        variables: the variables to which the gradients belong.
        no_sums: zeros with the shape of `sums`.

    Returns:
        A function of the arguments of `step`, for all rows, with its results: `sums` and `gradients` are totals over
        the parts, `new_mems` is the memory of all rows.
    """

    def split(x):  # [rows, ...] -> [parts, rows / parts, ...]
        rows, *shape = shape_of(x)
        return tf.reshape(x, [parts, rows // parts, *shape])

    def all_parts(
        tokens: Tensor, labels: Tensor, weights: Any, mems: Any, dropout_key: Tensor, done: Tensor | None = None
    ) -> tuple[Any, Any, Any]:
        tokens = split(tokens)
        labels = split(labels)
        mems = [split(mem) for mem in mems]
        weights = None if weights is None else split(weights)
        done = None if done is None else split(done)
        rows = shape_of(tokens)[1]  # of a part

        def body(i, sums, gradients, new_mems):
            part_weights = None if weights is None else weights[i]
            part_mems = [mem[i] for mem in mems]
            key = dropout_key + tf.stack([0, 0, i * rows])
            part_done = None if done is None else done[i]
            part_sums, part_gradients, part_mems = step(tokens[i], labels[i], part_weights, part_mems, key, part_done)
            gradients = [total + gradient for total, gradient in zip(gradients, part_gradients, strict=True)]
            new_mems = [array.write(i, mem) for array, mem in zip(new_mems, part_mems, strict=True)]
            # A list, as eager mode expects after a list of values.
            return [i + 1, sums + part_sums, gradients, new_mems]

        zeros = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
        arrays = [tf.TensorArray(mem.dtype, parts) for mem in mems]
        _, sums, gradients, new_mems = tf.while_loop(
            lambda i, *_: i < parts,
            body,
            [0, no_sums, zeros, arrays],
            parallel_iterations=1,
            maximum_iterations=parts,
        )
        new_mems = [array.stack() for array in new_mems]
        return sums, gradients, [tf.reshape(mem, [parts * rows, *shape_of(mem)[2:]]) for mem in new_mems]

    return all_parts


def side_by_side(step: Step, parts: int) -> Step:
    """A function like `step` that calls it for parts of the rows, none of which waits for another.

    Args and returns as in `part_by_part`.
    """

    def split(x):
        return [None] * parts if x is None else tf.split(x, parts)

    def all_parts(
        tokens: Tensor, labels: Tensor, weights: Any, mems: Any, dropout_key: Tensor, done: Tensor | None = None
    ) -> tuple[Any, Any, Any]:
        rows = shape_of(tokens)[0] // parts
        tokens, labels, weights, done = map(split, (tokens, labels, weights, done))
        mems = [split(mem) for mem in mems]
        keys = [dropout_key + tf.stack([0, 0, i * rows]) for i in range(parts)]
        arguments = [
            (tokens[i], labels[i], weights[i], [mem[i] for mem in mems], keys[i], done[i]) for i in range(parts)
        ]
        results = at_the_same_time(step, arguments)
        sums, gradients, new_mems = zip(*results, strict=True)
        gradients = [tf.add_n(gradients_of_weight) for gradients_of_weight in zip(*gradients, strict=True)]
        return tf.add_n(sums), gradients, [tf.concat(mems_of_layer, 0) for mems_of_layer in zip(*new_mems, strict=True)]

    return all_parts
