"""Continues a text with a trained model. The text appears as it is written.

    txl-generate --model_dir=runs/quickstart --prompt="The import statement" --temperature=0.8 --seed=1
    txl-generate --model_dir=runs/wt103 --prompt_file=article.txt --max_new_tokens=500 --top_p=0.95
    txl-generate --model_dir=runs/my --prompt="Q: " --min_p=0.05 --repetition_penalty=1.2 --stop='\\nQ:'
    txl-generate --model_dir=runs/my --prompt="The" --num_return_sequences=3 --stop_at_newline
    echo "Once upon a time" | txl-generate --model_dir=runs/my --greedy
    txl-generate --model_dir=runs/my --interactive --max_new_tokens=80 --stop_at_newline
    txl-generate --model_dir=runs/my --input=prompts.txt --output=texts.jsonl --format=json       (a prompt a line)
    txl-generate --model_dir=runs/my --input=prompts/ --output=texts/                 (many files, see docs/scale.md)

Without --prompt and --prompt_file the prompt comes from the standard input; the newline at its end is no part of it.
Where the run knows documents, an empty prompt begins one.
With --interactive every line that is typed is read and answered in the same memory, until Ctrl-D. Several samples come
one after the other, each behind its number on the standard error.

With --input every line is a prompt of its own, many at a time: a line of output, or --num_return_sequences of them, is
what follows it, with newlines written as \\n; with --format=json it is an object with "prompt" and "texts". A text is
the one that --prompt gives with the same --seed, for prompts of up to 512 tokens. A line that cannot be continued has
an empty one in its place, or an object with "error"; the standard error says why, and the status is 1. --input=-
continues lines as they come.

The text ends behind the first stop string, also where the last token goes on. --verbose prints a line for every token
of prompt and answer, with its nll in nats. Text goes to the standard output, the rest to the standard error. Control
characters are written like \\x1b, so that no text takes over a terminal; --raw writes them as they are.
"""

import codecs
import os
import sys
import time
from pathlib import Path

from absl import flags

from txl_programs.program import (
    FLAGS,
    changed,
    check_used,
    define_line_flags,
    load_model,
    messages_to_stderr,
    read_flags,
    run,
    values,
)
from txl_tf.config import REPETITION_WINDOW, ClusterConfig

define_line_flags("prompts", "one prompt, by --prompt, --prompt_file or the standard input")
flags.DEFINE_string("prompt", None, "Text to continue.")
flags.DEFINE_string("prompt_file", None, "File that holds it.")
flags.DEFINE_enum("format", "text", ["text", "json"], "With --input: lines of text, or of JSON.")
flags.DEFINE_integer("batch_size", 16, "Prompts of --input to continue at a time.", lower_bound=1)
flags.DEFINE_integer("max_new_tokens", 200, "Tokens to write, after each line where --interactive.", lower_bound=0)
flags.DEFINE_float("temperature", 1.0, "Below 1, likely tokens become likelier; 0 takes the most likely.")
flags.DEFINE_integer("top_k", None, "Draw from that many most likely tokens only.")
flags.DEFINE_float("top_p", None, "Draw from the most likely tokens that hold this share of the probability only.")
flags.DEFINE_float("min_p", None, "Draw from tokens at least that many times as likely as the likeliest only.")
flags.DEFINE_float("repetition_penalty", None, "Above 1, what has just been written becomes less likely.")
flags.DEFINE_integer("repetition_window", REPETITION_WINDOW, "Last tokens that --repetition_penalty is for.")
flags.DEFINE_integer("num_return_sequences", 1, "Samples to write; the first is the one that there would be alone.")
flags.DEFINE_integer("seed", None, "The same seed writes the same text; drawn anew by default.")
flags.DEFINE_bool("greedy", False, "Take the most likely token, as --temperature=0.")
_STOP = r"Text that ends the sample, such as \nQ: or <eos>, and is its end; may be given several times."
flags.DEFINE_multi_string("stop", [], _STOP)
flags.DEFINE_bool("stop_at_newline", False, r"End the text with its line, as --stop='\n'.")
flags.DEFINE_bool("stop_at_document", True, "End the text with its document, where the run knows documents.")
flags.DEFINE_bool("interactive", False, "Read lines and answer each, in one memory.")
flags.DEFINE_bool("verbose", False, "Print every token with its nll.")
flags.DEFINE_bool("raw", False, "Write control characters as they are.")
flags.DEFINE_integer("mem_len", None, "Positions of memory, rather than the run's.")
flags.DEFINE_integer("clamp_len", None, "Treat distances beyond it as clamp_len, rather than as the run does.")

