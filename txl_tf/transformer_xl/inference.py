"""Inference: weights that are read and projected once, before a loop, and how a model reads a segment with them.

Shapes:
    B: batch      T: tgt_len      H: n_head      D: d_head      E: d_model
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from txl_tf.equations import Zeros, project_distances, score_scale
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.kernels.threads import at_the_same_time
from txl_tf.kernels.watching import current_record
from txl_tf.nn.bound import bound
from txl_tf.nn.feed_forward import PositionwiseFF
from txl_tf.nn.parts import NotCacheable
from txl_tf.transformer_xl.attention import SegmentAttention, zero_memory_key_by_distance

# How many rows of a batch the graph computes separately: `MAX_UNROLLED_ROWS` if a segment has several tokens, but fewer
# than `LONG_SEGMENT`, otherwise `FEW_ROWS`. Larger batches use a loop, which is traced faster.
LONG_SEGMENT = 256
MAX_UNROLLED_ROWS = 16
FEW_ROWS = 4


class LayerWeights(NamedTuple):
    """Weights of a layer in the dtype in which they are used."""

    # The kernels of queries (times `score_scale(D)`), keys and values, [E, H * D] each. Two cores compute such products
    # of one token sooner than one product of all three.
    qkv: tuple[Tensor, Tensor, Tensor]
    o: Tensor  # [H * D, E]
    ff: tuple[Tensor, ...]  # kernels and biases of the feed-forward net; empty if the net is of another class
    # Only relative attention has these:
    scaled_u: Tensor | None = None  # [H, 1, D], u times `score_scale(D)`
    scaled_v: Tensor | None = None  # [H, 1, D], v times `score_scale(D)`
    # [H, any, D], projected sinusoids in the order in which attention takes them. With `zeros` and a scheme that turns
    # keys, the key of the zeros, turned for every distance.
    position_keys: Tensor | None = None
    zeros: Zeros | tuple[()] = ()  # only with pre_lnorm; empty instead of `None`, for `tf.nest.flatten`


def layer_weights(
    layer: Any, dtype: Any, scaled_u: Tensor | None = None, scaled_v: Tensor | None = None,
    position_keys: Tensor | None = None,
) -> LayerWeights:  # fmt: skip
    """`LayerWeights` of a layer in `dtype`. See there for the weights that are not the layer's own.

    Raises:
        NotCacheable: the keys and values of the layer's attention are not products of the hidden states.
    """
    attn = getattr(layer, "rel_attn", None)
    ff = getattr(layer, "ff", None)
    if not isinstance(attn, SegmentAttention):
        raise NotCacheable(f"{layer.name} has no rel_attn like RelMultiHeadAttn")
    qkv_kernel: Any = tf.convert_to_tensor(attn.kernel("qkv_kernel"))
    q_kernel, k_kernel, v_kernel = tf.split(qkv_kernel, 3, 1)
    qkv: Any = tuple(tf.cast(kernel, dtype) for kernel in (q_kernel * score_scale(attn.d_head), k_kernel, v_kernel))
    o_kernel = tf.cast(attn.kernel("o_kernel"), dtype)
    ff_weights = ff.computed_weights() if isinstance(ff, PositionwiseFF) else ()
    ff_weights = tuple(tf.cast(weight, dtype) for weight in ff_weights)
    zeros = attn.zeros(tf.cast(qkv_kernel, dtype), o_kernel)
    return LayerWeights(qkv, o_kernel, ff_weights, scaled_u, scaled_v, position_keys, zeros or ())


def weights_of_layers(network: Any, position_keys: Sequence[Tensor]) -> tuple[LayerWeights, ...]:
    """`LayerWeights` of all layers of a `TransformerXL`.

    Args:
        network: `TransformerXL`.
        position_keys: the result of `projected_positions`, in the order in which attention takes them.
    """
    dtype = network.compute_dtype
    weights: list[LayerWeights] = []
    for i, layer in enumerate(network.decoder_layers):
        scaled_u: Any = None
        scaled_v: Any = None
        if network.r_w_bias is not None:
            scaled_u, scaled_v = [
                tf.cast(bias[:, None] * score_scale(network.d_head), dtype) for bias in network.biases(i)
            ]
        of_layer = position_keys[i] if position_keys else None
        weights.append(layer_weights(layer, dtype, scaled_u, scaled_v, of_layer))
    return tuple(weights)


def projected_positions(network: Any, klen: Size) -> list[Any]:
    """The keys of the distances `klen - 1, ..., 0` in every layer: a list of `[H, klen, D]`.

    The list is empty if the scheme of positions needs no keys of distances. A scheme that turns keys needs them only
    with `pre_lnorm`: then they are the key of a zero memory, turned for every distance.

    Raises:
        NotCacheable: positions are relative, and the attention of a layer has no `r_kernel`.
    """
    if network.r_w_bias is None:
        return _turned_zeros(network, klen) if network.scheme.turns else []
    pos_emb: Any = tf.cast(network.position_table(klen), network.compute_dtype)

    def keys_of(layer: Any) -> Tensor:
        """The keys of the distances in a layer."""
        attn: Any = getattr(layer, "rel_attn", None)
        if getattr(attn, "r_kernel", None) is None:
            raise NotCacheable(f"{layer.name} has no rel_attn like RelMultiHeadAttn")
        return project_distances(pos_emb, tf.cast(attn.r_kernel, pos_emb.dtype), attn.n_head)

    return [keys_of(layer) for layer in network.decoder_layers]


def _turned_zeros(network: Any, klen: Size) -> list[Any]:
    """`projected_positions` of a scheme that turns keys."""
    attentions: list[Any] = [getattr(layer, "rel_attn", None) for layer in network.decoder_layers]
    if not all(isinstance(attn, SegmentAttention) for attn in attentions):
        return []  # `layer_weights` raises the error
    zeros = [attn.zeros(tf.cast(attn.kernel("qkv_kernel"), network.compute_dtype)) for attn in attentions]
    return [zero_memory_key_by_distance(of_layer.k, network.scheme, klen) for of_layer in zeros if of_layer is not None]


def call_with_cache(model: Any, tokens: Tensor, memory: Any, static_shapes: bool = False) -> Any:
    """Calls a model with a segment and a cached memory.

    Args:
        model: `TransformerXL`, or a function like its call, see `LanguageModel.outputs`.
        tokens: int `[B, T]`.
        memory: `NetworkMemory`.
        static_shapes: as in the call.

    Returns:
        `(output, state)`: the output of the model, and the state after the segment.
    """
    # The feed-forward nets compute with the weights that are cast already.
    ff_weights = [(of_layer.layer.ff, of_layer.weights.ff) for of_layer in memory.layers if of_layer.weights.ff]
    with bound(ff_weights):
        return model(tokens, memory, static_shapes=static_shapes)


def row_by_row(attend_row: Callable[[Any], Tensor], q: Tensor) -> Any:
    """Calls `attend_row(b)` for every row b of a batch, because one row at a time fits in the CPU's cache.

    Args:
        attend_row: function of the number of a row that returns `[H, T, D]`.
        q: `[B, H, T, D]`, the queries.

    Returns:
        `[B, H, T, D]`.
    """
    batch, _, length, _ = q.shape
    is_short = length is not None and 1 < length < LONG_SEGMENT
    if batch is not None and batch <= (MAX_UNROLLED_ROWS if is_short else FEW_ROWS):
        if batch == 1 or current_record() is not None:  # `watching` needs tensors of this graph, not of a function's
            return tf.stack([attend_row(b) for b in range(batch)])
        return tf.stack(at_the_same_time(attend_row, [(tf.constant(b),) for b in range(batch)]))
    spec = tf.TensorSpec(q.shape[1:], q.dtype)
    attend_row = tf.autograph.experimental.do_not_convert(attend_row)  # eager `map_fn` would convert all that it calls
    return tf.map_fn(attend_row, tf.range(shape_of(q)[0]), fn_output_signature=spec, parallel_iterations=1)


def has_many_single_queries(q: Tensor) -> bool:
    """Whether rows with the queries `q` `[B, H, T, D]` attend at once, see `RowsFirst`, and not by `row_by_row`.

    They do if many rows, or an unknown number of rows, have a single query each. The rows of a small batch do not,
    because the cores compute different heads of a row at the same time.
    """
    batch, _, length, _ = q.shape
    return length == 1 and (batch is None or batch > FEW_ROWS) and current_record() is None


def swap_rows_and_heads(x: Tensor) -> Any:
    """From `[B, H, any, D]` to `[H, B, any, D]`, the order of `Block`; or back."""
    return tf.transpose(x, [1, 0, 2, 3])


def initial_keys_and_values(network: Any, batch_size: Size, klen: Size) -> tuple[Any, Any]:
    """Zeros for the keys of all layers, and for the values: two tuples of `n_layer` `[batch_size, H, klen, D]`."""

    def zeros() -> tuple[Any, ...]:
        shape = [batch_size, network.n_head, klen, network.d_head]
        return tuple(tf.zeros(shape, network.compute_dtype) for _ in range(network.n_layer))

    return zeros(), zeros()


def writable_copy(state: Any) -> Any:
    """A copy that can be written in place, because nothing else refers to it, not even a constant of the graph."""
    return tf.nest.map_structure(lambda tensor: tf.raw_ops.DeepCopy(x=tensor), state)
