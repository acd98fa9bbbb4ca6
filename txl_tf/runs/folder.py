"""The folder of a run. `RunFolder` alone knows the names of the files in it:

config.json              family, data, model, vocabulary and training, see `txl_tf.config`
vocab.txt                the vocabulary, one symbol per line in the order of the ids. A vocabulary of subwords is in
                         vocab.model, those of pairs are in source_vocab.txt and target_vocab.txt
ckpt-<step>.*            checkpoints; the file `checkpoint` names them to other programs
best/ckpt-<step>.*       weights with the best validation; best.json has its loss or F1
ema/ckpt-<step>.*        moving average of the weights at the end of the training
log.csv                  losses and metrics
train/, validation/      the same as curves, for TensorBoard
tracker.json             id of the run in a tracker, if there is one
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from txl_tf.calls import checked_call
from txl_tf.config import RunConfig
from txl_tf.data.subwords import load_vocab, vocab_file
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError, UnknownArgumentError, brief, named
from txl_tf.files import (
    absolute,
    check_no_link,
    check_no_pattern,
    check_not_overwritten,
    check_scheme,
    check_writable,
    empty_removed_on_error,
    is_pipe,
    is_remote,
    lock,
    naming_read_errors,
    naming_write_errors,
    read_json,
    remove,
    remove_leftovers,
    removed_on_error,
    same_path,
    write_atomic,
    write_json,
)
from txl_tf.nn.parts import own_parts
from txl_tf.runs.families.record import Family, family_in, family_of_model
from txl_tf.runs.weights import (
    CheckpointFolder,
    CheckpointGone,
    CheckpointReader,
    UnreadableCheckpoint,
    check_exists,
    check_whole,
    delete_checkpoint,
    load_weights,
)
from txl_tf.schema import did_you_mean, differing

CREATING = "creating.tmp"  # exists in the folder of a run while `RunFolder.create` writes it
# `{beginning of an address: function that returns the local folder of the run}`; `txl_tf.convert.hub` adds its own.
SOURCES: dict[str, Callable[[str], str]] = {}
_ATTEMPTS = 10  # to open a checkpoint, which a training run in another process may delete
_WITH_CHECKPOINTS = ("best", "ema")  # subfolders of a run that contain checkpoints
_SUBFOLDERS = (*_WITH_CHECKPOINTS, "train", "validation")  # the last two are TensorBoard's
# Names of files and folders that belong to a run.
_OWN_NAMES = re.compile(
    r"config\.json|(\w+_)?vocab\.(txt|model)|lexicon\.txt|checkpoint|ckpt-\d+(\..*)?|best\.json|log\.csv|tracker\.json"
    rf"|{'|'.join(_SUBFOLDERS)}|{re.escape(CREATING)}",
    re.DOTALL,
)
_OPTIONS = ("dtype", "name", "recompute", "seed", "trainable")  # of models, besides their hyper-parameters


@checked_call
def load_run(
    model_dir: str | os.PathLike, ckpt_path: str | os.PathLike | None = None, **changes: Any
) -> tuple[Any, Any]:
    """Opens a trained, converted or averaged run.

    Args:
        model_dir: folder of the run; `hf://OWNER/NAME` for one on the Hugging Face Hub, which needs huggingface_hub; or
            `original://wt103` (enwik8, text8, lm1b) for a checkpoint that the original authors published.
        ckpt_path: path or name of a checkpoint, `"best"` or `"latest"`. The default is the best checkpoint for a tagger
            with a validation, otherwise the latest. The moving average of the weights has the name
            `"ema/ckpt-<step>"`.
        **changes: arguments of the model that replace those of the run, such as `mem_len`.

    Returns:
        `(model, vocab)`: the model, not compiled, and its vocabulary: `(lm, vocab)` of a language model, `(model,
        [source_vocab, target_vocab])` of an encoder-decoder, `(tagger, [vocab, bigram_vocab])` of a tagger. FLAT has
        the words of the lexicon as a third vocabulary.

    Raises:
        ParameterError: the folder contains no run; there is no such checkpoint, it is damaged, or it belongs to another
            model; or the run cannot change one of `changes`.
        OSError: a file cannot be read.
    """
    folder = RunFolder(model_dir)
    vocabs = folder.load_vocabs()
    return folder.load_model(ckpt_path, **changes), vocabs[0] if len(vocabs) == 1 else vocabs


def check_spares_runs(name: str, path: str | None, model_dir: str | os.PathLike | None = None) -> None:
    """Checks that writing to a path does not overwrite a part of a run. Other new files in its folder are allowed.

    Checks before that there is a file system for the path.

    Args:
        name: name of the argument whose value is `path`, for the error.
        path: file or folder to write to. `None` and "" are allowed.
        model_dir: folder of a run that may not have a `config.json` yet.

    Raises:
        ParameterError: `path` is the folder of a run, or has the name of one of its files or subfolders, or a scheme
            such as `https://`.
    """
    if not path:
        return
    check_scheme(name, path)
    run = path if _has_config(path) else _run_around(path, model_dir)
    if run is not None:
        message = f"{name} must not be the run {brief(run)} or a part of it, got {brief(path)}: choose another path"
        raise ParameterError(name, path, "a path that is no part of a run", message)


def _run_around(path: str, model_dir: str | os.PathLike | None = None) -> str | None:
    """The folder of the run whose file or subfolder has this path; `None` if there is none. Nothing needs to exist.

    `model_dir`: see `check_spares_runs`.
    """
    folder, own_name = os.path.split(absolute(path.rstrip("/")))
    if not _OWN_NAMES.fullmatch(own_name):
        return None
    if not is_remote(path):  # a link to a folder is followed. A link to a file is replaced
        folder = os.path.realpath(folder)
    folders = [folder]
    if os.path.basename(folder) in _SUBFOLDERS:
        folders.append(os.path.dirname(folder))
    for run in folders:
        if _has_config(run) or (model_dir is not None and same_path(run, os.fspath(model_dir))):
            return run
    return None


def _has_config(folder: str) -> bool:
    """Whether a folder contains the `config.json` of a run. Other programs have files of this name, too."""
    path = os.path.join(folder, "config.json")
    with naming_write_errors(folder):
        if not tf.io.gfile.exists(path):
            return False
        try:
            with tf.io.gfile.GFile(path) as file:
                values = json.loads(file.read())
        except ValueError:  # no JSON
            return False
    return isinstance(values, dict) and {"data", "model"} <= values.keys()


class RunFolder(CheckpointFolder):
    """The folder of a run, local or remote. If a file is missing or wrong, its methods raise ParameterError.

    Args:
        model_dir: path of the folder, or an address such as `hf://OWNER/NAME`, see `txl_tf.convert.hub`.
        task: task that the model of the run must have, see `Family`; `None` for any.
        family: family of the run to make or to train. By default, it is read from `config.json`.

    Attributes:
        path: path of the folder.
        address: the address from which the folder was downloaded; `None` for another folder.
        best, ema: the folders of the best checkpoint and of the averaged weights.
        config_file, log_file, best_file: paths of files.
    """

    def __init__(self, model_dir: str | os.PathLike, task: str | None = None, family: Family | None = None):
        path = os.fspath(model_dir)
        source = next((source for source in SOURCES if path.startswith(source)), None)
        self.address: str | None = path if source else getattr(model_dir, "address", None)
        if source is None:
            check_scheme("model_dir", path, "hf", "original")
        super().__init__(SOURCES[source](path) if source else path)
        self.task = family.task if family else task
        self._family = family
        self.config_file = os.path.join(self.path, "config.json")
        self.log_file = os.path.join(self.path, "log.csv")
        self.best = CheckpointFolder(os.path.join(self.path, "best"))
        self.best_file = os.path.join(self.best.path, "best.json")
        self.ema = CheckpointFolder(os.path.join(self.path, "ema"))

    @classmethod
    def around(cls, checkpoint: str, task: str | None = None) -> RunFolder:
        """The folder of the run to which the path of a checkpoint belongs.

        The checkpoint may be in `best` or `ema`, and need not exist.
        """
        folder = os.path.dirname(checkpoint)
        return cls(os.path.dirname(folder) if os.path.basename(folder) in _WITH_CHECKPOINTS else folder, task)

    def __str__(self) -> str:
        return self.path

    def __fspath__(self) -> str:
        return self.path

    # ------------------------------------------------------------------------------------ configuration, vocabulary

    def has_config(self) -> bool:
        """Whether the folder has a `config.json`. A folder of the original program has none."""
        return tf.io.gfile.exists(self.config_file)

    def read_config(self) -> dict:
        """The content of `config.json`.

        Returns:
            Dictionary: `"data"` is what the run was trained on; `"model"` has the arguments of the model, without
            hyper-parameters that were removed from the library; the key of each vocabulary has the arguments of its
            `Vocab`; `"training"` has the settings of a run that was trained here.

        Raises:
            ParameterError: there is no such file, or a value in it is wrong.
        """
        if not self.has_config():
            message = f"model_dir {self} is not the folder of a run: {self.config_file} does not exist"
            raise ParameterError("model_dir", self.path, "the folder of a run", message)
        values = read_json(self.config_file, lambda values: family_in(values, self.task).check_config(values))
        return {**values, "model": family_in(values).config.without_removed(values["model"])}

    @property
    def family(self) -> Family:
        """The record of the family of the run. A folder without `config.json` contains a Transformer-XL."""
        return self._family or family_in(self.read_config() if self.has_config() else {})

    def load_vocabs(self) -> list[Vocab]:
        """The vocabularies of the run. Raises ParameterError if one is not the one that `config.json` records."""
        config = self.read_config()
        loaded = []
        for name, size_name in family_in(config).vocabs.items():
            file = self._vocab_file(name, config[name].get("level"))
            vocab = load_vocab(file, **config[name])
            if config.get("fingerprints", {}).get(name, vocab.fingerprint()) != vocab.fingerprint():
                message = f"{file} was changed or damaged: its fingerprint differs from the one in config.json"
                raise ParameterError(name, file, "the file that was written", message)
            if size_name is not None and len(vocab) != config["model"][size_name]:
                expected = config["model"][size_name]
                message = f"{file} has {len(vocab)} symbols, but config.json has model.{size_name}={expected}"
                raise ParameterError(name, len(vocab), [expected], message)
            loaded.append(vocab)
        return loaded

    def load_vocab(self) -> Vocab:
        """The vocabulary of a run that has exactly one."""
        (vocab,) = self.load_vocabs()
        return vocab

    def _vocab_file(self, name: str, level: str | None) -> str:
        """The path of the file of the vocabulary `name`, whose tokens have the level `level`."""
        return os.path.join(self.path, vocab_file(name, level))

    def write_config(self, config: dict, vocabs: list[Vocab]) -> None:
        """Writes `config.json` and, if there are no checkpoints yet, the vocabularies.

        Args:
            config: content of `config.json`. Fingerprints of the vocabularies are added.
            vocabs: the vocabularies.

        Raises:
            ParameterError: the folder is not yet that of a run, and a vocabulary would overwrite a file with other
                content.
        """
        by_name = dict(zip(family_in(config).vocabs, vocabs, strict=True))
        if not self.steps():
            files = {self._vocab_file(name, vocab.level): vocab for name, vocab in by_name.items()}
            for path, vocab in files.items() if not self.has_config() else ():
                check_not_overwritten(path, vocab.get_data())
            for path, vocab in files.items():
                vocab.save(path)
        fingerprints = {name: vocab.fingerprint() for name, vocab in by_name.items()}
        write_json(self.config_file, {**config, "fingerprints": {**config.get("fingerprints", {}), **fingerprints}})

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints, from oldest to newest. If there are none, those that another program wrote.

        The latter are named by the file `checkpoint`. Those whose files are missing do not count.
        """
        steps = self.steps()
        if steps:
            return [self.checkpoint(step) for step in steps]
        return [path for path in self._named_checkpoints() if tf.io.gfile.exists(f"{path}.index")]

    def _named_checkpoints(self) -> list[str]:
        """The paths of the checkpoints that the file `checkpoint` names. Their files may be missing."""
        with naming_read_errors(os.path.join(self.path, "checkpoint")):
            state = tf.train.get_checkpoint_state(self.path)
        return list(state.all_model_checkpoint_paths) if state else []

    def find_checkpoint(self, ckpt_path: str | os.PathLike | None = None) -> str:
        """The path of a checkpoint.

        Args:
            ckpt_path: path or name of a checkpoint, `"best"` or `"latest"`; `None`: the one that `load_run` opens by
                default.

        Raises:
            ParameterError: there is no such checkpoint. If it was given by path or name, the error is a CheckpointGone.
        """
        if ckpt_path is None:
            best = self.find_best() if self.family.default_checkpoint == "best" else None
            return best["path"] if best else self.find_checkpoint("latest")
        ckpt_path = os.fspath(ckpt_path)
        if ckpt_path == "latest":
            if self.steps():
                return self.checkpoint(self.steps()[-1])
            message = f"model_dir {named(self)} contains no checkpoint"
            if not tf.io.gfile.isdir(self.path):
                message += ": the folder does not exist"
            of_others = self._named_checkpoints()
            if of_others and tf.io.gfile.exists(f"{of_others[-1]}.index"):
                return of_others[-1]
            if of_others:
                missing = f"its file `checkpoint` names {of_others[-1]}, but {of_others[-1]}.index does not exist"
                message = f"model_dir {named(self)}: {missing}"
            raise ParameterError("model_dir", self.path, "a folder with a checkpoint", message)
        if ckpt_path == "best":
            best = self.find_best()
            if best is None:
                message = f"model_dir {named(self)} contains no best checkpoint: there was no validation yet"
                raise ParameterError("model_dir", self.path, "a folder with a best checkpoint", message)
            return best["path"]
        check_scheme("ckpt_path", ckpt_path)
        for path in (os.path.join(self.path, ckpt_path), ckpt_path):
            if tf.io.gfile.exists(f"{path}.index"):
                return path
        message = f"no checkpoint at {ckpt_path}, nor in {self}: {ckpt_path}.index does not exist"
        raise CheckpointGone("checkpoint", ckpt_path, "the path or the name of a checkpoint", message)

    def with_checkpoint(
        self, ckpt_path: str | os.PathLike | None, use: Callable[[str], Any], argument: str = "ckpt_path"
    ) -> Any:
        """Calls `use` with the path of a checkpoint, and returns its result.

        A training run in another process may delete the checkpoint before it is opened. If `use` raises CheckpointGone,
        the checkpoint is looked up again, and `use` is called again, up to `_ATTEMPTS` times in all. If the same
        checkpoint is found again, no process has deleted it: its files are missing.

        Args:
            ckpt_path: see `find_checkpoint`.
            use: function of a path.
            argument: name of the argument that chooses a checkpoint, for messages.

        Raises:
            ParameterError: there is no such checkpoint, or it is damaged. In the second case, the message names a
                complete one, if there is one.
        """
        gone = None
        for tries_left in reversed(range(_ATTEMPTS)):
            path = self.find_checkpoint(ckpt_path)
            try:
                check_exists(path)  # before `use`, which may print the path
                return use(path)
            except CheckpointGone:
                if path == gone or not tries_left:
                    raise
                gone = path
            except UnreadableCheckpoint as error:
                raise self.damaged_error(error, argument) from error

    def damaged_error(self, error: UnreadableCheckpoint, argument: str) -> ParameterError:
        """The error about a damaged checkpoint. Its message names the newest complete one as a value of `argument`."""
        path = error.value
        newest_first = (self.checkpoint(step) for step in reversed(self.steps()))
        complete = next((other for other in newest_first if other != path and _is_whole(other)), None)
        if complete is None:
            message = f"{error}\nno other checkpoint in {self} is complete"
            return ParameterError(argument, path, error.allowed, message)
        name = complete if argument == "ensemble" else os.path.basename(complete)  # `ensemble` is a list of paths
        message = f"{error}\n{complete} is complete: --{argument}={name} takes it"
        if path in self.checkpoints():
            message += f"; all programs take it once {path}.* are removed"
        return ParameterError(argument, path, [name], message)

    def name_of(self, path: str) -> str:
        """The name of a checkpoint for messages: "best, step 180", "latest, step 200", or else the path.

        The name of the latest says if a newer one is incomplete.
        """
        kinds = {"latest": self.checkpoints()[-1:], "best": [best["path"]] if (best := self.find_best()) else []}
        kind = next((kind for kind, paths in kinds.items() if path in paths), None)
        step = os.path.basename(path).rpartition("-")[2]
        if not kind:
            return path
        newest = max(self.steps(files="index|data.*"), default=0)  # an incomplete one has no index
        is_incomplete = kind == "latest" and self.steps() and newest > self.steps()[-1]
        return f"{kind}, step {step}" + (f" (ckpt-{newest} is incomplete)" if is_incomplete else "")

    def find_best(self) -> dict | None:
        """The best checkpoint: `{"path": ..., "step": ..., "val_loss": ...}`; `None` if there was no validation.

        Instead of "val_loss", there may be another metric, see `Family.monitor`. "text" is the fingerprint of the text
        of the validation, if it is recorded.
        """
        if not tf.io.gfile.exists(self.best_file):
            return None
        best = read_json(self.best_file, self.family.check_best)
        return {"path": self.best.checkpoint(best["step"]), **best}

    def stops_early(self, training: RunConfig, step: int, text: str | None = None) -> bool:
        """Whether training should stop: the best validation of the run was `patience` or more steps before `step`.

        It is false without `patience`, and if there was no validation.

        Args:
            training: settings of the training.
            step: the current step.
            text: fingerprint of the text of the validation. The best validation on another text does not count.
        """
        patience = training.patience or 0
        best = self.find_best() if patience else None
        if best is None or (text and best.get("text") not in (None, text)):
            return False
        return step - best["step"] >= patience

    def load_model(self, ckpt_path: str | os.PathLike | None = None, **changes) -> keras.Model:
        """The model of the run, not compiled. Arguments and errors: see `load_run`."""
        return self.load_model_for("ckpt_path", ckpt_path, **changes)

    def load_model_for(self, argument: str, ckpt_path: Any, /, **changes) -> keras.Model:
        """`load_model` with errors that name `argument` in place of `ckpt_path`."""
        family = self.family
        arguments = self._arguments_with(changes)

        def load(path: str) -> keras.Model:
            """Makes the model, and sets its weights from a checkpoint."""
            reader = CheckpointReader(path)
            self.check_size(arguments, reader)
            model = family.make(**arguments)
            self.check_parts(model)
            load_weights(model, reader)
            return model

        return self.with_checkpoint(ckpt_path, load, argument)

    def _arguments_with(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the model of the run, with `changes`.

        Args:
            changes: `{name: value}` of hyper-parameters and of `_OPTIONS`.

        Raises:
            UnknownArgumentError: a name is neither a hyper-parameter of the family nor an option.
            ParameterError: a value is wrong, or a hyper-parameter changes that is not `free`.
        """
        trained = self.read_config()["model"]
        arguments = {**trained, **changes}
        family = self.family
        config = family.config(**trained)
        can = f"it can change {', '.join(config.free)}"
        for name in changes:
            if name not in (*config.names(), *_OPTIONS):
                known = [*config.free, *_OPTIONS]
                message = f"model_dir {self} is of the family {family.name}, which has no {name}: {can}; load_run also "
                message += f"takes {', '.join(_OPTIONS)}.{did_you_mean(name, known)}"
                raise UnknownArgumentError(name, changes[name], known, message)
        changed = family.config(**{name: arguments[name] for name in config.names() if name in arguments})
        for name, (trained_value, value) in differing(config.to_dict(), changed.to_dict()).items():
            if name not in config.free:
                message = f"{name} must be {brief(trained_value)}, as in model_dir {self}, got {brief(value)}: {can}"
                raise ParameterError(name, value, [trained_value], message)
        return arguments

    def check_parts(self, model: keras.Model) -> None:
        """Raises ParameterError unless the model of the run had the same parts of a user's own classes as `model`."""
        trained_parts = self.read_config().get("own_parts", []) if self.has_config() else []
        parts = own_parts(model, count_keras=False)
        kind = type(model).__name__

        def without_number(part: str) -> str:
            """The part; of the model itself only the class, because Keras numbers the models of a class."""
            return kind if part.startswith(f"{kind} ") else part

        if list(map(without_number, parts)) != list(map(without_number, trained_parts)):
            message = (
                f"model_dir {self} was trained with {', '.join(trained_parts) or 'the parts of txl_tf alone'}, and "
                f"this program makes {', '.join(parts) or 'those of txl_tf'}: set the same classes before"
            )
            raise ParameterError("model_dir", parts, trained_parts, message)

    def check_size(self, model: dict, reader: CheckpointReader) -> None:
        """Raises ParameterError if hyper-parameters describe a model of more than twice the weights of a checkpoint.

        It must be called before the model is made, which might not fit into memory.

        Args:
            model: hyper-parameters of the run.
            reader: the checkpoint.
        """
        described = self.family.least_weights(model)
        n_weights = sum(math.prod(shape) for shape in reader.weight_shapes.values())
        if described > 2 * n_weights:
            message = (
                f"{self.config_file} describes a model of at least {described:,} weights, but {reader.path} contains "
                f"{n_weights:,}"
            )
            raise ParameterError("model_dir", self.path, "the folder of a model with the weights it holds", message)

    # -------------------------------------------------------------------------------------------------------- writing

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """In this block, which writes to the folder, it is locked against other runs.

        Makes the folder, checks that it can be written to, and removes temporary files of killed processes. After an
        error, a new folder is removed if it is empty.

        Raises:
            ParameterError: the folder is at an address, such as `hf://`, or TensorFlow cannot write to such a path.
            OSError: another process has locked it, or it or one of its files cannot be written to.
        """
        if self.address:
            message = f"model_dir {self.address} can be read only: give a new folder, and --init_from={self.address}"
            raise ParameterError("model_dir", self.address, "a folder to write to", message)
        self._check_path()
        with empty_removed_on_error(self.path):
            try:
                tf.io.gfile.makedirs(self.path)
                check_writable(self.config_file)
            except (OSError, tf.errors.OpError) as error:
                raise OSError(f"model_dir {named(self)} cannot be written to: {named(error)}") from error
            with lock(self.path, f"another run is training in model_dir {self}"):
                check_no_link(self.path, *_SUBFOLDERS, os.path.basename(self.log_file))
                self._check_files()
                if not is_remote(self.path):
                    remove_leftovers(self.path)
                yield

    def _check_files(self) -> None:
        """Raises OSError if a file in the folder has the name of a subfolder, or is a pipe or a socket."""
        for name in tf.io.gfile.listdir(self.path):
            path = os.path.join(self.path, name.rstrip("/"))
            if name.rstrip("/") in _SUBFOLDERS and not tf.io.gfile.isdir(path):
                raise OSError(f"{path} cannot be written: it must be a folder, and is a file. Move it away")
            if is_pipe(path):
                raise OSError(f"{path} cannot be read or written: it is a named pipe or a socket. Move it away")

    def _check_path(self, argument: str = "model_dir") -> None:
        """Raises ParameterError if the path is empty, is a part of another run, or is remote and a pattern.

        `argument`: see `check_new`.
        """
        if not self.path:
            raise ParameterError(argument, "", "the folder of the run", f"{argument} must name the folder of the run")
        if is_remote(self.path):  # local checkpoints with such names are read through links
            check_no_pattern(argument, self.path)
        if not self.has_config():
            check_spares_runs(argument, self.path)

    def check_new(
        self, vocabs: Sequence[Vocab] = (), family: Family | None = None, argument: str = "model_dir"
    ) -> None:
        """Checks that a new run can be written to the folder.

        Args:
            vocabs: vocabularies of the new run.
            family: its family.
            argument: name of the argument whose value is the folder, for the errors.

        Raises:
            ParameterError: the path is empty, or is remote and TensorFlow would take it for a pattern; the folder
                already contains a run (the remains of a `create` that was killed do not count); or a vocabulary would
                overwrite a file with other content.
        """
        self._check_path(argument)
        unfinished = self._unfinished_files()
        if unfinished is None and (self.has_config() or self._named_checkpoints() or self.steps()):
            message = f"{self} already contains a run: choose a new folder"
            raise ParameterError(argument, self.path, "a new folder", message)
        for name, vocab in zip((family or self.family).vocabs if vocabs else (), vocabs, strict=True):
            path = self._vocab_file(name, vocab.level)
            if os.path.basename(path) not in (unfinished or []):
                check_not_overwritten(path, vocab.get_data())

    def _unfinished_files(self) -> list[str] | None:
        """The file names of the vocabularies of an unfinished run: the process of its `create` was killed.

        `None` if the run is not unfinished.
        """
        path = os.path.join(self.path, CREATING)
        if is_remote(path) or os.path.islink(path) or not os.path.isfile(path):
            return None
        with naming_read_errors(path), open(path, encoding="utf-8", errors="replace") as file:
            return [name for name in file.read(10_000).split("\n") if re.fullmatch(r"\w+\.(txt|model)", name)]

    def _remove_unfinished(self) -> None:
        """Removes temporary files of killed processes and, if there is an unfinished run, its files.

        The caller must hold the lock.
        """
        vocab_files = self._unfinished_files()
        remove_leftovers(self.path)
        if vocab_files is None:
            return
        for step in self.steps(files="index|data.*"):
            delete_checkpoint(self.checkpoint(step))
        # `CREATING` comes last, because it says that the run is unfinished.
        for name in ("checkpoint", *vocab_files, "config.json", CREATING):
            remove(os.path.join(self.path, name))

    def create(
        self, data: dict, model: dict, vocabs: list[Vocab], trained: Any, step: int,
        fingerprints: dict | None = None, family: Family | None = None, init_from: dict | None = None,
        training: dict | None = None, finish: Callable[[], None] = lambda: None,
    ) -> str:  # fmt: skip
        """Writes a run that was not trained here, such as a converted one, to a new folder.

        A new run can start from the weights, but training cannot resume from them, because they have no optimizer.
        After an error, the folder is as it was before. If the process is killed in a local folder, the file `CREATING`
        remains, and the next call removes the files.

        Args:
            data, model: `"data"` and `"model"` of `config.json`.
            vocabs: the vocabularies.
            trained: the model; or its weights as `{name: weight}`, then `family` is required.
            step: step of the checkpoint.
            fingerprints: fingerprints of the splits of the text.
            family: the family. By default, that of the model.
            init_from: `"init_from"` of `config.json`.
            training: settings of the training that the weights come from. Evaluations and new runs use them.
            finish: function that is called when all is written, before the file `CREATING` is removed.

        Returns:
            The path of the checkpoint.

        Raises:
            ParameterError: the folder is not new, or no family has the class of the model.
            OSError: the folder cannot be written to.
        """
        if family is None:
            family = family_of_model(trained)
        self.check_new(vocabs, family)
        with contextlib.ExitStack() as stack:
            stack.enter_context(removed_on_error(self.path))
            with naming_write_errors(self.path):
                tf.io.gfile.makedirs(self.path)
            files = [self._vocab_file(name, vocab.level) for name, vocab in zip(family.vocabs, vocabs, strict=True)]
            creating = os.path.join(self.path, CREATING)
            if not is_remote(self.path):
                stack.enter_context(lock(self.path, f"another program is writing the run {self}"))
                self._remove_unfinished()
                self.check_new(vocabs, family)  # another program may have written here meanwhile
                stack.enter_context(removed_on_error(creating))
                write_atomic(creating, "\n".join(map(os.path.basename, files)))
            for path in (self.config_file, *files):
                stack.enter_context(removed_on_error(path))
            config = family.config_content(data, model, vocabs)
            parts = own_parts(trained, count_keras=False) if isinstance(trained, keras.Model) else []
            optional = {"init_from": init_from, "training": training, "own_parts": parts}
            given = {name: value for name, value in optional.items() if value}
            self.write_config({**config, "fingerprints": fingerprints or {}, **given}, vocabs)
            stack.enter_context(removed_on_error(os.path.join(self.path, "checkpoint")))
            stack.enter_context(self._deleted_on_error(step))
            path = self.save_weights(trained, step)
            finish()
            remove(creating)
            return path

    @contextlib.contextmanager
    def _deleted_on_error(self, step: int) -> Iterator[None]:
        """Deletes the checkpoint of a step, which must not exist before the block, if the block raises an error."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError, tf.errors.OpError):  # the first error counts
                delete_checkpoint(self.checkpoint(step))
            raise

    def is_unfinished(self) -> bool:
        """Whether a process was killed, or still runs, in `create` of this run."""
        return os.path.lexists(os.path.join(self.path, CREATING))


def logged_step(text: str | None) -> int | None:
    """Returns the step in a value of the column "step" of `log.csv`; `None` if the value is missing or no step."""
    if text is None or not text.isdecimal() or len(text) > 18:  # Python refuses to convert thousands of digits
        return None
    return int(text)


def _is_whole(path: str) -> bool:
    """Whether all arrays of a checkpoint can be read."""
    try:
        check_whole(path)
    except (CheckpointGone, UnreadableCheckpoint):
        return False
    return True
