"""The work that a contestant repeats, and its time: calls of a function, or steps of Keras's `fit`.

Like all code of contestants, this file imports only public names of txl_tf, and imports them late, because it also runs
in processes that use the txl_tf of another checkout.

    work = Steps(model, repeated([batch]))    # or Calls(function)
    work.once()                               # does the work once, and returns what it computes
    mean_seconds(work, seconds=1)             # repeats it for a second, and returns the mean seconds

Both kinds have a method `ends(enough)`, which repeats steps of the work until `enough(ends)` is true, and returns
`ends`: the time at which the first measured step began, and the times at which steps ended, in seconds.
"""

import functools
import importlib.util
import time
from pathlib import Path
from typing import Any

FOREVER = 10**9  # number of steps of a `fit` that is ended by a callback


@functools.cache
def port(name):
    """A plain port of an original program as a module: tests/reference_model.py is `port("reference_model")`."""
    spec: Any = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "tests" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Calls:
    """Work that is a call of a function. It has one step."""

    steps = 1

    def __init__(self, function):
        self.once = function

    def ends(self, enough):
        """See the module."""
        ends = [time.perf_counter()]
        while not enough(ends):
            self.once()
            ends.append(time.perf_counter())
        return ends


class Steps:
    """Work that is some steps of `fit` or of `evaluate`.

    The first step of every `fit` is not measured, because Keras prepares the training before it.

    Args:
        model: a compiled Keras model.
        batches: `tf.data.Dataset` that has no end, see `repeated`.
        steps: number of steps in the work.
        evaluation: whether to call `evaluate` in place of `fit`.
    """

    def __init__(self, model, batches, steps=1, evaluation=False):
        self.model = model
        self.batches = batches
        self.steps = steps
        self.evaluation = evaluation

    def once(self):
        """Does the steps, and returns their mean loss."""
        return self._run(lambda ends: len(ends) == self.steps)[1]

    def ends(self, enough):
        """See the module. The first time is the end of the first step."""
        return self._run(enough)[0]

    def _run(self, enough):
        """Calls `fit` or `evaluate` until `enough(ends)`. Returns `(ends, mean loss)`."""
        import keras

        ends = []

        def on_step(step, logs):
            ends.append(time.perf_counter())
            if enough(ends):
                setattr(self.model, "stop_evaluating" if self.evaluation else "stop_training", True)

        clock = keras.callbacks.LambdaCallback(on_train_batch_end=on_step, on_test_batch_end=on_step)
        arguments = {"verbose": 0, "callbacks": [clock]}
        if self.evaluation:
            return ends, self.model.evaluate(self.batches, steps=FOREVER, **arguments)
        return ends, self.model.fit(self.batches, steps_per_epoch=FOREVER, **arguments).history["loss"][0]


def mean_seconds(work, seconds, least=1):
    """Repeats the work until `seconds` have passed, at least `least` times. Returns its mean seconds."""

    def enough(ends):
        done, rest = divmod(len(ends) - 1, work.steps)
        return not rest and done >= least and ends[-1] - ends[0] >= seconds

    ends = work.ends(enough)
    return (ends[-1] - ends[0]) / (len(ends) - 1) * work.steps


def repeated(batches):
    """A dataset that repeats a list of batches without end.

    A single batch may have any structure, and the shapes of the dataset are those of the batch. Several batches must be
    structures of int32 arrays; their shapes may differ.

    It does not use tf.data's autotuning: every `fit` would wait at its end for a thread that sleeps for seconds.
    """
    import tensorflow as tf

    if len(batches) == 1:
        dataset = tf.data.Dataset.from_tensors(batches[0]).repeat()
    else:
        specs = tf.nest.map_structure(lambda x: tf.TensorSpec([None] * x.ndim, tf.int32), batches[0])
        dataset = tf.data.Dataset.from_generator(lambda: batches, output_signature=specs).repeat().prefetch(2)
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def padded(rows):
    """Lists of ids as one array, int32 `[rows, longest]`, padded with 0."""
    import keras

    return keras.utils.pad_sequences(rows, padding="post")
