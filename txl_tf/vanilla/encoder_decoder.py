"""Encoder and decoder layers of the vanilla Transformer (Vaswani et al. 2017, section 3.1).

    post-norm, as in the paper          x = LayerNorm(x + dropout(sublayer(x)))
    pre-norm, `norm_first`              x = x + dropout(sublayer(LayerNorm(x)))

Pre-norm trains without a long warm-up. It leaves the output of the last layer unnormalised, so the stack of layers ends
with one more layer norm.
"""

from typing import Any, Unpack

import keras
import tensorflow as tf

from txl_tf.errors import ParameterError
from txl_tf.kernels.dropout import dropout, split
from txl_tf.kernels.shapes import Tensor, shape_of
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import CachedMemory, Layer
from txl_tf.nn.checks import check_sizes, check_tensors
from txl_tf.nn.feed_forward import PositionWiseFFN
from txl_tf.nn.masks import SWAP_BATCH_AND_HEADS, mask_of
from txl_tf.nn.ops import LayerNorm
from txl_tf.nn.parts import NotCacheable, is_library
from txl_tf.nn.settings import FREE_RATE, FREE_SEED, OF_CLASS
from txl_tf.vanilla.multi_head_attention import MultiHeadAttention, seen_of_masks

EPSILON = 1e-6  # of the article's layer norms: article 2 of docs/articles.md


