"""README and docs: their code runs as it stands, their links and files exist, and what they say of the code is so.

The code runs in a folder of its own with a small quickstart: the same model after four steps. Numbers that the pages
show are those of the whole quickstart and are not compared; names, shapes and messages are. REST and gRPC requests go
to a stand-in for TensorFlow Serving that speaks its protocols.
"""

import ast
import base64
import concurrent.futures
import contextlib
import http.server
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from helpers import ROOT, mentions, program, raises_naming
from tensorflow.core.protobuf import saved_model_pb2

import txl_tf
from txl_tf.data.text_files import pydoc_text
from txl_tf.runs.scoring import score_lines

PAGES = {
    path.name: path.read_text() for path in [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md"))]
}
OF_PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")  # their code does not run
CHINESE = [page for page in PAGES if page.endswith(".zh.md")]
BLOCKS = {  # (page, language, number): code
    (page, language, i): code
    for page, text in PAGES.items()
    if page not in CHINESE  # their code is that of the English pages
    for i, (language, code) in enumerate(re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S))
}

# The blocks of bash that do not run here, by a word in them, and why.
NOT_RUN = {
    "python3 -m venv": "installs; .ci/run runs it",
    "docker": "needs the image of TensorFlow Serving; a stand-in takes its place",
    "wt103": "needs the text or the published model",
    "--scaling": "takes ten minutes",
    "--against": "takes half an hour",
    "mkdocs": "serves until it is stopped; site_test.py builds the same site",
    "ray start": "needs several machines; tests/ray_training_test.py has a cluster of one",
    "tools/serve.py": "serves until it is stopped; another test runs it",
    "tools/demo.py": "serves until it is stopped; tests/demo_browser_test.py has it",
    "demo_screenshots": "needs a browser and trained runs",
}
# What becomes of a training in a command: the same model after a few steps.
FEW_STEPS = "--train_steps=4 --iterations=2 --save_steps=2 --warmup_steps=1 --sample_tokens=20 --max_eval_batch=3"
SHORTER = {
    "classify.py": "classify.py --epochs=1 --length=256",
    "--kind=context": "--kind=context --max_tokens=1000",
    "--kind=memory": "--kind=memory --max_tokens=3000",
    "--num_last_checkpoints=5": "--num_last_checkpoints=2",
}
STATE = (1, 4, 2, 4, 64, 32)  # of the quickstart's model, as docs/serving.md says


def blocks(language, of=None):
    return {key: code for key, code in BLOCKS.items() if key[1] == language and of in (None, key[0])}


def named(key):
    page, language, i = key
    return f"{page}-{language}-{i}"


def is_run(code):
    return not any(word in code for word in NOT_RUN)


# ------------------------------------------------------------------------------------------------ what the pages say


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readme_is_at_most_200_lines(page):
    assert len(PAGES[page].splitlines()) <= 200


@pytest.mark.parametrize("page", CHINESE)
def test_chinese_pages_have_the_code_and_the_numbers_of_the_english_ones(page):
    english = PAGES[page.replace(".zh.md", ".md")]
    for block in re.findall(r"^```.*?^```", PAGES[page], re.M | re.S):
        assert block in english, block
    assert {*re.findall(r"\d+\.\d+", PAGES[page])} <= {*re.findall(r"\d+\.\d+", english)}


@pytest.mark.parametrize("page", [*PAGES, *OF_PROJECT])
def test_a_page_contains_no_unresolved_merge(page):
    folder = ROOT / "docs" if (ROOT / "docs" / page).exists() else ROOT
    assert not re.search(r"^(<{7}|={7}|>{7})( |$)", (folder / page).read_text(), re.M)


@pytest.mark.parametrize("page", [*PAGES, *OF_PROJECT])
def test_links_lead_to_files_and_headings(page):
    folder = ROOT / "docs" if (ROOT / "docs" / page).exists() else ROOT
    text = re.sub(r"^```.*?^```", "", (folder / page).read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        found = (folder / path).resolve() if path else folder / page
        assert found.exists(), f"{page} links to {target}"
        if heading and found.suffix == ".md":  # articles_test.py has the lines of code
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}
            assert heading in slugs, f"{page} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, *OF_PROJECT])
