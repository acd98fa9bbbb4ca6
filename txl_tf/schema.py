"""Checks of values from users and from files, by the names and types of the fields of a dataclass.

Programs need these functions before they import TensorFlow, so `txl_config` defines them.
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
