"""The attention of the vanilla Transformer (Vaswani et al. 2017, section 3.2).

There are two kinds of masks, see `nn/masks.py`. Keras's masks are true or 1 where a query sees a key: `attention_mask`,
`mask`, `query_mask`, `value_mask` and `key_mask`. The masks of the articles (docs/articles.md) are numbers, 1 where a
key is forbidden, and broadcast to `[batch, heads, queries, keys]`: `forbidden`, and `mask` with four dimensions. A
query whose keys are all forbidden attends to all of them equally.

Shapes:
    B: batch      H: num_heads      T: queries      K: keys      D: depth, the width of a head      E: d_model
"""

import functools
from collections.abc import Sequence
from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.config import one_of
from txl_tf.config.checks import is_integer
from txl_tf.equations import score_scale
from txl_tf.errors import ParameterError, brief
from txl_tf.kernels import add_bias, head_matmul, join_heads, project
from txl_tf.kernels.attending import attention_probs
from txl_tf.kernels.dropout import dropout
from txl_tf.kernels.dtypes import wide_dtype
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.nn.arguments import LayerOptions, refusing, stored
from txl_tf.nn.base import CachedMemory, Layer
from txl_tf.nn.checks import check_heads, check_length, check_tensors, shown
from txl_tf.nn.masks import (
    SWAP_BATCH_AND_HEADS,
    as_bool,
    as_mask,
    mask_of,
    seen,
    seen_by_heads,
    seen_by_keras,
    seen_elements,
    seen_of_mask,
    with_mask,
)
from txl_tf.nn.ops import Linear
from txl_tf.nn.positions import rotate
from txl_tf.nn.settings import FREE_RATE, FREE_SEED
from txl_tf.schema import keywords_of


def create_padding_mask(ids: Tensor) -> Any:
    """1 where `ids` `[B, K]` are 0, which is padding: float32 `[B, 1, 1, K]`. Symbolic inputs of Keras are possible."""
    return keras.ops.cast(keras.ops.equal(ids, 0), "float32")[:, None, None]


def create_look_ahead_mask(size: Size) -> Tensor:
    """1 above the diagonal, where keys come after the query: float32 `[size, size]`.

    Raises:
        ParameterError: `size` is `None`, the length of a symbolic input. Use the argument `use_causal_mask=True` of a
            layer instead.
    """
    if size is None:
        message = "size must be an int or a scalar tensor, got None: give the layer use_causal_mask=True instead"
        raise ParameterError("size", size, "an int or a scalar tensor", message)
    check_length("size", size)
    positions: Any = tf.range(size)
    return tf.cast(positions[None] > positions[:, None], tf.float32)


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
    """`softmax(q k^T / sqrt(D)) v`.

    Args:
        q: `[..., T, D]`.
        k: `[..., K, D]`.
        v: `[..., K, any]`.
        mask: broadcasts to `[..., T, K]`: numbers, 1 where a key is forbidden, or bool, true where it is seen; `None`
            for no mask.

    Returns:
        `(output, attention_weights)`: `[..., T, any]` and `[..., T, K]`.
    """
    if any(keras.backend.is_keras_tensor(x) for x in (q, k, v, mask)):
        # Without the dtype, Keras would cast float64 inputs to its default.
        dtype = "float64" if wide_dtype(q, k, v) == tf.float64 else None
        return _ScaledDotProductAttention(dtype=dtype)(q, k, v, mask)
    visible = None if mask is None else seen(mask)
    # The kernels take heads as the first axis: here one.
    probs = attention_probs(q[None], k[None], visible=visible, scale=score_scale(q.shape[-1]))
    return head_matmul(probs, v[None])[0], probs[0]


