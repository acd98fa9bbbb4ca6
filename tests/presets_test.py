"""Presets: what they are, which one is chosen, and how many steps a text gets."""

import pytest

from txl_tf.config import EvaluationConfig, ModelConfig, OptimizerConfig, TrainingConfig
from txl_tf.config.presets import PRESETS, choose_preset, layer_weights, preset_settings, schedule_for, steps_for


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


@pytest.mark.parametrize(("replicas", "rows"), [(1, [16, 13]), (2, [16, 12]), (3, [15, 12]), (32, [32, 32])])
def test_replicas_divide_the_batches(replicas, rows):
    found = preset_settings("tiny", "char", 50_000, replicas)
    assert [found["train_batch_size"], found["eval_batch_size"]] == rows


def test_a_schedule_reads_the_text_so_many_times():
    assert [steps_for(250, epochs=4), steps_for(3), steps_for(1e6)] == [1000, 100, 4000]


def test_a_schedule_fits_steps_that_were_given():
    assert schedule_for(3) == {"train_steps": 3, "iterations": 50, "save_steps": 1}
    assert schedule_for(5000) == {"train_steps": 5000, "iterations": 100, "save_steps": 1250}
