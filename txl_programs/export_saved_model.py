"""Exports a trained model as a SavedModel for TensorFlow Serving, or to ONNX or TFLite.

    txl-export-saved-model --model_dir=runs/my --output=serving/my                  # serving/my/1/
    txl-export-saved-model --model_dir=runs/my --output=serving/my --version=2 --weights=bfloat16

    txl-export-saved-model --model_dir=runs/dates --output=serving/dates --beam_size=4 --n_best=2
    txl-export-saved-model --model_dir=runs/flat --output=serving/flat --lexicon=words.txt   (other than in training)
    txl-export-saved-model --model_dir=runs/my --output=portable/my --format=onnx --length=16         (or tflite)

A server that watches the folder loads the new version by itself. An existing version is never overwritten.

With --format=onnx or tflite, the output folder gets the model, its vocabularies, and model.json, which names inputs and
outputs. Their shapes are fixed: --batch_size rows of --length tokens, for the source of an encoder-decoder of
--source_length. ONNX needs tf2onnx: pip install "txl_tf[onnx]".
"""

import os
import sys

from absl import flags

from txl_config import WEIGHT_TYPES, SearchConfig
from txl_programs.flag_values import CKPT_HELP, FLAGS, check_used, define_flags, values
from txl_programs.opening import load_model
from txl_programs.printing import messages_to_stderr
from txl_programs.program import run

flags.DEFINE_string("model_dir", None, "Folder of the run.")
flags.DEFINE_string("output", None, "Folder of the served model. The last part of the path is the model's name.")
flags.DEFINE_enum("format", "saved_model", ["saved_model", "onnx", "tflite"], "Format of the model.")
flags.DEFINE_integer("batch_size", 1, "With ONNX and TFLite: rows of a call.", lower_bound=1)
flags.DEFINE_integer("length", 16, "With ONNX and TFLite: tokens of a segment, target or sentence.", lower_bound=1)
flags.DEFINE_integer(
    "source_length", None, "With ONNX and TFLite: tokens of the source of an encoder-decoder. Default: --length.",
    lower_bound=1,
)  # fmt: skip
flags.DEFINE_integer("version", 1, "Version to write: the name of a folder in output.", 1, 2**63 - 1)
flags.DEFINE_string("ckpt_path", None, CKPT_HELP)
flags.DEFINE_enum("weights", "float32", WEIGHT_TYPES, "Type of the stored weights.")
flags.DEFINE_integer("top_n", None, "Number of tokens that the signature next returns. Default: 10.", lower_bound=1)
flags.DEFINE_integer(
    "max_tokens",
    None,
    "Most tokens in a row of a request, and most tokens to generate. Default: 4096, max_len or max_seq_len.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "max_rows", None, "Most rows in a request. Default: as many as fit into 512 MiB, from 1 to 1024.", lower_bound=1
)
flags.DEFINE_integer("mem_len", None, "Length of the memory in positions. Default: as in the run.")
flags.DEFINE_integer(
    "clamp_len", None, "Treat greater distances as this one; 0 or -1 for no limit. Default: as in the run."
)
flags.DEFINE_bool(
    "warmup", None, "Write warm-up requests. They need tensorflow-serving-api. Default: write them if it is installed."
)
flags.DEFINE_string("lexicon", None, "For FLAT: lexicon to use instead of the run's, a file of words or jieba.")
flags.DEFINE_bool("skip_short_words", None, "Ignore words of one character in --lexicon. Default: as in the run.")
define_flags(SearchConfig)  # for an encoder-decoder
flags.mark_flags_as_required(["model_dir", "output"])

# Flags that only --format=saved_model uses, and those that only the other formats use.
OF_SAVED_MODELS = ("version", "weights", "top_n", "max_tokens", "max_rows", "warmup", "lexicon", "skip_short_words")
OF_OTHERS = ("batch_size", "length", "source_length")


def warn_of_longer_texts(folder, max_tokens):
    """Prints a warning if a served tagger accepts texts that are longer than the longest training line.

    It prints nothing if the lengths of the training lines are unknown.

    Args:
        folder: `RunFolder` of the tagger.
        max_tokens: most tokens of a text that the served model accepts.
    """
    from txl_tf.runs.families.pipeline import line_sizes

    sizes = line_sizes(folder)
    longest = sizes.longest if sizes else max_tokens
    if longest < max_tokens:
        print(
            f"The longest training line has {longest:,} tokens. The served model accepts up to {max_tokens:,}, and "
            f"tags longer texts less well. --max_tokens={longest} refuses them.",
            file=sys.stderr,
        )


def export_to_other_format():
    """Exports the run to --output in the --format ONNX or TFLite, and prints the path of the model."""
    from txl_tf import export_portable
    from txl_tf.runs.folder import RunFolder
    from txl_tf.serving.portable import check_output

    check_output(FLAGS.output, FLAGS.format)
    folder = RunFolder(FLAGS.model_dir)
    vocabs = folder.load_vocabs()
    model = load_model(folder, **values(("mem_len", "clamp_len"), given_only=True))
    vocab = vocabs[0] if len(vocabs) == 1 else vocabs
    print(export_portable(model, FLAGS.output, vocab, format=FLAGS.format, **values(OF_OTHERS)))


@messages_to_stderr()
def main():
    is_saved_model = FLAGS.format == "saved_model"
    others = (*OF_SAVED_MODELS, *SearchConfig.names())
    check_used(
        (OF_OTHERS, not is_saved_model, "is for --format=onnx and --format=tflite"),
        (others, is_saved_model, f"is for --format=saved_model, got {FLAGS.format}"),
    )
    if not is_saved_model:
        return export_to_other_format()
    from txl_tf import export_saved_model
    from txl_tf.files import absolute, check_no_pattern
    from txl_tf.runs.families.pipeline import with_lexicon
    from txl_tf.runs.folder import RunFolder, check_spares_runs
    from txl_tf.serving.export import check_new_folder

    check_used((("length_penalty",), FLAGS.beam_size > 1, "is for a beam search: give --beam_size, too"))
    directory = os.path.join(FLAGS.output, str(FLAGS.version))
    check_no_pattern("output", absolute(FLAGS.output))
    check_spares_runs("output", FLAGS.output)
    check_new_folder(directory)
    folder = RunFolder(FLAGS.model_dir)
    is_tagger = folder.family.task == "tagger"
    only_taggers = f"is for taggers, and {folder} contains {folder.family.described}"
    no_search = f"is for encoder-decoders, and {folder} contains {folder.family.described}"
    check_used(
        (("lexicon", "skip_short_words"), is_tagger, only_taggers),
        (SearchConfig.names(), folder.family.task == "encoder_decoder", no_search),
    )
    vocabs = with_lexicon(folder, folder.load_vocabs(), FLAGS.lexicon, FLAGS.skip_short_words)
    model = load_model(folder, **values(("mem_len", "clamp_len"), given_only=True))
    vocab = vocabs[0] if len(vocabs) == 1 else vocabs
    search = values(SearchConfig, given_only=True) or None
    options = values(("weights", "top_n", "max_tokens", "max_rows", "warmup"))
    export_saved_model(model, directory, vocab, search=search, **options)
    if is_tagger:
        warn_of_longer_texts(folder, FLAGS.max_tokens or model.network.max_seq_len)
    print(directory)


if __name__ == "__main__":
    run(main)
