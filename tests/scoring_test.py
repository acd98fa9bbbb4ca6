"""Scores of lines: those of `lm.score`, whatever else is in a batch, a block or a line."""

import copy
import math
import pickle
import time

import numpy as np
import pytest
from helpers import SMALL, eagerly, mentions, outside_data, raises_naming, raises_parameter, randomise, word_vocab

import txl_tf
from txl_tf.config import ScoringConfig
from txl_tf.data import lines as data_lines
from txl_tf.data.subwords import train_on_lines
from txl_tf.data.vocabulary import Vocab, newline_ids
from txl_tf.runs import scoring
from txl_tf.runs.families.pipeline import LanguagePipeline
from txl_tf.runs.scoring import Scorer, score_lines

HOSTILE = [
    "", " ", "w1\x85w2", "w3\u2028w4 w5", "w1\r", "\r", "\x00", "naïve 日本 🙂", "\ufeffw1", "w1\tw2", "\x1b[2J",
    "<eos> w2", "w7 " * 40, "unheard-of w3", "", "w2 w2", "e\u0301", "\x0bw1\x0c", "w9",
]  # fmt: skip


EAGER = pytest.mark.usefixtures("eager")  # the others show that graphs score the same


def make_vocab(level):
    if level == "word":
        return word_vocab()
    vocab = Vocab(level=level, **({"special": ["\n"]} if level == "char" else {}))
    vocab.count(HOSTILE)
    vocab.build()
    return vocab


def make_lm(vocab, family=txl_tf.TransformerXLLM, **options):
    lm = family(**{**SMALL, "n_token": len(vocab), "mem_len": 4, **options})
    randomise(lm)
    return lm


def by_hand(lm, ids, context=()):
    """The nll of every id after the context, by `lm.score` alone."""
    text = np.array([*context, *ids])[None]
    with eagerly():
        return lm.score(text[:, :-1], text[:, 1:])[0][0].numpy()[len(context) - 1 :]


@pytest.fixture(scope="module")
def words():
    vocab = make_vocab("word")
    return make_lm(vocab), vocab


@pytest.fixture(
    scope="module", params=["word", *(pytest.param(level, marks=pytest.mark.slow) for level in ("char", "byte"))]
)
def model(request):
    vocab = make_vocab(request.param)
    return make_lm(vocab), vocab


def test_copies_of_a_pipeline_have_no_graphs():
    vocab = make_vocab("word")
    pipeline = LanguagePipeline(None, vocab, checkpoint="ckpt-1")
    assert pipeline._scorer
    for other in (copy.copy(pipeline), copy.deepcopy(pipeline), pickle.loads(pickle.dumps(pipeline))):
        assert vars(other).keys() == {"model", "vocabs", "checkpoint"}
        assert other.vocabs[0].symbols == vocab.symbols and other.checkpoint == "ckpt-1"


def test_every_line_gets_what_score_gives_for_it_alone(model):
    lm, vocab = model
    scores = list(score_lines(lm, vocab, HOSTILE))
    assert [score.text for score in scores] == HOSTILE
    for line, score in zip(HOSTILE, scores, strict=True):
        ids = vocab.encode(f"{line}\n")
        nll = by_hand(lm, ids, newline_ids(vocab))
        np.testing.assert_array_equal(score.ids, ids)
        np.testing.assert_allclose(score.token_nll, nll, rtol=1e-5, atol=1e-5)
        size = len(f"{line}\n".encode())
        assert (score.tokens, score.bytes) == (len(ids), size)
        assert score.nll == pytest.approx(nll.sum(), rel=1e-5)
        assert score.ppl == pytest.approx(math.exp(nll.mean()), rel=1e-4)
        assert score.bpb == pytest.approx(nll.sum() / math.log(2) / size, rel=1e-5)


def test_a_score_does_not_depend_on_the_lines_beside_it(words):
    scorer = Scorer(*words)

    def nll_of(lines, batch_tokens):
        scorer.batch_tokens = batch_tokens
        return [score.nll for scores in scorer.score([lines]) for score in scores]

    alone = nll_of(HOSTILE, 1)
    for batch_tokens in (7, 60, 2048):
        np.testing.assert_allclose(nll_of(HOSTILE, batch_tokens), alone, rtol=1e-5)
    beside = [*HOSTILE[::-1], *["w8 " * 60] * 30]
    np.testing.assert_allclose(nll_of(beside, 10_000)[: len(HOSTILE)], alone[::-1], rtol=1e-5)


