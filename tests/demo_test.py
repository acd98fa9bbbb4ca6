"""The page's parts without Gradio and without a browser: text stays text, limits hold, views say what the library says.

tests/demo_browser_test.py has the page itself.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import (
    SMALL,
    make_run,
    mentions,
    program,
    raises_naming,
    raises_parameter,
    randomise,
    run_here,
    word_vocab,
)
from markupsafe import Markup

from txl_programs.demo import pieces
from txl_programs.demo.encoder_decoder import EncoderDecoderView
from txl_programs.demo.language_model import LanguageModelView, labels_of
from txl_programs.demo.limits import Limits, Shelf
from txl_programs.demo.pieces import Place, Span, element
from txl_programs.demo.runs import OpenRun, picked
from txl_programs.demo.tagger import TaggerView, changed
from txl_tf.data.vocabulary import Vocab
from txl_tf.language.transformer_lm import TransformerLM
from txl_tf.runs.folder import RunFolder

HOSTILE = "<script>alert(1)</script>\"'&\x00\x1b[31m\u202eabc"
SAFE = "&lt;script&gt;alert(1)&lt;/script&gt;&#34;&#39;&amp;\\x00\\x1b[31m\\u202eabc"


# ------------------------------------------------------------------------------------------------------------ pieces


def test_text_becomes_html_escaped_once_and_control_characters_are_written():
    assert element("p", HOSTILE) == f"<p>{SAFE}</p>"
    assert element("p", title=HOSTILE, data_pick="1:2", class_="a", id=None) == (
        f'<p title="{SAFE}" data-pick="1:2" class="a"></p>'
    )
    assert element("p", element("b", "<"), Markup("<br>")) == "<p><b>&lt;</b><br></p>"


HOSTILE_PLACE = Place(HOSTILE, 0.5, HOSTILE, HOSTILE)


@pytest.mark.parametrize("drawn", [
    pieces.notice(HOSTILE),
    pieces.side_by_side({HOSTILE: Markup("1"), "b": Markup("2")}, (HOSTILE, "b")),
    pieces.figure(HOSTILE, Markup(""), note=HOSTILE),
    pieces.facts(a=HOSTILE),
    pieces.tokens([HOSTILE_PLACE]),
    pieces.legend(HOSTILE, HOSTILE),
    pieces.bars([(HOSTILE, 0.5, HOSTILE)]),
    pieces.marked(HOSTILE, [Span(0, 4, HOSTILE, 0.5)], [HOSTILE]),
    pieces.choices(HOSTILE, [(HOSTILE, HOSTILE)], HOSTILE),
    pieces.matrix([[0.5]], [HOSTILE_PLACE], [HOSTILE], 100),
    pieces.lattice([HOSTILE_PLACE], [(0, 1, HOSTILE_PLACE)], 30),
])  # fmt: skip
def test_no_piece_lets_text_be_html(drawn):
    assert isinstance(drawn, Markup)
    assert not re.search(r"<script|\x00|\x1b|\u202e|'", drawn)
    opened, closed = re.findall(r"<(\w+)", drawn), re.findall(r"</(\w+)>", drawn)
    assert sorted(name for name in opened if name != "br") == sorted(closed)


def test_tokens_have_their_colours_clicks_and_lines():
    drawn = pieces.tokens([Place("a", 0.25, "the title", "7", "help"), Place("\n", 3.0), Place(" ")])
    first, second, third = re.findall(r"<span.*?</span>(?:<br>)*", drawn)
    assert first == (
        '<span class="token help" style="--a:0.250" title="the title" data-pick="7" tabindex="0" role="button">a</span>'
    )
    assert second == '<span class="token" style="--a:1.000">↵</span><br>'
    assert third == '<span class="token" style="--a:0.000"> </span>'


def test_a_matrix_draws_what_is_seen_by_its_root_and_names_both_sides():
    drawn = pieces.matrix([[0.25, 0.001], [0.0, 1.0]], [Place("r"), Place("s", pick="1")], ["a", "b"], 500, bar=1)
    assert re.findall(r"<title>(.*?)</title>", drawn) == ["r → a: 0.250", "s → b: 1.000"]
    assert re.findall(r'--a:([\d.]+)"', drawn) == ["0.500", "1.000"]
    assert re.findall(r'<text[^>]*data-pick="1"[^>]*>(.)', drawn) == ["s"]
    assert drawn.count("<line") == 1
    wide = pieces.matrix([[1.0] * 1000], [Place("r")], ["a"] * 1000, 500)  # scrolls rather than vanish
    assert float(re.search(r'width="(\d+)"', wide)[1]) > 1000 * pieces.LEAST_CELL


def test_words_of_a_lattice_lie_below_their_characters_and_not_on_each_other():
    words = [(0, 2, Place("ab")), (1, 3, Place("bc")), (2, 4, Place("cd"))]
    drawn = pieces.lattice([Place(c) for c in "abcd"], words, 10)
    boxes = {
        text: (float(x), float(y), float(width))
        for x, y, width, text in re.findall(r'<rect x="(.*?)" y="(.*?)" width="(.*?)".*?<text.*?>(.*?)<', drawn)
    }
    assert [boxes[c][0] for c in "abcd"] == [1, 11, 21, 31] and {boxes[c][1] for c in "abcd"} == {1}
    assert (boxes["ab"][0], boxes["ab"][2]) == (1, 17)
    assert boxes["ab"][1] == boxes["cd"][1] < boxes["bc"][1]


def test_entities_stand_in_their_text():
    drawn = pieces.marked("abcdef", [Span(1, 3, "PER", 0.987), Span(3, 4, "LOC", 0.5)], ["LOC", "PER"])
    first, second = "bc<small>PER 0.99</small>", "d<small>LOC 0.50</small>"
    marks = f'<mark class="kind1">{first}</mark><mark class="kind0">{second}</mark>'
    assert drawn == f'<p class="marked">a{marks}ef</p>'


@pytest.mark.parametrize("label, shown", [
    (" ", "␣"), ("\n", "↵"), ("a b\t", "a␣b⇥"), ("x" * 14, "x" * 14), ("x" * 15, "x" * 13 + "…"),
])  # fmt: skip
def test_labels_are_short(label, shown):
    assert pieces.short(label) == shown


# ------------------------------------------------------------------------------------------------------------ limits


def test_a_request_is_bounded_before_any_work():
    limits = Limits(max_tokens=3, max_new_tokens=5, max_rows=2, visitors=2)
    assert limits.check_text("x" * 60) == "x" * 60 and limits.waiting == 16
    with raises_parameter("The text", "x" * 61, "at most 60 characters"):
        limits.check_text("x" * 61)
    limits.check_tokens(3)
    with raises_parameter("The prompt", 4, "at most 3 tokens"):
        limits.check_tokens(4, "The prompt")
    assert limits.check_number("Samples", 2.0, limits.max_rows) == 2
    for wrong in (0, 3, 1.5, float("nan"), float("inf"), "2", None):
        with raises_parameter("Samples", allowed="a whole number from 1 to 2"):
            limits.check_number("Samples", wrong, limits.max_rows)
    for wrong in ("", None, 7, ["a"]):
        with raises_parameter("The text", wrong):
            limits.check_text(wrong)


def test_the_shelf_forgets_what_nobody_has_asked_for_longest():
    shelf = Shelf(2)
    first, second = shelf.put("a"), shelf.put("b")
    assert shelf.get(first) == "a"
    third = shelf.put("c")
    assert (shelf.get(first), shelf.get(second), shelf.get(third)) == ("a", None, "c")
    assert shelf.get(None) is None and shelf.get("guess") is None


def test_a_click_is_whole_numbers():
    assert picked("17", 1, 3) == [17] and picked("1:2:3", 1, 3) == [1, 2, 3]
    for wrong in ("", "-1", "1:2", "1:2:3:4", "1.5", "²", "x", None, 7, "1" * 200):
        with raises_parameter("click", wrong):
            picked(wrong, 1, 3)


# ----------------------------------------------------------------------------------------------------------- program


def test_without_gradio_the_program_says_what_to_install(monkeypatch):
    for tool in program("tools/demo.py"):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with raises_naming(ValueError, "txl_tf[demo]"):
            run_here(tool, "--model_dir=nowhere")


# ------------------------------------------------------------------------------------------------------------- views


def test_labels_are_what_a_reader_of_the_text_knows():
    byte = Vocab(level="byte")
    byte.build()
    assert labels_of(byte, byte.encode("aé\n")) == ["a", "\\xc3", "\\xa9", "\n"]
    vocab = word_vocab()
    assert labels_of(vocab, [2, 0, 1]) == ["w0 ", "\n", "<unk> "]


def test_what_a_word_changes_is_said():
    spans = [Span(0, 2, "PER", 0.9), Span(3, 4, "LOC", 0.5)]
    assert mentions(changed(spans, [spans[0]._replace(prob=0.7), spans[1]]), "0.200")
    assert mentions(changed(spans, [spans[0], spans[1]._replace(kind="ORG")]), 1, 2)


def test_a_tagger_without_attention_shows_its_entities_and_says_so(monkeypatch):
    view = TaggerView.__new__(TaggerView)
    view.network, view.limits = object(), Limits()
    view.tagger = SimpleNamespace(split=list, most=9)
    monkeypatch.setattr(view, "entities", lambda *_: [Span(0, 2, "PER", 0.9)], raising=False)
    view.run = SimpleNamespace(model=SimpleNamespace(kinds=["PER"]))
    shown = view.show("高山来")
    assert ">高山<small>PER 0.90</small></mark>来" in shown


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    vocab = Vocab(level="char", special=list("abcdefghijklmnopqrstuv "))
    vocab.build()
    folder = tmp_path_factory.mktemp("demo") / "run"
    make_run(folder, vocab)
    return LanguageModelView(OpenRun(folder, "run"), Limits(max_tokens=40))


@pytest.mark.parametrize("call, name, value", [
    (lambda view: view.encode("a" * 41), "The text", 41),
    (lambda view: view.encode("aXa"), "The text, line 1", "X"),
    (lambda view: next(view.read("a")), "text", "a"),
    (lambda view: view.look("abc", "3"), "click", 3),
    (lambda view: view.look("abc", "0"), "click", 0),
    (lambda view: view.look("abc", "1:2:0"), "click", "1:2:0"),
    (lambda view: view.alternatives("abc", "9"), "click", 9),
    (lambda view: view.start("abc", 1, {"sampling": {"temperature": -1}, "stops": {}}), "temperature", -1),
    (lambda view: view.start("a", 1, {"sampling": {}, "stops": {"stop_strings": ["X"]}}), "stop_strings", "X"),
])  # fmt: skip
def test_wrong_input_is_a_sentence(view, call, name, value):
    with raises_parameter(name, value):
        call(view)


@pytest.mark.slow
def test_samples_are_those_of_generate_and_go_on_as_one_text(view):
    lm, vocab = view.lm, view.vocab
    options = {"sampling": {"seed": 5, "temperature": 0.9, "top_k": 7}, "stops": {}}
    samples = view.start("abc", 2, options)
    for _ in range(2):
        for _ in view.write(samples, 6, options):
            pass
    ids = lm.generate(vocab.encode("abc")[None], 12, num_return_sequences=2, **options["sampling"])
    assert ["abc" + sample.text for sample in samples] == [vocab.decode(row) for row in ids.numpy()]
    assert [sample.tokens for sample in samples] == [12, 12]
    stop = samples[0].text[4:6]
    (again,), ends = view.start("abc", 1, options), {**options, "stops": {"stop_strings": [stop]}}
    for _ in view.write([again], 12, ends):
        pass
    assert again.ended and again.text == samples[0].text[: samples[0].text.index(stop) + 2]


@pytest.mark.slow
def test_reading_shows_the_nll_of_score_by_segments(view):
    view.tgt_len = 5
    ids = view.vocab.encode("abc def ghi")
    mems, expected = view.lm.initial_mems(1), []
    for start in (0, 5):
        tokens, labels = ids[None, start : min(start + 5, 10)], ids[None, start + 1 : start + 6]
        nll, mems = view.lm.score(tokens, labels, mems)
        expected += nll.numpy()[0].tolist()
    *steps, (_, _, drawn) = view.read("abc def ghi")
    assert [step[:2] for step in steps] == [(6, 11), (11, 11)]
    shown = [float(value) for value in re.findall(r"([\d.]+) bits, probability", drawn)]
    np.testing.assert_allclose(shown, np.divide(expected, np.log(2)), atol=6e-4)
    mean = float(re.search(r"<b>([\d.]+)</b> bits per token", drawn)[1])
    assert mean == pytest.approx(np.mean(expected) / np.log(2), abs=6e-5)


def test_more_targets_than_beams_are_refused():
    view = EncoderDecoderView.__new__(EncoderDecoderView)
    view.limits = Limits()
    with raises_parameter("n_best", 5, "at most 2"):
        view.translate("abc", 2, 5, 0.6)


def test_what_the_memory_saves_or_costs_is_a_positive_number_of_bits(view):
    nll = np.log(2) * np.float32([[3, 1, 2], [3, 1, 2], [1, 3, 2]])
    drawn = view._show_remembered(view.vocab.encode("abca"), nll)
    assert re.findall(r" (\w+) (-?[\d.]+) bits\"", drawn) == [("saves", "2.00"), ("costs", "2.00"), ("saves", "0.00")]
    assert re.findall('(help|harm)"', drawn)[:4] == ["harm", "help", "harm", "harm"]


@pytest.mark.slow
def test_a_model_of_words_without_memory_is_read_and_says_that_it_has_none(tmp_path):
    vocab = word_vocab()
    sizes = {**SMALL, "n_token": len(vocab), "mem_len": 0}
    lm = TransformerLM(**sizes)
    randomise(lm)
    RunFolder(tmp_path / "run").create({"dataset": "text"}, sizes, [vocab], lm, step=1)
    view = LanguageModelView(OpenRun(tmp_path / "run", "run"), Limits())
    text = "w1 w2 <b> w3"
    *_, (_, _, drawn) = view.read(text)
    nll, _ = lm.score(vocab.encode(text)[None, :-1], vocab.encode(text)[None, 1:])
    assert f"<b>{np.exp(nll.numpy().mean()):.3f}</b> perplexity" in drawn and ">&lt;unk&gt; </span>" in drawn
    *_, (_, _, drawn) = view.remember(text)
    assert "<b>no</b>" in drawn and not re.search('class="[^"]*(legend|help|harm)', drawn)
    shown = [float(value) for value in re.findall(r"([\d.]+) bits, probability", drawn)]
    np.testing.assert_allclose(shown, nll.numpy()[0] / np.log(2), atol=6e-4)
    looked = view.look(text, "2")
    assert len(re.findall("layer . head .</text>", looked)) == 4
    samples = view.start("w1 w2", 1, {"sampling": {"seed": 1}, "stops": {}})
    list(view.write(samples, 5, {"sampling": {"seed": 1}, "stops": {}}))
    expected = lm.generate(vocab.encode("w1 w2")[None], 5, seed=1).numpy()[0]
    assert "w1 w2" + samples[0].text == vocab.decode(expected)
