"""The page of language models: Generate, Score, Memory."""

import time

import gradio as gr

from txl_config.errors import brief
from txl_config.sampling import LONGEST_WINDOW, REPETITION_WINDOW
from txl_programs.demo.language import Refusal, said
from txl_programs.demo.language_model import LanguageModelView
from txl_programs.demo.limits import Limits, Shelf
from txl_programs.demo.pieces import side_by_side
from txl_programs.demo.runs import OpenRun
from txl_programs.demo.wiring import (
    Asked,
    Board,
    answered,
    count_slider,
    in_turns,
    pictures,
    stop_button,
    width_of,
)
from txl_tf.data.vocabulary import unescape

GENERATES = "The model continues your prompt, token by token, in the style of the text that it was trained on."
SCORES = "The stronger the colour of a token, the less the model expected it. Click a token to see the alternatives."
REMEMBERS = "The greener a token, the more the memory helps to predict it. Click a token to see where the model looks."
FIRST_TOKENS = 100  # most tokens of the example that is generated when the page is opened
ONE_A_ROW = 260  # smallest width of a slider in pixels, so that each has a row of its own on a phone
SECONDS = 0.05  # least time between two updates of a text while it is generated
TOP_P = "only the most likely tokens that together have this probability"
MIN_P = "no tokens less likely than this fraction of the most likely one"
PENALTY = "above 1: tokens that were just written become less likely"
WINDOW = "the penalty looks at so many last tokens"
SEED = "empty: another text every time. Continue keeps the seed of the text"  # so it is the text of one longer request
# The options of sampling, in the order of their components.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window", "seed")
# The example texts on the page. They are left out if the vocabulary of a run cannot encode them.
PROMPT = "The import statement"
PASSAGE = (
    'The "with" statement is used to wrap the execution of a block with methods defined by a context manager. The '
    'context manager is entered before the block is executed, and it is left after the block, also where the block '
    'raises an exception. A "with" statement with more than one context manager is the same as several "with" '
    "statements, one in the other. The context manager of the first one is left last."
)  # fmt: skip


def whole_or_nothing(name: str, text: str | None) -> int | None:
    """Returns the integer in a text box; `None` if the box is empty. (A number box of Gradio would return 0.)

    Raises ParameterError, which calls the box `name`, if the box contains another text.
    """
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError as error:
        sentence = "{name} must be a whole number, or empty, got {value}"
        raise Refusal(name, text, "a whole number, or empty", sentence, name=said(name), value=brief(text)) from error


