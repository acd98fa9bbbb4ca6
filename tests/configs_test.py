"""Every configuration parses, passes the checks, has the parameters it states and says what the original's script says.

The command lines of the original's scripts, which original_scripts.py holds, parse as well, by train.py or
tools/prepare_data.py, and mean what they meant there.
"""

import functools
import json
import math
import os
import re
import runpy
import shlex

import keras
import pytest
from absl import flags
from helpers import N_TOKEN, OF_ANY_TEXT, ROOT, bins_of, dataset_of, mentions, raises_parameter
from original_scripts import DEFAULTS, EVAL, SCRIPTS, TEST_DATA, TRAIN, TRAIN_DATA

from txl_programs import find_program, train
from txl_programs.flag_values import values
from txl_tf import TransformerXLLM, make_optimizer
from txl_tf.config import (
    BiLSTMTaggerConfig,
    EvaluationConfig,
    FlatTaggerConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    PairsTrainingConfig,
    SearchConfig,
    TaggedConfig,
    TaggerTrainingConfig,
    TenerTaggerConfig,
    TextConfig,
    TrainingConfig,
    TransformerConfig,
    check_bins,
)
from txl_tf.data.text.datasets import PAPER_DATASETS

ALL = {path.stem: path.read_text() for path in sorted((ROOT / "configs").glob("*.cfg"))}
OF_PAIRS = {name: text for name, text in ALL.items() if "tools/train_seq2seq.py" in text}
OF_TAGS = {name: text for name, text in ALL.items() if "tools/train_ner.py" in text}
CONFIGS = {name: text for name, text in ALL.items() if name not in [*OF_PAIRS, *OF_TAGS]}
OF_THE_PAPER = [name for name in CONFIGS if name not in OF_ANY_TEXT]

# The sizes that are known of the original's models, and how far they are rounded.
KNOWN_SIZES = {
    "wt103_base": (151_119_838, 0),
    "wt103_large": (285_205_322, 0),
    "enwik8_base": (41.06e6, 0.005e6),
    "enwik8_large": (277.2e6, 0.05e6),
    "text8_large": (277e6, 0.5e6),
    "lm1b_large": (838e6, 0.5e6),
}

PROGRAMS = ("prepare_data.py", "convert_checkpoint.py", "train_seq2seq.py", "tag.py", "translate.py", "train_ner.py")

# Flags of an evaluation that name folders and devices, or have another name here.
NOT_COMPARED = set(
    "data_dir model_dir corpus_info_path record_info_dir eval_ckpt_path num_core_per_host num_host use_tpu do_eval "
    "do_eval_only".split()
)


def dashed(values):
    """A command line, as a list, of `{flag: value}`."""
    return [f"--{flag}={value}" for flag, value in values.items()]


# ---------------------------------------------------------------------------------------------------- parsing


@pytest.fixture
def parse(monkeypatch):
    """Parses a command line of train.py: list of flags -> dict of all values. Leaves no trace."""
    monkeypatch.chdir(ROOT)  # where a --flagfile=configs/... within a file is looked for

    def parse(*line):
        flags.FLAGS.unparse_flags()
        assert flags.FLAGS(["train.py", *line]) == ["train.py"]
        return flags.FLAGS.flag_values_dict()

    yield parse
    flags.FLAGS.unparse_flags()


@pytest.fixture(scope="session")
def tool_flags():
    """Parses a command line of a program of tools/: its name, list of flags -> dict of all values."""

    def load(name):
        """What the program defines, in place of the flags there are: those of train.py have the same names."""
        own, before = flags.FlagValues(), dict(vars(flags.FLAGS))
        vars(flags.FLAGS).update(vars(own))
        try:
            runpy.run_module(find_program(name).name)
        finally:
            vars(flags.FLAGS).update(before)
        return own

    loaded = {f"tools/{name}": load(name) for name in PROGRAMS}

    def parse(program, *line):
        values = loaded[program]
        values.unparse_flags()
        assert values([program, *line]) == [program]
        return values.flag_values_dict()

    return parse


def model_of_flags(name):
    """`ModelConfig` of the flags that were parsed, those of a configuration."""
    return ModelConfig(**{**values(ModelConfig), **bins_of(name)})


@functools.cache
def count_parameters(model):
    """The number of parameters of the model that a `ModelConfig`, as JSON, describes; no weight is made."""
    with keras.StatelessScope(initialize_variables=False):
        lm = TransformerXLLM(**json.loads(model))
        count = sum(math.prod(variable.shape) for variable in lm.trainable_variables)
    keras.utils.clear_session()  # Keras would make all of them at the end of the next such scope, whoever opens it
    return count


