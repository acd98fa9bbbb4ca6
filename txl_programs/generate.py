"""Continues a text with a trained language model, and prints the tokens as the model generates them.

    txl-generate --model_dir=runs/quickstart --prompt="The import statement" --temperature=0.8 --seed=1
    txl-generate --model_dir=runs/wt103 --prompt_file=article.txt --max_new_tokens=500 --top_p=0.95
    txl-generate --model_dir=runs/my --prompt="Q: " --min_p=0.05 --repetition_penalty=1.2 --stop='\\nQ:'
    txl-generate --model_dir=runs/my --prompt="The" --num_return_sequences=3 --stop_at_newline
    echo "Once upon a time" | txl-generate --model_dir=runs/my --greedy
    txl-generate --model_dir=runs/my --interactive --max_new_tokens=80 --stop_at_newline
    txl-generate --model_dir=runs/my --prompt="The" --beam_size=4 --stop_at_newline
    txl-generate --model_dir=runs/my --prompt="Born on " --regex='[0-9]{1,2} (May|June) [0-9]{4}' --seed=1
    txl-generate --model_dir=runs/my --input=prompts.txt --output=texts.jsonl --format=json       (a prompt a line)
    txl-generate --model_dir=runs/my --input=prompts/ --output=texts/                 (many files, see docs/scale.md)

Without --prompt and --prompt_file, the program reads the prompt from the standard input, without the newline at its
end. If the run knows documents, an empty prompt begins one. With --interactive, the program answers every line that you
type until Ctrl-D. One memory runs through all lines and answers: old ones drop out of it. Several samples are printed
one after the other; the standard error has the number of each before it.

With --input, every line is a prompt, and the program continues many at the same time. It writes --num_return_sequences
lines for each: the new text, with newlines written as \\n, or with --format=json one object with "prompt" and "texts".
The text is the same as with --prompt and the same --seed. If a line cannot be continued, its lines of output are empty,
or it has an object with "error". The standard error then says why, and the exit status is 1. With --input=-, the
program answers a line as soon as the standard input pauses.

The text ends after the first stop string, even if the last token is longer. --verbose prints a line for every token of
the prompt and the answer, with its nll in nats. Text goes to the standard output, all else to the standard error.
Control characters are written like \\x1b, so that no text can take over a terminal; --raw writes them unchanged.

With --beam_size, the program searches for the most likely text, and draws nothing. All texts end at the same token: at
the newline with --stop_at_newline, at the token of one --stop, or else at the end of a document, if the run knows
documents; otherwise after --max_new_tokens. In a run with documents, --stop_at_newline and --stop need
--nostop_at_document. --num_return_sequences prints the best texts that the search found.

With --regex or --json_schema, the whole text has this form; such a text ends at the end of a document, or at a newline,
which is not printed. If it does not end within --max_new_tokens, the standard error says so, and --format=json writes
false in "ended". --suppress_tokens names tokens that no text may contain. With --beam_size and these flags, the program
prints a text when it is complete.
"""

import codecs
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from txl_config import ClusterConfig, SamplingConfig
from txl_programs.command_line import newly_given
from txl_programs.flag_values import (
    FLAGS,
    changed,
    check_not_both,
    check_used,
    define_flags,
    define_line_flags,
    given,
    values,
)
from txl_programs.opening import load_model, vocab_of
from txl_programs.printing import messages_to_stderr
from txl_programs.program import read_flags, run

