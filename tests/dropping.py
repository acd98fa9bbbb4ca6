"""What is done with the models of dropped_test.py and memory_left.py before they are dropped."""

import numpy as np
from conforming import ONE_LAYER, encoder_decoder, tagged_chars, tagged_lattice, tagger
from helpers import make_run, word_vocab

import txl_tf
from txl_tf.data.tagged.sentences import SentenceEncoder
from txl_tf.data.vocabulary import Vocab
from txl_tf.language.session import Session
from txl_tf.language.sliding_window import sliding_window_nll
from txl_tf.runs.scoring import Scorer
from txl_tf.taggers.text_tagger import TextTagger
from txl_tf.vanilla.translator import Translator

TEXT = np.random.default_rng(0).integers(1, 23, 200).astype(np.int32)
TOKENS = TEXT[:20].reshape(4, 5)


def optimizer():
    return txl_tf.make_optimizer(0.01, train_steps=10)


def language_model(**options):
    return txl_tf.TransformerXLLM(**{**ONE_LAYER, "mem_len": 4, **options})


def trained(lm, **compile_options):
    lm.compile(compile_options.pop("optimizer", None) or optimizer(), **compile_options)
    lm.fit(txl_tf.segments(TEXT, 4, 5, drop_remainder=True), steps_per_epoch=2, verbose=0)
    return lm


def evaluated(lm):
    lm.evaluate(txl_tf.segments(TEXT, 4, 5), verbose=0)
    lm.score(TOKENS, TOKENS)
    lm.log_probs(TOKENS)
    lm.train_on_batch(TOKENS, TOKENS)
    return lm


def everything():
    """All that is done with a language model, but for what the others do."""
    lm = evaluated(trained(language_model(cutoffs=[8], div_val=2)))
    lm.generate(TOKENS, 3)
    sliding_window_nll(lm, TEXT[:9], 4)
    return lm


def static_shapes():
    lm = trained(language_model(), static_shapes=True)
    lm.generate(TOKENS, 3)
    return lm


def exported(tmp_path):
    lm = language_model()
    txl_tf.export_saved_model(lm, str(tmp_path / "served"), word_vocab())
    return lm


def vanilla():
    lm = evaluated(trained(txl_tf.TransformerLM(**ONE_LAYER)))
    lm.generate(TOKENS, 3)
    return lm


def written():
    session = Session(language_model())
    session.read(TOKENS[:1])
    session.write(3)
    session.copy().write(2)
    return session, session.lm


def scored():
    lm, vocab = language_model(), word_vocab()
    scorer = Scorer(lm, vocab)
    list(scorer.score([["w1 w2", "w3"]]))
    return scorer, lm, vocab


def loaded(tmp_path):
    make_run(str(tmp_path / "run"), word_vocab())
    lm, vocab = txl_tf.load_run(str(tmp_path / "run"))
    lm.score(TOKENS, TOKENS)
    return lm, vocab


def translated():
    model = encoder_decoder()("float32")
    model.compile(optimizer())
    model.fit(TOKENS, TOKENS, verbose=0)
    model.evaluate(TOKENS, TOKENS, verbose=0)
    model.generate(TOKENS, start=1, end=2, max_new_tokens=2)
    vocab = word_vocab()
    translator = Translator(model, vocab, vocab)
    translator._translate([TOKENS[0]])
    return translator, model


def tagged(network, batch):
    model = tagger(network)("float32")
    model.compile(optimizer())
    inputs, tags = batch()
    model.fit(inputs, tags, verbose=0)
    model.evaluate(inputs, tags, verbose=0)
    model.predict(inputs, verbose=0)
    return model


def tagged_by_name():
    model, vocab = tagger(txl_tf.Tener)("float32"), Vocab(special=["<pad>", "<unk>"], unk="<unk>")
    vocab.set_lines(["<pad>", "<unk>", *"abc"], "symbols")
    text_tagger = TextTagger(model, SentenceEncoder(vocab))
    text_tagger.tag(["abc"])
    return text_tagger, model, vocab


USES = {
    "language model": everything,
    "static shapes": static_shapes,
    "recomputed, by an optimizer of Keras": lambda: trained(language_model(recompute=True), optimizer="adam"),
    "exported": exported,
    "vanilla language model": vanilla,
    "session": written,
    "scorer": scored,
    "load_run": loaded,
    "encoder-decoder and translator": translated,
    "TENER": lambda: tagged(txl_tf.Tener, tagged_chars),
    "text tagger": tagged_by_name,
    "FLAT": lambda: tagged(txl_tf.Flat, tagged_lattice),
}
