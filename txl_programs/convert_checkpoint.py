"""Makes the folder of a run, which every program here opens, out of another program's checkpoint; and back.

    txl-convert-checkpoint --tf1_checkpoint=tf_wt103/model --corpus=tf_wt103/data/cache.pkl \\
        --mem_len=1600 --clamp_len=1000 --same_length --model_dir=runs/wt103
    txl-convert-checkpoint --tf1_checkpoint=my/model.ckpt-1200 --corpus=my/vocab.txt --dataset=wt2 \\
        --mem_len=160 --model_dir=runs/my
    txl-convert-checkpoint --to_tf1 --model_dir=runs/my --tf1_checkpoint=back
    txl-convert-checkpoint --pytorch_checkpoint=transfo-xl-wt103 --model_dir=runs/wt103
    txl-convert-checkpoint --pytorch_checkpoint=LM-TFM-wt103/model.pt --corpus=data/cache.pt \\
        --model_dir=runs/mine

A PyTorch checkpoint is a file or folder of Hugging Face (config.json with .safetensors or .bin), of the original's
PyTorch program (model.pt) or of NVIDIA's (checkpoint_best.pt). PyTorch is not needed, and nothing in the files is run.

A checkpoint tells what the model is. Flags of the original's commands that describe the model may stay: they are
compared with it. One of TensorFlow, or the bare state_dict of a PyTorch program, does not tell mem_len, same_length and
clamp_len: give --mem_len, and the others if the model was trained or evaluated with them.
"""

from absl import flags

from txl_programs.program import FLAGS, check_used, define_flags, read_flags, run, values
from txl_tf.config import DATASETS, ModelConfig

PAPER_DATASETS = [name for name in DATASETS if name not in ("pydoc", "text")]

flags.DEFINE_string("tf1_checkpoint", None, "The original's checkpoint: its prefix (.../model.ckpt-0) or its folder.")
flags.DEFINE_string("pytorch_checkpoint", None, "Checkpoint of a PyTorch program: its file or folder.")
flags.DEFINE_string("model_dir", None, "Folder of the run.")
flags.DEFINE_string("corpus", None, "Its cache.pkl, vocab.pkl, cache.pt, or list of words; or the folder of one.")
flags.DEFINE_enum("dataset", None, PAPER_DATASETS, "Whose rules make words of text, where no file says.")
flags.DEFINE_string(
    "data_dir", None, "Folder for the text of a cache.pkl or cache.pt, prepared to train on and to evaluate."
)
flags.DEFINE_bool("to_tf1", False, "Go back: write tf1_checkpoint out of model_dir.")
flags.DEFINE_string("ckpt_path", None, "With to_tf1, the checkpoint of model_dir to take, rather than the latest.")

# What a checkpoint tells is compared with the flags; one of TensorFlow tells nothing of the memory.
TOLD = "n_layer d_model d_embed n_head d_head d_inner untie_r div_val proj_share_all_but_first proj_same_dim"
MEMORY = "mem_len same_length clamp_len"
BARE = "cutoffs layer_norm_epsilon"  # what the state_dict of a PyTorch program may not tell
FLAGGED = [*TOLD.split(), *MEMORY.split(), *BARE.split()]
LEFT_OUT = " ".join(name for name in ModelConfig.names() if name not in FLAGGED)
define_flags(ModelConfig, leave_out=LEFT_OUT, mem_len=None, **dict.fromkeys([*TOLD.split(), *BARE.split()]))

flags.mark_flag_as_required("model_dir")
flags.mark_flags_as_mutual_exclusive(["tf1_checkpoint", "pytorch_checkpoint"], required=True)

read_flags(__name__)

from txl_tf.convert.original import run_to_tf1, tf1_to_run
from txl_tf.convert.pytorch import pytorch_to_run
from txl_tf.runs.folder import RunFolder

CORPUS = "corpus model_dir dataset data_dir"


def described(names, model):
    """The arguments of a model or a layer."""
    values_of = model if isinstance(model, dict) else vars(model)
    return " ".join(f"{name}={values_of[name]}" for name in names.split())


def from_tf1():
    if FLAGS.corpus is None:
        raise ValueError("--corpus is needed: the cache.pkl or vocabulary file of the checkpoint")
    lm, vocab, checkpoint = tf1_to_run(**values(f"tf1_checkpoint {CORPUS} {MEMORY} {TOLD}"))
    print(f"{checkpoint}: {lm.count_params():,} parameters, {len(vocab):,} symbols")
    print("the checkpoint says:", described("n_layer d_model d_embed n_head d_head d_inner untie_r", lm.network))
    print("     ", described("cutoffs div_val proj_same_dim", lm.network), described("proj_share_all_but_first", lm))
    print("it does not say:", described("mem_len same_length clamp_len", lm.network))


def from_pytorch():
    made = pytorch_to_run(**values(f"pytorch_checkpoint {CORPUS}"), **values(ModelConfig, given_only=True))
    source = made.source
    print(f"{source.path}: {source.kind}, {made.n_parameter:,} parameters, {len(made.vocab):,} symbols")
    for who, names in made.origins.items():
        print(f"said by {who}:", described(" ".join(names), made.model))
    for note in made.notes:
        print("note:", note)
    print(made.checkpoint)


def to_tf1():
    print(run_to_tf1(**values("model_dir tf1_checkpoint ckpt_path")))
    model = ModelConfig(**RunFolder(FLAGS.model_dir).read_config()["model"])
    for name, original in {"layer_norm_epsilon": "1e-12", "reset_token": "no such thing"}.items():
        value = getattr(model, name)
        if value != getattr(ModelConfig, name):
            print(f"note: the model has {name}={value}; the original program has {original}, so its numbers differ")


def check_flags(what, taken):
    """Refuses flags that the conversion, the direction `what`, does not take."""
    own = FLAGS.get_key_flags_for_module(FLAGS.find_module_defining_flag("model_dir"))
    others = [flag.name for flag in own if flag.name not in ["to_tf1", *taken.split()]]
    check_used((others, False, f"is not for {what}, which takes {', '.join(taken.split())}"))


def main():
    if FLAGS.to_tf1:
        check_flags("--to_tf1", "model_dir tf1_checkpoint ckpt_path")
        to_tf1()
    elif FLAGS.pytorch_checkpoint is not None:
        check_flags("--pytorch_checkpoint", f"pytorch_checkpoint {CORPUS} {' '.join(FLAGGED)}")
        from_pytorch()
    else:
        check_flags("--tf1_checkpoint", f"tf1_checkpoint {CORPUS} {MEMORY} {TOLD}")
        from_tf1()


if __name__ == "__main__":
    run(main)
