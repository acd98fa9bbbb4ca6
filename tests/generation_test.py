"""Generated text is that of the uncached loop, and ends where it is told to."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import Subwords, raises_parameter, word_vocab

from txl_tf.language import generation
from txl_tf.language.generation import Texts, generate, generate_tokens
from txl_tf.language.sampling import (
    check_sampling,
    no_history,
    precompute_softmax,
    remember_segment,
    sample,
    sampling_of_sequences,
    uniform_draws,
)
from txl_tf.language.stopping import check_stops
from txl_tf.transformer_xl.decoding_cache import RingCache

BINS = {"cutoffs": [5, 12], "div_val": 2}
LM = {**BINS, "n_layer": 1, "clamp_len": 3}


@pytest.fixture(scope="module")
def make(small_lm):
    """Makes a small model whose text hangs on its prompt: attention and layer norms of small weights hide it."""

    def make(**options):
        lm = small_lm(**options)
        for variable in lm.trainable_variables:
            if variable.path.endswith("gamma"):
                variable.assign_add(tf.ones_like(variable))
            elif "rel_attn" in variable.path and "kernel" in variable.path:
                variable.assign(6 * variable)
        return lm

    return make


@pytest.fixture(scope="module")
def lm(make):
    """For batches of 3, so that all tests share a graph."""
    return make(**LM)


@pytest.fixture
def prompt():
    return np.random.default_rng(0).integers(0, 23, [3, 7])  # longer than the memory of 4


def uncached(lm, prompt, n, choose):
    """The plain loop: `choose(i, text, hidden)` picks the next token of every row, int `[batch]`."""
    text, tokens, mems = prompt, prompt, None
    for i in range(n):
        hidden, mems = lm.network(tokens, mems)
        tokens = np.asarray(choose(i, text, hidden[:, -1]))[:, None]
        text = np.concatenate([text, tokens], 1)
    return text


def uncached_greedy(lm, prompt, n, penalty=1.0, window=64):
    def most_likely(_, text, hidden):
        log_probs = np.array(lm.softmax(hidden[:, None], embedding=lm.network.embedding)[:, 0])
        for row, words in zip(log_probs, text, strict=True):
            row[list(set(words[-window:]))] *= np.float32(penalty)
        return log_probs.argmax(-1)

    return uncached(lm, prompt, n, most_likely)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"mem_len": 0}, {**BINS, "clamp_len": 3}], ids=str)
def test_greedy_text_is_that_of_the_uncached_loop(make, prompt, options):
    lm = make(**options)
    np.testing.assert_array_equal(generate(lm, prompt, 9, temperature=0), uncached_greedy(lm, prompt, 9))


@pytest.mark.slow
def test_penalised_text_is_that_of_the_uncached_loop(lm):
    """The window of 4 reaches from the text into the prompt, and then leaves it; 1 is the last token alone.

    Of many prompts, these are the three on which, and on whose penalties, the text hangs most.
    """
    prompts, cases = np.random.default_rng(0).integers(0, 23, [256, 7]), [(3.0, 64), (3.0, 4), (3.0, 1), (0.3, 3)]
    plain, reverse = (uncached_greedy(lm, given, 9) for given in (prompts, prompts[:, ::-1]))
    penalised = [uncached_greedy(lm, prompts, 9, *case) for case in cases]
    hangs = np.array([(text[:, 7:] != plain[:, 7:]).any(1) for text in (reverse, *penalised)])
    rows = np.argsort(-hangs.sum(0), kind="stable")[:3]
    assert hangs[:, rows].any(1).all()
    np.testing.assert_array_equal(generate(lm, prompts[rows], 9, temperature=0), plain[rows])
    for (penalty, window), expected in zip(cases, penalised, strict=True):
        options = {"temperature": 0, "repetition_penalty": penalty, "repetition_window": window}
        found = generate(lm, prompts[rows], 9, **options)
        np.testing.assert_array_equal(found, expected[rows], err_msg=f"{penalty} {window}")


def test_text_with_all_options_is_that_of_the_uncached_loop(lm, prompt):
    options = {"temperature": 1.4, "top_k": 15, "top_p": 0.95, "min_p": 0.03, "seed": [1, 2, 3]}
    options |= {"repetition_penalty": 1.3, "repetition_window": 5}
    sampling, bins = check_sampling(3, **options), precompute_softmax(lm)

    def drawn(i, text, hidden):
        seen = remember_segment(no_history(3, 23), tf.constant(text, tf.int32), tf.fill([3], text.shape[1]))
        return sample(bins, hidden, uniform_draws(sampling.seeds, i, 1)[0], sampling, seen)

    np.testing.assert_array_equal(generate(lm, prompt, 12, **options), uncached(lm, prompt, 12, drawn))


def test_prompts_of_unequal_length_give_what_each_gives_alone(lm, prompt):
    seeds = [5, 6, 5]
    for options in ({"temperature": 0}, {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 2.0, "min_p": 0.02}):
        together = generate(lm, prompt, 6, lengths=[7, 1, 3], seed=seeds, **options).numpy()
        for row, length in enumerate([7, 1, 3]):
            of_row = np.repeat(prompt[row : row + 1, :length], 3, 0)
            alone = generate(lm, of_row, 6, seed=seeds[row], **options)
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


@pytest.mark.ci
def test_numbers_may_be_numpy_s(lm, prompt):
    numbers = {"num_return_sequences": 2, "seed": 3, "top_k": 5, "stop_token": 4, "segment": 4}
    of_numpy = {name: np.int64(number) for name, number in numbers.items()}
    expected = generate(lm, prompt, 6, **numbers)
    np.testing.assert_array_equal(generate(lm, prompt, np.int64(6), **of_numpy), expected)
    np.testing.assert_array_equal(generate(lm, prompt, np.uint8(6), **of_numpy), expected)
    expected = generate(lm, prompt, 6, beam_size=2)
    np.testing.assert_array_equal(generate(lm, prompt, np.int64(6), beam_size=np.int64(2)), expected)


def test_a_row_ends_at_the_stop_token_and_the_others_go_on(lm, prompt):
    free = generate(lm, prompt, 8, seed=[1, 2, 3]).numpy()
    stop = next(int(token) for token in free[0, 8:] if not (free[:, 7:] == token).any(1).all())
    expected = free.copy()
    for row in expected[:, 7:]:
        if stop in row:
            row[np.argmax(row == stop) :] = stop
    np.testing.assert_array_equal(generate(lm, prompt, 8, seed=[1, 2, 3], stop_token=stop), expected)
    assert np.any(expected[:, -1] != stop)


def end_of(text, stops):
    """Where the first stop string of `stops` ends in bytes, by search; `None` without."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    return min(ends, default=None)


