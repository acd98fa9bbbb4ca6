"""The errors of the library. Their attributes tell code which value of the caller is wrong, and what is allowed.

Programs need these classes before they import TensorFlow, so `txl_config` defines them.
"""

from txl_config.errors import (
    MOST_CHARACTERS,
    ArgumentTypeError,
    CallError,
    FixedAttributeError,
    ParameterError,
    UnknownArgumentError,
    UnknownNameError,
    UnsupportedError,
    brief,
    located,
    named,
    shortened,
    visible,
)

__all__ = [
    "MOST_CHARACTERS", "ArgumentTypeError", "CallError", "FixedAttributeError", "ParameterError",
    "UnknownArgumentError", "UnknownNameError", "UnsupportedError", "brief", "located", "named", "shortened", "visible",
]  # fmt: skip
