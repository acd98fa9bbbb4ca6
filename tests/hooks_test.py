"""Private, undocumented and experimental parts of Keras and TensorFlow that the library leans on, each by its name.

A test that fails here after an update names what the update removed or changed. docs/development.md says where each
is used and what for.
"""

import ast
import functools
import gc
import io
import pickle
import re
import traceback
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT
from tensorflow.python.eager import record

DOCUMENT = ROOT / "docs" / "development.md"
SOURCES = sorted((ROOT / "txl_tf").rglob("*.py"))
HOOKS = {}


def hook(name):
    """Enters a check under the name that docs/development.md lists."""

    def enter(check):
        HOOKS[name] = check
        return check

    return enter


# ------------------------------------------------------------------------------------------------ keras.Model.fit


class Bare(keras.Model):
    """A model whose `fit` and `evaluate` go through three batches and do nothing with them."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.compile("sgd")

    def make_train_function(self, force=False):
        self.train_function = self.read

    def make_test_function(self, force=False):
        self.test_function = self.read

    def read(self, iterator):
        next(iterator)
        self.seen.append("step")
        return {"of the step": 1.0}

    def go(self, **kwargs):
        return self.fit(tf.data.Dataset.from_tensors(tf.zeros([2, 1])).repeat(3), verbose=0, shuffle=False, **kwargs)

    @classmethod
    def overriding(cls, name):
        """An instance that notes in `seen` when Keras calls its method `name`, and with which keyword arguments."""

        def method(self, *args, **kwargs):
            self.seen.append((name, kwargs))
            return getattr(super(made, self), name)(*args, **kwargs)

        made = type("Made", (cls,), {name: method})
        model = made()
        model.seen = []
        return model


def names_of(model):
    return [item if isinstance(item, str) else item[0] for item in model.seen]


@hook("keras.Model.reset_metrics")
def _(tmp_path):
    """Before callbacks of an epoch, where a resumed run puts sums back; after those of a test, which set weights."""

    class Note(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.seen.append("on_epoch_begin")

        def on_test_begin(self, logs=None):
            self.model.seen.append("on_test_begin")

    model = Bare.overriding("reset_metrics")
    model.go(callbacks=[Note()])
    assert names_of(model) == ["reset_metrics", "on_epoch_begin", "step", "step", "step"]
    model.seen.clear()
    model.evaluate(tf.data.Dataset.from_tensors(tf.zeros([2, 1])), verbose=0, callbacks=[Note()])
    assert names_of(model)[:2] == ["on_test_begin", "reset_metrics"]


@hook("keras.Model.make_train_function")
def _(tmp_path):
    """Called with `force`, it makes a function that calls the current `train_step`."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.zeros([2, 1]), tf.zeros([2, 1])))
    model.fit(data, verbose=0)
    model.train_step = lambda data: {"seven": tf.constant(7.0)}
    model.make_train_function(force=True)
    assert model.fit(data, verbose=0).history == {"seven": [7.0]}


@hook("keras.Model.make_test_function")
def _(tmp_path):
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.zeros([2, 1]), tf.zeros([2, 1])))
    model.evaluate(data, verbose=0)
    model.test_step = lambda data: {"seven": tf.constant(7.0)}
    model.make_test_function(force=True)
    assert model.evaluate(data, verbose=0, return_dict=True) == {"seven": 7.0}


@hook("keras.Layer.losses")
def _(tmp_path):
    """What layers gave to `add_loss` in an earlier call is not there after a call of a layer that they are parts of."""

    class Outer(keras.layers.Layer):
        def call(self, x):
            return x

    layer = Outer()
    inner = layer.inner = keras.layers.Layer()
    for part in (layer, inner):
        part.add_loss(tf.constant(1.0))
    assert len(layer.losses) == 2
    layer(tf.zeros([1]))
    assert not layer.losses and not inner.losses


@hook("keras.Model.get_metrics_result")
def _(tmp_path):
    """Its logs are those of the epoch where they have the names of the step's."""

    class Result(Bare):
        def get_metrics_result(self):
            return {"of the step": 7.0}

    assert Result().go().history == {"of the step": [7.0]}


