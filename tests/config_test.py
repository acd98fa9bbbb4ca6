"""Hyper-parameters: what each group says and refuses, and that networks hold the values."""

import dataclasses
import inspect
import json

import pytest

import txl_tf
from txl_tf import config
from txl_tf.config import (
    BiLSTMConfig,
    BiLSTMTaggerConfig,
    ClusterConfig,
    ColumnsConfig,
    DecoderConfig,
    EncoderConfig,
    EvaluationConfig,
    FlatConfig,
    FlatTaggerConfig,
    LabelConfig,
    MachineConfig,
    ModelConfig,
    NetworkConfig,
    OptimizerConfig,
    PairsConfig,
    PairsTrainingConfig,
    RunConfig,
    ScoringConfig,
    SearchConfig,
    SentenceConfig,
    TaggedConfig,
    TaggerTrainingConfig,
    TenerConfig,
    TenerTaggerConfig,
    TextConfig,
    TrainingClusterConfig,
    TrainingConfig,
    TransformerConfig,
    TransformerLMConfig,
    check_bins,
    check_fields,
)
from txl_tf.config.checks import not_empty
from txl_tf.errors import ParameterError
from txl_tf.schema import check_values
from txl_tf.training.distribution import make_strategy

SIZES = {"n_layer": 2, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 3, "d_inner": 12}
ENCODER = {"n_layer": 2, "d_model": 8, "n_head": 2, "d_inner": 12}
REQUIRED = {
    DecoderConfig: SIZES,
    NetworkConfig: SIZES,
    ModelConfig: SIZES,
    TransformerLMConfig: SIZES,
    SentenceConfig: {"d_model": 8},
    **dict.fromkeys([BiLSTMConfig, BiLSTMTaggerConfig], {"n_layer": 2, "d_model": 8}),
    **dict.fromkeys([EncoderConfig, TenerConfig, FlatConfig, TenerTaggerConfig, FlatTaggerConfig], ENCODER),
    TransformerConfig: {"num_layers": 2, "d_model": 8, "num_heads": 2, "dff": 12},
}
GROUPS = [
    group
    for group in vars(config).values()
    if isinstance(group, type) and issubclass(group, config.Config) and group is not config.Config
]


def make(group, **values):
    return group(**{**REQUIRED.get(group, {}), **values})


def test_all_groups_are_here():
    named = {NetworkConfig, ModelConfig, TextConfig, OptimizerConfig, TrainingConfig, EvaluationConfig, MachineConfig}
    named |= {ScoringConfig, ClusterConfig, TrainingClusterConfig}
    pairs = {TransformerConfig, PairsConfig, PairsTrainingConfig, SearchConfig}
    tagger = {LabelConfig, SentenceConfig, EncoderConfig, TenerConfig, FlatConfig, TenerTaggerConfig, FlatTaggerConfig}
    tagger |= {BiLSTMConfig, BiLSTMTaggerConfig}
    tagged = {ColumnsConfig, TaggedConfig, TaggerTrainingConfig}
    assert set(GROUPS) == {*named, *pairs, *tagger, *tagged, DecoderConfig, TransformerLMConfig, RunConfig}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 1e9])
@pytest.mark.parametrize("name", ["init_std", "proj_init_std", "init_range"])
def test_initial_weights_have_a_finite_scale(name, value):
    with pytest.raises(ParameterError) as caught:
        make(ModelConfig, **{name: value})
    assert caught.value.name == name and caught.value.value is value
    assert getattr(make(ModelConfig, **{name: 0.0}), name) == 0.0


NO_NAMES = "level text_field subword_type start eval_split pre post labels"  # strings without a list of choices


@pytest.mark.parametrize("group", GROUPS)
def test_an_empty_name_is_refused(group):
    """As of an unset variable of a shell; what an earlier version wrote to `config.json` still opens."""
    found = [field for field in dataclasses.fields(group) if field.type.startswith(("str", "list[str]"))]
    found = [field for field in found if not hasattr(field.metadata["check"], "choices")]
    for field in found:
        if field.name in NO_NAMES.split():
            continue
        for value in ["", [], ["a", ""]] if field.type.startswith("list") else [""]:
            with pytest.raises(ParameterError) as caught:
                make(group, **{field.name: value})
            assert caught.value.name == field.name and caught.value.value == value
            if value != ["a", ""]:
                check_values({field.name: value}, group, partial=True)


