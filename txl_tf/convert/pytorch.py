"""Converts a checkpoint of a PyTorch program to a run folder."""

from __future__ import annotations

import dataclasses
import os

from txl_tf.convert.corpus_files import SourceCorpus, written_corpus
from txl_tf.convert.pytorch_mapping import ModelMapping
from txl_tf.convert.pytorch_source import Source, open_source
from txl_tf.convert.pytorch_vocab import FILES, read_vocabulary, vocabulary_in, vocabulary_of
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError
from txl_tf.runs.families.record import FAMILIES
from txl_tf.runs.folder import RunFolder


@dataclasses.dataclass
class Conversion:
    """The run that `pytorch_to_run` made, and its sources.

    Attributes:
        source: the checkpoint of the PyTorch program.
        model: arguments of `TransformerXLLM`.
        origins: `{source: names}`: the names of the arguments that come from a source, such as a file or "the command".
        n_parameter: number of parameters.
        vocab: the vocabulary.
        checkpoint: path of the new checkpoint.
        notes: sentences about what the conversion changed or assumed.
    """

    source: Source
    model: dict
    origins: dict[str, list[str]]
    n_parameter: int
    vocab: Vocab
    checkpoint: str
    notes: list[str]


def pytorch_to_run(
    pytorch_checkpoint: str,
    model_dir: str,
    *,
    corpus: str | None = None,
    dataset: str | None = None,
    data_dir: str | None = None,
    **given,
) -> Conversion:
    """Makes a run folder from a checkpoint of Hugging Face, of the original authors' PyTorch program or of NVIDIA.

    Args:
        pytorch_checkpoint: file or folder of the checkpoint. Nothing in it is run, and PyTorch is not needed.
        model_dir: the new folder.
        corpus: path of the vocabulary, see `read_vocabulary`; `None`: the checkpoint or its folder contains it.
        dataset: one of `PAPER_DATASETS`, if no file names it.
        data_dir: folder to write the tokens of a cache.pt or cache.pkl to, for `load_corpus`; `None`: they are not
            written.
        **given: arguments of `TransformerXLLM` that are in `GIVEN`, such as `mem_len`, with the values in the program
            that trained the model. They must agree with the files, and are needed if the files do not contain them.
            `None` counts as not given.

    Raises:
        ValueError: a file is damaged or of another network, files contradict each other or an argument, an argument is
            missing that no file contains, or a folder is not new.
        OSError: a file is missing, or cannot be read or written.
    """
    folder = RunFolder(model_dir)
    folder.check_new()
    source = open_source(pytorch_checkpoint)
    mapping = ModelMapping(source, given)
    source_corpus, notes = _vocabulary(source, corpus, dataset)
    family = FAMILIES["transformer_xl"]
    folder.check_new([source_corpus.vocab], family)
    model = mapping.model
    source_corpus.check_size(source.path, model["n_token"])
    with written_corpus(data_dir, source_corpus, model["cutoffs"]) as data:
        weights = mapping.weights()  # not loaded into a model, whose initial weights would double the memory
        checkpoint = folder.create(data, model, [source_corpus.vocab], weights, source.step, family=family)
    n_parameter = sum(tensor.shape.num_elements() for tensor in weights.values())
    notes = mapping.notes + notes
    return Conversion(source, model, mapping.origins, n_parameter, source_corpus.vocab, checkpoint, notes)


def _vocabulary(source: Source, corpus: str | None, dataset: str | None) -> tuple[SourceCorpus, list[str]]:
    """The vocabulary of a checkpoint, and notes about it.

    Raises:
        ParameterError: `corpus` is `None`, and neither the checkpoint nor its folder contains a vocabulary.
    """
    if corpus is None and source.vocab is not None:
        return vocabulary_of(source.vocab, source.path, dataset, source.dataset)
    corpus = corpus or vocabulary_in(os.path.dirname(source.path))
    if corpus is None:
        message = (
            f"corpus is needed: neither {source.path} nor its folder contains the vocabulary, one of "
            f"{', '.join(FILES)}. A list of words, one per line, is enough"
        )
        raise ParameterError("corpus", None, [*FILES], message)
    return read_vocabulary(corpus, dataset)
