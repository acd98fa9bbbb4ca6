"""Schemes of positions: their equations in loops, and what is equal with every scheme, with a user's own, too.

`t5_positions.py` is that own scheme. What `SETTINGS` of `own_parts.py` says is how a model is made and used.
"""

import contextlib
import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import own_parts
import pytest
import t5_positions
import tensorflow as tf
from helpers import (
    ROOT,
    SMALL,
    eagerly,
    log_rows,
    mentions,
    program,
    raises_naming,
    raises_parameter,
    randomise,
    run_program,
    train_run,
    word_vocab,
)
from own_parts import SETTINGS, checks_of, expected_nll, wrong
from saved_models import STRANGER
from segments import (
    END,
    assert_a_cache_continues_hidden_states,
    assert_cached_segments_are_those_of,
    assert_documents_get_what_they_get_alone,
    assert_padding_changes_nothing,
    assert_prompts_of_unequal_length_get_what_they_get_alone,
    close,
    words,
)

import txl_tf
from txl_config import SCHEMES as SCHEMES_BY_NAME
from txl_config.models import REFUSED
from txl_programs import choosing
from txl_tf.config import ModelConfig
from txl_tf.language.session import Session
from txl_tf.language.window import window_start
from txl_tf.layers import MultiHeadAttn, Positions, register_positions
from txl_tf.nn import parts
from txl_tf.nn.position_schemes import Alibi, Learned, Relative, Rotary, Sinusoids, alibi_slopes
from txl_tf.serving.language_model import LanguageModelSignatures
from txl_tf.transformer_xl import inference, ring
from txl_tf.transformer_xl.cache import cached_forward, initial_state, precompute

SLOW = pytest.mark.slow
WINDOWS = ("sinusoids", "learned")
RINGS = ("relative", "alibi", "rotary", "t5")
SCHEMES = (*RINGS, *WINDOWS)
SIZES = {**SMALL, "d_head": 4, "dropout": 0.0, "seed": 0}
BINS = {"cutoffs": [5, 12], "div_val": 2}


def make(positions, seed=0, **options):
    lm = txl_tf.TransformerXLLM(**{**SIZES, "mem_len": 5, "positions": positions, **options})
    randomise(lm, seed, 0.5)
    return lm


def some(names, fast=()):
    """Parameters of a test, of which those that are not `fast` are slow."""
    return [pytest.param(name, marks=[SLOW] * (name not in fast)) for name in names]


# ---------------------------------------- the equations, in loops


def array(x):
    return tf.cast(x, tf.float64).numpy()


# The slopes that the paper states for 8 and 16 heads (section 3), and those of its program for other numbers.
SLOPES = {
    2: [2**-4, 2**-8],
    8: [2**-k for k in range(1, 9)],
    16: [2 ** -(k / 2) for k in range(1, 17)],
    3: [2**-4, 2**-8, 2**-2],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    1: [2**-8],
}


@pytest.mark.parametrize("n_head", SLOPES)
def test_slopes_are_those_of_the_paper(n_head):
    np.testing.assert_allclose(alibi_slopes(n_head), SLOPES[n_head], rtol=1e-12)


def turned(x, number):
    """RoPE of a vector: dimensions d and d + D / 2 are a plane, which turns by `number * 10000^(-2d / D)`."""
    half = len(x) // 2
    out = np.zeros_like(x)
    for d in range(half):
        angle = number * 10000 ** (-2 * d / len(x))
        out[d] = x[d] * np.cos(angle) - x[d + half] * np.sin(angle)
        out[d + half] = x[d + half] * np.cos(angle) + x[d] * np.sin(angle)
    return out


def bucket(distance, n_bucket=8, farthest=20):
    """T5's `_relative_position_bucket` with bidirectional=False."""
    exact = n_bucket // 2
    if distance < exact:
        return distance
    wide = np.log(distance / exact) / np.log(farthest / exact) * (n_bucket - exact)
    return min(exact + int(wide), n_bucket - 1)


def score_in_loops(positions, head, n_head, q, k, i, j, table):
    """The score of query i and key j, before the softmax; i counts the memory, too."""
    if positions == "rotary":
        q, k = turned(q, i), turned(k, j)
    score = q @ k / np.sqrt(len(q))
    if positions == "alibi":
        score -= SLOPES[n_head][head] * (i - j)
    if positions == "t5":
        score += table[bucket(i - j), head]
    return score


def attention_in_loops(positions, x, mem, attn, table=None):
    """`[T, E]` and `[M, E]` of one row: attention with its residual and layer norm."""
    n_head, d_head, context = attn.n_head, attn.d_head, np.concatenate([mem, x])
    q_kernel, k_kernel, v_kernel = np.moveaxis(array(attn.qkv_kernel).reshape(-1, 3, n_head, d_head), 1, 0)
    heads = np.zeros([len(x), n_head, d_head])
    for i, head in np.ndindex(len(x), n_head):
        place = len(mem) + i
        q, keys, values = x[i] @ q_kernel[:, head], context @ k_kernel[:, head], context @ v_kernel[:, head]
        scores = [score_in_loops(positions, head, n_head, q, keys[j], place, j, table) for j in range(place + 1)]
        weights = np.exp(scores) / np.exp(scores).sum()
        heads[i, head] = weights @ values[: place + 1]
    y = x + heads.reshape(len(x), -1) @ array(attn.o_kernel)
    norm = attn.layer_norm
    y = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + norm.epsilon)
    return y * array(norm.gamma) + array(norm.beta)


@pytest.mark.parametrize("n_head", [pytest.param(2, marks=SLOW), 6])
@pytest.mark.parametrize("positions", ["alibi", "rotary", "t5"])
def test_attention_is_a_loop_over_the_equation(positions, n_head, eager):
    rng = np.random.default_rng(0)
    attn = MultiHeadAttn(d_model=8, n_head=n_head, d_head=6, positions=positions)
    x, mem = rng.normal(size=[2, 7, 8]), rng.normal(size=[2, 30, 8])
    attn.build()
    randomise(attn, scale=1.0)
    table = array(attn.scheme.table) if positions == "t5" else None
    found = attn(tf.constant(x, tf.float32), mems=tf.constant(mem, tf.float32))
    expected = [attention_in_loops(positions, *row, attn, table) for row in zip(x, mem, strict=True)]
    close(found, expected)


@pytest.mark.parametrize("positions", ["alibi", "rotary", pytest.param("t5", marks=SLOW)])
def test_a_network_is_a_loop_over_the_equation(positions, eager):
    """Two segments with the memory between them, which begins as zeros that are attended to."""
    lm, text = make(positions, mem_len=6), words(1, 10)
    network, mems = lm.network, None
    table = array(network.scheme.table) if positions == "t5" else None
    given = [np.zeros([6, 8])] * 2
    for tokens in (text[:, :5], text[:, 5:]):
        hidden, mems = network(tokens, mems)
        x = array(network.embedding.tables[0])[tokens[0]] * np.sqrt(8)
        for i, layer in enumerate(network.decoder_layers):
            before, given[i] = given[i], np.concatenate([given[i], x])[-6:]
            found = attention_in_loops(positions, x, before, layer.rel_attn, table)
            x = array(layer.ff(tf.constant(found[None], tf.float32))[0])
            close(mems[i][0], given[i])
        close(hidden[0], x)


