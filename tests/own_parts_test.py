"""Own parts of models, in every way that users put them in: all methods compute what the model's own call does.

A method may also raise an error that names the part, before it returns a number. The tables of parts are in
`own_parts.py` (language models) and `own_pairs_and_taggers.py`; `SETTINGS` says how a model is made and used before.
With "one_layer" functions run without graphs, which is quick; the other settings are slow.
"""

import contextlib

import numpy as np
import own_pairs_and_taggers
import own_parts
import pytest
import tensorflow as tf
from helpers import eagerly, raises_parameter
from own_parts import CALLED, FAMILIES, OWN, attributes_set, wrong

import txl_tf
from txl_tf.language.sampling import precompute_softmax
from txl_tf.nn import parts

pytestmark = pytest.mark.ci

SETTINGS = {**own_parts.SETTINGS, "one_layer": own_parts.Setting({"n_layer": 1}, eager=True)}


def cases(ways, settings, fast=()):
    """Slow parameters `(way, setting)`. The ways `fast` are also tested with one layer, which is fast."""

    def case(way, setting, marks=()):
        return pytest.param(way, setting, id=f"{way}-{setting}", marks=marks)

    slow = [case(way, setting, pytest.mark.slow) for way in ways for setting in settings]
    return [case(way, "one_layer") for way in fast] + slow


def own_numbers(module, model):
    """What the model's own call gives, in which the own part ran."""
    CALLED.clear()
    expected = module(model)
    assert CALLED, "the own part is not in the model's own call: the case tests nothing"
    return expected


def show(found):
    """One line for every method that is wrong."""
    return "\n".join(f"{name}: {what}" for name, what in found.items())


def assert_agrees(make, numbers, checks_of, way, setting, folder):
    """Of a model in a setting: all its methods agree with its own call, or name the part in an error."""
    with eagerly() if setting.eager else contextlib.nullcontext():
        try:
            model = make()
        except Exception as error:
            assert own_parts.names_the_part(error, way.words), f"{type(error).__name__}: {error}"
            return
        expected = own_numbers(numbers, model)
        if not setting.reloaded:
            found = wrong(checks_of(model, expected, None if setting.eager else str(folder / "1")), way.words)
    if setting.reloaded:
        found = own_parts.check_elsewhere(model, expected, folder, way.words)
    assert not found, show(found)


def check_language_model(family, way, setting, folder, adaptive=True):
    way, setting = own_parts.WAYS[way], SETTINGS[setting]
    with attributes_set(way.attributes(FAMILIES[family], OWN[family])):
        assert_agrees(
            lambda: own_parts.make(family, way, setting, adaptive), own_parts.expected_nll, own_parts.checks_of, way,
            setting, folder,
        )  # fmt: skip


@pytest.mark.parametrize("way, setting", cases(own_parts.WAYS, own_parts.SETTINGS, ("layer_class",)))
def test_transformer_xl_computes_its_own_call(way, setting, tmp_path):
    check_language_model("xl", way, setting, tmp_path)


@pytest.mark.parametrize("way, setting", cases(own_parts.WAYS, own_parts.SETTINGS))
def test_a_vanilla_language_model_computes_its_own_call_within_a_window(way, setting, tmp_path):
    check_language_model("vanilla", way, setting, tmp_path)


def small(**options):
    lm = txl_tf.TransformerXLLM(**{**own_parts.SIZES, "n_layer": 1}, mem_len=4, dropout=0.0, seed=1, **options)
    own_parts.randomise(lm)
    return lm


def own_memory_of(lm):
    attention = lm.network.decoder_layers[0].rel_attn
    memory_of = attention.memory_of
    attention.memory_of = lambda mems: 3.0 * memory_of(mems)


def own_segment_of(lm):
    lm.network.decoder_layers[0].rel_attn.__class__ = OWN["xl"].near


def own_initial_mems_of_the_network(lm):
    lm.network.__class__ = OWN["xl"].started


def own_initial_mems_of_the_model(lm):
    lm.__class__ = OWN["xl"].started_model


def with_a_convolution(layer_class):
    """A subclass that adds the output for the token before, which attention does not do."""

    class Convolved(layer_class):
        def call(self, x, *args, **kwargs):
            result = super().call(x, *args, **kwargs)
            hidden, *others = result if isinstance(result, tuple) else (result,)
            hidden += tf.pad(hidden[:, :-1], [[0, 0], [1, 0], [0, 0]])
            return (hidden, *others) if others else hidden

    return Convolved


