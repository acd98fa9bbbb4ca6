"""Documents in a segment: a token does not see the content of earlier documents.

A document begins with `reset_token`, which ends the previous document. Here is a text `a a E b b E c` with three
documents, where E is the token, in segments of four:

    segment     a a E b | b E c ...        index         0 1 2 3 | 0 1 2
                                           starts        . . 2 2 | . 1 1       . is BEFORE

If a document begins at index s of a segment, everything before s acts for its tokens as the initial zero memory: they
attend to these keys, with their distances, but the content is zero. There are as many of these keys as at the beginning
of a text. So a document gets exactly the results that it would get as a separate text.

Instead of, or besides, a token that begins a document, flags `done` may mark the tokens that end one, as the steps of
an environment do in reinforcement learning. The token after a flag begins a document. If the last token of a segment
has a flag, nothing of the segment is in the next memory.

Shapes:
    B: batch      T: tgt_len, the segment      M: mlen, the memory      K: klen, the keys, M + T
    H: n_head     D: d_head
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import keras
import tensorflow as tf

from txl_tf.kernels.shapes import Size, Tensor, shape_of
from txl_tf.nn.arguments import LayerOptions, stored
from txl_tf.nn.base import Layer
from txl_tf.nn.checks import as_ids
from txl_tf.nn.masks import as_bool

BEFORE = -(1 << 30)  # the index of a document's first token if it is in an earlier segment


class Mask(NamedTuple):
    """The keys that the queries of a segment see."""

    attn_mask: Tensor  # float [T, K], or [B, T, K] with documents: 1 where masked, see `create_mask`
    content: Tensor | None = None  # float [B, T, K], see `content_mask`; `None` without documents
    starts: Tensor | None = None  # int32 [B, T], see `document_starts`; `None` without documents
    last: Tensor | None = None  # int32 [B, 1], see `last_start`; `None` without documents

    def layer_arguments(self, mem: Tensor) -> tuple[Any, ...]:
        """The arguments of a layer's call from `attn_mask` on: `(attn_mask, mem)`, or `(attn_mask, mem, content)`."""
        return (self.attn_mask, mem) if self.content is None else (self.attn_mask, mem, self.content)

    def forget(self, mems: Sequence[Tensor], lengths: Tensor | None = None) -> Any:
        """Sets memories after the segment to zeros before each row's last document; see `of_last_document`.

        Args:
            mems: tensors `[B, any, d_model]` that end with the segment.
            lengths: int32 `[B]`, the number of tokens in each row. `None`: T.

        Returns:
            A list of such tensors, or `mems` itself if there are no documents.
        """
        if self.last is None:
            return mems
        if any(keras.backend.is_keras_tensor(x) for x in (self.last, lengths, *mems)):
            return _Forget()(list(mems), self.last, self.starts, lengths)
        lengths = shape_of(self.starts)[1] if lengths is None else lengths
        in_last_document: Any = of_last_document(self.last, lengths, shape_of(mems[0])[1])
        return [mem * tf.cast(in_last_document, mem.dtype) for mem in mems]


def document_mask(
    attn_mask: Tensor, tokens: Tensor | None = None, reset_token: int | None = None, same_length: bool = False,
    lengths: Tensor | None = None, done: Tensor | None = None,
) -> Mask:  # fmt: skip
    """The masks for a segment in which documents begin. See the example of `TransformerXLLayer`.

    A document begins at a `reset_token`, and after a token that is `done`. At least one of the two must be given. The
    tensors may also be symbolic inputs of Keras.

    Args:
        attn_mask: float `[T, K]`, see `create_mask`.
        tokens: int `[B, T]`; needed for a `reset_token`.
        reset_token: int, the id of the first token of a document, or `None`.
        same_length: whether every query sees the same number of keys.
        lengths: int32 `[B]`, the number of tokens in each row. `None`: T.
        done: bool `[B, T]`, true at the last token of a document, or `None`.

    Returns:
        `Mask`. Layers take its `attn_mask`, and its `content` as `content_mask`. Its method `forget` sets the memory of
        documents that have ended to zeros.
    """
    if any(keras.backend.is_keras_tensor(x) for x in (attn_mask, tokens, lengths, done)):
        return _DocumentMask(reset_token, same_length)(attn_mask, tokens, lengths, done)
    qlen, klen = shape_of(attn_mask)
    counted = None if lengths is None else tf.range(qlen) < lengths[:, None]
    starts = document_starts(tokens, reset_token, counted, done)
    if not same_length:
        attn_mask = mask_far_zeros(attn_mask, starts)
    return Mask(attn_mask, content_mask(starts, klen - qlen), starts, last_start(starts, done, lengths))


