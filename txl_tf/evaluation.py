"""Evaluation: the mean nll of a split of a corpus, and the measures it is reported in."""

import math
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from txl_tf.corpus import num_segments, segments
from txl_tf.vocabulary import escape


def measure_of(corpus):
    """`"ppl"`, perplexity, where tokens are words, and `"bpc"`, bits per character (or byte), where they are not."""
    return "bpc" if corpus.by_character else "ppl"


def in_measure(nll, measure):
    """A mean nll in nats as `"bpc"` or `"ppl"`."""
    if measure == "bpc":
        return nll / math.log(2)
    return math.exp(min(nll, 700))  # the perplexity of a model that diverged need not be exact


class Evaluation:
    """Evaluates the splits of a corpus, all in the same way.

    Args:
        corpus: `Corpus`.
        batch_size: rows, over all replicas.
        tgt_len: tokens of a segment.
        max_batch: batches to evaluate; all of them if not positive.
    """

    def __init__(self, corpus, batch_size, tgt_len, max_batch=-1):
        self.corpus = corpus
        self.batch_size = batch_size
        self.tgt_len = tgt_len
        self.max_batch = max_batch
        self.measure = measure_of(corpus)

    def check(self, split):
        """Raises ValueError where the corpus has no such split or it is shorter than a batch."""
        if split not in self.corpus.splits:
            raise ValueError(f"eval_split must be one of {', '.join(self.corpus.splits)}, got {split!r}")
        num_segments(len(self.corpus.splits[split]), self.batch_size, self.tgt_len, name=f"{split} split")

    def dataset(self, split):
        """`tf.data.Dataset` of the batches to evaluate."""
        dataset = segments(self.corpus.splits[split], self.batch_size, self.tgt_len)
        return dataset.take(self.max_batch) if self.max_batch > 0 else dataset

    def n_token(self, split):
        """Number of tokens that are predicted."""
        labels = len(self.corpus.splits[split]) // self.batch_size - 1
        if self.max_batch > 0:
            labels = min(labels, self.max_batch * self.tgt_len)
        return labels * self.batch_size

    def run(self, lm, split, token_nll=None):
        """Evaluates `lm`, prints what it found and returns the mean nll in nats.

        Args:
            lm: compiled `TransformerXLLM`.
            split: of the corpus.
            token_nll: file to write a line for every predicted token to, in the order of the text: the token and
                its nll in nats, separated by a tab.
        """
        started = time.perf_counter()
        verbose = 1 if sys.stdout.isatty() else 0
        if token_nll is None:
            nll = lm.evaluate(self.dataset(split), verbose=verbose)
        else:
            nll = self._write_tokens(lm, split, token_nll, verbose)
        rate = self.n_token(split) / (time.perf_counter() - started)
        print(f"{split}: {self.format(nll)} | {self.n_token(split):,} tokens | {rate:,.0f} tokens/s", flush=True)
        return nll

    def _write_tokens(self, lm, split, path, verbose):
        """Scores the split, writes its tokens to `path` and returns the mean nll."""
        dataset, mems, columns = self.dataset(split), None, []
        progress = keras.utils.Progbar(int(dataset.cardinality()), verbose=verbose)
        for tokens, labels in dataset:
            nll, mems = lm.score(tokens, labels, mems)
            columns.append((labels.numpy(), nll.numpy()))
            progress.add(1)
        labels, nll = (np.concatenate(parts, 1).ravel() for parts in zip(*columns, strict=True))
        symbols = [escape(symbol) for symbol in self.corpus.vocab.symbols]
        with tf.io.gfile.GFile(path, "w") as file:
            for label, value in zip(labels, nll, strict=True):
                file.write(f"{symbols[label]}\t{value:.6f}\n")
        return float(nll.mean(dtype=np.float64))

    def format(self, nll):
        return f"loss {nll:.6f} nats | {self.measure} {in_measure(nll, self.measure):.4f}"