def commands_of(name):
    """The commands in the comment that a configuration opens with, split into words."""
    comment = "\n".join(line.removeprefix("#") for line in ALL[name].split("\n--")[0].splitlines())
    return [shlex.split(command) for command in re.findall(r"python (.*)", comment.replace("\\\n", ""))]


# ------------------------------------------------------------------------------------------ the configurations


def test_there_is_a_configuration_for_every_dataset_and_script():
    published = [f"{name}{suffix}" for name in TRAIN for suffix in ("", "_eval")]
    pretrained = [name.replace("sota", "pretrained") for name in EVAL if "sota" in name]
    tiny = [f"{dataset}_tiny" for dataset in PAPER_DATASETS]
    assert sorted(OF_THE_PAPER) == sorted([*published, *pretrained, *tiny, "ptb", "wt2", "wt2_small"])
    assert (len(published), len(pretrained)) == (16, 4)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_passes_the_checks_of_training(name, parse):
    parsed = parse(f"--flagfile=configs/{name}.cfg")
    model = model_of_flags(name)
    check_bins(model.n_token, model.d_embed, model.cutoffs, model.div_val)
    for config in (TextConfig, TrainingConfig, EvaluationConfig, MachineConfig):
        config(**values(config))
    make_optimizer(train_steps=parsed["train_steps"], **values(OptimizerConfig))
    assert train.data_arguments()
    assert parsed["model_dir"] == f"runs/{name.removesuffix('_eval')}"
    assert min(parsed[size] for size in ("tgt_len", "train_batch_size", "eval_batch_size")) > 0
    assert parsed["train_steps"] % parsed["iterations"] == parsed["save_steps"] % parsed["iterations"] == 0
    assert parsed["do_train"] != name.endswith(("_eval", "_pretrained"))


# With and without bins, projections, and weights of each layer. Those of one model take no longer than one.
FAST_SIZES = "enwik8_base lm1b_large ptb quickstart wt103_base wt103_large".split()
FAST_SIZES += [f"{name}_eval" for name in FAST_SIZES if f"{name}_eval" in CONFIGS] + ["lm1b_pretrained"]


