"""`Origin`: the run from which a new run takes its model, vocabularies and weights (`init_from`).

A run that has checkpoints resumes from them. It then reads everything from its own folder: the other one may be gone.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from typing import Any

import keras

from txl_tf.config import Config, RunConfig
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError, brief
from txl_tf.files import same_path
from txl_tf.nn.lora import is_low_rank
from txl_tf.runs.families.record import Family
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.weights import checkpoint_step, load_weights, weights_by_name
from txl_tf.schema import differing

logger = logging.getLogger("txl_tf")

_LORA = ("lora_rank", "lora_alpha")  # a run without LoRA can start one that has it
_MUCH_UNKNOWN = 0.05  # share of a text that is worth a warning


class Origin:
    """The run that a training starts from.

    Args:
        folder: folder of the run that is trained.
        init_from: path of the folder of the other run.
        task: task that its model must have, see `Family`.

    Attributes:
        path: `init_from`.
        source: `RunFolder` from which everything is read.
        config: its `config.json`.
        family, model: its record and its hyper-parameters.
        goes_on: whether the training resumes: `folder` has checkpoints, and `source` is the same folder.

    Raises:
        ParameterError: both folders are the same, the other one holds no run, or `folder` holds a run that started from
            another one.
    """

    source: RunFolder
    config: dict[str, Any]
    family: Family
    model: Any  # a `Config`, of the class `family.config`
    goes_on: bool

    def __init__(self, folder: RunFolder, init_from: str | os.PathLike, task: str | None = None):
        self.path = os.fspath(init_from)
        if same_path(self.path, folder.path):
            allowed = f"another folder than init_from={self.path}, whose run stays as it is"
            raise ParameterError("model_dir", folder.path, allowed, f"model_dir must be {allowed}")
        check_origin(folder, self.path)
        self.goes_on = bool(folder.steps())
        self.source = RunFolder(folder.path if self.goes_on else self.path, task)
        if not self.source.has_config():
            message = f"init_from must be the folder of a run, got {self.path}: it has no config.json"
            raise ParameterError("init_from", self.path, "the folder of a run", message)
        self.config = self.source.read_config()
        self.family = self.source.family
        self.model = self.family.config(**self.config["model"])

    @functools.cached_property
    def vocabs(self) -> list[Vocab]:
        """The vocabularies of the other run."""
        return self.source.load_vocabs()

    @property
    def settings(self) -> dict[str, dict]:
        """`{group: settings}`, the defaults of the run: all settings of the training that it resumes.

        A new run takes the model, the settings of reading, and those settings of the training that decide the batches.
        """
        known = {**self.config["data"], **self.config.get("vocab", {})}
        training = self.config.get("training", {})
        if not self.goes_on:  # static shapes depend on the machine
            taken = [name for name in (*self.family.batching, "eval_batch_size") if name != "static_shapes"]
            training = {name: training[name] for name in taken if name in training}
        return {
            "data": {name: known[name] for name in self.family.reading if name in known},
            "model": self.config["model"],
            "training": training,
        }

    def check(self, family: Family, model: Config, extends: bool = False) -> None:
        """Checks that the weights fit a model of a family with these hyper-parameters.

        Args:
            family: the family of the run that is trained.
            model: its hyper-parameters.
            extends: whether this run extends the vocabularies.

        Raises:
            ParameterError: a hyper-parameter differs that decides shapes, or a vocabulary cannot be extended.
        """
        if family is not self.family:
            message = (
                f"init_from {self.path} holds {self.family.described}, of the family {self.family.name}, got "
                f"{family.name} to train"
            )
            raise ParameterError("init_from", self.path, f"a run of the family {family.name}", message)
        if extends:
            for vocab in self.vocabs:
                vocab.check_extendable()
        for name, (before, now) in self._changes(model.to_dict()).items():
            if name not in self.model.free and not (name in _LORA and not getattr(self.model, "lora_rank", 0)):
                message = (
                    f"{name} must be {brief(before)}, as in {self.path}, got {brief(now)}: its weights fit no other. "
                    f"init_from can change {', '.join(self.model.free)}"
                )
                raise ParameterError(name, now, [before], message)

    def _changes(self, model: dict) -> dict[str, tuple]:
        """`{hyper-parameter: (value there, value here)}` where both differ, without those that the data will decide."""
        found = differing(self.model.to_dict(), model)
        unknown = ("n_bigram",) + tuple(name for name in model if model[name] is None or model[name] == ())
        return {name: pair for name, pair in found.items() if name in self.model.free or name not in unknown}

    def checkpoint(self, training: RunConfig) -> str:
        """The path of the checkpoint whose weights are taken: `warm_start_path`, or the default of the run."""
        return self.source.find_checkpoint(training.warm_start_path)

    def record(self, training: RunConfig) -> dict:
        """The value of `"init_from"` in `config.json`."""
        if self.goes_on:
            return self.config["init_from"]
        return {"model_dir": self.path, "checkpoint": self._name(self.checkpoint(training))}

    def _name(self, path: str) -> str:
        return path.removeprefix(f"{self.source.path.rstrip('/')}/")

    def say_unknown(self, counts: dict[str, tuple[int, int]], unk: str, of_note: Iterable[str] | None = None) -> None:
        """Logs which share of the new text is unknown. A large share is a warning.

        Args:
            counts: `{part of the text, such as "characters": (number of unknown ones, number of all)}`.
            unk: the unknown symbol.
            of_note: the parts that can cause a warning; by default all.
        """
        shares = {part: unknown / max(total, 1) for part, (unknown, total) in counts.items()}
        said = " and ".join(f"{share:.2%} of the {part}" for part, share in shares.items())
        said += f" {'is' if [*shares] == ['text'] else 'are'} {unk}" if shares else ""
        if any(shares[part] > _MUCH_UNKNOWN for part in (shares if of_note is None else of_note)):
            logger.warning(
                f"{said}: the vocabulary of init_from={self.path} lacks many symbols of the new text. extend_vocab "
                "gives them rows of their own"
            )
        elif said:
            logger.info(said)

    def say_extended(self, vocabs: list[Vocab], where: str = "") -> None:
        """Logs how many symbols `vocabs` add to the vocabularies of the other run, and where the new rows are."""
        added = (
            f"{len(now) - len(before):,} symbols to the {len(before):,} of {name}"
            for name, before, now in zip(self.family.vocabs, self.vocabs, vocabs, strict=False)
        )
        logger.info(f"extend_vocab adds {' and '.join(added)}{where}")

    def load(
        self,
        model: keras.Model,
        config: Config,
        training: RunConfig,
        final: Config | None = None,
        new_weights: tuple[str, ...] = (),
    ) -> None:
        """Sets the weights of `model`, and logs which checkpoint they come from and which settings have changed.

        Also logs the sizes of batches that the other run does not record, as a converted one does not, and their values
        here.

        Args:
            model: the model to train.
            config, training, final: its settings.
            new_weights: beginnings of the names of weights that keep their initial values.
        """

        lora: list[str] = []
        if not getattr(self.model, "lora_rank", 0):  # its updates are new, too
            lora = [name for name, weight in weights_by_name(model).items() if is_low_rank(weight)]

        def read(path: str) -> str:
            load_weights(model, path, leave_out=(*new_weights, *lora), extend=training.extend_vocab)
            return path

        path = self.source.with_checkpoint(training.warm_start_path, read, "warm_start_path")
        changes = self._changes(config.to_dict())
        changes.pop("target_lengths", None)  # the text says them
        for name, before in self.settings["training"].items():
            if getattr(training, name, before) != before:  # settings of the evaluation are not in `training`
                changes[name] = (before, getattr(training, name))
        shown = [f"{name} {_shown(before)} -> {_shown(now)}" for name, (before, now) in changes.items()]
        said = [f"step {checkpoint_step(path):,}, {os.path.dirname(self._name(path)) or 'latest'}"]
        if shown:
            said.append(f"changed: {', '.join(shown)}")
        if new_weights:
            said.append(f"new weights: {', '.join(new_weights)}")
        logger.info("init_from %s: %s", self.path, "; ".join(said))
        here = {**(final.to_dict() if final else {}), **training.to_dict()}
        recorded = self.config.get("training", {})
        sizes = [name for name in (*self.family.batching, "eval_batch_size") if type(here.get(name)) is int]
        unsaid = [name for name in sizes if name not in recorded]
        if unsaid:
            values = ", ".join(f"{name} {here[name]}" for name in unsaid)
            logger.info("%s does not record %s; here: %s", self.path, ", ".join(unsaid), values)


def check_origin(folder: RunFolder, init_from: str | None) -> None:
    """Raises ParameterError where a folder has checkpoints of a run that did not start from `init_from`."""
    if not folder.steps():
        return
    found = (folder.read_config() if folder.has_config() else {}).get("init_from")
    if found and not init_from:
        message = f"the run in {folder} started from another: go on with init_from={found['model_dir']}"
        raise ParameterError("init_from", init_from, [found["model_dir"]], message)
    if init_from and not (found and same_path(found["model_dir"], init_from)):
        started = f"started from {found['model_dir']}" if found else "did not start from another"
        message = f"model_dir {folder} holds a run that {started}, got init_from={init_from}: choose a new folder"
        raise ParameterError("model_dir", folder.path, "a new folder", message)


def _shown(value: Any) -> Any:
    """A value as the log shows it: of a long list its length."""
    return f"{len(value)}" if isinstance(value, list) else value
