"""The register of signatures: for each name of signatures, the function that says how a model is served with them.

The record of a family contains the name of its signatures, see `Family.signatures`. The modules that define signatures
register them when they are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError
from txl_tf.runs.families.record import families_of_model
from txl_tf.schema import keywords_of
from txl_tf.serving.request import StoredModel


class Served(NamedTuple):
    """How one model is served.

    Attributes:
        signatures: function of `(model, {name: table})` with the keyword arguments `weights`, `max_tokens` and
            `max_rows`, see `export_saved_model`. It returns the `StoredModel`.
        vocabs: `{name: vocabulary}` of the vocabularies that text is read and written with; empty if the signatures
            take only ids.
        table: function of `(vocabulary, path of its file)` that returns the vocabulary as a table of a graph.
        longest: most tokens of a row that the model takes; `None` for any number.
    """

    signatures: Callable[..., StoredModel]
    vocabs: dict[str, Vocab]
    table: Callable[[Vocab, str], Any]
    longest: int | None = None


class _Server(NamedTuple):
    """An entry of the register."""

    described: str  # what the models are, for messages
    serve: Callable[..., Served]  # the function that `serves` decorates


_SERVERS: dict[str, _Server] = {}  # the register, by the names of the signatures


def serves(name: str, described: str) -> Callable[[Callable[..., Served]], Callable[..., Served]]:
    """Decorator that registers how the families whose `signatures` is `name` are served.

    The decorated function takes the model, the argument `vocab` of `export_saved_model`, and, as keyword arguments, the
    options of `export_saved_model` that only such models have. It returns a `Served`.

    Args:
        name: name of the signatures.
        described: what the models are, for messages, such as "a tagger".
    """

    def register(serve: Callable[..., Served]) -> Callable[..., Served]:
        _SERVERS[name] = _Server(described, serve)
        return serve

    return register


def served_model(model: keras.Model, vocab: Vocab | Sequence[Vocab] | None, options: dict[str, Any]) -> Served:
    """Returns how a model is served, from the function that is registered for the signatures of its family.

    Args:
        model: the model.
        vocab: its vocabularies, see `export_saved_model`.
        options: options of `export_saved_model` that only some models have, `{name: value}`. `None` counts as not
            given.

    Raises:
        ParameterError: no family has the class of the model, its signatures are not registered, an option is of no use
            for the model, or a value is wrong.
    """
    family, *_ = families_of_model(model)
    if family.signatures not in _SERVERS:
        message = f"signatures of the family {family.name} must be registered: {', '.join(_SERVERS)} are"
        raise ParameterError("signatures", family.signatures, list(_SERVERS), message)
    described, serve = _SERVERS[family.signatures]
    given_options = {name: value for name, value in options.items() if value is not None}
    known = keywords_of(serve)
    for name, value in given_options.items():
        if name not in known:
            raise ParameterError(name, value, "left out", f"{name} is no argument for {described}, got {value}")
    return serve(model, vocab, **given_options)
