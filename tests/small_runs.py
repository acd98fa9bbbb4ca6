"""Runs of small random models: an encoder-decoder and taggers. `helpers.make_run` makes those of language models."""

from helpers import randomise

import txl_tf
from txl_tf.data.vocabulary import Vocab
from txl_tf.runs.families.tagger import FLAT, TENER
from txl_tf.runs.folder import RunFolder


def vocab_of(symbols, **options):
    vocab = Vocab(**options)
    vocab.set_lines(symbols, "symbols")
    return vocab


def make_encoder_decoder(folder):
    vocab = vocab_of(["<pad>", "<s>", "\n", *"abc"], level="char")
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 8, "max_len": 24}
    sizes |= {"input_vocab_size": len(vocab), "target_vocab_size": len(vocab)}
    model = txl_tf.Transformer(**sizes)
    model.build()
    randomise(model)
    RunFolder(folder).create({}, sizes, [vocab, vocab], model, step=1)


def make_tagger(folder, **options):
    vocab, bigrams = (vocab_of(["<pad>", "<unk>", *some], unk="<unk>") for some in ("abc", ["ab", "ca"]))
    sizes = {"n_layer": 1, "d_model": 8, "n_head": 2, "d_inner": 8, "d_embed": 6, "d_bigram": 4}
    sizes |= {"n_token": len(vocab), "n_bigram": len(bigrams), "labels": ["O", "B-X", "I-X"], **options}
    tagger = TENER.make(**sizes)
    tagger.build()
    randomise(tagger, scale=0.8)
    RunFolder(folder).create({}, sizes, [vocab, bigrams], tagger, step=1)


def make_flat(folder):
    """A run of FLAT, whose lexicon has two words."""
    words = ["bc", "abc"]
    symbols = ["<pad>", "<unk>", "a", "b", "c"]
    vocab, bigrams = vocab_of([*symbols, *words], unk="<unk>"), vocab_of(["<pad>", "<unk>", "ab"], unk="<unk>")
    sizes = {"n_layer": 1, "d_model": 8, "n_head": 2, "d_inner": 8, "d_embed": 6, "d_bigram": 4, "max_seq_len": 20}
    sizes |= {"n_token": len(vocab), "n_bigram": len(bigrams), "labels": ["O", "B-X", "I-X"]}
    tagger = FLAT.make(**sizes)
    tagger.build()
    randomise(tagger, scale=0.8)
    RunFolder(folder).create({}, sizes, [vocab, bigrams, vocab_of(words, unk=None)], tagger, step=1)
