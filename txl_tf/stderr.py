"""The standard error without what libraries in C++ note there for themselves.

Programs need it before TensorFlow is imported, so it is defined in `txl_config`.
"""

from txl_config.stderr import (
    without_notes,
)

__all__ = [
    "without_notes",
]
