"""The base of all layers, by Keras's conventions: dropout keys of their own, masks that are passed on, checks.

Dropout has one rule everywhere. `training=True` drops: by the `dropout_key` of the call or, without one, by a key of
the layer's own `SeedGenerator`. `training=False` never drops. A call without `training` drops where it is given a key.
"""

import contextlib
import inspect
import numbers
import random

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config.checks import RATE, at_least
from txl_tf.errors import ParameterError, brief
from txl_tf.nn.arguments import arguments_of
from txl_tf.nn.checkpointed import Checkpointed
from txl_tf.nn.quantization import Unquantized
from txl_tf.nn.settings import Settings, remember_graph

# ----------------------------------------------------------------------------------------------------------- dropout


class Dropping(Settings):
    """Mixin of layers and models that drop.

    Attributes:
        seed: int that the keys of the layer derive from; `None` where it draws none.
        seed_generator: counts the keys drawn. It is saved with the weights.
    """

    seed = seed_generator = _draw = None
    rate_names, _key_source, _always_draws = (), None, False  # see `start_keys`

    def start_keys(self, seed, always=False, **rates):
        """Call it in `__init__`, before the parts of the layer are made. Sets `seed`.

        Args:
            seed: int; `None` draws one; or `draw_key` of the layer that this one is a part of.
            always: whether there are keys without any rate above 0, too.
            **rates: rates of dropout by their names.

        Raises:
            ValueError: a rate is outside `[0, 1)`.
        """
        for name, rate in rates.items():
            RATE(name, rate)
        self.seed = None if callable(seed) else seed
        self._key_source, self._always_draws = seed if callable(seed) else None, always
        self.rate_names = tuple(rates)
        self._follow_rates(any(rates.values()))

    def rates(self):
        """The rates that decide whether the layer draws keys: those that `start_keys` was given, as they are now."""
        return [getattr(self, name) for name in self.rate_names]

    def _follow_rates(self, drops):
        """Draws keys if the layer drops: those of its owner, or its own."""
        if self._key_source is not None:
            self._draw = self._key_source if drops else None
        elif not drops and not self._always_draws:
            self._draw = None
        else:
            self._make_generator()
            self._draw = self.draw_key

    def _make_generator(self):
        if self.seed_generator is not None:
            return
        if self.seed is None:
            self.store("seed", random.randrange(2**31))
        locked = self._tracker.locked  # of a layer that is built, and that dropped nothing before
        self._tracker.unlock()
        with _strategy_of(self.variables).scope() if locked else contextlib.nullcontext():
            self.seed_generator = keras.random.SeedGenerator(self.seed)
        if locked:
            self._tracker.lock()

    def check_setting(self, name, value):
        value = super().check_setting(name, value)
        return random.randrange(2**31) if name == "seed" and value is None else value

    def settings_changed(self, names):
        super().settings_changed(names)
        self._follow_rates(any(self.rates()))
        if "seed" in names and self.seed_generator is not None:
            self.seed_generator.state.assign(keras.random.SeedGenerator(self.seed).state)

    def draw_key(self, x):
        """A new key, int `[3]`, for the rows of `x`: where there are replicas, for this one's share of them."""
        if self._draw != self.draw_key:
            return self._draw(x)
        context = tf.distribute.get_replica_context()
        replica = 0 if context is None else context.replica_id_in_sync_group
        first_row = tf.cast(replica, tf.int32) * tf.shape(x)[0]
        return tf.concat([tf.cast(self.seed_generator.next(), tf.int32), first_row[None]], 0)

    @contextlib.contextmanager
    def drawing(self, dropout_key):
        """Calls in this block that are not given a key drop by this one."""
        before = self._draw
        self.store("_draw", lambda x: dropout_key)
        try:
            yield
        finally:
            self.store("_draw", before)

    def key_of_call(self, x, training, dropout_key):
        """The key that a call drops by, for the rows of `x`; `None` where it does not."""
        if training is not None and not training:
            return None
        if dropout_key is None and training and self._draw is not None:
            return self._draw(x)
        return dropout_key

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if self.seed_generator is not None:
            store["seed_generator"] = self.seed_generator.state.numpy()

    def load_own_variables(self, store):
        store = {name: store[name] for name in store.keys()}
        state = store.pop("seed_generator", None)  # files of older versions have none
        if state is not None and self.seed_generator is not None:
            self.seed_generator.state.assign(state)
        super().load_own_variables(store)


