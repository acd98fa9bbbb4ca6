"""An argument by a name that a function does not have: the error names the function and what it takes."""

import keras
import numpy as np
import pytest
from helpers import raises_naming, raises_parameter

import txl_tf
from txl_tf import layers
from txl_tf.calls import known_names
from txl_tf.config import SearchConfig
from txl_tf.language.session import Session
from txl_tf.language.text_generator import TextGenerator
from txl_tf.runs.families.pipeline import LanguagePipeline, TaggingPipeline, TranslationPipeline
from txl_tf.runs.scoring import score_lines
from txl_tf.schema import check_names, keywords_of
from txl_tf.training.schedules import NoamSchedule

SIZES = {"n_token": 20, "n_layer": 1, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 8}
PROMPT = np.ones([1, 2], np.int32)
lm = transformer = None  # set by `models`; where names are checked first, `None` stands for a model


@pytest.fixture(scope="module", autouse=True)
def models():
    global lm, transformer
    lm = txl_tf.TransformerXLLM(**SIZES, mem_len=2)
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 8}
    transformer = txl_tf.Transformer(**sizes, input_vocab_size=9, target_vocab_size=9)
    lm.compile("sgd")
    transformer.compile("sgd")
    yield
    lm = transformer = None


# Calls with a wrong name: what the error must name, that name, and one that it must list.
CALLS = {
    "generate": (lambda x: lm.generate(PROMPT, 2, **x), "num_beams", "temperature"),
    "generate of TransformerLM": (lambda x: txl_tf.TransformerLM.generate(None, PROMPT, 2, **x), "processor", "top_p"),
    "generate of Transformer": (lambda x: transformer.generate(PROMPT, start=1, end=2, **x), "beamsize", "beam_size"),
    "TextGenerator": (lambda x: TextGenerator(lm, None, **x), "bad_words", "repetition_penalty"),
    "Session": (lambda x: Session(lm, **x), "rows", "batch_size"),
    "write": (lambda x: Session.write(None, 2, **x), "temprature", "temperature"),
    "compile": (lambda x: lm.compile("sgd", **x), "static_shape", "static_shapes"),
    "compile of Transformer": (lambda x: transformer.compile("sgd", **x), "los", "loss"),
    "fit": (lambda x: lm.fit(None, **x), "epoch", "epochs"),
    "fit of Transformer": (lambda x: transformer.fit(PROMPT, PROMPT, **x), "batchsize", "batch_size"),
    "evaluate": (lambda x: lm.evaluate(None, **x), "step", "steps"),
    "evaluate of Transformer": (lambda x: transformer.evaluate(PROMPT, PROMPT, **x), "verbosity", "verbose"),
    "nll": (lambda x: txl_tf.Tagger.nll(None, PROMPT, PROMPT, **x), "mask", "training"),
    "export": (lambda x: txl_tf.Tagger.export(None, "nowhere", **x), "signature", "input_signature"),
    "make_optimizer": (lambda x: txl_tf.make_optimizer(**x), "learning_rat", "learning_rate"),
    "export_saved_model": (lambda x: txl_tf.export_saved_model(lm, "nowhere", **x), "max_token", "max_tokens"),
    "export_saved_model's search": (
        lambda x: txl_tf.export_saved_model(transformer, "nowhere", search=x), "beam", "beam_size",
    ),
    "segments": (lambda x: txl_tf.segments(np.arange(9), 2, 2, **x), "shuffle", "repeat"),
    "prepare": (lambda x: txl_tf.prepare(["a text"], "nowhere", **x), "levl", "level"),
    "generate_lines": (lambda x: LanguagePipeline(None, None).generate_lines(["a"], **x), "beams", "beam_size"),
    "generate_text": (lambda x: LanguagePipeline(None, None).generate_text("a", **x), "num_beams", "batch_size"),
    "score_lines": (lambda x: LanguagePipeline(None, None).score_lines(["a"], **x), "segments", "segment"),
    "score_lines of a model": (lambda x: score_lines(lm, None, ["a"], **x), "carry", "carry_memory"),
    "translate_lines": (lambda x: TranslationPipeline(None).translate_lines(["a"], **x), "nbest", "n_best"),
    "tag_lines": (lambda x: TaggingPipeline(None).tag_lines(["a"], **x), "lexicon", "batch_size"),
    "TransformerXLLM": (lambda x: txl_tf.TransformerXLLM(**SIZES, mem_len=2, **x), "n_layers", "n_layer"),
    "TransformerLM": (lambda x: txl_tf.TransformerLM(**SIZES, **x), "clamp_len", "context_len"),
    "Transformer": (lambda x: txl_tf.Transformer(**x), "nhead", "num_heads"),
    "Tener": (lambda x: txl_tf.Tener(**x), "heads", "n_head"),
    "Tagger": (lambda x: txl_tf.Tagger(None, ["O"], **x), "schema", "scheme"),
    "PositionalEncoding": (lambda x: layers.PositionalEncoding(8, **x), "rates", "rate"),
    "EncoderLayer": (lambda x: layers.EncoderLayer(8, 2, 8, **x), "activation", "dropatt"),
    "AdaptiveSoftmax": (lambda x: layers.AdaptiveSoftmax(9, 8, 8, **x), "cutof", "cutoffs"),
    "LayerNorm": (lambda x: layers.LayerNorm(**x), "eps", "dtype"),
    "NoamSchedule": (lambda x: NoamSchedule(8, **x), "warmup", "warmup_steps"),
}  # fmt: skip


