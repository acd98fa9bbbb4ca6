"""Translates lines with a trained encoder-decoder, and says how right it is where the right targets are given.

    echo "Sat the 21st of Nov 2026" | txl-translate --model_dir=runs/dates
    txl-translate --model_dir=runs/deen --input=test.de --output=test.out --beam_size=4
    txl-translate --model_dir=runs/cmudict --pairs=test.tsv --beam_size=8           (error rates)
    txl-translate --model_dir=runs/deen --pairs=test.de,test.en --output=test.out   (and BLEU, chrF)

A line of input is a source, a line of output its translation. With --n_best above 1, and with --scores, a line of
output is number<TAB>score<TAB>translation, n_best lines for every source; a score is the log-probability in nats, of a
search divided by the length penalty. Text goes to the standard output, the rest to the standard error. In --pairs, a
source may stand on several lines: each of its targets is right. BLEU and chrF need sacrebleu (pip install sacrebleu).
Control characters are written like \\x1b, unless they go to a file or with --raw.
"""

import sys

from absl import flags

from txl_programs.program import FLAGS, answer_lines, define_flags, read_flags, run, values
from txl_tf.config import SearchConfig

flags.DEFINE_string("model_dir", None, "Folder of the run.")
flags.DEFINE_string("ckpt_path", None, "Checkpoint to take, rather than the latest: a path, a name, or best.")
flags.DEFINE_string("input", None, "File of sources, a line each; default: the standard input.")
flags.DEFINE_list("pairs", None, "File of source<TAB>target lines, or two files, to translate and to compare with.")
flags.DEFINE_string("output", None, "File to write to, rather than the standard output.")
flags.DEFINE_integer("batch_size", 64, "Sources to translate at a time.", lower_bound=1)
flags.DEFINE_bool("scores", False, "Write number and score of every translation.")
flags.DEFINE_bool("raw", False, "Write control characters to the standard output as they are.")

define_flags(SearchConfig)

flags.mark_flag_as_required("model_dir")

read_flags(__name__)

import keras

from txl_tf.data.pairs.parallel import read_lines, read_sides
from txl_tf.data.vocabulary import visible
from txl_tf.files import check_writable, new_file
from txl_tf.models.vanilla.translator import Translator
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import corpus_scores, error_rates, group_references


def write(translations, file, first=1, raw=True):
    """Writes the translations of sources, numbered from `first`."""
    for number, found in enumerate(translations, first):
        for text, score in found:
            line = f"{number}\t{score:.4f}\t{text}" if FLAGS.scores or FLAGS.n_best > 1 else text
            file.write((line if raw else visible(line)) + "\n")
    file.flush()


def translate(translator, sources, name):
    bar = keras.utils.Progbar(len(sources), verbose=1) if FLAGS.output and sys.stdout.isatty() else None
    return translator.translate(sources, name, bar and bar.add)


def report(translations, references, level):
    """Prints how right the best translations are."""
    found = [best.text for best, *_ in translations]
    rates = error_rates(found, references, level)
    lines = f"{rates['lines']:.2%} of {len(found):,} lines wrong, {rates['symbols']:.2%} of the symbols"
    scores = corpus_scores(found, references)
    print(lines, *scores.values() or ["(pip install sacrebleu for BLEU and chrF)"], sep="\n", file=sys.stderr)


def main():
    search = SearchConfig(**values(SearchConfig))
    if FLAGS.pairs and FLAGS.input:
        raise ValueError("--pairs and --input exclude each other")
    check_writable(FLAGS.output)
    folder = RunFolder(FLAGS.model_dir, "encoder_decoder")
    vocabs, references = folder.load_vocabs(), None
    interactive = not (FLAGS.pairs or FLAGS.input) and sys.stdin.isatty()
    if FLAGS.pairs:
        name = " and ".join(FLAGS.pairs)
        sides = ([line.removesuffix("\n") for line in side.lines] for side in read_sides(FLAGS.pairs))
        references = group_references(*sides)
        sources = list(references)
    elif FLAGS.input:
        name, sources = FLAGS.input, [line.removesuffix("\n") for line in read_lines(FLAGS.input)]
    elif not interactive:
        name, sources = "standard input", sys.stdin.read().removesuffix("\n").split("\n")
    translator = Translator(folder.load_model(FLAGS.ckpt_path), *vocabs, search, FLAGS.batch_size)
    if interactive:
        answer_lines(lambda line, number: write(translator.translate([line], "line"), sys.stdout, number, FLAGS.raw))
        return
    translations = translate(translator, sources, name)
    if FLAGS.output:
        with new_file(FLAGS.output) as file:
            write(translations, file)
    else:
        write(translations, sys.stdout, raw=FLAGS.raw)
    if references:
        report(translations, list(references.values()), vocabs[1].level)


if __name__ == "__main__":
    run(main)
