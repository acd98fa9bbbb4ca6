"""The page's languages: who gets which, no sentence without its translation, and what a Chinese browser is answered.

tests/demo_browser_test.py has a Chinese browser.
"""

import ast
import json
import re
import string
from types import SimpleNamespace

import pytest
from helpers import ROOT, mentions, word_vocab

from txl_config import SearchConfig
from txl_programs.demo import chinese
from txl_programs.demo.language import Refusal, explained, labels_in, preferred, said, speaking
from txl_programs.demo.limits import Limits
from txl_tf.data.vocabulary import Vocab
from txl_tf.language.sampling import check_sampling
from txl_tf.language.stopping import check_stops
from txl_tf.language.text_generator import encode_prompt

pytestmark = pytest.mark.ci

CHINESE = re.compile("[\u4e00-\u9fff]")
SOURCES = sorted((ROOT / "txl_programs/demo").rglob("*.py"))


@pytest.mark.parametrize("header, language", [
    (None, "en"), ("", "en"), ("zh", "zh"), ("zh-CN,zh;q=0.9,en;q=0.8", "zh"), ("zh-Hant-TW", "zh"), ("ZH-hk", "zh"),
    ("en-US,en;q=0.9,zh;q=0.8", "en"), ("en;q=0.2, zh;q=0.7", "zh"), ("fr,zh;q=0.5,en;q=0.3", "zh"), ("de,fr", "en"),
    ("zh;q=0", "en"), ("zh;q=..", "en"), ("zhx", "en"), ("*", "en"), ("zh" * 10_000, "en"),
])  # fmt: skip
def test_the_language_that_a_browser_prefers(header, language):
    assert preferred(header) == language


def test_the_language_ends_with_its_block():
    with speaking("zh"):
        assert said("This model has no memory.") == "该模型没有记忆。"
        with speaking("en"):
            assert said("Token {place}", place=3) == "Token 3"
        assert said("{bits:.0f} bits or more", bits=4.0) == "4 bits 或更多"
    assert said("This model has no memory.") == "This model has no memory."


def literals(path):
    return [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]


PLACES = {"said": [0], "Refusal": [3], "Refused": [1], "other_click": [1, 2]}  # arguments that are sentences


def sentences_in(path):
    """The sentences that a module hands to `said` and to the errors of the page, or calls `sentence`."""
    for node in ast.walk(ast.parse(path.read_text())):
        found = []
        if isinstance(node, ast.Call):
            places = PLACES.get(getattr(node.func, "id", ""), [])
            found = [node.args[place] for place in places]
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "sentence":
            found = [node.value]
        yield from (argument.value for argument in found if isinstance(argument, ast.Constant))


def fields(template):
    return {(name, spec) for _, name, spec, _ in string.Formatter().parse(template) if name}


def test_every_sentence_is_translated_and_every_translation_is_used():
    own = [path for path in SOURCES if path.name != "chinese.py"]
    missing = {text for path in own for text in sentences_in(path)} - chinese.SENTENCES.keys()
    assert not missing
    # names of arguments in messages of the library need not be literals of the page
    used = {value for path in own for value in literals(path)} | {"text", "source", "beam_size", "n_best"}
    used |= {"length_penalty"}
    assert sorted(chinese.SENTENCES.keys() - used) == []
    assert sorted(chinese.LABELS.keys() - used) == []


@pytest.mark.parametrize("english", chinese.SENTENCES)
def test_a_translation_has_the_values_of_its_sentence(english):
    assert fields(english) == fields(chinese.SENTENCES[english])


def char_vocab():
    vocab = Vocab(level="char", special=list("ab "))
    vocab.build()
    return vocab


