"""Pictures of runs and of what their models are made of, as PNG files.

    python tools/plot.py --kind=curves --model_dir=runs/my,runs/other --output=curves.png
    python tools/plot.py --kind=attention --model_dir=runs/my --text="once upon a time ..." --layer=3 --head=0 \
        --output=attention.png
    python tools/plot.py --kind=attention --model_dir=runs/dates --text="Sat the 21st of Nov 2026" --output=cross.png
    python tools/plot.py --kind=terms --model_dir=runs/my --text="once upon a time ..." --layer=3 --head=0 \
        --output=terms.png
    python tools/plot.py --kind=context --model_dir=runs/my --output=context.png
    python tools/plot.py --kind=scaling --figures=scaling.json --output=scaling.png
    python tools/plot.py --kind=masks --output=masks.png               (and shift, positions, wavelengths)

curves       loss of training and validation, learning rate and gradient norm, from log.csv.
attention    how much each of the last tgt_len tokens of a text attends to memory and segment (equation 6), for one
             head or, without --head, for all heads of the layer. The tokens before fill the memory. Of a run of pairs,
             what the model looks at in its source while it writes the target; or, by --attention, how the source
             attends to itself (encoder), or the target to itself (decoder).
terms        the four terms of the scores of one head of Transformer-XL, (a) to (d) of the paper's section 3.3.
context      mean nll of a text against the number of tokens the model is given before the one it predicts, and the
             relative effective context length (RECL) that follows, see `relative_gains` and `recl`: of a run against
             its own shorter contexts, or of several runs of one vocabulary as the paper's group of models. Segments
             have context_step tokens and a memory of mem_len, by default what makes as many keys as mem_len and tgt_len
             of the training did together.
scaling      the cost of a token against each argument, from `tools/benchmark.py --scaling --json=scaling.json`.
masks        which keys a query of Transformer-XL sees: without memory, with it, with same_length.
shift        how Transformer-XL moves scores by distance to their keys (`rel_shift`; paper, appendix B).
positions    the vanilla Transformer's positions: the table, and the products of its rows, which tell a distance but not
             its direction.
wavelengths  the periods of those waves, and how far apart they make any two positions.

It needs matplotlib: pip install "txl_tf[plot]".
"""

import csv
import json
import math
import os
import sys
from pathlib import Path

from absl import flags

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors come as exceptions; the rest is noise
sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.program import FLAGS, read_flags, run

KINDS = ("curves", "attention", "terms", "context", "scaling", "masks", "shift", "positions", "wavelengths")
NAMES = {"bpc": "bits per character", "ppl": "perplexity"}
HARD = (1.0, 0.5, 0.1)  # the paper's r
THRESHOLD = 0.01  # of the relative gain, the paper's
NEEDS = {**dict.fromkeys(("curves", "attention", "terms", "context"), "model_dir"), "scaling": "figures"}
TGT_LEN = {"attention": 32, "terms": 16, "masks": 5, "shift": 3}
MEM_LEN = {"masks": 4, "shift": 2}
MAX_LENGTH = 64  # of masks and shift
LOGARITHMIC = ("n_token", "tokens_before")  # arguments of the benchmark that grow by large factors

