"""Where to train: one device or all accelerators of this machine."""

import tensorflow as tf

STRATEGIES = ("auto", "one", "mirrored")


def make_strategy(name="auto"):
    """A `tf.distribute` strategy by name.

    Args:
        name: `"one"` uses one device, `"mirrored"` all GPUs of the machine (or all logical CPUs where there is no
            GPU), `"auto"` mirrors where there are several GPUs.

    Returns:
        `tf.distribute.Strategy`.

    Raises:
        ValueError: the name is not known.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {name!r}")
    gpus = tf.config.list_logical_devices("GPU")
    if name == "mirrored" or (name == "auto" and len(gpus) > 1):
        devices = gpus or tf.config.list_logical_devices("CPU")
        return tf.distribute.MirroredStrategy([device.name for device in devices])
    return tf.distribute.get_strategy()
