"""`fit` and `evaluate` of a model with memory, on one device and on many.

A step takes the memory in and gives it out as tensors, a share of the rows on every replica. So the memory stays on
its device, and the same step runs in eager mode, under XLA, several times a call and under every strategy of
`tf.distribute`. The sums that the logs are computed from go the same way.

    fit -> loop (training/loop.py) -> train_step -> segment_nll of the subclass

Rows: the batch is divided among the replicas in order. Replica r of R holds the rows `[r * B / R, (r + 1) * B / R)` of
every batch, and the memory of these rows.
"""

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import at_least
from txl_tf.data.batches import Batches, check_batches
from txl_tf.training.distribution import all_rows, num_workers, rows_of_this_worker
from txl_tf.training.loop import NO_TOTALS, LoopState, make_loop
from txl_tf.training.step import part_by_part, sum_and_count


class MemoryModel(keras.Model):
    """Keras model that is trained on consecutive segments of text.

    A subclass has a `network` with `n_token` and `seed`, and four functions of one replica, see `TransformerXLLM`. For
    training: `initial_mems` and `segment_nll`. For evaluation, which may carry the memory in another form:
    `start_evaluation` and `evaluation_nll`.

    Attributes:
        loop: `LoopState` of the `fit` or `evaluate` that runs or ran last.
        stop_requested: set it (from a signal handler, on any worker) to have all workers agree on a last step.
        stop_agreed: whether the step that just ran should be the last, the same on every worker.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.loop, self._validation_batches = LoopState(), None
        self.stop_requested = self.stop_agreed = False
        self.gradient_accumulation_steps, self.static_shapes, self.bin_capacities = 1, False, None
        self._compiled_gradients = None

    def compile(
        self, optimizer=None, *, jit_compile=False, steps_per_execution=1, run_eagerly=False,
        gradient_accumulation_steps=1, static_shapes=False, bin_capacities=None,
    ):  # fmt: skip
        """Configures `fit` and `evaluate`. The loss is the model's own.

        Args:
            optimizer: from `make_optimizer`, or any Keras optimizer (which does not clip as the original's does).
                `None` is enough to evaluate.
            jit_compile: compile forward and backward pass with XLA.
            steps_per_execution: training steps in one call of the compiled graph.
            run_eagerly: run the steps without a graph, for debugging.
            gradient_accumulation_steps: parts of a batch, each with its share of the rows, that are computed one after
                the other to save memory; the result is that of the whole.
            static_shapes: whether all tensors of a step have static shapes, as TPUs need.
            bin_capacities: list of int, with static shapes: most tokens of each bin but the first, in one part of a
                batch on one replica, see `choose_bin_capacities`. Tokens beyond are left out of loss and count, and the
                logs have their number, `overflow`. `None`: none is left out, as in evaluation.

        Raises:
            ValueError: an argument is out of its range.
        """
        at_least(1)("gradient_accumulation_steps", gradient_accumulation_steps)
        super().compile(
            optimizer, jit_compile=jit_compile, steps_per_execution=steps_per_execution, run_eagerly=run_eagerly
        )
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.static_shapes = bool(static_shapes)
        self.bin_capacities = bin_capacities

    def get_compile_config(self):
        if not self.compiled:
            return None
        names = "optimizer jit_compile steps_per_execution gradient_accumulation_steps static_shapes bin_capacities"
        return keras.saving.serialize_keras_object({name: getattr(self, name) for name in names.split()})

    def compile_from_config(self, config):
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None:
            self.optimizer.build(self.trainable_variables)

    def fit(self, x, **kwargs):
        """Trains on batches of consecutive segments, the memory carried from batch to batch.

        Row r of a batch continues row r of the batch before it. The memory starts from zeros, and goes on at the end
        of an epoch, where the text starts again, as in the original.

        Args:
            x: `tf.data.Dataset` of `(tokens, labels)`, int `[batch, tgt_len]` each, the batch over all replicas; every
                worker gives the whole of it. `tgt_len` may vary unless shapes are static.
            **kwargs: of `keras.Model.fit`, such as `epochs`, `steps_per_epoch`, `callbacks`, `validation_data` (a
                dataset of the same kind).

        Returns:
            The Keras `History`. The logs of a batch are the step's `loss` (mean nll in nats), `grad_norm` (global
            norm before clipping) and, with static shapes, `overflow`; those of an epoch are mean, mean and sum over it.

        Raises:
            ValueError: `x` is not such a dataset.
            tf.errors.InvalidArgumentError: an id outside the vocabulary.
        """
        self._assert_compile_called("fit")
        self._check_fit(kwargs.setdefault("steps_per_epoch", None))
        if not self.optimizer.built:  # within a step, some strategies could not
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)
        batches = self._prepare(x)
        self.loop = LoopState(self._log_names(), batches, self._on_replicas(self.initial_mems, batches))
        if batches.repeated:
            kwargs["steps_per_epoch"] = kwargs["steps_per_epoch"] or batches.count
        if kwargs.get("validation_data") is not None:
            self._validation_batches = self._prepare(kwargs["validation_data"], evaluation=True)
            kwargs["validation_data"] = self._validation_batches.dataset
            if self._validation_batches.repeated:
                kwargs["validation_steps"] = kwargs.get("validation_steps") or self._validation_batches.count
        return super().fit(batches.dataset, **{"shuffle": False, **kwargs})

    def evaluate(self, x, **kwargs):
        """The mean nll of a text, in nats a token. The memory starts from zeros and is carried from batch to batch.

        Args:
            x: as in `fit`.
            **kwargs: of `keras.Model.evaluate`.

        Returns:
            float: nll of all tokens over their number; with `return_dict=True`, `{"loss": ...}`.
        """
        self._assert_compile_called("evaluate")
        if kwargs.get("_use_cached_eval_dataset"):  # the validation_data of `fit`
            batches = self._validation_batches
        else:
            batches = self._prepare(x, evaluation=True)
            if batches.repeated:
                kwargs["steps"] = kwargs.get("steps") or batches.count
        training = self.loop
        self.loop = LoopState(("loss",), batches, self._on_replicas(self.start_evaluation, batches, batches.tgt_len))
        try:
            return super().evaluate(batches.dataset, **kwargs)
        finally:
            self.loop = training

    # ------------------------------------------------------------------------------------------------ one step

    def train_step(self, data, mems):
        """One step of training on one replica's share of a batch: `((tokens, labels), mems)` -> `(logs, new_mems)`.

        The logs are those of the whole batch, the same on every replica: `loss`, `tokens` (the number that it is the
        mean of), `grad_norm` and, with static shapes, `overflow`.
        """
        tokens, labels = data
        context = tf.distribute.get_replica_context()
        first_row = context.replica_id_in_sync_group * keras.ops.shape(tokens)[0]
        dropout_key = tf.stack([self.network.seed % 2**31, tf.cast(self.optimizer.iterations, tf.int32), first_row])
        loss_and_gradients = self._compiled_gradients or self._loss_and_gradients
        sums, gradients, new_mems = loss_and_gradients(tokens, labels, mems, dropout_key)
        nll, kept = tf.unstack(context.all_reduce("SUM", sums))
        logs = {"loss": nll / kept, "tokens": kept}
        if self.static_shapes:
            n_labels = self._num_labels(labels)
            logs["overflow"] = n_labels - kept
            gradients = [gradient * (n_labels / kept) for gradient in gradients]
        return {**logs, "grad_norm": self._update(context, gradients)}, new_mems

    def _update(self, context, gradients):
        """Applies the gradients, a replica's share of them; returns their global norm over all replicas."""
        step = tf.convert_to_tensor(self.optimizer.iterations)
        optimizer, scale = self.optimizer, 1.0
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer, scale = optimizer.inner_optimizer, tf.convert_to_tensor(optimizer.dynamic_scale)
        norm = None
        if not hasattr(optimizer, "gradient_norm"):  # Keras's own optimizers do not keep it
            norm = tf.linalg.global_norm(context.all_reduce("SUM", gradients)) / scale
        self.optimizer.apply(gradients, self.trainable_variables)
        if optimizer is not self.optimizer:  # which skips the update, but not the text, where half precision overflows
            optimizer.iterations.assign(step + 1)
        return tf.convert_to_tensor(optimizer.gradient_norm) if norm is None else norm

    def _num_labels(self, labels):
        """Number of labels of a batch over all replicas, float32."""
        return tf.cast(tf.size(labels) * self.distribute_strategy.num_replicas_in_sync, tf.float32)

    def _loss_and_gradients(self, tokens, labels, mems, dropout_key):
        """`[nll, tokens counted]` of the rows here, gradients of their share of the mean loss, and new memory."""
        n_labels = self._num_labels(labels)

        def part(tokens, labels, mems, dropout_key):
            with tf.GradientTape() as tape:
                nll, kept, new_mems = self.segment_nll(
                    tokens, labels, mems, training=True, dropout_key=dropout_key,
                    static_shapes=self.static_shapes, bin_capacities=self.bin_capacities,
                )  # fmt: skip
                sums = sum_and_count(nll, kept)
                loss = self.optimizer.scale_loss(sums[0] / n_labels)
            return sums, tape.gradient(loss, self.trainable_variables), new_mems

        if self.gradient_accumulation_steps == 1:
            return part(tokens, labels, mems, dropout_key)
        parts, variables = self.gradient_accumulation_steps, self.trainable_variables
        return part_by_part(part, parts, variables, tokens, labels, mems, dropout_key)

    def test_step(self, data, carried):
        """As `train_step`, without training: `((tokens, labels), carried)` -> `(logs, carried)`, see `evaluation_nll`.

        The logs are `loss` and `tokens`.
        """
        tokens, labels = data
        nll, kept, carried = self.evaluation_nll(tokens, labels, carried)
        nll, kept = tf.unstack(tf.distribute.get_replica_context().all_reduce("SUM", sum_and_count(nll, kept)))
        return {"loss": nll / kept, "tokens": kept}, carried

    # ------------------------------------------------------------------------------------- what Keras calls, and when

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            jitted = tf.function(self._loss_and_gradients, jit_compile=True) if self.jit_compile else None
            self._compiled_gradients = jitted
            self.train_function = make_loop(self, self.train_step, self._log_names())

    def make_test_function(self, force=False):
        if self.test_function is None or force:
            self.test_function = make_loop(self, self.test_step, ("loss",))

    def _log_names(self):
        return ("loss", "grad_norm", *["overflow"] * self.static_shapes)

    def reset_metrics(self):
        self.loop.totals = tf.constant(NO_TOTALS)

    def get_metrics_result(self):
        return self.loop.logs()

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Nothing: the model is built. Keras would take a batch off the dataset, and fails under several workers."""

    # ---------------------------------------------------------------------------------------- before the first step

    def _check_fit(self, steps_per_epoch):
        """Raises ValueError where `fit` cannot train with what `compile` was given."""
        if self.optimizer is None:
            raise ValueError("fit needs an optimizer, got None: compile with txl_tf.make_optimizer(...)")
        if (steps_per_epoch or 0) % self.steps_per_execution:
            raise ValueError(
                f"steps_per_epoch must be a multiple of steps_per_execution={self.steps_per_execution}, "
                f"got {steps_per_epoch}"
            )
        replicas = self.distribute_strategy.num_replicas_in_sync
        if replicas > 1 and isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(f"mixed_float16 trains on one replica, got {replicas}: use mixed_bfloat16")

    def _prepare(self, dataset, evaluation=False):
        """The dataset with its batches checked, and of several workers each with its own rows: `Batches`."""
        batches = check_batches(dataset, self.network.n_token, self.static_shapes, evaluation)
        strategy = self.distribute_strategy
        replicas, parts = strategy.num_replicas_in_sync, 1 if evaluation else self.gradient_accumulation_steps
        if batches.rows % (replicas * parts):
            raise ValueError(
                f"the batch must divide by the number of replicas, got {batches.rows} rows on {replicas} replicas"
                + f" with gradient_accumulation_steps={parts}" * (parts > 1)
            )
        if num_workers(strategy) == 1:
            return batches
        if batches.count == tf.data.UNKNOWN_CARDINALITY:
            raise ValueError("x must be of a known number of batches where several workers train together")
        mine = rows_of_this_worker(batches.dataset.repeat(), strategy, batches.rows)
        return Batches(mine, batches.rows, batches.tgt_len, batches.count, repeated=batches.count > 0)

    def _on_replicas(self, function, batches, *args):
        """`function(rows, *args)` on every replica, for its share of the rows."""
        strategy = self.distribute_strategy
        rows = batches.rows // strategy.num_replicas_in_sync
        if strategy.num_replicas_in_sync == 1:
            return function(rows, *args)
        return tf.function(strategy.run)(function, args=(rows, *args))

    # --------------------------------------------------------------------------------------------- what is resumed

    @property
    def metric_totals(self):
        """float64 array, the sums that the logs of this epoch are computed from."""
        return self.loop.totals.numpy()

    def set_metric_totals(self, array):
        """Goes on with sums from `metric_totals`. Call it once an epoch has begun, from a callback."""
        self.loop.totals = tf.constant(array, tf.float64)

    def carried_mems_array(self):
        """The memory that `fit` carries: float32 array `[n_layer, batch, mem_len, d_model]`, rows of all replicas.

        Where there are several workers, all must call it at the same step.
        """
        mems = all_rows(self.distribute_strategy, self.loop.mems)
        return np.stack([tf.cast(mem, tf.float32) for mem in mems])

    def set_carried_mems(self, array):
        """Goes on with a memory from `carried_mems_array`. Call it once `fit` has begun, from a callback."""
        shape = self.carried_mems_array().shape
        if array.shape != shape:
            raise ValueError(
                f"array must be [n_layer, batch, mem_len, d_model] = {list(shape)}, got {list(array.shape)}"
            )
        strategy = self.distribute_strategy
        shares = np.split(array, strategy.num_replicas_in_sync, axis=1)

        def share(layer):
            return strategy.experimental_distribute_values_from_function(
                lambda context: tf.cast(shares[context.replica_id_in_sync_group][layer], self.compute_dtype)
            )

        self.loop.mems = [share(layer) for layer in range(len(array))]
