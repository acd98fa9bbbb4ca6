"""Runs on the Hugging Face Hub and the original's published checkpoints, from servers on the loopback interface."""

import http.server
import json
import os
import re
import shutil
import threading
from functools import partial

import numpy as np
import pytest
from helpers import (
    assert_variables_equal,
    make_cache,
    make_run,
    program,
    raises_naming,
    raises_parameter,
    run_here,
    word_vocab,
)
from hub_server import hub_server
from pytorch_models import tensors_of, write_case
from torch_files import write_zip

import txl_tf
from txl_tf.convert import hub as hub_module
from txl_tf.convert.hub import Address
from txl_tf.data.text.corpus import load_corpus
from txl_tf.runs.folder import RunFolder

pytestmark = pytest.mark.ci

pytest.importorskip("huggingface_hub", reason="the hub needs huggingface_hub: pip install huggingface_hub")

WORDS = word_vocab().symbols


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_server() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
        yield found


@pytest.fixture
def published(hub, small_lm, tmp_path):
    """A model in the files of transfo-xl-wt103, on the hub: `pytorch_model.bin` and a pickled vocabulary."""
    lm = small_lm(layer_norm_epsilon=1e-5, cutoffs=[5, 12], div_val=2, proj_share_all_but_first=True, untie_r=True)
    path = write_case(tmp_path / "case", lm, "hf", WORDS)
    os.remove(path)
    tensors = {n if n.startswith("crit.") else f"transformer.{n}": a for n, a in tensors_of(lm, "hf").items()}
    write_zip(tmp_path / "case" / "pytorch_model.bin", tensors)
    hub.add("some/transfo-xl", {**contents(tmp_path / "case"), "README.md": b"a card", "tf_model.h5": b"x" * 9999})
    return lm


def test_a_checkpoint_of_the_hub_is_a_run(hub, published, tmp_path):
    lm, vocab = txl_tf.load_run("hf://some/transfo-xl")
    assert_variables_equal(txl_tf.tf1_variables(lm), txl_tf.tf1_variables(published))
    assert vocab.symbols == WORDS
    asked = [path for method, path in hub.requests if method == "GET"]
    assert not [path for path in asked if "README" in path or "tf_model" in path]  # only what the run is made of
    hub.requests.clear()
    txl_tf.load_run("hf://some/transfo-xl", mem_len=6)
    assert hub.requests == [("GET", "/api/models/some/transfo-xl/revision/main")]  # converted once
    assert not list((tmp_path / "cache").rglob("*.tmp")) and not list((tmp_path / "cache").rglob("*.bin"))


@pytest.mark.slow
def test_it_generates_and_is_evaluated_by_the_programs(hub, published, tmp_path, capsys, caplog):
    for tool in program("tools/generate.py"):
        options = ["--prompt=w1 w2", "--greedy", "--max_new_tokens=5"]
        assert not run_here(tool, "--model_dir=hf://some/transfo-xl", *options)
    shown = capsys.readouterr().out
    vocab = word_vocab()
    tokens = published.generate(vocab.encode("w1 w2")[None], max_new_tokens=5, temperature=0.0).numpy()
    assert vocab.decode(tokens[0]) == shown.rstrip("\n")
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4\n" * 20)
    options = ["--do_train=False", "--do_eval", f"--eval_path={text}", "--tgt_len=4", "--eval_batch_size=1"]
    for tool in program("train.py"):
        assert not run_here(tool, "--model_dir=hf://some/transfo-xl", *options)
        assert re.search(r"loss [\d.]+ nats", capsys.readouterr().out + caplog.text)
        with pytest.raises(ValueError):  # its folder is in the cache
            run_here(tool, "--model_dir=hf://some/transfo-xl", f"--data_path={text}", "--level=word", "--train_steps=2")
    pipe = txl_tf.pipeline("hf://some/transfo-xl@main")
    assert len(list(pipe.score_lines(["w1 w2"]))) == 1


