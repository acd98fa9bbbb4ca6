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
from txl_programs.demo.pieces import PAGE_WIDTH, element, notice, side_by_side
from txl_programs.demo.runs import OpenRun

MOST_RUNS = 2  # the largest number of runs side by side
# JavaScript that reports a click, or the key Enter, on an element with `data-pick`: its data, and the index of the run.
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
    by_run: dict = {}  # name of a run -> data that the handlers of its clicks need, such as the last click


class Board:
    """Base of the pages of the tasks. It has the runs of one task, of which a visitor chooses one or two.

    Args:
        runs: list of `OpenRun`.
        limits: `Limits`.

    Attributes:
        view: class of the views, which a subclass names.
        opened: Gradio's function that adds a handler for the opening of the page.
        views: `{name of a run: its view}`.
    """

    view: type
    opened: Any = None

    def __init__(self, runs: list[OpenRun], limits: Limits):
        self.views = {run.name: self.view(run, limits) for run in runs}
        self.limits = limits

    def spelled(self, text: str) -> str:
        """Returns `text`, an example text; or "" if the vocabulary of one of the runs cannot encode it."""
        try:
            for view in self.views.values():
                view.encode(text)
        except ValueError:
            return ""
        return text

    def choose(self) -> gr.CheckboxGroup:
        """Adds the component by which a visitor chooses runs. It is invisible if there is only one run."""
        names = list(self.views)
        label = "Runs, at most two side by side"
        return gr.CheckboxGroup(names, value=names[:MOST_RUNS], label=label, visible=len(names) > 1)

    def chosen(self, names: Any) -> dict[str, Any]:
        """Returns the views of the chosen runs, by name. Raises ParameterError unless 1 to `MOST_RUNS` are chosen."""
        views = {name: self.views[name] for name in names or () if name in self.views}
        if not 1 <= len(views) <= MOST_RUNS:
            sentence = "Choose one run, or two to compare. {number} are chosen."
            raise Refusal("runs", list(views), f"1 to {MOST_RUNS} runs", sentence, number=len(views))
        return views

    def listen(self, event: Callable, function: Callable, inputs: Any, outputs: Any, cancels: Any = None) -> Any:
        """Connects an event with a handler. All handlers together answer at most `Limits.visitors` events at a time.

        Args:
            event: Gradio's function that adds a handler, such as `button.click`.
            function: the handler.
            inputs, outputs: components whose values are arguments and results of the handler.
            cancels: events, from earlier calls, whose handlers are stopped when this event occurs.

        Returns:
            The event, to cancel it or to add another handler after it.
        """
        limit = self.limits.visitors
        return event(function, inputs, outputs, concurrency_id="visitors", concurrency_limit=limit, cancels=cancels)

    def begin(self, event: Callable, function: Callable, inputs: list[Any], outputs: list[Any]) -> list[Any]:
        """Connects an event, such as the opening of a tab, with a handler that answers the example texts of the page.

        The handler is not called if the visitor has asked something before.

        Args:
            event: see `listen`.
            function: the handler.
            inputs, outputs: see `listen`. The last output is a state, which is empty before the first answer.

        Returns:
            List with the event, for `cancels`; an empty list with --noexamples, which connects nothing.
        """
        if not self.limits.examples:
            return []

        def answer(state, *values):
            """Calls the handler, unless the state shows that a visitor has asked before."""
            if state and state != Asked():
                yield tuple(gr.skip() for _ in outputs)
            else:
                yield from function(*values)

        return [self.listen(event, answer, [outputs[-1], *inputs], outputs)]

    def clicked(self, asked: Asked, data: gr.EventData) -> tuple[str, str]:
        """Returns `(name, pick)`: the run in whose column a visitor clicked, and the data of the click.

        Raises ParameterError if the click does not belong to the answer to `asked`.
        """
        sent = data._data if isinstance(data._data, dict) else {}
        places = {str(i): name for i, name in enumerate(asked.names)}
        pick = sent.get("pick")
        if str(sent.get("run")) not in places or not isinstance(pick, str):
            sentence = "There is no answer yet, or this click belongs to another page."
            raise Refusal("click", pick, "in a picture of this page", sentence)
        return places[str(sent["run"])], pick


def count_slider(most: int, value: int, label: str, **options: Any) -> gr.Slider:
    """Adds a slider for a number from 1 to `most`. It is invisible if `most` is 1."""
    return gr.Slider(1, max(2, most), value, step=1, label=label, visible=most > 1, **options)


def pictures(name: str) -> gr.HTML:
    """Adds a component that shows HTML pieces, and reports clicks in them.

    Its template must stay "${value}": text that gets into a template by another way is run as JavaScript.
    """
    return gr.HTML("", html_template="${value}", js_on_load=CLICKS, elem_id=name, elem_classes="pictures")


def width_of(names: Collection[str]) -> int:
    """Returns the width in pixels of the picture of one run, if the pictures of the runs `names` are side by side."""
    gap = 20 if len(names) > 1 else 0
    return PAGE_WIDTH // max(1, len(names)) - gap


def answered(function: Callable) -> Callable:
    """Decorator: makes a handler of a function that yields `(markup, state)`. An error becomes a sentence on the page.

    For a ValueError, the sentence is its message. Other errors are printed on the terminal of the server, and the
    sentence refers to it.
    """

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
    """Runs several computations in turns. After each round, yields their progress, or their results if they are done.

    Args:
        steps: `{name of a run: iterator}`. An iterator yields `(done, total, None)` and, at the end, its result as the
            third value. The dictionary is emptied.
    """
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
    """Returns a bar and a sentence for the progress of reading a text: `done` of `total` tokens."""
    bar = element("progress", value=done, max=total)
    read = said("{done:,} of {total:,} tokens are read", done=done, total=total)
    return element("p", bar, f" {read}", class_="note")


def stop_button(name: str, *events) -> gr.Button:
    """Adds a button that stops the handlers of these events. What they have shown so far stays."""
    button = gr.Button("Stop", variant="stop", min_width=80, scale=0, elem_id=name)
    button.click(None, cancels=list(events), queue=False)
    return button
