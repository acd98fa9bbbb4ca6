"""The documentation site: built strictly, whole, found by its search, and without a request to another machine.

It needs the extra `docs`, and for its last tests Debian's packages chromium and chromium-driver.
"""

import functools
import html.parser
import http.server
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pytest
from helpers import ROOT, raises_naming
from pages import gallery, links, notebook

import txl_tf

PUBLIC = [
    f"{package}.{name}"
    for package in ("txl_tf", "txl_tf.layers", "txl_tf.config")
    for name in importlib.import_module(package).__all__
    if not inspect.ismodule(getattr(importlib.import_module(package), name))
]
PICTURES = sorted(path.name for path in (ROOT / "docs").glob("*.png"))


# ------------------------------------------------------------------------------------------- without building it

PLACES = {
    "README.md": "index.md",
    "docs/guide.md": "guide.md",
    "docs/memory.png": "memory.png",
    "deploy/README.md": "deploy.md",
    "txl_tf/files.py": "source:txl_tf/files.py",
}


def test_mkdocs_serve_watches_all_that_the_pages_are_made_of():
    pytest.importorskip("mkdocstrings", reason='needs the extra docs: pip install -e ".[docs]"')
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"))
    made_of = {*config.extra["included"].values(), *config.extra["packages"], "tools/documentation"}
    assert {os.path.relpath(path, ROOT) for path in config.watch} >= made_of


@pytest.mark.parametrize(
    "written, origin, src_uri, expected",
    [
        ("[a](docs/guide.md#b)", "README.md", "index.md", "[a](guide.md#b)"),
        ("![a\nb](docs/memory.png)", "README.md", "index.md", "![a\nb](memory.png)"),
        ("[a](../README.md#install)", "docs/guide.md", "guide.md", "[a](index.md#install)"),
        ("[a](../docs/guide.md)", "deploy/README.md", "deploy.md", "[a](guide.md)"),
        ("[a](guide.md)", "docs/guide.md", "models/guide.md", "[a](../guide.md)"),
        ("[a](../txl_tf/files.py#L12)", "docs/guide.md", "guide.md", "[a](source:txl_tf/files.py#L12)"),
        ("[a](#b) [c](https://d.org/README.md)", "README.md", "index.md", "[a](#b) [c](https://d.org/README.md)"),
        ("```\n[a](docs/guide.md)\n```", "README.md", "index.md", "```\n[a](docs/guide.md)\n```"),
        ("[![a](https://b.org/c)](LICENSE)\nd ![e](https://f.org/g)", "README.md", "index.md", "d "),
        ("[a](gone.md)", "README.md", "index.md", "[a](gone.md)"),  # mkdocs --strict names it
    ],
)
def test_links_fit_the_place_of_a_page(written, origin, src_uri, expected):
    assert links.rewritten(written, origin, src_uri, PLACES) == expected


def test_links_to_lines_of_code():
    found = links.with_sources('<a href="source:a/b.py#L12">x</a><a href="source:LICENSE">y</a>', "../{}/".format)
    assert found == '<a href="../a/b.py/#__span-0-12">x</a><a href="../LICENSE/">y</a>'


def test_flags_stay_in_one_line():
    found = links.with_whole_flags("<code>--mem_len</code> <code>a --b</code>")
    assert found == '<code class="flag">--mem_len</code> <code>a --b</code>'


def test_names_in_running_text_lead_to_the_reference():
    name, code = "<code>rel_shift</code>", '<a class="name" href="r#s"><code>rel_shift</code></a>'
    left_alone = f"<pre>{name}</pre><h2>{name}</h2><a href='x'>{name}</a><code>rel_shift(x)</code>"
    assert links.names_linked(f"<p>{name}</p>{left_alone}", {"rel_shift": "r#s"}) == f"<p>{code}</p>{left_alone}"


