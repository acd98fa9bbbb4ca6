"""Trains and evaluates a Transformer-XL language model.

    python train.py --flagfile=configs/quickstart.cfg
    python train.py --dataset=text --data_path=my.txt --level=char --model_dir=runs/my
    python train.py --data_dir=data/wikitext-103 --model_dir=runs/wt103 ...           (see tools/prepare_data.py)
    python train.py --model_dir=runs/my --do_train=False --do_eval --eval_path=other.txt

The flags are those of the original program where it has them, with its names, defaults and meaning. Training a
folder that holds checkpoints goes on from the latest. Evaluation takes the model from the run's config.json; flags
that are given count more, such as --mem_len, --clamp_len and --same_length.

  data          data_dir, or dataset with data_path, level, valid_fraction, min_freq, max_size, lower_case, cutoffs
  run           model_dir do_train do_eval eval_split eval_path eval_ckpt_path token_nll warm_start_path seed ...
  training      learning_rate warmup_steps min_lr_ratio clip optimizer train_steps train_batch_size save_steps ...
  model         n_layer d_model d_embed n_head d_head d_inner dropout dropatt tgt_len mem_len untie_r div_val ...
  machine       strategy tpu mixed_precision jit_compile steps_per_execution gradient_accumulation_steps recompute ...
"""

import os

from absl import flags

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors come as exceptions; the rest is noise

from txl_tf import datasets, distribution, optimization, runs, training
from txl_tf.program import run, values

# Data
flags.DEFINE_string("data_dir", None, "Folder of a corpus that tools/prepare_data.py prepared.")
flags.DEFINE_string("corpus_info_path", None, "The corpus-info.json of a prepared corpus, if it is not in data_dir.")
flags.DEFINE_enum(
    "dataset", None, datasets.DATASETS, "Text to prepare in memory: your own, Python's manual (pydoc) ..."
)
flags.DEFINE_list("data_path", None, "The text: UTF-8 file(s), comma-separated; for ptb, enwik8, ... their folder.")
flags.DEFINE_enum("level", "char", datasets.LEVELS, "What a token of your own text is.")
flags.DEFINE_float("valid_fraction", 0.05, "Share of your own text, at its end, that is held out for validation.")
flags.DEFINE_integer("min_freq", 0, "Symbols of your own text that are rarer become <unk>.")
flags.DEFINE_integer("max_size", None, "Number of most frequent symbols of your own text to keep; others are <unk>.")
flags.DEFINE_bool("lower_case", False, "Lower-case your own text.")
flags.DEFINE_list("cutoffs", None, "First word of each bin but the first of the adaptive softmax, as 20000,40000.")

# Run
flags.DEFINE_string("model_dir", None, "Folder of the run: checkpoints, vocabulary, log.csv, curves. Required.")
flags.DEFINE_bool("do_train", True, "Train.")
flags.DEFINE_bool("do_eval", False, "Evaluate eval_split, after training if that is done too.")
flags.DEFINE_bool("do_eval_only", False, "Evaluate without training, as --do_train=False --do_eval.")
flags.DEFINE_string("eval_split", "valid", "Split to evaluate: train, valid or test.")
flags.DEFINE_string("eval_path", None, "Text file to evaluate instead of a split, in the vocabulary of the run.")
flags.DEFINE_string("eval_ckpt_path", None, "Checkpoint to evaluate, rather than the latest: a path, or best.")
flags.DEFINE_string("token_nll", None, "File to write every evaluated token to, with its nll, row by row of the batch.")
flags.DEFINE_integer("sample_tokens", 0, "Tokens of text to write in the end of training, to see what it learned.")
flags.DEFINE_integer("max_eval_batch", -1, "Batches to evaluate; -1 for all.")
flags.DEFINE_string("warm_start_path", None, "Checkpoint whose weights a new run starts from; the original's will do.")
flags.DEFINE_integer("seed", 0, "Seed of the initial weights and of dropout.")

