"""Makes the folder of a run, which every program here opens, out of a checkpoint of the original; and back.

    python tools/convert_checkpoint.py --tf1_checkpoint=tf_wt103/model --corpus=tf_wt103/data/cache.pkl \
        --mem_len=1600 --clamp_len=1000 --same_length --model_dir=runs/wt103
    python tools/convert_checkpoint.py --tf1_checkpoint=my/model.ckpt-1200 --corpus=my/vocab.txt --dataset=wt2 \
        --mem_len=160 --model_dir=runs/my
    python tools/convert_checkpoint.py --to_tf1 --model_dir=runs/my --tf1_checkpoint=back

The checkpoint tells what the model is. Flags of the original's commands that describe the model may stay: they are
compared with the checkpoint. It does not tell mem_len, same_length and clamp_len: give --mem_len, and the others if the
model was trained or evaluated with them.
"""

import os
import sys
from pathlib import Path

from absl import flags

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors come as exceptions; the rest is noise
sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.program import FLAGS, define_flags, run, values
from txl_tf.config import ModelConfig
from txl_tf.convert.original import run_to_tf1, tf1_to_run
from txl_tf.data.datasets import PAPER_DATASETS

flags.DEFINE_string("tf1_checkpoint", None, "The original's checkpoint: its prefix (.../model.ckpt-0) or its folder.")
flags.DEFINE_string("model_dir", None, "Folder of the run.")
flags.DEFINE_string("corpus", None, "Its cache.pkl, a vocabulary file (a word a line), or the folder of either.")
flags.DEFINE_enum("dataset", None, list(PAPER_DATASETS), "Whose rules make words of text; a cache.pkl says.")
flags.DEFINE_string("data_dir", None, "Folder for the text of a cache.pkl, prepared to train on and to evaluate.")
flags.DEFINE_bool("to_tf1", False, "Go back: write tf1_checkpoint out of model_dir.")
flags.DEFINE_string("ckpt_path", None, "With to_tf1, the checkpoint of model_dir to take, rather than the latest.")

# No checkpoint tells mem_len, same_length and clamp_len. It does tell the others, which are compared with it.
TOLD = "n_layer d_model d_embed n_head d_head d_inner untie_r div_val proj_share_all_but_first proj_same_dim"
WITHOUT_FLAG = set(ModelConfig.names()) - {"mem_len", "same_length", "clamp_len", *TOLD.split()}
define_flags(ModelConfig, leave_out=" ".join(WITHOUT_FLAG), mem_len=None, **dict.fromkeys(TOLD.split()))

flags.mark_flags_as_required(["tf1_checkpoint", "model_dir"])

FROM_TF1 = "tf1_checkpoint corpus model_dir dataset data_dir mem_len same_length clamp_len"


def described(names, network):
    return " ".join(f"{name}={getattr(network, name)}" for name in names.split())


def from_tf1():
    if FLAGS.corpus is None:
        raise ValueError("--corpus is needed: the cache.pkl or vocabulary file of the checkpoint")
    lm, vocab, checkpoint = tf1_to_run(**values(FROM_TF1), **values(TOLD))
    print(f"{checkpoint}: {lm.count_params():,} parameters, {len(vocab):,} symbols")
    print("the checkpoint says:", described("n_layer d_model d_embed n_head d_head d_inner untie_r", lm.network))
    print("     ", described("cutoffs div_val proj_same_dim", lm.network), described("proj_share_all_but_first", lm))
    print("it does not say:", described("mem_len same_length clamp_len", lm.network))


def main():
    if FLAGS.to_tf1:
        print(run_to_tf1(**values("model_dir tf1_checkpoint ckpt_path")))
    else:
        from_tf1()


if __name__ == "__main__":
    run(main)
