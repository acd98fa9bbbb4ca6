"""Finds named entities in text, with a run of txl-train-ner.

    echo "高勇，男，中国国籍，无境外居留权。" | txl-tag --model_dir=runs/tener_resume
    txl-tag --model_dir=runs/flat_resume --input=text.txt --output=entities.jsonl
    txl-tag --model_dir=runs/flat_resume --input=text.txt --format=conll            (characters and tags)
    txl-tag --model_dir=runs/flat_resume --input=texts/ --output=found/             (many files, see docs/scale.md)
    txl-tag --model_dir=runs/flat_resume --tagged=test.char.bmes      (precision, recall, F1, confusion)
    txl-tag --model_dir=runs/tener_resume --input=text.txt --nosplit_sentences         (paragraphs, each at once)
    txl-tag --model_dir=runs/flat_resume --input=text.txt --lexicon=words.txt          (other words than in training)

A line of input is a sentence, or a text of several, which is cut at their ends where it has more of them than the lines
of the training. A line of output is its entities as JSON: kind, start, end (in characters, end excluded), text, and
prob, the probability that its tokens have just these tags. Tokens are characters or, of a run with
--token_level=word, words between white space; of one with --tag_scheme=none, each is given with its tag. With
--format=conll a space or a tab is written as ␣, which is the same symbol, so that --tagged and txl-train-ner read the
same entities. Lines are tagged as they come: a pause of the standard input is enough. A line that cannot be tagged has
an object with "error" in its place, or an empty line; the standard error says why, and the status is 1. Text goes to
the standard output, the rest to the standard error.

--tagged takes a file of tokens and tags instead, in the columns of the training files unless --token_column and
--tag_column say otherwise, and prints tables to the standard output; --list_wrong also lists the sentences that were
tagged wrongly. With --output or --format, the program also writes what it found. With --format alone, this goes to the
standard output, and the tables go to the standard error. The weights are those with the best F1 of the training, unless
--ckpt_path says otherwise.
"""

import dataclasses
import functools
import sys

from absl import flags

from txl_programs.program import (
    FLAGS,
    changed,
    check_used,
    define_flags,
    define_line_flags,
    messages_to_stderr,
    read_flags,
    run,
    values,
    with_checkpoint,
)
from txl_tf.config import ColumnsConfig

FORMATS = ("json", "conll")

define_line_flags("sentences")
flags.DEFINE_string("tagged", None, "File of tokens and tags, to tag and to compare with.")
flags.DEFINE_bool("list_wrong", False, "With --tagged: list the sentences that were tagged wrongly, below the tables.")
define_flags(ColumnsConfig)
flags.DEFINE_enum("format", "json", FORMATS, "JSON lines of entities, or a token and its tag a line.")
flags.DEFINE_bool("constraints", None, "Take only paths of tags that their scheme allows; default: as the run does.")
flags.DEFINE_integer("batch_size", 64, "Sentences to tag at a time.", lower_bound=1)
flags.DEFINE_integer(
    "max_seq_len", None, "Most tokens to read at a time; default: as many as the longest training sentence has."
)
flags.DEFINE_bool(
    "split_sentences",
    None,
    "Cut lines at the ends of sentences (。！？；… and . ! ? ;). Default: lines of more sentences than in training, if "
    "--max_seq_len is not given.",
)
flags.DEFINE_string("lexicon", None, "For FLAT: file of words to find in place of the run's, or jieba.")
flags.DEFINE_bool("skip_short_words", None, "Leave out words of one character of --lexicon; default: as the run does.")

read_flags(__name__)

from txl_programs.answering.files import answer_input
from txl_programs.answering.lines import check_output, write_answers
from txl_tf.data.line_files import Answering
from txl_tf.data.lines import LineError, as_json
from txl_tf.data.tagged.columns import BLANKS, line_of, places_in
from txl_tf.data.tagged.sentences import read_tagged_as
from txl_tf.runs.families.pipeline import POOL, TaggedLine, TaggingPipeline
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import confusion, format_confusion, format_scores, format_wrong, score_table
from txl_tf.schema import check_left_out

WRITTEN = {**BLANKS, 0: "␀"}  # tokens as a file can hold them; one with the byte 0 is none of text


def columns_of(folder):
    """The columns of the files that the run was trained on. Those of earlier versions do not say: the defaults."""
    known = folder.read_config()["data"]
    return ColumnsConfig(**{name: known.get(name) for name in ColumnsConfig.names()})