flags.DEFINE_enum("kind", "curves", KINDS, "The picture.")
flags.DEFINE_list("model_dir", None, "Folder(s) of runs, comma-separated.")
flags.DEFINE_string("output", None, "PNG file to write.")
flags.DEFINE_string("ckpt_path", None, "Checkpoint to take, rather than the latest; with a single run.")
flags.DEFINE_string("text", None, "Text of attention and terms; of an encoder-decoder, the source.")
flags.DEFINE_string("text_path", None, "UTF-8 file: that text, or the text of context; default there: the valid split.")
flags.DEFINE_enum("attention", None, ("encoder", "decoder", "cross"), "Of an encoder-decoder; default: cross.")
flags.DEFINE_integer("layer", -1, "Layer of attention and terms, from 0; -1 is the last.")
flags.DEFINE_integer("head", None, "Head, from 0; attention draws all where it is not given.")
flags.DEFINE_integer("tgt_len", None, f"Tokens of the segment that is drawn; default: {TGT_LEN}.")
flags.DEFINE_integer(
    "mem_len", None, f"Positions of memory; default: {MEM_LEN}, else the run's. For context, see there."
)
flags.DEFINE_integer("max_context", None, "Longest context; default: twice the keys that are attended to.")
flags.DEFINE_integer("context_step", 16, "Tokens from one context length to the next.")
flags.DEFINE_integer("max_tokens", 20000, "Tokens of the text to measure contexts on.")
flags.DEFINE_string("figures", None, "JSON file of tools/benchmark.py --scaling; for scaling.")
flags.DEFINE_integer("positions", 100, "Number of positions; for positions and wavelengths.", lower_bound=2)
flags.DEFINE_integer("d_model", 128, "Their width; for positions and wavelengths.", lower_bound=2)
flags.DEFINE_integer("dpi", 150, "Dots an inch.", lower_bound=20, upper_bound=600)
flags.mark_flag_as_required("output")
flags.register_multi_flags_validator(
    ["kind", "model_dir", "figures"],
    lambda given: bool(given[NEEDS[given["kind"]]]) if given["kind"] in NEEDS else True,
    "kind=scaling needs --figures; curves, attention, terms and context need --model_dir",
)

read_flags(__name__)

import numpy as np
import tensorflow as tf

from tools.drawing import Figure, FuncFormatter, NullLocator, colors, save, tidy
from tools.heads import (
    attention_of_pair,
    attention_of_text,
    draw_attention,
    draw_pair,
    draw_terms,
    terms_of_text,
    written_by,
)
from tools.ideas import draw_masks, draw_positions, draw_shift, draw_wavelengths
from txl_tf.data.pairs.parallel import START, read_lines
from txl_tf.data.text_files import read_files
from txl_tf.data.vocabulary import escape
from txl_tf.layers.positions import positional_encoding
from txl_tf.models.vanilla.translator import Translator
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import to_metric
from txl_tf.runs.same_run import check_text, check_vocab
from txl_tf.runs.setup import open_corpus

# ------------------------------------------------------------------------------------------------ training curves


def read_log(model_dir):
    """`log.csv` of a run as `{column: float array}`, NaN where it says NA.

    If a killed run repeated steps, the last row of each step counts.

    Raises:
        ValueError: there is no log.csv, or nothing in it.
    """
    path = os.path.join(model_dir, "log.csv")
    if not tf.io.gfile.exists(path):
        raise ValueError(f"model_dir {model_dir} has no curves: {path} does not exist (converted runs have none)")
    try:
        with tf.io.gfile.GFile(path) as file:
            rows = {int(row["step"]): row for row in csv.DictReader(file)}
        ordered = [rows[step] for step in sorted(rows)]
        names = ordered[0] if ordered else ()
        log = {
            name: np.array([math.nan if row[name] == "NA" else float(row[name]) for row in ordered]) for name in names
        }
    except (KeyError, TypeError, ValueError, csv.Error, tf.errors.OpError) as error:
        raise ValueError(f"{path} is not the log of a training: {type(error).__name__}: {error}") from error
    if not rows:
        raise ValueError(f"{path} has no rows: the run has not come to its first line of progress")
    return log


def draw_curves(logs):
    """Figure of `{name of a run: columns of its log}`.

    Raises:
        ValueError: one run is measured in bpc and another in ppl.
    """
    metrics = {"bpc" if "bpc" in log else "ppl" for log in logs.values()}
    if len(metrics) > 1:
        raise ValueError("model_dir has runs in bpc and in ppl, which do not fit one picture")
    (metric,) = metrics
    figure = Figure(figsize=(8, 7.5), layout="constrained")
    loss, rate, norm = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])
    for (name, log), color in zip(logs.items(), colors(len(logs)), strict=True):
        valid = ~np.isnan(log[f"val_{metric}"])
        loss.plot(log["step"], log[metric], color=color, alpha=0.6, lw=1.2, label=f"{name}: training")
        if valid.any():
            best = np.nanmin(log[f"val_{metric}"])
            label = f"{name}: validation (best {best:.4g})"
            loss.plot(log["step"][valid], log[f"val_{metric}"][valid], "o-", color=color, ms=4, lw=2, label=label)
        rate.plot(log["step"], log["learning_rate"], color=color)
        norm.plot(log["step"], log["grad_norm"], color=color)
    if metric == "ppl":
        loss.set_yscale("log")
        loss.yaxis.set_major_formatter(FuncFormatter("{:g}".format))
        loss.yaxis.set_minor_formatter(FuncFormatter("{:g}".format))
    loss.set_ylabel(NAMES[metric])
    loss.legend(frameon=False)
    rate.set_ylabel("learning rate")
    norm.set_ylabel("gradient norm")
    norm.set_ylim(bottom=0)
    norm.set_xlabel("training step")
    for axes in (loss, rate, norm):
        tidy(axes)
    return figure


