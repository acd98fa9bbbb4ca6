"""Reads hostile files in a fork of this process, with limits of memory and time.

`helpers.read_hostile` does it in a process for each file, which takes many seconds.
"""

import json
import os
import resource
import signal
import time
from pathlib import Path


def read_forked(folder, attempt):
    """Reads the files of a folder one after the other, with 3 GB to spare and for 20 seconds at most each.

    Args:
        attempt: function of a path that returns what became of the file.

    Returns:
        `{file: [what became of it or its ValueError, length of that, size of the file, growth of the peak in bytes,
        seconds of the processor]}`. What ends the process leaves out its file and all after it.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with os.fdopen(writing, "w") as file:
                for path in sorted(Path(folder).iterdir()):
                    print(json.dumps(_read(path, attempt)), file=file, flush=True)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = {name: rest for name, *rest in map(json.loads, file)}
    os.waitpid(child, 0)
    return found


def _read(path, attempt):
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + 3 * 2**30, -1))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = _memory("VmRSS"), time.process_time()
    try:
        found = attempt(path)
    except (ValueError, OSError) as error:
        found = str(error)
    except BaseException as error:  # which no file may cause
        found = f"not caught:\n{error!r}"
    seconds, growth = time.process_time() - start, _memory("VmHWM") - before
    return [path.name, found[:10_000], len(found), path.stat().st_size, growth, seconds]


def _memory(name):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
