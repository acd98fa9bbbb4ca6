"""`Origin`: the run from which a new run takes its model, vocabularies and weights (`init_from`).

A run that has checkpoints resumes from them. It then reads everything from its own folder, because the other one may
have been deleted.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from typing import Any

import keras

from txl_tf.config import Config, RunConfig
from txl_tf.data.vocabulary import MUCH_UNKNOWN, Vocab
from txl_tf.errors import ParameterError, brief
from txl_tf.files import same_path
from txl_tf.nn.lora import is_low_rank
from txl_tf.runs.families.record import Family
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.weights import checkpoint_step, load_weights, weights_by_name
from txl_tf.schema import differing

logger = logging.getLogger("txl_tf")

_LORA = ("lora_rank", "lora_alpha")  # a run with LoRA can start from a run without it


class Origin:
    """The other run from which a run takes its model, vocabularies and weights.

    Args:
        folder: folder of the run that is trained.
        init_from: path of the folder of the other run.
        task: task that the other run's model must have, see `Family`.

    Attributes:
        path: `init_from`.
        source: `RunFolder` from which everything is read: that of `init_from` or, if the training resumes, `folder`
            itself.
        config: the `config.json` of `source`.
        family, model: family and hyper-parameters of `source`.
        resumes: whether the training resumes, because `folder` has checkpoints.

    Raises:
        ParameterError: both folders are the same, `init_from` contains no run of this task, or `folder` contains a run
            that did not start from `init_from`.
    """

    source: RunFolder
    config: dict[str, Any]
    family: Family
    model: Any  # a `Config`, of the class `family.config`
    resumes: bool

    def __init__(self, folder: RunFolder, init_from: str | os.PathLike, task: str | None = None):
        self.path = os.fspath(init_from)
        if same_path(self.path, folder.path):
            allowed = f"another folder than init_from={self.path}, whose run stays as it is"
            raise ParameterError("model_dir", folder.path, allowed, f"model_dir must be {allowed}")
        check_origin(folder, self.path)
        self.resumes = bool(folder.steps())
        self.source = RunFolder(folder.path if self.resumes else self.path, task)
        if not self.source.has_config():
            message = f"init_from must be the folder of a run, got {self.path}: it has no config.json"
            raise ParameterError("init_from", self.path, "the folder of a run", message)
        self.config = self.source.read_config()
        self.family = self.source.family
        self.model = self.family.config(**self.config["model"])

    @functools.cached_property
    def vocabs(self) -> list[Vocab]:
        """The vocabularies of `source`."""
        return self.source.load_vocabs()

    @property
    def settings(self) -> dict[str, dict]:
        """The defaults of the run that is trained: `{"data": settings, "model": settings, "training": settings}`.

        "data" has those settings of `source` that a new run inherits, see `Family.inherited`. "model" has all
        hyper-parameters. "training" has all recorded settings if the training resumes. For a new run, it has those
        that decide the batches.
        """
        known = {**self.config["data"], **self.config.get("vocab", {})}
        training = self.config.get("training", {})
        if not self.resumes:
            batching = (*self.family.batching, "eval_batch_size")
            names = [name for name in batching if name != "static_shapes"]  # this setting depends on the machine
            training = {name: training[name] for name in names if name in training}
        return {
            "data": {name: known[name] for name in self.family.inherited if name in known},
            "model": self.config["model"],
            "training": training,
        }

    def check(self, family: Family, model: Config, extends: bool = False) -> None:
        """Checks that the weights of the other run fit the model to train.

        Args:
            family: family of the model to train.
            model: its hyper-parameters.
            extends: whether this run extends the vocabularies.

        Raises:
            ParameterError: the family differs, a hyper-parameter differs that is not `free`, or a vocabulary cannot be
                extended. If the other run has no LoRA, the hyper-parameters of LoRA may differ.
        """
        if family is not self.family:
            message = (
                f"init_from {self.path} contains {self.family.described}, of the family {self.family.name}, got "
                f"{family.name} to train"
            )
            raise ParameterError("init_from", self.path, f"a run of the family {family.name}", message)
        if extends:
            for vocab in self.vocabs:
                vocab.check_extendable()
        for name, (other_value, value) in self._changes(model.to_dict()).items():
            if name not in self.model.free and not (name in _LORA and not getattr(self.model, "lora_rank", 0)):
                message = (
                    f"{name} must be {brief(other_value)}, as in {self.path}, got {brief(value)}: its weights fit no "
                    f"other. init_from can change {', '.join(self.model.free)}"
                )
                raise ParameterError(name, value, [other_value], message)

    def _changes(self, model: dict) -> dict[str, tuple]:
        """`{hyper-parameter: (value in the other run, value in this run)}` of the hyper-parameters that differ.

        Hyper-parameters that the data will decide are left out: `n_bigram`, and those with the value `None` or `()` in
        this run. Those in `free`, whose every value fits the same weights, are not left out: for them, `None` is a
        value of its own.
        """
        differences = differing(self.model.to_dict(), model)
        undecided = ("n_bigram",) + tuple(name for name in model if model[name] is None or model[name] == ())
        return {name: pair for name, pair in differences.items() if name in self.model.free or name not in undecided}

    def checkpoint(self, training: RunConfig) -> str:
        """The path of the checkpoint whose weights are taken: `warm_start_path`, or the one that `load_run` opens."""
        return self.source.find_checkpoint(training.warm_start_path)

    def record(self, training: RunConfig) -> dict:
        """The value of `"init_from"` in `config.json`."""
        if self.resumes:
            return self.config["init_from"]
        return {"model_dir": self.path, "checkpoint": self._path_in_source(self.checkpoint(training))}

    def _path_in_source(self, path: str) -> str:
        """The path of a checkpoint relative to the folder of `source`. A path elsewhere is returned as it is."""
        return path.removeprefix(f"{self.source.path.rstrip('/')}/")

    def log_unknown(self, counts: dict[str, tuple[int, int]], unk: str, warn_for: Iterable[str] | None = None) -> None:
        """Logs which share of the new text is unknown. If a share is above 5%, the log line is a warning.

        Args:
            counts: `{what is counted, such as "characters": (number of unknown ones, number of all)}`; if it is empty,
                nothing is logged.
            unk: the unknown symbol.
            warn_for: the keys of `counts` whose share can cause a warning; by default all.
        """
        shares = {kind: unknown / max(total, 1) for kind, (unknown, total) in counts.items()}
        sentence = " and ".join(f"{share:.2%} of the {kind}" for kind, share in shares.items())
        sentence += f" {'is' if [*shares] == ['text'] else 'are'} {unk}" if shares else ""  # "of the text is <unk>"
        if any(shares[kind] > MUCH_UNKNOWN for kind in (shares if warn_for is None else warn_for)):
            logger.warning(
                f"{sentence}: the vocabulary of init_from={self.path} lacks many symbols of the new text. extend_vocab "
                "gives them rows of their own"
            )
        elif sentence:
            logger.info(sentence)

    def log_extended(self, vocabs: list[Vocab], where: str = "") -> None:
        """Logs how many symbols `vocabs` add to the vocabularies of the other run.

        Args:
            vocabs: the extended vocabularies.
            where: end of the sentence, which says where the new rows are.
        """
        added = (
            f"{len(extended) - len(known):,} symbols to the {len(known):,} of {name}"
            # Not strict, because FLAT has a lexicon after the vocabularies, which is not extended.
            for name, known, extended in zip(self.family.vocabs, self.vocabs, vocabs, strict=False)
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

        The other run may not record the sizes of its batches, for example because it was converted. Then the sizes of
        this run are logged.

        Args:
            model: the model to train.
            config: its hyper-parameters.
            training: settings of the training of this run. With `extend_vocab`, the rows of new symbols keep their
                initial values.
            final: settings of the final evaluation, or `None`.
            new_weights: beginnings of the names of weights that keep their initial values. The weights of LoRA keep
                them, too, if the other run has no LoRA.
        """

        new_lora: list[str] = []  # names of low-rank updates that the other run does not have
        if not getattr(self.model, "lora_rank", 0):
            new_lora = [name for name, weight in weights_by_name(model).items() if is_low_rank(weight)]

        def load_from(path: str) -> str:
            load_weights(model, path, (*new_weights, *new_lora), training.extend_vocab, check_finite=True)
            return path

        path = self.source.with_checkpoint(training.warm_start_path, load_from, "warm_start_path")
        changes = self._changes(config.to_dict())
        changes.pop("target_lengths", None)  # the text decides them, not the user
        for name, other_value in self.settings["training"].items():
            if getattr(training, name, other_value) != other_value:  # settings of the evaluation are not in `training`
                changes[name] = (other_value, getattr(training, name))
        shown = [f"{name} {_shown(other_value)} -> {_shown(value)}" for name, (other_value, value) in changes.items()]
        facts = [f"step {checkpoint_step(path):,}, {os.path.dirname(self._path_in_source(path)) or 'latest'}"]
        if shown:
            facts.append(f"changed: {', '.join(shown)}")
        if new_weights:
            facts.append(f"new weights: {', '.join(new_weights)}")
        logger.info("init_from %s: %s", self.path, "; ".join(facts))
        own_settings = {**(final.to_dict() if final else {}), **training.to_dict()}
        recorded = self.config.get("training", {})
        # `type` instead of `isinstance`, because True and False, as of `shuffle_documents`, are no sizes.
        sizes = [name for name in (*self.family.batching, "eval_batch_size") if type(own_settings.get(name)) is int]
        unrecorded = [name for name in sizes if name not in recorded]
        if unrecorded:
            values = ", ".join(f"{name} {own_settings[name]}" for name in unrecorded)
            names = ", ".join(unrecorded)
            logger.info("%s does not record %s; the values of this run are used: %s", self.path, names, values)


def check_origin(folder: RunFolder, init_from: str | None) -> None:
    """Raises ParameterError if a folder has checkpoints, and their run did not start as `init_from` says.

    A folder without checkpoints is accepted.

    Args:
        folder: the folder of the run that is trained.
        init_from: path of the folder from which the run must have started; `None` if it must not have started from
            another run.
    """
    if not folder.steps():
        return
    recorded = (folder.read_config() if folder.has_config() else {}).get("init_from")
    if recorded and not init_from:
        message = f"the run in {folder} started from another run: resume it with init_from={recorded['model_dir']}"
        raise ParameterError("init_from", init_from, [recorded["model_dir"]], message)
    if init_from and not (recorded and same_path(recorded["model_dir"], init_from)):
        started = f"started from {recorded['model_dir']}" if recorded else "did not start from another run"
        message = f"model_dir {folder} contains a run that {started}, got init_from={init_from}: choose a new folder"
        raise ParameterError("model_dir", folder.path, "a new folder", message)


def _shown(value: Any) -> Any:
    """A value as the log shows it. A list, such as the labels of a tagger, is shown as its length."""
    return f"{len(value)}" if isinstance(value, list) else value
