"""Checks of values that come from people and from files, by the fields of a dataclass: their names and types.

Programs need it before TensorFlow is imported, so it is defined in `txl_config`.
"""

from txl_config.schema import (
    Check,
    added_later,
    brief,
    check_field,
    check_left_out,
    check_names,
    check_type,
    check_values,
    did_you_mean,
    differing,
    keywords_of,
    nearest_name,
    takes_keyword,
)

__all__ = [
    "Check", "added_later", "brief", "check_field", "check_left_out", "check_names", "check_type", "check_values",
    "did_you_mean", "differing", "keywords_of", "nearest_name", "takes_keyword",
]  # fmt: skip
