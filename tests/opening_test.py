"""Training that resumes from --model_dir alone: the three programs take all settings from config.json."""

import dataclasses

import pytest
from helpers import ANY, make_run, program, raises_parameter, run_here, word_vocab, write_text
from small_runs import make_encoder_decoder, make_tagger

import txl_tf
from txl_tf.config import PairsConfig, TaggedConfig, TransformerLMConfig
from txl_tf.config.presets import PAIR_SIZES, SIZES
from txl_tf.runs import train
from txl_tf.runs.folder import RunFolder

# Settings of a run that differ from the defaults of the flags.
TRAINING = {"train_steps": 70, "iterations": 7, "save_steps": 14, "patience": 28, "seed": 3}
TRAINING |= {"mixed_precision": "bfloat16", "learning_rate": 0.125, "warmup_steps": 5}
RUNS = {
    "train.py": (
        lambda folder: make_run(folder, word_vocab(), untie_r=True),
        {"dataset": "text", "data_path": "some.txt", "level": "word"},
        {"tgt_len": 9, "train_batch_size": 4, "sample_tokens": 11, "do_eval": True},
    ),
    "tools/train_seq2seq.py": (
        make_encoder_decoder,
        {"train_path": "pairs.tsv", "source_level": "word"},
        {"batch_size": 6, "eval_sources": 8, "beam_size": 3},
    ),
    "tools/train_ner.py": (
        make_tagger,
        {"train_path": "train.txt", "bigrams": False},
        {"batch_size": 6},
    ),
}


@pytest.fixture(params=RUNS)
def resumed(request, tmp_path, monkeypatch):
    """`(settings, run)`: a function of flags that returns what `train_run` gets, and what the run was trained with."""
    make, data, training = RUNS[request.param]
    folder = RunFolder(tmp_path / "run")
    make(folder.path)
    config = {**folder.read_config(), "data": data, "training": {**TRAINING, **training}}
    folder.write_config(config, folder.load_vocabs())

    def settings(*flags):
        got = {}
        monkeypatch.setattr(train, "train_run", lambda folder, **settings: got.update(settings))
        for tool in program(request.param):
            run_here(tool, f"--model_dir={folder}", *flags)
        return got

    return settings, config


def test_a_folder_alone_gives_all_settings(resumed):
    settings, config = resumed
    got = settings()
    found = dataclasses.asdict(got["data"]) if dataclasses.is_dataclass(got["data"]) else got["data"]
    assert {name: found[name] for name in config["data"]} == config["data"]
    assert isinstance(got["data"], PairsConfig | TaggedConfig | dict)
    model = got["model"].to_dict()
    assert {name: model[name] for name in ("n_layer", "num_layers", "d_model", "untie_r") if name in model} == {
        name: config["model"][name] for name in ("n_layer", "num_layers", "d_model", "untie_r") if name in model
    }
    groups = (got["training"], got["optimizer"], got["machine"], got.get("final"))
    values = {name: value for group in groups if group for name, value in group.to_dict().items()}
    assert {name: values[name] for name in config["training"]} == config["training"]


def test_a_run_without_a_checkpoint_needs_the_whole_command(resumed, tmp_path, monkeypatch):
    settings, config = resumed
    monkeypatch.setattr(RunFolder, "steps", lambda folder: [])
    with raises_parameter("model_dir", ANY, "a run with a checkpoint"):
        settings()
    name = "data_path" if "data_path" in config["data"] else "train_path"
    text = write_text(tmp_path / "text.txt", "a\tb\n" * 9)
    assert settings(f"--{name}={text}", "--train_steps=20")["training"].train_steps == 20


def test_train_steps_extends_the_training_and_changes_nothing_else(resumed):
    settings, _ = resumed
    before = settings()
    after = settings("--train_steps=99")
    assert after["training"] == dataclasses.replace(before["training"], train_steps=99)
    assert {**after, "training": None} == {**before, "training": None}


