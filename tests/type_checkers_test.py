"""pyright and mypy, with their default settings, on the Python of README, docs and examples: no errors.

And both find a misspelt argument and a wrong type. The blocks of a page are one program, as its reader runs them.
Imports of packages without type information are no errors here: Keras has none, nor, for mypy, has TensorFlow.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

SIZES = "n_token=100, n_layer=2, d_embed=32, n_head=2, d_head=16, d_inner=64, mem_len=8"
WRONG = f"""
import txl_tf
from txl_tf.config import ModelConfig

txl_tf.TransformerXLLM({SIZES}, d_model=32, dropout=0.1)
txl_tf.TransformerXLLM({SIZES}, d_model=32, n_layr=2)  # wrong
txl_tf.TransformerXLLM({SIZES}, d_model="wide")  # wrong
txl_tf.Tener(n_token=9, n_layer=1, d_model=8, n_head=2, d_inner=8, atn_type="adatrans")  # wrong
ModelConfig({SIZES}, d_model=32, dropot=0.1)  # wrong
ModelConfig({SIZES}, d_model="wide")  # wrong
txl_tf.layers.PositionwiseFF(32, 64, droput=0.1)  # wrong
txl_tf.layers.EncoderLayer(32, 2, 64, rate="high")  # wrong
txl_tf.make_optimizer(learning_rate="high")  # wrong
"""
EXPECTED = {("wrong.py", i) for i, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")}


def pyright(folder):
    """`{(file, line): message}` of the errors in a folder."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    if not result.stdout.startswith("{"):
        pytest.skip(f"pyright has no node: {result.stderr[-200:]}")
    errors = [x for x in json.loads(result.stdout)["generalDiagnostics"] if x["severity"] == "error"]
    return {
        (os.path.basename(x["file"]), x["range"]["start"]["line"] + 1): x["message"]
        for x in errors
        if x.get("rule") != "reportMissingImports"
    }


def mypy(folder):
    """The same of mypy."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--disable-error-code=import-untyped",
        "--disable-error-code=import-not-found",
    ]
    files = sorted(str(path) for path in folder.glob("*.py"))
    variables = {**os.environ, "MYPYPATH": str(ROOT)}
    result = subprocess.run([*command, *files], capture_output=True, text=True, env=variables, cwd=folder)
    assert result.returncode in (0, 1), result.stderr
    found = re.findall(r"^([\w.]+\.py):(\d+): error: (.*)$", result.stdout, re.M)  # in the folder, not in the library
    return {(name, int(line)): message for name, line, message in found}


@pytest.mark.slow
@pytest.mark.parametrize("checker", [pyright, mypy])
def test_pages_and_examples_have_no_errors_and_wrong_arguments_are_found(checker, tmp_path):
    for page in [*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")]:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
        if blocks:
            (tmp_path / f"{page.name.replace('.', '_')}.py").write_text("\n".join(blocks))
    for path in (ROOT / "examples").glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "wrong.py").write_text(WRONG)
    found = checker(tmp_path)
    assert {place: message for place, message in found.items() if place not in EXPECTED} == {}
    assert set(found) == EXPECTED


@pytest.mark.slow
def test_the_code_of_the_model_passes_strict_pyright():
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    config = ROOT / "pyrightconfig.strict.json"
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", str(config)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if " errors, " not in result.stdout:
        pytest.skip(f"pyright has no node: {result.stderr[-200:]}")
    assert re.search("^0 errors, ", result.stdout, re.M), result.stdout
