"""Downloads: the public archives of the paper's datasets, unpacked into train.txt, valid.txt and test.txt."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import itertools
import logging
import lzma
import os
import posixpath
import re
import shutil
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import keras

from txl_tf.errors import ParameterError, brief, named
from txl_tf.files import check_no_link, is_remote, lock, naming_write_errors, remove

_LM1B = "1-billion-word-language-modeling-benchmark-r13output"
LM1B_SHARDS = f"{_LM1B}/training-monolingual.tokenized.shuffled/news.en-*"
LM1B_VOCAB = "1b_word_vocab.txt"
SPLITS = ("train", "valid", "test")

# The addresses of the original's getdata.sh.
URLS = {
    "enwik8": ["http://mattmahoney.net/dc/enwik8.zip"],
    "text8": ["http://mattmahoney.net/dc/text8.zip"],
    "wt2": ["https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip"],
    "wt103": ["https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip"],
    "ptb": ["http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"],
    "lm1b": [
        f"http://www.statmt.org/lm-benchmark/{_LM1B}.tar.gz",
        f"https://github.com/rafaljozefowicz/lm/raw/master/{LM1B_VOCAB}",
    ],
}

# Size in bytes and SHA-256 (or MD5) of the archives at these addresses, as users of the datasets publish them.
CHECKSUMS = {
    "enwik8.zip": (36445475, "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),
    "text8.zip": (31344016, "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"),
    "wikitext-2-v1.zip": (4475746, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
    "wikitext-103-v1.zip": (190229076, "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
    "simple-examples.tgz": (34869662, "30177ea32e27c525793142b6bf2c8e2d"),
    f"{_LM1B}.tar.gz": (1792209805, "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"),
}

# Dataset -> {text file in its archive: its new name}. The shards of lm1b keep their names: their pattern has `None`.
_TEXT_FILES = {
    "wt2": {f"wikitext-2/wiki.{split}.tokens": f"{split}.txt" for split in SPLITS},
    "wt103": {f"wikitext-103/wiki.{split}.tokens": f"{split}.txt" for split in SPLITS},
    "ptb": {f"simple-examples/data/ptb.{split}.txt": f"{split}.txt" for split in SPLITS},
    "lm1b": {
        LM1B_SHARDS: None,
        f"{_LM1B}/heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050": "valid.txt",
    },
}

# How the original's prep_enwik8.py and prep_text8.py write each byte. The newlines of enwik8 stay newlines, and `Vocab`
# drops them, because it splits the text at white space: the original's vocabulary has 204 of the 205 different bytes.
_SPELLINGS = {
    "enwik8": [b"\n" if byte == ord("\n") else str(byte).encode() for byte in range(256)],
    "text8": [b"_" if byte == ord(" ") else bytes([byte]) for byte in range(256)],
}


logger = logging.getLogger("txl_tf")

HELD_OUT = 5_000_000  # bytes of valid.txt and of test.txt, for enwik8 and text8
_MAX_BYTES = 1 << 31  # of enwik8 or text8, which are read into memory; a small malicious archive may unpack to more
# Errors of the readers for an archive that is damaged, encrypted or compressed in a way that Python does not know.
_UNREADABLE = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError,
    ValueError, OverflowError, LookupError, struct.error, OSError,
)  # fmt: skip


def fetch(dataset: str, data_dir: str, base_url: str | None = None) -> None:
    """Downloads and unpacks a dataset of the paper, like the original's getdata.sh, unless its files exist.

    An archive that is already in `data_dir` is not downloaded again. An interrupted download or unpacking leaves no
    file that looks complete.

    Args:
        dataset: one of `URLS`.
        data_dir: local folder for the archive and the text.
        base_url: address of another folder that has the archive. This archive may differ from the published one.

    Raises:
        ParameterError: an argument or an archive is wrong.
        OSError: the archive cannot be fetched, the folder cannot be written, or another process is downloading to it.
    """
    if dataset not in URLS:
        message = f"download is for the datasets {', '.join(URLS)}, got {brief(dataset)}"
        raise ParameterError("dataset", dataset, list(URLS), message)
    if is_remote(data_dir):
        message = f"download needs a local data_dir, got {named(data_dir)}"
        raise ParameterError("data_dir", data_dir, "a local folder", message)
    needed = [LM1B_VOCAB if dataset == "lm1b" else "train.txt", "valid.txt", "test.txt"]
    if all(os.path.exists(os.path.join(data_dir, name)) for name in needed):
        return
    with naming_write_errors(data_dir):
        os.makedirs(data_dir, exist_ok=True)
    with lock(data_dir, f"another process is downloading to {data_dir}"):
        _fetch(dataset, data_dir, base_url)


def _fetch(dataset: str, data_dir: str, base_url: str | None) -> None:
    """Fetches the files of `URLS`, unpacks the archive, and moves its files to `data_dir` when all are unpacked."""
    archive, *_ = [_fetch_file(url, data_dir, base_url) for url in URLS[dataset]]  # lm1b also has a word list
    staging = os.path.join(data_dir, "download.tmp")
    remove(staging)  # a killed process may have left it
    try:
        os.makedirs(staging)
        if dataset in _SPELLINGS:
            _unpack_bytes(dataset, archive, staging)
        else:
            _unpack_files(dataset, archive, staging)
        files = [path.relative_to(staging) for path in Path(staging).rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: (-len(path.parts), path)):  # last the files that `fetch` needs
            check_no_link(data_dir, str(path.parent))
            os.makedirs(os.path.join(data_dir, path.parent), exist_ok=True)
            os.replace(os.path.join(staging, path), os.path.join(data_dir, path))
    finally:
        with contextlib.suppress(OSError):  # the first error counts
            remove(staging)


def _fetch_file(url: str, folder: str, base_url: str | None) -> str:
    """Fetches a file, unless the folder has it. Returns its path. `base_url` replaces the folder of the URL.

    Logs a warning if a file that the folder has, or that is fetched from `base_url`, is not the published one.

    Raises:
        ParameterError: without `base_url`, the fetched file is not the published one.
        OSError: the file cannot be fetched, or the folder cannot be written to.
    """
    name = posixpath.basename(url)
    path = os.path.join(folder, name)
    if os.path.exists(path):
        _check_published(path, name, strict=False)
        return path
    if base_url:
        url = f"{base_url.rstrip('/')}/{name}"
    if not os.access(folder, os.W_OK):  # get_file would choose another folder
        raise PermissionError(f"data_dir {folder} cannot be written to")
    remove(os.path.join(folder, f"{name}.tmp"))
    chatty = keras.config.is_interactive_logging_enabled()
    if not sys.stdout.isatty():  # the progress bar of get_file is thousands of lines there
        keras.config.disable_interactive_logging()
    try:
        fetched = keras.utils.get_file(
            f"{name}.tmp", origin=url, cache_dir=folder, cache_subdir="", force_download=True
        )
    except Exception as error:  # get_file raises nothing narrower
        raise OSError(
            f"cannot fetch {url}: {error}\nput {name} into {folder} yourself, or give its address with --download_url"
        ) from error
    finally:
        if chatty:
            keras.config.enable_interactive_logging()
    try:
        _check_published(fetched, name, strict=not base_url)
    except ValueError:
        remove(fetched)
        raise
    os.replace(fetched, path)
    return path


def _check_published(path: str, name: str, strict: bool) -> None:
    """Compares a file with the published one of this name, if `CHECKSUMS` has it.

    If they differ, raises ParameterError; without `strict`, it logs a warning.
    """
    if name not in CHECKSUMS:
        return
    size, digest = CHECKSUMS[name]
    expected = size
    measured = os.path.getsize(path)
    unit = "bytes"
    if measured == size:
        with open(path, "rb") as file:
            measured = hashlib.file_digest(file, "sha256" if len(digest) == 64 else "md5").hexdigest()
        expected = digest
        unit = "as checksum"
    if measured == expected:
        return
    text = f"{path} is not the published {name}: it should have {expected} {unit}, and has {measured}"
    if strict:
        message = f"{text}. Fetch it again, or put the right one into the folder yourself"
        raise ParameterError(path, measured, [expected], message)
    logger.warning(text)


@contextlib.contextmanager
def _naming_damage(archive: str) -> Iterator[None]:
    """In this block, an error of reading the archive is a ParameterError that says that the archive is damaged.

    An error of the system, such as a full disk, is raised unchanged.
    """
    try:
        yield
    except _UNREADABLE as error:
        if getattr(error, "errno", None) not in (None, errno.EINVAL):  # an error of the system
            raise
        message = f"{archive} is not a whole archive: {error}. Remove it to fetch it again"
        raise ParameterError(archive, None, "a whole archive", message) from error


def _unpack_files(dataset: str, archive: str, folder: str) -> None:
    """Copies the text files of the archive to `folder`: those in `_TEXT_FILES`, and the shards of lm1b.

    It writes to no other paths, so a name in a malicious archive cannot lead out of `folder`. For lm1b, test.txt is a
    copy of valid.txt.

    Raises:
        ParameterError: the archive is damaged, lacks one of the files, or has no shard. A missing shard is no error if
            there are others.
        OSError: a file cannot be written.
    """
    missing = dict(_TEXT_FILES[dataset])
    with _naming_damage(archive):
        for name, file in _members(archive):
            if dataset == "lm1b" and re.fullmatch(re.escape(LM1B_SHARDS[:-1]) + r"\d+-of-\d+", name):
                missing.pop(LM1B_SHARDS, None)
                path = os.path.join(folder, name)
            elif (new_name := missing.get(name)) is not None:
                path = os.path.join(folder, new_name)
                del missing[name]
            else:
                continue
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
    if missing:
        raise _other_archive(archive, dataset, sorted(missing))
    if dataset == "lm1b":
        shutil.copyfile(os.path.join(folder, "valid.txt"), os.path.join(folder, "test.txt"))


def _other_archive(archive: str, dataset: str, missing: list[str]) -> ParameterError:
    """Returns the error for an archive that lacks files of its dataset."""
    message = f"{archive} is not the archive of dataset {dataset!r}: it lacks {', '.join(missing)}"
    return ParameterError(archive, None, f"an archive with {', '.join(missing)}", message)


def _members(archive: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yields the name and the open file of each regular file of a .zip or .tar.gz archive, in one pass.

    Damage raises an error. A zip archive has a checksum of each file, which Python checks at the end of the file. A
    gzip file has one checksum at its end, so it is read to its end.
    """
    if archive.endswith(".zip"):
        with zipfile.ZipFile(archive) as members:
            for member in members.infolist():
                if member.is_dir():
                    continue
                with members.open(member) as file:
                    yield posixpath.normpath(member.filename), file
    else:
        with gzip.open(archive) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as members:
                for member in filter(tarfile.TarInfo.isfile, members):
                    yield posixpath.normpath(member.name), cast("IO[bytes]", members.extractfile(member))
            while stream.read(1 << 20):
                pass


