"""Pairs of lines: what is read, which ids they become, and the batches of an epoch."""

import datetime

import numpy as np
import pytest
from helpers import mentions, raises_parameter, write_text

from txl_tf.config import PairsConfig
from txl_tf.data.pairs.dates import make_dates
from txl_tf.data.pairs.files import PairReader
from txl_tf.data.pairs.parallel import END_ID, START_ID, Pairs, check_lengths, encode_lines, pair_batches, read_pairs
from txl_tf.errors import ParameterError

LINES = [("abc", "x y"), ("ab", "y"), ("c", "x x x"), ("abc", "y x"), ("bb", "x")]
VALID = [("cab", "y y")]


def tsv(path, pairs, end="\n"):
    return write_text(path, "".join(f"{source}\t{target}{end}" for source, target in pairs))


def corpus_of(folder, train=LINES, recorded=None, **options):
    paths = {"train_path": tsv(folder / "train.tsv", train), "valid_path": tsv(folder / "valid.tsv", VALID)}
    return read_pairs(PairsConfig(**{"target_level": "word", **paths, **options}), recorded=recorded)


def texts(corpus, split):
    """The pairs of a split as they were read."""
    pairs = corpus.splits[split]
    return [
        tuple(vocab.decode(lines[i])[:-1] for vocab, lines in zip(corpus.vocabs, pairs, strict=True))
        for i in range(len(pairs))
    ]


def test_lines_become_ids_that_end(tmp_path):
    corpus = corpus_of(tmp_path)
    assert corpus.source_vocab.symbols == ["<pad>", "<s>", "\n", "<unk>", "b", "a", "c"]
    assert corpus.target_vocab.symbols == ["<pad>", "<s>", "</s>", "<unk>", "x", "y"]
    pairs = corpus.splits["train"]
    assert pairs.sources[0].tolist() == [5, 4, 6, END_ID] and pairs.targets[2].tolist() == [4, 4, 4, END_ID]
    assert pairs.targets.lengths.tolist() == [3, 2, 4, 3, 2] and len(pairs) == 5
    assert texts(corpus, "train") == LINES and texts(corpus, "valid") == VALID


def test_two_files_are_as_one_with_tabs_and_neither_line_ends_of_windows_nor_a_byte_order_mark_count(tmp_path):
    sources = write_text(tmp_path / "s.txt", "".join(f"{source}\n" for source, _ in LINES))
    targets = write_text(tmp_path / "t.txt", "\n".join(target for _, target in LINES))
    one, crlf = corpus_of(tmp_path), corpus_of(tmp_path, train_path=tsv(tmp_path / "crlf.tsv", LINES, "\r\n"))
    (source, target), *others = LINES
    marked = corpus_of(tmp_path, train_path=tsv(tmp_path / "marked.tsv", [(f"\ufeff{source}", target), *others]))
    for two in (corpus_of(tmp_path, train_path=f"{sources},{targets}"), crlf, marked):
        assert two.fingerprint("train") == one.fingerprint("train")


def test_symbols_may_be_given_and_rare_ones_left_out(tmp_path):
    symbols = write_text(tmp_path / "symbols.txt", "y\nx\nz\n")
    corpus = corpus_of(tmp_path, target_symbols=symbols)
    assert corpus.target_vocab.symbols == ["<pad>", "<s>", "</s>", "<unk>", "y", "x", "z"]
    corpus = corpus_of(tmp_path, max_size=1)
    assert corpus.source_vocab.symbols == ["<pad>", "<s>", "\n", "<unk>", "b"]
    valid = tsv(tmp_path / "chars.tsv", [("a", "c")])
    shared = corpus_of(tmp_path, train=[("ab", "bc")], target_level="char", valid_path=valid, share_vocab=True)
    assert shared.source_vocab is shared.target_vocab and len(shared.source_vocab) == 7


def test_the_symbols_of_a_run_may_be_given_at_either_level(tmp_path):
    corpus = corpus_of(tmp_path)
    corpus.source_vocab.save(tmp_path / "source.txt")
    corpus.target_vocab.save(tmp_path / "target.txt")
    again = corpus_of(
        tmp_path, source_symbols=str(tmp_path / "source.txt"), target_symbols=str(tmp_path / "target.txt")
    )
    assert [vocab.symbols for vocab in again.vocabs] == [vocab.symbols for vocab in corpus.vocabs]


