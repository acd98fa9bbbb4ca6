"""Which parts of a model are the library's own, and which are a user's."""

import contextlib
import contextvars
import inspect
import logging
import re

import keras
import tensorflow as tf

from txl_tf.errors import ParameterError


def is_library(part, cls):
    """Whether a layer or model is computed by the call of `cls`, the class that it has in this library.

    A call that was replaced, in a subclass, in the class or in the instance, is the user's.
    """
    call = getattr(type(part), "call", None)
    return "call" not in vars(part) and call is cls.call and call.__module__.startswith("txl_tf.")


def own_parts(model, of_keras=True):
    """The parts that a user has made other: `["Mine 'layer_0'", ...]`.

    Parts are the model and all layers in it. A part is a user's where its class is, or a method of its class.

    Args:
        of_keras: whether layers of Keras count as a user's. The library's language models have none.
    """
    layers = model._flatten_layers()
    parts = [part for part in layers if not _is_all_ours(part)]
    if not of_keras:
        parts = [part for part in parts if not type(part).__module__.startswith("keras.")]
    names = [f"{type(part).__name__} {part.name!r}" for part in parts]
    schemes = dict.fromkeys(type(getattr(layer, "scheme", None)) for layer in layers)
    # The scheme of a tagger, of its tags, is text.
    schemes = [cls for cls in schemes if hasattr(cls, "known_as") and not cls.__module__.startswith("txl_tf.")]
    # A scheme that is a Keras layer is among the parts already.
    return names + [f"{cls.__name__} 'positions'" for cls in schemes if not issubclass(cls, keras.Layer)]


def _is_all_ours(part):
    ours = [base for base in type(part).__mro__ if base.__module__.startswith("txl_tf.")]
    if not ours or ours[0] is not type(part) or "call" in vars(part):
        return False
    functions = (value for base in ours for value in vars(base).values() if inspect.isfunction(value))
    return all(function.__module__.startswith("txl_tf.") for function in functions)


def why_not_cached(model, read):
    """The error of a part of a model that cannot be computed from cached keys and values; `None` where there is none.

    A model of the library's parts alone can be cached. Of others `read` is traced, once until a part changes. An error
    in it is logged, and the model is computed without a cache, which raises the part's own errors.

    Args:
        read: function that computes something of the model from a cache.
    """
    known = model.__dict__.setdefault("_graphs", {})  # dropped when a part changes
    if "why_not_cached" not in known:
        parts, error = own_parts(model), None
        if parts:
            error = _error_of_trace(read)
        if error is not None:
            logging.getLogger("txl_tf").warning(
                "%s cannot be computed from cached keys and values, so evaluation and generation are slower: %s",
                ", ".join(parts), _cause(error),
            )  # fmt: skip
        known["why_not_cached"] = error
    return known["why_not_cached"]


def _error_of_trace(read):
    try:
        with tf.init_scope():
            tf.function(read, autograph=False).get_concrete_function()
    except Exception as error:
        return error
    return None


def _cause(error):
    """What an error says without what Keras puts around it."""
    found = re.findall("\x1b\\[1m(.*?)\x1b\\[0m", str(error), re.DOTALL)
    return found[0] if found else str(error)


# ------------------------------------------------------------------------------------------------------ configurations

# Parts whose classes are in a configuration, where they are not the library's.
PART_CLASSES = ("network_class", "softmax_class", "layer_class", "attention_class")

_chosen = contextvars.ContextVar("chosen", default=None)


def chosen_class(name, default):
    """The class that a constructor makes a part of: `default`, or that of the configuration which is being loaded."""
    return (_chosen.get() or {}).get(name) or default


@contextlib.contextmanager
def choosing(config):
    """Constructors in this block make parts of the classes that a configuration names.

    Args:
        config: a configuration with results of `registered_classes`.

    Yields:
        The configuration without the names of classes.

    Raises:
        ParameterError: no class of the name is registered.
    """
    found = {name: keras.saving.get_registered_object(config[name]) for name in PART_CLASSES if config.get(name)}
    for name, cls in found.items():
        if cls is None:
            allowed = "a class that is registered, see keras.saving.register_keras_serializable"
            raise ParameterError(name, config[name], allowed)
    token = _chosen.set({**(_chosen.get() or {}), **found})
    try:
        yield {name: value for name, value in config.items() if name not in PART_CLASSES}
    finally:
        _chosen.reset(token)


def registered_classes(**parts):
    """`{name: registered name of the class}` for a configuration, of the parts that are not the library's."""
    own = {name: type(part) for name, part in parts.items() if part is not None}
    return {
        name: keras.saving.get_registered_name(cls)
        for name, cls in own.items()
        if not cls.__module__.startswith("txl_tf.")
    }


def checked_config(model, config):
    """The configuration of a model. Raises ParameterError unless a model that is made from it has the same parts."""
    is_part = vars(model).get("_owner", lambda: None)() is not None
    if is_part or not own_parts(model):
        return config
    try:
        again = type(model).from_config(config)
    except Exception:  # whoever makes a model from it gets the same error
        return config
    for part, other in zip(model._flatten_layers(), again._flatten_layers(), strict=False):
        if type(part) is not type(other) or ("call" in vars(part)) != ("call" in vars(other)):
            allowed = f"a {type(other).__name__}, as a model made from the configuration has it"
            message = (
                f"{part.name} of {model.name} is a {type(part).__name__}, and a loaded file would have a "
                f"{type(other).__name__} there: make it the layer_class of the network or the attention_class of the "
                "layer, and register the class"
            )
            raise ParameterError(part.name, type(part).__name__, allowed, message)
    return config
