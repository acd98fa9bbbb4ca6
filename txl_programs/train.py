"""Trains and evaluates a language model: Transformer-XL, or with --model=transformer the vanilla Transformer.

    txl-train --flagfile=configs/quickstart.cfg
    txl-train --data_path=my.txt --level=char --model_dir=runs/my
    txl-train --data_path=more.txt --init_from=runs/my --model_dir=runs/tuned
    txl-train --data_dir=data/wikitext-103 --model_dir=runs/wt103 ...           (see txl-prepare-data)
    txl-train --model_dir=runs/my --do_train=False --do_eval --eval_path=other.txt

Flags that the original program has keep its names, defaults and meaning. Training continues from the latest checkpoint
of the folder. Evaluation takes the model from the run's config.json; flags such as --mem_len, --clamp_len and
--same_length override it.

  data          data_dir, or dataset with data_path, level, valid_fraction, min_freq, max_size, lower_case, cutoffs
  run           model_dir init_from extend_vocab do_train do_eval eval_split eval_path eval_ckpt_path token_nll ...
  training      learning_rate warmup_steps min_lr_ratio clip optimizer train_steps train_batch_size save_steps ...
  model         preset model n_layer d_model d_embed n_head d_head d_inner dropout dropatt tgt_len mem_len untie_r ...
  machine       strategy tpu mixed_precision matmul_precision jit_compile steps_per_execution recompute ...
  cluster       ray_workers ray_address ray_cpus ray_gpus ray_min_workers ray_restarts       (docs/scale.md)
"""

import logging
import os

from absl import flags

from txl_programs.program import (
    FLAGS,
    changed,
    check_used,
    completed,
    config_of,
    define_flags,
    given,
    optimizer_arguments,
    origin_of,
    run_training,
    values,
)
from txl_tf.config import (
    SCHEMES,
    EvaluationConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    TextConfig,
    TrainingClusterConfig,
    TrainingConfig,
    TransformerLMConfig,
)
from txl_tf.config.presets import (
    BYTES,
    PRESETS,
    SIZES,
    choose_preset,
    layer_weights,
    preset_settings,
    schedule_for,
    steps_for,
)

OF_DISTANCES, OF_PLACES = ("clamp_len", "untie_r"), ("context_len", "pos_embed")  # flags of some kinds of positions
MODELS = {"transformer_xl": ModelConfig, "transformer": TransformerLMConfig}

flags.DEFINE_string("model_dir", None, "Folder of the run: checkpoints, vocabulary, log.csv, curves. Required.")
flags.DEFINE_string("data_dir", None, "Folder of a corpus that txl-prepare-data prepared.")
flags.DEFINE_string("corpus_info_path", None, "The corpus-info.json of a prepared corpus, if it is not in data_dir.")
flags.DEFINE_enum("model", "transformer_xl", MODELS, "Kind of model: transformer has absolute positions, no memory.")
flags.DEFINE_enum("preset", None, PRESETS, "Size and recipe. Default for your own text: by its size and the machine.")
flags.DEFINE_bool("do_train", True, "Train.")
flags.DEFINE_bool("do_eval_only", False, "Evaluate without training, as --do_train=False --do_eval.")
define_flags(TextConfig, leave_out="num_shuffle seed")
define_flags(TrainingConfig)
define_flags(EvaluationConfig)
define_flags(OptimizerConfig)
define_flags(ModelConfig, leave_out="n_token reset_token")
define_flags(TransformerLMConfig, leave_out="n_token")
define_flags(MachineConfig)
define_flags(TrainingClusterConfig)

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


def data_arguments(instead=()):
    """The corpus that the flags name: `data_dir` alone, or the arguments of `build_corpus`; empty if they name none.

    `instead` has values of flags that are not given.
    """
    text = completed(TextConfig, dict(instead))
    text.pop("seed", None)  # that of the weights
    folder = os.path.dirname(FLAGS.corpus_info_path or "") or FLAGS.data_dir
    if folder:
        of_text = [f"--{name}" for name in given(text)]
        if of_text:
            raise ValueError(f"data_dir {folder} is a prepared corpus: leave out {', '.join(of_text)}")
        return {"data_dir": folder}
    if not (FLAGS.dataset or FLAGS.data_path):
        return {}
    return {**text, "dataset": FLAGS.dataset or "text"}


