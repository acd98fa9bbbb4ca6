"""Checks of calls of the public functions in `txl_tf.layers`: names, number, kinds and shapes of the arguments.

The functions themselves check nothing: layers call them with checked arguments. `txl_tf.layers` has the same functions
with these checks: a wrong call raises an error that names the argument, and shows how to write the call.

Where a function takes a tensor, lists and NumPy arrays become tensors; only masks and dropout keys stay as they are.
Where it takes a float tensor, they get the dtype that `_dtype_of` finds in the same call. In functions whose tensors
may have different dtypes (`mixed`), float arrays keep their dtypes.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import keras
import numpy as np
import tensorflow as tf

from txl_tf.calls import bind_call, check_true_or_false, with_signature
from txl_tf.config.checks import RATE, is_integer, is_number
from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Tensor
from txl_tf.nn.checks import (
    as_array,
    as_ids,
    check_key,
    check_length,
    check_sizes,
    check_tensors,
    described,
    shown,
    size_of,
    tensor_error,
)
from txl_tf.nn.embedding import check_ids
from txl_tf.nn.masks import as_bool, checked_numbers
from txl_tf.taggers.crf import checked_tags
from txl_tf.taggers.lattice import DISTANCES

Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = dict[str, Any]  # {name: value}
Sizes = dict[str, Any]  # {name of a dimension: its size in the arguments that were checked before}


class Shapes(NamedTuple):
    """The kinds and shapes that the arguments of a function must have.

    Attributes:
        arguments: `{name: description}`, in the order in which they are checked. A description is a kind of tensor with
            its dimensions, as in `check_tensors`, or a key of `_OTHERS`. "?" after the kind allows `None`. Three more
            kinds of tensors are possible: "ids", integers, also as whole numbers in floats; "mask", see `_check_mask`;
            and "floats", a list of tensors, see `_checked_list`. Arguments that are missing here are left to `check`
            and to the function.
        check: function of all arguments and the sizes of their dimensions, which raises ParameterError if some do not
            fit each other. It may replace arguments by tensors. `None` if nothing more is to be checked.
        mixed: whether tensors may have different floating-point dtypes.
        layer: for error messages, the layer that computes the same and makes the weights itself, as the function of the
            original program does; "" if there is none.
        symbolic: the names of the arguments that may be symbolic tensors of Keras. All others are refused.
    """

    arguments: dict[str, str]
    check: Callable[[Arguments, Sizes], None] | None = None
    mixed: bool = False
    layer: str = ""
    symbolic: tuple[str, ...] = ()


def checked(name: str, function: Function) -> Function:
    """Returns `function` with checks of its arguments, those of `SHAPES[name]`. Errors call the function `name`."""
    signature = inspect.signature(function)
    shapes = SHAPES[name]
    switches = [parameter.name for parameter in signature.parameters.values() if parameter.annotation in (bool, "bool")]
    hint = f". The layer {shapes.layer} makes the weights itself" if shapes.layer else ""

    # In a tf.function of a user, AutoGraph would convert all functions that `call` uses. None of them needs it.
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = bind_call(name, signature, args, kwargs, hint)
        for argument, value in given.arguments.items():
            if argument not in shapes.symbolic:
                _refuse_symbolic(name, argument, value)
        check_true_or_false(**{switch: given.arguments[switch] for switch in switches if switch in given.arguments})
        try:
            _check(given, shapes)
        except ParameterError as error:
            # A value without a shape, such as a size in the place of a kernel, suggests that the caller has passed the
            # arguments of the original program's function. The message then names the layer that takes them.
            if hint and not hasattr(error.value, "shape"):
                raise type(error)(error.name, error.value, error.allowed, f"{error}{hint}") from None
            raise
        return function(*given.args, **given.kwargs)

    call.__module__ = "txl_tf.layers"  # where pickle finds it
    return cast("Function", with_signature(call, signature))


def _check(given: inspect.BoundArguments, shapes: Shapes) -> None:
    """Checks the arguments of a call. In `given`, sets defaults, and replaces lists and arrays by tensors.

    Raises:
        ParameterError: an argument has another kind or shape, or arguments do not fit each other.
    """
    given.apply_defaults()
    arguments = given.arguments
    has_no_memory = "mems" in arguments and arguments["mems"] is None
    sizes: Sizes = {"mem_len": 0} if has_no_memory else {}
    call_dtype = _dtype_of(arguments, shapes)
    for name, description in shapes.arguments.items():
        kind, *dims = description.split()
        value = arguments[name]
        if value is None and kind.endswith("?"):
            continue
        kind = kind.rstrip("?")
        if kind in _OTHERS:
            _OTHERS[kind](name, value)
            if is_integer(value):
                sizes[name] = value
        elif kind == "mask":
            _check_mask(name, value, dims, sizes)
        elif kind == "floats":
            arguments[name] = _checked_list(name, value, dims, sizes, call_dtype)
        else:
            arguments[name] = _checked_tensor(name, value, kind, dims, sizes, call_dtype, shapes.mixed)
    if shapes.check is not None:
        shapes.check(arguments, sizes)


def _refuse_symbolic(function: str, name: str, value: Any) -> None:
    """Raises ParameterError if an argument of the `function`, or an element of its list, is a symbolic tensor."""
    if isinstance(value, (list, tuple)):
        for i, element in enumerate(value):
            if keras.backend.is_keras_tensor(element):
                _refuse_symbolic(function, f"{name}[{i}]", element)
    elif keras.backend.is_keras_tensor(value):
        allowed = f"no symbolic tensor of Keras: call {function} in the method call of a layer of yours"
        raise tensor_error(name, value, allowed)


def _dtype_of(arguments: Arguments, shapes: Shapes) -> tuple[str, Any]:
    """Returns the argument that sets the dtype of a call, and this dtype: `(name, dtype)`.

    It is the first float tensor or, without one, the first float array; without both, the result is `("", float32)`.
    """
    names = [name for name, description in shapes.arguments.items() if description.split()[0] in ("float", "float?")]
    values = [(name, arguments[name]) for name in names if _is_tensor_or_array(arguments[name])]
    values.sort(key=lambda pair: isinstance(pair[1], np.ndarray))  # tensors first, then arrays, each in their order
    dtypes = [(name, tf.as_dtype(x.dtype)) for name, x in values]
    return next(((name, dtype) for name, dtype in dtypes if dtype.is_floating), ("", tf.float32))


def _is_tensor_or_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _checked_tensor(
    name: str,
    value: Any,
    kind: str,
    dims: Sequence[str],
    sizes: Sizes,
    call_dtype: tuple[str, tf.DType],
    mixed: bool = True,
) -> Any:
    """Returns a value as a tensor of this kind and shape. Raises ParameterError if it is no such tensor.

    Args:
        name, value: the argument.
        kind, dims: see `Shapes`.
        sizes: sizes of dimensions. New ones are added.
        call_dtype: `(name, dtype)` from `_dtype_of`.
        mixed: see `Shapes`.
    """
    dtype_from, dtype = call_dtype
    plain_kind = "number" if kind == "ids" else kind
    if isinstance(value, (list, tuple, np.ndarray, np.generic)) or (is_number(value) and list(dims) == ["..."]):
        keeps_dtype = kind != "float" or (mixed and isinstance(value, np.ndarray))
        value = _as_tensor(name, value, described(kind, dims, sizes), None if keeps_dtype else dtype)
    check_tensors(sizes, **{name: (value, " ".join([plain_kind, *dims]))})
    if kind == "ids" and not keras.backend.is_keras_tensor(value):
        return as_ids(name, value)
    if kind == "float" and not mixed and tf.as_dtype(value.dtype) != dtype:
        raise tensor_error(name, value, f"{dtype.name}, as {dtype_from}")
    return value


def _as_tensor(name: str, value: Any, allowed: str, dtype: Any) -> Any:
    """Returns a list or an array of numbers as a tensor.

    A value that NumPy does not read as bools, integers or floats is returned unchanged: the checks that follow refuse
    it.

    Args:
        name: the argument, for the error.
        value: list, tuple, array or number.
        allowed: what is allowed, for the error.
        dtype: dtype of the tensor for a list, a number of Python or an array of floats. NumPy's arrays of integers and
            bools keep their dtypes. `None`: the tensor gets the dtype that NumPy has or finds.

    Raises:
        ParameterError: the lists in a list have different lengths.
    """
    array = as_array(name, value, allowed)
    if array.dtype.kind not in "iufb":
        return value
    if dtype is not None and (array.dtype.kind == "f" or not isinstance(value, (np.ndarray, np.generic))):
        return tf.cast(array, dtype)
    return tf.convert_to_tensor(array)


def _checked_list(name: str, value: Any, dims: Sequence[str], sizes: Sizes, call_dtype: tuple[str, tf.DType]) -> Any:
    """Returns a list of float tensors: the elements of `value`, each checked as by `_checked_tensor`.

    The last of `dims` is "?" if elements may be `None`. The sizes of a dimension may differ from element to element, so
    they are not added to `sizes`.

    Raises:
        ParameterError: `value` is not a list or tuple, is empty, or an element is wrong.
    """
    may_be_none = dims[-1] == "?"
    dims = [dim for dim in dims if dim != "?"]
    if not isinstance(value, (list, tuple)) or not value:
        allowed = f"a list of tensors, {described('float', dims, sizes)}"
        raise ParameterError(name, value, allowed, f"{name} must be {allowed}, got {shown(value)}")
    return [
        None if x is None and may_be_none else _checked_tensor(f"{name}[{i}]", x, "float", dims, {**sizes}, call_dtype)
        for i, x in enumerate(value)
    ]


def _check_mask(name: str, mask: Any, dims: Sequence[str], sizes: Sizes) -> None:
    """Raises ParameterError unless a mask consists of bools or of numbers 0 and 1, and has the right shape.

    It must have at least two dimensions and broadcast to `dims`. If "=" comes before `dims`, it must have their shape.
    """
    exact = dims[0] == "="
    dims = dims[1:] if exact else dims
    allowed = f"a mask of bool or of numbers 0 and 1, {described('', dims, sizes)}"
    if not keras.backend.is_keras_tensor(mask):
        mask = checked_numbers(name, mask)
    shape = tf.TensorShape(mask.shape)
    if shape.rank is None:
        return
    full_shape: list[Any] = [size_of(dim, sizes) for dim in dims]  # `None` for unknown sizes
    if "..." in dims:  # stands for any number of dimensions, which `sizes` has as one shape
        leading = sizes.get("...", tf.TensorShape([]))
        at = dims.index("...")
        full_shape[at : at + 1] = [*leading] if leading.rank is not None else []
    fits = shape.is_compatible_with(full_shape) if exact else shape.rank > 1 and _broadcasts_to(shape, full_shape)
    if not fits:
        raise tensor_error(name, mask, allowed)


def _broadcasts_to(shape: tf.TensorShape, full_shape: Sequence[Any]) -> bool:
    """Whether a shape broadcasts to `full_shape`. Unknown sizes, `None`, fit every size."""
    sizes = [None] * max(len(full_shape) - len(shape), 0) + shape.as_list()
    pairs = zip(sizes, full_shape, strict=False)
    return len(shape) <= len(full_shape) and all(size in (None, 1, full) or full is None for size, full in pairs)


# -------------------------------------------------------------------------------------------- arguments without shape


def _check_number(name: str, value: Any) -> None:
    if not is_number(value):
        raise ParameterError(name, value, "a number")


def _check_dtype(name: str, value: Any) -> None:
    """Raises ParameterError unless a value names a floating-point dtype.

    Numbers and arrays are refused. `tf.as_dtype` would take them: a number as a member of its enumeration of dtypes, an
    array for the dtype that it has.
    """
    as_dtype: Any = tf.as_dtype
    try:
        is_float = isinstance(value, (str, type, np.dtype, tf.DType)) and as_dtype(value).is_floating
    except TypeError:
        is_float = False
    if not is_float:
        raise ParameterError(name, value, "a floating-point dtype, such as float32")


# Kinds of arguments whose descriptions have no dimensions: `{kind: function that checks a name and a value}`.
_OTHERS: dict[str, Callable[[str, Any], None]] = {
    "size": lambda name, value: check_sizes(**{name: value}),  # a size of a weight: an integer from 1 on
    "length": check_length,  # an integer from 0 on
    "scalar": _check_number,
    "rate": RATE,
    "dtype": _check_dtype,
    "key": check_key,
}


# ------------------------------------------------------------------------------------------- checks of single functions


def _check_in_range(name: str, ids: Any, n: Any) -> None:
    """Raises ParameterError if an id is negative, or `n` or more. In a graph, ids are not checked."""
    if tf.executing_eagerly() and n is not None:
        check_ids(name, np.asarray(ids), n)


def _rank_of(name: str, value: Any) -> int:
    """The number of dimensions of a tensor; 0 for another value. Raises ParameterError if a graph does not know it."""
    rank = tf.TensorShape(getattr(value, "shape", ())).rank
    if rank is None:
        raise tensor_error(name, value, "a tensor whose number of dimensions is known")
    return rank


def _check_scores(arguments: Arguments, sizes: Sizes) -> None:
    """Checks `position_scores`, and replaces a list with the scores of each head by one tensor. `None` stays `None`.

    The tensor is `[n_head, ..., tgt_len, keys]`; or `[n_head, tgt_len, keys]`, the same scores for all rows.
    """
    scores = arguments["position_scores"]
    if scores is None:
        return
    call_dtype = ("q", tf.as_dtype(arguments["q"].dtype))
    if isinstance(scores, list) and scores and all(map(_is_tensor_or_array, scores)):
        keys = {"keys": sizes["keys"]} if "keys" in sizes else {}  # the other sizes are checked in the whole tensor
        of_heads = [
            _checked_tensor(f"position_scores[{i}]", x, "float", ["...", "keys"], {**keys}, call_dtype, mixed=False)
            for i, x in enumerate(scores)
        ]
        for i, x in enumerate(of_heads):
            if not tf.TensorShape(x.shape).is_compatible_with(of_heads[0].shape):
                allowed = f"of the shape of position_scores[0], {[*of_heads[0].shape]}"
                raise tensor_error(f"position_scores[{i}]", x, allowed)
        scores = tf.stack(of_heads)
    same_for_all_rows = _rank_of("position_scores", scores) == 3
    dims = ["n_head", "tgt_len", "keys"] if same_for_all_rows else ["n_head", "...", "tgt_len", "keys"]
    arguments["position_scores"] = _checked_tensor(
        "position_scores", scores, "float", dims, sizes, call_dtype, mixed=False
    )


def _check_attn_mask(arguments: Arguments, sizes: Sizes) -> None:
    """Raises ParameterError unless `attn_mask` fits: one mask for all heads or, with four dimensions, for each head."""
    mask = arguments["attn_mask"]
    if mask is None:
        return
    for_each_head = _rank_of("attn_mask", mask) == 4
    leading = ["batch", "n_head"] if for_each_head else ["batch"]
    _check_mask("attn_mask", mask, [*leading, "tgt_len", "mem_len+tgt_len"], sizes)


def _check_heads(arguments: Arguments, sizes: Sizes) -> None:
    """Raises ParameterError unless `n_head` divides the width of the kernels, and `attn_mask` fits."""
    if sizes["width"] % arguments["n_head"]:
        raise ParameterError("n_head", arguments["n_head"], f"a divisor of {sizes['width']}, the width of all heads")
    _check_attn_mask(arguments, sizes)


def _check_embedding(arguments: Arguments, sizes: Sizes) -> None:
    """Raises ParameterError unless cutoffs, tables and projections fit each other, and the tables contain all ids."""
    tables, projs, cutoffs, d_proj = (arguments[name] for name in ("tables", "projs", "cutoffs", "d_proj"))
    if not isinstance(cutoffs, (list, tuple)) or not all(map(is_integer, cutoffs)):
        raise ParameterError("cutoffs", cutoffs, "a list of integers")
    if len(tables) not in (1, len(cutoffs) + 1):
        allowed = f"one table, or one for each of the {len(cutoffs) + 1} clusters"
        raise ParameterError("tables", len(tables), allowed)
    _check_projections(tables, projs, len(tables), d_proj)
    ends = [0, *cutoffs]
    for i in range(len(cutoffs) if len(tables) > 1 else 0):  # the last table has no cutoff at its end
        _check_rows(f"tables[{i}]", tables[i], ends[i + 1] - ends[i])
    n_token = sum(table.shape[0] for table in tables)
    _check_in_range("x", arguments["x"], n_token)


def _check_rows(name: str, table: Tensor, rows: int) -> None:
    if table.shape[0] != rows:
        raise tensor_error(name, table, f"float [{rows}, width], a row for each of its words")


def _check_projections(tables: Any, projs: Any, number: int, d_proj: int) -> None:
    """Raises ParameterError unless each of `number` clusters has a projection from its table's width to `d_proj`.

    The projection may be `None` if the table has the width `d_proj`. A single table belongs to all clusters.
    """
    if len(projs) != number:
        raise ParameterError("projs", len(projs), f"a list of {number}, a projection or None for each cluster")
    for i, proj in enumerate(projs):
        table = tables[min(i, len(tables) - 1)]
        if proj is None and table.shape[1] != d_proj:
            allowed = f"float [{table.shape[1]}, d_proj={d_proj}], because the table has another width than d_proj"
            raise ParameterError(f"projs[{i}]", None, allowed)
        if proj is not None and tuple(proj.shape) != (table.shape[1], d_proj):
            raise tensor_error(f"projs[{i}]", proj, f"float [{table.shape[1]}, d_proj={d_proj}]")


def _check_softmax(arguments: Arguments, sizes: Sizes) -> None:
    """Raises ParameterError unless the weights of an adaptive softmax fit each other, and `target`, if any, fits."""
    hidden, tables, projs, biases, clusters = (
        arguments[name] for name in ("hidden", "tables", "projs", "biases", "clusters")
    )
    n_words = [bias.shape[0] for bias in biases]
    if len(tables) not in (1, len(biases)):
        raise ParameterError("tables", len(tables), f"one table, or one for each of the {len(biases)} clusters")
    for i, table in enumerate(tables):
        _check_rows(f"tables[{i}]", table, sum(n_words) if len(tables) == 1 else n_words[i])
    _check_projections(tables, projs, len(biases), hidden.shape[-1])
    if (clusters is None) != (len(biases) == 1):
        allowed = "None with one cluster, and (weight, bias) with several"
        raise ParameterError("clusters", clusters, allowed, f"clusters must be {allowed}: there are {len(biases)}")
    if clusters is not None:
        if not isinstance(clusters, (list, tuple)) or len(clusters) != 2:
            raise ParameterError("clusters", clusters, "(weight, bias)")
        weight, bias = clusters
        known_sizes = {"clusters": len(biases) - 1, "d_embed": tables[0].shape[1]}
        call_dtype = ("hidden", tf.as_dtype(hidden.dtype))
        arguments["clusters"] = (
            _checked_tensor("clusters[0]", weight, "float", ["clusters", "d_embed"], known_sizes, call_dtype),
            _checked_tensor("clusters[1]", bias, "float", ["clusters"], known_sizes, call_dtype),
        )
    target = arguments.get("target")
    if target is None:
        return
    if not tf.TensorShape(target.shape).is_compatible_with(hidden.shape[:-1]):
        raise tensor_error("target", target, f"int {[*hidden.shape[:-1]]}, an id for each vector of hidden")
    if "bin_capacities" not in arguments:
        _check_in_range("target", target, sum(n_words))
    elif tf.executing_eagerly():
        # With static shapes, a negative target does not count.
        _check_in_range("target", np.maximum(target, 0), sum(n_words))


def _check_crf(arguments: Arguments, sizes: Sizes) -> None:
    """Raises ParameterError if an element has a tag outside the ids. In a graph, tags are not checked."""
    if "tags" in arguments and tf.executing_eagerly():
        mask = arguments["mask"]
        is_element = tf.ones_like(arguments["tags"], tf.bool) if mask is None else tf.cast(mask, tf.bool)
        checked_tags(arguments["tags"], is_element, sizes["n_tag"])


def _check_angles(arguments: Arguments, sizes: Sizes) -> None:
    """Raises ParameterError unless `pos` and `i` are numbers or arrays that broadcast with each other."""
    shapes = {}
    for name in ("pos", "i"):
        x = np.asarray(arguments[name])
        if x.dtype.kind not in "iuf":
            raise ParameterError(name, arguments[name], "a number or an array of numbers")
        shapes[name] = x.shape
    try:
        np.broadcast_shapes(*shapes.values())
    except ValueError:
        allowed = f"an array that broadcasts with pos of shape {list(shapes['pos'])}"
        message = f"i must be {allowed}, got shape {list(shapes['i'])}"
        raise ParameterError("i", arguments["i"], allowed, message) from None


def _check_pairs(arguments: Arguments, sizes: Sizes) -> None:
    """Raises ParameterError unless `names` are names of distances of FLAT."""
    names = arguments["names"]
    if not isinstance(names, (list, tuple)) or not names or any(name not in DISTANCES for name in names):
        raise ParameterError("names", names, f"a list of some of {', '.join(DISTANCES)}")


def _check_pairwise(arguments: Arguments, sizes: Sizes) -> None:
    """Raises ParameterError unless `r` fits: with `index`, a row for each distinct pair; without, one for each pair."""
    has_index = arguments["index"] is not None  # which row of `r` each pair has
    description = "float distinct n_head d_head" if has_index else "float n_head batch tgt_len keys d_head"
    check_tensors(sizes, r=(arguments["r"], description))


def _check_shifted(arguments: Arguments, sizes: Sizes) -> None:
    """Raises ParameterError if `first` is greater than the number of queries."""
    first, tgt_len = arguments["first"], sizes.get("tgt_len")
    if is_integer(first) and tgt_len is not None and first > tgt_len:
        raise ParameterError("first", first, f"from 0 to {tgt_len}, the number of queries")


def _check_row_axis(arguments: Arguments, sizes: Sizes) -> None:
    """Raises ParameterError unless `row_axis` is `None` or an axis of `x`."""
    axis = arguments["row_axis"]
    rank = tf.TensorShape(arguments["x"].shape).rank
    if axis is not None and not (is_integer(axis) and (rank is None or 0 <= axis < rank)):
        axes = f", from 0 to {rank - 1}" if rank else ""
        raise ParameterError("row_axis", axis, f"None, or an axis of x{axes}")


def _check_reset(arguments: Arguments, sizes: Sizes) -> None:
    """Checks the arguments of `document_mask` that say where documents begin, and converts `done` to bool.

    Raises:
        ParameterError: `reset_token` and `done` are both `None`; `reset_token` is not an integer, or there are no
            tokens in which to find it; `done` is no mask of the tokens; or `attn_mask` has fewer keys than queries.
    """
    tokens, reset_token, done = (arguments[name] for name in ("tokens", "reset_token", "done"))
    if done is not None:
        _check_mask("done", done, ["=", "batch", "tgt_len"], sizes)
        if not keras.backend.is_keras_tensor(done):
            arguments["done"] = as_bool("done", done)
    elif reset_token is None:
        raise ParameterError("reset_token", None, "an integer, the id of a token, or left out where done is given")
    if reset_token is not None and not is_integer(reset_token):
        raise ParameterError("reset_token", reset_token, "an integer, the id of a token")
    if reset_token is not None and tokens is None:
        raise ParameterError("tokens", None, "int [batch, tgt_len] where a reset_token is given")
    if sizes.get("keys", 0) < sizes.get("tgt_len", 0):
        allowed = "float [tgt_len, mem_len + tgt_len], see create_mask"
        raise tensor_error("attn_mask", arguments["attn_mask"], allowed)


def _check_ids_in_table(arguments: Arguments, sizes: Sizes) -> None:
    _check_in_range("ids", arguments["ids"], sizes.get("rows"))


def _check_labels(arguments: Arguments, sizes: Sizes) -> None:
    _check_in_range("labels", arguments["labels"], sizes.get("classes"))


# Names of the original program, of the articles and of other implementations, and what to write in their place.
OTHER_NAMES = {
    "_create_mask": "txl_tf.layers.create_mask",
    "_cache_mem": "txl_tf.TransformerXL, whose call returns the new memory",
    "transformer": "txl_tf.TransformerXLLM",
    "positionwise_FF": "txl_tf.layers.PositionwiseFF, or the function positionwise_ff",
    "mul_adaptive_embedding_lookup": "txl_tf.layers.mask_adaptive_embedding_lookup(..., static_shapes=True)",
    "mul_adaptive_logsoftmax": "txl_tf.layers.static_adaptive_logsoftmax",
    "ProjectedAdaptiveLogSoftmax": "txl_tf.layers.AdaptiveSoftmax",
    "PositionalEmbedding": "txl_tf.layers.positional_embedding",
    "RelPartialLearnableMultiHeadAttn": "txl_tf.layers.RelMultiHeadAttn",
    "RelPartialLearnableDecoderLayer": "txl_tf.layers.TransformerXLLayer",
    "MemTransformerLM": "txl_tf.TransformerXLLM",
    "TransfoXLModel": "txl_tf.TransformerXL",
    "TransfoXLLMHeadModel": "txl_tf.TransformerXLLM",
    "RelativeMultiHeadAttn": "txl_tf.layers.TenerAttn",
    "RelativeSinusoidalPositionalEmbedding": "txl_tf.layers.two_way_positions",
    "TransformerLayer": "txl_tf.layers.TenerLayer",
    "Four_Pos_Fusion_Embedding": "txl_tf.layers.PositionFusion",
    "MultiHead_Attention_Lattice_rel_save_gpumm": "txl_tf.layers.LatticeAttn",
    "Transformer_Encoder_Layer": "txl_tf.layers.FlatLayer",
    "ConditionalRandomField": "txl_tf.layers.CRF",
    "heads_of": "txl_tf.layers.MultiHeadAttention, whose method project returns the heads",
    "feed_forward": "txl_tf.layers.PositionWiseFFN, or the function positionwise_ff",
    "EncoderBlock": "txl_tf.layers.EncoderLayer",
    "DecoderBlock": "txl_tf.layers.DecoderLayer",
    "Encoder": "txl_tf.Transformer",
    "Decoder": "txl_tf.Transformer",
    "gelu": 'txl_tf.TransformerXLLM(activation="gelu")',
}

# ------------------------------------------------------------------------------------------- shapes of all functions

# Arguments that several functions have.
_CORE = {
    "q": "float n_head ... tgt_len d_head",
    "k": "float n_head ... keys d_head",
    "v": "float n_head ... keys any",
    "visible": "mask? n_head ... tgt_len keys",
    "scale": "scalar",
}
_SEGMENT = {"w": "float batch tgt_len d_model", "mems": "float? batch mem_len d_model"}
_DISTANCES = {
    "r": "float 1 mem_len+tgt_len d_model",
    "r_w_bias": "float n_head d_head",
    "r_r_bias": "float n_head d_head",
    "qkv_kernel": "float d_model 3*n_head*d_head",
    "r_kernel": "float d_model n_head*d_head",
}
_CONTENT = {"content_mask": "mask? = batch tgt_len mem_len+tgt_len"}
_DROPOUT = {"dropatt": "rate", "dropout_key": "key?"}
_SOFTMAX = {"hidden": "float ... d_proj", "tables": "floats rows width", "projs": "floats width d_proj ?"}
_CRF = {
    "emissions": "float batch time n_tag",
    "mask": "mask? = batch time",
    "transitions": "float n_tag n_tag",
    "start": "float? n_tag",
    "end": "float? n_tag",
}
_FEED_FORWARD = {
    "inp": "float ... d_model",
    "kernel_1": "float d_model d_inner",
    "bias_1": "float d_inner",
    "kernel_2": "float d_inner d_model",
    "bias_2": "float d_model",
}
_HEADS = {"q": "float n_head batch length d_head", "k": "float n_head batch length d_head"}


def _without(arguments: dict[str, str], *names: str) -> dict[str, str]:
    return {name: description for name, description in arguments.items() if name not in names}


SHAPES = {  # the `Shapes` of each function of `txl_tf.layers`, by its name
    "adaptive_log_probs": Shapes({**_SOFTMAX, "biases": "floats words"}, _check_softmax, True, "AdaptiveSoftmax"),
    "alibi_slopes": Shapes({"n_head": "size"}),
    "attend": Shapes({**_CORE, **_DROPOUT}, _check_scores),
    "attention_probs": Shapes(_without(_CORE, "v"), _check_scores),
    "create_look_ahead_mask": Shapes({"size": "length?"}),
    "create_mask": Shapes({"qlen": "length", "mlen": "length", "first": "length"}),
    "create_padding_mask": Shapes({"ids": "number batch keys"}, symbolic=("ids",)),
    "crf_decode": Shapes(_CRF, None, True, "CRF(n_tag)"),
    "crf_marginals": Shapes(_CRF, None, True, "CRF(n_tag)"),
    "crf_nll": Shapes({**_CRF, "tags": "ids batch time"}, _check_crf, True, "CRF(n_tag)"),
    "cross_entropy": Shapes({"logits": "float rows classes", "labels": "ids rows"}, _check_labels),
    "distance_table": Shapes(
        {"places": "length", "d_model": "size", "shift": "scalar", "dtype": "dtype"}, symbolic=("places",)
    ),
    "distinct_pairs": Shapes(
        {"pos_s": "ids batch length", "pos_e": "ids batch length", "mask": "mask? = batch length"}, _check_pairs,
        symbolic=("pos_s", "pos_e", "mask"),
    ),
    "document_mask": Shapes(
        {"attn_mask": "float tgt_len keys", "tokens": "ids? batch tgt_len", "lengths": "ids? batch"}, _check_reset,
        symbolic=("attn_mask", "tokens", "lengths", "done"),
    ),
    "dropout": Shapes({"x": "float ...", "rate": "rate", "dropout_key": "key?"}, _check_row_axis),
    "embedding_lookup": Shapes({"table": "float rows width", "ids": "ids ..."}, _check_ids_in_table),
    "get_angles": Shapes({"d_model": "size"}, _check_angles),
    "inverse_frequencies": Shapes({"d_model": "size", "dtype": "dtype"}),
    "layer_norm": Shapes(
        {"x": "float ... width", "gamma": "float width", "beta": "float width", "epsilon": "scalar"}, None, True,
        "LayerNorm()",
    ),
    "mask_adaptive_embedding_lookup": Shapes(
        {"x": "ids ...", "d_proj": "size", "tables": "floats rows width", "projs": "floats width d_proj ?",
         "dtype": "dtype"},
        _check_embedding, True, "AdaptiveEmbedding(n_token, d_embed, d_proj, cutoffs=cutoffs, div_val=div_val)",
    ),
    "mask_adaptive_logsoftmax": Shapes(
        {**_SOFTMAX, "target": "ids ...", "biases": "floats words"}, _check_softmax, True,
        "AdaptiveSoftmax(n_token, d_embed, d_proj, cutoffs=cutoffs, div_val=div_val)",
    ),
    "multihead_attn": Shapes(
        {**_SEGMENT, "o_kernel": "float width d_model", "qkv_kernel": "float d_model 3*width", "n_head": "size",
         **_CONTENT, **_DROPOUT},
        _check_heads, False, "MultiHeadAttn(d_model, n_head, d_head, dropout, dropatt)",
    ),
    "pairwise_scores": Shapes({"q": "float n_head batch tgt_len d_head", "r": "float ...",
                               "index": "ids? batch tgt_len keys"}, _check_pairwise),
    "point_wise_feed_forward_network": Shapes({"d_model": "size", "dff": "size"}),
    "positional_embedding": Shapes({"pos_seq": "float keys", "inv_freq": "float half", "bsz": "size?"}),
    "positional_encoding": Shapes({"position": "size", "d_model": "size", "dtype": "dtype"}),
    "positionwise_ff": Shapes(
        {**_FEED_FORWARD, "rate": "rate", "dropout_key": "key?"}, None, False, "PositionwiseFF(d_model, d_inner)"
    ),
    "register_positions": Shapes({}),
    "rel_multihead_attn": Shapes(
        {**_SEGMENT, **_DISTANCES, "o_kernel": "float n_head*d_head d_model", **_CONTENT, **_DROPOUT},
        _check_attn_mask, False, "RelMultiHeadAttn(d_model, n_head, d_head, dropout, dropatt)",
    ),
    "rel_shift": Shapes({"x": "number ... qlen klen", "first": "length?"}),
    "relative_positions": Shapes({"klen": "length", "clamp_len": "scalar", "dtype": "dtype"}),
    "scaled_dot_product_attention": Shapes(
        {"q": "float ... queries depth", "k": "float ... keys depth", "v": "float ... keys any",
         "mask": "mask? ... queries keys"}, None, False, "MultiHeadAttention(d_model, num_heads)",
        ("q", "k", "v", "mask"),
    ),
    "score_terms": Shapes({**_SEGMENT, **_DISTANCES, **_CONTENT}),
    "shifted_scores": Shapes(
        {"q": "float n_head ... tgt_len d_head", "r": "float n_head rows d_head", "first": "length"}, _check_shifted
    ),
    "span_distances": Shapes(
        {"pos_s": "ids batch length", "pos_e": "ids batch length"}, symbolic=("pos_s", "pos_e")
    ),
    "static_adaptive_logsoftmax": Shapes(
        {**_SOFTMAX, "target": "ids ...", "biases": "floats words"}, _check_softmax, True, "AdaptiveSoftmax"
    ),
    "tener_position_scores": Shapes({**_HEADS, "v_bias": "float n_head d_head"}, None, False, "TenerAttn"),
    "tensor2tensor_frequencies": Shapes({"d_model": "size", "dtype": "dtype"}),
    "two_way_positions": Shapes({"length": "length", "d_head": "size", "dtype": "dtype"}),
    "two_way_scores": Shapes({"q": _HEADS["q"], "r": "float 2*length d_head"}),
}  # fmt: skip
