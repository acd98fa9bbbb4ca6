"""Transformer-XL's attention as layers: from a segment to memory and segment (paper, section 3.3).

The equation is `attention` in `txl_tf/equations.py`. u is called `r_w_bias` and v is called `r_r_bias`, as in the
original. W_q, W_(k,E) and W_v are side by side in `qkv_kernel`; W_(k,R) is `r_kernel`.

Shapes:
    B: batch        T: qlen, the queries        M: mlen, the memory        K: klen, the keys, M + T
    H: n_head       D: d_head                   E: d_model
"""

from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.config.checks import NOT_NEGATIVE
from txl_tf.equations import (
    Attention,
    OrderedKeyPositions,
    Zeros,
    attention,
    attention_block,
    causal,
    normalized,
    project_distances,
    score_scale,
)
from txl_tf.kernels.dropout import Drop, split
from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Attending, Layer
from txl_tf.nn.checks import check_length, check_sizes, check_tensors, checked_shape
from txl_tf.nn.lora import LowRank
from txl_tf.nn.masks import (
    SWAP_BATCH_AND_HEADS,
    as_bool,
    as_mask,
    checked_numbers,
    mask_of,
    seen,
    seen_by_article,
)
from txl_tf.nn.ops import for_weights_of_layer, make_norm, norm_of, norm_of_zeros, own_initializer
from txl_tf.nn.position_schemes import Relative
from txl_tf.nn.settings import FREE_EPSILON, FREE_RATE, FREE_SEED, OF_CLASS
from txl_tf.schema import check_type
from txl_tf.transformer_xl.memory import HiddenStates, LayerMemory


def create_mask(qlen: Size, mlen: Size, same_length: bool = False, first: Size = 0) -> Any:
    """The causal mask: 1 where a key is masked, 0 where a query sees it (`_create_mask` of the original).

    Query i sees the keys `0 ... mlen + i`; with `same_length`, only the last `mlen + 1` of them, `i ... mlen + i`. With
    qlen 3 and mlen 2, without and with `same_length`:

        0 0 0 1 1        0 0 0 1 1
        0 0 0 0 1        1 0 0 0 1
        0 0 0 0 0        1 1 0 0 0

    Args:
        qlen, mlen: ints or int scalar tensors, the lengths of segment and memory.
        same_length: every query sees the same number of keys (the original's evaluation settings).
        first: number of the first query and of the first key. The mask does not depend on it. But a value that is known
            only at run time keeps the mask, which may have megabytes, out of the compiled program.

    Returns:
        float32 `[qlen, mlen + qlen]`.

    Raises:
        ParameterError: a length is negative or not an integer.
    """
    check_length("qlen", qlen)
    check_length("mlen", mlen)
    return tf.cast(~causal(qlen, mlen, same_length, first), tf.float32)