@pytest.mark.parametrize(
    "name", [name if name in FAST_SIZES else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_its_model_has_the_parameters_that_the_comment_states(name, parse):
    parse(f"--flagfile=configs/{name}.cfg")
    without_effect = {"dropout": 0.0, "dropatt": 0.0, "mem_len": 0, "clamp_len": -1, "same_length": False}
    count = count_parameters(json.dumps(model_of_flags(name).to_dict() | without_effect))
    if name in OF_ANY_TEXT:
        return
    assert mentions(CONFIGS[name], f"{count:,}", f"{N_TOKEN[dataset_of(name)]:,}")
    known, tolerance = KNOWN_SIZES.get(name, (count, 0))
    assert abs(count - known) <= tolerance


@pytest.mark.parametrize("name", CONFIGS)
def test_its_first_comment_has_the_commands(name, parse, tool_flags):
    commands = commands_of(name)
    assert ["train.py", f"--flagfile=configs/{name}.cfg"] in [command[:2] for command in commands]
    of_config = parse(f"--flagfile=configs/{name}.cfg")
    for program, *line in commands:
        if program == "train.py":
            assert parse(*line)["model_dir"] == of_config["model_dir"]
            continue
        given = tool_flags(program, *line)
        assert given["data_dir"] == of_config["data_dir"]
        if program == "tools/prepare_data.py":
            assert given["dataset"] == dataset_of(name)
            assert given["download"]
        else:
            shared = "model_dir mem_len clamp_len same_length".split()
            assert {flag: given[flag] for flag in shared} == {flag: of_config[flag] for flag in shared}
            published = EVAL[f"{dataset_of(name)}_sota"]["eval_ckpt_path"]
            assert given["tf1_checkpoint"] == os.path.normpath(published)


@pytest.mark.parametrize("name", OF_PAIRS)
def test_a_configuration_of_pairs_passes_the_checks_and_says_its_commands(name, tool_flags, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = commands_of(name)
    assert commands[0][:2] == ["tools/train_seq2seq.py", f"--flagfile=configs/{name}.cfg"]
    given = tool_flags(*commands[0])
    for group in (PairsConfig, PairsTrainingConfig, OptimizerConfig, TransformerConfig, SearchConfig, MachineConfig):
        group(**{name: given[name] for name in group.names() if name in given})
    assert given["dataset"] or given["train_path"]
    assert given["train_steps"] % given["iterations"] == given["save_steps"] % given["iterations"] == 0
    for program, *line in commands[1:]:
        assert tool_flags(program, *line)["model_dir"] == given["model_dir"]


@pytest.mark.parametrize("name", OF_TAGS)
def test_a_configuration_of_a_tagger_passes_the_checks_and_says_its_command(name, tool_flags, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, *others = commands_of(name)
    assert command[:2] == ["tools/train_ner.py", f"--flagfile=configs/{name}.cfg"]
    given = tool_flags(*command)
    model = {"tener": TenerTaggerConfig, "flat": FlatTaggerConfig, "bilstm": BiLSTMTaggerConfig}[given["model"]]
    for group in (TaggedConfig, TaggerTrainingConfig, OptimizerConfig, model, MachineConfig):
        group(**{name: given[name] for name in group.names() if name in given})
    made_up = given["dataset"] == "towns"
    assert all(bool(given[f"{split}_path"]) != made_up for split in ("train", "valid", "test"))
    assert bool(given["lexicon"]) == (given["model"] == "flat")
    assert given["model_dir"] == f"runs/{'towns' if name == 'ner_quickstart' else name}"
    for program, *line in others:
        assert tool_flags(program, *line)["model_dir"] == given["model_dir"]
    assert given["train_steps"] % given["iterations"] == given["save_steps"] % given["iterations"] == 0
    epochs, steps = map(int, re.search(r": (\d+) epochs of (\d+) steps", OF_TAGS[name]).groups())
    assert epochs * steps == given["train_steps"] and given["save_steps"] % steps == 0


# -------------------------------------------------------------------------------- the original's command lines


def assert_parsed(parsed, expected):
    """That values, of any type, read as the text that is expected."""
    assert {flag: str(parsed[flag]) for flag in expected} == expected


def test_defaults_are_those_of_the_original(parse):
    assert_parsed(parse("--model_dir=runs/any"), DEFAULTS)


@pytest.mark.parametrize(
    ("command", "name"), [*(("train", name) for name in TRAIN), *(("eval", name) for name in EVAL)]
)
def test_a_command_of_the_original_means_the_same(command, name, parse):
    original = {"train": TRAIN, "eval": EVAL}[command][name]
    parsed = parse(*dashed(original))
    assert_parsed(parsed, original)
    trains = parsed["do_train"] and not parsed["do_eval_only"]
    assert trains == (command == "train")
    assert trains or parsed["do_eval"] or parsed["do_eval_only"]
    folder = train.data_arguments()["data_dir"]  # of the prepared corpus, not of tfrecords
    assert os.path.normpath(folder) == os.path.normpath(SCRIPTS[name]["root"])


def test_the_folder_of_a_corpus_is_that_of_its_file(parse):
    flags = ["--model_dir=runs/any", "--data_dir=tfrecords"]
    for path, folder in (("corpus-info.json", "."), ("a/b/corpus-info.json", "a/b"), ("", "tfrecords")):
        parse(*flags, f"--corpus_info_path={path}")
        assert train.data_arguments() == {"data_dir": folder}
    for path in ("a/b", "a/info.json", "a/corpus-info.json/"):
        parse(*flags, f"--corpus_info_path={path}")
        with raises_parameter("corpus_info_path", path):
            train.data_arguments()


@pytest.mark.parametrize("commands", [TRAIN_DATA, TEST_DATA], ids=["train_data", "test_data"])
def test_a_command_that_prepares_data_means_the_same(commands, tool_flags):
    for original in commands.values():
        assert_parsed(tool_flags("tools/prepare_data.py", *dashed(original)), original)


@pytest.mark.parametrize("name", TRAIN)
def test_a_training_has_the_values_of_its_script(name, parse):
    ours = parse(f"--flagfile=configs/{name}.cfg")
    original = parse(*dashed(TRAIN[name]))
    if name.endswith("_large"):
        original["min_lr_ratio"] = 0.01
        if original["div_val"] > 1:  # there are projections, which tf/train.py draws as all other weights
            original["proj_init_std"] = original["init_std"]
    sizes = ["tgt_len", "train_batch_size", "train_steps", "iterations", "save_steps"]
    for flag in [*ModelConfig.names(), *OptimizerConfig.names(), *sizes]:
        assert flag in ("n_token", "reset_token") or ours[flag] == original[flag], flag
    assert ours["eval_batch_size"] == ours["train_batch_size"]  # the scripts prepare the validation text so


@pytest.mark.parametrize("name", EVAL)
def test_an_evaluation_has_the_values_of_its_script(name, parse):
    config = name.replace("sota", "pretrained") if name.endswith("_sota") else f"{name}_eval"
    ours = parse(f"--flagfile=configs/{config}.cfg")
    expected = dict(EVAL[name])
    if name in ("enwik8_large", "text8_large"):  # these forget two, which the evaluation of the published model has
        assert not {"clamp_len", "same_length"} & set(expected)
        expected.update(clamp_len="1000", same_length="True")
    assert_parsed(ours, {flag: value for flag, value in expected.items() if flag not in NOT_COMPARED})
    assert ours["do_eval"]
    assert ours["dropout"] == ours["dropatt"] == 0
