"""Estimates how much memory the training of a language model needs, before it starts.

    txl-estimate --n_token=30000 --n_layer=12 --d_model=512 --d_embed=512 --n_head=8 --d_head=64 --d_inner=2048 \\
        --tgt_len=256 --mem_len=256 --train_batch_size=32
    txl-estimate --flagfile=configs/wt103_base.cfg --dataset=wt103
    txl-estimate --model_dir=runs/quickstart --train_batch_size=64

The program has the flags of txl-train, so a command line or a flag file of txl-train can be estimated as it is. Only
--do_eval_only, --corpus_info_path, the --ray_* flags and the original's flags without effect are missing, and
--lora_rank and --freeze are refused: such training runs need less memory, which is not estimated. The model,
the batch, the optimizer, --recompute, --mixed_precision, --gradient_accumulation_steps and --parallel_parts change the
result; flags of the data and of the schedule do not.

The size of the vocabulary is that of an existing run in --model_dir, --n_token, or that of the prepared --data_dir or
of --dataset, if this is a data set of the paper. For a text that is not prepared (--data_path), give --n_token, too,
and the --preset that txl-train chooses for it and prints: the text is not read here.

The figures are for one replica; --replicas divides the batch. They agree with measurements on a CPU within 15%. For
GPUs, they are computed, not measured: see docs/performance.md. The type that --mixed_precision=auto chooses depends on
the machine of the training, so the figures are then for float32, and the program says so.
"""

from absl import flags

from txl_config import (
    EvaluationConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    TextConfig,
    TrainingConfig,
    TransformerLMConfig,
)
from txl_config.data import INFO_FILE
from txl_config.memory import training_memory
from txl_config.presets import PRESETS
from txl_config.training import AUTO
from txl_programs.choosing import accepted_settings, check_model_flags
from txl_programs.flag_values import FLAGS, check_used, completed, config_of, define_flags, optimizer_config, refuse
from txl_programs.program import read_flags, run

MODELS = {"transformer_xl": ModelConfig, "transformer": TransformerLMConfig}

flags.DEFINE_string("model_dir", None, "Folder of a run, whose model is estimated. Without a run, it has no effect.")
flags.DEFINE_string("data_dir", None, "Folder of a prepared corpus, for the size of its vocabulary.")
flags.DEFINE_enum("model", "transformer_xl", MODELS, "Kind of model.")
flags.DEFINE_enum("preset", None, PRESETS, "Model size and training recipe.")
flags.DEFINE_bool("do_train", True, "No effect: txl-train has this flag.")
flags.DEFINE_integer("n_token", None, "Size of the vocabulary. Default: that of the run or of the data.", lower_bound=1)
flags.DEFINE_integer("replicas", 1, "Devices that divide the batch.", lower_bound=1)
define_flags(TrainingConfig)
define_flags(OptimizerConfig)
define_flags(ModelConfig, leave_out=("n_token", "reset_token"))
define_flags(TransformerLMConfig, leave_out=("n_token",))
define_flags(MachineConfig)
define_flags(TextConfig, leave_out=("num_shuffle", "seed"))
define_flags(EvaluationConfig)

read_flags(__name__)

import os
from typing import Any

from txl_config.checks import check_bins
from txl_config.errors import ParameterError
from txl_config.presets import preset_settings

# Symbols of the vocabularies of the paper's data sets.
SYMBOLS = {"enwik8": 204, "text8": 27, "ptb": 10_000, "wt2": 33_278, "wt103": 267_735, "lm1b": 793_471}


def vocabulary():
    """Returns `(n_token, cutoffs)`: the size of the vocabulary, and the cutoffs of its clusters.

    They come from --n_token with --cutoffs, else from the prepared --data_dir, which has its own cutoffs, else from
    --dataset, whose cutoffs --cutoffs replaces.

    Raises:
        ParameterError: none of them contains the size of the vocabulary, or a flag has no effect with --data_dir.
    """
    from txl_tf.data.text.datasets import PAPER_DATASETS
    from txl_tf.data.text.prepared_folder import read_info

    n_token, cutoffs = FLAGS.n_token, [int(x) for x in FLAGS.cutoffs or []]
    info_file = os.path.join(FLAGS.data_dir or "", INFO_FILE)
    is_prepared = FLAGS.data_dir and os.path.exists(info_file)
    if FLAGS.data_dir and not is_prepared:
        print(f"data_dir {FLAGS.data_dir} is not prepared, so it does not change the estimate")
    if n_token is not None and is_prepared:
        size = read_info(info_file)["vocab_size"]
        check_used((("data_dir",), size == n_token, f"has no effect: it has {size} symbols, got --n_token={n_token}"))
    if n_token is None and is_prepared:
        info = read_info(info_file)
        refuse(["cutoffs"], f"has no effect: the prepared data_dir {FLAGS.data_dir} has cutoffs of its own")
        check_used(
            (
                ("dataset",),
                info.get("dataset") in (None, FLAGS.dataset),
                f"has no effect: data_dir {FLAGS.data_dir} is prepared from another dataset, {info.get('dataset')}",
            ),
        )
        n_token, cutoffs = info["vocab_size"], info["cutoffs"][1:-1]  # the file has 0 before them, and n_token after
    elif n_token is None and FLAGS.dataset in SYMBOLS:
        n_token, cutoffs = SYMBOLS[FLAGS.dataset], cutoffs or PAPER_DATASETS[FLAGS.dataset].cutoffs
    if n_token is None:
        message = (
            "n_token, the size of the vocabulary, is needed: give it, or give a run, a prepared data_dir or dataset"
        )
        raise ParameterError("n_token", None, "the size of the vocabulary", message)
    return n_token, cutoffs


