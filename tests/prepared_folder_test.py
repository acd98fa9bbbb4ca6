"""A prepared folder whose corpus-info.json was edited by hand, or whose files are damaged, is one clear error."""

import json

import pytest
from helpers import ANY, mentions, raises_parameter

from txl_tf.data.text import corpus


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").write_text("b a\na a c\nb b a\n" * 9)
    corpus.prepare(folder, "text", folder / "text", level="word", cutoffs=[2], valid_fraction=0.5)
    return folder


@pytest.fixture
def folder(prepared, tmp_path):
    for name in ("corpus-info.json", "vocab.txt", "train.npy", "valid.npy"):
        (tmp_path / name).write_bytes((prepared / name).read_bytes())
    return tmp_path


def changed(**changes):
    """What to make of the file: values changed, and with `...` as value removed."""

    def edit(path):
        info = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({name: value for name, value in info.items() if value is not ...}))

    return edit


@pytest.mark.parametrize(
    "edit, name, value",
    [
        (changed(files=...), "files", None),
        (changed(files=["train.npy"]), "files", ['train.npy']),
        (changed(files={"train": ["../train.npy"], "valid": ["valid.npy"]}), "files", ['../train.npy']),
        (changed(files={"train": ["train.npy"]}), "n_tokens", ['train', 'valid']),
        (changed(files={"train": [], "valid": ["valid.npy"]}), "files", []),
        (changed(n_tokens={"train": "9"}), "n_tokens", {'train': '9'}),
        (changed(cutoffs=None), "cutoffs", None),
        (changed(cutoffs=[0, 3, 2, 5]), "cutoffs", [0, 3, 2, 5]),
        (changed(cutoffs=[0, 2, 9]), "cutoffs", [0, 2, 9]),
        (changed(vocab=None), "vocab", None),
        (changed(vocab=[]), "vocab", []),
        (changed(vocab={"level": "word", "levels": 3}), "vocab.levels", 3),
        (changed(vocab={"level": None}), "vocab.level", None),
        (changed(vocab_sise=5), "vocab_sise", 5),
        (changed(format=..., fromat=1), "fromat", 1),
        (changed(format=...), "format", None),
        (changed(format="1"), "format", "1"),
        (changed(inputs=None), "inputs", None),
        (changed(inputs={"a.txt": "x"}), "inputs", {'a.txt': 'x'}),
        (changed(vocab_size="5"), "vocab_size", "5"),
        (changed(dataset="wt4"), "dataset", "wt4"),
        (changed(sha256={"vocab.txt": "0"}), "sha256", ['vocab.txt']),
        (changed(options={"level": "char"}), "checksum", ANY),
        (lambda path: path.write_text("[]"), "{}/corpus-info.json", []),
    ],
)  # fmt: skip
def test_an_edited_info_names_the_file_the_key_what_was_found_and_what_is_allowed(folder, edit, name, value):
    path = folder / "corpus-info.json"
    edit(path)
    if name == "sha256":
        changed(checksum=...)(path)
    with raises_parameter(name.format(folder), value) as error:
        corpus.load_corpus(folder)
    assert str(path) in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_folder_of_before_has_no_checksums_and_says_so(folder, capsys):
    changed(sha256=..., checksum=...)(folder / "corpus-info.json")
    made = corpus.load_corpus(folder)
    assert mentions(capsys.readouterr().out, folder)
    assert len(made.fingerprint("train")) == 64 and made.fingerprint("train") != made.fingerprint("valid")


@pytest.mark.parametrize("name", ["vocab.txt", "train.npy", "valid.npy"])
def test_a_changed_file_is_noticed(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[-2] ^= 4
    (folder / name).write_bytes(data)
    with raises_parameter(f"{folder}/{name}", None, "the file that corpus-info.json describes"):
        corpus.load_corpus(folder)


def test_large_and_remote_token_files_are_verified_on_demand(folder, monkeypatch):
    data = bytearray((folder / "train.npy").read_bytes())
    data[-1] ^= 1
    (folder / "train.npy").write_bytes(data)
    corpus.load_corpus(f"file://{folder}")
    corpus.load_corpus(folder, verify=False)
    monkeypatch.setattr(corpus, "_QUICK_BYTES", 3)
    corpus.load_corpus(folder)
    for path in (folder, f"file://{folder}"):
        with raises_parameter(f"{path}/train.npy"):
            corpus.load_corpus(path, verify=True)


HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (%s,), }"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        HEADER[:40],
        HEADER % b"3",
        (HEADER % b"3").replace(b"}", b" ") + b" " * 58 + b"\n" + b"abc",
        (HEADER % b"(((3").ljust(127) + b"\nabc",
        (HEADER % b"3 + 3").ljust(127) + b"\nabc",
        (HEADER % b"9" * 30).ljust(127) + b"\nabc",
        (HEADER % b"3, 1").ljust(127) + b"\nabc",
        (HEADER % b"3").replace(b"|u1", b"|O ").ljust(127) + b"\nabc",
        (HEADER % b"3").replace(b"|u1", b"<f8").ljust(127) + b"\n" + bytes(24),
        (HEADER % b"3").ljust(127) + b"\nabcd",
        (HEADER % b"3").ljust(127) + b"\nab",
        (HEADER % b"3").ljust(127).replace(b"\x01\x00v", b"\x01\x00w") + b"\nabc",
    ],
)
def test_a_damaged_header_of_a_token_file_is_one_clear_error(folder, data):
    (folder / "train.npy").write_bytes(data)
    for path in (folder, f"file://{folder}"):
        with raises_parameter(f"{path}/train.npy") as error:
            corpus.load_corpus(path)
        assert len(str(error.value).splitlines()) == 1
