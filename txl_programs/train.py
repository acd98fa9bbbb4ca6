"""Trains and evaluates a language model: Transformer-XL, or with --model=transformer the vanilla Transformer.

    txl-train --flagfile=configs/quickstart.cfg
    txl-train --data_path=my.txt --level=char --model_dir=runs/my
    txl-train --data_path=more.txt --init_from=runs/my --model_dir=runs/tuned
    txl-train --data_dir=data/wikitext-103 --model_dir=runs/wt103 ...           (see txl-prepare-data)
    txl-train --model_dir=runs/my                              (resumes; --train_steps=N extends the training)
    txl-train --model_dir=runs/my --do_train=False --do_eval --eval_path=other.txt

Flags of the original program keep their names, defaults and meaning. Training resumes from the latest checkpoint in
model_dir: start the same command again, or give model_dir alone. An evaluation takes the model from the run's
config.json; flags such as --mem_len, --clamp_len and --same_length change it for this evaluation.

  data          data_dir, or dataset with data_path, level, valid_fraction, min_freq, max_size, lower_case, cutoffs
  run           model_dir init_from extend_vocab do_train do_eval eval_split eval_path eval_ckpt_path token_nll ...
  training      learning_rate warmup_steps min_lr_ratio clip optimizer train_steps patience train_batch_size ...
  model         preset model n_layer d_model d_embed n_head d_head d_inner dropout dropatt tgt_len mem_len untie_r ...
  machine       strategy tpu mixed_precision matmul_precision jit_compile steps_per_execution recompute ...
  cluster       ray_workers ray_address ray_cpus ray_gpus ray_min_workers ray_restarts       (docs/scale.md)
"""

import dataclasses
import logging
import os

from absl import flags

from txl_config import (
    DecoderConfig,
    EvaluationConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    TextConfig,
    TrainingClusterConfig,
    TrainingConfig,
    TransformerLMConfig,
)
from txl_config.data import INFO_FILE
from txl_config.errors import ParameterError
from txl_config.models import INITIAL, TRAINING_ONLY
from txl_config.presets import (
    BYTES,
    PRESETS,
    SAMPLE_TOKENS,
    SIZES,
    layer_weights,
    preset_settings,
    schedule_for,
    steps_for,
)
from txl_programs.choosing import (
    accepted_settings,
    batch_divisor,
    check_model_flags,
    chosen_preset,
    given_steps,
    is_on_tpu,
    log_choice,
)
from txl_programs.command_line import newly_given, outside_flag_files
from txl_programs.flag_values import (
    FLAGS,
    changed,
    check_used,
    completed,
    config_of,
    define_flags,
    given,
    optimizer_config,
    refuse,
    unused,
    values,
)
from txl_programs.opening import check_model_of_run, check_preset_of_run, origin_of, settings_to_resume
from txl_programs.program import run_training

FROM_TEXT = ("cutoffs",)  # hyper-parameter of the model that is decided when the text is prepared
TEXT_FLAGS = ("dataset", "data_path", "data_dir", "corpus_info_path")  # flags that say where the text is
READING = ("text_field", "skip_bad_lines")  # flags for a text that is not prepared
MODELS = {"transformer_xl": ModelConfig, "transformer": TransformerLMConfig}

flags.DEFINE_string(
    "model_dir", None, "Folder of the run: checkpoints, vocabulary, log.csv, TensorBoard curves. Required."
)
flags.DEFINE_string("data_dir", None, "Folder of a corpus prepared by txl-prepare-data.")
flags.DEFINE_string(
    "corpus_info_path", None, "Path of the corpus-info.json in the folder of a prepared corpus. Replaces data_dir."
)
flags.DEFINE_enum("model", "transformer_xl", MODELS, "Kind of model. transformer: absolute positions, no memory.")
flags.DEFINE_enum(
    "preset",
    None,
    PRESETS,
    "Model size and training recipe. Default for your own text: chosen by its size and the machine.",
)
flags.DEFINE_bool("do_train", True, "Train.")
flags.DEFINE_bool("do_eval_only", False, "Only evaluate, as with --do_train=False --do_eval.")
define_flags(TextConfig, leave_out=("num_shuffle", "seed"))
define_flags(TrainingConfig)
define_flags(EvaluationConfig)
define_flags(OptimizerConfig)
define_flags(ModelConfig, leave_out=("n_token", "reset_token"))
define_flags(TransformerLMConfig, leave_out=("n_token",))
define_flags(MachineConfig)
define_flags(TrainingClusterConfig)

