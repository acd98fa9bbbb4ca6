"""OpenAI's interface /v1/completions for a language model.

`Options` checks a request. For every text of the answer, the decoder gets a `Job`. A `Choice` turns the tokens of the
job into text, and ends the text at a stop string.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from txl_config import SamplingConfig
from txl_config.errors import ParameterError, brief
from txl_programs.server.errors import Failed
from txl_tf.data.text_files import plain_text
from txl_tf.data.vocabulary import Vocab
from txl_tf.language.sampling import seeds_of_sequences
from txl_tf.language.stopping import spell
from txl_tf.language.text_generator import TextStream
from txl_tf.serving.decoder import Alternatives, Decoder, Job, Piece

MOST_STOPS = 4
MOST_LOGPROBS = 5
# Parameters of OpenAI's interface that this server does not support, and the values that it accepts for them, which
# change nothing.
NEUTRAL: dict[str, tuple] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "suffix": ("", None),
}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bounds of a request.

    Attributes:
        max_tokens: most tokens of a prompt.
        max_new_tokens: most tokens of a text.
        max_rows: most texts of a request.
    """

    max_tokens: int = 4096
    max_new_tokens: int = 1024
    max_rows: int = 16


def whole(values: dict, name: str, default: Any, least: int, most: int) -> Any:
    """Returns the integer `name` of a request; `default` if it is left out or null.

    Raises Failed if it is no integer, or does not lie between `least` and `most`.
    """
    value = values.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise Failed(400, f"{name} must be an integer from {least} to {most}, got {brief(value)}", name)
    return value


def flag(values: dict, name: str) -> bool:
    """Returns the bool `name` of a request; False if it is left out or null. Raises Failed for any other value."""
    value = values.get(name)
    if value is None:
        return False
    if type(value) is not bool:
        raise Failed(400, f"{name} must be true or false, got {brief(value)}", name)
    return value


def characters_of(vocab: Vocab) -> frozenset[str]:
    """Returns the characters of the texts that a model can write. Empty at levels without a symbol for each of them."""
    if vocab.level in ("byte", "subword"):
        return frozenset()
    return frozenset("".join(vocab.symbols)) | frozenset(" \n" if vocab.level == "word" else "")


def can_write(vocab: Vocab, text: str, characters: frozenset[str]) -> bool:
    """Whether a text may occur in the texts that a model writes.

    A stop string may begin and end inside a word, unlike the stop strings of `txl_tf.language.stopping`.
    """
    if characters:
        return characters.issuperset(text)
    try:
        spell(vocab, text)
    except ParameterError:
        return False
    return True


