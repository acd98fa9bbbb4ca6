"""Continues a text with a trained language model, and prints the tokens as the model generates them.

    txl-generate --model_dir=runs/quickstart --prompt="The import statement" --temperature=0.8 --seed=1
    txl-generate --model_dir=runs/wt103 --prompt_file=article.txt --max_new_tokens=500 --top_p=0.95
    txl-generate --model_dir=runs/my --prompt="Q: " --min_p=0.05 --repetition_penalty=1.2 --stop='\\nQ:'
    txl-generate --model_dir=runs/my --prompt="The" --num_return_sequences=3 --stop_at_newline
    echo "Once upon a time" | txl-generate --model_dir=runs/my --greedy
    txl-generate --model_dir=runs/my --interactive --max_new_tokens=80 --stop_at_newline
    txl-generate --model_dir=runs/my --input=prompts.txt --output=texts.jsonl --format=json       (a prompt a line)
    txl-generate --model_dir=runs/my --input=prompts/ --output=texts/                 (many files, see docs/scale.md)

Without --prompt and --prompt_file, the program reads the prompt from the standard input, without the newline at its
end. If the run knows documents, an empty prompt begins one. With --interactive, the program answers every line that you
type until Ctrl-D, and keeps all lines and answers in one memory. Several samples are printed one after the other; the
standard error has the number of each before it.

With --input, every line is a prompt, and the program continues many at the same time. It writes --num_return_sequences
lines for each: the new text, with newlines written as \\n, or with --format=json one object with "prompt" and "texts".
For prompts of up to 512 tokens, the text is the same as with --prompt and the same --seed. If a line cannot be
continued, the output has an empty line or an object with "error". The standard error then says why, and the exit status
is 1. With --input=-, the program answers a line as soon as the standard input pauses.

The text ends after the first stop string, even if the last token is longer. --verbose prints a line for every token of
the prompt and the answer, with its nll in nats. Text goes to the standard output, all else to the standard error.
Control characters are written like \\x1b, so that no text can take over a terminal; --raw writes them unchanged.
"""

import codecs
import os
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags

from txl_config import REPETITION_WINDOW, ClusterConfig
from txl_programs.flag_values import FLAGS, changed, check_not_both, check_used, define_line_flags, values
from txl_programs.opening import load_model
from txl_programs.printing import messages_to_stderr
from txl_programs.program import read_flags, run

define_line_flags("prompts", "one prompt, by --prompt, --prompt_file or the standard input")
flags.DEFINE_string("prompt", None, "Text to continue.")
flags.DEFINE_string("prompt_file", None, "File with the text to continue.")
flags.DEFINE_enum("format", "text", ["text", "json"], "With --input: lines of text, or of JSON.")
flags.DEFINE_integer("batch_size", 16, "Prompts of --input to continue at the same time.", lower_bound=1)
flags.DEFINE_integer("max_new_tokens", 200, "Tokens to generate; with --interactive, after each line.", lower_bound=0)
flags.DEFINE_float(
    "temperature",
    1.0,
    "Sampling temperature. Less than 1: likely tokens become more likely. 0: always take the most likely token.",
)
flags.DEFINE_integer("top_k", None, "Sample only from this many most likely tokens.")
flags.DEFINE_float("top_p", None, "Sample only from the most likely tokens that together have this probability.")
flags.DEFINE_float(
    "min_p", None, "Sample only from tokens whose probability is at least min_p times that of the most likely token."
)
flags.DEFINE_float("repetition_penalty", None, "More than 1: tokens that were generated recently become less likely.")
flags.DEFINE_integer(
    "repetition_window", REPETITION_WINDOW, "Number of recent tokens that --repetition_penalty applies to."
)
flags.DEFINE_integer("num_return_sequences", 1, "Number of samples. The first one is the same as with 1.")
flags.DEFINE_integer("seed", None, "Random seed: the same seed gives the same text. Default: a new one each time.")
flags.DEFINE_bool("greedy", False, "Take the most likely token, as --temperature=0.")
_STOP = r"Stop string, such as \nQ: or <eos>: the text ends with it. May be given several times."
flags.DEFINE_multi_string("stop", [], _STOP)
flags.DEFINE_bool("stop_at_newline", False, r"End the text at the end of a line, as --stop='\n'.")
flags.DEFINE_bool("stop_at_document", True, "End the text at the end of a document, if the run knows documents.")
flags.DEFINE_bool("interactive", False, "Read lines, and answer each. All of them are kept in one memory.")
flags.DEFINE_bool("verbose", False, "Print every token with its nll.")
flags.DEFINE_bool("raw", False, "Write control characters unchanged.")
flags.DEFINE_integer("mem_len", None, "Length of the memory in positions. Default: as in the run.")
flags.DEFINE_integer("clamp_len", None, "Treat greater distances as this one; -1 for no limit. Default: as in the run.")

