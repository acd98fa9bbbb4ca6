"""The parts of a model: which ones belong to the library, which ones a user has written, and how to add more."""

import contextlib
import contextvars
import inspect
import logging
import re
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.kernels import precision
from txl_tf.kernels.dtypes import is_half


def is_library(part: Any, cls: Any) -> bool:
    """Whether a layer or model uses the library's `call` of `cls`.

    It does not if a user has overridden `call` in a subclass, in the class or in the instance.
    """
    call = getattr(type(part), "call", None)
    return "call" not in vars(part) and call is cls.call and call.__module__.startswith("txl_tf.")


def own_parts(model: Any, count_keras: bool = True) -> list[str]:
    """The parts of a model that are not entirely the library's: `["Mine 'layer_0'", ...]`.

    A part is the model itself or a layer in it. It is listed if its class is not from this library, or if a user has
    replaced a method or property of its class, or a method of the instance. So is a user's scheme of positions.

    Args:
        count_keras: whether layers of Keras count, too. The library's language models do not contain any.
    """
    layers = model._flatten_layers()
    parts = [part for part in layers if not _is_library_part(part)]
    if not count_keras:
        parts = [part for part in parts if not type(part).__module__.startswith("keras.")]
    names = [f"{type(part).__name__} {part.name!r}" for part in parts]
    schemes = dict.fromkeys(type(getattr(layer, "scheme", None)) for layer in layers)
    # The attribute `scheme` of a tagger is a string, the scheme of its tags.
    schemes = [cls for cls in schemes if hasattr(cls, "known_as") and not cls.__module__.startswith("txl_tf.")]
    # A scheme that is a Keras layer is already in the parts.
    return names + [f"{cls.__name__} 'positions'" for cls in schemes if not issubclass(cls, keras.Layer)]


def _is_library_part(part: Any) -> bool:
    """Whether the class of a part is this library's, and a user has replaced nothing in it.

    It looks at the methods and properties that the library's classes define, not at those from Keras, and at the
    methods of the instance.
    """
    ours = [base for base in type(part).__mro__ if base.__module__.startswith("txl_tf.")]
    if not ours or ours[0] is not type(part) or _methods_of_instance(part):
        return False
    functions = (_function_of(value) for base in ours for value in vars(base).values())
    return all(function.__module__.startswith("txl_tf.") for function in functions if inspect.isfunction(function))


def is_overridden(part: Any, name: str) -> bool:
    """Whether a user has overridden a method or property of a layer or model.

    It may be overridden in a subclass, in the class or in the instance. The first definition that Python finds counts.
    It is a user's if its module is not in txl_tf or Keras.
    """
    member = vars(part).get(name, inspect.getattr_static(type(part), name, None))
    if member is None:
        return False
    member = getattr(member, "fget", None) or getattr(member, "__func__", member)  # a property, or a bound method
    return (getattr(member, "__module__", None) or "").partition(".")[0] not in ("txl_tf", "keras")


def _methods_of_instance(part: Any) -> set[str]:
    """Names of the methods that a user has set on the object itself, in place of those of its class."""
    functions = [name for name, value in vars(part).items() if callable(value)]
    methods = [name for name in functions if inspect.isfunction(getattr(type(part), name, None))]
    return {name for name in methods if is_overridden(part, name)}  # Keras sets `build`, for example


def deciding_call(part: Any) -> Any:
    """The `call` whose signature decides which arguments a layer or model accepts: a function.

    A `call` with `*args` or `**kwargs` that uses `super()` passes them on. So the `call` that it overrides decides.
    `None` if a user has set the method on the instance.
    """
    calls = [] if "call" in vars(part) else [vars(cls)["call"] for cls in type(part).__mro__ if "call" in vars(cls)]
    return next((call for call in calls if not _passes_on(call)), None)


def _passes_on(call: Any) -> bool:
    """Whether a method has `*args` or `**kwargs` and uses `super()`."""
    code = getattr(inspect.unwrap(_function_of(call)), "__code__", None)
    if code is None or not code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return False
    return "super" in code.co_names


