"""A served vanilla language model gives the numbers of the one it was made of."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, raises_naming, randomise, word_vocab

import txl_tf
from txl_tf.language.generation import generate, generate_tokens
from txl_tf.language.sampling import check_sampling, sampling_of_sequences, uniform_draws
from txl_tf.language.stopping import no_stops
from txl_tf.serving.language_model import LanguageModelSignatures

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module", params=["part", pytest.param("whole", marks=pytest.mark.slow)])
def whole(request):
    """Whether all is exported."""
    return request.param == "whole"


@pytest.fixture(scope="module")
def lm(whole):
    lm = txl_tf.TransformerLM(**{**SMALL, "n_layer": 2 if whole else 1}, context_len=6)
    randomise(lm)
    return lm


class Functions(dict):
    """Functions of signatures: loaded, or, of those that were not exported, traced when they are asked for."""

    def __init__(self, loaded, traced):
        super().__init__(loaded)
        self.traced = traced

    def __missing__(self, name):
        self[name] = self.traced[name].get_concrete_function()
        return self[name]


@pytest.fixture(scope="module")
def signatures(lm, whole, tmp_path_factory):
    """Of the whole model, or of one of which two signatures are exported: each takes a second."""
    folder, every, traced = tmp_path_factory.mktemp("served") / "1", LanguageModelSignatures.signatures, {}

    def part(self):
        traced.update(every(self))
        return {name: traced[name] for name in ("initial_state", "score")}

    with pytest.MonkeyPatch.context() as patch:
        if not whole:
            patch.setattr(LanguageModelSignatures, "signatures", part)
        options = {"top_n": 23, "max_rows": 8, "max_tokens": 50, "warmup": None if whole else False}
        txl_tf.export_saved_model(lm, folder, word_vocab(), **options)
    return Functions(tf.saved_model.load(str(folder)).signatures, traced)


@pytest.fixture
def eagerly():
    """What is called once for each length is quicker without a graph."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(0, 23, [3, 12]).astype(np.int32)


def test_scores_and_predictions_go_on_from_the_state(lm, signatures, text, eagerly):
    """Up to a full window they are those of the tokens so far; after it, of the window's last half and what follows."""
    state = signatures["initial_state"](batch_size=tf.constant(3))["state"]
    for begin, end in ((0, 3), (3, 4), (4, 6)):
        nll, _ = lm.score(text[:, :end], text[:, 1 : end + 1])
        tokens, labels = text[:, begin:end], text[:, begin + 1 : end + 1]
        scored = signatures["score"](tokens=tf.constant(tokens), labels=tf.constant(labels), state=state)
        np.testing.assert_allclose(scored["nll"], nll[:, begin:], rtol=1e-5, atol=1e-5)
        predicted = signatures["next"](tokens=tf.constant(tokens), state=state)
        log_probs, _ = lm.log_probs(text[:, :end])
        in_order = np.take_along_axis(predicted["log_probs"].numpy(), predicted["ids"].numpy().argsort(1), 1)
        np.testing.assert_allclose(in_order, log_probs[:, -1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(predicted["state"], scored["state"], rtol=1e-5, atol=1e-5)
        state = scored["state"]
    log_probs, _ = lm.log_probs(text[:, 3:7])
    predicted = signatures["next"](tokens=tf.constant(text[:, 6:7]), state=state)
    np.testing.assert_allclose(predicted["log_probs"][:, 0], tf.reduce_max(log_probs[:, -1], -1), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_texts_are_written(lm, signatures, text, whole):
    options = {"temperature": 0.9, "top_k": 15, "top_p": 0.9, "seed": 4, "num_return_sequences": 3}
    options |= {"min_p": 0.01, "repetition_penalty": 1.5, "repetition_window": 6}
    vectors = {name: tf.constant([value]) for name, value in options.items()}
    vectors |= {"tokens": tf.constant(text[:1, :4]), "lengths": tf.constant([4]), "max_new_tokens": tf.constant([9])}
    number, limits = options["num_return_sequences"], tf.fill([3], 9)
    of_prompt = {name: value for name, value in options.items() if name != "num_return_sequences"}
    sampling = sampling_of_sequences(check_sampling(1, **of_prompt), number)
    prompt, uniform = tf.constant(text[:1, :4]), uniform_draws(sampling.seeds, 0, 9)
    free = generate_tokens(lm, prompt, tf.constant([4]), uniform, limits, sampling, no_stops(23), number).tokens.numpy()
    served = signatures["generate"](**vectors, stop_ids=tf.zeros([1, 0, 0], tf.int32))
    np.testing.assert_array_equal(served["sequences"][0], free)
    np.testing.assert_array_equal(served["tokens"], free[:1])
    stop = free[0, 6:8]
    if whole:
        vocab = word_vocab()
        options |= {"stop_strings": [vocab.decode(stop)], "vocab": vocab}
        expected, lengths = generate(lm, text[:1, :4], 9, **options, with_lengths=True)
    else:  # without another graph
        ends = [[i + 2 for i in range(4, 12) if (row[i : i + 2] == stop).all()] for row in free]
        lengths = [min(own, default=13) for own in ends]
        expected = np.where(np.arange(13) < np.array(lengths)[:, None], free, 0)
    served = signatures["generate"](**vectors, stop_ids=tf.constant(stop[None, None]))
    np.testing.assert_array_equal(served["sequences"][0], expected)
    np.testing.assert_array_equal(served["sequence_lengths"][0], lengths)
    assert lengths[0] <= 8


def test_texts_are_scored(lm, signatures, eagerly):
    ids = word_vocab().encode("w3 w5 w1 w0")
    scored = signatures["score_text"](text=tf.constant(["w3 w5 w1 w0"]))
    np.testing.assert_allclose(
        scored["nll"][0, 1:], lm.score(ids[None, :-1], ids[None, 1:])[0][0], rtol=1e-5, atol=1e-5
    )


def test_a_state_of_another_model_is_refused(signatures, text):
    state = signatures["initial_state"](batch_size=tf.constant(3))["state"]
    for bad in (state[:, 1:], state + 100, state + 0.5):
        with raises_naming(tf.errors.InvalidArgumentError, "state"):
            signatures["next"](tokens=tf.constant(text), state=bad)
