"""The base class of all layers, by Keras's conventions: masks, shapes and dtypes of outputs, errors of calls."""

import inspect
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from txl_tf.calls import bind_call, check_true_or_false
from txl_tf.errors import CallError, ParameterError, brief
from txl_tf.kernels.shapes import Tensor
from txl_tf.kernels.watching import AttentionRecord, watching
from txl_tf.nn.arguments import arguments_of, check_own_arguments
from txl_tf.nn.bases import MixedIntoLayer
from txl_tf.nn.checkpointed import Checkpointed
from txl_tf.nn.checks import check_width
from txl_tf.nn.dropping import Dropping
from txl_tf.nn.frozen import freeze, with_frozen
from txl_tf.nn.masks import mask_of, with_mask
from txl_tf.nn.parts import check_methods
from txl_tf.nn.quantization import Unquantized
from txl_tf.nn.settings import Settings, remember_graph

_KNOWN_RANK = "a tensor with a known number of dimensions"
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


def _is_tensor(x: Any) -> bool:
    """Whether a value is a tensor or a symbolic tensor of Keras."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _shape_or_value(x: Any) -> Any:
    """The shape of a tensor or of a symbolic tensor of Keras. Another value is returned unchanged."""
    return tuple(x.shape) if _is_tensor(x) else x


def _has_shape(value: Any) -> bool:
    """Whether a value is a tensor or a symbolic tensor, or a structure that contains one."""
    return any(map(_is_tensor, keras.tree.flatten(value)))


def _has_unknown_rank(value: Any) -> bool:
    """Whether a value is a tensor whose number of dimensions a graph does not know, or a structure with one."""
    leaves: list[Any] = keras.tree.flatten(value)
    return any(_is_tensor(x) and tf.TensorShape(x.shape).rank is None for x in leaves)


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


def check_switches_of_call(layer: Any, kwargs: dict[str, Any]) -> None:
    """Raises ArgumentTypeError if a call gets a switch, such as `training`, that is neither true, false nor a tensor.

    Switches are `training`, and the arguments of the call that are annotated as `bool`. Keras lets a caller give them
    only by name.
    """
    others = [name for name, x in kwargs.items() if x is not None and type(x) is not bool and not _is_tensor(x)]
    if others:
        parameters = inspect.signature(layer.call).parameters
        switches = ["training", *(name for name, x in parameters.items() if x.annotation in (bool, "bool"))]
        check_true_or_false(**{name: kwargs[name] for name in others if name in switches})


class CheckedCalls(MixedIntoLayer):
    """Mixin of layers and models: a call that does not fit the signature raises an error that names the argument.

    Raises:
        ArgumentTypeError: see `check_switches_of_call`.
        UnknownArgumentError: the call has no such argument.
        CallError: a required argument is missing; there are too many; or an argument that is no tensor was given by
            position, which Keras does not allow.
        ParameterError: the call failed, and the graph does not know the number of dimensions of an argument.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = memories_by_name(self, args, kwargs)
        check_switches_of_call(self, kwargs)
        try:
            return super().__call__(*args, **kwargs)
        except (TypeError, ValueError) as error:
            # The same error of a part names an argument of that part.
            if isinstance(error, ParameterError) and error.allowed != _KNOWN_RANK:
                raise
            called = type(self).__name__
            signature = inspect.signature(self.call)
            given = bind_call(called, signature, args, kwargs)  # raises an error unless the call fits the signature
            names = list(signature.parameters)
            unknown = [name for name, value in given.arguments.items() if _has_unknown_rank(value)]
            if unknown:
                message = f"{called}(): {unknown[0]} must be {_KNOWN_RANK}; tf.ensure_shape can set it"
                raise ParameterError(unknown[0], given.arguments[unknown[0]], _KNOWN_RANK, message) from error
            options = [
                name for name, x in zip(names, args, strict=False) if not _has_shape(x) and name in given.arguments
            ]
            if options and "Only input tensors" in str(error):
                by_name = ", ".join(f"{name}={brief(given.arguments[name])}" for name in options)
                message = f"{called}(): only tensors can be given by position; write {by_name}"
                raise CallError(called, list(args), names, message) from None
            raise

    def rematerialized_call(self, layer_call: Any, *args: Any, **kwargs: Any) -> Any:
        """Keras's method: the call of a layer that was made in a `keras.RematScope`.

        TensorFlow computes the call again for the gradients. It treats arguments that are given by name as constants,
        and drops the masks of tensors. So this method gives all floating-point tensors by position, and gives them
        their masks back. It draws the dropout key of the layer once, for both computations.
        """
        parameters = inspect.signature(self.call).parameters
        if isinstance(self, Dropping) and "dropout_key" in parameters:
            x = args[0] if args else kwargs[next(iter(parameters))]
            key = self.key_of_call(keras.tree.flatten(x)[0], kwargs.get("training"), kwargs.get("dropout_key"))
            kwargs["dropout_key"] = key
        leaves: list[Any] = keras.tree.flatten((args, kwargs))
        floats = [i for i, x in enumerate(leaves) if tf.is_tensor(x) and x.dtype.is_floating]
        masks = {i: mask_of(leaves[i]) for i in floats}

        def by_position(*tensors: Any) -> Any:
            filled = list(leaves)
            for i, x in zip(floats, tensors, strict=True):
                filled[i] = x if masks[i] is None else with_mask(x, masks[i])
            same_args, same_kwargs = keras.tree.pack_sequence_as((args, kwargs), filled)
            return layer_call(*same_args, **same_kwargs)

        call = super().rematerialized_call(by_position, *args, **kwargs)
        tensors = [leaves[i] for i in floats]
        return lambda *_, **__: call(*tensors)


class Attending(MixedIntoLayer):
    """Mixin of layers that attend by `attend` of `txl_tf/kernels/attending.py`, once in a call."""

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

        Raises ParameterError if a part, or a method of the model itself, was replaced after the constructor, or if a
        user's subclass has an argument of its own, see `check_own_arguments`: the configuration would not have it.
        """
        parts = self._flatten_layers(include_self=False)
        changed = next((part for part in parts if "_txl_replaced" in vars(part)), None)  # see `change_part`
        if changed is not None and not self.restores_parts:
            message = (
                f"{vars(changed)['_txl_replaced']} was set after {self.name} was made: a file or clone would not have "
                f"it. Set it in the constructor of a subclass of {type(self).__name__}"
            )
            allowed = "a part that the constructor makes"
            raise ParameterError(changed.name, type(changed).__name__, allowed, message)
        check_methods(self)
        check_own_arguments(self)
        return {**super().get_config(), **arguments_of(self)}

    def get_build_config(self) -> dict[str, Any] | None:
        """Keras's method: the shapes for `build`, and what is frozen. `None` if the layer is not built."""
        return with_frozen(super().get_build_config(), self)

    def build_from_config(self, config: Any) -> None:
        """Keras's method: builds a layer from a file, and freezes what was frozen."""
        shapes = dict(config or {})
        frozen = shapes.pop("frozen", None)
        super().build_from_config(shapes)
        freeze(self, frozen)

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
