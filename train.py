"""Trains and evaluates a Transformer-XL language model.

    python train.py --flagfile=configs/quickstart.cfg
    python train.py --dataset=text --data_path=my.txt --level=char --model_dir=runs/my

The flags are those of the original program where it has them, with its names, defaults and meaning. Training a
folder that holds checkpoints goes on from the latest.
"""

import os
import sys

from absl import app, flags, logging

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors come as exceptions; the rest is noise

from txl_tf import corpus, distribution, training

# Data
flags.DEFINE_enum("dataset", "text", corpus.DATASETS, "What to train on: your own text, Python's manual (pydoc), ...")
flags.DEFINE_list("data_path", None, "The text: UTF-8 file(s), comma-separated; for ptb, enwik8, ... their folder.")
flags.DEFINE_enum("level", "char", corpus.LEVELS, "What a token of your own text is.")
flags.DEFINE_float("valid_fraction", 0.05, "Share of your own text, at its end, that is held out for validation.")
flags.DEFINE_bool("lower_case", False, "Lower-case your own text.")
flags.DEFINE_list("cutoffs", None, "First word of each bin but the first of the adaptive softmax, as 20000,40000.")

# Run
flags.DEFINE_string(
    "model_dir", None, "Folder of the run: checkpoints, vocabulary, log.csv, TensorBoard.", required=True
)
flags.DEFINE_bool("do_train", True, "Train.")
flags.DEFINE_bool("do_eval", False, "Evaluate eval_split, after training if that is done too.")
flags.DEFINE_string("eval_split", "valid", "Split to evaluate: train, valid or test.")
flags.DEFINE_string("eval_ckpt_path", None, "Checkpoint to evaluate, rather than the latest of model_dir.")
flags.DEFINE_string("warm_start_path", None, "Checkpoint whose weights a new run starts from.")
flags.DEFINE_integer("max_eval_batch", -1, "Batches to evaluate; -1 for all.")
flags.DEFINE_integer("seed", 0, "Seed of the initial weights and of dropout.")

# Training
flags.DEFINE_float("learning_rate", 2.5e-4, "Highest learning rate.")
flags.DEFINE_float("clip", 0.25, "Largest global norm of the gradients.")
flags.DEFINE_float("min_lr_ratio", 0.004, "Last learning rate as a share of the highest; cosine in between.")
flags.DEFINE_integer("warmup_steps", 0, "Steps of linear warm-up.")
flags.DEFINE_integer("train_batch_size", 60, "Rows of a training batch, over all devices.")
flags.DEFINE_integer("eval_batch_size", 60, "Rows of an evaluation batch, over all devices.")
flags.DEFINE_integer("train_steps", 100000, "Training steps in all.")
flags.DEFINE_integer("iterations", 500, "Steps between two lines of progress.")
flags.DEFINE_integer("save_steps", 10000, "Steps between two checkpoints, each with a validation.")
flags.DEFINE_integer("max_to_keep", 5, "Checkpoints to keep.")

# Model
flags.DEFINE_integer("tgt_len", 70, "Tokens of a segment.")
flags.DEFINE_integer("mem_len", 70, "Positions of memory.")
flags.DEFINE_bool("same_length", False, "Let every token attend to mem_len + 1 positions, not to all it can.")
flags.DEFINE_integer("clamp_len", -1, "Treat distances beyond it as clamp_len; -1 for no limit.")
flags.DEFINE_integer("n_layer", 6, "Layers.")
flags.DEFINE_integer("d_model", 500, "Width of the hidden states.")
flags.DEFINE_integer("d_embed", 500, "Width of the embeddings.")
flags.DEFINE_integer("n_head", 10, "Attention heads.")
flags.DEFINE_integer("d_head", 50, "Width of a head.")
flags.DEFINE_integer("d_inner", 1000, "Width inside the feed-forward layers.")
flags.DEFINE_float("dropout", 0.1, "Dropout rate.")
flags.DEFINE_float("dropatt", 0.1, "Dropout rate of the attention probabilities.")
flags.DEFINE_bool("untie_r", False, "Give every layer its own r_w_bias and r_r_bias.")
flags.DEFINE_integer("div_val", 1, "Divide the width of the embeddings by it from bin to bin.")
flags.DEFINE_bool("proj_share_all_but_first", False, "Share all projections of embedding and softmax but the first.")
flags.DEFINE_bool("proj_same_dim", True, "Project a bin as wide as d_model too.")
flags.DEFINE_enum("init", "normal", ["normal", "uniform"], "How weights are initialised.")
flags.DEFINE_float("init_std", 0.02, "Standard deviation where init is normal.")
flags.DEFINE_float("proj_init_std", 0.01, "Standard deviation of the projections where init is normal.")
flags.DEFINE_float("init_range", 0.1, "Range where init is uniform.")

# Machine
flags.DEFINE_enum("strategy", "auto", distribution.STRATEGIES, "Devices to use; auto takes all GPUs there are.")
flags.DEFINE_enum("mixed_precision", "float32", list(training.PRECISIONS), "Type of the products.")
flags.DEFINE_bool("jit_compile", False, "Compile the training step with XLA.")
flags.DEFINE_integer("steps_per_execution", 1, "Steps in one call of the compiled graph.")

flags.register_validator(
    "cutoffs", lambda cutoffs: not cutoffs or all(c.isdigit() for c in cutoffs), "must be integers, as 20000,40000"
)

DATA = "dataset data_path level valid_fraction lower_case"
MODEL = (
    "mem_len same_length clamp_len n_layer d_model d_embed n_head d_head d_inner dropout dropatt untie_r div_val "
    "proj_share_all_but_first proj_same_dim init init_std proj_init_std init_range"
)
OPTIMIZER = "learning_rate clip min_lr_ratio warmup_steps"
RUN = (
    "model_dir do_train do_eval eval_split eval_ckpt_path warm_start_path max_eval_batch seed train_batch_size "
    "eval_batch_size train_steps iterations save_steps max_to_keep tgt_len strategy mixed_precision jit_compile "
    "steps_per_execution"
)


def values(names):
    return {name: flags.FLAGS[name].value for name in names.split()}


def main(argv):
    if argv[1:]:
        sys.exit(f"train.py: unexpected arguments: {' '.join(argv[1:])}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    cutoffs = flags.FLAGS.cutoffs
    try:
        training.train_and_evaluate(
            data={**values(DATA), "cutoffs": cutoffs and [int(c) for c in cutoffs]},
            model=values(MODEL),
            optimizer=values(OPTIMIZER),
            **values(RUN),
        )
    except (ValueError, OSError) as error:
        if flags.FLAGS["verbosity"].present:
            raise
        sys.exit(f"train.py: {error}\n(--verbosity=1 shows where)")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    app.run(main)