def level_of_text():
    """Returns what a token is, by which txl-train chooses a preset: as in the prepared --data_dir or in --dataset.

    For a text of your own, it is --level.

    Raises:
        ParameterError: --level is given, and the text has another level.
    """
    from txl_tf.data.text.datasets import token_level
    from txl_tf.data.text.prepared_folder import read_info

    info_file = os.path.join(FLAGS.data_dir or "", INFO_FILE)
    info = read_info(info_file) if FLAGS.data_dir and os.path.exists(info_file) else {}
    if "vocab" in info:  # not in a file of the original program
        level, has = token_level(info["dataset"], info["vocab"]["level"]), f"the prepared data_dir {FLAGS.data_dir} has"
    elif FLAGS.dataset in SYMBOLS:
        level, has = token_level(FLAGS.dataset, "word"), f"dataset={FLAGS.dataset} has"
    else:
        return FLAGS.level
    check_used((("level",), FLAGS.level == level, f"has no effect: {has} the level {level}"))
    return level


def settings():
    """Returns `(model, other_defaults)`: the hyper-parameters of the model, and values for other flags.

    Both come from the run in --model_dir if it exists, else from --preset. Flags on the command line take precedence.
    `other_defaults` is `{name: value}`; the values replace defaults of flags.

    Raises:
        ParameterError: a flag has no effect with the run, or see `vocabulary` and `level_of_text`.
    """
    from txl_tf.files import same_path
    from txl_tf.runs.folder import RunFolder

    folder = RunFolder(FLAGS.model_dir, "language_model") if FLAGS.model_dir else None
    if folder is not None and folder.has_config():
        config = folder.read_config()
        data = config["data"]
        has = f"model_dir {folder} is an existing run, which has"
        same_folder = bool(FLAGS.data_dir and data.get("data_dir")) and same_path(FLAGS.data_dir, data["data_dir"])
        refuse(["preset"], f"has no effect: {has} its settings already")
        check_used(
            (("model",), MODELS[FLAGS.model] is folder.family.config, f"has no effect: {has} another kind of model"),
            (("data_dir",), same_folder, f"has no effect: {has} another text"),
            (("dataset",), FLAGS.dataset == data.get("dataset"), f"has no effect: {has} another text"),
        )
        return config_of(folder.family.config, {"cutoffs": [], **config["model"]}), config.get("training", {})
    group = MODELS[FLAGS.model]
    n_token, cutoffs = vocabulary()
    # A billion tokens stand for a large text. For a small text, the preset of txl-train has smaller batches.
    preset = preset_settings(FLAGS.preset, level_of_text(), 1e9, FLAGS.replicas) if FLAGS.preset else {}
    known = {**accepted_settings(preset, group, {}), "n_token": n_token}
    if group is TransformerLMConfig:  # the default of --mem_len is Transformer-XL's
        known["mem_len"] = TransformerLMConfig.mem_len
    return group(**{**completed(group, known), "cutoffs": cutoffs}), preset


def shown(n_bytes):
    """Returns a number of bytes as text in MB or GB, padded to a fixed width."""
    return f"{n_bytes / 1e9:8.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:8.2f} MB"


def main():
    model: Any
    model, other_defaults = settings()
    check_model_flags(type(model), getattr(model, "positions", "relative"))
    check_bins(model.n_token, model.d_embed, model.cutoffs, model.div_val)
    training = config_of(TrainingConfig, other_defaults)
    if training.freeze:
        raise ParameterError("freeze", training.freeze, "left out: training with frozen weights is not estimated")
    optimizer = optimizer_config(training, other_defaults)
    precision = config_of(MachineConfig, other_defaults).mixed_precision
    shares = FLAGS.replicas * training.gradient_accumulation_steps
    parallel_parts = training.parallel_parts or 1
    parts = shares * parallel_parts
    if training.train_batch_size % parts:
        message = f"train_batch_size={training.train_batch_size} must be a multiple of the {parts} parts of a batch"
        raise ParameterError("train_batch_size", training.train_batch_size, f"a multiple of {parts}", message)
    rows = training.train_batch_size // shares
    memory = training_memory(
        model,
        rows,
        training.tgt_len,
        optimizer=optimizer.optimizer,
        ema=bool(optimizer.ema),
        recompute=training.recompute,
        mixed_precision=precision in ("bfloat16", "float16"),
        parallel_parts=parallel_parts,
    )
    print(f"{memory.n_weights:,} weights; {rows} rows of {training.tgt_len} tokens, mem_len {model.mem_len}")
    if (FLAGS.data_path or FLAGS.dataset == "text") and not FLAGS.preset and not other_defaults:
        print(
            "preset is not given: the sizes have the defaults of the flags. For such a text, txl-train chooses a preset"
        )
    if precision == AUTO:
        print("mixed_precision=auto depends on the machine of the training: the figures are for float32")
    if training.parallel_parts is None and FLAGS.replicas == 1 and not (training.jit_compile or training.static_shapes):
        print("parallel_parts is not given and depends on the machine of the training: the figures are for 1")
    for name in ("weights", "gradients", "optimizer", "activations", "memory", "runtime"):
        print(f"{name:12}{shown(getattr(memory, name))}")
    print(f"{'together':12}{shown(memory.total)}")
    print("In addition, the import of TensorFlow takes about 0.5 GB of the memory of the process")


if __name__ == "__main__":
    run(main)
