"""The whole page: a tab for every task, its style, and the server that shows it on this machine."""

import math
import os
from collections.abc import Mapping
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # it would report to its makers, and ask for newer versions
os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "100")  # Gradio keeps only so many records of requests in memory

import fastapi
import gradio as gr
from gradio import themes
from gradio.components import Component
from markupsafe import escape

from txl_config.errors import brief, shortened
from txl_programs.demo.language import explained, labels_in, preferred, said, speaking
from txl_programs.demo.language_model_page import LanguageModelPage
from txl_programs.demo.limits import Limits
from txl_programs.demo.line_pages import EncoderDecoderPage, TaggerPage
from txl_programs.demo.runs import OpenRun
from txl_programs.demo.server.guard import Guard
from txl_programs.demo.style import CSS
from txl_programs.web.connections import make_server
from txl_programs.web.listening import listen, url_of
from txl_programs.web.terminal import plain_output

TITLE = "# Look into a trained model"
PAGES = {
    "language_model": ("Language models", LanguageModelPage),
    "encoder_decoder": ("Encoder-decoders", EncoderDecoderPage),
    "tagger": ("Taggers", TaggerPage),
}


class Page(gr.Blocks):
    """A page in the language of each visitor's browser."""

    chinese: Mapping[str, str] = {}  # English label -> Chinese label, for labels that only this page has

    @property
    def config(self):
        """The configuration that Gradio sends to browsers, with labels in the language of the request."""
        return labels_in(self._config, self.chinese)

    @config.setter
    def config(self, config):
        self._config = config

    async def process_api(self, *args, request: gr.Request | None = None, **options):
        """Answers an event, in the language of the request."""
        with speaking(preferred(getattr(request, "headers", {}).get("accept-language"))):
            return await super().process_api(*args, request=request, **options)


def make_page(runs: list[OpenRun], limits: Limits) -> gr.Blocks:
    """Returns the page for these runs. If they have several tasks, each task has a tab."""
    tasks = [task for task in PAGES if any(run.task == task for run in runs)]
    with Page(title="txl_tf", analytics_enabled=False, fill_width=True) as page:
        gr.Markdown(TITLE, elem_id="title")
        english = described(runs)
        gr.Markdown(english, elem_id="about")
        with speaking("zh"):
            page.chinese = {english: described(runs)}
        for task in tasks:
            name, kind = PAGES[task]
            board = kind([run for run in runs if run.task == task], limits)
            board.opened = page.load
            if len(tasks) == 1:
                board.build()
            else:
                with gr.Tab(name):
                    board.build()
    for block in page.blocks.values():
        if isinstance(block, Component):
            explain_wrong_values(block)
    return page.queue(max_size=limits.waiting, api_open=False, status_update_rate=1)


def explain_wrong_values(component: Component) -> None:
    """Makes a component answer a wrong value with a sentence. Otherwise Gradio would print a traceback.

    For an empty box, whose value is `None`, Gradio would fail, too. The component passes `None` to the handlers, which
    report it.
    """
    preprocess_of_gradio = component.preprocess

    def preprocess(payload):
        """Converts a value that the page sent. Raises gr.Error with a sentence if it is wrong."""
        if payload is None:
            return None
        try:
            if isinstance(payload, float) and not math.isfinite(payload):
                raise ValueError(payload)
            return preprocess_of_gradio(payload)
        except Exception as error:  # any kind of error, because the value may be anything
            if isinstance(error, gr.Error):
                sentence = explained(ValueError(error.message))
            else:
                sentence = said("A box cannot hold {value}.", value=brief(payload))
            raise gr.Error(str(escape(shortened(str(sentence)))), print_exception=False) from None

    component.preprocess = preprocess


def make_app(page: gr.Blocks, limits: Limits, host: str) -> fastapi.FastAPI:
    """Returns the application that serves a page behind a `Guard`.

    Args:
        page: the page, from `make_page`.
        limits: limits of requests and of what the page keeps.
        host: address or name at which the server listens. For the hosts that requests may name, see `is_own_host`.
    """
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, page=page, limits=limits, host=host)
    page.state_session_capacity = limits.sessions
    page._queue.pending_messages_per_session.max_size = limits.sessions  # most sessions whose unread messages are kept
    fonts: Any = {"font": [themes.Font("sans-serif")], "font_mono": [themes.Font("monospace")]}
    greys = {"block_info_text_color": "*neutral_500", "block_info_text_color_dark": "*neutral_400"}
    theme = themes.Base(primary_hue="blue", **fonts).set(**greys)
    return gr.mount_gradio_app(
        app, page, path="/", theme=theme, css=CSS, footer_links=[],
        run_history=False, show_error=False, ssr_mode=False, mcp_server=False, pwa=False, enable_monitoring=False,
        allowed_paths=[], max_file_size=1,
    )  # fmt: skip


def serve(runs: list[OpenRun], limits: Limits, host: str, port: int) -> None:
    """Serves the page of these runs until the program is stopped. Prints the address of the page.

    Raises:
        ParameterError: the server cannot listen at this host and port.
    """
    listening = listen(host, port)
    app = make_app(make_page(runs, limits), limits, host)
    print(url_of(host, listening), flush=True)
    with plain_output():
        make_server(app).run(sockets=[listening])


def described(runs: list[OpenRun]) -> str:
    """Returns a paragraph on every run, in Markdown."""
    return "\n\n".join(f"**{escaped(run.name)}** {run.describe()}" for run in runs)


def escaped(name: str) -> str:
    """Returns a name, escaped for Markdown."""
    return "".join(f"\\{c}" if c.isascii() and not c.isalnum() and c not in " " else c for c in name)