class Options:
    """The checked parameters of a request, as attributes.

    Args:
        values: the JSON object of the request.
        vocab: vocabulary of the model.
        bounds: bounds of a request.
        characters: see `characters_of`.

    Raises:
        Failed: a parameter is wrong or would have no effect.
    """

    KNOWN = (
        "model", "prompt", "max_tokens", "n", "stream", "stream_options", "logprobs", "echo", "stop", "seed", "best_of",
        "user", *SamplingConfig.names(), *NEUTRAL,
    )  # fmt: skip

    def __init__(self, values: dict, vocab: Vocab, bounds: Bounds, characters: frozenset[str]):
        for name in values:
            if name not in self.KNOWN:
                raise Failed(
                    400, f"{brief(name)} is not a parameter of this server, which has {', '.join(self.KNOWN)}", name
                )
        for name, neutral in NEUTRAL.items():
            if name in values and (values[name] not in neutral or isinstance(values[name], bool)):  # False equals 0
                raise Failed(400, f"{name} is not supported by this server: leave it out", name)
        self.n = whole(values, "n", 1, 1, bounds.max_rows)
        best_of = values.get("best_of")
        if best_of not in (None, self.n) or isinstance(best_of, bool):
            raise Failed(400, "best_of must be left out, or equal n", "best_of")
        self.max_new_tokens = whole(values, "max_tokens", min(16, bounds.max_new_tokens), 0, bounds.max_new_tokens)
        self.logprobs = whole(values, "logprobs", None, 0, MOST_LOGPROBS)
        self.echo = flag(values, "echo")
        if not self.max_new_tokens and not self.echo:
            raise Failed(400, "max_tokens must be at least 1 without echo, got 0", "max_tokens")
        self.stream = flag(values, "stream")
        stream_options = values.get("stream_options")
        if stream_options is not None and (
            not self.stream or not isinstance(stream_options, dict) or stream_options.keys() - {"include_usage"}
        ):
            raise Failed(400, "stream_options must be an object with include_usage, and needs stream", "stream_options")
        self.include_usage = flag(stream_options or {}, "include_usage")
        self.stop = self._stop(values.get("stop"), vocab, characters)
        seed = whole(values, "seed", None, -(2**31), 2**31 - 1)
        self.sampling = _sampling(values)
        self.prompts = self._prompts(values.get("prompt"), vocab, bounds)
        if len(self.prompts) * self.n > bounds.max_rows:
            raise Failed(400, f"n times the number of prompts must be at most {bounds.max_rows}", "n")
        self.seeds = [seeds_of_sequences(seed, self.n) for _ in self.prompts]  # for each prompt, the seeds of its texts

    def _stop(self, stop: Any, vocab: Vocab, characters: frozenset[str]) -> list[str]:
        """Returns the stop strings of a request as a list.

        Raises Failed if there are too many, if one is empty, or if no text can contain one.

        Args:
            stop: a string, a list of strings, or `None` for no stop string. Failed is raised for any other value.
            vocab: vocabulary of the model.
            characters: see `characters_of`.
        """
        stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
        is_list = isinstance(stops, list) and len(stops) <= MOST_STOPS
        if not is_list or not all(isinstance(text, str) and text for text in stops):
            raise Failed(
                400, f"stop must be at most {MOST_STOPS} strings that are not empty, got {brief(stop)}", "stop"
            )
        stops = [plain_text(text) if vocab.has_plain_text else text for text in stops]
        for text in stops:
            if not text or not can_write(vocab, text, characters):
                message = f"stop must be text that the vocabulary of {len(vocab)} symbols can spell, got {brief(stop)}"
                raise Failed(400, message, "stop")
        return stops

    def _prompts(self, prompt: Any, vocab: Vocab, bounds: Bounds) -> list[np.ndarray]:
        """Returns the ids of each prompt. Raises Failed if one cannot be read.

        Args:
            prompt: a string, a list of ids, or a list of either; `None` for an empty string.
            vocab: vocabulary of the model.
            bounds: bounds of the request.
        """
        if prompt is None:
            prompt = ""
        is_ids = isinstance(prompt, list) and bool(prompt) and all(type(x) is int for x in prompt)
        prompts = [prompt] if is_ids or isinstance(prompt, str) else prompt
        if not isinstance(prompts, list) or not 1 <= len(prompts) <= bounds.max_rows:
            wanted = f"a string, a list of ids, or a list of at most {bounds.max_rows} of these"
            raise Failed(400, f"prompt must be {wanted}, got {brief(prompt)}", "prompt")
        if not all(isinstance(one_prompt, (str, list)) for one_prompt in prompts):
            raise Failed(
                400, f"prompt must have only strings, only ids or only lists of ids, got {brief(prompt)}", "prompt"
            )
        return [self._prompt(one_prompt, vocab, bounds.max_tokens) for one_prompt in prompts]

    def _prompt(self, prompt: Any, vocab: Vocab, max_tokens: int) -> np.ndarray:
        """Returns the ids of one prompt, a string or a list of ids, int32 `[n]`. Raises Failed if it cannot be read."""
        if isinstance(prompt, list) and all(type(x) is int for x in prompt):
            if any(not 0 <= x < len(vocab) for x in prompt):
                raise Failed(400, f"prompt must have ids from 0 to {len(vocab) - 1}, got {brief(prompt)}", "prompt")
            ids = np.array(prompt, np.int32)
        elif isinstance(prompt, str):
            if len(prompt) > 100 * max_tokens:  # refused before the vocabulary spends time on it
                message = f"prompt must have at most {max_tokens} tokens, got {len(prompt)} characters"
                raise Failed(400, message, "prompt")
            data = prompt.encode("utf-8", "surrogatepass")
            try:
                ids = vocab.encode(data if vocab.level == "byte" else data.decode())
            except UnicodeDecodeError as error:
                message = f"prompt must be Unicode text, got half of a surrogate pair at byte {error.start}"
                raise Failed(400, message, "prompt") from None
            except ValueError as error:
                raise Failed(400, f"prompt: {error}", "prompt") from None
        else:
            raise Failed(400, f"prompt must be a string or a list of ids, got {brief(prompt)}", "prompt")
        if len(ids) > max_tokens:
            raise Failed(400, f"prompt must have at most {max_tokens} tokens, got {len(ids)}", "prompt")
        return ids


