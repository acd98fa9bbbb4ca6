"""Scores lines of text with a trained language model: how likely each is, to rescore n-best lists or filter a corpus.

    echo "The import statement" | txl-score --model_dir=runs/quickstart
    txl-score --model_dir=runs/wt103 --input=nbest.txt --output=nll.txt
    txl-score --model_dir=runs/wt103 --input=corpus.txt --columns=bpb,text | awk -F'\\t' '$1 < 1.5'
    txl-score --model_dir=runs/wt103 --input=article.txt --carry_memory --format=tokens
    txl-score --model_dir=runs/wt103 --input=corpus/ --output=scores/               (many files, see docs/scale.md)

A line of output belongs to a line of input: the --columns, separated by tabs, or with --format=json an object.

    nll       negative log-likelihood of the line in nats, the sum over its tokens
    tokens    how many they are
    ppl       perplexity, exp(nll / tokens); nan, in JSON null, for a line without tokens
    bpb       bits per byte of the line in UTF-8; the same
    bytes     how many they are
    text      the line

By default every line follows a newline, or the end of a document where the run knows documents, and its own end counts,
as a token and as a byte: --start and --score_end change that. --format=tokens adds every token and its nll. \\n,
\\r\\n and \\r end a line; of a run with --level=byte or --raw_text only \\n. Lines are scored as they come; a pause of
the standard input is enough. A line that cannot be scored, such as one with a symbol that the vocabulary does not have,
has an empty line in its place, or an object with "error"; the standard error says why, and the status is 1.
Text goes to the standard output, the rest to the standard error; on a terminal, control characters are written like
\\x1b.
"""

import functools
import itertools
import math
import sys

from absl import flags

from txl_programs.program import (
    FLAGS,
    check_used,
    config_of,
    define_flags,
    define_line_flags,
    messages_to_stderr,
    read_flags,
    run,
    values,
)
from txl_tf.config import ScoringConfig

COLUMNS = {"nll": ".6f", "tokens": "d", "ppl": ".4f", "bpb": ".6f", "bytes": "d", "text": "s"}

define_line_flags("texts")
flags.DEFINE_enum("format", "tsv", ["tsv", "json", "tokens"], "Columns, JSON lines, or JSON lines with every token.")
flags.DEFINE_list("columns", ["nll"], f"What to write of a line, of {', '.join(COLUMNS)}; for --format=tsv.")
flags.DEFINE_integer("mem_len", None, "Positions of memory, rather than the run's.")
flags.DEFINE_integer("clamp_len", None, "Treat distances beyond it as clamp_len, rather than as the run does.")

define_flags(ScoringConfig)

read_flags(__name__)

from txl_programs.answering.files import answer_input
from txl_tf.data.line_files import Answering
from txl_tf.data.lines import LineError, as_json, in_blocks
from txl_tf.data.vocabulary import newline_ids
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.scoring import Scorer

TOGETHER = 2000  # lines of a file that are scored together, where there are several files


def as_columns(score, number=None):
    """A line of columns, empty where there is no score."""
    if isinstance(score, LineError):
        return "\n"
    return "\t".join(format(getattr(score, name), COLUMNS[name]) for name in FLAGS.columns) + "\n"


def as_object(score, number=None, *, symbols):
    """A line of JSON."""
    if isinstance(score, LineError):
        return as_json({"text": score.text, "error": score.reason})
    numbers = {name: getattr(score, name) for name in ("nll", "ppl", "bpb")}
    found = {"text": score.text, "tokens": score.tokens, "bytes": score.bytes}
    found |= {name: _rounded(value) for name, value in numbers.items()}
    if FLAGS.format == "tokens":
        pairs = zip(score.ids, score.token_nll.tolist(), strict=True)
        found["token_nll"] = [[symbols[i], _rounded(nll)] for i, nll in pairs]
    return as_json(found)


def _rounded(value):
    return round(value, 6) if math.isfinite(value) else None


def summands(score):
    """What adds up over all lines, as `report` takes it."""
    return score.nll, score.tokens, score.bytes, 1


def make_answering(folder, path):
    """What scores lines, by the flags, with the weights of a checkpoint."""
    lm = folder.load_model(path, **values("mem_len clamp_len", given_only=True))
    scorer = Scorer(lm, folder.load_vocab(), config_of(ScoringConfig))

    def answers(lines, name, strict, numbers):
        return itertools.chain.from_iterable(scorer.score(in_blocks(lines), name, strict, numbers))

    text = as_columns if FLAGS.format == "tsv" else functools.partial(as_object, symbols=scorer.vocab.symbols)
    return Answering(answers, text, summands)


@messages_to_stderr()
def main():
    if not FLAGS.columns or set(FLAGS.columns) - set(COLUMNS):
        raise ValueError(f"columns must be of {', '.join(COLUMNS)}, got {','.join(FLAGS.columns)!r}")
    tsv = f"is for --format=tsv, got --format={FLAGS.format}, whose lines have every number"
    check_used(("columns", FLAGS.format == "tsv", tsv))
    config, folder = config_of(ScoringConfig), RunFolder(FLAGS.model_dir, "language_model")
    if config.score_end and not newline_ids(folder.load_vocab()):
        print("the vocabulary has no symbol for the end of a line: ends do not count", file=sys.stderr)
    together = None if config.carry_memory else TOGETHER
    tally, seconds = answer_input(folder, make_answering, __spec__.name, together)
    report(*tally.sums or (0.0, 0, 0, 0), seconds)
    return int(tally.missing > 0)


def report(nll, tokens, size, lines, seconds):
    """Says on the standard error what the text is as a whole; `seconds` is `None` where they were not all for it."""
    whole = f"{lines:,} lines, {tokens:,} tokens"
    if tokens:
        whole += f": ppl {math.exp(min(nll / tokens, 700)):.4f}, {nll / math.log(2) / size:.4f} bits per byte"
    print(f"{whole} | {tokens / seconds:,.0f} tokens/s" if seconds else whole, file=sys.stderr)


if __name__ == "__main__":
    run(main)