# Flags of the original programs that have no effect here.
flags.DEFINE_string("record_info_dir", None, "No effect: the prepared corpus contains this information.")
flags.DEFINE_integer("num_core_per_host", None, "No effect: see --strategy.")
flags.DEFINE_integer("num_hosts", None, "No effect: see --strategy.")
flags.DEFINE_bool("use_tpu", None, "No effect: see --strategy=tpu.")
flags.DEFINE_string("master", None, "No effect: see --strategy.")
flags.DEFINE_bool("do_test", None, "No effect, as in the original.")
flags.DEFINE_bool("track_mean", None, "No effect, as in the original.")
flags.DEFINE_integer("start_eval_steps", None, "No effect: the latest checkpoint is evaluated.")
flags.DEFINE_alias("num_host", "num_hosts")  # as some of the original's scripts write it

flags.mark_flag_as_required("model_dir")


def data_arguments(other_defaults=None):
    """Returns which corpus the flags name: `{"data_dir": ...}` or arguments of `build_corpus`; empty if they name none.

    Args:
        other_defaults: `{name: value}` for flags that are not given.

    Raises:
        ParameterError: flags about the text are given together with a prepared corpus; or see `corpus_folder`.
    """
    other_defaults = other_defaults or {}
    text = completed(TextConfig, other_defaults)
    text.pop("seed", None)  # --seed is the seed of the weights
    if "seed" in other_defaults and text["dataset"] == "lm1b":  # of a run that Python started
        text["seed"] = other_defaults["seed"]
    folder = corpus_folder() or other_defaults.get("data_dir")
    if folder:
        if text_flags := given(text):
            names = ", ".join(f"--{name}" for name in text_flags)
            message = f"data_dir {folder} is a prepared corpus: leave out {names}"
            raise ParameterError(text_flags[0], FLAGS[text_flags[0]].value, "left out with data_dir", message)
        return {"data_dir": folder}
    if not (text["dataset"] or text["data_path"]):
        return {}
    return {**text, "dataset": text["dataset"] or "text"}


def corpus_folder():
    """Returns the folder of the prepared corpus that --corpus_info_path or --data_dir names; `None` without both.

    Raises:
        ParameterError: --corpus_info_path names another file than corpus-info.json.
    """
    path = FLAGS.corpus_info_path
    if not path:
        return FLAGS.data_dir
    folder, name = os.path.split(path)
    if name != INFO_FILE:
        raise ParameterError("corpus_info_path", path, f"the path of a {INFO_FILE}")
    return folder or os.curdir


def model_defaults(group, other_defaults):
    """Returns the values that replace defaults of the model's flags: `other_defaults`, for this kind of model.

    Args:
        group: the class of the model's hyper-parameters.
        other_defaults: `{name: value}`, from a run or a preset.
    """
    defaults = dict(other_defaults)
    if group is TransformerLMConfig:  # the default of --mem_len is Transformer-XL's
        defaults.setdefault("mem_len", TransformerLMConfig.mem_len)
    return defaults


def size_of_text(data, vocab=None):
    """Returns `(level, bytes, tokens)` of the training text in `data`, see `data_arguments`.

    For a prepared corpus, the number of bytes is an estimate. For another text, the number of tokens is an estimate;
    for compressed files, the number of bytes, too.

    Args:
        data: the text.
        vocab: an existing vocabulary that encodes it, or `None`.
    """
    from txl_tf.data.inputs import has_ending
    from txl_tf.data.text.corpus import load_corpus
    from txl_tf.data.text.datasets import check_files, make_recipe, token_level
    from txl_tf.data.text.prepared_folder import size_of

    if data.get("data_dir"):
        corpus = load_corpus(data["data_dir"])
        level = corpus.level
        n_tokens = len(corpus.splits["train"])
        return level, n_tokens * BYTES[level], n_tokens
    recipe = make_recipe(TextConfig(**data), vocab)
    check_files(recipe)
    level = token_level(data["dataset"], recipe.vocab_options["level"])
    n_bytes = 0
    for path in recipe.files["train"]:
        size = size_of(path) or 0  # `check_files` has found the files
        n_bytes += 3 * size if has_ending(path, ".gz", ".zip") else size  # compressed: about a third
    return level, n_bytes, n_bytes / BYTES[level]