def _sampling(values: dict) -> dict[str, float]:
    """Returns the options of sampling of a request. Options that are left out or null have their defaults.

    Raises Failed if one is wrong.
    """
    given = {name: values[name] for name in SamplingConfig.names() if values.get(name) is not None}
    try:
        config = SamplingConfig(**given)
        config.check_used()
        return config.to_dict()
    except ParameterError as error:
        raise Failed(400, str(error), error.name) from None


class Choice:
    """One text of an answer, to which `add` adds new tokens.

    For streaming, `take` returns parts of the text and its tokens as soon as no stop string can remove them.

    Args:
        index: number of the text in the answer.
        prompt: ids of the prompt.
        vocab: vocabulary of the model.
        options: options of the request.
    """

    def __init__(self, index: int, prompt: np.ndarray, vocab: Vocab, options: Options):
        self.index = index
        self.prompt = prompt
        self.vocab = vocab
        self.options = options
        self.stream = TextStream(vocab)
        self.text = ""  # all of the text
        self.n_taken = 0  # number of characters of the text that `take` has returned
        # With logprobs: the tokens that `take` has not returned yet. Each is the dictionary of `_token`, with `offset`
        # and `end`, the numbers of characters before the token and up to its end.
        self.tokens: list[dict] = []
        self.new_tokens = 0  # number of generated tokens
        self.finish_reason: str | None = None  # "stop" or "length" once the text has ended
        self.start = 0  # where the new text begins in `text`: after the prompt with `echo`
        self._add_prompt()

    def _add_prompt(self) -> None:
        """Gives the prompt to the stream of tokens. With `echo`, the text begins with the prompt."""
        prompt_text = self.stream.push(self.prompt)
        if self.options.echo:
            self.text = prompt_text
        self.start = len(self.text)

    def add_prompt_tokens(self, alternatives: Alternatives | None) -> None:
        """Adds the tokens of the prompt with their log-probabilities, for `echo` with `logprobs`.

        Args:
            alternatives: log-probabilities of the tokens after the first; `None` for a prompt of one token or none.
        """
        stream = TextStream(self.vocab)
        offset = 0
        for i, token in enumerate(self.prompt.tolist()):
            row = None if i == 0 or alternatives is None else i - 1  # the first token has no log-probability
            described = self._token(token, stream, alternatives, row)
            text = stream.push([token])
            self.tokens.append({**described, "offset": offset, "end": offset + len(text)})
            offset += len(text)

    def add(self, piece: Piece) -> None:
        """Adds new tokens to the text. Cuts the text before a stop string. Sets `finish_reason` if the text ends.

        The tokens of `piece` after a stop string are ignored.
        """
        for i, token in enumerate(piece.tokens):
            self.new_tokens += 1
            if piece.stopped and i == len(piece.tokens) - 1:  # the token that ends a document is not text
                break
            offset = len(self.text)
            described = {} if self.options.logprobs is None else self._token(token, self.stream, piece.alternatives, i)
            self.text += self.stream.push([token])
            if described:
                self.tokens.append({**described, "offset": offset, "end": len(self.text)})
            if self._cut_at_stop():
                return
        if piece.done:
            self.text += self.stream.end()
            if not self._cut_at_stop():
                self.finish_reason = "stop" if piece.stopped else "length"

    def _cut_at_stop(self) -> bool:
        """Ends the text before the first stop string after the prompt. Returns whether there is one."""
        offsets = [self.text.find(stop, self.start) for stop in self.options.stop]
        cut = min((offset for offset in offsets if offset >= 0), default=None)
        if cut is None:
            return False
        self.text = self.text[:cut]
        self.tokens = [token for token in self.tokens if token["offset"] < cut or token["offset"] < self.start]
        self.finish_reason = "stop"
        return True

    def _token(self, token: int, stream: TextStream, alternatives: Alternatives | None, row: int | None) -> dict:
        """Describes a token.

        Args:
            token: id of the token.
            stream: the stream of tokens before it.
            alternatives: log-probabilities; `None` if the token has none.
            row: index of the token in `alternatives`; `None` if the token has none.

        Returns:
            Dictionary of `text` (see `_shown`), `log_prob`, and `top`, the `{text: log-probability}` of the most likely
            tokens in its place. `log_prob` and `top` are `None` for a token without log-probabilities.
        """
        text = _shown(token, stream)
        if alternatives is None or row is None:
            return {"text": text, "log_prob": None, "top": None}
        n = self.options.logprobs or 0
        top: dict[str, float] = {}
        for other, log_prob in zip(alternatives.top_ids[row][:n], alternatives.top_log_probs[row][:n], strict=True):
            top.setdefault(_shown(int(other), stream), round(float(log_prob), 6))
        return {"text": text, "log_prob": round(float(alternatives.log_probs[row]), 6), "top": top}

    def take(self) -> tuple[str, list[dict]]:
        """Returns the text and the tokens that are certain and that no earlier call has returned.

        Until the text has ended, a suffix that is the beginning of a stop string is not certain: the stop string would
        be cut off.
        """
        end = len(self.text)
        if self.finish_reason is None:
            longest = max(map(len, self.options.stop), default=0)
            starts_of_stops = (
                offset
                for offset in range(max(self.start, end - longest + 1), end)
                if any(stop.startswith(self.text[offset:]) for stop in self.options.stop)
            )
            end = min(starts_of_stops, default=end)
        end = max(end, self.n_taken)
        text = self.text[self.n_taken : end]
        self.n_taken = end
        done = self.finish_reason is not None
        taken = [token for token in self.tokens if done or token["end"] <= end]
        self.tokens = self.tokens[len(taken) :]
        return text, taken

    def as_json(self) -> dict[str, Any]:
        """Returns the result of `take` as a choice in the form of OpenAI's answers."""
        text, tokens = self.take()
        choice: dict[str, Any] = {"index": self.index, "text": text, "finish_reason": self.finish_reason}
        choice["logprobs"] = None
        if self.options.logprobs is not None:
            choice["logprobs"] = {
                "tokens": [token["text"] for token in tokens],
                "token_logprobs": [token["log_prob"] for token in tokens],
                "top_logprobs": [token["top"] for token in tokens],
                "text_offset": [token["offset"] for token in tokens],
            }
        return choice