@pytest.mark.parametrize("group", GROUPS)
def test_every_hyper_parameter_has_a_help_text_and_a_default_that_its_check_passes(group):
    for field in dataclasses.fields(group):
        help_text = field.metadata["help"]
        assert len(help_text) > 5 and help_text.endswith("."), field.name
    make(group)
    group(**{field.name: field.metadata["flag"] for field in dataclasses.fields(group)})  # the programs' defaults


@pytest.mark.parametrize(
    "group, name, table",
    [
        (TransformerLMConfig, "context_len", "learned"),
        (TransformerConfig, "max_len", "learned"),
        (TenerTaggerConfig, "max_seq_len", "fix"),
    ],
)
def test_a_trained_model_may_change_a_length_unless_there_is_a_learned_table_of_it(group, name, table):
    values = {field.name: field.metadata["flag"] for field in dataclasses.fields(group)}
    free = group(**values).free
    assert name in free and "n_layer" not in free and "d_model" not in free
    assert group(**{**values, "pos_embed": table}).free == [other for other in free if other != name]


@pytest.mark.parametrize(
    "group, values",
    [
        (NetworkConfig, {"n_token": 23, "cutoffs": [5, 12], "mem_len": 4, "init": "uniform"}),
        (ModelConfig, {"n_token": 23, "cutoffs": [], "proj_share_all_but_first": True, "dropout": 0.0}),
        (TransformerLMConfig, {"cutoffs": [], "context_len": 9, "layer_norm_epsilon": 1e-5}),
        (TransformerConfig, {"input_vocab_size": 9, "target_vocab_size": 8, "norm_first": True, "rate": 0.0}),
        (TextConfig, {"dataset": "text", "data_path": ["a.txt", "b.txt"], "cutoffs": [5, 12], "max_size": 100}),
        (EncoderConfig, {"n_token": 9, "n_bigram": 0, "d_bigram": 7, "token_dropout": 0.01}),
        (BiLSTMConfig, {"n_layer": 3, "d_model": 16, "embed_dropout": 0.5}),
        (TenerConfig, {"attn_type": "transformer", "pos_embed": "sin", "after_norm": False, "scale": True}),
        (FlatConfig, {"fusion": "ff_two", "rel_pos_init": 0, "k_proj": False, "residual": "own"}),
        (LabelConfig, {"labels": ["O", "B-LOC"], "start_end": False, "output_dropout": 0.3}),
        (TenerTaggerConfig, {"labels": None, "n_token": 9, "key_position_term": False}),
        (FlatTaggerConfig, {"labels": ["O"], "constraints": False, "fusion_shared": False}),
        (TaggedConfig, {"train_path": "a.txt", "tag_scheme": "bioes", "lexicon": "jieba", "bigrams": False}),
        (TaggerTrainingConfig, {"batch_size": 7, "patience": 300, "jit_compile": True}),
        (OptimizerConfig, {"optimizer": "lamb", "weight_decay": 0.01, "clip": None}),
        (OptimizerConfig, {"optimizer": "sgd", "momentum": 0.0, "schedule": "linear", "clip_value": 5.0}),
        (TrainingConfig, {"tgt_len": 7, "static_shapes": True, "warm_start_path": "run/ckpt-5"}),
        (RunConfig, {"train_steps": 10, "iterations": 5, "steps_per_execution": 5, "allow_other_text": True}),
        (RunConfig, {"tracker": "wandb", "tracker_project": "mine"}),
        (PairsConfig, {"train_path": "a,b", "source_level": "word", "min_freq": 2, "share_vocab": False}),
        (PairsTrainingConfig, {"batch_size": 7, "batch_tokens": 100, "jit_compile": True}),
        (SearchConfig, {"beam_size": 4, "n_best": 2, "length_penalty": 0.0, "max_new_tokens": 9}),
        (EvaluationConfig, {"eval_split": "test", "eval_ckpt_path": "best"}),
        (ScoringConfig, {"start": "none", "score_end": False, "carry_memory": True, "segment": 64}),
        (MachineConfig, {"strategy": "mirrored", "logical_cpus": 2, "mixed_precision": "bfloat16"}),
        (ClusterConfig, {"ray_address": "auto", "ray_workers": 3, "ray_cpus": 0, "ray_gpus": 1}),
        (TrainingClusterConfig, {"ray_workers": 3, "ray_min_workers": 2, "ray_restarts": 0}),
    ],
)
def test_a_group_round_trips_through_a_dictionary_and_json(group, values):
    made = make(group, **values)
    as_dict = made.to_dict()
    assert list(as_dict) == group.names() == [field.name for field in dataclasses.fields(group)]
    assert {name: as_dict[name] for name in values} == values
    read = json.loads(json.dumps(as_dict))
    assert group(**read) == made and group(**read).to_dict() == as_dict
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seed = 1