def test_a_name_leads_to_the_public_function_and_to_no_class_with_a_double():
    pytest.importorskip("griffe", reason='needs the extra docs: pip install -e ".[docs]"')
    from pages import reference

    public = ["a.layers.Pairs", "a.layers.rel_shift", "a.layers.Tagger"]
    private = {"b": ["a.b.Pairs", "a.b.rel_shift", "a.b.one_name"], "c": ["a.c.one_name", "a.c.OneClass"]}
    found = reference.names_in_code({"p.md": (None, public, {}), "i.md": (None, [], private)})
    short = {name: place for name, place in found.items() if "." not in name}
    assert short == {
        "rel_shift": ("p.md", "a.layers.rel_shift"),
        "Tagger": ("p.md", "a.layers.Tagger"),
        "OneClass": ("i.md", "a.c.OneClass"),
    }
    assert {found[path] for path in public} == {("p.md", path) for path in public}
    assert found["a.b.Pairs"] == ("i.md", "a.b.Pairs")


def test_the_command_of_a_picture():
    block = "```bash\npython a.py --kind=b \\\n  --output=c.png\npython d.py --output=e.png\n```"
    assert gallery.command_of("c.png", [block]) == "python a.py --kind=b --output=c.png"
    assert gallery.command_of("e.png", ["by `python f.py --output=e.png`, and"]) == "python f.py --output=e.png"
    assert gallery.folded("python a.py --bb=1 --cc=2", width=16) == "python a.py \\\n  --bb=1 --cc=2"
    with raises_naming(ValueError, "--output=g.png"):
        gallery.command_of("g.png", [block])


def test_the_headings_above_a_picture_are_not_comments_of_code():
    block = "```bash\n# a comment\npython a.py --output=b.png\n```"
    text = f"# Title\n\n## Part one\n\n{block}\n\n![A](b.png)\n"
    found = gallery.page({"docs/c.md": text}, {"docs/c.md": "c/", "docs/b.png": "b.png"})
    assert "## Part one\n\n[![A](b.png)](c/#part-one)\n\nA: [Title](c/#part-one)." in found
    with pytest.raises(ValueError, match="docs/c.md"):
        gallery.page({"docs/c.md": f"{block}\n![A](b.png)\n"}, {"docs/c.md": "c/", "docs/b.png": "b.png"})


