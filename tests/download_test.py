"""Downloads: small archives of the public ones' form, served from disk."""

import hashlib
import io
import os
import re
import tarfile
import zipfile

import numpy as np
import pytest
from helpers import mentions, raises_naming, raises_parameter

from txl_tf.data.text import corpus, download

LM1B = "1-billion-word-language-modeling-benchmark-r13output"


def make_zip(folder, name, files):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return folder.as_uri()


def make_tar(folder, name, files):
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / name, "w:gz") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return folder.as_uri()


def files_in(folder):
    return {
        os.path.relpath(os.path.join(parent, name), folder) for parent, _, names in os.walk(folder) for name in names
    }


# ----------------------------------------------------------------------------------------- the original's rules


def test_enwik8_is_byte_values_with_its_newlines_left(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "HELD_OUT", 3)
    url = make_zip(tmp_path / "web", "enwik8.zip", {"enwik8": b"a\nb<\xc3\xa9 cd\n"})
    download.fetch("enwik8", tmp_path / "data", url)
    assert (tmp_path / "data/train.txt").read_bytes() == b"97 \n 98 60"
    assert (tmp_path / "data/valid.txt").read_bytes() == b"195 169 32"
    assert (tmp_path / "data/test.txt").read_bytes() == b"99 100 \n"
    made = corpus.prepare(tmp_path / "data", "enwik8")
    assert made.vocab.symbols == ["97", "98", "60", "195", "169", "32", "99", "100"]
    assert made.splits["train"].tolist() == [0, 1, 2]  # the original drops newlines, too
    assert made.by_character


def test_text8_is_letters_and_underscores_without_spaces_at_the_ends_of_the_splits(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "HELD_OUT", 4)
    url = make_zip(tmp_path / "web", "text8.zip", {"text8": b" ab c d efg h "})
    download.fetch("text8", tmp_path / "data", url)
    assert (tmp_path / "data/train.txt").read_bytes() == b"a b _ c"
    assert (tmp_path / "data/valid.txt").read_bytes() == b"d _ e f"
    assert (tmp_path / "data/test.txt").read_bytes() == b"g _ h"
    made = corpus.prepare(tmp_path / "data", "text8")
    assert made.vocab.decode(made.splits["valid"]) == "d _ e f"
    assert made.by_character


def test_bytes_are_spelt_alike_over_the_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "HELD_OUT", 10)
    data = bytes(range(97, 107)) * 250_000
    url = make_zip(tmp_path / "web", "text8.zip", {"text8": data})
    download.fetch("text8", tmp_path / "data", url)
    assert (tmp_path / "data/train.txt").read_bytes().replace(b" ", b"") == data[:-20]
    assert (tmp_path / "data/train.txt").stat().st_size == 2 * (len(data) - 20) - 1


@pytest.mark.parametrize(
    ("dataset", "make", "archive", "member", "words"),
    [
        ("wt2", make_zip, "wikitext-2-v1.zip", "wikitext-2/wiki.{}.tokens", ["b", "a", "B"]),
        ("wt103", make_zip, "wikitext-103-v1.zip", "wikitext-103/wiki.{}.tokens", ["b", "B", "a"]),
        ("ptb", make_tar, "simple-examples.tgz", "./simple-examples/data/ptb.{}.txt", ["b", "a"]),
    ],
)
def test_word_level_archives(tmp_path, dataset, make, archive, member, words):
    texts = {"train": b"B a b\n\nb\n", "valid": b"a\n", "test": b"b"}
    url = make(tmp_path / "web", archive, {"README": b"", **{member.format(s): text for s, text in texts.items()}})
    made = corpus.prepare(tmp_path / "data", dataset, download=True, download_url=url + "/")
    for split, text in texts.items():
        assert (tmp_path / f"data/{split}.txt").read_bytes() == text
    assert made.vocab.symbols == ["<eos>", *words]
    assert files_in(tmp_path / "data") == {
        archive, "train.txt", "valid.txt", "test.txt", "train.npy", "valid.npy", "test.npy", "vocab.txt",
        "corpus-info.json",
    }  # fmt: skip


