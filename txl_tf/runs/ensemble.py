"""Opens several runs of an encoder-decoder as one `Ensemble`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from txl_tf.errors import ParameterError
from txl_tf.files import real
from txl_tf.runs.folder import RunFolder
from txl_tf.vanilla.ensemble import Ensemble
from txl_tf.vanilla.transformer import Transformer


class Member(NamedTuple):
    """A run of an ensemble and the path of its checkpoint."""

    folder: RunFolder
    path: str


def members_of(folder: RunFolder, ensemble: Sequence[str | os.PathLike]) -> list[Member]:
    """The runs that translate together with the run in `folder`. Their weights are not read yet.

    Args:
        folder: folder of an encoder-decoder.
        ensemble: folders of other runs, or paths of checkpoints in runs, such as "runs/other/best". A folder stands for
            the checkpoint that `load_run` opens by default.

    Raises:
        ParameterError: an element is neither, or its run cannot be opened; or its vocabularies, or `max_len`, differ
            from those of `folder`.
    """
    if isinstance(ensemble, (str, os.PathLike)):
        raise ParameterError("ensemble", ensemble, "a list of folders of runs")
    return [_checked_member(folder, os.fspath(path)) for path in ensemble]


def _checked_member(folder: RunFolder, path: str) -> Member:
    """The member that an element of `ensemble` names. Its errors name `ensemble`."""
    try:
        member = _member(path)
        _check_fits(folder, member.folder)
    except ParameterError as error:
        raise ParameterError("ensemble", path, error.allowed, f"ensemble={path}: {error}") from error
    return member


def _member(path: str) -> Member:
    """The run in the folder at `path`, or around the checkpoint at `path`."""
    folder = RunFolder(path, "encoder_decoder")
    if folder.has_config():
        return Member(folder, folder.find_checkpoint())
    folder = RunFolder.around(path, "encoder_decoder")
    if folder.has_config():
        return Member(folder, folder.find_checkpoint(os.path.relpath(path, folder.path)))
    allowed = "the folder of a run, or a checkpoint in one, such as runs/other/best"
    raise ParameterError("ensemble", path, allowed, f"it must be {allowed}")


def _check_fits(first: RunFolder, other: RunFolder) -> None:
    """Raises ParameterError unless two runs have the same vocabularies and `max_len`."""
    names = first.family.vocabs
    for name, one, another in zip(names, first.load_vocabs(), other.load_vocabs(), strict=True):
        if one.fingerprint() != another.fingerprint():
            allowed = f"a run with the {name} of {first}"
            raise ParameterError("ensemble", other.path, allowed, f"it must be {allowed}")
    expected, found = (run.read_config()["model"]["max_len"] for run in (first, other))
    if expected != found:
        allowed = f"a run with max_len={expected}, as {first}"
        raise ParameterError("ensemble", other.path, allowed, f"it must be {allowed}, got max_len={found}")


def load_model(folder: RunFolder, path: str, members: Sequence[Member] = (), **changes: Any) -> Transformer | Ensemble:
    """The model of a run with the weights of the checkpoint at `path`; with `members`, its `Ensemble` with them.

    Args: `**changes`: see `load_run`; they hold for all models.

    Raises: as `load_run`. Also raises ParameterError if two models have the same checkpoint.
    """
    opened = [Member(folder, path), *members]
    paths = [real(member.path) for member in opened]
    for i, member in enumerate(opened):
        if paths[i] in paths[:i]:
            message = f"ensemble: the checkpoint {member.path} is there twice, which changes no translation"
            raise ParameterError("ensemble", member.path, "another checkpoint for each model", message)
    models = [member.folder.load_model(member.path, **changes) for member in opened]
    return Ensemble(models) if members else models[0]
