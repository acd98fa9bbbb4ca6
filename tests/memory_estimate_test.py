"""The estimate of tools/estimate.py: the number of weights exactly, the memory within 15% of what a training takes."""

import json
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, SMALL, make_run, mentions, program, raises_parameter, run_here, word_vocab, write_splits

import txl_tf
from txl_config.memory import INNER_ARRAYS, count_weights, training_memory
from txl_tf.config import ACTIVATIONS, GATED_ACTIVATIONS, ModelConfig, TransformerLMConfig
from txl_tf.config.presets import preset_settings
from txl_tf.nn.feed_forward import _ACTIVATIONS
from txl_tf.runs.folder import RunFolder

MODELS = [
    {}, {"untie_r": True}, {"d_embed": 6}, {"cutoffs": (5, 12)}, {"cutoffs": (5, 12), "d_embed": 6},
    {"cutoffs": (5, 12), "div_val": 2}, {"cutoffs": (5, 12), "div_val": 2, "proj_same_dim": False},
    {"cutoffs": (5, 12), "div_val": 2, "proj_share_all_but_first": True},
    {"cutoffs": (5, 12), "d_embed": 6, "proj_share_all_but_first": True},
    {"positions": "alibi"}, {"positions": "learned", "context_len": 9},
]  # fmt: skip


VARIANTS = [{"pre_lnorm": True}, {"activation": "swiglu"}, {"norm": "rms"}, {"tie_weight": False, "cutoffs": (5, 12)}]
MODELS += [options for options in VARIANTS if options.keys() <= {*ModelConfig.names()}]


def assert_counted(lm, config):
    """The numbers of weights, and of Muon's numbers for them, which differ between kernels and other weights."""
    assert count_weights(config) == lm.count_params()
    optimizer = txl_tf.make_optimizer(optimizer="muon")
    optimizer.build(lm.trainable_variables)
    moments = sum(
        x.value.shape.num_elements() for x in optimizer.variables if x.name.endswith(("momentum", "velocity"))
    )
    assert training_memory(config, 1, 1, optimizer="muon").optimizer == 4 * moments


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_weights_of_transformer_xl(options):
    arguments = {**SMALL, "mem_len": 4, **options}
    assert_counted(txl_tf.TransformerXLLM(**arguments), ModelConfig(**arguments))


@pytest.mark.parametrize("options", [{}, {"pos_embed": "learned"}, {"cutoffs": (5, 12), "div_val": 2}], ids=str)
def test_weights_of_the_vanilla_language_model(options):
    arguments = {**SMALL, "context_len": 9, **options}
    assert_counted(txl_tf.TransformerLM(**arguments), TransformerLMConfig(**arguments))


def test_what_changes_the_estimate():
    model = ModelConfig(**SMALL, mem_len=4)
    plain = training_memory(model, 4, 8)
    assert plain.weights == 4 * plain.n_weights and plain.optimizer == 2 * plain.weights
    assert plain.memory == 2 * 4 * SMALL["n_layer"] * 4 * 4 * SMALL["d_model"]
    assert plain.total == sum(
        (plain.weights, plain.gradients, plain.optimizer, plain.activations, plain.memory, plain.runtime)
    )
    assert training_memory(model, 8, 8).activations == 2 * plain.activations
    assert training_memory(model, 4, 8, optimizer="sgd", ema=True).optimizer == 2 * plain.weights
    deep = ModelConfig(**{**SMALL, "n_layer": 12}, mem_len=4)
    assert training_memory(deep, 4, 8, recompute=True).activations < training_memory(deep, 4, 8).activations / 3
    with raises_parameter("n_token"):
        count_weights(ModelConfig(**{**SMALL, "n_token": None}))


def test_every_activation_has_a_function_and_its_arrays():
    assert {*INNER_ARRAYS} == {*_ACTIVATIONS} == {*ACTIVATIONS} and {*GATED_ACTIVATIONS} <= {*ACTIVATIONS}


def test_gelu_and_swiglu_keep_more_arrays_of_the_inner_width_than_relu():
    made = {name: ModelConfig(**SMALL, mem_len=4, activation=name) for name in ("relu", "gelu", "swiglu")}
    activations = {name: training_memory(model, 4, 8).activations for name, model in made.items()}
    array = 4 * 4 * 8 * SMALL["d_inner"] * SMALL["n_layer"]
    assert activations["gelu"] - activations["relu"] == pytest.approx(3.5 * array, abs=1)
    assert activations["swiglu"] - activations["relu"] == pytest.approx(4.5 * array, abs=1)


def test_label_smoothing_needs_the_logits_of_all_clusters_for_every_token():
    clusters = {**SMALL, "n_token": 1000, "cutoffs": (100, 500), "mem_len": 4}
    plain, smoothed = (
        training_memory(ModelConfig(**clusters, label_smoothing=smoothing), 4, 8).activations for smoothing in (0, 0.1)
    )
    logits = 100 + 2 + 900
    assert smoothed - plain == pytest.approx(4 * 4 * 8 * (4.5 * logits - 3.5 * (logits - 0.9 * 900)), abs=1)


