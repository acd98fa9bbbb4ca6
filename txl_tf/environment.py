"""The environment: the processor, installed packages, Keras's backend, servers that listen, pipes in place of files.

Programs need these functions before they import TensorFlow, so `txl_config` defines them.
"""

from txl_config.environment import (
    check_backend,
    check_listens,
    check_versions,
    is_address,
    is_installed,
    is_pipe,
    is_system_pipe,
    processor_flags,
    too_old,
    wait_for_all,
)

__all__ = [
    "check_backend", "check_listens", "check_versions", "is_address", "is_installed", "is_pipe", "is_system_pipe",
    "processor_flags", "too_old", "wait_for_all",
]  # fmt: skip