def model_group(source):
    """Returns the class of the model's hyper-parameters: that of --model if it is given, else that of a run.

    Args:
        source: the existing run or the one of --init_from; `None` without both, for the default of --model.
    """
    return MODELS[FLAGS.model] if FLAGS["model"].present or source is None else source.family.config


def settings_of(folder):
    """Returns `(group, settings)`: the class of the model's hyper-parameters, and values for flags that are not given.

    `settings` is `{"data": ..., "model": ..., "training": ...}`, each with values by name. The first row that applies
    decides where they come from:

        the run exists, and no flag names a text    all settings of the run
        the run exists, and --init_from             "model" and "training" of the run, and "data" that it inherited
        --init_from, for a new run                  "model", batches and inherited "data" of the run that it names, and
                                                    the schedule by --train_steps or by the size of the text
        the run exists, and --preset or own text    "model" and "training" of the run, and of --preset what it lacks
        --preset or own text, for a new run         "model" and "training" of the preset that is given or chosen
        otherwise                                   none: the defaults of the flags

    Own text is --data_path without --dataset, or --dataset=text. Except in the first row and on a TPU, own text changes
    the default of `sample_tokens`, too. The function logs the preset or the schedule that it chooses.

    Raises:
        ParameterError: --preset has no effect, or a flag does not fit the run.
    """
    resumed = settings_to_resume(folder, TEXT_FLAGS)
    if resumed:
        return model_group(folder), resumed
    origin, settings = origin_of(folder, "language_model")
    group = model_group(folder if folder.steps() else origin)
    if FLAGS.preset and origin:
        raise unused("preset", f"has no effect with --init_from={FLAGS.init_from}: the new run has that run's model")
    data = data_arguments(settings["data"])
    own_text = data.get("dataset") == "text"
    if origin:
        if not origin.resumes:
            settings["training"] |= schedule_of_new_text(data, origin, settings["training"])
    elif data and (FLAGS.preset or own_text):
        settings |= settings_of_preset(data, folder, group)
    elif data and given_steps() is None and not folder.steps():
        log_defaults()
    if own_text and not is_on_tpu():  # on a TPU, the graph that generates samples would take long to compile
        level = completed(TextConfig, settings["data"])["level"]
        settings["training"] = {"sample_tokens": SAMPLE_TOKENS[level], **settings["training"]}
    return group, settings


def schedule_of_new_text(data, origin, training):
    """Returns `{name: value}` of the schedule of a new run that starts from the weights of another run.

    Without --train_steps, the size of the text decides the number of steps, and the function logs the schedule.

    Args:
        data: the corpus, see `data_arguments`.
        origin: the other run, see `origin_of`.
        training: `{name: value}` of the other run's training.
    """
    training = completed(TrainingConfig, training)
    tokens_per_step = training["train_batch_size"] * training["tgt_len"]
    steps = given_steps() or steps_for(size_of_text(data, *origin.vocabs)[-1] / tokens_per_step)
    schedule = schedule_for(steps)
    schedule["warmup_steps"] = schedule["train_steps"] // 10  # the optimizer starts without moments
    if given_steps() is None:
        as_flags = " ".join(f"--{name}={value}" for name, value in schedule.items())
        logging.getLogger("txl_tf").info("by the size of the text: %s", as_flags)
    return schedule


