"""The base class of all layers, by Keras's conventions: dropout keys, masks, shapes of outputs, checks of arguments.

Dropout has one rule everywhere. With `training=True`, a layer uses dropout: with the `dropout_key` of the call or,
without one, with a key that it draws from its own `SeedGenerator` or from that of the layer that contains it. With
`training=False`, it never does. A call without `training` uses dropout if it gets a key.
"""

import contextlib
import inspect
import math
import numbers
import random
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.calls import bind_call
from txl_tf.config.checks import RATE, at_least, is_integer
from txl_tf.errors import CallError, ParameterError, brief
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.kernels.watching import AttentionRecord, watching
from txl_tf.nn.arguments import arguments_of
from txl_tf.nn.bases import MixedIntoLayer
from txl_tf.nn.checkpointed import Checkpointed
from txl_tf.nn.quantization import Unquantized
from txl_tf.nn.settings import FREE_SEED, Settings, remember_graph

# ----------------------------------------------------------------------------------------------------------- dropout


class Dropping(Settings):
    """Mixin of layers and models with dropout.

    Attributes:
        seed: int from which the keys of the layer's own generator derive. `None` if no seed was given and the layer has
            no generator.
        seed_generator: counts the keys that the layer has drawn. It is saved with the weights.
        rate_names: names of the attributes that are dropout rates.
    """

    seed: int | None = None
    seed_generator: Any = None
    rate_names: tuple[str, ...] = ()
    _draw: Any = None  # draws a key for the rows of a tensor; `None`: nothing is dropped
    _key_source: Callable[[Any], Any] | None = None  # `draw_key` of the layer that this one is a part of
    _always_draws: bool = False

    def start_keys(self, seed: Any, always: bool = False, **rates: float) -> None:
        """Sets where dropout keys come from: the containing layer, a generator of this layer, or nowhere.

        Call it in `__init__`. Making a generator may draw a seed from Python's `random`, from which initial weights
        derive, too. So moving the call before or after the parts are made changes the initial weights for a given seed.

        Args:
            seed: an int; `None` for a random one, which is chosen when the generator is made; or `draw_key` of the
                layer that contains this one.
            always: whether to make a generator even if all rates are 0. It has no effect with a `draw_key`.
            **rates: dropout rates by name.

        Raises:
            ParameterError: a rate is outside `[0, 1)`, or the seed is another value.
        """
        for name, rate in rates.items():
            RATE(name, rate)
        if not callable(seed):
            FREE_SEED("seed", seed)
        self.seed = None if callable(seed) else seed
        self._key_source = seed if callable(seed) else None
        self._always_draws = always
        self.rate_names = tuple(rates)
        self._choose_key_source(any(rates.values()))

    def rates(self) -> list[float]:
        """The current values of the dropout rates."""
        return [getattr(self, name) for name in self.rate_names]

    def _choose_key_source(self, drops: bool) -> None:
        """Chooses the source of keys: the layer that contains this one, or else this layer's own generator.

        If nothing is dropped (`drops` is false), there is no source, except the own generator of a layer that always
        draws.
        """
        if self._key_source is not None:
            self._draw = self._key_source if drops else None
        elif not drops and not self._always_draws:
            self._draw = None
        else:
            self._draw = self.draw_key
            if self.seed_generator is None:
                if self.seed is None:
                    self.store("seed", random.randrange(2**31))
                with unlocked(self):  # it may be built, if its rates were 0 until now
                    self.seed_generator = keras.random.SeedGenerator(self.seed)

    def check_setting(self, name: str, value: Any) -> Any:
        """Checks a new value, see `Settings`. Returns the value, or a random seed for `seed=None`."""
        value = super().check_setting(name, value)
        return random.randrange(2**31) if name == "seed" and value is None else value

    def settings_changed(self, names: Iterable[str]) -> None:
        """Starts or stops drawing keys if the rates have changed. Restarts the generator if the seed has changed."""
        super().settings_changed(names)
        self._choose_key_source(any(self.rates()))
        if "seed" in names and self.seed_generator is not None:
            self.seed_generator.state.assign(keras.random.SeedGenerator(self.seed).state)

    def draw_key(self, x: Tensor) -> Tensor:
        """A new key for the rows of `x`, int32 `[3]`: two numbers from the generator, and the index of the first row.

        The index counts the rows of all replicas as if each replica had as many as this one. If this layer has no
        generator, the layer that contains it draws the key. In a block of `drawing`, the result is the key of the
        block.
        """
        if self._draw != self.draw_key:
            return self._draw(x)
        context = tf.distribute.get_replica_context()
        replica = 0 if context is None else context.replica_id_in_sync_group
        first_row = tf.cast(replica, tf.int32) * tf.shape(x)[0]
        return tf.concat([tf.cast(self.seed_generator.next(), tf.int32), first_row[None]], 0)

    @contextlib.contextmanager
    def drawing(self, dropout_key: Tensor) -> Generator[None, None, None]:
        """In this block, calls without a key of their own use this one."""
        before = self._draw
        self.store("_draw", lambda x: dropout_key)
        try:
            yield
        finally:
            self.store("_draw", before)

    def key_of_call(self, x: Tensor, training: bool | None, dropout_key: Tensor | None) -> Tensor | None:
        """The dropout key of a call, or `None` if the call uses no dropout.

        Args:
            x: an input with the rows of the batch. A key that is drawn depends on its number of rows.
            training: `True`: the call uses `dropout_key` or, without it, draws a key if the layer has a source of keys.
                `False`: no dropout. `None`: dropout only if a `dropout_key` is given.
            dropout_key: the key that was given to the call.
        """
        if training is not None and not training:
            return None
        if dropout_key is None and training and self._draw is not None:
            return self._draw(x)
        return dropout_key

    def save_own_variables(self, store: Any) -> None:
        """Keras's method: also saves the state of the seed generator, if there is one."""
        super().save_own_variables(store)
        if self.seed_generator is not None:
            store["seed_generator"] = self.seed_generator.state.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Keras's method: also restores the seed generator, if the file has its state."""
        store = {name: store[name] for name in store.keys()}
        state = store.pop("seed_generator", None)  # files of older versions do not have it
        if state is not None and self.seed_generator is not None:
            self.seed_generator.state.assign(state)
        super().load_own_variables(store)