def test_a_new_commit_is_another_run_and_without_the_hub_the_last_one_serves(hub, published, monkeypatch, caplog):
    first = RunFolder("hf://some/transfo-xl").path
    hub.repositories["some/transfo-xl"]["README.md"] = b"another card"
    second = RunFolder("hf://some/transfo-xl").path
    assert first != second and RunFolder(f"hf://some/transfo-xl@{os.path.basename(second)}").path == second
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with caplog.at_level("WARNING", "txl_tf"):
        assert RunFolder("hf://some/transfo-xl").path == second
    with raises_naming(OSError, "some/other"):
        RunFolder("hf://some/other")


def test_what_cannot_be_opened_is_named(hub, published, tmp_path):
    hub.add("some/empty", {"README.md": b""})
    hub.add("some/bert", {"config.json": b'{"model_type": "bert"}', "model.safetensors": b""})
    hub.add("some/none", {"config.json": b'{"model_type": "transfo-xl"}', "flax_model.msgpack": b""})
    hub.add("some/deep", {"config.json": b"[" * 100_000, "model.safetensors": b""})
    for address in ("hf://", "hf://a/b/c", "hf://a/../b", "hf://a b", "hf://no/such", "hf://some/transfo-xl@nothing",
                    "hf://some/empty", "hf://some/none"):  # fmt: skip
        with raises_parameter("model_dir", limit=""):
            RunFolder(address)
    for address in ("hf://some/bert", "hf://some/deep"):
        with pytest.raises(ValueError):
            RunFolder(address)
    assert not list((tmp_path / "cache").rglob("config.json"))  # no part of a run is left
    folder = RunFolder("hf://some/transfo-xl")
    with raises_parameter("model_dir", "hf://some/transfo-xl"), folder.locked():
        pass


def test_a_pickle_with_code_is_refused(hub, published):
    files = hub.repositories["some/transfo-xl"]
    files["vocab.pkl"] = b"cos\nsystem\n(S'echo harm'\ntR."
    with pytest.raises(ValueError):
        RunFolder("hf://some/transfo-xl")


def test_a_run_goes_to_the_hub_and_back(hub, tmp_path, monkeypatch):
    make_run(tmp_path / "run", word_vocab())
    config = RunFolder(tmp_path / "run").read_config()
    address = txl_tf.push_to_hub(tmp_path / "run", "me/mine", license="apache-2.0", private=True)
    assert address == "hf://me/mine" and hub.private == ["me/mine"]
    files = hub.repositories["me/mine"]
    assert "vocab.txt" in files and "config.json" in files
    pushed = json.loads(files["config.json"])
    assert pushed["model"] == config["model"] and "data_path" not in pushed["data"]
    card = files["README.md"].decode()
    assert (
        "license: apache-2.0" in card and 'pipeline("hf://me/mine")' in card and "pipeline_tag: text-generation" in card
    )
    lm, vocab = txl_tf.load_run(address)
    expected, _ = txl_tf.load_run(tmp_path / "run")
    assert_variables_equal(txl_tf.tf1_variables(lm), txl_tf.tf1_variables(expected))
    assert vocab.symbols == WORDS
    for tool in program("tools/convert_checkpoint.py"):
        assert not run_here(tool, "--to_hub=me/again", f"--model_dir={tmp_path / 'run'}")
        for name, flag in (("corpus", "--corpus=x"), ("to_tf1", "--to_tf1")):
            with raises_parameter(name):
                run_here(tool, "--to_hub=me/again", f"--model_dir={tmp_path / 'run'}", flag)
    assert "me/again" in hub.repositories
    for arguments in ({"repository": "a/b/c"}, {"repository": "a/b", "license": "two words"}):
        with raises_parameter(list(arguments)[-1]):
            txl_tf.push_to_hub(tmp_path / "run", **arguments)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OSError, match=r"^hf://me/mine\b.* uploaded\b"):  # not that the repository cannot be fetched
        txl_tf.push_to_hub(tmp_path / "run", "me/mine")