def accepts(part: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether `part(*args, **kwargs)` fits the signature of `deciding_call`. True if the signature is not known."""
    call = deciding_call(part)
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(part, *args, **kwargs)
    except TypeError:
        return False
    return True


def check_methods(model: Any) -> None:
    """Raises ParameterError if a user has set a method on a model after its constructor: a file would not have it.

    Keras's methods other than `call`, such as the steps, do not count: they may be set. Nor does a method of the
    library that is only wrapped, for example by `tf.function`.
    """
    changed = vars(model).get("_txl_changed", set())
    names = {name for name in _methods_of_instance(model) if name == "call" or not hasattr(keras.Model, name)}
    for name in sorted(names & changed):
        method = vars(model)[name]
        if not (getattr(_function_of(method), "__module__", None) or "").startswith("txl_tf."):
            allowed = f"a method of the class {type(model).__name__}, or of a registered subclass"
            message = f"{name} was set on {model.name}: a file or clone would not have it. Make it {allowed}"
            raise ParameterError(name, method, allowed, message)


def _function_of(member: Any) -> Any:
    """The function of a property, static or class method, `tf.function` and the like; any other member as it is."""
    for name in ("fget", "func", "__func__", "python_function"):
        member = getattr(member, name, None) or member
    return member


def keras_layer() -> keras.Layer:
    """A plain layer of Keras, to look at when this library is imported.

    It has a name and a dtype. Otherwise Keras would count it in the names of a user's layers, and would fix the policy
    for all layers to come: `keras.config.set_floatx` would then have no effect.
    """
    return keras.layers.Layer(name="layer", dtype="float32")


# Attributes that Keras sets, and that can change what a layer's call computes or which losses it adds.
_WITH_EFFECT = {
    "call", "_dtype_policy", "autocast", "_convert_input_args", "_supports_masking", "activity_regularizer"
}  # fmt: skip
# The other attributes that Keras sets, and the sources of dropout keys, do not change the call.
_WITHOUT_EFFECT = {"_key_source", "_draw", *vars(keras_layer())} - _WITH_EFFECT
# What this library notes about a layer, such as its owner and its graphs, does not change the call either. The names
# of these attributes begin with `_txl_`, those of TensorFlow's own attributes with `_self_`.
_PREFIXES_WITHOUT_EFFECT = ("_txl_", "_self_")


def alike(x: Any, y: Any) -> bool:
    """Whether two layers differ only in their names and in the values of their weights.

    Then the call of one with the weights of the other is the call of the other. All attributes are compared, also those
    that a user has added, except those without effect on the call, see `_matters`:

    - numbers, texts, arrays, containers and dtype policies by their content;
    - layers by their attributes, and weights by shape and dtype;
    - initializers, seed generators and `tf.Module`s by their class alone;
    - all others must be the same object.
    """
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, keras.Layer):
        attributes = [{name: a for name, a in vars(layer).items() if _matters(name)} for layer in (x, y)]
        return alike(*attributes)
    if isinstance(x, keras.Variable):
        return (x.shape, x.dtype) == (y.shape, y.dtype)
    if isinstance(x, dict):
        return list(x) == list(y) and all(alike(x[key], y[key]) for key in x)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(alike, x, y))
    if isinstance(x, np.ndarray):
        return np.array_equal(x, y)
    unimportant = (keras.initializers.Initializer, keras.random.SeedGenerator, tf.Module)
    comparable = (str, int, float, complex, frozenset, keras.DTypePolicy)
    return isinstance(x, unimportant) or (isinstance(x, comparable) and x == y)


def _matters(name: str) -> bool:
    """Whether an attribute can change what a layer's call computes."""
    return name not in _WITHOUT_EFFECT and not name.startswith(_PREFIXES_WITHOUT_EFFECT)


class NotCacheable(TypeError):
    """A check found a part of a model that needs hidden states, so it cannot be computed from cached keys and values.

    A part that computes with its memory as if it were tensors may raise another error before: see `why_not_cached`.
    """


def why_not_cached(
    model: Any, read: Callable[[], Any], compared: Callable[[], tuple[Any, Any]] | None = None
) -> Exception | None:
    """The error that shows that a model cannot be computed from cached keys and values; `None` if it can.

    A model that contains only parts of the library can. For other models, `read` is traced, and its error is logged and
    returned. The result is stored until a part changes. After an error, the caller computes the model without a cache.
    If the error was a mistake in a part that does not concern the cache, this computation raises it again.

    Args:
        read: function that computes something with the model from a cache.
        compared: function that computes outputs for a few tokens, one by one from a cache and all in one call. They
            differ if a part mixes positions in another way than by attention, for example by a convolution. `None`:
            nothing is compared.
    """

    def find() -> Exception | None:
        """Traces `read` if the model has parts of a user."""
        parts = own_parts(model)
        if not parts:
            return None
        try:
            with tf.init_scope():
                tf.function(read, autograph=False).get_concrete_function()
                if compared is not None and _differ(model, compared):
                    raise NotCacheable("one token at a time, they give other results than in one call")
        except Exception as error:
            message = re.search("\x1b\\[1m(.*?)\x1b\\[0m", str(error), re.DOTALL)  # in the text that Keras adds
            logging.getLogger("txl_tf").warning(
                "the model cannot be computed from cached keys and values, so evaluation and generation are slower "
                "(own parts: %s): %s", ", ".join(parts), message[1] if message else error,
            )  # fmt: skip
            return error
        return None

    return model.cached_result("why_not_cached", find)


def _differ(model: Any, compared: Callable[[], tuple[Any, Any]]) -> bool:
    """Whether the two results of `compared` differ. A function with effects is not run, and the answer is false."""
    compute = tf.function(compared, autograph=False).get_concrete_function()
    return not _has_effects(compute) and not _are_close(model, *compute())


def _are_close(model: Any, x: Any, y: Any) -> bool:
    """Whether float tensors of a model are equal up to rounding, relative to the largest number."""
    rounds = precision.rounds() or is_half(tf.as_dtype(model.compute_dtype))
    x, y = (np.asarray(tf.cast(tensor, "float64")) for tensor in (x, y))
    finite = np.isfinite(y)
    largest = np.max(np.abs(y[finite]), initial=1.0)
    return bool(np.allclose(x, y, rtol=0, atol=(0.1 if rounds else 1e-3) * largest, equal_nan=True))


def _has_effects(function: Any) -> bool:
    """Whether a graph changes variables or draws random numbers. Two of its results differ without a mistake."""
    graph = function.graph.as_graph_def()
    parts = (graph.node, *(inner.node_def for inner in graph.library.function))
    return any(node.op.startswith("Assign") or "Random" in node.op for part in parts for node in part)


# ------------------------------------------------------------------------------------------------------ configurations

# Keys of a configuration for the classes of parts. A configuration has the key only if the class is a user's own.
PART_CLASSES = ("network_class", "softmax_class", "layer_class", "attention_class")

_chosen: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("chosen", default=None)


def chosen_class(name: str, default: Any) -> Any:
    """The class of a part that a constructor makes: that of the configuration that is being loaded, or `default`."""
    return (_chosen.get() or {}).get(name) or default


@contextlib.contextmanager
def choosing(config: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
    """In this block, constructors make parts of the classes that a configuration names.

    Args:
        config: a configuration that contains the results of `registered_classes`.

    Yields:
        The configuration without the names of classes.

    Raises:
        ParameterError: no class is registered under a name in the configuration.
    """
    classes = {name: keras.saving.get_registered_object(config[name]) for name in PART_CLASSES if config.get(name)}
    for name, cls in classes.items():
        if cls is None:
            allowed = "a class that is registered, see keras.saving.register_keras_serializable"
            raise ParameterError(name, config[name], allowed)
    token = _chosen.set({**(_chosen.get() or {}), **classes})
    try:
        yield {name: value for name, value in config.items() if name not in PART_CLASSES}
    finally:
        _chosen.reset(token)


def registered_classes(**parts: Any) -> dict[str, str]:
    """`{name: registered name of its class}` of the parts whose class is not the library's, for a configuration.

    A part that is `None` is left out.
    """
    own = {name: type(part) for name, part in parts.items() if part is not None}
    return {
        name: keras.saving.get_registered_name(cls)
        for name, cls in own.items()
        if not cls.__module__.startswith("txl_tf.")
    }


def checked_config(model: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the `config` of a model. Raises ParameterError unless a model that is made from it has the same parts.

    Nothing is checked for a model with only parts of the library, or if the configuration cannot be loaded.
    """
    if not own_parts(model):
        return config
    try:
        copy_of_model = type(model).from_config(config)
    except Exception:  # loading the configuration will raise the same error
        return config
    for part, other in zip(model._flatten_layers(), copy_of_model._flatten_layers(), strict=False):
        lost = sorted(_methods_of_instance(part) - _methods_of_instance(other))
        if lost and (part is not model or "call" in lost):  # other methods of a model, such as its steps, may be set
            allowed = f"a method of the class {type(part).__name__}, or of a registered subclass"
            message = f"a loaded file would not have the {lost[0]} that was set on {part.name}: make it {allowed}"
            raise ParameterError(lost[0], getattr(part, lost[0]), allowed, message)
        if type(part) is not type(other):
            allowed = f"a {type(other).__name__}, as a model made from the configuration has it"
            message = (
                f"{part.name} of {model.name} is a {type(part).__name__}, but a loaded file would have a "
                f"{type(other).__name__} instead: make it the layer_class of the network or the attention_class of the "
                "layer, and register the class"
            )
            raise ParameterError(part.name, type(part).__name__, allowed, message)
    return config


@contextlib.contextmanager
def unlocked(layer: Any) -> Generator[None, None, None]:
    """In this block, a layer that is built accepts new weights and parts.

    They are made in the scope of the `tf.distribute` strategy in which the layer's other weights were made. For a layer
    that is not built, the block changes nothing.
    """
    if not layer._tracker.locked:
        yield
        return
    layer._tracker.unlock()
    try:
        with strategy_of(layer).scope():
            yield
    finally:
        layer._tracker.lock()


def strategy_of(layer: Any) -> Any:
    """The `tf.distribute` strategy in whose scope the weights of a layer were made; without one, that of the caller."""
    strategies = (getattr(variable.value, "distribute_strategy", None) for variable in layer.variables)
    return next(filter(None, strategies), tf.distribute.get_strategy())


def in_constructor(x: Any) -> bool:
    """Whether a constructor of `x` is running.

    It may be that of a user's class or mixin, which nothing of this library wraps, so the call stack is searched.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_varnames and frame.f_locals.get(code.co_varnames[0]) is x:
            return True
        frame = frame.f_back
    return False


def build_like(current: Any, part: Any) -> None:
    """Builds a new part for the inputs of the current one, if that is built.

    The optimizer, files and caches need its weights before its first call. A layer that is neither the library's nor
    Keras's may have another `build`, so its first call builds it.
    """
    known = hasattr(part, "free_settings") or type(part).__module__.startswith("keras.")
    shape = (current.get_build_config() or {}).get("input_shape") if current.built else None
    if known and shape is not None and not part.built:
        with strategy_of(current).scope():
            part.build(shape)


def owner_of(layer: Any) -> Any:
    """The layer or model of which a `layer` is a part, or `None`."""
    return vars(layer).get("_txl_owner", lambda: None)()


def release(x: Any, part: Any) -> None:
    """Makes a layer independent of `x`, after an attribute of `x` has lost it. Its settings can then change again.

    If another attribute of `x` contains the layer, it stays a part.
    """
    others = (value for name, value in vars(x).items() if name != "_layers")  # Keras's list of all parts
    if any(layer is part for value in others for layer in as_list(value)):
        return
    x._tracker.untrack(part)  # else Keras would keep the old part and its weights
    remaining = set(map(id, x._flatten_layers()))
    for layer in part._flatten_layers():
        if id(layer) not in remaining and owner_of(layer) is x:
            del vars(layer)["_txl_owner"]


def as_list(x: Any) -> list[Any]:
    """A list of the items of a list or tuple, or of one value; empty for `None`."""
    if isinstance(x, (list, tuple)):
        return list(x)
    return [] if x is None else [x]
