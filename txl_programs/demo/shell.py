"""The page as a whole: a tab for every task, its looks, and the server that shows it to this machine."""

import logging
import os
import socket

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # it would report to its makers, and ask for newer versions

import fastapi
import gradio as gr
import uvicorn

from txl_programs.demo.language_model_page import LanguageModelPage
from txl_programs.demo.limits import Limits
from txl_programs.demo.line_pages import EncoderDecoderPage, TaggerPage
from txl_programs.demo.runs import OpenRun
from txl_programs.demo.style import CSS

PAGES = {
    "language_model": ("Language models", LanguageModelPage),
    "encoder_decoder": ("Encoder-decoders", EncoderDecoderPage),
    "tagger": ("Taggers", TaggerPage),
}
# Everything comes from here. The browser itself refuses the rest, whatever Gradio's next version would load.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; form-action 'self'; base-uri 'self'; "
    "frame-ancestors 'self'"
)
MOST_BYTES = 4 * 2**20  # of a request
TOO_MUCH = f"A request has at most {MOST_BYTES:,} bytes, and no files."
WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
REFUSED = ("/gradio_api/upload",)  # the page takes no files


class Guard:
    """Between server and page: refuses files and large requests, and sends `POLICY` with every answer."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0" if scope["method"] in WITHOUT_BODY else b"unknown")
        if not length.isdigit() or int(length) > MOST_BYTES or scope["path"].startswith(REFUSED):
            refuse = fastapi.responses.PlainTextResponse(TOO_MUCH, status_code=413)
            return await refuse(scope, receive, send)

        async def send_with_policy(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        await self.app(scope, receive, send_with_policy)


class Server(uvicorn.Server):
    """It ends in silence, also where browsers still have the page open, whose connections it cuts."""

    def handle_exit(self, sig, frame):
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)


def make_page(runs: list[OpenRun], limits: Limits) -> gr.Blocks:
    """The page of these runs: a tab for each of their tasks."""
    tasks = [task for task in PAGES if any(run.task == task for run in runs)]
    with gr.Blocks(title="txl_tf", analytics_enabled=False, fill_width=True) as page:
        described = " · ".join(f"**{escaped(run.name)}** {run.describe()}" for run in runs)
        gr.Markdown(f"## What the model reads, remembers and writes\n{described}")
        for task in tasks:
            name, kind = PAGES[task]
            of_task = kind([run for run in runs if run.task == task], limits)
            if len(tasks) == 1:
                of_task.build()
            else:
                with gr.Tab(name):
                    of_task.build()
    for block in page.blocks.values():
        if isinstance(block, gr.components.Component):
            pass_on_nothing(block)
    return page.queue(max_size=limits.waiting, api_open=False, status_update_rate=1)


def pass_on_nothing(component: gr.components.Component) -> None:
    """Has a component hand on `None`, as of a box that is emptied, where Gradio would fail: what answers says it."""
    own = component.preprocess
    component.preprocess = lambda payload: None if payload is None else own(payload)


def make_app(page: gr.Blocks, limits: Limits) -> fastapi.FastAPI:
    """The application that serves a page."""
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard)
    fonts = {"font": [gr.themes.Font("sans-serif")], "font_mono": [gr.themes.Font("monospace")]}
    greys = {"block_info_text_color": "*neutral_500", "block_info_text_color_dark": "*neutral_400"}
    theme = gr.themes.Base(primary_hue="blue", **fonts).set(**greys)
    return gr.mount_gradio_app(
        app, page, path="/", theme=theme, css=CSS, footer_links=[],
        run_history=False, show_error=False, ssr_mode=False, mcp_server=False, pwa=False, enable_monitoring=False,
        allowed_paths=[], max_file_size=1,
    )  # fmt: skip


def serve(runs: list[OpenRun], limits: Limits, host: str, port: int) -> None:
    """Shows the page until it is stopped.

    Raises:
        ValueError: nothing can listen at this address.
    """
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise ValueError(f"host and port must be free to listen at, got {host} and {port}: {error}") from error
    app = make_app(make_page(runs, limits), limits)
    print(f"http://{host}:{listening.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    Server(config).run(sockets=[listening])


def escaped(name: str) -> str:
    """A name in Markdown."""
    return "".join(f"\\{c}" if c.isascii() and not c.isalnum() and c not in " " else c for c in name)