@pytest.mark.parametrize("call, expected", [
    (lambda: Limits(max_tokens=1).check_text(""), "文本为空：请输入或粘贴内容。"),
    (lambda: Limits(max_tokens=1).check_text("x" * 21, "The prompt"), "提示词有 21 个字符；本页最多接受 20 个。"),
    (lambda: Limits().check_number("Samples", 9, 4), "“样本数”必须是 1 到 4 之间的整数，现在是 9。"),
    (lambda: char_vocab().encode("aXa", name="The prompt"),
     "提示词：'X' 不在该模型的词表（3 个符号）中，请删去或换掉它。"),
    (lambda: encode_prompt(word_vocab(), " ", "The prompt"), "提示词为空：至少需要一个 token。"),
    (lambda: check_sampling(1, temperature=-1), "“温度”必须不小于 0 且不超过 1e30，现在是 -1。"),
    (lambda: check_sampling(1, top_p=2), "“Top p”必须在 (0, 1] 之内，现在是 2。"),
    (lambda: check_sampling(1, min_p=1), "“Min p”必须在 [0, 1) 之内，现在是 1。"),
    (lambda: check_sampling(1, repetition_penalty=0), "“重复惩罚”必须大于 0 且不超过 1e30，现在是 0。"),
    (lambda: check_sampling(1, top_k=0), "“Top k”必须是 1 到 2147483647 之间的整数，现在是 0。"),
    (lambda: check_sampling(1, seed=2**40), "“随机种子”必须是 32 位整数，现在是 1099511627776。"),
    (lambda: SearchConfig(length_penalty=-1.0), "“长度惩罚”必须不小于 0，现在是 -1.0。"),
    (lambda: check_stops(3, None, ["X"], vocab=char_vocab()), "词表无法拼出停止字符串 'X'。"),
])  # fmt: skip
def test_errors_of_the_page_and_of_the_library_are_sentences_in_chinese(call, expected):
    with speaking("zh"):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            call()
        assert explained(error.value) == expected


def test_an_error_without_a_translation_is_quoted():
    error = ValueError("something {odd} must not be")
    assert explained(error) == "something {odd} must not be"
    with speaking("zh"):
        assert explained(error) == "模型不接受这个输入：something {odd} must not be"
        refusal = Refusal("text", "", "not empty", "{name} is empty. Type or paste a text.", name=said("The text"))
        assert (refusal.name, refusal.value, refusal.allowed) == ("text", "", "not empty")
        assert explained(refusal) == "文本为空：请输入或粘贴内容。"


def test_labels_are_translated_and_texts_are_not():
    components = [
        {"id": 1, "type": "button", "props": {"value": "Generate"}},
        {"id": 2, "type": "textbox", "props": {"value": "Generate", "label": "Prompt", "info": None}},
        {"id": 3, "type": "markdown", "props": {"value": "**run** 5 weights"}},
    ]
    config = {"components": components, "title": "txl_tf"}
    assert labels_in(config, {}) is config
    with speaking("zh"):
        found = labels_in(config, {"**run** 5 weights": "**run** 5 个参数"})
    assert [component["props"]["value"] for component in found["components"]] == [
        "生成",
        "Generate",
        "**run** 5 个参数",
    ]
    assert found["components"][1]["props"]["label"] == "提示词"
    assert components[0]["props"]["value"] == "Generate"


# ------------------------------------------------------------------------------------------------------- the page


class View:
    """A view of a run that is not there."""

    vocab = SimpleNamespace(document=None)

    def __init__(self, run, limits):
        self.run, self.limits = run, limits

    def encode(self, text):
        raise ValueError

    def read(self, text):
        self.limits.check_text(text)
        yield 1, 1, said("This model has no memory.")


@pytest.fixture(scope="module")
def page():
    """The page of two runs of every task."""
    pytest.importorskip("gradio")
    from txl_programs.demo import line_pages
    from txl_programs.demo.language_model_page import LanguageModelPage
    from txl_programs.demo.runs import OpenRun
    from txl_programs.demo.shell import make_page

    def run(name, task):
        run = OpenRun.__new__(OpenRun)
        run.name, run.task, run.family_name, run.config = name, task, "transformer_xl", {"data": {"dataset": "pydoc"}}
        run.model = SimpleNamespace(token_level="char", count_params=lambda: 1234)
        return run

    with pytest.MonkeyPatch.context() as patch:
        for board in (LanguageModelPage, line_pages.EncoderDecoderPage, line_pages.TaggerPage):
            patch.setattr(board, "view", View)
        runs = [run(f"{task}{i}", task) for task in ("language_model", "encoder_decoder", "tagger") for i in range(2)]
        yield make_page(runs, Limits())


