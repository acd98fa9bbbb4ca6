"""The family of the encoder-decoder, which is trained on pairs of lines."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from txl_tf.config import (
    PairsConfig,
    PairsTrainingConfig,
    SearchConfig,
    TransformerConfig,
)
from txl_tf.data.batching import EpochBatches
from txl_tf.data.pairs.files import SIDES
from txl_tf.data.pairs.lengths import longest_targets, merged_lengths
from txl_tf.data.pairs.parallel import UNKNOWN, ParallelCorpus, check_lengths, pair_batches, read_pairs
from txl_tf.errors import ParameterError, visible
from txl_tf.runs.families.pipeline import TranslationPipeline
from txl_tf.runs.families.record import Family, register
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import counted_in, error_rates, group_references, in_case_of_vocabs, to_metric
from txl_tf.runs.train import EpochRun
from txl_tf.vanilla.transformer import Transformer
from txl_tf.vanilla.translator import Translator, check_search, did_not_end, never_written

logger = logging.getLogger("txl_tf")


class PairsRun(EpochRun):
    """One training run of an encoder-decoder, on pairs of lines.

    At the end, up to `eval_sources` sources of each split except "train" are translated with the settings `final`.
    """

    data: PairsConfig
    model_config: TransformerConfig
    training: PairsTrainingConfig
    final: SearchConfig
    corpus: ParallelCorpus
    model: Transformer

    kind = "pairs"
    remedy = "Choose another folder to train on these pairs"

    def prepare(self) -> None:
        """Raises ParameterError for settings that do not go together. Shared embeddings need a shared vocabulary."""
        super().prepare()
        if self.model_config.share_embeddings and not self.data.share_vocab:
            message = "share_embeddings needs share_vocab, got share_vocab=False"
            raise ParameterError("share_vocab", False, [True], message)
        if self.final.n_best > 1:
            allowed = "1 in a training, which counts only the best translations"
            raise ParameterError("n_best", self.final.n_best, allowed)

    def open_corpus(self) -> ParallelCorpus:
        """Reads the pairs. A run that starts from another one uses, or extends, the vocabularies of that run."""
        data = self.data
        max_len = self.model_config.max_len
        origin = self.origin
        recorded = self.recorded_data
        if origin is None:
            return read_pairs(data, None, max_len, self._has_unknown(), recorded=recorded)
        extends = self.training.extend_vocab and not origin.resumes
        shared = origin.config["data"].get("share_vocab", data.share_vocab)
        if data.share_vocab != shared and not origin.resumes and not (shared and extends):
            message = f"share_vocab must be {shared}, as in {origin.path}, got {data.share_vocab}"
            raise ParameterError("share_vocab", data.share_vocab, [shared], message)
        if self.training.extend_vocab and not extends:
            # The new symbols were chosen when the run began. `read_pairs` refuses options that choose symbols again.
            data = dataclasses.replace(data, min_freq=0, max_size=None, source_symbols=None, target_symbols=None)
        corpus = read_pairs(data, origin.vocabs, max_len, self._has_unknown(), extends, recorded)
        if extends:
            origin.log_extended(corpus.vocabs)
        sizes = (len(lines.ids) for lines in corpus.splits["train"])
        unknown = zip(corpus.unknown("train"), sizes, strict=True)
        origin.log_unknown(dict(zip(("sources", "targets"), unknown, strict=True)), UNKNOWN)
        return corpus

    def _has_unknown(self) -> bool:
        """Whether the vocabularies get `<unk>`.

        New vocabularies do. If the run resumes, or takes weights from a checkpoint of another run, they get it if a
        vocabulary of the existing run has it.
        """
        warm_start = self.training.warm_start_path
        if self.folder.steps():
            existing = self.folder
        elif warm_start:
            existing = RunFolder.around(warm_start)
        else:
            return True
        if not existing.has_config():  # a checkpoint alone, which does not show its vocabularies
            return True
        return any(vocab.unk in vocab.ids for vocab in existing.load_vocabs())

    def from_data(self) -> dict:
        """The hyper-parameters that the corpus decides: sizes of the vocabularies, and `target_lengths`.

        Raises ParameterError for pairs that are too long, and for search settings that do not fit the model.
        """
        check_lengths(self.corpus, self.model_config.max_len)
        target_vocab = self.corpus.vocabs[1]
        max_len = self.model_config.max_len
        if self.training.eval_sources:
            check_search(self.final, len(target_vocab), max_len, never_written(self.final, target_vocab))
        lengths = longest_targets(self.corpus.splits["train"])
        if self.origin:  # the model was trained on the pairs of the other run, too
            lengths = merged_lengths(self.origin.model.target_lengths, lengths)
        sizes = dict(zip(TRANSFORMER.required, map(len, self.corpus.vocabs), strict=True))
        return {**sizes, "target_lengths": lengths}

    @property
    def metric(self) -> str:
        return "ppl"

    @property
    def metrics(self) -> Sequence[str]:
        return ["ppl", "accuracy"]

    def as_text(self, logs: dict, prefix: str) -> str:
        """The loss, the perplexity and, if it is in `logs`, the accuracy."""
        line = super().as_text(logs, prefix)
        accuracy = logs.get(prefix + "accuracy")
        return line if accuracy is None else f"{line} | {accuracy:.2%} right"

    def batches_of(self, split: str, seed: int | None = None) -> EpochBatches:
        training = self.training
        replicas = self.strategy.num_replicas_in_sync
        return pair_batches(self.corpus.splits[split], training.batch_size, training.batch_tokens, seed, replicas)

    def tokens_per_step(self) -> float:
        return len(self.corpus.splits["train"].targets.ids) / len(self.train_batches)

    def log_model(self) -> None:
        """Logs sizes of corpus, vocabularies and model."""
        corpus = self.corpus
        sizes = ", ".join(f"{len(pairs):,} {split}" for split, pairs in corpus.splits.items())
        symbols = " and ".join(f"{len(vocab):,}" for vocab in corpus.vocabs)
        for sentence in corpus.said:
            logger.info("%s", sentence)
        logger.info("%s: %s symbols; pairs: %s", corpus.names["train"], symbols, sizes)
        for split in corpus.splits:
            if split != "train" or not self.origin:  # with an origin, `open_corpus` has logged those of "train"
                self._log_unknown(split)
        parameters = f"{self.model.count_params():,}"
        n_batches = len(self.train_batches)
        logger.info("model: %s parameters, %s; %d batches an epoch", parameters, self.machine.type_name, n_batches)

    def _log_unknown(self, split: str) -> None:
        """Logs how many symbols of a split are unknown to the vocabularies, for each side that has some."""
        for number, side, lines in zip(self.corpus.unknown(split), SIDES, self.corpus.splits[split], strict=True):
            if number:
                name = self.corpus.names[split]
                share = f"{number / len(lines.ids):.2%}"
                logger.info("%s: %s symbols of the %ss, %s, are <unk>", name, f"{number:,}", side, share)

    def finish(self) -> dict[str, dict[str, float]]:
        """Evaluates all splits except "train": `{split: {"loss": ..., "lines": ..., "symbols": ...}}`.

        "lines" and "symbols" are the error rates of translations, see `error_rates`, if sources are translated.
        """
        results: dict[str, dict[str, float]] = {}
        for split in self.held_out:
            measured = self.evaluate(split)
            if split == "valid":
                self.record_validation(measured)
            results[split] = {"loss": measured["loss"]}
            line = f"loss {measured['loss']:.6f} nats | ppl {to_metric(measured['loss'], 'ppl'):.4f}"
            logger.info("%s: %s | %s of the symbols right", split, line, f"{measured['accuracy']:.2%}")
            if self.training.eval_sources:
                results[split] |= self._translate(split, self.final)
        return results

    def _translate(self, split: str, search: SearchConfig) -> dict[str, float]:
        """Translates the first `eval_sources` different sources of a split; all of them if the number is negative.

        Logs the error rates and up to three samples, which TensorBoard shows, too. Returns the error rates, see
        `error_rates`.
        """
        vocabs = self.corpus.vocabs
        source_vocab, target_vocab = vocabs
        translator = Translator(self.model, source_vocab, target_vocab, search, batch_size=256)
        lines, translations = in_case_of_vocabs(self.corpus.texts[split], vocabs)
        references = group_references(lines, translations)
        sources = list(references)[: self.training.eval_sources if self.training.eval_sources > 0 else None]
        best = [best for best, *_ in translator.translate(sources, split)]
        texts = [translation.text for translation in best]
        n_unended = sum(not translation.ended for translation in best)
        right = [references[source] for source in sources]
        rates = error_rates(texts, right, target_vocab.level)
        how = "greedily" if search.beam_size == 1 else f"with beam_size={search.beam_size}"
        unit = counted_in(target_vocab.level)
        wrong = f"{rates['lines']:.2%} of the lines and {rates['symbols']:.2%} of the {unit} wrong"
        logger.info("%s: %s sources translated %s: %s", split, f"{len(sources):,}", how, wrong)
        if n_unended:
            logger.warning("%s: %s", split, did_not_end(n_unended, len(best), search, self.model))
        samples = []
        for i in np.linspace(0, len(sources) - 1, min(3, len(sources)), dtype=int):
            correction = "" if texts[i] in right[i] else f"   (right: {right[i][0]})"
            samples.append(f"{visible(sources[i])}  ->  {visible(texts[i])}{visible(correction)}")
            logger.info("  %s", samples[-1])
        self.show_text(f"sample_{split}", "\n".join(samples))
        return rates


def least_weights(model: dict) -> int:
    """A rough lower bound of the number of weights; see `Family`."""
    # Kernels of three attentions and two feed-forward nets, and one table of embeddings. Biases and norms are left out.
    layers = model["num_layers"] * (3 * 4 * model["d_model"] + 2 * 2 * model["dff"])
    return model["d_model"] * (layers + model["target_vocab_size"])


TRANSFORMER = register(
    Family(
        name="transformer",
        task="encoder_decoder",
        described="an encoder-decoder, for tools/train_seq2seq.py and tools/translate.py",
        model=Transformer,
        config=TransformerConfig,
        make=Transformer,
        least_weights=least_weights,
        signatures="encoder_decoder",
        required=("input_vocab_size", "target_vocab_size"),
        vocabs={"source_vocab": "input_vocab_size", "target_vocab": "target_vocab_size"},
        data=PairsConfig,
        paths=("train_path", "valid_path", "test_path"),
        inherited=("source_level", "target_level", "share_vocab", "lower_case"),
        training=PairsTrainingConfig,
        final=SearchConfig,
        batching=("batch_size", "batch_tokens"),
        recorded=("eval_sources", *SearchConfig.names()),
        pipeline=TranslationPipeline,
        run=PairsRun,
    )
)
