"""The base of all layers, by Keras's conventions: dropout keys of their own, masks that are passed on, checks.

Dropout has one rule everywhere. `training=True` drops: by the `dropout_key` of the call or, without one, by a key of
the layer's own `SeedGenerator`. `training=False` never drops. A call without `training` drops where it is given a key.
"""

import contextlib
import inspect
import random

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config.checks import RATE, at_least
from txl_tf.errors import ParameterError, brief
from txl_tf.layers.common.arguments import arguments_of
from txl_tf.layers.common.settings import Settings, remember_graph

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


class KerasHabits(Settings):
    """Mixin of layers and models: stored arguments in the config, shapes as `call` computes them, masks passed on."""

    def get_config(self):
        return {**super().get_config(), **arguments_of(self)}

    def compute_output_spec(self, *args, **kwargs):
        return keras.Operation.compute_output_spec(self, *args, **kwargs)  # traces the call, for dtypes and errors

    def compute_output_shape(self, *shapes, **named):
        """Like the first of the shapes, whose name is that of `build`, of the call, or none."""
        return [*shapes, *named.values()][0]

    def compute_mask(self, inputs, previous_mask):
        """The mask of the output: that of the input if it says which elements there are, bool `[batch, length]`."""
        rank = getattr(getattr(previous_mask, "shape", None), "rank", None)
        return previous_mask if rank == 2 and previous_mask.dtype == tf.bool else None


class Layer(KerasHabits, Dropping, keras.layers.Layer):
    """A layer whose output is like its first input, unless it says otherwise."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def __call__(self, *args, **kwargs):
        while args and args[-1] is None:  # Keras gives its mask a second time where None is given by position
            args = args[:-1]
        if not tf.executing_eagerly():
            remember_graph(self)
        return super().__call__(*args, **kwargs)

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


def check_heads(width_name, width, heads_name, heads):
    """Raises ParameterError unless both are positive integers and the heads divide the width."""
    check_sizes(**{width_name: width, heads_name: heads})
    if width % heads:
        raise ParameterError(width_name, width, f"a multiple of {heads_name}={heads}")


def as_ids(name, ids):
    """Ids of any integer type, or whole numbers of a floating one, which Keras makes of them where it traces: int32.

    An id that int32 does not hold becomes the nearest that it does, which is in no table either.

    Raises:
        ValueError: they are no numbers, or ragged.
    """
    given = ids if hasattr(ids, "dtype") else np.asarray(ids)
    if isinstance(given, tf.RaggedTensor):
        message = f"{name} must be filled up to one length, as by .to_tensor(), got a ragged {shown(given)}"
        raise ParameterError(name, ids, "a tensor of one length", message)
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
            raise tensor_error(name, tensor, f"a tensor, {_described(kind, dims, sizes)}")
        shape, dtype = tf.TensorShape(tensor.shape), tf.as_dtype(tensor.dtype)
        if dims[0] == "..." and shape.rank:
            dims = [*["..."] * (shape.rank - len(dims) + 1), *dims[1:]]
        expected = [sizes.get(dim) for dim in dims]
        if not _KINDS[kind](dtype) or not shape.is_compatible_with(expected):
            raise tensor_error(name, tensor, _described(kind, dims, sizes))
        if shape.rank is not None:
            sizes.update(
                (dim, size) for dim, size in zip(dims, shape, strict=True) if size is not None and dim != "..."
            )


def _described(kind, dims, sizes):
    named = [f"{dim}={sizes[dim]}" if sizes.get(dim) is not None else dim for dim in dims]
    return f"{kind} [{', '.join(named)}]".lstrip()


# -------------------------------------------------------------------------------------------------------------- masks


def mask_of(x):
    """The mask that Keras's layers pass on with a tensor, or `None`."""
    return getattr(x, "_keras_mask", None)


def mask_of_call(x, mask):
    """The mask that a call is given or, without one, that Keras passed on with `x`, as bool; `None` without either."""
    mask = mask_of(x) if mask is None else mask
    return None if mask is None else as_bool("mask", mask)


def as_bool(name, mask):
    """A mask of bool or of integers 0 and 1, true where there is something, as bool.

    Raises:
        ValueError: it is neither.
    """
    mask = tf.convert_to_tensor(mask)
    if mask.dtype.is_floating:
        raise tensor_error(name, mask, "bool, true where there is something")
    return tf.cast(mask, tf.bool)


def seen_by_article(name, mask, sizes, dims):
    """Which keys an article's mask leaves visible: numbers are 1 where forbidden, bool is true where seen.

    Args:
        name: of the argument, for the error.
        mask: two or more dimensions.
        sizes: see `check_tensors`.
        dims: names of the dimensions that the mask broadcasts to.

    Returns:
        bool, of the mask's shape.

    Raises:
        ValueError: the mask does not broadcast.
    """
    mask = tf.convert_to_tensor(mask)
    if mask.shape.rank is not None:
        whole = [sizes.get(dim) for dim in dims[-mask.shape.rank :]]
        known = len(whole) == mask.shape.rank > 1 and zip(mask.shape, whole, strict=True)
        if not known or any(None not in (size, other) and size not in (1, other) for size, other in known):
            message = f"{name} must broadcast to {_described('', dims, sizes)}, got {shown(mask)}"
            raise ParameterError(name, mask, f"of a shape that broadcasts to {_described('', dims, sizes)}", message)
    return seen(mask)


def seen(mask):
    """`seen_by_article` without its checks."""
    mask = tf.convert_to_tensor(mask)
    return mask if mask.dtype.is_bool else mask == 0


def seen_by_keras(name, mask, sizes, two):
    """A mask as Keras has it, true where a key is seen, with all dimensions: bool `[batch, queries, keys]`, some 1.

    Args:
        name: of the argument, for the errors.
        mask: bool, of the dimensions `two`, or `[batch, queries, keys]`.
        sizes: see `check_tensors`.
        two: "batch keys" or "queries keys".

    Raises:
        ValueError: the mask is not bool, or of another shape.
    """
    mask, dims = tf.convert_to_tensor(mask), two.split()
    three = ["batch", "queries", "keys"]
    shapes = f"bool {_described('', dims, sizes)} or {_described('', three, sizes)}, true where a key is seen"
    got = f"got {shown(mask)}"
    if not mask.dtype.is_bool:
        message = f"{name} must be {shapes}, {got}; what is 1 where a key is forbidden is given as forbidden="
        raise ParameterError(name, mask, shapes, message)
    rows = None if mask.shape.rank == 3 and mask.shape[0] == 1 else sizes.get("batch")
    expected = {"batch": rows, "queries": sizes.get("queries"), "keys": sizes.get("keys")}
    for names in (dims, three):
        if mask.shape.rank == len(names) and mask.shape.is_compatible_with([expected[dim] for dim in names]):
            return mask if names is three else mask[:, None] if "batch" in names else mask[None]
    other = "[queries, keys] is attention_mask" if name == "mask" else "[batch, keys] is mask"
    raise ParameterError(name, mask, shapes, f"{name} must be {shapes}, {got}; {other}")