def labels_of(config):
    """The texts of a page that are no texts of a visitor."""
    for component in config["components"]:
        props, kind = component["props"], component["type"]
        names = ["label", "info", "placeholder"] if props.get("show_label", True) or kind == "tabitem" else []
        names += ["value"] if kind in ("markdown", "button") else []
        yield from (props[name] for name in names if isinstance(props.get(name), str) and props[name])


def test_every_label_is_translated(page):
    with speaking("zh"):
        found = set(labels_of(page.config))
    assert {label for label in found if not CHINESE.search(label)} <= {"Top k", "Top p", "Min p"}
    assert len(found) > 40
    assert any("1,234 个参数" in label for label in found)
    assert not any(CHINESE.search(label) for label in labels_of(page.config))


@pytest.fixture(scope="module")
def client(page):
    from starlette.testclient import TestClient

    from txl_programs.demo.shell import make_app

    with TestClient(make_app(page, Limits(), "127.0.0.1"), base_url="http://127.0.0.1:7860") as found:
        yield found


@pytest.mark.parametrize("accepted, labels, refused", [
    ("zh-CN,zh;q=0.9,en;q=0.8", ("生成", "提示词", "0：每次取概率最大的 token"), "本页没有这个地址。"),
    ("en-US,en;q=0.9", ("Generate", "Prompt", "0 takes the most likely token"), "This page has no such address."),
])  # fmt: skip
def test_a_request_gets_the_page_and_its_refusals_in_its_language(client, accepted, labels, refused):
    headers = {"accept-language": accepted}
    for path in ("/", "/config"):
        answer = client.get(path, headers=headers)
        text = answer.text if path == "/config" else answer.text.encode().decode("utf-8")
        assert all(f'"{label}"' in text for label in labels), path
        assert "accept-language" in answer.headers["vary"]
    assert client.get("/nowhere", headers=headers).json()["error"] == refused


@pytest.mark.parametrize("accepted, empty, shown", [
    ("zh-CN", "文本为空：请输入或粘贴内容。", "该模型没有记忆。"),
    ("en", "The text is empty. Type or paste a text.", "This model has no memory."),
])  # fmt: skip
def test_an_answer_is_in_the_language_of_its_request(client, page, accepted, empty, shown):
    (read,) = (i for i, function in page.fns.items() if getattr(function.fn, "__name__", "") == "read")
    for text, expected in (("", empty), ("abc", shown)):
        said = asked(client, read, [["language_model0"], text], accepted)
        assert expected in said


@pytest.mark.parametrize("accepted, expected", [("zh-CN", "输入框不接受 ['a']。"), ("en", "A box cannot hold ['a'].")])
def test_a_value_of_another_kind_is_refused_in_the_language_of_its_request(client, page, accepted, expected):
    write = min(i for i, function in page.fns.items() if getattr(function.fn, "__name__", "") == "write")
    data = [["language_model0"], "abc", ["a"], *[None] * (len(page.fns[write].inputs) - 3)]
    assert expected in asked(client, write, data, accepted).replace("&#39;", "'")


@pytest.mark.parametrize("penalty", [1, 1.5])
def test_a_repetition_window_that_is_no_whole_number_is_refused(client, page, penalty):
    write = min(i for i, function in page.fns.items() if getattr(function.fn, "__name__", "") == "write")
    for window in (1.5, 0, 2**31):
        data = [["language_model0"], "abc", 1, 5, 0.8, "", 1, 0, penalty, window, "", "", False, True]
        said = asked(client, write, data, "en")
        assert mentions(said, "repetition_window") and str(window) in said


def asked(client, number, data, accepted):
    """Everything that the page answers to an event."""
    headers = {"accept-language": accepted}
    body = {"data": data, "fn_index": number, "session_hash": "abc", "event_data": None, "trigger_id": 3}
    assert client.post("/gradio_api/queue/join", json=body, headers=headers).status_code == 200
    with client.stream("GET", "/gradio_api/queue/data?session_hash=abc", headers=headers) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return "\n".join(json.dumps(json.loads(line), ensure_ascii=False) for line in lines)
