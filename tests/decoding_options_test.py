"""Generation with a processor of logits, by beam search, and of long prompts; scores of rows of unequal length."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, eagerly, eagerly_in_generation, raises_parameter, randomise, word_vocab

import txl_tf
from txl_tf.config import SearchConfig
from txl_tf.data.vocabulary import Vocab
from txl_tf.language.sliding_window import sliding_window_nll
from txl_tf.language.text_generator import TextGenerator
from txl_tf.transformer_xl import ring
from txl_tf.vanilla.translator import check_search

pytestmark = pytest.mark.ci

SLOW = pytest.mark.slow
N_TOKEN = 7


@pytest.fixture
def eager():
    with eagerly():
        yield


def make(model=txl_tf.TransformerXLLM, **options):
    sizes = {**SMALL, "n_layer": 1, "d_head": 4, "n_token": N_TOKEN, "mem_len": 5}
    lm = model(**{**sizes, "dropout": 0.0, "seed": 0, **options})
    randomise(lm, scale=0.5)
    return lm


def words(rows=3, n=9):
    return np.random.default_rng(0).integers(0, N_TOKEN, [rows, n]).astype(np.int32)


def totals(lm, prompt, texts):
    """The log-probability of each of some texts, int `[any, n]`, after a prompt, int `[m]`."""
    log_probs, mems = lm.log_probs(np.tile(prompt, [len(texts), 1]))
    found = 0.0
    for i in range(texts.shape[1]):
        found += np.take_along_axis(log_probs[:, -1].numpy(), texts[:, i : i + 1], 1)[:, 0]
        log_probs, mems = lm.log_probs(texts[:, i : i + 1], mems)
    return found


PAIRS = np.array([*itertools.product(range(N_TOKEN), repeat=2)])

# ---------------------------------------- beam search


@pytest.mark.parametrize("options", [{}, pytest.param({"positions": "rotary", "pre_lnorm": True}, marks=SLOW)], ids=str)
def test_a_wide_beam_finds_the_best_of_all_texts(options):
    lm, prompt, lengths = make(**options), words(2, 5), [5, 3]
    found = lm.generate(prompt, 2, lengths=lengths, beam_size=N_TOKEN, num_return_sequences=3).numpy()
    for b, n in enumerate(lengths):
        with eagerly():
            best = np.argsort(-totals(lm, prompt[b, :n], PAIRS))[:3]
        for text, expected in zip(found[3 * b : 3 * b + 3], PAIRS[best], strict=True):
            assert text[: n + 2].tolist() == [*prompt[b, :n], *expected]


@pytest.mark.parametrize("given", [{"stop_strings": ["w1"]}, {"stop_at_newline": True}])
def test_the_stop_string_that_a_beam_search_does_not_take_is_named(given):
    ((name, value),) = given.items()
    vocab = Vocab(level="char", special=["w", "1", "\n", *"abcd"])
    vocab.build()
    with raises_parameter(name, value):
        make().generate(words(1, 4), 2, beam_size=2, vocab=vocab, **given)


def test_texts_that_end_compete_by_their_penalised_scores():
    lm, prompt, end = make(), words(1, 4), 2
    pairs = PAIRS[PAIRS[:, 0] != end]
    with eagerly():
        of_pairs, (of_end,) = (totals(lm, prompt[0], texts) for texts in (pairs, np.array([[end]])))
    options = {"beam_size": N_TOKEN, "stop_token": end, "with_lengths": True, "num_return_sequences": 3}
    for penalty in (0.0, 2.0):
        texts, lengths = lm.generate(prompt, 2, length_penalty=penalty, **options)
        scores = dict(zip(map(tuple, pairs), of_pairs / (7 / 6) ** penalty, strict=True))
        scores[(end,)] = of_end
        best = sorted(scores, key=scores.get, reverse=True)
        for text, length, expected in zip(texts.numpy(), lengths.numpy(), best, strict=False):
            assert tuple(text[4:length]) == expected, f"penalty {penalty}"
            assert (text[length:] == end).all(), f"penalty {penalty}"


@SLOW
def test_one_hypothesis_is_greedy_and_models_without_cache_search_too(eager):
    lm, prompt = make(), words(2, 5)
    np.testing.assert_array_equal(
        lm.generate(prompt, 4, beam_size=1, temperature=0), lm.generate(prompt, 4, temperature=0)
    )

    class Own(txl_tf.layers.TransformerXLLayer):
        def call(self, w, r, r_w_bias, r_r_bias, attn_mask=None, mems=None, **options):
            return super().call(w, r, r_w_bias, r_r_bias, attn_mask, mems * 1.0, **options)

    class OwnNetwork(txl_tf.TransformerXL):
        layer_class = Own

    slow = make()
    slow.network.__class__ = OwnNetwork
    for layer in slow.network.decoder_layers:
        layer.__class__ = Own
    assert not slow.has_cache
    np.testing.assert_array_equal(slow.generate(prompt, 3, beam_size=3), lm.generate(prompt, 3, beam_size=3))


@SLOW
@pytest.mark.parametrize("pos_embed", ["sin", "learned"])
def test_beam_search_with_a_window_that_moves_on(pos_embed):
    lm = make(txl_tf.TransformerLM, mem_len=0, context_len=6, pos_embed=pos_embed)
    cached = lm.generate(words(2, 4), 5, beam_size=3)
    lm.why_not_cached = lambda: NotImplementedError()
    lm.drop_graphs()
    np.testing.assert_array_equal(lm.generate(words(2, 4), 5, beam_size=3), cached)


# ---------------------------------------- a processor of logits


def no_repeats(tokens, log_probs):
    """The last token of every row may not follow again."""
    return tf.where(tf.one_hot(tokens[:, -1], N_TOKEN, True, False, dtype=tf.bool), -np.inf, log_probs)


@pytest.mark.parametrize(
    "options",
    [{"beam_size": 3}, *(pytest.param(each, marks=SLOW) for each in ({"temperature": 0}, {"seed": 3, "top_k": 4}))],
)
def test_a_processor_decides_what_may_follow(options):
    lm, prompt = make(cutoffs=[3]), words(3, 5)
    text = lm.generate(prompt, 12, logits_processor=no_repeats, lengths=[5, 2, 4], **options).numpy()
    for row, n in zip(text, [5, 2, 4], strict=True):
        new = row[n - 1 : n + 12]
        assert (new[1:] != new[:-1]).all()
    plain = lm.generate(prompt, 12, lengths=[5, 2, 4], **options).numpy()
    assert (plain[:, 1:] == plain[:, :-1]).any()


@pytest.mark.parametrize("options", [{"seed": 1}, {"beam_size": 2}], ids=str)
def test_a_processor_of_a_float64_model(options):
    lm, prompt = make(dtype="float64"), words(1, 2)
    with eagerly_in_generation():
        text = lm.generate(prompt, 2, logits_processor=lambda tokens, log_probs: log_probs, **options)
        np.testing.assert_array_equal(text, lm.generate(prompt, 2, **options))


def test_a_processor_sees_the_text_so_far_and_the_model_s_log_probs():
    lm, prompt, seen = make(), words(2, 4), []

    def watch(tokens, log_probs):
        def note(tokens, log_probs):
            seen.append((tokens, log_probs))
            return log_probs

        return tf.ensure_shape(tf.numpy_function(note, [tokens, log_probs], tf.float32), log_probs.shape)

    text = lm.generate(prompt, 3, lengths=[4, 2], logits_processor=watch, seed=1).numpy()
    np.testing.assert_array_equal(text, lm.generate(prompt, 3, lengths=[4, 2], seed=1))
    for i, (tokens, log_probs) in enumerate(seen):
        assert tokens[0].tolist() == text[0, : 4 + i].tolist()
        assert tokens[1].tolist() == [-1, -1, *text[1, : 2 + i].tolist()]
        np.testing.assert_allclose(
            log_probs[0, text[0, 4 + i]], log_prob_of(lm, text[0, : 4 + i], text[0, 4 + i]), atol=1e-5
        )
    assert len(seen) == 3


@pytest.mark.parametrize("options", [{"seed": 1}, {"beam_size": 2}], ids=str)
def test_a_processor_must_return_scores_of_which_some_are_possible(options):
    lm, prompt = make(), words(1, 2)
    wrong = [
        lambda tokens, log_probs: None,
        lambda tokens, log_probs: tf.fill(tf.shape(log_probs), -np.inf),
        lambda tokens, log_probs: log_probs * np.nan,
        lambda tokens, log_probs: tf.where(tokens[:, -1:] == 5, -np.inf, only_five(log_probs)),  # 5 is a dead end
    ]
    with eagerly_in_generation():
        for processor in wrong:
            with raises_parameter("logits_processor", processor):
                lm.generate(prompt, 2, logits_processor=processor, **options)
        # After its end, a text needs no token.
        text = lm.generate(prompt, 3, logits_processor=wrong[-1], stop_token=5, with_lengths=True, **options)
    assert text[0][0].numpy().tolist() == [*prompt[0], 5, 5, 5] and text[1].numpy().tolist() == [3]


def only_five(log_probs):
    return tf.where(tf.range(N_TOKEN) == 5, log_probs, -np.inf)


def log_prob_of(lm, text, token):
    with eagerly():
        log_probs, mems = lm.log_probs(text[None, :4])
        for i in range(4, len(text)):
            log_probs, mems = lm.log_probs(text[None, i : i + 1], mems)
    return log_probs[0, -1, token]


# ---------------------------------------- long prompts


@pytest.mark.parametrize(
    "options",
    [
        {"reset_token": 1, "pre_lnorm": True},
        *(pytest.param(each, marks=SLOW) for each in ({}, {"positions": "rotary"})),
    ],
)
def test_pieces_of_a_prompt_are_read_with_memory(options):
    lm, prompt, lengths = make(**options), words(3, 11), [11, 4, 7]
    text = lm.generate(prompt, 4, lengths=lengths, segment=4, temperature=0).numpy()
    for b, n in enumerate(lengths):
        ends, mems = [*range(n % 4 or 4, n + 1, 4)], None
        with eagerly():
            for start, end in zip([0, *ends], ends, strict=False):
                log_probs, mems = lm.log_probs(prompt[b : b + 1, start:end], mems)
            for i in range(4):
                token = int(tf.argmax(log_probs[0, -1]))
                assert text[b, n + i] == token
                log_probs, mems = lm.log_probs(np.array([[token]]), mems)
    np.testing.assert_array_equal(
        lm.generate(prompt, 4, lengths=lengths, segment=11, seed=1), lm.generate(prompt, 4, lengths=lengths, seed=1)
    )


@SLOW
def test_pieces_in_a_graph_and_without_a_cache():
    lm, prompt, lengths = make(), words(3, 11), [11, 4, 7]
    with eagerly():
        expected = lm.generate(prompt, 4, lengths=lengths, segment=4, temperature=0)
    np.testing.assert_array_equal(lm.generate(prompt, 4, lengths=lengths, segment=4, temperature=0), expected)
    lm.why_not_cached = lambda: NotImplementedError()
    lm.drop_graphs()
    np.testing.assert_array_equal(lm.generate(prompt, 4, lengths=lengths, segment=4, temperature=0), expected)


@pytest.mark.ci
@pytest.mark.parametrize("length", [9, 13, 15])
def test_blocks_of_queries_may_be_padding_alone(length, monkeypatch):
    """The first piece of a prompt of 9 tokens has one token and 7 of padding: its second block has no token."""
    monkeypatch.setattr(ring, "QUERY_BLOCK", 4)
    lm, prompt = make(mem_len=1), words(2, length)
    found = lm.generate(prompt, 3, segment=8, temperature=0)[:, length:]
    mems, pieces = None, [prompt[:, : length % 8], prompt[:, length % 8 :]]
    for i in range(3):
        for piece in pieces:
            log_probs, mems = lm.log_probs(piece, mems)
        pieces = [np.argmax(log_probs[:, -1:], -1)]
        np.testing.assert_array_equal(found[:, i], pieces[0][:, 0])


# ---------------------------------------- rows of unequal length


@pytest.mark.parametrize("model", [txl_tf.TransformerXLLM, pytest.param(txl_tf.TransformerLM, marks=SLOW)])
def test_scores_of_rows_of_unequal_length(model, eager):
    lm, text, lengths = (
        make(model, n_layer=2, **({"mem_len": 0} if model is txl_tf.TransformerLM else {})),
        words(4, 8),
        [7, 3, 0, 5],
    )
    _, before = lm.score(text[:, :7], text[:, 1:])
    tokens, labels = text[:, :7].copy(), text[:, 1:].copy()
    for row, n in enumerate(lengths):
        tokens[row, n:] = labels[row, n:] = 999  # padding may have any value
    nll, mems = lm.score(tokens, labels, before, lengths=lengths)
    for b, n in enumerate(lengths):
        assert not np.any(nll[b, n:])
        if n:
            expected, alone = lm.score(tokens[b : b + 1, :n], labels[b : b + 1, :n], [m[b : b + 1] for m in before])
            np.testing.assert_allclose(nll[b, :n], expected[0], rtol=1e-4)
            np.testing.assert_allclose(mems[0][b], alone[0][0], atol=1e-5)
    labels[0, :2] = -100
    weighted, _ = lm.score(tokens, labels, before, sample_weight=[2.0, 1.0, 1.0, 1.0], lengths=lengths)
    np.testing.assert_allclose(weighted[0], [0, 0, *2 * nll[0, 2:]], rtol=1e-4)


def test_scores_do_not_depend_on_the_arguments_of_earlier_calls():
    tokens, weights = words(3, 4), np.full([3, 4], 2.0, np.float32)
    calls = [{}, {"sample_weight": weights}, {"lengths": [1, 3, 4]}, {"done": weights > 2}]
    calls.append({"sample_weight": weights, "lengths": [1, 3, 4]})
    first, second = make(), make()
    expected = [first.score(tokens, tokens, **options)[0] for options in calls]
    for options, nll in reversed([*zip(calls, expected, strict=True)]):
        np.testing.assert_array_equal(second.score(tokens, tokens, **options)[0], nll)
    mask = np.arange(4) < np.array([1, 3, 4])[:, None]
    np.testing.assert_allclose(expected[1], 2 * expected[0], rtol=1e-6)
    np.testing.assert_allclose(expected[2], expected[0] * mask, rtol=1e-5)


def test_arguments_that_do_not_fit_are_refused(eager):
    lm, prompt = make(), words(2, 5)
    window = make(txl_tf.TransformerLM, mem_len=0)
    static = make()
    static.compile(keras.optimizers.SGD(0.0), static_shapes=True)
    for model, options, name in (
        (lm, {"beam_size": 0}, "beam_size"),
        (lm, {"beam_size": 3, "temperature": 0.5}, "temperature"),
        (lm, {"beam_size": 3, "top_k": 2}, "top_k"),
        (lm, {"beam_size": 3, "seed": 2}, "seed"),
        (lm, {"beam_size": 3, "num_return_sequences": 4}, "num_return_sequences"),
        (lm, {"beam_size": 3, "length_penalty": -1.0}, "length_penalty"),
        (lm, {"length_penalty": 2.0}, "length_penalty"),
        (lm, {"repetition_window": 3}, "repetition_window"),
        (lm, {"vocab": "abc"}, "vocab"),
        (static, {"beam_size": 3}, "beam_size"),
        (static, {"logits_processor": no_repeats}, "logits_processor"),
        (static, {"segment": 3}, "segment"),
        (window, {"segment": 3}, "segment"),
        (lm, {"segment": 0}, "segment"),
        (lm, {"logits_processor": "no"}, "logits_processor"),
        (lm, {"logits_processor": lambda tokens, log_probs: log_probs[:, :2]}, "logits_processor"),
    ):
        with raises_parameter(name):
            model.generate(prompt, 2, **options)
    rows_that_differ = [[1], [2, 3]]
    for lengths in ([6, 1], [-1, 2], [1], [1.0, 2.0], [], rows_that_differ):
        with raises_parameter("lengths"):
            lm.score(prompt, prompt, lengths=lengths)
    for labels in (prompt[:, :1], prompt[:1], prompt[0], prompt > 0, rows_that_differ):
        with raises_parameter("labels"):
            lm.score(prompt, labels, lengths=[5, 3])
    for tokens in (prompt[0], prompt[:0], prompt > 0, rows_that_differ):
        with raises_parameter("tokens"):
            lm.score(tokens, tokens, lengths=[5] * len(tokens))
        with raises_parameter("tokens"):
            lm.attention(tokens, padding_mask=prompt >= 0)


def test_options_of_texts_without_effect_are_refused():
    vocab = word_vocab()
    for options, name in (
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"repetition_window": 3}, "repetition_window"),
    ):
        with raises_parameter(name):
            TextGenerator(make(), vocab, **options)
    search = SearchConfig(length_penalty=2.0)
    with raises_parameter("length_penalty"):
        check_search(search, 9, 30, [])
    check_search(SearchConfig(length_penalty=2.0, beam_size=2), 9, 30, [])


def test_options_of_texts_are_checked_before_a_prompt():
    vocab = word_vocab()
    sizes = {"n_token": len(vocab), "cutoffs": []}
    lm, window = make(**sizes), make(txl_tf.TransformerLM, **sizes, mem_len=0, context_len=6)
    for model, options, name in (
        (lm, {"stop_strings": "w1"}, "stop_strings"),
        (lm, {"stop_at_newline": "no"}, "stop_at_newline"),
        (lm, {"stop_at_document": "no"}, "stop_at_document"),
        (lm, {"segment": 0}, "segment"),
        (lm, {"segment": 2.5}, "segment"),
        (lm, {"segment": "a"}, "segment"),
        (window, {"segment": 100}, "segment"),
    ):
        with raises_parameter(name, options[name]):
            TextGenerator(model, vocab, **options)
    with raises_parameter("with_lengths", "no"):
        lm.generate([[1, 2]], 2, with_lengths="no")
    with raises_parameter("strict", "no"):
        list(TextGenerator(lm, vocab, 2).generate_lines(["w1"], strict="no"))


def test_what_computes_with_numbers_is_an_error_in_a_graph():
    lm, text = make(), words(1, 5)
    session = lm.session()
    session.read(text)
    pairs = txl_tf.Transformer(
        num_layers=1, d_model=8, num_heads=2, dff=12, input_vocab_size=9, target_vocab_size=9, seed=1
    )
    calls = {
        "generate": [
            lambda ids: lm.generate(ids, 8, seed=1),
            lambda _: lm.generate(text, 8, seed=1),
            lambda ids: pairs.generate(ids + 1, start=1, end=2),
        ],
        "session": [lambda _: lm.session().read(text)],
        "read": [session.read],
        "write": [lambda _: session.write(2)[0]],
        "sliding_window_nll": [lambda ids: sliding_window_nll(lm, ids[0], 3)],
        "reading a text": [lambda ids: next(txl_tf.nll_by_memory(lm, ids[0], 3, [0]))[1]],
    }
    for name, functions in calls.items():
        for function in functions:
            with raises_parameter(name, limit="eager execution"):
                tf.function(function, autograph=False)(tf.constant(text))
    with raises_parameter("generate"):
        tf.data.Dataset.from_tensors(text).map(calls["generate"][0])
    assert session.write(2)[0].shape == (1, 2)


def test_arrays_of_a_wrong_shape_are_refused():
    lm, text, rows = make(), words(2, 5), [[1], [2, 3]]
    lm.compile("sgd")
    for name, call in {
        "tokens": lambda: lm.session(2).read(rows),
        "prompt": lambda: lm.generate(rows, 2),
        "lengths": lambda: lm.generate(text, 2, lengths=rows),
        "done": lambda: lm.score(text, text, done=rows),
        "sample_weight": lambda: lm.score(text, text, sample_weight=rows),
        "x": lambda: lm.train_on_batch(rows, text),
        "y": lambda: lm.train_on_batch(text, rows),
    }.items():
        with raises_parameter(name):
            call()
    lm.score(text, text, done=np.zeros([2, 5], bool))
    with raises_parameter("done"):  # although the graph of the call before allows any length
        lm.score(text, text, done=np.zeros([2, 1], bool))
    with raises_parameter("done"):
        lm.train_on_batch({"tokens": text, "done": rows}, text)
