"""A vocabulary of subwords as a graph. TensorFlow Text's SentencePiece operation is in the stock TensorFlow Serving."""

from __future__ import annotations

import tensorflow as tf

from txl_tf.data.subwords import SPACE, SubwordVocab
from txl_tf.environment import is_installed
from txl_tf.language.stopping import NONE
from txl_tf.serving.request import checked
from txl_tf.serving.tables import check_utf8, read_text


def has_tensorflow_text() -> bool:
    """Whether tensorflow-text, which the extra `subword` installs, is there."""
    return is_installed("tensorflow_text")


class SubwordTokenizer(tf.Module):
    """A `SubwordVocab` as a graph, with the methods of `GraphTokenizer`.

    Args:
        vocab: `SubwordVocab`.
        path: file that it was saved to, which becomes an asset for people: the operation holds the model itself.
    """

    def __init__(self, vocab: SubwordVocab, path: str):
        import tensorflow_text  # an extra; registers the operation

        super().__init__()
        self.vocab = vocab
        self.asset = tf.saved_model.Asset(path)
        self.tokenizer = tensorflow_text.SentencepieceTokenizer(vocab.model, out_type=tf.int32)

    def encode(self, text: tf.Tensor, name: str = "text") -> tf.RaggedTensor:
        """`SubwordVocab.encode` of every string of `text` `[B]`: int32 ragged `[B, None]`. Messages call it `name`."""
        return self._split(read_text(self.vocab, checked([check_utf8(name, text)], text)), ["\n", SPACE])

    def _split(self, text: tf.Tensor, separators: list[str]) -> tf.RaggedTensor:
        """Ids of every string, cut at separators that SentencePiece must not see; those stand for ids themselves."""
        if not separators:
            return self.tokenizer.tokenize(text)
        separator, *others = separators
        ids = self.vocab.separators.get(separator)
        if ids is None:
            return self._split(text, others)
        parts = tf.strings.split(text, separator)  # [B, parts]
        pieces = self._split(parts.flat_values, others)
        after = tf.RaggedTensor.from_tensor(tf.tile(tf.constant([ids], tf.int32), [pieces.nrows(), 1]))
        joined = parts.with_flat_values(tf.concat([pieces, after], 1)).merge_dims(1, 2)
        return joined[:, : -len(ids)]  # none follows the last part

    def stop_units(self, stop: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The units of stop strings `[B, S]`, their bytes: see `GraphTokenizer.stop_units`."""
        rows, count = tf.unstack(tf.shape(stop))
        flat = read_text(self.vocab, tf.reshape(stop, [-1]))
        lengths = tf.strings.length(flat)
        longest = tf.reduce_max(tf.pad(lengths, [[0, 1]], constant_values=1))
        units = tf.cast(tf.io.decode_raw(flat, tf.uint8, fixed_length=longest), tf.int32)
        units = tf.where(tf.sequence_mask(lengths, longest), units, NONE)
        return tf.reshape(units, [rows, count, longest]), tf.reshape(lengths, [rows, count])

    def decode(self, ids: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
        """`SubwordVocab.decode` of every row of `ids` `[B, N]` up to its length: string `[B]`."""
        pieces = tf.RaggedTensor.from_tensor(tf.gather(tf.constant(self.vocab.token_bytes), ids), lengths)
        text = tf.strings.unicode_transcode(tf.strings.reduce_join(pieces, -1), "UTF-8", "UTF-8")
        return tf.strings.regex_replace(text, "(?m)^ ", "") if self.vocab.adds_space else text

    def spell(self, ids: tf.Tensor) -> tf.Tensor:
        """The names of the pieces of `ids`, of any shape."""
        return tf.gather(tf.constant(self.vocab.symbols), ids)
