"""Checks that a training run resumes the run in its folder with the same vocabularies, configuration and text.

Also checks that all of several workers train the same run.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import logging
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from txl_config.models import TRAINING_ONLY
from txl_tf.config import RunConfig
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError, brief
from txl_tf.files import naming_read_errors, same_path
from txl_tf.runs.families.record import family_in
from txl_tf.runs.folder import RunFolder, logged_step
from txl_tf.runs.origin import check_origin
from txl_tf.runs.weights import MisfitError
from txl_tf.schema import differing
from txl_tf.training.distribution import any_worker, num_workers, text_of_worker, worker_index

# Hyper-parameters that the text decides. They may change when a run resumes with another text, or starts from the
# weights of another run. Earlier versions do not record them.
_OF_TEXT = ("target_lengths",)

# Settings of the training that a checkpoint depends on, besides the `batching` of its family. The other settings of the
# training may change when a run resumes.
FIXED = ("mixed_precision", "matmul_precision", "optimizer", "ema", "seed", "freeze")

logger = logging.getLogger("txl_tf")


def check_same_run(folder: RunFolder, config: dict, vocabs: list[Vocab], training: RunConfig, remedy: str) -> None:
    """Checks that a training run can resume from the checkpoints in its folder, if there are any.

    Without checkpoints, checks that a new run would not overwrite another one, and that a run from which
    `warm_start_path` takes the weights has the same vocabularies. With `init_from`, the vocabularies need no check,
    because the text was read with those of that run.

    Args:
        folder: folder of the run.
        config: content of `config.json` that the training run would write.
        vocabs: its vocabularies.
        training: its settings.
        remedy: what to do about another vocabulary, the last sentence of that error.

    Raises:
        ParameterError: the checkpoints are those of another run, vocabulary, configuration or program or, without
            `allow_other_text`, of another text; or the folder contains best weights that `_check_best` refuses; or the
            vocabularies of the warm start differ.
    """
    check_origin(folder, training.init_from)
    if folder.steps():
        before = folder.read_config()
        # Another family or other settings of the data can have another vocabulary: `check_same_config` names them.
        if not _may_have_another_vocab(before, config):
            paths = {name: config["data"].get(name) for name in family_in(config).paths}
            moved = [f"{name}={path}" for name, path in paths.items() if path != before["data"].get(name)]
            check_vocab(folder, vocabs, remedy, "the text" + (f" with {', '.join(moved)}" if moved else ""))
        check_same_config(folder, config)
        if not training.allow_other_text:
            trained_on = {split: config["fingerprints"][split] for split in ("train", "valid")}
            check_text(folder, trained_on, "choose another folder, or resume with --allow_other_text")
        return
    others = folder.checkpoints()  # of another program, such as the original
    if others:
        message = f"model_dir {folder} contains {others[0]}, which no run of this library wrote: choose a new folder"
        raise ParameterError("model_dir", folder.path, "a new folder", message)
    _check_best(folder, training.warm_start_path)
    if training.warm_start_path and not training.init_from:
        _check_warm_start(training.warm_start_path, config, vocabs, remedy)


def _check_best(folder: RunFolder, warm_start_path: str | None) -> None:
    """Raises ParameterError if a folder without checkpoints has the best weights of a run that had checkpoints.

    A new run would remove these weights. If the run was killed before its first checkpoint, this is no error, because
    a new run does its steps again. But it is always an error if the new run would start from these weights.

    The run had checkpoints if its best weights or its log have a step after `save_steps`, or if its best weights are of
    `train_steps`. A run that was stopped earlier may have had one, too, which is not noticed.

    Args:
        folder: folder of the run.
        warm_start_path: checkpoint from which the new run takes its weights, or `None`.
    """
    best = folder.find_best()
    if best is None:
        return
    trained = folder.read_config().get("training", {})
    last = max(best["step"], _last_logged_step(folder.log_file))
    had_checkpoints = last > trained.get("save_steps", 0) or best["step"] >= trained.get("train_steps", 0)
    if had_checkpoints or (warm_start_path and same_path(warm_start_path, best["path"])):
        message = (
            f"model_dir {folder} contains the best weights of a run, {best['path']}, but no checkpoint to resume from: "
            "a new run would remove them. Choose another folder and start from them by warm_start_path, or move them"
        )
        raise ParameterError("model_dir", folder.path, "another folder", message)


def _last_logged_step(filename: str) -> int:
    """Returns the step of the last line of `log.csv`; 0 if there is no such file, or the line has no step."""
    if not tf.io.gfile.exists(filename):
        return 0
    with naming_read_errors(filename), tf.io.gfile.GFile(filename, "rb") as file:
        rows = list(csv.DictReader(io.StringIO(file.read().decode("latin1"))))
    return logged_step((rows or [{}])[-1].get("step")) or 0


def _check_warm_start(path: str, config: dict, vocabs: list[Vocab], remedy: str) -> None:
    """Checks the run of the checkpoint at `path`, from whose weights a new run starts.

    Raises ParameterError if its vocabularies differ. Warns if a hyper-parameter differs that evaluation uses, too: the
    weights may fit although the model computes something else, for example with other `positions`. A folder without
    `config.json` is not checked.
    """
    source = RunFolder.around(path, family_in(config).task)
    if not source.has_config():
        return
    check_vocab(source, vocabs, remedy)
    model = {name: value for name, value in config["model"].items() if name not in (*TRAINING_ONLY, *_OF_TEXT)}
    # A run of an earlier version does not record every hyper-parameter. It has the default of those that it lacks.
    defaults = {name: getattr(source.family.config, name, value) for name, value in model.items()}
    changes = differing({**defaults, **source.read_config()["model"]}, model)
    if changes:
        values = [", ".join(f"{name}={brief(pair[i])}" for name, pair in changes.items()) for i in (0, 1)]
        logger.warning("%s has %s; this run has %s", source, *values)


def check_vocab(folder: RunFolder, vocabs: list[Vocab], remedy: str, who: str = "the text") -> None:
    """Raises ParameterError unless `vocabs` are the vocabularies of the run in the folder.

    Args:
        folder: folder of the run.
        vocabs: the vocabularies to check.
        remedy: end of the message.
        who: what the message calls the owner of `vocabs`.
    """
    for name, vocab, before in zip(folder.family.vocabs, vocabs, folder.load_vocabs(), strict=True):
        difference = vocab.difference(before)
        if difference:
            what = name.replace("_", " ").replace("vocab", "vocabulary")
            message = (
                f"{who} has another {what} ({len(vocab)} symbols) than the run in {folder} ({len(before)} "
                f"symbols): {difference}. {remedy}"
            )
            raise ParameterError(name, vocab, f"the {what} of the run in {folder}", message)


def check_text(folder: RunFolder, fingerprints: dict[str, str], remedy: str) -> None:
    """Raises ParameterError if the run has recorded another fingerprint of a split of the text.

    A split without a recorded fingerprint passes.

    Args:
        folder: folder of the run.
        fingerprints: `{split: fingerprint}` of the splits to compare, see `Corpus.fingerprint`.
        remedy: end of the message.
    """
    recorded = folder.read_config().get("fingerprints", {})
    changed = [split for split, fingerprint in fingerprints.items() if recorded.get(split, fingerprint) != fingerprint]
    if changed:
        splits = " and ".join(changed)
        message = f"the text of the run in {folder} has changed since it was trained on ({splits}): {remedy}"
        raise ParameterError("text", changed, f"the text that the run in {folder} was trained on", message)


def check_same_config(folder: RunFolder, config: dict) -> None:
    """Raises MisfitError if the folder contains a run of another configuration.

    Raises ParameterError if its `best.json` is damaged.
    """
    folder.find_best()  # raises the error about `best.json`
    changes = _changes(folder.read_config(), config)
    if changes:
        message = f"model_dir {folder} contains a run of another configuration; choose another folder, or:"
        lines = [f"{name}: {old!r} in the existing run, {new!r} requested" for name, (old, new) in changes.items()]
        raise MisfitError("model_dir", folder.path, "another folder", message, lines)


def _changes(before: dict, requested: dict) -> dict[str, tuple[Any, Any]]:
    """The differences between two contents of `config.json` that keep a run from resuming: `{name: (old, new)}`."""
    requested = json.loads(json.dumps(requested))  # with lists instead of tuples
    family = family_in(requested)
    old_family = family_in(before)
    changes = {} if family is old_family else {"family": (old_family.name, family.name)}
    fingerprints, old_fingerprints = (config.get("fingerprints", {}) for config in (requested, before))
    same_text = old_fingerprints and all(
        old_fingerprints.get(split) == fingerprints.get(split) for split in ("train", "valid")
    )
    for part in ("data", "model", *family.vocabs, "training"):
        fields = [field for group in family.groups.get(part, (Vocab,)) for field in dataclasses.fields(group)]
        defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
        for name, value in requested.get(part, {}).items():
            old_value = before.get(part, {}).get(name, defaults.get(name))
            if name in _OF_TEXT or (same_text and name in family.paths):  # the same text at another path
                continue
            if old_value != value and (part != "training" or name in (*FIXED, *family.batching)):
                changes[f"{part}.{name}"] = (old_value, value)
    return changes


def _may_have_another_vocab(before: dict, requested: dict) -> bool:
    """Whether two runs may have different vocabularies of the same text: their family or a data setting differs."""
    paths = family_in(requested).paths
    names = {"family", *(f"data.{name}" for name in requested["data"] if name not in paths)}
    return not names.isdisjoint(_changes(before, requested))


def check_same_on_workers(
    folder: RunFolder, strategy: tf.distribute.Strategy, settings: Mapping[str, Any], paths: Mapping[str, Any]
) -> None:
    """Checks that several workers have the same settings and the same text. All workers must call it.

    Args:
        folder: folder of the run.
        strategy: strategy that has the workers.
        settings: `{name: value}` of everything that must be equal, with fingerprints as "fingerprints.train".
        paths: `{name: path}` of the texts. They may differ, and are named only if a fingerprint differs.

    Raises:
        MisfitError: a worker differs from the chief. It is raised on all workers: a worker that differs names its own
            differences, and the other workers name those of the first worker that differs.
    """
    sent = json.dumps([settings, paths], default=str)
    own_settings, own_paths = json.loads(sent)  # with lists instead of tuples
    chief_settings, chief_paths = json.loads(text_of_worker(strategy, 0, sent))
    worker = worker_index(strategy)
    changes = _differences(chief_settings, own_settings, worker)
    if any(change.startswith("fingerprints.") for change in changes):
        changes = [*_differences(chief_paths, own_paths, worker), *changes]
    if not any_worker(strategy, bool(changes)):
        return
    workers = range(num_workers(strategy))
    reports = [json.loads(text_of_worker(strategy, i, json.dumps(changes))) for i in workers]
    reported_worker = worker if changes else next(i for i in workers if reports[i])
    message = f"worker {reported_worker} has other settings than the chief: start all workers with the same command "
    message += "and text."
    raise MisfitError("model_dir", folder.path, "the same run on all workers", message, reports[reported_worker])


def _differences(chief: Mapping[str, Any], own: Mapping[str, Any], worker: int) -> list[str]:
    """Returns a line for each name whose value on this worker is not that of the chief.

    Args:
        chief: `{name: value}` of the chief.
        own: `{name: value}` of this worker.
        worker: index of this worker.
    """
    return [
        f"{name}: {brief(chief.get(name))} on the chief, {brief(own.get(name))} on worker {worker}"
        for name in {**chief, **own}
        if chief.get(name) != own.get(name)
    ]
