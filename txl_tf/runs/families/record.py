"""`Family`, the record of a family of models, and the register of all records."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras

from txl_tf.config import Config, MachineConfig, OptimizerConfig, RunConfig, at_least, satisfies
from txl_tf.data.subwords import empty_vocab
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError, brief
from txl_tf.schema import check_values

if TYPE_CHECKING:
    from txl_tf.runs.families.pipeline import Pipeline
    from txl_tf.runs.train import Run

FAMILIES: dict[str, Family] = {}  # `{name: record}`, see `register`
FIRST = "transformer_xl"  # the only family of the first versions, whose `config.json` names none


@dataclasses.dataclass(kw_only=True)
class _ConfigFile:
    """The keys of `config.json` that runs of all families have.

    Attributes:
        fingerprints: fingerprints of the vocabularies and of each split.
        own_parts: parts of the model whose classes are a user's own.
    """

    data: dict
    model: dict
    training: dict = dataclasses.field(default_factory=dict)
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    family: str = FIRST
    init_from: dict | None = None
    own_parts: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True)
class _InitFrom:
    """`"init_from"` of `config.json`: the folder of the run that the run started from, and the name of a checkpoint."""

    model_dir: str
    checkpoint: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model, and how it is made, trained, evaluated, saved in a folder and served.

    Attributes:
        name: the name in `config.json`.
        task: "language_model", "encoder_decoder" or "tagger": which programs open its runs.
        described: what its runs contain and which programs open them, for messages.
        model: class of the models. A model of a subclass belongs to the family, too. (How `generate` caches a text is
            defined by the class, not here, because `generate` needs no run.)
        network: class of the network in the models, if several families share the class of the model, as taggers do.
        config: class of the hyper-parameters.
        make: function of the hyper-parameters, and of options of Keras such as `dtype`, that returns a new model.
        check: function of an instance of `config`. It raises ParameterError if hyper-parameters do not fit each other.
        least_weights: function of the hyper-parameters, a dictionary, that returns a rough lower bound of the number
            of weights of the model, see `RunFolder.check_size`.
        weight_names: function of a model that returns `{name: variable}` of the weights whose names in checkpoints are
            those of another program. All other weights are named by their paths in Keras.
        signatures: name of the signatures of its served models, which `serving/` registers, see
            `txl_tf.serving.signatures.serves`.
        required: hyper-parameters that `config.json` must have, although they have a default elsewhere.
        vocabs: `{name: hyper-parameter}`: the name of each vocabulary, in `config.json` and of its file, and the
            hyper-parameter that is its size, or `None`.
        data: class of the settings of the data.
        paths: settings that are paths. The same data may be at other paths when a run resumes.
        inherited: settings of the data, or of the vocabulary, that a new run takes from the run that it starts from
            (`init_from`), together with the vocabularies.
        final: class of the settings of the evaluation at the end of a training run, or `None`.
        training: class of the settings of the training.
        batching: settings of the training that decide the batches. They are fixed once there is a checkpoint.
        recorded: settings that `config.json` records in addition to those of every family.
        monitor: the metric that decides which checkpoint is the best.
        best_of: `min` or `max`, the function that returns the better one of two values of this metric.
        default_checkpoint: the checkpoint that is opened by default: "latest", or "best" (the latest if there was no
            validation). A training run ends with the evaluation of these weights; with `ema`, of their moving average.
        rounds: whether `matmul_precision` has an effect on the models. It has no effect on Keras's own layers.
        pipeline: subclass of `Pipeline` that turns text into results.
        run: subclass of `Run` that says how data are read and batched, and how a model is trained and evaluated.
    """

    name: str
    task: str
    described: str
    model: type[keras.Model]
    network: type | None = None
    config: type[Config]
    make: Callable[..., keras.Model]
    check: Callable[[Config], None] = lambda model: None
    least_weights: Callable[[dict], int]
    weight_names: Callable[[Any], dict[str, Any]] = lambda model: {}
    signatures: str
    required: tuple[str, ...]
    vocabs: Mapping[str, str | None]
    data: type[Config]
    paths: tuple[str, ...]
    inherited: tuple[str, ...] = ()
    final: type[Config] | None = None
    training: type[RunConfig]
    batching: tuple[str, ...]
    recorded: tuple[str, ...] = ()
    monitor: str = "val_loss"
    best_of: Callable[[float, float], float] = min
    default_checkpoint: str = "latest"
    rounds: bool = True
    pipeline: type[Pipeline]
    run: type[Run]

    def check_config(self, values: dict) -> None:
        """Raises ParameterError unless `values` are a `config.json` of this family."""
        check_values(values, self._config_schema)
        values = {**values, "model": self.config.without_removed(values["model"])}
        for key, groups in self.groups.items():
            check_values(values.get(key, {}), *groups, partial=key != "model", prefix=f"{key}.")
        missing = [name for name in self.required if values["model"].get(name) is None]
        if missing:
            name = f"model.{missing[0]}"
            raise ParameterError(name, None, "given", f"{name} is missing")
        self.check(self.config(**values["model"]))
        if values.get("init_from") is not None:
            check_values(values["init_from"], _InitFrom, prefix="init_from.")
        for name in self.vocabs:
            empty_vocab(**values[name])  # raises ParameterError for wrong arguments of the vocabulary

    def config_content(self, data: dict, model: dict, vocabs: list[Vocab]) -> dict:
        """The content of `config.json` without "training" and other keys that not every run has.

        Args:
            data, model: settings of the data, and hyper-parameters.
            vocabs: the vocabularies, in the order of `self.vocabs`.
        """
        named = {name: vocab.get_config() for name, vocab in zip(self.vocabs, vocabs, strict=True)}
        return {"family": self.name, "data": data, "model": model, **named}

    def check_best(self, values: dict) -> None:
        """Raises ParameterError unless `values` are a `best.json` of this family."""
        check_values(values, self._best_schema)

    @functools.cached_property
    def _config_schema(self) -> type:
        """The dataclass that checks the keys of `config.json`: `_ConfigFile`, and a key for each vocabulary."""
        vocabs = [(name, Vocab) for name in self.vocabs]
        return dataclasses.make_dataclass("config", vocabs, bases=(_ConfigFile,), kw_only=True)

    @functools.cached_property
    def _best_schema(self) -> type:
        """The dataclass that checks the content of `best.json`."""
        step = dataclasses.field(metadata={"check": at_least(0)})
        value = dataclasses.field(metadata={"check": satisfies(math.isfinite, "be finite")})
        fields = [
            ("step", int, step),
            (self.monitor, float, value),
            ("text", str | None, None),  # fingerprint of the text of the validation
        ]
        return dataclasses.make_dataclass("best", fields)

    @property
    def groups(self) -> dict[str, tuple[type[Config], ...]]:
        """`{key in config.json: classes of the settings in it}`. If two classes have a setting, the last one counts."""
        training = (MachineConfig, OptimizerConfig, self.training)
        if self.final:
            training = (self.final, *training)
        return {"data": (self.data,), "training": training, "model": (self.config,)}