def model_arguments(group, given_only=False, instead=()):
    """`{hyper-parameter: value}` of the kind of model whose `group` it is, but for what comes from the text.

    `instead` has values of flags that are not given.
    """
    instead = dict(instead)
    if FLAGS.positions != "relative" and "positions" not in instead:  # a preset, which is for relative positions
        refused = getattr(SCHEMES[FLAGS.positions], "refused", OF_DISTANCES)  # no class yet of the library's
        instead = {name: value for name, value in instead.items() if name not in refused}
    found = values(group, given_only) if given_only else completed(group, instead)
    absolute = group is TransformerLMConfig
    if absolute and FLAGS["positions"].present:
        raise ValueError(
            "positions is for --model=transformer_xl: --model=transformer takes --pos_embed=sin or learned"
        )
    of_places = OF_PLACES if found.get("positions", "relative") == "relative" else ["pos_embed"]
    refused = changed(OF_DISTANCES) if absolute else given(of_places)
    if refused:
        what, kind = ("distances", "transformer") if absolute else ("places in a segment", "transformer_xl")
        raise ValueError(f"{refused[0]} is about {what}, which --model={kind} does not have: leave it out")
    if absolute and not FLAGS["mem_len"].present:  # whose default is Transformer-XL's
        found = {name: value for name, value in found.items() if name != "mem_len"}
        found |= {name: value for name, value in instead.items() if name == "mem_len"}
    return {name: value for name, value in found.items() if name != "cutoffs"}


def size_of_text(data):
    """`(level, bytes, tokens)` of the text that `data_arguments` name; bytes as they are on disk, tokens about."""
    from txl_tf.data.inputs import has_ending
    from txl_tf.data.text.corpus import load_corpus
    from txl_tf.data.text.datasets import check_files, make_recipe
    from txl_tf.data.text.prepared_folder import size_of

    if data.get("data_dir"):
        corpus = load_corpus(data["data_dir"])
        level, n_tokens = corpus.vocab.level, len(corpus.splits["train"])
        return level, n_tokens * BYTES[level], n_tokens
    recipe = make_recipe(TextConfig(**data))
    check_files(recipe)
    level = "char" if data["dataset"] in ("enwik8", "text8") else recipe.vocab_options["level"]
    n_bytes = sum(size_of(path) * (3 if has_ending(path, ".gz", ".zip") else 1) for path in recipe.files["train"])
    return level, n_bytes, n_bytes / BYTES[level]


def settings_of(folder):
    """The group of the model; and values for flags that are not given, by group: of a run to start from, or a preset.

    A run that is there keeps its own.
    """
    origin, settings = origin_of(folder, "language_model")
    group = origin.family.config if origin and not FLAGS["model"].present else MODELS[FLAGS.model]
    if FLAGS.preset and origin:
        raise ValueError(f"preset must be left out with init_from={FLAGS.init_from}, whose model is taken")
    data = data_arguments(settings["data"])
    own_text = data.get("dataset") == "text"
    if origin and not origin.goes_on:
        rows, length = (completed(TrainingConfig, settings["training"])[n] for n in ("train_batch_size", "tgt_len"))
        schedule = schedule_for(given_steps() or steps_for(size_of_text(data)[-1] / (rows * length)))
        schedule["warmup_steps"] = schedule["train_steps"] // 10
        settings["training"] |= schedule
        if given_steps() is None:
            chosen = " ".join(f"--{name}={value}" for name, value in schedule.items())
            logging.getLogger("txl_tf").info("by the size of the text: %s", chosen)
    elif not origin and data and (FLAGS.preset or own_text):
        steps = folder.steps()
        chosen = choose_settings(data, bool(steps)) if FLAGS.preset or not steps else {}
        kept = {"model": {}, "training": {}, **(folder.read_config() if steps else {})}
        sizes = SIZES if steps else chosen
        settings["model"] = {**kept["model"], **{name: chosen[name] for name in sizes if name in chosen}}
        settings["training"] = {**chosen, **kept["training"]}
    elif not origin and data and given_steps() is None and not folder.steps():
        say_defaults()
    if group is TransformerLMConfig and not origin:
        settings["model"].pop("mem_len", None)
    return group, settings


def given_steps():
    """`train_steps` of the command line, or `None`."""
    return FLAGS.train_steps if FLAGS["train_steps"].present else None