@hook("keras.Model.stop_training")
def _(tmp_path):
    """Set after a batch, it ends the epoch; taken back at the end of the epoch, the next one begins."""

    class Early(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

        def on_epoch_end(self, epoch, logs=None):
            self.model.seen.append(epoch)
            self.model.stop_training = False

    model = Bare()
    model.go(epochs=7, initial_epoch=5, callbacks=[Early()])
    assert model.seen == ["step", 5, "step", 6]


@hook("keras.Model._initial_epoch")
def _(tmp_path):
    """Set when `fit` begins, it is the first epoch; where it is the number of epochs, there is none."""
    for first, expected in ((6, ["step"] * 3), (7, [])):
        model = Bare()

        def skip(logs, model=model, first=first):
            model._initial_epoch = first

        model.go(epochs=7, initial_epoch=5, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=skip)])
        assert model.seen == expected


# ----------------------------------------------------------------------------------------------------- optimizers


def applied(optimizer):
    """The optimizer, after a gradient of 2 for a weight of 1."""
    weight = keras.Variable([1.0])
    optimizer.apply([tf.constant([2.0])], [weight])
    return optimizer, weight


@hook("keras.optimizers.Optimizer.update_step")
def _(tmp_path):
    """It gets TensorFlow's variable: with one device that of the weight, with several one with the same handle."""

    class Note(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            Note.found = variable, [weight.value.handle is variable.handle for weight in self.weights_of_test]

    optimizer = Note(0.25)
    optimizer.weights_of_test = [keras.Variable([1.0])]
    optimizer.apply([tf.constant([2.0])], optimizer.weights_of_test)
    assert Note.found[0] is optimizer.weights_of_test[0].value
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        optimizer = Note(0.25)
        optimizer.weights_of_test = [keras.Variable([1.0])]
        optimizer.build(optimizer.weights_of_test)
    tf.function(strategy.run)(lambda: optimizer.apply([tf.constant([2.0])], optimizer.weights_of_test))
    assert Note.found[1] == [True]


@hook("keras.optimizers.Optimizer.add_variable_from_reference")
def _(tmp_path):
    """All variables for a weight are made by it, under these names."""
    found = []

    def noting(base, **options):
        class Note(base):
            def add_variable_from_reference(self, reference_variable, name=None, *args, **kwargs):
                found.append((reference_variable, name))
                return super().add_variable_from_reference(reference_variable, name, *args, **kwargs)

        return applied(Note(0.1, **options))[1]

    for base, options in [(keras.optimizers.Adam, {}), (keras.optimizers.SGD, {"momentum": 0.9})]:
        weight = noting(base, use_ema=True, **options)
        assert all(reference is weight for reference, _ in found)
        expected = {"average", "momentum", "velocity"} if base is keras.optimizers.Adam else {"average", "momentum"}
        assert {name for _, name in found} == expected
        found.clear()


@hook("keras.Layer._tracker")
def _(tmp_path):
    """What is built takes no further layers until it is unlocked. What is untracked is no layer of it any more.

    The order of its list of layers is the order of the weights.
    """
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    with pytest.raises(ValueError, match="already built"):
        layer.head = keras.layers.Dense(1)
    layer._tracker.unlock()
    layer.head = head = keras.layers.Dense(1)
    assert head in layer._flatten_layers()
    layer.second = second = keras.layers.Dense(1)
    layer._tracker.config["layers"][1].reverse()
    assert list(layer._flatten_layers()) == [layer, second, head]
    layer._tracker.untrack(head)
    assert head not in layer._flatten_layers()


@hook("keras.Layer._flatten_layers")
def _(tmp_path):
    """All layers, the model first, in the order in which they were made."""

    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = keras.layers.Dense(1), keras.Sequential([keras.layers.Dense(2)])

    model = Two()
    assert list(model._flatten_layers()) == [model, model.first, model.second, model.second.layers[0]]


def two_calls():
    """`(input, first, second, outputs of both)` of two layers that are called one after the other."""
    first, second, symbol = keras.layers.Dense(1), keras.layers.Dense(2), keras.Input([3])
    inner = first(symbol)
    return symbol, first, second, inner, second(inner)


@hook("keras.KerasTensor._keras_history")
def _(tmp_path):
    _, first, second, inner, output = two_calls()
    assert [(x._keras_history[0], x._keras_history[1]) for x in (inner, output)] == [(first, 0), (second, 0)]


@hook("keras.Operation._inbound_nodes")
def _(tmp_path):
    """The calls of a layer: what went in, and the calls that it came from."""
    symbol, first, second, inner, _ = two_calls()
    (call,) = second._inbound_nodes
    assert call.operation is second and call.input_tensors == [inner] and call.parent_nodes == first._inbound_nodes
    assert not keras.layers.Dense(1)._inbound_nodes


@hook("keras.Operation._outbound_nodes")
def _(tmp_path):
    """The calls that compute with the outputs of a layer."""
    _, first, second, _, _ = two_calls()
    assert first._outbound_nodes == second._inbound_nodes and not second._outbound_nodes


@hook("keras.saving.serialize_keras_object(shared_object_id)")
def _(tmp_path):
    """In a file, the second configuration of a layer says that it is that of the first; elsewhere, it does not."""
    layer = keras.layers.Dense(1)

    @keras.saving.register_keras_serializable("hooks_test")
    class Twice(keras.layers.Layer):
        def get_config(self):
            config, again = (keras.saving.serialize_keras_object(layer) for _ in range(2))
            Twice.found = "shared_object_id" in config and "shared_object_id" in again
            return super().get_config()

        def call(self, x):
            return x

    symbol = keras.Input([3])
    model = keras.Model(symbol, Twice()(symbol))
    model.save(tmp_path / "model.keras")
    assert Twice.found
    model.get_config()
    assert not Twice.found


@hook("keras.Model.metrics")
def _(tmp_path):
    """Keras's own metric is the first one, before those of a user's attributes."""
    model = Bare()  # which is compiled
    model.own = keras.metrics.Mean("own")
    first, second = model.metrics
    assert first.name == "loss" and second is model.own


@hook("keras.Model._default_save_signature")
def _(tmp_path):
    class Own(keras.Model):
        @property
        def _default_save_signature(self):
            return tf.function(lambda x: {"y": x + 1}, input_signature=[tf.TensorSpec([None], tf.float32, "x")])

    tf.saved_model.save(Own(), tmp_path / "own")
    loaded = tf.saved_model.load(tmp_path / "own")
    np.testing.assert_array_equal(loaded.signatures["serving_default"](x=tf.zeros([2]))["y"], [1, 1])


@hook("tf.Trackable._trackable_children")
def _(tmp_path):
    """TensorFlow asks for the parts of an object by it, before it saves and before it restores."""

    class Own(keras.layers.Layer):
        def _trackable_children(self, save_type="checkpoint", **kwargs):
            if not hasattr(self, "shown"):
                self.shown = tf.Module()
                self.shown.weight = self.hidden[0]
            return super()._trackable_children(save_type, **kwargs)

    own, other = Own(), Own()
    own.hidden, other.hidden = [keras.Variable([1.0])], [keras.Variable([2.0])]
    path = tf.train.Checkpoint(own=own).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(own=other).restore(path).assert_consumed()
    np.testing.assert_array_equal(other.hidden[0], [1.0])


@hook("keras.optimizers.Optimizer.add_variable(aggregation)")
def _(tmp_path):
    variable = keras.optimizers.SGD().add_variable(shape=(), name="norm", aggregation="only_first_replica")
    assert variable.aggregation == "only_first_replica"


@hook("tf.distribute.DistributedValues.values")
def _(tmp_path):
    """Of a value that replicas pass to `merge_call`, and of a variable; one replica passes a plain tensor."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        variable = tf.Variable(3.0)

    def merged(strategy, value):
        assert isinstance(value, tf.distribute.DistributedValues)
        for i, (of_replica, own) in enumerate(zip(value.values, variable.values, strict=True)):
            assert float(of_replica) == i and own.device.endswith(f"CPU:{i}") and float(own) == 3

    def step():
        context = tf.distribute.get_replica_context()
        context.merge_call(merged, args=(tf.cast(context.replica_id_in_sync_group, tf.float32),))

    strategy.run(step)
    tf.distribute.get_replica_context().merge_call(
        lambda strategy, value: isinstance(value, tf.Tensor) or pytest.fail("not a tensor"), args=(tf.constant(1.0),)
    )


@hook("keras.metrics.Metric.add_variable(aggregation)")
def _(tmp_path):
    """`keras.metrics.Mean` makes its variables by it. They are read without asking other replicas."""

    class First(keras.metrics.Mean):
        def add_variable(self, *args, **kwargs):
            return super().add_variable(*args, **{**kwargs, "aggregation": "only_first_replica"})

    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()).scope():
        metrics = First(), keras.metrics.Mean()
    for metric in metrics:
        for value in metric.total.value.values:
            value.assign(3.0)
    own = metrics[1].total.value.synchronization == tf.VariableSynchronization.ON_READ  # from Keras 3.10 on
    assert [keras.ops.convert_to_numpy(metric.total) for metric in metrics] == [3.0, 6.0 if own else 3.0]


@hook("keras.optimizers.Optimizer.variables")
def _(tmp_path):
    """Checkpoints number them, so their order must stay."""
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1.0, 10))
    optimizer.add_variable(shape=(), name="norm")
    optimizer.build([keras.Variable([1.0], name="a"), keras.Variable([1.0], name="b")])
    names = [variable.name for variable in optimizer.variables]
    assert names == ["iteration", "norm", "a_momentum", "a_velocity", "b_momentum", "b_velocity"]


@hook("keras.optimizers.LossScaleOptimizer.inner_optimizer")
def _(tmp_path):
    inner = keras.optimizers.SGD()
    assert keras.optimizers.LossScaleOptimizer(inner).inner_optimizer is inner


# ----------------------------------------------------------------------------------------- callbacks, layers, scopes


def csv_logger(path):
    logger = keras.callbacks.CSVLogger(path, append=True)
    logger.on_train_begin()
    return logger


@hook("keras.initializers.Initializer.clone")
def _(tmp_path):
    initializer = keras.initializers.RandomNormal()
    np.testing.assert_array_equal(initializer([4]), initializer([4]))
    assert np.all(np.array(initializer([4])) != np.array(initializer.clone()([4])))


@hook("keras.Operation.compute_output_spec")
def _(tmp_path):
    """It traces the call of an operation, with a layer in it whose inputs and weights Keras casts there."""

    class Halves(keras.layers.Layer):
        def build(self, x_shape):
            self.scale = self.add_weight(shape=(1,))

        def compute_output_shape(self, x_shape):
            raise AssertionError("not asked")

        def call(self, x):
            if not x.dtype.is_floating:
                raise ValueError("x must be float")
            return (x * self.scale)[:, ::2]

    class Traced(keras.Operation):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def call(self, *args, **kwargs):
            return self.layer(*args, **kwargs)

    layer = Halves(dtype="mixed_float16")
    layer.build((None, 4))
    spec = Traced(layer).compute_output_spec(keras.KerasTensor([None, 4], dtype="float32"))
    assert (spec.shape, spec.dtype) == ((None, 2), "float16")
    with pytest.raises(ValueError, match="x must be float"):
        Traced(layer).compute_output_spec(keras.KerasTensor([None, 4], dtype="int32"))


@hook("keras.random.SeedGenerator.state")
def _(tmp_path):
    generator = keras.random.SeedGenerator(7)
    first, second = generator.next().numpy().tolist(), generator.next().numpy().tolist()
    assert (first, second) == ([7, 0], [7, 1])
    generator.state.assign([7, 1])
    assert generator.next().numpy().tolist() == second


@hook("keras.StatelessScope")
def _(tmp_path):
    variable = keras.Variable([1.0])
    with keras.StatelessScope([(variable, tf.constant([5.0]))]):
        assert float(tf.convert_to_tensor(variable)[0]) == 5
    assert float(tf.convert_to_tensor(variable)[0]) == 1


# ----------------------------------------------------------------------------------------------------- tensorflow


@hook("tf.Graph.outer_graph")
def _(tmp_path):
    """From a loop in a nested function, it leads to the graph of the function that was called; and that one can die."""
    seen = weakref.WeakSet()

    def outermost(i):
        graph = tf.compat.v1.get_default_graph()
        while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
            graph = graph.outer_graph
        seen.add(graph)
        return i + 1

    def nested():
        inner = tf.function(lambda x: tf.while_loop(lambda i: i < 3, outermost, [x]))
        return tf.function(lambda x: inner(x))

    function = nested()
    function(tf.constant(0))
    assert [graph.name for graph in seen] == [function.get_concrete_function(tf.constant(0)).graph.name]
    del function
    gc.collect()
    assert not seen


@hook("tf.Graph._override_gradient_function")
def _(tmp_path):
    with tf.Graph().as_default() as graph:
        x = tf.constant(3.0)
        with graph._override_gradient_function({"IdentityN": lambda operation, *upstream: [5 * upstream[0]]}):
            (y,) = tf.identity_n([x])
        with tf.compat.v1.Session() as session:
            assert session.run(tf.gradients(y, x)) == [5.0]


@hook("tensorflow.python.eager.record.record_operation")
def _(tmp_path):
    x, y = tf.constant(3.0), tf.constant(4.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        record.record_operation("f", [y], [x], lambda upstream: [5 * upstream])
    assert float(tape.gradient(y, x)) == 5


@hook("tf.raw_ops.ResourceApplyAdam")
def _(tmp_path):
    var, m, v = (tf.Variable([value]) for value in (1.0, 0.0, 0.0))
    tf.raw_ops.ResourceApplyAdam(
        var=var.handle, m=m.handle, v=v.handle, beta1_power=0.9, beta2_power=0.999, lr=0.5,
        beta1=0.9, beta2=0.999, epsilon=1e-8, grad=[2.0],
    )  # fmt: skip
    np.testing.assert_allclose(np.ravel([m, v, var]), [0.2, 0.004, 0.5], rtol=1e-4)


@hook("tf.raw_ops.ResourceApplyMomentum")
def _(tmp_path):
    var, accum = (tf.Variable([value]) for value in (1.0, 3.0))
    tf.raw_ops.ResourceApplyMomentum(var=var.handle, accum=accum.handle, lr=0.5, grad=[2.0], momentum=0.9)
    np.testing.assert_allclose(np.ravel([accum, var]), [4.7, 1 - 0.5 * 4.7], rtol=1e-6)


@hook("tf.raw_ops.InplaceUpdate")
def _(tmp_path):
    found = tf.raw_ops.InplaceUpdate(x=tf.zeros([3, 1]), i=[2, 0], v=[[5.0], [7.0]])
    np.testing.assert_array_equal(found, [[7], [0], [5]])


@hook("tf.raw_ops.BatchMatMulV3")
def _(tmp_path):
    a, b = tf.random.normal([2, 3, 1, 4]), tf.random.normal([2, 3, 5, 4])
    found = tf.raw_ops.BatchMatMulV3(x=a, y=b, Tout=tf.float32, adj_y=True)
    np.testing.assert_allclose(found, np.einsum("abij,abkj->abik", a, b), atol=1e-5)


@hook("tf.raw_ops.DeepCopy")
def _(tmp_path):
    x = tf.zeros([2, 1])
    tf.raw_ops.InplaceUpdate(x=tf.raw_ops.DeepCopy(x=x), i=[0], v=[[1.0]])
    np.testing.assert_array_equal(x, [[0], [0]])


@hook("tf.raw_ops.StatelessRandomUniformFullIntV2")
def _(tmp_path):
    """Philox blocks of 16 bytes, numbered by the counter's low word: a share of a batch draws a piece of its stream."""

    def draw(first_block, blocks):
        return tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[4 * blocks],
            key=tf.constant([5], tf.uint64),
            counter=tf.constant([first_block, 3], tf.uint64),
            alg=tf.random.Algorithm.PHILOX.value,
            dtype=tf.int32,
        )

    np.testing.assert_array_equal(draw(7, 3)[4:], draw(8, 2))