def settings_of_preset(data, folder, group):
    """Returns `{"model": ..., "training": ...}`, each with values by name, from a preset.

    An existing run keeps its own settings.

    Args:
        data: the corpus, see `data_arguments`.
        folder: the folder of the run.
        group: the class of the model's hyper-parameters.

    Raises:
        ParameterError: --preset has other settings than the existing run.
    """
    exists = bool(folder.steps())
    run = {"model": {}, "training": {}, **(folder.read_config() if exists else {})}
    optimizer = run["training"].get("optimizer", FLAGS.optimizer)
    preset = choose_settings(data, exists, optimizer) if FLAGS.preset or not exists else {}
    preset = accepted_settings(preset, group, run["model"] | run["training"])
    if not exists:
        return {"model": dict(preset), "training": preset}
    check_preset_of_run(preset, SIZES, run["model"] | run["training"])
    return {"model": run["model"], "training": {**preset, **run["training"]}}


def choose_settings(data, exists, optimizer):
    """Returns `{name: value}` of --preset or, without it, of the preset for this size of text and this machine.

    Logs the choice, unless the run exists already or the command line replaces all values of the preset.

    Args:
        data: the corpus, see `data_arguments`.
        exists: whether the run exists already.
        optimizer: name of the optimizer.
    """
    level, n_bytes, n_tokens = size_of_text(data)
    choice = chosen_preset(n_bytes)
    settings = preset_settings(choice.preset, level, n_tokens, batch_divisor(choice.gpus), given_steps(), optimizer)
    all_given = settings and set(settings) <= set(given(settings))
    if not exists and not all_given:
        sizes = values(SIZES, given_only=True)
        steps = settings.get("train_steps", FLAGS.train_steps) if given_steps() is None else None
        size = f"{n_bytes / 1e6:,.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:,.0f} kB"
        log_choice(choice, layer_weights(settings | sizes), steps, f"the text has {size}", layer_weights(sizes), sizes)
    return settings


def log_defaults():
    """Logs the size of the model and the number of steps that the defaults of the flags give, without a preset."""
    why = f"dataset={FLAGS.dataset}" if FLAGS.dataset else "data_dir"
    weights = layer_weights(values(SIZES)) / 1e6
    logging.getLogger("txl_tf").info(
        f"no preset with {why}, but the defaults of the flags: {weights:.1f} M parameters besides the embeddings, "
        f"{FLAGS.train_steps:,} steps; --preset=tiny is a smaller model and fewer steps"
    )