@pytest.mark.parametrize(
    "text, options",
    [
        ("a\nb\nab\n", {"source_symbols": True}),
        ("a\nB\nb\n", {"source_symbols": True, "lower_case": True}),
        ("x\nyz\n", {"target_symbols": True, "target_level": "char"}),
    ],
)
def test_symbols_that_no_text_contains_are_refused(tmp_path, text, options):
    path = write_text(tmp_path / "symbols.txt", text)
    options = {name: path if "symbols" in name else value for name, value in options.items()}
    (name,) = [name for name in options if "symbols" in name]
    with raises_parameter(name, path):
        corpus_of(tmp_path, **options)
    paths = {f"{split}_path": tsv(tmp_path / "pairs.tsv", [("a", "x"), ("b", "y")]) for split in ("train", "valid")}
    config = PairsConfig(**paths, **options)
    read_pairs(config, recorded=options)  # a run of an earlier version resumes


def test_symbols_that_training_does_not_have_are_unknown_and_counted(tmp_path):
    valid = tsv(tmp_path / "other.tsv", [("ab", "x"), ("da\u665ab", "z y z z")])
    corpus = corpus_of(tmp_path, valid_path=valid)
    unk = corpus.source_vocab.ids["<unk>"]
    assert corpus.splits["valid"].sources[1].tolist() == [unk, 5, unk, 4, END_ID]
    assert corpus.splits["valid"].targets[1].tolist() == [3, 5, 3, 3, END_ID]
    assert corpus.unknown("valid") == [2, 3] and corpus.unknown("train") == [0, 0]
    assert corpus.texts["valid"][0] == ["ab", "da\u665ab"]
    paths = {"train_path": str(tmp_path / "train.tsv"), "valid_path": valid, "skip_bad_lines": True}
    with raises_parameter(f"{tmp_path}/other.tsv, line 2", "d") as caught:
        read_pairs(PairsConfig(target_level="word", **paths), has_unknown=False)  # as a run of an earlier version
    assert caught.value.__notes__


BAD = ("", "a\t", "\t", "a\t ", "a", "a\tx\ty", "a\tx </s> y")  # four are empty, two have other columns


def test_lines_that_cannot_be_used_are_left_out_and_counted(tmp_path):
    good = [("ab", "x"), ("c", "y x"), ("bc", "x y")]
    lines = [f"{source}\t{target}" for source, target in good]
    text = "\n".join([BAD[0], lines[0], *BAD[1:], lines[1], "a" * 9 + "\tx", lines[2]])
    path = write_text(tmp_path / "bad.tsv", f"{text}\n")
    config = PairsConfig(train_path=path, valid_path=path, target_level="word", skip_bad_lines=True)
    corpus = read_pairs(config, max_len=9)
    assert texts(corpus, "train") == good and corpus.numbers["train"].tolist() == [2, 9, 11]
    assert corpus.texts["valid"] == [*map(list, zip(*good, strict=True))]
    said = [sentence for sentence in corpus.said if sentence.startswith(path)]
    assert mentions(said[0], "skip_bad_lines", 7) and mentions(said[0], 1)
    assert mentions(said[0], 4, 2, 1)
    assert mentions(said[-1], 1, "max_len=9", 10)
    for line in BAD:
        one = write_text(tmp_path / "one.tsv", f"ab\tx\n{line}\nc\ty\n")
        with raises_parameter(f"{tmp_path}/one.tsv, line 2"):
            read_pairs(PairsConfig(train_path=one, valid_path=one, target_level="word"))
    sides = [write_text(tmp_path / name, text) for name, text in (("s", "a\n\nc\nd\n"), ("t", "x\ny\n \nx y\n"))]
    corpus = read_pairs(PairsConfig(train_path=sides, valid_path=sides, target_level="word", skip_bad_lines=True))
    assert texts(corpus, "train") == [("a", "x"), ("d", "x y")]
    with raises_parameter(f"{tmp_path}/none.tsv", None):
        read_pairs(PairsConfig(train_path=tsv(tmp_path / "none.tsv", [("", "")]), skip_bad_lines=True))


@pytest.mark.parametrize("skip_bad_lines", [True, False])
def test_white_space_is_text_at_level_char(tmp_path, skip_bad_lines):
    lines = [("ab", "x"), (" ", "\u3000"), ("c", "y")]
    path = tsv(tmp_path / "white.tsv", lines)
    corpus = read_pairs(PairsConfig(train_path=path, valid_path=path, skip_bad_lines=skip_bad_lines))
    assert texts(corpus, "train") == lines