class LanguageModelPage(Board):
    """The page of the language models among the runs."""

    view = LanguageModelView

    def __init__(self, runs: list[OpenRun], limits: Limits):
        super().__init__(runs, limits)
        self.shelf = Shelf(2 * limits.visitors)

    def build(self) -> None:
        """Adds the components of the three tabs, and connects their events with the handlers."""
        names = self.choose()
        with gr.Tab("Generate"):
            gr.Markdown(GENERATES)
            self._build_write(names)
        with gr.Tab("Score") as tab:
            gr.Markdown(SCORES)
            self._build_reading(tab, names, self.read, self.show_alternatives, "read", "Score")
        with gr.Tab("Memory") as tab:
            gr.Markdown(REMEMBERS)
            self._build_reading(tab, names, self.remember, self.show_look, "remember", "Show the memory")

    # --------------------------------------------------------------------------------------------------------- write

    def _build_write(self, names):
        """Adds the controls and the result of `write` and `go_on`, and connects their events with the handlers.

        Args:
            names: the component that chooses runs.
        """
        limits = self.limits
        prompt = gr.Textbox(self.spelled(PROMPT), label="Prompt", lines=3, max_lines=12, elem_id="prompt")
        with gr.Row():
            max_new_tokens = limits.max_new_tokens
            number = count_slider(
                max_new_tokens, min(200, max_new_tokens), "New tokens", elem_id="new-tokens", min_width=ONE_A_ROW
            )
            rows = count_slider(limits.max_rows, 1, "Samples", min_width=ONE_A_ROW)
            info = "0 takes the most likely token"
            temperature = gr.Slider(0, 2, 0.8, step=0.05, label="Temperature", info=info, min_width=ONE_A_ROW)
        with gr.Accordion("More options", open=False, elem_id="more"):
            more = self._build_options()
        with gr.Row():
            write = gr.Button("Generate", variant="primary", min_width=80, scale=0, elem_id="write")
            go_on = gr.Button("Continue", min_width=110, scale=0, elem_id="continue")
            stop = gr.Row(scale=0, elem_classes="beside")
        key = gr.State("")
        shown = pictures("written")
        options = [number, temperature, *more]
        outputs = [shown, key]
        asking = [names, prompt, rows, *options]
        at_opening = self.begin(self.opened, self.write_first, asking, outputs)
        events = [
            self.listen(write.click, self.write, asking, outputs, cancels=at_opening),
            self.listen(prompt.submit, self.write, asking, outputs, cancels=at_opening),
            self.listen(go_on.click, self.go_on, [key, *options], outputs, cancels=at_opening),
        ]
        with stop:
            stop_button("stop", *events, *at_opening)

    def write_first(self, names, prompt, rows, number, *values):
        """Generates a short text for the example prompt. Changes nothing if there is none."""
        if prompt:
            yield from self.write(names, prompt, rows, min(number, FIRST_TOKENS), *values)
        else:
            yield gr.skip(), gr.skip()

    def _build_options(self):
        """Adds the components of all options but the temperature. Returns them in the order that `_options` expects."""
        with gr.Row():
            top_k = gr.Textbox("", label="Top k", info="only the k most likely tokens; empty: all", elem_id="top-k")
            top_p = gr.Slider(0.01, 1, 1, step=0.01, label="Top p", info=TOP_P)
            min_p = gr.Slider(0, 0.99, 0, step=0.01, label="Min p", info=MIN_P)
        with gr.Row():
            penalty = gr.Slider(0.5, 3, 1, step=0.05, label="Repetition penalty", info=PENALTY)
            window = gr.Number(REPETITION_WINDOW, label="Repetition window", info=WINDOW)
            seed = gr.Textbox("", label="Seed", info=SEED, elem_id="seed")
        with gr.Row():
            stop = gr.Textbox("", label="Stop strings", lines=2, info=r"one per line; \n is a newline")
            newline = gr.Checkbox(False, label="Stop at the end of a line")
            has_documents = any(view.vocab.document is not None for view in self.views.values())
            document = gr.Checkbox(True, label="Stop at the end of a document", visible=has_documents)
        return [top_k, top_p, min_p, penalty, window, seed, stop, newline, document]

    def _options(self, *values):
        """Returns the `options` of `LanguageModelView.start`.

        Raises ParameterError if a required number is missing, if `top_k` or `seed` is not a whole number, or for
        `repetition_window`. The ranges of the other options are checked later.

        Args:
            *values: the temperature, and the values of the components of `_build_options`.
        """
        *sampling, stop, newline, document = values
        options = dict(zip(SAMPLING, sampling, strict=True))
        optional = {name: whole_or_nothing(name, options.pop(name)) for name in ("top_k", "seed")}
        empty = [name for name, value in options.items() if value is None]
        if empty:
            sentence = "{name} must be a number, and is empty."
            raise Refusal(empty[0], None, "a number", sentence, name=said(empty[0]))
        options |= {name: value for name, value in optional.items() if value is not None}
        window = self.limits.check_number("repetition_window", options["repetition_window"], LONGEST_WINDOW)
        if options["repetition_penalty"] == 1:  # then the window has no effect, but its field always has a value
            window = REPETITION_WINDOW
        options["repetition_window"] = window
        ends = [unescape(line) for line in (stop or "").split("\n") if line]
        stops = {"stop_strings": ends, "stop_at_newline": bool(newline), "stop_at_document": bool(document)}
        return {"sampling": options, "stops": stops}

    @answered
    def write(self, names, prompt, rows, number, *values):
        """Generates samples with the chosen runs. Yields `(markup, key)`: the texts so far, and a key for `go_on`."""
        views = self.chosen(names)
        options = self._options(*values)
        number = self.limits.check_number("New tokens", number, self.limits.max_new_tokens)
        rows = self.limits.check_number("Samples", rows, self.limits.max_rows)
        texts = {name: view.start(prompt, rows, options) for name, view in views.items()}
        key = self.shelf.put((prompt, texts))
        yield from self._write(prompt, texts, number, options, key)

    @answered
    def go_on(self, key, number, *values):
        """Continues the texts that `write` has kept under the key. Yields what `write` yields."""
        written = self.shelf.get(key)
        options = self._options(*values)
        if written is None:
            sentence = "There is no text to continue, or the page has forgotten it. Generate a text first."
            raise Refusal("text", None, "generated before", sentence)
        prompt, texts = written
        number = self.limits.check_number("New tokens", number, self.limits.max_new_tokens)
        for name in texts:
            self.views[name].check(options)
        yield from self._write(prompt, texts, number, options, key)

    def _write(self, prompt, texts, number, options, key):
        """Generates tokens for all runs in turns, and yields `(markup, key)` about every `SECONDS`.

        Args:
            prompt: text.
            texts: `{name of a run: its samples}`.
            number: new tokens of each sample.
            options: see `LanguageModelView.start`.
            key: key of the texts on the shelf.
        """

        def show(writing):
            """Returns `(markup, key)` of the texts so far. `writing`: whether the generation is still running."""
            shown = {name: self.views[name].show_written(prompt, samples, writing) for name, samples in texts.items()}
            return side_by_side(shown, list(texts)), key

        yield show(True)
        generators = [self.views[name].write(samples, number, options) for name, samples in texts.items()]
        last_shown = time.monotonic()
        while generators:
            # Each generator yields `None` after a round of tokens; "ended" removes it from the list.
            generators = [generator for generator in generators if next(generator, "ended") is None]
            if time.monotonic() > last_shown + SECONDS:
                yield show(True)
                last_shown = time.monotonic()
        yield show(False)

    # --------------------------------------------------------------------------------------------- read and remember

    def _build_reading(self, tab, names, read, look, name, label):
        """Adds a text box, a button, the picture of the text, and the details of a clicked token.

        Args:
            tab: the tab that contains them. When it is opened, the example text is answered, unless there is none or
                the visitor has asked before.
            names: the component that chooses runs.
            read: handler that shows the text.
            look: handler of a click in the picture or in the details.
            name: beginning of the HTML ids of the components.
            label: label of the button.
        """
        text = gr.Textbox(self.spelled(PASSAGE), label="Text", lines=4, max_lines=20, elem_id=f"{name}-text")
        with gr.Row():
            button = gr.Button(label, variant="primary", min_width=80, scale=0, elem_id=name)
            stop = gr.Row(scale=0, elem_classes="beside")
        asked = gr.State(Asked())
        shown = pictures(f"{name}-shown")
        detail = pictures(f"{name}-detail")
        at_opening = self.begin(tab.select, read, [names, text], [shown, asked]) if self.spelled(PASSAGE) else []
        event = self.listen(button.click, read, [names, text], [shown, asked], cancels=at_opening)
        event.then(lambda: "", None, detail)
        with stop:
            stop_button(f"{name}-stop", event, *at_opening)
        for place in (shown, detail):
            self.listen(place.click, look, asked, [detail, asked])

    @answered
    def read(self, names, text):
        """Shows a text coloured by nll, for each chosen run."""
        views = self.chosen(names)
        for shown in in_turns({name: view.read(text) for name, view in views.items()}):
            yield shown, Asked(text, tuple(views), {})

    @answered
    def remember(self, names, text):
        """Shows a text coloured by the benefit of the memory, for each chosen run."""
        views = self.chosen(names)
        for shown in in_turns({name: view.remember(text) for name, view in views.items()}):
            yield shown, Asked(text, tuple(views), {})

    @answered
    def show_alternatives(self, asked, data: gr.EventData):
        """Shows the most likely tokens at the clicked position, for each run with the vocabulary of the clicked one."""
        asked = self._pick(asked, data)
        answers = {name: self.views[name].alternatives(asked.text, pick) for name, pick in asked.by_run.items()}
        yield side_by_side(answers, asked.names), asked

    @answered
    def show_look(self, asked, data: gr.EventData):
        """Shows where the heads look to predict the clicked token, and its nll with none, half and all of the memory.

        After a click on a head, it shows the attention of that head.
        """
        asked = self._pick(asked, data)
        width = width_of(asked.by_run)
        answers = {name: self.views[name].look(asked.text, pick, width) for name, pick in asked.by_run.items()}
        yield side_by_side(answers, asked.names), asked

    def _pick(self, asked, data):
        """Returns `asked` with the data of a click in `by_run`, for each run that answers the click.

        A click on a head is answered by its run. A click on a token is answered by all shown runs with the same
        vocabulary, because their tokens are at the same positions.
        """
        name, pick = self.clicked(asked, data)
        if ":" in pick:
            return asked._replace(by_run={**asked.by_run, name: pick})
        vocab = self.views[name].vocab
        alike = [other for other in asked.names if vocab.difference(self.views[other].vocab) is None]
        return asked._replace(by_run=dict.fromkeys(alike, pick))