def test_files_that_are_named_exist(page):
    folder = ROOT / "docs" if (ROOT / "docs" / page).exists() else ROOT
    parts = "layers|data|training|models|runs|serving|convert"
    places = r"txl_tf|txl_programs|tools|tests|docs|configs|examples|\.github"
    pattern = rf"(?<![\w/.-])(?:(?:{places})/[\w./*-]+|(?:{parts})/\w+\.py)"
    for name in re.findall(pattern, (folder / page).read_text()):
        name = name.rstrip(".")
        assert any(ROOT.glob(name)) or any((ROOT / "txl_tf").glob(name)), f"{page} names {name}"


@pytest.mark.parametrize("page", [*PAGES, *OF_PROJECT])
def test_nothing_points_outside_the_repository(page):
    folder = ROOT / "docs" if (ROOT / "docs" / page).exists() else ROOT
    text = (folder / page).read_text()
    assert "shared/" not in text
    assert "the documents" not in text


COMMAND = re.compile(r"(?:\.venv/bin/)?python (\S+\.py)(.*)$")


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_the_flags_they_use(page):
    """Of all commands, those that do not run here too."""
    code = "\n".join(blocks("bash", page).values()).replace("\\\n", " ")
    for line in re.split(r"\n|\|| && ", code):
        command = COMMAND.search(line)
        if not command:
            continue
        path, arguments = command.groups()
        with contextlib.closing(program(path)) as loaded:
            next(loaded)
            known = {*flags.FLAGS, *(f"no{name}" for name in flags.FLAGS), "flagfile"}
        given = re.findall(r"(?<!\S)--(\w+)", " ".join(shlex.split(arguments, comments=True)))
        assert set(given) <= known, line


