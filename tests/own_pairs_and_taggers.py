"""Parts of encoder-decoders and taggers as users write them, and what must agree: see `own_parts.py`."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from own_parts import CALLED, Disagreement, by_name, close, randomise

import txl_tf
from txl_tf import layers
from txl_tf.serving.tagging import TaggingSignatures
from txl_tf.serving.translation import TranslationSignatures
from txl_tf.vanilla.transformer import Decoder, Encoder

register = keras.saving.register_keras_serializable("own_parts")


class Way(NamedTuple):
    """As `own_parts.Way`; `make` gives the model."""

    words: tuple
    make: Callable = None
    attributes: list = []
    install: Callable = lambda model: None


# ------------------------------------------------------------------------------------------------ encoder-decoders

SIZES = {"num_layers": 2, "d_model": 8, "num_heads": 2, "dff": 12, "max_len": 12, "rate": 0.0, "seed": 3}
SIZES |= {"input_vocab_size": 17, "target_vocab_size": 15}
START, END, NEW = 1, 2, 5
_rng = np.random.RandomState(2)
SOURCE = _rng.randint(3, 17, [3, 6]).astype(np.int32)
TARGET = np.concatenate([np.full([3, 1], START), _rng.randint(3, 15, [3, 5])], 1).astype(np.int32)
SOURCE[1, 4:] = TARGET[2, 4:] = 0


@register
class OwnEncoderLayer(layers.EncoderLayer):
    """Half of the input again around all of the layer; the rest is passed on, whatever is asked for."""

    def call(self, x, *args, return_attention_scores=False, **kwargs):
        CALLED.add("OwnEncoderLayer")
        output, scores = super().call(x, *args, return_attention_scores=True, **kwargs)
        return (x * 0.5 + output, scores) if return_attention_scores else x * 0.5 + output


@register
class OwnDecoderLayer(layers.DecoderLayer):
    """The same for a decoder."""

    def call(self, x, *args, return_attention_scores=True, **kwargs):
        CALLED.add("OwnDecoderLayer")
        output, *scores = super().call(x, *args, return_attention_scores=True, **kwargs)
        return (x * 0.5 + output, *scores) if return_attention_scores else x * 0.5 + output


@register
class ShiftedHeads(layers.MultiHeadAttention):
    """Attention whose result is half as large again."""

    def attention(self, *args, **kwargs):
        CALLED.add("ShiftedHeads")
        output, weights = super().attention(*args, **kwargs)
        return 1.5 * output, weights


@register
class OwnNet(layers.PositionWiseFFN):
    """A feed-forward net with a path past it."""

    def call(self, x, *args, **kwargs):
        CALLED.add("OwnNet")
        return 0.7 * x + super().call(x, *args, **kwargs)


@register
class OwnDecoder(Decoder):
    """A decoder whose states are turned round."""

    def call(self, *args, **kwargs):
        CALLED.add("OwnDecoder")
        x, weights = super().call(*args, **kwargs)
        return x[..., ::-1], weights


@register
class OwnEncoder(Encoder):
    def call(self, ids, *args, return_attention_scores=False, **kwargs):
        CALLED.add("OwnEncoder")
        x, weights = super().call(ids, *args, return_attention_scores=True, **kwargs)
        return (x[..., ::-1], weights) if return_attention_scores else x[..., ::-1]


@register
class OwnTable(layers.Embeddings):
    """Embeddings with the parity of the id added."""

    def call(self, ids):
        CALLED.add("OwnTable")
        return super().call(ids) + tf.cast(ids % 2, self.compute_dtype)[..., None]


@register
class BiasedTransformer(txl_tf.Transformer):
    """Whose logits have what the user adds in `call`."""

    def call(self, inputs, training=None, dropout_key=None):
        CALLED.add("BiasedTransformer")
        logits = super().call(inputs, training=training, dropout_key=dropout_key)
        return logits + 2.0 * tf.cast(tf.range(self.target_vocab_size) % 3, logits.dtype)


@register
class OwnLayersTransformer(txl_tf.Transformer):
    """Whose constructor puts own layers in."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for layer in self.encoder.stacked:
            layer.__class__ = OwnEncoderLayer
        for layer in self.decoder.stacked:
            layer.__class__ = OwnDecoderLayer


