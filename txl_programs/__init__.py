"""The programs: `txl-train`, `txl-generate`, ...; in a clone also `train.py`, `tools/generate.py`, ...

Each program is a module of this package, which runs as the main module, as with `python -m`. Its --help shows its
docstring and its flags. It reads its flags before it imports TensorFlow. `program.py` starts and ends all programs.
"""

import importlib.util
import sys
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

FOLDERS = {
    "plot": "pictures",
    "demo": "demo",
    "serve": "server",
}  # first word of a program's name -> its folder in this package


def find_program(command: str) -> ModuleSpec | None:
    """Returns the spec of the module of a program; `None` if there is no such module.

    Args:
        command: name or path of the program, such as txl-train-ner or tools/train_ner.py.
    """
    name = Path(command).stem.removeprefix("txl-").replace("-", "_")
    folder = FOLDERS.get(name.partition("_")[0])
    return importlib.util.find_spec(".".join(filter(None, [__name__, folder, name])))


def main() -> None:
    """Runs the program that the first word of the command line names. An unknown name ends in a message."""
    spec = find_program(sys.argv[0])
    if spec is None or not isinstance(spec.loader, InspectLoader):
        sys.exit(f"{sys.argv[0]}: there is no program of this name")
    module = importlib.util.module_from_spec(spec)
    module.__name__ = "__main__"
    sys.modules["__main__"] = module  # the module really is the main one, as with python -m
    try:
        code: Any = spec.loader.get_code(spec.name)
        exec(code, vars(module))
    except KeyboardInterrupt:  # in an import of the program
        sys.exit(130)