def functions_of(path):
    """Functions, classes and `Class.method`s of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_the_stops_of_the_architecture_are_functions_of_these_files():
    stops = re.findall(r"^\| \d+ \| `([^`]+\.py)` \| (.*?) \|", PAGES["architecture.md"], re.M)
    assert len(stops) > 25
    for name, functions in stops:
        path = ROOT / name if (ROOT / name).exists() else ROOT / "txl_tf" / name
        assert set(re.findall(r"`([^`]+)`", functions)) <= functions_of(path), name


def test_the_architecture_lists_every_file():
    table = PAGES["architecture.md"].split("## Files")[1].split("\n## ")[0]
    files = {str(path.relative_to(ROOT / "txl_tf")) for path in (ROOT / "txl_tf").rglob("*.py")}
    files |= {str(path.relative_to(ROOT)) for path in (ROOT / "txl_config").rglob("*.py")}
    assert set(re.findall(r"`([\w/]+\.py)`", table)) == {name for name in files if not name.endswith("__init__.py")}


def test_the_readme_says_what_is_public():
    assert "`txl_tf.__all__`" in PAGES["README.md"]
    for name in set(re.findall(r"txl_tf\.(\w+)", PAGES["README.md"])) - {"__all__"}:
        assert name in txl_tf.__all__, name


# ----------------------------------------------------------------------------------------- Python that needs no run


@pytest.mark.slow
def test_the_python_of_the_readme_runs_and_what_it_saves_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    of_lm, of_layer = {}, {}
    for names, code in zip((of_lm, of_layer), blocks("python", "README.md").values(), strict=True):
        exec(code, names)
    assert float(capsys.readouterr().out.split("nats per token:")[1].split()[0]) < np.log(256)
    assert of_lm["text"].shape == (1, 60)
    assert of_lm["log_probs"].shape == (1, 20, 256)

    loaded = keras.saving.load_model("lm.keras")
    nll, _ = loaded.score(of_lm["tokens"], of_lm["labels"])
    np.testing.assert_allclose(nll, of_lm["nll"], rtol=1e-6)
    assert loaded.optimizer.iterations == of_lm["lm"].optimizer.iterations
    back = txl_tf.TransformerXLLM(**{name: loaded.get_config()[name] for name in of_lm["lm"].get_config()})
    txl_tf.load_tf1_checkpoint(back, "ckpt/model.ckpt-0")
    np.testing.assert_allclose(back.score(of_lm["tokens"], of_lm["labels"])[0], nll, rtol=1e-6)
    tokens = np.arange(40).reshape(2, 20)
    classifier = keras.saving.load_model("classifier.keras")
    np.testing.assert_allclose(classifier(tokens), of_layer["classifier"](tokens), rtol=1e-5)


@pytest.mark.slow
def test_the_python_of_the_layers_page_runs_and_what_it_writes_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code, *_), names = blocks("python", "layers.md").values(), {}
    exec(code, names)
    ids = np.array([[3, 1, 4, 0], [5, 9, 0, 0]], np.int32)
    expected = names["model"](ids)
    np.testing.assert_allclose(keras.saving.load_model("encoder.keras")(ids), expected, rtol=1e-5)
    served = tf.saved_model.load("encoder")
    np.testing.assert_allclose(served.serve(ids), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(served.serve(ids[1:, :2]), expected[1:], rtol=1e-4, atol=1e-5)  # padding does not count


@pytest.mark.slow
def test_the_python_of_the_transformer_page_learns_and_what_it_saves_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code, own_loss), names = blocks("python", "transformer.md").values(), {}
    exec(code, names)
    assert float(re.search(r"([\d.]+)% of the symbols", capsys.readouterr().out)[1]) > 95
    loaded = keras.saving.load_model("reverse.keras")
    inputs = names["source"][:4], names["target"][:4, :-1]
    np.testing.assert_allclose(loaded(inputs), names["logits"], rtol=1e-5)
    assert names["ids"].shape == (4, 2, 8) and names["scores"].shape == (4, 2)
    exec(own_loss, names)
    own = names["SmallLogits"].from_config(loaded.get_config())
    own(inputs)
    own.set_weights(loaded.get_weights())
    own.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=9))
    pair = names["source"][:4], names["target"][:4]
    losses = [float(model.train_on_batch(*pair, return_dict=True)["loss"]) for model in (own, loaded)]
    assert losses[0] == pytest.approx(losses[1] + 1e-3 * np.mean(np.square(names["logits"])), rel=1e-4)


@pytest.mark.slow
def test_the_python_of_the_ner_page_learns_and_what_it_saves_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,), names = blocks("python", "ner.md").values(), {}
    exec(code, names)
    assert float(re.search(r"F1 ([\d.]+)", capsys.readouterr().out)[1]) > 0.9
    loaded = keras.saving.load_model("tagger.keras")
    np.testing.assert_array_equal(loaded.decode({"chars": names["chars"][:4]})[0], names["best"])
    assert names["nll"].shape == (4,) and names["entities"]["ends"].shape == (4, 12)


@pytest.mark.slow
@pytest.mark.parametrize("i", [0, 1], ids=["tf.data", "datasets"])
def test_the_python_of_the_data_page_prepares_what_it_is_given(tmp_path, monkeypatch, capsys, i):
    if i == 1:
        pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    code, names = list(blocks("python", "data.md").values())[i], {}
    exec(code, names)
    if i == 0:
        assert capsys.readouterr().out.startswith("The cat sat on the mat. \u00e9\u00e8</s>The c")
    else:
        stories = [json.loads(line)["text"] for line in (tmp_path / "stories/one.jsonl").read_text().splitlines()]
        found = b"".join(bytes(ids[ids < 256].tolist()) for ids in map(np.asarray, names["corpus"].splits.values()))
        assert found == "".join(stories).encode() and "bytes" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- a small quickstart, and bash


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder like the repository's, in which the quickstart has four steps."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("train.py", "tools", "examples", "txl_tf"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "configs").mkdir()
    few_steps = FEW_STEPS.replace(" ", "\n")
    (folder / "configs" / "quickstart.cfg").write_text(
        f"{(ROOT / 'configs/quickstart.cfg').read_text()}\n{few_steps}\n"
    )
    dates, steps = (ROOT / "configs/seq2seq_quickstart.cfg").read_text(), "\n".join(FEW_STEPS.split()[:4])
    (folder / "configs" / "seq2seq_quickstart.cfg").write_text(f"{dates}\n--n_pairs=200\n--eval_sources=20\n{steps}\n")
    (folder / "configs" / "wt2_small.cfg").write_text(f"{(ROOT / 'configs/wt2_small.cfg').read_text()}\n{few_steps}\n")
    write_texts(folder)
    return folder


def write_texts(folder):
    """The texts of one's own that the pages name."""
    text = pydoc_text()[:20_000]
    for name in ("my.txt", "other.txt"):
        (folder / name).write_text("The cat sat on the mat. \u00e9\u00e8\n" * 10 + text)
    lines = [f" {line} \n" for line in text.splitlines() if line]
    (folder / "wiki.test.tokens").write_text("".join(lines))
    (folder / "wiki.valid.tokens").write_text("".join(itertools.islice(itertools.cycle(lines), 3760)))
    (folder / "stories").mkdir()
    lines = (json.dumps({"text": part}) for part in text.split("\n\n") if part)
    (folder / "stories" / "one.jsonl").write_text("\n".join(lines))