@contextlib.contextmanager
def unlocked(layer: Any) -> Generator[None, None, None]:
    """In this block, a layer that is built accepts new weights and parts.

    They are made in the scope of the `tf.distribute` strategy in which the layer's other weights were made. For a layer
    that is not built, the block changes nothing.
    """
    if not layer._tracker.locked:
        yield
        return
    strategies = (getattr(variable.value, "distribute_strategy", None) for variable in layer.variables)
    strategy: Any = next(filter(None, strategies), tf.distribute.get_strategy())
    layer._tracker.unlock()
    try:
        with strategy.scope():
            yield
    finally:
        layer._tracker.lock()


# ------------------------------------------------------------------------------------------------------------- layers


EMBEDDING_LIKE = "embedding_like"  # in the path of a weight, see `add_table`


class _Traced(keras.Operation):
    """The whole call of a layer, with Keras's casts and masks, as an operation that `compute_output_spec` can trace.

    Attributes:
        error: the exception that the call raised. Keras replaces it by one with another message and without its fields.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(name=layer.name)
        self.layer = layer
        self.error: Exception | None = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.layer(*args, **kwargs)
        except Exception as error:
            self.error = error  # for `compute_output_spec`: Keras raises another error in its place
            raise


def _shape_or_value(x: Any) -> Any:
    """The shape of a tensor or of a symbolic tensor of Keras. Another value is returned unchanged."""
    return tuple(x.shape) if hasattr(x, "shape") and hasattr(x, "dtype") else x


def _has_shape(value: Any) -> bool:
    """Whether a value is a tensor or a symbolic tensor, or a structure that contains one."""
    leaves: list[Any] = keras.tree.flatten(value)
    return any(_shape_or_value(x) is not x for x in leaves)


class OutputSpecs(MixedIntoLayer):
    """Mixin of layers and models that computes shapes and dtypes of outputs, before or after the layer is built."""

    @property
    def output_dtype(self) -> Any:
        """The dtype of the output, for `compute_output_spec` of a layer that is not built."""
        return self.compute_dtype

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the output of a call with these arguments, as instances of `keras.KerasTensor`.

        A layer that is built traces its call, so dtypes, casts and errors are those of the call. For a layer that is
        not built, the answer comes from `compute_output_shape` and `output_dtype`, and the layer is not built.
        """
        if self.built:
            traced = _Traced(self)
            try:
                return traced.compute_output_spec(*args, **kwargs)
            except Exception as error:
                raise traced.error or error from None
        arguments: Any = keras.tree.map_structure(_shape_or_value, (args, kwargs))
        shapes, named = arguments
        named = {f"{name}_shape" if _has_shape(kwargs[name]) else name: value for name, value in named.items()}
        if "training" not in inspect.signature(self.call).parameters:
            named.pop("training", None)  # `keras.Sequential` passes it to every layer
        parameters = inspect.signature(self.compute_output_shape).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            # A subclass may write this method as Keras does, with only some of the arguments.
            named = {name: value for name, value in named.items() if name in parameters}
        output = self.compute_output_shape(*shapes, **named)
        return keras.tree.map_shape_structure(lambda shape: keras.KerasTensor(shape, self.output_dtype), output)

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        """The shapes of the output of a call.

        Args: those of the call, by position or by name. The shape of a tensor `x` has the name `x_shape`. Options such
            as `return_attention_scores` keep their names. Arguments that do not matter may be left out.

        Raises:
            CallError: the call has no such argument, or a required one is missing.
        """
        return next(iter(self.named_shapes(shapes, named).values()))  # like the first argument

    def named_shapes(self, shapes: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `compute_output_shape` by their names in the call, with defaults for those left out.

        Raises:
            CallError: see `compute_output_shape`.
        """
        signature = inspect.signature(self.call)
        called = f"{type(self).__name__}.compute_output_shape"
        known = list(signature.parameters)
        first = known[0]
        # `input_shape` is Keras's name in `build`. Keras's `summary` passes on arguments in `**_` of `build` as `_`.
        names = {name: first if name == "input_shape" else name.removesuffix("_shape") for name in named}
        named = {names[name]: value for name, value in named.items() if name.strip("_")}
        try:
            bound = signature.bind_partial(*shapes, **named)
        except TypeError as error:
            raise CallError(called, list(shapes), known, f"{called}: {error}") from None
        bound.apply_defaults()
        if first not in bound.arguments:
            raise CallError(called, list(shapes), known, f"{called}: missing a required argument: '{first}_shape'")
        return bound.arguments


class CachedMemory:
    """Base class of objects that a call takes in place of tensors, see `transformer_xl/memory.py`."""

    def __repr__(self) -> str:
        return "a cached memory"


class NotCacheable(TypeError):
    """A check found a part of a model that needs hidden states, so it cannot be computed from cached keys and values.

    A part that computes with its memory as if it were tensors may raise another error before: see `why_not_cached`.
    """


def memories_by_name(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` of a call, where every `CachedMemory` is given by name: by position, Keras takes only tensors.

    If the call takes `*args`, the names come from the class whose call it overrides.
    """
    if not any(isinstance(x, CachedMemory) for x in args[1:]):
        return args, kwargs
    names: list[str] = []
    for cls in type(layer).__mro__:
        if "call" in vars(cls):
            _, *own = inspect.signature(cls.call).parameters.values()
            own = [parameter.name for parameter in own if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
            names += own[len(names) :]
    return args[:1], {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}


class CheckedCalls(MixedIntoLayer):
    """Mixin of layers and models: a call that does not fit the signature raises an error that names the argument.

    Raises:
        UnknownArgumentError: the call has no such argument.
        CallError: a required argument is missing; there are too many; or an argument that is no tensor was given by
            position, which Keras does not allow.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = memories_by_name(self, args, kwargs)
        try:
            return super().__call__(*args, **kwargs)
        except ParameterError:
            raise
        except (TypeError, ValueError) as error:
            called = type(self).__name__
            signature = inspect.signature(self.call)
            given = bind_call(called, signature, args, kwargs)  # raises an error unless the call fits the signature
            names = list(signature.parameters)
            options = [
                name for name, x in zip(names, args, strict=False) if not _has_shape(x) and name in given.arguments
            ]
            if options and "Only input tensors" in str(error):
                by_name = ", ".join(f"{name}={brief(given.arguments[name])}" for name in options)
                message = f"{called}(): only tensors can be given by position; write {by_name}"
                raise CallError(called, list(args), names, message) from None
            raise


class Attending(MixedIntoLayer):
    """Mixin of layers that attend by `txl_tf.kernels.attend`, once in a call."""

    def attention_probs(self, *args: Any, **kwargs: Any) -> Any:
        """The attention probabilities of a call, without dropout: `[n_head, batch, queries, keys]`.

        Args: those of the call.
        """
        with watching() as record:
            self(*args, **kwargs)
        return record.probs[0]


def watch_layers(
    model: Any, name: str, layers: Sequence[Any], *args: Any, **kwargs: Any
) -> tuple[AttentionRecord, Any]:  # fmt: skip
    """Calls a model. Returns what the attentions of its `layers` computed, and its output.

    Args:
        name: the argument that decides the class of the layers, for the error.

    Raises:
        ParameterError: the layers do not call `txl_tf.layers.attend` once each.
    """
    with watching() as record:
        output = model(*args, **kwargs)
    if len(record.probs) != len(layers):
        classes = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        message = (
            f"attention can be shown only where each of the n_layer={len(layers)} layers calls txl_tf.layers.attend "
            f"once, got {len(record.probs)} calls of {classes}"
        )
        raise ParameterError(name, layers, "layers that call txl_tf.layers.attend", message)
    return record, output


class KerasHabits(Settings, OutputSpecs, Checkpointed):
    """Mixin of layers and models: `get_config` with the stored arguments, shapes of outputs, and masks of outputs.

    Attributes:
        restores_parts: whether the configuration also contains the classes of parts that a user has written. Then a
            replaced part is no error in `get_config`.
    """

    restores_parts: bool = False

    def get_config(self) -> dict[str, Any]:
        """The stored arguments.

        Raises ParameterError if a part was replaced after the constructor: the configuration would not have it.
        """
        parts = self._flatten_layers(include_self=False)
        changed = next((part for part in parts if "_was_replaced" in vars(part)), None)  # see `change_part`
        if changed is not None and not self.restores_parts:
            message = (
                f"{changed.name} of {self.name} was replaced by a {type(changed).__name__} after {self.name} was made. "
                f"A file or clone would not have it. Make it in the constructor of a subclass of {type(self).__name__}"
            )
            allowed = "a part that the constructor makes"
            raise ParameterError(changed.name, type(changed).__name__, allowed, message)
        return {**super().get_config(), **arguments_of(self)}

    def add_table(self, name: str, shape: Sequence[int], initializer: Any, autocast: bool = True) -> Any:
        """`add_weight` for a weight that is not a matrix of a linear map: a table of rows, or the biases of all heads.

        Keras's Muon optimizer treats every weight with two dimensions as a matrix, unless its path contains
        "embedding". So the path of this weight contains it: `.../attn/embedding_like/u`. The weight has its usual name
        and its usual position in files.

        Returns:
            The weight, which also becomes the attribute `name`.
        """
        with keras.name_scope(self.name, caller=self), keras.name_scope(EMBEDDING_LIKE):
            table: Any = keras.Variable(initializer, shape, self.variable_dtype, autocast=autocast, name=name)
        setattr(self, name, table)  # Keras tracks attributes
        table.trainable = self.trainable
        return table

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """The mask of the output: the mask of the input if it marks elements, bool `[batch, length]`; else `None`."""
        rank = getattr(getattr(previous_mask, "shape", None), "rank", None)
        return previous_mask if rank == 2 and previous_mask.dtype == tf.bool else None


class Layer(CheckedCalls, Unquantized, KerasHabits, Dropping, keras.layers.Layer):
    """A layer. Its output has the shape of its first input, unless it overrides `compute_output_shape`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        while args and args[-1] is None:  # for None by position, Keras would pass its mask a second time
            args = args[:-1]
        if not tf.executing_eagerly():
            remember_graph(self)
        return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """`layers`, the parts of the layer, as models have it. So `summary(expand_nested=True)` shows them.

        It is not a property, because Keras writes the weights to files under every attribute that `dir` lists.
        """
        if name == "layers":
            return self._flatten_layers(include_self=False, recursive=False)
        return object.__getattribute__(self, name)  # raises the usual error

    def in_compute_dtype(self, *tensors: Tensor) -> list[Any]:
        """A list of the tensors and weights, cast to the dtype in which the layer computes."""
        return [tf.cast(x, self.compute_dtype) for x in tensors]

    def build_parts(self, shape: Any, *parts: keras.Layer) -> None:
        """Builds parts of this layer. The input of each part has the width `d_model`.

        Args:
            shape: shape of the first input of this layer, or `None` if unknown.
            *parts: the parts.

        Raises:
            ParameterError: the shape has another width than `d_model`.
        """
        check_width(next(iter(inspect.signature(self.call).parameters)), shape, "d_model", self.d_model)
        for part in parts:
            part.build((None, None, self.d_model))


# ------------------------------------------------------------------------------------------------------------- checks

_COUNT = at_least(1)
_KINDS: dict[str, Callable[[tf.DType], bool]] = {
    "float": lambda dtype: dtype.is_floating,
    "int": lambda dtype: dtype.is_integer,
    "bool": lambda dtype: dtype.is_bool,
    "number": lambda dtype: dtype.is_floating or dtype.is_integer,
}


def check_eager(method: str) -> None:
    """Raises ParameterError in a graph, such as that of a `tf.function` or of `Dataset.map`."""
    if not tf.executing_eagerly():
        message = f"{method} runs in eager execution only: call it outside tf.function and Dataset.map"
        raise ParameterError(method, None, "called in eager execution", message)


def check_sizes(**sizes: Any) -> None:
    """Raises ParameterError unless all are positive integers."""
    for name, size in sizes.items():
        _COUNT(name, size)


def check_length(name: str, length: Any, least: int = 0) -> None:
    """Raises ParameterError unless a length is an integer from `least` on, or an integer tensor.

    The tensor must be a scalar or of unknown rank. Its value is not checked.
    """
    if isinstance(length, numbers.Number | np.bool_):
        at_least(least)(name, length)
        return
    is_tensor = hasattr(length, "shape") and hasattr(length, "dtype")
    if not is_tensor or tf.TensorShape(length.shape).rank or not tf.as_dtype(length.dtype).is_integer:
        raise tensor_error(name, length, "an integer, or an integer scalar tensor")


def checked_length(name: str, length: Size, most: int, allowed: str, message: str = "") -> Size:
    """`length` of the argument `name`, which must be at most `most`.

    A length that is known when a graph is traced is checked then. Any other is checked when the graph runs: wait for
    the result, so that no other operation can fail first. XLA drops this check.

    Args:
        name, length, most: see above.
        allowed: the limit, for the error.
        message: the error without the length that was found; by default, `name` must be `allowed`.

    Raises:
        ParameterError: the length is greater. If the graph checks it, it raises an InvalidArgumentError.
    """
    message = message or f"{name} must be {allowed}"
    if isinstance(length, int):
        if length > most:
            raise ParameterError(name, length, allowed, f"{message}, got {length}")
        return length
    with tf.control_dependencies([tf.debugging.Assert(length <= most, [f"{message}, got", length])]):
        return tf.identity(length)


def checked_sizes(**tensors: tuple[Any, str]) -> list[Any]:
    """The tensors, with checks of the sizes that `check_tensors` could not know when a graph was traced.

    A size that two tensors share is checked when the graph runs. If only the first dimension is unknown, nothing is
    checked, and the graph gets no operations. XLA drops the checks.

    Args:
        **tensors: for each argument, `(tensor, "batch length")`: the names of its first dimensions. A tensor of unknown
            rank is not checked.

    Raises:
        tf.errors.InvalidArgumentError: the graph raises it if two sizes of the same name differ.
    """
    values = [tensor for tensor, _ in tensors.values()]
    shapes = [tf.TensorShape(tensor.shape) for tensor in values]
    if all(None not in shape[1:] for shape in shapes if shape.rank is not None):
        return values
    first: dict[str, tuple[str, Any]] = {}  # for every dimension, the first argument that has it, and its size
    checks = []
    for (name, (tensor, dims)), shape in zip(tensors.items(), shapes, strict=True):
        sizes = () if shape.rank is None else shape_of(tensor)
        for dim, size in zip(dims.split(), sizes, strict=False):
            other, expected = first.setdefault(dim, (name, size))
            if other != name and not (isinstance(size, int) and isinstance(expected, int)):
                text = [f"{name} must have the {dim} of {other},", expected, "but has", size]
                checks.append(tf.debugging.Assert(tf.equal(size, expected), text))
    with tf.control_dependencies(checks):
        return [tf.identity(tensor) for tensor in values]


def check_heads(width_name: str, width: Any, heads_name: str, heads: Any) -> None:
    """Raises ParameterError unless both are positive integers and the heads divide the width."""
    check_sizes(**{width_name: width, heads_name: heads})
    if width % heads:
        raise ParameterError(width_name, width, f"a multiple of {heads_name}={heads}")


def check_layer(layer: int, n_layer: int) -> int:
    """The index of a layer, from 0 on. A negative `layer` counts from the last: -1 is the last layer.

    Raises ParameterError if there is no such layer.
    """
    at_least(-n_layer, n_layer - 1)("layer", layer)
    return layer % n_layer


def as_ids(name: str, ids: Any) -> Any:
    """Ids as int32. They may have any integer dtype, or be whole numbers in floats: Keras makes floats when it traces.

    An id outside the range of int32 becomes the nearest int32. No table has a row for it either.

    Raises:
        ParameterError: they are not numbers, or the tensor is ragged or sparse.
    """
    values: Any = ids if hasattr(ids, "dtype") else as_array(name, ids, "integers")
    if isinstance(values, tf.RaggedTensor | tf.SparseTensor):
        raise dense_error(name, values, "filled up to one length, of integers")
    is_array = isinstance(values, np.ndarray)
    if not (values.dtype.kind in "iuf" if is_array else _KINDS["number"](tf.as_dtype(values.dtype))):
        raise ParameterError(name, ids, "integers", f"{name} must be integers, got {shown(ids)}")
    if tf.as_dtype(values.dtype) in (tf.int64, tf.uint32, tf.uint64):
        values = tf.clip_by_value(tf.cast(values, tf.int64), tf.int32.min, tf.int32.max)
    return tf.cast(values, tf.int32)


def width_of(name: str, shape: Any) -> int:
    """The last dimension of the `shape` for which a layer is built. Raises ParameterError if it is not known.

    `name` is the argument of the layer's call with this shape.
    """
    if not isinstance(shape, (tuple, list, tf.TensorShape)) or not len(shape) or not is_integer(shape[-1]):
        raise ParameterError(name, shape, "float [..., width] of a known width")
    width: Any = shape[-1]
    return int(width)


def check_width(name: str, shape: Any, width_name: str, width: int) -> None:
    """Raises ParameterError if the `shape` for which a layer is built has another width. An unknown width passes."""
    if isinstance(shape, (tuple, list)) and shape and is_integer(shape[-1]) and shape[-1] != width:
        raise ParameterError(name, list(shape), f"[..., {width_name}={width}]")


def shown(value: Any) -> str:
    """A value as an error message shows it. Tensors are shown by dtype and shape."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return brief(value)
    shape = tf.TensorShape(value.shape)
    dtype = getattr(value.dtype, "name", value.dtype)  # Keras has strings as dtypes
    return f"{dtype} {[*shape] if shape.rank is not None else '[...]'}"


def as_array(name: str, value: Any, allowed: str) -> np.ndarray:
    """A value as an array. Raises ParameterError if it is rows of different lengths, or no array for another reason."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError):
        raise tensor_error(name, value, allowed) from None


def tensor_error(name: str, tensor: Any, allowed: str) -> ParameterError:
    """A ParameterError about a tensor. Its message shows dtype and shape, not the numbers."""
    return ParameterError(name, tensor, allowed, f"{name} must be {allowed}, got {shown(tensor)}")


def dense_error(name: str, tensor: Any, allowed: str) -> ParameterError:
    """A ParameterError about a tensor that is ragged or sparse."""
    if isinstance(tensor, tf.SparseTensor):
        kind, remedy = "sparse", "tf.sparse.to_dense"
    else:
        kind, remedy = "ragged", ".to_tensor()"
    message = f"{name} must be {allowed}, got a {kind} {shown(tensor)}: {remedy} makes it dense"
    return ParameterError(name, tensor, f"dense, {allowed}", message)


def check_tensors(sizes: dict[str, Any], **tensors: tuple[Any, str]) -> None:
    """Raises ParameterError unless tensors have the right kinds and shapes. An unknown dimension matches any size.

    Args:
        sizes: `{name: size}` of the dimensions that are known. The function adds the sizes that it finds in tensors.
        **tensors: for each argument, `(tensor, "float batch length d_model")`: its kind and the names of its
            dimensions. A name stands for the same size in all tensors. "float?" also allows `None`. "float ... width"
            allows any number of dimensions before the width; the same dimensions of other tensors must broadcast to
            them. A dimension may also be a number, or be computed: "n_head*d_head", "mem_len+tgt_len".
    """
    for name, (tensor, what) in tensors.items():
        kind, *dims = what.split()
        is_optional = kind.endswith("?")
        kind = kind.rstrip("?")
        if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
            if tensor is None and is_optional:
                continue
            raise tensor_error(name, tensor, f"a tensor, {described(kind, dims, sizes)}")
        if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
            raise dense_error(name, tensor, described(kind, dims, sizes))
        shape = tf.TensorShape(tensor.shape)
        all_dims = dims
        if "..." in dims and shape.rank is not None:
            first = dims.index("...")
            others = max(shape.rank - len(dims) + 1, 0)
            all_dims = [*dims[:first], *["..."] * others, *dims[first + 1 :]]
            _check_leading(name, tensor, shape[first : first + others], sizes)
        expected = [size_of(dim, sizes) for dim in all_dims]
        if not _KINDS[kind](tf.as_dtype(tensor.dtype)) or not shape.is_compatible_with(expected):
            raise tensor_error(name, tensor, described(kind, dims, sizes))
        if shape.rank is not None:
            named_sizes = zip(all_dims, shape.as_list(), strict=True)
            sizes.update((dim, size) for dim, size in named_sizes if size is not None and dim.isidentifier())


def _check_leading(name: str, tensor: Any, leading: Any, sizes: dict[str, Any]) -> None:
    """Checks that the dimensions `leading`, in the place of "...", and those of earlier tensors broadcast to one shape.

    Stores this shape in `sizes["..."]`.
    """
    before = sizes.get("...", leading)
    try:
        sizes["..."] = tf.broadcast_static_shape(leading, before)
    except ValueError:
        raise tensor_error(
            name, tensor, f"of a shape whose dimensions {[*leading]} broadcast with {[*before]}"
        ) from None


def size_of(dim: str, sizes: dict[str, Any]) -> Any:
    """The size of a dimension of `check_tensors`; `None` if it is not known.

    A dimension is a number, a name, or a sum or a product of these, such as "mem_len+tgt_len".
    """
    if dim.isdigit():
        return int(dim)
    for sign, combine in (("+", sum), ("*", math.prod)):
        if sign in dim:
            parts = [size_of(part, sizes) for part in dim.split(sign)]
            return combine(parts) if all(isinstance(part, int) for part in parts) else None
    return None if dim == "..." else sizes.get(dim)


def described(kind: str, dims: Sequence[str], sizes: dict[str, Any]) -> str:
    """A kind and the names of dimensions as error messages show them: `float [batch, d_model=32]`."""

    def shown_as(dim: str) -> str:
        size = size_of(dim, sizes)
        return dim if size is None or dim.isdigit() else f"{dim}={size}"

    return f"{kind} [{', '.join(map(shown_as, dims))}]".lstrip()