def test_lm1b_takes_the_training_shards_and_the_first_held_out_one(tmp_path):
    train, held_out = "training-monolingual.tokenized.shuffled", "heldout-monolingual.tokenized.shuffled"
    url = make_tar(
        tmp_path / "web",
        f"{LM1B}.tar.gz",
        {
            f"{LM1B}/{train}/news.en-00002-of-00100": b"c\n",
            f"{LM1B}/{train}/news.en-00001-of-00100": b"a\na b\n",
            f"{LM1B}/{held_out}/news.en.heldout-00001-of-00050": b"no\n",
            f"{LM1B}/{held_out}/news.en.heldout-00000-of-00050": b"b\n",
            f"{LM1B}/README": b"",
        },
    )
    (tmp_path / "web/1b_word_vocab.txt").write_text("<S> 9\n<UNK> 5\na 2\nb 1\n")
    made = corpus.prepare(tmp_path / "data", "lm1b", download=True, download_url=url)
    assert (tmp_path / "data" / os.path.dirname(download.LM1B_SHARDS) / "news.en-00001-of-00100").exists()
    assert sorted(made.splits["train"][:7]) == [0, 0, 0, 0, 2, 2, 3]
    assert made.splits["train"][7:].tolist() == [0, 1, 0]
    assert made.splits["valid"].tolist() == made.splits["test"].tolist() == [0, 3, 0]
    assert not any("heldout" in path or "README" in path for path in files_in(tmp_path / "data"))


def test_a_file_of_lm1b_that_is_named_like_the_pattern_is_no_shard(tmp_path):
    folder = os.path.dirname(download.LM1B_SHARDS)
    held_out = f"{LM1B}/heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050"
    files = {download.LM1B_SHARDS: b"no\n", f"{folder}/news.en-00001-of-00100": b"a\n", held_out: b"b\n"}
    url = make_tar(tmp_path / "web", f"{LM1B}.tar.gz", files)
    (tmp_path / "web/1b_word_vocab.txt").write_text("<S> 9\n<UNK> 5\na 2\nb 1\n")
    download.fetch("lm1b", tmp_path / "data", url)
    assert os.listdir(tmp_path / "data" / folder) == ["news.en-00001-of-00100"]
    del files[f"{folder}/news.en-00001-of-00100"]
    make_tar(tmp_path / "web", f"{LM1B}.tar.gz", files)
    with raises_parameter(str(tmp_path / "none" / f"{LM1B}.tar.gz")):
        download.fetch("lm1b", str(tmp_path / "none"), url)


# -------------------------------------------------------------------------------------------------- what can go wrong


def test_what_is_there_is_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "HELD_OUT", 1)
    data = tmp_path / "data"
    url = make_zip(tmp_path / "web", "enwik8.zip", {"enwik8": b"abcde"})
    download.fetch("enwik8", data, url)
    (tmp_path / "web/enwik8.zip").unlink()
    (data / "train.txt").unlink()
    download.fetch("enwik8", data, url)  # the archive is there
    assert (data / "train.txt").read_bytes() == b"97 98 99"
    (data / "enwik8.zip").unlink()
    download.fetch("enwik8", data, url)  # the text is there
    (data / "test.txt").unlink()
    with raises_naming(OSError, "enwik8.zip", "--download_url"):
        download.fetch("enwik8", data, url)


def test_a_download_that_was_cut_short_is_not_taken_for_the_archive(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "HELD_OUT", 1)
    url = make_zip(tmp_path / "web", "enwik8.zip", {"enwik8": b"abcde"})
    (tmp_path / "data").mkdir()
    (tmp_path / "data/enwik8.zip.tmp").write_bytes(b"PK")
    download.fetch("enwik8", tmp_path / "data", url)
    assert files_in(tmp_path / "data") == {"enwik8.zip", "train.txt", "valid.txt", "test.txt"}