def register(family: Family) -> Family:
    """Adds a family to `FAMILIES`, so that its runs can be trained, opened, averaged and exported. Returns it."""
    FAMILIES[family.name] = family
    return family


def family_in(config: dict, task: str | None = None) -> Family:
    """The family that `config.json` names; `FIRST` if it names none.

    Args:
        config: content of `config.json`.
        task: task that the family must have; `None` for any.

    Raises:
        ParameterError: there is no such family, or it has another task.
    """
    name = config.get("family", FIRST)
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None or task not in (None, family.task):
        allowed = [known.name for known in FAMILIES.values() if task in (None, known.task)]
        holds = f": it is {family.described}" if family else ""
        message = f"family must be {' or '.join(allowed)}, got {brief(name)}{holds}"
        raise ParameterError("family", name, allowed, message)
    return family


def families_of_model(model: keras.Model) -> list[Family]:
    """The families whose models have the class of `model`, or the nearest of its bases that has a family.

    Raises:
        ParameterError: neither the class of the model nor one of its bases has a family.
    """
    return _families_of_nearest_base(type(model), "model", list(FAMILIES.values()))


def family_of_model(model: keras.Model) -> Family:
    """The family of a model. If several families share its class, as taggers do, the class of its network decides.

    Raises:
        ParameterError: no family has the class of the model or, if several have it, the class of its network.
    """
    families = families_of_model(model)
    return families[0] if len(families) == 1 else _families_of_nearest_base(type(model.network), "network", families)[0]


def family_of(config: type[Config]) -> Family:
    """The family of a class of hyper-parameters, or of the nearest of its bases that has a family.

    Raises:
        ParameterError: no family has these hyper-parameters.
    """
    return _families_of_nearest_base(config, "config", list(FAMILIES.values()))[0]


def _families_of_nearest_base(kind: type, attribute: str, families: list[Family]) -> list[Family]:
    """The families of a class.

    Args:
        kind: the class.
        attribute: "model", "network" or "config", the attribute of a family that is compared.
        families: the families among which to choose.

    Returns:
        The families whose `attribute` is `kind`; if there are none, the families whose `attribute` is a base class of
        `kind`, the nearest one that a family has.

    Raises:
        ParameterError: there is no such family.
    """
    for base in kind.__mro__:
        matches = [family for family in families if getattr(family, attribute) is base]
        if matches:
            return matches
    classes = [getattr(family, attribute) for family in families]
    known = list(dict.fromkeys(cls.__name__ for cls in classes if cls is not None))
    name = "network" if attribute == "network" else "model"  # the argument that callers give
    allowed = f"be or derive from {', '.join(known)}, or see txl_tf.runs.families.record.register"
    message = f"no family has the class {kind.__name__}: it must {allowed}"
    raise ParameterError(name, kind.__name__, known, message)