@pytest.mark.ci
@pytest.mark.parametrize("positions, pos_embed", [("sinusoids", "sin"), ("learned", "learned")])
def test_absolute_positions_are_those_of_the_vanilla_language_model(positions, pos_embed, eager):
    text = words(2, 14)
    for mem_len in (0, 3):
        lm = make(positions, context_len=9, mem_len=mem_len)
        sizes = {name: value for name, value in SIZES.items() if name != "positions"}
        other = txl_tf.TransformerLM(**sizes, context_len=9, mem_len=mem_len, pos_embed=pos_embed)
        other.set_weights(lm.get_weights())
        (nll, mems), (expected, other_mems) = (model.score(text[:, :6], text[:, 1:7]) for model in (lm, other))
        np.testing.assert_array_equal(nll, expected)
        np.testing.assert_array_equal(
            lm.score(text[:, 6:13], text[:, 7:], mems)[0], other.score(text[:, 6:13], text[:, 7:], other_mems)[0]
        )


@pytest.mark.parametrize("count", [2**31 - 7, *(pytest.param(count, marks=SLOW) for count in (2**31 - 1, 123_456_789))])
def test_rotary_scores_do_not_depend_on_how_long_the_text_is(count, eager):
    """Numbers of tokens pass 2**31, where int32 goes on at -2**31."""
    network, text = make("rotary").network, words(2, 20)
    weights, states = precompute(network, 5), [initial_state(network, 2, 5) for _ in range(2)]
    states[1] = states[1]._replace(count=tf.constant([count, count - 3]))
    for start in range(0, 20, 5):
        tokens = tf.constant(text[:, start : start + 5])
        found = []
        for i, state in enumerate(states):
            hidden, states[i] = cached_forward(network, weights, tokens, state)
            found.append(hidden)
        close(found[1], found[0])


# ---------------------------------------- segments, memory and caches


@pytest.mark.parametrize("positions", some(RINGS, ["rotary", "t5"]))
def test_two_segments_with_memory_are_one(positions, eager):
    """With same_length a token sees as much before it, wherever its segment begins."""
    lm, text = make(positions, mem_len=6, same_length=True, n_layer=2), words()
    whole, _ = lm.log_probs(text[:, :20])
    mems, found = None, []
    for start, end in ((0, 3), (3, 12), (12, 13), (13, 20)):
        log_probs, mems = lm.log_probs(text[:, start:end], mems)
        found.append(log_probs)
    close(np.concatenate(found, 1), whole)


@pytest.mark.parametrize("positions", some(WINDOWS, ["learned"]))
def test_places_count_from_the_beginning_of_a_segment(positions, eager):
    lm, text = make(positions, mem_len=0, context_len=20), words()
    whole, mems = lm.log_probs(text[:, :20])
    close(lm.log_probs(text[:, :7])[0], whole[:, :7])
    again, _ = lm.log_probs(text[:, :7], mems)
    np.testing.assert_array_equal(again, lm.log_probs(text[:, :7])[0])
    assert np.abs(lm.log_probs(text[:, 3:20])[0] - whole[:, 3:]).max() > 1e-2


MEMORIES = [
    {"mem_len": 5},
    {"mem_len": 3, "same_length": True, "reset_token": END},
    {"mem_len": 0, "reset_token": END},
    {"mem_len": 12, "reset_token": END, "n_head": 3, **BINS},
]


@pytest.mark.parametrize("blocks", [pytest.param(False, marks=SLOW), True])
@pytest.mark.parametrize("options", [MEMORIES[1], *(pytest.param(each, marks=SLOW) for each in MEMORIES[::2])], ids=str)
@pytest.mark.parametrize("positions", some(RINGS, ["rotary"]))
def test_cached_segments_of_any_length_are_those_of_the_network(positions, options, blocks, monkeypatch, eager):
    if blocks:  # queries in blocks, rows in a loop
        monkeypatch.setattr(ring, "QUERY_BLOCK", 2)
        monkeypatch.setattr(inference, "MAX_UNROLLED_ROWS", 1)
        monkeypatch.setattr(inference, "FEW_ROWS", 1)
    assert_cached_segments_are_those_of(make(positions, **options).network)


@register_positions("shifted_relative")
class ShiftedRelative(Relative):
    """Adds numbers to what the relative scheme returns, which may be a list with the scores of each head."""

    def scores(self, q, places):
        return tf.convert_to_tensor(super().scores(q, places)) + tf.cast(places.distances(q) % 3, q.dtype)


@register_positions("listed_alibi")
class ListedAlibi(Alibi):
    """Slopes depend on the query. Returns a list with the scores of each head for a single query."""

    def scores(self, q, places):
        scores = super().scores(q, places)
        scores = scores[:, None] if len(q.shape) == 4 else scores
        scores *= tf.reduce_sum(q, -1, keepdims=True)
        return tf.unstack(scores) if q.shape[-2] == 1 else scores


@pytest.mark.ci
@pytest.mark.parametrize(
    "positions, options",
    [("shifted_relative", {}), ("listed_alibi", {})]
    + [(name, {"pre_lnorm": True, "reset_token": END, "n_head": 3}) for name in RINGS]
    + [(name, {"pre_lnorm": True}) for name in WINDOWS]
    + [("relative", {"dtype": "float64"}), ("alibi", {"dtype": "mixed_bfloat16"})],
    ids=str,
)
def test_many_rows_read_a_token_at_once_as_few_rows_do_one_by_one(positions, options, monkeypatch, eager):
    window = {"mem_len": 0, "context_len": 5} if positions in WINDOWS else {}
    lm = make(positions, n_layer=1, **options, **window)
    text = words(6, 9, borders=[(3, 7), (), (0,), (5,), (), (6,)])

    def read(few_rows):
        """The outputs for the last five tokens of the rows, read one by one: `[5, rows, d_model]`."""
        monkeypatch.setattr(inference, "FEW_ROWS", few_rows)
        cache = lm.decoding_cache()
        weights = cache.precompute()
        _, state = cache.read_prompt(tf.constant(text[:, :4], tf.int32), tf.fill([6], 4))
        outputs = []
        for i in range(4, 9):
            output, state = cache.read_token(weights, tf.constant(text[:, i], tf.int32), state)
            outputs.append(array(output))
        return np.stack(outputs)

    tolerance = {"float64": 1e-12, "mixed_bfloat16": 0.1}.get(lm.dtype_policy.name, 1e-5)
    np.testing.assert_allclose(read(few_rows=1), read(few_rows=6), atol=tolerance)


@pytest.mark.ci
@pytest.mark.parametrize("positions", RINGS)
def test_a_state_of_hidden_states_goes_on_as_those(positions, eager):
    assert_a_cache_continues_hidden_states(make(positions, mem_len=7).network)


