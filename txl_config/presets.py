"""Presets of `train.py` for the user's own text, by name or by the size of the text and the machine.

| preset | weights of the layers | tokens of a step | steps |
|---|---|---|---|
| tiny | 1.9 M | 1,536 | 6 times the text, 500 to 4,000; 16 times a text under 48,000 tokens |
| small | 5.1 M | 4,096 | 8 times the text, 500 to 10,000; 16 times a text under 128,000 tokens |
| base | 13.5 M | 4,200 | 100,000: the defaults of the flags |
| paper | 40.9 M; words 41.0 M | 12,288; 9,000 | 400,000: the published set-up of enwik8; of WikiText-103 |

Presets of `train_seq2seq.py` for pairs of lines:

| preset | weights of the layers | of a step, at most | steps |
|---|---|---|---|
| tiny | 0.9 M | 64 pairs, 8,192 tokens | 20 times the pairs, 500 to 4,000 |
| small | 5.5 M | 128 pairs, 16,384 tokens | 20 times the pairs, 500 to 20,000 |
| base | 44.0 M | 64 pairs | 20,000: the defaults of the flags |
"""

from __future__ import annotations

import dataclasses
from typing import Any

from txl_config.models import ModelConfig

PRESETS = ("tiny", "small", "base", "paper")
SIZES = ("n_layer", "d_model", "d_embed", "n_head", "d_head", "d_inner")

PAIR_PRESETS = ("tiny", "small", "base")
PAIR_SIZES = ("num_layers", "d_model", "num_heads", "dff")

SAMPLE_TOKENS = {"word": 50, "char": 200, "byte": 200, "subword": 60}  # level -> tokens of a sample of the user's text
BYTES = {"word": 6, "char": 1, "byte": 1, "subword": 4}  # level -> approximate bytes of a token
# Settings that tiny and small share, and those of paper. They differ from the defaults of the flags.
_SHARED = {"dropatt": 0.0, "untie_r": True, "min_lr_ratio": 0.1}
_PAPER = {"dropatt": 0.0, "untie_r": True, "train_steps": 400_000, "iterations": 200, "save_steps": 4000}
# The presets have learning rates for Adam. With Muon, `tiny` and `small` have these instead.
_RATES_OF_MUON = {"tiny": 6e-3, "small": 3e-3}
_RATE_OF_MUON_FOR_PAIRS = 5e-3


def _sized(*sizes: int, segment: int, rows: int, **other_settings: Any) -> dict[str, Any]:
    """Returns `{hyper-parameter: value}` of a preset: the sizes of its model, segments and batches, and more settings.

    Args:
        *sizes: values of the hyper-parameters in `SIZES`, in this order.
        segment: tokens of a segment, and positions of memory.
        rows: rows of a batch, in training and in evaluation.
        **other_settings: more values by name.
    """
    lengths = {"tgt_len": segment, "mem_len": segment, "train_batch_size": rows, "eval_batch_size": rows}
    return {**dict(zip(SIZES, sizes, strict=True)), **lengths, **other_settings}


def _recipe(preset: str, level: str) -> dict[str, Any]:
    """Returns the settings of a preset for a long text on one device; empty for `base`.

    `tiny` and `small` get no numbers of steps here: these depend on the text, see `preset_settings`.
    """
    long_tokens = level in ("word", "subword")
    rate = 2e-3 if level in ("char", "subword") else 1e-3  # tiny: with 2e-3, bytes do not learn, words learn less
    if preset == "tiny":
        segment, rows = (64, 24) if long_tokens else (96, 16)
        tiny = _sized(4, 192, 192, 4, 48, 768, segment=segment, rows=rows, learning_rate=rate, dropout=0.0, **_SHARED)
        return tiny | ({"d_embed": 96, "div_val": 2} if level == "word" else {})
    if preset == "small":
        small = _sized(6, 256, 256, 4, 64, 1024, segment=128, rows=32, learning_rate=1e-3, dropout=0.1, **_SHARED)
        return small | ({"d_embed": 128, "div_val": 2} if level == "word" else {})
    if preset == "paper" and long_tokens:
        return _sized(16, 410, 410, 10, 41, 2100, segment=150, rows=60, proj_share_all_but_first=True, **_PAPER)
    return _sized(12, 512, 512, 8, 64, 2048, segment=512, rows=24, **_PAPER) if preset == "paper" else {}


def choose_preset(n_bytes: float, n_gpus: int, n_cores: int) -> str:
    """Returns the name of the preset for a text of `n_bytes` on a machine with these GPUs and processor cores.

    A training run with the preset takes minutes on a CPU.
    """
    if n_gpus:
        return "tiny" if n_bytes < 1e6 else "small" if n_bytes < 30e6 else "base"
    return "small" if n_bytes >= 30e6 and n_cores >= 16 else "tiny"