# ------------------------------------------------------------------------------------------------------- context


def nll_by_context(lm, ids, step, n_context):
    """Nll of the same tokens, given ever longer contexts.

    A token is predicted from the c tokens before it and nothing else: the memory starts empty, without its zeros.
    Windows of `step * n_context` tokens start every `step` tokens, so that every token is in `n_context` of them, its
    contexts c, c + step, c + 2 * step, ... where c is 1 to `step`, each for as many tokens. Segments are as long as a
    step, so that a longer context never means fewer keys.

    Args:
        lm: `TransformerXLLM`.
        ids: int `[n]`.
        step: tokens by which a context is longer than the one before.
        n_context: number of context lengths.

    Returns:
        nll: float64 `[n_context, tokens]`, nats; columns are the tokens of the text that have all contexts.

    Raises:
        ValueError: the text is too short.
    """
    length = step * n_context
    starts = np.arange(0, len(ids) - length, step)
    if len(starts) < n_context:
        raise ValueError(f"the text must hold {2 * length} tokens or more for contexts of {length}, got {len(ids)}")
    windows = ids[starts[:, None] + np.arange(length + 1)]
    rows = []
    for batch in np.split(windows, range(64, len(windows), 64)):
        mems = [tf.zeros([len(batch), 0, lm.network.d_model], lm.compute_dtype)] * lm.network.n_layer
        columns = []
        for start in range(0, length, step):
            nll, mems = lm.score(batch[:, start : start + step], batch[:, start + 1 : start + step + 1], mems)
            columns.append(nll.numpy())
        rows.append(np.concatenate(columns, 1))
    nll = np.concatenate(rows).astype(np.float64).reshape(len(starts), n_context, step)
    # Block b of the text is context number j of the window that starts j blocks earlier.
    blocks = range(n_context - 1, len(starts))
    return np.stack([nll[[b - j for b in blocks], j].ravel() for j in range(n_context)])


def relative_gains(nll, model, hard=1.0):
    """Gain of each context length over the one before it (appendix C of the paper).

    With `l_i(c, t)` the nll of token t under model i given c tokens, and c' the next longer context:

        b(c, t)   = min over i of l_i(c, t)                        the group's best at the short context
        f_i(c,c') = mean over T of min(b(c, t), l_i(c', t))        T: the share `hard` of tokens with largest b(c, t)
        g_i(c,c') = (exp f_i(c,c) - exp f_i(c,c')) / exp f_i(c,c)  relative reduction of perplexity

    Args:
        nll: `[models, n_context, tokens]`, nats, the same tokens for all.
        model: i.
        hard: the paper's r, in (0, 1].

    Returns:
        float64 `[n_context - 1]`: g of contexts 0 to 1, 1 to 2, ...
    """
    gains = []
    for short in range(nll.shape[1] - 1):
        baseline = nll[:, short].min(0)
        chosen = np.argsort(-baseline, kind="stable")[: math.ceil(hard * len(baseline))]
        before = np.minimum(baseline, nll[model, short])[chosen].mean()
        after = np.minimum(baseline, nll[model, short + 1])[chosen].mean()
        gains.append(1 - math.exp(after - before))
    return np.array(gains)


