"""Converts ids of a language model to text: as a stream (`TextStream`), or for many prompts (`TextGenerator`)."""

import codecs
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from txl_tf.calls import check_true_or_false
from txl_tf.config.checks import check_integer
from txl_tf.data.batching import by_length, in_order, next_power_of_two, padded
from txl_tf.data.lines import LINE, answers, decoded, text_of
from txl_tf.errors import ParameterError
from txl_tf.language.beam_search import LENGTH_PENALTY, check_length_penalty
from txl_tf.language.constraint import Constraint
from txl_tf.language.generation import check_beam_options, checked_segment, generate_texts
from txl_tf.language.sampling import SAMPLING, check_sampling
from txl_tf.language.stopping import check_stop_strings, check_stops, token_of
from txl_tf.schema import check_names, keywords_of

POOL = 8  # batches of prompts that are read and sorted by length together


class TextStream:
    """Converts ids to text. A character of several bytes comes with its last byte."""

    def __init__(self, vocab: Any) -> None:
        self.vocab = vocab
        self.last = []
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def copy(self) -> "TextStream":
        """A stream with the same state, which is continued independently."""
        other = TextStream(self.vocab)
        other.last = list(self.last)
        other.decoder.setstate(self.decoder.getstate())
        return other

    def push(self, ids: Iterable[int], excess: int = 0) -> str:
        """The text that `ids` add.

        Args:
            ids: the next tokens.
            excess: number of bytes of the last subword that come after a stop string. They are left out. At other
                levels, no token goes beyond the stop string.
        """
        if self.vocab.level == "byte":
            symbols = "".join(self.vocab.symbols[i] for i in ids)
            return self.decoder.decode(symbols.encode("utf-8", "surrogateescape"))
        if self.vocab.level == "subword":
            added = b"".join(self.vocab.token_bytes[i] for i in ids)
            return self.decoder.decode(added[: len(added) - excess])
        shown = self.vocab.decode(self.last)  # whether a space comes before a word depends on the two words before it
        text = self.vocab.decode([*self.last, *ids])
        self.last = [*self.last, *ids][-2:]
        return text[len(shown) :]

    def end(self) -> str:
        """The text of the remaining bytes, which are not a complete character."""
        return self.decoder.decode(b"", final=True)


def encode_prompt(vocab: Any, prompt: str | bytes, name: str = LINE) -> np.ndarray:
    """The ids of a prompt: int32 `[n]`.

    If the vocabulary has documents, an empty prompt becomes their end token, so that a new document follows.

    Args:
        vocab: `Vocab` of the model.
        prompt: text or bytes. At the level of bytes, any bytes are possible.
        name: the name of the prompt in messages.

    Raises:
        ValueError: the prompt is not UTF-8, has a symbol that is not in the vocabulary, or is empty without documents.
    """
    by_byte = vocab.level == "byte"
    text = decoded(prompt, "surrogateescape" if by_byte else "strict", name)
    ids = vocab.encode(text.encode("utf-8", "surrogateescape") if by_byte else text, name=name)
    if not ids.size and vocab.document is not None:
        return np.array([vocab.document_id], np.int32)
    if not ids.size:
        raise ParameterError(name, prompt, "at least one token", f"{name} is empty: it must have at least one token")
    return ids


class Continuation(NamedTuple):
    """The texts that follow a prompt.

    Attributes:
        prompt: the text of the prompt.
        texts: the new texts, `num_return_sequences` of them.
        ended: for each text, whether it ended at the stop token of a `Constraint`, so that it matches the whole
            expression. Always true without a `Constraint`.
    """

    prompt: str
    texts: list[str]
    ended: list[bool]


