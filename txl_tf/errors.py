"""The errors of the library: what is wrong with a value that the caller gave, as fields that code can read.

Programs need it before TensorFlow is imported, so it is defined in `txl_config`.
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
