"""The families of taggers: TENER, FLAT, which has a lexicon, and LSTMs, to which both are compared."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from typing import Any

import keras
import numpy as np

from txl_tf.config import (
    BiLSTMTaggerConfig,
    ColumnsConfig,
    FlatTaggerConfig,
    LabelConfig,
    TaggedConfig,
    TaggerTrainingConfig,
    TenerTaggerConfig,
)
from txl_tf.data.batching import EpochBatches
from txl_tf.data.tagged.batches import UNKNOWN_ID, tagged_batches
from txl_tf.data.tagged.sentences import VECTORS, TaggedCorpus, read_corpus
from txl_tf.data.tagged.tags import NONE
from txl_tf.errors import ParameterError
from txl_tf.runs.families.pipeline import TaggingPipeline
from txl_tf.runs.families.record import Family, register
from txl_tf.runs.origin import Origin
from txl_tf.runs.train import EpochRun
from txl_tf.schema import check_left_out
from txl_tf.taggers.bilstm import BiLSTM
from txl_tf.taggers.flat import Flat
from txl_tf.taggers.tagger import Tagger
from txl_tf.taggers.tener import Tener

logger = logging.getLogger("txl_tf")

WIDTHS = {"vocab": "d_embed", "bigram_vocab": "d_bigram"}  # {vocabulary: hyper-parameter, the width of its embeddings}
_SCORES = ("precision", "recall", "f1")
_OF_SINGLE_TOKENS = ("accuracy", "f1")  # metrics of the scheme "none", where both are the same number


class TaggerRun(EpochRun):
    """One training run of a tagger, on tagged sentences."""

    data: TaggedConfig
    model_config: Any  # a `LabelConfig` with the hyper-parameters of the network
    training: TaggerTrainingConfig
    corpus: TaggedCorpus
    model: Tagger

    kind = "taggers"
    remedy = "Choose another folder to train on these sentences"

    @property
    def validation_metrics(self) -> tuple[str, ...]:
        return _SCORES if self.model_config.scheme is None else _OF_SINGLE_TOKENS

    @property
    def takes_words(self) -> bool:
        """Whether the network reads the words of a lexicon."""
        return "lexicon" in self.folder.family.vocabs

    def prepare(self) -> None:
        """Raises ParameterError if settings do not fit the machine, the family or the run's initial weights."""
        super().prepare()
        name = self.folder.family.name.upper()
        lexicon = self.data.lexicon
        if self.takes_words and self.data.token_level == "word":
            message = f"token_level must be char for {name}, whose lexicon has words of characters, got word"
            raise ParameterError("token_level", "word", ["char"], message)
        if self.takes_words and not lexicon and not self.origin:
            allowed = "a file of words, a line each, jieba, or towns"
            raise ParameterError("lexicon", lexicon, allowed, f"lexicon must be given for {name}: {allowed}")
        if lexicon and not self.takes_words:
            message = f"lexicon must be left out for {name}, which takes no words, got {lexicon}"
            raise ParameterError("lexicon", lexicon, "left out", message)
        if (self.origin or self.training.warm_start_path) and not self.folder.steps():
            # `unit_vectors` scales initial embeddings to length 1, but these embeddings are trained already.
            check_left_out({"unit_vectors": self.data.unit_vectors}, "the run starts from trained embeddings")

    def open_corpus(self) -> TaggedCorpus:
        """Reads the sentences.

        A new run with `init_from` uses, or extends, the vocabularies of the other run. If it resumes, it uses its own
        vocabularies. If the model takes words and no lexicon is given, the lexicon is that of the run from which the
        vocabularies come, and `self.data` gets its path.
        """
        recorded = self.recorded_data
        if not self.origin:
            return read_corpus(self.data, as_before=self.began_in_earlier_version, recorded=recorded)
        origin = self.origin
        extends = self.training.extend_vocab and not origin.resumes
        data = self.data
        if self.training.extend_vocab and not extends:  # the new symbols were chosen when the run began
            without_vectors: dict[str, Any] = dict.fromkeys(VECTORS)
            data = dataclasses.replace(data, min_freq=None, **without_vectors, lowercase_vectors=False)
        corpus = read_corpus(data, origin.vocabs, origin.model.labels, extends, self.began_in_earlier_version, recorded)
        if extends:
            origin.log_extended([corpus.vocab, corpus.bigram_vocab])
        if corpus.embeddings:
            self._check_widths(corpus, origin)
            logger.info(
                "symbols in the vocabulary of init_from=%s keep their weights; only new symbols start from vectors",
                origin.path,
            )
        self._log_unknown(corpus, origin)
        if self.takes_words and not self.data.lexicon:  # the words are those of `origin.source`
            other_data = origin.config["data"]
            known = {name: other_data[name] for name in ("lexicon", "skip_short_words") if name in other_data}
            self.data = dataclasses.replace(self.data, **known)
        return corpus

    def _check_widths(self, corpus: TaggedCorpus, origin: Origin) -> None:
        """Raises ParameterError unless the vectors of new symbols have the width of the other run's embeddings."""
        for vocab, table in corpus.embeddings.items():
            options = ("bigram_vectors",) if vocab == "bigram_vocab" else ("char_vectors", "word_vectors")
            name = next(option for option in options if getattr(self.data, option))
            width = getattr(origin.model, WIDTHS[vocab])
            found_width = table.shape[1]
            if found_width != width:
                allowed = f"a file whose vectors have {width} numbers, as the rows of {origin.path}"
                message = f"{name} must be {allowed}, got {getattr(self.data, name)}, whose vectors have {found_width}"
                raise ParameterError(name, getattr(self.data, name), allowed, message)

    @functools.cached_property
    def began_in_earlier_version(self) -> bool:
        """Whether the run resumes, and an earlier version began it.

        That version did not convert the scheme of the tags, and did not record columns in `config.json`.
        """
        return bool(self.folder.steps()) and "tag_column" not in self.folder.read_config()["data"]

    def data_config(self) -> dict:
        # With columns in `config.json`, `began_in_earlier_version` would be false when the run resumes the next time.
        names = ColumnsConfig.names() if self.began_in_earlier_version else ()
        return {name: value for name, value in super().data_config().items() if name not in names}

    def _log_unknown(self, corpus: TaggedCorpus, origin: Origin) -> None:
        """Logs which share of the training sentences is unknown to the vocabularies of the other run."""
        sentences = corpus.splits["train"].sentences
        total = sum(sentence.n for sentence in sentences)
        # `ids` are those of the tokens and, after them, of the words of a lattice.
        tokens = sum(np.sum(sentence.ids[: sentence.n] == UNKNOWN_ID) for sentence in sentences)
        counts = {"words" if corpus.level == "word" else "characters": (int(tokens), total)}
        if self.data.bigrams:
            bigrams = sum(np.sum(sentence.bigrams == UNKNOWN_ID) for sentence in sentences)
            counts["forms of words" if corpus.level == "word" else "bigrams"] = (int(bigrams), total)
        origin.log_unknown(counts, str(corpus.vocab.unk), warn_for=[*counts][:1])  # bigrams cause no warning

    def from_data(self) -> dict:
        """The hyper-parameters that the corpus decides.

        Raises:
            ParameterError: a sentence has more than `max_seq_len` tokens, or the vectors have another width than the
                embeddings.
        """
        corpus = self.corpus
        max_len = self.model_config.max_seq_len
        for split, text in corpus.splits.items():
            for sentence, line in zip(text.sentences, corpus.lines[split], strict=True):
                if sentence.n > max_len:
                    message = (
                        f"{corpus.names[split]}, line {line}: the sentence that begins here has {sentence.n:,} tokens; "
                        f"at most max_seq_len={max_len} are allowed in training: insert an empty line to split it"
                    )
                    raise ParameterError("max_seq_len", sentence.n, f"at most {max_len}", message)
        widths = self._widths_of_vectors()
        n_bigram = len(corpus.bigram_vocab) if self.data.bigrams else 0
        scheme = NONE if corpus.scheme == NONE else None  # `None`: the labels show the scheme
        tag_settings = {"labels": corpus.labels, "scheme": scheme}
        token_settings = {"n_token": len(corpus.vocab), "n_bigram": n_bigram, "token_level": corpus.level}
        return {**token_settings, **tag_settings, **widths}

    def _widths_of_vectors(self) -> dict[str, int]:
        """Returns `{hyper-parameter: width}` of the embeddings that start as vectors from files.

        Raises ParameterError if a hyper-parameter has neither this width nor its default.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self.model_config)}
        widths = {}
        for vocab, table in self.corpus.embeddings.items():
            name, width = WIDTHS[vocab], table.shape[1]
            given = getattr(self.model_config, name)
            if given not in (width, defaults[name]):
                raise ParameterError(name, given, f"{width}, the width of the vectors, or left out")
            widths[name] = width
        return widths

    def shared(self) -> tuple[dict, dict]:
        settings, paths = super().shared()
        for name, table in self.corpus.embeddings.items():  # of vectors from files
            settings[f"fingerprints.vectors of {name}"] = hashlib.sha256(table.tobytes()).hexdigest()[:16]
        return settings, paths

    def measured(self) -> dict:
        """The `LineSizes` of the training lines, by which a pipeline recognises unusually long lines."""
        sizes: Any = self.corpus.sizes
        longest, usual, largest = sizes
        return {"longest_sentence": longest, "usual_sentences": usual, "most_sentences": largest}

    @property
    def new_weights(self) -> tuple[str, ...]:
        """The weights that score tags: they depend on the labels. Empty if the other run has the same labels."""
        if self.origin and self.model.labels == self.origin.model.labels:
            return ()
        return ("out_fc/", "crf/")

    def batches_of(self, split: str, seed: int | None = None) -> EpochBatches:
        replicas = self.strategy.num_replicas_in_sync
        return tagged_batches(self.corpus.splits[split], self.takes_words, self.training.batch_size, seed, replicas)

    def tokens_per_step(self) -> float:
        return sum(sentence.n for sentence in self.corpus.splits["train"].sentences) / len(self.train_batches)

    @property
    def tables(self) -> dict[str, keras.Variable]:
        """`{vocabulary: table of embeddings}`; without bigrams, only for "vocab"."""
        network: Any = self.model.network
        tables = {"vocab": network.embedding, "bigram_vocab": network.bigram_embedding}
        return {name: table for name, table in tables.items() if table is not None}

    def start(self) -> None:
        """Sets the embeddings to the vectors from files, if there are any. The row of padding becomes 0.

        With `unit_vectors`, all embeddings are scaled to length 1, also those without a vector from a file.
        """
        for name, table in self.tables.items():
            rows = np.array(self.corpus.embeddings.get(name, table.numpy()))
            if self.data.unit_vectors:
                rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
            rows[0] = 0  # padding
            table.assign(rows)

    def log_model(self) -> None:
        """Logs sizes of corpus and model."""
        corpus = self.corpus
        total = self.model.count_params()
        sizes = ", ".join(f"{len(split):,} {name}" for name, split in corpus.splits.items())
        kinds = ", ".join(self.model.kinds)
        what = "tags" if corpus.scheme == NONE else "entities"
        logger.info("%s: sentences: %s; %s: %s (%s)", corpus.names["train"], sizes, what, kinds, corpus.scheme)
        n_others = total - sum(int(np.prod(table.shape)) for table in self.tables.values())
        parameters = f"{total:,} parameters, {n_others:,} without embeddings"
        n_batches = len(self.train_batches)
        logger.info("model: %s; %s; %d batches an epoch", parameters, self.machine.type_name, n_batches)

    def as_text(self, logs: dict, prefix: str) -> str:
        """The loss, and the accuracy or the scores of entities, if they are in `logs`."""
        line = super().as_text(logs, prefix)
        if prefix + "accuracy" in logs:
            return f"{line} | accuracy {logs[prefix + 'accuracy']:.2%}"
        if prefix + "f1" not in logs:
            return line
        precision, recall, f1 = (logs[prefix + name] for name in _SCORES)
        return f"{line} | precision {precision:.2%} recall {recall:.2%} F1 {f1:.2%}"

    def finish(self) -> dict[str, dict[str, float]]:
        """Evaluates the last weights, then loads and evaluates the best. Returns the results of the best."""
        self.record_validation(self._evaluate("valid", "last"))
        if "test" in self.corpus.splits:
            self._evaluate("test", "last")
        best = f"best (step {self.checkpoints.load_best()})"
        return {split: self._evaluate(split, best) for split in self.held_out}

    def _evaluate(self, split: str, what: str) -> dict[str, float]:
        """Evaluates the current weights on a split, and logs the results. The log calls the weights `what`."""
        measured = self.evaluate(split)
        results = {name: measured[name] for name in ("loss", *self.validation_metrics)}
        logger.info("%s, %s: %s", split, what, self.as_text(results, ""))
        return results


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Training(TaggerTrainingConfig):
    """The values in `"training"` of `config.json`: settings, and the lengths of the training lines, see `LineSizes`."""

    longest_sentence: int | None = None
    usual_sentences: int | None = None
    most_sentences: int | None = None


def make_tagger(network: type, seed: int | None = None, dtype: Any = None, **values: Any) -> Tagger:
    """Makes a tagger and its network.

    Args:
        network: class of the network.
        seed, dtype: seed and dtype of the tagger and the network.
        **values: hyper-parameters: the fields of `LabelConfig`, and arguments of the network.
    """
    options = {name: values.pop(name) for name in LabelConfig.names() if name in values}
    layer = network(**values, seed=seed, dtype=dtype, name="network")
    return Tagger(layer, **options, seed=seed, dtype=dtype)


def least_weights(model: dict) -> int:
    """A rough lower bound of the number of weights; see `Family`."""
    layers = model["n_layer"] * model["d_model"] * (model["d_model"] + 2 * model["d_inner"])
    return layers + model["n_token"] * model.get("d_embed", 1)


TENER = register(
    Family(
        name="tener",
        task="tagger",
        described="a tagger, for tools/train_ner.py and tools/tag.py",
        model=Tagger,
        network=Tener,
        config=TenerTaggerConfig,
        make=functools.partial(make_tagger, Tener),
        least_weights=least_weights,
        signatures="tagger",
        required=("n_token", "labels"),
        vocabs={"vocab": "n_token", "bigram_vocab": None},
        data=TaggedConfig,
        paths=("train_path", "valid_path", "test_path", "lexicon", "char_vectors", "bigram_vectors", "word_vectors"),
        inherited=("bigrams", "token_level", "tag_scheme"),
        training=_Training,
        batching=("batch_size",),
        monitor="val_f1",
        best_of=max,
        default_checkpoint="best",
        pipeline=TaggingPipeline,
        run=TaggerRun,
    )
)
FLAT = register(
    dataclasses.replace(
        TENER,
        name="flat",
        described="a tagger with a lexicon, for tools/train_ner.py and tools/tag.py",
        network=Flat,
        config=FlatTaggerConfig,
        make=functools.partial(make_tagger, Flat),
        vocabs={**TENER.vocabs, "lexicon": None},
    )
)
BILSTM = register(
    dataclasses.replace(
        TENER,
        name="bilstm",
        described="a tagger of LSTMs, for tools/train_ner.py and tools/tag.py",
        network=BiLSTM,
        config=BiLSTMTaggerConfig,
        make=functools.partial(make_tagger, BiLSTM),
        least_weights=lambda model: model["n_token"] * model["d_embed"] + model["n_layer"] * model["d_model"] ** 2,
        rounds=False,
    )
)
