"""The encoder-decoder, trained on pairs of lines."""

from __future__ import annotations

import dataclasses
import logging

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
from txl_tf.errors import visible
from txl_tf.runs.families.pipeline import TranslationPipeline
from txl_tf.runs.families.record import Family, register
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import as_spelt, counted_in, error_rates, group_references, to_metric
from txl_tf.runs.train import EpochRun
from txl_tf.vanilla.transformer import Transformer
from txl_tf.vanilla.translator import Translator, check_search, did_not_end, never_written

logger = logging.getLogger("txl_tf")


class PairsRun(EpochRun):
    """One training of an encoder-decoder, on pairs; `final` says how what was held out is translated at the end."""

    kind = "pairs"
    remedy = "Choose another folder to train on these pairs"

    def prepare(self) -> None:
        super().prepare()
        if self.model_config.share_embeddings and not self.data.share_vocab:
            raise ValueError("share_embeddings needs share_vocab, got share_vocab=False")

    def open_corpus(self) -> ParallelCorpus:
        data, extends = self.data, self.training.extend_vocab and not self.origin.goes_on
        if self.training.extend_vocab and not extends:  # the symbols are chosen already
            data = dataclasses.replace(data, min_freq=0, max_size=None, source_symbols=None, target_symbols=None)
        vocabs, max_len = self.origin.vocabs if self.origin else None, self.model_config.max_len
        corpus = read_pairs(data, vocabs, max_len, self._has_unknown(), extends)
        if extends:
            self.origin.say_extended(corpus.vocabs)
        if self.origin:
            sizes = (len(lines.ids) for lines in corpus.splits["train"])
            unknown = zip(corpus.unknown("train"), sizes, strict=True)
            self.origin.say_unknown(dict(zip(("sources", "targets"), unknown, strict=True)), UNKNOWN)
        return corpus

    def _has_unknown(self) -> bool:
        """Whether vocabularies have `<unk>`: new ones, and those of a run that goes on, or gives weights, if it has."""
        warm_start = self.training.warm_start_path
        known = self.folder if self.folder.steps() else RunFolder.around(warm_start) if warm_start else None
        if known is None or not known.has_config():
            return True
        return any(vocab.unk in vocab.ids for vocab in known.load_vocabs())

    def from_data(self) -> dict:
        check_lengths(self.corpus, self.model_config.max_len)
        target_vocab, max_len = self.corpus.vocabs[1], self.model_config.max_len
        if self.training.eval_sources:
            check_search(self.final, len(target_vocab), max_len, never_written(self.final, target_vocab))
        lengths = longest_targets(self.corpus.splits["train"])
        if self.origin:  # whose pairs the model knows too
            lengths = merged_lengths(self.origin.model.target_lengths, lengths)
        sizes = dict(zip(TRANSFORMER.required, map(len, self.corpus.vocabs), strict=True))
        return {**sizes, "target_lengths": lengths}

    def batches_of(self, split: str, seed: int | None = None) -> EpochBatches:
        training, replicas = self.training, self.strategy.num_replicas_in_sync
        return pair_batches(self.corpus.splits[split], training.batch_size, training.batch_tokens, seed, replicas)

    def tokens_per_step(self) -> float:
        return len(self.corpus.splits["train"].targets.ids) / len(self.train_batches)

    def log_model(self) -> None:
        corpus, parameters = self.corpus, f"{self.model.count_params():,}"
        sizes = ", ".join(f"{len(pairs):,} {split}" for split, pairs in corpus.splits.items())
        symbols = " and ".join(f"{len(vocab):,}" for vocab in corpus.vocabs)
        for sentence in corpus.said:
            logger.info("%s", sentence)
        logger.info("%s: %s symbols; pairs: %s", corpus.names["train"], symbols, sizes)
        for split in corpus.splits:
            if split != "train" or not self.origin:  # which has said it
                self._say_unknown(split)
        type_name, n_batches = self.machine.type_name, len(self.train_batches)
        logger.info("model: %s parameters, %s; %d batches an epoch", parameters, type_name, n_batches)

    def _say_unknown(self, split: str) -> None:
        for number, side, lines in zip(self.corpus.unknown(split), SIDES, self.corpus.splits[split], strict=True):
            if number:
                name, share = self.corpus.names[split], f"{number / len(lines.ids):.2%}"
                logger.info("%s: %s symbols of the %ss, %s, are <unk>", name, f"{number:,}", side, share)

    def finish(self) -> dict[str, dict[str, float]]:
        """Evaluations and samples of translations."""
        results = {}
        for split in self.held_out:
            found = self.evaluate(split)
            if split == "valid":
                self.record_validation(found)
            results[split] = {"loss": found["loss"]}
            line = f"loss {found['loss']:.6f} nats | ppl {to_metric(found['loss'], 'ppl'):.4f}"
            logger.info("%s: %s | %s of the symbols right", split, line, f"{found['accuracy']:.2%}")
            if self.training.eval_sources:
                results[split] |= self._translate(split, self.final)
        return results

    def _translate(self, split: str, search: SearchConfig) -> dict[str, float]:
        """Error rates of the first `eval_sources` different sources of a split."""
        vocabs = self.corpus.vocabs
        translator = Translator(self.model, *vocabs, search, batch_size=256)
        references = group_references(*as_spelt(self.corpus.texts[split], vocabs))
        sources = list(references)[: self.training.eval_sources if self.training.eval_sources > 0 else None]
        best = [best for best, *_ in translator.translate(sources, split)]
        found, unended = [translation.text for translation in best], sum(not translation.ended for translation in best)
        right = [references[source] for source in sources]
        rates = error_rates(found, right, vocabs[1].level)
        how = "greedily" if search.beam_size == 1 else f"with beam_size={search.beam_size}"
        wrong = (
            f"{rates['lines']:.2%} of the lines and {rates['symbols']:.2%} of the {counted_in(vocabs[1].level)} wrong"
        )
        logger.info("%s: %s sources translated %s: %s", split, f"{len(sources):,}", how, wrong)
        if unended:
            logger.warning("%s: %s", split, did_not_end(unended, len(best), search, self.model))
        samples = []
        for i in np.linspace(0, len(sources) - 1, min(3, len(sources)), dtype=int):
            mark = "" if found[i] in right[i] else f"   (right: {right[i][0]})"
            samples.append(f"{visible(sources[i])}  ->  {visible(found[i])}{visible(mark)}")
            logger.info("  %s", samples[-1])
        self.show_text(f"sample_{split}", "\n".join(samples))
        return rates


def least_weights(model: dict) -> int:
    layers = model["num_layers"] * (3 * 4 * model["d_model"] + 2 * 2 * model["dff"])
    return model["d_model"] * (layers + model["target_vocab_size"])


TRANSFORMER = register(
    Family(
        name="transformer",
        task="encoder_decoder",
        described="an encoder-decoder, for tools/train_seq2seq.py and tools/translate.py",
        network=Transformer,
        config=TransformerConfig,
        make=Transformer,
        least_weights=least_weights,
        required=("input_vocab_size", "target_vocab_size"),
        vocabs={"source_vocab": "input_vocab_size", "target_vocab": "target_vocab_size"},
        data=PairsConfig,
        places=("train_path", "valid_path", "test_path"),
        reading=("source_level", "target_level", "share_vocab", "lower_case"),
        training=PairsTrainingConfig,
        final=SearchConfig,
        batching=("batch_size", "batch_tokens"),
        pipeline=TranslationPipeline,
        run=PairsRun,
    )
)
