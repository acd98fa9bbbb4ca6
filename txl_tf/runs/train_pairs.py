"""Training of an encoder-decoder, from pairs of lines to a folder of checkpoints and logs."""

from __future__ import annotations

import dataclasses
import functools
import logging

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import (
    MachineConfig,
    OptimizerConfig,
    PairsConfig,
    PairsTrainingConfig,
    SearchConfig,
    TransformerConfig,
)
from txl_tf.data.batching import EpochBatches
from txl_tf.data.pairs.parallel import ParallelCorpus, check_lengths, pair_batches, read_pairs
from txl_tf.data.vocabulary import visible
from txl_tf.models.vanilla.transformer import Transformer
from txl_tf.models.vanilla.translator import Translator
from txl_tf.runs.error_rates import error_rates, group_references
from txl_tf.runs.evaluate import to_metric
from txl_tf.runs.pairs_folder import PairsFolder
from txl_tf.runs.run import Run
from txl_tf.runs.setup import open_machine
from txl_tf.runs.trackers import check_tracker
from txl_tf.runs.weights import check_exists
from txl_tf.training.optimization import make_optimizer

logger = logging.getLogger("txl_tf")

_STRATEGIES = ("auto", "one", "mirrored")


def train_pairs(
    folder: PairsFolder | str,
    *,
    data: PairsConfig,
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    training: PairsTrainingConfig,
    search: SearchConfig | None = None,
    machine: MachineConfig | None = None,
) -> dict[str, dict[str, float]]:
    """Trains an encoder-decoder and translates what was held out; everything it leaves behind is in the folder.

    A folder that holds checkpoints is continued from the newest that is whole, exactly: weights, optimizer, place in
    the pairs, dropout and the sums of the window of steps that was under way.

    Args:
        folder: `PairsFolder`, or its path.
        model: the sizes of the vocabularies are those of the pairs.
        search: how the held-out sources are translated at the end.

    Returns:
        `{split: {"loss": mean nll of a target symbol in nats, "lines", "symbols": shares that are wrong}}`; the last
        two where it was translated.

    Raises:
        ValueError, OSError: bad input, before any long work; the message says what was found and what is allowed. Or
            the training diverged or the disk is full: the last good checkpoint is named.
        KeyboardInterrupt, SystemExit(0): after Ctrl-C or SIGTERM, once the run is saved.
    """
    machine, folder = machine or MachineConfig(), PairsFolder(folder)
    if machine.strategy not in _STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(_STRATEGIES)} for pairs, got {machine.strategy}")
    if model.share_embeddings and not data.share_vocab:
        raise ValueError("share_embeddings needs share_vocab, got share_vocab=False")
    if training.warm_start_path:
        check_exists(training.warm_start_path)
    check_tracker(training.tracker)
    strategy, machine = open_machine(machine)
    with strategy.scope():
        keras_optimizer = make_optimizer(train_steps=training.train_steps, **optimizer.to_dict())
    with folder.writing():
        keras.utils.set_random_seed(training.seed)
        run = _PairsRun(folder, read_pairs(data), training, machine, strategy)
        sizes = map(len, run.corpus.vocabs)
        names = "input_vocab_size", "target_vocab_size"
        model = dataclasses.replace(model, **dict(zip(names, sizes, strict=True)))
        check_lengths(run.corpus, model.max_len)
        config = run.config(data, model, optimizer)
        run.check_same_run(config)
        run.make_model(model, keras_optimizer)
        state = run.restore()
        folder.describe(config, run.corpus.vocabs)
        return run.train(state, search or SearchConfig())


class _PairsRun(Run):
    """One training of an encoder-decoder; `train_pairs` calls its methods."""

    corpus: ParallelCorpus
    remedy = "Choose another folder to train on these pairs"

    def pair_batches(self, split: str, seed: int | None = None) -> EpochBatches:
        training, multiple = self.training, self.strategy.num_replicas_in_sync
        return pair_batches(self.corpus.splits[split], training.batch_size, training.batch_tokens, seed, multiple)

    def config(self, data: PairsConfig, model: TransformerConfig, optimizer: OptimizerConfig) -> dict:
        """`config.json`."""
        names = "batch_size batch_tokens train_steps iterations save_steps seed"
        training = {name: getattr(self.training, name) for name in names.split()}
        training["mixed_precision"] = self.machine.mixed_precision
        return {
            **self.folder.config(data.to_dict(), model.to_dict(), self.corpus.vocabs, Transformer),
            "training": {**training, **optimizer.to_dict()},
            "fingerprints": self.fingerprints,
        }

    def make_model(self, model: TransformerConfig, optimizer: keras.optimizers.Optimizer) -> None:
        """The compiled model, its optimizer built."""
        training, corpus = self.training, self.corpus
        with self.strategy.scope():
            made = Transformer(**model.to_dict(), seed=training.seed, dtype=self.machine.dtype_policy)
            steps_per_execution = training.steps_per_execution or 1
            made.compile(optimizer, jit_compile=training.jit_compile, steps_per_execution=steps_per_execution)
        self.use(made)
        sizes = ", ".join(f"{len(pairs):,} {split}" for split, pairs in corpus.splits.items())
        symbols = " and ".join(f"{len(vocab):,}" for vocab in corpus.vocabs)
        logger.info("%s: %s symbols; pairs: %s", corpus.names["train"], symbols, sizes)
        parameters, type_name = f"{made.count_params():,}", self.machine.mixed_precision
        logger.info("model: %s parameters, %s; %d batches an epoch", parameters, type_name, len(self._train_batches))

    @functools.cached_property
    def _train_batches(self) -> EpochBatches:
        return self.pair_batches("train", self.training.seed)

    def batches(self, start: int) -> tf.data.Dataset:
        return self._train_batches.dataset(start, repeat=True)

    def validation(self) -> tf.data.Dataset:
        return self.pair_batches("valid").dataset()

    def tokens_per_step(self) -> float:
        return len(self.corpus.splits["train"].targets.ids) / len(self._train_batches)

    def finish(self, search: SearchConfig) -> dict[str, dict[str, float]]:
        """Averaged weights, evaluations and a sample, at the end of the training."""
        self.save_average()
        results = {}
        for split in self.corpus.splits:
            if split == "train":
                continue
            found = self.model.evaluate(self.pair_batches(split).dataset(), verbose=0, return_dict=True)
            results[split] = {"loss": found["loss"]}
            line = f"loss {found['loss']:.6f} nats | ppl {to_metric(found['loss'], 'ppl'):.4f}"
            logger.info("%s: %s | %s of the symbols right", split, line, f"{found['accuracy']:.2%}")
            if self.training.eval_sources:
                results[split] |= self._translate(split, search)
        self.checkpoints.save_best(results["valid"]["loss"])
        self.log_end()
        return results

    def _translate(self, split: str, search: SearchConfig) -> dict[str, float]:
        """Error rates of the first `eval_sources` different sources of a split."""
        (source_vocab, target_vocab), pairs = self.corpus.vocabs, self.corpus.splits[split]
        translator = Translator(self.model, source_vocab, target_vocab, search, batch_size=256)
        texts = [
            [vocab.decode(lines[i][:-1]) for i in range(len(pairs))]
            for vocab, lines in zip(self.corpus.vocabs, pairs, strict=True)
        ]
        references = group_references(*texts)
        sources = list(references)[: self.training.eval_sources if self.training.eval_sources > 0 else None]
        found = [best.text for best, *_ in translator.translate(sources, split)]
        right = [references[source] for source in sources]
        rates = error_rates(found, right, target_vocab.level)
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
