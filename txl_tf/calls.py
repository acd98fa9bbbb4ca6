"""Checks of the arguments of a call by the signature of the function: their names, their number and their types.

Programs need it before TensorFlow is imported, so it is defined in `txl_config`.
"""

from txl_config.calls import (
    bind_call,
    checked_call,
    checked_init,
    known_names,
    shortest_call,
    unknown_name,
    with_signature,
)

__all__ = [
    "bind_call", "checked_call", "checked_init", "known_names", "shortest_call", "unknown_name", "with_signature",
]  # fmt: skip