def lengths_until(vocab, rows, start, stops):
    """Tokens of each row up to the one that completes a stop string behind `start`."""
    data, lengths = [piece or b"\xff" for piece in vocab.token_bytes], []  # a symbol that is no text ends one as well
    for row in rows:
        pieces = [data[i] for i in row[start:]]
        end = end_of(b"".join(pieces), stops)
        ends = np.cumsum([*map(len, pieces)])
        lengths.append(len(row) if end is None else start + 1 + int(np.searchsorted(ends, end)))
    return lengths


STOPS = [["a"], ["\n\n"], ["er", "\n a"], ["é", "日", "r:"], ["ab", "bab", "b"], ["aaaaaaaaaaaa"]]


def test_rows_end_with_the_token_that_completes_a_stop_string(lm, prompt):
    vocab, options = Subwords(), {"temperature": 1.5, "with_lengths": True}

    def written(**stopping):
        """12 rows, in batches of 3."""
        found = [generate(lm, prompt, 20, seed=np.arange(i, i + 3), **options, **stopping) for i in range(0, 12, 3)]
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

    (free, _), differing = written(), 0
    for stops in STOPS:
        lengths = lengths_until(vocab, free, 7, [stop.encode() for stop in stops])
        tokens, found = written(stop_strings=stops, vocab=vocab)
        expected = np.where(np.arange(27) < np.array(lengths)[:, None], free, 0)
        np.testing.assert_array_equal(tokens, expected, err_msg=str(stops))
        np.testing.assert_array_equal(found, lengths, err_msg=str(stops))
        differing += len(set(lengths)) > 3
    assert differing >= 3


SAMPLINGS = [
    {"temperature": 0},
    {},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.9},
    {"top_p": 0.5, "stop_token": 3},
    {"min_p": 0.05, "repetition_penalty": 1.7, "repetition_window": 5, "num_return_sequences": 2},
    {"temperature": 1.5, "stop_strings": ["w3 w2", "w11"], "stop_at_newline": True, "vocab": word_vocab()},
]


@pytest.mark.slow
def test_with_static_shapes_and_stop_strings_the_text_is_the_same(make, lm, prompt):
    static, how = make(**LM), {"seed": [1, 2, 3], "lengths": [7, 1, 3], **SAMPLINGS[-1]}
    static.compile(static_shapes=True)
    expected, lengths = generate(lm, prompt, 20, **how, with_lengths=True)
    found = generate(static, prompt, 20, **how, with_lengths=True)
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(found[1], lengths)
    np.testing.assert_array_equal(generate(static, prompt, 0, **{**how, "lengths": None}), prompt)


