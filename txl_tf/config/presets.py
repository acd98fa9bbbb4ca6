"""Presets: sizes of models and training recipes for the user's own text or pairs of lines.

Programs need them before they import TensorFlow. So `txl_config` defines them, and this module imports them from there.
"""

from txl_config.presets import (
    BYTES,
    PAIR_PRESETS,
    PAIR_SIZES,
    PRESETS,
    SIZES,
    choose_preset,
    layer_weights,
    pair_settings,
    pair_weights,
    preset_settings,
    schedule_for,
    steps_for,
)

__all__ = [
    "BYTES", "PAIR_PRESETS", "PAIR_SIZES", "PRESETS", "SIZES", "choose_preset", "layer_weights", "pair_settings",
    "pair_weights", "preset_settings", "schedule_for", "steps_for",
]  # fmt: skip
