"""One step of a model with memory, on one replica: memory goes in and comes out as tensors.

So the memory stays on its device, and the same step runs in eager mode, under XLA, several times a call and under every
strategy of `tf.distribute`.

    train_step                  the loss of a segment and its gradients; one update; new memory
        segment_nll             the model's: nll of every label, new memory
        part_by_part            with gradient accumulation, the rows in parts, one after the other
    test_step                   the same without gradients
"""

import keras
import tensorflow as tf

from txl_tf.layers.common.fusion import fusing
from txl_tf.training.distribution import sum_over_replicas
from txl_tf.training.optimization import global_norm
from txl_tf.training.trained_model import apply_gradients


class SegmentStep:
    """Mixin of `MemoryModel`: the steps that its loop calls on every replica."""

    _compiled_gradients = None  # `_loss_and_gradients` under XLA, with `jit_compile`

    def train_step(self, data, mems):
        """One step of training on one replica's share of a batch: `((tokens, labels), mems)` -> `(logs, new_mems)`.

        The logs are those of the whole batch, the same on every replica: `loss`, `tokens` (the number that it is the
        mean of), `grad_norm` and, with static shapes, `overflow`.
        """
        tokens, labels = data
        loss_and_gradients = self._compiled_gradients or self._loss_and_gradients
        key = self.step_key(keras.ops.shape(tokens)[0])
        sums, gradients, new_mems = loss_and_gradients(tokens, labels, mems, key)
        nll, kept = tf.unstack(sum_over_replicas(sums))
        logs = {"loss": nll / kept, "tokens": kept}
        if self.static_shapes:
            n_labels = self._num_labels(labels)
            logs["overflow"] = n_labels - kept
            gradients = [gradient * (n_labels / kept) for gradient in gradients]
        return {**logs, "grad_norm": self._update(gradients)}, new_mems

    def test_step(self, data, carried):
        """One step of evaluation: `((tokens, labels), carried)` -> `(logs, carried)`, see `evaluation_nll`.

        The logs are `loss` and `tokens`.
        """
        nll, kept, carried = self.evaluation_nll(*data, carried)
        return self._test_logs(nll, kept), carried

    def _test_logs(self, nll, kept):
        nll, kept = tf.unstack(sum_over_replicas(sum_and_count(nll, kept)))
        return {"loss": nll / kept, "tokens": kept}

    def _loss_and_gradients(self, tokens, labels, mems, dropout_key):
        """`[nll, tokens counted]` of the rows here, gradients of their share of the mean loss, and new memory."""
        n_labels, parts = self._num_labels(labels), self.gradient_accumulation_steps
        compiled_whole = self.static_shapes or self._compiled_gradients is not None

        def part(tokens, labels, mems, dropout_key):
            with fusing(not compiled_whole), tf.GradientTape() as tape:
                nll, kept, new_mems = self.segment_nll(
                    tokens, labels, mems, training=True, dropout_key=dropout_key,
                    static_shapes=self.static_shapes, bin_capacities=self.bin_capacities,
                )  # fmt: skip
                sums = sum_and_count(nll, kept)
                loss = self.optimizer.scale_loss(self.with_penalties(sums[0] / n_labels, parts))
                gradients = tape.gradient(loss, self.trainable_variables)
            return sums, gradients, new_mems

        if parts == 1:
            return part(tokens, labels, mems, dropout_key)
        sums = tf.zeros([2], self.loss_dtype)
        return part_by_part(part, parts, sums, self.trainable_variables, tokens, labels, mems, dropout_key)

    def _num_labels(self, labels):
        """Number of labels of a batch over all replicas, in the dtype of the loss."""
        return tf.cast(tf.size(labels) * self.distribute_strategy.num_replicas_in_sync, self.loss_dtype)

    def _update(self, gradients):
        """Applies the gradients, a replica's share of them; returns their global norm over all replicas."""
        if not gradients:  # all weights are frozen
            return tf.zeros([], self.loss_dtype)
        optimizer, norm = self.inner_optimizer, None
        if not hasattr(optimizer, "gradient_norm"):  # Keras's own optimizers do not keep it
            norm = global_norm(sum_over_replicas(gradients))
            norm /= self.optimizer.scale_loss(tf.ones([], norm.dtype))
        apply_gradients(self.optimizer, gradients, self.trainable_variables)
        return tf.convert_to_tensor(optimizer.gradient_norm) if norm is None else norm


def sum_and_count(nll, kept):
    """`[nll, tokens counted]` of a segment, `[2]`, in the dtype of `nll`.

    `kept`, bool, says which tokens count (`None`: all).
    """
    count = tf.size(nll) if kept is None else tf.math.count_nonzero(kept, dtype=tf.int32)
    return tf.stack([tf.reduce_sum(nll), tf.cast(count, nll.dtype)])


def part_by_part(step, parts, sums, variables, tokens, labels, mems, dropout_key):
    """Calls `step` for one part of the rows after the other: the result is that of all rows, in the memory of one part.

    Args:
        step: function of `(tokens, labels, mems, dropout_key)` that returns `(sums, gradients, new_mems)`.
        parts: number of parts, a divisor of the rows.
        sums: zeros, to which those of the parts are added.
        variables: those that the gradients are of.
        dropout_key: int `[3]`, see `dropout`; each part gets the number of its first row.

    Returns:
        `(sums, gradients, new_mems)`: sums and gradients added up, the memories of all rows.
    """

    def split(x):
        return tf.reshape(x, [parts, x.shape[0] // parts, *keras.ops.shape(x)[1:]])

    tokens, labels, mems = split(tokens), split(labels), [split(mem) for mem in mems]
    rows = tokens.shape[1]

    def body(i, sums, gradients, new_mems):
        of_part, of_gradients, of_mems = step(
            tokens[i], labels[i], [mem[i] for mem in mems], dropout_key + tf.stack([0, 0, i * rows])
        )
        gradients = [total + part for total, part in zip(gradients, of_gradients, strict=True)]
        new_mems = [ta.write(i, mem) for ta, mem in zip(new_mems, of_mems, strict=True)]
        return [i + 1, sums + of_part, gradients, new_mems]  # a list as the first values are: eager mode looks

    zeros = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
    arrays = [tf.TensorArray(mem.dtype, parts) for mem in mems]
    _, sums, gradients, new_mems = tf.while_loop(
        lambda i, *_: i < parts,
        body,
        [0, sums, zeros, arrays],
        parallel_iterations=1,
        maximum_iterations=parts,
    )
    new_mems = [ta.stack() for ta in new_mems]
    return sums, gradients, [tf.reshape(mem, [parts * rows, *keras.ops.shape(mem)[2:]]) for mem in new_mems]
