"""Parts of language models as users write them, and what of a model must agree with the model's own call.

`own_parts_test.py` puts each part into each setting; those of other models are in `own_pairs_and_taggers.py`. A process
that loads a saved model imports the two, as a user's program imports the classes that it registered, and no attribute
of the library's classes is set there.
"""

import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
import tensorflow as tf
from helpers import eagerly

import txl_tf
from txl_tf import layers
from txl_tf.language.language_model import LanguageModel
from txl_tf.language.session import Session
from txl_tf.language.transformer_lm import AbsoluteTransformer
from txl_tf.layers import multihead_attn, rel_multihead_attn
from txl_tf.serving.language_model import LanguageModelSignatures
from txl_tf.transformer_xl.network import TransformerXL

N_TOKEN = 19
SIZES = {"n_token": N_TOKEN, "n_layer": 2, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 12}
ADAPTIVE = {"cutoffs": [6, 12], "div_val": 2}
CALLED = set()  # names of own methods that ran: a part that does nothing would agree with anything


class Family(NamedTuple):
    """The library's classes that parts are subclasses of, and options of the models."""

    model: type
    network: type
    layer: type
    attention: type
    options: dict


FAMILIES = {
    "xl": Family(
        txl_tf.TransformerXLLM, TransformerXL, layers.TransformerXLLayer, layers.RelMultiHeadAttn,
        {"mem_len": 4},
    ),
    "vanilla": Family(
        txl_tf.TransformerLM, AbsoluteTransformer, layers.TransformerLMLayer, layers.MultiHeadAttn,
        {"context_len": 16},
    ),
}  # fmt: skip


def _registering(family):
    """Decorator that registers a class with Keras, by its own name and that of its family."""

    def decorate(cls):
        cls.__name__ = cls.__qualname__ = f"{cls.__name__}{family.title()}"
        return keras.saving.register_keras_serializable("own_parts")(cls)

    return decorate


# ---------------------------------------------------------------------------------------------- parts of any network


@keras.saving.register_keras_serializable("own_parts")
class GatedNet(layers.PositionwiseFF):
    """SwiGLU in place of the relu, with one more weight."""

    def build(self, *args, **kwargs):
        super().build(*args, **kwargs)
        self.gate = self.add_weight(name="gate", shape=(self.d_model, self.d_inner), initializer="glorot_uniform")

    def call(self, inp, training=None, dropout_key=None):
        CALLED.add("GatedNet")
        inner = tf.nn.silu(tf.matmul(inp, self.gate)) * (tf.matmul(inp, self.kernel_1) + self.bias_1)
        return self.layer_norm(inp + tf.matmul(inner, self.kernel_2) + self.bias_2)


@keras.saving.register_keras_serializable("own_parts")
class ForeignNet(keras.layers.Layer):
    """A feed-forward net that is no class of the library's, with other names of weights."""

    def __init__(self, width, inner, **kwargs):
        super().__init__(**kwargs)
        self.width, self.up, self.down = width, keras.layers.Dense(inner, "gelu"), keras.layers.Dense(width)
        self.norm = keras.layers.LayerNormalization()

    def build(self, shape=None, **_):
        self.up.build((None, None, self.width))
        self.down.build((None, None, self.up.units))
        self.norm.build((None, None, self.width))

    def call(self, inp, dropout_key=None):
        CALLED.add("ForeignNet")
        return self.norm(inp + self.down(self.up(inp)))


@keras.saving.register_keras_serializable("own_parts")
class RootNorm(layers.LayerNorm):
    """RMSNorm: no mean."""

    def call(self, x):
        CALLED.add("RootNorm")
        return x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-6) * self.gamma + self.beta


@keras.saving.register_keras_serializable("own_parts")
class SharperSoftmax(layers.AdaptiveSoftmax):
    """All log-probabilities at another temperature."""

    def call(self, hidden, embedding=None):
        CALLED.add("SharperSoftmax")
        return tf.nn.log_softmax(2.5 * super().call(hidden, embedding=embedding))


class Parts(NamedTuple):
    """The own classes of a family."""

    residual: type
    pre_norm: type
    gated_net: type
    foreign_net: type
    root_norm: type
    scaled: type
    tripled: type
    near: type
    lora: type
    louder: type
    started: type
    own_embed: type
    own_positions: type
    model_of: Callable
    softmax_model: type
    sharper_model: type
    started_model: type
    louder_model: type


