"""Chains of small operations as one pass over memory, in a training step on CPUs.

There, TensorFlow runs one operation after the other, each a pass over its tensors, and a training step is half passes.
XLA makes one loop of a chain, but its matrix products are slower than oneDNN's: so XLA compiles the chains alone.

    with fusing(True):          the training step is traced
        mask = make_mask(...)   decorated with `fused`: compiled where that pays, else as it stands
"""

import contextlib
import contextvars
import functools
import math

import tensorflow as tf
from tensorflow.python.eager import record

# Elements below which a chain stays as it is: compiling one takes a quarter of a second.
FEWEST = 1 << 16

_fusing = contextvars.ContextVar("fusing", default=None)


@contextlib.contextmanager
def fusing(active):
    """Whether functions marked `fused` are compiled in this block. No inner block undoes `fusing(False)`."""
    token = _fusing.set(active and _fusing.get() is not False)
    try:
        yield
    finally:
        _fusing.reset(token)


def pays(shape):
    """Whether a chain over tensors of a shape is worth compiling: a large one of known shape, on CPUs, in a graph."""
    known = _fusing.get() and all(isinstance(n, int) for n in shape)
    return bool(known) and math.prod(shape) >= FEWEST and not tf.executing_eagerly() and only_cpus()


def only_cpus():
    """Whether there is no accelerator."""
    return all(device.device_type == "CPU" for device in tf.config.list_logical_devices())


def fused(f):
    """`f(shape, *args)`, compiled where `shape`, that of its largest tensor, says that it `pays`.

    It then has no gradient: `f` makes masks, or is half of a `custom_gradient`. Arguments that are not tensors are
    constants of the program. The program of a shape stays to the process's end: `f` must capture nothing, or it would
    hold the model.
    """

    @functools.wraps(f)
    def alone(*args):
        with fusing(False):
            return f(*args)

    compiled = tf.function(alone, autograph=False, jit_compile=True)

    @functools.wraps(f)
    def call(shape, *args):
        if not pays(shape):
            return f(shape, *args)
        with record.stop_recording():
            return compiled(tuple(shape), *args)

    return call