# Training
flags.DEFINE_float("learning_rate", 2.5e-4, "Highest learning rate.")
flags.DEFINE_float("clip", 0.25, "Largest global norm of the gradients.")
flags.DEFINE_float("min_lr_ratio", 0.004, "Last learning rate as a share of the highest; cosine in between.")
flags.DEFINE_integer("warmup_steps", 0, "Steps of linear warm-up.")
flags.DEFINE_enum("optimizer", "adam", list(optimization.OPTIMIZERS), "adam is the original's.")
flags.DEFINE_float("weight_decay", 0.0, "Weight decay of adamw and lamb.")
flags.DEFINE_float("ema", 0.0, "Momentum of a moving average of the weights, as 0.999, that is evaluated in the end.")
flags.DEFINE_integer("train_batch_size", 60, "Rows of a training batch, over all devices.")
flags.DEFINE_integer("eval_batch_size", 60, "Rows of an evaluation batch; default without training: the run's.")
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
flags.DEFINE_string("tpu", None, "Name or grpc:// address of the TPU, or local; with --strategy=tpu.")
flags.DEFINE_string("tpu_zone", None, "Zone of the TPU, if it is another than this machine's.")
flags.DEFINE_string("gcp_project", None, "Project of the TPU, if it is another than this machine's.")
flags.DEFINE_integer("logical_cpus", None, "Devices that the processor counts for: to try --strategy=mirrored on it.")
flags.DEFINE_bool("jit_compile", False, "Compile the training step with XLA.")
flags.DEFINE_integer("steps_per_execution", 1, "Steps in one call of the compiled graph.")
flags.DEFINE_integer("gradient_accumulation_steps", 1, "Parts of a batch to compute one after the other.")
flags.DEFINE_bool("recompute", False, "Compute the layers again in the backward pass: less memory, more time.")
flags.DEFINE_bool("static_shapes", None, "Fixed room for rare words; those beyond do not count. Default: on TPUs.")

# Flags of the original's programs that have nothing left to say.
flags.DEFINE_string("record_info_dir", None, "No effect: the prepared corpus says it.")
flags.DEFINE_integer("num_core_per_host", None, "No effect: see --strategy.")
flags.DEFINE_integer("num_hosts", None, "No effect: see --strategy.")
flags.DEFINE_bool("use_tpu", None, "No effect: see --strategy=tpu.")
flags.DEFINE_string("master", None, "No effect: see --strategy.")
flags.DEFINE_bool("tie_weight", None, "No effect: embedding and softmax are always tied.")
flags.DEFINE_bool("do_test", None, "No effect, as in the original.")
flags.DEFINE_bool("track_mean", None, "No effect, as in the original.")
flags.DEFINE_integer("start_eval_steps", None, "No effect: the latest checkpoint is evaluated.")
flags.DEFINE_alias("num_host", "num_hosts")  # as some of the original's scripts write it

flags.mark_flag_as_required("model_dir")
flags.register_validator(
    "cutoffs", lambda cutoffs: not cutoffs or all(c.isdigit() for c in cutoffs), "must be integers, as 20000,40000"
)

DATA = "dataset data_path level valid_fraction min_freq max_size lower_case"
MODEL = (
    "mem_len same_length clamp_len n_layer d_model d_embed n_head d_head d_inner dropout dropatt untie_r div_val "
    "proj_share_all_but_first proj_same_dim init init_std proj_init_std init_range"
)
OPTIMIZER = "learning_rate clip min_lr_ratio warmup_steps optimizer weight_decay ema"
TRAINING = (
    "do_eval sample_tokens warm_start_path train_batch_size eval_batch_size train_steps iterations save_steps "
    "max_to_keep jit_compile steps_per_execution gradient_accumulation_steps recompute static_shapes"
)
EVALUATION = "eval_split max_eval_batch token_nll"
MACHINE = "strategy tpu tpu_zone gcp_project logical_cpus mixed_precision seed"


def data_arguments():
    """Which corpus: `data_dir` alone, or the arguments of `build_corpus`; empty where no flag says."""
    folder = os.path.dirname(flags.FLAGS.corpus_info_path or "") or flags.FLAGS.data_dir
    if folder:
        given = values(f"{DATA} cutoffs", given_only=True)
        if given:
            raise ValueError(f"data_dir {folder} is a prepared corpus: leave out {', '.join(f'--{n}' for n in given)}")
        return {"data_dir": folder}
    if not (flags.FLAGS.dataset or flags.FLAGS.data_path):
        return {}
    cutoffs = flags.FLAGS.cutoffs
    arguments = {**values(DATA), "cutoffs": cutoffs if cutoffs is None else [int(cutoff) for cutoff in cutoffs]}
    return {**arguments, "dataset": arguments["dataset"] or "text"}


def has_config():
    """Whether the run says itself what its model is; that of the original program does not."""
    return os.path.exists(os.path.join(flags.FLAGS.model_dir, runs.CONFIG_FILE))


def main():
    if flags.FLAGS.do_train and not flags.FLAGS.do_eval_only:
        training.train_and_evaluate(
            data=data_arguments(),
            model=values(MODEL),
            optimizer=values(OPTIMIZER),
            **values(f"model_dir tgt_len {TRAINING} {EVALUATION} {MACHINE}"),
        )
    elif flags.FLAGS.do_eval or flags.FLAGS.do_eval_only:
        training.evaluate_run(
            data=data_arguments(),
            model=values(MODEL, given_only=True) if has_config() else values(MODEL),
            **values("tgt_len eval_batch_size", given_only=True),
            **values(f"model_dir eval_path eval_ckpt_path {EVALUATION} {MACHINE}"),
        )
    else:
        raise ValueError("nothing to do: --do_train and --do_eval are both False")


if __name__ == "__main__":
    run(main)
