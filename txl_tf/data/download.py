"""Downloads: the public archives of the paper's datasets, unpacked into train.txt, valid.txt and test.txt."""

import os
import posixpath
import re
import shutil
import sys
import tarfile
import zipfile
import zlib

import keras

from txl_tf.files import is_remote

# The addresses of the original's getdata.sh.
URLS = {
    "enwik8": ["http://mattmahoney.net/dc/enwik8.zip"],
    "text8": ["http://mattmahoney.net/dc/text8.zip"],
    "wt2": ["https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip"],
    "wt103": ["https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip"],
    "ptb": ["http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"],
    "lm1b": [
        "http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz",
        "https://github.com/rafaljozefowicz/lm/raw/master/1b_word_vocab.txt",
    ],
}

LM1B_SHARDS = "1-billion-word-language-modeling-benchmark-r13output/training-monolingual.tokenized.shuffled/news.en-*"
LM1B_VOCAB = "1b_word_vocab.txt"
_LM1B_HELD_OUT = (
    "1-billion-word-language-modeling-benchmark-r13output/heldout-monolingual.tokenized.shuffled/"
    "news.en.heldout-00000-of-00050"
)

# Where the archives have the text; * is the split.
_TEXT_FILES = {
    "wt2": "wikitext-2/wiki.*.tokens",
    "wt103": "wikitext-103/wiki.*.tokens",
    "ptb": "simple-examples/data/ptb.*.txt",
}

# How prep_enwik8.py and prep_text8.py spell a byte. The newlines of enwik8 stay newlines, so that splitting the
# text at white space drops them: the original's vocabulary has 204 of the 205 bytes.
_SPELLINGS = {
    "enwik8": [b"\n" if byte == ord("\n") else str(byte).encode() for byte in range(256)],
    "text8": [b"_" if byte == ord(" ") else bytes([byte]) for byte in range(256)],
}


