"""Trains a Transformer encoder-decoder on pairs of lines, and translates what was held out.

    txl-train-seq2seq --flagfile=configs/seq2seq_quickstart.cfg
    txl-train-seq2seq --train_path=pairs.tsv --model_dir=runs/mine              (source<TAB>target lines)
    txl-train-seq2seq --train_path=train.de,train.en --valid_path=valid.de,valid.en \\
        --source_level=word --target_level=word --min_freq=5 --model_dir=runs/deen

Unless --num_layers, --d_model, --num_heads and --dff are all given, a preset says the size of the model, its batches
and the number of steps, by the size of the pairs and the machine; a flag that is given replaces the preset's value.
Training continues from the latest checkpoint of the folder. txl-translate translates with it, txl-export-saved-model
makes a served model of it, txl-average-checkpoints the mean of its checkpoints.

  data          dataset, or train_path with valid_path, test_path, source_level, target_level, skip_bad_lines ...
  run           model_dir init_from extend_vocab train_steps iterations save_steps max_to_keep eval_sources seed ...
  training      learning_rate schedule warmup_steps optimizer beta_2 clip batch_size batch_tokens ...
  model         preset num_layers d_model num_heads dff max_len rate norm_first share_embeddings label_smoothing ...
  machine       strategy mixed_precision matmul_precision jit_compile steps_per_execution
  cluster       ray_workers ray_address ray_cpus ray_gpus ray_min_workers ray_restarts       (docs/scale.md)
"""

import logging
import os

from absl import flags

from txl_programs.program import (
    FLAGS,
    changed,
    check_used,
    config_of,
    define_flags,
    given,
    optimizer_arguments,
    origin_of,
    run_training,
    values,
)
from txl_tf.config import (
    MachineConfig,
    OptimizerConfig,
    PairsConfig,
    PairsTrainingConfig,
    SearchConfig,
    TrainingClusterConfig,
    TransformerConfig,
)
from txl_tf.config.presets import (
    BYTES,
    PAIR_PRESETS,
    PAIR_SIZES,
    choose_preset,
    pair_settings,
    pair_weights,
)

flags.DEFINE_string("model_dir", None, "Folder of the run: checkpoints, vocabularies, log.csv, curves.")
flags.DEFINE_enum("preset", None, PAIR_PRESETS, "Size and recipe. Default: by the size of the pairs and the machine.")
define_flags(PairsConfig)
define_flags(PairsTrainingConfig, train_steps=20000, save_steps=2000)
define_flags(OptimizerConfig, learning_rate=1e-3, clip=1.0, warmup_steps=1000, beta_2=0.98, min_lr_ratio=0.0)
define_flags(
    TransformerConfig,
    leave_out="input_vocab_size target_vocab_size target_lengths",
    norm_first=True,
    label_smoothing=0.1,
)
define_flags(SearchConfig)
define_flags(MachineConfig, leave_out="tpu tpu_zone gcp_project")
define_flags(TrainingClusterConfig)

flags.mark_flag_as_required("model_dir")


def size_of_pairs(data):
    """`(pairs, bytes, tokens)` of the training, about."""
    from txl_tf.data.text_files import blocks_of

    if data.dataset == "dates":
        return data.n_pairs, 35 * data.n_pairs, 35 * data.n_pairs
    paths = data.train_path.split(",") if isinstance(data.train_path, str) else data.train_path or []
    sizes, lines = [0] * len(paths), [0] * len(paths)
    for i, path in enumerate(paths):
        for block in blocks_of(path):
            sizes[i], lines[i] = sizes[i] + len(block), lines[i] + block.count(b"\n")
    of_token = [BYTES[data.source_level], BYTES[data.target_level]]
    shares = sizes if len(sizes) == 2 else [sum(sizes) / 2] * 2
    tokens = sum(size / width for size, width in zip(shares, of_token, strict=True))
    return max([1, *lines]), sum(sizes), tokens


def choose_settings(data, is_there):
    """The values of --preset, or of that which suits pairs and machine; says which, unless a run `is_there`."""
    import tensorflow as tf

    n_pairs, n_bytes, n_tokens = size_of_pairs(data)
    n_gpus, n_cores = len(tf.config.list_physical_devices("GPU")), os.cpu_count()
    preset = FLAGS.preset or choose_preset(n_bytes, n_gpus, n_cores)
    found = pair_settings(preset, n_pairs, n_tokens)
    sizes, defaults = values(" ".join(PAIR_SIZES), given_only=True), values(" ".join(PAIR_SIZES))
    if is_there or not n_bytes or (found and set(found) <= set(given(found))):  # or all of it is given
        return found
    weights = pair_weights(**{name: found.get(name, defaults[name]) for name in PAIR_SIZES} | sizes) / 1e6
    steps = FLAGS.train_steps if FLAGS["train_steps"].present else found.get("train_steps", FLAGS.train_steps)
    says = f"preset {preset}: {weights:.1f} M parameters besides the embeddings, {steps:,} steps"
    if not FLAGS.preset:
        machine = "there is a GPU" if n_gpus else f"there is no GPU, but {n_cores} cores"
        base = pair_weights(**{name: FLAGS[name].default for name in PAIR_SIZES}) / 1e6
        says += f", because there are {n_pairs:,} pairs of {n_bytes / 1e6:,.2f} MB and {machine}; --preset=base for "
        says += f"{base:.1f} M"
    kept = [f"{name}={value}" for name, value in sizes.items()]
    says += f"; {', '.join(kept)} as given, all else as in the preset" if kept else ""
    logging.getLogger("txl_tf").info(says)
    return found


def settings_of(folder):
    """Values for flags that are not given, by group: of a run to start from or to go on with, or else of a preset."""
    origin, settings = origin_of(folder, "encoder_decoder")
    if origin:
        if FLAGS.preset:
            raise ValueError(f"preset must be left out with init_from={FLAGS.init_from}, whose model is taken")
        return settings
    is_there, kept = bool(folder.steps()), {"model": {}, "training": {}}
    has_sizes = is_there or FLAGS.warm_start_path or len(given(PAIR_SIZES)) == len(PAIR_SIZES)
    chosen = choose_settings(config_of(PairsConfig), is_there) if FLAGS.preset or not has_sizes else {}
    kept |= folder.read_config() if is_there else {}
    settings["model"] = {**kept["model"], **{name: chosen[name] for name in PAIR_SIZES if name in chosen}}
    settings["training"] = {**chosen, **kept["training"]}
    return settings


def main():
    from txl_tf.runs.folder import RunFolder
    from txl_tf.runs.train import train_run

    made = FLAGS.dataset == "dates"
    check_used(
        (changed("n_pairs"), made, "is for --dataset=dates"),
        (changed("valid_fraction"), not (made or FLAGS.valid_path), "is for pairs of your own without --valid_path"),
    )
    settings = settings_of(RunFolder(FLAGS.model_dir, "encoder_decoder"))
    data, training = config_of(PairsConfig, settings["data"]), config_of(PairsTrainingConfig, settings["training"])
    train_run(
        FLAGS.model_dir,
        data=data,
        model=config_of(TransformerConfig, settings["model"]),
        optimizer=OptimizerConfig(**optimizer_arguments(OptimizerConfig, training, settings["training"])),
        training=training,
        final=config_of(SearchConfig),
        machine=config_of(MachineConfig),
    )


if __name__ == "__main__":
    run_training(main)
