"""What happens around the training steps: lines of progress, logs by step, checkpoints, and Ctrl-C."""

import datetime
import signal
import threading
import time

import keras

from txl_tf.evaluation import in_measure


def step_of(model):
    """Number of training steps done, those of earlier sessions included."""
    return int(model.optimizer.iterations.numpy())


class RunState(keras.callbacks.Callback):
    """Checkpoints every `save_steps` steps and at the end, and the end itself after `train_steps` steps.

    Args:
        checkpoints: `RunCheckpoints`.
        mems: memory to start with, from `RunCheckpoints.restore`; `None` for zeros.
        train_steps, save_steps: see `train_and_evaluate`.
    """

    def __init__(self, checkpoints, mems, train_steps, save_steps):
        super().__init__()
        self.checkpoints = checkpoints
        self.mems = mems
        self.train_steps = train_steps
        self.save_steps = save_steps

    def on_train_begin(self, logs=None):
        self.saved_step = step_of(self.model)
        if self.mems is not None:
            self.model.set_carried_mems(self.mems)

    def on_train_batch_end(self, batch, logs=None):
        step = step_of(self.model)
        if step >= self.train_steps:
            self.model.stop_training = True
        elif step // self.save_steps > self.saved_step // self.save_steps:
            self.save(step)

    def on_epoch_end(self, epoch, logs=None):
        if self.model.stop_training:  # now, since a moving average takes the place of the weights at the end
            self.save(step_of(self.model))

    def save(self, step):
        if step > self.saved_step:
            self.checkpoints.save()
            self.saved_step = step


class Progress(keras.callbacks.Callback):
    """A line of progress at the end of every Keras epoch, which is a window of `iterations` steps.

    Adds to the epoch's logs, for the loggers after it: `step`, the loss in `measure`, `learning_rate` of the last
    step and `tokens_per_second` of training alone.

    Args:
        train_steps: steps in all.
        tokens_per_step: tokens of a batch.
        measure: "ppl" or "bpc".
    """

    def __init__(self, train_steps, tokens_per_step, measure):
        super().__init__()
        self.train_steps = train_steps
        self.tokens_per_step = tokens_per_step
        self.measure = measure
        self.traced = False

    def on_train_begin(self, logs=None):
        print("tracing the training step", flush=True)

    def on_epoch_begin(self, epoch, logs=None):
        self.begin = self.end = (step_of(self.model), time.perf_counter())

    def on_train_batch_end(self, batch, logs=None):
        self.end = (step_of(self.model), time.perf_counter())
        if not self.traced:  # the first call was spent on tracing
            self.traced = True
            self.begin = self.end

    def on_epoch_end(self, epoch, logs=None):
        (first, started), (step, ended) = self.begin, self.end
        seconds = (ended - started) / (step - first) if step > first else float("nan")
        optimizer = self.model.optimizer
        schedule = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
        logs["step"] = step
        logs["learning_rate"] = float(schedule(step - 1) if callable(schedule) else optimizer.learning_rate)
        logs["tokens_per_second"] = self.tokens_per_step / seconds
        line = [f"step {step:>{len(str(self.train_steps))}}/{self.train_steps}", self.loss(logs, "")]
        line += [f"lr {logs['learning_rate']:.3g}", f"grad norm {logs['grad_norm']:.2f}"]
        if seconds == seconds:
            left = datetime.timedelta(seconds=round((self.train_steps - step) * seconds))
            line += [f"{logs['tokens_per_second']:,.0f} tokens/s", f"{left} left"]
        if "val_loss" in logs:
            line.append("valid " + self.loss(logs, "val_"))
        print(" | ".join(line), flush=True)

    def loss(self, logs, prefix):
        logs[prefix + self.measure] = in_measure(logs[prefix + "loss"], self.measure)
        return f"loss {logs[prefix + 'loss']:.4f} | {self.measure} {logs[prefix + self.measure]:.3f}"


class StepTensorBoard(keras.callbacks.TensorBoard):
    """TensorBoard curves over training steps, rather than epochs."""

    def __init__(self, log_dir):
        super().__init__(log_dir, write_graph=False)

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(step_of(self.model), logs)


class StepCSVLogger(keras.callbacks.CSVLogger):
    """`log.csv`, with "NA" in the columns of the validation where there was none.

    Args:
        filename: the file.
        measure: "ppl" or "bpc".
        append: go on with the file that is there.
    """

    def __init__(self, filename, measure, append):
        super().__init__(filename, append=append)
        self.measure = measure

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, {"val_loss": "NA", f"val_{self.measure}": "NA", **logs})


class StopOnInterrupt(keras.callbacks.Callback):
    """Ctrl-C ends the training after the step that runs; a second one ends the program at once.

    To come before the callbacks that log and save.
    """

    def __init__(self):
        super().__init__()
        self.interrupted = False

    def on_train_begin(self, logs=None):
        self.main_thread = threading.current_thread() is threading.main_thread()
        if self.main_thread:  # no other may handle signals
            self.previous = signal.signal(signal.SIGINT, self.handle)

    def handle(self, signum, frame):
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        print("\ninterrupted: saving after this step (Ctrl-C again to stop at once)", flush=True)
        self.model.stop_evaluating = True

    def on_test_begin(self, logs=None):
        self.model.stop_evaluating = self.interrupted

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training |= self.interrupted

    def on_epoch_end(self, epoch, logs=None):
        if self.interrupted:  # of a validation that was cut short nothing is to be logged
            for name in [name for name in logs if name.startswith("val_")]:
                del logs[name]

    def on_train_end(self, logs=None):
        if self.main_thread:
            signal.signal(signal.SIGINT, self.previous)
