"""Prepares a corpus: vocabulary, token files and corpus-info.json, from which training reads batches of any size.

    txl-prepare-data --dataset=wt103 --data_dir=data/wikitext-103 --download
    txl-prepare-data --dataset=text --data_path=a.txt,b.txt --level=word --data_dir=data/mine
    txl-prepare-data --data_dir=data/mine --verify          (compares every file with its checksum)
    txl-prepare-data --dataset=text --data_path=gs://bucket/texts/ --data_dir=data/mine --ray_address=auto

The raw text of a data set of the paper is read from data_dir itself: train.txt, valid.txt and test.txt, as the
original's getdata.sh makes them. The flags of the original's data_utils.py are accepted; its flags about batches have
no effect.
"""

from absl import flags

from txl_config import ClusterConfig, TextConfig
from txl_programs.flag_values import FLAGS, check_used, cluster_of, define_flags, values
from txl_programs.program import run

flags.DEFINE_string(
    "data_dir", None, "Folder of the prepared corpus. For a data set of the paper, it also contains the raw text."
)
flags.DEFINE_bool(
    "download", False, "Download the public archive of a data set of the paper, unless its text exists already."
)
flags.DEFINE_string("download_url", None, "URL of a folder that contains the archive. Default: the public one.")
flags.DEFINE_bool("verify", False, "Only check a prepared data_dir: compare every file with its checksum.")
flags.DEFINE_integer("shard_tokens", None, "Most tokens in a file. Default: one file for each split.", lower_bound=1)
define_flags(TextConfig, dataset="wt103")
define_flags(ClusterConfig, leave_out=("ray_gpus",))

# Flags of the original's data_utils.py that have no effect here.
AT_TRAINING_TIME = "No effect: txl-train has the flags for the batch size, tgt_len and devices."
OF_BATCHES = (
    "tgt_len", "per_host_train_bsz", "per_host_valid_bsz", "per_host_test_bsz", "num_core_per_host", "num_passes",
)  # fmt: skip
for name in OF_BATCHES:
    flags.DEFINE_integer(name, None, AT_TRAINING_TIME)
flags.DEFINE_bool("use_tpu", None, AT_TRAINING_TIME)
flags.DEFINE_integer("num_procs", None, "No effect: one process is fast enough.")
flags.DEFINE_integer("max_batch", None, "No effect, as in the original.")
flags.DEFINE_bool("debug", None, "No effect, as in the original.")

flags.mark_flag_as_required("data_dir")


OWN_TEXT = (  # flags for the user's own text and for Python's manual
    "level", "valid_fraction", "min_freq", "max_size", "lower_case", "vocab_size", "subword_type", "documents",
    "text_field", "raw_text", "skip_bad_lines",
)  # fmt: skip


def check_flags():
    """Raises ParameterError if a flag is given that has no effect because of --verify, the data set or another flag."""
    own = FLAGS.dataset in ("text", "pydoc")
    dataset = f"--dataset={FLAGS.dataset}"
    level = f"--level={FLAGS.level}"
    vocab_path = f"--vocab_path={FLAGS.vocab_path}"
    preparation_flags = ["download", "download_url", "shard_tokens", *TextConfig.names(), *ClusterConfig.names()]
    check_used(
        (preparation_flags, not FLAGS.verify, "is for a preparation, and --verify only checks one"),
        (OWN_TEXT, own, f"is for your own text, and {dataset} has the original's tokens"),
        (("text_field", "skip_bad_lines"), FLAGS.dataset != "pydoc", "is for --dataset=text"),
        (("download", "download_url"), not own, f"is for datasets of the paper, not for {dataset}"),
        (("download_url",), FLAGS.download, "is for --download, which is not given"),
        (("num_shuffle", "seed"), FLAGS.dataset == "lm1b", f"is for --dataset=lm1b, not for {dataset}"),
        (("subword_type",), FLAGS.level == "subword", f"is for --level=subword, not for {level}"),
        (("subword_type",), not FLAGS.vocab_path, f"is for making subwords, which {vocab_path} has already"),
    )


def main():
    check_flags()
    import txl_tf
    from txl_tf.data.text.corpus import load_corpus
    from txl_tf.runs.folder import check_spares_runs

    if FLAGS.verify:
        corpus = load_corpus(FLAGS.data_dir, verify=True)
        print("every file is intact: its checksum is the recorded one")
    else:
        check_spares_runs("data_dir", FLAGS.data_dir)
        cluster = cluster_of(ClusterConfig)
        arguments = {**values(("data_dir", "download", "download_url", "shard_tokens")), **values(TextConfig)}
        # Only lm1b takes these two. `prepare` would refuse the default of --num_shuffle, which is not the library's.
        if FLAGS.dataset != "lm1b":
            arguments = {name: value for name, value in arguments.items() if name not in ("num_shuffle", "seed")}
        corpus = txl_tf.prepare(**arguments, verbose=1, ray=cluster if cluster.given else None)
    sizes = ", ".join(f"{len(tokens):,} {split}" for split, tokens in corpus.splits.items())
    print(f"{FLAGS.data_dir}: {len(corpus.vocab):,} symbols, cutoffs {corpus.cutoffs}; tokens: {sizes}")


if __name__ == "__main__":
    run(main)
