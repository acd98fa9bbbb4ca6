"""Every configuration parses, passes the checks, has the parameters it states and says what the original's script says.

The command lines of the original's scripts are kept here, with their variables filled in. All of them parse, by
train.py or tools/prepare_data.py, and mean what they meant there.
"""

import configparser
import math
import os
import re
import runpy
import shlex
from pathlib import Path

import keras
import pytest
from absl import flags

import train
from txl_tf import TransformerXLLM, make_optimizer
from txl_tf.adaptive import check_bins
from txl_tf.datasets import PAPER_DATASETS
from txl_tf.model import check_arguments

ROOT = Path(__file__).parents[1]
CONFIGS = {path.stem: path.read_text() for path in sorted((ROOT / "configs").glob("*.cfg"))}
OF_ANY_TEXT = ("quickstart", "tinyshakespeare")
OF_THE_PAPER = [name for name in CONFIGS if name not in OF_ANY_TEXT]
N_TOKEN = {"enwik8": 204, "text8": 27, "ptb": 10000, "wt2": 33278, "wt103": 267735, "lm1b": 793471}

# The sizes that are known of the original's models, and how far they are rounded.
KNOWN_SIZES = {
    "wt103_base": (151_119_838, 0),
    "wt103_large": (285_205_322, 0),
    "enwik8_base": (41.06e6, 0.005e6),
    "enwik8_large": (277.2e6, 0.05e6),
    "text8_large": (277e6, 0.5e6),
    "lm1b_large": (838e6, 0.5e6),
}

# ------------------------------------------------------------------------------------ the original's command lines