def choose_settings(data, is_there):
    """The values of --preset, or of that which suits text and machine; says which, unless a run `is_there`."""
    import tensorflow as tf

    level, n_bytes, n_tokens = size_of_text(data)
    n_gpus, n_cores = len(tf.config.list_physical_devices("GPU")) + (FLAGS.strategy == "tpu"), os.cpu_count()
    preset = FLAGS.preset or choose_preset(n_bytes, n_gpus, n_cores)
    replicas = FLAGS.logical_cpus or max(n_gpus, 1)
    found = preset_settings(preset, level, n_tokens, 1 if FLAGS.strategy == "one" else replicas)
    machine = "there is a GPU or a TPU" if n_gpus else f"there is no GPU, but {n_cores} cores"
    size = f"{n_bytes / 1e6:,.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:,.0f} kB"
    why = "" if FLAGS.preset else f", because the text has {size} and {machine}; --preset=base for {{base}}"
    if not is_there and (not found or set(found) - set(given(found))):  # else all of it is given
        sizes = values(" ".join(SIZES), given_only=True)
        weights, base = (f"{layer_weights(some | sizes) / 1e6:.1f} M parameters" for some in (found, {}))
        says = [f"preset {preset}: {weights} besides the embeddings"]
        if given_steps() is None:
            says.append(f"{found.get('train_steps', FLAGS.train_steps):,} steps")
        kept = ", ".join(f"{name}={value}" for name, value in sizes.items())
        kept = f"; {kept} as given, all else as in the preset" if kept else ""
        logging.getLogger("txl_tf").info(", ".join(says) + why.format(base=base) + kept)
    return found


def say_defaults():
    """Says how much the defaults of the flags are, which a text takes that gets no preset by itself."""
    why = f"dataset={FLAGS.dataset}" if FLAGS.dataset else "data_dir"
    weights = layer_weights(values(" ".join(SIZES))) / 1e6
    logging.getLogger("txl_tf").info(
        f"no preset with {why}, but the defaults of the flags: {weights:.1f} M parameters besides the embeddings, "
        f"{FLAGS.train_steps:,} steps; --preset=tiny is a smaller model and fewer steps"
    )


def rows_to_divide():
    """Of a batch, what the workers that are left with --ray_min_workers must divide."""
    for name in ("train_batch_size", "eval_batch_size"):  # presets and runs to start from have others
        if not FLAGS[name].present:
            raise ValueError(f"ray_min_workers needs {name}: as many workers go on as divide it")
    return [FLAGS.train_batch_size // FLAGS.gradient_accumulation_steps, FLAGS.eval_batch_size]


def main():
    from txl_tf.runs.evaluate import evaluate_run
    from txl_tf.runs.folder import RunFolder
    from txl_tf.runs.train import train_run

    folder, machine = RunFolder(FLAGS.model_dir, "language_model"), config_of(MachineConfig)
    evaluation = values(EvaluationConfig)
    if FLAGS.do_train and not FLAGS.do_eval_only:
        group, settings = settings_of(folder)
        training = config_of(TrainingConfig, settings["training"])
        train_run(
            folder,
            data=data_arguments(settings["data"]),
            model=group(**model_arguments(group, instead=settings["model"])),
            optimizer=OptimizerConfig(**optimizer_arguments(OptimizerConfig, training, settings["training"])),
            training=training,
            final=config_of(EvaluationConfig, settings["training"]),
            machine=machine,
        )
    elif FLAGS.do_eval or FLAGS.do_eval_only:
        of_the_run = ("tgt_len", "eval_batch_size", "reset_memory_at_documents")
        of_the_run = [name for name in of_the_run if not FLAGS[name].present]
        group = folder.family.config
        if FLAGS["model"].present and MODELS[FLAGS.model] is not group:
            raise ValueError(f"model must be {folder.family.name}, as in model_dir {folder}, got {FLAGS.model}")
        data, of_rows = data_arguments(), "text_field skip_bad_lines"
        check_used((of_rows, data or FLAGS.eval_path, "is for a text that --data_path or --eval_path names"))
        evaluate_run(
            folder,
            data=data,
            reading=values(of_rows, given_only=True),
            model=model_arguments(group, given_only=folder.has_config()),
            evaluation=EvaluationConfig(**{**evaluation, **dict.fromkeys(of_the_run)}),
            machine=machine,
        )
    else:
        raise ValueError("nothing to do: --do_train and --do_eval are both False")


if __name__ == "__main__":
    run_training(main, rows_to_divide)