def recl(gains, step):
    """Relative effective context length: the context after which `step` more tokens gain less than 1% perplexity.

    A group of one model is compared with its own shorter contexts. The paper's figures are of the group of all the
    models it compares: a value here compares with others of the same group, text, `step` and r alone.

    Args:
        gains: `relative_gains`.
        step: tokens from one context to the next.

    Returns:
        int, the (longest) context in tokens. The longest measured where every gain reaches the threshold: the RECL
        is then that or more.
    """
    below = np.flatnonzero(gains < THRESHOLD)
    return step * (1 + (below[0] if below.size else len(gains)))


def draw_context(nll, names, step, spans, metric):
    """Figure of nll against context, and of the gains that the RECL is read from.

    Args:
        nll: `[models, n_context, tokens]`, nats.
        names: of the models.
        step: tokens from one context to the next.
        spans: the number of keys that each model attends to.
        metric: "bpc" or "ppl".
    """
    contexts = step * (1 + np.arange(nll.shape[1]))
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, color in enumerate(colors(len(names))):
        values = [to_metric(mean, metric) for mean in nll[i].mean(1)]
        label = f"{names[i]}: {values[-1]:.4g} at {contexts[-1]}"
        left.plot(contexts, values, "o-", color=color, ms=4, label=label)
        left.axvline(spans[i], color=color, ls="--", lw=1, label=f"{names[i]}: {spans[i]} keys of attention")
        for hard, style in zip(HARD, ("-", "--", ":"), strict=True):
            gains = relative_gains(nll, i, hard)
            more = "" if (gains < THRESHOLD).any() else "at least "
            label = f"{names[i]}, hardest {hard:.0%}: RECL {more}{recl(gains, step)}"
            right.plot(contexts[:-1], 100 * gains, style, color=color, marker="o", ms=3, label=label)
    left.set_ylabel(NAMES[metric])
    left.set_title(f"the same {nll.shape[2]:,} tokens, given more and more context", fontsize=10)
    right.axhline(100 * THRESHOLD, color="black", lw=1)
    right.set_yscale("log")
    right.set_ylabel(f"gain, % of perplexity (line: {THRESHOLD:.0%})")
    right.yaxis.set_major_formatter(FuncFormatter("{:g}".format))
    right.set_title(f"what {step} tokens more of context gain", fontsize=10)
    for axes in (left, right):
        tidy(axes)
        axes.set_xlabel(f"context, tokens (from {step - 1} fewer)")
        axes.legend(frameon=False, fontsize=9)
    return figure


# ------------------------------------------------------------------------------------------------------- scaling


def read_figures(path):
    """Rows of the JSON file of `tools/benchmark.py --scaling`: list of dicts.

    Raises:
        ValueError: it has no such rows.
    """
    with open(path) as file:
        rows = [row for row in json.load(file)["rows"] if "argument" in row]
    if not rows:
        raise ValueError(f"{path} has no costs by argument: make it by tools/benchmark.py --scaling --json={path}")
    return rows