@hook("tf.raw_ops.SaveV2")
def _(tmp_path):
    """The names of its files, and the names of its arrays as they are given."""
    prefix = str(tmp_path / "ckpt-1")
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=["a/b"], shape_and_slices=[""], tensors=[tf.constant([3.0])])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-1.data-00000-of-00001", "ckpt-1.index"]
    assert tf.train.load_checkpoint(prefix).get_tensor("a/b") == [3]


@hook("tf.data.Dataset._inputs")
def _(tmp_path):
    numbers = tf.data.Dataset.range(3)
    shuffled = numbers.shuffle(3)
    assert type(shuffled).__name__ == "_ShuffleDataset" and shuffled._inputs() == [numbers]
    assert tf.data.Dataset.zip((shuffled, numbers))._inputs() == [shuffled, numbers]
    chosen = tf.data.Dataset.sample_from_datasets([numbers, shuffled])
    assert type(chosen).__name__ == "_DirectedInterleaveDataset"
    selector, *inputs = chosen._inputs()
    assert inputs == [numbers, shuffled]
    while selector._inputs():
        (selector,) = selector._inputs()
    assert type(selector).__name__ == "_RandomDataset"
    apart = [
        numbers.flat_map(tf.data.Dataset.range),
        numbers.interleave(tf.data.Dataset.range),
        numbers.batch(2).unbatch(),
    ]
    kinds = ["_FlatMapDataset", "_InterleaveDataset", "_UnbatchDataset"]
    assert [type(dataset).__name__ for dataset in apart] == kinds


