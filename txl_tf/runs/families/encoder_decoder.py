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
    at_least,
)
from txl_tf.data.batching import EpochBatches
from txl_tf.data.pairs.parallel import UNKNOWN, ParallelCorpus, check_lengths, pair_batches, read_pairs
from txl_tf.data.vocabulary import visible
from txl_tf.models.vanilla.transformer import Transformer
from txl_tf.models.vanilla.translator import Translator
from txl_tf.runs.families.pipeline import TranslationPipeline
from txl_tf.runs.families.record import Family, register
from txl_tf.runs.metrics import as_spelt, error_rates, group_references, to_metric
from txl_tf.runs.train import EpochRun

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
        if not self.origin:
            return read_pairs(self.data)
        before, data = self.origin.vocabs, self.data
        extends = self.training.extend_vocab and not self.origin.goes_on
        if self.training.extend_vocab and not extends:  # the symbols are chosen already
            data = dataclasses.replace(data, min_freq=0, max_size=None, source_symbols=None, target_symbols=None)
        corpus = read_pairs(data, before, extends)
        if extends:
            names, sizes = self.folder.family.vocabs, zip(map(len, before), map(len, corpus.vocabs), strict=True)
            self.origin.say_extended(dict(zip(names, sizes, strict=True)))
        unknown = {}
        for side, vocab, lines in zip(("sources", "targets"), corpus.vocabs, corpus.splits["train"], strict=True):
            if vocab.unk in vocab.ids:
                unknown[side] = np.sum(lines.ids == vocab.ids[vocab.unk]), len(lines.ids)
        self.origin.say_unknown(unknown, UNKNOWN)
        return corpus

    def from_data(self) -> dict:
        check_lengths(self.corpus, self.model_config.max_len)
        if self.training.eval_sources:
            at_least(1, len(self.corpus.vocabs[1]) - 1)("beam_size", self.final.beam_size)  # all symbols but padding
        return dict(zip(TRANSFORMER.required, map(len, self.corpus.vocabs), strict=True))

    def batches_of(self, split: str, seed: int | None = None) -> EpochBatches:
        training, replicas = self.training, self.strategy.num_replicas_in_sync
        return pair_batches(self.corpus.splits[split], training.batch_size, training.batch_tokens, seed, replicas)

    def tokens_per_step(self) -> float:
        return len(self.corpus.splits["train"].targets.ids) / len(self.train_batches)

    def log_model(self) -> None:
        corpus, parameters = self.corpus, f"{self.model.count_params():,}"
        sizes = ", ".join(f"{len(pairs):,} {split}" for split, pairs in corpus.splits.items())
        symbols = " and ".join(f"{len(vocab):,}" for vocab in corpus.vocabs)
        logger.info("%s: %s symbols; pairs: %s", corpus.names["train"], symbols, sizes)
        type_name, n_batches = self.machine.type_name, len(self.train_batches)
        logger.info("model: %s parameters, %s; %d batches an epoch", parameters, type_name, n_batches)

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
        found = [best.text for best, *_ in translator.translate(sources, split)]
        right = [references[source] for source in sources]
        rates = error_rates(found, right, vocabs[1].level)
        how = "greedily" if search.beam_size == 1 else f"with beam_size={search.beam_size}"
        wrong = f"{rates['lines']:.2%} of the lines and {rates['symbols']:.2%} of the symbols wrong"
        logger.info("%s: %s sources translated %s: %s", split, f"{len(sources):,}", how, wrong)
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