def _set_class(cls, *parts):
    """Sets the class of parts of a model, by their path: lists stand for all in them."""

    def install(model):
        for path in parts:
            found = [model]
            for name in path.split("."):
                found = [getattr(part, name) for part in found]
                found = [each for part in found for each in (part if isinstance(part, (list, tuple)) else [part])]
            for part in found:
                part.__class__ = cls

    return install


def _around(cls, name):
    """A method of the class that is put in place of its own, as a patch of a user's."""
    plain = getattr(cls, name)

    @functools.wraps(plain)
    def call(self, x, *args, **kwargs):
        CALLED.add(f"{cls.__name__}.{name}")
        found = plain(self, x, *args, **kwargs)
        return (x * 0.5 + found[0], *found[1:]) if isinstance(found, tuple) else x * 0.5 + found

    return [(cls, name, call)]


def make_transformer(cls=txl_tf.Transformer):
    return lambda: cls(**SIZES)


PAIRS = {
    "encoder_layers": Way(("OwnEncoderLayer",), install=_set_class(OwnEncoderLayer, "encoder.stacked")),
    "decoder_layers": Way(("OwnDecoderLayer",), install=_set_class(OwnDecoderLayer, "decoder.stacked")),
    "encoder_layer_call": Way(("EncoderLayer",), attributes=_around(layers.EncoderLayer, "call")),
    "decoder_layer_call": Way(("DecoderLayer",), attributes=_around(layers.DecoderLayer, "call")),
    "own_attention": Way(
        ("ShiftedHeads",),
        install=_set_class(ShiftedHeads, "encoder.stacked.mha", "decoder.stacked.mha1", "decoder.stacked.mha2"),
    ),
    "own_net": Way(("OwnNet",), install=_set_class(OwnNet, "encoder.stacked.ffn", "decoder.stacked.ffn")),
    "own_decoder": Way(("OwnDecoder",), install=_set_class(OwnDecoder, "decoder")),
    "own_encoder": Way(("OwnEncoder",), install=_set_class(OwnEncoder, "encoder")),
    "own_embedding": Way(("OwnTable",), install=_set_class(OwnTable, "target_embedding")),
    "model_call": Way(("BiasedTransformer",), make_transformer(BiasedTransformer)),
    "own_layers_in_constructor": Way(("OwnEncoderLayer", "OwnDecoderLayer"), make_transformer(OwnLayersTransformer)),
}


def _greedy(model, ids):
    """Raises Disagreement unless `ids`, `[3, N]`, are step by step the argmax of the call, up to the end."""
    ids = np.asarray(ids)
    target, ended = np.full([3, 1], START, np.int32), np.zeros(3, bool)
    for i in range(ids.shape[1]):
        last = np.asarray(model((SOURCE, target)))[:, -1].copy()
        last[:, [0, START]] = -np.inf  # padding and the start are never written
        chosen = ids[:, i : i + 1]
        short = np.take_along_axis(last, chosen, 1)[:, 0] < last.max(1) - 1e-4
        if (short & ~ended).any():
            raise Disagreement(f"token {i + 1} is {chosen.ravel()}, the likeliest are {last.argmax(1)}")
        ended |= chosen[:, 0] == END
        target = np.concatenate([target, np.where(ended[:, None], END, chosen)], 1)


def pairs_nll(model):
    """The nll of labels by the model's own call, `[3, 5]`, 0 at padding."""
    log_probs = np.asarray(tf.nn.log_softmax(model((SOURCE, TARGET[:, :-1]))))
    labels = TARGET[:, 1:]
    return -np.take_along_axis(log_probs, labels[..., None], -1)[..., 0] * (labels != 0)


def pairs_checks(model, nll, folder):
    loss = nll.sum() / (TARGET[:, 1:] != 0).sum()
    options = {"start": START, "end": END, "max_new_tokens": NEW, "suppress_tokens": (START,)}

    def generated(**more):
        return lambda: _greedy(model, np.reshape(model.generate(SOURCE, **options, **more)[0], [3, -1]))

    served = Functions(model, TranslationSignatures, folder, search={"beam_size": 1, "max_new_tokens": NEW})
    return {
        "call": lambda: close(pairs_nll(model), nll),
        "evaluate": lambda: close(np.ravel(model.evaluate(SOURCE, TARGET, verbose=0))[0], loss),
        "greedy": generated(),
        "beam of 1": generated(n_best=1),
        "served score": lambda: close(
            served["score"](source=tf.constant(SOURCE), target=tf.constant(TARGET[:, 1:]))["nll"], nll
        ),
        "served text": lambda: _greedy(
            model, np.reshape(served["translate"](source=tf.constant(SOURCE))["ids"], [3, -1])
        ),
        "train_on_batch": lambda: close(np.ravel(model.train_on_batch(SOURCE, TARGET))[0], loss),
    }  # fmt: skip


