"""A SavedModel that scores, predicts and writes, ids or text, and runs without this library.

    export_saved_model(lm, "serving/my/1", vocab)       # TensorFlow Serving wants <name>/<version>/
    serve = tf.saved_model.load("serving/my/1").signatures
    state = serve["initial_state"](batch_size=tf.constant(2))["state"]
    serve["score"](tokens=tokens, labels=labels, state=state)           # {"nll": ..., "state": ...}

The memory is an argument and a result, so that a server keeps nothing between requests: what one returns continues the
text in the next. It is one float32 tensor `state` `[B, L, 2, H, M, D]`, keys and values in the order of time, in which
rows of different sessions can share a batch. Every argument and every result has the batch first; rows do not see each
other.

Shapes:
    B: batch      T: tokens of a request      L: n_layer      H: n_head      M: mem_len      D: d_head
    n: top_n      N: tokens of the longest row of a result
"""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
from collections.abc import Callable

import tensorflow as tf

from txl_tf.data.vocabulary import Vocab
from txl_tf.files import removed_on_error, writing
from txl_tf.models.language_model import TransformerXLLM
from txl_tf.serving.signatures import ServingSignatures, check_arguments
from txl_tf.serving.text import GraphTokenizer

WARMUP_FILE = "tf_serving_warmup_requests"

logger = logging.getLogger("txl_tf")


def export_saved_model(
    lm: TransformerXLLM,
    directory: str | os.PathLike,
    vocab: Vocab | None = None,
    *,
    weights: str = "float32",
    top_n: int = 10,
    max_tokens: int = 4096,
    max_rows: int | None = None,
    start_token: int | None = None,
    warmup: bool | None = None,
) -> None:
    """Writes a SavedModel whose signatures score, predict and write ids and, with a vocabulary, text.

    `ServingSignatures` says what each takes and returns. An InvalidArgumentError names the argument that is wrong.

    Args:
        lm: `TransformerXLLM`.
        directory: new or empty folder; it appears whole.
        vocab: `Vocab` of the model; `None` leaves out the signatures of text.
        weights: type the weights are stored in, "float32", "float16" or "bfloat16"; computation stays as in `lm`.
        top_n: how many tokens `next` returns; all where the vocabulary has fewer.
        max_tokens: most tokens of a row of a request, and most new ones.
        max_rows: most rows of a request; by default as many of one token as fit 512 MiB: see docs/serving.md.
        start_token: id that an empty prompt stands for; by default the end of a line, 0 where there is none.
        warmup: whether to write warm-up requests, which need `tensorflow-serving-api`. `None`: where it is installed.

    Raises:
        ValueError: an argument is out of range, or `directory` holds something.
        OSError: it cannot be written.
    """
    directory, n_token = os.fspath(directory), lm.network.n_token
    if vocab is not None and len(vocab) != n_token:
        raise ValueError(f"vocab must hold the model's n_token={n_token} symbols, got {len(vocab)}")
    if start_token is None:
        start_token = 0 if vocab is None else vocab.ids.get(vocab.eos or "\n", 0)
    check_arguments(n_token, weights, top_n, max_tokens, start_token, max_rows)
    has_serving_api = importlib.util.find_spec("tensorflow_serving") is not None
    if warmup and not has_serving_api:
        raise ValueError("warmup=True needs tensorflow-serving-api, which is not installed: pip install it")
    if tf.io.gfile.exists(directory) and (not tf.io.gfile.isdir(directory) or tf.io.gfile.listdir(directory)):
        raise ValueError(f"directory {directory} already exists: choose a new one")

    temporary = f"{directory.rstrip('/')}.{os.getpid()}.tmp"  # no version's name to a server that watches the folder
    with tempfile.TemporaryDirectory() as folder, writing(directory), removed_on_error(temporary):
        text = None
        if vocab is not None:
            path = os.path.join(folder, "vocab.txt")
            vocab.save(path)
            text = GraphTokenizer(vocab, path)
        served = ServingSignatures(lm, weights, min(top_n, n_token), max_tokens, start_token, text, max_rows)
        signatures = served.signatures()
        tf.saved_model.save(served.resources, temporary, signatures=signatures)
        if warmup or (warmup is None and has_serving_api):
            write_warmup(os.path.join(temporary, "assets.extra"), signatures)
        elif warmup is None:
            logger.info("no warm-up requests: they need pip install tensorflow-serving-api")
        if tf.io.gfile.exists(directory):
            tf.io.gfile.rmtree(directory)
        tf.io.gfile.rename(temporary, directory)


def write_warmup(folder: str, signatures: dict[str, Callable]) -> None:
    """Writes a small request for every signature, which a server runs at its start: a TFRecord of `PredictionLog`s."""
    from tensorflow_serving.apis import predict_pb2, prediction_log_pb2  # an extra, and slow to import

    values = {"max_new_tokens": 1, "top_p": 1, "batch_size": 1, "text": ""}
    tf.io.gfile.makedirs(folder)
    with tf.io.TFRecordWriter(os.path.join(folder, WARMUP_FILE)) as writer:
        for signature, function in signatures.items():
            request = predict_pb2.PredictRequest()
            request.model_spec.signature_name = signature
            for name, spec in function.structured_input_signature[1].items():
                shape = [1 if size is None else size for size in spec.shape] if spec.shape.rank else []
                proto = tf.make_tensor_proto(values.get(name, 0), spec.dtype)  # one value for all places
                proto.tensor_shape.CopyFrom(tf.TensorShape(shape).as_proto())
                request.inputs[name].CopyFrom(proto)
            log = prediction_log_pb2.PredictionLog(predict_log=prediction_log_pb2.PredictLog(request=request))
            writer.write(log.SerializeToString())
