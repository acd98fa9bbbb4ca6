"""Exports models as SavedModels, which run without this library: they score, predict, generate, translate or tag.

    export_saved_model(lm, "serving/my/1", vocab)       # TensorFlow Serving wants <name>/<version>/
    served = tf.saved_model.load("serving/my/1")
    served.generate_text(["The import"], temperature=[0.7])             # {"text": ...}; other options have defaults
    state = served.initial_state(2)["state"]
    served.score(tokens, labels, state)                                 # {"nll": ..., "state": ...}

The memory is an argument and a result, so that a server keeps nothing between requests: to continue a text, a request
passes on the memory that the last answer returned. It is one float32 tensor, `state`. For most models it is
`[B, L, 2, H, M, D]`, keys and values in the order of time; other forms are in state.py. Apart from `batch_size`, every
argument and every result has the batch as its first dimension. Rows do not affect each other, so that a batch can have
rows of different texts.

Shapes:
    B: batch      L: n_layer      H: n_head      M: mem_len      D: d_head
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from txl_tf.calls import check_true_or_false, known_names
from txl_tf.config import WEIGHT_TYPES, one_of
from txl_tf.config.checks import check_integer
from txl_tf.data.subwords import SubwordVocab, vocab_file
from txl_tf.data.vocabulary import Vocab
from txl_tf.environment import is_installed
from txl_tf.errors import ParameterError
from txl_tf.files import (
    absolute,
    check_no_pattern,
    is_remote,
    naming_write_errors,
    remove,
    remove_leftovers,
    removed_on_error,
)
from txl_tf.language.language_model import LanguageModel
from txl_tf.runs.folder import check_spares_runs
from txl_tf.serving.request import StoredModel
from txl_tf.serving.signatures import Served, served_model
from txl_tf.serving.subwords import has_tensorflow_text
from txl_tf.taggers.tagger import Tagger
from txl_tf.vanilla.transformer import Transformer

WARMUP_FILE = "tf_serving_warmup_requests"

logger = logging.getLogger("txl_tf")


@known_names
def export_saved_model(
    lm: LanguageModel | Transformer | Tagger,
    directory: str | os.PathLike,
    vocab: Vocab | Sequence[Vocab] | None = None,
    *,
    weights: str = "float32",
    top_n: int | None = None,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    start_token: int | None = None,
    search: dict | None = None,
    suppress_tokens: Sequence[int] | None = None,
    warmup: bool | None = None,
) -> None:
    """Exports a model as a SavedModel, which takes ids and, with a vocabulary, text.

    `LanguageModelSignatures`, `TranslationSignatures` and `TaggingSignatures` describe the signatures. A wrong request
    gets an InvalidArgumentError, which names the argument.

    Args:
        lm: language model, `Transformer`, or `Tagger`. A tagger with a network that is no `SentenceNetwork` takes the
            inputs of its network and no text.
        directory: new or empty folder, without `[`, `]` and backslash in its path. It appears when it is complete.
        vocab: `Vocab` of the model. For a `Transformer`, those of source and target. For a `Tagger`, those of its run:
            of tokens (for `Flat`, of characters and words), of bigrams or forms, and of the lexicon, if it has one.
            `None` for ids alone. Subwords need tensorflow-text. Without it, or if a vocabulary is a tokenizer.json, the
            SavedModel takes ids alone, and a warning says so.
        weights: type in which the weights are stored, "float32", "float16" or "bfloat16". The model computes in the
            dtype of `lm`. The numbers in requests and answers are float32, also those of a float64 model.
        top_n: for a language model, the number of tokens that `next` returns; at most as many as the vocabulary has. By
            default 10, or all tokens of a smaller vocabulary.
        max_tokens: most tokens of a row of a request, and most new ones. The default is 4096 for a language model,
            `max_len` for a `Transformer`, and `max_seq_len` for a `Tagger`.
        max_rows: most rows of a request; by default as many as fit 512 MiB with one token each, but at most 1024, see
            docs/serving.md.
        start_token: for a language model, the id that an empty prompt continues. The default is the id of the end of a
            document or, if `vocab` has none, of a line; without either, 0.
        search: for a `Transformer`: `beam_size`, `n_best`, `length_penalty`, `max_new_tokens`, `allow_special`. By
            default the search is greedy, up to the lengths that the model has from its training (`target_lengths`).
        suppress_tokens: for a `Transformer`, ids that no target may contain. By default those of `<s>` and, with
            `vocab`, of `<unk>`, unless `search` has `allow_special`. Without `vocab`, the id of `<unk>` is not known.
        warmup: whether to write warm-up requests, which need `tensorflow-serving-api`; by default, if it is installed.

    Raises:
        ParameterError: no family has the class of the model, an argument is out of its range or of no use for the
            model, `directory` is not empty, or `warmup` is true without `tensorflow-serving-api`.
        OSError: `directory` cannot be written to.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise ParameterError("directory", directory, "the path of a folder")
    check_no_pattern("directory", absolute(os.fspath(directory)))
    options = {
        "top_n": top_n,
        "start_token": start_token,
        "search": search,
        "suppress_tokens": suppress_tokens,
    }
    if warmup is not None:
        check_true_or_false(warmup=warmup)
    make = _checked_factory(lm, os.fspath(directory), vocab, options, weights, max_tokens, max_rows)
    _write(make, os.fspath(directory), warmup)