@keras.saving.register_keras_serializable("txl_tf")
class _ScaledDotProductAttention(keras.layers.Layer):
    """`scaled_dot_product_attention` as a layer, for symbolic inputs of Keras."""

    def call(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
        return scaled_dot_product_attention(q, k, v, mask)


def seen_of_masks(
    sizes: Any, mask: Tensor | None = None, *, mask_name: str = "mask", attention_mask: Any = None,
    forbidden: Any = None, look_ahead_mask: Any = None, use_causal_mask: bool = False, query_mask: Any = None,
    value_mask: Any = None, key_mask: Any = None,
) -> Tensor | None:  # fmt: skip
    """Combines all masks of a call of `MultiHeadAttention`, `EncoderLayer` or `DecoderLayer` for `attention_probs`.

    Args:
        sizes: sizes by name: `num_heads`, and `batch`, `queries` and `keys`, which may be scalar tensors.
        mask, attention_mask, forbidden, use_causal_mask, query_mask, value_mask, key_mask: see `MultiHeadAttention`.
        mask_name: the name of `mask` in errors.
        look_ahead_mask: see `DecoderLayer`. If it is bool, it is true where a key is seen; `forbidden` is the reverse.

    Returns:
        bool with four dimensions that broadcasts to `[H, B, T, K]`, or `None` without masks.
    """
    queries = sizes["queries"]
    keys = sizes["keys"]
    found_sizes = sizes
    sizes = {name: size if isinstance(size, int) else None for name, size in sizes.items()}
    parts = []
    if mask is not None:
        parts.append(seen_of_mask(mask_name, mask, sizes, found_sizes))
    if attention_mask is not None:
        parts.append(seen_by_keras("attention_mask", attention_mask, sizes))
    if forbidden is not None:
        forbidden = as_mask("forbidden", forbidden)
        # `seen_by_heads` takes a bool mask that is true where a key is seen.
        article_mask = ~forbidden if forbidden.dtype.is_bool else forbidden
        parts.append(seen_by_heads("forbidden", article_mask, sizes))
    if look_ahead_mask is not None:
        parts.append(seen_by_heads("look_ahead_mask", look_ahead_mask, sizes))
    if value_mask is not None:
        parts.append(seen_elements("value_mask", value_mask, sizes, "keys", found_sizes))
    if key_mask is not None and key_mask is not value_mask:
        parts.append(seen_elements("key_mask", key_mask, sizes, "keys", found_sizes))
    if query_mask is not None:
        parts.append(seen_elements("query_mask", query_mask, sizes, "queries", found_sizes))
    if use_causal_mask:
        parts.append((tf.range(queries)[:, None] >= tf.range(keys))[None, None])
    return functools.reduce(tf.logical_and, parts) if parts else None


def heads_of(x: Tensor, linears: Sequence[Any], num_heads: int) -> list[Tensor]:
    """Projects `x` `[B, any, E]` with each linear layer, `[E, H * D]`, in one product.

    Returns:
        List of the heads of each projection, `[H, B, any, D]`.
    """
    batch, length, _ = shape_of(x)
    n = len(linears)
    kernels = [tf.cast(linear.kernel, x.dtype) for linear in linears]
    biases = [tf.cast(linear.bias, x.dtype) for linear in linears]
    kernel = kernels[0] if n == 1 else tf.concat(kernels, 1)
    bias = biases[0] if n == 1 else tf.concat(biases, 0)
    depth = kernels[0].shape[1] // num_heads
    heads = tf.reshape(add_bias(project(x, kernel), bias), [batch, length, n, num_heads, depth])
    return tf.unstack(tf.transpose(heads, [2, 3, 0, 1, 4]))  # n tensors [H, B, any, D]


def _refuse_keras_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ParameterError if the constructor of the class `name` gets those of Keras's layer, `(num_heads, key_dim)`.

    It recognises the name `key_dim`. By position, it recognises them only if the first is smaller than the second:
    `d_model` cannot be smaller than `num_heads`.
    """
    call = name + "(d_model={}, num_heads={})"
    if "key_dim" in kwargs:
        depth = kwargs["key_dim"]
        heads = kwargs.get("num_heads", args[0] if args else None)
        known = is_integer(heads) and is_integer(depth)
        allowed = "left out: d_model is the width of all heads together"
        working = call.format(heads * depth, heads) if known else call.format("num_heads * key_dim", "num_heads")
        message = f"key_dim must be {allowed}, got {brief(depth)}; write {working}"
        raise ParameterError("key_dim", depth, allowed, message)
    if len(args) > 1 and all(map(is_integer, args[:2])) and 0 < args[0] < args[1]:
        heads, depth = args[:2]
        allowed = f"a multiple of num_heads={depth}"
        working = call.format(heads * depth, heads)
        message = (
            f"d_model must be {allowed}, got {heads}; write Keras's (num_heads={heads}, key_dim={depth}) as {working}"
        )
        raise ParameterError("d_model", heads, allowed, message)


@keras.saving.register_keras_serializable("txl_tf")
class MultiHeadAttention(Layer):
    """Multi-head attention: projections `wq`, `wk`, `wv` and `dense`, all with biases.

    Call it in the article's order, `(v, k, q)`, or with Keras's names, `(query=, value=, key=)`. It is an error if
    three positional tensors could be in Keras's order.

    ```python
    attention = txl_tf.layers.MultiHeadAttention(d_model=32, num_heads=4)
    x, source = tf.random.normal([2, 3, 32]), tf.random.normal([2, 5, 32])
    output = attention(query=x, value=source)  # [2, 3, 32]
    output, weights = attention(source, source, x)  # [2, 3, 32]
    ```

    Args:
        d_model: width, a multiple of `num_heads`.
        num_heads: number of heads. (Keras's layer takes `num_heads` first, then `key_dim`, the width of a head. Here,
            the name `key_dim` and two sizes in Keras's order, if the first is smaller, are errors that show how to
            write the call.)
        rate: dropout rate of the attention weights. The article has no such dropout.
        seed: int from which dropout derives, unless the call gets a key. `None` draws one.
        positions: "rotary" rotates queries and keys by their positions, from 0 on (Su et al. 2021); `None` for no
            positions.

    Call arguments:
        v, k: `[batch, keys, d_model]`, in this order.
        q: `[batch, queries, d_model]`.
        mask: true where a key is seen: bool `[batch, keys]` or `[batch, queries, keys]`, or integers 0 and 1 `[batch,
            keys]`. Numbers with four dimensions are a mask of the article, see `forbidden`. Without a `mask`, the
            default of `value_mask` and `key_mask` is the mask that Keras passes on with `v` and `k`.
        query, value, key: Keras's names of `q`, `v` and `k`. By default, `key` is `value`.
        attention_mask: true or 1 where a key is seen, bool or numbers 0 and 1: `[queries, keys]`, `[batch, queries,
            keys]` or `[batch, num_heads, queries, keys]`, where batch, heads and queries may be 1.
        forbidden: broadcasts to `[batch, num_heads, queries, keys]`, 1 where a key is forbidden, as in the article.
        query_mask: true or 1 at queries, `[batch, queries]`; by default the mask that Keras passes on with `q`. It also
            becomes the mask of the output, whose rows at padding have no meaning.
        value_mask, key_mask: true or 1 at values and at keys, `[batch, keys]`.
        use_causal_mask: whether to hide the keys after the position of a query.
        return_attention_scores: whether to return the weights, too; by default `True` with `(v, k, q)` and `False` with
            `query=`.
        training, dropout_key: see `txl_tf.nn.dropping`.

    Returns:
        `(output, attention_weights)`: `[batch, queries, d_model]` and `[batch, num_heads, queries, keys]`; or only the
        output.

    Raises:
        ParameterError: `d_model` is not a multiple of `num_heads`, tensors or masks have other shapes, or the tensors
            seem to be in Keras's order.
    """

    free_settings = {"rate": FREE_RATE, "seed": FREE_SEED}
    fixed_settings = {"depth": ""}  # follows from d_model and num_heads
    weight_parts = ("wq", "wk", "wv", "dense")

    @refusing(_refuse_keras_arguments)
    @stored
    def __init__(
        self, d_model: int, num_heads: int, rate: float = 0.0, seed: int | None = None, positions: str | None = None,
        **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_heads(d_model, "num_heads", num_heads)
        self.start_keys(seed, rate=rate)
        self.depth = d_model // num_heads
        _check_positions(positions, d_model, num_heads)
        self.wq = Linear(d_model, dtype=self.dtype_policy, name="wq")
        self.wk = Linear(d_model, dtype=self.dtype_policy, name="wk")
        self.wv = Linear(d_model, dtype=self.dtype_policy, name="wv")
        self.dense = Linear(d_model, dtype=self.dtype_policy, name="dense")

    # The three shapes are arguments of their own, because Keras's `summary` uses only the shapes that `build` names.
    def build(self, v_shape: Any = None, k_shape: Any = None, q_shape: Any = None, **_: Any) -> None:
        self.build_parts(v_shape, self.wq, self.wk, self.wv, self.dense)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = _by_article_names(args, kwargs)
        if len(args) > 2:
            _check_order(*args[:3])
        return super().__call__(*args, **kwargs)

    def call(
        self, v: Tensor, k: Tensor, q: Tensor, mask: Tensor | None = None, attention_mask: Any = None,
        forbidden: Any = None, use_causal_mask: bool = False, return_attention_scores: bool = True,
        query_mask: Any = None, value_mask: Any = None, key_mask: Any = None, training: bool | None = None,
        dropout_key: Tensor | None = None,
    ) -> Any:  # fmt: skip
        sizes = {"d_model": self.d_model, "num_heads": self.num_heads}
        check_tensors(sizes, v=(v, "float batch keys d_model"), k=(k, "float batch keys d_model"))
        check_tensors(sizes, q=(q, "float batch queries d_model"))
        query_mask = mask_of(q) if query_mask is None else query_mask
        if mask is None:
            value_mask = mask_of(v) if value_mask is None else value_mask
            key_mask = mask_of(k) if key_mask is None else key_mask
        batch, queries, _ = shape_of(q)
        sizes |= {"batch": batch, "queries": queries, "keys": shape_of(k)[1]}
        visible = seen_of_masks(
            sizes, mask, attention_mask=attention_mask, forbidden=forbidden, use_causal_mask=use_causal_mask,
            query_mask=query_mask, value_mask=value_mask, key_mask=key_mask,
        )  # fmt: skip
        output, weights = self.attention(v, k, q, visible, self.key_of_call(q, training, dropout_key))
        if query_mask is not None:
            output = with_mask(output, as_bool("query_mask", query_mask))
        return (output, tf.transpose(weights, SWAP_BATCH_AND_HEADS)) if return_attention_scores else output

    def attention(
        self, v: Tensor, k: Tensor, q: Tensor, visible: Any = None, dropout_key: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`(output, weights)`, see `attend`. Arguments are not checked.

        Args:
            v, k, q, dropout_key: see the call.
            visible: see `attend`. Or a `CachedMemory`, which contains keys and values, and computes the attention.
        """
        if isinstance(visible, CachedMemory):
            memory: Any = visible
            return memory.attention(self, v, k, q)
        if q is k and k is v:
            q, k, v = self.project(q, self.wq, self.wk, self.wv)
        else:
            (q,) = self.project(q, self.wq)
            if k is v:
                k, v = self.project(k, self.wk, self.wv)
            else:
                k, v = *self.project(k, self.wk), *self.project(v, self.wv)
        return self.attend(self.turned(q), self.turned(k), v, visible, dropout_key)

    def project(self, x: Tensor, *layers: Any) -> list[Tensor]:
        """Projects `x` with `layers`, which are some of `wq`, `wk` and `wv`. Returns a list of `[H, B, any, D]`."""
        return heads_of(tf.cast(x, self.compute_dtype), layers, self.num_heads)

    def turned(self, heads: Tensor, first: Size = 0) -> Tensor:
        """Queries or keys `[H, B, any, D]`, rotated by their positions from `first` on if `positions` is "rotary"."""
        if self.positions is None:
            return heads
        return rotate(heads, first + tf.range(shape_of(heads)[2]))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Any = None, dropout_key: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The attention of all heads, concatenated and projected. Arguments are not checked.

        Args:
            q, k, v: `[H, B, any, D]`, from `project`; queries and keys `turned`.
            visible: bool that broadcasts to `[H, B, T, K]`, true where a key is seen; `None` for all.
            dropout_key: key for the dropout of the attention weights; `None` for no dropout.

        Returns:
            `(output, weights)`: `[B, T, E]`, and the weights before dropout, `[H, B, T, K]`.
        """
        probs = attention_probs(q, k, visible=visible, scale=score_scale(self.depth))
        vectors = join_heads(head_matmul(dropout(probs, self.rate, dropout_key, row_axis=1), v))
        batch, length, _ = shape_of(vectors)
        kernel, bias = self.in_compute_dtype(*self.dense.weights)
        return tf.reshape(add_bias(project(vectors, kernel), bias), [batch, length, self.d_model]), probs

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        return None  # the call itself attaches the mask of the queries to the output

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """As `OutputSpecs.compute_output_spec`, but with all arguments by name.

        That method traces the call with a new tensor for each argument, so `v` and `k` are no longer one tensor. By
        name, the order is clear all the same.
        """
        names = keywords_of(self.call)
        if len(args) > len(names):  # a user's call with `*args`
            return super().compute_output_spec(*args, **kwargs)
        return super().compute_output_spec(**dict(zip(names, args, strict=False)), **kwargs)

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        named = {name.removesuffix("_shape"): x for name, x in named.items()}
        shapes_by_name = self.named_shapes(shapes, _by_article_names(shapes, named))
        if len(shapes) > 2 and shapes[0][1] != shapes[1][1]:
            raise _order_error(shapes)
        q_shape = shapes_by_name.get("q", shapes_by_name["v"])
        weights_shape = (q_shape[0], self.num_heads, q_shape[1], shapes_by_name["v"][1])
        return (q_shape, weights_shape) if shapes_by_name["return_attention_scores"] else q_shape


def _check_positions(positions: Any, d_model: int, num_heads: int) -> None:
    """Raises ParameterError if `MultiHeadAttention` does not have such `positions`, or not for this width of a head."""
    if positions is None:
        return
    one_of(("rotary",))("positions", positions)
    if d_model // num_heads % 2:
        allowed = f"an even multiple of num_heads={num_heads}, because rotary positions rotate pairs of dimensions"
        raise ParameterError("d_model", d_model, allowed)


def _by_article_names(args: Any, named: Any) -> dict[str, Any]:
    """The keyword arguments of a call, with `q`, `v` and `k` instead of Keras's names `query`, `value` and `key`.

    With Keras's names, `return_attention_scores` is `False` unless it is given. Raises ParameterError if only one of
    `query` and `value` is given, or tensors are also given by position or by the article's names.
    """
    query, value, key = (named.get(name) for name in ("query", "value", "key"))
    rest = {name: x for name, x in named.items() if name not in ("query", "value", "key")}
    if query is value is key is None:
        return rest
    by_article = {"v": value, "k": value if key is None else key, "q": query}
    if args or query is None or value is None or rest.keys() & by_article.keys():
        name = "query" if query is None else "value"
        allowed = "given by name, without tensors by position or by the names v, k and q"
        raise ParameterError(name, named.get(name), allowed, f"query and value must both be {allowed}")
    return {"return_attention_scores": False, **rest, **by_article}


def _check_order(v: Tensor, k: Tensor, q: Tensor) -> None:
    """Raises ParameterError if positional tensors may be in Keras's order, `(query, value, key)`.

    They are certainly in the article's order if `v` and `k` are one tensor, or if `v` and `k` have the same length, and
    `q` has another length.
    """
    if v is k:
        return
    given: list[Any] = [getattr(x, "shape", None) for x in (v, k, q)]
    shapes: list[Any] = [tf.TensorShape(shape) for shape in given]
    lengths = [shape[1] if shape.rank == 3 else None for shape in shapes]
    if k is q or lengths[0] != lengths[1] or lengths[0] == lengths[2]:
        raise _order_error((v, k, q))


def _order_error(by_position: Any) -> ParameterError:
    """The error for tensors by position whose order is not clear."""
    allowed = "v and k of one tensor, or of one length that is not the length of q"
    message = (
        f"v, k and q by position must be {allowed}, got {', '.join(map(shown, by_position))}: name them, v=, k=, q= "
        "or, with Keras's names, query=, value=, key="
    )
    return ParameterError("v", by_position, allowed, message)
