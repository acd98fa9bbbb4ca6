"""Trains a tagger of named entities: TENER, FLAT with a lexicon, or a BiLSTM, the baseline of both.

    txl-train-ner --flagfile=configs/ner_quickstart.cfg                 (generated sentences, two minutes)
    txl-train-ner --flagfile=configs/tener_resume.cfg --train_path=DIR/train.char.bmes ...
    txl-train-ner --model=flat --lexicon=jieba --train_path=train.txt --valid_path=dev.txt \\
        --test_path=test.txt --model_dir=runs/mine

A line of a file has a character and its tag, such as B-PER, separated by a space or a tab. An empty line ends a
sentence. With --token_level=word, a line has a word and its tag, and may have other columns between them.
--token_column and --tag_column choose other columns, for example for CoNLL-U. Tag schemes are BIO, BIOES, BMES, IOB1,
IO and BILOU; use --tag_scheme=none for tags that are not entities, such as parts of speech. The best checkpoint is the
one with the highest F1 on valid_path, or on 5% of train_path if there is no valid_path. Training resumes from the
latest checkpoint in model_dir: start the same command again, or give model_dir alone. Tag text with the run by
txl-tag; serve it with txl-export-saved-model.

  data          dataset, or train_path valid_path valid_fraction test_path token_level tag_scheme token_column
                tag_column comments segment_digits bigrams lexicon char_vectors word_vectors lowercase_vectors ...
  run           model_dir init_from extend_vocab train_steps iterations save_steps patience max_to_keep seed ...
  training      learning_rate schedule warmup_steps optimizer momentum clip clip_value batch_size ...
  model         model n_layer d_model n_head d_inner dropout embed_dropout token_dropout output_dropout max_seq_len ...
  of TENER      attn_type pos_embed after_norm key_position_term
  of FLAT       fusion fusion_shared k_proj residual rel_pos_init ...
  machine       strategy mixed_precision matmul_precision jit_compile steps_per_execution
  cluster       ray_workers ray_address ray_cpus ray_gpus ray_min_workers ray_restarts       (docs/scale.md)
"""

from absl import flags

from txl_config import (
    BiLSTMTaggerConfig,
    FlatTaggerConfig,
    MachineConfig,
    OptimizerConfig,
    TaggedConfig,
    TaggerTrainingConfig,
    TenerTaggerConfig,
    TrainingClusterConfig,
)
from txl_programs.command_line import newly_given
from txl_programs.flag_values import FLAGS, changed, check_used, config_of, define_flags, optimizer_config, refuse
from txl_programs.opening import check_model_of_run, origin_of, settings_to_resume
from txl_programs.program import run_training

MODELS = {"tener": TenerTaggerConfig, "flat": FlatTaggerConfig, "bilstm": BiLSTMTaggerConfig}
FROM_DATA = ("labels", "scheme", "n_token", "n_bigram")  # hyper-parameters that come from the data

flags.DEFINE_string(
    "model_dir", None, "Folder of the run: checkpoints, vocabularies, log.csv, TensorBoard curves. Required."
)
flags.DEFINE_enum("model", "tener", MODELS, "The network.")
define_flags(TaggedConfig)
define_flags(TaggerTrainingConfig, train_steps=6000, iterations=250, save_steps=250)
define_flags(OptimizerConfig, learning_rate=1e-3, clip=None, clip_value=5.0, schedule="linear", warmup_steps=60)
for group in MODELS.values():
    define_flags(group, leave_out=FROM_DATA)
define_flags(MachineConfig, leave_out=("tpu", "tpu_zone", "gcp_project"))
define_flags(TrainingClusterConfig)

flags.mark_flag_as_required("model_dir")


def main():
    from txl_tf.runs.folder import RunFolder
    from txl_tf.runs.train import train_run

    folder = RunFolder(FLAGS.model_dir, "tagger")
    if folder.steps() and folder.has_config():  # the training would resume
        check_model_of_run(folder, MODELS)
    settings = settings_to_resume(folder, ("dataset", "train_path"))
    if settings:
        family = folder.family
    else:
        origin, settings = origin_of(folder, "tagger")
        family = origin.family if origin else None
    kind = family.name if family and not FLAGS["model"].present else FLAGS.model
    model = MODELS[kind]
    model_flags = dict.fromkeys(name for group in MODELS.values() for name in group.names())
    unused_flags = [name for name in model_flags if name not in model.names()]
    refuse(unused_flags, f"is not a flag of --model={kind}")
    data = config_of(TaggedConfig, settings["data"])
    training = config_of(TaggerTrainingConfig, settings["training"])
    config = config_of(model, settings["model"])
    recorded = {**settings["model"], **settings["training"]}
    check_used(
        (changed(["n_sentences"]), data.dataset == "towns", "is for --dataset=towns"),
        (newly_given(["d_bigram"], recorded), data.bigrams, "is for bigrams, but the network gets none"),
        (
            newly_given(["key_position_term"], recorded),
            getattr(config, "attn_type", "adatrans") == "adatrans",
            "is for --attn_type=adatrans",
        ),
        (
            newly_given(["constraints"], recorded),
            data.tag_scheme != "none",
            "is for tags of entities, not for --tag_scheme=none",
        ),
    )
    train_run(
        FLAGS.model_dir,
        data=data,
        model=config,
        optimizer=optimizer_config(training, settings["training"]),
        training=training,
        machine=config_of(MachineConfig, settings["training"]),
    )


if __name__ == "__main__":
    run_training(main)