class TextGenerator:
    """Continues prompts as text, in batches.

    Args:
        lm: `TransformerXLLM` or `TransformerLM`.
        vocab: `Vocab` of the model.
        max_new_tokens: the largest number of tokens of a text.
        num_return_sequences: number of texts for every prompt.
        stop_strings, stop_at_newline: see `generate`. A beam search has one end, which must be one token.
        stop_at_document: whether a text ends at the end of its document, if the vocabulary has documents.
        batch_size: number of prompts to continue together.
        beam_size, length_penalty: see `generate`.
        logits_processor: see `generate`. With a `Constraint`, texts end at its stop token, which is no part of them.
        segment: see `generate`.
        **sampling: see `generate`. All prompts have the same `seed`, so a text does not depend on the other prompts.

    Raises:
        ParameterError: an argument is out of its range, or the vocabulary cannot spell a stop string.
    """

    def __init__(
        self, lm: Any, vocab: Any, max_new_tokens: int = 200, *, num_return_sequences: int = 1,
        stop_strings: Iterable[str] = (), stop_at_newline: bool = False, stop_at_document: bool = True,
        batch_size: int = 16, beam_size: int = 1, length_penalty: float = LENGTH_PENALTY,
        logits_processor: Callable[..., Any] | None = None, segment: int | None = None, **sampling: Any,
    ) -> None:  # fmt: skip
        check_names("TextGenerator", sampling, [*keywords_of(TextGenerator), *SAMPLING])
        check_integer("max_new_tokens", max_new_tokens, 0)
        check_integer("batch_size", batch_size, 1)
        ends = checked_stop_arguments(
            vocab, num_return_sequences=num_return_sequences, stop_strings=stop_strings,
            stop_at_newline=stop_at_newline, stop_at_document=stop_at_document, beam_size=beam_size,
            length_penalty=length_penalty, logits_processor=logits_processor, **sampling,
        )  # fmt: skip
        self.lm = lm
        self.vocab = vocab
        self.options = {
            **ends, **sampling, "beam_size": beam_size, "length_penalty": length_penalty,
            "logits_processor": logits_processor,
        }  # fmt: skip
        self.end_token = constraint_stop_token(logits_processor)
        self.segment = checked_segment(lm, segment)
        self.max_new_tokens = max_new_tokens
        self.number = num_return_sequences
        self.batch_size = batch_size

    def continue_ids(self, ids: np.ndarray) -> Continuation:
        """Continues one prompt, int32 `[n]`. The `prompt` of the result is empty."""
        return self._continue_batch([("", ids)])[0]

    def generate_lines(
        self, prompts: Any, name: str = "prompts", strict: bool = True, numbers: Any = None
    ) -> Iterator[Any]:
        """Continues a stream of prompts in bounded memory.

        Args:
            prompts: strings or bytes, see `txl_tf.data.lines`.
            name: the name of the prompts in messages, such as their file.
            strict: whether a prompt that cannot be read raises an error. Otherwise, a `LineError` takes its place.
            numbers: line numbers for messages; by default 1, 2, ...

        Yields:
            A `Continuation` for every prompt, in order.
        """
        return answers(prompts, self._encode, self._continue, name, strict, POOL * self.batch_size, numbers)

    def _encode(self, line: str | bytes) -> tuple[str, np.ndarray]:
        """`(text, ids)` of a prompt. Raises ValueError if it cannot be read."""
        errors = "surrogateescape" if self.vocab.level == "byte" else "strict"
        prompt = text_of(line, errors, zeros=self.vocab.has_zero_bytes)
        prompt = prompt.removesuffix("\r") if self.vocab.has_plain_text else prompt
        return prompt, encode_prompt(self.vocab, prompt)

    def _continue(self, prompts: Any) -> Any:
        """The `Continuation` of each prompt `(text, ids)`, computed in batches of similar length."""
        lengths = np.array([len(ids) for _, ids in prompts], int)
        return in_order(self._continue_batch, prompts, by_length(lengths, self.batch_size))

    def _continue_batch(self, prompts: Any) -> list[Continuation]:
        """The `Continuation` of each prompt `(text, ids)` of one batch.

        The batch is padded to a power of two, because every size of a batch has its own graph.
        """
        n_padding = next_power_of_two(len(prompts)) - len(prompts)
        rows = [*prompts, *([prompts[-1]] * n_padding)]
        ids = [ids for _, ids in rows]
        n = self.number
        lengths = np.array([len(row) for row in ids])
        # A prompt in pieces is padded to whole pieces, which takes longer if no prompt is longer than one.
        segment = self.segment if self.segment is not None and lengths.max() > self.segment else None
        arrays = generate_texts(
            self.lm, padded(ids), self.max_new_tokens, lengths=lengths, num_return_sequences=n, vocab=self.vocab,
            segment=segment, **self.options,
        )  # fmt: skip
        tokens, ends, excess = (array.numpy() for array in arrays)
        found = [self._text(ids[i // n], tokens[i], ends[i], excess[i]) for i in range(len(prompts) * n)]
        texts, ended = ([*column] for column in zip(*found, strict=True))
        return [
            Continuation(prompt, texts[i * n : (i + 1) * n], ended[i * n : (i + 1) * n])
            for i, (prompt, _) in enumerate(prompts)
        ]

    def _text(self, prompt: np.ndarray, tokens: np.ndarray, length: int, excess: int) -> tuple[str, bool]:
        """The text after a prompt, and whether it `ended`, see `Continuation`."""
        new = tokens[len(prompt) : length]
        ended = True
        if self.end_token is not None:
            ended = len(new) > 0 and new[-1] == self.end_token
            new = new[: len(new) - ended]
        stream = TextStream(self.vocab)
        stream.push(prompt)  # whether a space comes before the first new word depends on the prompt
        return stream.push(new, excess) + stream.end(), bool(ended)


def checked_stop_arguments(
    vocab: Any, *, num_return_sequences: int, stop_strings: Iterable[str], stop_at_newline: bool,
    stop_at_document: bool, beam_size: int, length_penalty: float, logits_processor: Any, **sampling: Any,
) -> dict[str, Any]:  # fmt: skip
    """Checks arguments of `TextGenerator` that need no model. Returns the arguments of `generate` that end a text.

    Returns:
        One of three dictionaries:
            `{"stop_strings": ..., "stop_at_newline": ...}`, without a `Constraint` and a beam search;
            `{"stop_token": ..., "stop_strings": ...}`, with a `Constraint`;
            `{"stop_token": ...}`, in a beam search. The token is `None` if no text ends early.

    Raises:
        ParameterError: an argument is out of its range, the vocabulary cannot spell a stop string, or a beam search has
            more than one end.
    """
    check_integer("num_return_sequences", num_return_sequences, 1)
    check_sampling(1, **sampling)
    check_integer("beam_size", beam_size, 1, len(vocab))
    check_length_penalty(length_penalty, beam_size > 1)
    if beam_size > 1:
        check_beam_options(beam_size, num_return_sequences, sampling)
    stops = stops_of(vocab, stop_strings, stop_at_newline, stop_at_document)
    check_stops(len(vocab), **stops, vocab=vocab)
    token = constraint_stop_token(logits_processor)
    if token is None and beam_size == 1:
        return stops
    strings = [*stops["stop_strings"], *(["\n"] if stop_at_newline else [])]
    # With a `Constraint`, no text contains the end of a document. Its stop token is not needed as a stop string, too.
    if token is not None:
        strings = [text for text in strings if text != vocab.document and token_of(vocab, text) != token]
    if beam_size == 1:
        return {"stop_token": token, "stop_strings": strings}
    return {"stop_token": _beam_stop_token(vocab, token, strings)}


def constraint_stop_token(processor: Any) -> int | None:
    """The stop token of a `Constraint`; `None` for another processor, or for none."""
    return processor.stop_token if isinstance(processor, Constraint) else None


def _beam_stop_token(vocab: Any, token: int | None, strings: list[str]) -> int | None:
    """The stop token of a beam search: the token of a `Constraint`, or that of a stop string, or `None` without ends.

    Raises:
        ParameterError: there are several ends, or the stop string is not one token.
    """
    ends = [*([] if token is None else [vocab.symbols[token]]), *strings]
    if len(ends) > 1:
        message = f"a beam search ends all texts at one token, got {len(ends)} ends: {', '.join(map(repr, ends))}"
        if vocab.document in strings:
            message += f" (stop_at_document=False leaves out {vocab.document!r})"
        raise ParameterError("stop_strings", strings, "one end", message)
    if not strings:
        return token
    token = token_of(vocab, strings[0])
    if token is None:
        message = f"a beam search needs a stop string of one token that no other token contains, got {strings[0]!r}"
        raise ParameterError("stop_strings", strings[0], "one token", message)
    return token


def stops_of(
    vocab: Any, stop_strings: Iterable[str] = (), stop_at_newline: bool = False, stop_at_document: bool = True
) -> dict[str, Any]:
    """Arguments of `generate` that end a text at these strings and, if the vocabulary has documents, at their end."""
    check_stop_strings(stop_strings)
    check_true_or_false(stop_at_document=stop_at_document)
    ends = [vocab.document] if stop_at_document and vocab.document is not None else []
    return {"stop_strings": [*(stop_strings or ()), *ends], "stop_at_newline": stop_at_newline}