read_flags(__name__)

import tensorflow as tf

from txl_programs.answering.files import answer_input
from txl_tf.data.line_files import Answering
from txl_tf.data.lines import LineError, as_json
from txl_tf.data.text_files import with_newlines
from txl_tf.data.vocabulary import escape, unescape
from txl_tf.errors import visible
from txl_tf.files import reading
from txl_tf.language.sampling import check_integer, check_sampling, of_sequences
from txl_tf.language.session import Session
from txl_tf.language.stopping import check_stops
from txl_tf.language.text_generator import POOL, TextGenerator, TextStream, encode_prompt, stops_of
from txl_tf.runs.folder import RunFolder

READ_AT_ONCE = 512  # tokens of a prompt, so that its length does not matter
WRITTEN_AT_ONCE = 4  # tokens between two looks at the screen


class Writer:
    """Reads prompts and writes their continuations, to the standard output."""

    def __init__(self, lm, vocab, options):
        self.session = Session(lm)
        self.vocab, self.options = vocab, options
        self.stream = TextStream(vocab)
        self.echoed = ""
        self.written = 0
        self.seconds = 0.0

    def read(self, ids, echo=True):
        for start in range(0, len(ids), READ_AT_ONCE):
            piece = ids[start : start + READ_AT_ONCE]
            text = self.as_shown(piece, self.session.read(piece[None])[0])
            if echo or FLAGS.verbose:
                self.show(text)
                self.echoed += text

    def write(self, number):
        """Writes so many tokens, or less where a stop string ends the text."""
        while number > 0:
            started = time.perf_counter()
            step = min(WRITTEN_AT_ONCE, number)
            tokens, nll = self.session.write(step, vocab=self.vocab, with_nll=FLAGS.verbose, **self.options)
            if self.written:  # the first step compiles the graph
                self.seconds += time.perf_counter() - started
            self.written += tokens.shape[1]
            number -= step
            self.show(self.as_shown(tokens[0], nll[0] if FLAGS.verbose else None, self.session.excess))
            if self.session.ended:
                break
        self.show(self.stream.end() + ("" if FLAGS.verbose else "\n"))

    def write_samples(self, number, seeds):
        """One text for each seed, all after what was read so far."""
        session, stream, prompt = self.session, self.stream, self.echoed
        for i, seed in enumerate(seeds):
            if len(seeds) > 1:
                print(f"--- {i + 1} of {len(seeds)}", file=sys.stderr, flush=True)
            self.session, self.stream = session.copy(), stream.copy()
            if i:
                self.show(prompt)
            self.options["seed"] = seed
            self.write(number)

    def as_shown(self, ids, nll, excess=0):
        text = self.stream.push(ids, excess)
        if FLAGS.verbose:
            return "".join(f"{escape(self.vocab.symbols[i])}\t{value:.4f}\n" for i, value in zip(ids, nll, strict=True))
        return text

    def show(self, text):
        sys.stdout.write(text if FLAGS.raw else visible(text))
        sys.stdout.flush()

    def report(self):
        timed = self.written - WRITTEN_AT_ONCE
        if timed > 0:
            print(f"{self.written} tokens, {timed / self.seconds:,.0f} tokens/s", file=sys.stderr)


def read_prompt(vocab):
    """The prompt as text or bytes; `None` where there is none to be read."""
    if FLAGS.prompt is not None and FLAGS.prompt_file is not None:
        raise ValueError("--prompt and --prompt_file exclude each other")
    if FLAGS.prompt is not None:
        return os.fsencode(FLAGS.prompt)
    if FLAGS.prompt_file is None and FLAGS.interactive:
        return None
    if FLAGS.prompt_file is None:
        prompt = sys.stdin.buffer.read()
    else:
        with reading(FLAGS.prompt_file):
            prompt = Path(FLAGS.prompt_file).read_bytes()
    prompt = prompt.removeprefix(codecs.BOM_UTF8)
    return (with_newlines(prompt) if vocab.has_plain_text else prompt).removesuffix(b"\n")


