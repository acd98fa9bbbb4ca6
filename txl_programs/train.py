"""Trains and evaluates a language model: Transformer-XL, or with --model=transformer the vanilla Transformer.

    txl-train --flagfile=configs/quickstart.cfg
    txl-train --dataset=text --data_path=my.txt --level=char --model_dir=runs/my
    txl-train --data_dir=data/wikitext-103 --model_dir=runs/wt103 ...           (see txl-prepare-data)
    txl-train --model_dir=runs/my --do_train=False --do_eval --eval_path=other.txt

Flags that the original program has keep its names, defaults and meaning. Training continues from the latest checkpoint
of the folder. Evaluation takes the model from the run's config.json; flags such as --mem_len, --clamp_len and
--same_length override it.

  data          data_dir, or dataset with data_path, level, valid_fraction, min_freq, max_size, lower_case, cutoffs
  run           model_dir do_train do_eval eval_split eval_path eval_ckpt_path token_nll warm_start_path tracker ...
  training      learning_rate warmup_steps min_lr_ratio clip optimizer train_steps train_batch_size save_steps ...
  model         model n_layer d_model d_embed n_head d_head d_inner dropout dropatt tgt_len mem_len untie_r div_val ...
  machine       strategy tpu mixed_precision jit_compile steps_per_execution gradient_accumulation_steps recompute ...
"""

import os

from absl import flags

from txl_programs.program import FLAGS, define_flags, run, values
from txl_tf.config import (
    EvaluationConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    TextConfig,
    TrainingConfig,
    TransformerLMConfig,
)

MODELS = {"transformer_xl": ModelConfig, "transformer": TransformerLMConfig}

flags.DEFINE_string("model_dir", None, "Folder of the run: checkpoints, vocabulary, log.csv, curves. Required.")
flags.DEFINE_string("data_dir", None, "Folder of a corpus that txl-prepare-data prepared.")
flags.DEFINE_string("corpus_info_path", None, "The corpus-info.json of a prepared corpus, if it is not in data_dir.")
flags.DEFINE_enum("model", "transformer_xl", MODELS, "Kind of model: transformer has absolute positions, no memory.")
flags.DEFINE_bool("do_train", True, "Train.")
flags.DEFINE_bool("do_eval_only", False, "Evaluate without training, as --do_train=False --do_eval.")
define_flags(TextConfig, leave_out="num_shuffle seed")
define_flags(TrainingConfig)
define_flags(EvaluationConfig)
define_flags(OptimizerConfig)
define_flags(ModelConfig, leave_out="n_token reset_token")
define_flags(TransformerLMConfig, leave_out="n_token")
define_flags(MachineConfig)

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


def data_arguments():
    """The corpus that the flags name: `data_dir` alone, or the arguments of `build_corpus`; empty if they name none."""
    text = {name: value for name, value in values(TextConfig).items() if name != "seed"}  # that of the weights
    folder = os.path.dirname(FLAGS.corpus_info_path or "") or FLAGS.data_dir
    if folder:
        given = [name for name in text if FLAGS[name].present]
        if given:
            raise ValueError(f"data_dir {folder} is a prepared corpus: leave out {', '.join(f'--{n}' for n in given)}")
        return {"data_dir": folder}
    if not (FLAGS.dataset or FLAGS.data_path):
        return {}
    return {**text, "dataset": FLAGS.dataset or "text"}


def model_arguments(group, given_only=False):
    """`{hyper-parameter: value}` of the kind of model whose `group` it is, but for what comes from the text."""
    given = values(group, given_only)
    if group is TransformerLMConfig:
        refused = [name for name in ("clamp_len", "untie_r") if FLAGS[name].present]
        if refused:
            raise ValueError(f"{refused[0]} is about distances, which --model=transformer does not have: leave it out")
        if not FLAGS["mem_len"].present:  # whose default is Transformer-XL's
            given.pop("mem_len", None)
    return {name: value for name, value in given.items() if name != "cutoffs"}


def main():
    from txl_tf.runs.evaluate import evaluate_run
    from txl_tf.runs.folder import RunFolder
    from txl_tf.runs.train import train_run

    folder, machine = RunFolder(FLAGS.model_dir, "language_model"), MachineConfig(**values(MachineConfig))
    evaluation = values(EvaluationConfig)
    if FLAGS.do_train and not FLAGS.do_eval_only:
        train_run(
            folder,
            data=data_arguments(),
            model=MODELS[FLAGS.model](**model_arguments(MODELS[FLAGS.model])),
            optimizer=OptimizerConfig(**values(OptimizerConfig)),
            training=TrainingConfig(**values(TrainingConfig)),
            final=EvaluationConfig(**evaluation),
            machine=machine,
        )
    elif FLAGS.do_eval or FLAGS.do_eval_only:
        of_the_run = ("tgt_len", "eval_batch_size", "reset_memory_at_documents")
        of_the_run = [name for name in of_the_run if not FLAGS[name].present]
        group = folder.family.config
        evaluate_run(
            folder,
            data=data_arguments(),
            model=model_arguments(group, given_only=folder.has_config()),
            evaluation=EvaluationConfig(**{**evaluation, **dict.fromkeys(of_the_run)}),
            machine=machine,
        )
    else:
        raise ValueError("nothing to do: --do_train and --do_eval are both False")


if __name__ == "__main__":
    run(main)
