"""The programs: `txl-train`, `txl-generate`, ...; in a clone also `train.py`, `tools/generate.py`, ...

Each is a module of this package, and runs as `python -m` runs it: as the main module, whose docstring and flags --help
shows, and which reads its flags before it imports TensorFlow. `program.py` has what all of them have in common.
"""

import importlib.util
import sys
from pathlib import Path

FOLDERS = {"plot": "pictures", "demo": "demo"}  # first word of a program's name -> where it is, with what it draws


def find_program(command):
    """The spec of the module that a command names, such as txl-train-ner or tools/train_ner.py; `None` if none is."""
    name = Path(command).stem.removeprefix("txl-").replace("-", "_")
    folder = FOLDERS.get(name.partition("_")[0])
    return importlib.util.find_spec(".".join(filter(None, [__name__, folder, name])))


def main():
    """Runs the program that the command line names."""
    spec = find_program(sys.argv[0])
    if spec is None:
        sys.exit(f"{sys.argv[0]}: there is no program of this name")
    module = sys.modules["__main__"] = importlib.util.module_from_spec(spec)
    module.__name__ = "__main__"
    try:
        exec(spec.loader.get_code(spec.name), vars(module))
    except KeyboardInterrupt:  # in an import of the program
        sys.exit(130)
