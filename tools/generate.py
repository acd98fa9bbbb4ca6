"""Continues a text with a trained model, word by word as it is written.

    python tools/generate.py --model_dir=runs/quickstart --prompt="The import statement" --temperature=0.8 --seed=1
    python tools/generate.py --model_dir=runs/wt103 --prompt_file=article.txt --max_new_tokens=500 --top_p=0.95
    echo "Once upon a time" | python tools/generate.py --model_dir=runs/my --greedy
    python tools/generate.py --model_dir=runs/my --interactive --max_new_tokens=80 --stop='\\n'

Without --prompt and --prompt_file the prompt comes from the standard input; the newline at its end is no part of it.
With --interactive every line that is typed is read and answered in the same memory, until Ctrl-D. --verbose prints a
line for every token of prompt and answer, with its nll in nats. Text goes to the standard output, the rest to the
standard error. Control characters are written like \\x1b, so that no text takes over a terminal; --raw writes them as
they are.
"""

import codecs
import os
import sys
import time
from pathlib import Path

from absl import flags

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors come as exceptions; the rest is noise
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import tensorflow as tf

from tools.program import FLAGS, run, values
from txl_tf.data.vocabulary import escape, unescape, visible
from txl_tf.models.generation import Session
from txl_tf.models.sampling import check_sampling
from txl_tf.runs.folder import RunFolder

flags.DEFINE_string("model_dir", None, "Folder of the run.")
flags.DEFINE_string("ckpt_path", None, "Checkpoint to take, rather than the latest.")
flags.DEFINE_string("prompt", None, "Text to continue.")
flags.DEFINE_string("prompt_file", None, "File that holds it.")
flags.DEFINE_integer("max_new_tokens", 200, "Tokens to write, after each line where --interactive.", lower_bound=0)
flags.DEFINE_float("temperature", 1.0, "Below 1, likely tokens become likelier; 0 takes the most likely.")
flags.DEFINE_integer("top_k", None, "Draw from that many most likely tokens only.")
flags.DEFINE_float("top_p", None, "Draw from the most likely tokens that hold this share of the probability only.")
flags.DEFINE_integer("seed", None, "The same seed writes the same text; drawn anew by default.")
flags.DEFINE_bool("greedy", False, "Take the most likely token, as --temperature=0.")
flags.DEFINE_string("stop", None, r"Symbol that ends the text, such as <eos> or \n.")
flags.DEFINE_bool("interactive", False, "Read lines and answer each, in one memory.")
flags.DEFINE_bool("verbose", False, "Print every token with its nll.")
flags.DEFINE_bool("raw", False, "Write control characters as they are.")
flags.DEFINE_integer("mem_len", None, "Positions of memory, rather than the run's.")
flags.DEFINE_integer("clamp_len", None, "Treat distances beyond it as clamp_len, rather than as the run does.")

flags.mark_flag_as_required("model_dir")

READ_AT_ONCE = 512  # tokens of a prompt, so that its length does not matter
WRITTEN_AT_ONCE = 4  # tokens between two looks at the screen


class TextStream:
    """Ids in, text out as soon as it is complete: a character of several bytes comes with its last one."""

    def __init__(self, vocab):
        self.vocab = vocab
        self.last = []
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids):
        """The text that `ids` add."""
        if self.vocab.level == "byte":
            return self.decoder.decode(bytes(ids))
        shown = self.vocab.decode(self.last)  # a word goes with a space or without, as the one before it says
        text = self.vocab.decode([*self.last, *ids])
        self.last = list(ids[-1:]) or self.last
        return text[len(shown) :]

    def end(self):
        """What is left: bytes that never became a character."""
        return self.decoder.decode(b"", final=True)


