"""Files are loaded in a fresh process, whichever of txl_tf and keras is imported first.

Keras loads a class of a file if it is registered, and `import txl_tf` registers all classes of the library.
"""

import importlib
import json
import subprocess
import sys

import pytest
from helpers import ROOT

SAVED = ROOT / "tests" / "saved"

LOAD_ALL = """
import json, sys
{imports}
print(json.dumps({{path: type(keras.saving.load_model(path)).__name__ for path in sys.argv[1:]}}))
"""


STATE = """
import logging, os, random, sys, warnings
import keras, numpy, tensorflow as tf

def state():
    loggers = {name: logging.getLogger(name).level for name in ["", "absl", "tensorflow", "keras"]}
    numbers = numpy.random.get_state()[1].tolist(), random.getstate(), tf.config.get_soft_device_placement()
    return loggers, numbers, {**os.environ}, [*warnings.filters], warnings.showwarning, numpy.get_printoptions()

before = state()
import txl_tf
assert state() == before
keras.config.set_floatx("float64")
assert [keras.layers.Layer().name, keras.layers.Layer().name] == ["layer", "layer_1"]
dense = keras.layers.Dense(3)
assert (dense.name, dense.compute_dtype, txl_tf.layers.LayerNorm().compute_dtype) == ("dense", "float64", "float64")
"""


@pytest.mark.ci
def test_the_import_changes_nothing_in_keras_and_other_libraries():
    subprocess.run([sys.executable, "-c", STATE], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("first, second", [("txl_tf", "keras"), ("keras", "txl_tf")])
def test_every_kind_of_file_is_loaded_in_a_fresh_process(first, second, tmp_path):
    paths = sorted(map(str, SAVED.glob("*/model.keras")))
    assert len(paths) > 15
    script = LOAD_ALL.format(imports=f"import {first}\nimport {second}")
    command = [sys.executable, "-c", script, *paths]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(json.loads(done.stdout.splitlines()[-1])) == paths


def test_the_configuration_imports_nothing_slow():
    script = "import sys, txl_config; assert not {'txl_tf', 'keras', 'tensorflow', 'numpy'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", ["", ".checks", ".presets"])
def test_the_configuration_is_the_same_in_both_packages(name):
    check_exports(f"txl_tf.config{name}", f"txl_config{name}")


@pytest.mark.parametrize("name", ["errors", "schema", "calls", "environment", "stderr"])
def test_the_library_exports_what_programs_need_early(name):
    check_exports(f"txl_tf.{name}", f"txl_config.{name}")


def check_exports(exporting, defining):
    """The names of one module are those of the other, and all that the other defines is there."""
    exporting = importlib.import_module(exporting)
    defining = importlib.import_module(defining)
    for name in exporting.__all__:
        assert getattr(exporting, name) is getattr(defining, name)
    own = [name for name, found in vars(defining).items() if getattr(found, "__module__", "") == defining.__name__]
    assert {name for name in own if not name.startswith("_")} <= {*exporting.__all__}
