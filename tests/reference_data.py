"""Data preparation as the original's vocabulary.py and data_utils.py do it: baseline of the benchmark.

Line by line, in plain Python: `strip().split()`, a `Counter`, an id for every symbol by `add_symbol`, an array for
every line, all of them concatenated in the end. What is counted stays in memory as lists of words until the file is
read, and the encoded lines until they are joined, as there. Nothing here knows about `txl_tf`.
"""

import os
from collections import Counter, OrderedDict

import numpy as np


class ReferenceVocab:
    """Symbols and ids. Without `delimiter` lines are split at white space; the empty one makes characters of them."""

    def __init__(self, special=(), min_freq=0, max_size=None, lower_case=False, delimiter=None):
        self.counter = Counter()
        self.special = special
        self.min_freq = min_freq
        self.max_size = max_size
        self.lower_case = lower_case
        self.delimiter = delimiter

    def tokenize(self, line, add_eos=False):
        line = line.strip()
        if self.lower_case:
            line = line.lower()
        symbols = line if self.delimiter == "" else line.split(self.delimiter)
        return [*symbols, "<eos>"] if add_eos else symbols

    def count_file(self, path, add_eos=False):
        sents = []
        with open(path, encoding="utf-8") as file:
            for line in file:
                symbols = self.tokenize(line, add_eos)
                self.counter.update(symbols)
                sents.append(symbols)
        return sents

    def build_vocab(self):
        self.idx2sym = []
        self.sym2idx = OrderedDict()
        for symbol in self.special:
            self.add_symbol(symbol)
        for symbol, count in self.counter.most_common(self.max_size):
            if count < self.min_freq:
                break
            self.add_symbol(symbol)

    def add_symbol(self, symbol):
        if symbol not in self.sym2idx:
            self.idx2sym.append(symbol)
            self.sym2idx[symbol] = len(self.idx2sym) - 1

    def get_idx(self, symbol):
        return self.sym2idx[symbol] if symbol in self.sym2idx else self.sym2idx["<unk>"]

    def convert_to_nparray(self, symbols):
        return np.array([self.get_idx(symbol) for symbol in symbols], dtype=np.int64)

    def encode_file(self, path, add_eos=True):
        encoded = []
        with open(path, encoding="utf-8") as file:
            for line in file:
                encoded.append(self.convert_to_nparray(self.tokenize(line, add_eos)))
        return np.concatenate(encoded)


def prepare(folder, output):
    """WikiText-103's way from train.txt, valid.txt and test.txt to vocab.txt and an array a split, `{split: array}`."""
    vocab = ReferenceVocab(special=["<eos>"])
    vocab.count_file(os.path.join(folder, "train.txt"))
    vocab.build_vocab()
    splits = {split: vocab.encode_file(os.path.join(folder, f"{split}.txt")) for split in ("train", "valid", "test")}
    os.makedirs(output)
    with open(os.path.join(output, "vocab.txt"), "w", encoding="utf-8") as file:
        file.writelines(f"{symbol}\n" for symbol in vocab.idx2sym)
    for split, ids in splits.items():
        np.save(os.path.join(output, f"{split}.npy"), ids)
    return splits