define_line_flags("prompts", "one prompt, by --prompt, --prompt_file or the standard input")
flags.DEFINE_string("prompt", None, "Text to continue.")
flags.DEFINE_string("prompt_file", None, "File with the text to continue.")
flags.DEFINE_enum("format", "text", ["text", "json"], "With --input: lines of text, or of JSON.")
flags.DEFINE_integer("batch_size", 16, "Prompts of --input to continue at the same time.", lower_bound=1)
flags.DEFINE_integer("max_new_tokens", 200, "Tokens to generate; with --interactive, after each line.", lower_bound=0)
define_flags(SamplingConfig)
flags.DEFINE_integer("num_return_sequences", 1, "Number of samples. The first one is the same as with 1.")
flags.DEFINE_integer("seed", None, "Random seed: the same seed gives the same text. Default: a new one each time.")
flags.DEFINE_bool("greedy", False, "Take the most likely token, as --temperature=0.")
_STOP = r"Stop string, such as \nQ: or <eos>: the text ends with it. May be given several times."
flags.DEFINE_multi_string("stop", [], _STOP)
flags.DEFINE_bool("stop_at_newline", False, r"End the text at the end of a line, as --stop='\n'.")
flags.DEFINE_bool("stop_at_document", True, "End the text at the end of a document, if the run knows documents.")
flags.DEFINE_integer("beam_size", 1, "Hypotheses of a beam search for the most likely text. 1: no search.")
flags.DEFINE_float(
    "length_penalty",
    0.6,
    "With --beam_size: the log-probability of a text is divided by ((5 + tokens) / 6)**length_penalty.",
)
flags.DEFINE_string("regex", None, "Generate a text that matches this regular expression as a whole.")
flags.DEFINE_string("json_schema", None, "File with a JSON schema: generate a JSON value that it allows.")
flags.DEFINE_multi_string(
    "suppress_tokens", [], "Token that no text may contain, such as <unk>. May be given several times."
)
flags.DEFINE_bool("interactive", False, "Read lines, and answer each. One memory runs through all of them.")
flags.DEFINE_bool("verbose", False, "Print every token with its nll.")
flags.DEFINE_bool("raw", False, "Write control characters unchanged.")
flags.DEFINE_integer("mem_len", None, "Length of the memory in positions. Default: as in the run.")
flags.DEFINE_integer(
    "clamp_len", None, "Treat greater distances as this one; 0 or -1 for no limit. Default: as in the run."
)

read_flags(__name__)

import numpy as np
import tensorflow as tf

from txl_config.errors import ParameterError, named, visible
from txl_programs.answering.files import answer_input
from txl_tf.data.line_files import Answering
from txl_tf.data.lines import LineError, as_json, decoded
from txl_tf.data.text_files import with_newlines
from txl_tf.data.vocabulary import Vocab, escape, newline_ids, unescape
from txl_tf.files import naming_read_errors
from txl_tf.language.constraint import Constraint
from txl_tf.language.language_model import LanguageModel
from txl_tf.language.sampling import seeds_of_sequences
from txl_tf.language.session import Session
from txl_tf.language.text_generator import (
    POOL,
    Continuation,
    TextGenerator,
    TextStream,
    checked_stop_arguments,
    encode_prompt,
)
from txl_tf.runs.folder import RunFolder
from txl_tf.training.threads import set_threads_for_texts

READ_AT_ONCE = 512  # tokens of a prompt per call: prompts of any length need one graph
# The program prints the tokens of `WRITTEN_SECONDS` at once, but at least 4 and at most 64, because each call of the
# model takes as long as several tokens.
WRITTEN_AT_ONCE = 4, 64
WRITTEN_SECONDS = 0.1