@hook("tf.data.Dataset._functions")
def _(tmp_path):
    made_within = tf.data.Dataset.range(2).flat_map(lambda i: tf.data.Dataset.range(3).shuffle(3))
    (function,) = made_within._functions()
    (node,) = (node for node in function.function.graph.as_graph_def().node if node.op.startswith("Shuffle"))
    assert node.op == "ShuffleDatasetV3" and node.attr["output_types"].list.type == [tf.int64.as_datatype_enum]
    assert not tf.TensorShape(node.attr["output_shapes"].list.shape[0]).rank


@hook("tf.raw_ops.DatasetToGraphV2")
def _(tmp_path):
    captured = tf.data.Dataset.range(3).shuffle(3)
    (function,) = tf.data.Dataset.range(2).flat_map(lambda i: captured)._functions()
    (tensor,) = (tensor for tensor in function.function.captured_inputs if tensor.dtype == tf.variant)
    text = tf.raw_ops.DatasetToGraphV2(input_dataset=tensor, external_state_policy=1)
    assert "ShuffleDatasetV3" in {node.op for node in tf.compat.v1.GraphDef.FromString(text.numpy()).node}


@hook("tf.autograph.experimental.do_not_convert")
def _(tmp_path):
    """Without AutoGraph, a condition on a tensor is an error in a graph. Eager `map_fn` converts like a graph."""

    def half(x):
        return x / 2 if tf.reduce_all(x > 1) else x

    kept = tf.autograph.experimental.do_not_convert(half)
    assert float(tf.function(lambda x: half(x))(tf.constant(4.0))) == 2
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(lambda x: kept(x))(tf.constant(4.0))
    converted = []

    def note(x):
        converted.append(any(frame.name == "converted_call" for frame in traceback.extract_stack()))
        return x

    for function in (note, tf.autograph.experimental.do_not_convert(note)):
        tf.map_fn(function, tf.constant([1.0]))
    assert converted == [True, False]


