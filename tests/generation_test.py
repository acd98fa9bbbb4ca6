"""Generated text is that of the uncached loop, and reading and writing in turns is one text."""

import numpy as np
import pytest
import tensorflow as tf

from txl_tf.models.generation import Session, generate, generate_tokens_static
from txl_tf.models.memory_reader import MemoryReader
from txl_tf.models.sampling import check_sampling, uniform_draws

BINS = {"cutoffs": [5, 12], "div_val": 2}


@pytest.fixture(scope="module")
def lm(small_lm):
    return small_lm(**BINS)


@pytest.fixture
def prompt():
    return np.random.default_rng(0).integers(0, 23, [3, 7])  # longer than the memory of 4


def uncached_greedy(lm, prompt, n):
    text, tokens, mems = [prompt], prompt, None
    for _ in range(n):
        log_probs, mems = lm.log_probs(tokens, mems)
        tokens = np.argmax(log_probs[:, -1:], -1)
        text.append(tokens)
    return np.concatenate(text, 1)


@pytest.mark.parametrize("options", [{"mem_len": 0}, {**BINS, "clamp_len": 3}], ids=str)
def test_greedy_text_is_that_of_the_uncached_loop(small_lm, prompt, options):
    lm = small_lm(**options)
    np.testing.assert_array_equal(generate(lm, prompt, 9, temperature=0), uncached_greedy(lm, prompt, 9))


def test_prompts_of_unequal_length_give_what_each_gives_alone(lm, prompt):
    seeds = [5, 6, 5]
    for options in ({"temperature": 0}, {"temperature": 1.3, "top_k": 9, "top_p": 0.9}):
        together = generate(lm, prompt, 6, lengths=[7, 1, 3], seed=seeds, **options).numpy()
        for row, length in enumerate([7, 1, 3]):
            alone = generate(lm, prompt[row : row + 1, :length], 6, seed=seeds[row], **options)
            np.testing.assert_array_equal(together[row, : length + 6], alone[0])
            assert not together[row, length + 6 :].any()


def test_seeds_decide_the_draws_and_the_number_of_tokens_does_not(lm, prompt):
    same_prompt = np.repeat(prompt[:1], 3, 0)
    long = generate(lm, same_prompt, 8, seed=[1, 2, 1]).numpy()
    np.testing.assert_array_equal(long[0], long[2])
    assert np.any(long[0] != long[1])
    np.testing.assert_array_equal(generate(lm, same_prompt, 5, seed=[1, 2, 1]), long[:, :12])
    np.testing.assert_array_equal(generate(lm, same_prompt, 0, seed=1), same_prompt)
    unseeded = generate(lm, same_prompt, 20).numpy()
    assert np.any(unseeded[0] != unseeded[1])


def test_a_row_ends_at_the_stop_token_and_the_others_go_on(lm, prompt):
    free = generate(lm, prompt, 8, seed=[1, 2, 3]).numpy()
    stop = int(free[0, 9])
    expected = free.copy()
    for row in expected[:, 7:]:
        if stop in row:
            row[np.argmax(row == stop) :] = stop
    np.testing.assert_array_equal(generate(lm, prompt, 8, seed=[1, 2, 3], stop_token=stop), expected)
    assert np.any(expected[:, -1] != stop)


SAMPLINGS = [{"temperature": 0}, {}, {"temperature": 1.3, "top_k": 9, "top_p": 0.9}, {"top_p": 0.5, "stop_token": 3}]


@pytest.mark.parametrize("options", [BINS, {"mem_len": 9, "same_length": True, "clamp_len": 3}], ids=str)
def test_with_static_shapes_the_text_is_the_same(small_lm, prompt, options):
    """Prompt and text of 7 and 20 tokens have room for 16 and 32."""
    dynamic, static = small_lm(**options), small_lm(**options)
    static.compile(static_shapes=True)
    for sampling in SAMPLINGS:
        how = {"seed": [1, 2, 3], "lengths": [7, 1, 3], **sampling}
        expected = generate(dynamic, prompt, 20, **how)
        np.testing.assert_array_equal(generate(static, prompt, 20, **how), expected)
    assert np.unique(expected).size > 5
    np.testing.assert_array_equal(generate(static, prompt, 0, seed=1), prompt)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_xla_writes_the_same_text(lm, prompt, sampling):
    how = {"seed": [1, 2, 3], "lengths": [7, 1, 3], **sampling}
    expected = generate(lm, prompt, 9, **how).numpy()
    for argument in ("seed", "lengths"):
        how.pop(argument)
    stop = how.pop("stop_token", -1)
    options, lengths = check_sampling(3, seed=[1, 2, 3], **how), tf.constant([7, 1, 3])
    ids = tf.constant(np.where(np.arange(7) < lengths[:, None], prompt, 0))
    uniform = uniform_draws(options.seeds, 0, 11)
    write = tf.function(generate_tokens_static, jit_compile=True, autograph=False)
    found = write(lm, ids, lengths, uniform, tf.constant(9), options, tf.constant(stop))
    assert found.shape == [3, 7 + 11]
    np.testing.assert_array_equal(found[:, : 7 + 9], expected)


