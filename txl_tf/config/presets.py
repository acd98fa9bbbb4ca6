"""Sizes and recipes for a text or pairs of one's own, by its size and the machine.

Programs need it before TensorFlow is imported, so it is defined in `txl_config`.
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