def test_a_notebook_becomes_a_page(tmp_path):
    outputs = [
        {"output_type": "stream", "text": ["\x1b[1mone\x1b[0m\n", "two\n"]},
        {"output_type": "display_data", "data": {"image/png": "QUJD\n", "text/plain": ["<Figure>"]}},
        {"output_type": "execute_result", "data": {"text/plain": ["3"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# A\n", "b"]},
        {"cell_type": "code", "source": ["1 + 2"], "outputs": outputs},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert notebook.to_markdown(tmp_path / "a.ipynb").split("\n\n") == [
        "# A\nb",
        "```python\n1 + 2\n```",
        "```text\none\ntwo\n```",
        '<img alt="Picture of the code above" src="data:image/png;base64,QUJD">',
        "```text\n3\n```\n",
    ]


# ------------------------------------------------------------------------------------------------- the built site


class Page(html.parser.HTMLParser):
    """Anchors of a page, its links, and what a browser loads for it."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loaded = {""}, [], []
        self.text = path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs.get("id"), attrs.get("name")}
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        elif tag == "link" and attrs.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(attrs["href"])
        elif attrs.get("src"):
            self.loaded.append(attrs["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built by `mkdocs build --strict`."""
    pytest.importorskip("mkdocstrings", reason='needs the extra docs: pip install -e ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """`{path: Page}`."""
    return {str(path.relative_to(site)): Page(path) for path in site.rglob("*.html")}


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(pages):
    assert len(PUBLIC) > 100
    of_reference = {path: page for path, page in pages.items() if path.startswith("reference/")}
    for name in PUBLIC:
        places = [path for path, page in of_reference.items() if name in page.anchors]
        assert len(places) == 1, f"{name}: {places}"
        folder = places[0].removeprefix("reference/").removesuffix("index.html")
        assert f"{folder}#{name}" in pages["reference/index.html"].links, name
    anchors = {anchor for page in of_reference.values() for anchor in page.anchors if anchor}
    assert not [anchor for anchor in anchors if re.match(r"txl_tf\..*\._", anchor)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TransformerXL", "TransformerXLLM", "TransformerLM", "Transformer", "Tener", "Flat"])
def test_models_show_the_arguments_that_they_take(pages, name):
    """Also those of a group of hyper-parameters, which a decorator adds."""
    (page,) = (page for page in pages.values() if f"txl_tf.{name}" in page.anchors)
    shown = re.search(rf'id="txl_tf\.{name}".*?<pre.*?>(.*?)</pre>', page.text, re.S)[1]
    shown = re.sub(r"<[^>]*>", "", shown)
    parameters = inspect.signature(getattr(txl_tf, name)).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    assert {*names} == {*re.findall(r"^\s+(\w+)[:=]", shown, re.M)} | ({*names} & {"args"})
    assert re.search(r"dropout: float = 0\.|rate: float = 0\.1", shown)


@pytest.mark.slow
def test_hyper_parameters_have_their_checks_in_words(pages):
    text = pages["reference/training-and-runs/hyper-parameters/index.html"].text
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", text))
    assert "n_layer (int) – Layers. Required. The flag's default: 6. It must be at least 1 and at most 10,000." in text
    # The wording of the help may change; its characters are escaped, and default and check follow it.
    assert re.search(
        r"token_dropout \(float\) – [^.]*&lt;unk&gt;[^.]*\. Default: 0\.0\. It must lie in \[0, 1\)\.", text
    )
    assert "It must be one of float32, bfloat16, float16, auto." in text


@pytest.mark.slow
def test_generate_is_a_method_of_language_models(pages):
    page = pages["reference/models/transformer-xl/index.html"]
    assert "txl_tf.TransformerXLLM.generate" in page.anchors
    assert "Call arguments:" in page.text
    assert "Args:" not in page.text  # a section that Griffe did not know


@pytest.mark.slow
def test_the_reference_shows_the_methods_of_users_first_and_no_internals(pages):
    text = pages["reference/models/transformer-xl/index.html"].text
    shown = re.findall(r'id="txl_tf\.(\w+\.\w+)"', text)
    methods = [name for name in shown if name.startswith("TransformerXLLM.")]
    assert methods[:5] == [f"TransformerXLLM.{name}" for name in ("fit", "evaluate", "generate", "score", "log_probs")]
    assert "TransformerXL.attention" in shown
    assert not {"TransformerXL.forward", "TransformerXL.enter", "TransformerXLLM.step_with_memory"} & {*shown}
    internal = "txl_tf.transformer_xl.cache.cached_forward"
    assert internal not in text
    assert internal in pages["reference/internals/models-transformer-xl/index.html"].anchors


@pytest.mark.slow
def test_every_link_leads_somewhere(site, pages):
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or path == "404.html":
                continue
            target = (site / path).parent / urllib.parse.unquote(parts.path) if parts.path else site / path
            target = Path(os.path.normpath(target / "index.html" if target.is_dir() else target))
            found = pages.get(str(target.relative_to(site)))
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.exists() or (found and anchor not in found.anchors):
                wrong.append(f"{path}: {link}")
    assert not wrong


@pytest.mark.slow
def test_the_readme_is_the_front_page(pages):
    headings = re.findall(r"^## (.*)$", (ROOT / "README.md").read_text(), re.M)
    assert re.findall(r"<h2[^>]*>(.*?)<a", pages["index.html"].text) == headings
    assert "guide/#pictures" in pages["index.html"].links


@pytest.mark.slow
def test_the_front_page_has_its_pictures_and_a_column_of_pages(site, pages):
    page = pages["index.html"]
    pictures = [address for address in page.loaded if address.endswith(".png") and "assets" not in address]
    assert pictures == re.findall(r"!\[[^\]]*\]\(docs/([\w-]+\.png)\)", (ROOT / "README.md").read_text()) != []
    assert all((site / picture).exists() for picture in pictures)
    column = re.search(r'<div class="md-sidebar md-sidebar--primary"[^>]*>', page.text)[0]
    assert "hidden" not in column
    assert {"learn/", "faq/", "guide/"} <= {*page.links}


@pytest.mark.slow
def test_the_gallery_has_every_picture_with_its_command(pages):
    page = pages["gallery/index.html"]
    assert sorted(src.removeprefix("../") for src in page.loaded if src.endswith(".png") and "assets" not in src) == (
        PICTURES
    )
    text = re.sub(r"<[^>]*>", "", page.text)
    for name in PICTURES:
        assert f"--output={name}" in text or name.startswith("demo-"), name
    assert text.count("demo_screenshots.py runs docs") == sum(name.startswith("demo-") for name in PICTURES)


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site, pages):
    for path, page in pages.items():
        for address in page.loaded:
            assert not re.match(r"(https?:)?//", address), f"{path}: {address}"
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", path.read_text()), path


@pytest.mark.slow
@pytest.mark.parametrize(
    "word, location",
    [
        ("rel_shift", "reference/layers/attention-and-positions/#txl_tf.layers.rel_shift"),
        ("Distributed", "distributed/"),
        ("位置编码", "articles.zh/"),
        ("early stopping", "faq/#how-do-i-use-early-stopping"),
        ("GPU memory", "faq/#out-of-memory-gpu-memory-or-main-memory"),
        ("tokenizer", "faq/#can-i-use-my-own-tokenizer"),
        ("export a model to ONNX", "faq/#can-i-export-a-model-to-onnx-tflite-or-tensorflowjs"),
        ("hidden states", "faq/#how-do-i-get-hidden-states-or-an-embedding-of-a-text"),
    ],
)
def test_the_search_index_has_it(site, word, location):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = [entry for entry in entries if word in (entry["title"] + entry["text"]).replace("\u200b", "")]
    assert location in [entry["location"] for entry in found]
    assert not [entry for entry in entries if entry["location"].startswith("source/")]


# --------------------------------------------------------------------------------------------------- in a browser


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address(site):
    """Where the site is served on this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@pytest.fixture
def browser():
    """Chromium without a window, with a log of its requests."""
    webdriver = pytest.importorskip("selenium.webdriver", reason='needs the extra docs: pip install -e ".[docs]"')
    paths = shutil.which("chromium"), shutil.which("chromedriver")
    if None in paths:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1400,1000"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(paths[1]))
    driver.implicitly_wait(20)
    yield driver
    driver.quit()


def requests_of(browser):
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]


def of_this_machine(urls, address):
    local = (address, "data:", f"blob:{address}", "chrome:", "about:")
    return [url for url in urls if url.startswith(local)]


@pytest.mark.slow
def test_the_search_finds_rel_shift_and_no_request_leaves_the_machine(browser, address):
    browser.get(address)
    browser.find_element("css selector", "label.md-search__icon, [data-md-component=search-query]")
    browser.execute_script("document.querySelector('#__search').click()")
    browser.find_element("css selector", "[data-md-component=search-query]").send_keys("rel_shift")
    results = browser.find_elements("css selector", ".md-search-result__item a")
    found = {urllib.parse.urlsplit(result.get_attribute("href")).path for result in results}
    assert "/reference/layers/attention-and-positions/" in found

    browser.get(f"{address}reference/layers/attention-and-positions/#txl_tf.layers.rel_shift")
    assert browser.find_element("id", "txl_tf.layers.rel_shift").is_displayed()
    urls = requests_of(browser)
    assert f"{address}search/search_index.json" in urls
    assert of_this_machine(urls, address) == urls


@pytest.mark.slow
@pytest.mark.parametrize("words", ["early stopping", "GPU memory", "tokenizer", "export onnx", "hidden states"])
def test_the_search_leads_to_the_answer(browser, address, words):
    browser.get(address)
    browser.find_element("css selector", "[data-md-component=search-query]")
    browser.execute_script("document.querySelector('#__search').click()")
    browser.find_element("css selector", "[data-md-component=search-query]").send_keys(words)
    browser.find_element("css selector", ".md-search-result__item a")
    results = browser.find_elements("css selector", ".md-search-result__item > a")
    found = [urllib.parse.urlsplit(result.get_attribute("href")).path for result in results]
    assert "/faq/" in found[:3], found


@pytest.mark.slow
def test_a_light_and_a_dark_theme(browser, address):
    def scheme():
        return browser.find_element("tag name", "body").get_attribute("data-md-color-scheme")

    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    )
    browser.get(address)
    assert scheme() == "default"
    (toggle,) = (
        label for label in browser.find_elements("css selector", "label[for^=__palette]") if label.is_displayed()
    )
    toggle.click()
    assert scheme() == "slate"
