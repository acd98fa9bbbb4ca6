"""Checks of hyper-parameters, and the parts of their groups.

Programs need them before they import TensorFlow. So `txl_config` defines them, and this module imports them from there.
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
    as_int,
    at_least,
    check_bins,
    check_fields,
    check_integer,
    check_parallel_parts,
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
    "already_checked", "as_int", "at_least", "check_bins", "check_fields", "check_integer", "check_parallel_parts",
    "group", "is_integer", "is_number", "keras_initializer", "not_empty", "one_of", "one_of_or_initializer",
    "option", "satisfies", "unless", "where",
]  # fmt: skip
