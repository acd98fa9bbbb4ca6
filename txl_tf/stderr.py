"""The standard error stream, without the log lines that C++ libraries write to it.

Programs need this function before they import TensorFlow, so `txl_config` defines it.
"""

from txl_config.stderr import (
    without_notes,
)

__all__ = [
    "without_notes",
]