def rel_multihead_attn(
    w: Tensor, r: Tensor, r_w_bias: Tensor, r_r_bias: Tensor, attn_mask: Tensor | None, mems: Tensor | None,
    qkv_kernel: Tensor, r_kernel: Tensor, o_kernel: Tensor, dropatt: float = 0.0, dropout_key: Tensor | None = None,
    content_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Relative attention with its projections. `RelMultiHeadAttn` adds the residual connection and layer norm.

    The batch is the first axis. In the original, `w` and `mems` are `[T, B, E]` and `[M, B, E]`, and `r` is
    `[K, 1, E]`. Queries are computed only for the segment. The original also computes them for the memory, and then
    ignores them.

    All tensors have the same dtype. A mask that Keras passed on with `w` has no effect, unlike in the layer: give it in
    `attn_mask`.

    Args: as in the call of `RelMultiHeadAttn` (`attn_mask`, `mems` and `content_mask` may be `None`), and
        qkv_kernel: `[E, 3 * H * D]`, the kernels of queries, keys and values, side by side.
        r_kernel, o_kernel: `[E, H * D]` and `[H * D, E]`.
        dropatt, dropout_key: of the attention probabilities, see `attend`.

    Returns:
        `[B, T, E]`.
    """
    n_head = r_w_bias.shape[0]
    relative = (r, r_w_bias, r_r_bias, r_kernel)
    memory, weights = memory_and_weights(
        w, attn_mask, mems, qkv_kernel, o_kernel, n_head, Relative(), content_mask, relative=relative
    )
    return attention(w, memory, weights, Drop(dropatt, dropout_key))


def memory_and_weights(
    h: Tensor, attn_mask: Tensor | None, mems: Tensor | None, qkv_kernel: Tensor, o_kernel: Tensor, n_head: int,
    scheme: Any, content_mask: Tensor | None = None, zeros: Zeros | None = None, relative: Any = None,
) -> tuple[HiddenStates, Attention]:  # fmt: skip
    """The arguments `memory` and `w` of `txl_tf.equations.attention`.

    Args: as in `multihead_attn`, and
        h: `[B, T, E]`, the segment: `w` of `multihead_attn`.
        scheme: a `Positions`.
        zeros: the result of `SegmentAttention.zeros`. It may be `None` if no key counts as zeros.
        relative: `(r, r_w_bias, r_r_bias, r_kernel)` of `rel_multihead_attn`; `None`: the scheme is not relative.
    """
    tgt_len = shape_of(h)[1]
    mem_len = 0 if mems is None else shape_of(mems)[1]
    visible: Any = causal(tgt_len, mem_len) if attn_mask is None else seen(attn_mask)
    if len(visible.shape) == 4:  # a mask of heads, [B, H, T, K]
        visible = tf.transpose(visible, SWAP_BATCH_AND_HEADS)
    content = None if content_mask is None else tf.cast(content_mask, h.dtype)
    r = u = v = None
    if relative is not None:
        r, u, v, r_kernel = relative
        r = project_distances(r, r_kernel, n_head)  # [H, K, D]
        u = u[:, None, None]
        v = v[:, None, None]
    elif zeros is not None and scheme.turns:
        r = zero_memory_key_by_distance(zeros.k, scheme, mem_len + tgt_len)
    if r is not None:
        # `rel_shift` needs a column of zeros. It comes from a key of zeros, so the scores need not be copied for it.
        r = tf.pad(r, [[0, 0], [1, 0], [0, 0]])
    if zeros is not None:
        zeros = Zeros(zeros.k[:, None], zeros.v[:, None])  # for keys and values [H, B, K, D]
    zero_value = None if zeros is None else zeros.v
    key_positions = OrderedKeyPositions(
        klen=mem_len + tgt_len, visible=visible, r=r, first=tgt_len, content=content, zero_value=zero_value
    )
    scale = score_scale(o_kernel.shape[0] // n_head)
    weights = Attention(qkv=qkv_kernel, o=o_kernel, n_head=n_head, scale=scale, scheme=scheme, u=u, v=v, zeros=zeros)
    return HiddenStates(mems, key_positions), weights


def zero_memory_key_by_distance(zero_key: Tensor, scheme: Any, klen: Size) -> Any:
    """The key of a zero memory, turned for the distances `klen - 1, ..., 0`: `[H, klen, D]`.

    Args:
        zero_key: `[H, 1, D]`, see `Zeros`. It is not zero.
        scheme: turns keys, so that products of queries and keys depend only on their distance.
        klen: the number of distances.
    """
    n_head, _, d_head = zero_key.shape
    keys = tf.broadcast_to(zero_key, [n_head, klen, d_head])
    return scheme.turn(keys, tf.range(klen) - (klen - 1))


class SegmentAttention(LowRank, Attending, Layer):
    """Base class of attention to memory and segment, with its residual connection and layer norm.

    A subclass defines the call, which returns the result of `attend_segment`.

    Attributes:
        relative: whether the positions are relative, so that there is an `r_kernel`.
        scheme: the scheme of positions.
    """

    d_model: int
    n_head: int
    d_head: int
    dropout: float
    dropatt: float
    pre_lnorm: bool
    relative: bool = True
    scheme: Any = Relative()
    lora_kernels = ("qkv_kernel", "o_kernel")
    free_settings = {
        "dropout": FREE_RATE, "dropatt": FREE_RATE, "layer_norm_epsilon": FREE_EPSILON, "seed": FREE_SEED,
    }  # fmt: skip
    fixed_settings = {"relative": OF_CLASS}
    copied_settings = {"layer_norm_epsilon": ("layer_norm.epsilon",)}

    @stored
    def __init__(
        self, d_model: int, n_head: int, d_head: int, dropout: float = 0.0, dropatt: float = 0.0,
        kernel_initializer: Any = "glorot_uniform", layer_norm_epsilon: float = 1e-12, seed: int | None = None,
        pre_lnorm: bool = False, norm: str = "layer", **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_sizes(d_model=d_model, n_head=n_head, d_head=d_head)
        check_type("pre_lnorm", pre_lnorm, bool)
        NOT_NEGATIVE("layer_norm_epsilon", layer_norm_epsilon)
        self.start_keys(seed, dropout=dropout, dropatt=dropatt)
        self.kernel_initializer = for_weights_of_layer(keras.initializers.get(kernel_initializer))
        self.layer_norm = make_norm(norm, layer_norm_epsilon, dtype=self.dtype_policy, name="layer_norm")

    def build(self, w_shape: Any = None, **_: Any) -> None:
        def kernel(name: str, shape: tuple[int, int]) -> Any:
            """Makes a kernel."""
            return self.add_weight(name=name, shape=shape, initializer=own_initializer(self.kernel_initializer))

        width = self.n_head * self.d_head
        self.qkv_kernel = kernel("qkv_kernel", (self.d_model, 3 * width))
        self.r_kernel = kernel("r_kernel", (self.d_model, width)) if self.relative else None
        self.o_kernel = kernel("o_kernel", (width, self.d_model))
        self.build_parts(w_shape, self.layer_norm)
        self.restore_lora()

    def memory_of(self, mems: Tensor) -> Any:
        """The memory as attention projects it: hidden states `[batch, mem_len, d_model]`, normalised if `pre_lnorm`."""
        return normalized(mems, norm_of(self.layer_norm)) if self.pre_lnorm else mems

    def zeros(self, qkv_kernel: Tensor, o_kernel: Tensor | None = None) -> Zeros | None:
        """`Zeros` of this attention; `None` if the keys and values of a memory of zeros are zeros.

        Its `k` and `v` are `[n_head, 1, d_head]`, its `output` is `[d_model]`.

        Args:
            qkv_kernel: the kernel, in the dtype of the result.
            o_kernel: for `Zeros.output`. `None` leaves it out.
        """
        zero = norm_of_zeros(self.layer_norm, self.d_model, qkv_kernel.dtype) if self.pre_lnorm else None
        if zero is None:
            return None
        heads = tf.linalg.matvec(qkv_kernel[:, self.n_head * self.d_head :], zero, transpose_a=True)
        k, v = tf.unstack(tf.reshape(heads, [2, self.n_head, 1, self.d_head]))
        output = None if o_kernel is None else tf.linalg.matvec(o_kernel, tf.reshape(v, [-1]), transpose_a=True)
        return Zeros(k, v, output)

    def attend_segment(
        self, w: Tensor, attn_mask: Any, mems: Any, content_mask: Tensor | None, training: bool | None,
        dropout_key: Tensor | None, *r_u_v: Tensor,
    ) -> Tensor:  # fmt: skip
        """Checks the arguments of a call and computes its result: `[batch, tgt_len, d_model]`.

        Args:
            w, attn_mask, mems, content_mask, training, dropout_key: of the call, see `RelMultiHeadAttn`. In inference,
                `mems` may be a `LayerMemory`. It knows masks and positions, so `attn_mask` and `r_u_v` must be the same
                object.
            *r_u_v: `r`, `r_w_bias` and `r_r_bias` of the call, if it has them.
        """
        dropatt_key, output_key = split(self.key_of_call(w, training, dropout_key), 2)
        if isinstance(mems, LayerMemory):
            mems.check(self, w, *r_u_v, attn_mask)
            memory = mems
            weights = mems.weights_of_attention()
        else:
            visible, mems = self.segment_of(w, attn_mask, mems, *r_u_v)
            content_mask = _checked_content_mask(content_mask, w, mems)
            keys = shape_of(mems)[1] + shape_of(w)[1]
            if r_u_v and not isinstance(keys, int):
                r_u_v = (checked_shape("r", r_u_v[0], {"0": 1, "keys": keys}), *r_u_v[1:])
            kernels = [self.kernel("qkv_kernel"), self.kernel("o_kernel")]
            w, mems, qkv_kernel, o_kernel = self.in_compute_dtype(w, mems, *kernels)
            memory, weights = memory_and_weights(
                w, visible, self.memory_of(mems), qkv_kernel, o_kernel, self.n_head, self.scheme, content_mask,
                zeros=None if content_mask is None else self.zeros(qkv_kernel),
                relative=self.in_compute_dtype(*r_u_v, self.r_kernel) if r_u_v else None,
            )  # fmt: skip
        drop_probs = Drop(self.dropatt, dropatt_key)
        drop_output = Drop(self.dropout, output_key)
        return attention_block(w, memory, weights, norm_of(self.layer_norm), drop_probs, drop_output, self.pre_lnorm)

    def segment_of(self, w: Tensor, attn_mask: Any, mems: Tensor | None, *r_u_v: Tensor) -> tuple[Any, Any]:
        """Checks the arguments of a call, see `attend_segment`. Makes its mask and, if `mems` is `None`, empty memory.

        Returns:
            `(visible, mems)`: bool, true where a query sees a key, `[tgt_len, keys]`, `[batch, tgt_len, keys]` or
            `[batch, n_head, tgt_len, keys]`; and `[batch, mem_len, d_model]`.

        Raises:
            ParameterError: a tensor or a mask has another shape.
        """
        sizes: dict[str, Any] = {"d_model": self.d_model, "n_head": self.n_head, "d_head": self.d_head}
        check_tensors(sizes, w=(w, "float batch tgt_len d_model"), mems=(mems, "float? batch mem_len d_model"))
        mems = w[:, :0] if mems is None else mems
        qlen = shape_of(w)[1]
        mlen = shape_of(mems)[1]
        sizes["keys"] = mlen + qlen if isinstance(mlen + qlen, int) else None
        shapes = {"r": "float 1 keys d_model", "r_w_bias": "float n_head d_head", "r_r_bias": "float n_head d_head"}
        check_tensors(sizes, **{name: (x, shapes[name]) for name, x in zip(shapes, r_u_v, strict=False)})
        if attn_mask is None:
            visible = causal(qlen, mlen)
        else:
            mask: Any = as_mask("attn_mask", attn_mask)
            heads = ["n_head"] if mask.shape.rank == 4 else []
            visible = seen_by_article("attn_mask", mask, sizes, ["batch", *heads, "tgt_len", "keys"])
        elements: Any = mask_of(w)
        if elements is not None:
            elements = tf.pad(as_bool("mask", elements), [[0, 0], [mlen, 0]], constant_values=True)
            visible &= elements[:, None, None] if visible.shape.rank == 4 else elements[:, None]
        return visible, mems


def _checked_content_mask(content_mask: Any, w: Tensor, mems: Tensor) -> Any:
    """`content_mask` of `RelMultiHeadAttn` as a tensor, or `None`.

    Raises ParameterError unless it is `[batch, tgt_len, mem_len + tgt_len]`, of bool or of the numbers 0 and 1.
    """
    if content_mask is None:
        return None
    content_mask = checked_numbers("content_mask", content_mask)
    lengths = {"batch": w.shape[0], "tgt_len": w.shape[1], "mem_len": mems.shape[1]}
    sizes = {name: size for name, size in lengths.items() if size is not None}
    kind = "bool" if content_mask.dtype.is_bool else "number"
    check_tensors(sizes, content_mask=(content_mask, f"{kind} batch tgt_len mem_len+tgt_len"))
    batch, tgt_len, _ = shape_of(w)
    keys = shape_of(mems)[1] + tgt_len
    if isinstance(keys, int):
        return content_mask
    return checked_shape("content_mask", content_mask, {"batch": batch, "tgt_len": tgt_len, "keys": keys})


@keras.saving.register_keras_serializable("txl_tf")
class RelMultiHeadAttn(SegmentAttention):
    """Relative multi-head attention with its residual connection: `LayerNorm(w + dropout(attention))`.

    With `pre_lnorm`, it is `w + dropout(attention)`, where attention sees `LayerNorm(w)` and `LayerNorm(mems)`.

    ```python
    w, mems = tf.random.normal([2, 5, 32]), tf.random.normal([2, 3, 32])  # a segment of 5, a memory of 3
    distances, frequencies = txl_tf.layers.relative_positions(3 + 5), txl_tf.layers.inverse_frequencies(32)
    r = txl_tf.layers.positional_embedding(distances, frequencies)  # [1, 8, 32]
    u, v = tf.Variable(tf.zeros([4, 8])), tf.Variable(tf.zeros([4, 8]))
    attention = txl_tf.layers.RelMultiHeadAttn(d_model=32, n_head=4, d_head=8)
    output = attention(w, r, u, v, mems=mems)  # [2, 5, 32]
    ```

    Args:
        d_model: width of the hidden states.
        n_head, d_head: number of heads and the width of each.
        dropout: dropout rate of the attention's output.
        dropatt: dropout rate of the attention probabilities.
        kernel_initializer: initializer of the three projections. With a seed, each draws other numbers.
        layer_norm_epsilon: added to the variance in layer norm.
        seed: int from which dropout keys derive, for calls without a key. `None` draws one.
        pre_lnorm: whether to normalise segment and memory before attention, instead of the sum after it.
        norm: "layer" for layer norm, "rms" for `RMSNorm`.

    Call arguments:
        w: `[batch, tgt_len, d_model]`, the segment. A mask that Keras passed on with it also hides keys.
        r: `[1, mem_len + tgt_len, d_model]`, position embeddings, farthest distance first: see `positional_embedding`
            and `relative_positions`.
        r_w_bias, r_r_bias: `[n_head, d_head]`, u and v. They are arguments because layers share them unless `untie_r`.
        attn_mask: `[tgt_len, mem_len + tgt_len]`, or with a batch in front, or with batch and heads: `[batch, n_head,
            tgt_len, mem_len + tgt_len]`. Numbers are 1 where a key is masked, see `create_mask`. Bool is true where a
            query sees a key. `None`: the mask of `create_mask`.
        mems: `[batch, mem_len, d_model]`; `mem_len` may be 0. `None`: there is no memory.
        content_mask: `[batch, tgt_len, mem_len + tgt_len]`, 0 where a key lies before the query's document, so that
            its content counts as zeros, and 1 elsewhere, see `document_mask`. `None`: no key counts as zeros.
        training, dropout_key: see `txl_tf.nn.dropping`.

    Returns:
        `[batch, tgt_len, d_model]`.

    Raises:
        ParameterError: an argument is out of its range, or a tensor or a mask has another shape.

    Reference:
        Dai et al. 2019, section 3.3; `rel_multihead_attn` of the original.
    """

    def call(
        self, w: Tensor, r: Tensor, r_w_bias: Tensor, r_r_bias: Tensor, attn_mask: Any = None, mems: Any = None,
        content_mask: Tensor | None = None, training: bool | None = None, dropout_key: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self.attend_segment(w, attn_mask, mems, content_mask, training, dropout_key, r, r_w_bias, r_r_bias)
