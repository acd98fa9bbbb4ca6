"""The families of language models, Transformer-XL and the vanilla Transformer, which are trained on text."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from txl_config.memory import count_weights
from txl_tf.config import (
    Config,
    EvaluationConfig,
    ModelConfig,
    TextConfig,
    TrainingConfig,
    TransformerLMConfig,
    check_bins,
    check_position_count,
)
from txl_tf.data.subwords import vocab_file
from txl_tf.data.text.batches import Segments, choose_bin_capacities, num_batches
from txl_tf.data.text.corpus import Corpus
from txl_tf.data.text.documents import Documents
from txl_tf.data.vocabulary import newline_ids
from txl_tf.errors import ParameterError, brief, visible
from txl_tf.language.language_model import LanguageModel, TransformerXLLM
from txl_tf.language.transformer_lm import TransformerLM
from txl_tf.nn.position_schemes import checked_scheme
from txl_tf.runs.checkpoints import Resumed, step_of
from txl_tf.runs.evaluate import Evaluator
from txl_tf.runs.families.original_names import original_names
from txl_tf.runs.families.pipeline import LanguagePipeline
from txl_tf.runs.families.record import Family, register
from txl_tf.runs.setup import (
    MOST_STEPS_ON_TPU,
    ROW_BY_ROW,
    check_divides,
    check_documents,
    check_token_nll,
    log_model,
    name_of,
    open_corpus,
    reset_token_of,
    token_nll_of_worker,
    warn_of_one_cluster,
    without_symbol_choice,
)
from txl_tf.runs.train import Run
from txl_tf.training.distribution import broadcast_from_chief, is_chief, is_default
from txl_tf.training.threads import choose_parallel_parts, choose_threads

logger = logging.getLogger("txl_tf")

_PROMPT = 32  # the least length of the prompt of a sample, tokens
_SEARCHED = 4096  # the prompt is taken from this many tokens at the beginning of the text


def sample_prompt(tokens: np.ndarray, newline: int | None, least: int = _PROMPT) -> np.ndarray:
    """Returns tokens of a text after which a sample reads well: whole lines at the beginning of a paragraph.

    A paragraph follows an empty line. Without an empty line, the prompt begins at the second line; without a second
    line, at the first token. It ends at the first end of a line that makes it `least` to `8 * least` tokens long; if
    there is none, after `least` tokens.

    Args:
        tokens: `[n]`, ids of the text.
        newline: id of the token that ends a line; `None` if the vocabulary has none.
        least: the least length of the prompt, if the text is long enough.
    """
    tokens = np.asarray(tokens[:_SEARCHED])
    begins = np.flatnonzero(tokens == newline) + 1  # where lines begin
    begins_of_paragraphs = [begin for begin in begins[1:] if tokens[begin - 2] == newline]
    start = next(begin for begin in (*begins_of_paragraphs, *begins, 0) if begin < len(tokens))
    ends = [end for end in begins if least <= end - start <= 8 * least]
    return tokens[start : ends[0] if ends else start + least]


def steps_per_call(limit: int, *ends: int) -> int:
    """The largest number of steps per call, at most `limit`, that divides all of `ends`.

    Args:
        limit: the largest number that is allowed.
        *ends: steps at which a call must end, such as the last step and the steps between checkpoints.
    """
    return max(k for k in range(1, limit + 1) if math.gcd(*ends) % k == 0)


class LanguageModelRun(Run):
    """One training run of a language model, on a text.

    Three settings are completed before they are used: `training` and `final` by `prepare`, `data` by `open_corpus`.
    """

    data: dict[str, Any]  # `{"data_dir": ...}` or arguments of `build_corpus`
    model_config: Any  # a `ModelConfig` or `TransformerLMConfig`, or that of another family
    training: TrainingConfig
    final: EvaluationConfig
    corpus: Corpus
    model: LanguageModel
    parallel_parts: int = 1  # the argument of `compile`, from `choose_threads` on

    kind = "language models"
    remedy = "Choose another folder to train on this text; eval_path evaluates it in the vocabulary of the run"

    def prepare(self) -> None:
        """Completes the settings, and checks them as far as they do not depend on the text."""
        model = self.model_config
        training = self.training
        final = self.final
        for name in ("eval_path", "eval_ckpt_path"):
            value = getattr(final, name)
            if value:
                message = (
                    f"{name} is for an evaluation alone (--do_train=False --do_eval), got {value}: the end of a "
                    "training evaluates its last weights on its own text"
                )
                raise ParameterError(name, value, "left out in a training", message)
        if not final.do_eval and final.eval_split != EvaluationConfig.eval_split:
            message = f"eval_split is for do_eval, which is False, got {brief(final.eval_split)}"
            raise ParameterError("eval_split", final.eval_split, "left out without do_eval", message)
        if training.static_shapes is None:
            on_tpu = isinstance(self.strategy, tf.distribute.TPUStrategy)
            self.training = dataclasses.replace(training, static_shapes=on_tpu)
        rows = final.eval_batch_size or training.train_batch_size
        self.final = dataclasses.replace(final, eval_batch_size=rows, tgt_len=training.tgt_len)
        if self.data.get("cutoffs"):
            # The size of the vocabulary is not known yet: `sys.maxsize` lets all cutoffs lie below it.
            check_bins(sys.maxsize, model.d_embed, self.data["cutoffs"], model.div_val)
        parts = training.gradient_accumulation_steps, training.parallel_parts or 1
        check_divides(self.strategy, *parts, train_batch_size=training.train_batch_size)
        check_divides(self.strategy, eval_batch_size=rows)
        if final.parallel_parts not in (None, training.parallel_parts):
            allowed = f"{training.parallel_parts}, as in the training"
            raise ParameterError("parallel_parts", final.parallel_parts, allowed)
        check_positions(model, training.reset_memory_at_documents)
        check_position_count(model.to_dict(), tgt_len=training.tgt_len, sliding_window=final.sliding_window or 0)
        check_token_nll(final.token_nll, self.folder, self.data)

    def open_corpus(self) -> Corpus:
        """Completes `data`, and reads the text.

        A run that starts from another one uses, or extends, the vocabulary of that run.
        """
        self.data = self._completed_data()
        recorded = self.recorded_data
        origin = self.origin
        if origin is None:
            return open_corpus(self.data, recorded=recorded)
        (vocab,) = origin.vocabs
        cutoffs = list(origin.model.cutoffs)
        extends = self.training.extend_vocab and not origin.resumes
        # When an extended run resumes, its new symbols have been chosen already.
        data = without_symbol_choice(self.data) if self.training.extend_vocab and not extends else self.data
        corpus = open_corpus(data, vocab, extends, recorded)
        corpus.cutoffs = cutoffs
        difference = corpus.vocab.difference(vocab)
        if extends and corpus.vocab.symbols[: len(vocab)] == vocab.symbols:
            where = ", in the last cluster of the adaptive softmax" if cutoffs else ""
            origin.log_extended([corpus.vocab], where)
        elif difference:
            message = (
                f"{name_of(self.data)} has another vocabulary than init_from={origin.path}: {difference}. Prepare "
                f"it with vocab_path={origin.path}/{vocab_file('vocab', vocab.level)}"
            )
            raise ParameterError("vocab", corpus.vocab, f"the vocabulary of {origin.path}", message)
        tokens = np.asarray(corpus.splits["train"][:1_000_000])  # enough to estimate the share of unknown symbols
        unk = corpus.vocab.unk
        if unk is not None and unk in corpus.vocab.ids:
            n_unknown = int(np.sum(tokens == corpus.vocab.ids[unk]))
            origin.log_unknown({"text": (n_unknown, len(tokens))}, unk)
        return corpus

    def _completed_data(self) -> dict[str, Any]:
        """`data` with the settings that come from an existing run: `raw_text`; with `origin`, `cutoffs`, `documents`.

        Raises ParameterError if `cutoffs` are given and differ from those of `origin`.
        """
        data = self.data
        origin = self.origin
        if data.get("dataset") in ("text", "pydoc") and data.get("raw_text") is None:
            # Runs of earlier versions, and runs that start from them, read raw text. Other runs do not.
            existing = origin.source if origin else self.folder
            raw_text = bool(existing.steps()) and existing.load_vocabs()[0].raw_text
            data = {**data, "raw_text": raw_text}
        if origin is None:
            return data
        cutoffs = list(origin.model.cutoffs)
        given = data.get("cutoffs")
        if given not in (None, cutoffs):
            message = f"cutoffs must be {cutoffs}, as in {origin.path}, got {given}"
            raise ParameterError("cutoffs", given, [cutoffs], message)
        if data.get("data_dir"):
            return data
        documents = data.get("documents")
        if documents is None:
            (vocab,) = origin.vocabs
            documents = vocab.document is not None
        return {**data, "cutoffs": cutoffs, "documents": documents}

    @property
    def splits(self) -> list[str]:
        """The splits to evaluate at the end: "valid" and, with `do_eval`, the one of `eval_split`."""
        evaluated = ["valid", self.final.eval_split] if self.final.do_eval else ["valid"]
        return list(dict.fromkeys(evaluated))

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Evaluates the splits, from `open_corpus` on."""
        return Evaluator(self.corpus, self.final)

    @property
    def metric(self) -> str:
        return self.evaluator.metric

    def from_data(self) -> dict:
        """The hyper-parameters that the corpus decides.

        Raises ParameterError if the text has no ends of documents, and a setting needs them.
        """
        vocab = self.corpus.vocab
        if self.training.shuffle_documents:
            check_documents("shuffle_documents", vocab)
        settings: dict[str, Any] = {"n_token": len(vocab), "cutoffs": self.corpus.cutoffs}
        if self.training.reset_memory_at_documents:
            settings["reset_token"] = reset_token_of(vocab, type(self.model_config))
        return settings

    def data_config(self) -> dict:
        data = {name: value for name, value in self.data.items() if name != "raw_text"}  # the vocabulary records it
        return {**data, "by_character": self.corpus.by_character}

    def choose_threads(self) -> None:
        """Chooses `parallel_parts` unless it is given, and sets TensorFlow's threads unless it is too late."""
        self.parallel_parts = choose_threads(self.training.parallel_parts, self._fastest_parts)

    def _fastest_parts(self) -> int:
        """See `choose_parallel_parts`. It is 1 if something cannot be computed in parts.

        That is so for several replicas, under XLA, for a model of another package, and if the evaluation at the end has
        a sliding window or writes every token.
        """
        training = self.training
        final = self.final
        whole = training.static_shapes or training.jit_compile or not is_default(self.strategy)
        whole = whole or final.sliding_window or final.token_nll
        if whole or type(self.model_config) not in ROW_BY_ROW:
            return 1
        rows = training.train_batch_size // training.gradient_accumulation_steps
        n_tokens = training.train_steps * training.train_batch_size * training.tgt_len
        # With LoRA, only few weights have gradients.
        n_weights = 0 if self.model_config.lora_rank else count_weights(self.model_config)
        rows_to_divide = math.gcd(rows, final.eval_batch_size or rows)  # `prepare` has set it
        return choose_parallel_parts(rows_to_divide, n_tokens, n_weights / (rows * training.tgt_len))

    def options(self) -> tuple[dict, dict]:
        """Additional arguments for the model and for `compile`. Raises ParameterError if a split is too short."""
        for split in self.splits:
            self.evaluator.check(split)
        training = self.training
        static_shapes = bool(training.static_shapes)
        num_batches(  # raises the error about the training split
            len(self.corpus.splits["train"]),
            training.train_batch_size,
            training.tgt_len,
            static_shapes,
            name="the train split",
            rows="train_batch_size",
        )
        compile_arguments = {
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "parallel_parts": self.parallel_parts,
            "static_shapes": static_shapes,
            "bin_capacities": self._bin_capacities(self.model_config.cutoffs) if static_shapes else None,
        }
        return {"recompute": True} if training.recompute else {}, compile_arguments

    def _bin_capacities(self, cutoffs: list[int]) -> list[int]:
        """The capacities of the clusters with static shapes, see `choose_bin_capacities`.

        The chief counts the tokens of the whole training text for all workers.
        """
        capacities = [0] * len(cutoffs)
        parts = self.training.gradient_accumulation_steps
        if cutoffs and is_chief(self.strategy):
            rows = self.training.train_batch_size // (self.strategy.num_replicas_in_sync * parts)
            capacities = choose_bin_capacities(self.corpus.splits["train"], rows, self.training.tgt_len, cutoffs)
        return [broadcast_from_chief(self.strategy, capacity) for capacity in capacities]

    def log_model(self) -> None:
        log_model(name_of(self.data), self.corpus, self.model, self.strategy, self.machine.type_name)
        warn_of_one_cluster(self.model_config.to_dict())

    def fit(self, state: Resumed) -> None:
        """Trains, see `Run.fit`. On TPUs, chooses `steps_per_execution`, unless it is given."""
        training = self.training
        if training.steps_per_execution is None and isinstance(self.strategy, tf.distribute.TPUStrategy):
            ends = training.train_steps, training.iterations, training.save_steps, step_of(self.model)
            self.model.steps_per_execution = steps_per_call(MOST_STEPS_ON_TPU, *ends)
        super().fit(state)

    def batches(self, start: int) -> Segments:
        training = self.training
        text = self.corpus.splits["train"]
        documents = None
        if training.shuffle_documents:
            end: Any = self.corpus.vocab.document_id  # `from_data` has checked that there is one
            documents = Documents(text, end, training.seed)
        return Segments(
            text,
            training.train_batch_size,
            training.tgt_len,
            start,
            repeat=True,
            drop_remainder=bool(training.static_shapes),
            documents=documents,
        )

    def validation(self) -> Segments:
        return self.evaluator.batches("valid")

    def tokens_per_step(self) -> float:
        return self.training.train_batch_size * self.training.tgt_len

    def finish(self) -> dict[str, float]:
        """Evaluates the trained model, and logs a sample if `sample_tokens` is set. Returns `{split: mean nll}`."""
        lm = self.model
        token_nll = token_nll_of_worker(self.final.token_nll, self.strategy)
        # The file `token_nll` is for the last split, the one of `eval_split`.
        paths = {split: token_nll if split == self.splits[-1] else None for split in self.splits}
        results = {split: self.evaluator.run(lm, split, path) for split, path in paths.items()}
        by_segments = results["valid"]
        # A sliding window gives another loss, which cannot be compared with the validations during the training.
        if self.final.sliding_window:
            by_segments = lm.evaluate(self.validation(), verbose=0, return_dict=True)
        self.record_validation(by_segments)
        if self.training.sample_tokens and self.checkpoints.writes:
            self.sample()
        return {split: measured["loss"] for split, measured in results.items()}

    @property
    def samples(self) -> bool:
        """Whether to sample after validations. With static shapes, generation would take long to compile."""
        return bool(self.training.sample_tokens) and not self.training.static_shapes

    def sample(self) -> None:
        """Logs a text that the model generates after `sample_prompt` of the validation split; also for TensorBoard."""
        vocab = self.corpus.vocab
        training = self.training
        newline = newline_ids(vocab)
        prompt = sample_prompt(self.corpus.splits["valid"], newline[-1] if newline else None)
        (tokens,) = self.model.generate(prompt[None], training.sample_tokens, temperature=0.8, seed=training.seed)
        title = f"a sample at temperature 0.8, after {vocab.decode(prompt)!r}:"
        text = visible(vocab.decode(tokens[len(prompt) :]))
        logger.info("%s", title)
        logger.info("%s", text)
        self.show_text("sample", f"{title}\n{text}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Data(TextConfig):
    """The values in `"data"` of `config.json`: `TextConfig`, and what else `open_corpus` and evaluation need."""

    data_dir: str | None = None
    by_character: bool = False


def least_weights(group: type[Config], model: dict) -> int:
    """The number of weights of a model of these hyper-parameters, without low-rank updates; see `Family`.

    Args:
        group: class of the hyper-parameters.
        model: hyper-parameters by name. Other names are ignored.
    """
    values = {name: model[name] for name in group.names() if name in model}
    return count_weights(group(**{**values, "lora_rank": 0}))


def check_model(model: Any) -> None:
    """Raises ParameterError if hyper-parameters, of any family of language models, do not fit each other."""
    check_bins(model.n_token, model.d_embed, model.cutoffs, model.div_val)
    check_positions(model)


def check_positions(model: Any, resets: bool = False) -> None:
    """Raises ParameterError if hyper-parameters do not fit the scheme of positions.

    Args:
        model: hyper-parameters, of any family of language models.
        resets: whether the memory is reset at documents, which not every scheme can do.
    """
    if "positions" not in model.names():
        return
    scheme = checked_scheme(model.positions, model)
    if resets:  # `reset_token` comes from the text, so `checked_scheme` has not seen it
        scheme.check_refused("reset_token", "reset_memory_at_documents")


TRANSFORMER_XL = register(
    Family(
        name="transformer_xl",
        task="language_model",
        described="a language model, for train.py, tools/generate.py and others",
        model=TransformerXLLM,
        config=ModelConfig,
        make=TransformerXLLM,
        check=check_model,
        least_weights=functools.partial(least_weights, ModelConfig),
        weight_names=original_names,
        signatures="language_model",
        required=("n_token", "mem_len"),
        vocabs={"vocab": "n_token"},
        data=_Data,
        paths=("data_path", "data_dir", "vocab_path"),
        inherited=("level", "lower_case", "raw_text"),
        training=TrainingConfig,
        final=EvaluationConfig,
        batching=("tgt_len", "train_batch_size", "static_shapes", "shuffle_documents"),
        recorded=(
            "eval_batch_size",
            "eval_split",
            "do_eval",
            "sample_tokens",
            "gradient_accumulation_steps",
            "parallel_parts",
            "recompute",
            "reset_memory_at_documents",
        ),  # fmt: skip
        pipeline=LanguagePipeline,
        run=LanguageModelRun,
    )
)
TRANSFORMER_LM = register(
    dataclasses.replace(
        TRANSFORMER_XL,
        name="transformer_lm",
        model=TransformerLM,
        config=TransformerLMConfig,
        make=TransformerLM,
        least_weights=functools.partial(least_weights, TransformerLMConfig),
    )
)
