"""The vanilla language model: against loops over its equations, in training, with its window and without."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, assert_round_trips, eagerly, raises_parameter, randomise

import txl_tf
from txl_tf.config import TransformerLMConfig
from txl_tf.language.generation import generate_tokens
from txl_tf.language.sampling import (
    check_sampling,
    no_history,
    precompute_softmax,
    remember_segment,
    sample,
    uniform_draws,
)
from txl_tf.language.session import Session
from txl_tf.language.sliding_window import sliding_window_nll
from txl_tf.language.stopping import no_stops
from txl_tf.language.transformer_lm import AbsoluteTransformer
from txl_tf.language.window import window_start
from txl_tf.transformer_xl.absolute_layer import TransformerLMLayer
from txl_tf.transformer_xl.attention import create_mask

BINS = {"cutoffs": [5, 12], "div_val": 2}
SLOW = pytest.mark.slow


def make(seed=0, **options):
    lm = txl_tf.TransformerLM(**{**SMALL, "dropout": 0.0, "seed": 0, **options})
    randomise(lm, seed)
    return lm


def close(got, expected, rtol=1e-5, atol=1e-5):
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)


# ---------------------------------------- the equations, in loops


def array(x):
    return tf.cast(x, tf.float64).numpy()


def sinusoids(position, d_model=8):
    angles = [position / 10000 ** (2 * i / d_model) for i in range(d_model // 2)]
    return np.array([*np.sin(angles), *np.cos(angles)])


def normalised(x, norm, epsilon):
    return (x - x.mean()) / np.sqrt(x.var() + epsilon) * array(norm.gamma) + array(norm.beta)


def attention_in_loops(x, mem, attn, same_length):
    """One row, x `[T, E]` and mem `[M, E]`: what the heads find, projected."""
    width, d_head = attn.n_head * attn.d_head, attn.d_head
    q_kernel, k_kernel, v_kernel = np.split(array(attn.qkv_kernel), 3, 1)
    context = np.concatenate([mem, x])
    out = np.zeros([len(x), width])
    for i in range(len(x)):
        last = len(mem) + i
        seen = range(i if same_length else 0, last + 1)
        for head in range(attn.n_head):
            columns = slice(head * d_head, (head + 1) * d_head)
            q = x[i] @ q_kernel[:, columns]
            scores = np.exp([q @ (context[j] @ k_kernel[:, columns]) / np.sqrt(d_head) for j in seen])
            for weight, j in zip(scores / scores.sum(), seen, strict=True):
                out[i, columns] += weight * (context[j] @ v_kernel[:, columns])
    return out @ array(attn.o_kernel)


def in_loops(lm, tokens, mems):
    """One row: log-probabilities `[T, N]`, and what each layer was given."""
    net, epsilon = lm.network, lm.network.layer_norm_epsilon
    table = array(net.embedding.tables[0])
    position = sinusoids if net.pos_table is None else array(net.pos_table).__getitem__
    x = np.array([table[token] * np.sqrt(8) + position(place) for place, token in enumerate(tokens)])
    given = []
    for layer, mem in zip(net.decoder_layers, mems, strict=True):
        given.append(x)
        attn, ff = layer.rel_attn, layer.ff
        found = attention_in_loops(x, mem, attn, net.same_length)
        x = np.array([normalised(a + b, attn.layer_norm, epsilon) for a, b in zip(x, found, strict=True)])
        inner = np.maximum(x @ array(ff.kernel_1) + array(ff.bias_1), 0)
        x = x + inner @ array(ff.kernel_2) + array(ff.bias_2)
        x = np.array([normalised(row, ff.layer_norm, epsilon) for row in x])
    logits = x @ table.T + array(lm.softmax.biases[0])
    return logits - np.log(np.exp(logits).sum(1, keepdims=True)), given


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"mem_len": 3}, marks=SLOW),
        {"mem_len": 7, "same_length": True},
        pytest.param({"layer_norm_epsilon": 0.01}, marks=SLOW),
        {"pos_embed": "learned", "context_len": 5},
    ],  # fmt: skip
    ids=str,
)
def test_scores_are_those_of_loops_over_the_equations(small_batches, options):
    """The memory, where there is one, carries the positions of its own segment."""
    lm = make(**options)
    mems = lm.initial_mems(2)
    expected_mems = [[array(mem[row]) for mem in mems] for row in range(2)]
    for tokens, labels in zip(*small_batches(n=3), strict=True):
        log_probs, _ = lm.log_probs(tokens, mems)
        nll, mems = lm.score(tokens, labels, mems)
        for row in range(2):
            expected, given = in_loops(lm, tokens[row], expected_mems[row])
            close(log_probs[row], expected)
            close(nll[row], -expected[np.arange(5), labels[row]])
            whole = [np.concatenate(both) for both in zip(expected_mems[row], given, strict=True)]
            expected_mems[row] = [x[len(x) - lm.network.mem_len :] for x in whole]
            for mem, expected_mem in zip(mems, expected_mems[row], strict=True):
                close(mem[row], expected_mem)


def test_attention_probs_are_causal_and_sum_to_1(small_batches):
    (tokens,), _ = small_batches(n=1)
    network = make().network
    probs = network.attention_probs(tokens, network.initial_mems(2), 1).numpy()
    close(probs.sum(-1), np.ones([2, 2, 5]))
    assert np.all((probs > 0) == (create_mask(5, 0).numpy() == 0))


# ---------------------------------------- what follows from absolute positions


def test_without_memory_every_segment_is_a_text_of_its_own(small_batches):
    lm, (tokens, labels) = make(), small_batches(n=2)
    first, mems = lm.score(tokens[0], labels[0])
    assert [mem.shape for mem in mems] == [(2, 0, 8)] * 2
    np.testing.assert_array_equal(lm.score(tokens[1], labels[1], mems)[0], lm.score(tokens[1], labels[1])[0])
    close(lm.score(tokens[0][:, :3], labels[0][:, :3])[0], first[:, :3])  # and it does not look ahead
    assert np.abs(lm.score(tokens[0][:, 1:], labels[0][:, 1:])[0] - first[:, 1:]).max() > 1e-3  # moved, and shorter


def test_padding_changes_nothing(small_batches):
    lm, (tokens, _) = make(), small_batches(n=1)
    padded = np.insert(tokens[0], [0, 2, 2], 22, axis=1)
    mask = tf.constant([[False, True, True, False, False, True, True, True]] * 2)
    hidden, _ = lm.network(tf.constant(padded), padding_mask=mask)
    close(tf.boolean_mask(hidden, mask), tf.reshape(lm.network(tokens[0])[0], [10, 8]))


def test_the_weights_are_those_of_transformer_xl_without_relative_positions():
    lm = txl_tf.TransformerLM(**SMALL, **BINS)
    other = txl_tf.TransformerXLLM(**SMALL, **BINS, mem_len=0)
    width = SMALL["n_head"] * SMALL["d_head"]
    assert other.count_params() - lm.count_params() == SMALL["n_layer"] * SMALL["d_model"] * width + 2 * width
    assert lm.network.r_w_bias is None and lm.network.r_r_bias is None
    assert all(layer.rel_attn.r_kernel is None for layer in lm.network.decoder_layers)


# ---------------------------------------- training


def dataset(small_batches, n=4, batch=4):
    return tf.data.Dataset.from_tensor_slices(tuple(small_batches(n=n, batch=batch)))


def trained(small_batches, recompute=False, **compile_options):
    """Losses of two epochs, and the weights after them."""
    lm = make(dropout=0.2, dropatt=0.2, recompute=recompute, **BINS)
    lm.compile(optimizer=txl_tf.make_optimizer(0.01, train_steps=100), **compile_options)
    losses = lm.fit(dataset(small_batches).repeat(), epochs=2, steps_per_epoch=4, verbose=0).history["loss"]
    return losses, [variable.numpy() for variable in lm.trainable_variables]


@pytest.fixture(scope="module")
def plainly_trained(small_batches):
    losses, weights = trained(small_batches)
    assert losses[1] < losses[0]
    return losses, weights


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient_accumulation_steps": 2}, marks=SLOW),
        pytest.param({"static_shapes": True}, marks=SLOW),
        pytest.param({"recompute": True}, marks=SLOW),
    ],
    ids=str,
)
def test_training_is_the_same_in_parts_with_static_shapes_and_recomputed(small_batches, plainly_trained, options):
    losses, weights = trained(small_batches, **options)
    close(losses, plainly_trained[0])
    for got, expected in zip(weights, plainly_trained[1], strict=True):
        close(got, expected, atol=5e-4)


@SLOW
def test_two_replicas_train_as_one_dropout_included(small_batches, plainly_trained, two_replicas):
    with two_replicas.scope():
        losses, weights = trained(small_batches)
    close(losses, plainly_trained[0])
    for got, expected in zip(weights, plainly_trained[1], strict=True):
        close(got, expected, atol=5e-4)


def test_dropout_drops_from_the_sum_of_embedding_and_position():
    network = AbsoluteTransformer(**{**SMALL, "n_token": 100}, dropout=0.5)
    network.build()
    tokens = tf.constant(np.arange(100)[None])
    mems = network.initial_mems(1)
    whole, *_ = network.enter(tokens, mems)
    dropped, *_ = network.enter(tokens, mems, (tf.constant([1, 2, 0]), None))
    kept = dropped.numpy() != 0
    assert 0.4 < kept.mean() < 0.6
    close(dropped.numpy()[kept], 2 * whole.numpy()[kept])


@pytest.mark.parametrize("options", [pytest.param({}, marks=SLOW), {"mem_len": 4}], ids=str)
def test_evaluate_is_the_mean_nll_of_the_segments(small_batches, options):
    lm = make(**options, **BINS)
    lm.compile()
    mems, nll = None, []
    for tokens, labels in zip(*small_batches(n=3, batch=4), strict=True):
        with eagerly():
            scores, mems = lm.score(tokens, labels, mems)
        nll.append(scores)
    close(lm.evaluate(dataset(small_batches, n=3), verbose=0), np.mean(nll))


# ---------------------------------------- save, load


@pytest.mark.slow
def test_keras_file_holds_all_of_the_model(small_batches, tmp_path):
    lm = make(context_len=6, same_length=True, mem_len=2, **BINS)
    lm.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    (tokens,), (labels,) = small_batches(n=1)
    np.testing.assert_array_equal(loaded.score(tokens, labels)[0], lm.score(tokens, labels)[0])
    assert loaded.get_config() == lm.get_config()
    assert {*TransformerLMConfig.names()} <= {*lm.get_config()}
    assert not {"clamp_len", "untie_r"} & {*lm.get_config()}


def test_layer_round_trips():
    assert_round_trips(TransformerLMLayer(8, 2, 3, 12, dropout=0.1, dropatt=0.2))


# ---------------------------------------- generation


def start_by_counting(length, context_len):
    """Where the window begins once `length` tokens are read one after the other."""
    start = 0
    for i in range(length):
        if i - start == context_len:
            start = i - context_len // 2
    return start


@pytest.mark.parametrize("context_len", [2, 3, 4, 5, 9])
def test_a_window_that_is_full_moves_on_to_its_last_half(context_len):
    got = window_start(tf.range(30), context_len)
    np.testing.assert_array_equal(got, [start_by_counting(length, context_len) for length in range(30)])


def uncached(lm, prompt, n, choose):
    """The plain loop: every token from the whole of its window."""
    text = np.asarray(prompt)
    with eagerly():
        for i in range(n):
            window = text[:, start_by_counting(text.shape[1], lm.context_len) :]
            text = np.concatenate([text, choose(i, window)[:, None]], 1)
    return text


@pytest.fixture
def prompt():
    return np.random.default_rng(0).integers(0, 23, [3, 7])


@pytest.fixture(scope="module")
def lm():
    """With a window that moves on while it writes; all texts of three rows are written by one graph."""
    return make(context_len=5, **BINS)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"context_len": 32}, marks=SLOW),
        {"n_layer": 1, "context_len": 5, **BINS},
        pytest.param({"context_len": 5, **BINS}, marks=SLOW),
        pytest.param({"context_len": 2}, marks=SLOW),
        pytest.param({"context_len": 6, "mem_len": 3, "same_length": True}, marks=SLOW),
        pytest.param({"context_len": 5, "pos_embed": "learned"}, marks=SLOW),
    ],
    ids=str,
)
def test_greedy_text_is_that_of_the_uncached_loop(prompt, options):
    lm = make(**options)

    def most_likely(_, window):
        return np.argmax(lm.log_probs(window)[0][:, -1], 1)

    np.testing.assert_array_equal(lm.generate(prompt, 12, temperature=0), uncached(lm, prompt, 12, most_likely))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 4.0, "repetition_window": 2},  # a window has 3 tokens at least
        {"temperature": 1.2, "min_p": 0.1, "repetition_penalty": 0.4, "repetition_window": 3},
    ],
    ids=str,
)
@SLOW
def test_sampled_text_is_that_of_the_uncached_loop(lm, prompt, options):
    options = {**options, "seed": [1, 2, 3]}
    sampling, bins = check_sampling(3, **options), precompute_softmax(lm)

    def drawn(i, window):
        hidden, _ = lm.network(tf.constant(window))
        seen = remember_segment(no_history(3, 23), tf.constant(window, tf.int32), tf.fill([3], window.shape[1]))
        return sample(bins, hidden[:, -1], uniform_draws(sampling.seeds, i, 1)[0], sampling, seen).numpy()

    np.testing.assert_array_equal(lm.generate(prompt, 12, **options), uncached(lm, prompt, 12, drawn))


@pytest.mark.slow
def test_prompts_of_unequal_length_give_what_each_gives_alone(lm, prompt):
    lengths = [7, 1, 4]
    for options in ({"temperature": 0}, {"temperature": 1.3, "top_p": 0.9, "seed": 5}):
        together = lm.generate(prompt, 8, lengths=lengths, **options).numpy()
        for row, length in enumerate(lengths):
            alone = lm.generate(prompt[row : row + 1, :length], 8, **options)
            np.testing.assert_array_equal(together[row, : length + 8], alone[0])
            assert not together[row, length + 8 :].any()


@pytest.mark.slow
def test_a_row_ends_at_the_stop_token_and_the_others_go_on(lm, prompt):
    free = lm.generate(prompt, 8, seed=[1, 2, 3]).numpy()
    stop = int(free[0, 9])
    expected = free.copy()
    for row in expected[:, 7:]:
        if stop in row:
            row[np.argmax(row == stop) :] = stop
    np.testing.assert_array_equal(lm.generate(prompt, 8, seed=[1, 2, 3], stop_token=stop), expected)


@pytest.mark.slow
def test_many_rows_and_an_unknown_number_of_them_are_what_each_is_alone(lm, prompt):
    many = np.repeat(prompt, 6, 0)  # more than are written out in the graph
    expected = np.repeat(lm.generate(prompt, 8, temperature=0), 6, 0)
    np.testing.assert_array_equal(lm.generate(many, 8, temperature=0), expected)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)], autograph=False)
    def served(prompt):
        batch, n = tf.unstack(tf.shape(prompt))
        options = tf.nest.map_structure(lambda x: tf.repeat(x, batch), check_sampling(1, temperature=0, seed=0))
        stops = no_stops(lm.network.n_token)
        uniform, limits = uniform_draws(options.seeds, 0, 8), tf.fill([batch], 8)
        return generate_tokens(lm, prompt, tf.fill([batch], n), uniform, limits, options, stops).tokens

    np.testing.assert_array_equal(served(many), expected)


@pytest.mark.slow
def test_a_session_reads_and_writes_in_one_window(lm, prompt):
    session = Session(lm, batch_size=3)
    pieces = [session.read(prompt)]
    written = np.concatenate([session.write(n, temperature=0)[0] for n in (1, 5)], 1)
    np.testing.assert_array_equal(written, lm.generate(prompt, 6, temperature=0)[:, 7:])
    pieces += [np.full([3, 6], np.nan), session.read(prompt[:, ::-1])]
    text, nll = np.concatenate([prompt, written, prompt[:, ::-1]], 1), np.concatenate(pieces, 1)
    assert np.isnan(nll[:, 0]).all()
    with eagerly():
        for i in [*range(1, 7), *range(13, 20)]:
            window = text[:, start_by_counting(i, 5) : i + 1]
            close(nll[:, i], lm.score(window[:, :-1], window[:, 1:])[0][:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", pytest.param("mixed_float16", marks=SLOW)])
def test_generation_in_half_precision_stays_close(prompt, dtype):
    text = np.concatenate([prompt, prompt], 1)
    exact, half = (Session(make(context_len=6, dtype=policy), 3).read(text) for policy in ("float32", dtype))
    assert 0 < np.nanmax(np.abs(half - exact)) < 0.2


# ---------------------------------------- sliding window


@pytest.mark.parametrize("window, step, n", [
    (5, 2, 17), pytest.param(4, 4, 14, marks=SLOW), pytest.param(6, 3, 5, marks=SLOW), pytest.param(1, 1, 6, marks=SLOW)
])  # fmt: skip
def test_sliding_window_is_a_loop_of_score(window, step, n):
    lm = make(n_layer=1, **BINS)
    tokens = np.random.default_rng(1).integers(0, 23, [n])
    end = done = min(window, n - 1)
    with eagerly():
        expected = list(lm.score(tokens[None, :end], tokens[None, 1 : end + 1])[0][0].numpy())
        while done < n - 1:
            end = min(end + step, n - 1)
            nll, _ = lm.score(tokens[None, end - window : end], tokens[None, end - window + 1 : end + 1])
            expected += list(nll[0, done - end :].numpy())
            done = end
    got = sliding_window_nll(lm, tokens, window, batch_size=3, step=step)
    assert got.dtype == np.float32
    close(got, expected)


@pytest.mark.slow
def test_sliding_window_of_step_1_gives_every_token_a_full_window(small_lm):
    tokens = np.random.default_rng(1).integers(0, 23, [12])
    for lm in (make(), small_lm()):
        expected = []
        with eagerly():
            for i in range(1, 12):
                first = max(0, i - 4)
                expected.append(lm.score(tokens[None, first:i], tokens[None, first + 1 : i + 1])[0][0, -1])
        close(sliding_window_nll(lm, tokens, window=4, batch_size=5), expected)


# ---------------------------------------- errors


@pytest.mark.parametrize(
    "options, name, limit",
    [
        ({"context_len": 1}, "context_len", "2"),
        ({"context_len": 2.5}, "context_len", "an integer"),
        ({"mem_len": -1}, "mem_len", "0"),
        ({"d_model": 7}, "d_model", "even"),
        ({"untie_r": True}, "untie_r", ""),
        ({"clamp_len": 5}, "clamp_len", ""),
        ({"reset_token": 1}, "reset_token", ""),
        ({"pos_embed": "none"}, "pos_embed", "learned"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options, name, limit):
    with raises_parameter(name, options[name], limit=limit):
        make(**options)


def test_the_network_refuses_what_is_about_distances():
    with raises_parameter("clamp_len", 4):
        AbsoluteTransformer(**SMALL, clamp_len=4)


def test_no_segment_is_longer_than_the_learned_positions(small_batches):
    lm, tokens = make(pos_embed="learned", context_len=4), small_batches(n=1)[0][0]
    assert lm.network.pos_table.shape == (4, 8)
    with pytest.raises(txl_tf.ParameterError) as caught:
        lm.network(tokens)
    assert (caught.value.name, caught.value.value) == ("tokens", 5)


@pytest.mark.parametrize(
    "arguments, name, limit",
    [
        ({"tokens": [1]}, "tokens", "n at least 2"),
        ({"tokens": [1.0, 2.0]}, "tokens", "integers"),
        ({"tokens": [[1, 2]]}, "tokens", "[n]"),
        ({"tokens": [1, 23]}, "tokens", "22"),
        ({"window": 0}, "window", "from 1"),
        ({"batch_size": 0}, "batch_size", "from 1"),
        ({"step": 5}, "step", "1 to 4"),
    ],
    ids=str,
)
def test_bad_arguments_of_the_sliding_window_are_named(arguments, name, limit):
    with raises_parameter(name, limit=limit):
        sliding_window_nll(make(n_layer=1), **{"tokens": [1, 2, 3], "window": 4, **arguments})
