"""Trains a Transformer encoder-decoder on pairs of lines, and translates what was held out.

    txl-train-seq2seq --flagfile=configs/seq2seq_quickstart.cfg
    txl-train-seq2seq --train_path=pairs.tsv --model_dir=runs/mine              (source<TAB>target lines)
    txl-train-seq2seq --train_path=train.de,train.en --valid_path=valid.de,valid.en \\
        --source_level=word --target_level=word --min_freq=5 --model_dir=runs/deen

Training continues from the latest checkpoint of the folder. txl-translate translates with it,
txl-export-saved-model makes a served model of it, txl-average-checkpoints the mean of its checkpoints.

  data          dataset, or train_path with valid_path, test_path, source_level, target_level, source_symbols ...
  run           model_dir init_from extend_vocab train_steps iterations save_steps max_to_keep eval_sources seed ...
  training      learning_rate schedule warmup_steps optimizer beta_2 clip batch_size batch_tokens ...
  model         num_layers d_model num_heads dff max_len rate norm_first share_embeddings label_smoothing ...
  machine       strategy mixed_precision matmul_precision jit_compile steps_per_execution
  cluster       ray_workers ray_address ray_cpus ray_gpus ray_min_workers ray_restarts       (docs/scale.md)
"""

from absl import flags

from txl_programs.program import (
    FLAGS,
    changed,
    check_used,
    config_of,
    define_flags,
    optimizer_arguments,
    origin_of,
    run_training,
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

flags.DEFINE_string("model_dir", None, "Folder of the run: checkpoints, vocabularies, log.csv, curves.")
define_flags(PairsConfig)
define_flags(PairsTrainingConfig, train_steps=20000, save_steps=2000)
define_flags(OptimizerConfig, learning_rate=1e-3, clip=1.0, warmup_steps=1000, beta_2=0.98, min_lr_ratio=0.0)
define_flags(TransformerConfig, leave_out="input_vocab_size target_vocab_size", norm_first=True, label_smoothing=0.1)
define_flags(SearchConfig)
define_flags(MachineConfig, leave_out="tpu tpu_zone gcp_project")
define_flags(TrainingClusterConfig)

flags.mark_flag_as_required("model_dir")


def main():
    from txl_tf.runs.folder import RunFolder
    from txl_tf.runs.train import train_run

    _, settings = origin_of(RunFolder(FLAGS.model_dir), "encoder_decoder")
    data, training = config_of(PairsConfig, settings["data"]), config_of(PairsTrainingConfig, settings["training"])
    made = data.dataset == "dates"
    check_used(
        (changed("n_pairs"), made, "is for --dataset=dates"),
        (changed("valid_fraction"), not (made or data.valid_path), "is for pairs of your own without --valid_path"),
    )
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