@known_names
def local_signatures(
    lm: LanguageModel | Transformer | Tagger,
    vocab: Vocab | Sequence[Vocab] | None = None,
    *,
    weights: str = "float32",
    top_n: int | None = None,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    search: dict | None = None,
) -> StoredModel:
    """Makes the signatures of `export_saved_model` in this process, for a server in Python. It writes no SavedModel.

    Args: see `export_saved_model`.

    Returns:
        The `StoredModel`. Its method `signatures` returns `{name: function}`; options that a call leaves out have
        default values.

    Raises: as `export_saved_model`.
    """
    options = {"top_n": top_n, "search": search}
    make = _checked_factory(lm, "the server", vocab, options, weights, max_tokens, max_rows)
    with tempfile.TemporaryDirectory() as folder:  # the tables read their files at once, and need them no more
        return make(folder)


def _checked_factory(
    lm: Any, shown_as: str, vocab: Any, options: dict[str, Any], weights: str, max_tokens: int | None,
    max_rows: int | None,
) -> Callable[[str], StoredModel]:  # fmt: skip
    """Checks the options of a model that is to be served. Returns a function that makes its `StoredModel`.

    Args:
        lm, vocab, weights, max_tokens, max_rows: see `export_saved_model`.
        shown_as: the name of the export in log messages.
        options: the options that only some models have, `{name: value}`. `None` counts as not given.

    Returns:
        Function of a folder. It writes the vocabularies there, whose files the tables of the `StoredModel` refer to. If
        a graph cannot use one of the vocabularies, the `StoredModel` has none.

    Raises:
        ParameterError: an option is out of its range or of no use for the model.
    """
    served = served_model(lm, vocab, options)
    if not _can_serve_text(shown_as, served.vocabs):
        served = served._replace(vocabs={})
    max_tokens = (served.longest or 4096) if max_tokens is None else max_tokens
    check_integer("max_tokens", max_tokens, 1, served.longest or 2**31 - 1)
    one_of(WEIGHT_TYPES)("weights", weights)
    if max_rows is not None:
        check_integer("max_rows", max_rows, 1)
    sizes = {"weights": weights, "max_tokens": max_tokens, "max_rows": max_rows}
    return lambda folder: served.signatures(lm, _tables(served, folder), **sizes)


def _tables(served: Served, folder: str) -> dict[str, Any]:
    """Writes the vocabularies to files in `folder`, and returns `{name: table}`, tables that refer to these files."""
    tables = {}
    for name, vocab in served.vocabs.items():
        path = os.path.join(folder, vocab_file(name, vocab.level))
        vocab.save(path)
        tables[name] = served.table(vocab, path)
    return tables


def _can_serve_text(shown_as: str, vocabs: dict[str, Vocab]) -> bool:
    """Whether a graph can read text with the vocabularies. For subwords, logs why not, or what the user needs.

    `shown_as` is the name of the export in these messages.
    """
    if not any(vocab.level == "subword" for vocab in vocabs.values()):
        return True
    if any(isinstance(vocab, SubwordVocab) and vocab.is_tokenizer for vocab in vocabs.values()):
        logger.warning("%s takes ids and no text: no graph can run a tokenizer.json", shown_as)
        return False
    if has_tensorflow_text():
        message = "%s: to load this model in Python, import tensorflow_text first; TensorFlow Serving contains it"
        logger.info(message, shown_as)
        return True
    logger.warning("%s takes ids and no text: text needs pip install tensorflow-text", shown_as)
    return False


