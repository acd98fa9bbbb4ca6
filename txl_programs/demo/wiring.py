"""The common parts of the pages of all tasks: the choice of runs, clicks in a picture, error messages."""

import functools
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import gradio as gr
from markupsafe import Markup

from txl_config.errors import shortened
from txl_programs.demo.language import Refusal, explained, said
from txl_programs.demo.limits import Limits
from txl_programs.demo.pieces import ROOM, element, notice, side_by_side
from txl_programs.demo.runs import OpenRun

MOST_RUNS = 2  # the largest number of runs side by side
# A click on what has `data-pick` says so, and in which of the runs' columns; by keyboard, too.
CLICKS = """
const say = event => {
  const target = event.target.closest('[data-pick]');
  if (!target || !element.contains(target)) return;
  const run = target.closest('[data-run]');
  trigger('click', {pick: target.dataset.pick, run: run ? run.dataset.run : '0'});
};
element.addEventListener('click', say);
element.addEventListener('keydown', event => { if (event.key === 'Enter') say(event); });
"""


class Asked(NamedTuple):
    """The last request of a visitor, which clicks refer to."""

    text: str = ""
    names: tuple[str, ...] = ()
    by_run: dict = {}  # name of a run: what clicks in it need, or what was clicked


class Board:
    """The runs of one task and their views, of which a visitor chooses one or two.

    Args:
        runs: `OpenRun` each.
        limits: `Limits`.

    Attributes:
        view: the class of the views, which a subclass names.
        opened: the event that a visitor opens the page.
        views: name of a run -> its view.
    """

    view: type
    opened: Any = None

    def __init__(self, runs: list[OpenRun], limits: Limits):
        self.views = {run.name: self.view(run, limits) for run in runs}
        self.limits = limits

    def spelled(self, text: str) -> str:
        """A text to begin with, or nothing where one of the runs cannot spell it."""
        try:
            for view in self.views.values():
                view.encode(text)
        except ValueError:
            return ""
        return text

    def choose(self) -> gr.CheckboxGroup:
        """The component to choose runs with; one run needs none."""
        names = list(self.views)
        label = "Runs, at most two side by side"
        return gr.CheckboxGroup(names, value=names[:MOST_RUNS], label=label, visible=len(names) > 1)

    def chosen(self, names: Any) -> dict[str, Any]:
        """The views of the chosen names. Raises `Refusal`, a ParameterError, unless there are 1 to `MOST_RUNS`."""
        views = {name: self.views[name] for name in names or () if name in self.views}
        if not 1 <= len(views) <= MOST_RUNS:
            sentence = "Choose one run, or two to compare. {number} are chosen."
            raise Refusal("runs", list(views), f"1 to {MOST_RUNS} runs", sentence, number=len(views))
        return views

    def listen(self, event: Callable, function: Callable, inputs: Any, outputs: Any, cancels: Any = None) -> Any:
        """Calls a function for an event. The limit of visitors counts the events of all functions.

        Args:
            event: of a component.
            function: a handler, with its `inputs` and `outputs`.
            cancels: other events, whose handlers stop.
        """
        limit = self.limits.visitors
        return event(function, inputs, outputs, concurrency_id="visitors", concurrency_limit=limit, cancels=cancels)

    def begin(self, event: Callable, function: Callable, inputs: list[Any], outputs: list[Any]) -> list[Any]:
        """Answers the first texts of the page at an event, such as the opening of a tab, if nothing was asked before.

        Args:
            event: of the page or of a tab.
            function: a handler. The last of its outputs is a state, which is empty before the first answer.
            inputs, outputs: of the handler.

        Returns:
            List of the event, for `cancels`; empty without examples.
        """
        if not self.limits.examples:
            return []

        def answer(state, *values):
            if state and state != Asked():
                yield tuple(gr.skip() for _ in outputs)
            else:
                yield from function(*values)

        return [self.listen(event, answer, [outputs[-1], *inputs], outputs)]

    def clicked(self, asked: Asked, data: gr.EventData) -> tuple[str, str]:
        """`(name, pick)`: in which run a visitor clicked, and on what."""
        sent = data._data if isinstance(data._data, dict) else {}
        places = {str(i): name for i, name in enumerate(asked.names)}
        pick = sent.get("pick")
        if str(sent.get("run")) not in places or not isinstance(pick, str):
            sentence = "There is no answer yet, or this click belongs to another page."
            raise Refusal("click", pick, "in a picture of this page", sentence)
        return places[str(sent["run"])], pick


def count_slider(most: int, value: int, label: str, **options: Any) -> gr.Slider:
    """The component to choose a number from 1 to `most` with. It is invisible if `most` is 1."""
    return gr.Slider(1, max(2, most), value, step=1, label=label, visible=most > 1, **options)


def pictures(name: str) -> gr.HTML:
    """A place for pieces, which hears of clicks.

    Its template must stay "${value}": text that gets into a template by another way is run as JavaScript.
    """
    return gr.HTML("", html_template="${value}", js_on_load=CLICKS, elem_id=name, elem_classes="pictures")


def room_of(names: Collection[str]) -> int:
    """Pixels of a picture of each of these runs, side by side."""
    gap = 20 if len(names) > 1 else 0
    return ROOM // max(1, len(names)) - gap


def answered(function: Callable) -> Callable:
    """Makes a handler of a generator of `(markup, state)`. If it raises ValueError, the page shows the sentence."""

    @functools.wraps(function)
    def answer(*arguments, **named):
        """Yields what the generator yields, with the markup as text; or a sentence instead of an error."""
        try:
            for markup, state in function(*arguments, **named):
                yield str(markup), state
        except ValueError as error:
            yield str(notice(shortened(explained(error)))), gr.skip()
        except Exception:  # a visitor must get a sentence, whatever has been sent
            traceback.print_exc()
            yield str(notice(said("This request cannot be answered. The server's terminal says why."))), gr.skip()

    return answer


def in_turns(steps: dict[str, Iterator[tuple[int, int, Markup | None]]]) -> Iterator[Markup]:
    """Runs several computations in turns. Shows the progress of each, and then its result."""
    shown = {}
    names = list(steps)
    while steps:
        for name in list(steps):
            done, total, result = next(steps[name])
            shown[name] = result or progress(done, total)
            if result is not None:
                del steps[name]
        yield side_by_side(shown, names)


def progress(done: int, total: int) -> Markup:
    """The progress of reading a text."""
    bar = element("progress", value=done, max=total)
    read = said("{done:,} of {total:,} tokens are read", done=done, total=total)
    return element("p", bar, f" {read}", class_="note")


def stop_button(name: str, *events) -> gr.Button:
    """A button that stops what these events began; what has been shown so far stays."""
    button = gr.Button("Stop", variant="stop", min_width=80, scale=0, elem_id=name)
    button.click(None, cancels=list(events), queue=False)
    return button
