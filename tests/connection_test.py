"""A process that ends in C++, as Ray's driver does when its raylet dies, leaves one line; any other end leaves none."""

import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.parametrize("end, status, line", [
    ("os._exit(1)", 1, "demo: the cluster is gone\n"), ("os.kill(os.getpid(), 9)", -9, "demo: the cluster is gone\n"),
    ("sys.exit(3)", 3, ""), ("pass", 0, ""), ("raise KeyboardInterrupt", -2, ""),
])  # fmt: skip
def test_the_last_words_of_a_process(end, status, line):
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from importlib.util import module_from_spec, spec_from_file_location
import types
sys.modules["txl_tf"] = package = types.ModuleType("txl_tf")
package.__path__ = [{str(ROOT / "txl_tf")!r}]
sys.excepthook = lambda kind, *_: None
from txl_tf.cluster.connection import last_words
with last_words("demo: the cluster is gone"):
    {end}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, line)
