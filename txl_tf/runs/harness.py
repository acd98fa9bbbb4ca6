"""A language model as a model of lm-evaluation-harness (the package lm-eval).

    import lm_eval
    import txl_tf

    model = txl_tf.harness_model("runs/my")
    results = lm_eval.simple_evaluate(model=model, tasks=["wikitext", "lambada_openai"])

A text of more than `segment` tokens is read segment by segment, each with the memory of the segment before, as by
`lm.score`. The first token of every text is predicted from the token that ends a document or, if the vocabulary has
none, a line.

Shapes:
    B: batch      T: tokens of a segment      n: tokens of the longest text in a batch, minus 1
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from txl_tf.calls import checked_call
from txl_tf.config import SamplingConfig
from txl_tf.config.checks import check_integer
from txl_tf.data.batching import padded
from txl_tf.environment import is_installed
from txl_tf.errors import ParameterError
from txl_tf.language.language_model import LanguageModel
from txl_tf.language.stopping import check_stops
from txl_tf.language.text_generator import TextGenerator
from txl_tf.runs.folder import RunFolder
from txl_tf.schema import check_type

SEGMENT = 512  # tokens
# Options of a request for text, by their names in tasks: those that `TextGenerator` takes, and others.
_SAMPLING = [name for name in SamplingConfig.names() if name != "repetition_window"]
_OTHER_OPTIONS = ("do_sample", "until", "max_gen_toks", "max_new_tokens")


@checked_call
def harness_model(
    model_dir: str | os.PathLike,
    ckpt_path: str | os.PathLike | None = None,
    *,
    batch_size: int = 16,
    max_gen_toks: int = 256,
    segment: int | None = None,
    **changes: Any,
) -> Any:
    """Opens a run as a model for `lm_eval.simple_evaluate`, see the module.

    Args:
        model_dir, ckpt_path, **changes: see `load_run`.
        batch_size: texts that are read together.
        max_gen_toks: most tokens of a generated text, for tasks that give no number.
        segment: most tokens that are read at a time, by default 512. With absolute positions, as in the vanilla
            language model, it is at most `context_len`, the default.

    Returns:
        An `lm_eval.api.model.LM`.

    Raises:
        ParameterError: lm-eval is not installed, the run is not one of a language model, or an argument is out of its
            range.
    """
    if not is_installed("lm_eval"):
        message = 'harness_model needs lm-eval, which is not installed: pip install "txl_tf[eval]"'
        raise ParameterError("lm_eval", None, "installed", message)
    check_integer("batch_size", batch_size, 1)
    check_integer("max_gen_toks", max_gen_toks, 1)
    if segment is not None:
        check_integer("segment", segment, 1)
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports] - an extra, and slow to import

    folder = RunFolder(model_dir, "language_model")
    vocab = folder.load_vocab()
    lm = folder.load_model(ckpt_path, **changes)
    model_class: Any = type("HarnessModel", (HarnessMethods, LM), {})  # `LM` is known only here
    model = model_class()
    model.open(lm, vocab, batch_size, max_gen_toks, segment)
    return model


class HarnessMethods:
    """The methods that lm-evaluation-harness calls, see its class `LM`. `harness_model` makes a subclass of both.

    A request of the harness has its arguments in `args`.
    """

    def open(self, lm: LanguageModel, vocab: Any, batch_size: int, max_gen_toks: int, segment: int | None) -> None:
        """Sets the model and the options, see `harness_model`.

        Raises:
            ParameterError: the model has absolute positions, and `segment` is larger than `context_len`.
        """
        self.lm: Any = lm
        self.vocab = vocab
        self.batch_size = batch_size
        self.max_gen_toks = max_gen_toks
        if lm.has_window and segment is not None:
            check_integer("segment", segment, 1, lm.context_len)
        self.segment = segment or (lm.context_len if lm.has_window else SEGMENT)
        self.start = [vocab.start_id]
        self._read = tf.function(self._read_segment, autograph=False, reduce_retracing=True)

    # --------------------------------------------------------------------------------- the interface of the harness

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each request `(context, continuation)`: the log-probability of the continuation in nats, and whether each
        of its tokens was the most likely one.
        """
        pairs = [self._ids_of_both(*request.args) for request in requests]
        scores = self._scores([before + after for before, after in pairs])
        results = []
        for (before, _), (nll, greedy) in zip(pairs, scores, strict=True):
            first = len(before) - 1  # first score of the continuation: token i has the score i - 1, token 0 has none
            results.append((-float(nll[first:].sum(dtype=np.float64)), bool(greedy[first:].all())))
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """For each request `(text,)`: the log-probability of the text in nats."""
        texts = [self.start + self._encode(request.args[0]) for request in requests]
        return [-float(nll.sum(dtype=np.float64)) for nll, _ in self._scores(texts)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """For each request `(context, options)`: the generated text that follows the context, up to a stop string.

        Requests with the same options are answered together.
        """
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        results = [""] * len(requests)
        for rows in groups.values():
            texts = self._generate([requests[i].args[0] for i in rows], dict(requests[rows[0]].args[1]))
            for i, text in zip(rows, texts, strict=True):
                results[i] = text
        return results

    @property
    def tokenizer_name(self) -> str:
        """The name by which the harness's cache tells tokenizers apart."""
        return self.vocab.fingerprint()

    # ----------------------------------------------------------------------------------------- parts of these methods

    def _encode(self, text: str) -> list[int]:
        """The ids of a text."""
        data = text.encode("utf-8", "surrogatepass") if self.vocab.level == "byte" else text
        return self.vocab.encode(data).tolist()

    def _ids_of_both(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """`(ids of a context, with the start token before them, ids of its continuation)`.

        Spaces at the end of the context belong to the continuation, as in the other models of the harness. Both texts
        are encoded as one text. Of its ids, as many belong to the context as the context has if it is encoded alone.
        """
        spaces = len(context) - len(context.rstrip(" "))
        if spaces:
            continuation = context[-spaces:] + continuation
            context = context[:-spaces]
        before = self._encode(context)
        both = self._encode(context + continuation)
        return self.start + both[: len(before)], both[len(before) :]

    def _scores(self, texts: Sequence[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Scores texts of ids.

        Returns:
            For each text of n tokens, `(nll, greedy)`: float `[n - 1]` and bool `[n - 1]`, the nll of every token but
            the first, and whether this token was the most likely one.
        """
        scores: list[Any] = [None] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # batches of similar lengths need less padding
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            ids = padded([np.array(texts[i], np.int32) for i in rows])
            nll, greedy = self._score_batch(ids[:, :-1], ids[:, 1:])
            for row, i in enumerate(rows):
                n = len(texts[i]) - 1
                scores[i] = nll[row, :n], greedy[row, :n]
        return scores

    def _score_batch(self, tokens: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores `labels` after `tokens`, int `[B, n]` each, segment by segment: `(nll, greedy)`, both `[B, n]`."""
        if not tokens.shape[1]:
            return np.zeros(tokens.shape, np.float32), np.ones(tokens.shape, bool)
        mems = tuple(self.lm.first_mems(len(tokens)))
        results = []
        for i in range(0, tokens.shape[1], self.segment):
            columns = slice(i, i + self.segment)
            nll, greedy, mems = self._read(tf.constant(tokens[:, columns]), tf.constant(labels[:, columns]), mems)
            results.append((nll.numpy(), greedy.numpy()))
        nll, greedy = (np.concatenate(arrays, 1) for arrays in zip(*results, strict=True))
        return nll, greedy

    def _read_segment(self, tokens: Any, labels: Any, mems: Any) -> tuple[Any, Any, Any]:
        """Scores one segment `[B, T]`: `(nll, greedy, new_mems)`."""
        log_probs, new_mems = self.lm(tokens, list(mems))
        nll = -tf.gather(log_probs, labels, batch_dims=2)
        return nll, tf.argmax(log_probs, -1, output_type=tf.int32) == labels, tuple(new_mems)

    def _generate(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        """Generates the text that follows each context. All have the same options, those of a task of the harness.

        The most likely token is always taken, unless `do_sample` is true, or `do_sample` is not given and the
        `temperature` is above 0. A `repetition_penalty` also counts then.

        Raises:
            ParameterError: an option is unknown or has another type, or both names of the largest number of tokens are
                given.
        """
        unknown = options.keys() - {*_SAMPLING, *_OTHER_OPTIONS}
        if unknown:
            name = sorted(unknown)[0]
            raise ParameterError(name, options[name], f"one of {', '.join((*_SAMPLING, *_OTHER_OPTIONS))}")
        given = {name: value for name, value in options.items() if value is not None}
        until = given.get("until", [])
        check_type("until", until, str | Sequence[str])
        until = [until] if isinstance(until, str) else until
        sampling: dict[str, Any] = {name: given[name] for name in _SAMPLING if name in given}
        do_sample = given.get("do_sample", bool(sampling.get("temperature")))
        check_type("do_sample", do_sample, bool)
        if not do_sample:
            sampling = {"temperature": 0.0, "repetition_penalty": sampling.get("repetition_penalty", 1.0)}
        sampling["top_k"] = sampling.get("top_k") or None  # tasks write 0 for no limit
        lengths = {name: given[name] for name in ("max_gen_toks", "max_new_tokens") if name in given}
        for name, length in lengths.items():
            check_integer(name, length, 1)
        if len(lengths) == 2:
            raise ParameterError("max_new_tokens", lengths["max_new_tokens"], "left out if max_gen_toks is given")
        (max_new_tokens,) = lengths.values() or (self.max_gen_toks,)
        generator = TextGenerator(
            self.lm,
            self.vocab,
            max_new_tokens,
            stop_strings=self._spelled(until),
            batch_size=self.batch_size,
            segment=None if self.lm.has_window else self.segment,
            seed=0,
            **sampling,
        )
        prompts = [context or self.vocab.symbols[self.start[0]] for context in contexts]
        return [_cut(answer.texts[0], until) for answer in generator.generate_lines(prompts)]

    def _spelled(self, until: Iterable[str]) -> list[str]:
        """The stop strings that the vocabulary can spell, at which generation can end early.

        A text may contain others, such as "Q:" as the end of the word "FAQ:". `_cut` finds them in the finished text.
        """
        spelled = []
        for text in filter(None, until):
            try:
                check_stops(len(self.vocab), None, [text], False, self.vocab)
            except ParameterError:
                continue
            spelled.append(text)
        return spelled


def _cut(text: str, until: Sequence[str]) -> str:
    """The text before the first stop string in it, or the whole text."""
    positions = [text.find(stop) for stop in until if stop]
    return text[: min((position for position in positions if position >= 0), default=len(text))]
