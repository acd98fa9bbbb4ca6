"""How the library is put together: parts that import downwards only, functions that can be read, a whole wheel.

What a test cannot judge, such as whether a function is too long, is in docs/development.md, under "What review asks".
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from helpers import ROOT, TEXT, mentions

CONFIG = sorted((ROOT / "txl_config").rglob("*.py"))
PATHS = sorted((ROOT / "txl_tf").rglob("*.py"))
PROGRAMS = sorted((ROOT / "txl_programs").rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def trees():
    return {path: ast.parse(path.read_text()) for path in (*CONFIG, *PATHS, *PROGRAMS, *TOOLS)}


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def statements(tree):
    """The nodes of a file, without expressions and what is in them, which are most."""
    nodes = [tree]
    for node in nodes:
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return nodes


def imports(tree):
    """Names of the modules that a file imports, wherever in it; `from a.b import c` gives `a.b.c`."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# ---------------------------------------------------------------------------------------------- wings and imports


@pytest.fixture(scope="module")
def levels():
    """`{part of txl_tf: level}` by docs/architecture.md."""
    rows = re.findall(r"^\| (\d+) \| (`[^|]*`) \| [^|]* \|$", (ROOT / "docs/architecture.md").read_text(), re.M)
    return {part: int(level) for level, parts in rows for part in re.findall(r"`(\w+)(?:\.py|/)`", parts)}


def test_every_file_belongs_to_a_wing(levels):
    wings = {path.relative_to(ROOT / "txl_tf").parts[0].removesuffix(".py") for path in PATHS}
    assert wings == {*levels, "__init__"}


def test_imports_go_downwards_only(trees, levels):
    """A file imports from its own wing, or from those above it in docs/architecture.md; nothing imports a program."""
    wrong = []
    for path in PATHS:
        _, wing, *_ = [*module_name(path).split("."), "__init__"]
        for name in imports(trees[path]):
            top, *rest = name.split(".")
            if top in ("txl_programs", "tools", "tests", "train", "examples"):
                wrong.append(f"{path}: {name}")
            if top == "txl_tf" and wing != "__init__" and not (rest[0] == wing or levels[rest[0]] < levels[wing]):
                wrong.append(f"{path}: {name}")
    for path in PROGRAMS:
        names = [name for name in imports(trees[path]) if name.split(".")[0] in ("tools", "tests", "train")]
        wrong += [f"{path}: {name}" for name in names]
    assert not wrong


def test_the_configuration_imports_nothing_slow(trees):
    """Programs read their flags with it. Only the check of initializers imports Keras, when it is called."""
    allowed = {*sys.stdlib_module_names, "txl_config"}
    for path in CONFIG:
        at_once = ast.Module([node for node in trees[path].body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        assert {name.split(".")[0] for name in imports(at_once)} <= allowed, path
        assert {name.split(".")[0] for name in imports(trees[path])} <= {*allowed, "keras"}, path


def test_no_flags_and_nothing_printed(trees):
    wrong = []
    for path in (*CONFIG, *PATHS):
        wrong += [f"{path}: {name}" for name in imports(trees[path]) if name.split(".")[0] == "absl"]
        calls = [node.func for node in ast.walk(trees[path]) if isinstance(node, ast.Call)]
        wrong += [f"{path}: print" for call in calls if isinstance(call, ast.Name) and call.id == "print"]
    assert not wrong


def test_no_test_imports_another():
    for path in (ROOT / "tests").glob("*.py"):
        text = path.read_text()
        if not re.search(r"_test\b(?!\.py)", text):  # quicker than to parse it
            continue
        found = {part for name in imports(ast.parse(text)) for part in name.split(".")}
        assert not [name for name in found if name.endswith("_test")], path.name


# ------------------------------------------------------------------------------------------------------ readability


def test_every_file_says_what_it_holds(trees):
    assert not [name_of(path) for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)]


BLOCKS = ast.If | ast.For | ast.While | ast.With | ast.Try | ast.Match | ast.FunctionDef


def depth(node):
    """How many blocks stand one within the other in a node, itself excepted; `elif` is no deeper than its `if`."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # contains no block
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def test_no_function_nests_deeper_than_four_blocks(trees):
    found = set()
    for path, tree in trees.items():
        functions = (node for node in statements(tree) if isinstance(node, ast.FunctionDef))
        found |= {f"{name_of(path)}: {function.name}" for function in functions if depth(function) > 4}
    assert not found


# ------------------------------------------------------------------------------------------------------ the wheel

# In a fresh interpreter: imports every module that it is told, and says where each is.
IMPORT_ALL = """
import importlib, sys
folder, *names = sys.argv[1:]
for name in names:
    path = importlib.import_module(name).__file__
    assert path.startswith(folder), path
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that the wheel is installed in, and the environment in which Python finds it there."""
    source, wheels, folder = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "installed"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE", "train.py"):
        shutil.copy(ROOT / name, source / name)
    for name in ("txl_config", "txl_tf", "txl_programs", "tools", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "goldens")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    pip = [sys.executable, "-m", "pip"]
    command = [*pip, "wheel", "--no-deps", "-w", str(wheels), "."]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.glob("txl_tf-*.whl")
    command = [*pip, "install", "--no-deps", "--no-index", "--no-compile", "--target", str(folder), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_works_without_the_repository(installed, tmp_path):
    folder, environment = installed
    files = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]
    files = {str(file) for file in files if file.parts[0] != "bin" and ".dist-info" not in file.parts[0]}
    assert files == {*map(name_of, (*CONFIG, *PATHS, *PROGRAMS)), "txl_config/py.typed", "txl_tf/py.typed"}
    command = [sys.executable, "-P", "-c", IMPORT_ALL, str(folder), *map(module_name, (*CONFIG, *PATHS))]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_the_programs_of_the_wheel_run(installed, tmp_path):
    folder, environment = installed

    def run(name, *arguments):
        command = [str(folder / "bin" / name), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    scripts = sorted(path.name for path in folder.glob("bin/*"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert scripts == sorted(project["scripts"])
    for name in scripts:
        helped = run(name, "--help")
        assert f"    {name} --" in helped.stdout and not helped.stderr, (name, helped)
    (tmp_path / "text").write_text(TEXT)
    small = "--dataset=text --data_path=text --level=char --n_layer=1 --d_model=8 --d_embed=8 --n_head=2 --d_head=4 "
    small += "--d_inner=8 --tgt_len=8 --mem_len=8 --train_batch_size=2 --train_steps=2 --model_dir=run"
    trained = run("txl-train", *small.split())
    assert trained.returncode == 0 and "step 2/2 " in trained.stdout, trained.stderr
    written = run("txl-generate", "--model_dir=run", "--prompt=the cat", "--max_new_tokens=5", "--seed=1")
    assert written.returncode == 0 and written.stdout.startswith("the cat"), written.stderr
    refused = run("txl-generate", "--model_dir=nowhere", "--prompt=the cat")
    assert refused.returncode == 1 and mentions(refused.stderr, "model_dir", "nowhere")