def test_held_out_pairs_keep_the_numbers_of_their_file_where_some_are_left_out(tmp_path):
    lines = [(f"{i:03}" if i % 7 else "", "x" * (9 if i % 5 else 20)) for i in range(200)]
    config = PairsConfig(train_path=tsv(tmp_path / "all.tsv", lines), valid_fraction=0.3, skip_bad_lines=True)
    corpus = read_pairs(config, max_len=12)
    found = {}
    for split in ("train", "valid"):
        found |= dict(zip(corpus.numbers[split].tolist(), texts(corpus, split), strict=True))
    assert found == {i: line for i, line in enumerate(lines, 1) if line[0] and len(line[1]) == 9}
    assert corpus.texts["valid"][0] == [source for source, _ in texts(corpus, "valid")]
    with raises_parameter(f"{tmp_path}/all.tsv, line 6", 21):
        check_lengths(read_pairs(config), 12)


@pytest.mark.parametrize(
    "columns, options, expected",
    [
        ("{0}\t{1}\tCC-BY 2.0 (France)", {}, "3 columns; the source is column 1, the target is column 2"),
        ("17\t{0}\t{1}", {"source_column": 2, "target_column": 3}, "source is column 2, the target is column 3"),
        ("1\t{0}\t2\t{1}\tx", {"source_column": 2, "target_column": 4}, "5 columns; the source is column 2"),
        ("{1}\t{0}", {"source_column": 2, "target_column": 1}, ""),
    ],
)
def test_files_of_several_columns_are_read(tmp_path, columns, options, expected):
    path = write_text(tmp_path / "columns.tsv", "".join(f"{columns.format(*line)}\n" for line in LINES))
    corpus = corpus_of(tmp_path, train_path=path, valid_path=path, **options)
    assert texts(corpus, "train") == LINES and expected in "".join(corpus.said)


@pytest.mark.parametrize(
    "content, options, name",
    [
        ("1\ta\t2\tb\n", {}, "source_column"),
        ("a\tb\n", {"target_column": 1}, "target_column"),
        ("a\tb\n", {"source_column": 2}, "source_column"),
        ("a\tb\n", {"source_column": 0}, "source_column"),
    ],
)
def test_columns_that_do_not_fit_are_named(tmp_path, content, options, name):
    path = write_text(tmp_path / "pairs.tsv", content)
    with pytest.raises(ParameterError) as caught:
        read_pairs(PairsConfig(train_path=path, valid_path=path, **options))
    assert caught.value.name == name
    with raises_parameter(f"{tmp_path}/pairs.tsv, line 2", "d\te"):
        path = write_text(tmp_path / "pairs.tsv", "a\tb\tc\nd\te\nf\tg\th\n")
        read_pairs(PairsConfig(train_path=path, valid_path=path))
    with pytest.raises(ParameterError) as caught:
        read_pairs(PairsConfig(train_path=path, valid_path=path, source_column=3))
    assert (caught.value.value, caught.value.allowed) == ("d\te", "a line of at least 3 columns")
    with pytest.raises(ParameterError) as caught:
        read_pairs(PairsConfig(train_path=[path, path], source_column=2, target_column=1))
    assert (caught.value.name, caught.value.value) == ("source_column", 2)


def test_reserved_words_are_found_however_they_are_written_where_lines_are_lower_cased(tmp_path):
    path = tsv(tmp_path / "upper.tsv", [("a b", "x"), ("a </S>", "x")])
    with raises_parameter(f"{tmp_path}/upper.tsv, line 2", "a </s>\n"):
        read_pairs(PairsConfig(train_path=path, valid_path=path, source_level="word", lower_case=True))


def test_the_sources_that_are_held_out_are_not_trained_on(tmp_path):
    lines = [(f"{i % 200}", "x") for i in range(400)]  # every source twice
    path = tsv(tmp_path / "all.tsv", lines)
    corpus = read_pairs(PairsConfig(train_path=path, valid_fraction=0.2))
    train, valid = ({source for source, _ in texts(corpus, split)} for split in ("train", "valid"))
    assert not train & valid and len(train | valid) == 200 and 20 < len(valid) < 60
    assert len(corpus.splits["valid"]) == 2 * len(valid)
    assert corpus.texts["valid"] == [*map(list, zip(*texts(corpus, "valid"), strict=True))]
    again = read_pairs(PairsConfig(train_path=path, valid_fraction=0.2))
    assert again.fingerprint("valid") == corpus.fingerprint("valid")


