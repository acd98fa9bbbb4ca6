"""Finds named entities in text, with a run of txl-train-ner.

    echo "高勇，男，中国国籍，无境外居留权。" | txl-tag --model_dir=runs/tener_resume
    txl-tag --model_dir=runs/flat_resume --input=text.txt --output=entities.jsonl
    txl-tag --model_dir=runs/flat_resume --input=text.txt --format=conll            (characters and tags)
    txl-tag --model_dir=runs/flat_resume --input=texts/ --output=found/             (many files, see docs/scale.md)
    txl-tag --model_dir=runs/flat_resume --tagged=test.char.bmes      (precision, recall, F1, confusion)
    txl-tag --model_dir=runs/tener_resume --input=text.txt --nosplit_sentences         (paragraphs, each at once)
    txl-tag --model_dir=runs/flat_resume --input=text.txt --lexicon=words.txt          (other words than in training)

A line of input is a sentence or several sentences. If a line has more sentences than the training lines had, the
program splits it. A line of output lists the entities as JSON: kind, start and end (in characters, end excluded), text,
and prob, the probability that the tokens of the entity have exactly these tags. Tokens are characters or, for a run
with --token_level=word, words between white space. For a run with --tag_scheme=none, the output lists every token with
its tag. --format=conll writes a space or a tab as ␣, which is the same symbol, so that --tagged and txl-train-ner read
the same entities. The program answers a line as soon as the standard input pauses. If a line cannot be tagged, the
output has an object with "error" or, with --format=conll, an empty line, as for an empty line of input. The standard
error then says why, and the exit status is 1. Text goes to the standard output, all else to the standard error.

--tagged reads a file of tokens and tags instead, compares the tags, and prints tables to the standard output. The file
has the columns of the training files unless --token_column and --tag_column say otherwise. --list_wrong also lists the
sentences with wrong tags. With --output or --format, the program also writes the entities that it found; with --format
alone they go to the standard output, and the tables go to the standard error. The program uses the checkpoint with the
best validation F1 unless --ckpt_path names another.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable

from absl import flags

from txl_config import ColumnsConfig
from txl_programs.flag_values import (
    FLAGS,
    changed,
    check_not_both,
    check_used,
    define_flags,
    define_line_flags,
    refuse,
    values,
)
from txl_programs.opening import with_checkpoint
from txl_programs.printing import messages_to_stderr
from txl_programs.program import read_flags, run

FORMATS = ("json", "conll")

define_line_flags("sentences")
flags.DEFINE_string("tagged", None, "File of tokens and tags: tag the tokens, and compare with the tags.")
flags.DEFINE_bool("list_wrong", False, "With --tagged: also list the sentences with wrong tags.")
define_flags(ColumnsConfig)
flags.DEFINE_enum("format", "json", FORMATS, "Entities as JSON lines, or one token and its tag on each line.")
flags.DEFINE_bool(
    "constraints", None, "Allow only sequences of tags that the tag scheme allows. Default: as in the run."
)
flags.DEFINE_integer("batch_size", 64, "Sentences to tag at a time.", lower_bound=1)
flags.DEFINE_integer(
    "max_seq_len", None, "Most tokens to read at a time. Default: as many as the longest training line has."
)
flags.DEFINE_bool(
    "split_sentences",
    None,
    "Split lines at the ends of sentences (。！？；… and . ! ? ;). Default: split lines with more sentences than the "
    "training lines, unless --max_seq_len is given.",
)
flags.DEFINE_string("lexicon", None, "For FLAT: lexicon to use instead of the run's, a file of words or jieba.")
flags.DEFINE_bool("skip_short_words", None, "Ignore words of one character in --lexicon. Default: as in the run.")

read_flags(__name__)

from txl_config.errors import ParameterError
from txl_config.schema import check_left_out
from txl_programs.answering.files import answer_input
from txl_programs.answering.lines import check_output, write_answers
from txl_tf.data.line_files import Answering
from txl_tf.data.lines import LineError, as_json
from txl_tf.data.tagged.columns import BLANKS, TaggedSentence, columns_in, line_of, places_in
from txl_tf.data.tagged.sentences import read_tagged_as
from txl_tf.runs.families.pipeline import POOL, TaggedLine, TaggingPipeline
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import confusion, format_confusion, format_scores, format_wrong, score_table

WRITTEN = {**BLANKS, 0: "␀"}  # characters that a file of columns cannot hold -> what is written instead


def columns_of(folder: RunFolder) -> ColumnsConfig:
    """Returns the columns of the training files; the defaults for a run of an earlier version, which lacks them."""
    known = folder.read_config()["data"]
    return ColumnsConfig(**{name: known.get(name) for name in ColumnsConfig.names()})


def lines_of(tagged: TaggedLine | LineError, number: int | None = None, tag_first: bool = False) -> str:
    """Returns the lines of output for the answer to a line, in the --format.

    Args:
        tagged: the answer to the line.
        number: the number of the line, which `Answering` passes; not used.
        tag_first: with --format=conll: whether the tag stands before the token.
    """
    if FLAGS.format == "json":
        error = {"error": tagged.reason} if isinstance(tagged, LineError) else {"entities": tagged.entities}
        return as_json({"text": tagged.text, **error})
    if isinstance(tagged, LineError):
        return "\n"
    rows = [(token.translate(WRITTEN), tag) for token, tag in zip(tagged.tokens, tagged.tags, strict=True)]
    return "".join(f"{tag} {token}\n" if tag_first else f"{token} {tag}\n" for token, tag in rows) + "\n"


def text_function(folder: RunFolder) -> Callable[..., str]:
    """Returns `lines_of` for this run: in the order of the training files, which may have the tag before the token."""
    return functools.partial(lines_of, tag_first=places_in(2, columns_of(folder)) == (1, 0))


def read_tagged(folder: RunFolder) -> list[TaggedSentence]:
    """Returns the sentences of --tagged with their tags, which are converted to the scheme of the run's model."""
    config = folder.read_config()
    digits = config["data"].get("segment_digits", False)
    model = config["model"]
    columns = columns_in(FLAGS.tagged, columns_of(folder))
    columns = dataclasses.replace(columns, **values(ColumnsConfig, given_only=True))
    return read_tagged_as(FLAGS.tagged, model["labels"], digits, model.get("scheme"), columns)