def test_the_program(tmp_path, capsys):
    make_run(tmp_path / "run", word_vocab())
    lm, _ = txl_tf.load_run(tmp_path / "run")
    for tool in program("tools/estimate.py"):
        assert not run_here(tool, f"--model_dir={tmp_path / 'run'}", "--train_batch_size=8", "--tgt_len=16")
        shown = capsys.readouterr().out
        assert mentions(shown, f"{lm.count_params():,}", 8, 16, "mem_len", 4)
        assert not run_here(tool, f"--flagfile={ROOT}/configs/wt103_base.cfg", "--dataset=wt103", "--replicas=4")
        assert mentions(capsys.readouterr().out, "151,119,838", 15, 150)
        with raises_parameter("n_token"):
            run_here(tool, "--n_layer=2")
        with raises_parameter("train_batch_size"):
            run_here(tool, "--n_token=9", "--train_batch_size=10", "--replicas=4")
        with raises_parameter("freeze", ["embedding"]):
            run_here(tool, "--n_token=9", "--freeze=embedding")


def test_the_precision_of_a_run_counts_and_auto_is_named(tmp_path, capsys):
    run = str(tmp_path / "run")
    make_run(run, word_vocab())
    folder = RunFolder(run)
    folder.write_config({**folder.read_config(), "training": {"mixed_precision": "bfloat16"}}, folder.load_vocabs())
    shown = {}
    for tool in program("tools/estimate.py"):
        for flags in ([], ["bfloat16"], ["float32"], ["auto"]):
            assert not run_here(tool, f"--model_dir={run}", *(f"--mixed_precision={flag}" for flag in flags))
            shown[*flags] = capsys.readouterr().out.splitlines()
    activations = {flags: [line for line in lines if "activations" in line] for flags, lines in shown.items()}
    assert activations[()] == activations["bfloat16",] != activations["float32",] == activations["auto",]
    assert mentions(shown["auto",], "mixed_precision", "auto", "float32") and not mentions(shown["float32",], "auto")


def test_the_flags_of_the_data_are_used_or_refused(tmp_path, capsys):
    run, data, other = (str(tmp_path / name) for name in ("run", "data", "other"))
    make_run(run, word_vocab())
    folder = RunFolder(run)
    folder.write_config({**folder.read_config(), "data": {"data_dir": data}}, folder.load_vocabs())
    for prepared in (data, other):
        txl_tf.prepare_ids({"train": np.arange(50) % 9}, prepared, n_token=9)
    for tool in program("tools/estimate.py"):
        for flag in ("preset=tiny", "model=transformer", f"data_dir={other}", "dataset=wt103"):
            with raises_parameter(flag.split("=")[0], flag.split("=")[1], "left out"):
                run_here(tool, f"--model_dir={run}", f"--{flag}")
        for flag in ("cutoffs=3,5", "dataset=wt103"):
            with raises_parameter(flag.split("=")[0], allowed="left out"):
                run_here(tool, f"--data_dir={data}", f"--{flag}")
        with raises_parameter("data_dir", data, "left out"):
            run_here(tool, f"--data_dir={data}", "--n_token=10")
        assert not run_here(tool, "--data_dir=nowhere", "--n_token=10")
        assert mentions(capsys.readouterr().out, "data_dir", "nowhere")
        assert not run_here(tool, f"--model_dir={run}", "--model=transformer_xl", f"--data_dir={data}/")
        assert not run_here(tool, f"--data_dir={data}", "--dataset=text")
        assert not run_here(tool, "--n_token=9", "--cutoffs=3,5", f"--data_dir={data}")
        run_here(tool, "--n_token=9")
        lines = [line for line in capsys.readouterr().out.splitlines() if "weights;" in line]
        assert lines[1] == lines[3] != lines[2]


@pytest.mark.parametrize("dataset, level", [("wt103", "word"), ("lm1b", "word"), ("enwik8", "char"), ("text8", "char")])
def test_a_preset_is_that_of_the_level_of_the_text(tmp_path, capsys, dataset, level):
    sizes = preset_settings("paper", level, 1e9)
    for tool in program("tools/estimate.py"):
        run_here(tool, f"--dataset={dataset}", "--preset=paper")
        assert mentions(capsys.readouterr().out, sizes["train_batch_size"], sizes["tgt_len"], sizes["mem_len"])
        run_here(tool, f"--dataset={dataset}", "--preset=paper", f"--level={level}")
        with raises_parameter("level", "byte", "left out"):
            run_here(tool, f"--dataset={dataset}", "--preset=paper", "--level=byte")


@pytest.mark.parametrize("cutoffs", [[50, 20], [20, 20], [0, 20], [500], [100]])
def test_cutoffs_that_cannot_be_trained_are_refused(tmp_path, cutoffs):
    make_run(tmp_path / "run", word_vocab())
    for tool in program("tools/estimate.py"):
        for flag in ("--n_token=100", f"--model_dir={tmp_path / 'run'}"):
            with raises_parameter("cutoffs", cutoffs):
                run_here(tool, flag, f"--cutoffs={','.join(map(str, cutoffs))}")