def run_bash(code, folder, **addresses):
    """The output of a block that runs as it stands, but for the Python, the number of steps and the addresses."""
    code = code.replace(".venv/bin/python", shlex.quote(sys.executable))
    few = dict(re.findall(r"--(\w+)=(\d+)", FEW_STEPS))
    code = re.sub(r"--(\w+)=\d+", lambda flag: f"--{flag[1]}={few[flag[1]]}" if flag[1] in few else flag[0], code)
    for short, shorter in SHORTER.items():
        if "--max_tokens" not in shorter or "--text=" not in code:  # it limits the text of a file
            code = code.replace(short, shorter)
    for port, address in addresses.items():
        code = code.replace(f"localhost:{port.removeprefix('port_')}", address)
    script = f"set -euo pipefail\n{code}\nwait\n"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{code}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def free_address():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return f"localhost:{found.getsockname()[1]}"


@pytest.fixture(scope="module")
def five_minutes(workplace):
    """What the training prints that the README installs for, and what its other blocks print."""
    install, *others = blocks("bash", "README.md").values()
    (train,) = re.findall(r"\.venv/bin/python train\.py .*", install)
    return [run_bash(code, workplace) for code in (train, *filter(is_run, others))]


@pytest.mark.slow
def test_the_five_minutes_of_the_readme(five_minutes, workplace):
    train, generate, *_ = five_minutes
    shown = re.findall(r"^```\n(pydoc: .*?)^```", PAGES["README.md"], re.M | re.S)[0]
    text_and_model = [*itertools.takewhile(lambda line: not line.startswith("step "), shown.splitlines())]
    assert len(text_and_model) == 2 and all(line in train for line in text_and_model)  # as in the whole quickstart
    pattern = (
        r"step +\d+/\d+ \| loss [\d.]+ \| bpc [\d.]+ \| lr [\de.-]+ \| grad norm [\d.]+ \| [\d,]+ tokens/s \| \S+ left"
    )
    assert re.search(pattern, train)
    assert re.search(pattern, shown)
    assert generate.startswith("The import statement")
    assert re.search(r"valid: loss [\d.]+ nats \| bpc [\d.]+ \|", train)
    for name in ("config.json", "vocab.txt", "log.csv", "best/best.json", "train"):
        assert (workplace / "runs" / "quickstart" / name).exists(), name


RUN_ELSEWHERE = [
    key for key, code in blocks("bash").items() if is_run(code) and key[0] not in ("README.md", "serving.md")
]


