"""Checks of the arguments of a call by the signature of the function: their names, their number and their types.

Programs need these functions before they import TensorFlow, so `txl_config` defines them.
"""

from txl_config.calls import (
    bind_call,
    check_true_or_false,
    checked_call,
    checked_init,
    known_names,
    shortest_call,
    unknown_name,
    with_signature,
)

__all__ = [
    "bind_call", "check_true_or_false", "checked_call", "checked_init", "known_names", "shortest_call", "unknown_name",
    "with_signature",
]  # fmt: skip