def rows_to_divide():
    """Returns the batch sizes that any number of workers must divide: with --ray_min_workers, the number may change.

    Raises:
        ParameterError: the command line does not give a batch size.
    """
    for name in ("train_batch_size", "eval_batch_size"):  # the defaults do not count: a preset may change them
        if not FLAGS[name].present:
            message = f"ray_min_workers needs {name}: the number of workers that continue must divide it"
            raise ParameterError(name, None, "given with ray_min_workers", message)
    parts = FLAGS.gradient_accumulation_steps * (FLAGS.parallel_parts or 1)
    return [FLAGS.train_batch_size // parts, FLAGS.eval_batch_size]


def main():
    from txl_tf.runs.folder import RunFolder

    folder = RunFolder(FLAGS.model_dir, "language_model")
    if FLAGS.do_train and not FLAGS.do_eval_only:
        train(folder)
    elif FLAGS.do_eval or FLAGS.do_eval_only:
        evaluate(folder)
    else:
        message = "nothing to do: --do_train and --do_eval are both False"
        raise ParameterError("do_eval", False, "True if do_train is False", message)


def train(folder):
    """Trains the run in this folder, as the flags describe it."""
    from txl_tf.runs.train import train_run

    group, settings = settings_of(folder)
    training = config_of(TrainingConfig, settings["training"])
    model = config_of(group, model_defaults(group, settings["model"]), leave_out=FROM_TEXT)
    check_model_flags(group, getattr(model, "positions", "relative"))
    if FLAGS.init_from and not training.extend_vocab:  # extend_vocab adds new rows
        new = newly_given(INITIAL, settings["model"])
        refuse(new, f"has no effect with --init_from={FLAGS.init_from}: all weights are loaded")
    if isinstance(model, DecoderConfig):
        check_used(
            (changed(["lora_alpha"]), model.lora_rank, "is for low-rank updates: give --lora_rank, too"),
            (changed(["init_range"]), model.init == "uniform", "is for --init=uniform"),
            (changed(["init_std", "proj_init_std"]), model.init == "normal", "is for --init=normal"),
        )
    final = config_of(EvaluationConfig, settings["training"])
    if not final.do_eval and not newly_given(["eval_split"], settings["training"]):
        final = dataclasses.replace(final, eval_split=EvaluationConfig.eval_split)
    train_run(
        folder,
        data=data_arguments(settings["data"]),
        model=model,
        optimizer=optimizer_config(training, settings["training"]),
        training=training,
        final=final,
        machine=config_of(MachineConfig, settings["training"]),
    )


def check_used_in_evaluation(folder, data):
    """Raises ParameterError if a flag is given that has no effect on this evaluation.

    The command of a training run with --do_eval_only is accepted. So flags about training are accepted if a flag names
    the text, as that command does. Flags with the values of the run, and flags of a flag file, are always accepted.

    Args:
        folder: the folder of the run.
        data: the corpus that the flags name, see `data_arguments`; empty if they name none.
    """
    config = folder.read_config() if folder.has_config() else {}
    recorded = {}
    for part in ("vocab", "data", "model", "training"):
        recorded |= config.get(part, {})
    recorded["init_from"] = config.get("init_from", {}).get("model_dir")

    def differing(group, *but):
        """Returns the flags of a group, except `but`, that are given with another value than that of the run."""
        flags_given = values(group, given_only=True)
        names = [name for name, value in flags_given.items() if value != recorded.get(name, FLAGS[name].default)]
        return [name for name in names if name not in but]

    text_flags = differing(TextConfig, "seed", *TEXT_FLAGS, *READING)
    training_flags = [
        *differing(TrainingConfig, *EvaluationConfig.names()),
        *differing(OptimizerConfig),
        *given(["preset"]),
    ]
    # 0 turns a rate off, as every evaluation does: commands of the original give --dropout=0.0.
    training_flags += [x for x in differing(folder.family.config) if x in TRAINING_ONLY and FLAGS[x].value]
    tgt_len_flag = [name for name in differing(EvaluationConfig) if name == "tgt_len"]
    without_text = "has no effect with --eval_path" if FLAGS.eval_path else "has no effect without --data_path"
    has_segments = not FLAGS.sliding_window or FLAGS.max_eval_batch > 0  # the batches decide how many tokens to read
    # With a text on the command line, this may be the training command with --do_eval_only: its flags are accepted.
    may_be_training = bool(data)
    rules = (
        (text_flags, data and not FLAGS.eval_path, without_text),
        (training_flags, may_be_training, "is for training: leave it out of an evaluation"),
        (changed(["lora_alpha"]), may_be_training or recorded.get("lora_rank"), "is for a run with --lora_rank"),
        (changed(["eval_split"]), may_be_training or not FLAGS.eval_path, "has no effect with --eval_path"),
        (tgt_len_flag, may_be_training or has_segments, "has no effect with --sliding_window"),
    )
    check_used(*((outside_flag_files(names), used, why) for names, used, why in rules))


def evaluate(folder):
    """Evaluates the run in this folder. Flags that are given change the run's hyper-parameters for this evaluation.

    Raises:
        ParameterError: a flag does not fit the run.
    """
    from txl_tf.runs.evaluate import evaluate_run
    from txl_tf.runs.origin import check_origin

    group = folder.family.config
    check_model_of_run(folder, MODELS)
    data = data_arguments()
    check_used((READING, data or FLAGS.eval_path, "is for a text that --data_path or --eval_path names"))
    check_used_in_evaluation(folder, data)
    if FLAGS.init_from:
        check_origin(folder, FLAGS.init_from)
    model = values(group, given_only=True) if folder.has_config() else completed(group, model_defaults(group, {}))
    check_model_flags(group, model.get("positions", "relative"))
    evaluation = values(EvaluationConfig)
    for name in ("tgt_len", "eval_batch_size", "reset_memory_at_documents"):
        if not FLAGS[name].present:
            evaluation[name] = None  # as in the run
    evaluate_run(
        folder,
        data=data,
        reading=values(READING, given_only=True),
        model={name: value for name, value in model.items() if name not in FROM_TEXT},
        evaluation=EvaluationConfig(**evaluation),
        machine=config_of(MachineConfig),
    )


if __name__ == "__main__":
    run_training(main, rows_to_divide)
