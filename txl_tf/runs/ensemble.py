"""Opens several runs of an encoder-decoder as one `Ensemble`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError
from txl_tf.files import absolute
from txl_tf.runs.folder import RunFolder
from txl_tf.vanilla.ensemble import Ensemble
from txl_tf.vanilla.transformer import Transformer

_COUNTING = ("min_freq", "max_size")  # arguments of a `Vocab` that do not change how it reads a text


class Member(NamedTuple):
    """A run of an ensemble and the path of its checkpoint."""

    folder: RunFolder
    path: str


def members_of(folder: RunFolder, ensemble: Sequence[str | os.PathLike], changes: Any = None) -> list[Member]:
    """The runs that translate together with the run in `folder`. Their weights are not read yet.

    Args:
        folder: folder of an encoder-decoder.
        ensemble: folders of other runs, or paths of checkpoints in runs, such as "runs/other/best". For a folder, the
            checkpoint is the one that `load_run` opens by default.
        changes: hyper-parameters that all models will have in place of their own, `{name: value}`.

    Raises:
        ParameterError: an element is neither the folder of a run nor a checkpoint; its run cannot be opened; or its
            vocabularies, or `max_len`, differ from those of `folder`.
    """
    is_list = isinstance(ensemble, (list, tuple))
    if not is_list or not all(isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in ensemble):
        raise ParameterError("ensemble", ensemble, "a list of folders of runs")
    return [_checked_member(folder, os.fspath(path), changes or {}) for path in ensemble]


def _checked_member(folder: RunFolder, path: str, changes: Mapping[str, Any]) -> Member:
    """The member that an element of `ensemble` names. Its errors name `ensemble`."""
    try:
        member = _member(path)
        _check_fits(folder, member.folder, changes)
    except ParameterError as error:
        raise ParameterError("ensemble", path, error.allowed, f"ensemble={path}: {error}") from error
    return member


def _member(path: str) -> Member:
    """The run in the folder at `path`, or around the checkpoint at `path`."""
    folder = RunFolder(path, "encoder_decoder")
    if folder.has_config():
        return Member(folder, folder.find_checkpoint())
    parent, name = os.path.split(path)
    for place in (parent, os.path.dirname(parent)):  # the second one is for checkpoints in `best` and `ema`
        folder = RunFolder(place, "encoder_decoder")
        if folder.has_config():
            return Member(folder, folder.find_checkpoint(name if name in ("best", "latest") else absolute(path)))
    allowed = "the folder of a run, or a checkpoint in one, such as runs/other/best"
    raise ParameterError("ensemble", path, allowed, f"it must be {allowed}")


def _check_fits(first: RunFolder, other: RunFolder, changes: Mapping[str, Any]) -> None:
    """Raises ParameterError if the vocabularies or the `max_len` of two runs differ."""
    for name, one, another in zip(first.family.vocabs, first.load_vocabs(), other.load_vocabs(), strict=True):
        difference = another.difference(one)
        if not difference and _reading(one) != _reading(another):
            difference = f"its settings are {_reading(another)}, and those of the other are {_reading(one)}"
        if difference:
            allowed = f"a run with the {name} of {first}"
            raise ParameterError("ensemble", other.path, allowed, f"it must be {allowed}: {difference}")
    expected, found = ({**run.read_config()["model"], **changes}["max_len"] for run in (first, other))
    if expected != found:
        allowed = f"a run with max_len={expected}, as {first}"
        raise ParameterError("ensemble", other.path, allowed, f"it must be {allowed}, got max_len={found}")


def _reading(vocab: Vocab) -> dict[str, Any]:
    """The settings of a vocabulary that say how it reads a text."""
    return {name: value for name, value in vocab.get_config().items() if name not in _COUNTING}


def load_model(folder: RunFolder, path: str, members: Sequence[Member] = (), **changes: Any) -> Transformer | Ensemble:
    """The model of a run with the weights of the checkpoint at `path`; with `members`, its `Ensemble` with them.

    Args: `**changes`: see `load_run`; they hold for all models.
    """
    model: Any = folder.load_model(path, **changes)
    if not members:
        return model
    return Ensemble([model, *(run.load_model_for("ensemble", other, **changes) for run, other in members)])
