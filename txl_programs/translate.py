"""Translates lines with a trained encoder-decoder, and measures its errors if reference translations are given.

    echo "Sat the 21st of Nov 2026" | txl-translate --model_dir=runs/dates
    txl-translate --model_dir=runs/deen --input=test.de --output=test.out --beam_size=4
    txl-translate --model_dir=runs/deen --input='de/*.txt' --output=en/             (many files, see docs/scale.md)
    txl-translate --model_dir=runs/cmudict --pairs=test.tsv --beam_size=8           (error rates)
    txl-translate --model_dir=runs/deen --pairs=test.de,test.en --output=test.out   (and BLEU, chrF)
    txl-translate --model_dir=runs/seed0 --ensemble=runs/seed1 --ensemble=runs/seed2 --input=test.de

A line of input is a source sentence, a line of output its translation. With --n_best above 1, and with --scores, the
output has n_best lines for every source: number<TAB>score<TAB>translation. The score is the log-probability in nats; a
beam search divides it by the length penalty. The program answers a line as soon as the standard input pauses. If a line
cannot be translated, its translation and its score are empty. The standard error then says why, and the exit status is
1. Text goes to the standard output, all else to the standard error. At the end, the program prints how many
translations were cut off because they did not end within --max_new_tokens, and how many symbols of the sources are not
in the vocabulary (<unk>). In --pairs, several lines may have the same source: each of its targets counts as correct,
and error rates count the source once. BLEU and chrF need sacrebleu: pip install "txl_tf[seq2seq]". --bleu_tokenize
chooses its tokenizer. On a terminal, control characters are written like \\x1b, unless --raw is given.
"""

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from absl import flags

from txl_config import SearchConfig, TransformerConfig
from txl_config.data import PairFilesConfig
from txl_programs.flag_values import (
    FLAGS,
    check_not_both,
    check_used,
    config_of,
    define_flags,
    define_line_flags,
    values,
)
from txl_programs.opening import vocabs_of, with_checkpoint
from txl_programs.printing import messages_to_stderr
from txl_programs.program import read_flags, run

define_line_flags("sources")
flags.DEFINE_multi_string(
    "ensemble",
    [],
    "Another run with the same vocabularies, or a checkpoint in one, such as runs/other/best: its model translates "
    "together with that of --model_dir, by the mean of their probabilities. Give the flag once for each run. "
    "--ckpt_path is only for --model_dir.",
)
flags.DEFINE_list(
    "pairs", None, "File of source<TAB>target lines, or two files: translate the sources, and compare with the targets."
)
flags.DEFINE_integer("batch_size", 64, "Sources to translate at the same time.", lower_bound=1)
flags.DEFINE_bool("scores", False, "Write the number and score of every translation, too.")
flags.DEFINE_string(
    "bleu_tokenize",
    None,
    "With --pairs: sacrebleu's tokenizer for BLEU, such as 13a, zh or char. Default: by the script of the targets.",
)
flags.DEFINE_bool("raw", False, "Write control characters to a terminal unchanged.")

define_flags(SearchConfig)
define_flags(PairFilesConfig)

read_flags(__name__)

import numpy as np

from txl_config.errors import ParameterError
from txl_config.schema import check_left_out
from txl_programs.answering.files import answer_input
from txl_programs.answering.lines import check_output, write_answers
from txl_tf.data.line_files import Answering, Tally
from txl_tf.data.lines import LineError
from txl_tf.data.pairs.files import PairReader, without_ends
from txl_tf.data.pairs.parallel import fitting
from txl_tf.data.vocabulary import Vocab
from txl_tf.files import absolute
from txl_tf.runs.ensemble import load_model, members_of
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import (
    check_tokenizer,
    corpus_scores,
    counted_in,
    error_rates,
    group_references,
    in_case_of_vocabs,
)
from txl_tf.vanilla.translator import POOL, Translation, Translator, assumed_length, did_not_end

Answer = TypeVar("Answer")


def lines_of(translations: Sequence[Translation] | LineError, number: int) -> str:
    """Returns the lines of output for the translations of line `number`, the best one first, or for its `LineError`."""
    if not (FLAGS.scores or FLAGS.n_best > 1):
        return "\n" if isinstance(translations, LineError) else f"{translations[0].text}\n"
    if isinstance(translations, LineError):
        return f"{number}\t\t\n" * FLAGS.n_best
    return "".join(f"{number}\t{score:.4f}\t{text}\n" for text, score in translations)


def counts_of(translations: Sequence[Translation]) -> tuple[int, int, int]:
    """Returns the numbers of a source that are summed over all sources, for `say_counts`: `(unended, unknown, lines)`.

    `unended` is 1 if the best translation was cut off, else 0. `unknown` is the number of unknown symbols in the
    source. `lines` is 1 if there are any, else 0.
    """
    best = translations[0]
    return int(not best.ended), best.unknown, int(best.unknown > 0)


def say_counts(tally: Tally, search: SearchConfig, model: TransformerConfig) -> None:
    """Prints how many translations were cut off, and how many symbols of the sources were unknown, if there are any.

    Args:
        tally: tally of all lines, with the sums of `counts_of`.
        search: how the lines were translated.
        model: hyper-parameters of the model.
    """
    unended, unknown, lines = map(int, tally.sums or [0, 0, 0])
    if unended:
        print(did_not_end(unended, tally.lines - tally.missing, search, model), file=sys.stderr)
    if unknown:
        message = (
            f"symbols of the sources that are not in the vocabulary, read as <unk>: {unknown:,} in {lines:,} lines"
        )
        print(message, file=sys.stderr)


