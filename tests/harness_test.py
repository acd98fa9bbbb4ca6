"""A run as a model of lm-evaluation-harness: its numbers are those of the model, and a task of the package runs."""

import importlib.util
import json
import types

import numpy as np
import pytest
from helpers import SMALL, make_run, raises_parameter

import txl_tf
from txl_tf.data.vocabulary import Vocab
from txl_tf.language import text_generator
from txl_tf.runs.harness import HarnessMethods, harness_model

pytestmark = pytest.mark.ci

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: pip install it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("harness") / "run"
    vocab = Vocab(level="char", special=list("abcdefgh \n:.?"))
    vocab.build()
    make_run(found, vocab, n_layer=1)
    return found


@pytest.fixture(scope="module")
def model(folder):
    """The methods alone, which need no lm-eval."""
    found = HarnessMethods()
    found.open(*txl_tf.load_run(folder), batch_size=3, max_gen_toks=256, segment=6)
    return found


def request(*arguments):
    return types.SimpleNamespace(args=arguments)


def expected_scores(model, text):
    """The nll of every character of a text after a newline, read in segments of 6 by `lm.score`; and the best ids."""
    ids = model.vocab.encode("\n" + text)[None]
    mems, nll, best = model.lm.initial_mems(1), [], []
    for start in range(0, ids.shape[1] - 1, 6):
        tokens, labels = ids[:, :-1][:, start : start + 6], ids[:, 1:][:, start : start + 6]
        some, _ = model.lm.score(tokens, labels, mems)
        log_probs, mems = model.lm.log_probs(tokens, mems)
        nll.append(np.asarray(some)[0])
        best.append(np.argmax(log_probs, -1)[0] == labels[0])
    return np.concatenate(nll), np.concatenate(best)


def test_log_likelihoods_are_those_of_the_model(model):
    pairs = [("abc", "de"), ("", "abc"), ("ab ", "cd"), ("abcdefgh:", " abcdefgh. abc"), ("a", "b")]
    found = model.loglikelihood([request(*pair) for pair in pairs])
    for (context, continuation), (log_likelihood, greedy) in zip(pairs, found, strict=True):
        nll, best = expected_scores(model, context + continuation)
        first = len(context.rstrip(" "))  # spaces at the end of the context count, as elsewhere in the harness
        np.testing.assert_allclose(log_likelihood, -nll[first:].sum(), rtol=1e-5)
        assert greedy == best[first:].all()
    texts = ["abcdefgh abcdefgh", "a", "."]
    found = model.loglikelihood_rolling([request(text) for text in texts])
    np.testing.assert_allclose(found, [-expected_scores(model, text)[0].sum() for text in texts], rtol=1e-5)


def test_the_most_likely_continuation_is_greedy(model):
    best = model.generate_until([request("abc", {"until": [], "max_gen_toks": 3})])[0]
    model_says = model.loglikelihood([request("abc", best), request("abc", best[:2] + "?")])
    assert model_says[0][1] and not (model_says[1][1] and best[2] != "?")


def test_with_absolute_positions_a_segment_is_at_most_the_context(model):
    lm = txl_tf.TransformerLM(**{**SMALL, "n_token": len(model.vocab), "context_len": 16})
    found = txl_tf.runs.harness.HarnessMethods()
    for segment, expected in [(None, 16), (16, 16), (6, 6)]:
        found.open(lm, model.vocab, batch_size=3, max_gen_toks=5, segment=segment)
        assert found.segment == expected
    with raises_parameter("segment", 17, limit="1 to 16"):
        found.open(lm, model.vocab, batch_size=3, max_gen_toks=5, segment=17)


def test_generated_texts_end_before_their_stop_strings(model):
    whole = model.generate_until([request("abc", {"until": ["never 诗"], "max_gen_toks": 20})])[0]
    ids = model.vocab.encode("abc")[None]
    tokens = model.lm.generate(ids, max_new_tokens=20, temperature=0.0).numpy()
    assert whole == model.vocab.decode(tokens[0, 3:])
    stop = whole[5]
    found = model.generate_until(
        [request("abc", {"until": [stop, ""], "max_gen_toks": 20}), request("abc", {"until": []})]
    )
    assert found[0] == whole[: whole.index(stop)] and found[1][:20] == whole
    for name in ("num_beams", "max_length", "until"):
        with raises_parameter(name, 3):
            model.generate_until([request("abc", {name: 3})])
    for options in ({"max_gen_toks": 0}, {"max_gen_toks": 2.5}, {"max_new_tokens": "7"}, {"do_sample": "no"}):
        with raises_parameter(*next(iter(options.items()))):
            model.generate_until([request("abc", options)])
    with raises_parameter("max_new_tokens", 9):
        model.generate_until([request("abc", {"max_gen_toks": 3, "max_new_tokens": 9})])