def started(mems):
    """Memories before a text, zeros, as a user may change them."""
    return [mem + tf.cast(1 + tf.range(tf.shape(mem)[-1]) % 3, mem.dtype) for mem in mems]


def parts_of(name):
    """`Parts` of a family, registered with Keras."""
    family = FAMILIES[name]

    @_registering(name)
    class Residual(family.layer):
        """One more residual around all of the layer."""

        def call(self, w, *args, **kwargs):
            CALLED.add("Residual")
            return w + super().call(w, *args, **kwargs)

    @_registering(name)
    class PreNorm(family.layer):
        """`x + attention(norm(x))`, then `x + net(norm(x))`, by the functions of the documents."""

        if name == "xl":

            def call(self, w, r, r_w_bias, r_r_bias, attn_mask=None, mems=None, content_mask=None, training=None,
                     dropout_key=None):  # fmt: skip
                CALLED.add("PreNorm")
                norm, attn = self.rel_attn.layer_norm, self.rel_attn
                kernels = attn.qkv_kernel, attn.r_kernel, attn.o_kernel
                w = w + rel_multihead_attn(norm(w), r, r_w_bias, r_r_bias, attn_mask, norm(mems), *kernels)
                return w + self.net(self.ff.layer_norm(w))

        else:

            def call(self, w, attn_mask=None, mems=None, training=None, dropout_key=None):
                CALLED.add("PreNorm")
                norm, attn = self.rel_attn.layer_norm, self.rel_attn
                w = w + multihead_attn(norm(w), attn_mask, norm(mems), attn.qkv_kernel, attn.o_kernel, attn.n_head)
                return w + self.net(self.ff.layer_norm(w))

        def net(self, x):
            ff = self.ff
            return layers.positionwise_ff(x, ff.kernel_1, ff.bias_1, ff.kernel_2, ff.bias_2)

    @_registering(name)
    class WithGatedNet(family.layer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.ff = GatedNet(self.d_model, self.d_inner, name="ff")

    @_registering(name)
    class WithForeignNet(family.layer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.ff = ForeignNet(self.d_model, self.d_inner, name="ff")

    @_registering(name)
    class WithRootNorm(family.layer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.ff.layer_norm = RootNorm(name="layer_norm")

    @_registering(name)
    class Scaled(family.attention):
        """What attention gives, half as large again."""

        def call(self, w, *args, **kwargs):
            CALLED.add("Scaled")
            return 1.5 * super().call(w, *args, **kwargs)

    @_registering(name)
    class Tripled(family.attention):
        """Hidden states of the memory count three times."""

        def memory_of(self, mems):
            CALLED.add("Tripled")
            return 3.0 * super().memory_of(mems)

    @_registering(name)
    class Near(family.attention):
        """Attention to a token and the one before it."""

        def segment_of(self, w, attn_mask, mems, *distances):
            CALLED.add("Near")
            visible, mems = super().segment_of(w, attn_mask, mems, *distances)
            n, klen = visible.shape[-2:]
            key = tf.range(klen)
            return visible & (key > tf.range(n)[:, None] + klen - n - 2), mems

    @_registering(name)
    class Lora(family.attention):
        """A product of two thin matrices beside attention."""

        def build(self, *args, **kwargs):
            super().build(*args, **kwargs)
            self.lora_a = self.add_weight(name="lora_a", shape=(self.d_model, 2), initializer="glorot_uniform")
            self.lora_b = self.add_weight(name="lora_b", shape=(2, self.d_model), initializer="glorot_uniform")

        def call(self, w, *args, **kwargs):
            CALLED.add("Lora")
            return super().call(w, *args, **kwargs) + tf.matmul(tf.matmul(w, self.lora_a), self.lora_b)

    @_registering(name)
    class Louder(family.network):
        """Hidden states times 1.5."""

        def call(
            self, tokens, mems=None, padding_mask=None, training=None, dropout_key=None, static_shapes=False
        ):  # fmt: skip
            CALLED.add("Louder")
            hidden, new_mems = super().call(tokens, mems, padding_mask, training, dropout_key, static_shapes)
            return 1.5 * hidden, new_mems

    @_registering(name)
    class Started(family.network):
        """The first memory is not zeros."""

        def initial_mems(self, batch_size):
            CALLED.add("Started")
            return started(super().initial_mems(batch_size))

    @_registering(name)
    class OwnEmbed(family.network):
        """Embeddings with the parity of the token added."""

        def embed(self, tokens, *args, **kwargs):
            CALLED.add("OwnEmbed")
            hidden, pos_emb = super().embed(tokens, *args, **kwargs)
            return hidden + tf.cast(tokens % 2, hidden.dtype)[..., None], pos_emb

    @_registering(name)
    class OwnPositions(family.network):
        """Sinusoids of half the distance, or place."""

        def position_table(self, length, zero=0):
            CALLED.add("OwnPositions")
            return super().position_table(length, zero) * 0.5 + 0.25

    def model_of(network_class):
        """The family's model over another network, as `LanguageModel` documents it."""

        class Own(family.model):
            def __init__(self, *, proj_share_all_but_first=False, **kwargs):
                kwargs.pop("pos_embed", None)
                if name == "vanilla":
                    self.context_len, self.pos_embed = kwargs.pop("context_len"), "sin"
                keras_own = {key: kwargs.pop(key) for key in ("name", "dtype", "trainable") if key in kwargs}
                LanguageModel.__init__(self, network_class, kwargs, proj_share_all_but_first, **keras_own)

            def get_config(self):
                config = {key: x for key, x in self.network.get_config().items() if key != "name"}
                config["proj_share_all_but_first"] = self.proj_share_all_but_first
                return config | ({"context_len": self.context_len} if name == "vanilla" else {})

        Own.__name__ = f"Model{network_class.__name__}"
        return keras.saving.register_keras_serializable("own_parts")(Own)

    @_registering(name)
    class SoftmaxModel(family.model):
        """With its own softmax, made by its constructor."""

        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            sizes = {key: value for key, value in self.softmax.get_config().items() if key not in ("dtype", "name")}
            del self.softmax
            self.softmax = SharperSoftmax.from_config({**sizes, "name": "adaptive_softmax"})
            self.softmax.build((None, None, self.network.d_model))

    @_registering(name)
    class SharperModel(family.model):
        def call(self, tokens, mems=None):
            CALLED.add("SharperModel")
            log_probs, new_mems = super().call(tokens, mems)
            return tf.nn.log_softmax(2.5 * log_probs), new_mems

    @_registering(name)
    class StartedModel(family.model):
        def initial_mems(self, batch_size):
            CALLED.add("StartedModel")
            return started(super().initial_mems(batch_size))

    @_registering(name)
    class LouderModel(family.model):
        def outputs(self, tokens, mems=None, **options):
            CALLED.add("LouderModel")
            outputs, new_mems = super().outputs(tokens, mems, **options)
            return 1.5 * outputs, new_mems

    return Parts(
        Residual, PreNorm, WithGatedNet, WithForeignNet, WithRootNorm, Scaled, Tripled, Near, Lora, Louder, Started,
        OwnEmbed, OwnPositions, {cls: model_of(cls) for cls in (Louder, Started, OwnEmbed, OwnPositions)}.__getitem__,
        SoftmaxModel, SharperModel, StartedModel, LouderModel,
    )  # fmt: skip


OWN = {name: parts_of(name) for name in FAMILIES}


# ------------------------------------------------------------------------------------- how a part gets into a model


class Way(NamedTuple):
    """How a part gets into a model.

    words: any of them in an error says which part cannot be used.
    model: the class of the model, of the family and its own parts.
    attributes: `[(class, attribute, value)]` that are set before a model is made and given back after the test.
    install: what is done to a model that was made.
    """

    words: tuple
    model: Callable = lambda family, own: family.model
    attributes: Callable = lambda family, own: []
    install: Callable = lambda lm, own: None


def _layer_class(part):
    return lambda family, own: [(family.network, "layer_class", getattr(own, part))]


def _attention_class(part):
    return lambda family, own: [(family.layer, "attention_class", getattr(own, part))]


def _set_network(lm, own):
    arguments = {key: value for key, value in lm.network.get_config().items() if key != "name"}
    network = own.louder(**arguments, name="transformer")
    network.build_at_once()
    network.set_weights(lm.network.get_weights())
    lm.network = network


def _set_class_of_attention(lm, own):
    for layer in lm.network.decoder_layers:
        layer.rel_attn.__class__ = own.scaled


def _set_class_of_one_layer(lm, own):
    lm.network.decoder_layers[-1].__class__ = own.residual


def _set_class_of_network(lm, own):
    lm.network.__class__ = own.own_embed


def _set_class_of_softmax(lm, own):
    lm.softmax.__class__ = SharperSoftmax


def _set_own_call_of_an_instance(lm, own):
    layer = lm.network.decoder_layers[0]
    plain = layer.call

    def call(w, *args, **kwargs):
        CALLED.add("call of an instance")
        return w + plain(w, *args, **kwargs)

    layer.call = call


WAYS = {
    "layer_class": Way(("layer_class", "Residual"), attributes=_layer_class("residual")),
    "attention_class": Way(("attention_class", "Scaled"), attributes=_attention_class("scaled")),
    "memory_of": Way(("attention_class", "Tripled"), attributes=_attention_class("tripled")),
    "segment_of": Way(("attention_class", "Near"), attributes=_attention_class("near")),
    "initial_mems": Way(("Started",), lambda family, own: own.model_of(own.started)),
    "initial_mems_of_model": Way(("StartedModel",), lambda family, own: own.started_model),
    "outputs_of_model": Way(("LouderModel",), lambda family, own: own.louder_model),
    "network_class": Way(("network_class", "Louder"), lambda family, own: own.model_of(own.louder)),
    "network_set": Way(("Louder", "weight transformer/"), install=_set_network),
    "class_of_attention": Way(("__class__", "Scaled"), install=_set_class_of_attention),
    "class_of_one_layer": Way(("__class__", "Residual"), install=_set_class_of_one_layer),
    "class_of_network": Way(("__class__", "OwnEmbed"), install=_set_class_of_network),
    "gated_net": Way(("GatedNet",), attributes=_layer_class("gated_net")),
    "foreign_net": Way(("ForeignNet",), attributes=_layer_class("foreign_net")),
    "pre_norm": Way(("layer_class", "PreNorm"), attributes=_layer_class("pre_norm")),
    "embed": Way(("OwnEmbed",), lambda family, own: own.model_of(own.own_embed)),
    "lora": Way(("attention_class", "Lora"), attributes=_attention_class("lora")),
    "softmax_call": Way(("SharperSoftmax", "SoftmaxModel"), lambda family, own: own.softmax_model),
    "class_of_softmax": Way(("__class__", "SharperSoftmax"), install=_set_class_of_softmax),
    "model_call": Way(("SharperModel",), lambda family, own: own.sharper_model),
    "positions": Way(("OwnPositions",), lambda family, own: own.model_of(own.own_positions)),
    "layer_norm": Way(("RootNorm",), attributes=_layer_class("root_norm")),
    "call_of_an_instance": Way(
        ("layer_0", "TransformerXLLayer", "TransformerLMLayer"), install=_set_own_call_of_an_instance
    ),
}


@contextlib.contextmanager
def attributes_set(attributes):
    """Sets attributes of classes for a while."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in attributes if name in vars(owner)]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, _ in attributes:
            delattr(owner, name)
        for owner, name, value in before:
            setattr(owner, name, value)


def randomise(model):
    """Weights that leave no part without an effect."""
    rng = np.random.RandomState(5)
    for variable in model.trainable_variables:
        scale = 0.05 if "bias_" in variable.path else 0.5  # those of words: a text hangs on what came before it
        variable.assign(rng.normal("gamma" in variable.path, scale, variable.shape))


# ------------------------------------------------------------------------------------------------- what must agree

TEXT = np.random.RandomState(1).randint(0, N_TOKEN, [2, 11]).astype(np.int32)
SEGMENTS = [(TEXT[:, i : i + 5], TEXT[:, i + 1 : i + 6]) for i in (0, 5)]
PROMPT, NEW = TEXT[:, :5], 3


class Disagreement(AssertionError):
    """A number or a text other than that of the model's own call."""


def close(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    worst = np.abs(found - expected).max()
    if not worst <= 1e-5 * np.abs(expected).max():
        raise Disagreement(f"differs by {worst:.2g}: {found.ravel()[0]:.5f} for {expected.ravel()[0]:.5f}")


def expected_nll(lm):
    """The nll of both segments, float `[2, 2, 5]`, by the model's own call."""
    found, mems = [], None
    for tokens, labels in SEGMENTS:
        log_probs, mems = lm(tokens, mems)
        found.append(-np.take_along_axis(np.asarray(log_probs), labels[..., None], -1)[..., 0])
    return np.stack(found)


def carries_memory(lm):
    """Whether generation has the memory of the model's own call, and no window."""
    return lm.network.mem_len > 0 and lm.cached_by != "window"


def greedy(lm, written):
    """Raises Disagreement unless every new token of `written`, `[2, 5 + NEW]`, is an argmax of the model's own call."""
    written, tokens, mems, carries = np.asarray(written), PROMPT, None, carries_memory(lm)
    for i in range(5, 5 + NEW):
        log_probs, new_mems = lm(tokens, mems)
        last, chosen = np.asarray(log_probs)[:, -1], written[:, i : i + 1]
        if (np.take_along_axis(last, chosen, 1)[:, 0] < last.max(1) - 1e-4).any():
            raise Disagreement(f"token {i - 4} is {chosen.ravel()}, the likeliest are {last.argmax(1)}")
        tokens, mems = (chosen, new_mems) if carries else (written[:, : i + 1], None)


def _evaluate(lm, nll):
    data = tf.data.Dataset.from_tensor_slices(tuple(np.stack(x) for x in zip(*SEGMENTS, strict=True)))
    close(np.ravel(lm.evaluate(data, verbose=0))[0], nll.mean())


def _score(lm, nll):
    mems = None
    for (tokens, labels), expected in zip(SEGMENTS, nll, strict=True):
        found, mems = lm.score(tokens, labels, mems)
        close(found, expected)


def _log_probs(lm, nll):
    log_probs, _ = lm.log_probs(SEGMENTS[0][0])
    close(-np.take_along_axis(np.asarray(log_probs), SEGMENTS[0][1][..., None], -1)[..., 0], nll[0])


def _session(lm):
    session = Session(lm, batch_size=2)
    session.read(PROMPT)
    greedy(
        lm, np.concatenate([PROMPT, session.write(1, temperature=0)[0], session.write(NEW - 1, temperature=0)[0]], 1)
    )


def _train(lm, nll):
    lm.optimizer.learning_rate.assign(0.0)
    lm.reset_memory()
    for (tokens, labels), expected in zip(SEGMENTS, nll, strict=True):
        close(np.ravel(lm.train_on_batch(tokens, labels))[0], expected.mean())


GREEDY = {
    "max_new_tokens": [NEW], "temperature": [0.0], "top_k": [0], "top_p": [1.0], "seed": [0], "min_p": [0.0],
    "repetition_penalty": [1.0], "repetition_window": [64], "num_return_sequences": [1],
}  # fmt: skip


def by_name(functions):
    """Functions of signatures, not exported, that take their arguments by name when they run without graphs, too."""

    def called(function):
        parameters = inspect.signature(function.python_function).parameters.values()
        return lambda **given: function(*(given[x.name] if x.name in given else x.default for x in parameters))

    return {name: called(function) for name, function in functions.items()}


class Served:
    """The answers of an exported model, of the two signatures that are checked; or, quicker, without the export."""

    def __init__(self, lm, folder):
        self.lm, self.folder, self.functions = lm, folder, None

    def signature(self, name):
        if self.functions is None and self.folder is None:
            self.functions = by_name(LanguageModelSignatures(self.lm).signatures())
        if self.functions is None:
            every = LanguageModelSignatures.signatures

            def some(signatures):
                return {key: f for key, f in every(signatures).items() if key in ("initial_state", "score", "generate")}

            with attributes_set([(LanguageModelSignatures, "signatures", some)]):
                txl_tf.export_saved_model(self.lm, self.folder, warmup=False)
            self.functions = tf.saved_model.load(self.folder).signatures
        return self.functions[name]

    def score(self, nll):
        state = self.signature("initial_state")(batch_size=tf.constant(2))["state"]
        for (tokens, labels), expected in zip(SEGMENTS[: len(nll)], nll, strict=True):
            answer = self.signature("score")(tokens=tf.constant(tokens), labels=tf.constant(labels), state=state)
            state = answer["state"]
            close(answer["nll"], expected)

    def text(self):
        options = {name: tf.constant(value) for name, value in GREEDY.items()}
        answer = self.signature("generate")(
            tokens=tf.constant(PROMPT), lengths=tf.constant([5, 5]), **options, stop_ids=tf.zeros([1, 0, 0], tf.int32)
        )
        greedy(self.lm, answer["tokens"])


def checks_of(lm, nll, folder):
    """`{method: function}`, each of which raises what is wrong. The last changes the optimizer."""
    served = Served(lm, folder)
    window = nll if carries_memory(lm) else nll[:1]  # a window goes on where the model's own call begins anew
    compiled = {"evaluate": lambda: _evaluate(lm, nll), "train_on_batch": lambda: _train(lm, nll)}
    return {
        "score": lambda: _score(lm, nll),
        "log_probs": lambda: _log_probs(lm, nll),
        "first_nll": lambda: close(lm.first_nll(*map(tf.constant, SEGMENTS[0])), nll[0]),
        "generate": lambda: greedy(lm, lm.generate(PROMPT, NEW, temperature=0)),
        "session": lambda: _session(lm),
        "served score": lambda: served.score(window),
        "served text": lambda: served.text(),
        **(compiled if lm.compiled else {}),
    }


def wrong(checks, words):
    """`{check: what is wrong}` of all checks; an error that names the part is right, any other is not."""
    found = {}
    for name, check in checks.items():
        try:
            check()
        except Disagreement as error:
            found[name] = str(error)
        except Exception as error:  # an error of any kind is a finding
            if not names_the_part(error, words):
                found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def assert_all_methods_agree(lm, setting, folder):
    """All methods of a model without own parts compute what its own call does, in one of `SETTINGS`."""
    if setting.compiled is not None:
        lm.compile(keras.optimizers.SGD(0.0), **setting.compiled)
    with eagerly() if setting.eager else contextlib.nullcontext():
        found = wrong(checks_of(lm, expected_nll(lm), None if setting.eager else str(folder / "1")), ())
    assert not found, found


def names_the_part(error, words):
    """Whether an error is a ValueError that says which part cannot be used."""
    return isinstance(error, ValueError) and any(word in str(error) for word in words)


def make(family, way, setting, adaptive=True):
    """A language model with a part in a setting, to be checked while the attributes of the way are set."""
    classes, own = FAMILIES[family], OWN[family]
    options = {**SIZES, **classes.options, **(ADAPTIVE if adaptive else {}), "dropout": 0.0, "seed": 3}
    keras.utils.set_random_seed(1)
    lm = way.model(classes, own)(**{**options, **setting.options})
    randomise(lm)
    if setting.compiled is not None:
        lm.compile(keras.optimizers.SGD(0.0), **setting.compiled)
    if setting.used_before:
        wrong(checks_of(lm, np.zeros([2, 2, 5]), None), ())
    way.install(lm, own)
    return lm


class Setting(NamedTuple):
    """How a model is made, compiled and used before it is checked.

    options, compiled: arguments of the model and of `compile`; `None` for a model that is not compiled.
    used_before: whether all its methods were called before the part came in.
    eager: whether functions run without graphs, which is quicker for small models.
    reloaded: whether a process of its own loads the model from a `.keras` file.
    """

    options: dict = {}
    compiled: dict | None = {}
    used_before: bool = False
    eager: bool = False
    reloaded: bool = False


SETTINGS = {
    "eager": Setting(eager=True),
    "uncompiled": Setting(compiled=None, eager=True),
    "plain": Setting(),
    "used_before": Setting(used_before=True),
    "static_shapes": Setting(compiled={"static_shapes": True}),
    "recompute": Setting({"recompute": True}),
    "jit_compile": Setting(compiled={"jit_compile": True, "static_shapes": True}),
    "reloaded": Setting(reloaded=True),
}


def reloaded(path, expected, folder, words):
    """What is wrong with a model that is loaded from a file: what `wrong` finds, or why it could not be loaded."""
    try:
        model = keras.saving.load_model(path)
    except Exception as error:  # an error of any kind is a finding
        return {} if names_the_part(error, words) else {"load": f"{type(error).__name__}: {str(error)[:200]}"}
    model.compile(keras.optimizers.SGD(0.0))
    return wrong(model_checks(model, np.load(expected)["expected"], folder), words)


def model_checks(model, expected, folder):
    """`{method: function}` of a model of any family."""
    if isinstance(model, LanguageModel):
        return checks_of(model, expected, folder)
    from own_pairs_and_taggers import checks_of as checks_of_others  # which imports this module

    return checks_of_others(model, expected, folder)


def check_elsewhere(model, expected, folder, words):
    """What is wrong in another process, which loads the saved model. `save` may raise an error that names the part."""
    try:
        model.save(folder / "model.keras")
    except Exception as error:  # an error of any kind is a finding
        return {} if names_the_part(error, words) else {"save": f"{type(error).__name__}: {str(error)[:200]}"}
    np.savez(folder / "expected.npz", expected=expected)
    command = [sys.executable, "-c", ELSEWHERE, folder / "model.keras", folder / "expected.npz", folder / "1", *words]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    if result.returncode:
        return {"process": result.stderr[-500:]}
    return json.loads(result.stdout.splitlines()[-1])


# A user's program: it imports the modules whose classes are registered, and loads.
ELSEWHERE = """
import json, sys
import own_parts, own_pairs_and_taggers
path, expected, folder, *words = sys.argv[1:]
print(json.dumps(own_parts.reloaded(path, expected, folder, words)))
"""
