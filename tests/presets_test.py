"""Presets: what they are, which one is chosen, and how many steps a text gets."""

import functools
import itertools
import json
import logging

import pytest
from helpers import mentions, program, raises_parameter, run_here, write_splits, write_text

import txl_tf
from txl_config.training import SCHEDULES
from txl_programs import choosing
from txl_tf.config import (
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    PairsTrainingConfig,
    TrainingConfig,
    TransformerConfig,
)
from txl_tf.config.presets import (
    PAIR_PRESETS,
    PAIR_SIZES,
    PRESETS,
    choose_preset,
    layer_weights,
    pair_settings,
    pair_weights,
    preset_settings,
    schedule_for,
    steps_for,
)
from txl_tf.vanilla.transformer import Transformer


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("level", ["char", "byte", "word", "subword"])
def test_a_preset_passes_the_checks_of_its_groups(preset, level):
    found = preset_settings(preset, level, 1e6)
    groups = ModelConfig, OptimizerConfig, TrainingConfig, EvaluationConfig
    assert not set(found) - {name for group in groups for name in group.names()}
    if preset == "base":
        assert found == {}
        return
    for group in groups:
        group(**{name: value for name, value in found.items() if name in group.names()})
    assert found["mem_len"] == found["tgt_len"]


def test_the_layers_have_the_weights_that_the_table_says():
    """13.5 M are those of the flags' defaults, which have 13.6 M parameters with the embeddings of 100 characters."""
    found = {name: round(layer_weights(preset_settings(name, "char", 1e6)) / 1e6, 1) for name in PRESETS}
    assert found == {"tiny": 1.9, "small": 5.1, "base": 13.5, "paper": 40.9}
    assert layer_weights(preset_settings("paper", "word", 1e6)) == 16 * 410 * (5 * 410 + 2 * 2100)


@pytest.mark.parametrize(
    ("n_bytes", "n_gpus", "n_cores", "preset"),
    [
        (465e3, 0, 2, "tiny"), (1e9, 0, 8, "tiny"), (1e9, 0, 32, "small"), (465e3, 1, 2, "tiny"), (5e6, 1, 2, "small"),
        (100e6, 8, 2, "base"),
    ],
)  # fmt: skip
def test_the_choice(n_bytes, n_gpus, n_cores, preset):
    assert choose_preset(n_bytes, n_gpus, n_cores) == preset


@pytest.mark.parametrize(
    ("n_tokens", "rows", "steps", "lines"),
    [
        (1000, 1, 100, 50),
        (12_288, 16, 100, 50),
        (50_000, 16, 500, 50),
        (465_000, 16, 1800, 50),
        (1.1e6, 16, 4000, 100),
        (1e9, 16, 4000, 100),
    ],
)
def test_steps_follow_the_text(n_tokens, rows, steps, lines):
    found = preset_settings("tiny", "char", n_tokens)
    assert (found["train_batch_size"], found["train_steps"], found["iterations"]) == (rows, steps, lines)
    assert found["save_steps"] == steps // 4 and found["warmup_steps"] < steps


@pytest.mark.parametrize(
    "settings", [preset_settings("tiny", "char", 1e6, train_steps=400), pair_settings("tiny", 1e4, 1e5, 400)]
)
def test_checkpoints_and_warmup_fit_the_steps_that_are_given(settings):
    assert (settings["train_steps"], settings["save_steps"], settings["iterations"]) == (400, 100, 50)
    assert settings["warmup_steps"] == 80


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_muon_has_a_higher_learning_rate_and_nothing_else(preset):
    for settings in (
        functools.partial(preset_settings, preset, "byte", 1e6),
        functools.partial(pair_settings, preset, 9, 9),
    ):
        adam, muon = settings(optimizer="adam"), settings(optimizer="muon")
        assert settings() == settings(optimizer="lamb") == adam
        rates = {"preset_settings": {"tiny": 6e-3, "small": 3e-3}, "pair_settings": {"tiny": 5e-3, "small": 5e-3}}
        assert muon.pop("learning_rate") == rates[settings.func.__name__][preset] > adam.pop("learning_rate")
        assert muon == adam


@pytest.mark.parametrize(("replicas", "rows"), [(1, [16, 13]), (2, [16, 12]), (3, [15, 12]), (32, [32, 32])])
def test_replicas_divide_the_batches(replicas, rows):
    found = preset_settings("tiny", "char", 50_000, replicas)
    assert [found["train_batch_size"], found["eval_batch_size"]] == rows