def preset_settings(
    preset: str,
    level: str,
    n_tokens: float,
    replicas: int = 1,
    train_steps: int | None = None,
    optimizer: str = "adam",
) -> dict[str, Any]:
    """Returns `{hyper-parameter: value}` for model, optimizer, training and evaluation; empty for `base`.

    Args:
        preset: one of `PRESETS`.
        level: one of `LEVELS`, what a token is.
        n_tokens: approximate number of tokens of the text.
        replicas: number of devices that divide a batch. The batches of `base` and `paper` are fixed.
        train_steps: number of steps that the user chose, for `tiny` and `small`. Default: by the size of the text.
        optimizer: for `tiny` and `small`, "muon" has a higher learning rate than the other optimizers.
    """
    recipe = _recipe(preset, level)
    if preset in ("base", "paper"):
        return recipe
    if optimizer == "muon":
        recipe["learning_rate"] = _RATES_OF_MUON[preset]
    segment = recipe["tgt_len"]

    def rows_of(max_rows: int, tokens: float) -> int:
        """Returns the number of rows of a batch, a multiple of `replicas`: at most `max_rows`, at least `replicas`.

        Within these bounds, there are so few rows that a text of `tokens` has a segment for each.
        """
        return int(max(1, min(max_rows, tokens // segment) // replicas)) * replicas

    recipe["train_batch_size"] = rows = rows_of(recipe["train_batch_size"], n_tokens / 8)  # 8 segments a row, or more
    # 2 segments a row, or more: a twentieth of the text is for validation.
    recipe["eval_batch_size"] = rows_of(16, n_tokens / 40)
    epoch = n_tokens / (rows * segment)
    least = max(100, min(500, 16 * epoch))  # more than 16 times a small text makes it worse
    bounds = (6, least, 4000) if preset == "tiny" else (8, least, 10_000)
    schedule = schedule_for(train_steps or steps_for(epoch, *bounds))
    return recipe | schedule | {"warmup_steps": min(100, schedule["train_steps"] // 5)}


def steps_for(epoch_steps: float, epochs: int = 3, least: float = 100, most: int = 4000) -> int:
    """Returns the number of steps that read a text `epochs` times, within bounds, rounded down to hundreds.

    Args:
        epoch_steps: number of steps that read the text once.
        epochs: how many times to read it.
        least, most: bounds of the number before it is rounded. If one of them is below 100, the result can be 0.
    """
    return int(min(most, max(least, epochs * epoch_steps))) // 100 * 100


def schedule_for(train_steps: int) -> dict[str, int]:
    """Returns the settings `train_steps`, `iterations` (steps between lines of progress) and `save_steps`, by name."""
    iterations = 50 if train_steps <= 2000 else 100
    return {"train_steps": train_steps, "iterations": iterations, "save_steps": max(1, train_steps // 4)}


def pair_settings(
    preset: str, n_pairs: float, n_tokens: float, train_steps: int | None = None, optimizer: str = "adam"
) -> dict[str, Any]:
    """Returns `{hyper-parameter: value}` for model, optimizer and training on pairs of lines; empty for `base`.

    Args:
        preset: one of `PAIR_PRESETS`.
        n_pairs: number of training pairs.
        n_tokens: approximate number of tokens on both sides of all pairs.
        train_steps: number of steps that the user chose. Default: by the number of pairs.
        optimizer: "muon" has a higher learning rate than the other optimizers.
    """
    if preset == "base":
        return {}
    sizes, rows, tokens, rate, max_steps = {
        "tiny": ((2, 128, 4, 512), 64, 8192, 2e-3, 4000),
        "small": ((3, 256, 4, 1024), 128, 16_384, 1e-3, 20_000),
    }[preset]
    epoch = max(n_pairs / rows, n_tokens / tokens)
    schedule = schedule_for(train_steps or steps_for(epoch, 20, 500, max_steps))
    warmup = min(200, schedule["train_steps"] // 5)
    rate = _RATE_OF_MUON_FOR_PAIRS if optimizer == "muon" else rate
    batch = {"batch_size": rows, "batch_tokens": tokens, "learning_rate": rate, "warmup_steps": warmup}
    return {**dict(zip(PAIR_SIZES, sizes, strict=True)), **batch, **schedule}


def pair_weights(num_layers: int, d_model: int, num_heads: int, dff: int) -> int:
    """Returns the number of weights in the layers of an encoder-decoder, without biases and layer norms.

    The arguments are those in `PAIR_SIZES`, so that callers can pass all of them. `num_heads` has no effect.
    """
    # A layer of the encoder and one of the decoder have together three attentions, with four kernels each, and two
    # feed-forward nets, with two kernels each.
    return num_layers * (12 * d_model**2 + 4 * d_model * dff)


def layer_weights(values: dict[str, Any]) -> int:
    """Returns the number of weights in the layers of a Transformer-XL, without biases and layer norms.

    Args:
        values: hyper-parameters by name. Sizes that are missing have the defaults of the flags.
    """
    sizes = {field: values.get(field, _DEFAULTS[field]) for field in SIZES}
    width = sizes["n_head"] * sizes["d_head"]  # of all heads together
    # Five kernels of attention: queries, keys, values, positions and output. Two of the feed-forward net.
    return sizes["n_layer"] * sizes["d_model"] * (5 * width + 2 * sizes["d_inner"])


_DEFAULTS = {field.name: field.metadata["flag"] for field in dataclasses.fields(ModelConfig)}
