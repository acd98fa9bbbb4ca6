"""Executes examples/quickstart.ipynb and writes its outputs into it: after every change of its code.

    python tests/execute_notebook.py

The notebook then also has the checksum of the code that made its outputs; tests/notebook_test.py compares them.
"""

import hashlib
import resource
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

PATH = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def checksum(notebook):
    """SHA-256 of the code of all cells."""
    return hashlib.sha256("\0".join(cell.source for cell in code_cells(notebook)).encode()).hexdigest()


def execute(notebook, folder):
    """Executes a notebook in place, in a kernel of its own that starts in `folder`.

    What TensorFlow writes to stderr while it is imported, about this machine, is left out.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed. Has its code and its traceback.
    """
    client = NotebookClient(
        notebook, resources={"metadata": {"path": str(folder)}}, kernel_name="python3", timeout=None,
        startup_timeout=300, record_timing=False, coalesce_streams=True,
    )  # fmt: skip
    client.execute()
    imports = code_cells(notebook)[0]
    imports.outputs = [output for output in imports.outputs if output.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}  # not the version that happened to run it
    notebook.metadata["checksum"] = checksum(notebook)


def main():
    notebook, start = nbformat.read(PATH, as_version=4), time.time()
    execute(notebook, PATH.parent)
    nbformat.write(notebook, PATH)
    kernel = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{PATH.name}: {time.time() - start:.0f} s, {kernel.ru_utime + kernel.ru_stime:.0f} s of processor time")


if __name__ == "__main__":
    main()
