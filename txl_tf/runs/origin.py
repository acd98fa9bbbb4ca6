"""Where a new run starts from: model, vocabularies and weights of another run (`init_from`).

A run that has checkpoints goes on from them. Its own folder then stands for the other one, which may be gone.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable

import keras

from txl_tf.config import Config, RunConfig
from txl_tf.data.vocabulary import Vocab
from txl_tf.files import same_path
from txl_tf.runs.families.record import Family
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.weights import checkpoint_step, load_weights
from txl_tf.schema import brief, differing

logger = logging.getLogger("txl_tf")

_MUCH = 0.05  # of a text that is unknown


class Origin:
    """What a training takes from the run that it starts from.

    Args:
        folder: of the run that is trained.
        init_from: path of the other run's.
        task: what its model must be for, see `Family`.

    Attributes:
        source: `RunFolder` to take everything from.
        config: its `config.json`.
        family, model: its record, and its hyper-parameters.
        goes_on: whether `folder` has checkpoints, and is `source`.

    Raises:
        ValueError: the folders are one, there is no run in the other, or `folder` holds a run of another origin.
    """

    def __init__(self, folder: RunFolder, init_from: str | os.PathLike, task: str | None = None):
        self.path = os.fspath(init_from)
        if same_path(self.path, folder.path):
            raise ValueError(f"model_dir must be another folder than init_from={self.path}, whose run stays as it is")
        check_origin(folder, self.path)
        self.goes_on = bool(folder.steps())
        self.source = RunFolder(folder.path if self.goes_on else self.path, task)
        if not self.source.has_config():
            raise ValueError(f"init_from must be the folder of a run, got {self.path}: it has no config.json")
        self.config, self.family = self.source.read_config(), self.source.family
        self.model = self.family.config(**self.config["model"])

    @functools.cached_property
    def vocabs(self) -> list[Vocab]:
        return self.source.load_vocabs()

    @property
    def settings(self) -> dict[str, dict]:
        """Group -> settings that the run has unless it is told otherwise: all of its own where it goes on.

        A new run takes the model, how text is read, and of the training what decides the batches.
        """
        config, family = self.config, self.family
        known = {**config["data"], **config.get("vocab", {})}
        training = config.get("training", {})
        if not self.goes_on:  # static shapes are the machine's
            taken = [name for name in (*family.batching, "eval_batch_size") if name != "static_shapes"]
            training = {name: training[name] for name in taken if name in training}
        return {
            "data": {name: known[name] for name in family.reading if name in known},
            "model": config["model"],
            "training": training,
        }

    def check(self, family: Family, model: Config, extends: bool = False) -> None:
        """Raises ValueError where the weights would not fit a model of these hyper-parameters, or where a vocabulary
        cannot be extended, if this run `extends` them.
        """
        if family is not self.family:
            raise ValueError(
                f"init_from {self.path} holds {self.family.described}, of the family {self.family.name}, got "
                f"{family.name} to train"
            )
        for vocab in self.vocabs if extends else ():
            vocab.check_extendable()
        for name, (before, now) in self._changes(model.to_dict()).items():
            if name not in self.model.free:
                raise ValueError(
                    f"{name} must be {brief(before)}, as in {self.path}, got {brief(now)}: its weights fit no other. "
                    f"init_from can change {', '.join(self.model.free)}"
                )

    def _changes(self, model: dict) -> dict[str, tuple]:
        """Hyper-parameter -> its values before and now, where they differ; not where the data will decide it."""
        found = differing(self.model.to_dict(), model)
        unknown = ("n_bigram",) + tuple(name for name in model if model[name] is None or model[name] == ())
        return {name: pair for name, pair in found.items() if name in self.model.free or name not in unknown}

    def checkpoint(self, training: RunConfig) -> str:
        """Path of the checkpoint whose weights are taken: `warm_start_path`, or else the run's default."""
        return self.source.find_checkpoint(training.warm_start_path)

    def record(self, training: RunConfig) -> dict:
        """`"init_from"` of `config.json`."""
        if self.goes_on:
            return self.config["init_from"]
        return {"model_dir": self.path, "checkpoint": self._name(self.checkpoint(training))}

    def _name(self, path: str) -> str:
        return path.removeprefix(f"{self.source.path.rstrip('/')}/")

    def say_unknown(self, counts: dict[str, tuple[int, int]], unk: str, of_note: Iterable[str] | None = None) -> None:
        """Logs how much of the new text is unknown; as a warning where it is much.

        Args:
            counts: parts of the text, such as "characters" -> how many of them are unknown, and how many there are.
            unk: the unknown symbol.
            of_note: the parts that are worth a warning; by default all.
        """
        shares = {part: unknown / max(total, 1) for part, (unknown, total) in counts.items()}
        said = " and ".join(f"{share:.2%} of the {part}" for part, share in shares.items())
        said += f" {'is' if [*shares] == ['text'] else 'are'} {unk}" if shares else ""
        if any(shares[part] > _MUCH for part in (shares if of_note is None else of_note)):
            logger.warning(
                f"{said}: the vocabulary of init_from={self.path} lacks many symbols of the new text. extend_vocab "
                "gives them rows of their own"
            )
        elif said:
            logger.info(said)

    def say_extended(self, vocabs: list[Vocab], where: str = "") -> None:
        """Logs by how many symbols `vocabs` are longer than those of the other run, and where the new rows are."""
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
        anew: tuple[str, ...] = (),
    ) -> None:
        """Sets the weights, but for those whose names begin with one of `anew`; says what was taken and changed.

        Also says which sizes of batches the other run does not record, as a converted one, and what they are here.
        """

        def read(path):
            load_weights(model, path, leave_out=anew, extend=training.extend_vocab)
            return path

        path = self.source.with_checkpoint(training.warm_start_path, read, "warm_start_path")
        changes = self._changes(config.to_dict())
        changes.pop("target_lengths", None)  # the text says them
        for name, before in self.settings["training"].items():
            if getattr(training, name, before) != before:  # an evaluation's is not of the training
                changes[name] = (before, getattr(training, name))
        shown = [f"{name} {_shown(before)} -> {_shown(now)}" for name, (before, now) in changes.items()]
        said = [f"step {checkpoint_step(path):,}, {os.path.dirname(self._name(path)) or 'latest'}"]
        said += [f"changed: {', '.join(shown)}"] * bool(shown)
        said += [f"new weights: {', '.join(anew)}"] * bool(anew)
        logger.info("init_from %s: %s", self.path, "; ".join(said))
        here = {**(final.to_dict() if final else {}), **training.to_dict()}
        recorded = self.config.get("training", {})
        sizes = [name for name in (*self.family.batching, "eval_batch_size") if type(here.get(name)) is int]
        unsaid = [name for name in sizes if name not in recorded]
        if unsaid:
            values = ", ".join(f"{name} {here[name]}" for name in unsaid)
            logger.info("%s does not record %s; here: %s", self.path, ", ".join(unsaid), values)


def check_origin(folder: RunFolder, init_from: str | None) -> None:
    """Raises ValueError where a folder has checkpoints of a run that started from something else than `init_from`."""
    if not folder.steps():
        return
    found = (folder.read_config() if folder.has_config() else {}).get("init_from")
    if found and not init_from:
        raise ValueError(f"the run in {folder} started from another: go on with init_from={found['model_dir']}")
    if init_from and not (found and same_path(found["model_dir"], init_from)):
        started = f"started from {found['model_dir']}" if found else "did not start from another"
        raise ValueError(
            f"model_dir {folder} holds a run that {started}, got init_from={init_from}: choose a new folder"
        )


def _shown(value):
    return f"{len(value)}" if isinstance(value, list) else value
