"""The pages of encoder-decoders and taggers. Each answers one line of text."""

import gradio as gr

from txl_programs.demo.encoder_decoder import BEAMS, EncoderDecoderView
from txl_programs.demo.pieces import side_by_side
from txl_programs.demo.runs import other_click
from txl_programs.demo.tagger import TaggerView
from txl_programs.demo.wiring import Asked, Board, answered, count_slider, pictures, width_of

SOURCE = "Sat the 21st of Nov 2026"
SENTENCES = {
    "char": "高勇：男，中国国籍，中国科技会堂专家委员会专家，大学本科学历，工程师。",
    "word": "John Smith lives in New York .",
}


class EncoderDecoderPage(Board):
    """The page of the encoder-decoders among the runs."""

    view = EncoderDecoderView

    def build(self) -> None:
        """Adds the components, and connects their events with the handlers."""
        gr.Markdown("The best targets for a source line. Click a target to see where each head looks.")
        names = self.choose()
        source = gr.Textbox(self.spelled(SOURCE), label="Source", elem_id="source")
        with gr.Row():
            beams = gr.Radio(BEAMS, value=BEAMS[-2], label="Beams")
            n_best = count_slider(max(BEAMS), 3, "Targets")
            penalty = gr.Slider(0, 2, 0.6, step=0.1, label="Length penalty")
        button = gr.Button("Translate", variant="primary", min_width=80, scale=0, elem_id="translate")
        asked = gr.State(Asked())
        shown = pictures("targets")
        detail = pictures("cross")
        inputs = [names, source, beams, n_best, penalty]
        outputs = [shown, asked]
        at_opening = self.begin(self.opened, self.translate, inputs, outputs) if self.spelled(SOURCE) else []
        for event in (button.click, source.submit):  # a new translation also empties the picture of the old attention
            self.listen(event, self.translate, inputs, outputs, cancels=at_opening).then(lambda: "", None, detail)
        for place in (shown, detail):  # both have symbols to click
            self.listen(place.click, self.look, asked, [detail, asked])

    @answered
    def translate(self, names, source, beams, n_best, penalty):
        """Shows the best translations of every chosen run."""
        views = self.chosen(names)
        n_best = self.limits.check_number("Targets", n_best, max(BEAMS))
        translations = {name: view.translate(source, beams, n_best, penalty) for name, view in views.items()}
        targets = {
            name: [target.text for target in run_translations] for name, run_translations in translations.items()
        }
        shown = {name: views[name].show(run_translations) for name, run_translations in translations.items()}
        yield side_by_side(shown, list(views)), Asked(source, tuple(views), targets)

    @answered
    def look(self, asked, data: gr.EventData):
        """Shows the cross-attention of the clicked translation, or of the clicked head for it."""
        name, pick = self.clicked(asked, data)
        targets = asked.by_run[name]
        i = pick.partition(":")[0]
        if not (i.isascii() and i.isdigit() and int(i) < len(targets)):
            raise other_click(pick, "source", "Translate the source again.")
        shown = {name: self.views[name].look(asked.text, targets[int(i)], pick)}
        yield side_by_side(shown, asked.names), asked


class TaggerPage(Board):
    """The page of the taggers among the runs."""

    view = TaggerView

    def build(self) -> None:
        """Adds the components, and connects their events with the handlers."""
        gr.Markdown("The entities of a sentence, with types and probabilities. Click a token to see where it looks.")
        names = self.choose()
        level = next(iter(self.views.values())).run.model.token_level
        text = gr.Textbox(SENTENCES[level], label="Sentence", elem_id="sentence")
        button = gr.Button("Tag", variant="primary", min_width=80, scale=0, elem_id="tag")
        asked = gr.State(Asked())
        shown = pictures("tagged")
        at_opening = self.begin(self.opened, self.tag, [names, text], [shown, asked])
        for event in (button.click, text.submit):
            self.listen(event, self.tag, [names, text], [shown, asked], cancels=at_opening)
        self.listen(shown.click, self.look, asked, [shown, asked])

    @answered
    def tag(self, names, text):
        """Shows the entities that every chosen run finds."""
        asked = Asked(text, tuple(self.chosen(names)), {})
        yield self._show(asked), asked

    @answered
    def look(self, asked, data: gr.EventData):
        """Shows the attention of the clicked item; or the sentence with a word removed from the lexicon or put back.

        `asked.by_run` has `(left_out, pick)` for a run: the words that are removed from the lexicon, and the last click
        on an item or a head.
        """
        name, pick = self.clicked(asked, data)
        left_out, last_pick = asked.by_run.get(name, (frozenset(), ""))
        if pick.startswith(("out:", "in:")):
            state = self.views[name].toggled(asked.text, left_out, pick), last_pick
        else:
            state = left_out, pick
        asked = asked._replace(by_run={**asked.by_run, name: state})
        yield self._show(asked), asked

    def _show(self, asked):
        """Returns the pictures of all chosen runs, each after the clicks in it, which are in `asked.by_run`."""
        shown = {}
        width = width_of(asked.names)
        for name in asked.names:
            left_out, pick = asked.by_run.get(name, (frozenset(), ""))
            shown[name] = self.views[name].show(asked.text, left_out, pick, width)
        return side_by_side(shown, asked.names)
