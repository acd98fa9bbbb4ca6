"""docs/articles.md, its Chinese twin and examples/articles.py: what they name exists, what they say and show is so.

Links to lines of code rot with every edit above them. This writes them anew, in both pages:

    python tests/articles_test.py
"""

import ast
import importlib.util
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import mentions

import txl_tf
from txl_tf import layers
from txl_tf.errors import CallError
from txl_tf.taggers.lattice import distance_table

ROOT = Path(__file__).parents[1]
PAGES = ("articles.md", "articles.zh.md")
TEXTS = {page: (ROOT / "docs" / page).read_text() for page in PAGES}
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./(\w[\w/]*\.py)#L(\d+)\)")
BLOCK = re.compile(r"^```python\n(.*?)^```\n\n^```\n(.*?)^```", re.M | re.S)


def lines_of(path):
    """`{name of a function, a class or a Class.method: line of its def or class}`."""
    found = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.lineno
        if isinstance(node, ast.ClassDef):
            methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef))
            found |= {f"{node.name}.{inner.name}": inner.lineno for inner in methods}
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_the_lines_of_what_they_name(page):
    links, lines = LINK.findall(TEXTS[page]), {}
    assert len(links) == TEXTS[page].count("#L") > 70
    for name, path, line in links:
        found = lines.setdefault(path, lines_of(path)).get(name)
        assert found == int(line), f"{name} is in line {found} of {path}, not {line}: python tests/articles_test.py"


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_are_named_exist(page):
    named = re.findall(r"`(\w+_test\.py)::(\w+)`", TEXTS[page])
    assert len(named) > 60
    for path, name in named:
        assert name in lines_of(f"tests/{path}"), f"{path}::{name}"


def test_both_pages_have_the_same_rows_code_and_output():
    """The same links, tests, commands and numbers of cells, row by row; headings have other words."""
    english, chinese = ([line for line in TEXTS[page].splitlines() if line.startswith("|")] for page in PAGES)
    for one, other in zip(english, chinese, strict=True):
        for pattern in (LINK, r"`\w+_test\.py::\w+`", r"`articles\.py \w+`", r"(?<!\\)\|"):
            assert re.findall(pattern, one) == re.findall(pattern, other), other
    assert re.findall(r"^```.*?^```", TEXTS[PAGES[0]], re.M | re.S) == re.findall(
        r"^```.*?^```", TEXTS[PAGES[1]], re.M | re.S
    )


def test_python_of_the_page_prints_what_it_shows(capsys):
    blocks, names = BLOCK.findall(TEXTS["articles.md"]), {}
    assert len(blocks) == 3
    for code, shown in blocks:
        exec(code, names)
        assert capsys.readouterr().out == shown
    for div_val in (1, 2, 4):  # the formula is right of a layer that is built
        layer = layers.AdaptiveEmbedding(50, 16, 16, cutoffs=[10, 25], div_val=div_val)
        layer.build()
        assert sum(names["parameters"](50, 16, [10, 25], div_val)) == layer.count_params()


def test_the_table_of_bins_is_that_of_the_layer():
    layer = layers.AdaptiveEmbedding(267735, 1024, 1024, cutoffs=[20000, 40000, 200000], div_val=4)
    expected = [
        (i, n, layer.bin_width(i), n * layer.bin_width(i), layer.bin_width(i) * 1024, n * 1024)
        for i, n in enumerate(layer.bin_sizes)
    ]
    for page in PAGES:
        rows = re.findall(
            r"^\| (\d) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", TEXTS[page], re.M
        )
        assert [tuple(int(cell.replace(",", "")) for cell in row) for row in rows] == expected


# ------------------------------------------------------------------------------------------------- claims of articles


def test_without_positions_the_order_does_not_count():
    layer, order = layers.EncoderLayer(8, 2, 16), [3, 0, 4, 1, 2]
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 5, 8)), tf.float32)
    np.testing.assert_allclose(layer(tf.gather(x, order, axis=1)), tf.gather(layer(x), order, axis=1), atol=1e-5)


@pytest.mark.parametrize("d_model", [64, 128, 512])
def test_two_thousand_positions_are_unique(d_model):
    table = layers.positional_encoding(2000, d_model).numpy()[0]
    assert len(np.unique(table.round(2), axis=0)) == 2000


def test_the_two_kinds_of_frequencies_differ():
    article = layers.positional_embedding(tf.range(-50.0, 51), layers.inverse_frequencies(128))[0]
    assert abs(float(tf.reduce_max(abs(distance_table(51, 128) - article))) - 0.29) < 0.005


def test_keras_takes_tensors_alone_by_position():
    layer, x = layers.EncoderLayer(8, 2, 16), tf.ones([1, 3, 8])
    with pytest.raises(CallError):
        layer(x, False, None)
    np.testing.assert_array_equal(layer(x, training=False, mask=None), layer(x))


def test_a_tagger_takes_a_bilstm():
    """A tag of the first element can depend on the last one, and the other way round."""
    bilstm = keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True))
    tagger = txl_tf.Tagger(keras.Sequential([keras.layers.Embedding(9, 4), bilstm]), ["O", "B-X", "I-X"])
    chars = tf.constant([[1, 2, 3, 4], [5, 2, 3, 4], [1, 2, 3, 6]])
    first, last = (tf.unstack(tagger.emissions(chars)[0][:, place]) for place in (0, -1))
    for other in (1, 2):
        assert all(float(tf.reduce_max(abs(x[0] - x[other]))) > 1e-6 for x in (first, last))
    assert np.isfinite(tagger.nll(chars, tf.zeros_like(chars))).all()


# ----------------------------------------------------------------------------------------------- examples/articles.py


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("articles_example", ROOT / "examples" / "articles.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_articles_code_computes_what_ours_does(example, capsys):
    assert example.main() == 0
    found = re.findall(r"^article (\d)  (\w+) +(\S+)$", capsys.readouterr().out, re.M)
    assert len(found) == len(example.CHECKS) and {number for number, *_ in found} == set("1234")
    assert max(float(difference) for *_, difference in found) < 2e-6


def test_a_difference_or_an_unknown_name_is_told_by_the_status(example, capsys, monkeypatch):
    monkeypatch.setattr(example, "plain_mask", lambda *_: tf.fill([3, 6], np.nan))
    assert example.main(["create"]) == 1
    assert capsys.readouterr().out.split()[:4] == ["article", "1", "create_mask", "inf"]
    monkeypatch.setattr(example, "plain_ffn", lambda layer, x: x * np.nan)
    assert example.main(["feed"]) == 1 and "nan" in capsys.readouterr().out
    assert example.main(["scaled", "nothing"]) == 1
    assert mentions(capsys.readouterr().out, "nothing", "positional_embedding", "rel_shift")


@pytest.mark.parametrize("page", PAGES)
def test_checks_that_are_named_exist(example, page):
    named = re.findall(r"articles\.py ((?:[a-z_]+ ?)+)", TEXTS[page])
    assert len(named) > 40
    for word in " ".join(named).split():
        assert any(word in function.__name__ for function in example.CHECKS), word


if __name__ == "__main__":
    for page, text in TEXTS.items():
        renewed = LINK.sub(lambda link: re.sub(r"\d+\)$", f"{lines_of(link[2])[link[1]]})", link[0]), text)
        (ROOT / "docs" / page).write_text(renewed)
