"""Exports models to ONNX and TFLite (LiteRT), with fixed shapes, to run without TensorFlow.

    export_portable(lm, "serving/my_onnx", vocab, format="onnx", batch_size=1, length=16)

    session = onnxruntime.InferenceSession("serving/my_onnx/model.onnx")
    outputs = session.run(None, {"tokens": tokens, "mem0": mem0, "mem1": mem1})   # [log_probs, new_mem0, new_mem1]

A model is exported as a function of arrays, without loops over tokens and without text. The program that calls it turns
text into ids, and passes the memory of one call to the next. `model.json` describes the arrays. The vocabularies are in
the same folder.

| model | inputs | outputs |
|---|---|---|
| language model | tokens `[B, T]`; mem0, mem1 ... `[B, M, E]` | log_probs `[B, T, N]`; new_mem0, new_mem1 ... |
| vanilla language model | tokens `[B, T]` | log_probs `[B, T, N]` |
| encoder-decoder | source `[B, S]`, target `[B, T]` | log_probs `[B, T, N]` of the symbol after each target symbol |
| tagger | the network's inputs, see `Tener` and `Flat` | tags `[B, T]`, score `[B]`: the CRF's best path |

`Flat` can be exported to ONNX only: it divides int64 numbers of pairs of positions, which TFLite cannot.

Shapes:
    B: batch_size      T: length      S: source      M: mem_len      E: d_model      N: size of the vocabulary
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from txl_tf.calls import known_names
from txl_tf.config.checks import check_integer
from txl_tf.data.subwords import vocab_file
from txl_tf.data.vocabulary import Vocab
from txl_tf.environment import is_installed, too_old
from txl_tf.errors import ParameterError
from txl_tf.files import write_json
from txl_tf.language.language_model import LanguageModel
from txl_tf.runs.families.record import families_of_model
from txl_tf.serving.export import check_new_folder, new_folder
from txl_tf.serving.tables import named_vocabs
from txl_tf.serving.tagging import tagger_vocabs
from txl_tf.taggers.crf import crf_decode_unrolled
from txl_tf.taggers.tagger import Tagger
from txl_tf.training.keras_arguments import refuse_hooks
from txl_tf.vanilla.transformer import Transformer

FORMATS = ("onnx", "tflite")
OPSET = 17  # version of ONNX's operations
# The arrays of a lattice have room for `ITEMS * length` items (characters and words). A longer lattice does not fit.
ITEMS = 2

logger = logging.getLogger("txl_tf")


class Portable(NamedTuple):
    """A model as a function of arrays.

    Attributes:
        function: takes tensors as keyword arguments, and returns `{name: tensor}`.
        inputs: `{name: spec}` of the arguments of `function`.
        vocabs: `{name of the file without its ending: vocabulary}`.
        notes: further items of `model.json`.
    """

    function: Callable[..., dict[str, tf.Tensor]]
    inputs: dict[str, tf.TensorSpec]
    vocabs: dict[str, Vocab]
    notes: dict[str, Any]


@known_names
def check_output(directory: str, format: str) -> None:
    """Checks the folder and the format of an export, before a program loads the model.

    Raises:
        ParameterError: the format does not exist, a package is missing, or `directory` is a file or a folder that is
            not empty.
    """
    if format not in FORMATS:
        raise ParameterError("format", format, list(FORMATS))
    missing = [name for name in ("tf2onnx", "onnx") if format == "onnx" and not is_installed(name)]
    if missing:
        packages = f"package{'s' if len(missing) > 1 else ''} {' and '.join(missing)}"
        message = f'format="onnx" needs the {packages}: pip install "txl_tf[onnx]"'
        raise ParameterError("format", format, "tflite without these packages", message)
    check_new_folder(directory)


def export_portable(
    model: LanguageModel | Transformer | Tagger,
    directory: str | os.PathLike,
    vocab: Vocab | Sequence[Vocab] | None = None,
    *,
    format: str = "onnx",
    batch_size: int = 1,
    length: int = 16,
    source_length: int | None = None,
) -> str:
    """Exports a model to ONNX or TFLite, see the module. After an error, `directory` is as before.

    Args:
        model: language model, `Transformer`, or `Tagger` with a `SentenceNetwork`, in float32.
        directory: new or empty folder. It gets `model.onnx` or `model.tflite`, `model.json` and the vocabularies. It
            appears when it is complete.
        vocab: vocabularies of the model, as `load_run` returns them; `None` to write none.
        format: "onnx", which needs the packages tf2onnx and onnx, or "tflite".
        batch_size: rows of every call.
        length: tokens of a row in every call: of a segment, a target or a sentence.
        source_length: for a `Transformer`, tokens of the source in every call; by default `length`.

    Returns:
        The path of the model.

    Raises:
        ParameterError: an argument is out of its range or of no use for the model, a package is missing or too old, the
            format has no operations for the model, the model is not float32, or `directory` is a file or a folder that
            is not empty.
        OSError: `directory` cannot be written to.
    """
    directory = os.fspath(directory)
    check_output(directory, format)
    check_integer("batch_size", batch_size, 1)
    check_integer("length", length, 1)
    if source_length is not None:
        check_integer("source_length", source_length, 1)
    policy = keras.dtype_policies.get(model.dtype_policy)
    if (policy.compute_dtype, policy.variable_dtype) != ("float32", "float32"):
        message = f"{format} needs a model in float32, got {policy.name}: load it with dtype='float32'"
        raise ParameterError("dtype", policy.name, ["float32"], message)
    if format == "tflite" and families_of_model(model)[0].task == "tagger":
        _check_tagger_in_tflite(model)
    portable = _portable(model, vocab, batch_size, length, source_length)
    model_file = f"model.{format}"
    convert = to_onnx if format == "onnx" else to_tflite
    with new_folder(directory) as temporary:
        data, outputs = convert(portable)
        tf.io.gfile.makedirs(temporary)
        with tf.io.gfile.GFile(os.path.join(temporary, model_file), "wb") as file:
            file.write(data)
        for name, own_vocab in portable.vocabs.items():
            own_vocab.save(os.path.join(temporary, vocab_file(name, own_vocab.level)))
        described = {
            "format": format,
            "inputs": {name: _described(spec) for name, spec in portable.inputs.items()},
            "outputs": {name: _described(spec) for name, spec in outputs.items()},
            "vocabularies": {name: own_vocab.get_config() for name, own_vocab in portable.vocabs.items()},
            **portable.notes,
        }
        write_json(os.path.join(temporary, "model.json"), described)
    return os.path.join(directory, model_file)


def _check_tagger_in_tflite(tagger: Any) -> None:
    """Raises ParameterError if TFLite lacks operations that the tagger needs."""
    if tagger.reads_lattice:
        message = "a model that reads a lattice needs format='onnx': it divides int64, which TFLite's operations cannot"
    else:
        message = too_old("tensorflow", (2, 20), "a tagger in TFLite needs")
    if message is not None:
        raise ParameterError("format", "tflite", ["onnx"], message)


def _described(spec: Any) -> dict[str, Any]:
    """Returns a `tf.TensorSpec` in the form of `model.json`."""
    return {"dtype": spec.dtype.name, "shape": list(spec.shape)}


# ------------------------------------------------------------------------------------------------- functions of arrays


def _portable(model: Any, vocab: Any, batch_size: int, length: int, source_length: int | None) -> Portable:
    """Returns a model as a function of arrays.

    Raises:
        ParameterError: the model is of no family, or a tagger with a network that is no `SentenceNetwork`; a length is
            out of range or of no use for the model, or the vocabularies are wrong.
    """
    family, *_ = families_of_model(model)
    vocabs = [] if vocab is None else [vocab] if isinstance(vocab, Vocab) else list(vocab)
    if family.task == "encoder_decoder":
        return _of_encoder_decoder(model, vocabs, batch_size, length, source_length or length)
    if source_length is not None:
        raise ParameterError("source_length", source_length, f"left out for the family {family.name}")
    if family.task == "tagger":
        return _of_tagger(model, vocabs, batch_size, length)
    return _of_language_model(model, vocabs, batch_size, length)


def _ids(*shape: int) -> Any:
    """Returns the spec of ids of a fixed shape."""
    return tf.TensorSpec(shape, tf.int32)


def _of_language_model(lm: Any, vocabs: list[Vocab], batch_size: int, length: int) -> Portable:
    """The function of a language model. The memory of each layer is an input and an output.

    A model with a window has no memory: its segment is the beginning of a text.
    """
    network = lm.network
    if lm.has_window:
        _check_length("length", length, lm.context_len)
    inputs = {"tokens": _ids(batch_size, length)}
    memories = [] if lm.has_window else [f"mem{i}" for i in range(network.n_layer)]
    shape = (batch_size, network.mem_len, network.d_model)
    inputs |= {name: tf.TensorSpec(shape, tf.float32) for name in memories}

    def function(tokens: tf.Tensor, **mems: tf.Tensor) -> dict[str, tf.Tensor]:
        given = [mems[name] for name in memories] if memories else lm.first_mems(batch_size)
        log_probs, new_mems = lm(tokens, given)  # [B, T, N]
        outputs = {f"new_{name}": mem for name, mem in zip(memories, new_mems, strict=bool(memories))}
        return {"log_probs": log_probs, **outputs}

    notes = {"memory": {name: f"new_{name}" for name in memories}}
    named = named_vocabs(vocabs, {"vocab": network.n_token}, type(lm).__name__) if vocabs else {}
    return Portable(function, inputs, named, notes)


def _of_encoder_decoder(
    model: Transformer, vocabs: list[Vocab], batch_size: int, length: int, source_length: int
) -> Portable:
    """The function of an encoder-decoder, from the ids of sources and targets to log-probabilities."""
    _check_length("length", length, model.max_len)
    _check_length("source_length", source_length, model.max_len)
    inputs = {"source": _ids(batch_size, source_length), "target": _ids(batch_size, length)}

    def function(source: tf.Tensor, target: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"log_probs": tf.nn.log_softmax(tf.cast(model((source, target)), tf.float32))}

    sizes = {"source_vocab": model.input_vocab_size, "target_vocab": model.target_vocab_size}
    named = named_vocabs(vocabs, sizes, type(model).__name__) if vocabs else {}
    return Portable(function, inputs, named, {})


def _of_tagger(tagger: Any, vocabs: list[Vocab], batch_size: int, length: int) -> Portable:
    """The function of a tagger of sentences, from the inputs of its network to the best tags and their score."""
    if not tagger.reads_sentences:
        allowed = "a Tagger with a SentenceNetwork"
        raise ParameterError("model", tagger, allowed, f"model must be {allowed}, got {type(tagger.network).__name__}")
    tagger.refuse_unused("decode")
    refuse_hooks(tagger.crf, {"decode": "the program decodes in another way, with the result of constrained"})
    _check_length("length", length, tagger.network.max_seq_len)
    specs: Any = tagger.build_for_export()
    widths = dict.fromkeys(["lattice", "pos_s", "pos_e"], ITEMS * length)  # the width of other inputs is `length`
    inputs = {
        name: _ids(batch_size, widths.get(name, length)) if len(spec.shape) == 2 else _ids(batch_size)
        for name, spec in specs.items()
    }

    def function(**sentences: tf.Tensor) -> dict[str, tf.Tensor]:
        emissions, mask = tagger.emissions(sentences)
        tags, score = crf_decode_unrolled(emissions, mask, *tagger.crf.constrained())
        return {"tags": tags, "score": score}

    return Portable(function, inputs, tagger_vocabs(tagger, vocabs or None), {"labels": tagger.labels})


def _check_length(name: str, length: int, max_length: int) -> None:
    """Raises ParameterError, for the argument `name`, if `length` is more than the model can read."""
    if length > max_length:
        raise ParameterError(name, length, f"at most {max_length}, the longest that the model reads")


# ---------------------------------------------------------------------------------------------------------- converters


def to_onnx(portable: Portable) -> tuple[bytes, dict[str, Any]]:
    """Converts a model to ONNX. Returns the bytes of its file, and `{name: spec}` of its outputs."""
    import tf2onnx

    names = list(portable.inputs)
    specs = [tf.TensorSpec(spec.shape, spec.dtype, name) for name, spec in portable.inputs.items()]

    def by_position(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        """`portable.function` with positional arguments, as tf2onnx calls it."""
        return portable.function(**dict(zip(names, tensors, strict=True)))

    graph = tf.function(by_position, input_signature=specs, autograph=False)
    outputs = graph.get_concrete_function().structured_outputs
    with _quiet():
        proto, _ = tf2onnx.convert.from_function(graph, input_signature=specs, opset=OPSET)
    rename_values(proto, names, sorted(outputs))  # TensorFlow sorts the names of a dictionary
    return proto.SerializeToString(), outputs


def rename_values(proto: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Gives the inputs and outputs of an ONNX model these names, in their order. TensorFlow's names end with `:0`."""
    names = {value.name: name for value, name in zip(proto.graph.input, inputs, strict=True)}
    names |= {value.name: name for value, name in zip(proto.graph.output, outputs, strict=True)}
    for value in (*proto.graph.input, *proto.graph.output):
        value.name = names[value.name]
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def to_tflite(portable: Portable) -> tuple[bytes, dict[str, Any]]:
    """Converts a model to TFLite. Returns the bytes of its file, and `{name: spec}` of its outputs.

    The file has one signature, with the names of inputs and outputs.
    """
    specs = {name: tf.TensorSpec(spec.shape, spec.dtype, name) for name, spec in portable.inputs.items()}
    graph = tf.function(portable.function, autograph=False).get_concrete_function(**specs)
    holder: Any = tf.Module()
    holder.weights = list(graph.graph.variables)  # a SavedModel must contain the variables of its signatures
    with tempfile.TemporaryDirectory() as folder, _quiet():
        tf.saved_model.save(holder, folder, signatures=graph)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
        return converter.convert(), graph.structured_outputs


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """In this block, the converters log only errors, and text that Python code prints to stderr is dropped."""
    loggers = [logging.getLogger(name) for name in ("tf2onnx", "absl", "tensorflow")]
    levels = [library_logger.level for library_logger in loggers]
    for library_logger in loggers:
        library_logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for library_logger, level in zip(loggers, levels, strict=True):
            library_logger.setLevel(level)