@pytest.mark.parametrize("function", CALLS)
def test_an_unknown_argument_is_named_with_the_function_and_what_it_takes(function):
    call, wrong, right = CALLS[function]
    with pytest.raises(txl_tf.UnknownArgumentError) as caught:
        call({wrong: 3})
    error = caught.value
    assert (error.name, error.value) == (wrong, 3)
    assert right in error.allowed and wrong not in error.allowed and "self" not in error.allowed
    assert len(set(error.allowed)) == len(error.allowed)
    assert function.split(" of ")[0] in str(error) and repr(wrong) in str(error) and right in str(error)
    assert isinstance(error, TypeError) and isinstance(error, ValueError)


@pytest.mark.parametrize("search", [4, 0, False, "beam", "", ["beam_size"], [], SearchConfig(beam_size=3)])
def test_the_options_of_a_search_are_a_dictionary(tmp_path, search):
    with raises_parameter("search", search):
        txl_tf.export_saved_model(transformer, tmp_path / "1", search=search)


def test_a_name_that_is_no_text_is_unknown(tmp_path):
    with pytest.raises(txl_tf.UnknownArgumentError) as caught:
        txl_tf.export_saved_model(transformer, tmp_path / "1", search={3: 4})
    assert (caught.value.name, caught.value.value) == (3, 4)


@pytest.mark.parametrize("metrics", [0, False, "", "bits", {}])
def test_metrics_of_a_language_model_are_a_list(metrics):
    with raises_parameter("metrics", metrics):
        lm.compile("sgd", metrics=metrics)


def test_the_nearest_name_is_suggested_and_none_where_none_is_near():
    with raises_naming(txl_tf.UnknownArgumentError, "temprature", "temperature"):
        lm.generate(PROMPT, 2, temprature=0.5)
    with pytest.raises(txl_tf.UnknownArgumentError) as caught:
        check_names("f", {"xyz": 1}, ["temperature"])
    assert "Did you mean" not in str(caught.value)


def test_known_names_of_a_function_are_those_of_its_signature():
    @known_names
    def function(first, /, second, *, third=1, **others):
        return first, second, third, others

    assert keywords_of(function) == ["second", "third"]
    assert function(1, second=2) == (1, 2, 1, {})
    with pytest.raises(txl_tf.UnknownArgumentError):
        function(1, 2, fourth=3)


def test_bases_of_a_user_may_take_arguments_of_their_own():
    class Named:
        def __init__(self, *, nickname=None, **kwargs):
            super().__init__(**kwargs)
            self.nickname = nickname

    class Mine(layers.EncoderLayer, Named, keras.layers.Layer):
        def __init__(self, units, **kwargs):
            super().__init__(**kwargs)
            self.units = units

    layer = Mine(3, d_model=8, num_heads=2, dff=8, nickname="x", name="mine")
    assert (layer.units, layer.nickname, layer.name, layer.dff) == (3, "x", "mine", 8)
    with pytest.raises(txl_tf.UnknownArgumentError) as caught:
        Mine(3, d_model=8, num_heads=2, dff=8, nick="x")
    assert caught.value.name == "nick" and {"nickname", "dff"} <= set(caught.value.allowed)