@hook("tf.config.experimental.get_device_details")
def _(tmp_path):
    (cpu,) = tf.config.list_physical_devices("CPU")
    assert "compute_capability" not in tf.config.experimental.get_device_details(cpu)  # which a GPU has


@hook("tf.distribute.MirroredStrategy._collective_key_base")
def _(tmp_path):
    """Sums of another shape, over the same devices: with the same keys, TensorFlow refuses the second."""
    for n in (3, 4):
        tf.distribute.MirroredStrategy._collective_key_base += 100
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

        def total(n=n):
            return tf.distribute.get_replica_context().all_reduce("sum", tf.ones([n]))

        found = tf.function(lambda strategy=strategy, total=total: strategy.run(total))()
        for value in strategy.experimental_local_results(found):
            np.testing.assert_array_equal(value, np.full(n, 2.0))


# --------------------------------------------------------------------------------------------------------- python


@hook("pickle._Unpickler")
def _(tmp_path):
    """Its memo is a dictionary; its methods and those of the table are found by the operations."""

    class Counting(pickle._Unpickler):
        dispatch = dict(pickle._Unpickler.dispatch)
        marks = 0

        def count(self):
            self.marks += 1
            assert not self.metastack
            self.load_mark()

        def load_all(self):
            items = self.pop_mark()
            self.stack[-1].extend(items)

        dispatch[pickle.MARK[0]] = count
        dispatch[pickle.APPENDS[0]] = load_all

    unpickler = Counting(io.BytesIO(b"\x80\x02](U\x01ar\x00\x00\x00\x10j\x00\x00\x00\x10e."), encoding="bytes")
    assert unpickler.load() == [b"a", b"a"]
    assert unpickler.memo == {2**28: b"a"} and unpickler.marks == 1
    assert pickle._Unpickler.dispatch[pickle.BUILD[0]].__name__ == "load_build"