@pytest.mark.parametrize("evil", ["../evil.txt", "/tmp/evil.txt", "wikitext-2/../../wiki.train.tokens"])
def test_no_file_lands_outside_the_folder(tmp_path, evil):
    names = [f"wikitext-2/wiki.{split}.tokens" for split in ("train", "valid", "test")]
    url = make_zip(tmp_path / "web", "wikitext-2-v1.zip", {evil: b"evil\n", **dict.fromkeys(names, b"a\n")})
    download.fetch("wt2", tmp_path / "data", url)
    assert files_in(tmp_path) == {
        "web/wikitext-2-v1.zip", "data/wikitext-2-v1.zip", "data/train.txt", "data/valid.txt", "data/test.txt",
    }  # fmt: skip
    assert (tmp_path / "data/train.txt").read_bytes() == b"a\n"


def test_links_in_an_archive_are_not_followed(tmp_path):
    (tmp_path / "web").mkdir()
    with tarfile.open(tmp_path / "web/simple-examples.tgz", "w:gz") as archive:
        for split in ("train", "valid", "test"):
            member = tarfile.TarInfo(f"simple-examples/data/ptb.{split}.txt")
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(member)
    with raises_parameter(f"{tmp_path}/data/simple-examples.tgz", None):
        download.fetch("ptb", tmp_path / "data", (tmp_path / "web").as_uri())
    assert files_in(tmp_path / "data") == {"simple-examples.tgz"}


@pytest.mark.parametrize(
    ("dataset", "archive", "content", "name", "value"),
    [
        ("wt2", "wikitext-2-v1.zip", b"PK nothing", "{}/wikitext-2-v1.zip", None),
        ("ptb", "simple-examples.tgz", b"nothing", "{}/simple-examples.tgz", None),
    ],
)
def test_a_broken_archive_is_named(tmp_path, dataset, archive, content, name, value):
    (tmp_path / archive).write_bytes(content)
    with raises_parameter(name.format(tmp_path), value):
        download.fetch(dataset, tmp_path)


WT2 = {f"wikitext-2/wiki.{split}.tokens": f"the {split} text\n".encode() * 60 for split in ("train", "valid", "test")}
PTB = {f"./simple-examples/data/ptb.{split}.txt": f"the {split} text\n".encode() * 60 for split in download.SPLITS}


@pytest.mark.parametrize(
    ("dataset", "make", "archive", "files"),
    [("wt2", make_zip, "wikitext-2-v1.zip", WT2), ("ptb", make_tar, "simple-examples.tgz", PTB)],
)
def test_a_flipped_bit_or_a_lost_end_is_noticed_or_changes_nothing(tmp_path, dataset, make, archive, files):
    make(tmp_path / "web", archive, files)
    whole = (tmp_path / "web" / archive).read_bytes()
    noticed = 0
    for i, place in enumerate(np.linspace(0, len(whole) - 1, 60).astype(int).tolist()):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << i % 8
        folder = tmp_path / f"flipped-{i}"
        folder.mkdir()
        (folder / archive).write_bytes(whole[:place] if i % 6 == 5 and place < len(whole) - 1 else damaged)
        try:
            download.fetch(dataset, folder)
        except ValueError as error:
            assert mentions(str(error), folder / archive) and len(str(error).splitlines()) == 1
            assert files_in(folder) == {archive}
            noticed += 1
        else:
            for name, text in files.items():
                assert (folder / f"{name.split('.')[-2]}.txt").read_bytes() == text, place
    assert noticed > 40


def encrypted(path):
    data = bytearray(path.read_bytes())
    for header in (b"PK\x03\x04", b"PK\x01\x02"):  # flag bit 0, at byte 6 of a file's header and 8 of the directory's
        place = data.index(header) + (6 if header == b"PK\x03\x04" else 8)
        data[place] |= 1
    path.write_bytes(data)


def compressed_by(method):
    def change(path):
        data = bytearray(path.read_bytes())
        for header in (b"PK\x03\x04", b"PK\x01\x02"):
            place = data.index(header) + (8 if header == b"PK\x03\x04" else 10)
            data[place : place + 2] = method.to_bytes(2, "little")
        path.write_bytes(data)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (encrypted, "is encrypted, password required"),
        (compressed_by(99), "compression method is not supported"),
        (compressed_by(14), "is not a whole archive: "),  # lzma, which it is not
        (compressed_by(12), "is not a whole archive: "),  # bzip2
    ],
)
def test_a_zip_that_cannot_be_read_is_named(tmp_path, change, message):
    make_zip(tmp_path, "wikitext-2-v1.zip", WT2)
    change(tmp_path / "wikitext-2-v1.zip")
    with raises_parameter(f"{tmp_path}/wikitext-2-v1.zip", None, "a whole archive") as raised:
        download.fetch("wt2", tmp_path)
    assert message in str(raised.value)
    assert files_in(tmp_path) == {"wikitext-2-v1.zip"}


