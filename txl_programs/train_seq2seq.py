"""Trains a Transformer encoder-decoder on pairs of lines, and translates held-out sources at the end.

    txl-train-seq2seq --flagfile=configs/seq2seq_quickstart.cfg
    txl-train-seq2seq --train_path=pairs.tsv --model_dir=runs/mine              (source<TAB>target lines)
    txl-train-seq2seq --train_path=train.de,train.en --valid_path=valid.de,valid.en \\
        --source_level=word --target_level=word --min_freq=5 --model_dir=runs/deen

Unless --num_layers, --d_model, --num_heads and --dff are all given, a preset chooses the size of the model, the batch
size and the number of steps by the number of pairs and the machine. A flag that you give replaces the preset's value.
Training resumes from the latest checkpoint in model_dir: start the same command again, or give model_dir alone.
Translate with the run by txl-translate; serve it with txl-export-saved-model; average its checkpoints with
txl-average-checkpoints.

  data          dataset, or train_path with valid_path, test_path, source_level, target_level, skip_bad_lines ...
  run           model_dir init_from extend_vocab train_steps iterations save_steps patience max_to_keep seed ...
  training      learning_rate schedule warmup_steps optimizer beta_2 clip batch_size batch_tokens ...
  model         preset num_layers d_model num_heads dff max_len rate norm_first share_embeddings label_smoothing ...
  machine       strategy mixed_precision matmul_precision jit_compile steps_per_execution
  cluster       ray_workers ray_address ray_cpus ray_gpus ray_min_workers ray_restarts       (docs/scale.md)
"""

import dataclasses
from typing import Any

from absl import flags

from txl_config import (
    MachineConfig,
    OptimizerConfig,
    PairsConfig,
    PairsTrainingConfig,
    SearchConfig,
    TrainingClusterConfig,
    TransformerConfig,
)
from txl_config.presets import (
    BYTES,
    PAIR_PRESETS,
    PAIR_SIZES,
    pair_settings,
    pair_weights,
)
from txl_programs.choosing import chosen_preset, given_steps, log_choice
from txl_programs.command_line import newly_given
from txl_programs.flag_values import (
    FLAGS,
    changed,
    check_used,
    config_of,
    define_flags,
    given,
    optimizer_config,
    refuse,
    unused,
    values,
)
from txl_programs.opening import check_preset_of_run, origin_of, settings_to_resume
from txl_programs.program import run_training

flags.DEFINE_string(
    "model_dir", None, "Folder of the run: checkpoints, vocabularies, log.csv, TensorBoard curves. Required."
)
flags.DEFINE_enum(
    "preset",
    None,
    PAIR_PRESETS,
    "Model size and training recipe. Default: chosen by the number of pairs and the machine.",
)
define_flags(PairsConfig)
define_flags(PairsTrainingConfig, train_steps=20000, save_steps=2000)
define_flags(OptimizerConfig, learning_rate=1e-3, clip=1.0, warmup_steps=1000, beta_2=0.98, min_lr_ratio=0.0)
define_flags(
    TransformerConfig,
    leave_out=("input_vocab_size", "target_vocab_size", "target_lengths"),
    norm_first=True,
    label_smoothing=0.1,
)
define_flags(SearchConfig)
define_flags(MachineConfig, leave_out=("tpu", "tpu_zone", "gcp_project"))
define_flags(TrainingClusterConfig)

flags.mark_flag_as_required("model_dir")


def size_of_pairs(data):
    """Returns `(pairs, bytes, tokens)` of the training data. `tokens`, of sources and targets together, is an estimate.

    The number of pairs is the number of lines of the longest file, at least 1. Bytes and tokens are counted over all
    files. Generated dates are not in a file; they have about 35 characters a pair.

    Raises:
        ParameterError, OSError: a file is empty or cannot be read.
    """
    from txl_tf.data.pairs.files import pair_paths
    from txl_tf.data.text_files import blocks_of

    if data.dataset == "dates":
        return data.n_pairs, 35 * data.n_pairs, 35 * data.n_pairs
    paths = pair_paths(data.train_path or [])
    sizes = [0] * len(paths)  # bytes of each file
    lines = [0] * len(paths)
    for i, path in enumerate(paths):
        block = b"\n"
        for block in blocks_of(path):
            sizes[i] += len(block)
            lines[i] += block.count(b"\n")
        lines[i] += not block.endswith(b"\n")  # the last line may have no newline
    bytes_of_token = [BYTES[data.source_level], BYTES[data.target_level]]
    shares = sizes if len(sizes) == 2 else [sum(sizes) / 2] * 2  # bytes of the sources, and of the targets
    tokens = sum(size / width for size, width in zip(shares, bytes_of_token, strict=True))
    return max([1, *lines]), sum(sizes), tokens