@pytest.mark.parametrize("resumed", ["train.py", "tools/train_seq2seq.py"], indirect=True)
def test_a_preset_of_a_run_that_resumes_is_refused(resumed):
    settings, _ = resumed
    with raises_parameter("preset", "tiny"):
        settings("--preset=tiny")


@pytest.mark.parametrize("preset", ["tiny", "base"])
@pytest.mark.parametrize("resumed", ["train.py", "tools/train_seq2seq.py"], indirect=True)
def test_a_preset_of_other_values_than_the_run_is_refused_even_with_sizes(resumed, tmp_path, preset):
    """The run was trained with a learning rate of 0.125, which is that of no preset."""
    settings, config = resumed
    if "source_level" in config["data"]:
        text = write_text(tmp_path / "pairs.tsv", "".join(f"{i}\tx{i}\n" for i in range(300)))
        flags = [f"--train_path={text}", "--source_level=word", "--batch_size=6"]
    else:
        text = write_text(tmp_path / "text.txt", "a b c\n" * 300)
        flags = [f"--data_path={text}", "--level=word"]
    sizes = [*SIZES, *PAIR_SIZES, "tgt_len", "mem_len", "dropout", "dropatt", "untie_r", "div_val", "min_lr_ratio"]
    recorded = {**config["model"], **config["training"]}
    flags += [f"--{name}={recorded[name]}" for name in dict.fromkeys(sizes) if name in recorded]
    with raises_parameter("preset", preset):
        settings(*flags, f"--preset={preset}")
    got = settings(*flags, f"--preset={preset}", "--learning_rate=0.125", "--min_lr_ratio=0.1")
    assert got["optimizer"].learning_rate == 0.125 and got["training"].iterations == 7


@pytest.mark.parametrize("flags", ["--optimizer=adam", "--preset=base"])
def test_a_run_keeps_its_kind_of_model_when_its_text_is_given(monkeypatch, tmp_path, flags):
    """Without --model, the kind of model is that of the run, not the default of the flag."""
    folder = RunFolder(tmp_path / "run")
    make_run(folder.path, word_vocab(), txl_tf.TransformerLM)
    sizes = {name: value for name, value in folder.read_config()["model"].items() if name in SIZES}
    text = write_text(tmp_path / "text.txt", "a b c\n" * 300)
    got = {}
    monkeypatch.setattr(train, "train_run", lambda folder, **settings: got.update(settings))
    for tool in program("train.py"):
        as_flags = [f"--{name}={value}" for name, value in sizes.items()]
        run_here(tool, f"--model_dir={folder}", f"--data_path={text}", "--level=word", flags, *as_flags)
    assert isinstance(got["model"], TransformerLMConfig) and got["model"].mem_len == 4


@pytest.mark.parametrize("resumed", ["train.py"], indirect=True)
def test_a_run_that_started_from_another_needs_no_flag_for_it(resumed, tmp_path):
    settings, config = resumed
    folder = RunFolder(tmp_path / "run")
    folder.write_config({**config, "init_from": {"model_dir": "there", "checkpoint": "ckpt-1"}}, folder.load_vocabs())
    assert settings()["training"].init_from == "there"


@pytest.mark.parametrize("resumed", ["train.py"], indirect=True)
def test_settings_without_effect_are_refused_as_flags_and_ignored_in_a_run(resumed, tmp_path):
    settings, config = resumed
    folder = RunFolder(tmp_path / "run")
    recorded = {"momentum": 0.5, "schedule": "constant", "min_lr_ratio": 0.5}  # as an earlier version recorded them
    training = {**config["training"], **recorded}
    model = {**config["model"], "lora_alpha": 3.0, "init_range": 0.5}
    folder.write_config({**config, "training": training, "model": model}, folder.load_vocabs())
    optimizer = settings("--min_lr_ratio=0.004", "--lora_alpha=3", "--lora_rank=2")["optimizer"]
    assert (optimizer.momentum, optimizer.schedule, optimizer.min_lr_ratio) == (0.9, "constant", 0.004)
    assert settings("--optimizer=sgd", "--momentum=0.6")["optimizer"].momentum == 0.6
    assert settings("--schedule=cosine")["optimizer"].min_lr_ratio == 0.5
    for flags, name, value in [
        ("--momentum=0.5", "momentum", 0.5),
        ("--optimizer=sgd --beta_2=0.5", "beta_2", 0.5),
        ("--min_lr_ratio=0.5", "min_lr_ratio", 0.5),
        ("--lora_alpha=3", "lora_alpha", 3),
        ("--init_range=0.5", "init_range", 0.5),
        ("--init=uniform --init_std=0.5", "init_std", 0.5),
        ("--sliding_step=3", "sliding_step", 3),
    ]:
        with raises_parameter(name, value):
            settings(*flags.split())