# Folder of the data, flags that train and eval share, and the other flags of each command; `lines_of` adds the other
# folders. The section sota evaluates the published model. The scripts of text8 are those of enwik8.
SCRIPTS = configparser.ConfigParser()
SCRIPTS.read_string("""
[enwik8_base]
root = ../data/enwik8/
model = n_layer=12 d_model=512 d_embed=512 n_head=8 d_head=64 d_inner=2048
train_data = dataset=enwik8 tgt_len=512 per_host_train_bsz=24 per_host_valid_bsz=24 num_passes=1 use_tpu=False
test_data = dataset=enwik8 tgt_len=80 per_host_test_bsz=10 num_passes=1 use_tpu=False
train = dropout=0.1 dropatt=0.0 learning_rate=0.00025 warmup_steps=0 train_steps=400000 tgt_len=512 mem_len=512
  train_batch_size=24 num_core_per_host=4 iterations=200 save_steps=4000 do_train=True do_eval=False
eval = dropout=0.0 dropatt=0.0 tgt_len=80 mem_len=2100 clamp_len=820 same_length=True eval_batch_size=10
  num_core_per_host=1 do_train=False do_eval=True eval_split=test

[enwik8_large]
root = ../data/enwik8/
model = n_layer=24 d_model=1024 d_embed=1024 n_head=8 d_head=128 d_inner=3072
train_data = dataset=enwik8 tgt_len=768 per_host_train_bsz=64 per_host_valid_bsz=64 num_core_per_host=16 num_passes=10
  use_tpu=True
test_data = dataset=enwik8 tgt_len=128 per_host_test_bsz=16 num_core_per_host=8 num_passes=1 use_tpu=True
train = dropout=0.15 dropatt=0.15 learning_rate=0.00025 warmup_steps=4000 train_steps=400000 tgt_len=768 mem_len=768
  train_batch_size=64 use_tpu=True num_host=2 num_core_per_host=16 iterations=1000 save_steps=10000 do_train=True
  do_eval=False
eval = tgt_len=128 mem_len=3800 eval_batch_size=16 num_host=1 num_core_per_host=8 use_tpu=True do_train=False
  do_eval_only=True eval_split=test

[enwik8_sota]
root = .//pretrained_xl/tf_enwik8/data
model = n_layer=24 d_model=1024 d_embed=1024 n_head=8 d_head=128 d_inner=3072
test_data = dataset=enwik8 tgt_len=128 per_host_test_bsz=16 num_passes=1 use_tpu=False
eval = eval_ckpt_path=.//pretrained_xl/tf_enwik8/model/model.ckpt-0 dropout=0.0 dropatt=0.0 tgt_len=128 mem_len=3800
  clamp_len=1000 same_length=True eval_batch_size=16 num_core_per_host=2 do_train=False do_eval=True eval_split=test

[wt103_base]
root = ../data/wikitext-103/
model = div_val=1 untie_r=True proj_share_all_but_first=True n_layer=16 d_model=410 d_embed=410 n_head=10 d_head=41
  d_inner=2100
train_data = dataset=wt103 tgt_len=150 per_host_train_bsz=60 per_host_valid_bsz=60 num_passes=1 use_tpu=False
test_data = dataset=enwik8 tgt_len=64 per_host_test_bsz=10 num_passes=1 use_tpu=False
train = dropout=0.1 dropatt=0.0 learning_rate=0.00025 warmup_steps=0 train_steps=400000 tgt_len=150 mem_len=150
  train_batch_size=60 num_core_per_host=4 iterations=200 save_steps=4000
eval = dropout=0.0 dropatt=0.0 tgt_len=64 mem_len=640 clamp_len=400 same_length=True eval_batch_size=10
  num_core_per_host=1 do_train=False do_eval=True eval_split=test

[wt103_large]
root = ../data/wikitext-103/
model = div_val=4 untie_r=True proj_share_all_but_first=True proj_same_dim=True n_layer=18 d_model=1024 d_embed=1024
  n_head=16 d_head=64 d_inner=4096
train_data = dataset=wt103 tgt_len=384 per_host_train_bsz=128 per_host_valid_bsz=128 num_core_per_host=16
  num_passes=10 use_tpu=True
test_data = dataset=wt103 tgt_len=128 per_host_test_bsz=8 num_core_per_host=8 num_passes=1 use_tpu=True
train = dropout=0.2 dropatt=0.2 init_std=0.005 learning_rate=0.00025 warmup_steps=16000 train_steps=4000000
  tgt_len=384 mem_len=384 train_batch_size=128 num_hosts=4 num_core_per_host=16 iterations=1000 save_steps=10000
  use_tpu=True do_eval=False
eval = tgt_len=128 mem_len=1600 clamp_len=1000 same_length=True eval_batch_size=8 num_host=1 num_core_per_host=8
  use_tpu=True do_train=False do_eval_only=True eval_split=test

[wt103_sota]
root = .//pretrained_xl/tf_wt103/data
model = div_val=4 untie_r=True proj_share_all_but_first=True n_layer=18 d_model=1024 d_embed=1024 n_head=16 d_head=64
  d_inner=4096
test_data = dataset=enwik8 tgt_len=128 per_host_test_bsz=16 num_passes=1 use_tpu=False
eval = eval_ckpt_path=.//pretrained_xl/tf_wt103/model/model.ckpt-0 dropout=0.0 dropatt=0.0 tgt_len=128 mem_len=1600
  clamp_len=1000 same_length=True eval_batch_size=16 num_core_per_host=1 do_train=False do_eval=True eval_split=test

[lm1b_base]
root = ../data/one-billion-words/
model = div_val=4 untie_r=True proj_share_all_but_first=False proj_same_dim=False n_layer=18 d_model=1024 d_embed=1024
  n_head=8 d_head=128 d_inner=4096
train_data = dataset=lm1b tgt_len=256 per_host_train_bsz=256 per_host_valid_bsz=256 num_passes=1 use_tpu=False
test_data = dataset=lm1b tgt_len=32 per_host_test_bsz=16 num_passes=1 use_tpu=False
train = dropout=0.1 dropatt=0.0 learning_rate=0.00025 warmup_steps=0 train_steps=400000 tgt_len=256 mem_len=256
  train_batch_size=256 num_core_per_host=4 iterations=200 save_steps=4000
eval = dropout=0.0 dropatt=0.0 tgt_len=32 mem_len=128 clamp_len=-1 same_length=True eval_batch_size=16
  num_core_per_host=1 do_train=False do_eval=True eval_split=test

[lm1b_large]
root = ../data/one-billion-words/
model = div_val=4 untie_r=True proj_share_all_but_first=False proj_same_dim=False n_layer=24 d_model=1280 d_embed=1280
  n_head=16 d_head=80 d_inner=8192
train_data = dataset=lm1b tgt_len=32 per_host_train_bsz=16 per_host_valid_bsz=16 num_core_per_host=16 num_passes=10
  use_tpu=True
test_data = dataset=lm1b tgt_len=32 per_host_test_bsz=8 num_core_per_host=8 num_passes=1 use_tpu=True
train = dropout=0.05 dropatt=0.05 init_std=0.005 learning_rate=0.0001 warmup_steps=30000 train_steps=1200000
  tgt_len=32 mem_len=32 train_batch_size=512 num_hosts=32 num_core_per_host=16 iterations=1000 save_steps=10000
  use_tpu=True do_eval=False
eval = tgt_len=32 mem_len=128 clamp_len=-1 same_length=True eval_batch_size=8 num_host=1 num_core_per_host=8
  use_tpu=True do_train=False do_eval_only=True eval_split=test

[lm1b_sota]
root = .//pretrained_xl/tf_lm1b/data
model = div_val=4 untie_r=True proj_share_all_but_first=False proj_same_dim=False n_layer=24 d_model=1280 d_embed=1280
  n_head=16 d_head=80 d_inner=8192
test_data = dataset=lm1b tgt_len=32 per_host_test_bsz=16 num_passes=1 use_tpu=False
eval = eval_ckpt_path=.//pretrained_xl/tf_lm1b/model/model.ckpt-1191000 dropout=0.0 dropatt=0.0 tgt_len=32 mem_len=128
  clamp_len=-1 same_length=True eval_batch_size=16 num_core_per_host=1 do_train=False do_eval=True eval_split=test
""")
for size in ("base", "large", "sota"):
    same = SCRIPTS[f"enwik8_{size}"].items()
    SCRIPTS[f"text8_{size}"] = {command: text.replace("enwik8", "text8") for command, text in same}

