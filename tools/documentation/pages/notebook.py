"""A notebook with its outputs, as a page."""

import json
import re

ANSI = re.compile(r"\x1b\[[\d;]*m")  # colours of a terminal


def to_markdown(path):
    """The Markdown of the notebook `path`: its text, its code, and its outputs. Pictures are part of the Markdown."""
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join(part for cell in cells for part in parts_of(cell)) + "\n"


def parts_of(cell):
    """The Markdown of a cell of a notebook and of each of its outputs, as a list."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [text]
    return [f"```python\n{text}\n```", *(output_of(output) for output in cell["outputs"])]


def output_of(output):
    """The Markdown of an output of a cell: printed text, a picture, or a value as text."""
    if output["output_type"] == "stream":
        text = ANSI.sub("", "".join(output["text"])).rstrip("\n")
        return f"```text\n{text}\n```"
    data = output["data"]
    if "image/png" in data:
        image = "".join(data["image/png"]).replace("\n", "")
        return f'<img alt="Picture of the code above" src="data:image/png;base64,{image}">'
    return "```text\n" + "".join(data["text/plain"]) + "\n```"
