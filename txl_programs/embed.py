r"""Computes a vector for each line of text with a trained language model: the mean of the hidden states of its tokens.

    txl-embed --model_dir=runs/quickstart --input=lines.txt --output=vectors.npy
    echo "The import statement" | txl-embed --model_dir=runs/quickstart | cut -f1-4
    txl-embed --model_dir=runs/wt103 --input=corpus/ --output=vectors/            (many files, see docs/scale.md)

With an --output that ends with .npy, the program writes an array, float32 [lines, d_model]. Otherwise it writes a line
of output for every line of input: the numbers of the vector, separated by tabs.

--layer=0 takes the embeddings, --layer=1 the outputs of the first layer, ...; the default is the last layer. If a line
has no vector, for example because it is empty, the output has an empty line or a row of NaN. The standard error then
says why, and the exit status is 1.
"""

import itertools
import sys

from absl import flags

from txl_config import ScoringConfig
from txl_programs.flag_values import FLAGS, define_flags, define_line_flags
from txl_programs.printing import messages_to_stderr
from txl_programs.program import read_flags, run

define_line_flags("texts")
flags.DEFINE_integer("layer", -1, "Layer whose outputs to take; 0 for the embeddings, -1 for the last layer.")

define_flags(ScoringConfig, leave_out={"start", "score_end", "carry_memory", "continuations"})

read_flags(__name__)

import numpy as np

from txl_config import ClusterConfig
from txl_config.errors import ParameterError
from txl_programs.answering.files import answer_input, is_several
from txl_programs.answering.lines import check_output, input_lines, say_how_many, say_missing
from txl_programs.flag_values import cluster_of
from txl_programs.opening import vocab_of, with_checkpoint
from txl_tf.data.inputs import has_ending
from txl_tf.data.line_files import Answering, Tally, nothing
from txl_tf.data.lines import LineError, in_blocks
from txl_tf.files import new_file
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.vectors import TextVectors

TOGETHER = 2000  # lines in a block, if the input is several files or runs on a cluster


def as_text(vector, number=None):
    """Returns the line of output for a vector; for a `LineError`, an empty line. `number` is not used."""
    return "\n" if isinstance(vector, LineError) else "\t".join(f"{x:.6g}" for x in vector) + "\n"


def make_answering(folder, path):
    """Returns the `Answering` that computes the vectors of lines as the flags say, with the checkpoint at `path`."""
    lm = folder.load_model(path)
    reader = TextVectors(lm, vocab_of(folder), FLAGS.layer, FLAGS.segment, FLAGS.batch_tokens)

    def answers(lines, name, strict, numbers):
        return itertools.chain.from_iterable(reader.vectors(in_blocks(lines), name, strict, numbers))

    return Answering(answers, as_text)


def write_array(folder):
    """Writes the vectors of one file or of the standard input as an array, with NaN for a line without a vector.

    Returns:
        The `Tally` of the lines.

    Raises:
        ParameterError: the flags ask for a Ray cluster, --input names several files, or --input or --output cannot be
            used.
        LineError: a line has no vector, with --strict.
        OSError: a file cannot be read or written.
    """
    if cluster_of(ClusterConfig).given or is_several(FLAGS.input):
        allowed = "a folder, with several files or a Ray cluster"
        message = f"--output=....npy is for one file on this machine: give {allowed}, got {FLAGS.output}"
        raise ParameterError("output", FLAGS.output, allowed, message)
    check_output()
    lines, name = input_lines(vocab_of(folder).has_plain_text)
    answering = with_checkpoint(folder, lambda path: make_answering(folder, path))
    width = folder.read_config()["model"]["d_model"]
    tally = Tally()
    rows = []
    for vector in answering.answers(lines, name, FLAGS.strict, itertools.count(1)):
        tally.count(vector, nothing)
        say_missing(tally)
        rows.append(np.full([width], np.nan, np.float32) if isinstance(vector, LineError) else vector)
    say_how_many(tally)
    with new_file(FLAGS.output) as file:
        np.save(file, np.stack(rows) if rows else np.zeros([0, width], np.float32))
    return tally


@messages_to_stderr()
def main():
    folder = RunFolder(FLAGS.model_dir, "language_model")
    if FLAGS.output and has_ending(FLAGS.output, ".npy"):
        tally = write_array(folder)
    else:
        tally, _ = answer_input(folder, make_answering, __spec__.name, TOGETHER)
    print(f"{tally.lines:,} lines", file=sys.stderr)
    return int(tally.missing > 0)


if __name__ == "__main__":
    run(main)