def test_a_schedule_reads_the_text_so_many_times():
    assert [steps_for(250, epochs=4), steps_for(3), steps_for(1e6)] == [1000, 100, 4000]


def test_a_schedule_fits_steps_that_were_given():
    assert schedule_for(3) == {"train_steps": 3, "iterations": 50, "save_steps": 1}
    assert schedule_for(5000) == {"train_steps": 5000, "iterations": 100, "save_steps": 1250}


# ------------------------------------------------------------------------------------------------- pairs of lines


@pytest.mark.parametrize("preset", PAIR_PRESETS)
def test_a_preset_of_pairs_passes_the_checks_of_its_groups(preset):
    found = pair_settings(preset, 7629, 110_000)
    groups = TransformerConfig, OptimizerConfig, PairsTrainingConfig
    assert not set(found) - {name for group in groups for name in group.names()}
    for group in groups if found else ():
        group(**{name: value for name, value in found.items() if name in group.names()})


def test_steps_follow_the_pairs_and_the_table_says_the_weights():
    assert [pair_settings("tiny", n, 14 * n)["train_steps"] for n in (100, 7629, 10**6)] == [500, 2300, 4000]
    long = pair_settings("tiny", 6000, 6000 * 512)  # 16 pairs a step
    assert (long["train_steps"], long["iterations"], long["save_steps"]) == (4000, 100, 1000)
    sizes = [{name: pair_settings(preset, 1, 1)[name] for name in PAIR_SIZES} for preset in ("tiny", "small")]
    sizes.append({name: TransformerConfig.__dataclass_fields__[name].metadata["flag"] for name in PAIR_SIZES})
    assert [round(pair_weights(**some) / 1e6, 1) for some in sizes] == [0.9, 5.5, 44.0]
    model = Transformer(**sizes[0], input_vocab_size=5, target_vocab_size=5, norm_first=True)
    assert sum(weight.shape.num_elements() for weight in model.weights if weight.shape.rank == 2) == pytest.approx(
        pair_weights(**sizes[0]), rel=0.01
    )


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """A function of flags of `train_seq2seq.py`: the settings that the training would have, and what is printed."""
    from txl_tf.runs import train

    path = write_text(tmp_path / "pairs.tsv", "".join(f"{i}\tx{i}\n" for i in range(300)))
    monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: [])
    said = []

    def settings(*flags):
        got = {}
        monkeypatch.setattr(train, "train_run", lambda folder, **settings: got.update(settings))
        monkeypatch.setattr(logging.getLogger("txl_tf"), "info", lambda text, *args: said.append(text % args))
        said.clear()
        for tool in program("tools/train_seq2seq.py"):
            run_here(tool, f"--train_path={path}", f"--model_dir={tmp_path / 'run'}", *flags)
        return got["model"], got["training"], "\n".join(said)

    return settings


@pytest.mark.parametrize("dataset, rows", [("text8", 24), ("wt2", 60)])
def test_a_prepared_text_has_the_preset_of_its_tokens(tmp_path, dataset, rows):
    """The words of text8 are characters."""
    write_splits(tmp_path, "a b _ a\n" * 20, "a b\n", "b a\n")
    txl_tf.prepare(data_dir=tmp_path, dataset=dataset)
    for tool in program("train.py"):
        tool.FLAGS(["train.py", "--model_dir=run", "--preset=paper"])
        data = {"data_dir": str(tmp_path)}
        assert tool.choose_settings(data, exists=False, optimizer="adam")["train_batch_size"] == rows
        assert tool.size_of_text(data)[0] == ("char" if dataset == "text8" else "word")


@pytest.mark.parametrize("end", ["", "\n"])
def test_pairs_are_the_lines_of_the_file_with_more_lines(tmp_path, end):
    """The last line counts with and without a newline."""
    paths = [write_text(tmp_path / name, lines + end) for name, lines in (("a", "x\ny\nz"), ("b", "xx\nyy"))]
    for tool in program("tools/train_seq2seq.py"):
        pairs, n_bytes, _ = tool.size_of_pairs(PairsConfig(train_path=paths, valid_path=paths))
    assert (pairs, n_bytes) == (3, 10 + 2 * len(end))