class Writer:
    """Reads prompts, and prints their continuations to the standard output. One memory runs through all of them.

    Args:
        lm: the language model.
        vocab: its vocabulary.
        options: options of `Session.write`: sampling, stop tokens and strings, and the seed.
    """

    def __init__(self, lm: LanguageModel, vocab: Vocab, options: dict[str, Any]):
        self.session = Session(lm)
        self.vocab = vocab
        self.options = options
        self.stream = TextStream(vocab)
        self.echoed = ""  # text of the prompts that were read with `echo`
        self.written = 0  # number of generated tokens
        self.timed = 0  # the same, without the tokens of the first two calls, see `write`
        self.seconds = 0.0  # time for the timed tokens

    def read(self, ids: np.ndarray, echo: bool = True, show: bool = True) -> None:
        """Reads a prompt into the memory, and prints it if asked.

        Args:
            ids: int32 `[n]`, the prompt.
            echo: whether the prompt belongs to the printed text. With --verbose, it always does.
            show: whether to print it now. If not, `write_samples` prints it before each of several samples.
        """
        first = len(ids) % READ_AT_ONCE  # length of the first piece; later ones are whole, as in `generate`
        for piece in np.split(ids, range(first, len(ids), READ_AT_ONCE)):
            if not piece.size:
                continue
            text = self.as_shown(piece, self.session.read(piece[None])[0])
            if echo or FLAGS.verbose:
                self.echoed += text
                if show:
                    print_text(text)

    def write(self, number: int) -> None:
        """Generates and prints `number` tokens, or fewer if a stop string or a stop token ends the text.

        The very first token is printed alone, because it needs no graph. The next call compiles one. Without --verbose,
        a newline is printed at the end.
        """
        while number > 0:
            started = time.perf_counter()
            step = min(self.at_once(), number)
            tokens, nll = self.session.write(step, vocab=self.vocab, with_nll=FLAGS.verbose, **self.options)
            if self.written > 1:  # neither the first token nor the call that compiles the graph
                self.seconds += time.perf_counter() - started
                self.timed += tokens.shape[1]
            self.written += tokens.shape[1]
            number -= step
            print_text(self.as_shown(tokens[0], None if nll is None else nll[0], self.session.excess))
            if self.session.ended:
                break
        print_text(self.stream.end() + ("" if FLAGS.verbose else "\n"))

    def at_once(self) -> int:
        """The number of tokens to generate before they are printed. The text does not depend on it."""
        if not self.written:
            return 1
        fewest, most = WRITTEN_AT_ONCE
        per_second = self.timed / self.seconds if self.timed else 0
        return min(max(int(per_second * WRITTEN_SECONDS), fewest), most)

    def write_samples(self, number: int, seeds: Sequence[int]) -> None:
        """Prints a text of up to `number` new tokens for each seed. Each text continues the prompts that were read.

        If there are several seeds, the prompt is printed before each text, and a line on the standard error numbers the
        text. Afterwards, the memory contains the last text.
        """
        session = self.session
        stream = self.stream
        prompt = self.echoed
        for i, seed in enumerate(seeds):
            if len(seeds) > 1:
                say_number(i, len(seeds))
            self.session = session.copy()
            self.stream = stream.copy()
            if len(seeds) > 1:
                print_text(prompt)
            self.options["seed"] = seed
            self.write(number)

    def as_shown(self, ids: np.ndarray, nll: Any, excess: int = 0) -> str:
        """Returns what to print for new ids: their text or, with --verbose, a line with symbol and nll for each id.

        Args:
            ids: int32 `[n]`.
            nll: float `[n]`, nats. Only --verbose needs them.
            excess: bytes of the last token that come after a stop string, see `TextStream.push`.
        """
        text = self.stream.push(ids, excess)
        if FLAGS.verbose:
            return "".join(f"{escape(self.vocab.symbols[i])}\t{value:.4f}\n" for i, value in zip(ids, nll, strict=True))
        return text

    def report(self) -> None:
        """Prints the number of generated tokens, and the speed.

        The speed is without the first two calls of `session.write`, see `write`. Prints nothing if only these calls
        generated tokens.
        """
        if self.timed > 0:
            print(f"{self.written} tokens, {self.timed / self.seconds:,.0f} tokens/s", file=sys.stderr)


def print_text(text: str) -> None:
    """Prints a text at once, with control characters as escapes unless --raw is given."""
    sys.stdout.write(text if FLAGS.raw else visible(text))
    sys.stdout.flush()


def say_number(i: int, number: int) -> None:
    """Prints a line to the standard error that numbers sample `i`, counted from 0, of `number` samples."""
    print(f"--- {i + 1} of {number}", file=sys.stderr, flush=True)


