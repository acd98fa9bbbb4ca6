"""Corpora: from text to token arrays, and from token arrays to the batches of a language model.

Shapes:
    B: batch_size, rows of text read side by side
    T: tgt_len, tokens a segment
    S: n_token_of_the_split // B, tokens a row
"""

import codecs
import dataclasses
import itertools
import math
import os

import numpy as np
import tensorflow as tf

from txl_tf.vocabulary import LEVELS, Vocab

SPLITS = ("train", "valid", "test")

_WORDS = {"level": "word", "special": ["<eos>"], "eos": "<eos>", "unk": "<unk>"}

# The datasets of the paper, each a folder of train.txt, valid.txt and test.txt. enwik8 is one line of byte
# values, text8 one line of letters with _ for the space; spaces separate them, so to `Vocab` they are words.
# name: (options of Vocab, splits whose words are counted, cutoffs)
PAPER_DATASETS = {
    "enwik8": ({"level": "word", "lower_case": True}, SPLITS, []),
    "text8": ({"level": "word", "lower_case": True}, SPLITS, []),
    "ptb": ({**_WORDS, "lower_case": True}, SPLITS, []),
    "wt2": (_WORDS, SPLITS, []),
    "wt103": (_WORDS, ("train",), [20000, 40000, 200000]),
}
DATASETS = ("pydoc", "text", *PAPER_DATASETS)

_READ_BYTES = 1 << 20


@dataclasses.dataclass
class Corpus:
    """A vocabulary and the token arrays of a text.

    Attributes:
        vocab: `Vocab`.
        cutoffs: list of int, the first ids of the adaptive softmax's bins, without 0 and `len(vocab)`.
        splits: dict, `"train"`, `"valid"` and perhaps `"test"` -> integer array `[n]`.
        by_character: whether tokens are characters or bytes, rather than words.
    """

    vocab: Vocab
    cutoffs: list
    splits: dict
    by_character: bool


# --------------------------------------------------------------------------------------------- text -> tokens


def build_corpus(
    dataset, data_path=None, level="char", valid_fraction=0.05, min_freq=0, max_size=None, lower_case=False
):
    """Reads a dataset, makes its vocabulary and encodes its splits.

    - `"pydoc"`: Python's own reference manual, as that of the Python that runs. Splits train, valid.
    - `"text"`: the UTF-8 file or files `data_path`. Splits train, valid.
    - `"enwik8"`, `"text8"`, `"ptb"`, `"wt2"`, `"wt103"`: train.txt, valid.txt and test.txt in the folder
      `data_path`, by the original's rules; the arguments that follow are not used.

    For the first two the vocabulary is that of the whole text. At level `"word"` each line ends in `<eos>`.
    The symbols that `min_freq` and `max_size` leave out become `<unk>`.

    Args:
        dataset: one of `DATASETS`.
        data_path: file or folder; for `"text"` also several files, as a list or separated by commas.
        level: `"char"`, `"byte"` or `"word"`.
        valid_fraction: the share of the tokens, at the end, that is held out as `valid`; in (0, 1).
        min_freq, max_size, lower_case: see `Vocab`.

    Returns:
        `Corpus`.

    Raises:
        ValueError: an argument or the text is not what it should be.
        FileNotFoundError: a file is not there.
    """
    if dataset in PAPER_DATASETS:
        return _paper_corpus(dataset, data_path)
    if dataset == "lm1b":
        raise ValueError(f"dataset 'lm1b' is not available yet; available: {', '.join(DATASETS)}")
    if dataset not in DATASETS:
        raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, got {dataset!r}")
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    if not 0 < valid_fraction < 1:
        raise ValueError(f"valid_fraction must be between 0 and 1, both excluded, got {valid_fraction}")

    options = {"level": level, "lower_case": lower_case, "min_freq": min_freq, "max_size": max_size}
    if level == "word":
        options.update(special=["<eos>", "<unk>"], eos="<eos>", unk="<unk>")
    elif min_freq > 1 or max_size is not None:
        options.update(special=["<unk>"], unk="<unk>")
    vocab = Vocab(**options)
    paths = [] if dataset == "pydoc" else _split_paths(data_path)

    def texts():
        return read_files(paths, level) if paths else [pydoc_text()]

    vocab.count(texts())
    vocab.build()
    tokens = vocab.encode(texts())
    n_train = int(len(tokens) * (1 - valid_fraction))
    if n_train in (0, len(tokens)):
        raise ValueError(f"a text of {len(tokens)} tokens is too short to hold out {valid_fraction} of it")
    return Corpus(vocab, [], {"train": tokens[:n_train], "valid": tokens[n_train:]}, level != "word")