# Defaults of the original's train_gpu.py. Its train.py, for TPUs, has 0.01 for min_lr_ratio.
DEFAULTS = (
    "learning_rate=0.00025 clip=0.25 min_lr_ratio=0.004 warmup_steps=0 train_batch_size=60 eval_batch_size=60 "
    "train_steps=100000 iterations=500 save_steps=10000 max_eval_batch=-1 eval_split=valid do_train=True do_eval=False "
    "do_eval_only=False tgt_len=70 mem_len=70 same_length=False clamp_len=-1 n_layer=6 d_model=500 d_embed=500 "
    "n_head=10 d_head=50 d_inner=1000 dropout=0.1 dropatt=0.1 untie_r=False div_val=1 proj_share_all_but_first=False "
    "proj_same_dim=True init=normal init_std=0.02 proj_init_std=0.01 init_range=0.1"
)
# Flags of an evaluation that name folders and devices, or have another name here.
NOT_COMPARED = set(
    "data_dir model_dir corpus_info_path record_info_dir eval_ckpt_path num_core_per_host num_host use_tpu do_eval "
    "do_eval_only".split()
)


def lines_of(command):
    """`{script: list of flags}` of all the scripts that have the command."""
    lines = {}
    for name in SCRIPTS.sections():
        script, (dataset, size) = SCRIPTS[name], name.split("_")
        root = script["root"]
        if command not in script:
            continue
        if command.endswith("_data"):
            lines[name] = [f"--data_dir={root}/"] + dashed(script[command])
            continue
        lines[name] = [
            f"--data_dir=/{dataset}-tfrecords" if size == "large" else f"--data_dir={root}/tfrecords",
            f"--record_info_dir={root}/tfrecords/",
            f"--corpus_info_path={root}/corpus-info.json",
            f"--model_dir=/{dataset}" if size == "large" else f"--model_dir=EXP-{dataset}",
            *dashed(f"{script['model']} {script[command]}"),
        ]
    return lines