def line_of(found, number=None):
    """What is written for a prompt of --input: `(prompt, texts)`."""
    if isinstance(found, LineError):
        error = {"prompt": found.text, "error": found.reason}
        return as_json(error) if FLAGS.format == "json" else "\n" * FLAGS.num_return_sequences
    prompt, texts = found
    if FLAGS.format == "json":
        return as_json({"prompt": prompt, "texts": texts})
    return "".join(text.replace("\n", r"\n") + "\n" for text in texts)


def of_model():
    """What is other than in the run, of the model."""
    return values("mem_len clamp_len", given_only=True)


def of_sampling():
    """How tokens are drawn, but for what ends a text."""
    options = values("top_k top_p min_p repetition_penalty repetition_window seed")
    return options | {"temperature": 0.0 if FLAGS.greedy else FLAGS.temperature}


def of_ends():
    """What ends a text."""
    return {"stop_strings": [*map(unescape, FLAGS.stop)], "stop_at_newline": FLAGS.stop_at_newline}


def make_answering(folder, path):
    """What continues every line of --input, by the flags, with the weights of a checkpoint."""
    numbers = values("max_new_tokens num_return_sequences batch_size stop_at_document")
    lm, options = folder.load_model(path, **of_model()), {**numbers, **of_sampling(), **of_ends()}
    return Answering(TextGenerator(lm, folder.load_vocab(), **options).generate_lines, line_of)


def check_flags():
    """Refuses flags that do not go together."""
    of_lines = ["output", "format", "strict", "batch_size", *ClusterConfig.names()]
    of_draws, drawn = ["top_k", "top_p", "min_p", *changed("num_return_sequences")], "is for tokens that are drawn"
    check_used(
        (of_lines, FLAGS.input is not None, "is for the lines of --input, which is not given"),
        ("prompt prompt_file interactive verbose", FLAGS.input is None, "and --input exclude each other"),
        (["temperature", *of_draws], not FLAGS.greedy, f"{drawn}, and --greedy draws none"),
        (of_draws, FLAGS.temperature != 0, f"{drawn}, and --temperature=0 draws none"),
        ("repetition_window", FLAGS.repetition_penalty not in (None, 1), "is for --repetition_penalty, which is none"),
    )
    if FLAGS.interactive and FLAGS.num_return_sequences > 1:
        raise ValueError("--interactive and --num_return_sequences exclude each other")


@messages_to_stderr()
def main():
    check_flags()
    folder = RunFolder(FLAGS.model_dir, "language_model")
    vocab, options = folder.load_vocab(), of_sampling()
    # All that can be wrong, before the model is loaded.
    check_integer("num_return_sequences", FLAGS.num_return_sequences, 1)
    seeds = of_sequences(check_sampling(1, **options), FLAGS.num_return_sequences).seeds.numpy().tolist()
    ends = stops_of(vocab, **of_ends(), stop_at_document=FLAGS.stop_at_document)
    check_stops(len(vocab), None, **ends, vocab=vocab)
    if FLAGS.input is not None:
        tally, _ = answer_input(folder, make_answering, __spec__.name, POOL * FLAGS.batch_size, FLAGS.raw)
        return int(tally.missing > 0)
    prompt = read_prompt(vocab)
    ids = None if prompt is None else encode_prompt(vocab, prompt, "prompt")
    writer = Writer(load_model(folder, **of_model()), vocab, options | ends | {"seed": seeds[0]})
    if ids is not None:
        writer.read(ids, echo=bool(prompt))
        writer.write_samples(FLAGS.max_new_tokens, seeds)
    if FLAGS.interactive:
        answer_typed(writer)
    writer.report()


def answer_typed(writer):
    """Reads and answers lines in one memory, until Ctrl-D."""
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
    tf.config.threading.set_inter_op_parallelism_threads(1)  # of what a token takes, each waits for the one before
    run(main)
