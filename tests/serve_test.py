"""The server of tools/serve.py: what it answers is what the model says, alone and in a batch, to those who may ask."""

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import tensorflow as tf
from helpers import SMALL, Subwords, make_run, program, raises_parameter, randomise, run_here
from small_runs import make_encoder_decoder, make_tagger

import txl_tf
from txl_tf.data.vocabulary import Vocab
from txl_tf.language.session import Session
from txl_tf.serving.batcher import Batcher
from txl_tf.serving.decoder import PIECE, Alternatives, Busy, Decoder, Job, Piece
from txl_tf.serving.export import local_signatures

pytest.importorskip("starlette", reason="the server needs starlette: pip install starlette uvicorn")
pytest.importorskip("uvicorn", reason="the server needs uvicorn: pip install starlette uvicorn")

from txl_programs.server.app import Guard, Server, make_app, message_for_client  # noqa: E402
from txl_programs.server.completions import Bounds, Choice, Completions, Options, _deliverer, characters_of  # noqa: E402
from txl_programs.server.errors import Failed  # noqa: E402
from txl_programs.server.predict import Signature, array_of  # noqa: E402
from txl_programs.web.connections import make_server  # noqa: E402
from txl_programs.web.listening import listen, url_of  # noqa: E402

pytestmark = pytest.mark.ci

SLOW = pytest.mark.slow
SYMBOLS = "abcdefghijklmnopqrst \n."