class Writer:
    """Reads prompts and writes their continuations, to the standard output."""

    def __init__(self, lm, vocab, options, stop):
        self.session = Session(lm)
        self.vocab, self.options, self.stop = vocab, options, stop
        self.stream = TextStream(vocab)
        self.written = 0
        self.seconds = 0.0

    def read(self, ids, echo=True):
        for start in range(0, len(ids), READ_AT_ONCE):
            piece = ids[start : start + READ_AT_ONCE]
            self.show(piece, self.session.read(piece[None])[0], echo)

    def write(self, number):
        while number > 0:
            started = time.perf_counter()
            step = min(1 if self.stop is not None else WRITTEN_AT_ONCE, number)
            tokens, nll = self.session.write(step, with_nll=FLAGS.verbose, **self.options)
            if self.written:  # the first step compiles the graph
                self.seconds += time.perf_counter() - started
            self.written += step
            number -= step
            self.show(tokens[0], nll[0] if FLAGS.verbose else None)
            if self.stop == tokens[0, -1]:
                break
        self.end()

    def end(self):
        sys.stdout.write(self.stream.end() + ("" if FLAGS.verbose else "\n"))
        sys.stdout.flush()

    def show(self, ids, nll, echo=True):
        text = self.stream.push(ids)
        if FLAGS.verbose:
            text = "".join(f"{escape(self.vocab.symbols[i])}\t{value:.4f}\n" for i, value in zip(ids, nll, strict=True))
        if echo or FLAGS.verbose:
            sys.stdout.write(text if FLAGS.raw else visible(text))
            sys.stdout.flush()

    def report(self):
        timed = self.written - (1 if self.stop is not None else WRITTEN_AT_ONCE)
        if timed > 0:
            print(f"{self.written} tokens, {timed / self.seconds:,.0f} tokens/s", file=sys.stderr)


def read_prompt():
    """The prompt as text or bytes; `None` where there is none to be read."""
    if FLAGS.prompt is not None and FLAGS.prompt_file is not None:
        raise ValueError("--prompt and --prompt_file exclude each other")
    if FLAGS.prompt is not None:
        return os.fsencode(FLAGS.prompt)
    if FLAGS.prompt_file is not None:
        return Path(FLAGS.prompt_file).read_bytes().removesuffix(b"\n")
    if FLAGS.interactive:
        return None
    return sys.stdin.buffer.read().removesuffix(b"\n")


def encode(vocab, prompt, name="prompt"):
    """Ids of bytes in UTF-8, which at byte level may be any bytes."""
    if vocab.level != "byte":
        try:
            prompt = prompt.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8 text: see byte {error.start}") from error
    ids = vocab.encode(prompt, name=name)
    if not ids.size:
        raise ValueError(f"{name} is empty: it must hold at least one token")
    return ids


def stop_id(vocab):
    if FLAGS.stop is None:
        return None
    stop = unescape(FLAGS.stop)
    stop = vocab.eos if stop == "\n" and vocab.eos else stop
    if stop not in vocab.ids:
        raise ValueError(f"stop {FLAGS.stop!r} is not in the vocabulary of {len(vocab)} symbols")
    return vocab.ids[stop]


def main():
    folder = RunFolder(FLAGS.model_dir)
    vocab = folder.load_vocab()
    stop = stop_id(vocab)
    options = {
        "temperature": 0.0 if FLAGS.greedy else FLAGS.temperature,
        "top_k": FLAGS.top_k,
        "top_p": FLAGS.top_p,
        "seed": int(np.random.default_rng().integers(2**31)) if FLAGS.seed is None else FLAGS.seed,
    }
    check_sampling(1, **options)  # before the model is loaded
    prompt = read_prompt()
    ids = None if prompt is None else encode(vocab, prompt)
    changes = values("mem_len clamp_len", given_only=True)
    writer = Writer(folder.load_model(FLAGS.ckpt_path, **changes), vocab, options, stop)
    if ids is not None:
        writer.read(ids)
        writer.write(FLAGS.max_new_tokens)
    while FLAGS.interactive:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            break
        try:
            writer.read(encode(vocab, line, name="line"), echo=False)
        except ValueError as error:
            print(visible(str(error)), file=sys.stderr)
            continue
        writer.write(FLAGS.max_new_tokens)
    writer.report()


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(1)  # of what a token takes, each waits for the one before
    run(main)