def lines_of(found, number=None, tag_first=False):
    """What is written for a sentence, a `TaggedLine`; with `tag_first`, tokens stand in the second column."""
    if FLAGS.format == "json":
        error = {"error": found.reason} if isinstance(found, LineError) else {"entities": found.entities}
        return as_json({"text": found.text, **error})
    if isinstance(found, LineError):
        return "\n"
    rows = [(token.translate(WRITTEN), tag) for token, tag in zip(found.tokens, found.tags, strict=True)]
    return "".join(f"{tag} {token}\n" if tag_first else f"{token} {tag}\n" for token, tag in rows) + "\n"


def text_function(folder):
    """`lines_of`, with the columns in the order of the run's files."""
    return functools.partial(lines_of, tag_first=places_in(2, columns_of(folder)) == (1, 0))


def read_tagged(folder):
    """The sentences of --tagged."""
    config = folder.read_config()
    digits, model = config["data"].get("segment_digits", False), config["model"]
    columns = dataclasses.replace(columns_of(folder), **values(ColumnsConfig, given_only=True))
    return read_tagged_as(FLAGS.tagged, model["labels"], digits, model.get("scheme"), columns)


def open_pipeline(folder, path):
    """The tagger of a run, by the flags, with the weights of a checkpoint."""
    changes = values("constraints max_seq_len lexicon skip_short_words", given_only=True)
    return TaggingPipeline.open(folder, path, **changes)


def compare(sentences, pipeline, text):
    """Tags sentences that have tags, writes what it found where that is asked for, and prints tables.

    Args:
        text: function of a `TaggedLine` that gives what is written.
    """
    tagger, model, tags = pipeline.tagger, pipeline.model, [sentence.tags for sentence in sentences]
    tagger.batch_size = FLAGS.batch_size
    tokens, space = [sentence.tokens for sentence in sentences], " " * (model.token_level == "word")
    places = [f"{FLAGS.tagged}, line {line_of(sentence, 0)}" for sentence in sentences]
    for each, place in zip(tokens, places, strict=True):
        pipeline.warn_of_length(each, place, FLAGS.split_sentences)
    results = tagger.tag_in_sentences(tokens, split=FLAGS.split_sentences)
    written = FLAGS.output or FLAGS["format"].present
    if written:
        pairs = zip(tokens, results, strict=True)
        write_answers((TaggedLine.of(tagger, space.join(tokens), tokens, found) for tokens, found in pairs), text)
    found, scheme = [result.tags for result in results], model.scheme
    report = [format_scores(score_table(found, tags, scheme)), format_confusion(confusion(found, tags, scheme))]
    if FLAGS.list_wrong:
        report.append(format_wrong(places, tokens, found, tags, scheme, space))
    out = sys.stderr if written and not FLAGS.output else sys.stdout
    print(*report, sep="\n\n", file=out)


def make_answering(folder, path):
    """What tags lines, by the flags, with the weights of a checkpoint."""
    tag_lines = functools.partial(
        open_pipeline(folder, path).tag_lines, batch_size=FLAGS.batch_size, split_sentences=FLAGS.split_sentences
    )
    return Answering(tag_lines, text_function(folder))


@messages_to_stderr()
def main():
    if FLAGS.tagged == "":
        raise ValueError("--tagged must name a file, got ''")
    if FLAGS.tagged and FLAGS.input:
        raise ValueError("--tagged and --input exclude each other")
    folder = RunFolder(FLAGS.model_dir, "tagger")
    folder.load_vocabs()  # errors come before lines are read
    if FLAGS.tagged:
        check_left_out(values("ray_address ray_workers"), "--tagged is for one machine")
        check_used((changed("strict"), False, "is for lines: --tagged ends at what it cannot read anyway"))
        check_output(FLAGS.tagged)
        sentences = read_tagged(folder)
        pipeline = with_checkpoint(folder, functools.partial(open_pipeline, folder))
        return compare(sentences, pipeline, text_function(folder))
    check_used((["list_wrong", *ColumnsConfig.names()], False, "is for --tagged"))
    tally, _ = answer_input(folder, make_answering, __spec__.name, POOL * FLAGS.batch_size)
    return int(tally.missing > 0)


if __name__ == "__main__":
    run(main)
