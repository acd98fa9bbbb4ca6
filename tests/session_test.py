"""Reading and writing in turns is one text, which ends where it is told to."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, Subwords, eagerly, raises_parameter, word_vocab

import txl_tf
from txl_tf.language.generation import generate
from txl_tf.language.session import Session

pytestmark = pytest.mark.ci


def lively(lm):
    """A small model whose text hangs on its prompt: attention and layer norms of small weights hide it."""
    for variable in lm.trainable_variables:
        if variable.path.endswith("gamma"):
            variable.assign_add(tf.ones_like(variable))
        elif "rel_attn" in variable.path and "kernel" in variable.path:
            variable.assign(6 * variable)
    return lm


@pytest.fixture(scope="module")
def lm(small_lm):
    return lively(small_lm(cutoffs=[5, 12], div_val=2))


@pytest.fixture(scope="module")
def prompt():
    return np.random.default_rng(0).integers(0, 23, [3, 7])  # longer than the memory of 4


@pytest.fixture(scope="module")
def new(lm):
    """A session to be copied, which has read nothing: the copies share its graphs."""
    return Session(lm)


@pytest.fixture(scope="module")
def after_prompt(new, prompt):
    """The same, which has read the first row of the prompt."""
    session = new.copy()
    session.read(prompt[:1])
    return session


def test_a_session_reads_and_writes_in_one_memory(lm, prompt, new):
    prompt, answer = prompt[:1], prompt[1:2]
    session = new.copy()
    nll = session.read(prompt)
    assert np.isnan(nll[0, 0])
    with eagerly():
        expected, _ = lm.score(prompt[:, :-1], prompt[:, 1:])
    np.testing.assert_allclose(nll[:, 1:], expected, rtol=1e-5)

    written = np.concatenate([session.write(n, seed=5)[0] for n in (1, 3, 2)], 1)
    np.testing.assert_array_equal(written, generate(lm, prompt, 6, seed=5)[:, 7:])

    answer_nll = session.read(answer)
    with eagerly():
        _, mems = lm.log_probs(prompt)
        for token in written[0]:
            log_probs, mems = lm.log_probs([[token]], mems)
        expected, _ = lm.score(answer[:, :-1], answer[:, 1:], mems)
    np.testing.assert_allclose(answer_nll[:, 1:], expected, rtol=1e-5)
    np.testing.assert_allclose(answer_nll[0, 0], -log_probs[0, -1, answer[0, 0]], rtol=1e-5)


OPTIONS = {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.8, "repetition_window": 6}


def read_and_written_in_pieces(session, prompt, seed):
    session.read(prompt)  # at once, as `generate` does: in pieces, a token sees fewer of the zeros before the text
    return np.concatenate([session.write(n, **OPTIONS, seed=seed)[0] for n in (1, 5, 4)], 1)


def test_a_model_makes_its_session(lm, prompt):
    session = lm.session(batch_size=3)
    session.read(prompt)
    for row, written in enumerate(session.write(4, seed=5)[0]):  # row by row, `generate` needs no graph of its own
        np.testing.assert_array_equal(written, generate(lm, prompt[row : row + 1], 4, seed=5)[0, 7:])


def test_all_options_are_those_of_generate(lm, prompt, new):
    for row in range(3):
        written = read_and_written_in_pieces(new.copy(), prompt[row : row + 1], row)
        np.testing.assert_array_equal(written, generate(lm, prompt[row : row + 1], 10, **OPTIONS, seed=row)[:, 7:])


@pytest.mark.slow
def test_all_options_of_three_rows_are_those_of_generate(lm, prompt):
    written = read_and_written_in_pieces(Session(lm, batch_size=3), prompt, [1, 2, 3])
    np.testing.assert_array_equal(written, generate(lm, prompt, 10, **OPTIONS, seed=[1, 2, 3])[:, 7:])


def test_numbers_may_be_numpy_s(lm, prompt, after_prompt):
    written = [after_prompt.copy().write(number, seed=1)[0] for number in (2, np.int64(2))]
    np.testing.assert_array_equal(*written)


def test_the_penalty_is_for_what_was_read_and_written_in_turns(lm, prompt, after_prompt):
    """After an answer, against log-probabilities and a list of the last tokens."""
    session, options = after_prompt.copy(), {"temperature": 0, "repetition_penalty": 5.0, "repetition_window": 9}
    text = prompt[0].tolist()
    text += session.write(4, **options)[0][0].tolist()
    session.read(prompt[1:2, :3])
    text += prompt[1, :3].tolist()
    with eagerly():
        _, mems = lm.log_probs(prompt[:1])
        for token in text[7:11]:
            _, mems = lm.log_probs([[token]], mems)
        log_probs = np.array(lm.log_probs(prompt[1:2, :3], mems)[0][0, -1])
    log_probs[list(set(text[-9:]))] *= 5
    assert session.write(1, **options)[0][0, 0] == log_probs.argmax()


@pytest.mark.slow
def test_stop_strings_may_begin_in_one_call_and_end_in_the_next(lm, prompt, after_prompt):
    vocab, stops, ends = Subwords(), ["ab", "bba", "ser", "\n\n"], set()
    options = {"temperature": 1.2, "vocab": vocab, "stop_strings": stops}
    for seed in range(100):
        (expected,), (length,) = generate(lm, prompt[:1], 20, seed=seed, with_lengths=True, **options)
        for pieces in ([1] * 20, [4] * 5, [7, 13], [20]):
            session, written = after_prompt.copy(), []
            for n in pieces:
                tokens, nll = session.write(n, seed=seed, with_nll=True, **options)
                assert nll.shape == tokens.shape
                written += tokens[0].tolist()
                if session.ended:
                    break
            np.testing.assert_array_equal(written, expected[7:length])
            text = vocab.bytes_of(written)
            assert session.ended == any(stop.encode() in text for stop in stops)
            if session.ended:
                text = text[: len(text) - session.excess]
                assert text.endswith(tuple(stop.encode() for stop in stops))
                assert not any(stop.encode() in text[:-1] for stop in stops)
        ends.add((len(written), session.excess))
        if seed > 10 and len(ends) > 3 and any(excess for _, excess in ends):
            break
    else:
        pytest.fail(f"texts end in too few ways: {ends}")


@pytest.mark.slow
def test_writing_goes_on_behind_a_stop_string_as_if_it_had_not_stopped(lm, prompt, after_prompt):
    vocab, session = word_vocab(), after_prompt.copy()
    free = generate(lm, prompt[:1], 12, seed=3)[0, 7:].numpy().tolist()
    first, _ = session.write(12, seed=3, stop_strings=[vocab.symbols[free[4]]], vocab=vocab)
    assert session.ended and first[0].tolist() == free[: free.index(free[4]) + 1]
    rest, _ = session.write(12 - first.shape[1], seed=3)
    assert not session.ended and first[0].tolist() + rest[0].tolist() == free


def test_what_somebody_answers_is_between(prompt, after_prompt, eager):
    """The first word of a stop string comes before an answer, the second after it."""
    vocab, ended = word_vocab(), []
    for answers in (False, True):
        session = after_prompt.copy()
        first = int(session.write(1, seed=3)[0][0, 0])
        if answers:
            session.read(prompt[1:2])
        second = int(session.copy().write(1, seed=3)[0][0, 0])
        stop = f"{vocab.symbols[first]} {vocab.symbols[second]}"
        session.write(1, seed=3, stop_strings=[stop], vocab=vocab)
        ended.append(session.ended)
    assert ended == [True, False]


@pytest.mark.slow
def test_copies_go_on_by_themselves(lm, prompt, after_prompt):
    window = Session(lively(txl_tf.TransformerLM(**{**SMALL, "n_layer": 1}, context_len=9)))
    window.read(prompt[:1])
    for session in (after_prompt.copy(), window):
        whole = [session.copy().write(8, seed=seed)[0] for seed in (1, 2, 3)]
        if session is not window:
            expected = [generate(lm, prompt[:1], 8, seed=seed)[:, 7:] for seed in (1, 2, 3)]
            np.testing.assert_array_equal(whole, expected)
        first, second = session.copy(), session.copy()
        written = [[], [], []]
        for _ in range(4):  # in turns
            for i, each in enumerate((session, first, second)):
                written[i].append(each.write(2, seed=i + 1)[0])
        for pieces, expected in zip(written, whole, strict=True):
            np.testing.assert_array_equal(np.concatenate(pieces, 1), expected)


def test_copy_and_deepcopy_continue_independently(prompt, new):
    session = new.copy()
    session.read(prompt[:1])
    expected = session.copy().read(prompt[1:2])
    for duplicate in (copy.copy(session), copy.deepcopy({"session": session})["session"]):
        duplicate.write(3, seed=9)
        assert duplicate.lm is session.lm
    np.testing.assert_array_equal(session.read(prompt[1:2]), expected)
    with raises_parameter("session", session):
        pickle.dumps(session)


def test_bad_arguments_are_named(lm, prompt, new, after_prompt):
    session = new.copy()
    with raises_parameter("write"):
        session.write(1)
    with raises_parameter("tokens", 23):
        session.read([[23]])
    session = after_prompt.copy()
    with raises_parameter("repetition_window", 3):
        session.write(1, repetition_window=3)
    with raises_parameter("vocab", "abc"):
        session.write(1, vocab="abc")
    with raises_parameter("stop_strings", "w99"):
        session.write(1, stop_strings=["w99"], vocab=word_vocab())
    for wrong in (4, 0, "", "w1"):
        with raises_parameter("stop_strings", wrong):
            session.write(1, stop_strings=wrong, vocab=word_vocab())
    rows = Session(lm, batch_size=3)
    rows.read(prompt)
    with raises_parameter("stop_strings"):
        rows.write(1, stop_at_newline=True, vocab=word_vocab())