def test_symbols_are_those_of_the_whole_file_and_texts_are_as_they_were_read(tmp_path):
    path = tsv(tmp_path / "all.tsv", [(f"{i:02}{chr(0x4E00 + i)}", f"{i} X  y") for i in range(60)])
    corpus = read_pairs(PairsConfig(train_path=path, valid_fraction=0.2, target_level="word"))
    sources, targets = corpus.texts["valid"]
    assert len(sources) > 5 and {source[2] for source in sources} <= set(corpus.source_vocab.symbols)
    assert targets == [f"{int(source[:2])} X  y" for source in sources]
    some = read_pairs(PairsConfig(train_path=path, valid_fraction=0.2, target_level="word", min_freq=1, max_size=99))
    assert not {source[2] for source in sources} & set(some.source_vocab.symbols)  # which become <unk>


@pytest.mark.parametrize(
    "content, name, value",
    [
        ("a\tx\nb\n", "{}/train.tsv, line 2", "b"),
        ("a\tx\nb\ty\tz\n", "{}/train.tsv, line 2", 'b\ty\tz'),
        ("a\tx\n\ty\n", "{}/train.tsv, line 2", ""),
        ("a\tx\na\t \n", "{}/train.tsv, line 2", ""),
        ("a\tx\na\tx <s>\n", "{}/train.tsv, line 2", 'x <s>\n'),
        ("", "{}/train.tsv", b''),
        (b"a\tx\n\xff\ty\n", "{}/train.tsv", None),
    ],
)  # fmt: skip
def test_lines_that_are_no_pairs_are_named(tmp_path, content, name, value):
    path = write_text(tmp_path / "train.tsv", content)
    with raises_parameter(name.format(tmp_path), value):
        read_pairs(PairsConfig(train_path=path, valid_path=path, target_level="word"))


def test_lines_are_numbered_as_in_the_file_where_some_are_held_out(tmp_path):
    lines = [(f"{i:03}", "x") for i in range(200)]
    for changed, value, side in [(("100", " "), "", "target"), (("1" * 9, "x"), 10, "source")]:
        path = tsv(tmp_path / "all.tsv", [*lines[:100], changed, *lines[101:]])
        for fraction in (0.3, 0.5):  # all of these are held out but "100" with 0.3: a hash of the source decides
            with raises_parameter(f"{tmp_path}/all.tsv, line 101", value) as raised:
                config = PairsConfig(train_path=path, valid_fraction=fraction, target_level="word")
                check_lengths(read_pairs(config), 9)
            assert side in str(raised.value)


def test_other_bad_input_is_named(tmp_path):
    one, two = write_text(tmp_path / "one", "a\nb\n"), write_text(tmp_path / "two", "a\nb\nc\n")
    with raises_parameter("path", [one, two]) as raised:
        read_pairs(PairsConfig(train_path=[one, two]))
    assert mentions(str(raised.value), one, 2, two, 3)
    comma = tsv(tmp_path / "a,b.tsv", [("a", "b")])
    for path in (comma, comma.split(",")):  # a flag is a list
        assert [side.lines for side in PairReader().read(path)] == [["a\n"], ["b\n"]]
    with raises_parameter("train_path", None):
        read_pairs(PairsConfig())
    with raises_parameter("train_path", f"{tmp_path}/one"):
        read_pairs(PairsConfig(dataset="dates", train_path=one))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_pairs(PairsConfig(train_path=str(tmp_path / "nowhere")))
    with raises_parameter("valid_fraction", 0.05):
        read_pairs(PairsConfig(train_path=tsv(tmp_path / "few.tsv", [("a", "b")])))
    with raises_parameter("share_vocab", True):
        PairsConfig(share_vocab=True, target_level="word")
    with raises_parameter(f"{tmp_path}/train.tsv, line 3", 4, "at most max_len=3 symbols"):
        check_lengths(corpus_of(tmp_path, train=[("bc", "x"), ("ab", "y"), ("a", "x y x")]), 3)