def test_a_decoder_layer_that_mixes_positions_generates_what_the_call_predicts():
    model = txl_tf.Transformer(
        num_layers=1, d_model=8, num_heads=2, dff=16, input_vocab_size=9, target_vocab_size=9, max_len=12, seed=1
    )
    own_parts.randomise(model)
    model.decoder.stacked[0].__class__ = with_a_convolution(txl_tf.layers.DecoderLayer)
    source, target = np.array([[3, 4, 5]]), [1]
    tokens = model.generate(source, start=1, end=None, max_new_tokens=5)[0].numpy()[0]
    for _ in range(5):
        logits = model((source, np.array([target])))[0, -1].numpy()
        target.append(1 + int(logits[1:].argmax()))  # padding is never written
    assert tokens.tolist() == target[1:]
    assert isinstance(model.why_not_cached(), parts.NotCacheable)


class Banning(txl_tf.Transformer):
    """Never predicts symbol 3."""

    def logits(self, hidden):
        logits = super().logits(hidden)
        return tf.where(tf.range(self.target_vocab_size) == 3, tf.constant(-np.inf, logits.dtype), logits)


def counting(n):
    """A decoder layer that counts its calls in the variable `n`."""

    class Counting(txl_tf.layers.DecoderLayer):
        def call(self, x, *args, **kwargs):
            n.assign_add(1)
            return super().call(x, *args, **kwargs)

    return Counting


def test_infinite_logits_and_layers_with_a_state_keep_the_cache():
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 16, "input_vocab_size": 9, "target_vocab_size": 9}
    assert Banning(**sizes, seed=1).why_not_cached() is None
    model = txl_tf.Transformer(**sizes, seed=1)
    n = tf.Variable(0)
    model.decoder.stacked[0].__class__ = counting(n)
    assert model.why_not_cached() is None and int(n) == 0


def test_a_layer_that_mixes_positions_of_a_window_generates_what_the_call_predicts():
    lm = txl_tf.TransformerLM(**{**own_parts.SIZES, "n_layer": 1}, context_len=8, dropout=0.0, seed=1)
    own_parts.randomise(lm)
    layer = lm.network.decoder_layers[0]
    layer.__class__ = with_a_convolution(type(layer))
    tokens = lm.generate([[3, 2]], max_new_tokens=5, temperature=0.0).numpy()[0].tolist()
    text = [3, 2]
    for _ in range(5):
        text.append(int(lm.log_probs([text])[0][0, -1].numpy().argmax()))
    assert text[-len(tokens) :] == tokens
    assert isinstance(lm.why_not_cached(), parts.NotCacheable)


@pytest.mark.parametrize(
    "install", [own_memory_of, own_segment_of, own_initial_mems_of_the_network, own_initial_mems_of_the_model]
)
def test_an_own_memory_is_read_where_a_cache_would_be(install):
    lm = small()
    with eagerly():
        before = own_parts.expected_nll(lm)
        install(lm)
        expected = own_parts.expected_nll(lm)
        assert np.abs(expected - before).max() > 0.01
        carried, cache = lm.start_evaluation(2, 5), lm.decoding_cache()
        state = cache.initial_state(2)
        mems = None
        for (tokens, labels), of_segment in zip(own_parts.SEGMENTS, expected, strict=True):
            found, _, carried = lm.evaluation_nll(tf.constant(tokens), tf.constant(labels), carried)
            outputs, state = cache.read(tf.constant(tokens), state)
            of_score, mems = lm.score(tokens, labels, mems)
            for nll in (found, lm.nll_of(outputs, labels), of_score):
                own_parts.close(nll, of_segment)
        own_parts.close(lm.first_nll(*map(tf.constant, own_parts.SEGMENTS[0])), expected[0])


@pytest.mark.parametrize("install", [own_initial_mems_of_the_network, own_initial_mems_of_the_model])
@pytest.mark.parametrize("reset_token", [None, 3])
def test_an_own_memory_is_refused_where_documents_reset_it_to_zeros(install, reset_token):
    lm = small(reset_token=reset_token)
    install(lm)
    tokens, labels = own_parts.SEGMENTS[0]
    done = None if reset_token else np.zeros([2, 5], bool)
    with eagerly(), raises_parameter("initial_mems", limit="zeros"):
        lm.score(tokens, labels, done=done)