@pytest.mark.slow
@pytest.mark.parametrize("key", RUN_ELSEWHERE, ids=named)
def test_the_commands_of_the_docs_run(key, five_minutes, workplace):
    addresses = {f"port_{port}": free_address() for port in re.findall(r"localhost:(\d+)", BLOCKS[key])}
    run_bash(BLOCKS[key], workplace, **addresses)
    for name in re.findall(r"--(?:output|token_nll|output_dir|tf1_checkpoint)=(\S+)", BLOCKS[key]):
        assert (workplace / name).exists(), name


@pytest.mark.slow
def test_the_python_of_the_guide_gives_a_training_a_callback(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("the cat sat on the mat, and so on and on.\n" * 500)
    (code,) = (code for code in blocks("python", "guide.md").values() if "train_run(" in code)
    exec(code, {})
    noted = [line.split() for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"\d+ [\d.]+", line)]
    assert [int(step) for step, _ in noted] == [50, 100, 150, 200]
    assert float(noted[-1][1]) < float(noted[0][1])


@pytest.mark.slow
def test_the_python_of_the_guide_scores_lines_as_the_program(five_minutes, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    (code,) = (code for code in blocks("python", "guide.md").values() if "score_lines(" in code)
    exec(code, {})
    found = [line.split() for line in capsys.readouterr().out.splitlines()]
    (command,) = (code for code in blocks("bash", "guide.md").values() if "score.py" in code)
    rows = [row.split("\t") for row in run_bash(command, workplace).splitlines()]
    assert [words[:3] for words in found] == [row[-1].split() for row in rows]
    np.testing.assert_allclose([float(words[3]) for words in found], [float(row[0]) for row in rows], rtol=1e-5)


@pytest.mark.slow
def test_the_python_of_the_guide_trains_with_weights_and_in_steps_of_its_own():
    _, _, *codes = (code for code in blocks("python", "guide.md").values() if "lm_eval" not in code)
    names = {}
    for code in codes:
        exec(code, names)
    nll, labels = names["nll"].numpy(), names["labels"].numpy()
    np.testing.assert_array_equal(nll > 0, labels >= 25)
    lm = names["Logging"].from_config(names["lm"].get_config())
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-2, train_steps=9))
    one = names["answers"].take(1)  # of several steps, the loss is weighted and the other numbers are their mean
    for found in (lm.fit(one, verbose=0).history, lm.evaluate(one, verbose=0, return_dict=True)):
        found = {name: np.ravel(value)[0] for name, value in found.items()}
        assert found["bits"] == pytest.approx(found["loss"] / np.log(2), rel=1e-5)


@pytest.mark.slow
def test_the_python_of_the_guide_evaluates_a_task(five_minutes, workplace, monkeypatch, capsys):
    pytest.importorskip("lm_eval", reason="the harness needs lm-eval: pip install lm-eval")
    monkeypatch.chdir(workplace)
    question = {"question": "The import", "choices": [" statement", " potato"], "answer": 0}
    (workplace / "questions.jsonl").write_text(json.dumps(question) + "\n")
    (code,) = (code for code in blocks("python", "guide.md").values() if "lm_eval" in code)
    names = {}
    exec(code, names)
    assert names["results"]["results"]["pep"]["acc,none"] in (0, 1)


