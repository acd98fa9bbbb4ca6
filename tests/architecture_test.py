"""How the library is put together: wings that import downwards only, small files and functions, a whole wheel.

schema <- config, files <- layers <- data <- training <- models <- runs <- serving <- convert
"""

import ast
import importlib
import os
import shutil
import subprocess
import sys
import zipfile

import keras
import pytest
from helpers import ROOT

LEVELS = {"schema": 0, "config": 1, "files": 1} | {
    wing: level
    for level, wing in enumerate("layers data training models runs serving convert".split(), start=2)
}  # fmt: skip
PATHS = sorted((ROOT / "txl_tf").rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in PATHS]


@pytest.fixture(scope="module")
def trees():
    return {path: ast.parse(path.read_text()) for path in PATHS}


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(tree):
    """Names of the modules that a file imports, wherever in it; `from a.b import c` gives `a.b.c`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_every_file_belongs_to_a_wing():
    wings = {path.relative_to(ROOT / "txl_tf").parts[0].removesuffix(".py") for path in PATHS}
    assert wings == {*LEVELS, "__init__"}


def test_imports_go_downwards_only(trees):
    wrong = []
    for path in PATHS:
        if path == ROOT / "txl_tf" / "__init__.py":
            continue
        wing = module_name(path).split(".")[1]
        for name in imports(trees[path]):
            top, *rest = name.split(".")
            if top in ("tools", "tests", "train"):  # programs
                wrong.append(f"{path}: {name}")
            if top == "txl_tf" and not (rest[0] == wing or LEVELS[rest[0]] < LEVELS[wing]):
                wrong.append(f"{path}: {name}")
    assert not wrong


def test_no_flags_and_nothing_printed(trees):
    wrong = []
    for path in PATHS:
        wrong += [f"{path}: {name}" for name in imports(trees[path]) if name.split(".")[0] == "absl"]
        calls = [node.func for node in ast.walk(trees[path]) if isinstance(node, ast.Call)]
        wrong += [f"{path}: print" for call in calls if isinstance(call, ast.Name) and call.id == "print"]
    assert not wrong


def test_files_have_400_lines_at_most_and_functions_60(trees):
    wrong = []
    for path in PATHS:
        lines = len(path.read_text().splitlines())
        wrong += [f"{path}: {lines} lines"] * (lines > 400)
        wrong += [f"{path}: {f.name}" for f in functions(trees[path]) if f.end_lineno - f.lineno + 1 > 60]
    assert not wrong


def test_functions_have_12_arguments_at_most_but_for_the_layers_and_models_of_keras(trees):
    wrong = []
    for path in PATHS:
        module = importlib.import_module(module_name(path))
        classes = [node for node in trees[path].body if isinstance(node, ast.ClassDef)]
        of_keras = [c for c in classes if issubclass(getattr(module, c.name), keras.layers.Layer | keras.Model)]
        exempt = [f for node in of_keras for f in node.body if getattr(f, "name", "") == "__init__"]
        for node in functions(trees[path]):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
            if count > 12 and node not in exempt:
                wrong.append(f"{path}: {node.name} has {count} arguments")
    assert not wrong


def test_no_test_imports_another():
    for path in (ROOT / "tests").glob("*.py"):
        found = {part for name in imports(ast.parse(path.read_text())) for part in name.split(".")}
        assert not [name for name in found if name.endswith("_test")], path.name


# ------------------------------------------------------------------------------------------------------ the wheel

# In a fresh interpreter: imports every module that it is told, and says where each is.
IMPORT_ALL = """
import importlib, sys
folder, *names = sys.argv[1:]
for name in names:
    path = importlib.import_module(name).__file__
    assert path.startswith(folder), path
"""


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_works_without_the_repository(tmp_path):
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "train.py"):
        shutil.copy(ROOT / name, source / name)
    for name in ("txl_tf", "tools", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "goldens"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("txl_tf-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    files = [file.relative_to(unpacked) for file in unpacked.rglob("*") if file.is_file()]
    files = {str(file) for file in files if ".dist-info" not in file.parts[0]}
    assert files == {*NAMES, "txl_tf/py.typed"}

    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    command = [sys.executable, "-P", "-c", IMPORT_ALL, str(unpacked), *map(module_name, PATHS)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