@pytest.mark.parametrize(
    "options, name",
    [
        ({"n_pairs": 9}, "n_pairs"),
        ({"valid_fraction": 0.2}, "valid_fraction"),
        ({"dataset": "dates", "train_path": None, "valid_path": None, "valid_fraction": 0.2}, "valid_fraction"),
        ({"subword_type": "bpe"}, "subword_type"),
        ({"share_vocab": True, "source_level": "word", "min_freq": 2}, "min_freq"),
        ({"share_vocab": True, "source_level": "word", "max_size": 2}, "max_size"),
    ],
)
def test_options_without_an_effect_are_refused_unless_a_run_has_recorded_them(tmp_path, options, name):
    symbols = write_text(tmp_path / "symbols", "a\nb\nc\nx\ny\n")
    of_files = {"source_symbols": symbols, "target_symbols": symbols} if "share_vocab" in options else {}
    with raises_parameter(name, options[name], "left out"):
        corpus_of(tmp_path, **options, **of_files)
    with raises_parameter(name, options[name], "left out"):
        corpus_of(tmp_path, recorded={name: None}, **options, **of_files)
    assert len(corpus_of(tmp_path, recorded={name: options[name]}, **options, **of_files).splits["train"])


# ------------------------------------------------------------------------------------------------------------ dates


def test_dates_are_those_that_are_written_and_each_split_has_its_own():
    made = make_dates(3000)
    assert {split: len(pairs) for split, pairs in made.items()} == {"train": 3000, "valid": 1000, "test": 1000}
    dates = {split: {iso for _, iso in pairs} for split, pairs in made.items()}
    assert not dates["train"] & dates["test"] and not dates["train"] & dates["valid"]
    known = {}
    for written, iso in sum(made.values(), []):
        assert known.setdefault(written, iso) == iso  # nothing can be read in two ways
        date = datetime.date.fromisoformat(iso)
        assert str(date.day) in written and f"{date.year % 100:02d}" in written
        names = (date.strftime("%b").lower(), str(date.month))
        assert any(name in written.lower() for name in names), written


# ---------------------------------------------------------------------------------------------------------- batches


@pytest.fixture(scope="module")
def pairs():
    """300 pairs of random lengths, whose ids tell the number of the pair."""
    rng = np.random.default_rng(0)

    class Numbers:
        def encode(self, lines, name):
            return np.concatenate([[*[3 + i] * n, END_ID] for i, n in enumerate(lines)]).astype(np.int32)

    sides = ([*rng.integers(1, high, 300)] for high in (8, 12))
    return Pairs(*(encode_lines(Numbers(), side, "numbers") for side in sides))


@pytest.mark.parametrize("batch_size, batch_tokens", [(16, None), (300, 120), (7, 60), (1, 1)])
def test_an_epoch_has_every_pair_once_in_batches_of_like_lengths(pairs, batch_size, batch_tokens):
    batches = pair_batches(pairs, batch_size, batch_tokens, seed=3)
    seen, rows, kept = [], 0, 0
    for step in range(len(batches)):
        source, target = batches.batch(step)
        assert len(source) <= batch_size and (target[:, 0] == START_ID).all()
        tokens = source.size + target.size
        assert batch_tokens is None or tokens <= batch_tokens or len(source) == 1
        for s, t in zip(source, target, strict=True):
            i = s[0] - 3
            assert (
                s[s != 0].tolist() == pairs.sources[i].tolist() and t[t != 0][1:].tolist() == pairs.targets[i].tolist()
            )
            seen.append(i)
        rows, kept = rows + tokens, kept + np.sum(source != 0) + np.sum(target != 0)
    assert sorted(seen) == list(range(300)) and kept > 0.8 * rows


def test_a_step_has_the_same_batch_wherever_a_run_begins(pairs):
    batches = pair_batches(pairs, 16, seed=3)
    n = len(batches)
    whole = [source.tolist() for source, _ in batches.dataset(repeat=True).take(2 * n + 3).as_numpy_iterator()]
    for start in (5, n - 1, n, n + 7):
        later = pair_batches(pairs, 16, seed=3).dataset(start, repeat=True).take(3).as_numpy_iterator()
        assert [source.tolist() for source, _ in later] == whole[start : start + 3]
    assert whole[:n] != whole[n : 2 * n]
    assert sorted(map(len, whole[:n])) == sorted(map(len, whole[n : 2 * n]))
    other = [source.tolist() for source, _ in pair_batches(pairs, 16, seed=4).dataset().as_numpy_iterator()]
    assert other != whole[:n] and len(other) == n


def test_rows_are_filled_up_for_replicas(pairs):
    batches, even = pair_batches(pairs, 7, seed=0), pair_batches(pairs, 7, seed=0, multiple=2)
    for (source, target), (wider, longer) in zip(batches.dataset(), even.dataset(), strict=True):
        n = len(source)
        assert len(wider) == len(longer) == n + n % 2
        np.testing.assert_array_equal(wider[:n], source)
        np.testing.assert_array_equal(longer[:n], target)
        assert not np.any(wider[n:]) and not np.any(longer[n:])
