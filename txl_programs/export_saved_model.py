"""Exports a trained model as a SavedModel for TensorFlow Serving.

    txl-export-saved-model --model_dir=runs/my --output=serving/my                  # serving/my/1/
    txl-export-saved-model --model_dir=runs/my --output=serving/my --version=2 --weights=bfloat16

    txl-export-saved-model --model_dir=runs/dates --output=serving/dates --beam_size=4 --n_best=2
    txl-export-saved-model --model_dir=runs/flat --output=serving/flat --lexicon=words.txt   (other than in training)

A server that watches the folder takes up the new version by itself. A version that exists is never overwritten.
"""

import os
import sys

from absl import flags

from txl_programs.program import (
    CKPT_HELP,
    FLAGS,
    check_used,
    define_flags,
    load_model,
    messages_to_stderr,
    run,
    values,
)
from txl_tf.config import WEIGHT_TYPES, SearchConfig

flags.DEFINE_string("model_dir", None, "Folder of the run.")
flags.DEFINE_string("output", None, "Folder of the served model; its last part is the model's name.")
flags.DEFINE_integer("version", 1, "Version to write, a folder in output.", lower_bound=1)
flags.DEFINE_string("ckpt_path", None, CKPT_HELP)
flags.DEFINE_enum("weights", "float32", WEIGHT_TYPES, "Type the weights are stored in.")
flags.DEFINE_integer("top_n", None, "Tokens that the signature next returns; default: 10.", lower_bound=1)
flags.DEFINE_integer(
    "max_tokens",
    None,
    "Most tokens of a row of a request, and most new ones; default: 4096, max_len, or max_seq_len.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "max_rows", None, "Most rows of a request; default: as many as fit 512 MiB, from 1 to 1024.", lower_bound=1
)
flags.DEFINE_integer("mem_len", None, "Positions of memory, rather than the run's.")
flags.DEFINE_integer("clamp_len", None, "Treat distances beyond it as clamp_len, rather than as the run does.")
flags.DEFINE_bool(
    "warmup", None, "Write warm-up requests; default: where tensorflow-serving-api, which they need, is installed."
)
flags.DEFINE_string("lexicon", None, "For FLAT: file of words to find in place of the run's, or jieba.")
flags.DEFINE_bool("skip_short_words", None, "Leave out words of one character of --lexicon; default: as the run does.")
define_flags(SearchConfig)  # of an encoder-decoder
flags.mark_flags_as_required(["model_dir", "output"])


def say_longest(folder, max_tokens):
    """Says which texts a served tagger takes, and reads less well than in training."""
    from txl_tf.runs.families.pipeline import line_sizes

    sizes = line_sizes(folder)
    longest = sizes.longest if sizes else max_tokens
    if longest < max_tokens:
        print(
            f"the longest training sentence has {longest:,} tokens: longer texts, up to {max_tokens:,}, are tagged "
            f"less well. --max_tokens={longest} refuses them",
            file=sys.stderr,
        )


@messages_to_stderr()
def main():
    from txl_tf import export_saved_model
    from txl_tf.files import absolute, check_no_pattern
    from txl_tf.runs.families.pipeline import with_lexicon
    from txl_tf.runs.folder import RunFolder

    check_used(("length_penalty", FLAGS.beam_size > 1, "is for a search: give --beam_size"))
    directory = os.path.join(FLAGS.output, str(FLAGS.version))
    check_no_pattern("output", absolute(FLAGS.output))
    folder = RunFolder(FLAGS.model_dir)
    is_tagger = folder.family.task == "tagger"
    check_used(("lexicon skip_short_words", is_tagger, f"is for taggers, and {folder} holds {folder.family.described}"))
    vocabs = with_lexicon(folder, folder.load_vocabs(), FLAGS.lexicon, FLAGS.skip_short_words)
    model = load_model(folder, **values("mem_len clamp_len", given_only=True))
    if is_tagger:
        say_longest(folder, FLAGS.max_tokens or model.network.max_seq_len)
    vocab = vocabs[0] if len(vocabs) == 1 else vocabs
    search = values(SearchConfig, given_only=True) or None
    export_saved_model(model, directory, vocab, search=search, **values("weights top_n max_tokens max_rows warmup"))
    print(directory)


if __name__ == "__main__":
    run(main)