@pytest.mark.parametrize("same_length", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("reset_token", [pytest.param(None, marks=SLOW), END])
@pytest.mark.parametrize("positions", some(RINGS, ["alibi"]))
def test_prompts_of_unequal_length_get_what_they_get_alone(positions, reset_token, same_length, eager):
    lm = make(positions, mem_len=4, same_length=same_length, reset_token=reset_token)
    assert_prompts_of_unequal_length_get_what_they_get_alone(lm.network)


@pytest.mark.parametrize("positions", some(SCHEMES, ["rotary"]))
def test_padding_changes_nothing(positions, eager):
    options = {"context_len": 20} if positions in WINDOWS else {"reset_token": END}
    network = make(positions, mem_len=4, **options).network
    assert_padding_changes_nothing(network, words(2, 12, borders=[(3,), (0, 4)]))


@pytest.mark.parametrize("method", ["network", pytest.param("evaluate", marks=SLOW)])
@pytest.mark.parametrize("positions", some(RINGS, ["alibi"]))
def test_documents_get_what_they_get_alone(positions, method, eager):
    lm, alone = (make(positions, mem_len=6, reset_token=token) for token in (END, None))
    text, expected = assert_documents_get_what_they_get_alone(lm, alone)
    if method == "evaluate":
        batches = [x.reshape(4, 1, 5) for x in (text[:, :20], text[:, 1:])]
        for options in ({}, {"static_shapes": True}):
            lm.compile(**options)
            close(lm.evaluate(tf.data.Dataset.from_tensor_slices(tuple(batches)), verbose=0), expected.mean())


# ---------------------------------------- all methods, in all settings


def of_settings(positions, setting, **options):
    """A model as `own_parts.make` makes one."""
    sizes = {**own_parts.SIZES, **own_parts.ADAPTIVE, "dropout": 0.0, "seed": 3, "positions": positions}
    memory = {"mem_len": 0, "context_len": 16} if positions in WINDOWS else {"mem_len": 4}
    lm = txl_tf.TransformerXLLM(**{**sizes, **memory, **setting.options, **options})
    own_parts.randomise(lm)
    if setting.compiled is not None:
        lm.compile(keras.optimizers.SGD(0.0), **setting.compiled)
    return lm


@SLOW
@pytest.mark.parametrize("setting", ["eager", "uncompiled", "plain", "static_shapes", "recompute", "jit_compile"])
@pytest.mark.parametrize("positions", SCHEMES)
def test_all_methods_compute_the_model_s_own_call(positions, setting, tmp_path):
    """Scores, evaluation, texts, sessions, what is served and training, by cache or not."""
    setting = SETTINGS[setting]
    with eagerly() if setting.eager else contextlib.nullcontext():
        lm = of_settings(positions, setting)
        found = wrong(checks_of(lm, expected_nll(lm), None if setting.eager else str(tmp_path / "1")), ())
    assert not found, lines_of(found)


@SLOW
@pytest.mark.parametrize(
    "options",
    [
        {"mem_len": 0}, {"same_length": True}, {"reset_token": 3}, {"proj_share_all_but_first": True}, {"n_head": 3},
        {"mem_len": 3, "dtype": "float64"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("positions", SCHEMES)
def test_all_methods_agree_with_options(positions, options):
    if "reset_token" in options and positions in WINDOWS:
        pytest.skip("refused")
    with eagerly():
        lm = of_settings(positions, SETTINGS["eager"], **options)
        found = wrong(checks_of(lm, expected_nll(lm), None), ())
    assert not found, lines_of(found)


def lines_of(found):
    return "\n".join(f"{name}: {what}" for name, what in found.items())


@pytest.mark.parametrize("positions", some(SCHEMES))
def test_half_precision_is_near(positions, eager):
    text = words(2, 13)
    lm, half = (make(positions, dtype=dtype) for dtype in ("float32", "mixed_bfloat16"))
    expected, found, mems, half_mems = [], [], None, None
    for a, b in ((0, 6), (6, 12)):
        nll, mems = lm.score(text[:, a:b], text[:, a + 1 : b + 1], mems)
        of_half, half_mems = half.score(text[:, a:b], text[:, a + 1 : b + 1], half_mems)
        expected.append(nll)
        found.append(of_half)
    assert half_mems[0].dtype == tf.bfloat16
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.3)
    assert np.abs(np.array(found) - expected).mean() < 0.06
    half.compile()
    batches = [x.reshape(2, 2, 6).transpose(1, 0, 2) for x in (text[:, :12], text[:, 1:])]
    evaluated = half.evaluate(tf.data.Dataset.from_tensor_slices(tuple(batches)), verbose=0)
    np.testing.assert_allclose(evaluated, np.mean(found), rtol=0, atol=0.03)


@pytest.mark.parametrize("positions", some(SCHEMES, ["t5"]))
def test_attention_is_that_which_the_scores_have(positions, eager):
    """The pictures' probabilities: of one row, they are 1 in sum, and 0 in the future."""
    lm, text = make(positions, mem_len=3, **({"context_len": 20} if positions in WINDOWS else {})), words(2, 6)
    _, mems = lm.network(text)
    probs, new_mems = lm.attention(text, mems)
    assert probs.shape == (2, 2, 2, 6, 9)
    close(tf.reduce_sum(probs, -1), np.ones([2, 2, 2, 6]))
    assert not np.triu(probs.numpy()[..., 3:], 1).any()
    for mem, expected in zip(new_mems, lm.network(text, mems)[1], strict=True):
        np.testing.assert_array_equal(mem, expected)


# ---------------------------------------- generation


def greedy_uncached(lm, prompt, n):
    """The likeliest tokens one by one, each read with the memory of those before it."""
    tokens, mems, text = prompt, None, prompt
    for _ in range(n):
        log_probs, mems = lm.log_probs(tokens, mems)
        tokens = np.argmax(log_probs[:, -1], 1).astype(np.int32)[:, None]
        text = np.concatenate([text, tokens], 1)
    return text


@pytest.mark.parametrize("positions", some(RINGS))
def test_greedy_texts_are_those_of_the_uncached_model(positions):
    """Of prompts of unequal length, by `generate` and by a session, and in blocks of queries."""
    lm, prompt, lengths = make(positions, n_layer=1, **BINS), words(3, 9), [9, 4, 7]
    with eagerly():
        expected = [greedy_uncached(lm, prompt[b : b + 1, :n], 8)[0] for b, n in enumerate(lengths)]
        session = Session(lm, batch_size=1)
        session.read(prompt[:1, :5])
        session.read(prompt[:1, 5:])
        written = np.concatenate([session.write(3, temperature=0)[0], session.write(5, temperature=0)[0]], 1)
        np.testing.assert_array_equal(written[0], expected[0][9:])
    found = lm.generate(prompt, 8, temperature=0, lengths=lengths).numpy()
    for row, n, text in zip(found, lengths, expected, strict=True):
        np.testing.assert_array_equal(row[: n + 8], text)


@SLOW
@pytest.mark.parametrize("positions", RINGS)
def test_a_prompt_may_be_longer_than_a_block_of_queries(positions):
    n = ring.QUERY_BLOCK + 70
    lm, prompt = make(positions, n_layer=1, mem_len=300), words(2, n)
    with eagerly():
        expected = greedy_uncached(lm, prompt, 4)
    np.testing.assert_array_equal(lm.generate(prompt, 4, temperature=0), expected)
    np.testing.assert_array_equal(
        lm.generate(np.pad(prompt, [(0, 0), (0, 3)]), 4, temperature=0, lengths=[n, n])[:, : n + 4], expected
    )
    lm.compile(static_shapes=True)
    np.testing.assert_array_equal(lm.generate(prompt, 4, temperature=0), expected)


@pytest.mark.parametrize("positions", some(WINDOWS))
def test_generation_goes_on_beyond_a_window(positions):
    lm, prompt = make(positions, mem_len=0, context_len=6), words(2, 9)
    text = lm.generate(prompt, 9, temperature=0).numpy()
    assert text.shape == (2, 18)
    with eagerly():
        for i in range(9, 18):
            begin = int(window_start(tf.constant(i), 6))
            expected = np.argmax(lm.log_probs(text[:, begin:i])[0][:, -1], 1)
            np.testing.assert_array_equal(text[:, i], expected)


# ---------------------------------------- training

WAYS = {
    "plain": ({}, {}),
    "recompute": ({"recompute": True}, {}),
    "static shapes": ({}, {"static_shapes": True}),
    "static shapes and recompute": ({"recompute": True}, {"static_shapes": True}),
    "two replicas": ({}, {}),
    "xla": ({}, {"jit_compile": True}),
    "parts": ({}, {"gradient_accumulation_steps": 2}),
}


@pytest.fixture(scope="module")
def trained(two_replicas):
    """Weights and losses after four steps with dropout, in one of the `WAYS`; one way once for a scheme."""
    known = {}

    def train(positions, way):
        options, compiled = WAYS[way]
        strategy = two_replicas if way == "two replicas" else tf.distribute.get_strategy()
        memory = {"context_len": 5} if positions in WINDOWS else {"reset_token": END}
        with strategy.scope():
            lm = make(positions, **{"dropout": 0.2, "dropatt": 0.2, "mem_len": 4}, **memory, **options, **BINS)
            lm.seed = 3
            lm.compile(keras.optimizers.SGD(0.05), **compiled)
        before = [weight.numpy() for weight in lm.trainable_variables]
        text = words(4, 21, borders=[(3, 9), (), (0, 16), (10,)])
        batches = [x.reshape(4, 4, 5).transpose(1, 0, 2) for x in (text[:, :20], text[:, 1:])]
        losses = []
        record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))
        lm.fit(tf.data.Dataset.from_tensor_slices(tuple(batches)), verbose=0, callbacks=[record])
        after = {weight.path: weight.numpy() for weight in lm.trainable_variables}
        return before, after, losses

    def found(positions, way):
        if (positions, way) not in known:
            known[positions, way] = train(positions, way)
        return known[positions, way]

    return found


@pytest.mark.parametrize("static_shapes", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_reaches_the_table_of_an_own_scheme(recompute, static_shapes, eager):
    lm, text = make("t5", mem_len=12, recompute=recompute), words(3, 12)
    tokens, labels = tf.constant(text[:, :-1]), tf.constant(text[:, 1:])
    table = lm.network.scheme.table

    def loss(**options):
        return tf.reduce_sum(lm.segment_nll(tokens, labels, lm.initial_mems(3), **options)[0])

    with tf.GradientTape() as tape:
        total = loss(training=True, static_shapes=static_shapes)
    found = tape.gradient(total, table.value).numpy()
    value, expected = table.numpy(), np.zeros([8, 2])
    for place in ((0, 0), (3, 1), (7, 0)):
        for sign in (1, -1):
            table.assign(value + sign * 0.01 * np.eye(16)[np.ravel_multi_index(place, [8, 2])].reshape(8, 2))
            expected[place] += sign * loss().numpy() / 0.02
        np.testing.assert_allclose(found[place], expected[place], rtol=0.02, atol=0.01)
    assert np.abs(found).min() > 0


@SLOW
@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
@pytest.mark.parametrize("positions", SCHEMES)
def test_every_way_of_training_is_the_same(trained, positions, way):
    (_, weights, losses), (before, expected, expected_losses) = trained(positions, way), trained(positions, "plain")
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6)
    assert len(weights) == len(expected)
    for found, array, old in zip(weights.values(), expected.values(), before, strict=True):
        np.testing.assert_allclose(found, array, rtol=0, atol=1e-5)
        assert (array != old).any()


# ---------------------------------------- files

# Programs of a user: what they print last is what they find.
OPENED = """
import json, sys
{imports}
import keras, numpy as np, txl_tf
folder = sys.argv[1]
text, found = np.load(f"{{folder}}/text.npy"), {{}}
for name in sys.argv[2:]:
    try:
        lm = keras.saving.load_model(f"{{folder}}/{{name}}.keras")
    except ValueError as error:
        found[name] = str(error)
        continue
    lm.compile()
    nll, mems = lm.score(text[:, :6], text[:, 1:7])
    again, _ = lm.score(text[:, 6:12], text[:, 7:13], mems)
    written = lm.generate(text[:, :6], 5, temperature=0)
    found[name] = [np.concatenate([nll, again], 1).tolist(), written.numpy().tolist()]
print(json.dumps(found))
"""


def elsewhere(program, *arguments, folder=ROOT / "tests", **options):
    """What a program prints last, in a process of its own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, **options)
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@SLOW
def test_a_file_opens_in_another_process(tmp_path):
    np.save(tmp_path / "text.npy", words(2, 13))
    expected = {}
    for positions in SCHEMES:
        lm = make(positions, **({"context_len": 12} if positions in WINDOWS else {}), **BINS)
        lm.save(tmp_path / f"{positions}.keras")
        text = np.load(tmp_path / "text.npy")
        nll, mems = lm.score(text[:, :6], text[:, 1:7])
        nll = np.concatenate([nll, lm.score(text[:, 6:12], text[:, 7:13], mems)[0]], 1)
        expected[positions] = nll, lm.generate(text[:, :6], 5, temperature=0)
    found = elsewhere(OPENED.format(imports="import t5_positions"), tmp_path, *SCHEMES)
    for positions, (nll, written) in expected.items():
        close(found[positions][0], nll)
        np.testing.assert_array_equal(found[positions][1], written)
    without = elsewhere(OPENED.format(imports=""), tmp_path, "alibi", "t5")
    close(without["alibi"][0], expected["alibi"][0])
    assert "positions" in without["t5"] and "'t5'" in without["t5"]


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda lm: pickle.loads(pickle.dumps(lm)),
    "clone_model": keras.models.clone_model,
    "from_config": lambda lm: type(lm).from_config(lm.get_config()),
}


@pytest.mark.parametrize("way", some([*COPIES, "h5", "keras"], ["from_config"]))
@pytest.mark.parametrize("positions", some(SCHEMES, ["t5"]))
def test_copies_have_the_same_numbers_and_a_scheme_of_their_own(positions, way, tmp_path, eager):
    lm, text = make(positions), words(2, 9)
    if way == "h5":
        lm.save_weights(tmp_path / "lm.weights.h5")
        again = make(positions, seed=1, name=lm.name)
        again.load_weights(tmp_path / "lm.weights.h5")
    elif way == "keras":
        lm.save(tmp_path / "lm.keras")
        again = keras.saving.load_model(tmp_path / "lm.keras")
    else:
        again = COPIES[way](lm)
    if way in ("clone_model", "from_config"):
        again.set_weights(lm.get_weights())
    assert again.get_config() == lm.get_config() and again.network.scheme is not lm.network.scheme
    assert len(again.weights) == len(lm.weights)
    np.testing.assert_array_equal(again.log_probs(text)[0], lm.log_probs(text)[0])
    for weight in again.weights:  # which share nothing
        weight.assign(weight * 0.5)
    assert np.abs(again.log_probs(text)[0] - lm.log_probs(text)[0]).max() > 1e-3


# ---------------------------------------- serving


@SLOW
@pytest.mark.parametrize("whole", [{}, {"reset_token": END, "mem_len": 3}], ids=str)
@pytest.mark.parametrize("positions", SCHEMES)
def test_a_served_model_goes_on_from_its_state_where_there_is_no_txl_tf(positions, whole, tmp_path):
    if positions in WINDOWS:
        whole = {"mem_len": 0, "context_len": 24}
    lm, text = make(positions, n_layer=1, **whole), words(3, 15, borders=[(3, 9), (), (6,)])
    txl_tf.export_saved_model(lm, tmp_path / "1", word_vocab(), top_n=23, max_tokens=50, warmup=False)
    requests = [("initial_state", {"batch_size": np.int32(3)})]
    pieces = ((0, 5), (5, 6), (6, 7), (7, 14))
    for a, b in pieces:
        requests.append(("next", {"tokens": text[:, a:b], "state": "before"}))
        requests[-1] = ("score", {"tokens": text[:, a:b], "labels": text[:, a + 1 : b + 1], "state": "before"})
    given = {"max_new_tokens": np.int32(7), "temperature": np.float32(0), "top_k": np.int32(0), "top_p": np.float32(1)}
    given |= {"seed": np.int32(5), "min_p": np.float32(0), "repetition_penalty": np.float32(1)}
    given |= {"repetition_window": np.int32(64)}
    lengths = np.array([7, 9, 3], np.int32)
    options = {name: np.full([3], value) for name, value in given.items()}
    options |= {"num_return_sequences": np.int32([1]), "stop_ids": np.zeros([1, 0, 0], np.int32)}
    requests.append(("generate", {"tokens": text[:, :9], "lengths": lengths, **options}))
    (tmp_path / "requests").write_bytes(pickle.dumps({"": (str(tmp_path / "1"), requests)}))
    command = [sys.executable, "-c", STRANGER, tmp_path / "requests", tmp_path / "answers"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert not done.returncode, done.stderr[-2000:]
    answers = pickle.loads((tmp_path / "answers").read_bytes())[""]
    mems, expected = None, []
    with eagerly():
        if positions in WINDOWS:
            expected = lm.score(text[:, :14], text[:, 1:15])[0]
        else:
            for a, b in pieces:
                nll, mems = lm.score(text[:, a:b], text[:, a + 1 : b + 1], mems)
                expected.append(nll)
            expected = np.concatenate(expected, 1)
    close(np.concatenate([answer["nll"] for answer in answers[1:-1]], 1), expected)
    written = lm.generate(text[:, :9], 7, temperature=0, lengths=lengths)
    np.testing.assert_array_equal(answers[-1]["tokens"], written)


@pytest.fixture(scope="module")
def served_rotary():
    lm = make("rotary", n_layer=1)
    return lm, LanguageModelSignatures(lm, top_n=23, max_tokens=50)


def test_rows_of_a_request_may_be_of_different_sessions(served_rotary, eager):
    """With different numbers of tokens before them, which the state counts."""
    lm, served = served_rotary
    text, states, mems = words(3, 30), [], []
    for row, n in enumerate((1, 9, 22)):
        state = served.initial_state(tf.constant(1))["state"]
        tokens, labels = text[row : row + 1, :n], text[row : row + 1, 1 : n + 1]
        states.append(served.score(tf.constant(tokens), tf.constant(labels), state)["state"])
        mems.append(lm.score(tokens, labels)[1])
    tokens = np.stack([text[row, n : n + 6] for row, n in enumerate((1, 9, 22))])
    state, together = tf.concat(states, 0), [tf.concat(layer, 0) for layer in zip(*mems, strict=True)]
    for a, b in ((0, 1), (1, 5)):
        answer = served.score(tf.constant(tokens[:, a:b]), tf.constant(tokens[:, a + 1 : b + 1]), state)
        nll, together = lm.score(tokens[:, a:b], tokens[:, a + 1 : b + 1], together)
        close(answer["nll"], nll)
        state = answer["state"]


@pytest.mark.parametrize("bad", [-1.0, 0.5, 65536.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("digit", [-1, -2])
def test_a_state_that_no_answer_had_is_refused(served_rotary, bad, digit, eager):
    _, served = served_rotary
    state, tokens = served.initial_state(tf.constant(2))["state"].numpy(), tf.constant(words(2, 3))
    served.next(tokens, tf.constant(state))
    state[1, digit] = bad
    with pytest.raises(tf.errors.InvalidArgumentError, match="state"):
        served.next(tokens, tf.constant(state))


def test_a_served_count_goes_on_from_its_largest_value_to_0(served_rotary, eager):
    lm, served = served_rotary
    text = words(1, 13)
    state = served.initial_state(tf.constant(1))["state"].numpy()
    state[:, -2:] = 65535, 65533
    mems = None
    for a, b in ((0, 1), (1, 2), (2, 8), (8, 12)):
        answer = served.score(tf.constant(text[:, a:b]), tf.constant(text[:, a + 1 : b + 1]), tf.constant(state))
        nll, mems = lm.score(text[:, a:b], text[:, a + 1 : b + 1], mems)
        close(answer["nll"], nll)
        state = answer["state"].numpy()
    np.testing.assert_array_equal(state[0, -2:], [0, 9])


# ---------------------------------------- what is refused


@pytest.mark.parametrize(
    "positions, name, value",
    [
        *((positions, "clamp_len", 3) for positions in SCHEMES if positions != "relative"),
        *((positions, "untie_r", True) for positions in SCHEMES if positions != "relative"),
        *((positions, "context_len", 9) for positions in RINGS),
        *((positions, "reset_token", 1) for positions in WINDOWS),
        ("rotary", "d_head", 5),
        *(("relative", "positions", value) for value in ("nobody", "", 3, None, ["alibi"])),
    ],
)
def test_what_a_scheme_does_not_take_is_refused_by_name(positions, name, value):
    for cls in (txl_tf.TransformerXLLM, txl_tf.TransformerXL):
        with pytest.raises(txl_tf.ParameterError) as caught:
            cls(**{**SIZES, "mem_len": 3, "positions": positions, name: value})
        assert caught.value.name == name and caught.value.value == value


def test_the_error_for_an_unknown_scheme_says_how_to_register_one():
    sizes = {name: value for name, value in SIZES.items() if name in ModelConfig.names()}
    for make_one in (lambda: ModelConfig(**sizes, positions="nobody"), lambda: MultiHeadAttn(8, 2, 4, positions="no")):
        with raises_parameter("positions", limit="txl_tf.layers.register_positions"):
            make_one()


@pytest.mark.parametrize("positions", ["relative", "sinusoids", "learned", "nobody", "", 3, Positions])
def test_attention_takes_only_schemes_that_need_no_network(positions):
    for make_layer in (
        lambda: MultiHeadAttn(8, 2, 4, positions=positions),
        lambda: txl_tf.layers.TransformerLMLayer(8, 2, 4, 16, positions=positions),
    ):
        with pytest.raises(txl_tf.ParameterError) as caught:
            make_layer()
        assert caught.value.name == "positions" and caught.value.value == positions
    with raises_parameter("d_head", 5):
        MultiHeadAttn(8, 2, 5, positions="rotary")


def doubled(base):
    class Doubled(base):
        def call(self, w, *args, **kwargs):
            return 2 * super().call(w, *args, **kwargs)

    return Doubled


def network_of(positions, layer_class, attention_class=None, **methods):
    """A network with own classes; its layers are of a subclass if there is an `attention_class`."""
    if attention_class is not None:
        layer_class = type("Layer", (layer_class,), {"attention_class": attention_class})
    network_class = type("Network", (txl_tf.TransformerXL,), {"layer_class": layer_class, **methods})
    return network_class(**SIZES, mem_len=3, positions=positions)


@pytest.mark.parametrize("positions", ["relative", "sinusoids", "alibi", "rotary", "t5"])
def test_own_classes_must_take_the_arguments_of_the_scheme(positions, eager):
    fitting, other = ("TransformerXLLayer", "RelMultiHeadAttn"), ("TransformerLMLayer", "MultiHeadAttn")
    if positions != "relative":
        fitting, other = other, fitting
    layer_class, attention_class = (getattr(txl_tf.layers, name) for name in fitting)
    other_layer, other_attention = (getattr(txl_tf.layers, name) for name in other)
    for own_class in (doubled(other_layer), doubled(doubled(other_layer)), type("Plain", (other_layer,), {})):
        with raises_parameter("layer_class", own_class.__name__, limit=f"{fitting[0]} with positions={positions!r}"):
            network_of(positions, own_class)
    for own_class in (doubled(other_attention), other_attention):
        limit = f"{fitting[1]} with positions={positions!r}"
        with raises_parameter("attention_class", own_class.__name__, limit=limit):
            network_of(positions, layer_class, own_class)
        with raises_parameter("attention_class", own_class.__name__, limit=limit):
            network_of(positions, doubled(layer_class), own_class)
    for network in (
        network_of(positions, doubled(layer_class)),
        network_of(positions, layer_class, doubled(attention_class)),
    ):
        assert np.isfinite(network(words(1, 3))[0]).all()


def of_no_base(self, w, *args, **kwargs):
    return w + 1


def by_name(self, w, attn_mask=None, mems=None, dropout_key=None):
    return self.rel_attn(w, attn_mask=attn_mask, mems=mems)


@pytest.mark.parametrize(
    "positions, attention, call",
    [
        ("sinusoids", None, of_no_base),
        ("sinusoids", None, tf.function(of_no_base)),
        ("relative", "MultiHeadAttn", of_no_base),
        ("alibi", "MultiHeadAttn", by_name),
        ("alibi", "MultiHeadAttn", tf.function(by_name)),
    ],
)
def test_a_layer_with_a_call_of_its_own_may_have_any_base(positions, attention, call, eager):
    own_class = type("Own", (txl_tf.layers.TransformerXLLayer,), {"call": call})
    network = network_of(positions, own_class, attention and getattr(txl_tf.layers, attention))
    assert np.isfinite(network(words(1, 3))[0]).all()


@keras.saving.register_keras_serializable("tests")
class Foreign(keras.layers.Layer):
    """A layer that is no class of the library's."""

    def __init__(self, name=None, **arguments):
        super().__init__(name=name)

    def build(self, shape=None):
        self.built = True

    def call(self, w, attn_mask, mems, dropout_key=None):
        return w


def test_a_layer_of_keras_is_a_layer(eager):
    assert np.isfinite(network_of("sinusoids", Foreign)(words(1, 3))[0]).all()
    with raises_parameter("layer_class", "Foreign"):
        network_of("relative", Foreign)


def test_a_network_that_calls_its_layers_itself_may_have_any_layers(eager):
    def enter(self, tokens, mems, *args, **kwargs):
        hidden, arguments, mask = txl_tf.TransformerXL.enter(self, tokens, mems, *args, **kwargs)
        return hidden, [rest[3:] for rest in arguments], mask

    assert np.isfinite(network_of("relative", Foreign, enter=enter)(words(1, 3))[0]).all()


def test_settings_of_a_model_change_where_the_scheme_has_them(eager):
    alibi, sinusoids, learned = (make(name, mem_len=0) for name in ("alibi", "sinusoids", "learned"))
    with pytest.raises(txl_tf.ParameterError) as caught:
        alibi.clamp_len = 5
    assert (caught.value.name, caught.value.value, alibi.clamp_len) == ("clamp_len", 5, -1)
    with pytest.raises(txl_tf.ParameterError):
        sinusoids.reset_token = 1
    for lm in (alibi, learned):
        with pytest.raises(txl_tf.ParameterError):
            lm.context_len = 4
        with pytest.raises(txl_tf.ParameterError):
            lm.positions = "rotary"
    sinusoids.context_len = 4
    assert sinusoids.network.context_len == sinusoids.decoding_cache().context_len == 4


@SLOW
def test_another_window_of_sinusoids_takes_effect():
    lm, other = (make("sinusoids", mem_len=0, context_len=context_len) for context_len in (16, 4))
    prompt = words(2, 6)
    before = lm.generate(prompt, 8, temperature=0)
    lm.context_len = 4
    after = lm.generate(prompt, 8, temperature=0)
    np.testing.assert_array_equal(after, other.generate(prompt, 8, temperature=0))
    assert (after != before).numpy().any()


def test_a_segment_that_is_longer_than_what_is_learned_is_refused(eager):
    lm, text = make("learned", mem_len=0, context_len=6), words(2, 9)
    lm.compile("sgd")
    batches = tf.data.Dataset.from_tensors((text[:, :8], text[:, 1:]))
    for call in (
        lambda: lm.score(text[:, :8], text[:, 1:]),
        lambda: lm.first_nll(tf.constant(text[:, :8]), tf.constant(text[:, 1:])),
        lambda: lm.evaluate(batches, verbose=0),
        lambda: lm.fit(batches, verbose=0),
    ):
        with pytest.raises(txl_tf.ParameterError) as caught:
            call()
        assert caught.value.name == "tokens" and caught.value.value == 8


@pytest.mark.ci
def test_such_a_segment_is_refused_after_segments_of_other_lengths():
    """A graph that has seen several lengths knows none of them."""
    lm, text = make("learned", context_len=6, n_layer=1, n_head=1), words(2, 9)
    lm.compile("sgd")
    calls = (
        lambda x: lm.score(x, x),
        lambda x: lm.score(x, x, lengths=[3, 2]),
        lambda x: lm.log_probs(x),
        lambda x: lm.alternatives(x, 2),
        lambda x: lm.attention(x),
        lambda x: lm.train_on_batch(x, x),
        lambda x: lm.test_on_batch(x, x),
    )
    for call in calls:
        for n in (4, 6):
            call(text[:, :n])
        with raises_parameter("tokens", 8, limit="context_len=6"):
            call(text[:, :8])

    def segments():
        for n in (4, 6, 8):
            yield text[:, :n], text[:, 1 : n + 1]

    dataset = tf.data.Dataset.from_generator(segments, output_signature=(tf.TensorSpec([2, None], tf.int32),) * 2)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        lm.fit(dataset, verbose=0)
    assert mentions(str(caught.value), "context_len=6", 8) and "node" not in str(caught.value)


def test_masks_and_memories_of_a_wrong_length_have_a_name_in_a_graph():
    """A mask of one column would broadcast to all tokens."""
    network, text = make("alibi", n_layer=1).network, words(2, 6)
    specs = tf.TensorSpec([2, None], tf.int32), tf.TensorSpec([2, None], tf.bool), tf.TensorSpec([2, None, 8])

    def called(tokens, mask, mem):
        return network(tokens, [mem] * network.n_layer, padding_mask=mask)[0]

    call = tf.function(called, autograph=False).get_concrete_function(*specs)
    mask, mem = np.arange(6) < [[6], [3]], np.zeros([2, 5, 8], np.float32)
    expected = called(tf.constant(text), tf.constant(mask), tf.constant(mem))
    np.testing.assert_allclose(call(*map(tf.constant, (text, mask, mem))), expected, rtol=1e-5, atol=1e-6)
    for tensors, facts in (((text, mask[:, :1], mem), ("padding_mask", 6, 1)), ((text, mask, mem[:, 1:]), ("mems", 4))):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            call(*map(tf.constant, tensors))
        assert mentions(str(caught.value), *facts)
    lm = make("alibi", n_layer=1)
    for n in (3, 4, 5):
        lm.score(text[:, :n], text[:, :n], lengths=[n, 1])
    with raises_parameter("mems", limit="mem_len=5"):
        lm.score(text, text, [mem[:, 1:]] * lm.network.n_layer, lengths=[6, 3])


def test_an_own_table_of_positions_may_be_longer(monkeypatch):
    class Repeated(Learned):
        def table(self, network, length, zero=0):
            table = tf.convert_to_tensor(network.pos_table)
            return tf.gather(table, tf.range(length) % network.context_len)[None]

    monkeypatch.setitem(SCHEMES_BY_NAME, "repeated", Repeated)
    monkeypatch.setattr(Repeated, "known_as", "repeated")
    lm, text = make("repeated", mem_len=0, context_len=4), words(2, 9)
    assert np.all(lm.score(text[:, :8], text[:, 1:])[0] > 0)


@pytest.mark.parametrize("method", ["position_table", "positions"])  # the second is the name before 0.1.0
def test_a_table_of_an_own_network_may_be_longer(method):
    def repeated(self, length, zero=0):
        return tf.gather(tf.convert_to_tensor(self.pos_table), tf.range(length) % self.context_len)[None]

    text, own_class = words(2, 8), type("Own", (txl_tf.TransformerXL,), {method: repeated})
    own, other = (
        cls(**SMALL, positions="learned", context_len=n) for cls, n in ((own_class, 4), (txl_tf.TransformerXL, 8))
    )
    own.build_at_once()
    other.build_at_once()
    weights = {weight.path.split("/", 1)[1]: weight for weight in own.weights}
    for weight in other.weights:
        value = weights[weight.path.split("/", 1)[1]].numpy()
        weight.assign(np.tile(value, [2, 1]) if weight.path.endswith("pos_table") else value)
    close(own(text)[0], other(text)[0])


@pytest.mark.parametrize("positions", [name for name in SCHEMES if name != "relative"])
def test_the_original_program_has_relative_positions_alone(positions, tmp_path):
    lm = make(positions)
    for call in (lambda: txl_tf.tf1_variables(lm), lambda: txl_tf.save_tf1_checkpoint(lm, str(tmp_path / "original"))):
        with raises_parameter("positions"):
            call()
    assert not [*tmp_path.iterdir()]
    with pytest.raises(txl_tf.ParameterError) as caught:
        lm.network.attention_terms(words(1, 3))
    assert (caught.value.name, caught.value.value) == ("positions", positions)


# ---------------------------------------- a user's own schemes


def test_names_and_classes_of_own_schemes_are_checked():
    for name in ("alibi", "relative", 3):
        with pytest.raises(txl_tf.ParameterError) as caught:
            register_positions(name)
        assert (caught.value.name, caught.value.value) == ("name", name)
    for cls in (int, Positions(), lambda: None):
        with pytest.raises(txl_tf.ParameterError):
            register_positions("of_a_test")(cls)

    class Unknown(Alibi):  # a file could not say its name
        pass

    with pytest.raises(txl_tf.ParameterError) as caught:
        MultiHeadAttn(8, 2, 4, positions=Unknown())
    assert caught.value.name == "positions"


@pytest.fixture
def registered():
    """Registers classes for a test."""
    tables = (SCHEMES_BY_NAME, REFUSED)
    before = [dict(table) for table in tables]
    yield lambda name, cls: register_positions(name)(cls)
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


def grown(x, numbers):
    """Not a rotation, and so a matter of places: within a window it is the same with a cache."""
    return x * (1 + tf.cast(numbers[..., None], x.dtype) / 10)


def near(self, q, places):
    """By what the query has, and without a tensor for the batch where there is none."""
    return tf.cast(places.distances(q), q.dtype) * tf.reduce_mean(q, -1, keepdims=True)


def without_u(self, q, w):
    q = q * w.scale
    return q, q + w.v * w.scale


def louder(base):
    def enter(self, network, embeddings, *args, **kwargs):
        return base.enter(self, network, embeddings * 2, *args, **kwargs)

    return enter


def make_factor(self, owner):
    Relative.make_weights(self, owner)
    self.factor = self.add_weight(name="factor", shape=(), initializer="ones")


def scaled_scores(self, q, places):
    scores = places.scores_by_distance(q)
    return [x * self.factor for x in scores] if isinstance(scores, list) else scores * self.factor


ABSOLUTE = {"cached_by": "window", "refused": Sinusoids.refused}
OWN = {
    "by the query": ((Positions,), {"scores": near}),
    "turned back": ((Positions,), {"turn": lambda self, x, numbers: Rotary.turn(self, x, -numbers)}),
    "no u": ((Relative,), {"queries": without_u}),
    "weighted": ((Relative, keras.layers.Layer), {"make_weights": make_factor, "scores": scaled_scores}),
    "half the table": ((Relative,), {"table": lambda self, *args: 0.5 * Relative.table(self, *args)}),
    "louder": ((Positions,), {"enter": louder(Positions)}),
    "louder relative": ((Relative,), {"enter": louder(Relative)}),
    "grown": ((Positions,), {"turn": lambda self, x, numbers: grown(x, numbers), **ABSOLUTE}),
    "more sinusoids": ((Sinusoids,), {"table": lambda self, *args: 2 * Sinusoids.table(self, *args)}),
    "louder sinusoids": ((Sinusoids,), {"enter": louder(Sinusoids)}),
    "louder alibi": ((Alibi,), {"enter": louder(Alibi)}),
    "sinusoids and scores": ((Sinusoids,), {"scores": near}),
    "nothing": ((Positions,), {}),
}


@pytest.mark.parametrize("setting", ["eager", "static_shapes", "recompute", "jit_compile"])
@pytest.mark.parametrize("name", OWN)
@SLOW
def test_own_schemes_are_asked_by_all_methods(registered, name, setting, tmp_path):
    """By those that read keys and values from a cache, or by those without."""
    bases, methods = OWN[name]
    cls, setting = registered(name, type("Own", bases, methods)), SETTINGS[setting]
    registered("nothing_at_all", type("Nothing", (Positions,), {}))
    with eagerly() if setting.eager else contextlib.nullcontext():
        memory = {"mem_len": 0, "context_len": 16} if cls.cached_by == "window" and bases == (Sinusoids,) else {}
        memory = {"mem_len": 0} if cls.cached_by == "window" and not memory else memory
        lm, plain = (of_settings(each, setting, **memory) for each in (name, bases[0].known_as or "nothing_at_all"))
        nll = expected_nll(lm)
        found = wrong(checks_of(lm, nll, None), ())
        if len(plain.weights) == len(lm.weights) and name != "nothing":
            assert np.abs(expected_nll(plain) - nll).max() > 1e-3
    assert not found, lines_of(found)


def test_the_scheme_of_tags_is_no_own_part():
    network = txl_tf.Tener(n_token=9, n_layer=1, d_model=8, n_head=2, d_inner=12)
    assert parts.own_parts(txl_tf.Tagger(network, ["NOUN", "VERB"], scheme="none")) == []


def test_an_own_scheme_takes_40_lines_at_most():
    assert len(Path(t5_positions.__file__).read_text(encoding="utf-8").splitlines()) <= 40


# ---------------------------------------- runs and programs


def test_train_py_leaves_out_what_the_scheme_refuses_whether_or_not_its_class_is_known(registered, monkeypatch):
    registered("of_rings", type("OfRings", (Positions,), {"refused": {"mem_len": "has no effect"}}))
    assert {name: SCHEMES_BY_NAME[name].refused for name in REFUSED} == REFUSED
    values = {"clamp_len": 3, "context_len": 9, "mem_len": 4, "n_layer": 2}
    for tool in program("train.py"):
        for positions in REFUSED:
            tool.FLAGS(["train.py", "--model_dir=run", f"--positions={positions}"])
            known = choosing.accepted_settings(values, ModelConfig, {})
            with monkeypatch.context() as patch:
                patch.setitem(SCHEMES_BY_NAME, positions, None)  # as before the library is imported
                assert choosing.accepted_settings(values, ModelConfig, {}) == known
            left_out = REFUSED[positions]
            assert known == {name: value for name, value in values.items() if name not in left_out}


@SLOW
@pytest.mark.parametrize("positions", SCHEMES)
def test_a_run_keeps_its_positions(positions, tmp_path, text_file):
    model = {"positions": positions, **({"context_len": 8} if positions in WINDOWS else {})}
    results = train_run(tmp_path / "run", text_file, model=model)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["positions"] == positions
    assert [float(row["loss"]) for row in log_rows(tmp_path / "run")][-1] < 4
    (lm, vocab), (again, _) = (txl_tf.load_run(tmp_path / "run") for _ in range(2))  # names hang on no counter
    text = np.array(vocab.encode("the cat sat on the mat, "))[None]
    np.testing.assert_array_equal(lm.log_probs(text[:, :8])[0], again.log_probs(text[:, :8])[0])
    assert lm.network.scheme.known_as == positions and np.isfinite(results["valid"]).all()
    # It goes on, and stops where it would have.
    train_run(tmp_path / "half", text_file, model=model, training={"train_steps": 12, "save_steps": 6})
    for path in (tmp_path / "half").glob("ckpt-12*"):
        path.unlink()
    train_run(tmp_path / "half", text_file, model=model, training={"train_steps": 12, "save_steps": 6})
    resumed, _ = txl_tf.load_run(tmp_path / "half")
    for found, expected in zip(resumed.weights, lm.weights, strict=True):
        np.testing.assert_array_equal(found, expected)
    kind = WINDOWS if positions in WINDOWS else ("alibi", "rotary")  # context_len fits both
    other = next(name for name in kind if name != positions)
    with raises_naming(ValueError, "positions", positions):
        origin = {"init_from": str(tmp_path / "run")}
        train_run(tmp_path / "other", text_file, model={**model, "positions": other}, training=origin)
    with pytest.raises(ValueError, match="positions"):
        train_run(tmp_path / "run", text_file, model={**model, "positions": other})


TINY = (
    "--dataset=text --level=char --n_layer=1 --d_model=16 --d_embed=16 --n_head=2 --d_head=8 --d_inner=16 --tgt_len=8 "
    "--train_batch_size=4 --eval_batch_size=2 --train_steps=4 --iterations=2 --save_steps=4 --warmup_steps=0"
).split()


@SLOW
@pytest.mark.parametrize(
    "flags, name",
    [
        ("--positions=alibi --clamp_len=3", "clamp_len"),
        ("--positions=rotary --untie_r", "untie_r"),
        ("--positions=alibi --context_len=9", "context_len"),
        ("--model=transformer --positions=alibi", "positions"),
        ("--positions=rotary --d_head=5", "d_head"),
        ("--positions=learned --context_len=6", "tgt_len"),
        ("--positions=sinusoids --reset_memory_at_documents --documents", "reset"),
        ("--positions=t5", "positions"),
        ("--positions=sinusoids --pos_embed=learned", "pos_embed"),
    ],
)
def test_flags_that_do_not_fit_are_one_line_before_any_training(flags, name, tmp_path, text_file):
    folders = f"--data_path={text_file}", f"--model_dir={tmp_path}/run"
    done = run_program("train.py", *TINY, *flags.split(), *folders)
    lines = done.stderr.strip().splitlines()
    message = [line for line in lines if not line.startswith("(--verbosity")][-1]
    assert done.returncode and name in message and "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "config.json").exists()


# A user's program that knows its own scheme: any of the library's programs, under its own name.
WITH_OWN_CODE = "import sys, t5_positions; from txl_programs import main; sys.argv = sys.argv[1:]; main()"


@SLOW
def test_programs_run_with_own_code(tmp_path, text_file):
    run = tmp_path / "run"

    def program(code, *arguments):
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "tests")

    line = ["txl-train", *TINY, "--positions=t5", f"--data_path={text_file}", f"--model_dir={run}"]
    done = program(WITH_OWN_CODE, *line)
    assert not done.returncode, done.stderr[-2000:]
    assert json.loads((run / "config.json").read_text())["model"]["positions"] == "t5"
    evaluate = ["txl-train", f"--model_dir={run}", "--do_eval_only"]
    generate = ["txl-generate", f"--model_dir={run}", "--prompt=the cat", "--max_new_tokens=5"]
    for arguments in (evaluate, generate):
        done = program(WITH_OWN_CODE, *arguments)
        assert not done.returncode, done.stderr[-2000:]
        done = program(WITH_OWN_CODE.replace(", t5_positions", ""), *arguments)
        assert done.returncode and "Traceback" not in done.stderr, done.stderr[-2000:]
        assert "positions" in done.stderr and "t5" in done.stderr