def _strategy_of(variables):
    """The `tf.distribute` strategy that variables were made under."""
    strategies = (getattr(variable.value, "distribute_strategy", None) for variable in variables)
    return next(filter(None, strategies), tf.distribute.get_strategy())


# ------------------------------------------------------------------------------------------------------------- layers


EMBEDDING_LIKE = "embedding_like"  # in the path of a weight, see `add_table`


class _Traced(keras.Operation):
    """The whole call of a layer, with Keras's casts and masks, as an operation that `compute_output_spec` can trace.

    Attributes:
        error: what the call raised. Keras replaces it by an exception with another message and without its fields.
    """

    def __init__(self, layer):
        super().__init__(name=layer.name)
        self.layer, self.error = layer, None

    def call(self, *args, **kwargs):
        try:
            return self.layer(*args, **kwargs)
        except Exception as error:
            self.error = error
            raise


def _shape_of(x):
    """The shape of a tensor or of a symbol of Keras; other values as they are."""
    return tuple(x.shape) if hasattr(x, "shape") and hasattr(x, "dtype") else x


def _has_shape(value):
    """Whether a value is a tensor or a symbol of Keras, or a structure with one."""
    return any(_shape_of(x) is not x for x in keras.tree.flatten(value))


class OutputSpecs:
    """Mixin of layers and models: shapes and dtypes of what a call returns, with weights or without."""

    @property
    def output_dtype(self):
        """The dtype of what a call returns, for `compute_output_spec` of a layer without weights."""
        return self.compute_dtype

    def compute_output_spec(self, *args, **kwargs):
        """Shapes and dtypes of what a call with these arguments returns, as instances of `keras.KerasTensor`.

        With weights, the layer traces its call, so dtypes, casts and errors are those of the call. Without weights, the
        answer is that of `compute_output_shape` and `output_dtype`, and the layer stays without weights.
        """
        if self.built:
            traced = _Traced(self)
            try:
                return traced.compute_output_spec(*args, **kwargs)
            except Exception as error:
                raise traced.error or error from None
        shapes, named = keras.tree.map_structure(_shape_of, (args, kwargs))
        named = {f"{name}_shape" if _has_shape(kwargs[name]) else name: value for name, value in named.items()}
        if "training" not in inspect.signature(self.call).parameters:
            named.pop("training", None)  # `keras.Sequential` gives it to every layer
        parameters = inspect.signature(self.compute_output_shape).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            named = {name: value for name, value in named.items() if name in parameters}  # of a subclass, as Keras's
        output = self.compute_output_shape(*shapes, **named)
        return keras.tree.map_shape_structure(lambda shape: keras.KerasTensor(shape, self.output_dtype), output)

    def compute_output_shape(self, *shapes, **named):
        """The shapes of what a call returns.

        Args: those of the call, in its order or by its names. The shape of a tensor `x` is `x_shape` by name; options
            such as `return_attention_scores` keep their names. Arguments that do not matter may be left out.

        Raises:
            TypeError: the call has no such argument.
        """
        return next(iter(self.named_shapes(shapes, named).values()))  # like the first argument

    def named_shapes(self, shapes, named):
        """The arguments of `compute_output_shape` by their names in the call, options with their defaults."""
        signature = inspect.signature(self.call)
        first = next(iter(signature.parameters))
        # `input_shape` is Keras's name in `build`. What `**_` of `build` took, `summary` of Keras passes on as `_`.
        names = {name: first if name == "input_shape" else name.removesuffix("_shape") for name in named}
        named = {names[name]: value for name, value in named.items() if name.strip("_")}
        try:
            given = signature.bind_partial(*shapes, **named)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}.compute_output_shape: {error}") from None
        given.apply_defaults()
        if first not in given.arguments:
            raise TypeError(f"{type(self).__name__}.compute_output_shape: missing a required argument: '{first}_shape'")
        return given.arguments


def put_in(part):
    """Whether a part, or its class, was set after the layer was made that it is a part of."""
    return "_was_put_in" in vars(part)


class CachedMemory:
    """Base of objects that a call takes in the place of tensors, see `transformer_xl/memory.py`."""

    def __repr__(self):
        return "a cached memory"


class NotCacheable(TypeError):
    """A part of a model cannot be computed from cached keys and values: it needs tensors in their place."""