@contextlib.contextmanager
def listening(app):
    """The address of an application that a thread serves."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        server = make_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{opened.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


class Served:
    """A small language model behind a server."""

    def __init__(self, folder):
        vocab = Vocab(level="char", special=list(SYMBOLS))
        vocab.build()
        make_run(folder, vocab, n_layer=1)
        self.folder = folder
        self.lm, self.vocab = txl_tf.load_run(folder)
        self.stored = local_signatures(self.lm, self.vocab, max_tokens=64, max_rows=16)
        self.signatures = self.stored.signatures()
        self.decoder = Decoder(self.lm, max_rows=8)
        self.batcher = Batcher(self.signatures, 16)
        completions = Completions("lm", self.vocab, self.decoder, Bounds(64, 64, 8))
        self.server = Server("lm", self.signatures, self.batcher, completions)
        self.app = make_app(self.server, "127.0.0.1")

    def complete(self, **values):
        found = requests.post(f"{self.url}/v1/completions", json=values, timeout=60)
        assert found.status_code == 200, found.text
        return found.json()

    def predict(self, **values):
        return requests.post(f"{self.url}/v1/models/lm:predict", json=values, timeout=60)

    def generated(self, prompt, max_new_tokens=20, **options):
        """What `lm.generate` says of a prompt: the new texts."""
        ids = self.vocab.encode(prompt)[None]
        tokens = self.lm.generate(ids, max_new_tokens=max_new_tokens, **options).numpy()
        return [self.vocab.decode(row[ids.shape[1] :]) for row in tokens]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    found = Served(tmp_path_factory.mktemp("served") / "lm")
    with listening(found.app) as found.url:
        yield found
    found.decoder.close()


# ------------------------------------------------------------------------------------------------------ completions


@pytest.mark.parametrize("options", [
    {"temperature": 0}, {"seed": 1}, {"seed": 3, "temperature": 0.7, "top_p": 0.8},
    {"seed": 3, "top_k": 5, "min_p": 0.02, "repetition_penalty": 1.5, "repetition_window": 4},
])  # fmt: skip
def test_a_completion_is_what_generate_writes(served, options):
    found = served.complete(**{"prompt": "abc", "max_tokens": 20, "top_k": 0, "top_p": 1, "min_p": None, **options})
    assert [choice["text"] for choice in found["choices"]] == served.generated("abc", **options)
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}


def test_several_prompts_and_texts_of_each(served):
    found = served.complete(prompt=["abc", [5, 6]], n=2, seed=7, max_tokens=9)
    expected = served.generated("abc", 9, seed=7, num_return_sequences=2)
    expected += served.generated("fg", 9, seed=7, num_return_sequences=2)
    assert [choice["text"] for choice in found["choices"]] == expected
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]


def test_a_stream_is_the_text_in_pieces(served):
    values = {"prompt": "abc", "seed": 1, "max_tokens": 30, "stream": True, "n": 2}
    values |= {"logprobs": 1, "stream_options": {"include_usage": True}}
    with requests.post(f"{served.url}/v1/completions", json=values, stream=True, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines(decode_unicode=True) if line]
    assert lines.pop() == "[DONE]"
    *events, usage = map(json.loads, lines)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 60
    texts, tokens = ["", ""], [[], []]
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += choice["logprobs"]["tokens"]
    assert len(events) > 4
    assert texts == served.generated("abc", 30, seed=1, num_return_sequences=2)
    assert ["".join(some) for some in tokens] == texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_ends_before_its_stop_string(served, stream):
    (whole,) = served.generated("abc", 40, seed=1)
    stop = whole[17:20]
    cut = whole.index(stop)
    values = {"prompt": "abc", "seed": 1, "max_tokens": 40, "stop": ["no\n", stop], "logprobs": 0}
    if not stream:
        (choice,) = served.complete(**values)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (whole[:cut], "stop")
        assert "".join(choice["logprobs"]["tokens"]) == whole[:cut]
        return
    with requests.post(
        f"{served.url}/v1/completions", json={**values, "stream": True}, stream=True, timeout=60
    ) as sent:
        lines = [line for line in sent.iter_lines(decode_unicode=True) if line][:-1]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(choice["text"] for choice in choices) == whole[:cut]
    assert [choice["finish_reason"] for choice in choices][-1] == "stop"


def test_a_stop_string_may_end_with_an_incomplete_character():
    vocab = SimpleNamespace(level="byte", symbols=["a", "b", "\udcc3"])
    for stops, reason, text in ((["b\ufffd"], "stop", "a"), (["c"], "length", "ab\ufffd")):
        options = SimpleNamespace(echo=False, logprobs=None, stop=stops)
        choice = Choice(0, np.zeros(0, np.int32), vocab, options)
        choice.add(Piece([0, 1, 2], done=True))
        assert (choice.text, choice.finish_reason) == (text, reason)


def test_logprobs_are_those_of_the_model_without_temperature(served):
    (choice,) = served.complete(prompt="abc", seed=1, max_tokens=10, logprobs=3, temperature=0.5)["choices"]
    session = Session(served.lm)
    session.read(served.vocab.encode("abc")[None])
    tokens, nll = session.write(10, seed=1, temperature=0.5, with_nll=True)
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"] == served.vocab.decode(tokens[0])
    np.testing.assert_allclose(found["token_logprobs"], -nll[0], atol=2e-5)
    assert found["text_offset"] == list(range(10))
    for token, log_prob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(top) == 3 and sorted(top.values(), reverse=True) == list(top.values())
        assert top.get(token, log_prob) == log_prob


def words():
    vocab = Vocab(special=["<eos>", "<unk>", "a", "b"], eos="<eos>", unk="<unk>")
    vocab.build()
    return vocab


def some_bytes():
    return SimpleNamespace(level="byte", symbols=["a", "\udcc3", "\udca9", "\n"])


@pytest.mark.parametrize("vocab, shown", [
    (words, [" <unk>", " a", "\n", "b"]),
    (some_bytes, ["a", r"bytes:\xc3", r"bytes:\xa9", "\n"]),
    (Subwords, ["User", r"bytes:\xc3", r"bytes:\xa9", "\u65e5"]),
], ids=["words", "bytes", "subwords"])  # fmt: skip
def test_a_token_has_the_same_text_in_its_place_and_among_the_most_likely(vocab, shown):
    vocab = vocab()
    ids = {"word": [1, 2, 0, 3], "byte": [0, 1, 2, 3], "subword": [10, 18, 19, 20]}[vocab.level]
    prompt = np.array(ids[1:2], np.int32)
    options = SimpleNamespace(echo=False, logprobs=2, stop=[])
    choice = Choice(0, prompt if vocab.level == "word" else prompt[:0], vocab, options)
    top_ids, log_probs = np.array([[i, ids[0]] for i in ids]), np.full([4, 2], -1.0)
    choice.add(Piece(ids, Alternatives(log_probs[:, 0], top_ids, log_probs), done=True))
    found = choice.as_json()["logprobs"]
    assert found["tokens"] == shown
    assert all(token in top for token, top in zip(found["tokens"], found["top_logprobs"], strict=True))


def test_an_echo_scores_the_prompt(served):
    text = "abcab.\nhello"
    (choice,) = served.complete(prompt=text, max_tokens=0, echo=True, logprobs=2)["choices"]
    ids = served.vocab.encode(text)[None]
    nll = np.asarray(served.lm.score(ids[:, :-1], ids[:, 1:])[0])
    assert choice["text"] == text and choice["logprobs"]["tokens"] == list(text)
    assert choice["logprobs"]["token_logprobs"][0] is None
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1:], -nll[0], atol=2e-5)
    (choice,) = served.complete(prompt="abc", max_tokens=5, echo=True, seed=1)["choices"]
    assert choice["text"] == "abc" + served.generated("abc", 5, seed=1)[0]


def test_an_empty_prompt_continues_a_line(served):
    (choice,) = served.complete(seed=1, max_tokens=12)["choices"]
    assert choice["text"] == served.generated("\n", 12, seed=1)[0]


@pytest.mark.parametrize("values, name", [
    ({"prompt": "Q"}, "prompt"), ({"prompt": 3}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [99]}, "prompt"),
    ({"prompt": "a" * 65}, "prompt"), ({"prompt": "a" * 9999}, "prompt"), ({"prompt": [["a"]]}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 65}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
    ({"n": 9}, "n"), ({"n": 5, "prompt": ["a", "b"]}, "n"), ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"), ({"top_p": 0}, "top_p"), ({"logprobs": 6}, "logprobs"),
    ({"stop": [""]}, "stop"), ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ["a", "\u00e9"]}, "stop"), ({"stop": "A"}, "stop"), ({"stop": "\r\n"}, "stop"),
    ({"temperature": 10**400}, "temperature"), ({"seed": 2**40}, "seed"), ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"), ({"best_of": 2}, "best_of"),
    ({"presence_penalty": 0.5}, "presence_penalty"), ({"logit_bias": {"1": 1}}, "logit_bias"),
    ({"suffix": "x"}, "suffix"), ({"temprature": 1}, "temprature"), ({"top_k": -1}, "top_k"), ({"top_k": 1.0}, "top_k"),
    ({"prompt": [1, True]}, "prompt"), ({"prompt": ["a", 1]}, "prompt"), ({"best_of": True}, "best_of"),
    ({"presence_penalty": False}, "presence_penalty"),
    ({"min_p": True}, "min_p"), ({"repetition_window": 0}, "repetition_window"),
    ({"repetition_window": 9}, "repetition_window"), ({"top_p": 10**400}, "top_p"),
])  # fmt: skip
def test_a_wrong_parameter_is_named(served, values, name):
    found = requests.post(f"{served.url}/v1/completions", json={"prompt": "a", **values}, timeout=60)
    assert (found.status_code, found.json()["error"]["param"]) == (400, name), found.text


def test_half_of_a_surrogate_pair_in_a_prompt_is_refused_in_place_of_an_unknown_symbol():
    vocab = Vocab(level="char", special=["<unk>", *SYMBOLS], unk="<unk>")
    vocab.build()
    assert len(Options({"prompt": "a\u00e9"}, vocab, Bounds(), characters_of(vocab)).prompts[0]) == 2
    with pytest.raises(Failed) as caught:
        Options({"prompt": "a\ud800"}, vocab, Bounds(), characters_of(vocab))
    assert (caught.value.status, caught.value.name) == (400, "prompt")


def test_texts_in_a_batch_are_those_of_each_alone(served):
    """Texts of different lengths and options join and leave the batch while others are generated."""
    requested = [
        {"prompt": SYMBOLS[: 1 + i % 7], "seed": i, "max_tokens": 5 + 7 * (i % 5), "temperature": 0.5 + i % 3}
        for i in range(20)
    ]
    alone = [served.complete(**values)["choices"][0]["text"] for values in requested]
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        together = list(pool.map(lambda values: served.complete(**values)["choices"][0]["text"], requested))
    assert together == alone
    assert served.decoder.largest > 4


def test_a_client_that_leaves_frees_its_place(served):
    values = {"prompt": "a", "max_tokens": 64, "stream": True, "n": 8}
    with requests.post(f"{served.url}/v1/completions", json=values, stream=True, timeout=60) as answer:
        next(answer.iter_lines())
    for _ in range(200):
        if not served.decoder._jobs:
            break
        time.sleep(0.05)
    assert not served.decoder._jobs


@pytest.fixture
def make_decoder(served, monkeypatch):
    """A function that makes a `Decoder` of the served model, with the graphs of the decoder that serves it."""
    made = {name: value for name, value in vars(served.decoder).items() if name.endswith("_graph")}
    monkeypatch.setattr(Decoder, "_make_graphs", lambda decoder: vars(decoder).update(made))
    return functools.partial(Decoder, served.lm)


def test_no_more_texts_wait_than_are_allowed(make_decoder):
    pieces = []
    decoder = make_decoder(max_rows=1, max_waiting=2)
    try:
        jobs = [Job(np.array([1]), 64, pieces.append) for _ in range(8)]
        with pytest.raises(Busy):
            for job in jobs:
                decoder.submit(job)
    finally:
        decoder.close()


class Client:
    """Takes the pieces of a text. With `error`, it fails to."""

    def __init__(self, error=None):
        self.error = error
        self.pieces = []
        self.ended = threading.Event()

    def __call__(self, piece):
        if self.error is not None:
            raise self.error
        self.pieces.append(piece)
        if piece.done:
            self.ended.set()


def test_a_client_that_takes_no_piece_ends_only_its_own_text(served, make_decoder, monkeypatch):
    decoder = make_decoder(max_rows=4)
    prompt = np.array([1])
    try:
        gone, client = Client(RuntimeError("Event loop is closed")), Client()
        job = Job(prompt, 64, gone)
        decoder.submit(job)
        decoder.submit(Job(prompt, 20, client, temperature=0.0))
        assert client.ended.wait(60) and job.cancelled and job.written <= PIECE
        assert all(piece.error is None for piece in client.pieces)
        expected = served.lm.generate(prompt[None], max_new_tokens=20, temperature=0.0).numpy()[0, 1:]
        assert [token for piece in client.pieces for token in piece.tokens] == expected.tolist()

        error = ValueError("the graph fails")
        with monkeypatch.context() as failing:

            def next_piece(*_):
                raise error

            failing.setattr(decoder, "_next_piece_graph", next_piece)
            client = Client()
            decoder.submit(Job(prompt, 64, gone))
            decoder.submit(Job(prompt, 64, client))
            assert client.ended.wait(60) and client.pieces == [Piece([], done=True, error=error)]
        client = Client()
        decoder.submit(Job(prompt, 3, client))  # the thread still runs
        assert client.ended.wait(60) and client.pieces[-1].error is None
    finally:
        decoder.close()


def test_a_cancelled_text_gets_no_error(make_decoder, monkeypatch):
    decoder = make_decoder()
    error = ValueError("the graph fails")
    submitted = threading.Event()
    cancelled, client = Client(), Client()
    jobs = [Job(np.array([1]), 64, cancelled), Job(np.array([1]), 64, client)]
    try:
        decoder.submit(Job(np.array([1]), 1, lambda piece: submitted.wait(60)))  # so that both texts join together
        for job in jobs:
            decoder.submit(job)

        def next_piece(*_):
            jobs[0].cancelled = True
            raise error

        monkeypatch.setattr(decoder, "_next_piece_graph", next_piece)
        submitted.set()
        assert client.ended.wait(60) and client.pieces[-1] == Piece([], done=True, error=error)
        assert not any(piece.done for piece in cancelled.pieces) and all(job.cancelled for job in jobs)
    finally:
        submitted.set()
        decoder.close()


def test_an_error_after_the_end_of_a_choice_does_not_end_the_request(served):
    """As when a stop string has ended the choice, but the decoder has not yet read that it is cancelled."""
    ids = served.vocab.encode("b.b").tolist()

    class Stopping:
        def submit(self, job):
            job.deliver(Piece(ids))
            job.deliver(Piece([], done=True, error=ValueError("the graph fails")))

    completions = Completions("lm", served.vocab, Stopping(), Bounds(64, 64, 8))
    options = completions.checked({"prompt": "a", "max_tokens": 20, "n": 2, "stop": "."})
    choices = asyncio.run(completions.answer(options))["choices"]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("b", "stop")] * 2


def test_a_closed_decoder_takes_no_job(make_decoder):
    decoder = make_decoder()
    decoder.close()
    with pytest.raises(RuntimeError) as raised:
        decoder.submit(Job(np.array([1]), 3, Client()))
    assert not isinstance(raised.value, Busy)


KINDS = {
    "rotary": (txl_tf.TransformerXLLM, {"positions": "rotary", "d_head": 4, "mem_len": 4}),
    "learned": (txl_tf.TransformerXLLM, {"positions": "learned", "context_len": 7, "mem_len": 0}),
    "vanilla": (txl_tf.TransformerLM, {"context_len": 7}),
    "documents": (txl_tf.TransformerXLLM, {"mem_len": 4, "reset_token": 3}),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SLOW if kind != "vanilla" else ()) for kind in KINDS])
def test_texts_join_the_batch_with_every_kind_of_memory(kind):
    make, options = KINDS[kind]
    lm = make(**{**SMALL, "n_layer": 1, **options})
    randomise(lm)
    prompts = [np.arange(1 + 2 * i) % 20 for i in range(7)]
    found = [[] for _ in prompts]
    ended = threading.Semaphore(0)

    def deliver(i, piece):
        assert piece.error is None, piece.error
        found[i] += piece.tokens
        if piece.done:
            ended.release()

    decoder = Decoder(lm, stop_token=3, max_rows=3)
    try:
        for i, prompt in enumerate(prompts):
            decoder.submit(Job(prompt, 4 + 5 * i, functools.partial(deliver, i), seed=i, temperature=1.3))
        for _ in prompts:
            assert ended.acquire(timeout=60)
    finally:
        decoder.close()
    for i, prompt in enumerate(prompts):
        tokens, lengths = lm.generate(
            prompt[None], max_new_tokens=4 + 5 * i, seed=i, temperature=1.3, stop_token=3, with_lengths=True
        )
        assert found[i] == tokens.numpy()[0, len(prompt) : int(lengths[0])].tolist()
    assert decoder.largest == 3


# ---------------------------------------------------------------------------------------- TensorFlow Serving's REST


def test_columns_and_rows_are_answered_as_the_signature_answers(served):
    texts = ["abc", "hello."]
    expected = {name: x.numpy() for name, x in served.signatures["score_text"](text=texts).items()}
    found = served.predict(signature_name="score_text", inputs={"text": texts}).json()["outputs"]
    np.testing.assert_allclose(found["nll"], expected["nll"], rtol=1e-6)
    assert found["symbols"] == [[symbol.decode() for symbol in row] for row in expected["symbols"]]
    assert found == served.predict(signature_name="score_text", inputs=texts).json()["outputs"]
    rows = [{name: found[name][i] for name in found} for i in range(2)]
    for instances in (texts, [{"text": text} for text in texts], [{"text": {"b64": "YWJj"}}, {"text": texts[1]}]):
        assert served.predict(signature_name="score_text", instances=instances).json()["predictions"] == rows
    written = served.predict(
        signature_name="generate_text", instances=[{"text": "abc", "seed": 1, "max_new_tokens": 9}]
    )
    assert written.json() == {"predictions": ["abc" + served.generated("abc", 9, seed=1)[0]]}


def test_a_state_goes_from_answer_to_request(served):
    ids = served.vocab.encode("abcdefgh.")[None]
    state = served.predict(signature_name="initial_state", inputs={"batch_size": 1}).json()["outputs"]
    nll = []
    for start in (0, 4):
        inputs = {"tokens": ids[:, start : start + 4].tolist(), "labels": ids[:, start + 1 : start + 5].tolist()}
        found = served.predict(signature_name="score", inputs={**inputs, "state": state}).json()["outputs"]
        state = found["state"]
        nll += found["nll"][0]
    mems, expected = served.lm.initial_mems(1), []
    for start in (0, 4):
        some, mems = served.lm.score(ids[:, start : start + 4], ids[:, start + 1 : start + 5], mems)
        expected += np.asarray(some)[0].tolist()
    np.testing.assert_allclose(nll, expected, rtol=1e-5)


def test_requests_at_the_same_time_are_joined_and_get_their_own_answers(served):
    texts = [SYMBOLS[: 1 + i] for i in range(12)]
    alone = [served.predict(signature_name="score_text", inputs={"text": [text]}).json() for text in texts]

    def ask(text):
        return served.predict(signature_name="score_text", inputs={"text": [text]}).json()

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for _ in range(3):
            together = list(pool.map(ask, [*texts, "Q"]))
            assert "error" in together.pop()
            for one, other in zip(alone, together, strict=True):
                assert one["outputs"]["symbols"] == other["outputs"]["symbols"]
                np.testing.assert_allclose(one["outputs"]["nll"], other["outputs"]["nll"], rtol=1e-5)
    assert served.batcher.largest > 1


def test_requests_are_joined_whatever_the_longest_of_their_strings():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "text")])
    def lengths_of(text):
        return {"bytes": tf.strings.length(text)}

    async def ask_together():
        texts = [np.array([b"abc"]), np.array([b"de", b"fghij"]), np.array(["h\u00e9".encode() * 3])]
        assert [text.dtype.str for text in texts] == ["|S3", "|S5", "|S9"]
        return await asyncio.gather(*(batcher.call("lengths_of", {"text": text}) for text in texts))

    batcher = Batcher({"lengths_of": lengths_of}, 16)
    found = asyncio.run(ask_together())
    assert [result["bytes"].tolist() for result in found] == [[3], [2, 5], [9]]
    assert batcher.largest == 3


def test_requests_of_several_shapes_are_joined_with_their_like():
    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32, "tokens")])
    def doubled(tokens):
        return {"tokens": 2 * tokens}

    async def ask_together():
        calls = [batcher.call("doubled", {"tokens": np.full([rows, n], n, np.int32)}) for rows, n in shapes]
        return await asyncio.wait_for(asyncio.gather(*calls), 60)

    batcher, shapes = Batcher({"doubled": doubled}, 16), [(1, 5), (2, 7), (1, 5), (1, 6), (3, 5), (1, 7)]
    for _ in range(2):
        found = asyncio.run(ask_together())
        for result, (rows, n) in zip(found, shapes, strict=True):
            np.testing.assert_array_equal(result["tokens"], np.full([rows, n], 2 * n))
    assert batcher.largest == 3


class Waiting:
    """A signature that counts its calls, and waits in each until `may_end` is set."""

    def __init__(self, signature):
        self.signature = signature
        self.n_calls = 0
        self.may_end = threading.Event()

    def __getattr__(self, name):
        return getattr(self.signature, name)

    def __call__(self, **arguments):
        self.n_calls += 1
        assert self.may_end.wait(60)
        return self.signature(**arguments)


def test_a_waiting_request_whose_client_leaves_is_not_computed(served, monkeypatch):
    waiting = Waiting(served.batcher.signatures["score_text"])
    monkeypatch.setitem(served.batcher.signatures, "score_text", waiting)
    queue = served.batcher._waiting["score_text"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(served.predict, signature_name="score_text", inputs=["abc"])
        until(lambda: waiting.n_calls)
        values = {"signature_name": "score_text", "inputs": ["abd"]}
        with pytest.raises(requests.ReadTimeout):
            requests.post(f"{served.url}/v1/models/lm:predict", json=values, timeout=0.5)
        until(lambda: queue and queue[0].result.cancelled())
        waiting.may_end.set()
        assert first.result().status_code == 200
    until(lambda: "score_text" not in served.batcher._tasks)
    assert waiting.n_calls == 1 and not queue


def until(condition):
    """Waits until `condition` is true, at most 10 s."""
    for _ in range(200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("the condition did not become true")


class ClosingLoop:
    """An event loop that closes after `is_closed` was asked."""

    def is_closed(self):
        return False

    def call_soon_threadsafe(self, *args):
        raise RuntimeError("Event loop is closed")


def test_a_piece_for_a_loop_that_closes_is_dropped():
    pieces = asyncio.Queue()
    _deliverer(ClosingLoop(), pieces, 0)(None)
    assert pieces.empty()


def test_status_and_metadata(served):
    assert served.server.name == "lm"
    found = requests.get(f"{served.url}/v1/models/lm", timeout=60).json()
    assert found["model_version_status"][0] == {
        "version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""},
    }  # fmt: skip
    assert requests.get(f"{served.url}/v1/models", timeout=60).json()["data"][0]["id"] == found["id"] == "lm"
    found = requests.get(f"{served.url}/v1/models/lm/versions/1/metadata", timeout=120).json()
    described = found["metadata"]["signature_def"]["signature_def"]
    assert described.keys() == served.signatures.keys()
    assert described["score_text"]["inputs"]["text"] == {
        "dtype": "DT_STRING", "tensor_shape": {"dim": [{"size": "-1", "name": ""}], "unknown_rank": False},
        "name": "text:0",
    }  # fmt: skip
    assert described["score_text"]["outputs"].keys() == {"nll", "symbols", "lengths"}
    assert described["initial_state"]["inputs"]["batch_size"]["tensor_shape"]["unknown_rank"]


@pytest.mark.parametrize("values, status", [
    ({"inputs": {"text": ["a"]}}, 404),
    ({"signature_name": "score_text"}, 400),
    ({"signature_name": "score_text", "inputs": ["a"], "instances": ["a"]}, 400),
    ({"signature_name": "score_text", "inputs": {"texts": ["a"]}}, 400),
    ({"signature_name": "score_text", "inputs": {"text": [3]}}, 400),
    ({"signature_name": "score_text", "inputs": {"text": [["a"], ["b", "c"]]}}, 400),
    ({"signature_name": "score_text", "inputs": {"text": "a"}}, 400),
    ({"signature_name": "score_text", "inputs": {"text": []}}, 400),
    ({"signature_name": "score_text", "inputs": {"text": ["a"] * 17}}, 400),
    ({"signature_name": "score_text", "instances": [{"text": "a"}, {"x": "a"}]}, 400),
    ({"signature_name": "score_text", "instances": [{"text": {"b64": "?"}}]}, 400),
    ({"signature_name": "generate_text", "instances": ["a"]}, 400),
    ({"signature_name": "generate_text", "inputs": {"text": ["a"], "temperature": [-1]}}, 400),
    ({"signature_name": "generate_text", "inputs": {"text": ["a"], "seed": [1.5]}}, 400),
    ({"signature_name": "next", "inputs": {"tokens": [[1, 2], [3]]}}, 400),
    ({"signature_name": "next", "inputs": {"tokens": [[1]], "state": [[0.5]]}}, 400),
    ({"signature_name": "score_text", "inputs": ["a"], "version": 1}, 400),
    ({"signature_name": "generate_text", "inputs": {"text": ["a"], "max_new_tokens": [3, 3]}}, 400),
    ({"signature_name": "generate", "inputs": {"tokens": [[1], [2]], "lengths": [1]}}, 400),
    ({"signature_name": "generate_text", "inputs": {"text": ["a", "b"], "max_new_tokens": [True, 2]}}, 400),
    ({"signature_name": "generate_text", "inputs": {"text": ["a", "b"], "temperature": [True, 0.5]}}, 400),
    ({"signature_name": "next", "inputs": {"tokens": [[1, 2], [True, 2]]}}, 400),
])  # fmt: skip
def test_a_wrong_request_gets_one_sentence(served, values, status):
    found = served.predict(**values)
    assert found.status_code == status and 0 < len(found.json()["error"]) <= 500, found.text


def test_half_of_a_surrogate_pair_is_refused_by_name(served):
    found = served.predict(signature_name="generate_text", inputs={"text": ["a"], "stop": [["\ud800"]]})
    assert found.status_code == 400 and found.json()["error"].startswith("stop ")


@pytest.mark.parametrize("batched", [False, True])
def test_one_value_stands_for_all_rows_only_of_an_optional_argument(batched):
    """As in the exported signature: required arguments, and several values, must have one row for each result."""

    default = tf.constant([5])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32, name) for name in ("a", "b", "c")])
    def added(a, b, c=default):
        tf.debugging.assert_equal(tf.shape(a), tf.shape(b))
        tf.debugging.Assert((tf.size(c) == 1) | (tf.size(c) == tf.size(a)), [tf.shape(c)])
        return {"sum": a + b + c}

    async def ask(*requests):
        requests = [{name: np.array(x, np.int32) for name, x in request.items()} for request in requests]
        calls = [batcher.call("added", request) for request in requests]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)

    batcher, good = Batcher({"added": added}, 16), {"a": [1, 2], "b": [3, 4]}
    others = [good, good] if batched else []  # all requests of one call of `ask` wait at the same time
    for wrong in ({"a": [1, 2], "b": [3]}, {"a": [1], "b": [3, 4]}, {"a": [1], "b": [3], "c": [1, 2]}):
        assert isinstance(asyncio.run(ask(*others, wrong))[-1], tf.errors.InvalidArgumentError)
    for c, expected in (([7], [11, 13]), ([1, 2], [5, 8])):
        assert asyncio.run(ask(*others, good | {"c": c}))[-1]["sum"].tolist() == expected
    assert asyncio.run(ask(*others, good))[-1]["sum"].tolist() == [9, 11]


def test_strings_and_base64_may_be_mixed():
    for values in (["a", {"b64": "YWI="}], [{"b64": "YQ=="}, "ab"]):
        assert array_of("text", values, "string").tolist() == [b"a", b"ab"]


def test_metadata_has_every_type_of_the_signatures():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, "x")])
    def compared(x):
        return {"above": x > 0, "n": tf.size(x), "wide": tf.cast(x, tf.float64), "text": tf.as_string(x)}

    outputs = Signature("compared", compared).described()["outputs"]
    types = {"above": "DT_BOOL", "n": "DT_INT32", "wide": "DT_DOUBLE", "text": "DT_STRING"}
    assert {name: output["dtype"] for name, output in outputs.items()} == types


def test_null_in_place_of_a_string_is_refused_with_the_name_of_the_input():
    with pytest.raises(Failed, match=r"^text must .* None$"):
        array_of("text", ["a", None], "string")


@tf.function
def take_third(values):
    return tf.gather(values, 3)


@tf.function
def refuse(values):
    tf.debugging.Assert(tf.size(values) > 2, ["values are", values, "and", tf.size(values)])


@pytest.mark.parametrize("function, message", [(refuse, "values are 1 2 and 2"), (take_third, "3 is not in [0, 2)")])
def test_an_error_of_a_graph_shows_no_code_of_the_server(function, message):
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        function(tf.constant([1, 2]))
    shown = message_for_client(caught.value)
    assert message in shown and "\n" not in shown
    assert not any(word in shown for word in ("node", "File", "Op:", ".py"))


def test_other_addresses_and_bodies(served):
    for method, path, status in [
        ("GET", "/v1/models/other", 404), ("GET", "/v1/models/lm/versions/2", 404), ("GET", "/", 404),
        ("POST", "/v1/models", 405), ("GET", "/v1/completions", 405),
    ]:  # fmt: skip
        found = requests.request(method, served.url + path, json={} if method == "POST" else None, timeout=60)
        assert found.status_code == status and "error" in found.json(), path
    for body in (b"", b"[]", b"{", b"[" * 100_000):
        assert requests.post(f"{served.url}/v1/completions", data=body, timeout=60).status_code == 400
    assert requests.post(f"{served.url}/v1/completions", json={"model": "x"}, timeout=60).status_code == 404


# ------------------------------------------------------------------------------------------------------ who may ask


@pytest.mark.parametrize("headers, status", [
    ({"host": "evil.test"}, 400), ({"origin": "http://evil.test"}, 403), ({"sec-fetch-site": "cross-site"}, 403),
])  # fmt: skip
def test_other_sites_are_refused(served, headers, status):
    assert requests.get(f"{served.url}/v1/models", headers=headers, timeout=60).status_code == status


def test_the_key_and_the_size(served):
    guarded = Guard(served.app.app, "127.0.0.1", ["Proxy.test"], "secret", max_bytes=100)
    with listening(guarded) as url:
        for headers, status in [
            ({}, 401), ({"authorization": "Bearer no"}, 401), ({"authorization": "Bearer secret"}, 200),
            ({"authorization": "Bearer secret", "host": "proxy.test"}, 200),
        ]:  # fmt: skip
            assert requests.get(f"{url}/v1/models", headers=headers, timeout=60).status_code == status
        key = {"authorization": "Bearer secret"}
        large = requests.post(f"{url}/v1/completions", headers=key, data=b"x" * 101, timeout=60)
        assert large.status_code == 413
        chunked = requests.post(f"{url}/v1/completions", headers=key, data=iter([b"{}"]), timeout=60)
        assert chunked.status_code == 413


def test_the_openai_package(served):
    openai = pytest.importorskip("openai", reason="the test needs openai: pip install openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["lm"] == [client.models.retrieve("lm").id]
    (expected,) = served.generated("abc", 20, seed=1)
    found = client.completions.create(model="lm", prompt="abc", max_tokens=20, seed=1, logprobs=2)
    assert found.choices[0].text == expected == "".join(found.choices[0].logprobs.tokens)
    stream = client.completions.create(model="lm", prompt="abc", max_tokens=20, seed=1, stream=True)
    assert "".join(event.choices[0].text for event in stream) == expected
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="lm", prompt="abc", frequency_penalty=1)
    assert caught.value.param == "frequency_penalty"


# ------------------------------------------------------------------------------------------------------ the program


def test_other_families_have_their_signatures(tmp_path):
    make_tagger(tmp_path / "tagger")
    make_encoder_decoder(tmp_path / "pairs")
    inputs = {"tagger": ("tag_text", "abcab"), "pairs": ("translate_text", "abc")}
    for name, (signature, text) in inputs.items():
        model, vocabs = txl_tf.load_run(tmp_path / name)
        signatures = local_signatures(model, vocabs).signatures()
        app = make_app(Server(name, signatures, Batcher(signatures, 16)), "127.0.0.1")
        expected = signatures[signature](text=[text])
        with listening(app) as url:
            asked = {"signature_name": signature, "inputs": {"text": [text]}}
            found = requests.post(f"{url}/v1/models/{name}:predict", json=asked, timeout=120).json()["outputs"]
            assert requests.post(f"{url}/v1/completions", json={}, timeout=60).status_code == 404
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if value.dtype == "string":
                assert np.array(found[key]).tolist() == np.char.decode(value.numpy().astype("S")).tolist()
            else:
                np.testing.assert_allclose(found[key], value, rtol=1e-5)


@pytest.fixture(scope="module")
def tool():
    yield from program("tools/serve.py")


def test_wrong_flags_are_named_before_the_model_is_loaded(tool, served, tmp_path, monkeypatch):
    folder = served.folder
    (tmp_path / "key").write_text("two words")
    with raises_parameter("api_key_file"):
        run_here(tool, f"--model_dir={folder}", f"--api_key_file={tmp_path / 'key'}")
    monkeypatch.setenv("TXL_API_KEY", "")
    with raises_parameter("api_key_file"):
        run_here(tool, f"--model_dir={folder}")
    monkeypatch.delenv("TXL_API_KEY")
    with raises_parameter("name"):
        run_here(tool, f"--model_dir={folder}", "--name=a/b")
    with raises_parameter("length_penalty"):
        run_here(tool, f"--model_dir={folder}", "--length_penalty=1")
    with raises_parameter("beam_size", 4, "left out"):
        run_here(tool, f"--model_dir={folder}", "--beam_size=4")
    with socket.create_server(("127.0.0.1", 0)) as taken, raises_parameter("port"):
        run_here(tool, f"--model_dir={folder}", f"--port={taken.getsockname()[1]}")


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_hosts_are_addresses_of_both_versions_and_names():
    for host, expected in (
        ("::1", "http://[::1]:"),
        ("127.0.0.1", "http://127.0.0.1:"),
        ("localhost", "http://localhost:"),
    ):
        with listen(host, 0) as listening_socket:
            port = listening_socket.getsockname()[1]
            assert url_of(host, listening_socket) == f"{expected}{port}"
            socket.create_connection((host, port)).close()
    with raises_parameter("port", 0):
        listen("2001:db8::1", 0)
