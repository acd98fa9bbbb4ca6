"""Evaluation: the mean nll of a split of a corpus, and the measures it is reported in."""

import math
import time

from txl_tf.corpus import num_segments, segments


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

    def run(self, lm, split):
        """Evaluates `lm`, prints what it found and returns the mean nll in nats."""
        started = time.perf_counter()
        nll = lm.evaluate(self.dataset(split), verbose=0)
        rate = self.n_token(split) / (time.perf_counter() - started)
        print(f"{split}: {self.format(nll)} | {self.n_token(split):,} tokens | {rate:,.0f} tokens/s", flush=True)
        return nll

    def format(self, nll):
        return f"loss {nll:.4f} nats | {self.measure} {in_measure(nll, self.measure):.4f}"