def memories_by_name(layer, args, kwargs):
    """`(args, kwargs)` of a call, with a `CachedMemory` by its name: Keras takes nothing but tensors by position.

    Where the call takes `*args`, the names are those of the class that it overrides.
    """
    if not any(isinstance(x, CachedMemory) for x in args[1:]):
        return args, kwargs
    names = []
    for cls in type(layer).__mro__:
        if "call" in vars(cls):
            _, *own = inspect.signature(cls.call).parameters.values()
            own = [parameter.name for parameter in own if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
            names += own[len(names) :]
    return args[:1], {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}


class KerasHabits(Settings, OutputSpecs, Checkpointed):
    """Mixin of layers and models: stored arguments in the config, shapes of the output, masks passed on.

    Attributes:
        restores_parts: whether the configuration says which class a part has that is not the library's.
    """

    restores_parts = False

    def get_config(self):
        changed = next((part for part in self._flatten_layers(include_self=False) if put_in(part)), None)
        if changed is not None and not self.restores_parts:
            message = (
                f"{changed.name} of {self.name} was made a {type(changed).__name__} after {self.name} was made: a file "
                f"or clone would not have it. Make it in the constructor of a subclass of {type(self).__name__}"
            )
            allowed = "a part that the constructor makes"
            raise ParameterError(changed.name, type(changed).__name__, allowed, message)
        return {**super().get_config(), **arguments_of(self)}

    def add_table(self, name, shape, initializer, autocast=True):
        """`add_weight` for a weight that no vector is multiplied by: a table of rows, or a bias of every head.

        Keras's Muon takes every weight of two dimensions for a matrix, unless its path contains "embedding". So the
        path of this weight does: `.../attn/embedding_like/u`. Its name and its position in files are as usual.

        Returns:
            The weight, which becomes the attribute `name`, too.
        """
        with keras.name_scope(self.name, caller=self), keras.name_scope(EMBEDDING_LIKE):
            table = keras.Variable(initializer, shape, self.variable_dtype, autocast=autocast, name=name)
        setattr(self, name, table)  # Keras tracks attributes
        table.trainable = self.trainable
        return table

    def compute_mask(self, inputs, previous_mask=None):
        """The mask of the output: that of the input if it says which elements there are, bool `[batch, length]`."""
        rank = getattr(getattr(previous_mask, "shape", None), "rank", None)
        return previous_mask if rank == 2 and previous_mask.dtype == tf.bool else None


class Layer(Unquantized, KerasHabits, Dropping, keras.layers.Layer):
    """A layer whose output is like its first input, unless it says otherwise."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def __call__(self, *args, **kwargs):
        while args and args[-1] is None:  # Keras gives its mask a second time where None is given by position
            args = args[:-1]
        args, kwargs = memories_by_name(self, args, kwargs)
        if not tf.executing_eagerly():
            remember_graph(self)
        return super().__call__(*args, **kwargs)

    def __getattr__(self, name):
        """`layers`, as models have it: the parts of the layer, which `summary(expand_nested=True)` then shows.

        It is found here and is no property, since Keras's files would also name the weights by every attribute that
        `dir` lists.
        """
        if name == "layers":
            return self._flatten_layers(include_self=False, recursive=False)
        return object.__getattribute__(self, name)  # raises the usual error

    def computed(self, *tensors):
        """Tensors and weights in the dtype that the layer computes in."""
        return [tf.cast(x, self.compute_dtype) for x in tensors]

    def build_parts(self, shape, *parts):
        """Builds layers whose input has the width `d_model`, as the first input of this layer, of the `shape`, must."""
        check_width(next(iter(inspect.signature(self.call).parameters)), shape, "d_model", self.d_model)
        for part in parts:
            part.build((None, None, self.d_model))


# ------------------------------------------------------------------------------------------------------------- checks

_COUNT = at_least(1)
_KINDS = {
    "float": lambda dtype: dtype.is_floating,
    "int": lambda dtype: dtype.is_integer,
    "bool": lambda dtype: dtype.is_bool,
}


def check_sizes(**sizes):
    """Raises ParameterError unless all are positive integers."""
    for name, size in sizes.items():
        _COUNT(name, size)


def check_length(name, length, least=0):
    """Raises ParameterError where a length, an int or an int scalar tensor, is a number below `least` or no integer."""
    if isinstance(length, numbers.Number | np.bool_):
        at_least(least)(name, length)


def check_heads(width_name, width, heads_name, heads):
    """Raises ParameterError unless both are positive integers and the heads divide the width."""
    check_sizes(**{width_name: width, heads_name: heads})
    if width % heads:
        raise ParameterError(width_name, width, f"a multiple of {heads_name}={heads}")


def check_layer(layer, n_layer):
    """The number of a layer, from 0 on; a negative one counts from the last. Raises ParameterError if there is none."""
    at_least(-n_layer, n_layer - 1)("layer", layer)
    return layer % n_layer


def as_ids(name, ids):
    """Ids of any integer type, or whole numbers of a floating one, which Keras makes of them where it traces: int32.

    An id that int32 does not hold becomes the nearest that it does, which is in no table either.

    Raises:
        ValueError: they are no numbers, or ragged.
    """
    given = ids if hasattr(ids, "dtype") else np.asarray(ids)
    if isinstance(given, tf.RaggedTensor | tf.SparseTensor):
        raise _dense_error(name, given, "filled up to one length, of integers")
    if not (given.dtype.kind in "iuf" if isinstance(given, np.ndarray) else _is_number(given.dtype)):
        raise ParameterError(name, ids, "integers", f"{name} must be integers, got {shown(ids)}")
    if tf.as_dtype(given.dtype) in (tf.int64, tf.uint32, tf.uint64):
        given = tf.clip_by_value(tf.cast(given, tf.int64), tf.int32.min, tf.int32.max)
    return tf.cast(given, tf.int32)


def _is_number(dtype):
    dtype = tf.as_dtype(dtype)
    return dtype.is_integer or dtype.is_floating


def width_of(name, shape):
    """The last of the dimensions that a layer is built for. Raises ParameterError where it is not known."""
    if not isinstance(shape, (tuple, list, tf.TensorShape)) or not len(shape) or not isinstance(shape[-1], int):
        raise ParameterError(name, shape, "float [..., width] of a known width")
    return shape[-1]


def check_width(name, shape, width_name, width):
    """Raises ParameterError where the `shape` that a layer is built for has another width; `None` says nothing."""
    if isinstance(shape, (tuple, list)) and shape and isinstance(shape[-1], int) and shape[-1] != width:
        raise ParameterError(name, list(shape), f"[..., {width_name}={width}]")


def shown(value):
    """A value as an error shows it: of a tensor, its type and shape."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return brief(value)
    shape = tf.TensorShape(value.shape)
    return f"{tf.as_dtype(value.dtype).name} {[*shape] if shape.rank is not None else '[...]'}"


def tensor_error(name, tensor, allowed):
    """The ParameterError of a tensor, whose message shows its type and shape rather than its numbers."""
    return ParameterError(name, tensor, allowed, f"{name} must be {allowed}, got {shown(tensor)}")


def _dense_error(name, tensor, allowed):
    """The ParameterError of a ragged or sparse tensor."""
    kind, remedy = (
        ("sparse", "tf.sparse.to_dense") if isinstance(tensor, tf.SparseTensor) else ("ragged", ".to_tensor()")
    )
    message = f"{name} must be {allowed}, got a {kind} {shown(tensor)}: {remedy} makes it dense"
    return ParameterError(name, tensor, f"dense, {allowed}", message)


def check_tensors(sizes, **tensors):
    """Raises ParameterError unless tensors have their kinds and shapes. An unknown dimension fits any size.

    Args:
        sizes: `{name: size}` of dimensions that are known. Sizes that the tensors show are added to it.
        **tensors: by argument, `(tensor, "float batch length d_model")`: its kind, then the names of its dimensions. A
            name stands for one size in all of them. "float?" allows `None`; "float ... width" any dimensions in front.
    """
    for name, (tensor, what) in tensors.items():
        kind, *dims = what.split()
        if tensor is None and kind.endswith("?"):
            continue
        kind = kind.rstrip("?")
        if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
            raise tensor_error(name, tensor, f"a tensor, {described(kind, dims, sizes)}")
        if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
            raise _dense_error(name, tensor, described(kind, dims, sizes))
        shape, dtype = tf.TensorShape(tensor.shape), tf.as_dtype(tensor.dtype)
        if dims[0] == "..." and shape.rank:
            dims = [*["..."] * (shape.rank - len(dims) + 1), *dims[1:]]
        expected = [sizes.get(dim) for dim in dims]
        if not _KINDS[kind](dtype) or not shape.is_compatible_with(expected):
            raise tensor_error(name, tensor, described(kind, dims, sizes))
        if shape.rank is not None:
            sizes.update(
                (dim, size) for dim, size in zip(dims, shape, strict=True) if size is not None and dim != "..."
            )


def described(kind, dims, sizes):
    """A kind and the names of dimensions as errors show them, with the sizes that are known."""
    named = [f"{dim}={sizes[dim]}" if sizes.get(dim) is not None else dim for dim in dims]
    return f"{kind} [{', '.join(named)}]".lstrip()
