"""One vector for each line of text: the mean of its tokens' hidden states, whatever is read together with it."""

import numpy as np
import pytest
from helpers import SMALL, make_run, program, raises_naming, raises_parameter, randomise, run_here, word_vocab

import txl_tf
from txl_tf.data.lines import LineError
from txl_tf.data.vocabulary import line_start_ids

LINES = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w2 w2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, its model and its vocabulary."""
    folder = tmp_path_factory.mktemp("vectors") / "run"
    make_run(folder, word_vocab())
    return folder, *txl_tf.load_run(folder)


@pytest.fixture(scope="module")
def tool():
    yield from program("tools/embed.py")


def alone(lm, vocab, line, layer=-1):
    """The vector of a line by the network's call for it alone."""
    start = line_start_ids(vocab)
    ids = np.concatenate([start, vocab.encode(line)]).astype(np.int32)[None]
    _, _, states = lm.network(ids, output_hidden_states=True)
    return states[layer][0, len(start) :].numpy().mean(0)


@pytest.mark.ci
@pytest.mark.parametrize("layer", [-1, 0, 1])
def test_a_vector_is_the_mean_over_the_tokens_of_the_line(run, layer):
    folder, lm, vocab = run
    found = txl_tf.text_vectors((lm, vocab), LINES, layer=layer)
    assert found.dtype == np.float32 and found.shape == (4, SMALL["d_model"])
    for vector, line in zip(found, LINES, strict=True):
        np.testing.assert_allclose(vector, alone(lm, vocab, line, layer), atol=1e-6)


def test_neither_batches_nor_the_folder_matter_and_long_lines_are_read_with_memory(run, eager):
    folder, lm, vocab = run
    expected = txl_tf.text_vectors((lm, vocab), LINES)
    np.testing.assert_allclose(txl_tf.text_vectors(folder, LINES, batch_tokens=1), expected, atol=1e-6)
    text = vocab.encode(LINES[2])
    ids = np.concatenate([line_start_ids(vocab), text]).astype(np.int32)[None]
    mems, states = None, []
    for first in range(0, ids.shape[1], 3):
        hidden, mems = lm.network(ids[:, first : first + 3], mems)
        states.append(hidden)
    mean = np.concatenate(states, 1)[0, -len(text) :].mean(0)
    found = txl_tf.text_vectors((lm, vocab), LINES, segment=3)
    np.testing.assert_allclose(found[2], mean, atol=1e-6)
    assert np.abs(found[2] - expected[2]).max() > 1e-4
    assert txl_tf.text_vectors((lm, vocab), []).shape == (0, SMALL["d_model"])


def test_the_vanilla_language_model(run):
    vocab = run[2]
    lm = txl_tf.TransformerLM(**SMALL, context_len=16)
    randomise(lm)
    for vector, line in zip(txl_tf.text_vectors((lm, vocab), LINES), LINES, strict=True):
        np.testing.assert_allclose(vector, alone(lm, vocab, line), atol=1e-6)


def test_what_has_no_vector(run):
    _, lm, vocab = run
    with raises_naming(LineError, 2):
        txl_tf.text_vectors((lm, vocab), ["w1", ""])
    found = txl_tf.text_vectors((lm, vocab), ["w1", "", "w2"], strict=False)
    assert np.isnan(found[1]).all() and np.isfinite(found[::2]).all()
    with raises_parameter("layer", 3):
        txl_tf.text_vectors((lm, vocab), LINES, layer=3)
    for missing in (["w1", None], iter(["w1", None])):
        with raises_parameter("lines", None):
            txl_tf.text_vectors((lm, vocab), missing)


def test_the_program_writes_an_array_or_lines(run, tool, tmp_path, capsys):
    folder, lm, vocab = run
    (tmp_path / "lines.txt").write_text("\n".join([*LINES, "", ""]))
    expected = txl_tf.text_vectors((lm, vocab), LINES)
    options = [f"--model_dir={folder}", f"--input={tmp_path}/lines.txt"]
    assert run_here(tool, *options, f"--output={tmp_path}/v.npy") == 1
    assert "lines.txt, line 5" in capsys.readouterr().err
    found = np.load(tmp_path / "v.npy")
    np.testing.assert_allclose(found[:4], expected, atol=1e-6)
    assert found.shape == (5, SMALL["d_model"]) and np.isnan(found[4]).all()
    assert run_here(tool, *options, f"--output={tmp_path}/v.tsv", "--layer=-1") == 1
    rows = (tmp_path / "v.tsv").read_text().split("\n")
    assert rows[4:] == ["", ""]
    numbers = [[float(x) for x in row.split("\t")] for row in rows[:4]]
    np.testing.assert_allclose(numbers, expected, atol=1e-5)
    assert run_here(tool, *options, f"--output={tmp_path}/V.NPY") == 1
    np.testing.assert_array_equal(np.load(tmp_path / "V.NPY"), found)
    with raises_parameter("output", f"{tmp_path}/v.npy", "a folder, with several files or a Ray cluster"):
        run_here(tool, f"--model_dir={folder}", "--input=a,b", f"--output={tmp_path}/v.npy")