def read_prompt(vocab: Vocab) -> bytes | None:
    """Returns the prompt as bytes: from --prompt, --prompt_file or, without both, the standard input.

    With --interactive and no prompt, returns `None`. One newline at the end of a file or the standard input is removed.
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
    if vocab.has_plain_text:
        prompt = with_newlines(prompt.removeprefix(codecs.BOM_UTF8))
    return prompt.removesuffix(b"\n")


def line_of(answer: Continuation | LineError, number: int | None = None) -> str:
    """Returns the lines of output for a prompt of --input.

    Args:
        answer: the answer to the prompt.
        number: the number of the line, which `Answering` passes; not used.
    """
    if isinstance(answer, LineError):
        error = {"prompt": answer.text, "error": answer.reason}
        return as_json(error) if FLAGS.format == "json" else "\n" * FLAGS.num_return_sequences
    if FLAGS.format == "json":
        fields = {"prompt": answer.prompt, "texts": answer.texts}
        return as_json(fields | {"ended": answer.ended} if FLAGS.regex or FLAGS.json_schema else fields)
    return "".join(text.replace("\n", r"\n") + "\n" for text in answer.texts)


def counts_of(answer: Continuation) -> tuple[int, int]:
    """Returns the numbers of a prompt that are summed over all prompts: the arguments of `say_unfinished`."""
    return answer.ended.count(False), len(answer.ended)


def say_unfinished(unfinished: int, number: int) -> None:
    """Prints how many texts do not match --regex or --json_schema, because they were cut off. Prints nothing for 0.

    Args:
        unfinished: number of texts that were cut off.
        number: number of all texts.
    """
    if unfinished:
        form = "regex" if FLAGS.regex else "json_schema"
        message = f"{unfinished:,} of {number:,} texts did not end within --max_new_tokens={FLAGS.max_new_tokens}"
        print(f"{message}, so they do not match --{form} as a whole", file=sys.stderr)


def model_changes() -> dict[str, Any]:
    """The hyper-parameters of the model that the flags change."""
    return values(("mem_len", "clamp_len"), given_only=True)


def sampling_options() -> dict[str, Any]:
    """Returns `{name: value}` of the options of sampling; `None` for an option without a default that is not given."""
    options = {**values(SamplingConfig), "seed": FLAGS.seed}
    return options | {"temperature": 0.0} if FLAGS.greedy else options


def text_options(folder: RunFolder) -> dict[str, Any]:
    """Returns the arguments of `checked_stop_arguments` besides the vocabulary, from the flags.

    A beam search has no sampling.
    """
    numbers = values(("num_return_sequences", "stop_at_newline", "stop_at_document", "beam_size", "length_penalty"))
    # `os.fsencode`: in a locale without UTF-8, the bytes of the command line are not text yet.
    stops = {"stop_strings": [unescape(decoded(os.fsencode(text), name="--stop")) for text in FLAGS.stop]}
    sampling = {} if FLAGS.beam_size > 1 else sampling_options()
    return {**numbers, **stops, **sampling, "logits_processor": processor_of(folder)}


@functools.lru_cache(maxsize=1)
def processor_of(folder: RunFolder) -> Callable[..., Any] | None:
    """Returns the `logits_processor` of --regex, --json_schema or --suppress_tokens; `None` without these flags.

    It is cached, because the automaton of an expression takes a while to build.

    Raises:
        ParameterError: the vocabulary does not fit the flag, or the expression or schema cannot be used.
    """
    vocab = vocab_of(folder)
    if FLAGS.suppress_tokens:
        return suppressing(vocab, [*map(unescape, FLAGS.suppress_tokens)])
    name = "regex" if FLAGS.regex is not None else "json_schema"
    if FLAGS[name].value is None:
        return None
    if vocab.level == "word":
        message = f"--{name} is for runs of characters, bytes or subwords, and the tokens of {folder.path} are words"
        raise ParameterError(name, FLAGS[name].value, "left out for a run of words", message)
    newline = newline_ids(vocab)
    if vocab.document is not None and FLAGS.stop_at_document and not FLAGS.stop_at_newline:
        end = vocab.ids[vocab.document]
    elif len(newline) == 1:
        end = newline[0]
    else:
        message = f"--{name} needs a token at which texts end, and {folder.path} knows neither documents nor newlines"
        raise ParameterError(name, FLAGS[name].value, "left out for a run without ends", message)
    return Constraint(vocab, regex=FLAGS.regex, json_schema=read_schema(), stop_token=end)


def read_schema() -> str | None:
    """Returns the text in the file of --json_schema; `None` without this flag."""
    if FLAGS.json_schema is None:
        return None
    with naming_read_errors(FLAGS.json_schema):
        return decoded(Path(FLAGS.json_schema).read_bytes(), name=f"--json_schema={FLAGS.json_schema}")


def suppressing(vocab: Vocab, symbols: Iterable[str]) -> Callable[..., Any]:
    """Returns a `logits_processor` that never allows these symbols. Raises ParameterError if one is unknown."""
    allowed = np.ones([len(vocab)], bool)
    for symbol in symbols:
        if symbol not in vocab.ids:
            message = f"--suppress_tokens must be a token of the vocabulary, got {symbol!r} (--verbose prints tokens)"
            raise ParameterError("suppress_tokens", symbol, "a token of the vocabulary", message)
        allowed[vocab.ids[symbol]] = False
    return lambda tokens, log_probs: tf.where(allowed, log_probs, tf.constant(-np.inf, log_probs.dtype))


def make_generator(folder: RunFolder, lm: LanguageModel) -> TextGenerator:
    """Returns the `TextGenerator` that the flags describe. A model with memory reads a long prompt in pieces."""
    segment = None if lm.has_window else READ_AT_ONCE
    options = values(("max_new_tokens", "batch_size")) | text_options(folder)
    return TextGenerator(lm, vocab_of(folder), segment=segment, **options)


def make_answering(folder: RunFolder, path: str) -> Answering:
    """Returns the `Answering` that continues the lines of --input as the flags say, with the checkpoint at `path`."""
    generator = make_generator(folder, folder.load_model(path, **model_changes()))
    return Answering(generator.generate_lines, line_of, counts_of)


def print_when_complete(folder: RunFolder, vocab: Vocab, ids: np.ndarray, echo: bool) -> None:
    """Generates the texts after one prompt, and prints each text when all are complete.

    Args:
        folder: folder of the run.
        vocab: vocabulary of the run.
        ids: int32 `[n]`, the prompt.
        echo: whether each printed text begins with the prompt.
    """
    generator = make_generator(folder, load_model(folder, **model_changes()))
    texts, ended = generator.continue_ids(ids)[1:]
    prompt = TextStream(vocab).push(ids) if echo else ""
    for i, text in enumerate(texts):
        if len(texts) > 1:
            say_number(i, len(texts))
        print_text(f"{prompt}{text}\n")
    say_unfinished(ended.count(False), len(ended))


def check_flags() -> None:
    """Raises ParameterError for flags that exclude each other, or that have no effect without another flag."""
    input_flags = ["output", "format", "strict", "batch_size", *ClusterConfig.names()]
    also_greedy = ("temperature", "repetition_penalty", "repetition_window")  # options that change the likeliest token
    limits = [name for name in SamplingConfig.names() if name not in also_greedy]
    draws = newly_given(["seed", "num_return_sequences"], {})
    whole_text_flags = changed(["beam_size"]) + given(["regex", "json_schema", "suppress_tokens"])
    search = FLAGS.beam_size > 1
    draws_nothing = f"is for sampling, and a beam search (--beam_size={FLAGS.beam_size}) draws nothing"
    complete = ""
    if whole_text_flags:
        complete = f"prints tokens one by one, and with --{whole_text_flags[0]} a text is complete first"
    # Each rule: flags, whether they have an effect, and why not, see `check_used`.
    check_used(
        (input_flags, FLAGS.input is not None, "is for the lines of --input, which is not given"),
        (("prompt", "prompt_file", "interactive", "verbose"), FLAGS.input is None, "and --input exclude each other"),
        ([*SamplingConfig.names(), "seed", *changed(["greedy"])], not search, draws_nothing),
        (("length_penalty",), search, "is for a beam search: give --beam_size, too"),
        (changed(["interactive", "verbose"]), not whole_text_flags, complete),
        (given(["regex", "json_schema"]), not FLAGS.suppress_tokens, "and --suppress_tokens exclude each other"),
        (["temperature", *limits, *draws], not FLAGS.greedy, "is for sampling, and --greedy does not sample"),
        (limits + draws, FLAGS.temperature != 0, "is for sampling, and --temperature=0 does not sample"),
        (
            ("repetition_window",),
            FLAGS.repetition_penalty not in (None, 1),
            "needs --repetition_penalty, with a value other than 1",
        ),
    )
    check_not_both("regex", "json_schema")
    if FLAGS.regex == "":
        raise ParameterError("regex", "", "a regular expression", "--regex must not be empty: leave it out")
    if FLAGS.interactive and FLAGS.num_return_sequences > 1:
        message = "--interactive and --num_return_sequences exclude each other"
        raise ParameterError("num_return_sequences", FLAGS.num_return_sequences, "1 with --interactive", message)


@messages_to_stderr()
def main() -> int | None:
    check_flags()
    folder = RunFolder(FLAGS.model_dir, "language_model")
    vocab = vocab_of(folder)
    options = text_options(folder)
    ends = checked_stop_arguments(vocab, **options)  # before the model is loaded
    if FLAGS.input is not None:
        tally, _ = answer_input(folder, make_answering, __spec__.name, POOL * FLAGS.batch_size, FLAGS.raw)
        say_unfinished(*map(int, tally.sums or (0, 0)))
        return int(tally.missing > 0)
    prompt = read_prompt(vocab)
    name = "prompt" if FLAGS.prompt_file is None else f"prompt_file {named(FLAGS.prompt_file)}"
    ids: Any = None if prompt is None else encode_prompt(vocab, prompt, name)
    if FLAGS.beam_size > 1 or options["logits_processor"] is not None:
        return print_when_complete(folder, vocab, ids, echo=bool(prompt))
    seeds = seeds_of_sequences(FLAGS.seed, FLAGS.num_return_sequences)
    writer = Writer(load_model(folder, **model_changes()), vocab, sampling_options() | ends | {"seed": seeds[0]})
    if ids is not None:
        writer.read(ids, echo=bool(prompt), show=len(seeds) == 1)
        writer.write_samples(FLAGS.max_new_tokens, seeds)
    if FLAGS.interactive:
        answer_typed(writer)
    writer.report()


def answer_typed(writer: Writer) -> None:
    """Reads lines until Ctrl-D, and answers each. The memory of the `Writer` runs through all lines and answers."""
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
    of_each_prompt = max(FLAGS.beam_size, FLAGS.num_return_sequences)
    set_threads_for_texts(FLAGS.beam_size if FLAGS.input is None else FLAGS.batch_size * of_each_prompt)
    run(main)