read_flags(__name__)

import tensorflow as tf

from txl_config.errors import ParameterError, visible
from txl_programs.answering.files import answer_input
from txl_tf.data.line_files import Answering
from txl_tf.data.lines import LineError, as_json
from txl_tf.data.text_files import with_newlines
from txl_tf.data.vocabulary import escape, unescape
from txl_tf.files import naming_read_errors
from txl_tf.language.sampling import check_integer, check_sampling, of_sequences
from txl_tf.language.session import Session
from txl_tf.language.stopping import check_stops
from txl_tf.language.text_generator import POOL, TextGenerator, TextStream, encode_prompt, stops_of
from txl_tf.runs.folder import RunFolder

READ_AT_ONCE = 512  # tokens of a prompt per call: prompts of any length need one graph
WRITTEN_AT_ONCE = 4  # tokens that are generated before they are printed


class Writer:
    """Reads prompts, and writes their continuations to the standard output.

    Args:
        lm: the language model.
        vocab: its vocabulary.
        options: of `Session.write`: sampling, stop tokens and strings, and the seed.
    """

    def __init__(self, lm, vocab, options):
        self.session = Session(lm)
        self.vocab = vocab
        self.options = options
        self.stream = TextStream(vocab)
        self.echoed = ""  # text of the prompts that were read with `echo`
        self.written = 0  # number of generated tokens
        self.seconds = 0.0  # time for these tokens, without the first ones

    def read(self, ids, echo=True, show=True):
        """Reads a prompt.

        Args:
            ids: int32 `[n]`, the prompt.
            echo: whether the prompt belongs to the printed text. With --verbose, it always does.
            show: whether to print it now. If not, `write_samples` prints it before each of several samples.
        """
        for start in range(0, len(ids), READ_AT_ONCE):
            piece = ids[start : start + READ_AT_ONCE]
            text = self.as_shown(piece, self.session.read(piece[None])[0])
            if echo or FLAGS.verbose:
                self.echoed += text
                if show:
                    self.show(text)

    def write(self, number):
        """Generates and prints `number` tokens, or fewer if a stop string or a stop token ends the text."""
        while number > 0:
            started = time.perf_counter()
            step = min(WRITTEN_AT_ONCE, number)
            tokens, nll = self.session.write(step, vocab=self.vocab, with_nll=FLAGS.verbose, **self.options)
            if self.written:  # the first step compiles the graph
                self.seconds += time.perf_counter() - started
            self.written += tokens.shape[1]
            number -= step
            self.show(self.as_shown(tokens[0], None if nll is None else nll[0], self.session.excess))
            if self.session.ended:
                break
        self.show(self.stream.end() + ("" if FLAGS.verbose else "\n"))

    def write_samples(self, number, seeds):
        """Generates a text of up to `number` tokens for each seed. Each continues the prompts that were read before.

        If there are several, each begins with the prompt, and a line on the standard error numbers it.
        """
        session = self.session
        stream = self.stream
        prompt = self.echoed
        for i, seed in enumerate(seeds):
            if len(seeds) > 1:
                print(f"--- {i + 1} of {len(seeds)}", file=sys.stderr, flush=True)
            self.session = session.copy()
            self.stream = stream.copy()
            if len(seeds) > 1:
                self.show(prompt)
            self.options["seed"] = seed
            self.write(number)

    def as_shown(self, ids, nll, excess=0):
        """The text of new ids, without `excess` characters at its end; with --verbose, a line for each id."""
        text = self.stream.push(ids, excess)
        if FLAGS.verbose:
            return "".join(f"{escape(self.vocab.symbols[i])}\t{value:.4f}\n" for i, value in zip(ids, nll, strict=True))
        return text

    def show(self, text):
        sys.stdout.write(text if FLAGS.raw else visible(text))
        sys.stdout.flush()

    def report(self):
        """Prints the number of tokens, and the speed without the first ones, whose graph had to be compiled."""
        timed = self.written - WRITTEN_AT_ONCE
        if timed > 0:
            print(f"{self.written} tokens, {timed / self.seconds:,.0f} tokens/s", file=sys.stderr)


def read_prompt(vocab):
    """The prompt as bytes: that of --prompt, of --prompt_file or, without both, of the standard input.

    Returns `None` with --interactive if no prompt is given.
    """
    check_not_both("prompt", "prompt_file")
    if FLAGS.prompt is not None:
        return os.fsencode(FLAGS.prompt)
    if FLAGS.prompt_file is None and FLAGS.interactive:
        return None
    if FLAGS.prompt_file is None:
        if sys.stdin.isatty():
            message = "type the text to continue, then Ctrl-D on a line of its own (or give --prompt or --interactive)"
            print(message, file=sys.stderr, flush=True)
        prompt = sys.stdin.buffer.read()
    else:
        with naming_read_errors(FLAGS.prompt_file):
            prompt = Path(FLAGS.prompt_file).read_bytes()
    prompt = prompt.removeprefix(codecs.BOM_UTF8)
    return (with_newlines(prompt) if vocab.has_plain_text else prompt).removesuffix(b"\n")


