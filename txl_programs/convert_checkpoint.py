"""Converts a checkpoint of another program to the folder of a run, or a run to a checkpoint of the original program.

    txl-convert-checkpoint --tf1_checkpoint=tf_wt103/model --corpus=tf_wt103/data/cache.pkl \\
        --mem_len=1600 --clamp_len=1000 --same_length --model_dir=runs/wt103
    txl-convert-checkpoint --tf1_checkpoint=my/model.ckpt-1200 --corpus=my/vocab.txt --dataset=wt2 \\
        --mem_len=160 --model_dir=runs/my
    txl-convert-checkpoint --to_tf1 --model_dir=runs/my --tf1_checkpoint=back
    txl-convert-checkpoint --pytorch_checkpoint=transfo-xl-wt103 --model_dir=runs/wt103
    txl-convert-checkpoint --pytorch_checkpoint=LM-TFM-wt103/model.pt --corpus=data/cache.pt \\
        --model_dir=runs/mine
    txl-convert-checkpoint --to_hub=OWNER/NAME --model_dir=runs/my --license=apache-2.0

A PyTorch checkpoint is a file or folder of Hugging Face (config.json with .safetensors or .bin), of the original
PyTorch program (model.pt) or of NVIDIA's program (checkpoint_best.pt). The conversion needs no PyTorch and runs no code
from the files.

The hyper-parameters come from the checkpoint. You may keep the flags of the original's commands that describe the
model: the program compares them with the checkpoint. A TensorFlow checkpoint, or the plain state_dict of a PyTorch
program, does not contain mem_len, same_length and clamp_len: give --mem_len, and the other two if the model was trained
or evaluated with them.

With --to_hub, the weights and the vocabulary of a run are uploaded to the Hugging Face Hub, with a model card. It needs
huggingface_hub (pip install "txl_tf[hub]"), and a token in HF_TOKEN or by `hf auth login`. All programs open
such a run, and Transformer-XL checkpoints of the hub, with --model_dir=hf://OWNER/NAME.
"""

from absl import flags

from txl_config import DATASETS, ModelConfig
from txl_programs.flag_values import FLAGS, define_flags, refuse, values
from txl_programs.program import read_flags, run

PAPER_DATASETS = [name for name in DATASETS if name not in ("pydoc", "text")]

flags.DEFINE_string(
    "tf1_checkpoint", None, "Checkpoint of the original program: its prefix (.../model.ckpt-0) or its folder."
)
flags.DEFINE_string("pytorch_checkpoint", None, "Checkpoint of a PyTorch program: a file or a folder.")
flags.DEFINE_string("model_dir", None, "Folder of the run.")
flags.DEFINE_string(
    "corpus",
    None,
    "Vocabulary of the checkpoint: cache.pkl, vocab.pkl, cache.pt or a list of words; or the folder of such a file.",
)
flags.DEFINE_enum("dataset", None, PAPER_DATASETS, "Data set whose rules split text into words, if no file says which.")
flags.DEFINE_string(
    "data_dir",
    None,
    "Folder to write the text of a cache.pkl or cache.pt to, as a prepared corpus for training and evaluation.",
)
flags.DEFINE_bool("to_tf1", False, "Convert the other way: write the run in model_dir as tf1_checkpoint.")
flags.DEFINE_string(
    "ckpt_path", None, "With --to_tf1 and --to_hub: checkpoint of model_dir to convert. Default: as in other programs."
)
flags.DEFINE_string("to_hub", None, "Repository of the Hugging Face Hub to upload the run in model_dir to: OWNER/NAME.")
flags.DEFINE_string("license", None, "With --to_hub: license of the model for its card, such as apache-2.0.")
flags.DEFINE_bool("private", None, "With --to_hub: make a new repository private.")

# The hyper-parameters that have a flag, by where the conversion finds their values.
SIZES = ("n_layer", "d_model", "d_embed", "n_head", "d_head", "d_inner", "untie_r")
BINS = ("div_val", "proj_same_dim", "proj_share_all_but_first")
RECORDED = (*SIZES, *BINS)  # every checkpoint contains them; a flag must have the value of the checkpoint
MEMORY = ("mem_len", "same_length", "clamp_len")  # a TensorFlow checkpoint does not contain them
OPTIONAL = ("cutoffs", "layer_norm_epsilon", "pre_lnorm")  # the state_dict of a PyTorch program may lack them
LEFT_OUT = set(ModelConfig.names()) - {*RECORDED, *MEMORY, *OPTIONAL}
# A flag with the default `None` has the value of the checkpoint. A checkpoint without mem_len needs --mem_len.
define_flags(ModelConfig, leave_out=LEFT_OUT, mem_len=None, **dict.fromkeys([*RECORDED, *OPTIONAL]))

