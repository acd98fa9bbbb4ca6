"""Finds named entities in text, with a run of txl-train-ner.

    echo "高勇，男，中国国籍，无境外居留权。" | txl-tag --model_dir=runs/tener_resume
    txl-tag --model_dir=runs/flat_resume --input=text.txt --output=entities.jsonl
    txl-tag --model_dir=runs/flat_resume --input=text.txt --format=conll            (characters and tags)
    txl-tag --model_dir=runs/flat_resume --input=texts/ --output=found/             (many files, see docs/scale.md)
    txl-tag --model_dir=runs/flat_resume --tagged=test.char.bmes      (precision, recall, F1, confusion)

A line of input is a sentence, a line of output its entities as JSON: kind, start, end (in characters, end excluded),
text, and prob, the probability that its tokens have just these tags. Tokens are characters or, of a run with
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

import contextlib
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
    load_model,
    read_flags,
    run,
    values,
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

read_flags(__name__)

from txl_programs.answering.files import answer_input
from txl_programs.answering.lines import check_output, write_answers
from txl_tf.data.line_files import Answering
from txl_tf.data.lines import LineError, as_json
from txl_tf.data.tagged.columns import BLANKS, line_of, places_in
from txl_tf.data.tagged.sentences import encoder_of, read_tagged_as
from txl_tf.models.taggers.text_tagger import TextTagger
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
    with contextlib.redirect_stdout(sys.stderr):  # what the library says of the file
        return read_tagged_as(FLAGS.tagged, model["labels"], digits, model.get("scheme"), columns)


def compare(sentences, model, vocabs, text):
    """Tags sentences that have tags, writes what it found where that is asked for, and prints tables.

    Args:
        text: function of a `TaggedLine` that gives what is written.
    """
    tagger, tags = TextTagger(model, encoder_of(*vocabs), FLAGS.batch_size), [sentence.tags for sentence in sentences]
    results, space = tagger.tag([sentence.tokens for sentence in sentences]), " " * (model.token_level == "word")
    written = FLAGS.output or FLAGS["format"].present
    if written:
        pairs = zip([sentence.tokens for sentence in sentences], results, strict=True)
        write_answers((TaggedLine.of(tagger, space.join(tokens), tokens, found) for tokens, found in pairs), text)
    found, scheme = [result.tags for result in results], model.scheme
    report = [format_scores(score_table(found, tags, scheme)), format_confusion(confusion(found, tags, scheme))]
    if FLAGS.list_wrong:
        places = [f"{FLAGS.tagged}, line {line_of(sentence, 0)}" for sentence in sentences]
        tokens = [sentence.tokens for sentence in sentences]
        report.append(format_wrong(places, tokens, found, tags, scheme, space))
    out = sys.stderr if written and not FLAGS.output else sys.stdout
    print(*report, sep="\n\n", file=out)


def make_answering(folder, path):
    """What tags lines, by the flags, with the weights of a checkpoint."""
    model = folder.load_model(path, **values("constraints", given_only=True))
    pipeline = TaggingPipeline(model, *folder.load_vocabs())
    return Answering(functools.partial(pipeline.tag_lines, batch_size=FLAGS.batch_size), text_function(folder))


def main():
    if FLAGS.tagged == "":
        raise ValueError("--tagged must name a file, got ''")
    if FLAGS.tagged and FLAGS.input:
        raise ValueError("--tagged and --input exclude each other")
    folder = RunFolder(FLAGS.model_dir, "tagger")
    vocabs = folder.load_vocabs()
    if FLAGS.tagged:
        check_left_out(values("ray_address ray_workers"), "--tagged is for one machine")
        check_used((changed("strict"), False, "is for lines: --tagged ends at what it cannot read anyway"))
        check_output(FLAGS.tagged)
        sentences = read_tagged(folder)
        model = load_model(folder, **values("constraints", given_only=True))
        return compare(sentences, model, vocabs, text_function(folder))
    check_used((["list_wrong", *ColumnsConfig.names()], False, "is for --tagged"))
    tally, _ = answer_input(folder, make_answering, __spec__.name, POOL * FLAGS.batch_size)
    return int(tally.missing > 0)


if __name__ == "__main__":
    run(main)