def line_of(answer, number=None):
    """The output for the answer to a prompt of --input: `(prompt, texts)`, or a `LineError`."""
    if isinstance(answer, LineError):
        error = {"prompt": answer.text, "error": answer.reason}
        return as_json(error) if FLAGS.format == "json" else "\n" * FLAGS.num_return_sequences
    prompt, texts = answer
    if FLAGS.format == "json":
        return as_json({"prompt": prompt, "texts": texts})
    return "".join(text.replace("\n", r"\n") + "\n" for text in texts)


def model_changes():
    """The hyper-parameters of the model that the flags change."""
    return values(("mem_len", "clamp_len"), given_only=True)


def sampling_options() -> dict[str, Any]:
    """The options of sampling, by name; `None` for those that are not given."""
    options = values(("top_k", "top_p", "min_p", "repetition_penalty", "repetition_window", "seed"))
    return options | {"temperature": 0.0 if FLAGS.greedy else FLAGS.temperature}


def stop_options():
    """The options that end a text."""
    return {"stop_strings": [*map(unescape, FLAGS.stop)], "stop_at_newline": FLAGS.stop_at_newline}


def make_answering(folder, path):
    """The generator for the lines of --input, as the flags describe it, with the weights of a checkpoint."""
    numbers = values(("max_new_tokens", "num_return_sequences", "batch_size", "stop_at_document"))
    options = {**numbers, **sampling_options(), **stop_options()}
    lm = folder.load_model(path, **model_changes())
    return Answering(TextGenerator(lm, folder.load_vocab(), **options).generate_lines, line_of)


def check_flags():
    """Raises ParameterError for flags that exclude each other, or that have no effect without another flag."""
    input_flags = ["output", "format", "strict", "batch_size", *ClusterConfig.names()]
    sampling_flags = [
        "top_k",
        "top_p",
        "min_p",
        *changed(["num_return_sequences"]),
    ]  # 1, the default, is always allowed
    # Each row: flags, whether they have an effect, and the rest of the message, which begins with the flag.
    check_used(
        (input_flags, FLAGS.input is not None, "is for the lines of --input, which is not given"),
        (("prompt", "prompt_file", "interactive", "verbose"), FLAGS.input is None, "and --input exclude each other"),
        (["temperature", *sampling_flags], not FLAGS.greedy, "is for sampling, and --greedy does not sample"),
        (sampling_flags, FLAGS.temperature != 0, "is for sampling, and --temperature=0 does not sample"),
        (
            ("repetition_window",),
            FLAGS.repetition_penalty not in (None, 1),
            "needs --repetition_penalty, with a value other than 1",
        ),
    )
    if FLAGS.interactive and FLAGS.num_return_sequences > 1:
        message = "--interactive and --num_return_sequences exclude each other"
        raise ParameterError("num_return_sequences", FLAGS.num_return_sequences, "1 with --interactive", message)


@messages_to_stderr()
def main():
    check_flags()
    folder = RunFolder(FLAGS.model_dir, "language_model")
    vocab = folder.load_vocab()
    options = sampling_options()
    # Check all values before the model is loaded.
    check_integer("num_return_sequences", FLAGS.num_return_sequences, 1)
    seeds = of_sequences(check_sampling(1, **options), FLAGS.num_return_sequences).seeds.numpy().tolist()
    ends = stops_of(vocab, **stop_options(), stop_at_document=FLAGS.stop_at_document)
    check_stops(len(vocab), None, **ends, vocab=vocab)
    if FLAGS.input is not None:
        tally, _ = answer_input(folder, make_answering, __spec__.name, POOL * FLAGS.batch_size, FLAGS.raw)
        return int(tally.missing > 0)
    prompt = read_prompt(vocab)
    ids = None if prompt is None else encode_prompt(vocab, prompt, "prompt")
    writer = Writer(load_model(folder, **model_changes()), vocab, options | ends | {"seed": seeds[0]})
    if ids is not None:
        writer.read(ids, echo=bool(prompt), show=len(seeds) == 1)
        writer.write_samples(FLAGS.max_new_tokens, seeds)
    if FLAGS.interactive:
        answer_typed(writer)
    writer.report()


def answer_typed(writer):
    """Reads lines, and answers each, until Ctrl-D. The memory keeps all lines and answers."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            return
        try:
            writer.read(encode_prompt(writer.vocab, line, "line"), echo=False)
        except ValueError as error:
            print(visible(str(error)), file=sys.stderr)
            continue
        writer.write(FLAGS.max_new_tokens)


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(1)  # the operations for one token wait for each other
    run(main)