@pytest.mark.parametrize("resumed", ["train.py"], indirect=True)
def test_a_split_to_evaluate_needs_do_eval(resumed, tmp_path):
    settings, config = resumed
    folder = RunFolder(tmp_path / "run")
    training = {**config["training"], "eval_split": "test"}
    folder.write_config({**config, "training": training}, folder.load_vocabs())
    assert (settings()["final"].eval_split, settings("--nodo_eval")["final"].eval_split) == ("test", "valid")
    assert settings("--eval_split=train", "--nodo_eval")["final"].eval_split == "train"  # `train_run` refuses it


@pytest.mark.parametrize("resumed", ["tools/train_seq2seq.py"], indirect=True)
def test_flags_of_translations_are_for_a_training_that_makes_some(resumed):
    settings, _ = resumed
    assert settings("--beam_size=5", "--n_best=1")["final"].beam_size == 5
    assert settings("--eval_sources=0")["final"].beam_size == 3  # of the run
    for flags, name, value in [
        ("--n_best=2", "n_best", 2),
        ("--beam_size=5 --eval_sources=0", "beam_size", 5),
        ("--allow_special --eval_sources=0", "allow_special", True),
        ("--max_new_tokens=9 --eval_sources=0", "max_new_tokens", 9),
    ]:
        with raises_parameter(name, value):
            settings(*flags.split())


@pytest.mark.parametrize("resumed", ["tools/train_ner.py"], indirect=True)
def test_another_model_than_that_of_the_run_is_refused_first(resumed):
    """It would ask for settings that this run does not have: FLAT needs a lexicon, and TENER has none."""
    settings, _ = resumed
    assert settings("--model=tener") == settings()
    for flags in ("--model=flat", "--model=flat --train_path=a", "--model=bilstm --attn_type=transformer"):
        with raises_parameter("model", flags.split()[0].removeprefix("--model=")):
            settings(*flags.split())


@pytest.mark.parametrize("resumed", ["tools/train_ner.py"], indirect=True)
def test_flags_that_the_network_or_the_tags_do_not_use_are_refused(resumed, tmp_path):
    settings, _ = resumed
    assert settings("--nokey_position_term", "--noconstraints")["model"].key_position_term is False
    for flags, name, value in [
        ("--attn_type=transformer --nokey_position_term", "key_position_term", False),
        ("--tag_scheme=none --noconstraints", "constraints", False),
        ("--d_bigram=9", "d_bigram", 9),  # the run has no bigrams
        (
            f"--model_dir={tmp_path / 'new'} --train_path=a --nobigrams --lexicon=b --model=flat --d_bigram=9",
            "d_bigram",
            9,
        ),
    ]:
        with raises_parameter(name, value):
            settings(*flags.split())


@pytest.mark.parametrize("resumed", ["tools/train_seq2seq.py"], indirect=True)
def test_a_length_penalty_is_for_a_beam_search(resumed):
    settings, _ = resumed
    assert settings("--length_penalty=1")["final"].length_penalty == 1  # the run has beam_size=3
    with raises_parameter("length_penalty", 1.0):
        settings("--length_penalty=1", "--beam_size=1")