def open_pipeline(folder: RunFolder, path: str) -> TaggingPipeline:
    """Returns the `TaggingPipeline` of a run as the flags say, with the checkpoint at `path`."""
    changes = values(("constraints", "max_seq_len", "lexicon", "skip_short_words"), given_only=True)
    return TaggingPipeline.open(folder, path, **changes)


def compare(
    sentences: list[TaggedSentence], pipeline: TaggingPipeline, format_line: Callable[[TaggedLine], str]
) -> None:
    """Tags the sentences of --tagged, compares the result with their own tags, and prints scores and a confusion table.

    With --list_wrong, it also prints the sentences with wrong tags. If --output or --format is given, it also writes
    the entities.

    Args:
        sentences: sentences with their tags, from `read_tagged`.
        pipeline: the pipeline of the run.
        format_line: function from a tagged line to the output for it.
    """
    tagger = pipeline.tagger
    model = pipeline.model
    tagger.batch_size = FLAGS.batch_size
    tags = [sentence.tags for sentence in sentences]
    tokens = [sentence.tokens for sentence in sentences]
    space = " " if model.token_level == "word" else ""
    places = [f"{FLAGS.tagged}, line {line_of(sentence, 0)}" for sentence in sentences]
    for sentence_tokens, place in zip(tokens, places, strict=True):
        pipeline.warn_of_length(sentence_tokens, place, FLAGS.split_sentences)
    results = tagger.tag_in_sentences(tokens, split=FLAGS.split_sentences)
    writes_entities = FLAGS.output or FLAGS["format"].present
    if writes_entities:
        pairs = zip(tokens, results, strict=True)
        lines = (TaggedLine.of(tagger, space.join(line_tokens), line_tokens, result) for line_tokens, result in pairs)
        write_answers(lines, format_line)
    predicted = [result.tags for result in results]
    scheme = model.scheme
    report = [format_scores(score_table(predicted, tags, scheme)), format_confusion(confusion(predicted, tags, scheme))]
    if FLAGS.list_wrong:
        report.append(format_wrong(places, tokens, predicted, tags, scheme, space))
    out = sys.stderr if writes_entities and not FLAGS.output else sys.stdout  # the entities take the standard output
    print(*report, sep="\n\n", file=out)


def make_answering(folder: RunFolder, path: str) -> Answering:
    """Returns the `Answering` that tags lines as the flags say, with the checkpoint at `path`."""
    tag_lines = functools.partial(
        open_pipeline(folder, path).tag_lines, batch_size=FLAGS.batch_size, split_sentences=FLAGS.split_sentences
    )
    return Answering(tag_lines, text_function(folder))


@messages_to_stderr()
def main() -> int | None:
    if FLAGS.tagged == "":
        raise ParameterError("tagged", "", "a file", "--tagged must name a file, got ''")
    check_not_both("tagged", "input")
    folder = RunFolder(FLAGS.model_dir, "tagger")
    folder.load_vocabs()  # report errors before any line is read
    has_entities = folder.read_config()["model"].get("scheme") != "none"
    check_used((("constraints",), has_entities, "is for tags of entities, which this run does not have"))
    if FLAGS.tagged:
        check_left_out(values(("ray_address", "ray_workers")), "--tagged is for one machine")
        refuse(changed(["strict"]), "is for lines: with --tagged, the program always ends at the first error")
        check_output()
        sentences = read_tagged(folder)
        pipeline = with_checkpoint(folder, functools.partial(open_pipeline, folder))
        return compare(sentences, pipeline, text_function(folder))
    refuse(["list_wrong", *ColumnsConfig.names()], "is for --tagged")
    tally, _ = answer_input(folder, make_answering, __spec__.name, POOL * FLAGS.batch_size)
    return int(tally.missing > 0)


if __name__ == "__main__":
    run(main)