class Completions:
    """Answers requests to /v1/completions.

    Args:
        name: name of the model.
        vocab: vocabulary of the model.
        decoder: `Decoder` that generates the texts.
        bounds: bounds of a request.
    """

    def __init__(self, name: str, vocab: Vocab, decoder: Decoder, bounds: Bounds):
        self.name = name
        self.vocab = vocab
        self.decoder = decoder
        self.bounds = bounds
        self.characters = characters_of(vocab)

    def checked(self, values: dict) -> Options:
        """Returns the parameters of a request. Raises Failed if one is wrong, or names another model."""
        if values.get("model") not in (None, self.name):
            raise Failed(404, f"model must be {self.name}, got {brief(values['model'])}", "model")
        return Options(values, self.vocab, self.bounds, self.characters)

    async def answer(self, options: Options) -> dict[str, Any]:
        """Generates all texts, and returns the whole answer."""
        answer = self._head()
        choices: list[Choice] = []
        async for _ in self._grown(options, choices):
            pass  # until all texts have ended
        answer["choices"] = [choice.as_json() for choice in choices]
        answer["usage"] = _usage(options, choices)
        return answer

    async def events(self, options: Options) -> AsyncIterator[bytes]:
        """Generates all texts, and yields the parts of the answer as server-sent events."""
        head = self._head()
        usage = {"usage": None} if options.include_usage else {}
        choices: list[Choice] = []
        async for choice in self._grown(options, choices):
            part = choice.as_json()
            if part["text"] or part["finish_reason"] or (part["logprobs"] or {}).get("tokens"):
                yield _event({**head, "choices": [part], **usage})
        if options.include_usage:
            yield _event({**head, "choices": [], "usage": _usage(options, choices)})
        yield b"data: [DONE]\n\n"

    def _head(self) -> dict[str, Any]:
        """Returns the fields that all parts of an answer have."""
        identity = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"}
        return {**identity, "created": int(time.time()), "model": self.name}

    async def _grown(self, options: Options, choices: list[Choice]) -> AsyncIterator[Choice]:
        """Generates all texts. Yields a choice whenever it has new tokens or has ended.

        Args:
            options: options of the request.
            choices: an empty list. Before the first choice is yielded, the list gets all choices.

        Raises:
            Busy: too many texts are waiting.
            Exception: the error that ended a text.
        """
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        jobs: list[Job | None] = []
        for prompt, seeds in zip(options.prompts, options.seeds, strict=True):
            alternatives = None
            if options.echo and options.logprobs is not None and len(prompt) > 1:
                alternatives = await asyncio.to_thread(self.decoder.alternatives, prompt)
            for seed in seeds:
                choice = Choice(len(choices), prompt, self.vocab, options)
                if options.echo and options.logprobs is not None:
                    choice.add_prompt_tokens(alternatives)
                choices.append(choice)
                jobs.append(self._job(options, prompt, seed, _deliverer(loop, pieces, choice.index)))
        try:
            for choice, job in zip(choices, jobs, strict=True):
                if job is None:  # max_tokens is 0: the text is only the prompt
                    choice.finish_reason = "length"
                    yield choice
                else:
                    self.decoder.submit(job)
            n_running = sum(job is not None for job in jobs)
            while n_running:
                index, piece = await pieces.get()
                choice = choices[index]
                if choice.finish_reason is not None:  # a piece that was delivered before its job was cancelled
                    continue
                if piece.error is not None:
                    raise piece.error
                choice.add(piece)
                if choice.finish_reason is not None:
                    n_running -= 1
                    _cancel(jobs[index])
                yield choice
        finally:  # after an error, or if the client has closed the connection, texts may still be running
            for job in jobs:
                _cancel(job)

    def _job(self, options: Options, prompt: np.ndarray, seed: int, deliver: Any) -> Job | None:
        """Returns the job of a text; `None` if the request asks for no new token."""
        if not options.max_new_tokens:
            return None
        ids = prompt if len(prompt) else np.array([self.vocab.start_id], np.int32)
        logprobs = options.logprobs is not None
        return Job(ids, options.max_new_tokens, deliver, logprobs, seed=seed, **options.sampling)


