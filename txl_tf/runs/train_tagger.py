"""Training of a tagger, from files of tagged sentences to a folder of checkpoints and logs."""

from __future__ import annotations

import dataclasses
import functools
import logging

import keras
import numpy as np
import tensorflow as tf

from txl_tf.config import (
    FlatTaggerConfig,
    MachineConfig,
    OptimizerConfig,
    TaggedConfig,
    TaggerTrainingConfig,
    TenerTaggerConfig,
)
from txl_tf.data.batching import EpochBatches
from txl_tf.data.tagged.batches import tagged_batches
from txl_tf.data.tagged.sentences import TaggedCorpus, read_corpus
from txl_tf.runs.run import Run
from txl_tf.runs.setup import open_machine
from txl_tf.runs.tagger_folder import TAGGER_FOLDERS, TenerFolder
from txl_tf.runs.trackers import check_tracker
from txl_tf.runs.weights import check_exists, load_weights
from txl_tf.training.optimization import make_optimizer

logger = logging.getLogger("txl_tf")

_STRATEGIES = ("auto", "one", "mirrored")


def train_tagger(
    model_dir: str,
    *,
    data: TaggedConfig,
    model: TenerTaggerConfig | FlatTaggerConfig,
    optimizer: OptimizerConfig,
    training: TaggerTrainingConfig,
    machine: MachineConfig | None = None,
) -> dict[str, dict[str, float]]:
    """Trains a tagger; everything it leaves behind is in the folder.

    A folder that holds checkpoints is continued from the newest that is whole, exactly: weights, optimizer, place in
    the sentences, dropout and the sums of the window of steps that was under way.

    Args:
        model_dir: path of the run's folder.
        data: with a lexicon if, and only if, the model is FLAT.
        model: its hyper-parameters decide which network it is. Labels and sizes of vocabularies are those of the data.

    Returns:
        `{split: {"loss": mean nll of a sentence in nats, "precision", "recall", "f1"}}` of the checkpoint with the best
        F1 on the sentences to validate on; the splits are "valid" and perhaps "test".

    Raises:
        ValueError, OSError: bad input, before any long work; the message says what was found and what is allowed. Or
            the training diverged or the disk is full: the last good checkpoint is named.
        KeyboardInterrupt, SystemExit(0): after Ctrl-C or SIGTERM, once the run is saved.
    """
    family = "flat" if isinstance(model, FlatTaggerConfig) else "tener"
    machine, folder = machine or MachineConfig(), TAGGER_FOLDERS[family](model_dir)
    _check(family, data, training, machine)
    strategy, machine = open_machine(machine)
    with strategy.scope():
        keras_optimizer = make_optimizer(train_steps=training.train_steps, **optimizer.to_dict())
    with folder.writing():
        keras.utils.set_random_seed(training.seed)
        run = _TaggerRun(folder, read_corpus(data), training, machine, strategy)
        model = run.complete(model, data)
        config = run.config(data, model, optimizer)
        run.check_same_run(config)
        run.make_model(model, keras_optimizer, data.unit_vectors)
        state = run.restore()
        folder.describe(config, run.corpus.vocabs)
        return run.train(state)


def _check(family: str, data: TaggedConfig, training: TaggerTrainingConfig, machine: MachineConfig) -> None:
    if machine.strategy not in _STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(_STRATEGIES)} for taggers, got {machine.strategy}")
    if family == "flat" and not data.lexicon:
        raise ValueError("lexicon must be given for FLAT: a file of words, a line each, or jieba")
    if family == "tener" and data.lexicon:
        raise ValueError(f"lexicon must be left out for TENER, which takes no words, got {data.lexicon}")
    if training.warm_start_path:
        check_exists(training.warm_start_path)
    check_tracker(training.tracker)