def _write(make: Callable[[str], StoredModel], directory: str, warmup: bool | None) -> None:
    """Writes a SavedModel. It becomes `directory` when it is complete. After an error, `directory` is as before.

    Args:
        make: function of a folder for the files of the vocabularies that returns the model.
        directory: a new or empty folder.
        warmup: see `export_saved_model`.

    Raises:
        ParameterError: `directory` is not empty, or `warmup` is true without `tensorflow-serving-api`.
        OSError: `directory` cannot be written to.
    """
    has_serving_api = is_installed("tensorflow_serving")
    if warmup and not has_serving_api:
        message = "warmup=True needs tensorflow-serving-api, which is not installed: pip install it"
        raise ParameterError("warmup", True, [False, None], message)
    check_new_folder(directory)
    with tempfile.TemporaryDirectory() as folder, new_folder(directory) as temporary:
        stored = make(folder)
        signatures = stored.signatures()
        # In Python, these functions have default values for their arguments. The signatures of a SavedModel have none.
        for name, function in signatures.items():
            setattr(stored.resources, name, function)
        tf.saved_model.save(stored.resources, temporary, signatures=signatures)
        if warmup or (warmup is None and has_serving_api):
            write_warmup(os.path.join(temporary, "assets.extra"), signatures, stored.warmup_values)
        elif warmup is None:
            logger.info("no warm-up requests: they need pip install tensorflow-serving-api")


@contextlib.contextmanager
def new_folder(directory: str) -> Iterator[str]:
    """Yields the path of a temporary folder, which the block makes. At the end of the block, it becomes `directory`.

    After an error, `directory` is as it was before the block, and the temporary folder is removed.

    Args:
        directory: a folder that is empty or does not exist.

    Raises:
        ParameterError: at the end of the block, `directory` is not empty.
        OSError: `directory` cannot be written to, or the block raises an OSError or an error of TensorFlow.
    """
    temporary = f"{directory.rstrip('/')}.{os.getpid()}.tmp"  # a server that watches the folder ignores such a name
    if not is_remote(directory):
        remove_leftovers(os.path.dirname(temporary) or ".", os.path.basename(directory.rstrip("/")))
    remove(temporary)  # a killed process with the same id may have left it
    with naming_write_errors(directory), removed_on_error(temporary):
        yield temporary
        check_new_folder(directory)  # another process may have written it meanwhile
        remove(directory)
        tf.io.gfile.rename(temporary, directory)


def check_new_folder(directory: str) -> None:
    """Raises ParameterError unless the folder is empty or does not exist, and is no part of a run."""
    check_spares_runs("directory", directory)
    if tf.io.gfile.exists(directory) and (not tf.io.gfile.isdir(directory) or tf.io.gfile.listdir(directory)):
        message = f"directory {directory} already exists: choose a new one"
        raise ParameterError("directory", directory, "a new or empty folder", message)


def write_warmup(folder: str, signatures: dict[str, Any], values: dict[str, Any]) -> None:
    """Writes a small request for every signature, which a server runs when it starts: a TFRecord of `PredictionLog`s.

    Args:
        folder: folder of the file.
        signatures: `{name: graph}`.
        values: `{argument: value}`, the value of all elements of an argument. The elements of other arguments are 0
            or "". Every dimension that may have any size has the size 1.
    """
    # An extra, and slow to import. Type checkers do not see its classes, which are made at the import.
    from tensorflow_serving.apis import predict_pb2, prediction_log_pb2

    protos: Any = predict_pb2
    logs: Any = prediction_log_pb2
    tf.io.gfile.makedirs(folder)
    with tf.io.TFRecordWriter(os.path.join(folder, WARMUP_FILE)) as writer:
        for signature, function in signatures.items():
            request = protos.PredictRequest()
            request.model_spec.signature_name = signature
            for spec in function.input_signature:
                shape = [1 if size is None else size for size in spec.shape] if spec.shape.rank else []
                proto = tf.make_tensor_proto(values.get(spec.name, tf.zeros([], spec.dtype).numpy()), spec.dtype)
                proto.tensor_shape.CopyFrom(tf.TensorShape(shape).as_proto())
                request.inputs[spec.name].CopyFrom(proto)
            log = logs.PredictionLog(predict_log=logs.PredictLog(request=request))
            writer.write(log.SerializeToString())
