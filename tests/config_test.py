"""Hyper-parameters: what each group says and refuses, and that networks hold the values."""

import dataclasses
import inspect
import json

import pytest
from helpers import ANY, mentions, raises_naming, raises_parameter

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
    SamplingConfig,
    ScoringConfig,
    SearchConfig,
    SentenceConfig,
    SoftmaxConfig,
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
    others = {DecoderConfig, SoftmaxConfig, TransformerLMConfig, RunConfig, SamplingConfig}
    assert set(GROUPS) == {*named, *pairs, *tagger, *tagged, *others}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 1e9])
@pytest.mark.parametrize("name", ["init_std", "proj_init_std", "init_range"])
def test_initial_weights_have_a_finite_scale(name, value):
    with pytest.raises(ParameterError) as caught:
        make(ModelConfig, **{name: value})
    assert caught.value.name == name and caught.value.value is value
    assert getattr(make(ModelConfig, **{name: 0.0}), name) == 0.0


# Strings without a list of choices.
NO_NAMES = ("level", "text_field", "subword_type", "start", "eval_split", "pre", "post", "labels")


@pytest.mark.parametrize("group", GROUPS)
def test_an_empty_name_is_refused(group):
    """As of an unset variable of a shell; what an earlier version wrote to `config.json` still opens."""
    found = [field for field in dataclasses.fields(group) if field.type.startswith(("str", "list[str]"))]
    found = [field for field in found if not hasattr(field.metadata["check"], "choices")]
    for field in found:
        if field.name in NO_NAMES:
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
        (SamplingConfig, {"temperature": 0, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_window": 9}),
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
    (NetworkConfig, {"positions": "absolute"}, "positions", ANY),  # other tests of the process register schemes
    (DecoderConfig, {"context_len": 1}, "context_len", "at least 2"),
    (DecoderConfig, {"n_token": 0}, "n_token", "at least 1"),
    (DecoderConfig, {"n_token": 20.5}, "n_token", "an integer"),
    (DecoderConfig, {"n_layer": 0}, "n_layer", "at least 1"),
    (DecoderConfig, {"n_layer": None}, "n_layer", "an integer"),
    (DecoderConfig, {"n_layer": 10**20}, "n_layer", "at most 10000"),
    (DecoderConfig, {"d_model": 7}, "d_model", "even (half sines, half cosines)"),
    (DecoderConfig, {"d_model": 0}, "d_model", "at least 1"),
    (DecoderConfig, {"d_embed": 0}, "d_embed", "at least 1"),
    (DecoderConfig, {"n_head": -1}, "n_head", "at least 1"),
    (DecoderConfig, {"d_head": 0}, "d_head", "at least 1"),
    (DecoderConfig, {"d_inner": "12"}, "d_inner", "an integer"),
    (DecoderConfig, {"dropout": 1.0}, "dropout", "lie in [0, 1)"),
    (DecoderConfig, {"dropatt": -0.1}, "dropatt", "lie in [0, 1)"),
    (DecoderConfig, {"mem_len": -1}, "mem_len", "at least 0"),
    (DecoderConfig, {"mem_len": None}, "mem_len", "an integer"),
    (DecoderConfig, {"div_val": 0}, "div_val", "at least 1"),
    (NetworkConfig, {"reset_token": -1}, "reset_token", "at least 0"),
    (ModelConfig, {"reset_token": "END"}, "reset_token", "an integer"),
    (DecoderConfig, {"layer_norm_epsilon": 0.0}, "layer_norm_epsilon", "between 0 and 1, both excluded"),
    (DecoderConfig, {"layer_norm_epsilon": -1e-5}, "layer_norm_epsilon", "between 0 and 1, both excluded"),
    (DecoderConfig, {"layer_norm_epsilon": float("inf")}, "layer_norm_epsilon", "between 0 and 1, both excluded"),
    (DecoderConfig, {"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon", "between 0 and 1, both excluded"),
    (TransformerLMConfig, {"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon", "a number"),
    (DecoderConfig, {"init": "xavier"}, "init", ["normal", "uniform", "a Keras initializer"]),
    (TransformerLMConfig, {"pos_embed": "fix"}, "pos_embed", ["sin", "learned"]),
    (TransformerConfig, {"pos_embed": "none"}, "pos_embed", ["sin", "learned", "rotary"]),
    (TransformerLMConfig, {"context_len": 1}, "context_len", "at least 2"),
    (DecoderConfig, {"activation": "selu"}, "activation", ["relu", "gelu", "swiglu"]),
    (DecoderConfig, {"norm": "batch"}, "norm", ["layer", "rms"]),
    (DecoderConfig, {"pre_lnorm": 1}, "pre_lnorm", "True or False"),
    (DecoderConfig, {"lora_rank": -1}, "lora_rank", "at least 0"),
    (DecoderConfig, {"lora_alpha": 0.0}, "lora_alpha", "positive"),
    (SoftmaxConfig, {"label_smoothing": 1.0}, "label_smoothing", "lie in [0, 1)"),
    (SoftmaxConfig, {"z_loss": -1.0}, "z_loss", "0 or more"),
    (ModelConfig, {"n_layer": 2.5}, "n_layer", "an integer"),
    (RunConfig, {"train_steps": 10**20}, "train_steps", "an integer of at most 64 bits"),
    (RunConfig, {"train_steps": -(10**20)}, "train_steps", "at least 1"),
    (TextConfig, {"cutoffs": 10**20}, "cutoffs", ANY),
    (LabelConfig, {"labels": "O"}, "labels", "a list (a string each)"),
    (LabelConfig, {"start_end": 1}, "start_end", "True or False"),
    (LabelConfig, {"output_dropout": 1.0}, "output_dropout", "lie in [0, 1)"),
    (SentenceConfig, {"n_token": 0}, "n_token", "at least 1"),
    (SentenceConfig, {"n_bigram": -1}, "n_bigram", "at least 0"),
    (SentenceConfig, {"d_embed": 0}, "d_embed", "at least 1"),
    (SentenceConfig, {"d_bigram": 0}, "d_bigram", "at least 1"),
    (EncoderConfig, {"n_layer": 0}, "n_layer", "at least 1"),
    (SentenceConfig, {"d_model": 7}, "d_model", "even (half sines, half cosines)"),
    (EncoderConfig, {"n_head": 0}, "n_head", "at least 1"),
    (EncoderConfig, {"d_inner": 0}, "d_inner", "at least 1"),
    (SentenceConfig, {"max_seq_len": 0}, "max_seq_len", "at least 1"),
    (EncoderConfig, {"dropout": 1.0}, "dropout", "lie in [0, 1)"),
    (EncoderConfig, {"dropatt": -0.1}, "dropatt", "lie in [0, 1)"),
    (EncoderConfig, {"embed_dropout": 2}, "embed_dropout", "lie in [0, 1)"),
    (SentenceConfig, {"token_dropout": 1.0}, "token_dropout", "lie in [0, 1)"),
    (BiLSTMConfig, {"n_layer": 0}, "n_layer", "at least 1"),
    (BiLSTMConfig, {"embed_dropout": 1.0}, "embed_dropout", "lie in [0, 1)"),
    (TenerConfig, {"attn_type": "naive"}, "attn_type", ["adatrans", "transformer"]),
    (TenerConfig, {"pos_embed": None}, "pos_embed", ["none", "sin", "fix"]),
    (FlatConfig, {"fusion": "two"}, "fusion", ["ff", "ff_two"]),
    (FlatConfig, {"rel_pos_init": 2}, "rel_pos_init", "at most 1"),
    (FlatConfig, {"residual": "both"}, "residual", ["input", "own"]),
    (TaggedConfig, {"tag_scheme": "iob1"}, "tag_scheme", ["bio", "bioes", "bmes", "none"]),
    (TaggedConfig, {"dataset": "msra"}, "dataset", ["text", "towns"]),
    (TaggedConfig, {"lowercase_vectors": True}, "lowercase_vectors", "left out"),
    (TaggedConfig, {"skip_short_words": True}, "skip_short_words", "left out"),
    (TaggedConfig, {"skip_short_words": True, "token_level": "word"}, "skip_short_words", "left out"),
    (TaggedConfig, {"bigrams": False, "bigram_vectors": "x"}, "bigram_vectors", "left out"),
    (TaggedConfig, {"n_sentences": 0}, "n_sentences", "at least 1"),
    (TaggedConfig, {"dataset": "towns", "token_level": "word"}, "token_level", "char for dataset=towns"),
    (TaggedConfig, {"dataset": "towns", "valid_path": "a.txt"}, "valid_path", "left out"),
    (TaggedConfig, {"token_level": "byte"}, "token_level", ["char", "word"]),
    (LabelConfig, {"token_level": "byte"}, "token_level", ["char", "word"]),
    (LabelConfig, {"scheme": "bio"}, "scheme", ["none"]),
    (TaggedConfig, {"min_freq": "2"}, "min_freq", "an integer"),
    (TaggedConfig, {"min_freq": -1}, "min_freq", "at least 0"),
    (TaggedConfig, {"valid_fraction": 1.0}, "valid_fraction", "between 0 and 1, both excluded"),
    (TaggedConfig, {"valid_fraction": 0.1, "valid_path": "a"}, "valid_fraction", "left out"),
    (TaggedConfig, {"valid_fraction": 0.1, "dataset": "towns"}, "valid_fraction", "left out"),
    (TaggedConfig, {"tag_column": 3, "dataset": "towns"}, "tag_column", "left out"),
    (ColumnsConfig, {"token_column": 0}, "token_column", "1 or more, or -1 for the last, -2 for the one before, ..."),
    (ColumnsConfig, {"tag_column": 0}, "tag_column", "1 or more, or -1 for the last, -2 for the one before, ..."),
    (
        TaggedConfig,
        {"token_column": 0, "tag_column": 0},
        "token_column",
        "1 or more, or -1 for the last, -2 for the one before, ...",
    ),
    (TaggerTrainingConfig, {"batch_size": 0}, "batch_size", "at least 1"),
    (TaggerTrainingConfig, {"extend_vocab": True}, "extend_vocab", "left out without init_from"),
    (RunConfig, {"patience": 0}, "patience", "at least 1"),
    (TextConfig, {"dataset": "imdb"}, "dataset", ["pydoc", "text", "enwik8", "text8", "ptb", "wt2", "wt103", "lm1b"]),
    (TextConfig, {"level": "sentence"}, "level", ["word", "char", "byte", "subword"]),
    (TextConfig, {"level": None}, "level", ["word", "char", "byte", "subword"]),
    (TextConfig, {"valid_fraction": 0.0}, "valid_fraction", "between 0 and 1, both excluded"),
    (TextConfig, {"valid_fraction": 1}, "valid_fraction", "between 0 and 1, both excluded"),
    (TextConfig, {"cutoffs": [5, 5]}, "cutoffs", "positive and rise"),
    (TextConfig, {"cutoffs": [0, 5]}, "cutoffs", "positive and rise"),
    (TextConfig, {"vocab_size": 0}, "vocab_size", "at least 1"),
    (TextConfig, {"subword_type": "wordpiece"}, "subword_type", ["unigram", "bpe"]),
    (TextConfig, {"num_shuffle": 0}, "num_shuffle", "positive"),
    (TextConfig, {"min_freq": -7}, "min_freq", "at least 0"),
    (TextConfig, {"max_size": 0}, "max_size", "at least 1"),
    (TextConfig, {"seed": -1}, "seed", "at least 0"),
    (TextConfig, {"seed": 2**32}, "seed", "at most 4294967295"),
    (PairsConfig, {"dataset": "wmt"}, "dataset", ["text", "dates"]),
    (PairsConfig, {"source_level": "byte"}, "source_level", ["word", "char", "subword"]),
    (PairsConfig, {"target_level": "byte"}, "target_level", ["word", "char", "subword"]),
    (PairsConfig, {"valid_fraction": 1.0}, "valid_fraction", "between 0 and 1, both excluded"),
    (PairsConfig, {"min_freq": -1}, "min_freq", "at least 0"),
    (PairsConfig, {"max_size": 0}, "max_size", "at least 1"),
    (PairsConfig, {"n_pairs": 0}, "n_pairs", "at least 1"),
    (PairsConfig, {"source_column": 0}, "source_column", "at least 1"),
    (PairsConfig, {"target_column": 0}, "target_column", "at least 1"),
    (PairsConfig, {"vocab_size": 0}, "vocab_size", "at least 1"),
    (PairsConfig, {"subword_type": "wordpiece"}, "subword_type", ["unigram", "bpe"]),
    (PairsTrainingConfig, {"batch_size": 0}, "batch_size", "at least 1"),
    (PairsTrainingConfig, {"batch_tokens": 0}, "batch_tokens", "at least 1"),
    (PairsTrainingConfig, {"eval_sources": -2}, "eval_sources", "at least -1"),
    (SearchConfig, {"beam_size": 0}, "beam_size", "at least 1"),
    (SearchConfig, {"length_penalty": -1.0}, "length_penalty", "0 or more"),
    (SearchConfig, {"n_best": 0}, "n_best", "at least 1"),
    (SearchConfig, {"max_new_tokens": 0}, "max_new_tokens", "at least 1"),
    (SamplingConfig, {"temperature": -1}, "temperature", "0 or more, at most 1e30"),
    (SamplingConfig, {"temperature": None}, "temperature", "a number"),
    (SamplingConfig, {"top_k": -1}, "top_k", "an integer from 1 to 2147483647, or 0 for all"),
    (SamplingConfig, {"top_k": 2**31}, "top_k", "an integer from 1 to 2147483647, or 0 for all"),
    (SamplingConfig, {"top_p": 0}, "top_p", "lie in (0, 1]"),
    (SamplingConfig, {"min_p": 1.0}, "min_p", "lie in [0, 1)"),
    (SamplingConfig, {"repetition_penalty": 0.0}, "repetition_penalty", "positive, at most 1e30"),
    (SamplingConfig, {"repetition_window": 2**30}, "repetition_window", "an integer from 1 to 1073741823"),
    (SamplingConfig, {"repetition_window": None}, "repetition_window", "an integer"),
    (TransformerConfig, {"input_vocab_size": 0}, "input_vocab_size", "at least 1"),
    (TransformerConfig, {"target_vocab_size": 2**31}, "target_vocab_size", "at most 2147483647"),
    (TransformerConfig, {"num_layers": 0}, "num_layers", "at least 1"),
    (TransformerConfig, {"d_model": 7}, "d_model", "even (half sines, half cosines)"),
    (TransformerConfig, {"num_heads": 0}, "num_heads", "at least 1"),
    (TransformerConfig, {"dff": 1 << 19}, "dff", "at most 262144"),
    (TransformerConfig, {"max_len": 0}, "max_len", "at least 1"),
    (TransformerConfig, {"rate": 1.0}, "rate", "lie in [0, 1)"),
    (TransformerConfig, {"label_smoothing": -0.1}, "label_smoothing", "lie in [0, 1)"),
    (TransformerConfig, {"dropatt": "0"}, "dropatt", "a number"),
    (TransformerConfig, {"dropact": 2}, "dropact", "lie in [0, 1)"),
    (TransformerConfig, {"target_lengths": [5, 4]}, "target_lengths", "positive and never fall"),
    (TransformerConfig, {"target_lengths": []}, "target_lengths", "positive and never fall"),
    (OptimizerConfig, {"learning_rate": 0.0}, "learning_rate", "positive"),
    (OptimizerConfig, {"learning_rate": float("nan")}, "learning_rate", "positive"),
    (OptimizerConfig, {"learning_rate": float("inf")}, "learning_rate", "finite"),
    (
        OptimizerConfig,
        {"weight_decay": float("inf"), "optimizer": "lamb"},
        "weight_decay",
        "0 or more, and 0 for adam and sgd",
    ),
    (
        OptimizerConfig,
        {"weight_decay": float("nan"), "optimizer": "lamb"},
        "weight_decay",
        "0 or more, and 0 for adam and sgd",
    ),
    (PairsConfig, {"n_pairs": 10**9}, "n_pairs", "at most 1000000"),
    (TaggedConfig, {"n_sentences": 10**9}, "n_sentences", "at most 1000000"),
    (TrainingConfig, {"sample_tokens": 10**9}, "sample_tokens", "at most 100000"),
    (MachineConfig, {"logical_cpus": 10**9}, "logical_cpus", "at most 1024"),
    (OptimizerConfig, {"min_lr_ratio": 1.5}, "min_lr_ratio", "lie in [0, 1]"),
    (OptimizerConfig, {"optimizer": "adagrad"}, "optimizer", ["adam", "adamw", "lamb", "sgd", "muon"]),
    (OptimizerConfig, {"weight_decay": 0.1}, "weight_decay", "0 or more, and 0 for adam and sgd"),
    (OptimizerConfig, {"weight_decay": 0.1, "optimizer": "sgd"}, "weight_decay", "0 or more, and 0 for adam and sgd"),
    (OptimizerConfig, {"weight_decay": -1, "optimizer": "lamb"}, "weight_decay", "0 or more, and 0 for adam and sgd"),
    (OptimizerConfig, {"beta_2": 1.0}, "beta_2", "lie in [0, 1)"),
    (OptimizerConfig, {"momentum": 1.0}, "momentum", "lie in [0, 1)"),
    (OptimizerConfig, {"clip_value": "5"}, "clip_value", "a number"),
    (OptimizerConfig, {"momentum": 0.5}, "momentum", "left out"),
    (OptimizerConfig, {"beta_2": 0.5, "optimizer": "sgd"}, "beta_2", "left out"),
    (OptimizerConfig, {"min_lr_ratio": 0.5, "schedule": "noam", "warmup_steps": 9}, "min_lr_ratio", "left out"),
    (EvaluationConfig, {"sliding_step": 3}, "sliding_step", "left out without sliding_window"),
    (OptimizerConfig, {"schedule": "step"}, "schedule", ["cosine", "noam", "linear", "constant"]),
    (OptimizerConfig, {"ema": 1.0}, "ema", "lie in [0, 1)"),
    (TrainingConfig, {"tgt_len": -3}, "tgt_len", "at least 1"),
    (TrainingConfig, {"train_batch_size": 0}, "train_batch_size", "at least 1"),
    (RunConfig, {"train_steps": 0}, "train_steps", "at least 1"),
    (RunConfig, {"iterations": 0}, "iterations", "at least 1"),
    (RunConfig, {"save_steps": 0}, "save_steps", "at least 1"),
    (RunConfig, {"max_to_keep": 0}, "max_to_keep", "at least 1"),
    (RunConfig, {"tracker": "comet"}, "tracker", ["none", "wandb", "mlflow"]),
    (RunConfig, {"steps_per_execution": 0}, "steps_per_execution", "at least 1"),
    (RunConfig, {"steps_per_execution": 7}, "steps_per_execution", "a divisor of train_steps=100000"),
    (RunConfig, {"steps_per_execution": 7, "train_steps": 70}, "steps_per_execution", "a divisor of iterations=500"),
    (TrainingConfig, {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps", "at least 1"),
    (TrainingConfig, {"parallel_parts": 0}, "parallel_parts", "at least 1"),
    (
        TrainingConfig,
        {"parallel_parts": 2, "jit_compile": True},
        "parallel_parts",
        "1 with static_shapes or jit_compile",
    ),
    (EvaluationConfig, {"tgt_len": 0}, "tgt_len", "at least 1"),
    (EvaluationConfig, {"parallel_parts": 0}, "parallel_parts", "at least 1"),
    (EvaluationConfig, {"sliding_window": 0}, "sliding_window", "at least 1"),
    (TrainingConfig, {"sample_tokens": -1}, "sample_tokens", "at least 0"),
    (EvaluationConfig, {"max_eval_batch": -2}, "max_eval_batch", "1 or more, or -1 for all"),
    (EvaluationConfig, {"max_eval_batch": 0}, "max_eval_batch", "1 or more, or -1 for all"),
    (EvaluationConfig, {"sliding_step": 0}, "sliding_step", "at least 1"),
    (ScoringConfig, {"segment": 0}, "segment", "at least 1"),
    (ScoringConfig, {"batch_tokens": 0}, "batch_tokens", "at least 1"),
    (EvaluationConfig, {"eval_batch_size": 0}, "eval_batch_size", "at least 1"),
    (MachineConfig, {"strategy": "all"}, "strategy", ["auto", "one", "mirrored", "multi_worker", "tpu"]),
    (MachineConfig, {"logical_cpus": 0}, "logical_cpus", "at least 1"),
    (MachineConfig, {"logical_cpus": 0.5}, "logical_cpus", "an integer"),
    (ClusterConfig, {"ray_address": ""}, "ray_address", "a name that is not empty, or left out"),
    (ClusterConfig, {"ray_address": "here"}, "ray_address", "auto, local or host:port"),
    (ClusterConfig, {"ray_address": "here:65536"}, "ray_address", "auto, local or host:port"),
    (ClusterConfig, {"ray_workers": 0}, "ray_workers", "at least 1"),
    (ClusterConfig, {"ray_cpus": -1}, "ray_cpus", "at least 0"),
    (ClusterConfig, {"ray_gpus": 0.5}, "ray_gpus", "an integer"),
    (TrainingClusterConfig, {"ray_workers": -1}, "ray_workers", "at least 1"),
    (TrainingClusterConfig, {"ray_workers": 2, "ray_restarts": -1}, "ray_restarts", "at least 0"),
    (TrainingClusterConfig, {"ray_workers": 2, "ray_min_workers": 0}, "ray_min_workers", "at least 1"),
    (TrainingClusterConfig, {"ray_workers": 2, "ray_min_workers": 3}, "ray_min_workers", "at most ray_workers=2"),
    (TrainingClusterConfig, {"ray_address": "auto"}, "ray_workers", "the number of workers to train on"),
    (MachineConfig, {"mixed_precision": "float8"}, "mixed_precision", ["float32", "bfloat16", "float16", "auto"]),
    (DecoderConfig, {"init_std": -0.1}, "init_std", "0 or more"),
    (NetworkConfig, {"clamp_len": -2}, "clamp_len", "at least -1"),
    (DecoderConfig, {"proj_init_std": float("nan")}, "proj_init_std", "0 or more"),
    (DecoderConfig, {"init_range": 1e9}, "init_range", "at most 1000"),
    (MachineConfig, {"matmul_precision": "tf32"}, "matmul_precision", ["float32", "bfloat16"]),
    (
        MachineConfig,
        {"matmul_precision": "bfloat16", "mixed_precision": "auto"},
        "matmul_precision",
        "float32 for mixed_precision=auto",
    ),
    *(
        (group, {field.name: ""}, field.name, "a name that is not empty, or left out")
        for group in GROUPS
        for field in dataclasses.fields(group)
        if field.metadata["check"] is not_empty
    ),
]


@pytest.mark.parametrize("group, values, name, allowed", BAD, ids=str)
def test_a_bad_value_is_an_error_that_names_the_argument_the_value_and_what_is_allowed(group, values, name, allowed):
    with raises_parameter(name, allowed=allowed) as raised:
        make(group, **values)
    assert raised.value.value is values.get(name)
    assert name in str(raised.value)


@pytest.mark.parametrize(
    "group, values, facts",
    [
        (TrainingConfig, {"tgt_len": -3}, ["tgt_len", 1, -3]),
        (OptimizerConfig, {"schedule": "x"}, ["schedule", "cosine, noam, linear, constant", "'x'"]),
        (DecoderConfig, {"dropout": 1.0}, ["dropout", "[0, 1)", 1.0]),
        (TextConfig, {"cutoffs": (5, 5)}, ["cutoffs", "[5, 5]"]),
        (DecoderConfig, {"init": "xavier"}, ["init", "normal, uniform", "'xavier'", "Keras"]),
        (TaggedConfig, {"unit_vectors": 1}, ["unit_vectors", True, False, 1]),
        (TaggedConfig, {"lowercase_vectors": True}, ["lowercase_vectors", True]),
        (RunConfig, {"steps_per_execution": 7}, ["steps_per_execution=7", "train_steps=100000"]),
        (OptimizerConfig, {"weight_decay": 0.1}, ["weight_decay", 0, 0.1, "adam", "sgd"]),
        (
            MachineConfig,
            {"matmul_precision": "bfloat16", "mixed_precision": "auto"},
            ["matmul_precision", "float32", "mixed_precision=auto", "'bfloat16'"],
        ),
    ],
)
def test_the_message_of_each_kind_of_check(group, values, facts):
    with raises_naming(ParameterError, *facts):
        make(group, **values)


@pytest.mark.parametrize("group", GROUPS)
def test_every_check_has_a_bad_value_here(group):
    checked = {field.name for field in dataclasses.fields(group) if field.metadata["check"]}
    assert checked <= {name for other, values, *_ in BAD for name in values if issubclass(group, other)}


def test_none_is_allowed_where_it_is_the_default_alone():
    assert make(NetworkConfig, n_token=None).n_token is None
    assert TextConfig(dataset=None, cutoffs=None).cutoffs is None
    assert EvaluationConfig(tgt_len=None).tgt_len is None
    assert SamplingConfig(top_k=None, top_p=None, min_p=None, repetition_penalty=None) == SamplingConfig()
    with raises_parameter("tgt_len", None, "an integer"):
        TrainingConfig(tgt_len=None)


def test_attributes_of_another_object_are_checked_as_the_group_s_own():
    made = make(NetworkConfig)
    values = type("Values", (), made.to_dict())()
    check_fields(NetworkConfig, values)
    values.n_head = 0
    with raises_parameter("n_head", 0, "at least 1"):
        check_fields(NetworkConfig, values)


# ---------------------------------------- bins


@pytest.mark.parametrize("cutoffs", [[10, 10], [12, 5], [0, 5], [5, 23], [5, 30], [-3, 5], [0], [23]], ids=str)
def test_cutoffs_that_leave_a_bin_empty_are_an_error(cutoffs):
    with raises_parameter("cutoffs", cutoffs, "numbers that increase and lie between 0 and n_token=23"):
        check_bins(23, 8, cutoffs, 1)


@pytest.mark.parametrize("cutoffs", [[], [1], [22], [1, 2, 3], [7, 15]], ids=str)
def test_cutoffs_that_leave_something_to_every_bin_are_none(cutoffs):
    check_bins(23, 8, cutoffs, 1)
    check_bins(23, 8, tuple(cutoffs), 2)


def test_a_bin_of_width_0_is_an_error_that_names_it():
    with raises_parameter("d_embed", 15, "at least 16") as raised:
        check_bins(23, 15, [5, 12], 4)
    assert mentions(str(raised.value), "div_val=4", "d_embed=15", 2, 3)
    check_bins(23, 16, [5, 12], 4)
    check_bins(23, 3, [], 4)  # one bin, and nothing to divide


@pytest.mark.parametrize(
    "arguments, name, value, allowed",
    [
        ((0, 8, [], 1), "n_token", 0, "at least 1"),
        ((23.0, 8, [], 1), "n_token", 23.0, "an integer"),
        ((23, 8, [5], 0), "div_val", 0, "at least 1"),
        ((23, 8, [5], 1.5), "div_val", 1.5, "an integer"),
        ((23, 8, [5, 12.5], 1), "cutoffs", [5, 12.5], "integers"),
        ((23, 8, {5, 12}, 1), "cutoffs", {5, 12}, "a list of integers"),
    ],
    ids=str,
)
def test_numbers_of_bins_that_are_none_are_an_error(arguments, name, value, allowed):
    with raises_parameter(name, value, allowed):
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


def test_a_machine_has_the_arguments_of_make_strategy():
    taken = inspect.signature(make_strategy).parameters
    machine = MachineConfig(strategy="tpu", tpu="node", tpu_zone="zone", gcp_project="project", logical_cpus=3)
    assert machine.strategy_arguments == {name: getattr(machine, name) for name in taken}


@pytest.mark.parametrize(
    "mixed_precision, policy",
    [("float32", "float32"), ("bfloat16", "mixed_bfloat16"), ("float16", "mixed_float16")],
)
def test_a_type_of_products_has_keras_s_name(mixed_precision, policy):
    assert MachineConfig(mixed_precision=mixed_precision).dtype_policy == policy