@keras.saving.register_keras_serializable("txl_tf")
class _DocumentMask(Layer):
    """`document_mask` as a layer, for symbolic inputs of Keras. It also converts its inputs."""

    @stored
    def __init__(
        self, reset_token: int | None = None, same_length: bool = False, **kwargs: Unpack[LayerOptions]
    ) -> None:
        super().__init__(**{"autocast": False, **kwargs})

    def call(self, attn_mask: Tensor, tokens: Any = None, lengths: Any = None, done: Any = None) -> Any:
        tokens = None if tokens is None else as_ids("tokens", tokens)
        lengths = None if lengths is None else as_ids("lengths", lengths)
        done = None if done is None else as_bool("done", done)
        return document_mask(attn_mask, tokens, self.reset_token, self.same_length, lengths, done)


@keras.saving.register_keras_serializable("txl_tf")
class _Forget(Layer):
    """`Mask.forget` as a layer, for symbolic inputs of Keras."""

    def __init__(self, **kwargs: Unpack[LayerOptions]) -> None:
        super().__init__(**{"autocast": False, **kwargs})

    def call(self, mems: Any, last: Tensor, starts: Tensor, lengths: Any = None) -> Any:
        return Mask(last, starts=starts, last=last).forget(mems, lengths)


def last_start(starts: Tensor, done: Tensor | None = None, lengths: Tensor | None = None) -> Any:
    """The index at which each row's last document begins, or `BEFORE`: int32 `[B, 1]`. The next segment continues it.

    If the last token of a row ends a document, the last document begins with the next segment: the index is the number
    of tokens in the row.

    Args:
        starts: int32 `[B, T]`, see `document_starts`.
        done, lengths: see `document_mask`.
    """
    if done is None:
        return starts[:, -1:]
    batch, tgt_len = shape_of(starts)
    ends: Any = tf.fill([batch], tgt_len) if lengths is None else lengths
    is_done = tf.gather(done, tf.maximum(ends - 1, 0), batch_dims=1) & (ends > 0)
    return tf.where(is_done[:, None], ends[:, None], starts[:, -1:])


def document_starts(
    tokens: Tensor | None, reset_token: int | None, counted: Tensor | None = None, done: Tensor | None = None
) -> Any:
    """The index in the segment at which the document of each token begins, or `BEFORE`.

    Args:
        tokens: int `[B, T]`; needed for a `reset_token`.
        reset_token: int, the id of the first token of a document, or `None`.
        counted: bool, broadcasts to `[B, T]`. A token where it is False does not begin a document. `None`: all count.
        done: bool `[B, T]`, true at the last token of a document, or `None`.

    Returns:
        int32 `[B, T]`.
    """
    resets: Any = None
    if reset_token is not None:
        resets = tokens == reset_token
    if done is not None:
        after_done = tf.pad(done[:, :-1], [[0, 0], [1, 0]])
        resets = after_done if resets is None else resets | after_done
    batch, tgt_len = shape_of(resets)
    if counted is not None:
        resets &= counted
    row: Any = tf.range(batch)
    number_in_row: Any = tf.cumsum(tf.cast(resets, tf.int32), 1)
    documents = number_in_row + (tgt_len + 1) * row[:, None]  # a number for every document of the batch
    index = tf.where(resets, tf.range(tgt_len), BEFORE)  # only the first token of a document has its own index
    return tf.gather(tf.math.unsorted_segment_max(index, documents, batch * (tgt_len + 1)), documents)


def content_mask(starts: Tensor, mlen: Size) -> Any:
    """1 where a key of memory or segment is in the query's document or after it, 0 where its content counts as zero.

    Args:
        starts: int32 `[B, T]`, see `document_starts`.
        mlen: int or int scalar tensor, the length of the memory.

    Returns:
        float32 `[B, T, M + T]`.
    """
    index: Any = tf.range(-mlen, shape_of(starts)[1])
    return tf.cast(index >= starts[..., None], tf.float32)


def mask_far_zeros(attn_mask: Tensor, starts: Tensor) -> Any:
    """`attn_mask` that also masks the keys that a query would not see in a text that begins with its document.

    In such a text, the query at index i sees the last `M + i + 1` keys. `M` of them are the zeros before the text.

    Args:
        attn_mask: float32 `[T, K]`, 1 where masked, see `create_mask`.
        starts: int32 `[B, T]`.

    Returns:
        float32 `[B, T, K]`.
    """
    keys: Any = tf.range(shape_of(attn_mask)[1])
    return tf.maximum(attn_mask, tf.cast(keys < starts[..., None], tf.float32))


def of_last_document(starts: Tensor, lengths: Tensor, n_positions: Size) -> Any:
    """1 for the positions of memory and segment in a row's last document, 0 for the positions before it.

    Args:
        starts: int32 `[B, T]`, of which the last column is used; or `[B, 1]`, see `last_start`.
        lengths: int, or int32 `[B]`, the number of tokens of the segment that count.
        n_positions: int or int scalar tensor. The result is for this number of positions, the last ones.

    Returns:
        float32 `[B, n_positions, 1]`.
    """
    end: Any = tf.reshape(lengths, [-1, 1])
    index = end - n_positions + tf.range(n_positions)
    is_in_last_document: Any = tf.cast(index >= starts[:, -1:], tf.float32)
    return is_in_last_document[..., None]
