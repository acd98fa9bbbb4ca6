"""A language model's ids as text: as they come (`TextStream`), or as the texts of many prompts (`TextGenerator`)."""

import codecs
from typing import Any

import numpy as np

from txl_tf.data.batching import by_length, in_order, padded
from txl_tf.data.lines import LINE, answers, decoded, text_of
from txl_tf.errors import ParameterError
from txl_tf.kernels.shapes import Tensor
from txl_tf.language.generation import write_texts
from txl_tf.language.sampling import SAMPLING, check_integer, check_sampling
from txl_tf.language.stopping import check_stops
from txl_tf.schema import check_names, keywords_of

POOL = 8  # batches of prompts that are read and sorted by length together


class TextStream:
    """Ids in, text out as soon as it is complete: a character of several bytes comes with its last one."""

    def __init__(self, vocab: Any):
        self.vocab = vocab
        self.last = []
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def copy(self):
        other = TextStream(self.vocab)
        other.last = list(self.last)
        other.decoder.setstate(self.decoder.getstate())
        return other

    def push(self, ids: Tensor, excess: int = 0):
        """The text that `ids` add, less the last `excess` bytes, which are of subwords."""
        if self.vocab.level == "byte":
            symbols = "".join(self.vocab.symbols[i] for i in ids)
            return self.decoder.decode(symbols.encode("utf-8", "surrogateescape"))
        if self.vocab.level == "subword":
            added = b"".join(self.vocab.token_bytes[i] for i in ids)
            return self.decoder.decode(added[: len(added) - excess])
        shown = self.vocab.decode(self.last)  # a word goes with a space or without, as the two before it say
        text = self.vocab.decode([*self.last, *ids])
        self.last = [*self.last, *ids][-2:]
        return text[len(shown) :]

    def end(self):
        """What is left: bytes that never became a character."""
        return self.decoder.decode(b"", final=True)


def encode_prompt(vocab: Any, prompt: Tensor, name: str = LINE):
    """The ids of a prompt, text or bytes: int32 `[n]`. At the level of bytes it may be any bytes.

    An empty one begins a document, where the vocabulary has documents.

    Raises:
        ValueError: it is empty, not UTF-8, or has a symbol that the vocabulary does not have; calls it `name`.
    """
    by_byte = vocab.level == "byte"
    text = decoded(prompt, "surrogateescape" if by_byte else "strict", name)
    ids = vocab.encode(text.encode("utf-8", "surrogateescape") if by_byte else text, name=name)
    if not ids.size and vocab.document is not None:
        return np.array([vocab.document_id], np.int32)
    if not ids.size:
        raise ParameterError(name, prompt, "at least one token", f"{name} is empty: it must have at least one token")
    return ids


class TextGenerator:
    """Prompts to the texts that follow them.

    Args:
        lm: `TransformerXLLM` or `TransformerLM`.
        vocab: `Vocab` of the model.
        max_new_tokens: most tokens of a text.
        num_return_sequences: texts for every prompt.
        stop_strings, stop_at_newline: see `generate`.
        stop_at_document: whether a text ends with its document, where the vocabulary has documents.
        batch_size: prompts to continue at a time.
        **sampling: see `generate`. A `seed` is that of every prompt, whose text does not depend on the others then.
    """

    def __init__(
        self, lm: Any, vocab: Any, max_new_tokens: int = 200, *, num_return_sequences: int = 1, stop_strings: Any = (),
        stop_at_newline: bool = False, stop_at_document: bool = True, batch_size: int = 16, **sampling: Any,
    ):  # fmt: skip
        check_names("TextGenerator", sampling, [*keywords_of(TextGenerator), *SAMPLING])
        check_integer("max_new_tokens", max_new_tokens, 0)
        check_integer("num_return_sequences", num_return_sequences, 1)
        check_integer("batch_size", batch_size, 1)
        check_sampling(1, **sampling)
        self.stops = stops_of(vocab, stop_strings, stop_at_newline, stop_at_document)
        check_stops(len(vocab), None, **self.stops, vocab=vocab)
        self.lm, self.vocab, self.sampling = lm, vocab, sampling
        self.max_new_tokens, self.number, self.batch_size = max_new_tokens, num_return_sequences, batch_size

    def generate_lines(self, prompts: Any, name: str = "prompts", strict: bool = True, numbers: Any = None):
        """Yields `(prompt, texts)` for every prompt, in order and in bounded memory: its text, and the
        `num_return_sequences` texts that follow it.

        Args:
            prompts: strings or bytes, see `txl_tf.data.lines`.
            name: what messages call the prompts, such as their file.
            strict: whether a prompt that cannot be read is an error; else a `LineError` is in its place.
            numbers: of the lines, for messages; by default they are counted from 1.
        """
        return answers(prompts, self._encode, self._continue, name, strict, POOL * self.batch_size, numbers)

    def _encode(self, line: str):
        prompt = text_of(line, "surrogateescape" if self.vocab.level == "byte" else "strict")
        prompt = prompt.removesuffix("\r") if self.vocab.has_plain_text else prompt
        return prompt, encode_prompt(self.vocab, prompt)

    def _continue(self, prompts: Any):
        lengths = np.array([len(ids) for _, ids in prompts], int)
        return in_order(self._write, prompts, by_length(lengths, self.batch_size))

    def _write(self, prompts: Any):
        """Of one batch. It is filled up to a power of two: few sizes, each of which has a graph of its own."""
        rows = [*prompts, *[prompts[-1]] * ((1 << (len(prompts) - 1).bit_length()) - len(prompts))]
        ids, n = [ids for _, ids in rows], self.number
        lengths = np.array([len(row) for row in ids])
        options = {"lengths": lengths, "num_return_sequences": n, "vocab": self.vocab, **self.stops, **self.sampling}
        arrays = [array.numpy() for array in write_texts(self.lm, padded(ids), self.max_new_tokens, **options)]
        found = [self._text(ids[i // n], *(array[i] for array in arrays)) for i in range(len(prompts) * n)]
        return [(prompt, found[i * n : (i + 1) * n]) for i, (prompt, _) in enumerate(prompts)]

    def _text(self, prompt: Tensor, tokens: Tensor, length: Tensor, excess: Any):
        stream = TextStream(self.vocab)
        stream.push(prompt)
        return stream.push(tokens[len(prompt) : length], excess) + stream.end()


def stops_of(vocab: Any, stop_strings: Any = (), stop_at_newline: bool = False, stop_at_document: bool = True):
    """Arguments of `generate` that end a text at these strings and, where the vocabulary has documents, at its end."""
    ends = [vocab.document] if stop_at_document and vocab.document is not None else []
    return {"stop_strings": [*stop_strings, *ends], "stop_at_newline": stop_at_newline}