class _TaggerRun(Run):
    """One training of a tagger; `train_tagger` calls its methods."""

    folder: TenerFolder
    corpus: TaggedCorpus
    metrics = ()
    validated = ("precision", "recall", "f1")
    remedy = "Choose another folder to train on these sentences"

    @property
    def lattice(self) -> bool:
        return self.corpus.lexicon is not None

    def sentence_batches(self, split: str, seed: int | None = None) -> EpochBatches:
        multiple = self.strategy.num_replicas_in_sync
        return tagged_batches(self.corpus.splits[split], self.lattice, self.training.batch_size, seed, multiple)

    def complete(self, model: TenerTaggerConfig | FlatTaggerConfig, data: TaggedConfig):
        """The hyper-parameters with those that the data decides. Raises ValueError where a sentence is too long."""
        corpus = self.corpus
        for split, sentences in corpus.splits.items():
            lengths = [sentence.n for sentence in sentences.sentences]
            longest = int(np.argmax(lengths))
            if lengths[longest] > model.max_seq_len:
                raise ValueError(
                    f"{corpus.names[split]}, sentence {longest + 1} has {lengths[longest]:,} characters; at most "
                    f"max_seq_len={model.max_seq_len} are allowed"
                )
        widths = {"vocab": "d_embed", "bigram_vocab": "d_bigram"}
        found = {widths[name]: table.shape[1] for name, table in corpus.embeddings.items()}
        n_bigram = len(corpus.bigram_vocab) if data.bigrams else 0
        return dataclasses.replace(model, n_token=len(corpus.vocab), n_bigram=n_bigram, labels=corpus.labels, **found)

    def config(self, data: TaggedConfig, model: TenerTaggerConfig, optimizer: OptimizerConfig) -> dict:
        """`config.json`."""
        names = "batch_size patience train_steps iterations save_steps seed"
        training = {name: getattr(self.training, name) for name in names.split()}
        training["mixed_precision"] = self.machine.mixed_precision
        return {
            **self.folder.config(data.to_dict(), model.to_dict(), self.corpus.vocabs, None),
            "training": {**training, **optimizer.to_dict()},
            "fingerprints": self.fingerprints,
        }

    def make_model(self, model: TenerTaggerConfig, optimizer: keras.optimizers.Optimizer, unit_vectors: bool) -> None:
        """The compiled model, its optimizer built, its embeddings those of the vectors that are given."""
        training, corpus = self.training, self.corpus
        with self.strategy.scope():
            made = self.folder.make_model(
                {"family": next(iter(self.folder.families)), "model": model.to_dict()},
                seed=training.seed, dtype=self.machine.dtype_policy,
            )  # fmt: skip
            steps_per_execution = training.steps_per_execution or 1
            made.compile(optimizer, jit_compile=training.jit_compile, steps_per_execution=steps_per_execution)
        tables = {"vocab": made.network.embedding, "bigram_vocab": made.network.bigram_embedding}
        for name, table in tables.items():
            if table is None:
                continue
            rows = corpus.embeddings.get(name, table.numpy()).copy()
            if unit_vectors:
                rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
            rows[0] = 0  # padding
            table.assign(rows)
        self.use(made)
        sizes = ", ".join(f"{len(split):,} {name}" for name, split in corpus.splits.items())
        kinds = ", ".join(made.kinds)
        logger.info("%s: sentences: %s; entities: %s (%s)", corpus.names["train"], sizes, kinds, corpus.scheme)
        logger.info("model: %s parameters, %s without embeddings; %s; %d batches an epoch", *self._sizes(made))

    def _sizes(self, made: keras.Model) -> tuple:
        tables = made.network.embedding, made.network.bigram_embedding
        embeddings = sum(int(np.prod(table.shape)) for table in tables if table is not None)
        total = made.count_params()
        return f"{total:,}", f"{total - embeddings:,}", self.machine.mixed_precision, len(self._train_batches)

    @functools.cached_property
    def _train_batches(self) -> EpochBatches:
        return self.sentence_batches("train", self.training.seed)

    def batches(self, start: int) -> tf.data.Dataset:
        return self._train_batches.dataset(start, repeat=True)

    def validation(self) -> tf.data.Dataset:
        return self.sentence_batches("valid").dataset()

    def tokens_per_step(self) -> float:
        return sum(sentence.n for sentence in self.corpus.splits["train"].sentences) / len(self._train_batches)

    def show(self, logs: dict, prefix: str) -> str:
        line = f"loss {logs[prefix + 'loss']:.4f}"
        if prefix + "f1" not in logs:
            return line
        precision, recall, f1 = (logs[prefix + name] for name in self.validated)
        return f"{line} | precision {precision:.2%} recall {recall:.2%} F1 {f1:.2%}"

    def finish(self) -> dict[str, dict[str, float]]:
        """Averaged weights, and evaluations of the last and of the best weights, at the end of the training."""
        self.save_average()
        self.checkpoints.save_best(self._evaluate("valid", "last")["f1"])
        if "test" in self.corpus.splits:
            self._evaluate("test", "last")
        best = self.folder.find_best()
        load_weights(self.model, best["path"])
        results = {
            split: self._evaluate(split, f"best (step {best['step']})")
            for split in self.corpus.splits
            if split != "train"
        }
        self.log_end()
        return results

    def _evaluate(self, split: str, what: str) -> dict[str, float]:
        found = self.model.evaluate(self.sentence_batches(split).dataset(), verbose=0, return_dict=True)
        found = {name: float(found[name]) for name in ("loss", *self.validated)}
        logger.info("%s, %s: %s", split, what, self.show(found, ""))
        return found
