"""`fit` and `evaluate` of a model with memory, on one device and on many.

A step takes the memory in and gives it out as tensors, a share of the rows on every replica, so that it stays on its
device and one and the same step runs in eager mode, under XLA, several times a call, and under every strategy of
`tf.distribute`. What the logs are computed from, sums over all replicas, is handed on in the same way.

Rows: the batch is divided among the replicas in order. Replica r of R holds the rows `[r * B / R, (r + 1) * B / R)` of
every batch, and the memory of these rows.
"""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from txl_tf.adaptive import id_error
from txl_tf.distribution import all_rows, any_worker, num_workers

_NO_TOTALS = np.zeros(5)  # nll, tokens counted, tokens left out, gradient norm, 1: summed over the steps of an epoch


class CarriesMemory(keras.Model):
    """Keras model that is trained on consecutive segments of text.

    A subclass has a `network` with `n_token` and `seed`, and four functions of one replica, for training
    `initial_mems(batch_size)` and `segment_nll(tokens, labels, mems, *, bin_sizes, training, seed)`, which returns
    `(nll, kept, new_mems)`, and for evaluation, which may carry the memory in another form,
    `start_evaluation(batch_size, tgt_len)` and `evaluation_nll(tokens, labels, carried)`, which returns
    `(nll, kept, carried)`.

    Attributes:
        carried_mems: the memory between two steps of `fit`.
        stop_requested: set it (from a signal handler, on any worker) to have all workers agree on a last step.
        stop_agreed: whether the step that just ran should be the last, the same on every worker.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.carried_mems = self._batches = None
        self.stop_requested = self.stop_agreed = False
        self._totals = tf.constant(_NO_TOTALS)
        self.gradient_accumulation_steps, self.bin_sizes = 1, None
        self._log_names = []
        self._compiled_gradients = None

    def compile(
        self,
        optimizer,
        *,
        jit_compile=False,
        steps_per_execution=1,
        run_eagerly=False,
        gradient_accumulation_steps=1,
        bin_sizes=None,
    ):
        """Configures `fit` and `evaluate`. The loss is the model's own.

        Args:
            optimizer: from `make_optimizer`, or any Keras optimizer (which is then not clipped as the original's).
            jit_compile: compile forward and backward pass with XLA.
            steps_per_execution: training steps in one call of the compiled graph.
            run_eagerly: run the steps without a graph, for debugging.
            gradient_accumulation_steps: parts of a batch, each with its share of the rows, that are computed one after
                the other to save memory; the result is that of the whole.
            bin_sizes: list of int, see `get_bin_sizes`: how many tokens of every bin but the first one part of a batch
                on one replica has room for, which gives all tensors static shapes. Tokens beyond are left out of loss
                and count; the logs have their number, `overflow`. `None` for any number of tokens. Evaluation leaves
                out nothing in any case.

        Raises:
            ValueError: an argument is out of its range.
        """
        if gradient_accumulation_steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be at least 1, got {gradient_accumulation_steps}")
        super().compile(
            optimizer=optimizer,
            jit_compile=jit_compile,
            steps_per_execution=steps_per_execution,
            run_eagerly=run_eagerly,
        )
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.bin_sizes = bin_sizes

    def get_compile_config(self):
        if not self.compiled:
            return None
        names = ("optimizer", "jit_compile", "steps_per_execution", "gradient_accumulation_steps", "bin_sizes")
        return keras.saving.serialize_keras_object({name: getattr(self, name) for name in names})

    def compile_from_config(self, config):
        self.compile(**keras.saving.deserialize_keras_object(config))
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
        steps = kwargs.setdefault("steps_per_epoch", None)
        if (steps or 0) % self.steps_per_execution:
            raise ValueError(
                f"steps_per_epoch must be a multiple of steps_per_execution={self.steps_per_execution}, got {steps}"
            )
        replicas = self.distribute_strategy.num_replicas_in_sync
        if replicas > 1 and isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(f"mixed_float16 trains on one replica, got {replicas}: use mixed_bfloat16")
        if not self.optimizer.built:  # within a step, some strategies could not
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)
        self._batches = self._prepare(x, self.gradient_accumulation_steps)
        self.carried_mems = self._on_replicas(self.initial_mems)
        if self._batches.repeated:
            kwargs["steps_per_epoch"] = steps or self._batches.count
        if kwargs.get("validation_data") is not None:
            self._validation_batches = self._prepare(kwargs["validation_data"], evaluation=True)
            kwargs["validation_data"] = self._validation_batches.dataset
            if self._validation_batches.repeated:
                kwargs["validation_steps"] = kwargs.get("validation_steps") or self._validation_batches.count
        return super().fit(self._batches.dataset, **{"shuffle": False, **kwargs})

    def evaluate(self, x, **kwargs):
        """The mean nll of a text, in nats a token. The memory starts from zeros and is carried from batch to batch.

        Args:
            x: as in `fit`.
            **kwargs: of `keras.Model.evaluate`.

        Returns:
            float: nll of all tokens over their number; with `return_dict=True`, `{"loss": ...}`.
        """
        training = self.carried_mems, self._totals, self._batches
        if kwargs.get("_use_cached_eval_dataset"):  # the validation_data of `fit`
            self._batches = self._validation_batches
        else:
            self._batches = self._prepare(x, evaluation=True)
            if self._batches.repeated:
                kwargs["steps"] = kwargs.get("steps") or self._batches.count
        self.carried_mems = self._on_replicas(self.start_evaluation, self._batches.tgt_len)
        try:
            return super().evaluate(self._batches.dataset, **kwargs)
        finally:
            self.carried_mems, self._totals, self._batches = training

    # ------------------------------------------------------------------------------------------------ one step

    def train_step(self, data, mems):
        """One step of training on one replica's share of a batch.

        Args:
            data: `(tokens, labels)`.
            mems: the replica's memory.

        Returns:
            `(logs, new_mems)`: the logs are those of the whole batch, the same on every replica: `loss`, `tokens` (the
            number that it is the mean of), `grad_norm` and, with static shapes, `overflow`.
        """
        tokens, labels = data
        context = tf.distribute.get_replica_context()
        first_row = context.replica_id_in_sync_group * keras.ops.shape(tokens)[0]
        seed = tf.stack([self.network.seed % 2**31, tf.cast(self.optimizer.iterations, tf.int32), first_row])
        loss_and_gradients = self._compiled_gradients or self._loss_and_gradients
        sums, gradients, new_mems = loss_and_gradients(tokens, labels, mems, seed)
        nll, kept = tf.unstack(context.all_reduce("SUM", sums))
        n_token = tf.cast(self._num_labels(labels), tf.float32)
        logs = {"loss": nll / kept, "tokens": kept}
        if self.bin_sizes is not None:
            logs["overflow"] = n_token - kept
            gradients = [gradient * (n_token / kept) for gradient in gradients]
        step = tf.convert_to_tensor(self.optimizer.iterations)
        optimizer, scale = self.optimizer, 1.0
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer, scale = optimizer.inner_optimizer, tf.convert_to_tensor(optimizer.dynamic_scale)
        if not hasattr(optimizer, "gradient_norm"):
            logs["grad_norm"] = tf.linalg.global_norm(context.all_reduce("SUM", gradients)) / scale
        self.optimizer.apply(gradients, self.trainable_variables)
        if optimizer is not self.optimizer:  # which skips the update, but not the text, where half precision overflows
            optimizer.iterations.assign(step + 1)
        if hasattr(optimizer, "gradient_norm"):
            logs["grad_norm"] = tf.convert_to_tensor(optimizer.gradient_norm)
        return logs, new_mems

    def _num_labels(self, labels):
        """Number of labels of a batch, over all replicas."""
        return tf.size(labels) * self.distribute_strategy.num_replicas_in_sync

    def _loss_and_gradients(self, tokens, labels, mems, seed):
        """`[nll, tokens counted]`, sums over the rows here; the mean loss' gradients, of which the same; new memory."""
        n_token = tf.cast(self._num_labels(labels), tf.float32)

        def part(tokens, labels, mems, seed):
            with tf.GradientTape() as tape:
                nll, kept, new_mems = self.segment_nll(
                    tokens, labels, mems, bin_sizes=self.bin_sizes, training=True, seed=seed
                )
                sums = _sums(nll, kept)
                loss = self.optimizer.scale_loss(sums[0] / n_token)
            return sums, tape.gradient(loss, self.trainable_variables), new_mems

        if self.gradient_accumulation_steps == 1:
            return part(tokens, labels, mems, seed)
        zeros = [tf.zeros(variable.shape, variable.dtype) for variable in self.trainable_variables]
        return _part_by_part(part, self.gradient_accumulation_steps, zeros, tokens, labels, mems, seed)

    def test_step(self, data, carried):
        """As `train_step`, without training; the logs are `loss` and `tokens`. Carries what `evaluation_nll` does."""
        tokens, labels = data
        nll, kept, carried = self.evaluation_nll(tokens, labels, carried)
        nll, kept = tf.unstack(tf.distribute.get_replica_context().all_reduce("SUM", _sums(nll, kept)))
        return {"loss": nll / kept, "tokens": kept}, carried

    # ---------------------------------------------------------------------------------------------- many steps

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            jitted = tf.function(self._loss_and_gradients, jit_compile=True) if self.jit_compile else None
            self._compiled_gradients = jitted
            names = ["loss", "grad_norm", *["overflow"] * (self.bin_sizes is not None)]
            self._log_names = names
            self.train_function = self._carrying_memory(self.train_step, names)

    def make_test_function(self, force=False):
        if self.test_function is None or force:
            self.test_function = self._carrying_memory(self.test_step, ["loss"])

    def _carrying_memory(self, step, names):
        """`step` over all replicas, several times a call, the memory handed from one to the next on the device."""
        strategy, no_logs = self.distribute_strategy, {"overflow": 0.0, "grad_norm": 0.0}

        def one_step(shape, data, mems, totals):
            @tf.autograph.experimental.do_not_convert
            def replica_step(data, mems):
                for ids in data:
                    ids.set_shape(shape)  # which the distribution of a dataset forgets
                return step(data, mems)

            logs, mems = strategy.run(replica_step, args=(data, mems))
            logs = {name: strategy.experimental_local_results(value)[0] for name, value in logs.items()}
            exact = {name: tf.cast(value, totals.dtype) for name, value in {**no_logs, **logs}.items()}
            nll = exact["loss"] * exact["tokens"]
            totals += tf.stack([nll, exact["tokens"], exact["overflow"], exact["grad_norm"], 1.0])
            return {name: logs[name] for name in names}, mems, totals

        def several_steps(n, shape, iterator, mems, totals):
            logs = dict.fromkeys(names, 0.0)
            for _ in tf.range(n):
                # An evaluation writes to its memory in place: no step may begin before the last one has read it.
                tf.autograph.experimental.set_loop_options(parallel_iterations=1)
                logs, mems, totals = one_step(shape, next(iterator), mems, totals)
            return logs, mems, totals

        if not self.run_eagerly:
            one_step = tf.function(one_step, reduce_retracing=True)
            several_steps = tf.function(several_steps, reduce_retracing=True)

        def function(iterator):
            stop, logs, batches = any_worker(strategy, self.stop_requested), None, self._batches
            rows = batches.rows // strategy.num_replicas_in_sync
            shape = (rows, batches.tgt_len if self.bin_sizes is not None else None)
            for n in batches.calls(iterator, self.steps_per_execution):
                if n > 1:
                    results = several_steps(tf.constant(n), shape, iterator, self.carried_mems, self._totals)
                else:
                    data = next(iterator, None)
                    if data is None:
                        break
                    results = one_step(shape, data, self.carried_mems, self._totals)
                logs, self.carried_mems, self._totals = results
            if logs is None:
                raise StopIteration
            self._log_names, self.stop_agreed = names, stop
            return logs

        return function

    def _prepare(self, dataset, parts=1, evaluation=False):
        """The dataset with its batches checked, as `_Batches`.

        Args:
            parts: of a replica's rows, for gradient accumulation.
            evaluation: whether the first segment is as long as any. Where shapes are static, shorter ones are padded.
        """
        spec = getattr(dataset, "element_spec", None)
        pair = isinstance(spec, tuple) and len(spec) == 2 and all(s.dtype.is_integer for s in spec)
        if not (pair and spec[0].shape.rank in (None, 2) and spec[0].shape.is_compatible_with(spec[1].shape)):
            raise ValueError(
                "x must be a tf.data.Dataset of (tokens, labels), int [batch, tgt_len] each, "
                f"got {type(dataset).__name__}" + (f" of {spec}" if spec is not None else "")
            )
        rows, tgt_len = spec[0].shape if spec[0].shape.rank else (None, None)
        count, static = int(dataset.cardinality()), self.bin_sizes is not None
        if static and not evaluation and tgt_len is None:
            raise ValueError("static shapes need segments of one length: see drop_remainder of txl_tf.segments")
        if rows is None or (evaluation and tgt_len is None) or count == 0:
            first = next(iter(dataset), None)
            if first is None:
                raise ValueError("x must hold at least one batch, got an empty dataset")
            rows, tgt_len = first[0].shape
        strategy = self.distribute_strategy
        replicas = strategy.num_replicas_in_sync
        if rows % (replicas * parts):
            raise ValueError(
                f"the batch must divide by the number of replicas, got {rows} rows on {replicas} replicas"
                + f" with gradient_accumulation_steps={parts}" * (parts > 1)
            )
        dataset = _with_checks(dataset, rows, self.network.n_token, tgt_len if evaluation else None)
        if static:
            dataset = _padded(dataset, tgt_len)
        if num_workers(strategy) == 1:
            return _Batches(dataset, rows, tgt_len, count)
        if count == tf.data.UNKNOWN_CARDINALITY:
            raise ValueError("x must be of a known number of batches where several workers train together")
        return _Batches(_of_this_worker(dataset.repeat(), strategy, rows), rows, tgt_len, count, repeated=count > 0)

    def _on_replicas(self, function, *args):
        """`function(rows, *args)` on every replica, for its share of the rows."""
        strategy = self.distribute_strategy
        rows = self._batches.rows // strategy.num_replicas_in_sync
        if strategy.num_replicas_in_sync == 1:
            return function(rows, *args)
        return tf.function(strategy.run)(function, args=(rows, *args))

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Nothing: the model is built. Keras would take a batch off the dataset, and fails under several workers."""

    # -------------------------------------------------------------------------------------- state between steps

    def reset_metrics(self):
        self._totals = tf.constant(_NO_TOTALS)

    def get_metrics_result(self):
        nll, tokens, overflow, grad_norm, steps = self.metric_totals
        logs = {"loss": nll / max(tokens, 1), "grad_norm": grad_norm / max(steps, 1), "overflow": overflow}
        return {name: float(logs[name]) for name in self._log_names}

    @property
    def metric_totals(self):
        """float64 array, the sums that the logs of this epoch are computed from."""
        return self._totals.numpy()

    def set_metric_totals(self, array):
        """Goes on with sums from `metric_totals`; to be called once an epoch has begun, from a callback."""
        self._totals = tf.constant(array, tf.float64)

    def carried_mems_array(self):
        """The memory that `fit` carries: float32 array `[n_layer, batch, mem_len, d_model]`, rows of all replicas.

        Where there are several workers, all must call it at the same step.
        """
        mems = all_rows(self.distribute_strategy, self.carried_mems)
        return np.stack([tf.cast(mem, tf.float32) for mem in mems])

    def set_carried_mems(self, array):
        """Goes on with a memory from `carried_mems_array`; to be called once `fit` has begun, from a callback.

        Raises:
            ValueError: the array is not of the batch and the model that are trained.
        """
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

        self.carried_mems = [share(layer) for layer in range(len(array))]


@dataclasses.dataclass
class _Batches:
    """What `fit` and `evaluate` read.

    Attributes:
        dataset: `tf.data.Dataset`, or distributed.
        rows: of a batch, over all replicas.
        tgt_len: tokens of a segment, or of the first where they differ.
        count: number of batches, or one of TensorFlow's negative numbers for infinitely many and unknown.
        repeated: whether the dataset repeats these batches for ever. To find the end of a dataset, several workers
            would have to ask one another at every step.
    """

    dataset: object
    rows: int
    tgt_len: int
    count: int
    repeated: bool = False

    def __post_init__(self):
        self._iterator, self._left = None, 0

    def calls(self, iterator, k):
        """Numbers of steps to take, a call each: the next `k`, or what is left of the batches."""
        if self.count == tf.data.INFINITE_CARDINALITY:
            return [k]
        if self.count < 0:
            return [1] * k
        if iterator is not self._iterator or (self.repeated and not self._left):
            self._iterator, self._left = iterator, self.count
        k = min(k, self._left)
        self._left -= k
        return [k]


def _sums(nll, kept):
    """`[nll, tokens counted]`, summed over a segment, of which `kept` (`None`: all) counts."""
    count = tf.size(nll) if kept is None else tf.math.count_nonzero(kept, dtype=tf.int32)
    return tf.stack([tf.reduce_sum(nll), tf.cast(count, tf.float32)])


def _part_by_part(step, parts, zeros, tokens, labels, mems, seed):
    """`step` on one part of the rows after the other: sums and gradients added up, the memory put together."""

    def split(x):
        return tf.reshape(x, [parts, x.shape[0] // parts, *keras.ops.shape(x)[1:]])

    tokens, labels, mems = split(tokens), split(labels), [split(mem) for mem in mems]
    rows = tokens.shape[1]

    def body(i, sums, gradients, new_mems):
        of_part, of_gradients, of_mems = step(
            tokens[i], labels[i], [mem[i] for mem in mems], seed + tf.stack([0, 0, i * rows])
        )
        gradients = [total + part for total, part in zip(gradients, of_gradients, strict=True)]
        return i + 1, sums + of_part, gradients, [ta.write(i, mem) for ta, mem in zip(new_mems, of_mems, strict=True)]

    arrays = [tf.TensorArray(mem.dtype, parts) for mem in mems]
    _, sums, gradients, new_mems = tf.while_loop(
        lambda i, *_: i < parts,
        body,
        [0, tf.zeros([2]), zeros, arrays],
        parallel_iterations=1,
        maximum_iterations=parts,
    )
    new_mems = [ta.stack() for ta in new_mems]
    return sums, gradients, [tf.reshape(mem, [parts * rows, *keras.ops.shape(mem)[2:]]) for mem in new_mems]


def _with_checks(dataset, rows, n_token, most=None):
    """The dataset, where a batch with other rows, more than `most` tokens or an id that no table has is an error.

    Checked on the way in, on the host: a GPU would read zeros for such an id, and XLA drops checks.
    """

    def check(tokens, labels):
        found = tf.shape(tokens)[0]
        checks = [
            tf.debugging.Assert(found == rows, ["every batch must have the rows of the first,", rows, "found", found])
        ]
        if most is not None:
            length = tf.shape(tokens)[1]
            text = f"segments of an evaluation must not be longer than the first, {most}, found"
            checks.append(tf.debugging.Assert(length <= most, [text, length]))
        for name, ids in (("tokens", tokens), ("labels", labels)):
            smallest, largest = tf.reduce_min(ids), tf.reduce_max(ids)
            worst = tf.where(smallest < 0, smallest, largest)
            checks.append(tf.debugging.Assert((smallest >= 0) & (largest < n_token), [id_error(name, n_token), worst]))
        same = tf.reduce_all(tf.shape(tokens) == tf.shape(labels))
        checks.append(
            tf.debugging.Assert(same, ["labels must have the shape of tokens,", tf.shape(tokens), tf.shape(labels)])
        )
        with tf.control_dependencies(checks):
            tokens, labels = tf.identity(tokens), tf.identity(labels)
        tokens.set_shape([rows, tokens.shape[1]])
        labels.set_shape([rows, labels.shape[1]])
        return tokens, labels

    return dataset.map(check)


def _padded(dataset, tgt_len):
    """The dataset with segments of `tgt_len`, where a shorter one ends in labels -1, which do not count."""

    def pad(ids, value):
        ids = tf.pad(ids, [[0, 0], [0, tgt_len - tf.shape(ids)[1]]], constant_values=value)
        return tf.ensure_shape(ids, [None, tgt_len])

    return dataset.map(lambda tokens, labels: (pad(tokens, 0), pad(tf.cast(labels, tf.int32), -1)))


def _of_this_worker(dataset, strategy, rows):
    """The rows of this worker's replicas, for each of them in turn.

    `experimental_distribute_dataset` deals the shares of a batch out to the workers like cards.
    """

    def shares_of(context):
        replicas = context.num_replicas_in_sync // context.num_input_pipelines
        share = rows // context.num_replicas_in_sync
        first = context.input_pipeline_id * replicas

        here = slice(first * share, (first + replicas) * share)
        mine = dataset.map(lambda tokens, labels: (tokens[here], labels[here]))
        if replicas > 1:
            mine = mine.unbatch().batch(share, drop_remainder=True)
            if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:  # else every step asks all workers for the end
                mine = mine.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        return mine.prefetch(tf.data.AUTOTUNE)

    return strategy.distribute_datasets_from_function(shares_of)