def test_two_replicas_write_the_text_of_one(small_lm, prompt, two_replicas):
    with two_replicas.scope():
        lm = small_lm(**BINS, n_layer=1)
        lm.compile(static_shapes=True)
    expected = generate(small_lm(**BINS, n_layer=1), prompt, 9, seed=4)
    np.testing.assert_array_equal(generate(lm, prompt, 9, seed=4), expected)


def test_prompts_of_like_lengths_are_compiled_once(small_lm, prompt, monkeypatch):
    lm, traced = small_lm(), []
    lm.compile(static_shapes=True)
    read_prompt = MemoryReader.read_prompt
    monkeypatch.setattr(MemoryReader, "read_prompt", lambda *args: traced.append(args[1].shape) or read_prompt(*args))
    long = np.tile(prompt, 3)
    for n, new_tokens in [(1, 3), (7, 16), (16, 1), (17, 17), (21, 32)]:
        assert generate(lm, long[:, :n], new_tokens).shape == [3, n + new_tokens]
    assert traced == [[3, 16], [3, 32]]


def test_a_session_reads_and_writes_in_one_memory(lm, prompt):
    prompt, answer = prompt[:1], prompt[1:2]
    session = Session(lm)
    nll = session.read(prompt)
    assert np.isnan(nll[0, 0])
    expected, _ = lm.score(prompt[:, :-1], prompt[:, 1:])
    np.testing.assert_allclose(nll[:, 1:], expected, rtol=1e-5)

    written = np.concatenate([session.write(n, seed=5)[0] for n in (1, 3, 2)], 1)
    np.testing.assert_array_equal(written, generate(lm, prompt, 6, seed=5)[:, 7:])

    answer_nll = session.read(answer)
    _, mems = lm.log_probs(prompt)
    for token in written[0]:
        log_probs, mems = lm.log_probs([[token]], mems)
    expected, _ = lm.score(answer[:, :-1], answer[:, 1:], mems)
    np.testing.assert_allclose(answer_nll[:, 1:], expected, rtol=1e-5)
    np.testing.assert_allclose(answer_nll[0, 0], -log_probs[0, -1, answer[0, 0]], rtol=1e-5)


def test_a_new_memory_is_copied_before_it_is_written_to(lm, prompt):
    """Zeros that are constants of the graph would keep what an earlier call wrote into them."""
    first = generate(lm, prompt[:, :1], 5, temperature=0)
    generate(lm, prompt[:, 1:2], 5, temperature=0)
    np.testing.assert_array_equal(generate(lm, prompt[:, :1], 5, temperature=0), first)


def test_bad_arguments_are_named(lm, prompt):
    for arguments, message in [
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be 0 or more, got nan"),
        ({"top_k": 0}, "top_k must be an integer from 1"),
        ({"top_p": 0}, r"top_p must lie in \(0, 1\], got 0"),
        ({"top_p": 1.1}, r"top_p must lie in \(0, 1\], got 1.1"),
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer from 0 .*got -1"),
        ({"prompt": np.zeros([1, 0], int)}, r"prompt must be integers \[batch, n\], n at least 1"),
        ({"prompt": [[1.5]]}, "prompt must be integers"),
        ({"prompt": [[1, 23]]}, "prompt must hold ids between 0 and n_token - 1 = 22, found 23"),
        ({"lengths": [1, 0, 2]}, "lengths must be .*between 1 and 7"),
        ({"stop_token": 23}, "stop_token must be an integer from 0 to 22, got 23"),
        ({"seed": [1, 2]}, "seed must be an integer of 32 bits, or one for each of the 3 rows"),
        ({"seed": 0.5}, "seed must be an integer"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(lm, **{"prompt": prompt, "max_new_tokens": 1, **arguments})
    session = Session(lm)
    with pytest.raises(ValueError, match="read a text first"):
        session.write(1)
    with pytest.raises(ValueError, match="found 23"):
        session.read([[23]])