class _TransformerLayer(Layer):
    """Base class of both layers: attentions and a feed-forward net, each with a layer norm and dropout.

    A subclass sets `attentions`. Each name in it becomes an attribute with a `MultiHeadAttention`.
    """

    attentions: tuple[str, ...] = ()  # names of the attentions, in order
    mha: Any
    mha1: Any
    mha2: Any
    layernorm1: Any  # of the first sublayer; `layernorm2` and `layernorm3` are those of the next sublayers
    layernorm2: Any
    layernorm3: Any
    free_settings = {"rate": FREE_RATE, "dropatt": FREE_RATE, "dropact": FREE_RATE, "seed": FREE_SEED}
    fixed_settings = {"attentions": OF_CLASS}
    copied_settings = {"dropact": ("ffn.rate",)}

    @stored
    def __init__(
        self, d_model: int, num_heads: int, dff: int, rate: float = 0.1, norm_first: bool = False, dropatt: float = 0.0,
        dropact: float = 0.0, seed: int | None = None, positions: str | None = None, **kwargs: Unpack[LayerOptions],
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        check_sizes(d_model=d_model, num_heads=num_heads, dff=dff)
        self.start_keys(seed, rate=rate, dropatt=dropatt, dropact=dropact)
        options: dict[str, Any] = {"dtype": self.dtype_policy}
        seed_of_part: Any = self.draw_key  # in place of a seed: the parts get their dropout keys from this layer
        self.ffn = PositionWiseFFN(dff, d_model, dropact, seed_of_part, **options, name="ffn")
        for name in self.attentions:
            mha = MultiHeadAttention(d_model, num_heads, dropatt, seed_of_part, positions, **options, name=name)
            setattr(self, name, mha)
        for name in self._norms():
            setattr(self, name, LayerNorm(EPSILON, **options, name=name))

    def _norms(self) -> list[str]:
        """Names of the layer norms: one for each attention and one for the feed-forward net."""
        return [f"layernorm{i + 1}" for i in range(len(self.attentions) + 1)]

    def build(self, x_shape: Any = None, **_: Any) -> None:
        attentions = [getattr(self, name) for name in self.attentions]
        norms = [getattr(self, name) for name in self._norms()]
        self.build_parts(x_shape, *attentions, self.ffn, *norms)

    def _residual(self, x: Tensor, norm: Any, sublayer: Any, dropout_key: Tensor | None = None) -> tuple[Tensor, Any]:
        """Applies a sublayer with its residual connection, dropout and layer norm.

        Args:
            x: the input.
            norm: the layer norm.
            sublayer: function of the input (with `norm_first`, of the normalised input) that returns `(output,
                weights)`: attention weights, or `None` if the sublayer is not an attention.
            dropout_key: key of the dropout of the output.

        Returns:
            `(x, weights)`: the result, and the weights from the sublayer.
        """
        output, weights = sublayer(norm(x) if self.norm_first else x)
        output = dropout(output, self.rate, dropout_key)
        return (x + output if self.norm_first else norm(x + output)), weights

    def _feed_forward(
        self, x: Tensor, norm: Any, inner_key: Tensor | None = None, output_key: Tensor | None = None
    ) -> Tensor:
        """Applies the feed-forward net as a sublayer.

        Args:
            x, norm: see `_residual`.
            inner_key: key of the dropout after the activation.
            output_key: key of the dropout of the output.
        """
        return self._residual(x, norm, lambda y: (self.ffn(y, dropout_key=inner_key), None), output_key)[0]


def attention_of(
    mha: Any, v: Tensor, k: Tensor, q: Tensor, visible: Any = None, dropout_key: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Calls `MultiHeadAttention.attention`. If a user has replaced the call of `mha`, calls `mha` itself instead.

    `visible` has four dimensions and broadcasts to `[H, B, queries, keys]`, the shape of the weights. A user's call
    gets a mask that broadcasts to `[B, H, queries, keys]`, and returns weights of this shape.

    Raises:
        ParameterError: the user's call does not return a tuple.
        NotCacheable: `visible` is a `CachedMemory`, and the call is a user's.
    """
    if is_library(mha, MultiHeadAttention):
        return mha.attention(v, k, q, visible, dropout_key)
    if isinstance(visible, CachedMemory):
        raise NotCacheable(f"{type(mha).__name__} {mha.name!r} has its own call")
    mask = None if visible is None else tf.transpose(visible, SWAP_BATCH_AND_HEADS)
    results = mha(v, k, q, attention_mask=mask, dropout_key=dropout_key)
    if not isinstance(results, tuple):
        allowed = "a method that returns (output, attention_scores), as that of MultiHeadAttention"
        raise ParameterError("call", type(mha).__name__, allowed, f"call of {type(mha).__name__} must be {allowed}")
    output, weights = results
    return output, tf.transpose(weights, SWAP_BATCH_AND_HEADS)


@keras.saving.register_keras_serializable("txl_tf")
class EncoderLayer(_TransformerLayer):
    """The encoder layer: self-attention and a feed-forward net.

    ```python
    layer = txl_tf.layers.EncoderLayer(d_model=32, num_heads=4, dff=64)
    ids = tf.constant([[5, 7, 2, 4], [3, 3, 0, 0]])  # 0 is padding
    output = layer(tf.random.normal([2, 4, 32]), mask=ids != 0)  # [2, 4, 32]
    ```

    Args:
        d_model, num_heads, dff: width, number of heads, width inside the feed-forward net.
        rate: dropout rate of the outputs of both sublayers.
        norm_first: pre-norm with `True`; post-norm, as in the article, with `False`.
        dropatt, dropact: dropout rates of the attention weights and after the relu. The article has neither.
        seed: int from which dropout derives, unless the call gets a key. `None` draws one.
        positions: of every attention, see `MultiHeadAttention`.

    Call arguments:
        x: `[batch, length, d_model]`.
        mask: bool or integers 0 and 1, true at elements, `[batch, length]`; or bool, true where a key is seen, `[batch,
            length, length]`. By default, the mask that Keras passes on with `x`. Numbers with four dimensions are a
            mask of the article, see `forbidden`.
        attention_mask: true or 1 where a key is seen, bool or numbers 0 and 1: `[length, length]`, `[batch, length,
            length]` or `[batch, num_heads, length, length]`.
        forbidden: broadcasts to `[batch, num_heads, length, length]`, 1 where a key is forbidden, as in the article.
        use_causal_mask: whether to hide the keys after the position of a query.
        return_attention_scores: whether to return the attention weights, too.
        training, dropout_key: see `txl_tf.nn.dropping`.

    Returns:
        `[batch, length, d_model]`. With `return_attention_scores`, also the weights, `[batch, num_heads, length,
        length]`.

    Raises:
        ParameterError: an argument is out of its range, or a tensor or a mask has another shape.
    """

    attentions = ("mha",)
    copied_settings = {"dropatt": ("mha.rate",)}

    def call(
        self, x: Tensor, mask: Tensor | None = None, attention_mask: Any = None, forbidden: Any = None,
        use_causal_mask: bool = False, return_attention_scores: bool = False, training: bool | None = None,
        dropout_key: Tensor | None = None,
    ) -> Any:  # fmt: skip
        sizes = {"d_model": self.d_model, "num_heads": self.num_heads}
        check_tensors(sizes, x=(x, "float batch length d_model"))
        batch, length, _ = shape_of(x)
        sizes |= {"batch": batch, "queries": length, "keys": length}
        mask = mask_of(x) if mask is None else mask
        visible = seen_of_masks(
            sizes, mask, attention_mask=attention_mask, forbidden=forbidden, use_causal_mask=use_causal_mask
        )
        dropatt_key, attention_key, inner_key, output_key = split(self.key_of_call(x, training, dropout_key), 4)
        (x,) = self.in_compute_dtype(x)
        x, weights = self._residual(
            x, self.layernorm1, lambda y: attention_of(self.mha, y, y, y, visible, dropatt_key), attention_key
        )
        x = self._feed_forward(x, self.layernorm2, inner_key, output_key)
        return (x, tf.transpose(weights, SWAP_BATCH_AND_HEADS)) if return_attention_scores else x

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        shapes_by_name = self.named_shapes(shapes, named)
        x_shape = shapes_by_name["x"]
        if not shapes_by_name["return_attention_scores"]:
            return x_shape
        batch, length, _ = x_shape
        return x_shape, (batch, self.num_heads, length, length)


@keras.saving.register_keras_serializable("txl_tf")
class DecoderLayer(_TransformerLayer):
    """The decoder layer: self-attention, attention to the encoder's output, and a feed-forward net.

    Self-attention sees all positions, unless a mask hides some. To hide later positions, use `use_causal_mask=True` or
    the article's `look_ahead_mask`.

    ```python
    layer = txl_tf.layers.DecoderLayer(d_model=32, num_heads=4, dff=64)
    source, x = tf.random.normal([2, 4, 32]), tf.random.normal([2, 3, 32])
    seen = tf.constant([[5, 7, 2, 4], [3, 3, 0, 0]]) != 0  # of the source
    output, own, cross = layer(x, source, padding_mask=seen, use_causal_mask=True)  # [2, 3, 32]
    output = layer(x, source, use_causal_mask=True, return_attention_scores=False)  # [2, 3, 32]
    ```

    Args: see `EncoderLayer`.

    Call arguments:
        x: `[batch, length, d_model]`.
        enc_output: `[batch, source, d_model]`.
        look_ahead_mask: mask of self-attention, which broadcasts to `[batch, num_heads, length, length]`: numbers, 1
            where a key is forbidden, or bool, true where it is seen.
        padding_mask: mask of the source, bool or integers 0 and 1 `[batch, source]`, true at elements; by default, the
            mask that Keras passes on with `enc_output`. Numbers with four dimensions are a mask of the article, 1 where
            a key is forbidden.
        mask: mask of `x`, bool or integers 0 and 1 `[batch, length]`, true at elements; by default, the mask that Keras
            passes on with `x`. Numbers with four dimensions are a mask of the article, 1 where a key is forbidden.
        use_causal_mask: whether to hide later positions in self-attention.
        return_attention_scores: whether to return the weights, too, as the article's layer does.
        training, dropout_key: see `txl_tf.nn.dropping`.

    Returns:
        `(output, attn_weights_block1, attn_weights_block2)`: `[batch, length, d_model]`, and the weights of both
        attentions, `[batch, num_heads, length, length]` and `[batch, num_heads, length, source]`. With
        `return_attention_scores=False`, only the output.

    Raises:
        ParameterError: an argument is out of its range, or a tensor or a mask has another shape.
    """

    attentions = ("mha1", "mha2")
    copied_settings = {"dropatt": ("mha1.rate", "mha2.rate")}

    def call(
        self, x: Tensor, enc_output: Any, look_ahead_mask: Tensor | None = None, padding_mask: Tensor | None = None,
        mask: Tensor | None = None, use_causal_mask: bool = False, return_attention_scores: bool = True,
        training: bool | None = None, dropout_key: Tensor | None = None,
    ) -> Any:  # fmt: skip
        if isinstance(enc_output, DecoderMemory):  # a step of decoding with cached keys and values
            enc_output.check(self, look_ahead_mask, padding_mask)
            own = cross = enc_output  # both attentions take the memory in place of a mask
            dropout_key = None
        else:
            sizes = {"d_model": self.d_model, "num_heads": self.num_heads}
            check_tensors(
                sizes, x=(x, "float batch length d_model"), enc_output=(enc_output, "float batch source d_model")
            )
            sizes["batch"], length, _ = shape_of(x)
            source = shape_of(enc_output)[1]
            mask = mask_of(x) if mask is None else mask
            padding_mask = mask_of(enc_output) if padding_mask is None else padding_mask
            sizes_of_own = {**sizes, "queries": length, "keys": length}
            own = seen_of_masks(sizes_of_own, mask, look_ahead_mask=look_ahead_mask, use_causal_mask=use_causal_mask)
            cross = seen_of_masks({**sizes, "queries": length, "keys": source}, padding_mask, mask_name="padding_mask")
            x, enc_output = self.in_compute_dtype(x, enc_output)
            dropout_key = self.key_of_call(x, training, dropout_key)
        dropatt_key1, attention_key1, dropatt_key2, attention_key2, inner_key, output_key = split(dropout_key, 6)
        x, own_weights = self._residual(
            x, self.layernorm1, lambda y: attention_of(self.mha1, y, y, y, own, dropatt_key1), attention_key1
        )
        x, cross_weights = self._residual(
            x,
            self.layernorm2,
            lambda y: attention_of(self.mha2, enc_output, enc_output, y, cross, dropatt_key2),
            attention_key2,
        )
        x = self._feed_forward(x, self.layernorm3, inner_key, output_key)
        if not return_attention_scores:
            return x
        return x, *(tf.transpose(weights, SWAP_BATCH_AND_HEADS) for weights in (own_weights, cross_weights))

    # Both shapes are arguments of their own, because Keras's `summary` uses only the shapes that `build` names.
    def build(self, x_shape: Any = None, enc_output_shape: Any = None, **_: Any) -> None:
        super().build(x_shape)

    def compute_output_shape(self, *shapes: Any, **named: Any) -> Any:
        shapes_by_name = self.named_shapes(shapes, named)
        if not shapes_by_name["return_attention_scores"]:
            return shapes_by_name["x"]
        batch, length, _ = shapes_by_name["x"]
        source = shapes_by_name["enc_output"][1] if shapes_by_name.get("enc_output") else None
        return shapes_by_name["x"], *((batch, self.num_heads, length, keys) for keys in (length, source))

    def source_heads(self, enc_output: Any) -> tuple[Tensor, ...]:
        """`(keys, values)` of the encoder's output, `[num_heads, batch, source, depth]` each, for cached decoding."""
        k, v = self.mha2.project(enc_output, self.mha2.wk, self.mha2.wv)
        return self.mha2.turned(k), v


class DecoderMemory(CachedMemory):
    """The cached keys and values to which a decoder layer attends when it reads one more element.

    It is an argument of the layer's call instead of `enc_output` and both masks. It is not a tensor, so the layer can
    only pass it on to its attentions.

    Args:
        layer: the `DecoderLayer`.
        position: int scalar tensor, the position of the element.
        cache: `(keys, values)` of the elements before `position`, `[num_heads, batch, position, depth]` each.
        source: `(keys, values)` of the encoder's output, see `source_heads`. Each source may have several targets, in
            neighbouring rows.
        seen: bool, true at keys of the source that are seen; see `visible` in `MultiHeadAttention.attend`.
    """

    def __init__(self, layer: Any, position: Tensor, cache: Any, source: Tensor, seen: Tensor) -> None:
        self.layer = layer
        self.position = position
        self.cache = cache
        self.source = source
        self.seen = seen
        self.attended: list[str] = []  # to which part of the memory the layer has attended, in order

    def check(self, layer: Any, *masks: Any) -> None:
        """Raises NotCacheable unless this is the memory of `layer`, and the layer got it in place of each of its masks.

        A user's decoder may have called the layer with another layer's memory, or with masks of its own.
        """
        if layer is not self.layer or any(mask is not self for mask in masks):
            raise NotCacheable(f"{self.layer.name} gives its attention another mask or another encoder's output")

    def attention(self, mha: Any, v: Any, k: Any, q: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of the new element: to the source if `v` and `k` are this memory, else to the target so far.

        The target so far includes the new element, whose keys and values are added to the cache. Arguments and results:
        see `MultiHeadAttention.attention`. Raises NotCacheable if another attention than `mha1` or `mha2` calls it, or
        if `q`, `k` and `v` of `mha1` are not one tensor.
        """
        if mha is self.layer.mha2 and k is self and v is self:
            self.attended.append("source")
            (q,) = mha.project(q, mha.wq)
            return self._attend_to_source(mha, mha.turned(q, self.position))
        if mha is not self.layer.mha1 or not q is k is v:
            raise NotCacheable(f"{self.layer.name} does not attend by mha1 to the target and by mha2 to the source")
        self.attended.append("target")
        q, k, v = mha.project(q, mha.wq, mha.wk, mha.wv)  # [H, B, 1, D] each
        q, k = (mha.turned(x, self.position) for x in (q, k))
        self.cache = tuple(tf.concat([old, new], 2) for old, new in zip(self.cache, (k, v), strict=True))
        return mha.attend(q, *self.cache)

    def _attend_to_source(self, mha: Any, q: Tensor) -> tuple[Tensor, Tensor]:
        """The attention of queries `[H, B, 1, D]`. Those of one source read its keys and values together."""
        n_head, batch, _, depth = shape_of(q)
        sources = shape_of(self.source[0])[1]
        output, probs = mha.attend(tf.reshape(q, [n_head, sources, -1, depth]), *self.source, self.seen)
        return tf.reshape(output, [batch, 1, output.shape[-1]]), tf.reshape(probs, [n_head, batch, 1, -1])

    def updated_cache(self) -> tuple[Tensor, ...]:
        """The cache with the new element.

        Raises NotCacheable unless the layer attended exactly once to the target and once to the source.
        """
        if sorted(self.attended) != ["source", "target"]:
            raise NotCacheable(f"{self.layer.name} does not attend once to the target and once to the source")
        return self.cache
