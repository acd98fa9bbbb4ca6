"""The runs on the page, and clicks in their pictures."""

import threading
from typing import Any

from txl_programs.demo.language import Refusal, said
from txl_tf.runs.folder import RunFolder

# Family -> what a visitor reads about the model, after its name.
FAMILIES = {
    "transformer_xl": (
        "is a Transformer-XL: it predicts each token of a text from earlier tokens, and keeps a memory of what it read."
    ),
    "transformer_lm": (
        "is a vanilla Transformer language model: it predicts each token of a text from the tokens in its window, "
        "without memory."
    ),
    "transformer": "is an encoder-decoder: it reads a source line and generates a target line.",
    "tener": "is a TENER tagger: it finds the entities of a sentence, and its attention tells left from right.",
    "flat": "is a FLAT tagger: it finds the entities of a sentence. It also reads the words of a lexicon.",
    "bilstm": "is a BiLSTM tagger: it finds the entities of a sentence.",
}
PAPERS = {
    "transformer_xl": "https://arxiv.org/abs/1901.02860",
    "transformer_lm": "https://arxiv.org/abs/1706.03762",
    "transformer": "https://arxiv.org/abs/1706.03762",
    "tener": "https://arxiv.org/abs/1911.04474",
    "flat": "https://arxiv.org/abs/2004.11795",
}
TEXTS = {
    "pydoc": "It was trained on Python's reference manual.",
    "dates": "It was trained on made-up dates, which it writes as ISO 8601.",
    "towns": "It was trained on made-up sentences about people and towns.",
}


class OpenRun:
    """A run: its model and vocabularies, and a lock for computations with the model.

    Args:
        model_dir: folder of the run.
        name: name of the run on the page.

    Attributes:
        folder: `RunFolder` of the run.
        family_name: family of the model, such as "transformer_xl".
        task: task of the family, such as "language_model".
        config: `config.json` of the run.
        vocabs: list of its vocabularies.
        model: its model.
        lock: lock to hold during a computation with the model.
    """

    def __init__(self, model_dir: str, name: str):
        self.folder = folder = RunFolder(model_dir)
        self.name = name
        self.task = folder.family.task
        self.config = folder.read_config()
        self.family_name = folder.family.name
        self.vocabs = folder.load_vocabs()
        self.model = folder.load_model()
        self.lock = threading.Lock()

    def describe(self) -> str:
        """Returns a description of the model in Markdown: its kind, its size and, if known, its data and its paper."""
        what = said(FAMILIES.get(self.family_name, "a model of the family {family}."), family=self.family_name)
        text = said(TEXTS[self.config["data"]["dataset"]]) if self.config["data"].get("dataset") in TEXTS else ""
        size = said("It has {number:,} weights.", number=self.model.count_params())
        paper = f"[{said('Paper')}]({PAPERS[self.family_name]})" if self.family_name in PAPERS else ""
        return " ".join(filter(None, [what, text, size, paper]))


def picked(pick: Any, *numbers: int) -> list[int]:
    """Returns the integers in the data of a click: `[0, 17]` for "0:17".

    Args:
        pick: the data, of any kind and length: a visitor can send anything.
        *numbers: how many integers are allowed; 1 and 3 allow "5" and "5:0:1".

    Raises:
        ParameterError: the page cannot have sent this data.
    """
    parts = pick.split(":") if isinstance(pick, str) and len(pick) < 100 else []
    if len(parts) not in numbers or not all(part.isascii() and part.isdigit() for part in parts):
        raise other_click(pick, "page", "Load the page again.")
    return [int(part) for part in parts]


def other_click(pick: Any, what: str, remedy: str) -> Refusal:
    """Returns the error for a click that does not fit the page, such as a click in the picture of an earlier text.

    Args:
        pick: data of the click.
        what: what the picture belongs to, such as "text".
        remedy: a sentence that says what to do.
    """
    sentence = "This click belongs to another {what}. {remedy}"
    return Refusal("click", pick, f"in a picture of this {what}", sentence, what=said(what), remedy=said(remedy))
