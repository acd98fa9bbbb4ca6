"""Checks of hyper-parameters, and what groups of them are made of.

Programs need it before TensorFlow is imported, so it is defined in `txl_config`.
"""

from txl_config.checks import (
    COUNT_OR_ALL,
    EVEN_SIZE,
    FRACTION,
    INIT_SCALE,
    LAYERS,
    LENGTH,
    MEMORY,
    NEVER_FALLING,
    NOT_NEGATIVE,
    POSITIVE,
    RATE,
    RISING,
    SHARE,
    SYMBOLS,
    WIDTH,
    Config,
    Group,
    all_of,
    already_checked,
    at_least,
    check_bins,
    check_fields,
    group,
    is_integer,
    is_number,
    keras_initializer,
    not_empty,
    one_of,
    one_of_or_initializer,
    option,
    satisfies,
    unless,
    where,
)

__all__ = [
    "COUNT_OR_ALL", "EVEN_SIZE", "FRACTION", "INIT_SCALE", "LAYERS", "LENGTH", "MEMORY", "NEVER_FALLING",
    "NOT_NEGATIVE", "POSITIVE", "RATE", "RISING", "SHARE", "SYMBOLS", "WIDTH", "Config", "Group", "all_of",
    "already_checked", "at_least", "check_bins", "check_fields", "group", "is_integer", "is_number",
    "keras_initializer", "not_empty", "one_of", "one_of_or_initializer", "option", "satisfies", "unless", "where",
]  # fmt: skip