def choose_settings(data, exists, optimizer):
    """Returns `{name: value}` of --preset or, without it, of the preset for this size of data and this machine.

    Logs the choice, unless the run exists already, there is no data, or the command line replaces all values.

    Args:
        data: the pairs, a `PairsConfig`.
        exists: whether the run exists already.
        optimizer: name of the optimizer.
    """
    n_pairs, n_bytes, n_tokens = size_of_pairs(data)
    choice = chosen_preset(n_bytes)
    settings = pair_settings(choice.preset, n_pairs, n_tokens, given_steps(), optimizer)
    all_given = settings and set(settings) <= set(given(settings))
    if not exists and n_bytes and not all_given:
        sizes = values(PAIR_SIZES, given_only=True)
        defaults: dict[str, Any] = {name: FLAGS[name].default for name in PAIR_SIZES}
        chosen = {name: settings.get(name, default) for name, default in defaults.items()} | sizes
        steps = given_steps() or settings.get("train_steps", FLAGS.train_steps)
        size = f"there are {n_pairs:,} pairs of {n_bytes / 1e6:,.2f} MB"
        log_choice(choice, pair_weights(**chosen), steps, size, pair_weights(**defaults), sizes)
    return settings


def settings_of(folder):
    """Returns values for flags that are not given, from the existing run, from --init_from or from a preset.

    Returns:
        `{"data": ..., "model": ..., "training": ...}`, each with values by name.

    Raises:
        ParameterError: --preset has no effect, or other settings than the existing run.
    """
    resumed = settings_to_resume(folder, ("dataset", "train_path"))
    if resumed:
        return resumed
    origin, settings = origin_of(folder, "encoder_decoder")
    if origin:
        if FLAGS.preset:
            raise unused(
                "preset", f"has no effect with --init_from={FLAGS.init_from}: the new run has that run's model"
            )
        return settings
    exists = bool(folder.steps())
    has_sizes = exists or FLAGS.warm_start_path or len(given(PAIR_SIZES)) == len(PAIR_SIZES)
    run = folder.read_config() if exists else {"model": {}, "training": {}}
    optimizer = run["training"].get("optimizer", FLAGS.optimizer)
    preset = choose_settings(config_of(PairsConfig), exists, optimizer) if FLAGS.preset or not has_sizes else {}
    if exists:
        check_preset_of_run(preset, PAIR_SIZES, run["model"] | run["training"])
        settings["model"] = run["model"]
        settings["training"] = {**preset, **run["training"]}
    else:
        settings["model"] = {name: preset[name] for name in PAIR_SIZES if name in preset}
        settings["training"] = preset
    return settings


def main():
    from txl_tf.runs.folder import RunFolder
    from txl_tf.runs.train import train_run

    settings = settings_of(RunFolder(FLAGS.model_dir, "encoder_decoder"))
    data = config_of(PairsConfig, settings["data"])
    is_dates = data.dataset == "dates"
    check_used(
        (changed(["n_pairs"]), is_dates, "is for --dataset=dates"),
        (
            changed(["valid_fraction"]),
            not (is_dates or data.valid_path),
            "is for pairs of your own without --valid_path",
        ),
        (
            changed(["subword_type"]),
            "subword" in (data.source_level, data.target_level),
            "is for --source_level=subword or --target_level=subword",
        ),
    )
    training = config_of(PairsTrainingConfig, settings["training"])
    new = newly_given(SearchConfig.names(), settings["training"])
    one_best = [name for name in new if name == "n_best"]
    refuse(one_best, "is for txl-translate: a training counts only the best translation of a source")
    check_used((new, training.eval_sources, "is for translations, and --eval_sources=0 makes none"))
    search = dataclasses.replace(config_of(SearchConfig, settings["training"]), n_best=1)
    check_used((changed(["length_penalty"]), search.beam_size > 1, "is for a beam search: give --beam_size, too"))
    train_run(
        FLAGS.model_dir,
        data=data,
        model=config_of(TransformerConfig, settings["model"]),
        optimizer=optimizer_config(training, settings["training"]),
        training=training,
        final=search,
        machine=config_of(MachineConfig, settings["training"]),
    )


if __name__ == "__main__":
    run_training(main)