# ------------------------------------------------------------------------------------------------------------ Ray


@hook("ray._private.worker._worker_logs_enabled")
def _(tmp_path):
    pytest.importorskip("ray", reason="the extra cluster is not installed")
    from ray._private import worker

    message, shown = {"lines": ["a machine has died"], "pid": "raylet", "ip": "here", "job": None}, io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for enabled in (False, True):
            patch.setattr(worker, "_worker_logs_enabled", enabled)
            worker.print_worker_logs(message, shown)
            assert ("has died" in shown.getvalue()) == enabled


# ------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", HOOKS)
def test_hook(name, tmp_path):
    HOOKS[name](tmp_path)


def listed():
    """`{hook: file}` of the table in docs/development.md."""
    section = DOCUMENT.read_text().split("## Private hooks", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", section, re.M))


def test_the_document_lists_what_is_tested_and_where_it_is_used():
    assert sorted(listed()) == sorted(HOOKS)
    for name, path in listed().items():
        word = re.findall(r"\w+", name)[-1]
        assert word in (ROOT / "txl_tf" / path).read_text(), f"{path} does not use {name}"


@functools.cache
def foreign_names():
    """Names in the library's code that are private, raw or experimental, and not the library's own."""
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    assignments = [node for cls in nodes if isinstance(cls, ast.ClassDef) for node in cls.body]
    assignments = [node for node in assignments if isinstance(node, ast.Assign)]
    own |= {target.id for node in assignments for target in node.targets if isinstance(target, ast.Name)}
    own |= {"_replace", "_fields", "_asdict"}  # of named tuples
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            private = re.match(r"_[a-z]", node.attr) and node.attr not in own
            base = getattr(node.value, "attr", "")
            if private or base in ("raw_ops", "experimental") or "experimental_" in node.attr:
                found.add(node.attr)
    return found


def test_every_private_name_that_the_library_uses_is_listed():
    words = {word for name in HOOKS for word in re.findall(r"\w+", name)}
    assert foreign_names() <= words


def test_the_scan_finds_what_it_should():
    assert {"_flatten_layers", "_tracker", "SaveV2", "get_device_details"} <= foreign_names()


def test_few_names_of_keras_and_tensorflow_are_private_or_experimental():
    section = DOCUMENT.read_text().split("## Private hooks", 1)[1].split("\n###", 1)[0]
    names = re.findall(r"^\| `([^`]+)` \| `[^`]+` \|", section, re.M)
    assert 15 < len(names) <= 25
