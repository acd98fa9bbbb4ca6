"""Scores lines of text with a trained language model: how likely each is, to rescore n-best lists or filter a corpus.

    echo "The import statement" | txl-score --model_dir=runs/quickstart
    txl-score --model_dir=runs/wt103 --input=nbest.txt --output=nll.txt
    txl-score --model_dir=runs/wt103 --input=corpus.txt --columns=bpb,text | awk -F'\\t' '$1 < 1.5'
    txl-score --model_dir=runs/wt103 --input=article.txt --carry_memory --format=tokens

A line of output belongs to a line of input: the --columns, separated by tabs, or with --format=json an object.

    nll       negative log-likelihood of the line in nats, the sum over its tokens
    tokens    how many they are
    ppl       perplexity, exp(nll / tokens); nan, in JSON null, for a line without tokens
    bpb       bits per byte of the line in UTF-8; the same
    bytes     how many they are
    text      the line

By default every line follows a newline, and its own end counts, as a token and as a byte: --start and --score_end
change that. --format=tokens adds every token and its nll. Only \\n ends a line. Lines are scored as they come; a pause
of the standard input is enough. Text goes to the standard output, the rest to the standard error; on a terminal,
control characters are written like \\x1b.
"""

import json
import math
import os
import re
import select
import sys
import time

from absl import flags

from txl_programs.program import FLAGS, define_flags, read_flags, run, values
from txl_tf.config import ScoringConfig

COLUMNS = {"nll": ".6f", "tokens": "d", "ppl": ".4f", "bpb": ".6f", "bytes": "d", "text": "s"}
PAUSE = 0.1  # seconds without input after which what has come is scored

flags.DEFINE_string("model_dir", None, "Folder of the run.")
flags.DEFINE_string("ckpt_path", None, "Checkpoint to take, rather than the latest: a path, a name, or best.")
flags.DEFINE_string("input", None, "File of texts, a line each; default: the standard input.")
flags.DEFINE_string("output", None, "File to write to, rather than the standard output.")
flags.DEFINE_enum("format", "tsv", ["tsv", "json", "tokens"], "Columns, JSON lines, or JSON lines with every token.")
flags.DEFINE_list("columns", ["nll"], f"What to write of a line, of {', '.join(COLUMNS)}; for --format=tsv.")
flags.DEFINE_integer("mem_len", None, "Positions of memory, rather than the run's.")
flags.DEFINE_integer("clamp_len", None, "Treat distances beyond it as clamp_len, rather than as the run does.")

define_flags(ScoringConfig)

flags.mark_flag_as_required("model_dir")

read_flags(__name__)

from txl_tf.data.text_files import read_files
from txl_tf.data.vocabulary import visible
from txl_tf.files import check_writable, new_file
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.scoring import Scorer, in_blocks


def lines_of(pieces):
    """The lines of pieces of bytes, without newlines; `None` where the pieces have one."""
    rest = b""
    for piece in pieces:
        if piece is None:
            yield None
            continue
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def standard_input():
    """What there is to be read, piece by piece, and `None` whenever nothing more comes for the moment."""
    while piece := sys.stdin.buffer.read1(1 << 20):
        yield piece
        if os.name == "posix" and not select.select([sys.stdin.buffer], [], [], PAUSE)[0]:
            yield None


def row(score):
    """A line of columns."""
    return "\t".join(format(getattr(score, name), COLUMNS[name]) for name in FLAGS.columns)


def as_json(score, symbols):
    """A line of JSON; what is no Unicode text, as single bytes, is escaped."""
    numbers = {name: getattr(score, name) for name in ("nll", "ppl", "bpb")}
    found = {"text": score.text, "tokens": score.tokens, "bytes": score.bytes}
    found |= {name: _rounded(value) for name, value in numbers.items()}
    if FLAGS.format == "tokens":
        pairs = zip(score.ids, score.token_nll.tolist(), strict=True)
        found["token_nll"] = [[symbols[i], _rounded(nll)] for i, nll in pairs]
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", json.dumps(found, ensure_ascii=False))


def _rounded(value):
    return round(value, 6) if math.isfinite(value) else None


def score(scorer, blocks, write):
    """Writes the scores of all blocks, and returns the sums of nll, tokens, bytes and lines."""
    sums = [0.0, 0, 0, 0]
    for scores in scorer.score(blocks):
        lines = [row(found) if FLAGS.format == "tsv" else as_json(found, scorer.vocab.symbols) for found in scores]
        write("".join(f"{line}\n" for line in lines))
        for found in scores:
            sums = [total + x for total, x in zip(sums, (found.nll, found.tokens, found.bytes, 1), strict=True)]
    return sums


def write_to_stdout(text):
    if sys.stdout.isatty():
        sys.stdout.write(visible(text))
    else:
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.flush()


def main():
    if not FLAGS.columns or set(FLAGS.columns) - set(COLUMNS):
        raise ValueError(f"columns must be of {', '.join(COLUMNS)}, got {','.join(FLAGS.columns)!r}")
    config = ScoringConfig(**values(ScoringConfig))
    check_writable(FLAGS.output)
    folder = RunFolder(FLAGS.model_dir, "language_model")
    lm = folder.load_model(FLAGS.ckpt_path, **values("mem_len clamp_len", given_only=True))
    scorer = Scorer(lm, folder.load_vocab(), config, FLAGS.input or "standard input")
    if config.score_end and not scorer.score_end:
        print("the vocabulary has no symbol for the end of a line: ends do not count", file=sys.stderr)
    blocks = in_blocks(lines_of(read_files([FLAGS.input], "byte") if FLAGS.input else standard_input()))
    started = time.perf_counter()
    if FLAGS.output:
        with new_file(FLAGS.output) as file:
            sums = score(scorer, blocks, lambda text: file.write(text.encode("utf-8", "surrogateescape")))
    else:
        sums = score(scorer, blocks, write_to_stdout)
    report(*sums, time.perf_counter() - started)


def report(nll, tokens, size, lines, seconds):
    """Says on the standard error what the text is as a whole."""
    whole = f"{lines:,} lines, {tokens:,} tokens"
    if tokens:
        whole += f": ppl {math.exp(min(nll / tokens, 700)):.4f}, {nll / math.log(2) / size:.4f} bits per byte"
    print(f"{whole} | {tokens / seconds:,.0f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    run(main)
