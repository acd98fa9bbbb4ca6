"""The notebook: its outputs are those of its code, it says nothing of the machine it ran on, and it runs."""

import contextlib
import io
import re
import tempfile
import types

import nbformat
import pytest
import tensorflow as tf
from execute_notebook import PATH, checksum, code_cells, execute

import txl_tf
from txl_tf.serving.language_model import LanguageModelSignatures
from txl_tf.serving.tables import GraphTokenizer

NOTEBOOK = nbformat.read(PATH, as_version=4)
CODE = code_cells(NOTEBOOK)
# What makes the notebook short: two steps of a small model, and less held-out text.
SMALL = {
    "STEPS, EVERY = 1200, 150": "STEPS, EVERY = 2, 1",
    "n_layer=4, d_model=128, d_embed=128": "n_layer=1, d_model=16, d_embed=16",
    "d_inner=512": "d_inner=16",
    'splits["valid"][:]': 'splits["valid"][:2000]',
    "layer=2": "layer=0",
}


def texts_of(cells):
    """What cells print, and what stands for their pictures."""
    outputs = [output for cell in cells for output in cell.outputs]
    return "\n".join(output.get("text") or output["data"].get("text/plain", "") for output in outputs)


def pictures_of(cells):
    return [output for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})]


def bits_of(cells):
    """`(held out at the end, with memory, without)`, bits a character, as the notebook prints them."""
    text = texts_of(cells)
    memory = re.search(r"with memory ([\d.]+) bits a character, without ([\d.]+)", text)
    return float(re.findall(r"held out ([\d.]+)$", text, re.M)[-1]), *map(float, memory.groups())


# -------------------------------------------------------------------------------------------- what the repository has


def test_the_outputs_are_those_of_the_code():
    nbformat.validate(NOTEBOOK)
    assert NOTEBOOK.metadata["checksum"] == checksum(NOTEBOOK), "execute it anew: python tests/execute_notebook.py"
    assert [cell.execution_count for cell in CODE] == list(range(1, len(CODE) + 1))