class Functions:
    """The functions of an export; without a folder, of the signatures as they are before it."""

    def __init__(self, model, signatures, folder, **options):
        self.model, self.signatures, self.folder, self.options, self.functions = (
            model,
            signatures,
            folder,
            options,
            None,
        )

    def __getitem__(self, name):
        if self.functions is None and self.folder is None:
            if "search" in self.options:
                self.options = {"search": txl_tf.config.SearchConfig(**self.options["search"])}
            self.functions = by_name(self.signatures(self.model, **self.options).signatures())
        if self.functions is None:
            txl_tf.export_saved_model(self.model, self.folder, warmup=False, **self.options)
            self.functions = tf.saved_model.load(self.folder).signatures
        return self.functions[name]


# -------------------------------------------------------------------------------------------------------- taggers

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
NETWORK = {"n_token": 23, "n_bigram": 9, "d_embed": 6, "d_bigram": 4, "d_model": 8, "n_layer": 2, "seed": 3}
OF_ATTENTION = {"n_head": 2, "d_inner": 12}


@register
class OwnTenerLayer(layers.TenerLayer):
    def call(self, x, *args, **kwargs):
        CALLED.add("OwnTenerLayer")
        return 0.5 * x + super().call(x, *args, **kwargs)


@register
class OwnTenerAttn(layers.TenerAttn):
    def call(self, x, *args, **kwargs):
        CALLED.add("OwnTenerAttn")
        return 1.5 * super().call(x, *args, **kwargs)


@register
class OwnFlatLayer(layers.FlatLayer):
    def call(self, x, *args, **kwargs):
        CALLED.add("OwnFlatLayer")
        return 0.5 * x + super().call(x, *args, **kwargs)


@register
class OwnTener(txl_tf.Tener):
    def call(self, *args, **kwargs):
        CALLED.add("OwnTener")
        return super().call(*args, **kwargs)[..., ::-1]


@register
class OwnBiLSTM(txl_tf.BiLSTM):
    def call(self, *args, **kwargs):
        CALLED.add("OwnBiLSTM")
        return super().call(*args, **kwargs)[..., ::-1]


@register
class OwnTagger(txl_tf.Tagger):
    """Whose emissions have what the user adds in `call`."""

    def call(self, inputs, training=None, dropout_key=None):
        CALLED.add("OwnTagger")
        emissions = super().call(inputs, training=training, dropout_key=dropout_key)
        return emissions + 2.0 * tf.cast(tf.range(len(self.labels)) % 2, emissions.dtype)