def test_an_own_memory_of_segment_nll_alone_is_not_that_of_score():
    class Own(txl_tf.TransformerXLLM):
        def initial_mems(self, batch_size):
            return [*super().initial_mems(batch_size), tf.zeros([batch_size])]

        def segment_nll(self, tokens, labels, mems, **options):
            nll, kept, new_mems = super().segment_nll(tokens, labels, mems[:1], **options)
            return nll, kept, [*new_mems, mems[1] + 1]

    lm = small()
    tokens, labels = own_parts.SEGMENTS[0]
    with eagerly():
        expected = lm.score(tokens, labels)[0]
        lm.__class__ = Own
        own_parts.close(lm.score(tokens, labels)[0], expected)
        assert lm.has_cache and lm.segment_nll(tokens, labels, lm.initial_mems(2))[2][1].numpy().tolist() == [1, 1]


class HalvedModel(txl_tf.TransformerXLLM):
    def log_probs_of(self, outputs):
        return tf.nn.log_softmax(0.5 * super().log_probs_of(outputs))


@pytest.mark.parametrize("cls", [OWN["xl"].louder_model, HalvedModel])
def test_own_outputs_and_probabilities_are_those_of_all_methods(cls):
    lm = small()
    tokens, labels = own_parts.SEGMENTS[0]
    with eagerly():
        before = own_parts.expected_nll(lm)[0]
        lm.__class__ = cls
        expected = own_parts.expected_nll(lm)[0]
        assert np.abs(expected - before).max() > 0.01
        log_probs = lm.log_probs(tokens)[0]
        own_parts.close(-np.take_along_axis(np.asarray(log_probs), labels[..., None], -1)[..., 0], expected)
        own_parts.close(lm.score(tokens, labels)[0], expected)
        own_parts.close(lm.alternatives(tokens, 1)[1][..., 0], np.asarray(log_probs).max(-1))
        cache = lm.decoding_cache()  # that of `generate`, whose sampling computes with `clusters`, if there are any
        outputs, _ = cache.read(tf.constant(tokens), cache.initial_state(2))
        own_parts.close(lm.log_probs_of(outputs), log_probs)
        assert (clusters := precompute_softmax(lm)) == () or cls is not HalvedModel, clusters


def test_a_new_network_is_built_and_has_the_place_of_the_old_one():
    lm = small()
    lm.network = OWN["xl"].own_embed.from_config(lm.network.get_config())
    lm.softmax = txl_tf.layers.AdaptiveSoftmax.from_config(lm.softmax.get_config())
    with eagerly():
        assert lm.has_cache
    loaded = type(lm).from_config(lm.get_config())
    assert type(loaded.network) is OWN["xl"].own_embed
    # Files contain the variables of the optimizer in this order.
    assert [weight.name for weight in loaded.weights] == [weight.name for weight in lm.weights]


class DoubledSoftmax(txl_tf.layers.AdaptiveSoftmax):
    def nll(self, hidden, labels, embedding, **objective):
        return 2.0 * super().nll(hidden, labels, embedding, **objective)


class DoubledModel(txl_tf.TransformerXLLM):
    def nll_of(self, outputs, labels, **objective):
        return 2.0 * super().nll_of(outputs, labels, **objective)


@pytest.mark.parametrize("part, cls", [("softmax", DoubledSoftmax), ("model", DoubledModel)])
def test_an_own_nll_counts_with_static_shapes(part, cls):
    lm = small(cutoffs=[6, 12], div_val=2)
    tokens, labels = own_parts.SEGMENTS[0]
    labels = tf.constant(np.where(labels == labels[0, 0], -1, labels))
    expected, counted, _ = lm.segment_nll(tokens, labels, lm.initial_mems(2), static_shapes=True)
    (lm.softmax if part == "softmax" else lm).__class__ = cls
    found, counted_now, _ = lm.segment_nll(tokens, labels, lm.initial_mems(2), static_shapes=True)
    np.testing.assert_allclose(found, 2 * expected, rtol=1e-5)
    np.testing.assert_array_equal(counted_now, counted)


def test_a_call_refuses_an_option_that_the_network_does_not_take():
    lm = small()
    lm.network.__class__ = OWN["xl"].louder
    with raises_parameter("output_hidden_states", True):
        lm(own_parts.PROMPT, output_hidden_states=True)


OF_KERAS = [name for name in own_parts.SETTINGS if name not in ("recompute", "static_shapes")]


def check_other(kind, way, setting, folder):
    way, setting = own_pairs_and_taggers.WAYS[kind][way], SETTINGS[setting]
    if "jit_compile" in (setting.compiled or {}):
        setting = setting._replace(compiled={"jit_compile": True})
    with attributes_set(way.attributes):
        assert_agrees(
            lambda: own_pairs_and_taggers.make(way, setting), own_pairs_and_taggers.own_numbers,
            own_pairs_and_taggers.checks_of, way, setting, folder,
        )  # fmt: skip


