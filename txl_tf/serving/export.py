"""A SavedModel that scores, predicts and writes, translates or tags, ids or text, and runs without this library.

    export_saved_model(lm, "serving/my/1", vocab)       # TensorFlow Serving wants <name>/<version>/
    served = tf.saved_model.load("serving/my/1")
    served.generate_text(["The import"], temperature=[0.7])             # {"text": ...}; the rest has default values
    state = served.initial_state(2)["state"]
    served.score(tokens, labels, state)                                 # {"nll": ..., "state": ...}

The memory is an argument and a result, so that a server keeps nothing between requests: what one returns continues the
text in the next. It is one float32 tensor `state` `[B, L, 2, H, M, D]`, keys and values in the order of time, in which
rows of different sessions can share a batch; of the vanilla language model it is `[B, X]`, its window. Every argument
and every result has the batch first; rows do not see each other.

Shapes:
    B: batch      L: n_layer      H: n_head      M: mem_len      D: d_head      X: numbers of a window
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Callable, Sequence

import tensorflow as tf

from txl_tf.config import WEIGHT_TYPES, SearchConfig, one_of
from txl_tf.data.pairs.parallel import END_ID
from txl_tf.data.subwords import SubwordVocab, vocab_file
from txl_tf.data.vocabulary import Vocab
from txl_tf.environment import is_installed
from txl_tf.errors import ParameterError
from txl_tf.files import absolute, check_no_pattern, is_remote, remove, remove_leftovers, removed_on_error, writing
from txl_tf.language.beam_search import check_suppressed
from txl_tf.language.language_model import LanguageModel
from txl_tf.language.sampling import check_integer
from txl_tf.schema import check_names, known_names
from txl_tf.serving.language_model import LanguageModelSignatures
from txl_tf.serving.subwords import SubwordTokenizer, has_tensorflow_text
from txl_tf.serving.tables import GraphTokenizer, SymbolTable, named_vocabs
from txl_tf.serving.tagging import TaggingSignatures, tagger_vocabs
from txl_tf.serving.translation import TranslationSignatures
from txl_tf.taggers.tagger import Tagger
from txl_tf.vanilla.transformer import Transformer
from txl_tf.vanilla.translator import assumed_length, never_written

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
    """Writes a SavedModel that scores, predicts and writes, translates, or tags, ids and, with a vocabulary, text.

    `LanguageModelSignatures`, `TranslationSignatures` and `TaggingSignatures` say what the signatures take and return.
    An InvalidArgumentError names the argument of a request that is wrong.

    Args:
        lm: language model, `Transformer`, or `Tagger`; over a network that is no `SentenceNetwork`, for ids alone.
        directory: new or empty folder, without `[`, `]` and backslash in its path; it appears whole.
        vocab: `Vocab` of the model; of subwords it needs tensorflow-text, and is left out where that is missing. Of a
            `Transformer` those of source and target; of a `Tagger` those of its run: of tokens, with words for `Flat`,
            of bigrams or forms and, where it has one, of the lexicon. `None` for ids alone.
        weights: type the weights are stored in, "float32", "float16" or "bfloat16"; computation stays as in `lm`. The
            numbers of requests and answers are float32, of a float64 model too.
        top_n: how many tokens `next` returns, by default 10; all where the vocabulary has fewer.
        max_tokens: most tokens of a row of a request, and most new ones; by default 4096, `max_len`, or `max_seq_len`.
        max_rows: most rows of a request; by default as many of one token as fit 512 MiB: see docs/serving.md.
        start_token: id that an empty prompt stands for; by default the end of a document, else of a line, else 0.
        search: of a `Transformer`: `beam_size`, `n_best`, `length_penalty`, `max_new_tokens`, `allow_special`. By
            default greedy, up to the lengths that the model has from its training (`target_lengths`).
        suppress_tokens: of a `Transformer`, ids that no target may contain. By default that of `<s>` and, with `vocab`,
            that of `<unk>`, unless `search` has `allow_special`. Without `vocab` nothing says which id `<unk>` has.
        warmup: whether to write warm-up requests, which need `tensorflow-serving-api`. `None`: where it is installed.

    Raises:
        ValueError: an argument is out of range, or `directory` holds something.
        OSError: it cannot be written.
    """
    check_no_pattern("directory", absolute(os.fspath(directory)))
    table = SymbolTable if isinstance(lm, Tagger) else _tokenizer_of
    if isinstance(lm, Transformer):
        suppress_tokens = _suppressed(lm, vocab, search, suppress_tokens)
    if any(isinstance(part, SubwordVocab) for part in _parts_of(vocab)):
        if not has_tensorflow_text():
            logger.warning("%s takes ids and no text: text needs pip install tensorflow-text", directory)
            if isinstance(vocab, SubwordVocab):  # of a language model
                start_token = vocab.start_id if start_token is None else start_token
            vocab = None
        else:
            logger.info("%s: to load it in Python, import tensorflow_text first. Servers have it", directory)
    serve, vocabs, longest = _of_family(lm, vocab, top_n, start_token, search, suppress_tokens)
    max_tokens = (longest or 4096) if max_tokens is None else max_tokens
    check_integer("max_tokens", max_tokens, 1, longest or 2**31 - 1)
    one_of(WEIGHT_TYPES)("weights", weights)
    if max_rows is not None:
        check_integer("max_rows", max_rows, 1)
    serve = functools.partial(serve, lm, weights=weights, max_tokens=max_tokens, max_rows=max_rows)
    _write(serve, os.fspath(directory), vocabs, table, warmup)


def _parts_of(vocab: Vocab | Sequence[Vocab] | None) -> Sequence[Vocab]:
    return vocab if isinstance(vocab, (list, tuple)) else [vocab]


def _tokenizer_of(vocab: Vocab, path: str) -> GraphTokenizer | SubwordTokenizer:
    return (SubwordTokenizer if isinstance(vocab, SubwordVocab) else GraphTokenizer)(vocab, path)


def _suppressed(
    model: Transformer, vocab: Sequence[Vocab] | None, search: dict | None, given: Sequence[int] | None
) -> list[int]:
    """Ids that no target may contain. With vocabularies that served models cannot read, these say them, too."""
    check_names("export_saved_model's search", search or {}, SearchConfig.names())
    search = SearchConfig(**search or {})
    if given is None:
        return never_written(search, _vocabs_of(model, vocab).get("target_vocab"))
    if search.allow_special:
        raise ParameterError("suppress_tokens", given, "left out with allow_special")
    return sorted(check_suppressed(given, END_ID, model.target_vocab_size))


def _vocabs_of(model: Transformer, vocab: Sequence[Vocab] | None) -> dict[str, Vocab]:
    """The vocabularies of an encoder-decoder by name, which must have the sizes of the model."""
    sizes = {"source_vocab": model.input_vocab_size, "target_vocab": model.target_vocab_size}
    return named_vocabs(vocab, sizes, "Transformer") if vocab is not None else {}


def _of_family(lm, vocab, top_n, start_token, search, never) -> tuple[Callable, dict[str, Vocab], int | None]:
    """The signatures of a model, its vocabularies by name, and the longest row that it takes; `None` for any."""
    if isinstance(lm, Transformer):
        _refuse("an encoder-decoder", top_n=top_n, start_token=start_token)
        search = SearchConfig(**search or {})
        if assumed := assumed_length(search, lm):
            logger.warning("%s", assumed)
        serve = functools.partial(TranslationSignatures, search=search, never=never)
        return serve, _vocabs_of(lm, vocab), lm.max_len
    if isinstance(lm, Tagger):
        _refuse("a tagger", top_n=top_n, start_token=start_token, search=search, suppress_tokens=never)
        return TaggingSignatures, tagger_vocabs(lm, vocab), getattr(lm.network, "max_seq_len", None)
    _refuse("a language model", search=search, suppress_tokens=never)
    n_token, top_n = lm.network.n_token, 10 if top_n is None else top_n
    if start_token is None:
        start_token = 0 if vocab is None else vocab.start_id
    check_integer("top_n", top_n, 1)
    check_integer("start_token", start_token, 0, n_token - 1)
    serve = functools.partial(LanguageModelSignatures, top_n=top_n, start_token=start_token)
    return serve, named_vocabs([vocab], {"vocab": n_token}, type(lm).__name__) if vocab is not None else {}, None


def _refuse(what: str, **arguments) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ValueError(f"{given[0]} is no argument for {what}, got {arguments[given[0]]}")


def _write(serve: Callable, directory: str, vocabs: dict[str, Vocab], table: Callable, warmup: bool | None) -> None:
    """Writes the model that `serve` makes of the tables of `vocabs`."""
    has_serving_api = is_installed("tensorflow_serving")
    if warmup and not has_serving_api:
        raise ValueError("warmup=True needs tensorflow-serving-api, which is not installed: pip install it")
    _check_new(directory)
    temporary = f"{directory.rstrip('/')}.{os.getpid()}.tmp"  # no version's name to a server that watches the folder
    if not is_remote(directory):
        remove_leftovers(os.path.dirname(temporary) or ".", os.path.basename(directory.rstrip("/")))
    remove(temporary)  # of a killed process that had the same number
    with tempfile.TemporaryDirectory() as folder, writing(directory), removed_on_error(temporary):
        tables = {}
        for name, vocab in vocabs.items():
            path = os.path.join(folder, vocab_file(name, vocab.level))
            vocab.save(path)
            tables[name] = table(vocab, path)
        served = serve(tables)
        signatures = served.signatures()
        for name, function in signatures.items():  # which Python calls, with default values: signatures have none there
            setattr(served.resources, name, function)
        tf.saved_model.save(served.resources, temporary, signatures=signatures)
        if warmup or (warmup is None and has_serving_api):
            write_warmup(os.path.join(temporary, "assets.extra"), signatures, served.warmup_values)
        elif warmup is None:
            logger.info("no warm-up requests: they need pip install tensorflow-serving-api")
        _check_new(directory)  # another may have been faster
        remove(directory)
        tf.io.gfile.rename(temporary, directory)


def _check_new(directory: str) -> None:
    """Raises ValueError unless the folder is empty or not there."""
    if tf.io.gfile.exists(directory) and (not tf.io.gfile.isdir(directory) or tf.io.gfile.listdir(directory)):
        raise ValueError(f"directory {directory} already exists: choose a new one")


def write_warmup(folder: str, signatures: dict[str, Callable], values: dict) -> None:
    """Writes a small request for every signature, which a server runs at its start: a TFRecord of `PredictionLog`s.

    Args:
        values: `{argument: value}`, one for all places; 0 for others.
    """
    from tensorflow_serving.apis import predict_pb2, prediction_log_pb2  # an extra, and slow to import

    tf.io.gfile.makedirs(folder)
    with tf.io.TFRecordWriter(os.path.join(folder, WARMUP_FILE)) as writer:
        for signature, function in signatures.items():
            request = predict_pb2.PredictRequest()
            request.model_spec.signature_name = signature
            for spec in function.input_signature:  # of which no graph is made again
                shape = [1 if size is None else size for size in spec.shape] if spec.shape.rank else []
                proto = tf.make_tensor_proto(values.get(spec.name, tf.zeros([], spec.dtype).numpy()), spec.dtype)
                proto.tensor_shape.CopyFrom(tf.TensorShape(shape).as_proto())
                request.inputs[spec.name].CopyFrom(proto)
            log = prediction_log_pb2.PredictionLog(predict_log=prediction_log_pb2.PredictLog(request=request))
            writer.write(log.SerializeToString())
