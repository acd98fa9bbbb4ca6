"""Translations of an encoder-decoder and its attention to the source, as HTML."""

from markupsafe import Markup

from txl_config import SearchConfig
from txl_programs.demo.language import Refusal, said
from txl_programs.demo.limits import Limits
from txl_programs.demo.pieces import PAGE_WIDTH, Place, choices, element, figure, matrix, short
from txl_programs.demo.runs import OpenRun, other_click, picked
from txl_tf.vanilla.translator import Translation, Translator

BEAMS = (1, 2, 4, 8)  # the beam sizes to choose from; only a few, because each needs a graph of its own


class EncoderDecoderView:
    """What the page shows of a run of an encoder-decoder.

    Args:
        run: `OpenRun`.
        limits: `Limits`.
    """

    def __init__(self, run: OpenRun, limits: Limits):
        self.run = run
        self.limits = limits
        self.model = run.model
        self.source_vocab, self.target_vocab = run.vocabs
        self.reader = Translator(self.model, self.source_vocab, self.target_vocab)
        self.encode = self.reader.encode

    def translate(self, source: str, beam_size: int, n_best: int, length_penalty: float) -> list[Translation]:
        """Returns the best translations of a line. Raises ParameterError if the line or an option is wrong."""
        source = self.limits.check_text(source, "The source").strip("\n")
        if beam_size not in BEAMS:
            allowed = ", ".join(map(str, BEAMS))
            sentence = "Beams must be one of {allowed}, got {value}."
            raise Refusal("beam_size", beam_size, list(BEAMS), sentence, allowed=allowed, value=repr(beam_size))
        if n_best > beam_size:
            sentence = "Targets must be at most Beams, {most}, got {value}."
            raise Refusal("n_best", n_best, f"at most {beam_size}", sentence, most=beam_size, value=repr(n_best))
        if "\n" in source:
            sentence = "The source has several lines. This page translates one line."
            raise Refusal("source", source, "one line", sentence)
        search = SearchConfig(beam_size=beam_size, n_best=n_best, length_penalty=length_penalty)
        with self.run.lock:
            translator = Translator(self.model, self.source_vocab, self.target_vocab, search)
            return translator.translate([source], "The source")[0]

    def show(self, targets: list[Translation]) -> Markup:
        """Returns a table of translations with their scores, the best one first. A click on one calls `look`."""
        rows = [
            element(
                "tr", element("td", i + 1), element("td", target.text, class_="target"),
                element("td", f"{target.score:.3g}"), data_pick=str(i), tabindex=0, role="button",
            )
            for i, target in enumerate(targets)
        ]  # fmt: skip
        head = element("tr", *(element("th", name) for name in ("", said("target"), said("score, nats"))))
        note = said("The score is the log-probability; of a search, divided by the length penalty. Click a target.")
        return element("div", element("table", head, *rows, class_="targets"), element("p", note, class_="note"))

    def look(self, source: str, target: str, pick: str) -> Markup:
        """Returns a picture of the cross-attention of a head: columns are the source, rows are the target.

        Args:
            source, target: the source, and the translation that was clicked.
            pick: "i" or "i:layer:head", where i is the index of the translation. "i" alone stands for the first head of
                the last layer.

        Raises:
            ParameterError: the click belongs to another page or model.
        """
        i, *layer_and_head = picked(pick, 1, 3)
        n_layer = self.model.num_layers
        n_head = self.model.num_heads
        layer, head = layer_and_head or (n_layer - 1, 0)
        if not (layer < n_layer and head < n_head):
            raise other_click(pick, "model", "Translate the source again.")
        with self.run.lock:
            attention = self.reader.attention(source.strip("\n"), target)
        clicked = f"{i}:{layer}:{head}"
        heads = [
            choices(said("Layer {layer}, head", layer=m), [(str(h), f"{i}:{m}:{h}") for h in range(n_head)], clicked)
            for m in range(n_layer)
        ]
        rows = [Place(short(symbol)) for symbol in attention.queries]
        columns = [short(symbol) for symbol in attention.keys]
        drawn = matrix(attention.weights[layer, head], rows, columns, PAGE_WIDTH)
        note = "A row is a symbol that is written; a column, one of the source. Rows sum to 1; colours are roots."
        title = "Layer {layer}, head {head}: where it looks to write “{target}”"
        return figure(said(title, layer=layer, head=head, target=target), *heads, drawn, note=said(note))
