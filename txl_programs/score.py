"""Scores lines of text with a trained language model, for example to rescore n-best lists or to filter a corpus.

    echo "The import statement" | txl-score --model_dir=runs/quickstart
    txl-score --model_dir=runs/wt103 --input=nbest.txt --output=nll.txt
    txl-score --model_dir=runs/wt103 --input=corpus.txt --columns=bpb,text | awk -F'\\t' '$1 < 1.5'
    txl-score --model_dir=runs/wt103 --input=article.txt --carry_memory --format=tokens
    printf 'The import\\t statement\\n' | txl-score --model_dir=runs/quickstart --continuations --columns=nll,text
    txl-score --model_dir=runs/wt103 --input=corpus/ --output=scores/               (many files, see docs/scale.md)

The program writes a line of output for every line of input: the --columns, separated by tabs, or with --format=json
an object.

    nll       negative log-likelihood of the line in nats, the sum over its tokens
    tokens    number of tokens of the line
    ppl       perplexity, exp(nll / tokens); nan (in JSON null) for a line without tokens
    bpb       bits per byte of the line in UTF-8; nan (in JSON null) if no token of the line is scored
    bytes     number of bytes of the line in UTF-8
    text      the line

By default the program scores every line as if a newline stood before it, or the end of a document if the run knows
documents. The end of the line counts as a token and as a byte. --start and --score_end change this. With
--continuations, a line is a context, a tab and a continuation, and only the continuation counts. --format=tokens adds
every token and its nll. \\n, \\r\\n and \\r end a line; for a run with --level=byte or --raw_text, only \\n does. The
program answers a line as soon as the standard input pauses. If a line cannot be scored, for example because the
vocabulary lacks a symbol of it, the output has an empty line or an object with "error". The standard error then says
why, and the exit status is 1. Text goes to the standard output, all else to the standard error. On a terminal,
control characters are written like \\x1b.
"""

import functools
import itertools
import math
import sys

from absl import flags

from txl_config import ScoringConfig
from txl_programs.flag_values import FLAGS, check_used, config_of, define_flags, define_line_flags, values
from txl_programs.printing import messages_to_stderr
from txl_programs.program import read_flags, run

# Column -> format of its values.
COLUMNS = {"nll": ".6f", "tokens": "d", "ppl": ".4f", "bpb": ".6f", "bytes": "d", "text": "s"}

define_line_flags("texts")
flags.DEFINE_enum("format", "tsv", ["tsv", "json", "tokens"], "Columns, JSON lines, or JSON lines with every token.")
flags.DEFINE_list("columns", ["nll"], f"Columns to write with --format=tsv: {', '.join(COLUMNS)}.")
flags.DEFINE_integer("mem_len", None, "Length of the memory in positions. Default: as in the run.")
flags.DEFINE_integer(
    "clamp_len", None, "Treat greater distances as this one; 0 or -1 for no limit. Default: as in the run."
)

define_flags(ScoringConfig)

read_flags(__name__)

from txl_config.errors import ParameterError
from txl_programs.answering.files import answer_input
from txl_programs.opening import vocab_of
from txl_tf.data.line_files import Answering
from txl_tf.data.lines import LineError, as_json, in_blocks
from txl_tf.data.vocabulary import newline_ids
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.scoring import Scorer

TOGETHER = 2000  # lines in a block, if the input is several files or runs on a cluster


def as_columns(score, number=None):
    """Returns the line with the --columns of a score; an empty line for a `LineError`. `number` is not used."""
    if isinstance(score, LineError):
        return "\n"
    return "\t".join(format(getattr(score, name), COLUMNS[name]) for name in FLAGS.columns) + "\n"


def as_object(score, number=None, *, symbols):
    """Returns the line of output with a JSON object for a score or a `LineError`.

    Args:
        score: the score or the error.
        number: not used.
        symbols: symbols of the vocabulary, by id.
    """
    if isinstance(score, LineError):
        return as_json({"text": score.text, "error": score.reason})
    numbers = {name: getattr(score, name) for name in ("nll", "ppl", "bpb")}
    fields = {"text": score.text, "tokens": score.tokens, "bytes": score.bytes}
    fields |= {name: _rounded(value) for name, value in numbers.items()}
    if FLAGS.format == "tokens":
        pairs = zip(score.ids, score.token_nll.tolist(), strict=True)
        fields["token_nll"] = [[symbols[i], _rounded(nll)] for i, nll in pairs]
    return as_json(fields)


def _rounded(value):
    """A number with six decimal places; `None` for nan and infinity, which JSON does not have."""
    return round(value, 6) if math.isfinite(value) else None


def summands(score, *, unk_id):
    """Returns the numbers of a line that are summed over all lines: `nll`, `tokens`, `size` and `lines` of
    `report`, and the number of unknown tokens.
    """
    return score.nll, score.tokens, score.bytes, 1, int((score.ids == unk_id).sum())


def make_answering(folder, path):
    """Returns the `Answering` that scores lines as the flags say, with the checkpoint at `path`."""
    lm = folder.load_model(path, **values(("mem_len", "clamp_len"), given_only=True))
    scorer = Scorer(lm, vocab_of(folder), config_of(ScoringConfig))

    def answers(lines, name, strict, numbers):
        return itertools.chain.from_iterable(scorer.score(in_blocks(lines), name, strict, numbers))

    text = as_columns if FLAGS.format == "tsv" else functools.partial(as_object, symbols=scorer.vocab.symbols)
    return Answering(answers, text, functools.partial(summands, unk_id=scorer.vocab.unk_id))


@messages_to_stderr()
def main():
    if not FLAGS.columns or set(FLAGS.columns) - set(COLUMNS):
        message = f"--columns must name some of {', '.join(COLUMNS)}, got {','.join(FLAGS.columns)!r}"
        raise ParameterError("columns", FLAGS.columns, list(COLUMNS), message)
    only_tsv = f"is for --format=tsv, got --format={FLAGS.format}, which writes every number"
    check_used((("columns",), FLAGS.format == "tsv", only_tsv))
    config = config_of(ScoringConfig)
    folder = RunFolder(FLAGS.model_dir, "language_model")
    if config.score_end and not newline_ids(vocab_of(folder)):
        print("The vocabulary has no symbol for the end of a line, so the ends of lines do not count.", file=sys.stderr)
    together = None if config.carry_memory else TOGETHER  # memory goes from line to line, but not from block to block
    tally, seconds = answer_input(folder, make_answering, __spec__.name, together)
    # Earlier versions, which may have answered some files, did not count the unknown tokens.
    nll, tokens, size, lines, unknown = [*tally.sums, *[0] * (5 - len(tally.sums))]
    report(nll, tokens, size, lines, seconds)
    note = vocab_of(folder).note_on_unknown(int(unknown), int(tokens), "the lines")
    if note:
        print(note, file=sys.stderr)
    return int(tally.missing > 0)


def report(nll, tokens, size, lines, seconds):
    """Prints the totals of the text to the standard error.

    Args:
        nll: sum of the nll of all tokens, in nats.
        tokens: number of tokens.
        size: number of bytes.
        lines: number of lines that have a score.
        seconds: time for all lines; `None` if some were scored by an earlier run of the program.
    """
    summary = f"{lines:,} lines, {tokens:,} tokens"
    if tokens:
        summary += f": ppl {math.exp(min(nll / tokens, 700)):.4f}, {nll / math.log(2) / size:.4f} bits per byte"
    print(f"{summary} | {tokens / seconds:,.0f} tokens/s" if seconds else summary, file=sys.stderr)


if __name__ == "__main__":
    run(main)