@pytest.mark.parametrize("options", [{}, {"do_sample": False, "temperature": 0.7, "top_k": 3}], ids=str)
def test_the_repetition_penalty_of_a_task_counts_without_sampling(model, options):
    found = model.generate_until([request("abc", {"max_gen_toks": 20, "repetition_penalty": 5.0, **options})])[0]
    ids = model.vocab.encode("abc")[None]
    tokens = model.lm.generate(ids, max_new_tokens=20, temperature=0.0, repetition_penalty=5.0).numpy()
    assert found == model.vocab.decode(tokens[0, 3:])
    assert found != model.generate_until([request("abc", {"max_gen_toks": 20})])[0]


@pytest.fixture
def segments(monkeypatch):
    """The `segment` with which each batch of prompts is read."""
    found = []
    generate_texts = text_generator.generate_texts

    def write(*args, **options):
        found.append(options["segment"])
        return generate_texts(*args, **options)

    monkeypatch.setattr(text_generator, "generate_texts", write)
    return found


def test_a_long_prompt_is_read_in_segments(model, segments):
    prompts = ["abc", "abcdefgh " * 3 + "abc"]
    texts = [model.generate_until([request(prompt, {"max_gen_toks": 5})])[0] for prompt in prompts]
    assert segments == [None, 6]  # a segment is padded, so a shorter prompt is read as it is
    ids = model.vocab.encode(prompts[1])
    tokens = model.lm.generate(ids[None], max_new_tokens=5, temperature=0.0, segment=6).numpy()[0]
    assert texts[1] == model.vocab.decode(tokens[len(ids) :])


def test_a_model_with_absolute_positions_reads_a_prompt_as_one_segment(model, segments):
    absolute = HarnessMethods()
    lm = txl_tf.TransformerLM(**{**SMALL, "n_layer": 1, "n_token": len(model.vocab), "context_len": 16})
    absolute.open(lm, model.vocab, batch_size=3, max_gen_toks=5, segment=6)
    assert len(absolute.generate_until([request("abcdefgh abc", {})])[0]) == 5
    assert segments == [None]


@needs_lm_eval
def test_arguments_of_the_model_replace_those_of_the_run(folder):
    assert harness_model(folder, mem_len=5).lm.network.mem_len == 5 != txl_tf.load_run(folder)[0].network.mem_len
    with raises_parameter("mem_length", 5):
        harness_model(folder, mem_length=5)


@needs_lm_eval
def test_a_task_of_the_package_with_local_data(folder, model, tmp_path):
    import lm_eval

    rows = [
        {"question": "abc", "choices": ["de", "gh"], "answer": 0},
        {"question": "ab", "choices": ["c", "?"], "answer": 1},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}}}
    common |= {"test_split": "test", "doc_to_text": "{{question}}:"}
    choice = {
        "task": "local_choice", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}], **common,
    }  # fmt: skip
    (tmp_path / "cache").mkdir()
    opened = harness_model(folder, segment=6, batch_size=3)
    results = lm_eval.simple_evaluate(model=opened, tasks=[choice], bootstrap_iters=0)
    right = []
    for row in rows:
        scores = [expected_scores(model, f"{row['question']}: {text}") for text in row["choices"]]
        n = len(row["question"]) + 1
        right.append(int(np.argmax([-nll[n:].sum() for nll, _ in scores])) == row["answer"])
    assert results["results"]["local_choice"]["acc,none"] == np.mean(right)


@needs_lm_eval
def test_wrong_arguments_are_named(folder):
    for name in ("batch_size", "max_gen_toks", "segment"):
        with raises_parameter(name, 0):
            harness_model(folder, **{name: 0})
    assert "harness_model" in txl_tf.__all__