def collecting_best(
    answers: Iterable[list[Translation] | LineError], best: list[Translation]
) -> Iterator[list[Translation] | LineError]:
    """Yields the answers. Appends the best translation of each to the list `best`; for a `LineError`, an empty text."""
    for translations in answers:
        best.append(Translation("", 0.0) if isinstance(translations, LineError) else translations[0])
        yield translations


def for_every_line(sources: Iterable[str], answers: Iterator[Answer]) -> Iterator[Answer]:
    """Yields an answer for each source, also for repeated ones.

    Args:
        sources: list of lines.
        answers: iterator with one answer for each different source, in the order in which they first appear.
    """
    answer_of = {}
    for source in sources:
        if source not in answer_of:
            answer_of[source] = next(answers)
        yield answer_of[source]


def report(texts: list[str], references: list[list[str]], level: str, n_pairs: int) -> None:
    """Prints the error rates of the best translations and, if sacrebleu is installed, BLEU and chrF.

    Args:
        texts: the best translation of each source; empty, and thus wrong, if the source could not be translated.
        references: list of the correct targets of each source.
        level: level of the target's tokens, such as "word".
        n_pairs: number of pairs. It is larger than the number of sources if pairs have the same source.
    """
    rates = error_rates(texts, references, level)
    counted = f"{len(texts):,} lines"
    if n_pairs != len(texts):
        counted = f"{len(texts):,} different sources ({n_pairs:,} pairs)"
    lines = f"{rates['lines']:.2%} of {counted} wrong, {rates['symbols']:.2%} of the {counted_in(level)}"
    scores = corpus_scores(texts, references, FLAGS.bleu_tokenize, level)
    print(lines, *scores.values() or ['(pip install "txl_tf[seq2seq]" for BLEU and chrF)'], sep="\n", file=sys.stderr)


def make_answering(folder: RunFolder, path: str) -> Answering:
    """Returns the `Answering` that translates lines as the flags say, with the checkpoint at `path`."""
    members = members_of(folder, FLAGS.ensemble)
    for member in members:
        print(f"ensemble: {member.folder.name_of(member.path)} of {member.folder}", file=sys.stderr)
    model = load_model(folder, path, members)
    source_vocab, target_vocab = vocabs_of(folder)
    translator = Translator(model, source_vocab, target_vocab, config_of(SearchConfig), FLAGS.batch_size)
    return Answering(translator.translate_lines, lines_of, counts_of)


def compare(folder: RunFolder, vocabs: list[Vocab]) -> Tally:
    """Translates the sources of --pairs, writes the translations, and prints their error rates.

    Args:
        folder: folder of the run.
        vocabs: vocabularies of the sources and of the targets.

    Returns:
        The `Tally` of all pairs. A source in several pairs is translated once, and counts in the tally for each pair.

    Raises:
        ParameterError: the pairs cannot be used, or a flag does not fit --pairs.
        LineError: a source has no translation, with --strict.
    """
    check_left_out(values(("ray_address", "ray_workers")), "--pairs is for one machine")
    check_output()
    reader = PairReader(config_of(PairFilesConfig), [vocab.level for vocab in vocabs])
    texts = reader.read(FLAGS.pairs)
    if FLAGS.skip_bad_lines:
        lengths = [[vocab.count(line) for line in text.lines] for vocab, text in zip(vocabs, texts, strict=True)]
        fits, reason = fitting(np.max(lengths, 0), texts, folder.read_config()["model"]["max_len"])
        texts = [text.take(fits) for text in texts]
        if reason:
            reader.said.append(reason)
    for sentence in reader.said:
        print(sentence, file=sys.stderr)
    sides = in_case_of_vocabs([without_ends(text.lines) for text in texts], vocabs)
    references = group_references(*sides)
    # `{source: number of its first line}`: of equal keys, `dict` keeps the last value.
    first_number = dict(zip(reversed(sides[0]), reversed(texts[0].numbers), strict=True))
    numbers = [first_number[source] for source in references]
    best: list[Translation] = []
    answering = with_checkpoint(folder, functools.partial(make_answering, folder))
    answers = answering.answers(references, " and ".join(FLAGS.pairs), FLAGS.strict, numbers=numbers)
    answers = for_every_line(sides[0], collecting_best(answers, best))
    tally = write_answers(answers, answering.text, answering.numbers, FLAGS.raw)
    report([translation.text for translation in best], list(references.values()), vocabs[1].level, len(sides[0]))
    return tally


@messages_to_stderr()
def main() -> int:
    search = config_of(SearchConfig)
    check_used(
        (("length_penalty",), FLAGS.beam_size > 1, "is for a beam search: give --beam_size, too"),
        (("bleu_tokenize", *PairFilesConfig.names()), FLAGS.pairs, "is for --pairs"),
    )
    if FLAGS.bleu_tokenize is not None:
        check_tokenizer(FLAGS.bleu_tokenize)
    if FLAGS.pairs == []:
        raise ParameterError("pairs", [], "one file or two", "--pairs must name one file or two, got none")
    check_not_both("pairs", "input")
    folder = RunFolder(FLAGS.model_dir, "encoder_decoder")
    vocabs = vocabs_of(folder)
    # Paths of checkpoints, so that all that follows opens the same ones, even if a member is still trained.
    FLAGS.ensemble = [absolute(member.path) for member in members_of(folder, FLAGS.ensemble)]
    model = TransformerConfig(**folder.read_config()["model"])
    if assumed := assumed_length(search, model):
        print(assumed, file=sys.stderr)
    if FLAGS.pairs:
        tally = compare(folder, vocabs)
    else:
        tally, _ = answer_input(folder, make_answering, __spec__.name, POOL * FLAGS.batch_size, FLAGS.raw)
    say_counts(tally, search, model)
    return int(tally.missing > 0)


if __name__ == "__main__":
    run(main)
