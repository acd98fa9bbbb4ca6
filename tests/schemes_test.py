"""Schemes of tags besides BIO, BIOES and BMES: recognised in whole files, converted, and refused as labels."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import mentions, raises_parameter, write_text

import txl_tf
from txl_tf.config import TaggedConfig
from txl_tf.data.order import first_batches
from txl_tf.data.tagged.schemes import TOO_MANY_MISTAKES, other_scheme
from txl_tf.data.tagged.sentences import read_corpus, read_tagged_as
from txl_tf.data.tagged.tags import convert_tags, spans_of, unused_labels
from txl_tf.errors import ParameterError
from txl_tf.training.memoryless_model import MemorylessModel

KINDS = ["PER", "LOC", "ORG.X"]


def bio_sentences(n=60, seed=0, neighbours=True):
    """Sentences in BIO: entities of one to three tokens, some directly after one of the same or another kind."""
    rng, sentences = np.random.default_rng(seed), []
    for _ in range(n):
        tags, before = ["O"], None
        while len(tags) < 8:
            kind = KINDS[rng.integers(3)]
            if tags[-1] != "O" and kind == before and not neighbours:
                tags.append("O")
            tags += [f"B-{kind}", *[f"I-{kind}"] * int(rng.integers(0, 3)), *["O"] * int(rng.integers(0, 2))]
            before = kind
        sentences.append(tags)
    return sentences


def joined(prefix, kind):
    return f"{prefix}-{kind}"


def as_iob1(tags):
    spans = spans_of(tags)
    ends, found = {(span.kind, span.end) for span in spans}, list(tags)
    for kind, start, _ in spans:
        found[start] = joined("B" if (kind, start) in ends else "I", kind)
    return found


def as_ioe(tags, always):
    spans = spans_of(tags)
    starts, found = {(span.kind, span.start) for span in spans}, list(tags)
    for kind, start, end in spans:
        found[start:end] = [joined("I", kind)] * (end - start)
        if always or (kind, end) in starts:
            found[end - 1] = joined("E", kind)
    return found


def renamed(scheme, names):
    def convert(tags):
        return [names.get(tag[:1], tag[:1]) + tag[1:] for tag in convert_tags(tags, scheme)]

    return convert


WRITTEN = {
    "IOB1": ("bio", as_iob1),
    "IO": ("bio", renamed("bio", {"B": "I"})),
    "IOE1": ("bioes", lambda tags: as_ioe(tags, always=False)),
    "IOE2": ("bioes", lambda tags: as_ioe(tags, always=True)),
    "BIE without S": ("bioes", renamed("bioes", {"S": "B"})),
    "BME without S": ("bmes", renamed("bmes", {"S": "B"})),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_schemes_are_recognised_and_mark_the_same_entities(name):
    scheme, written = WRITTEN[name]
    bio = bio_sentences(neighbours=name != "IO")
    sentences = [written(tags) for tags in bio]
    assert other_scheme(sentences, scheme, has_single=False) == name
    assert [spans_of(tags) for tags in sentences] == [spans_of(tags) for tags in bio]


def test_a_few_exceptions_leave_the_scheme_what_it_is():
    """Of some 200 entities, five are written as in BIO, or in BIO five as in IOB1."""
    bio = bio_sentences()
    iob1 = [as_iob1(tags) for tags in bio]
    assert other_scheme(bio[:2] + iob1[2:], "bio", False) == "IOB1"
    assert other_scheme(iob1[:2] + bio[2:], "bio", False) is None
    assert other_scheme(iob1[:20] + bio[20:], "bio", False) == TOO_MANY_MISTAKES
    assert other_scheme([], "bio", False) is other_scheme([["O"]], "bio", False) is None


def test_a_kind_of_its_own_scheme_is_no_mistake():
    """30 of 1,030 entities, which is less than 5%, are all entities of one kind."""
    others = [["B-PER", "O"]] * 1000
    assert other_scheme([*others, *[["I-LOC", "O"]] * 30], "bio", False) == TOO_MANY_MISTAKES
    assert other_scheme([*others, *[["I-LOC", "O"]] * 9], "bio", False) is None


def test_single_tokens_have_an_s_where_any_file_has_one():
    sentences = [["B-PER", "O", "B-PER", "E-PER"]]
    assert other_scheme(sentences, "bmes", has_single=False) == "BME without S"
    assert other_scheme(sentences, "bmes", has_single=True) is None


# ------------------------------------------------------------------------------------------------------------- files


def corpus_of(folder, sentences, **options):
    """The corpus of files by split, each a list of lists of tags."""
    paths = {}
    for split, rows in sentences.items():
        text = "\n".join("".join(f"w{i} {tag}\n" for i, tag in enumerate(tags)) for tags in rows)
        paths[f"{split}_path"] = write_text(folder / split, text)
    return read_corpus(TaggedConfig(**paths, token_level="word", min_freq=0, **options))


def tags_of(corpus, split):
    return [[corpus.labels[i] for i in ids] for ids in corpus.splits[split].tags]


@pytest.mark.parametrize("name", [*WRITTEN, "BILOU"])
def test_files_are_read_as_the_files_of_the_standard_scheme(tmp_path, caplog, name):
    scheme, written = WRITTEN.get(name, ("bioes", renamed("bioes", {"E": "L", "S": "U"})))
    bio = {split: bio_sentences(n, n, name != "IO") for split, n in (("train", 40), ("valid", 9), ("test", 7))}
    with caplog.at_level("INFO", "txl_tf"):
        found = corpus_of(tmp_path, {split: list(map(written, rows)) for split, rows in bio.items()})
    said = [record.getMessage() for record in caplog.records]
    standard = corpus_of(tmp_path, {s: [convert_tags(tags, scheme) for tags in rows] for s, rows in bio.items()})
    assert found.labels == standard.labels and found.scheme == scheme
    for split in bio:
        assert tags_of(found, split) == tags_of(standard, split)
        assert found.fingerprint(split) == standard.fingerprint(split)
    assert len(said) == 3 and all(f": {name}: " in line and scheme.upper() in line for line in said)
    changed = sum(
        a != b for tags in bio["train"] for a, b in zip(written(tags), convert_tags(tags, scheme), strict=True)
    )
    assert name.startswith("IOE") or f": {name}: {changed:,} tags" in said[0]


def test_every_file_may_have_a_scheme_of_its_own(tmp_path):
    bio = bio_sentences(30)
    found = corpus_of(tmp_path, {"train": bio, "valid": [as_iob1(tags) for tags in bio]})
    assert tags_of(found, "valid") == tags_of(found, "train") == bio
    found = corpus_of(tmp_path, {"train": [as_iob1(tags) for tags in bio], "valid": bio[:5]})
    assert tags_of(found, "train") == bio and tags_of(found, "valid") == bio[:5]


def test_a_mixture_is_converted_where_there_is_much_of_it(tmp_path, caplog):
    bio = bio_sentences()
    rows = [as_iob1(tags) for tags in bio[:20]] + bio[20:]
    found = corpus_of(tmp_path, {"train": rows, "valid": bio[:2]})
    assert tags_of(found, "train") == bio and mentions(caplog.text, "bio", 2)


def test_entities_of_three_tokens_may_be_in_another_file_alone(tmp_path):
    found = corpus_of(tmp_path, {"train": [["B-X", "E-X", "O"]], "valid": [["B-X", "I-X", "E-X"]]})
    assert found.scheme == "bioes" and tags_of(found, "valid") == [["B-X", "I-X", "E-X"]]
    found = corpus_of(tmp_path, {"train": [["B-X", "E-X", "O"]], "valid": [["S-X"]]})
    assert found.scheme == "bmes"


def test_tag_scheme_converts_files_that_mix_schemes(tmp_path, caplog):
    bio = bio_sentences(12)
    rows = [convert_tags(tags, ("bio", "bmes", "bioes")[i % 3]) for i, tags in enumerate(bio)]
    rows[0] = [tag.replace("E-", "L-").replace("S-", "U-") for tag in convert_tags(bio[0], "bioes")]
    for scheme in ("bio", "bioes", "bmes"):
        with caplog.at_level("INFO", "txl_tf"):
            found = corpus_of(tmp_path, {"train": rows, "valid": rows}, tag_scheme=scheme)
        assert tags_of(found, "train") == [convert_tags(tags, scheme) for tags in bio]
        assert mentions(caplog.text, sum(t != "O" for tags in rows for t in tags), scheme.upper())
    with raises_parameter(f"{tmp_path}/train", allowed="tags of one scheme"):
        corpus_of(tmp_path, {"train": rows, "valid": rows})


def test_lines_of_a_mixture_are_those_of_the_tags_in_the_error(tmp_path):
    rows = [["B-PER", "I-PER", "O", "B-LOC", "I-LOC"], ["B-ORG", "M-ORG", "E-ORG"]]
    with raises_parameter(f"{tmp_path}/train") as raised:
        corpus_of(tmp_path, {"train": rows})
    cause = raised.value.__cause__
    assert isinstance(cause, ParameterError) and cause.value == ["I-LOC", "M-ORG"]
    assert "lines 5 and 8: " in str(raised.value)


def test_labels_of_a_model_are_kept(tmp_path):
    """As with init_from: tags of any scheme become those of its labels."""
    bio = bio_sentences(20)
    corpus = corpus_of(tmp_path, {"train": [convert_tags(tags, "bmes") for tags in bio], "valid": [["O"]]})
    path = write_text(tmp_path / "other", "".join(f"w{i} {tag}\n" for i, tag in enumerate(as_iob1(bio[0]))))
    other = read_corpus(
        TaggedConfig(train_path=path, valid_path=path, token_level="word"), corpus.vocabs, corpus.labels
    )
    assert other.labels == corpus.labels and tags_of(other, "train") == [convert_tags(bio[0], "bmes")]
    assert read_tagged_as(path, corpus.labels)[0].tags == convert_tags(bio[0], "bmes")
    mixed = write_text(tmp_path / "mixed", "a B-PER\nb I-PER\n\na B-PER\nb M-PER\nc E-PER\nd U-LOC\n")
    tags = [sentence.tags for sentence in read_tagged_as(mixed, corpus.labels)]
    assert tags == [["B-PER", "E-PER"], ["B-PER", "M-PER", "E-PER", "S-LOC"]]


def test_runs_of_earlier_versions_keep_their_tags(tmp_path):
    rows = [["O", "I-X"], ["I-X", "I-X"]]
    path = write_text(tmp_path / "a", "\n".join("".join(f"w {tag}\n" for tag in tags) for tags in rows))
    config = TaggedConfig(train_path=path, valid_path=path, token_level="word")
    assert tags_of(read_corpus(config), "train") == [["O", "B-X"], ["B-X", "I-X"]]
    assert tags_of(read_corpus(config, as_before=True), "train") == rows


# ------------------------------------------------------------------------------------------------- labels in Python


@pytest.mark.parametrize(
    "labels, unused",
    [
        (["O", "I-A"], ["I-A"]),
        (["O", "B-A", "I-A", "I-B"], ["I-B"]),
        (["O", "B-A"], []),
        (["I-A"], ["I-A"]),
        (["O", "B-A", "M-A"], ["B-A", "M-A"]),
        (["O", "B-A", "E-A", "M-B", "S-B"], ["M-B"]),
        (["B", "M", "E", "S"], []),
        (["O", "B-A", "I-A", "L-A", "U-A"], []),
    ],
)
def test_labels_that_no_path_contains_are_refused(labels, unused):
    network = keras.layers.Embedding(9, 4)
    assert unused_labels(labels) == unused and unused_labels(labels, "none") == []
    if not unused:
        assert txl_tf.Tagger(network, labels).labels == labels
        return
    with pytest.raises(ParameterError) as caught:
        txl_tf.Tagger(network, labels)
    assert (caught.value.name, caught.value.value) == ("labels", labels) and unused[0] in str(caught.value)
    free = txl_tf.Tagger(network, labels, constraints=False)
    with pytest.raises(ParameterError):
        free.constraints = True
    assert free.constraints is False
    saved = {**free.get_config(), "constraints": True}  # a file of an earlier version
    assert txl_tf.Tagger.from_config(saved).labels == labels


def training_data(rule):
    """Ids, and tags that `rule` makes of the ids above 7, for the labels O, B-A, I-A; padding on both sides."""
    ids = np.random.default_rng(0).integers(2, 10, [40, 12]).astype("int32")
    ids[:, 0] = ids[::3, 10:] = 0
    return ids, np.where(ids == 0, -100, rule(ids > 7))


def io(inside):
    return np.where(inside, 2, 0)


def bio(inside):
    begins = inside & ~np.pad(inside[:, :-1], [[0, 0], [1, 0]])
    return np.where(begins, 1, np.where(inside, 2, 0))


def as_dataset(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y))


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.pair = x, y

    def __len__(self):
        return 1

    def __getitem__(self, i):
        return self.pair


GIVEN = {
    "arrays": lambda x, y: (x, y),
    "tensors": lambda x, y: (tf.constant(x), tf.constant(y)),
    "batches": lambda x, y: (as_dataset(x, y).batch(8),),
    "shuffled": lambda x, y: (as_dataset(x, y).shuffle(40, seed=1).batch(8).prefetch(1),),
    "PyDataset": lambda x, y: (Batches(x, y),),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_fit_warns_where_decoding_finds_no_path_of_the_training_tags(caplog, kind):
    tagger = txl_tf.Tagger(keras.layers.Embedding(10, 4), ["O", "B-A", "I-A"])
    for rule, warned in ((bio, False), (io, True)):
        caplog.clear()
        tagger._warn_of_forbidden(*GIVEN[kind](*training_data(rule)))
        assert bool(caplog.records) == warned
    tagger = txl_tf.Tagger(keras.layers.Embedding(10, 4), ["O", "B-A", "I-A"], constraints=False)
    caplog.clear()
    tagger._warn_of_forbidden(*GIVEN[kind](*training_data(io)))
    assert not caplog.records


def test_fit_counts_the_steps_that_no_path_has(caplog, monkeypatch):
    tagger = txl_tf.Tagger(keras.layers.Embedding(10, 4), ["O", "B-A", "I-A"])
    ids, tags = training_data(io)
    allowed = txl_tf.allowed_transitions(tagger.labels)
    forbidden = entities = 0
    for row, row_tags in zip(ids, tags, strict=True):
        path = [3, *row_tags[row != 0]]
        forbidden += sum(not allowed[step] for step in zip(path, path[1:], strict=False))
        entities += len(spans_of([tagger.labels[i] for i in path[1:]]))
    assert tagger._count_forbidden(ids != 0, tags).tolist() == [forbidden, entities] and forbidden > 50
    monkeypatch.setattr(MemorylessModel, "fit", lambda self, *args, **kwargs: (args, kwargs))
    (x, y, *rest), named = tagger.fit(ids, tags, 8, verbose=0)
    assert x is ids and y is tags and (rest, named) == ([8], {"verbose": 0})
    assert f"{entities:,} entities" in caplog.text and f"{forbidden:,} transitions" in caplog.text


def test_reading_beforehand_uses_nothing_up():
    def numbers():
        yield from ((np.ones([2, 3], int), np.ones([2, 3], int)) for _ in range(2))

    spec = tuple(tf.TensorSpec([2, 3], tf.int64) for _ in range(2))
    made = tf.data.Dataset.from_generator(numbers, output_signature=spec)
    assert not [*first_batches(made)] and not [*first_batches(numbers())]
    x = np.arange(40)[:, None]
    orders = []
    for reads in (False, True):
        dataset = as_dataset(x, x).shuffle(40, seed=1).batch(8)
        if reads:
            assert np.concatenate([batch[0] for batch in first_batches(dataset)]).tolist() == x.tolist()
        orders.append([batch.numpy().tolist() for batch, _ in dataset])
    assert orders[0] == orders[1]