def _deliverer(loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue, index: int) -> Any:
    """Returns a function that the thread of the decoder calls with a piece. It puts `(index, piece)` into a queue.

    The queue belongs to the event loop. If the loop is closed, the function does nothing.
    """

    def deliver(piece: Piece) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(pieces.put_nowait, (index, piece))

    return deliver


def _cancel(job: Job | None) -> None:
    """Tells the decoder to end a text early. Does nothing for `None`."""
    if job is not None:
        job.cancelled = True


def _usage(options: Options, choices: list[Choice]) -> dict[str, int]:
    """Returns the numbers of tokens of an answer. The tokens of a prompt count once, even if it has n texts."""
    prompt = sum(map(len, options.prompts))
    new = sum(choice.new_tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _shown(token: int, stream: TextStream) -> str:
    r"""Returns the text that a token adds to a stream. The stream stays as it is.

    Bytes that are not whole characters become `bytes:` and all bytes of the token, such as `bytes:\x61\xff`, as in
    OpenAI's answers.
    """
    vocab = stream.vocab
    if vocab.level == "subword":
        data = vocab.token_bytes[token]
    elif vocab.level == "byte":
        data = vocab.symbols[token].encode("utf-8", "surrogateescape")
    else:
        return stream.copy().push([token])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _event(values: dict) -> bytes:
    """Returns values as a server-sent event."""
    return b"data: " + json.dumps(values).encode() + b"\n\n"