@pytest.mark.slow
@pytest.mark.parametrize("options", [BINS, {"mem_len": 9, "same_length": True, "clamp_len": 3}], ids=str)
def test_with_static_shapes_the_text_is_the_same(make, prompt, options):
    """Prompt and text of 7 and 20 tokens have room for 16 and 32."""
    dynamic, static = make(**options), make(**options)
    static.compile(static_shapes=True)
    for sampling in SAMPLINGS:
        how = {"seed": [1, 2, 3], "lengths": [7, 1, 3], **sampling}
        expected = generate(dynamic, prompt, 20, **how)
        np.testing.assert_array_equal(generate(static, prompt, 20, **how), expected)
    assert np.unique(expected).size > 5
    np.testing.assert_array_equal(generate(static, prompt, 0, seed=1), prompt)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: str({**sampling, "vocab": None}))
def test_xla_writes_the_same_text(lm, prompt, sampling):
    how = {"lengths": [7, 1, 3], **sampling}
    expected, expected_lengths = generate(lm, prompt, 9, seed=[1, 2, 3], with_lengths=True, **how)
    lengths, number = tf.constant(how.pop("lengths")), how.pop("num_return_sequences", 1)
    stopping = {
        name: how.pop(name) for name in ("stop_token", "stop_strings", "stop_at_newline", "vocab") if name in how
    }
    options = sampling_of_sequences(check_sampling(3, seed=[1, 2, 3], **how), number)
    ids = tf.constant(np.where(np.arange(7) < lengths[:, None], prompt, 0), tf.int32)
    uniform, limits = uniform_draws(options.seeds, 0, 11), tf.fill([3 * number], 9)
    write = tf.function(generate_tokens, jit_compile=True, autograph=False)
    found = write(lm, ids, lengths, uniform, limits, options, check_stops(23, **stopping), number, True)
    assert found.tokens.shape == [3 * number, 7 + 11]
    np.testing.assert_array_equal(found.tokens[:, : 7 + 9], expected)
    np.testing.assert_array_equal(found.lengths, expected_lengths)


@pytest.mark.slow
def test_two_replicas_write_the_text_of_one(make, lm, prompt, two_replicas):
    with two_replicas.scope():
        other = make(**LM)
        other.compile(static_shapes=True)
    np.testing.assert_array_equal(generate(other, prompt, 9, seed=4), generate(lm, prompt, 9, seed=4))


@pytest.fixture
def traced(monkeypatch):
    """The shapes of the prompts, and of the stop strings, that graphs are made for; they write zeros."""
    shapes = []

    def write(lm, prompt, lengths, uniform, limits, sampling, stops, number, static_shapes, **options):
        shapes.append((prompt.shape.as_list(), stops.strings.shape.as_list()))
        assert static_shapes == uniform.shape.is_fully_defined()
        room = tf.shape(uniform)[0]
        return Texts(tf.pad(prompt, [[0, 0], [0, room]]), lengths + room, lengths)

    monkeypatch.setattr(generation, "generate_tokens", write)
    return shapes


def test_prompts_of_like_lengths_are_compiled_once(small_lm, prompt, traced):
    lm = small_lm(n_layer=1)
    lm.compile(static_shapes=True)
    long = np.tile(prompt, 3)
    for n, new_tokens in [(1, 3), (7, 16), (16, 1), (17, 17), (21, 32)]:
        assert generate(lm, long[:, :n], new_tokens).shape == [3, n + new_tokens]
    assert [prompt for prompt, _ in traced] == [[3, 16], [3, 32]]


def test_values_of_options_do_not_trace_anew(small_lm, prompt, traced):
    lm, vocab = small_lm(n_layer=1), word_vocab()
    stops = [[], ["w1"], ["w1 w2\n", "w5"], ["w3", "w4", "w5 w6 w7 w8"]]
    for i, stop_strings in enumerate(stops, 1):
        options = {"temperature": 0.5 * i, "min_p": 0.1 * i, "repetition_penalty": 1.0 + i, "repetition_window": 1 + i}
        options |= {"top_k": i or None, "seed": i, "stop_token": i, "stop_at_newline": i == 3}
        assert generate(lm, prompt, 3 + i, stop_strings=stop_strings, vocab=vocab, **options).shape == [3, 10 + i]
    assert traced == [([3, None], [1, None, None])]
    lm.compile(static_shapes=True)
    for stop_strings in stops:
        generate(lm, prompt, 3, stop_strings=stop_strings, vocab=vocab)
    assert traced[1:] == [([3, 16], [1, 0, 0]), ([3, 16], [1, 4, 16])]  # without stop strings, and with room for some


