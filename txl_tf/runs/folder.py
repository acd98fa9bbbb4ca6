"""The folder of a run. `RunFolder` alone knows what lies where:

config.json              family, data, model, vocabulary and training, see `txl_tf.config`
vocab.txt                a symbol a line, in the order of the ids; of subwords vocab.model; of pairs source_vocab.txt ..
ckpt-<step>.*            checkpoints, and `checkpoint`, which names them to other programs
best/ckpt-<step>.*       weights with the best validation; best.json says which loss, or F1
ema/ckpt-<step>.*        moving average of the weights at the end of the training
log.csv, train/          curves
tracker.json             id of the run where a tracker follows it
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from txl_tf.config import RunConfig
from txl_tf.data.subwords import load_vocab, vocab_file
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError, UnknownArgumentError, named, shortened
from txl_tf.files import (
    check_kept,
    check_no_link,
    check_no_pattern,
    check_writable,
    is_pipe,
    is_remote,
    lock,
    read_json,
    reading,
    remove,
    remove_leftovers,
    removed_on_error,
    write_atomic,
    write_json,
    writing,
)
from txl_tf.nn.parts import own_parts
from txl_tf.runs.families.record import Family, family_in, family_of_model
from txl_tf.runs.weights import (
    CheckpointFolder,
    CheckpointGone,
    CheckpointReader,
    UnreadableCheckpoint,
    check_whole,
    delete_checkpoint,
    load_weights,
)
from txl_tf.schema import brief, did_you_mean, differing

CREATING = "creating.tmp"  # exists in the folder of a run while `RunFolder.create` writes it
_ATTEMPTS = 10  # to open a checkpoint of a run that is trained meanwhile and deletes its old ones
_EVENTS = ("train", "validation")  # folders of TensorBoard's files
_OPTIONS = ("dtype", "name", "recompute", "seed", "trainable")  # of models, besides their hyper-parameters


def load_run(model_dir: str | os.PathLike, ckpt_path: str | None = None, **changes: Any) -> tuple[Any, Any]:
    """A trained, converted or averaged run, ready to score and generate.

    Args:
        model_dir: the run's folder.
        ckpt_path: a checkpoint of it by path or name, `"best"` or `"latest"`. By default that of the training's last
            evaluation: of a tagger the best, where there was a validation; of others the latest.
        **changes: arguments of the model to use instead of the run's own, such as `mem_len`.

    Returns:
        `(lm, vocab)`: the language model, not compiled, and its `Vocab`. Of an encoder-decoder, `(model,
        [source_vocab, target_vocab])`; of a tagger, `(tagger, [vocab, bigram_vocab])` and, of FLAT, the words of the
        lexicon as a third.

    Raises:
        ValueError: it is no run's folder, there is no such checkpoint or it is of another model.
    """
    folder = RunFolder(model_dir)
    vocabs = folder.load_vocabs()
    return folder.load_model(ckpt_path, **changes), vocabs[0] if len(vocabs) == 1 else vocabs


class RunFolder(CheckpointFolder):
    """The folder of a run, local or remote. Its methods raise ValueError that names the folder and what is missing.

    Args:
        model_dir: its path.
        task: what the model of the run must be for, see `Family`; `None` for anything.
        family: of a run that is about to be made; else `config.json` says it.
    """

    def __init__(self, model_dir: str | os.PathLike, task: str | None = None, family: Family | None = None):
        super().__init__(os.fspath(model_dir))
        self.task, self._family = family.task if family else task, family
        self.config_file = os.path.join(self.path, "config.json")
        self.log_file = os.path.join(self.path, "log.csv")
        self.best = CheckpointFolder(os.path.join(self.path, "best"))
        self.best_file = os.path.join(self.best.path, "best.json")
        self.ema = CheckpointFolder(os.path.join(self.path, "ema"))

    @classmethod
    def around(cls, checkpoint: str, task: str | None = None) -> RunFolder:
        """The folder of the run that has a checkpoint, perhaps in `best` or `ema`. It may not be there."""
        folder = os.path.dirname(checkpoint)
        return cls(os.path.dirname(folder) if os.path.basename(folder) in ("best", "ema") else folder, task)

    def __str__(self) -> str:
        return self.path

    def __fspath__(self) -> str:
        return self.path

    # ------------------------------------------------------------------------------------ configuration, vocabulary

    def has_config(self) -> bool:
        """Whether there is a `config.json`, which a folder of the original program does not have."""
        return tf.io.gfile.exists(self.config_file)

    def read_config(self) -> dict:
        """`config.json`: `"data"`, what the run was trained on; `"model"` and the vocabularies, arguments of the model
        and of `Vocab`; and, if the run was trained here, `"training"`.
        """
        if not self.has_config():
            message = f"model_dir {self} is not the folder of a run: {self.config_file} does not exist"
            raise ValueError(shortened(message))
        values = read_json(self.config_file, lambda values: family_in(values, self.task).check_config(values))
        return {**values, "model": family_in(values).config.without_removed(values["model"])}

    @property
    def family(self) -> Family:
        """The record of the run's family. A folder of the original program holds a Transformer-XL."""
        return self._family or family_in(self.read_config() if self.has_config() else {})

    def load_vocabs(self) -> list[Vocab]:
        """The vocabularies of the run."""
        config, loaded = self.read_config(), []
        for name, size in family_in(config).vocabs.items():
            file = self._vocab_file(name, config[name].get("level"))
            vocab = load_vocab(file, **config[name])
            if config.get("fingerprints", {}).get(name, vocab.fingerprint()) != vocab.fingerprint():
                raise ValueError(f"{file} is not as it was written: config.json has another fingerprint of it")
            if size is not None and len(vocab) != config["model"][size]:
                raise ValueError(
                    f"{file} has {len(vocab)} symbols, but config.json says model.{size} {config['model'][size]}"
                )
            loaded.append(vocab)
        return loaded

    def load_vocab(self) -> Vocab:
        """The vocabulary of the run, which has one."""
        (vocab,) = self.load_vocabs()
        return vocab

    def _vocab_file(self, name: str, level: str | None) -> str:
        return os.path.join(self.path, vocab_file(name, level))

    def describe(self, config: dict, vocabs: list[Vocab]) -> None:
        """Writes `config.json` and, while there is no checkpoint that depends on them, the vocabularies."""
        named = dict(zip(family_in(config).vocabs, vocabs, strict=True))
        if not self.steps():
            for name, vocab in named.items():
                vocab.save(self._vocab_file(name, vocab.level))
        fingerprints = {name: vocab.fingerprint() for name, vocab in named.items()}
        write_json(self.config_file, {**config, "fingerprints": {**config.get("fingerprints", {}), **fingerprints}})

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def checkpoints(self) -> list[str]:
        """Paths of the checkpoints, from oldest to newest; the original program's too."""
        steps = self.steps()
        if steps:
            return [self.checkpoint(step) for step in steps]
        with reading(os.path.join(self.path, "checkpoint")):
            state = tf.train.get_checkpoint_state(self.path)
        return list(state.all_model_checkpoint_paths) if state else []

    def find_checkpoint(self, ckpt_path: str | None = None) -> str:
        """The path of a checkpoint: see `load_run` for what `ckpt_path` may be."""
        if ckpt_path is None:
            best = self.find_best() if self.family.default_checkpoint == "best" else None
            return best["path"] if best else self.find_checkpoint("latest")
        if ckpt_path == "latest":
            if not self.checkpoints():
                raise ValueError(f"model_dir {named(self)} holds no checkpoint")
            return self.checkpoints()[-1]
        if ckpt_path == "best":
            best = self.find_best()
            if best is None:
                raise ValueError(f"model_dir {named(self)} holds no best checkpoint: there was no validation yet")
            return best["path"]
        for path in (os.path.join(self.path, ckpt_path), ckpt_path):
            if tf.io.gfile.exists(f"{path}.index"):
                return path
        message = f"no checkpoint at {ckpt_path}, nor in {self}: {ckpt_path}.index does not exist"
        raise CheckpointGone(shortened(message))

    def with_checkpoint(self, ckpt_path: str | None, use: Callable[[str], Any], argument: str = "ckpt_path") -> Any:
        """`use(path)`, where `path` is that of `find_checkpoint`.

        A run that is trained may delete the checkpoint before it is opened. Then `use` gets its successor.

        Raises:
            ParameterError: it is damaged. The message says which one is complete; `argument` is what names one.
        """
        for left in reversed(range(_ATTEMPTS)):
            path = self.find_checkpoint(ckpt_path)
            try:
                return use(path)
            except CheckpointGone:
                if not left:
                    raise
            except UnreadableCheckpoint as error:
                raise self.way_out(error, argument) from error

    def way_out(self, error: UnreadableCheckpoint, argument: str) -> ParameterError:
        """The error of a damaged checkpoint, with the newest checkpoint that is complete for an `argument`."""
        path, others = error.value, (self.checkpoint(step) for step in reversed(self.steps()))
        whole = next((other for other in others if other != path and _is_whole(other)), None)
        if whole is None:
            message = f"{error}\nno other checkpoint in {self} is complete"
            return ParameterError(argument, path, error.allowed, message)
        name = os.path.basename(whole)
        message = f"{error}\n{whole} is complete: --{argument}={name} takes it"
        if path in self.checkpoints():
            message += f"; all programs take it once {path}.* are removed"
        return ParameterError(argument, path, [name], message)

    def name_of(self, path: str) -> str:
        """What a checkpoint is, for messages: "best, step 180"; its path where it is neither best nor latest."""
        kinds = {"latest": self.checkpoints()[-1:], "best": [best["path"]] if (best := self.find_best()) else []}
        kind = next((kind for kind, paths in kinds.items() if path in paths), None)
        step = os.path.basename(path).rpartition("-")[2]
        if not kind:
            return path
        started = max(self.steps(files="index|data.*"), default=0)
        incomplete = kind == "latest" and self.steps() and started > self.steps()[-1]
        return f"{kind}, step {step}" + (f" (ckpt-{started} is incomplete)" if incomplete else "")

    def find_best(self) -> dict | None:
        """`"path"`, `"step"` and what is monitored, such as `"val_loss"`, of the best checkpoint; or `None`."""
        if not tf.io.gfile.exists(self.best_file):
            return None
        best = read_json(self.best_file, self.family.check_best)
        return {"path": self.best.checkpoint(best["step"]), **best}

    def stops_early(self, training: RunConfig, step: int, text: str | None = None) -> bool:
        """Whether a run has had no better validation for as long as it has patience, after that at `step`.

        `text` is the fingerprint of what it is validated on: the best of another text says nothing.
        """
        patience = getattr(training, "patience", None)
        best = self.find_best() if patience else None
        if best is None or (text and best.get("text") not in (None, text)):
            return False
        return step - best["step"] >= patience

    def load_model(self, ckpt_path: str | None = None, **changes) -> keras.Model:
        """The model of the run, not compiled; see `load_run` for the arguments."""
        family, trained = self.family, self.read_config()["model"]
        arguments, config = {**trained, **changes}, family.config(**trained)
        can = f"it can change {', '.join(config.free)}"
        for name in changes:
            if name not in (*config.names(), *_OPTIONS):
                known = [*config.free, *_OPTIONS]
                message = f"model_dir {self} is of the family {family.name}, which has no {name}: {can}; load_run also "
                message += f"takes {', '.join(_OPTIONS)}.{did_you_mean(name, known)}"
                raise UnknownArgumentError(name, changes[name], known, message)
        changed = family.config(**{name: arguments[name] for name in config.names() if name in arguments})
        for name, (before, now) in differing(config.to_dict(), changed.to_dict()).items():
            if name not in config.free:
                raise ValueError(f"{name} must be {brief(before)}, as in model_dir {self}, got {brief(now)}: {can}")

        def load(path):
            reader = CheckpointReader(path)
            self.check_size(arguments, reader)
            model = family.make(**arguments)
            self.check_parts(model)
            load_weights(model, reader)
            return model

        return self.with_checkpoint(ckpt_path, load)

    def check_parts(self, model: keras.Model) -> None:
        """Raises ParameterError unless a user's own parts of the model are those that the run was trained with."""
        trained = self.read_config().get("own_parts", []) if self.has_config() else []
        found = own_parts(model, of_keras=False)
        if found != trained:
            message = (
                f"model_dir {self} was trained with {', '.join(trained) or 'the parts of txl_tf alone'}, and this "
                f"program makes {', '.join(found) or 'those of txl_tf'}: set the same classes before"
            )
            raise ParameterError("model_dir", found, trained, message)

    def check_size(self, model: dict, reader: CheckpointReader) -> None:
        """Raises ValueError where `config.json` describes a far larger model than the checkpoint holds.

        Call it before the model is made, which might not fit into memory.
        """
        described = self.family.least_weights(model)
        found = sum(math.prod(shape) for shape in reader.weight_shapes.values())
        if described > 2 * found:
            raise ValueError(
                f"{self.config_file} describes a model of at least {described:,} weights, but {reader.path} holds "
                f"{found:,}"
            )

    # -------------------------------------------------------------------------------------------------------- writing

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Makes the folder, checks that it can be written to, and keeps other runs out of it."""
        self._check_path()
        try:
            tf.io.gfile.makedirs(self.path)
            check_writable(self.config_file)
        except (OSError, tf.errors.OpError) as error:
            raise OSError(f"model_dir {named(self)} cannot be written to: {named(error)}") from error
        with lock(self.path, f"another run is training in model_dir {self}"):
            check_no_link(self.path, "best", "ema", *_EVENTS, os.path.basename(self.log_file))
            self._check_files()
            if not is_remote(self.path):
                remove_leftovers(self.path)
            yield

    def _check_files(self) -> None:
        """Raises OSError where a file is in the place of a folder, or a pipe in that of a file."""
        for name in tf.io.gfile.listdir(self.path):
            path = os.path.join(self.path, name.rstrip("/"))
            if name.rstrip("/") in ("best", "ema", *_EVENTS) and not tf.io.gfile.isdir(path):
                raise OSError(f"{path} cannot be written: it must be a folder, and is a file. Move it away")
            if is_pipe(path):
                raise OSError(f"{path} cannot be read or written: it is a named pipe or a socket. Move it away")

    def _check_path(self) -> None:
        if not self.path:
            raise ValueError("model_dir must name the folder of the run")
        if is_remote(self.path):  # local checkpoints are read through links of other names
            check_no_pattern("model_dir", self.path)

    def check_new(self, vocabs: list[Vocab] = (), family: Family | None = None) -> None:
        """Raises ValueError if the folder is not named, holds a run, or a file that the vocabularies of a new one, of
        `family`, would be written over.
        """
        self._check_path()
        unfinished = self._unfinished_files()
        if unfinished is None and (self.has_config() or self.checkpoints()):
            raise ValueError(f"{self} already holds a run: choose a new folder")
        for name, vocab in zip((family or self.family).vocabs if vocabs else (), vocabs, strict=True):
            path = self._vocab_file(name, vocab.level)
            if os.path.basename(path) not in (unfinished or []):
                check_kept(path, vocab.get_data())

    def _unfinished_files(self) -> list[str] | None:
        """Names of the vocabularies that `create` was writing when its process was killed; `None` if it was not."""
        path = os.path.join(self.path, CREATING)
        if is_remote(path) or os.path.islink(path) or not os.path.isfile(path):
            return None
        with reading(path), open(path, encoding="utf-8", errors="replace") as file:
            return [name for name in file.read(10_000).split("\n") if re.fullmatch(r"\w+\.(txt|model)", name)]

    def _remove_unfinished(self) -> None:
        """Removes what a killed `create` has written. The caller holds the lock."""
        vocab_files = self._unfinished_files()
        remove_leftovers(self.path)
        if vocab_files is None:
            return
        for step in self.steps(files="index|data.*"):
            delete_checkpoint(self.checkpoint(step))
        for name in (
            "checkpoint",
            *vocab_files,
            "config.json",
            CREATING,
        ):  # the last one says that the run is unfinished
            remove(os.path.join(self.path, name))

    def create(
        self, data: dict, model: dict, vocabs: list[Vocab], trained: keras.Model | dict[str, tf.Tensor], step: int,
        fingerprints: dict | None = None, family: Family | None = None, init_from: dict | None = None,
        training: dict | None = None, finish: Callable[[], None] = lambda: None,
    ) -> str:  # fmt: skip
        """Writes a run that was not trained here, in a new folder; returns the path of its checkpoint.

        `trained` is a model, or its weights by name where `family` says of what model. `training` are the settings of
        the training that the weights come from, which evaluations and new runs take.
        A new run can start from its weights, but training cannot go on from it. An error leaves what was there before.
        If the process is killed, the next call removes what it has written: the file `CREATING` says so. `finish` is
        called before that file is removed.
        """
        family = family or family_of_model(trained)
        self.check_new(vocabs, family)
        with contextlib.ExitStack() as stack:
            stack.enter_context(removed_on_error(self.path))
            with writing(self.path):
                tf.io.gfile.makedirs(self.path)
            files = [self._vocab_file(name, vocab.level) for name, vocab in zip(family.vocabs, vocabs, strict=True)]
            creating = os.path.join(self.path, CREATING)
            if not is_remote(self.path):
                stack.enter_context(lock(self.path, f"another program is writing the run {self}"))
                self._remove_unfinished()
                self.check_new(vocabs, family)  # another program may have been faster
                stack.enter_context(removed_on_error(creating))
                write_atomic(creating, "\n".join(map(os.path.basename, files)))
            for path in (self.config_file, *files):
                stack.enter_context(removed_on_error(path))
            config = family.describe(data, model, vocabs)
            parts = own_parts(trained, of_keras=False) if isinstance(trained, keras.Model) else []
            known = {"init_from": init_from, "training": training, "own_parts": parts}
            known = {name: value for name, value in known.items() if value}
            self.describe({**config, "fingerprints": fingerprints or {}, **known}, vocabs)
            path = self.save_weights(trained, step)
            finish()
            remove(creating)
            return path

    def is_unfinished(self) -> bool:
        """Whether a process was killed while it created the run."""
        return os.path.lexists(os.path.join(self.path, CREATING))


def _is_whole(path: str) -> bool:
    try:
        check_whole(path)
    except (CheckpointGone, UnreadableCheckpoint):
        return False
    return True