def cases_of(ways):
    """As `cases`. Whoever patches a class of the library in one process must also patch it in another."""
    patches = [name for name, way in ways.items() if way.attributes]
    found = cases(ways, OF_KERAS)
    return [case for case in found if not (case.values[0] in patches and case.values[1] == "reloaded")]


@pytest.mark.parametrize("way, setting", cases_of(own_pairs_and_taggers.PAIRS))
def test_an_encoder_decoder_computes_its_own_call(way, setting, tmp_path):
    check_other("pairs", way, setting, tmp_path)


@pytest.mark.parametrize("way, setting", cases_of(own_pairs_and_taggers.TAGGERS))
def test_a_tagger_computes_its_own_call(way, setting, tmp_path):
    check_other("tagger", way, setting, tmp_path)


@pytest.mark.parametrize("part, cls", [("encoder", "OwnEncoder"), ("decoder", "OwnDecoder")])
def test_a_configuration_without_an_own_stack_is_refused(part, cls):
    model = own_pairs_and_taggers.make_transformer()()
    getattr(model, part).__class__ = getattr(own_pairs_and_taggers, cls)
    with raises_parameter(part, cls):
        model.get_config()


@pytest.mark.parametrize(
    "name, replaced",
    [
        ("needs_embedding", property(lambda self: True)),
        ("from_config", classmethod(lambda cls, config: cls(**config))),
        ("build", lambda self, shape=None: None),
        ("call", tf.function(lambda self, hidden, embedding=None: hidden)),
        ("shares_projection", staticmethod(lambda i: False)),
    ],
)
def test_a_class_is_a_user_s_if_a_member_is_replaced(name, replaced, monkeypatch):
    softmax = txl_tf.layers.AdaptiveSoftmax(n_token=5, d_embed=4, d_proj=4, name="softmax")
    assert parts.own_parts(softmax) == []
    monkeypatch.setattr(txl_tf.layers.AdaptiveSoftmax, name, replaced)
    assert parts.own_parts(softmax) == ["AdaptiveSoftmax 'softmax'"]


# ------------------------------------------------------------------------------------------- without any own part

PLAIN = own_parts.Way(("nothing",))


@pytest.mark.parametrize("adaptive", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["adaptive", "plain"])
@pytest.mark.parametrize(
    "setting", ["one_layer", *(pytest.param(name, marks=pytest.mark.slow) for name in own_parts.SETTINGS)]
)
@pytest.mark.parametrize("family", ["xl", pytest.param("vanilla", marks=pytest.mark.slow)])
def test_the_library_s_own_language_models_compute_their_call(family, setting, adaptive, tmp_path):
    """`score`, `evaluate`, `first_nll` and what is served agree; so do texts of `generate`, a session and a server."""
    setting = SETTINGS[setting]
    with eagerly() if setting.eager else contextlib.nullcontext():
        lm = own_parts.make(family, PLAIN, setting, adaptive)
        expected = own_parts.expected_nll(lm)
        if setting.reloaded:
            found = own_parts.check_elsewhere(lm, expected, tmp_path, PLAIN.words)
        else:
            found = wrong(
                own_parts.checks_of(lm, expected, None if setting.eager else str(tmp_path / "1")), PLAIN.words
            )
    assert not found, show(found)


OTHERS = {"transformer": None, "tener": own_pairs_and_taggers.TENER, "flat": own_pairs_and_taggers.FLAT}


@pytest.mark.slow
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_the_library_s_own_other_models_compute_their_call(make):
    way = own_pairs_and_taggers.Way(("nothing",), make)
    with eagerly():
        model = own_pairs_and_taggers.make(way, SETTINGS["eager"])
        expected = own_pairs_and_taggers.own_numbers(model)
        found = wrong(own_pairs_and_taggers.checks_of(model, expected, None), way.words)
    assert not found, show(found)


@pytest.mark.slow
def test_the_comparison_notices_a_difference_of_a_number_and_of_a_token():
    with eagerly():
        lm = own_parts.make("xl", PLAIN, SETTINGS["eager"])
        expected = own_parts.expected_nll(lm)
        found = wrong(own_parts.checks_of(lm, expected * 1.0001, None), PLAIN.words)
        assert {"score", "first_nll", "evaluate", "served score", "train_on_batch"} <= found.keys()
        text = np.array(lm.generate(own_parts.PROMPT, own_parts.NEW, temperature=0))
        text[0, -1] = (text[0, -1] + 1) % own_parts.N_TOKEN
        with pytest.raises(own_parts.Disagreement):
            own_parts.greedy(lm, text)
