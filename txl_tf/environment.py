"""What the library finds where it runs: optional packages, servers, named pipes.

Programs need it before TensorFlow is imported, so it is defined in `txl_config`.
"""

from txl_config.environment import (
    check_backend,
    check_listens,
    check_versions,
    is_address,
    is_installed,
    is_pipe,
    too_old,
    wait_for_all,
)

__all__ = [
    "check_backend", "check_listens", "check_versions", "is_address", "is_installed", "is_pipe", "too_old",
    "wait_for_all",
]  # fmt: skip