def test_a_width_of_a_cluster_that_cannot_be_trained_is_refused():
    for tool in program("tools/estimate.py"):
        with raises_parameter("d_embed", 8):
            run_here(tool, "--n_token=100", "--cutoffs=10,20", "--d_embed=8", "--div_val=4")


def test_flags_that_the_model_does_not_use_are_refused():
    wrong = [
        ("untie_r", ["--positions=alibi", "--untie_r"]), ("clamp_len", ["--positions=learned", "--clamp_len=5"]),
        ("context_len", ["--context_len=9"]), ("context_len", [f"--context_len={TransformerLMConfig.context_len}"]),
        ("clamp_len", ["--model=transformer", "--clamp_len=5"]),
    ]  # fmt: skip
    for tool in program("tools/estimate.py"):
        for name, given in wrong:
            with raises_parameter(name):
                run_here(tool, "--n_token=100", *given)


def test_a_text_without_a_preset_is_named(capsys):
    for tool in program("tools/estimate.py"):
        for flags in (["--data_path=my.txt"], ["--dataset=text"]):
            run_here(tool, "--n_token=100", *flags)
            assert mentions(capsys.readouterr().out, "preset", "txl-train")
            run_here(tool, "--n_token=100", *flags, "--preset=base")
            assert not mentions(capsys.readouterr().out, "preset")


def test_a_preset_of_a_prepared_text8_is_for_characters(tmp_path, capsys):
    write_splits(tmp_path, "a b _ a\n" * 20, "a b\n", "b a\n")
    txl_tf.prepare(data_dir=tmp_path, dataset="text8")
    for tool in program("tools/estimate.py"):
        run_here(tool, f"--data_dir={tmp_path}", "--preset=paper", "--level=char")
        assert mentions(capsys.readouterr().out, 24, 512)


def test_a_preset_is_that_of_the_level_of_a_prepared_text(tmp_path, capsys):
    txl_tf.prepare_ids({"train": np.arange(50) % 9}, str(tmp_path), n_token=9)  # of words
    for tool in program("tools/estimate.py"):
        run_here(tool, f"--data_dir={tmp_path}", "--preset=paper")
        assert mentions(capsys.readouterr().out, 60, 150)
        with raises_parameter("level", "char", "left out"):
            run_here(tool, f"--data_dir={tmp_path}", "--preset=paper", "--level=char")


def test_the_program_names_the_flags_of_train_py_that_it_lacks():
    helps = {}
    for train in program("train.py"):
        helps = {name: train.FLAGS[name].help or "" for name in train.FLAGS}
    for tool in program("tools/estimate.py"):
        lacking = {name for name in helps if name not in tool.FLAGS}
        named = {name for name in lacking if f"--{name}" in tool.__doc__ or name.startswith("ray_")}
        assert {"do_eval_only", "corpus_info_path", "ray_workers"} <= named and "--ray_*" in tool.__doc__
        without_effect = {name for name in lacking if "No effect" in helps[name] or name == "num_host"}
        assert lacking == named | without_effect


# Trains a small model first, so that what TensorFlow itself takes is not counted.
MEASURED = """
import json, sys
import numpy as np
import txl_tf

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

def train(batch, tgt_len, **model):
    lm = txl_tf.TransformerXLLM(**model)
    lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, warmup_steps=2, train_steps=100, min_lr_ratio=0.1, clip=0.25))
    ids = np.random.default_rng(0).integers(0, model["n_token"], batch * (4 * tgt_len + 1)).astype("int32")
    lm.fit(txl_tf.segments(ids, batch_size=batch, tgt_len=tgt_len), verbose=0)

shape = json.loads(sys.argv[1])
small = {"n_token": 50, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "mem_len": 4}
train(2, 4, **{**shape["model"], **small})
before = status("VmRSS")
train(shape["rows"], shape["tgt_len"], **shape["model"])
print(status("VmHWM") - before)
"""
NAMES = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "mem_len", "n_token")
SHAPES = [
    ((6, 256, 4, 64, 1024, 64, 5000), 16, 64, "relu"),
    ((4, 512, 8, 64, 2048, 128, 300), 8, 128, "relu"),
    ((3, 128, 8, 16, 256, 300, 100), 16, 100, "relu"),
    ((6, 128, 4, 32, 1024, 64, 1000), 32, 64, "gelu"),
    ((6, 128, 4, 32, 1024, 64, 1000), 32, 64, "swiglu"),
]


@pytest.mark.slow
@pytest.mark.parametrize("sizes, rows, tgt_len, activation", SHAPES)
def test_the_estimate_is_within_15_percent_of_a_training_on_this_cpu(sizes, rows, tgt_len, activation):
    model = dict(zip(NAMES, sizes, strict=True))
    model = {**model, "d_embed": model["d_model"], "dropout": 0.1, "activation": activation}
    shape = json.dumps({"model": model, "rows": rows, "tgt_len": tgt_len})
    done = subprocess.run([sys.executable, "-c", MEASURED, shape], capture_output=True, text=True, check=True)
    estimate = training_memory(ModelConfig(**model), rows, tgt_len).total
    assert estimate == pytest.approx(int(done.stdout.split()[-1]), rel=0.15)