@pytest.mark.slow
def test_several_sequences_of_a_prompt_stand_next_to_each_other(lm, prompt, monkeypatch):
    """Each is what a call of its own would write, with the seed that is derived for it; a prompt is read once."""
    read, read_prompt = [], RingCache.read_prompt
    monkeypatch.setattr(RingCache, "read_prompt", lambda *args: read.append(args[1].shape[0]) or read_prompt(*args))
    for options in ({"lengths": [7, 1, 3]}, {"temperature": 0.8, "repetition_penalty": 1.5, "stop_token": 2}):
        seed = np.array([4, 5, -6])
        many, lengths = generate(lm, prompt, 8, seed=seed, num_return_sequences=3, with_lengths=True, **options)
        assert many.shape == [9, 15] and read[-1] == 3
        seeds = sampling_of_sequences(check_sampling(3, seed=seed), 3).seeds.numpy().reshape(3, 3)
        for k in range(3):
            alone, its_lengths = generate(lm, prompt, 8, seed=seeds[:, k], with_lengths=True, **options)
            np.testing.assert_array_equal(many[k::3], alone)
            np.testing.assert_array_equal(lengths[k::3], its_lengths)
        np.testing.assert_array_equal(many[::3], generate(lm, prompt, 8, seed=seed, **options))
        assert len(np.unique(many, axis=0)) > (3 if "stop_token" in options else 8)


def test_stop_strings_lie_in_new_text_alone(lm, prompt):
    """The prompt ends with the first word of a stop string, and the text begins with the second."""
    vocab = word_vocab()
    free = generate(lm, prompt, 6, temperature=0).numpy()
    pairs = [{vocab.decode(ids[i : i + 2]) for i in range(7, 12)} for ids in free]
    apart = (i for i in range(3) if vocab.decode(free[i, 6:8]) not in pairs[i])
    row = next(i for i in apart if 0 not in free[i, 6:9])  # and no newline
    across, within = vocab.decode(free[row, 6:8]), vocab.decode(free[row, 7:9])
    options = {"temperature": 0, "vocab": vocab, "with_lengths": True}
    assert generate(lm, prompt, 6, stop_strings=[across], **options)[1][row] == 13
    assert generate(lm, prompt, 6, stop_strings=[within], **options)[1][row] == 9


def test_a_newline_ends_the_line(lm, prompt):
    vocab, end = word_vocab(), 0
    seed = next(seed for seed in range(100) if np.any(generate(lm, prompt, 20, seed=seed)[:, 7:-1] == end))
    expected = generate(lm, prompt, 20, seed=seed, stop_token=vocab.ids["<eos>"])
    assert np.any(expected[:, -1] == end)
    for options in ({"stop_at_newline": True}, {"stop_strings": ["\n"]}, {"stop_strings": ["<eos>"]}):
        np.testing.assert_array_equal(generate(lm, prompt, 20, seed=seed, vocab=vocab, **options), expected)


def test_a_new_memory_is_copied_before_it_is_written_to(lm, prompt):
    """Zeros that are constants of the graph would keep what an earlier call wrote into them."""
    first = generate(lm, prompt[:, :1], 9, temperature=0)
    assert np.any(generate(lm, prompt[:, 1:2], 9, temperature=0)[:, 1:] != first[:, 1:])
    np.testing.assert_array_equal(generate(lm, prompt[:, :1], 9, temperature=0), first)


def test_bad_arguments_are_named(lm, prompt):
    for arguments, name, limit in [
        ({"temperature": -0.1}, "temperature", ""),
        ({"temperature": float("nan")}, "temperature", ""),
        ({"top_k": 0}, "top_k", "from 1"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"top_p": 1.1}, "top_p", "(0, 1]"),
        ({"max_new_tokens": -1}, "max_new_tokens", "from 0"),
        ({"prompt": np.zeros([1, 0], int)}, "prompt", "n at least 1"),
        ({"prompt": [[1.5]]}, "prompt", ""),
        ({"prompt": [[1, 23]]}, "prompt", "22"),
        ({"lengths": [1, 0, 2]}, "lengths", "1 and 7"),
        ({"stop_token": 23}, "stop_token", "0 to 22"),
        ({"seed": [1, 2]}, "seed", "3 rows"),
        ({"seed": 0.5}, "seed", ""),
        ({"min_p": 1.0}, "min_p", "[0, 1)"),
        ({"repetition_penalty": -1}, "repetition_penalty", ""),
        ({"num_return_sequences": 0}, "num_return_sequences", "from 1"),
        ({"stop_strings": ["w1"]}, "vocab", "['w1']"),
        ({"stop_at_newline": True}, "vocab", r"['\n']"),
        ({"stop_strings": "w1", "vocab": word_vocab()}, "stop_strings", ""),
        ({"stop_strings": ["w1", "w99"], "vocab": word_vocab()}, "stop_strings", ""),
    ]:
        with raises_parameter(name, limit=limit):
            generate(lm, **{"prompt": prompt, "max_new_tokens": 1, **arguments})