def test_without_sizes_a_preset_is_chosen_and_flags_that_are_given_count(chosen):
    model, training, said = chosen()
    assert (model.num_layers, model.d_model, model.num_heads, model.dff) == (2, 128, 4, 512)
    assert (training.train_steps, training.batch_tokens, training.iterations) == (500, 8192, 50)
    assert mentions(said, "tiny", "0.9") and "500 steps" in said and "300 pairs" in said and "44.0 M" in said
    model, training, said = chosen("--d_model=64", "--train_steps=70", "--batch_size=3")
    assert (model.num_layers, model.d_model, model.dff) == (2, 64, 512) and mentions(said, "d_model=64")
    assert (training.train_steps, training.save_steps, training.batch_size) == (70, 17, 3) and "70 steps" in said
    model, training, said = chosen("--num_layers=1", "--d_model=8", "--num_heads=2", "--dff=8")
    assert (training.train_steps, training.batch_tokens) == (20_000, None) and "preset" not in said
    model, training, said = chosen("--preset=base")
    assert (model.d_model, training.train_steps) == (512, 20_000) and mentions(said, "base", "44.0")
    said = chosen("--preset=base", "--train_steps=70")[-1]
    assert mentions(said, "warmup_steps=1000", "train_steps=70", "warmup_steps=7")


LANGUAGE_MODELS = [
    *(f"--positions={name}" for name in ("relative", "sinusoids", "learned", "alibi", "rotary")),
    "--model=transformer",
    "--model=transformer --pos_embed=learned",
]


@pytest.fixture
def resumed(monkeypatch, tmp_path):
    """A function of a program and of the flags of a new run: that run's settings, and a function of flags to resume."""
    from txl_tf.runs import train
    from txl_tf.runs.folder import RunFolder

    got = {}
    monkeypatch.setattr(train, "train_run", lambda folder, **settings: got.update(settings))
    monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: [])

    def trained(tool, *flags):
        def settings(*some_flags):
            run_here(tool, f"--model_dir={tmp_path / 'run'}", *some_flags)
            return dict(got)

        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "steps", lambda folder: [])
            new = settings(*flags)
        groups = (new["machine"], new["final"], new["training"], new["optimizer"])
        training = {name: value for group in groups for name, value in group.to_dict().items()}
        config = json.loads(json.dumps({"data": {}, "model": new["model"].to_dict(), "training": training}))
        monkeypatch.setattr(RunFolder, "steps", lambda folder: [10])
        monkeypatch.setattr(RunFolder, "read_config", lambda folder: config)
        return new, settings

    return trained


def same_settings(one, other):
    """Whether two results of `train_run`'s arguments are equal, with tuples as lists."""
    return json.dumps(one, default=vars) == json.dumps(other, default=vars)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("level", ["char", "word"])
def test_the_command_of_a_run_with_a_preset_resumes_it(resumed, tmp_path, preset, level):
    path = write_text(tmp_path / "a.txt", "some text\n" * 300)
    for tool in program("train.py"):
        for schedule, model in itertools.product(SCHEDULES, LANGUAGE_MODELS):
            flags = [f"--preset={preset}", f"--data_path={path}", f"--level={level}"]
            flags += [f"--schedule={schedule}", "--optimizer=sgd", *model.split()]
            new, settings = resumed(tool, *flags)
            assert same_settings(settings(*flags), new), flags
            longer = settings(*flags, "--train_steps=9000")
            assert longer["training"].train_steps == 9000 and same_settings(longer["model"], new["model"]), flags
            if schedule == "constant" and "transformer" not in model:  # the run keeps them without the flags, too
                assert same_settings(settings(*flags[:3]), new), flags


@pytest.mark.parametrize("name, data", [("train.py", "data_path"), ("tools/train_seq2seq.py", "train_path")])
def test_a_preset_has_the_learning_rate_of_the_optimizer(resumed, tmp_path, name, data):
    """A run that resumes keeps its optimizer."""
    path = write_text(tmp_path / "a.txt", "some\ttext\n" * 300)
    for tool in program(name):
        flags = ["--preset=tiny", f"--{data}={path}"]
        adam, _ = resumed(tool, *flags)
        muon, settings = resumed(tool, *flags, "--optimizer=muon")
        assert muon["optimizer"].learning_rate > adam["optimizer"].learning_rate
        assert same_settings(settings(*flags), muon)
        assert settings(*flags, "--optimizer=adam")["optimizer"].optimizer == "adam"  # `train_run` refuses it by name