def fetch(dataset, data_dir, base_url=None, num_test_chars=5_000_000):
    """Fetches and unpacks a dataset of the paper, as the original's getdata.sh does, unless its text is there.

    An archive that is in `data_dir` already, by its own name, is not fetched. A download or an unpacking that is
    cut short leaves nothing that looks whole.

    Args:
        dataset: one of `URLS`.
        data_dir: local folder that gets archive and text.
        base_url: where the archive is, without its name, rather than where getdata.sh finds it.
        num_test_chars: bytes of valid.txt and of test.txt, for enwik8 and text8.

    Raises:
        ValueError: an argument or an archive is not what it should be.
        OSError: the archive cannot be fetched, or the folder cannot be written.
    """
    if dataset not in URLS:
        raise ValueError(f"download is for the datasets {', '.join(URLS)}, got {dataset!r}")
    if is_remote(data_dir):
        raise ValueError(f"download needs a local data_dir, got {data_dir}")
    needed = ["train.txt", "valid.txt", "test.txt"]
    if dataset == "lm1b":
        needed[0] = LM1B_VOCAB
    if all(os.path.exists(os.path.join(data_dir, name)) for name in needed):
        return
    archive = [_fetch_file(url, data_dir, base_url) for url in URLS[dataset]][0]
    staging = os.path.join(data_dir, "download.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        os.makedirs(staging)
        _unpack(dataset, archive, staging, num_test_chars)
        _move_files(staging, data_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fetch_file(url, folder, base_url):
    name = posixpath.basename(url)
    path = os.path.join(folder, name)
    if os.path.exists(path):
        return path
    if base_url:
        url = f"{base_url.rstrip('/')}/{name}"
    os.makedirs(folder, exist_ok=True)
    if not os.access(folder, os.W_OK):  # get_file would go elsewhere
        raise PermissionError(f"data_dir {folder} cannot be written to")
    chatty = keras.config.is_interactive_logging_enabled()
    if not sys.stdout.isatty():  # the bar of get_file is thousands of lines there
        keras.config.disable_interactive_logging()
    try:
        fetched = keras.utils.get_file(
            f"{name}.tmp", origin=url, cache_dir=folder, cache_subdir="", force_download=True
        )
    except Exception as error:  # get_file raises nothing narrower
        raise OSError(
            f"cannot fetch {url}: {error}\nput {name} into {folder} yourself, or say with --download_url where it is"
        ) from error
    finally:
        if chatty:
            keras.config.enable_interactive_logging()
    os.replace(fetched, path)
    return path


def _unpack(dataset, archive, folder, num_test_chars):
    try:
        if dataset in _SPELLINGS:
            _unpack_bytes(dataset, archive, folder, num_test_chars)
        else:
            _unpack_files(dataset, archive, folder)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"{archive} is not a whole archive: {error}. Remove it to fetch it again") from error


def _unpack_files(dataset, archive, folder):
    """Copies the files that are wanted, and no other, to names that are chosen here."""
    missing = _wanted_files(dataset)
    for name, file in _members(archive):
        if dataset == "lm1b" and re.fullmatch(re.escape(LM1B_SHARDS[:-1]) + r"\d+-of-\d+", name):
            _copy(file, os.path.join(folder, name))
            missing.pop(LM1B_SHARDS, None)
        elif name in missing:
            _copy(file, os.path.join(folder, missing.pop(name)))
    if missing:
        raise ValueError(f"{archive} is not the archive of dataset {dataset!r}: it lacks {', '.join(sorted(missing))}")
    if dataset == "lm1b":
        shutil.copyfile(os.path.join(folder, "valid.txt"), os.path.join(folder, "test.txt"))


def _wanted_files(dataset):
    """dict, file in the archive -> the file it becomes."""
    if dataset == "lm1b":
        return {LM1B_SHARDS: None, _LM1B_HELD_OUT: "valid.txt"}
    return {_TEXT_FILES[dataset].replace("*", split): f"{split}.txt" for split in ("train", "valid", "test")}


def _members(archive):
    """Yields name and open file of each regular file of a zip or tar archive, in one pass."""
    if archive.endswith(".zip"):
        with zipfile.ZipFile(archive) as members:
            for member in members.infolist():
                if not member.is_dir():
                    with members.open(member) as file:
                        yield posixpath.normpath(member.filename), file
    else:
        with tarfile.open(archive, "r|*") as members:
            for member in members:
                if member.isfile():
                    yield posixpath.normpath(member.name), members.extractfile(member)


def _copy(file, path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as copy:
        shutil.copyfileobj(file, copy, 1 << 20)


def _unpack_bytes(dataset, archive, folder, num_test_chars):
    """Splits the one file of enwik8 or text8 and writes each byte as a word."""
    data = next((file.read() for name, file in _members(archive) if name == dataset), None)
    if data is None:
        raise ValueError(f"{archive} is not the archive of dataset {dataset!r}: it lacks {dataset}")
    if len(data) <= 2 * num_test_chars:
        raise ValueError(f"{archive} has {len(data)} bytes of text, too few to hold out 2 * {num_test_chars}")
    ends = {"train": len(data) - 2 * num_test_chars, "valid": len(data) - num_test_chars, "test": len(data)}
    begin = 0
    for split, end in ends.items():
        part = data[begin:end].strip() if dataset == "text8" else data[begin:end]
        with open(os.path.join(folder, f"{split}.txt"), "wb") as file:
            for position in range(0, len(part), 1 << 20):
                block = part[position : position + (1 << 20)]
                file.write(b" " * (position > 0) + b" ".join(map(_SPELLINGS[dataset].__getitem__, block)))
        begin = end


def _move_files(source, target):
    """Moves a tree of files into another, the topmost files last."""
    paths = [os.path.relpath(os.path.join(f, name), source) for f, _, names in os.walk(source) for name in names]
    for path in sorted(paths, key=lambda path: (-path.count(os.sep), path)):
        os.makedirs(os.path.dirname(os.path.join(target, path)), exist_ok=True)
        os.replace(os.path.join(source, path), os.path.join(target, path))
