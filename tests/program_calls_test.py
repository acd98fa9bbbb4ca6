"""Every call of a function of the packages, in tools, examples and programs, has arguments that the function takes."""

import ast
import importlib
import inspect

import pytest
from helpers import ROOT

FILES = sorted(path for folder in ("examples", "tools", "txl_programs") for path in (ROOT / folder).rglob("*.py"))
PACKAGES = ("txl_tf", "txl_config", "txl_programs")


def imported(tree):
    """`{name in the file: object}` of what the file imports from the packages."""
    objects = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] in PACKAGES:
            module = importlib.import_module(node.module)
            # A module such as `txl_programs.train` is no attribute before it is imported. It would define its flags.
            found = {name.asname or name.name: getattr(module, name.name, None) for name in node.names}
            objects |= {name: value for name, value in found.items() if value is not None}
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name in PACKAGES:
                    objects[name.asname or name.name] = importlib.import_module(name.name)
    return objects


def called(function, objects):
    """The object that the expression of a call names, such as `txl_tf.layers.attend`; `None` for another one."""
    if isinstance(function, ast.Name):
        return objects.get(function.id)
    if isinstance(function, ast.Attribute):
        owner = called(function.value, objects)
        return getattr(owner, function.attr, None) if inspect.ismodule(owner) else None
    return None


def wrong_calls(source):
    """`[(line, message)]` of the calls in a source whose arguments do not fit the signature of the function."""
    tree = ast.parse(source)
    objects, wrong = imported(tree), []
    for node in ast.walk(tree):
        target = called(node.func, objects) if isinstance(node, ast.Call) else None
        if not callable(target):
            continue
        positional = [value for value in node.args if not isinstance(value, ast.Starred)]
        named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        is_whole = len(positional) == len(node.args) and len(named) == len(node.keywords)
        signature = inspect.signature(target)
        try:
            (signature.bind if is_whole else signature.bind_partial)(*positional, **named)
        except TypeError as error:
            wrong.append((node.lineno, str(error)))
    return wrong


@pytest.mark.ci
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_arguments_of_calls_are_those_of_the_functions(path):
    assert wrong_calls(path.read_text(encoding="utf-8")) == []


def test_a_wrong_call_is_found():
    source = (
        "import txl_tf\n"
        "from txl_programs.opening import bytes_for_training as read\n"
        "read(more_than=3)\n"
        "read(fewest=3)\n"
        "read()\n"
        "txl_tf.segments([1], 2)\n"
        "txl_tf.segments(*[[1], 2, 3], tgt=2)\n"
    )
    assert [line for line, _ in wrong_calls(source)] == [4, 5, 6, 7]
