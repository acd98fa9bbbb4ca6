"""Finds named entities in text, with a run of txl-train-ner.

    echo "高勇，男，中国国籍，无境外居留权。" | txl-tag --model_dir=runs/tener_resume
    txl-tag --model_dir=runs/flat_resume --input=text.txt --output=entities.jsonl
    txl-tag --model_dir=runs/flat_resume --input=text.txt --format=conll            (characters and tags)
    txl-tag --model_dir=runs/flat_resume --tagged=test.char.bmes      (precision, recall, F1, confusion)

A line of input is a sentence, a line of output its entities as JSON: kind, start, end (in characters, end excluded),
text, and prob, the probability that its tokens have just these tags. Tokens are characters or, of a run with
--token_level=word, words between white space; of one with --tag_scheme=none, each is given with its tag. Text goes to
the standard output, the rest to the standard error. --tagged takes a file of tokens and tags instead, and compares. The
weights are those with the best F1 of the training, unless --ckpt_path says otherwise.
"""

import json
import sys

from absl import flags

from txl_programs.program import FLAGS, answer_lines, read_flags, run, values

FORMATS = ("json", "conll")

flags.DEFINE_string("model_dir", None, "Folder of the run.")
flags.DEFINE_string("ckpt_path", "best", "Checkpoint to take: a path, a name, best, or latest.")
flags.DEFINE_string("input", None, "File of sentences, a line each; default: the standard input.")
flags.DEFINE_string("tagged", None, "File of tokens and tags, to tag and to compare with.")
flags.DEFINE_string("output", None, "File to write to, rather than the standard output.")
flags.DEFINE_enum("format", "json", FORMATS, "JSON lines of entities, or a token and its tag a line.")
flags.DEFINE_bool("constraints", None, "Take only paths of tags that their scheme allows; default: as the run does.")
flags.DEFINE_integer("batch_size", 64, "Sentences to tag at a time.", lower_bound=1)

flags.mark_flag_as_required("model_dir")

read_flags(__name__)

import keras

from txl_tf.data.pairs.parallel import read_lines
from txl_tf.data.tagged.sentences import encoder_of, read_tagged_as
from txl_tf.data.vocabulary import visible
from txl_tf.files import check_writable, new_file
from txl_tf.models.taggers.text_tagger import TextTagger
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import confusion, format_confusion, format_scores, score_table


def line_of(tagger, sentence, found):
    """What is written for a sentence, a list of tokens."""
    if FLAGS.format == "conll":
        return "".join(f"{token} {tag}\n" for token, tag in zip(sentence, found.tags, strict=True)) + "\n"
    line = (" " if tagger.tagger.token_level == "word" else "").join(sentence)
    return json.dumps(tagger.describe(line, found), ensure_ascii=False) + "\n"


def write(tagger, sentences, results, file, raw=True):
    for sentence, found in zip(sentences, results, strict=True):
        line = line_of(tagger, sentence, found)
        file.write(line if raw else visible(line))
    file.flush()


def read_sentences(folder, split):
    """`(sentences, tags)`; the tags are `None` unless they are given."""
    if FLAGS.tagged:
        config = folder.read_config()
        digits, model = config["data"].get("segment_digits", False), config["model"]
        sentences = read_tagged_as(FLAGS.tagged, model["labels"], digits, model.get("scheme"))
        return [sentence.tokens for sentence in sentences], [sentence.tags for sentence in sentences]
    if FLAGS.input:
        return [split(line.removesuffix("\n")) for line in read_lines(FLAGS.input)], None
    text = sys.stdin.read()
    return [split(line) for line in text.removesuffix("\n").split("\n")] if text else [], None


def main():
    if FLAGS.tagged and FLAGS.input:
        raise ValueError("--tagged and --input exclude each other")
    check_writable(FLAGS.output)
    folder = RunFolder(FLAGS.model_dir, "tagger")
    vocabs = folder.load_vocabs()
    interactive = not (FLAGS.tagged or FLAGS.input) and sys.stdin.isatty()
    if not interactive:
        word = folder.read_config()["model"].get("token_level") == "word"
        sentences, tags = read_sentences(folder, str.split if word else list)
    model = folder.load_model(
        None if FLAGS.ckpt_path == "latest" else FLAGS.ckpt_path, **values("constraints", given_only=True)
    )
    tagger = TextTagger(model, encoder_of(*vocabs), FLAGS.batch_size)
    if interactive:

        def answer(line, _):
            sentences = [tagger.split(line)]
            write(tagger, sentences, tagger.tag(sentences), sys.stdout, raw=False)

        answer_lines(answer)
        return
    bar = keras.utils.Progbar(len(sentences), verbose=1) if FLAGS.output and sys.stdout.isatty() else None
    results = tagger.tag(sentences, bar and bar.add)
    if FLAGS.output:
        with new_file(FLAGS.output) as file:
            write(tagger, sentences, results, file)
    elif not FLAGS.tagged or FLAGS["format"].present:
        write(tagger, sentences, results, sys.stdout, raw=not sys.stdout.isatty())
    if tags is not None:
        found = [result.tags for result in results]
        print(format_scores(score_table(found, tags, model.scheme)), file=sys.stderr)
        print(f"\n{format_confusion(confusion(found, tags, model.scheme))}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
