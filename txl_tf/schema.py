"""Checks of values from people and from files: by the fields of a dataclass, and by the signature of a function.

Programs need it before TensorFlow is imported, so it is defined in `txl_config`.
"""

from txl_config.calls import bind_call, checked_call, checked_init, known_names, unknown_name
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
    takes_keyword,
)

__all__ = [
    "Check",
    "added_later",
    "bind_call",
    "brief",
    "check_field",
    "check_left_out",
    "check_names",
    "check_type",
    "check_values",
    "checked_call",
    "checked_init",
    "did_you_mean",
    "differing",
    "keywords_of",
    "known_names",
    "takes_keyword",
    "unknown_name",
]
