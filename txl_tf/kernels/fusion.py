"""Fuses chains of small operations into one pass over memory, in training steps on CPUs.

On a CPU, TensorFlow runs one operation after the other, and each is a pass over its tensors. These passes take half of
the time of a training step. XLA turns a chain of operations into one loop, but its matrix products are slower than
those of oneDNN. So XLA compiles only the chains.

    with fusing(True):          while the training step is traced
        mask = make_mask(...)   decorated with `fused`: compiled if the tensors are large enough, else called as it is
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import tensorflow as tf

# A chain over fewer elements is not compiled, because compiling takes a quarter of a second.
MIN_ELEMENTS = 1 << 16

_fusing: contextvars.ContextVar[bool | None] = contextvars.ContextVar("fusing", default=None)


@contextlib.contextmanager
def fusing(active: bool) -> Generator[None, None, None]:
    """Decides whether `fused` functions are compiled in this block. A block in `fusing(False)` cannot turn it on."""
    token = _fusing.set(active and _fusing.get() is not False)
    try:
        yield
    finally:
        _fusing.reset(token)


def pays(shape: Sequence[Any]) -> bool:
    """Whether a chain of small operations over tensors of this shape should be compiled.

    It should if `fusing` is on, the shape is known and has at least `MIN_ELEMENTS` elements, a graph is being traced,
    and there are only CPUs.
    """
    is_known = all(isinstance(n, int) for n in shape)
    is_large = is_known and math.prod(shape) >= MIN_ELEMENTS
    return bool(_fusing.get()) and is_large and not tf.executing_eagerly() and only_cpus()


def only_cpus() -> bool:
    """Whether TensorFlow has only CPUs, no accelerator."""
    return all(device.device_type == "CPU" for device in tf.config.list_logical_devices())


def fused(f: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of `f(shape, *args)`: XLA compiles the function if `pays(shape)`.

    `shape` is the shape of the largest tensor in `f`. The compiled function has no gradient, so use it for masks or
    inside a `custom_gradient`. Arguments that are not tensors become constants of the program. The program for a shape
    stays in memory until the process ends. So `f` must not capture anything, or it would keep a model in memory, too.
    """

    @functools.wraps(f)
    def alone(*args: Any) -> Any:
        """`f`, in which other fused functions are called as they are: they are compiled as a part of it."""
        with fusing(False):
            return f(*args)

    compiled = tf.function(alone, autograph=False, jit_compile=True)

    @functools.wraps(f)
    def call(shape: Sequence[Any], *args: Any) -> Any:
        if not pays(shape):
            return f(shape, *args)
        # Without stop_gradient, the compiled function would also return the tensors that a gradient needs.
        args = tf.nest.map_structure(lambda x: tf.stop_gradient(x) if tf.is_tensor(x) else x, args)
        return compiled(tuple(shape), *args)

    return call