@pytest.mark.slow
def test_the_python_of_the_faq_runs(five_minutes, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    names = {}
    for code in blocks("python", "faq.md").values():
        exec(code, names)
    assert names["hidden"].shape == (*names["ids"].shape, 128)


# ------------------------------------------------------------------------------------------------------- serving


class StandIn:
    """Signatures of a SavedModel, as TensorFlow Serving runs them."""

    def __init__(self, directory):
        self.loaded = tf.saved_model.load(str(directory))
        model = saved_model_pb2.SavedModel.FromString((Path(directory) / "saved_model.pb").read_bytes())
        self.signatures = model.meta_graphs[0].signature_def

    def dtypes(self, signature):
        return {
            name: spec.dtype for name, spec in self.loaded.signatures[signature].structured_input_signature[1].items()
        }

    def __call__(self, signature, inputs):
        defaults = self.signatures[signature].defaults  # of what the request leaves out
        defaults = {name: tf.constant(tf.make_ndarray(value)) for name, value in defaults.items()}
        return self.loaded.signatures[signature](**{**defaults, **inputs})


def rest_server(stand_in, name):
    """TensorFlow Serving's REST in columns: `inputs` is a dict, `outputs` one too, or the only output by itself."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == f"/v1/models/{name}:predict"
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            dtypes = stand_in.dtypes(request["signature_name"])
            inputs = {key: tf.constant(decoded(value), dtypes[key]) for key, value in request["inputs"].items()}
            try:
                outputs = {
                    key: encoded(value.numpy().tolist(), key)
                    for key, value in stand_in(request["signature_name"], inputs).items()
                }
                status, body = 200, {"outputs": outputs if len(outputs) > 1 else next(iter(outputs.values()))}
            except tf.errors.InvalidArgumentError as error:
                status, body = 400, {"error": error.message}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body, indent=1).encode())

        def log_message(self, *arguments):
            pass

    return http.server.ThreadingHTTPServer(("localhost", 0), Handler)


def decoded(value):
    """JSON as arguments: strings as they are, other bytes as `{"b64": ...}`."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    return base64.b64decode(value["b64"]) if isinstance(value, dict) else value


def encoded(value, name):
    if isinstance(value, list):
        return [encoded(item, name) for item in value]
    if isinstance(value, bytes):
        return {"b64": base64.b64encode(value).decode()} if name.endswith("_bytes") else value.decode()
    return value


@pytest.fixture(scope="module")
def exported(five_minutes, workplace):
    """The stand-in, with what the first block of docs/serving.md writes."""
    export = next(code for code in blocks("bash", "serving.md").values() if "--output=serving/quickstart" in code)
    assert run_bash(export, workplace) == "serving/quickstart/1\n"
    return StandIn(workplace / "serving" / "quickstart" / "1")


@pytest.fixture(scope="module")
def rest(exported):
    """Address of the REST server."""
    server = rest_server(exported, "quickstart")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"localhost:{server.server_address[1]}"
    server.shutdown()


REST = [key for key, code in blocks("bash", "serving.md").items() if "curl" in code]


def answers_shown(key):
    """The answers in the block of JSON that follows a block of commands."""
    page, _, i = key
    return json_values(BLOCKS[page, "json", i + 1])


def json_values(text):
    """JSON values one after the other."""
    found, decoder, text = [], json.JSONDecoder(), text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].strip()
    return found


def shape_of(value):
    """Names, lengths and types; an error is its message about an argument."""
    if isinstance(value, dict):
        return {key: "error" if key == "error" else shape_of(item) for key, item in value.items()}
    return [shape_of(item) for item in value] if isinstance(value, list) else type(value).__name__


def test_rest_blocks_have_their_answers():
    assert len(REST) == 2
    assert [len(answers_shown(key)) for key in REST] == [5, 2]


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs the commands curl and jq")
def test_the_rest_requests_by_curl(rest, workplace):
    found = json_values(run_bash("\n".join(BLOCKS[key] for key in REST), workplace, port_8501=rest))
    expected = [answer for key in REST for answer in answers_shown(key)]
    assert [shape_of(answer) for answer in found] == [shape_of(answer) for answer in expected]
    assert found[0]["outputs"][0].startswith("The import statement")
    assert found[1]["outputs"]["symbols"] == [["i", "f", " ", "x"], ["i", "", "", ""]]
    assert found[2]["outputs"]["lengths"] == [7, 3]
    assert mentions(found[3]["error"], "temperature", 0)
    assert all(text.startswith("The import statement") for text in found[4]["outputs"][0])


@pytest.mark.slow
def test_the_rest_requests_without_curl(rest):
    """The bodies of the first block, so that a machine without curl tests them too."""
    bodies = re.findall(r"-d '(.*?)'", BLOCKS[REST[0]], re.S)
    for body, expected in zip(bodies, answers_shown(REST[0]), strict=True):
        request = urllib.request.Request(f"http://{rest}/v1/models/quickstart:predict", body.encode())
        try:
            with urllib.request.urlopen(request) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            answer = json.load(error)
        assert shape_of(answer) == shape_of(expected)