def _paper_corpus(dataset, data_path):
    options, counted_splits, cutoffs = PAPER_DATASETS[dataset]
    if not data_path:
        raise ValueError(f"dataset {dataset!r} needs data_path: a folder of train.txt, valid.txt, test.txt")
    paths = {split: f"{data_path}/{split}.txt" for split in SPLITS}
    vocab = Vocab(**options)
    for split in counted_splits:
        vocab.count(read_files([paths[split]], "word"))
    vocab.build()
    splits = {split: vocab.encode(read_files([path], "word"), name=path) for split, path in paths.items()}
    return Corpus(vocab, [c for c in cutoffs if c < len(vocab)], splits, dataset in ("enwik8", "text8"))


def pydoc_text():
    """Python's reference manual as `help()` shows it, its topics in alphabetical order."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _split_paths(data_path):
    if not data_path:
        raise ValueError("dataset 'text' needs data_path: a UTF-8 text file, or several separated by commas")
    if isinstance(data_path, str):
        return [path.strip() for path in data_path.split(",")]
    return [data_path] if isinstance(data_path, os.PathLike) else list(data_path)


def read_files(paths, level):
    """Yields the text of one file after the other, in pieces of about a megabyte.

    Args:
        paths: list of files, local or remote.
        level: `"char"`: pieces are str; `"word"`: the same, cut between words, and the last line of each file
            ends with a newline; `"byte"`: pieces are bytes, and the files may hold anything.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file is empty, or is not UTF-8 text. Names the file and the byte.
    """
    for path in paths:
        pieces = _read_blocks(path)
        if level != "byte":
            pieces = _decode(pieces, path)
        if level == "word":
            pieces = _cut_between_words(pieces)
        yield from pieces


def _read_blocks(path):
    if not tf.io.gfile.exists(path):
        raise FileNotFoundError(f"there is no file {path}")
    if tf.io.gfile.isdir(path):
        raise ValueError(f"{path} is a folder, not a text file")
    with tf.io.gfile.GFile(path, "rb") as file:
        block = file.read(_READ_BYTES)
        if not block:
            raise ValueError(f"{path} is empty")
        while block:
            yield block
            block = file.read(_READ_BYTES)


def _decode(blocks, path):
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0  # of the block in the file
    for block in itertools.chain(blocks, [b""]):
        start = position - len(decoder.getstate()[0])  # a character may have begun in the block before
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_text(path, start + error.start) from error
        if b"\0" in block:
            raise _not_text(path, position + block.index(b"\0"))
        yield text
        position += len(block)


def _not_text(path, position):
    return ValueError(f"{path} is not UTF-8 text: see byte {position}. level='byte' reads any file")


def _cut_between_words(pieces):
    text = last = ""
    for piece in pieces:
        text += piece
        last = piece or last
        cut = text.rfind("\n") + 1 or text.rfind(" ") + 1
        yield text[:cut]
        text = text[cut:]
    if not last.endswith("\n"):
        yield text + "\n"


# ------------------------------------------------------------------------------------------ tokens -> batches


def segments(tokens, batch_size, tgt_len, start=0, repeat=False, drop_remainder=False):
    """Cuts a token array into the batches of a language model, in order, as the original does.

    The tokens are laid out in B rows of S, those left over dropped. A batch is the next T columns of all
    rows, so row r of a batch goes on where row r of the batch before ended. 14 tokens, B = 2, T = 4:

        0 1 2  3 |  4  5  6      tokens [[0, 1, 2, 3], [7, 8, 9, 10]]   labels [[1, 2, 3, 4], [8, 9, 10, 11]]
        7 8 9 10 | 11 12 13      tokens [[4, 5], [11, 12]]              labels [[5, 6], [12, 13]]

    Args:
        tokens: integer array `[n]`. An `np.memmap` is read piece by piece, any other array is held in memory.
        batch_size: B, over all replicas.
        tgt_len: T.
        start: index of the batch to begin with, to resume; with `repeat`, it may lie past the first epoch.
        repeat: whether to begin again after the last batch, for ever.
        drop_remainder: whether to leave out a shorter last batch, where all must have one shape.

    Returns:
        `tf.data.Dataset` of `(tokens, labels)`, int32 `[B, T]` each. The last batch of an epoch may be
        shorter, and `element_spec` then has `None` for T.

    Raises:
        ValueError: `tokens` is not such an array or too short, or a number is out of range.
    """
    tokens = _check_tokens(tokens)
    n_batch = num_segments(len(tokens), batch_size, tgt_len, drop_remainder)
    if start < 0 or (start > n_batch and not repeat):
        raise ValueError(f"start must be in [0, {n_batch}], the number of batches, got {start}")
    rows = tokens[: len(tokens) // batch_size * batch_size].reshape(batch_size, -1)  # [B, S]
    read_columns = _column_reader(rows)
    one_length = drop_remainder or (rows.shape[1] - 1) % tgt_len == 0

    def segment(i):
        window = read_columns(i * tgt_len, (i + 1) * tgt_len + 1)  # [B, T + 1]; shorter where the rows end
        window = tf.ensure_shape(window, [batch_size, tgt_len + 1 if one_length else None])
        return window[:, :-1], window[:, 1:]

    order = tf.data.Dataset.range(start % n_batch if repeat else start, n_batch)
    if repeat:
        order = order.concatenate(tf.data.Dataset.range(n_batch).repeat())
    return order.map(segment).prefetch(tf.data.AUTOTUNE)


def _column_reader(rows):
    """A function of tensors `(begin, end) -> rows[:, begin:end]`, int32, that embeds no array in a graph."""
    if isinstance(rows, np.memmap):
        return lambda begin, end: tf.numpy_function(
            lambda begin, end: rows[:, begin:end].astype(np.int32), [begin, end], tf.int32
        )
    with tf.device("CPU:0"):
        held = tf.convert_to_tensor(rows)
    return lambda begin, end: tf.cast(held[:, begin:end], tf.int32)


def num_segments(n_tokens, batch_size, tgt_len, drop_remainder=False, name="text"):
    """The number of batches that `segments` makes of `n_tokens` tokens; `name` is what an error calls them."""
    _check_enough(n_tokens, batch_size, tgt_len, tgt_len + 1 if drop_remainder else 2, name)
    n_label = n_tokens // batch_size - 1  # of a row
    return n_label // tgt_len if drop_remainder else math.ceil(n_label / tgt_len)


def get_bin_sizes(tokens, batch_size, tgt_len, cutoffs):
    """Chooses the adaptive softmax's bin capacities for static shapes, by the original's rule.

    A capacity is the mean plus 2.5 standard deviations of a segment's tokens in the bin, to the nearest 8.

    Args:
        tokens: integer array `[n]`, the training text.
        batch_size: B, of one replica.
        tgt_len: T.
        cutoffs: list of int, as in `Corpus`.

    Returns:
        list of int, the capacity of each bin but the first.
    """
    tokens = _check_tokens(tokens)
    _check_enough(len(tokens), batch_size, tgt_len, tgt_len)
    n_batch = len(tokens) // batch_size // tgt_len
    blocks = tokens[: batch_size * n_batch * tgt_len].reshape(batch_size, n_batch, tgt_len)
    bin_sizes = []
    for left, right in itertools.pairwise([*cutoffs, np.inf]):
        share = ((blocks >= left) & (blocks < right)).sum((0, 2)) / (batch_size * tgt_len)  # [n_batch]
        size = math.ceil(batch_size * tgt_len * (np.mean(share) + 2.5 * np.std(share)))
        bin_sizes.append(max(8, (size + 4) // 8 * 8))
    return bin_sizes


def _check_tokens(tokens):
    tokens = np.asanyarray(tokens)  # a memory map stays one
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens must be a 1-D integer array, got {tokens.dtype} of shape {tokens.shape}")
    return tokens


def _check_enough(n_tokens, batch_size, tgt_len, row_tokens, name="text"):
    for argument, value in (("batch_size", batch_size), ("tgt_len", tgt_len)):
        if value < 1:
            raise ValueError(f"{argument} must be positive, got {value}")
    if n_tokens < batch_size * row_tokens:
        raise ValueError(
            f"the {name} has {n_tokens} tokens: batch_size={batch_size} and tgt_len={tgt_len} need at least "
            f"{batch_size * row_tokens}, {row_tokens} a row"
        )