def _unpack_bytes(dataset: str, archive: str, folder: str) -> None:
    """Splits the one file of enwik8 or text8 into train, valid and test, and writes each byte as a word.

    Raises:
        ParameterError: the archive is damaged, lacks the file, or the file is too short or too long.
    """
    with _naming_damage(archive):
        data = next((file.read(_MAX_BYTES + 1) for name, file in _members(archive) if name == dataset), None)
    if data is not None and len(data) > _MAX_BYTES:
        message = f"{archive} has more than {_MAX_BYTES} bytes of text"
        raise ParameterError(archive, None, f"an archive of at most {_MAX_BYTES} bytes of text", message)
    if data is None:
        raise _other_archive(archive, dataset, [dataset])
    n_train = len(data) - 2 * HELD_OUT
    if n_train <= 0:
        message = f"{archive} has {len(data)} bytes of text, too few to hold out 2 * {HELD_OUT}"
        raise ParameterError(archive, len(data), f"an archive of more than {2 * HELD_OUT} bytes of text", message)
    ends = [0, n_train, n_train + HELD_OUT, len(data)]
    for split, (begin, end) in zip(SPLITS, itertools.pairwise(ends), strict=True):
        part = data[begin:end].strip() if dataset == "text8" else data[begin:end]
        with open(os.path.join(folder, f"{split}.txt"), "wb") as file:
            for position in range(0, len(part), 1 << 20):
                block = part[position : position + (1 << 20)]
                if position:
                    file.write(b" ")
                file.write(b" ".join(map(_SPELLINGS[dataset].__getitem__, block)))