def test_a_run_with_a_preset_keeps_the_memory_that_was_given(resumed, tmp_path):
    path = write_text(tmp_path / "a.txt", "some text\n" * 300)
    for tool in program("train.py"):
        flags = ["--preset=tiny", "--model=transformer", f"--data_path={path}"]
        _, settings = resumed(tool, *flags, "--mem_len=20")
        assert settings(*flags)["model"].mem_len == 20


def test_a_preset_of_another_last_learning_rate_than_the_run_is_refused(resumed, tmp_path):
    """The run had no last learning rate, because its schedule was another one."""
    path = write_text(tmp_path / "a.txt", "some text\n" * 300)
    for tool in program("train.py"):
        flags = ["--preset=tiny", f"--data_path={path}"]
        _, settings = resumed(tool, *flags, "--schedule=constant")
        with raises_parameter("preset", "tiny"):
            settings(*flags, "--schedule=cosine")


@pytest.mark.parametrize("preset", PAIR_PRESETS)
def test_the_command_of_a_run_on_pairs_with_a_preset_resumes_it(resumed, tmp_path, preset):
    path = write_text(tmp_path / "pairs.tsv", "".join(f"{i}\tx{i}\n" for i in range(300)))
    for tool in program("tools/train_seq2seq.py"):
        for schedule, positions in itertools.product(SCHEDULES, ("sin", "learned", "rotary")):
            flags = [f"--preset={preset}", f"--train_path={path}", f"--schedule={schedule}", f"--pos_embed={positions}"]
            new, settings = resumed(tool, *flags)
            assert same_settings(settings(*flags), new), flags


def test_an_estimate_leaves_out_what_the_positions_do_not_accept():
    for tool in program("tools/estimate.py"):
        run_here(tool, "--n_token=20", "--preset=tiny", "--positions=learned")
        assert not tool.settings()[0].untie_r
        run_here(tool, "--n_token=20", "--preset=tiny")
        assert tool.settings()[0].untie_r


TASKS = {"type": "worker", "index": 0}
SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n9",
    "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "n9",
}  # fmt: skip


@pytest.mark.parametrize(
    "flags, gpus, environment, divisor",
    [
        ([], 0, {}, 1),
        ([], 3, {}, 3),
        (["--strategy=one"], 3, {}, 1),
        (["--strategy=mirrored", "--logical_cpus=2"], 0, {}, 2),
        (["--logical_cpus=2"], 0, {}, 2),
        (["--strategy=tpu", "--tpu=local"], 0, {}, 8),
        (["--tpu=local"], 0, {}, 8),
        ([], 2, {"TF_CONFIG": {"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "task": TASKS}}, 6),
        ([], 0, {"TF_CONFIG": {"cluster": {"worker": ["b:1", "c:1"]}, "task": TASKS}}, 2),
        (["--strategy=mirrored"], 2, {"TF_CONFIG": {"cluster": {"worker": ["b:1", "c:1"]}, "task": TASKS}}, 2),
        ([], 0, SRUN, 3),
        (["--strategy=one"], 2, {"TF_CONFIG": "{"}, 1),
    ],
)
def test_the_replicas_of_all_workers_and_of_a_tpu_divide_the_batch(monkeypatch, flags, gpus, environment, divisor):
    for name, value in environment.items():
        monkeypatch.setenv(name, value if isinstance(value, str) else json.dumps(value))
    for tool in program("train.py"):
        tool.FLAGS(["train.py", "--model_dir=run", *flags])
        assert choosing.batch_divisor(gpus) == divisor


@pytest.mark.parametrize(
    "name, environment",
    [("TF_CONFIG", {"TF_CONFIG": '["damaged"]'}), ("SLURM_*", {**SRUN, "SLURM_STEP_NUM_TASKS": "many"})],
)
def test_workers_that_are_malformed_are_refused_before_a_preset_is_logged(monkeypatch, tmp_path, name, environment):
    path = write_text(tmp_path / "a.txt", "some text\n" * 300)
    monkeypatch.setattr(choosing, "log_choice", lambda *args: pytest.fail("a preset is logged"))
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    for tool in program("train.py"):
        tool.FLAGS(["train.py", f"--model_dir={tmp_path / 'run'}", f"--data_path={path}"])
        with raises_parameter(name):
            tool.main()


def test_the_cores_are_those_that_the_program_may_use(monkeypatch):
    monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: [])
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1}, raising=False)
    for tool in program("train.py"):
        tool.FLAGS(["train.py", "--model_dir=run"])
        assert choosing.chosen_preset(10**9) == ("tiny", 0, "there is no GPU, but 2 cores")