@pytest.fixture(scope="module")
def grpc_address(exported):
    """Address of a gRPC server with TensorFlow Serving's PredictionService."""
    grpc = pytest.importorskip("grpc")
    apis = pytest.importorskip("tensorflow_serving.apis.prediction_service_pb2_grpc")
    from tensorflow_serving.apis import predict_pb2

    class Service(apis.PredictionServiceServicer):
        def Predict(self, request, context):
            assert request.model_spec.name == "quickstart"
            inputs = {name: tf.constant(tf.make_ndarray(proto)) for name, proto in request.inputs.items()}
            try:
                outputs = exported(request.model_spec.signature_name, inputs)
            except tf.errors.InvalidArgumentError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
            response = predict_pb2.PredictResponse()
            for name, value in outputs.items():
                response.outputs[name].CopyFrom(tf.make_tensor_proto(value))
            return response

    unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2), options=unlimited)
    apis.add_PredictionServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("localhost:0")
    server.start()
    yield f"localhost:{port}"
    server.stop(None)


@pytest.mark.slow
def test_the_grpc_client(grpc_address, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    (code,) = (code for code in blocks("python", "serving.md").values() if "grpc" in code)
    names = {}
    exec(code.replace("localhost:8500", grpc_address), names)
    assert names["scored"]["nll"].shape == (1, 4)
    assert names["written"]["text"][0].startswith(b"The import statement")
    assert names["state"].shape == STATE
    assert names["likely"]["ids"].shape == names["likely"]["log_probs"].shape == (1, 3)
    assert names["more"].shape == (6,)

    lm, vocab = txl_tf.load_run("runs/quickstart")
    text, mems, expected = vocab.encode("The import statement is used to bind names."), None, []
    np.testing.assert_array_equal(names["text"], [text])
    for start in (0, 14, 28):
        nll, mems = lm.score(text[None, start : start + 14], text[None, start + 1 : start + 15], mems)
        expected.append(float(tf.reduce_sum(nll)))
    np.testing.assert_allclose([float(line) for line in capsys.readouterr().out.split()], expected, rtol=1e-4)

    import grpc

    with raises_naming(grpc.RpcError, "temperature", 0):
        names["call"]("generate_text", text=["a"], **{**names["sampling"], "temperature": np.float32([-1])})


@pytest.mark.slow
def test_the_saved_model_without_a_server(exported, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    printed, found = run_python_of(
        "serving/quickstart", texts='texts', nll='scored["nll"]', lengths='scored["lengths"]', ids="ids", score="nll",
        state='answer["state"]', next='answer["ids"]',
    )  # fmt: skip
    assert printed.startswith("The import statement")
    assert found["texts"].shape == (2, 2) and all(text.startswith(b"The import") for text in found["texts"][0])
    assert found["lengths"].tolist() == [5, 2]
    expected = [line.nll for line in score_lines(*txl_tf.load_run("runs/quickstart"), ["if x", "i"])]
    np.testing.assert_allclose(found["nll"].sum(1), expected, rtol=1e-5)
    assert found["ids"].shape == (2, 7) and found["score"].shape == (1, 1)
    assert found["state"].shape == STATE and found["next"].shape == (1, 3)


@pytest.mark.slow
def test_onnx_tflite_and_tensorflow_js(five_minutes, workplace, monkeypatch, capsys):
    for name in ("tf2onnx", "onnxruntime"):
        pytest.importorskip(name, reason=f"ONNX needs {name}: pip install tf2onnx onnx onnxruntime")
    monkeypatch.chdir(workplace)
    (export,) = (code for code in blocks("bash", "serving.md").values() if "--format=onnx" in code)
    run_bash(export, workplace)
    lm, vocab = txl_tf.load_run("runs/quickstart")
    by_onnx, by_tflite, for_js = (
        next(code for code in blocks("python", "serving.md").values() if word in code)
        for word in ("onnxruntime", "tf.lite", "plain_model")
    )
    names = {"lm": lm}
    for code in (by_onnx, by_tflite, for_js):
        exec(code, names)
    ids = vocab.encode("The import statement is used to ")[None]
    mems = lm.initial_mems(1)
    for segment in (ids[:, :16], ids[:, 16:]):
        log_probs, mems = lm.log_probs(segment, mems)
    assert capsys.readouterr().out.rstrip("\n") == vocab.symbols[int(np.argmax(log_probs[0, -1]))]
    assert tf.saved_model.load("plain_model").signatures


@pytest.mark.slow
def test_the_server_and_its_client(five_minutes, workplace, monkeypatch, capsys):
    pytest.importorskip("openai", reason="the client needs openai: pip install openai")
    pytest.importorskip("starlette", reason="the server needs starlette: pip install starlette uvicorn")
    monkeypatch.chdir(workplace)
    (command,) = (code for code in blocks("bash", "serving.md").values() if "tools/serve.py" in code)
    words = shlex.split(command.replace(".venv/bin/python", shlex.quote(sys.executable)))
    process = subprocess.Popen([*words, "--port=0"], stdout=subprocess.PIPE, text=True, cwd=workplace)
    try:
        address = process.stdout.readline().partition("/v1/")[0]
        (code,) = (code for code in blocks("python", "serving.md").values() if "openai" in code)
        names = {}
        exec(code.replace("http://localhost:8501", address), names)
    finally:
        process.terminate()
        process.wait()
    assert names["answer"].choices[0].text and len(capsys.readouterr().out) > 40


def run_python_of(served, **expressions):
    """Runs the block of docs/serving.md that loads a served model, in a process of its own.

    Returns:
        `(output, found)`: what it prints; `{name: array}` of `{name: expression}`.
    """
    (code,) = (code for code in blocks("python", "serving.md").values() if f'load("{served}' in code)
    found = ", ".join(f"{name}={expression}.numpy()" for name, expression in expressions.items())
    save = "**{name: x.astype('S') if x.dtype == object else x for name, x in found.items()}"
    code += f"\nimport numpy as np\nfound = dict({found})\nnp.savez('found.npz', {save})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, dict(np.load("found.npz"))


@pytest.mark.slow
def test_the_encoder_decoder_of_the_serving_page(workplace, monkeypatch):
    (commands,) = (code for code in blocks("bash", "serving.md").values() if "seq2seq" in code)
    assert run_bash(commands, workplace).endswith("serving/dates/1\n")
    monkeypatch.chdir(workplace)
    _, found = run_python_of(
        "serving/dates", text='found["text"]', scores='found["scores"]', lengths='scored["lengths"]', ids='ids["ids"]',
        nll="nll",
    )  # fmt: skip
    assert found["text"].shape == found["scores"].shape == (1, 2)
    assert found["lengths"].tolist() == [11]
    assert found["ids"].shape[:2] == (2, 2) and found["nll"].shape == (1, 2)


@pytest.mark.slow
def test_the_table_of_signatures(exported):
    of_lm = PAGES["serving.md"].split("## Signatures")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", of_lm, re.M)
    shown = {name: tuple(set(re.findall(r"`([a-z_]+)`", cell)) for cell in cells) for name, *cells in rows}
    signatures = exported.loaded.signatures
    assert shown == {
        name: (set(exported.dtypes(name)), set(function.structured_outputs)) for name, function in signatures.items()
    }


def test_every_block_is_run_or_named():
    """Every block of Python and bash is run by a test above, or a word of NOT_RUN says why not."""
    pages = {"README.md", "data.md", "faq.md", "guide.md", "layers.md", "ner.md", "serving.md", "transformer.md"}
    pages |= {"articles.md"}  # articles_test.py runs them
    pages |= {"research.md"}  # research_test.py runs them
    pages |= {"development.md"}  # new_family_test.py runs it
    assert {key[0] for key in blocks("python")} == pages
    assert {key[1] for key in BLOCKS} <= {"bash", "python", "json", "bibtex"}
    for word in NOT_RUN:
        assert any(word in code for code in blocks("bash").values()), word
