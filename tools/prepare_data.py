"""Prepares a corpus: vocabulary, token files and corpus-info.json, from which training reads batches of any size.

    python tools/prepare_data.py --dataset=wt103 --data_dir=data/wikitext-103 --download
    python tools/prepare_data.py --dataset=text --data_path=a.txt,b.txt --level=word --data_dir=data/mine

The datasets of the paper are read from data_dir itself: train.txt, valid.txt and test.txt, as the original's
getdata.sh makes them. The flags of the original's data_utils.py parse; those that cut batches have no effect.
"""

import os
import sys
from pathlib import Path

from absl import flags

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors come as exceptions; the rest is noise
sys.path.insert(0, str(Path(__file__).parents[1]))

from txl_tf import corpus
from txl_tf.program import run, values

flags.DEFINE_enum("dataset", "wt103", corpus.DATASETS, "What to prepare: a dataset of the paper, text (your own), ...")
flags.DEFINE_string("data_dir", None, "Folder of the prepared corpus, and of the raw text of the paper's datasets.")
flags.DEFINE_list("data_path", None, "The text: UTF-8 file(s), comma-separated; for the paper's datasets their folder.")
flags.DEFINE_bool("download", False, "Fetch the public archive of a dataset of the paper, unless its text is there.")
flags.DEFINE_string("download_url", None, "Address of a folder that has the archive, rather than the usual one.")

flags.DEFINE_enum("level", "char", corpus.LEVELS, "What a token of your own text is.")
flags.DEFINE_float("valid_fraction", 0.05, "Share of your own text, at its end, that is held out for validation.")
flags.DEFINE_integer("min_freq", 0, "Symbols of your own text that are rarer become <unk>.")
flags.DEFINE_integer("max_size", None, "Number of most frequent symbols of your own text to keep; others are <unk>.")
flags.DEFINE_bool("lower_case", False, "Lower-case your own text.")
flags.DEFINE_list("cutoffs", None, "First word of each bin but the first of the adaptive softmax, as 20000,40000.")
flags.DEFINE_integer("num_shuffle", 4, "For lm1b: random orders of the sentences, one after the other on disk.")
flags.DEFINE_integer("seed", 123456, "For lm1b: seed of the random orders.")

# Flags of the original's data_utils.py that have nothing left to say.
AT_TRAINING_TIME = "No effect: batch size, tgt_len and devices are chosen at training time."
for name in "tgt_len per_host_train_bsz per_host_valid_bsz per_host_test_bsz num_core_per_host num_passes".split():
    flags.DEFINE_integer(name, None, AT_TRAINING_TIME)
flags.DEFINE_bool("use_tpu", None, AT_TRAINING_TIME)
flags.DEFINE_integer("num_procs", None, "No effect: one process is fast enough.")
flags.DEFINE_integer("max_batch", None, "No effect, as in the original.")
flags.DEFINE_bool("debug", None, "No effect, as in the original.")

flags.mark_flag_as_required("data_dir")
flags.register_validator(
    "cutoffs", lambda cutoffs: not cutoffs or all(c.isdigit() for c in cutoffs), "must be integers, as 20000,40000"
)

OPTIONS = "level valid_fraction min_freq max_size lower_case num_shuffle seed"


def main():
    cutoffs = flags.FLAGS.cutoffs
    made = corpus.prepare(
        **values(f"data_dir dataset data_path download download_url {OPTIONS}"),
        cutoffs=cutoffs if cutoffs is None else [int(cutoff) for cutoff in cutoffs],
        verbose=1,
    )
    sizes = ", ".join(f"{len(tokens):,} {split}" for split, tokens in made.splits.items())
    print(f"{flags.FLAGS.data_dir}: {len(made.vocab):,} symbols, cutoffs {made.cutoffs}; tokens: {sizes}")


if __name__ == "__main__":
    run(main)
