"""A flipped bit in any file of a run or of a corpus is noticed, or changes nothing; and it is never a traceback.

Archives: see download_test.py.
"""

import shutil

import numpy as np
import pytest
from helpers import TEXT, assert_variables_equal, read_checkpoint, train_run

import txl_tf
from txl_tf.data.text import corpus

PLACES = 24  # of a file
CONTINUED_WITH = ("config.json", "vocab.txt", "log.csv", "best/best.json", "ckpt-12.index")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`run`, of 12 steps on `data`, a prepared corpus; and `whole`, copies of both."""
    folder = tmp_path_factory.mktemp("flips")
    (folder / "text.txt").write_text(TEXT)
    corpus.prepare(folder / "data", "text", folder / "text.txt", level="word", cutoffs=[3])
    train(folder, 12)
    for name in ("run", "data"):
        shutil.copytree(folder / name, folder / "whole" / name)
    return folder


def train(folder, train_steps):
    data = {"data_dir": str(folder / "data"), "dataset": None, "data_path": None}
    train_run(folder / "run", None, data=data, training={"train_steps": train_steps})


def restore(folder, part):
    shutil.rmtree(folder / part)
    shutil.copytree(folder / "whole" / part, folder / part)


def flips(folder, name):
    """Damages a file in one place after the other; what was done in between is undone."""
    path, content = folder / name, (folder / "whole" / name).read_bytes()
    part = name.split("/")[0]
    for i, place in enumerate(np.linspace(0, len(content) - 1, PLACES).astype(int).tolist()):
        restore(folder, part)
        flipped = bytearray(content)
        flipped[place] ^= 1 << i % 8
        path.write_bytes(flipped)
        yield f"{name}: bit {i % 8} of byte {place}"
    restore(folder, part)


def noticed(function, *arguments):
    """Whether it raises an error that a program prints in one line; any other ends the test."""
    try:
        return function(*arguments), False
    except (ValueError, OSError) as error:
        assert 0 < len(str(error)) < 3000
        return None, True


def names_in(folder, part):
    return sorted(str(path.relative_to(folder)) for path in (folder / part).rglob("*") if path.is_file())


@pytest.mark.slow
def test_of_a_corpus(folder):
    def load():
        made = corpus.load_corpus(folder / "data")
        splits = {split: np.array(tokens).tolist() for split, tokens in made.splits.items()}
        return made.vocab.get_config(), made.vocab.symbols, made.cutoffs, splits, made.by_character

    expected = load()
    names = names_in(folder, "data")
    assert names == ["data/corpus-info.json", "data/train.npy", "data/valid.npy", "data/vocab.txt"]
    for name in names:
        seen = 0
        for where in flips(folder, name):
            found, error = noticed(load)
            assert error or found == expected, where
            seen += error
        assert seen > PLACES * 0.9, name  # but for white space, every byte counts


@pytest.mark.slow
def test_of_a_run_that_is_opened(folder):
    def load():
        opened = []
        for ckpt_path in (None, "best", "ckpt-6"):
            lm, vocab = txl_tf.load_run(folder / "run", ckpt_path)
            config = {**lm.get_config(), "name": None, "seed": None}  # which are drawn anew
            opened.append((config, vocab.get_config(), vocab.symbols, txl_tf.tf1_variables(lm)))
        return opened

    expected = load()
    names = names_in(folder, "run")
    assert len(names) >= 12
    for name in names:
        for where in flips(folder, name):
            found, error = noticed(load)
            for parts, expected_parts in zip(found or [], expected, strict=not error):
                assert parts[:3] == expected_parts[:3], where
                assert_variables_equal(parts[3], expected_parts[3])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUED_WITH)
def test_of_a_run_that_is_continued(folder, name, capfd):
    """A damaged checkpoint is named, and the run goes on from the one before."""
    train(folder, 15)
    expected = read_checkpoint(folder / "run" / "ckpt-15")
    restore(folder, "run")
    (folder / "run" / "ckpt-12.index").unlink()
    train(folder, 15)
    from_before = read_checkpoint(folder / "run" / "ckpt-15")
    for where in flips(folder, f"run/{name}"):
        capfd.readouterr()
        _, error = noticed(train, folder, 15)
        if not error:
            damaged = "damaged checkpoint: " in capfd.readouterr().out
            found = read_checkpoint(folder / "run" / "ckpt-15")
            assert_variables_equal(found, from_before if damaged else expected)
            assert damaged <= (name == "ckpt-12.index"), where