@EAGER
def test_the_model_that_has_no_memory_reads_lines_too():
    vocab = word_vocab()
    lm = make_lm(vocab, txl_tf.TransformerLM, mem_len=0, context_len=10)
    lines = ["w1 w2", "", " ".join(f"w{i}" for i in range(20))]
    scores = list(score_lines(lm, vocab, lines))
    for line, score in zip(lines, scores, strict=True):
        text = [0, *vocab.encode(f"{line}\n")]
        pieces = [by_hand(lm, text[i + 1 : i + 11], text[i : i + 1]) for i in range(0, len(text) - 1, 10)]
        np.testing.assert_allclose(score.token_nll, np.concatenate(pieces), rtol=1e-5, atol=1e-5)


@EAGER
@pytest.mark.parametrize(
    "options",
    [pytest.param({"mem_len": 0}, marks=pytest.mark.slow), {"mem_len": 9, "same_length": True, "clamp_len": 5}],
    ids=str,
)
def test_a_long_line_is_read_in_segments_with_memory(options):
    vocab = word_vocab()
    lm = make_lm(vocab, **options)
    rng = np.random.default_rng(0)
    lines = [" ".join(f"w{i}" for i in rng.integers(0, 21, n)) for n in (3, 17, 6, 5, 23, 7)]
    scores = list(score_lines(lm, vocab, lines, segment=6, batch_tokens=12))
    for line, score in zip(lines, scores, strict=True):
        text, mems, nll = np.array([[0, *vocab.encode(f"{line}\n")]]), None, []
        for i in range(0, text.size - 1, 6):
            found, mems = lm.score(text[:, i : i + 6][:, : text.size - 1 - i], text[:, i + 1 : i + 7], mems)
            nll += found[0].numpy().tolist()
        np.testing.assert_allclose(score.token_nll, nll, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("segment, block", [pytest.param(32, 3, marks=pytest.mark.slow), (512, 1)])
def test_with_carried_memory_the_lines_are_one_text(model, segment, block, monkeypatch):
    lm, vocab = model
    monkeypatch.setattr(data_lines, "BLOCK_LINES", block)
    scores = list(score_lines(lm, vocab, HOSTILE, carry_memory=True, segment=segment))
    assert [score.text for score in scores] == HOSTILE
    ids = vocab.encode("".join(f"{line}\n" for line in HOSTILE))
    text, mems, nll = np.concatenate([newline_ids(vocab), ids])[None], None, []
    for i in range(0, ids.size, segment):
        labels = text[:, i + 1 : i + 1 + segment]
        found, mems = lm.score(text[:, i : i + labels.size], labels, mems)
        nll.append(found[0].numpy())
    np.testing.assert_array_equal(np.concatenate([score.ids for score in scores]), ids)
    found = np.concatenate([score.token_nll for score in scores])
    np.testing.assert_allclose(found, np.concatenate(nll), rtol=1e-5, atol=2e-5)
    assert sum(score.nll for score in scores) == pytest.approx(np.concatenate(nll).sum(), rel=1e-5)


@EAGER
def test_carried_memory_gives_lines_as_soon_as_their_last_segment_is_full():
    vocab = word_vocab()
    scorer = Scorer(make_lm(vocab), vocab, scoring.ScoringConfig(carry_memory=True, segment=4))
    scores = scorer.score(iter([["w1 w2"], ["w3"], ["w4 w5 w6", "w7"]]))
    assert [[score.text for score in some] for some in scores] == [[], ["w1 w2"], ["w3"], ["w4 w5 w6", "w7"]]


@EAGER
def test_without_a_start_the_first_token_does_not_count(words):
    lm, vocab = words
    for line, score in zip(HOSTILE, score_lines(lm, vocab, HOSTILE, start="none"), strict=True):
        ids = vocab.encode(f"{line}\n")
        assert np.isnan(score.token_nll[0]) and score.tokens == len(ids) - 1
        nll = by_hand(lm, ids[1:], ids[:1]) if len(ids) > 1 else []
        np.testing.assert_allclose(score.token_nll[1:], nll, rtol=1e-5, atol=1e-5)
        assert score.nll == pytest.approx(np.sum(nll), rel=1e-5)


@EAGER
@pytest.mark.parametrize("carry_memory", [False, True])
def test_without_the_end_the_newline_does_not_count(words, carry_memory):
    lm, vocab = words
    options = {"carry_memory": carry_memory}
    with_end = list(score_lines(lm, vocab, HOSTILE, **options))
    for full, score in zip(with_end, score_lines(lm, vocab, HOSTILE, score_end=False, **options), strict=True):
        assert (score.tokens, score.bytes) == (full.tokens - 1, full.bytes - 1)
        nll = full.token_nll[:-1]
        np.testing.assert_allclose(score.token_nll[: score.tokens], nll, rtol=1e-5, atol=1e-5)
        assert score.nll == pytest.approx(nll.sum(), rel=1e-5) and np.isfinite(score.nll)
        if not score.tokens:
            assert score.nll == 0 and math.isnan(score.ppl) and math.isnan(score.bpb)


@EAGER
def test_a_start_of_several_tokens_is_context(words):
    lm, vocab = words
    start = r"w1 w2\n"
    context = vocab.encode("w1 w2\n")
    plain, carried = (list(score_lines(lm, vocab, ["w3", ""], start=start, carry_memory=c)) for c in (False, True))
    np.testing.assert_allclose(plain[0].token_nll, by_hand(lm, vocab.encode("w3\n"), context), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(plain[1].token_nll, by_hand(lm, vocab.encode("\n"), context), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(carried[0].token_nll, plain[0].token_nll, rtol=1e-5, atol=1e-5)
    in_all = by_hand(lm, vocab.encode("w3\n\n"), context)
    np.testing.assert_allclose(carried[1].token_nll, in_all[-1:], rtol=1e-5, atol=1e-5)


@EAGER
def test_a_start_may_be_a_symbol_and_lines_of_lm1b_begin_with_their_own():
    vocab = word_vocab()
    lm = make_lm(vocab)
    (score,) = score_lines(lm, vocab, ["w3"], start="<unk>")
    np.testing.assert_allclose(score.token_nll, by_hand(lm, vocab.encode("w3\n"), [1]), rtol=1e-5)

    vocab = Vocab(special=["<S>", "a", "b"], bos="<S>", eos="<S>")
    vocab.build()
    lm = make_lm(vocab)
    full, empty = score_lines(lm, vocab, ["a b", ""])
    assert full.ids.tolist() == [0, 1, 2, 0] and (full.tokens, empty.tokens) == (3, 1)
    np.testing.assert_allclose(full.token_nll[1:], by_hand(lm, [1, 2, 0], [0]), rtol=1e-5)
    np.testing.assert_allclose(empty.token_nll[1:], by_hand(lm, [0], [0]), rtol=1e-5)


@EAGER
def test_a_vocabulary_without_newline_scores_no_ends_and_no_first_tokens():
    vocab = Vocab(level="char", special=list("ab"))
    vocab.build()
    lm = make_lm(vocab)
    scorer = Scorer(lm, vocab)
    assert not scorer.score_end and not len(scorer.start)
    ((full, one, none),) = scorer.score([["ab", "a", ""]])
    np.testing.assert_allclose(full.token_nll[1:], by_hand(lm, [1], [0]), rtol=1e-5)
    assert [(s.tokens, s.bytes) for s in (full, one, none)] == [(1, 2), (0, 1), (0, 0)]
    carried = list(score_lines(lm, vocab, ["", "ab", "a"], carry_memory=True))
    np.testing.assert_allclose(carried[1].token_nll[1:], full.token_nll[1:], rtol=1e-5)
    assert [score.tokens for score in carried] == [0, 1, 1]
    assert [rows.tolist() for rows in scorer.batches(np.array([1, -1, 0, 3]))] == [[3, 0]]  # none of an empty text


@EAGER
def test_bytes_that_are_no_text_are_scored_by_byte():
    vocab = make_vocab("byte")
    lm = make_lm(vocab)
    lines = [b"\xff\xfe\n", b"a\x80", "é", b"\r\n"]
    scores = list(score_lines(lm, vocab, lines))
    assert [score.text.encode("utf-8", "surrogateescape") for score in scores] == [
        b"\xff\xfe",
        b"a\x80",
        b"\xc3\xa9",
        b"\r",
    ]
    np.testing.assert_array_equal(scores[0].ids, [255, 254, 10])
    np.testing.assert_allclose(scores[0].token_nll, by_hand(lm, [255, 254, 10], [10]), rtol=1e-5)


@EAGER
def test_lines_are_taken_block_by_block_and_newlines_at_their_ends_are_theirs(monkeypatch):
    monkeypatch.setattr(data_lines, "BLOCK_LINES", 3)
    vocab, taken = word_vocab(), []
    lm = make_lm(vocab)
    lines = (taken.append(i) or f"w{i}\n" for i in range(8))
    scores = score_lines(lm, vocab, lines)
    assert next(scores).text == "w0" and taken == [0, 1, 2]
    assert [score.text for score in scores] == [f"w{i}" for i in range(1, 8)]
    paused = iter([None, "a", None, None, "b", "c", "d", "e"])
    assert list(data_lines.in_blocks(paused)) == [["a"], ["b", "c", "d"], ["e"]]
    monkeypatch.setattr(data_lines, "BLOCK_SIZE", 4)
    assert list(data_lines.in_blocks(["ab", "c", "de", "fghij", ""])) == [["ab", "c", "de"], ["fghij"], [""]]


@pytest.mark.parametrize(
    "lines, facts",
    [
        (["ab", "bzab"], [2, "'z'", 3]),
        ([b"ab", b"a", b"ab\xff"], [3, 2]),
        (["ab", "a\ud800"], [2, 1]),
    ],
    ids=str,
)
def test_a_bad_line_is_named(lines, facts):
    vocab = Vocab(level="char", special=list("\nab"))
    vocab.build()
    with raises_naming(ValueError, "n-best", *facts):
        list(score_lines(make_lm(vocab), vocab, lines, name="n-best"))


@EAGER
@pytest.mark.parametrize("carry_memory", [False, True])
def test_a_bad_line_is_in_its_place_and_changes_no_other(carry_memory):
    vocab = Vocab(level="char", special=list("\nab"))
    vocab.build()
    lm, good = make_lm(vocab), ["ab", "a", "bba"]
    expected = list(score_lines(lm, vocab, good, carry_memory=carry_memory))
    lines = ["?", b"\xff", *good[:1], "é", *good[1:], b"b\xff"]
    found = list(score_lines(lm, vocab, lines, "in.txt", strict=False, carry_memory=carry_memory))
    errors = {i: str(score) for i, score in enumerate(found) if isinstance(score, data_lines.LineError)}
    assert [*errors] == [0, 1, 3, 6] and mentions(errors[1], "in.txt", 2, 0)
    assert mentions(errors[3], "in.txt", 4, "'é'", 3)
    for score, by_itself in zip([found[2], *found[4:6]], expected, strict=True):
        assert score.text == by_itself.text and score.nll == pytest.approx(by_itself.nll, rel=1e-6)


@EAGER
def test_bad_arguments_are_named():
    vocab = word_vocab()
    with raises_parameter("vocab", 23, "the 9 symbols of the model"):
        Scorer(make_lm(vocab, n_token=9), vocab)
    with raises_parameter("batch_tokens", 0, "at least 1"):
        score_lines(make_lm(vocab), vocab, [], batch_tokens=0)
    learned = make_lm(vocab, txl_tf.TransformerLM, pos_embed="learned", context_len=8)
    assert Scorer(learned, vocab).segment == 8
    with raises_parameter("segment", 9, limit="context_len=8"):
        score_lines(learned, vocab, [], segment=9)
    lm = make_lm(vocab)
    lm.compile(static_shapes=True)
    with raises_parameter("static_shapes", True, [False]):
        Scorer(lm, vocab)


@pytest.mark.slow
def test_many_lines_equal_score_and_take_a_fifth_of_its_time():
    """Sentences of WikiText-2, of a model of its size; tools/benchmark.py --mode=scoring has the figures."""
    texts = outside_data("data", "wikitext-2")
    text = (texts / "valid.txt").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.replace(" . ", " .\n").split("\n") if line.strip()][:5000]
    vocab = Vocab(special=["<eos>", "<unk>"], eos="<eos>", unk="<unk>", max_size=8000)
    vocab.count(lines)
    vocab.build()
    sizes = {"n_layer": 4, "d_model": 192, "d_embed": 192, "n_head": 4, "d_head": 48, "d_inner": 768, "mem_len": 64}
    lm = txl_tf.TransformerXLLM(n_token=len(vocab), **sizes)
    scorer, alone = Scorer(lm, vocab), lambda line: by_hand(lm, vocab.encode(f"{line}\n"), [0]).sum(dtype=np.float64)
    together = lambda lines: [score.nll for scores in scorer.score([lines]) for score in scores]  # noqa: E731
    together(lines[:100]), [alone(line) for line in lines[:20]]  # compiles
    seconds = []
    for i in range(0, len(lines), 1000):  # in turns, so that other work on the machine slows both
        part, times = lines[i : i + 1000], [time.perf_counter()]
        found = together(part)
        times.append(time.perf_counter())
        expected = [alone(line) for line in part]
        times.append(time.perf_counter())
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        seconds.append(np.diff(times) / len(part))
    fastest = np.min(seconds, 0)  # other work on the machine only slows
    assert fastest[1] > 5 * fastest[0], seconds


@EAGER
@pytest.mark.parametrize("level", ["word", pytest.param("char", marks=pytest.mark.slow), "byte"])
def test_only_a_continuation_counts(level):
    vocab = make_vocab(level)
    lm = make_lm(vocab)
    space = "" if level == "word" else " "
    lines = [f"w1 w2\t{space}w3 w4", "\tw7 w7", f"w7 w7 w1\t{space}w5\tw5", "w5\t"]
    scores = list(score_lines(lm, vocab, lines, continuations=True))
    for line, score in zip(lines, scores, strict=True):
        context, continuation = line.split("\t", 1)
        joint = " " if level == "word" and context and continuation else ""
        before = [*newline_ids(vocab), *vocab.encode(context)]
        own = vocab.encode(f"{joint}{continuation}\n")
        nll = by_hand(lm, own, before)
        n = len(before) - 1
        assert score.text == line and (score.tokens, score.bytes) == (
            len(own),
            len(f"{joint}{continuation}\n".encode()),
        )
        assert np.isnan(score.token_nll[:n]).all()
        np.testing.assert_allclose(score.token_nll[n:], nll, rtol=1e-5, atol=1e-5)
        assert score.nll == pytest.approx(nll.sum(), rel=1e-5)


@EAGER
@pytest.mark.parametrize(
    "line", ["the ca\tt", "the c\tat sat", "th\te cat", "the cat\t sat", "\tthe cat", "the cat \tsat"]
)
def test_a_subword_over_the_tab_belongs_to_the_continuation(line):
    vocab = train_on_lines(["the cat sat", "a cat", "the mat"] * 20, vocab_size=280, subword_type="bpe")
    scorer = scoring.Scorer(make_lm(vocab), vocab, ScoringConfig(continuations=True, score_end=False))
    context, whole = scoring.at_tab(line, "subword")
    ids = vocab.encode(whole)
    ends = np.cumsum([len(vocab.token_bytes[i]) for i in ids])
    assert ends[-1] == len(whole)
    encoded = scorer.encode(line)
    assert encoded.context == np.sum(ends <= len(context)) and encoded.context < len(ids)
    (score,) = next(scorer.score([[line]]))
    assert score.tokens == len(ids) - encoded.context > 0 and score.nll > 0


@EAGER
def test_the_end_counts_after_a_continuation_without_subwords():
    vocab = train_on_lines(["the cat sat", "a cat", "the mat"] * 20, vocab_size=280, subword_type="bpe")
    (score,) = score_lines(make_lm(vocab), vocab, ["the cat\t"], continuations=True)
    assert (score.tokens, score.bytes) == (1, 1) and score.nll > 0


@EAGER
def test_a_line_without_a_tab_is_no_continuation(words):
    found = list(score_lines(*words, ["w1\tw2", "w1 w2"], "in.txt", strict=False, continuations=True))
    assert found[0].tokens == 2 and mentions(str(found[1]), "in.txt", 2)
    with raises_parameter("continuations", True):
        list(score_lines(*words, ["w1\tw2"], continuations=True, carry_memory=True))
    with raises_parameter("batch_tokens", 9, limit="carry_memory"):
        list(score_lines(*words, ["w1"], carry_memory=True, batch_tokens=9))
    assert scoring.at_tab("a \t b", "subword") == ("a", "a  b")


@pytest.mark.parametrize("has_zero", [False, True])
def test_a_line_with_a_zero_byte_is_scored_only_if_the_vocabulary_has_it(has_zero):
    special = ["<unk>", "a", "b", "\n", *(["\0"] if has_zero else [])]
    vocab = Vocab(level="char", special=special, unk="<unk>")
    vocab.build()
    scored = list(score_lines(make_lm(vocab), vocab, [b"ab", b"a\0b"], strict=False))
    assert [isinstance(found, data_lines.LineError) for found in scored] == [False, not has_zero]
    words = Vocab(level="word", special=["<unk>", "b\0" if has_zero else "b"], unk="<unk>")
    words.build()
    assert words.has_zero_bytes is has_zero