def dashed(text):
    return [f"--{flag}" for flag in text.split()]


def pairs(line):
    """`{flag: value}` of a list of flags, both as text."""
    return dict(flag.removeprefix("--").split("=") for flag in line)


TRAIN_LINES, EVAL_LINES = lines_of("train"), lines_of("eval")

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
            runpy.run_path(ROOT / "tools" / name)
        finally:
            vars(flags.FLAGS).update(before)
        return own

    loaded = {f"tools/{name}": load(name) for name in ("prepare_data.py", "convert_checkpoint.py")}

    def parse(program, *line):
        values = loaded[program]
        values.unparse_flags()
        assert values([program, *line]) == [program]
        return values.flag_values_dict()

    return parse


def dataset_of(name):
    return re.split("[_.]", name)[0]


def bins_of(name):
    """`n_token` and `cutoffs` that a configuration trains with."""
    if name in OF_ANY_TEXT:
        return {"n_token": 128, "cutoffs": []}
    return {"n_token": N_TOKEN[dataset_of(name)], "cutoffs": PAPER_DATASETS[dataset_of(name)][2]}


def count_parameters(**model):
    """The number of parameters of a model, of which no weight is made."""
    with keras.StatelessScope(initialize_variables=False):
        lm = TransformerXLLM(**model)
        count = sum(math.prod(variable.shape) for variable in lm.trainable_variables)
    keras.utils.clear_session()  # Keras would make all of them at the end of the next such scope, whoever opens it
    return count


def commands_of(name):
    """The commands in the comment that a configuration opens with, split into words."""
    comment = "\n".join(line.removeprefix("#") for line in CONFIGS[name].split("\n--")[0].splitlines())
    return [shlex.split(command) for command in re.findall(r"python (.*)", comment.replace("\\\n", ""))]


# ------------------------------------------------------------------------------------------ the configurations


def test_there_is_a_configuration_for_every_dataset_and_script():
    published = [f"{name}{suffix}" for name in TRAIN_LINES for suffix in ("", "_eval")]
    pretrained = [name.replace("sota", "pretrained") for name in EVAL_LINES if "sota" in name]
    tiny = [f"{dataset}_tiny" for dataset in PAPER_DATASETS]
    assert sorted(OF_THE_PAPER) == sorted([*published, *pretrained, *tiny, "ptb", "wt2"])
    assert (len(published), len(pretrained)) == (16, 4)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_passes_the_checks_of_training(name, parse):
    values = parse(f"--flagfile=configs/{name}.cfg")
    model = train.values(train.MODEL)
    check_arguments(**model)
    check_bins(**bins_of(name), d_embed=model["d_embed"], div_val=model["div_val"])
    make_optimizer(train_steps=values["train_steps"], **train.values(train.OPTIMIZER))
    assert train.data_arguments()
    assert values["model_dir"] == f"runs/{name.removesuffix('_eval')}"
    assert min(values[size] for size in ("tgt_len", "train_batch_size", "eval_batch_size")) > 0
    assert values["train_steps"] % values["iterations"] == values["save_steps"] % values["iterations"] == 0
    assert values["do_train"] != name.endswith(("_eval", "_pretrained"))


@pytest.mark.parametrize("name", CONFIGS)
def test_its_model_has_the_parameters_that_the_comment_states(name, parse):
    parse(f"--flagfile=configs/{name}.cfg")
    count = count_parameters(**bins_of(name), **train.values(train.MODEL))
    if name in OF_ANY_TEXT:
        return
    assert f"# {count:,} parameters with {N_TOKEN[dataset_of(name)]:,} symbols." in CONFIGS[name]
    known, tolerance = KNOWN_SIZES.get(name, (count, 0))
    assert abs(count - known) <= tolerance