def draw_scaling(rows):
    """Figure of the cost of a token, a panel for each mode and argument, from 0: what does not depend on it is flat."""
    panels = list(dict.fromkeys((row["mode"], row["argument"]) for row in rows))
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 2.9 * height + 0.4), layout="constrained")
    grid = figure.subplots(height, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (mode, argument) in zip(grid.flat, panels, strict=False):
        for name, color in zip(names, colors(len(names)), strict=True):
            chosen = [
                row for row in rows if (row["mode"], row["argument"], row["contestant"]) == (mode, argument, name)
            ]
            values = [row["value"] for row in chosen]
            axes.plot(values, [row["microseconds_per_token"] for row in chosen], "o-", color=color, ms=4, label=name)
        tidy(axes)
        ticks = sorted({row["value"] for row in rows if (row["mode"], row["argument"]) == (mode, argument)})
        if argument in LOGARITHMIC:
            axes.set_xscale("log")
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.set_xlabel(argument)
        axes.set_title(f"{mode}: µs a token", fontsize=10)
    grid[0, 0].legend(frameon=False, fontsize=8)
    return figure


# -------------------------------------------------------------------------------------------------------- program


def names_of(model_dirs):
    """The folders' last names, or the whole paths where two are the same."""
    names = [os.path.basename(os.path.normpath(path)) for path in model_dirs]
    return names if len(set(names)) == len(names) else model_dirs


def only_one(model_dirs):
    if len(model_dirs) > 1:
        raise ValueError(f"model_dir must be one run here, got {len(model_dirs)}: {', '.join(model_dirs)}")
    return model_dirs[0]


def check_index(name, value, n, lowest=0):
    if not lowest <= value < n:
        raise ValueError(f"{name} must lie between {lowest} and {n - 1}, got {value}")


def given_text():
    if (FLAGS.text is None) == (FLAGS.text_path is None):
        raise ValueError("no text to attend to: give either text or text_path")


def attention():
    folder = RunFolder(only_one(FLAGS.model_dir))
    if folder.family.task == "encoder_decoder":
        return attention_of_run_of_pairs(folder)
    if FLAGS.attention is not None:
        raise ValueError(f"attention={FLAGS.attention} is for runs of pairs, which the run in {folder} is not")
    lm, ids, tgt_len, layer, labels = text_of_run(RunFolder(folder, "language_model"))
    probs, n_key = attention_of_text(lm, ids, tgt_len, layer)
    return draw_attention(probs, labels[-n_key:], layer, FLAGS.head)


def terms():
    folder = RunFolder(only_one(FLAGS.model_dir), "language_model")
    family = folder.family.name
    if family != "transformer_xl":
        raise ValueError(f"kind=terms is for relative positions, which family={family} in {folder} has not")
    if FLAGS.head is None:
        raise ValueError("kind=terms draws one head: give head")
    lm, ids, tgt_len, layer, labels = text_of_run(folder)
    parts, probs, n_key = terms_of_text(lm, ids, tgt_len, layer, FLAGS.head)
    return draw_terms(parts, probs, labels[-n_key:], layer, FLAGS.head, lm.network.same_length)


def text_of_run(folder):
    """Checked flags of a language model's attention: `(lm, ids, tgt_len, layer, a label for every id)`."""
    given_text()
    model = folder.read_config()["model"]
    layer = layer_and_head(model["n_layer"], model["n_head"])
    vocab = folder.load_vocab()
    text = [FLAGS.text] if FLAGS.text_path is None else read_files([FLAGS.text_path], vocab.level)
    ids = vocab.encode(text)
    tgt_len = TGT_LEN[FLAGS.kind] if FLAGS.tgt_len is None else FLAGS.tgt_len
    if not 1 <= tgt_len < len(ids) + 1:
        raise ValueError(f"tgt_len must lie between 1 and the {len(ids)} tokens of the text, got {tgt_len}")
    changes = {} if FLAGS.mem_len is None else {"mem_len": FLAGS.mem_len}
    return folder.load_model(FLAGS.ckpt_path, **changes), ids, tgt_len, layer, labels_of(vocab, ids)


def attention_of_run_of_pairs(folder):
    for name in ("tgt_len", "mem_len"):
        if FLAGS[name].value is not None:
            raise ValueError(f"{name} is for language models, and the run in {folder} learned from pairs")
    given_text()
    model = folder.read_config()["model"]
    layer = layer_and_head(model["num_layers"], model["num_heads"])
    name = "text" if FLAGS.text_path is None else FLAGS.text_path
    lines = FLAGS.text.split("\n") if FLAGS.text_path is None else [x.removesuffix("\n") for x in read_lines(name)]
    if len(lines) != 1:
        raise ValueError(f"{name} must be one line, the source, got {len(lines)}")
    vocabs = folder.load_vocabs()
    translator = Translator(folder.load_model(FLAGS.ckpt_path), *vocabs)
    source = translator.encode(lines, name)[0]
    target = written_by(translator.model, source)
    which = FLAGS.attention or "cross"
    weights = attention_of_pair(translator.model, source, target, which, layer)
    of_source, of_target = (labels_of(vocab, ids) for vocab, ids in zip(vocabs, (source, target), strict=True))
    queries = of_source if which == "encoder" else of_target
    keys = [label_of(vocabs[1].symbols[START]), *of_target[:-1]] if which == "decoder" else of_source
    return draw_pair(weights, queries, keys, which, layer, FLAGS.head)


def layer_and_head(n_layer, n_head):
    """The layer, from 0, of checked flags."""
    check_index("layer", FLAGS.layer, n_layer, lowest=-1)
    if FLAGS.head is not None:
        check_index("head", FLAGS.head, n_head)
    return FLAGS.layer % n_layer


def labels_of(vocab, ids):
    return [label_of(vocab.symbols[i]) for i in ids]


def label_of(symbol):
    return "␣" if symbol == " " else escape(symbol)


def context():
    model_dirs, step = FLAGS.model_dir, FLAGS.context_step
    if FLAGS.ckpt_path:
        only_one(model_dirs)
    folders = [RunFolder(model_dir, "language_model") for model_dir in model_dirs]
    configs = [folder.read_config() for folder in folders]
    vocab = folders[0].load_vocab()
    for folder in folders[1:]:
        difference = vocab.difference(folder.load_vocab())
        if difference:
            raise ValueError(f"model_dir {folder} has another vocabulary than {model_dirs[0]}: {difference}")
    spans = [span_of(config) for config in configs]
    longest = 2 * max(spans) if FLAGS.max_context is None else FLAGS.max_context
    if step < 1 or longest < 2 * step:
        raise ValueError(f"max_context must be two context_step or more, got {longest} and {step}")
    ids = held_out(folders[0], vocab)[: FLAGS.max_tokens]
    nll = []
    for folder, span in zip(folders, spans, strict=True):
        lm = folder.load_model(FLAGS.ckpt_path, mem_len=max(span - step, 0))
        nll.append(nll_by_context(lm, ids, step, longest // step))
    metric = "bpc" if configs[0]["data"].get("by_character", vocab.level != "word") else "ppl"
    return draw_context(np.stack(nll), names_of(model_dirs), step, spans, metric)


def span_of(config):
    """The most keys a token attends to: of `--mem_len` and a step, or of the memory and segment it was trained with."""
    if FLAGS.mem_len is not None:
        return FLAGS.mem_len + FLAGS.context_step
    return config["model"]["mem_len"] + config.get("training", {}).get("tgt_len", 0)


def held_out(folder, vocab):
    """The ids of `text_path`, or of the run's valid split."""
    if FLAGS.text_path is not None:
        return vocab.encode(read_files([FLAGS.text_path], vocab.level), name=FLAGS.text_path)
    found = open_corpus(folder.read_config()["data"])
    check_vocab(folder, [found.vocab], "give a text_path")
    check_text(folder, {"valid": found.fingerprint("valid")}, "give a text_path")
    return np.asarray(found.splits["valid"][: FLAGS.max_tokens])


def lengths():
    """`(tgt_len, mem_len)` of pictures without a run."""
    defaults = {"tgt_len": TGT_LEN, "mem_len": MEM_LEN}
    found = [
        default[FLAGS.kind] if FLAGS[name].value is None else FLAGS[name].value for name, default in defaults.items()
    ]
    for name, value, least in zip(defaults, found, (1, 0), strict=True):
        if not least <= value <= MAX_LENGTH:
            raise ValueError(f"{name} must lie between {least} and {MAX_LENGTH}, got {value}")
    return found


def curves():
    logs = [read_log(model_dir) for model_dir in FLAGS.model_dir]
    return draw_curves(dict(zip(names_of(FLAGS.model_dir), logs, strict=True)))


DRAW = {  # kind: function without arguments that returns the figure
    "curves": curves,
    "attention": attention,
    "terms": terms,
    "context": context,
    "scaling": lambda: draw_scaling(read_figures(FLAGS.figures)),
    "masks": lambda: draw_masks(*lengths()),
    "shift": lambda: draw_shift(*lengths()),
    "positions": lambda: draw_positions(positional_encoding(FLAGS.positions, FLAGS.d_model).numpy()[0]),
    "wavelengths": lambda: draw_wavelengths(FLAGS.positions, FLAGS.d_model),
}


def main():
    if Figure is None:
        sys.exit('plot.py: matplotlib is missing: pip install "txl_tf[plot]"')
    figure = DRAW[FLAGS.kind]()
    save(figure, FLAGS.output, FLAGS.dpi)
    print(f"{FLAGS.kind}: {FLAGS.output}")


if __name__ == "__main__":
    run(main)
