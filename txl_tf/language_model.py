"""The language model: the network, its softmax, and memory carried through `fit` and `evaluate`."""

import keras
import numpy as np
import tensorflow as tf

from txl_tf.adaptive import AdaptiveSoftmax
from txl_tf.model import TransformerXL, make_initializer


@keras.saving.register_keras_serializable("txl_tf")
class TransformerXLLM(keras.Model):
    """Transformer-XL language model: `TransformerXL`, and the adaptive softmax that shares its embeddings.

    ```python
    lm = txl_tf.TransformerXLLM(n_token=256, n_layer=6, d_model=256, d_embed=256, n_head=4, d_head=64, d_inner=1024,
                                mem_len=128)
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10000))
    lm.fit(dataset)                         # batches (tokens, labels), int [batch, tgt_len]
    nll, mems = lm.score(tokens, labels)    # nats a token; mems continue the text in the next call
    ```

    The weights exist from construction on.

    Args: those of `TransformerXL`, and
        proj_share_all_but_first: the softmax shares the embedding's projections but the first, see
            `AdaptiveSoftmax`.

    Call arguments:
        tokens: int `[batch, tgt_len]`.
        mems: list of `n_layer` tensors `[batch, any, d_model]`; `None` for `initial_mems`.

    Returns:
        `(log_probs, new_mems)`, as `log_probs`.

    Reference:
        Dai et al. 2019; `transformer` and `train` of the original.
    """

    def __init__(
        self,
        *,
        n_token,
        n_layer,
        d_model,
        d_embed,
        n_head,
        d_head,
        d_inner,
        dropout=0.1,
        dropatt=0.0,
        mem_len,
        same_length=False,
        clamp_len=-1,
        untie_r=False,
        cutoffs=(),
        div_val=1,
        proj_share_all_but_first=False,
        proj_same_dim=True,
        init="normal",
        init_std=0.02,
        proj_init_std=0.01,
        init_range=0.1,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.proj_share_all_but_first = proj_share_all_but_first
        self.network = TransformerXL(
            n_token=n_token,
            n_layer=n_layer,
            d_model=d_model,
            d_embed=d_embed,
            n_head=n_head,
            d_head=d_head,
            d_inner=d_inner,
            dropout=dropout,
            dropatt=dropatt,
            mem_len=mem_len,
            same_length=same_length,
            clamp_len=clamp_len,
            untie_r=untie_r,
            cutoffs=cutoffs,
            div_val=div_val,
            proj_same_dim=proj_same_dim,
            init=init,
            init_std=init_std,
            proj_init_std=proj_init_std,
            init_range=init_range,
            seed=seed,
            dtype=self.dtype_policy,
            name="transformer",
        )
        self.softmax = AdaptiveSoftmax(
            n_token,
            d_embed,
            d_model,
            cutoffs=cutoffs,
            div_val=div_val,
            proj_same_dim=proj_same_dim,
            proj_share_all_but_first=proj_share_all_but_first,
            proj_initializer=make_initializer(init, proj_init_std, init_range),
            dtype=self.dtype_policy,
            name="adaptive_softmax",
        )
        self.gradient_norm_tracker = keras.metrics.Mean(name="grad_norm")
        self.carried_mems = None
        self._compiled_gradients = None
        self.build()

    def build(self, tokens_shape=None):
        if not self.network.built:
            self.network.build()
            self.softmax.build()

    def get_config(self):
        network = self.network.get_config()
        own = {**super().get_config(), "proj_share_all_but_first": self.proj_share_all_but_first}
        return {**network, **own}

    # ------------------------------------------------------------------------------------------------- inference

    def call(self, tokens, mems=None):
        hidden, new_mems = self.network(tokens, mems)
        return self.softmax(hidden, embedding=self.network.embedding), new_mems

    def initial_mems(self, batch_size):
        """The memory before the first segment: list of `n_layer` zeros `[batch_size, mem_len, d_model]`."""
        return self.network.initial_mems(batch_size)

    def score(self, tokens, labels, mems=None):
        """Negative log-likelihood of every label, in place.

        Args:
            tokens: int `[batch, tgt_len]`.
            labels: int `[batch, tgt_len]`, the tokens shifted by one.
            mems: list of `n_layer` tensors `[batch, any, d_model]`; `None` for `initial_mems`.

        Returns:
            `(nll, new_mems)`: float32 `[batch, tgt_len]`, nats, and the memory for the next segment.

        Raises:
            ValueError: an id outside the vocabulary, or shapes that do not belong together.
        """
        tokens, labels = self._check_ids("tokens", tokens), self._check_ids("labels", labels)
        if tokens.shape != labels.shape:
            raise ValueError(f"labels must have the shape of tokens, {tokens.shape}, got {labels.shape}")
        return self._score(tokens, labels, self._check_mems(tokens, mems))

    def log_probs(self, tokens, mems=None):
        """Log-probability of every word of the vocabulary as the next token.

        Args:
            tokens: int `[batch, tgt_len]`.
            mems: list of `n_layer` tensors `[batch, any, d_model]`; `None` for `initial_mems`.

        Returns:
            `(log_probs, new_mems)`: float32 `[batch, tgt_len, n_token]` in vocabulary order, whose exponentials sum
            to 1 over the whole vocabulary, and the memory for the next segment.

        Raises:
            ValueError: an id outside the vocabulary, or shapes that do not belong together.
        """
        tokens = self._check_ids("tokens", tokens)
        return self._log_probs(tokens, self._check_mems(tokens, mems))

    @tf.function(reduce_retracing=True)
    def _score(self, tokens, labels, mems):
        hidden, new_mems = self.network(tokens, mems)
        return self.softmax.nll(hidden, labels, self.network.embedding), new_mems

    @tf.function(reduce_retracing=True)
    def _log_probs(self, tokens, mems):
        return self(tokens, mems)

    def _check_ids(self, name, ids):
        """`ids` as an int tensor `[batch, tgt_len]` whose every id the vocabulary has."""
        ids = tf.convert_to_tensor(ids)
        if not ids.dtype.is_integer or ids.shape.rank != 2 or 0 in ids.shape:
            raise ValueError(f"{name} must be integers [batch, tgt_len], got {ids.dtype.name} {list(ids.shape)}")
        if not tf.executing_eagerly():
            return ids
        outside = ids.numpy()[(ids.numpy() < 0) | (ids.numpy() >= self.network.n_token)]
        if outside.size:
            raise ValueError(_id_error(name, self.network.n_token) + f" {outside[0]}")
        return ids

    def _check_mems(self, tokens, mems):
        if mems is None:
            return self.initial_mems(keras.ops.shape(tokens)[0])
        network = self.network
        shapes = [list(mem.shape) for mem in mems]
        expected = [tokens.shape[0], *shapes[0][1:2], network.d_model] if shapes else None
        if len(mems) != network.n_layer or any(shape != expected for shape in shapes):
            raise ValueError(
                f"mems must be n_layer={network.n_layer} tensors [batch={tokens.shape[0]}, mem_len, "
                f"d_model={network.d_model}], got {len(mems)} of shapes {shapes}"
            )
        return [tf.cast(mem, self.compute_dtype) for mem in mems]

    # -------------------------------------------------------------------------------------- training, evaluation

    def compile(self, optimizer, *, jit_compile=False, steps_per_execution=1, run_eagerly=False):
        """Configures `fit` and `evaluate`. The loss is the model's own.

        Args:
            optimizer: from `make_optimizer`, or any Keras optimizer (which is then not clipped as the original's).
            jit_compile: compile forward and backward pass with XLA.
            steps_per_execution: training steps in one call of the compiled graph.
            run_eagerly: run the steps without a graph, for debugging.
        """
        super().compile(
            optimizer=optimizer,
            jit_compile=jit_compile,
            steps_per_execution=steps_per_execution,
            run_eagerly=run_eagerly,
        )

    def get_compile_config(self):
        if not self.compiled:
            return None
        names = ("optimizer", "jit_compile", "steps_per_execution")
        return keras.saving.serialize_keras_object({name: getattr(self, name) for name in names})

    def compile_from_config(self, config):
        self.compile(**keras.saving.deserialize_keras_object(config))
        self.optimizer.build(self.trainable_variables)

    def fit(self, x, **kwargs):
        """Trains on batches of consecutive segments, the memory carried from batch to batch.

        Row r of a batch continues row r of the batch before it. The memory starts from zeros, and goes on at the end
        of an epoch, where the text starts again, as in the original.

        Args:
            x: `tf.data.Dataset` of `(tokens, labels)`, int `[batch, tgt_len]` each; `tgt_len` may vary.
            **kwargs: of `keras.Model.fit`, such as `epochs`, `steps_per_epoch`, `callbacks`, `validation_data` (a
                dataset of the same kind).

        Returns:
            The Keras `History`. The logs of a batch are the step's `loss` (mean nll in nats) and `grad_norm` (global
            norm before clipping), those of an epoch are means over it.

        Raises:
            ValueError: `x` is not such a dataset.
            tf.errors.InvalidArgumentError: an id outside the vocabulary.
        """
        x, self.carried_mems = self._prepare(x)
        if kwargs.get("validation_data") is not None:
            kwargs["validation_data"], _ = self._prepare(kwargs["validation_data"])
        if (kwargs.get("steps_per_epoch") or 0) % self.steps_per_execution:
            raise ValueError(
                f"steps_per_epoch must be a multiple of steps_per_execution={self.steps_per_execution}, "
                f"got {kwargs['steps_per_epoch']}"
            )
        return super().fit(x, **{"shuffle": False, **kwargs})

    def evaluate(self, x, **kwargs):
        """The mean nll of a text, in nats a token. The memory starts from zeros and is carried from batch to batch.

        Args:
            x: as in `fit`.
            **kwargs: of `keras.Model.evaluate`.

        Returns:
            float: nll of all tokens over their number; with `return_dict=True`, `{"loss": ...}`.
        """
        training_mems = self.carried_mems
        x, self.carried_mems = self._prepare(x)
        try:
            return super().evaluate(x, **kwargs)
        finally:
            self.carried_mems = training_mems

    def train_step(self, data, mems):
        """One step of training on one replica's share of a batch.

        Args:
            data: `(tokens, labels)`.
            mems: the replica's memory.

        Returns:
            `(logs, new_mems)`.
        """
        tokens, labels = data
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        seed = tf.stack([self.network.seed % 2**31 + replica, tf.cast(self.optimizer.iterations, tf.int32)])
        loss_and_gradients = self._compiled_gradients or self._loss_and_gradients
        loss, grads, new_mems = loss_and_gradients(tokens, labels, mems, seed)
        self.optimizer.apply(grads, self.trainable_variables)
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)  # of a loss-scaling optimizer
        if hasattr(optimizer, "gradient_norm"):
            norm = optimizer.gradient_norm
        else:
            norm = tf.linalg.global_norm(tf.distribute.get_replica_context().all_reduce("SUM", grads))
        logs = {"loss": loss, "grad_norm": norm}
        self._loss_tracker.update_state(loss, sample_weight=tf.size(labels))
        self.gradient_norm_tracker.update_state(logs["grad_norm"])
        return logs, new_mems

    def _loss_and_gradients(self, tokens, labels, mems, seed):
        with tf.GradientTape() as tape:
            hidden, new_mems = self.network(tokens, mems, training=True, seed=seed)
            loss = tf.reduce_mean(self.softmax.nll(hidden, labels, self.network.embedding))
            share = self.optimizer.scale_loss(loss / self.distribute_strategy.num_replicas_in_sync)
        return loss, tape.gradient(share, self.trainable_variables), new_mems

    def test_step(self, data, mems):
        """As `train_step`, without training; what it finds goes to the metrics."""
        tokens, labels = data
        hidden, new_mems = self.network(tokens, mems)
        nll = self.softmax.nll(hidden, labels, self.network.embedding)
        self._loss_tracker.update_state(tf.reduce_mean(nll), sample_weight=tf.size(labels))
        return {}, new_mems

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            jitted = tf.function(self._loss_and_gradients, jit_compile=True) if self.jit_compile else None
            self._compiled_gradients = jitted
            self.train_function = self._carrying_memory(self.train_step, {"loss": 0.0, "grad_norm": 0.0})

    def make_test_function(self, force=False):
        if self.test_function is None or force:
            self.test_function = self._carrying_memory(self.test_step, {"loss": 0.0})

    def _carrying_memory(self, step, zero_logs):
        """`step` over all replicas, several times a call, the memory handed from one to the next on the device."""
        strategy = self.distribute_strategy

        @tf.autograph.experimental.do_not_convert
        def replica_step(data, mems):
            for ids in data:
                ids.set_shape([mems[0].shape[0], None])  # which the distribution of a dataset forgets
            return step(data, mems)

        def one_step(data, mems):
            logs, mems = strategy.run(replica_step, args=(data, mems))
            logs = {name: strategy.reduce("MEAN", value, axis=None) for name, value in logs.items()}
            return logs or {"loss": self._loss_tracker.result()}, mems

        def several_steps(iterator, mems):
            logs, done = zero_logs, False
            for _ in tf.range(self.steps_per_execution):
                data = iterator.get_next_as_optional()
                if not data.has_value():
                    break
                logs, mems = one_step(data.get_value(), mems)
                done = True
            return logs, mems, done

        if not self.run_eagerly:
            one_step = tf.function(one_step, reduce_retracing=True)
            several_steps = tf.function(several_steps, reduce_retracing=True)

        def function(iterator):
            if self.steps_per_execution == 1:
                logs, self.carried_mems = one_step(next(iterator), self.carried_mems)
                return logs
            logs, self.carried_mems, done = several_steps(iterator, self.carried_mems)
            if not done:
                raise StopIteration
            return logs

        return function

    def _prepare(self, dataset):
        """The dataset with its batches checked, and every replica's memory of zeros for its rows of them."""
        spec = getattr(dataset, "element_spec", None)
        pair = isinstance(spec, tuple) and len(spec) == 2 and all(s.dtype.is_integer for s in spec)
        if not (pair and spec[0].shape.rank in (None, 2) and spec[0].shape.is_compatible_with(spec[1].shape)):
            raise ValueError(
                "x must be a tf.data.Dataset of (tokens, labels), int [batch, tgt_len] each, "
                f"got {type(dataset).__name__}" + (f" of {spec}" if spec is not None else "")
            )
        rows = spec[0].shape[0] if spec[0].shape.rank else None
        if rows is None or dataset.cardinality() == 0:
            first = next(iter(dataset), None)
            if first is None:
                raise ValueError("x must hold at least one batch, got an empty dataset")
            rows = first[0].shape[0]
        strategy = self.distribute_strategy
        replicas = strategy.num_replicas_in_sync
        if rows % replicas:
            raise ValueError(f"the batch must divide by the number of replicas, got {rows} rows on {replicas} replicas")
        dataset = _with_checks(dataset, rows, self.network.n_token)
        if replicas == 1:
            return dataset, self.initial_mems(rows)
        return dataset, tf.function(strategy.run)(self.initial_mems, args=(rows // replicas,))

    def carried_mems_array(self):
        """The memory that `fit` carries: float32 array `[n_layer, batch, mem_len, d_model]`, rows of all replicas."""
        local = self.distribute_strategy.experimental_local_results
        return np.stack([tf.cast(tf.concat(local(mem), 0), tf.float32).numpy() for mem in self.carried_mems])

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


def _id_error(name, n_token):
    return f"{name} must hold ids between 0 and n_token - 1 = {n_token - 1}, found"


def _with_checks(dataset, rows, n_token):
    """The dataset, where a batch with another number of rows or an id that the tables do not have is an error.

    Checked on the way in, on the host: a GPU would read zeros for such an id, and XLA drops checks.
    """

    def check(tokens, labels):
        found = tf.shape(tokens)[0]
        checks = [
            tf.debugging.Assert(found == rows, ["every batch must have the rows of the first,", rows, "found", found])
        ]
        for name, ids in (("tokens", tokens), ("labels", labels)):
            smallest, largest = tf.reduce_min(ids), tf.reduce_max(ids)
            worst = tf.where(smallest < 0, smallest, largest)
            checks.append(tf.debugging.Assert((smallest >= 0) & (largest < n_token), [_id_error(name, n_token), worst]))
        same = tf.reduce_all(tf.shape(tokens) == tf.shape(labels))
        checks.append(
            tf.debugging.Assert(same, ["labels must have the shape of tokens,", tf.shape(tokens), tf.shape(labels)])
        )
        with tf.control_dependencies(checks):
            tokens, labels = tf.identity(tokens), tf.identity(labels)
        tokens.set_shape([rows, None])
        labels.set_shape([rows, None])
        return tokens, labels

    return dataset.map(check)