def test_the_outputs_hold_no_error_and_nothing_of_the_machine():
    outputs = [output for cell in CODE for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    text = texts_of(CODE)
    assert not re.search(r"/(tmp|home|root|work|usr|Users)/|\d\d:\d\d:\d\d|tensorflow:|object at 0x", text)
    assert not [cell.id for cell in CODE if "execution" in cell.metadata]
    assert NOTEBOOK.metadata["language_info"] == {"name": "python"}


def test_it_is_small_and_its_cells_are_short():
    assert PATH.stat().st_size < 500_000
    assert not [cell.id for cell in NOTEBOOK.cells if len(cell.source.splitlines()) > 15]


def test_its_links_lead_to_files_and_headings():
    markdown = "\n".join(cell.source for cell in NOTEBOOK.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#]+)#?([^)]*)\)", markdown)
    assert len(links) >= 7
    for path, heading in links:
        found = PATH.parent / path
        assert found.exists(), path
        headings = re.findall(r"^#+ (.*)$", found.read_text(), re.M) if heading else []
        slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings]
        assert not heading or heading in slugs, heading


def test_it_uses_the_public_interface():
    source = "\n".join(cell.source for cell in CODE)
    assert not re.search(r"from txl_tf|import txl_tf\.", source)
    assert set(re.findall(r"txl_tf\.(\w+)", source)) <= set(txl_tf.__all__)


def check_claims(cells):
    """The model has learned, and its memory helps."""
    held_out, with_memory, without = bits_of(cells)
    assert held_out < 1.8 and abs(with_memory - held_out) < 0.1
    assert with_memory < without - 0.05
    assert len(pictures_of(cells)) == 3
    assert "The same text as of lm.generate" in texts_of(cells)


def test_what_it_shows_is_what_its_text_claims():
    check_claims(CODE)


# ---------------------------------------------------------------------------------------------------- it runs

SMALLER = SMALL | {
    'splits["valid"][:]': 'splits["valid"][:1924]',  # segments of one length
    "max_new_tokens=200": "max_new_tokens=20",
    "max_new_tokens=[200]": "max_new_tokens=[20]",
}
PARTS = [("imports", "curve"), ("write", "picture"), ("export", "score-text")]


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Runs a part of the notebook with a small model, and the parts before it, in this process: what it prints."""
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.close("all")
    folder, names, printed, exported = tmp_path_factory.mktemp("notebook"), {}, {}, {}

    def export_saved_model(lm, directory, vocab):
        vocab.save(folder / "vocab.txt")
        table = GraphTokenizer(vocab, str(folder / "vocab.txt"))
        functions = LanguageModelSignatures(lm, {"vocab": table}, start_token=vocab.start_id).signatures()
        exported[directory] = types.SimpleNamespace(signatures=functions, **functions)

    def run(part):
        for number in range(len(printed), part + 1):
            first, last = (next(i for i, cell in enumerate(CODE) if cell.id == name) for name in PARTS[number])
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                for cell in CODE[first : last + 1]:
                    source = cell.source
                    for old, new in SMALLER.items():
                        source = source.replace(old, new)
                    exec(compile(source, cell.id, "exec"), names)
            printed[number] = output.getvalue()
        return printed[part], len(plt.get_fignums())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr(plt, "show", lambda: None)
        patch.setattr(txl_tf, "export_saved_model", export_saved_model)
        patch.setattr(tf.saved_model, "load", exported.__getitem__)
        level = tf.get_logger().level
        yield run
        tf.get_logger().setLevel(level)
        plt.close("all")


@pytest.mark.slow
def test_its_small_model_trains(cells):
    text, pictures = cells(0)
    assert "step 1: " in text and "step 2: " in text and "step 3: " not in text
    assert 5 < float(re.findall(r"held out ([\d.]+)$", text, re.M)[-1]) < 8 and pictures == 1


@pytest.mark.slow
def test_its_small_model_writes_is_scored_and_drawn(cells):
    text, pictures = cells(1)
    assert re.findall("^--- temperature (.*)$", text, re.M) == ["0.3", "0.8", "1.2"]
    bits = re.search(r"with memory ([\d.]+) bits a character, without ([\d.]+)", text).groups()
    assert all(5 < float(value) < 8 for value in bits) and pictures == 2


@pytest.mark.slow
def test_its_small_model_is_served(cells):
    """Its own asserts hold: what is served equals what `lm.generate` writes and `lm.score` finds."""
    text, _ = cells(2)
    assert "The same text as of lm.generate" in text and "generate_text, generate_texts, " in text
    assert text.count(" bits\n") == 8


def execute_copy(folder, changes):
    """Executes the notebook, in a folder of its own, with other text in its cells: the code cells, with new outputs."""
    (folder / "examples").mkdir()
    notebook = nbformat.read(PATH, as_version=4)
    for old, new in changes.items():
        assert sum(old in cell.source for cell in code_cells(notebook)) == 1, old
        for cell in code_cells(notebook):
            cell.source = cell.source.replace(old, new)
            cell.outputs, cell.execution_count = [], None
    execute(notebook, folder / "examples")
    assert not list((folder / "examples").iterdir())
    return code_cells(notebook)


@pytest.mark.slow
def test_it_runs_with_a_small_model(tmp_path):
    """Its own asserts hold: what is served equals what `lm.generate` writes and `lm.score` finds."""
    cells = execute_copy(tmp_path, SMALL)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    held_out, with_memory, without = bits_of(cells)
    assert 5 < min(held_out, with_memory, without) and len(pictures_of(cells)) == 3
    text = texts_of(cells)
    assert "step 1: " in text and "step 2: " in text and "step 3: " not in text
    assert "The same text as of lm.generate" in text


@pytest.mark.slow
def test_it_runs_as_it_stands(tmp_path):
    check_claims(execute_copy(tmp_path, {}))
