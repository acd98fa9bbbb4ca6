"""Temporary files of programs that were killed: the next program that writes at the same place removes them."""

from __future__ import annotations

import contextlib
import logging
import os
import re

from txl_tf.files import remove

logger = logging.getLogger("txl_tf")

# `write_atomic` and `export_saved_model` write to `<name>.<process>.<8 digits>.tmp` and `<name>.<process>.tmp` first.
_TEMPORARY = re.compile(r"(?P<name>.+?)\.(?P<process>\d{1,9})(\.[0-9a-f]{8})?\.tmp", re.DOTALL)


def remove_leftovers(folder: str, name: str | None = None) -> list[str]:
    """Removes the temporary files and folders of dead processes from a local folder. Returns their names.

    The caller holds the lock of the folder, or is the only one to write `name`. A link is removed, not followed.

    Args:
        name: the file or folder that the processes were writing; `None`: any.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    removed = []
    for found in names:
        match = _TEMPORARY.fullmatch(found)
        if not match or (name is not None and match["name"] != name) or is_alive(int(match["process"])):
            continue
        with contextlib.suppress(OSError):
            remove(os.path.join(folder, found))
            removed.append(found)
    if removed:
        logger.info("%s: removed %s, which a dead process left", folder, ", ".join(removed))
    return removed


def is_alive(process: int) -> bool:
    """Whether a process of this number exists on this machine. If nobody can tell, it may be alive."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