@pytest.mark.parametrize("name", CONFIGS)
def test_its_first_comment_has_the_commands(name, parse, tool_flags):
    commands = commands_of(name)
    assert ["train.py", f"--flagfile=configs/{name}.cfg"] in [command[:2] for command in commands]
    values = parse(f"--flagfile=configs/{name}.cfg")
    for program, *line in commands:
        if program == "train.py":
            assert parse(*line)["model_dir"] == values["model_dir"]
            continue
        given = tool_flags(program, *line)
        assert given["data_dir"] == values["data_dir"]
        if program == "tools/prepare_data.py":
            assert given["dataset"] == dataset_of(name)
            assert given["download"]
        else:
            shared = "model_dir mem_len clamp_len same_length".split()
            assert {flag: given[flag] for flag in shared} == {flag: values[flag] for flag in shared}
            published = pairs(EVAL_LINES[f"{dataset_of(name)}_sota"])["eval_ckpt_path"]
            assert given["tf1_checkpoint"] == os.path.normpath(published)


# -------------------------------------------------------------------------------- the original's command lines


def test_defaults_are_those_of_the_original(parse):
    values = parse("--model_dir=runs/any")
    assert {flag: str(values[flag]) for flag in pairs(dashed(DEFAULTS))} == pairs(dashed(DEFAULTS))


@pytest.mark.parametrize(
    ("command", "name"), [("train", name) for name in TRAIN_LINES] + [("eval", name) for name in EVAL_LINES]
)
def test_a_command_of_the_original_means_the_same(command, name, parse):
    line = lines_of(command)[name]
    values = parse(*line)
    assert {flag: str(values[flag]) for flag in pairs(line)} == pairs(line)
    trains = values["do_train"] and not values["do_eval_only"]
    assert trains == (command == "train")
    assert trains or values["do_eval"] or values["do_eval_only"]
    folder = train.data_arguments()["data_dir"]  # of the prepared corpus, not of tfrecords
    assert os.path.normpath(folder) == os.path.normpath(SCRIPTS[name]["root"])


@pytest.mark.parametrize("command", ["train_data", "test_data"])
def test_a_command_that_prepares_data_means_the_same(command, tool_flags):
    for line in lines_of(command).values():
        values = tool_flags("tools/prepare_data.py", *line)
        assert {flag: str(values[flag]) for flag in pairs(line)} == pairs(line)


@pytest.mark.parametrize("name", TRAIN_LINES)
def test_a_training_has_the_values_of_its_script(name, parse):
    ours = parse(f"--flagfile=configs/{name}.cfg")
    original = parse(*TRAIN_LINES[name])
    if name.endswith("_large"):
        original["min_lr_ratio"] = 0.01
    sizes = "tgt_len train_batch_size train_steps iterations save_steps"
    for flag in f"{train.MODEL} {train.OPTIMIZER} {sizes}".split():
        assert ours[flag] == original[flag], flag
    assert ours["eval_batch_size"] == ours["train_batch_size"]  # the scripts prepare the validation text so


@pytest.mark.parametrize("name", EVAL_LINES)
def test_an_evaluation_has_the_values_of_its_script(name, parse):
    config = name.replace("sota", "pretrained") if name.endswith("_sota") else f"{name}_eval"
    ours = parse(f"--flagfile=configs/{config}.cfg")
    expected = pairs(EVAL_LINES[name])
    if name in ("enwik8_large", "text8_large"):  # these forget two, which the evaluation of the published model has
        assert not {"clamp_len", "same_length"} & set(expected)
        expected.update(clamp_len="1000", same_length="True")
    for flag in set(expected) - NOT_COMPARED:
        assert str(ours[flag]) == expected[flag], flag
    assert ours["do_eval"]
    assert ours["dropout"] == ours["dropatt"] == 0
