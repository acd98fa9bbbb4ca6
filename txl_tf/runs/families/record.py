"""`Family`, what a record holds, and the register of all records."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import keras

from txl_tf.config import Config, MachineConfig, OptimizerConfig, RunConfig, at_least, satisfies
from txl_tf.data.subwords import empty_vocab
from txl_tf.data.vocabulary import Vocab
from txl_tf.schema import brief, check_values

FAMILIES: dict[str, Family] = {}  # by name, see `register`
FIRST = "transformer_xl"  # family of a run whose `config.json` names none, as early ones do


@dataclasses.dataclass(kw_only=True)
class _ConfigFile:
    """`config.json` of any run, but for its vocabularies.

    Attributes:
        fingerprints: of the vocabularies and of each split.
        own_parts: the parts of the model whose classes are a user's own.
    """

    data: dict
    model: dict
    training: dict = dataclasses.field(default_factory=dict)
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    family: str = FIRST
    init_from: dict | None = None
    own_parts: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True)
class _Origin:
    """`"init_from"` of `config.json`: the folder of the run that another started from, and the name of a checkpoint."""

    model_dir: str
    checkpoint: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model, and how it is trained, kept in a folder and evaluated.

    Attributes:
        name: in `config.json`.
        task: "language_model", "encoder_decoder" or "tagger": which programs open its runs.
        described: what its runs hold and which programs open them, for messages.
        network: class of the network, or of the model itself where it has no network apart.
        config: group of its hyper-parameters.
        make: function of the hyper-parameters, and of options of Keras such as `dtype`, that gives the model.
        check: function of the hyper-parameters, a `config`: raises ValueError where they do not fit each other.
        least_weights: function of the hyper-parameters, a dictionary: about how many weights a model has, at least.
        required: hyper-parameters that `config.json` must have, though they have a default elsewhere.
        vocabs: key in `config.json`, and name of a file, of each vocabulary -> hyper-parameter that is its size; `None`
            where that is not recorded.
        data: group of what is read.
        places: settings of the data that say where it lies, not what it is.
        reading: settings of the data, or of the vocabulary, that a run takes with the vocabularies of another.
        final: group of the settings of the evaluation at the end of a training, or `None`.
        training: group of how it is trained.
        batching: which settings of the training decide the batches: they are fixed once there is a checkpoint.
        recorded: which other settings, besides those of every family, `config.json` holds.
        monitor, best_of: what tells the best checkpoint, and which of two is better.
        default_checkpoint: what is opened where nobody names a checkpoint, as the last evaluation of a training is of
            its weights: "latest", or "best", which is the latest where there was no validation.
        rounds: whether its products heed `set_matmul_precision`, as those of Keras's layers do not.
        pipeline: the subclass of `Pipeline` that turns text into results.
        run: the subclass of `Run` that says how its data are read and batched, and how it is trained and evaluated.
    """

    name: str
    task: str
    described: str
    network: type
    config: type[Config]
    make: Callable[..., keras.Model]
    check: Callable[[Config], None] = lambda model: None
    least_weights: Callable[[dict], int]
    required: tuple[str, ...]
    vocabs: Mapping[str, str | None]
    data: type[Config]
    places: tuple[str, ...]
    reading: tuple[str, ...] = ()
    final: type[Config] | None = None
    training: type[RunConfig]
    batching: tuple[str, ...]
    recorded: tuple[str, ...] = ()
    monitor: str = "val_loss"
    best_of: Callable = min
    default_checkpoint: str = "latest"
    rounds: bool = True
    pipeline: type
    run: type

    def check_config(self, values: dict) -> None:
        """Raises ValueError unless `values` are a `config.json` of this family."""
        check_values(values, self._config_file)
        values = {**values, "model": self.config.without_removed(values["model"])}
        for key, groups in self.groups.items():
            check_values(values.get(key, {}), *groups, partial=key != "model", prefix=f"{key}.")
        missing = [name for name in self.required if values["model"].get(name) is None]
        if missing:
            raise ValueError(f"model.{missing[0]} is missing")
        self.check(self.config(**values["model"]))
        if values.get("init_from") is not None:
            check_values(values["init_from"], _Origin, prefix="init_from.")
        for name in self.vocabs:
            empty_vocab(**values[name])  # checks them

    def describe(self, data: dict, model: dict, vocabs: list[Vocab]) -> dict:
        """`config.json` of a run, but for its training."""
        named = {name: vocab.get_config() for name, vocab in zip(self.vocabs, vocabs, strict=True)}
        return {"family": self.name, "data": data, "model": model, **named}

    def check_best(self, values: dict) -> None:
        """Raises ValueError unless `values` are a `best.json` of this family."""
        check_values(values, self._best_file)

    @functools.cached_property
    def _config_file(self) -> type:
        vocabs = [(name, Vocab) for name in self.vocabs]
        return dataclasses.make_dataclass("config", vocabs, bases=(_ConfigFile,), kw_only=True)

    @functools.cached_property
    def _best_file(self) -> type:
        checks = {"step": at_least(0), self.monitor: satisfies(math.isfinite, "be finite")}
        types = {"step": int, self.monitor: float}
        fields = [(name, types[name], dataclasses.field(metadata={"check": check})) for name, check in checks.items()]
        text = ("text", str | None, None)  # fingerprint of the text that was validated on
        return dataclasses.make_dataclass("best", [*fields, text])

    @property
    def groups(self) -> dict[str, tuple[type[Config], ...]]:
        """Key in `config.json` -> groups of the settings that it may hold; of two with one name, the last counts."""
        training = (self.final, MachineConfig, OptimizerConfig, self.training)
        return {"data": (self.data,), "training": tuple(filter(None, training)), "model": (self.config,)}


def register(family: Family) -> Family:
    """Makes a family known to all that open, average and export runs."""
    FAMILIES[family.name] = family
    return family


def family_in(config: dict, task: str | None = None) -> Family:
    """The family that a `config.json` names.

    Raises:
        ValueError: there is no such family, or it has another task.
    """
    name = config.get("family", FIRST)
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None or task not in (None, family.task):
        allowed = " or ".join(known.name for known in FAMILIES.values() if task in (None, known.task))
        holds = f": it is {family.described}" if family else ""
        raise ValueError(f"family must be {allowed}, got {brief(name)}{holds}")
    return family


def family_of_model(model: keras.Model) -> Family:
    """The family that made a model. Raises ValueError where no family did."""
    for family in FAMILIES.values():
        if isinstance(family.make, type) and isinstance(model, family.make):
            return family
    return family_of(type(getattr(model, "network", model)))


def family_of(kind: type) -> Family:
    """The family of a class, its network or its group of hyper-parameters. Raises ValueError where it is of none."""
    for family in FAMILIES.values():
        if kind in (family.network, family.config):
            return family
    raise ValueError(f"no family has {kind.__name__}: see txl_tf.runs.families.record.register")