def test_a_damaged_lzma_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "wikitext-2-v1.zip", "w", zipfile.ZIP_LZMA) as archive:
        for name, text in WT2.items():
            archive.writestr(name, text * 50)
    data = bytearray((tmp_path / "wikitext-2-v1.zip").read_bytes())
    data[70:90] = bytes(20)
    (tmp_path / "wikitext-2-v1.zip").write_bytes(data)
    with raises_parameter(f"{tmp_path}/wikitext-2-v1.zip", None):
        download.fetch("wt2", tmp_path)


def test_a_full_disk_is_no_damaged_archive(tmp_path, monkeypatch):
    make_zip(tmp_path, "wikitext-2-v1.zip", WT2)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left on device"):
        download.fetch("wt2", tmp_path)
    assert files_in(tmp_path) == {"wikitext-2-v1.zip"}


def test_an_archive_from_the_published_address_must_be_the_published_one(tmp_path, monkeypatch, capsys):
    url = make_zip(tmp_path / "web", "wikitext-2-v1.zip", WT2)
    monkeypatch.setitem(download.URLS, "wt2", [f"{url}/wikitext-2-v1.zip"])
    with raises_parameter(f"{tmp_path}/data/wikitext-2-v1.zip.tmp", allowed=[4475746]):
        download.fetch("wt2", tmp_path / "data")
    assert files_in(tmp_path / "data") == set()
    size = (tmp_path / "web/wikitext-2-v1.zip").stat().st_size
    monkeypatch.setitem(download.CHECKSUMS, "wikitext-2-v1.zip", (size, "0" * 64))
    with raises_parameter(f"{tmp_path}/data/wikitext-2-v1.zip.tmp", allowed=["0" * 64]) as raised:
        download.fetch("wt2", tmp_path / "data")
    assert re.fullmatch("[0-9a-f]{64}", raised.value.value)
    download.fetch("wt2", tmp_path / "mirrored", url)  # of another address only a warning
    assert mentions(capsys.readouterr().out, "wikitext-2-v1.zip")
    content = (tmp_path / "web/wikitext-2-v1.zip").read_bytes()
    monkeypatch.setitem(download.CHECKSUMS, "wikitext-2-v1.zip", (size, hashlib.sha256(content).hexdigest()))
    download.fetch("wt2", tmp_path / "data")
    assert (tmp_path / "data/train.txt").read_bytes() == WT2["wikitext-2/wiki.train.tokens"]
    assert capsys.readouterr().out == ""


def test_an_archive_of_something_else_is_named(tmp_path):
    make_zip(tmp_path, "wikitext-2-v1.zip", {"wikitext-2/wiki.train.tokens": b"a\n"})
    lacking = "wikitext-2/wiki.test.tokens, wikitext-2/wiki.valid.tokens"
    with raises_parameter(f"{tmp_path}/wikitext-2-v1.zip", None, f"an archive with {lacking}"):
        download.fetch("wt2", tmp_path)
    make_zip(tmp_path, "text8.zip", {"readme": b""})
    with raises_parameter(f"{tmp_path}/text8.zip", None):
        download.fetch("text8", tmp_path)
    make_zip(tmp_path, "enwik8.zip", {"enwik8": b"abcd"})
    with raises_parameter(f"{tmp_path}/enwik8.zip", 4):
        download.fetch("enwik8", tmp_path)
    assert files_in(tmp_path) == {"wikitext-2-v1.zip", "text8.zip", "enwik8.zip"}


def test_bad_arguments_are_refused(tmp_path):
    with raises_parameter("dataset", "text", ["enwik8", "text8", "wt2", "wt103", "ptb", "lm1b"]):
        download.fetch("text", tmp_path)
    with raises_parameter("data_dir", "gs://bucket/x"):
        download.fetch("wt2", "gs://bucket/x")