# ---------------------------------------- bad values

BAD = [
    (NetworkConfig, {"positions": "absolute"}, "positions must be one of relative, sinusoids, .*, got 'absolute'"),
    (DecoderConfig, {"context_len": 1}, "context_len must be at least 2, got 1"),
    (DecoderConfig, {"n_token": 0}, "n_token must be at least 1, got 0"),
    (DecoderConfig, {"n_token": 20.5}, "n_token must be an integer, got 20.5"),
    (DecoderConfig, {"n_layer": 0}, "n_layer must be at least 1, got 0"),
    (DecoderConfig, {"n_layer": None}, "n_layer must be an integer, got None"),
    (DecoderConfig, {"d_model": 7}, "d_model must be even .*got 7"),
    (DecoderConfig, {"d_model": 0}, "d_model must be at least 1, got 0"),
    (DecoderConfig, {"d_embed": 0}, "d_embed must be at least 1, got 0"),
    (DecoderConfig, {"n_head": -1}, "n_head must be at least 1, got -1"),
    (DecoderConfig, {"d_head": 0}, "d_head must be at least 1, got 0"),
    (DecoderConfig, {"d_inner": "12"}, "d_inner must be an integer, got '12'"),
    (DecoderConfig, {"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
    (DecoderConfig, {"dropatt": -0.1}, r"dropatt must lie in \[0, 1\), got -0.1"),
    (DecoderConfig, {"mem_len": -1}, "mem_len must be at least 0, got -1"),
    (DecoderConfig, {"mem_len": None}, "mem_len must be an integer, got None"),
    (DecoderConfig, {"div_val": 0}, "div_val must be at least 1, got 0"),
    (NetworkConfig, {"reset_token": -1}, "reset_token must be at least 0, got -1"),
    (ModelConfig, {"reset_token": "END"}, "reset_token must be an integer, got 'END'"),
    (DecoderConfig, {"layer_norm_epsilon": 0.0}, "layer_norm_epsilon must be between 0 and 1, both excluded, got 0.0"),
    (DecoderConfig, {"layer_norm_epsilon": -1e-5}, "layer_norm_epsilon must be between 0 and 1, .* got -1e-05"),
    (DecoderConfig, {"layer_norm_epsilon": float("inf")}, "layer_norm_epsilon must be between 0 and 1, .* got inf"),
    (DecoderConfig, {"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon must be between 0 and 1, .* got nan"),
    (TransformerLMConfig, {"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon must be a number, got '1e-5'"),
    (DecoderConfig, {"init": "xavier"}, "init must be one of normal, uniform, got 'xavier'"),
    (TransformerLMConfig, {"pos_embed": "fix"}, "pos_embed must be one of sin, learned, got 'fix'"),
    (TransformerConfig, {"pos_embed": "none"}, "pos_embed must be one of sin, learned, got 'none'"),
    (TransformerLMConfig, {"context_len": 1}, "context_len must be at least 2, got 1"),
    (ModelConfig, {"n_layer": 2.5}, "n_layer must be an integer, got 2.5"),
    (LabelConfig, {"labels": "O"}, "labels must be a list .a string each., got 'O'"),
    (LabelConfig, {"start_end": 1}, "start_end must be True or False, got 1"),
    (LabelConfig, {"output_dropout": 1.0}, r"output_dropout must lie in \[0, 1\), got 1.0"),
    (SentenceConfig, {"n_token": 0}, "n_token must be at least 1, got 0"),
    (SentenceConfig, {"n_bigram": -1}, "n_bigram must be at least 0, got -1"),
    (SentenceConfig, {"d_embed": 0}, "d_embed must be at least 1, got 0"),
    (SentenceConfig, {"d_bigram": 0}, "d_bigram must be at least 1, got 0"),
    (EncoderConfig, {"n_layer": 0}, "n_layer must be at least 1, got 0"),
    (SentenceConfig, {"d_model": 7}, "d_model must be even .*got 7"),
    (EncoderConfig, {"n_head": 0}, "n_head must be at least 1, got 0"),
    (EncoderConfig, {"d_inner": 0}, "d_inner must be at least 1, got 0"),
    (SentenceConfig, {"max_seq_len": 0}, "max_seq_len must be at least 1, got 0"),
    (EncoderConfig, {"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
    (EncoderConfig, {"dropatt": -0.1}, r"dropatt must lie in \[0, 1\), got -0.1"),
    (EncoderConfig, {"embed_dropout": 2}, r"embed_dropout must lie in \[0, 1\), got 2"),
    (SentenceConfig, {"token_dropout": 1.0}, r"token_dropout must lie in \[0, 1\), got 1.0"),
    (BiLSTMConfig, {"n_layer": 0}, "n_layer must be at least 1, got 0"),
    (BiLSTMConfig, {"embed_dropout": 1.0}, r"embed_dropout must lie in \[0, 1\), got 1.0"),
    (TenerConfig, {"attn_type": "naive"}, "attn_type must be one of adatrans, transformer, got 'naive'"),
    (TenerConfig, {"pos_embed": None}, "pos_embed must be one of none, sin, fix, got None"),
    (FlatConfig, {"fusion": "two"}, "fusion must be one of ff, ff_two, got 'two'"),
    (FlatConfig, {"rel_pos_init": 2}, "rel_pos_init must be at most 1, got 2"),
    (FlatConfig, {"residual": "both"}, "residual must be one of input, own, got 'both'"),
    (TaggedConfig, {"tag_scheme": "iob1"}, "tag_scheme must be one of bio, bioes, bmes, none, got 'iob1'"),
    (TaggedConfig, {"dataset": "msra"}, "dataset must be one of text, towns, got 'msra'"),
    (TaggedConfig, {"lowercase_vectors": True}, "lowercase_vectors must be left out, .*there are no vectors"),
    (TaggedConfig, {"skip_short_words": True}, "skip_short_words must be left out, .*words of a lexicon"),
    (
        TaggedConfig,
        {"bigrams": False, "bigram_vectors": "x"},
        "bigram_vectors must be left out, .*there are no bigrams",
    ),
    (TaggedConfig, {"n_sentences": 0}, "n_sentences must be at least 1, got 0"),
    (TaggedConfig, {"dataset": "towns", "token_level": "word"}, "token_level must be char for dataset=towns, got word"),
    (TaggedConfig, {"dataset": "towns", "valid_path": "a.txt"}, "valid_path must be left out, got 'a.txt': dataset=to"),
    (TaggedConfig, {"token_level": "byte"}, "token_level must be one of char, word, got 'byte'"),
    (LabelConfig, {"token_level": "byte"}, "token_level must be one of char, word, got 'byte'"),
    (LabelConfig, {"scheme": "bio"}, "scheme must be one of none, got 'bio'"),
    (TaggedConfig, {"min_freq": "2"}, "min_freq must be an integer, got '2'"),
    (TaggedConfig, {"min_freq": -1}, "min_freq must be at least 0, got -1"),
    (TaggedConfig, {"valid_fraction": 1.0}, "valid_fraction must be between 0 and 1, both excluded, got 1.0"),
    (TaggedConfig, {"valid_fraction": 0.1, "valid_path": "a"}, "valid_fraction must be left out, got 0.1: valid_path "),
    (TaggedConfig, {"valid_fraction": 0.1, "dataset": "towns"}, "valid_fraction must be left out, got 0.1: dataset=to"),
    (
        TaggedConfig,
        {"tag_column": 3, "dataset": "towns"},
        "tag_column must be left out, got 3: dataset=towns makes its",
    ),
    (ColumnsConfig, {"token_column": 0}, "token_column must be 1 or more, or -1 for the last, .*, got 0"),
    (ColumnsConfig, {"tag_column": 0}, "tag_column must be 1 or more, or -1 for the last, .*, got 0"),
    (TaggedConfig, {"token_column": 0, "tag_column": 0}, "token_column must be 1 or more, or -1 for the last"),
    (TaggerTrainingConfig, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    (TaggerTrainingConfig, {"extend_vocab": True}, "extend_vocab needs init_from"),
    (TaggerTrainingConfig, {"patience": 0}, "patience must be at least 1, got 0"),
    (TextConfig, {"dataset": "imdb"}, "dataset must be one of pydoc, text, .*got 'imdb'"),
    (TextConfig, {"level": "sentence"}, "level must be one of word, char, byte, subword, got 'sentence'"),
    (TextConfig, {"level": None}, "level must be one of word, char, byte, subword, got None"),
    (TextConfig, {"valid_fraction": 0.0}, "valid_fraction must be between 0 and 1, both excluded, got 0.0"),
    (TextConfig, {"valid_fraction": 1}, "valid_fraction must be between 0 and 1, both excluded, got 1"),
    (TextConfig, {"cutoffs": [5, 5]}, r"cutoffs must be positive and rise, got \[5, 5\]"),
    (TextConfig, {"cutoffs": [0, 5]}, r"cutoffs must be positive and rise, got \[0, 5\]"),
    (TextConfig, {"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
    (TextConfig, {"subword_type": "wordpiece"}, "subword_type must be one of unigram, bpe, got 'wordpiece'"),
    (TextConfig, {"num_shuffle": 0}, "num_shuffle must be positive, got 0"),
    (TextConfig, {"min_freq": -7}, "min_freq must be at least 0, got -7"),
    (TextConfig, {"max_size": 0}, "max_size must be at least 1, got 0"),
    (TextConfig, {"seed": -1}, "seed must be at least 0, got -1"),
    (TextConfig, {"seed": 2**32}, "seed must be at most 4294967295, got 4294967296"),
    (PairsConfig, {"dataset": "wmt"}, "dataset must be one of text, dates, got 'wmt'"),
    (PairsConfig, {"source_level": "byte"}, "source_level must be one of word, char, subword, got 'byte'"),
    (PairsConfig, {"target_level": "byte"}, "target_level must be one of word, char, subword, got 'byte'"),
    (PairsConfig, {"valid_fraction": 1.0}, "valid_fraction must be between 0 and 1, both excluded, got 1.0"),
    (PairsConfig, {"min_freq": -1}, "min_freq must be at least 0, got -1"),
    (PairsConfig, {"max_size": 0}, "max_size must be at least 1, got 0"),
    (PairsConfig, {"n_pairs": 0}, "n_pairs must be at least 1, got 0"),
    (PairsConfig, {"source_column": 0}, "source_column must be at least 1, got 0"),
    (PairsConfig, {"target_column": 0}, "target_column must be at least 1, got 0"),
    (PairsConfig, {"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
    (PairsConfig, {"subword_type": "wordpiece"}, "subword_type must be one of unigram, bpe, got 'wordpiece'"),
    (PairsTrainingConfig, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    (PairsTrainingConfig, {"batch_tokens": 0}, "batch_tokens must be at least 1, got 0"),
    (PairsTrainingConfig, {"eval_sources": -2}, "eval_sources must be at least -1, got -2"),
    (SearchConfig, {"beam_size": 0}, "beam_size must be at least 1, got 0"),
    (SearchConfig, {"length_penalty": -1.0}, "length_penalty must be 0 or more, got -1.0"),
    (SearchConfig, {"n_best": 0}, "n_best must be at least 1, got 0"),
    (SearchConfig, {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    (TransformerConfig, {"input_vocab_size": 0}, "input_vocab_size must be at least 1, got 0"),
    (TransformerConfig, {"target_vocab_size": 2**31}, "target_vocab_size must be at most 2147483647, got 2147483648"),
    (TransformerConfig, {"num_layers": 0}, "num_layers must be at least 1, got 0"),
    (TransformerConfig, {"d_model": 7}, "d_model must be even"),
    (TransformerConfig, {"num_heads": 0}, "num_heads must be at least 1, got 0"),
    (TransformerConfig, {"dff": 1 << 19}, "dff must be at most 262144, got 524288"),
    (TransformerConfig, {"max_len": 0}, "max_len must be at least 1, got 0"),
    (TransformerConfig, {"rate": 1.0}, r"rate must lie in \[0, 1\), got 1.0"),
    (TransformerConfig, {"label_smoothing": -0.1}, r"label_smoothing must lie in \[0, 1\), got -0.1"),
    (TransformerConfig, {"dropatt": "0"}, "dropatt must be a number, got '0'"),
    (TransformerConfig, {"dropact": 2}, r"dropact must lie in \[0, 1\), got 2"),
    (TransformerConfig, {"target_lengths": [5, 4]}, r"target_lengths must be positive and never fall, got \[5, 4\]"),
    (TransformerConfig, {"target_lengths": []}, r"target_lengths must be positive and never fall, got \[\]"),
    (OptimizerConfig, {"learning_rate": 0.0}, "learning_rate must be positive, got 0.0"),
    (OptimizerConfig, {"learning_rate": float("nan")}, "learning_rate must be positive, got nan"),
    (OptimizerConfig, {"learning_rate": float("inf")}, "learning_rate must be finite, got inf"),
    (OptimizerConfig, {"weight_decay": float("inf"), "optimizer": "lamb"}, "weight_decay must be 0 or more"),
    (OptimizerConfig, {"weight_decay": float("nan"), "optimizer": "lamb"}, "weight_decay must be 0 or more"),
    (PairsConfig, {"n_pairs": 10**9}, "n_pairs must be at most 1000000, got 1000000000"),
    (TaggedConfig, {"n_sentences": 10**9}, "n_sentences must be at most 1000000, got 1000000000"),
    (TrainingConfig, {"sample_tokens": 10**9}, "sample_tokens must be at most 100000, got 1000000000"),
    (MachineConfig, {"logical_cpus": 10**9}, "logical_cpus must be at most 1024, got 1000000000"),
    (OptimizerConfig, {"min_lr_ratio": 1.5}, r"min_lr_ratio must lie in \[0, 1\], got 1.5"),
    (OptimizerConfig, {"optimizer": "adagrad"}, "optimizer must be one of adam, adamw, lamb, sgd, got 'adagrad'"),
    (OptimizerConfig, {"weight_decay": 0.1}, "weight_decay must be 0 or more, and 0 for adam and sgd, got 0.1 for"),
    (OptimizerConfig, {"weight_decay": 0.1, "optimizer": "sgd"}, "weight_decay must be .*0 for .*sgd, got 0.1 for sgd"),
    (OptimizerConfig, {"weight_decay": -1, "optimizer": "lamb"}, "weight_decay must be 0 or more, .*got -1 for lamb"),
    (OptimizerConfig, {"beta_2": 1.0}, r"beta_2 must lie in \[0, 1\), got 1.0"),
    (OptimizerConfig, {"momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0"),
    (OptimizerConfig, {"clip_value": "5"}, "clip_value must be a number, got '5'"),
    (OptimizerConfig, {"schedule": "step"}, "schedule must be one of cosine, noam, linear, constant, got 'step'"),
    (OptimizerConfig, {"ema": 1.0}, r"ema must lie in \[0, 1\), got 1.0"),
    (TrainingConfig, {"tgt_len": -3}, "tgt_len must be at least 1, got -3"),
    (TrainingConfig, {"train_batch_size": 0}, "train_batch_size must be at least 1, got 0"),
    (RunConfig, {"train_steps": 0}, "train_steps must be at least 1, got 0"),
    (RunConfig, {"iterations": 0}, "iterations must be at least 1, got 0"),
    (RunConfig, {"save_steps": 0}, "save_steps must be at least 1, got 0"),
    (RunConfig, {"max_to_keep": 0}, "max_to_keep must be at least 1, got 0"),
    (RunConfig, {"tracker": "comet"}, "tracker must be one of none, wandb, mlflow, got 'comet'"),
    (RunConfig, {"steps_per_execution": 0}, "steps_per_execution must be at least 1, got 0"),
    (RunConfig, {"steps_per_execution": 7}, "steps_per_execution=7 must divide train_steps=100000"),
    (RunConfig, {"steps_per_execution": 7, "train_steps": 70}, "steps_per_execution=7 must divide iterations=500"),
    (TrainingConfig, {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1, got 0"),
    (EvaluationConfig, {"tgt_len": 0}, "tgt_len must be at least 1, got 0"),
    (EvaluationConfig, {"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
    (TrainingConfig, {"sample_tokens": -1}, "sample_tokens must be at least 0, got -1"),
    (EvaluationConfig, {"max_eval_batch": -2}, "max_eval_batch must be 1 or more, or -1 for all, got -2"),
    (EvaluationConfig, {"max_eval_batch": 0}, "max_eval_batch must be 1 or more, or -1 for all, got 0"),
    (EvaluationConfig, {"sliding_step": 0}, "sliding_step must be at least 1, got 0"),
    (ScoringConfig, {"segment": 0}, "segment must be at least 1, got 0"),
    (ScoringConfig, {"batch_tokens": 0}, "batch_tokens must be at least 1, got 0"),
    (EvaluationConfig, {"eval_batch_size": 0}, "eval_batch_size must be at least 1, got 0"),
    (MachineConfig, {"strategy": "all"}, "strategy must be one of auto, one, mirrored, multi_worker, tpu, got 'all'"),
    (MachineConfig, {"logical_cpus": 0}, "logical_cpus must be at least 1, got 0"),
    (MachineConfig, {"logical_cpus": 0.5}, "logical_cpus must be an integer, got 0.5"),
    (ClusterConfig, {"ray_address": ""}, "ray_address must be a name that is not empty, or left out, got ''"),
    (ClusterConfig, {"ray_address": "here"}, "ray_address must be auto, local or host:port, got 'here'"),
    (ClusterConfig, {"ray_address": "here:65536"}, "ray_address must be auto, local or host:port, got 'here:65536'"),
    (ClusterConfig, {"ray_workers": 0}, "ray_workers must be at least 1, got 0"),
    (ClusterConfig, {"ray_cpus": -1}, "ray_cpus must be at least 0, got -1"),
    (ClusterConfig, {"ray_gpus": 0.5}, "ray_gpus must be an integer, got 0.5"),
    (TrainingClusterConfig, {"ray_workers": -1}, "ray_workers must be at least 1, got -1"),
    (TrainingClusterConfig, {"ray_workers": 2, "ray_restarts": -1}, "ray_restarts must be at least 0, got -1"),
    (TrainingClusterConfig, {"ray_workers": 2, "ray_min_workers": 0}, "ray_min_workers must be at least 1, got 0"),
    (TrainingClusterConfig, {"ray_workers": 2, "ray_min_workers": 3}, "ray_min_workers must be at most ray_workers=2"),
    (TrainingClusterConfig, {"ray_address": "auto"}, "ray_address and ray_min_workers go with ray_workers"),
    (
        MachineConfig,
        {"mixed_precision": "float8"},
        "mixed_precision must be one of float32, bfloat16, float16, auto, got 'float8'",
    ),
    (DecoderConfig, {"init_std": -0.1}, "init_std must be 0 or more, got -0.1"),
    (DecoderConfig, {"proj_init_std": float("nan")}, "proj_init_std must be 0 or more, got nan"),
    (DecoderConfig, {"init_range": 1e9}, "init_range must be at most 1000, got 1000000000.0"),
    (MachineConfig, {"matmul_precision": "tf32"}, "matmul_precision must be one of float32, bfloat16, got 'tf32'"),
    (
        MachineConfig,
        {"matmul_precision": "bfloat16", "mixed_precision": "auto"},
        "matmul_precision=bfloat16 is for mixed_precision=float32, got auto",
    ),
    *(
        (group, {field.name: ""}, f"{field.name} must be a name that is not empty, or left out, got ''")
        for group in GROUPS
        for field in dataclasses.fields(group)
        if field.metadata["check"] is not_empty
    ),
]


@pytest.mark.parametrize("group, values, message", BAD, ids=str)
def test_a_bad_value_is_an_error_that_names_the_argument_the_value_and_what_is_allowed(group, values, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make(group, **values)


@pytest.mark.parametrize("group", GROUPS)
def test_every_check_has_a_bad_value_here(group):
    checked = {field.name for field in dataclasses.fields(group) if field.metadata["check"]}
    assert checked <= {name for other, values, _ in BAD for name in values if issubclass(group, other)}


def test_none_is_allowed_where_it_is_the_default_alone():
    assert make(NetworkConfig, n_token=None).n_token is None
    assert TextConfig(dataset=None, cutoffs=None).cutoffs is None
    assert EvaluationConfig(tgt_len=None).tgt_len is None
    with pytest.raises(ValueError, match="tgt_len must be an integer, got None"):
        TrainingConfig(tgt_len=None)


def test_attributes_of_another_object_are_checked_as_the_group_s_own():
    made = make(NetworkConfig)
    values = type("Values", (), made.to_dict())()
    check_fields(NetworkConfig, values)
    values.n_head = 0
    with pytest.raises(ValueError, match="n_head must be at least 1, got 0"):
        check_fields(NetworkConfig, values)


# ---------------------------------------- bins


@pytest.mark.parametrize("cutoffs", [[10, 10], [12, 5], [0, 5], [5, 23], [5, 30], [-3, 5], [0], [23]], ids=str)
def test_cutoffs_that_leave_a_bin_empty_are_an_error(cutoffs):
    with pytest.raises(ValueError, match=r"cutoffs must increase and lie between 0 and n_token=23, got \[") as error:
        check_bins(23, 8, cutoffs, 1)
    assert str(cutoffs) in str(error.value)


@pytest.mark.parametrize("cutoffs", [[], [1], [22], [1, 2, 3], [7, 15]], ids=str)
def test_cutoffs_that_leave_something_to_every_bin_are_none(cutoffs):
    check_bins(23, 8, cutoffs, 1)
    check_bins(23, 8, tuple(cutoffs), 2)


def test_a_bin_of_width_0_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="div_val=4 divides d_embed=15 down to width 0 in bin 2 of 3.*at least 16"):
        check_bins(23, 15, [5, 12], 4)
    check_bins(23, 16, [5, 12], 4)
    check_bins(23, 3, [], 4)  # one bin, and nothing to divide


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 8, [], 1), "n_token must be at least 1, got 0"),
        ((23.0, 8, [], 1), "n_token must be an integer, got 23.0"),
        ((23, 8, [5], 0), "div_val must be at least 1, got 0"),
        ((23, 8, [5], 1.5), "div_val must be an integer, got 1.5"),
        ((23, 8, [5, 12.5], 1), r"cutoffs must be integers, got \[5, 12.5\]"),
    ],
    ids=str,
)
def test_numbers_of_bins_that_are_none_are_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_bins(*arguments)


# ---------------------------------------- who holds the values of the groups (signatures: `signatures_test.py`)


def test_a_network_and_a_language_model_hold_the_values_of_their_group():
    given = make(
        ModelConfig, n_token=23, cutoffs=(5, 12), mem_len=4, div_val=2, init_std=0.1, layer_norm_epsilon=1e-5
    ).to_dict()
    lm = txl_tf.TransformerXLLM(**given)
    assert {name: lm.get_config()[name] for name in ModelConfig.names()} == given
    assert {name: getattr(lm.network, name) for name in NetworkConfig.names()} == {
        name: given[name] for name in NetworkConfig.names()
    }
    lm = txl_tf.TransformerXLLM(n_token=23, mem_len=0, **SIZES)
    assert make(ModelConfig, n_token=23).to_dict() == {name: lm.get_config()[name] for name in ModelConfig.names()}


@pytest.mark.parametrize(
    "network, group",
    [
        (txl_tf.Tener, TenerConfig),
        pytest.param(txl_tf.Flat, FlatConfig, marks=pytest.mark.slow),
        (txl_tf.BiLSTM, BiLSTMConfig),
    ],
)
def test_an_encoder_holds_the_values_of_its_group(network, group):
    given = make(group, n_token=9, d_embed=6, embed_dropout=0.2).to_dict()
    assert {name: network(**given).get_config()[name] for name in group.names()} == given


def test_the_machine_s_devices_are_the_arguments_of_make_strategy():
    taken = inspect.signature(make_strategy).parameters
    machine = MachineConfig(strategy="tpu", tpu="node", tpu_zone="zone", gcp_project="project", logical_cpus=3)
    assert dict(zip(taken, machine.devices, strict=True)) == {name: getattr(machine, name) for name in taken}


@pytest.mark.parametrize(
    "mixed_precision, policy",
    [("float32", "float32"), ("bfloat16", "mixed_bfloat16"), ("float16", "mixed_float16")],
)
def test_a_type_of_products_has_keras_s_name(mixed_precision, policy):
    assert MachineConfig(mixed_precision=mixed_precision).dtype_policy == policy