@pytest.mark.parametrize("name", ["config.json", "vocab.txt", "ckpt-1.index", "ckpt-1.data-00000-of-00001"])
@pytest.mark.parametrize("missing", [False, True])
def test_a_damaged_run_is_named_and_not_kept(hub, tmp_path, name, missing):
    """The hub may be mended afterwards, and the next call must fetch the run again."""
    make_run(tmp_path / "run", word_vocab())
    files = contents(tmp_path / "run")
    assert name in files
    if missing:
        del files[name]
    else:
        middle = len(files[name]) // 2
        changed = b"{" if name == "config.json" else bytes([files[name][middle] ^ 1])
        files[name] = files[name][:middle] + changed + files[name][middle + 1 :]
    hub.add("me/mine", files)
    with raises_naming(ValueError, "hf://me/mine"):
        txl_tf.load_run("hf://me/mine")
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_addresses():
    assert Address.of("hf://o/n") == ("o/n", "main") and str(Address.of("hf://o/n@v1.0/")) == "hf://o/n@v1.0"
    assert Address.of("hf://transfo-xl-wt103").repository == "transfo-xl-wt103"
    assert Address.of("hf://o/n@refs/pr/1/") == ("o/n", "refs/pr/1")


def test_a_checkpoint_of_the_original_authors_by_name(tmp_path, monkeypatch, small_lm):
    """From a server with the layout of tf/sota/download.sh, and a small model in the place of the published one."""
    lm = small_lm(n_token=4, cutoffs=[2, 3], mem_len=1600, clamp_len=1000, same_length=True)
    folder = tmp_path / "server" / "tf_wt103"
    (folder / "data").mkdir(parents=True)
    txl_tf.save_tf1_checkpoint(lm, folder / "model" / "model.ckpt-0")
    make_cache(folder / "data" / "cache.pkl", monkeypatch)
    info = {"vocab_size": 4, "cutoffs": [0, 2, 3, 4], "dataset": "wt103"}
    (folder / "data" / "corpus-info.json").write_text(json.dumps(info))
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "server"))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        monkeypatch.setenv("TXL_ORIGINAL_URL", f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            files = tmp_path / "cache" / "original" / "wt103-files"
            (files / "model").mkdir(parents=True)
            (files / "model" / "model.ckpt-0.index").write_bytes(b"<html>not found</html>")
            with raises_naming(ValueError, "original://wt103", files):
                txl_tf.load_run("original://wt103")
            shutil.rmtree(files)  # as the message says
            found, vocab = txl_tf.load_run("original://wt103")
        finally:
            server.shutdown()
            thread.join()
    assert_variables_equal(txl_tf.tf1_variables(found), txl_tf.tf1_variables(lm))
    assert found.network.mem_len == 1600 and found.network.same_length
    shutil.rmtree(tmp_path / "server")
    assert txl_tf.load_run("original://wt103")[1].symbols == vocab.symbols  # from the cache
    assert load_corpus(RunFolder("original://wt103").path + "-data").splits["test"].tolist() == [3]
    with raises_parameter("model_dir", "original://ptb"):
        txl_tf.load_run("original://ptb")


def test_the_published_models_are_those_of_the_flag_files():
    """The settings that no file of a checkpoint contains, and the numbers of parameters, are those in configs/."""
    from helpers import ROOT

    for name, published in hub_module.PUBLISHED.items():
        text = (ROOT / "configs" / f"{name}_pretrained.cfg").read_text()
        assert f"{published.n_parameter:,} parameters" in text
        assert f"model.ckpt-{published.step} " in text
        for option, value in published.memory.items():
            assert (f"--{option} " if value is True else f"--{option}={value} ") in text, (name, option)
    assert np.all([published.memory["same_length"] for published in hub_module.PUBLISHED.values()])