flags.mark_flag_as_required("model_dir")
flags.mark_flags_as_mutual_exclusive(["tf1_checkpoint", "pytorch_checkpoint", "to_hub"], required=True)

read_flags(__name__)

from txl_config.errors import ParameterError
from txl_tf.convert.hub import push_to_hub
from txl_tf.convert.original import run_to_tf1, tf1_to_run
from txl_tf.convert.pytorch import pytorch_to_run
from txl_tf.convert.pytorch_mapping import NOBODY
from txl_tf.runs.folder import RunFolder

# Flags of each conversion.
CORPUS = ("corpus", "model_dir", "dataset", "data_dir")
TO_TF1 = ("model_dir", "tf1_checkpoint", "ckpt_path")
TO_HUB = ("model_dir", "to_hub", "ckpt_path", "license", "private")
FROM_TF1 = ("tf1_checkpoint", *CORPUS, *MEMORY, *RECORDED)
FROM_PYTORCH = ("pytorch_checkpoint", *CORPUS, *RECORDED, *MEMORY, *OPTIONAL)


def described(names, model):
    """Returns arguments of a model as text: "n_layer=2 d_model=8".

    Args:
        names: names of the arguments.
        model: the model, a layer, or a dictionary of its arguments.
    """
    arguments = model if isinstance(model, dict) else vars(model)
    return " ".join(f"{name}={arguments[name]}" for name in names)


def from_tf1():
    """Converts a checkpoint of the original program to a run. Prints the model's arguments, and where each comes from.

    Raises:
        ParameterError: --corpus is not given, or the conversion is not possible.
    """
    if FLAGS.corpus is None:
        message = "--corpus must be given: the cache.pkl or vocabulary file of the checkpoint"
        raise ParameterError("corpus", None, "the cache.pkl or vocabulary file of the checkpoint", message)
    lm, vocab, checkpoint = tf1_to_run(**values(FROM_TF1))
    print(f"{checkpoint}: {lm.count_params():,} parameters, {len(vocab):,} symbols")
    bins = described(("cutoffs", "div_val", "proj_same_dim"), lm.network)
    print("from the checkpoint:", described(SIZES, lm.network))
    print("     ", bins, described(("proj_share_all_but_first",), lm))
    print("from the flags:", described(MEMORY, lm.network))


def from_pytorch():
    """Converts a checkpoint of PyTorch to a run. Prints the model's arguments, and where each comes from."""
    converted = pytorch_to_run(**values(("pytorch_checkpoint", *CORPUS)), **values(ModelConfig, given_only=True))
    source = converted.source
    print(f"{source.path}: {source.kind}, {converted.n_parameter:,} parameters, {len(converted.vocab):,} symbols")
    for who, names in converted.origins.items():
        print("assumed:" if who == NOBODY else f"settings from {who}:", described(names, converted.model))
    for note in converted.notes:
        print("note:", note)
    print(converted.checkpoint)


def to_tf1():
    """Converts a run to a checkpoint of the original program, and prints the path of the checkpoint.

    It also prints a note for each setting of the model that the original program does not have.
    """
    print(run_to_tf1(**values(TO_TF1)))
    model = ModelConfig(**RunFolder(FLAGS.model_dir).read_config()["model"])
    for name, original in {"layer_norm_epsilon": "1e-12", "reset_token": "no such setting"}.items():
        value = getattr(model, name)
        if value != getattr(ModelConfig, name):
            print(f"note: the model has {name}={value}; the original program has {original}, so its numbers differ")


def check_flags(what, taken):
    """Raises ParameterError if a flag is given that the conversion does not use.

    Args:
        what: the flag that chooses the conversion, such as "--to_hub".
        taken: the names of the flags that the conversion uses. `--noto_tf1` is always allowed.
    """
    fits = what == "--to_tf1" or not FLAGS.to_tf1
    own = FLAGS.get_key_flags_for_module(FLAGS.find_module_defining_flag("model_dir"))
    other_flags = [flag.name for flag in own if flag.name not in taken and not (flag.name == "to_tf1" and fits)]
    refuse(other_flags, f"is not for {what}, which takes {', '.join(taken)}")


def main():
    """Does the conversion that the flags ask for: to the hub, to TensorFlow 1, or from PyTorch or TensorFlow 1."""
    if FLAGS.to_hub is not None:
        check_flags("--to_hub", TO_HUB)
        print(push_to_hub(FLAGS.model_dir, FLAGS.to_hub, **values(TO_HUB[2:])))
    elif FLAGS.to_tf1:
        check_flags("--to_tf1", TO_TF1)
        to_tf1()
    elif FLAGS.pytorch_checkpoint is not None:
        check_flags("--pytorch_checkpoint", FROM_PYTORCH)
        from_pytorch()
    else:
        check_flags("--tf1_checkpoint", FROM_TF1)
        from_tf1()


if __name__ == "__main__":
    run(main)
