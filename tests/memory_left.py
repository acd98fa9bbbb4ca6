"""Measures the memory that stays of models that are made, used as in dropping.py, and dropped.

    python tests/memory_left.py TENER --models=30
    python tests/memory_left.py "a model of Keras"

The first third of the models is not counted. TensorFlow keeps a kernel for every operation that runs eagerly, by the
names of the variables; what stays once that cache is emptied is printed, too.
"""

import argparse
import ctypes
import gc
import inspect
import os
import resource
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from dropping import TOKENS, USES
from tensorflow.python.eager import context


def plain():
    model = keras.Sequential([keras.layers.Embedding(23, 32), keras.layers.Dense(23)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(TOKENS, TOKENS, verbose=0)
    model.evaluate(TOKENS, TOKENS, verbose=0)
    model.predict(TOKENS, verbose=0)


def resident():
    """MB of this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def with_and_without_cache():
    kept = resident()
    context.context().clear_kernel_cache()
    return kept, resident()


def main():
    uses = USES | {"a model of Keras": plain}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("use", choices=uses)
    parser.add_argument("--models", type=int, default=30)
    arguments = parser.parse_args()
    use, counted = uses[arguments.use], arguments.models * 2 // 3
    for i in range(arguments.models):
        if i == arguments.models - counted:
            before = with_and_without_cache()
        with tempfile.TemporaryDirectory() as folder:
            use(Path(folder)) if inspect.signature(use).parameters else use()
    kept, others = ((after - begun) / counted for after, begun in zip(with_and_without_cache(), before, strict=True))
    print(f"{arguments.use}: {kept:.1f} MB a model, {others:.1f} MB without TensorFlow's cache of kernels")


if __name__ == "__main__":
    main()