@register
class OwnLayersTener(txl_tf.Tener):
    """Whose constructor puts own layers in."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for layer in self.stacked:
            layer.__class__ = OwnTenerLayer


def make_tagger(network, cls=txl_tf.Tagger):
    options = {} if issubclass(network, txl_tf.BiLSTM) else OF_ATTENTION
    return lambda: cls(network(**NETWORK, **options), LABELS, seed=4)


TENER, FLAT = make_tagger(txl_tf.Tener), make_tagger(txl_tf.Flat)
TAGGERS = {
    "tener_layers": Way(("OwnTenerLayer",), TENER, install=_set_class(OwnTenerLayer, "network.stacked")),
    "tener_attention": Way(("OwnTenerAttn",), TENER, install=_set_class(OwnTenerAttn, "network.stacked.self_attn")),
    "tener_layer_call": Way(("TenerLayer",), TENER, _around(layers.TenerLayer, "call")),
    "tener_net": Way(("OwnNet",), TENER, install=_set_class(OwnNet, "network.stacked.ffn")),
    "flat_layers": Way(("OwnFlatLayer",), FLAT, install=_set_class(OwnFlatLayer, "network.stacked")),
    "own_tener": Way(("OwnTener",), make_tagger(OwnTener)),
    "own_layers_in_constructor": Way(("OwnTenerLayer",), make_tagger(OwnLayersTener)),
    "own_bilstm": Way(("OwnBiLSTM",), make_tagger(OwnBiLSTM)),
    "model_call": Way(("OwnTagger",), make_tagger(txl_tf.Tener, OwnTagger)),
}


def tagger_inputs(tagger):
    rng = np.random.RandomState(4)
    chars, bigrams = (rng.randint(1, n, [4, 5]).astype(np.int32) for n in (23, 9))
    chars[1, 3:] = bigrams[1, 3:] = 0
    tags = rng.randint(0, len(LABELS), [4, 5]).astype(np.int32)
    if not isinstance(tagger.network, txl_tf.Flat):
        return {"chars": chars, "bigrams": bigrams}, tags
    pos_s, pos_e = (np.tile(np.pad(np.arange(5), (0, 2)), (4, 1)).astype(np.int32) for _ in "se")
    lattice = np.pad(chars, [(0, 0), (0, 2)])
    lattice[0, 5:], pos_s[0, 5:], pos_e[0, 5:] = [7, 8], [0, 2], [1, 4]
    lengths = {"seq_len": np.int32([5, 3, 5, 5]), "lex_num": np.int32([2, 0, 0, 0])}
    return {"lattice": lattice, "bigrams": bigrams, **lengths, "pos_s": pos_s, "pos_e": pos_e}, tags


def tagger_checks(tagger, emissions, folder):
    inputs, gold = tagger_inputs(tagger)
    mask = np.ones([4, 5], bool)
    mask[1, 3:] = False
    nll = np.asarray(tagger.crf.nll(tf.constant(emissions), gold, mask))
    tags = np.asarray(tagger.crf.decode(tf.constant(emissions), mask)[0])
    served = Functions(tagger, TaggingSignatures, folder)

    def same(found):
        if (np.asarray(found) != tags).any():
            raise Disagreement(f"tags are {np.asarray(found).ravel()}, the best path is {tags.ravel()}")

    return {
        "call": lambda: close(tagger(inputs), emissions),
        "nll": lambda: close(tagger.nll(inputs, gold), nll),
        "evaluate": lambda: close(np.ravel(tagger.evaluate(inputs, gold, verbose=0))[0], nll.mean()),
        "decode": lambda: same(tagger.decode(inputs)[0]),
        "entities": lambda: same(tagger.entities(inputs)["tags"]),
        "served tags": lambda: same(served["tag"](**{name: tf.constant(x) for name, x in inputs.items()})["tags"]),
        "train_on_batch": lambda: close(np.ravel(tagger.train_on_batch(inputs, gold))[0], nll.mean()),
    }


# ----------------------------------------------------------------------------------------------------------- both

WAYS = {"pairs": PAIRS, "tagger": TAGGERS}


def checks_of(model, expected, folder):
    """`{method: function}` of a model; `expected` is what `own_numbers` gave."""
    checks = (tagger_checks if isinstance(model, txl_tf.Tagger) else pairs_checks)(model, expected, folder)
    needs = () if model.compiled else ("evaluate", "train_on_batch")
    return {name: check for name, check in checks.items() if name not in needs}


def own_numbers(model):
    """What the model's own call gives: the nll of labels, or emissions."""
    return np.asarray(model(tagger_inputs(model)[0])) if isinstance(model, txl_tf.Tagger) else pairs_nll(model)


def make(way, setting):
    """A model with a part, to be checked within `attributes_set(way.attributes)`."""
    keras.utils.set_random_seed(1)
    model = (way.make or make_transformer())()
    model(tagger_inputs(model)[0] if isinstance(model, txl_tf.Tagger) else (SOURCE, TARGET))
    randomise(model)
    if isinstance(model, txl_tf.Transformer):  # no end among the likeliest two: a beam of 1 would keep it for later
        model.final_layer.bias.assign(tf.where(tf.range(15) == END, -50.0, model.final_layer.bias))
    if setting.compiled is not None:
        model.compile(keras.optimizers.SGD(0.0), **setting.compiled)
    if setting.used_before:
        for check in checks_of(model, own_numbers(model), None).values():
            check()
    way.install(model)
    return model
