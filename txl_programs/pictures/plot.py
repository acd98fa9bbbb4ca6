"""Pictures of runs and of what their models are made of, as PNG files.

    txl-plot --kind=curves --model_dir=runs/my,runs/other --output=curves.png
    txl-plot --kind=attention --model_dir=runs/my --text="once upon a time ..." --layer=3 --head=0 \\
        --output=attention.png
    txl-plot --kind=attention --model_dir=runs/dates --text="Sat the 21st of Nov 2026" --output=cross.png
    txl-plot --kind=terms --model_dir=runs/my --text="once upon a time ..." --layer=3 --head=0 \\
        --output=terms.png
    txl-plot --kind=memory --model_dir=runs/my --output=memory.png              (and context)
    txl-plot --kind=memory --model_dir=runs/my --text="once upon a time ..." --output=along.png
    txl-plot --kind=scaling --figures=scaling.json --output=scaling.png
    txl-plot --kind=masks --output=masks.png               (and shift, positions, wavelengths)

curves       loss of training and validation, learning rate and gradient norm, from log.csv.
attention    how much each of the last tgt_len tokens of a text attends to memory and segment (equation 6), for one
             head or, without --head, for all heads of the layer. The tokens before fill the memory. Of a run of pairs,
             what the model looks at in its source while it writes the target; or, by --attention, how the source
             attends to itself (encoder), or the target to itself (decoder).
terms        the four terms of the scores of one head of Transformer-XL, (a) to (d) of the paper's section 3.3.
memory       what the memory is worth: mean nll of a text by the place in its segment, with memory and without. With
             --text, nll along that text with none, half and all of the memory, token by token.
context      mean nll of a text against the number of tokens the model is given before the one it predicts; what more of
             them save; and the paper's gain, which takes the better of two contexts for every token, with the relative
             effective context length (RECL) that follows, see `relative_gains` and `recl`: of a run against
             its own shorter contexts, or of several runs of one vocabulary as the paper's group of models. Segments
             have context_step tokens and a memory of mem_len, by default what makes as many keys as mem_len and tgt_len
             of the training did together.
scaling      the cost of a token against each argument, from `tools/benchmark.py --scaling --json=scaling.json`.
masks        which keys a query of Transformer-XL sees: without memory, with it, with same_length.
shift        how Transformer-XL moves scores by distance to their keys (`rel_shift`; paper, appendix B).
positions    the vanilla Transformer's positions: the table, and the products of its rows, which tell a distance but not
             its direction.
wavelengths  the periods of those waves, and how far apart they make any two positions.

It needs matplotlib: in a clone, pip install -e ".[plot]".
"""

from absl import flags

from txl_programs.program import CKPT_HELP, FLAGS, check_used, load_model, names_of, read_flags, run

OF_RUNS = ("curves", "attention", "terms", "memory", "context")
KINDS = (*OF_RUNS, "scaling", "masks", "shift", "positions", "wavelengths")
NEEDS = {**dict.fromkeys(OF_RUNS, "model_dir"), "scaling": "figures"}
_ATTENTION = "model_dir ckpt_path text text_path layer head tgt_len mem_len font"
USES = {  # kind: flags that it uses, besides those of all kinds
    "curves": "model_dir",
    "attention": f"{_ATTENTION} attention",
    "terms": _ATTENTION,
    "memory": "model_dir ckpt_path text text_path tgt_len mem_len max_tokens font",
    "context": "model_dir ckpt_path text_path mem_len max_context context_step max_tokens",
    "scaling": "figures",
    **dict.fromkeys(("masks", "shift"), "tgt_len mem_len"),
    **dict.fromkeys(("positions", "wavelengths"), "positions d_model"),
}
TGT_LEN = {"attention": 32, "terms": 16, "masks": 5, "shift": 3}
MEM_LEN = {"masks": 4, "shift": 2}
MAX_LENGTH = 64  # of masks and shift
MOST_ALONG = 400  # tokens of a text whose memory is drawn token by token

flags.DEFINE_enum("kind", "curves", KINDS, "The picture.")
flags.DEFINE_list("model_dir", None, "Folder(s) of runs, comma-separated.")
flags.DEFINE_string("output", None, "PNG file to write.")
flags.DEFINE_string("ckpt_path", None, f"{CKPT_HELP} With a single run.")
flags.DEFINE_string("text", None, "Text of attention, terms and memory; of an encoder-decoder, the source.")
flags.DEFINE_string(
    "text_path", None, "UTF-8 file: that text, or the text of memory and context; default there: the valid split."
)
flags.DEFINE_enum("attention", None, ("encoder", "decoder", "cross"), "Of an encoder-decoder; default: cross.")
flags.DEFINE_integer("layer", -1, "Layer of attention and terms, from 0; -1 is the last.")
flags.DEFINE_integer("head", None, "Head, from 0; attention draws all where it is not given.")
flags.DEFINE_integer(
    "tgt_len", None, f"Tokens of a segment; default: {TGT_LEN}, or of a shorter text all; for memory the training's."
)
flags.DEFINE_integer(
    "mem_len", None, f"Positions of memory; default: {MEM_LEN}, else the run's. For context, see there."
)
flags.DEFINE_integer("max_context", None, "Longest context; default: twice the keys that are attended to.")
flags.DEFINE_integer("context_step", 16, "Tokens from one context length to the next.")
flags.DEFINE_integer("max_tokens", 20000, "Most tokens of the text of memory and context.")
flags.DEFINE_string("figures", None, "JSON file of tools/benchmark.py --scaling; for scaling.")
flags.DEFINE_integer("positions", 100, "Number of positions; for positions and wavelengths.", lower_bound=2)
flags.DEFINE_integer("d_model", 128, "Their width; for positions and wavelengths.", lower_bound=2)
flags.DEFINE_string("font", None, "File of a font for the labels of attention, terms and, with --text, memory.")
flags.DEFINE_integer("dpi", 150, "Dots an inch.", lower_bound=20, upper_bound=600)
flags.mark_flag_as_required("output")
flags.register_multi_flags_validator(
    ["kind", "model_dir", "figures"],
    lambda given: bool(given[NEEDS[given["kind"]]]) if given["kind"] in NEEDS else True,
    "kind=scaling needs --figures; curves, attention, terms, memory and context need --model_dir",
)

read_flags(__name__)

import numpy as np

from txl_programs.pictures.context import (
    draw_context,
    draw_memory,
    draw_memory_along,
    nll_by_context,
    nll_by_position,
)
from txl_programs.pictures.curves import draw_curves, read_log
from txl_programs.pictures.drawing import MISSING, Figure, save, use_font
from txl_programs.pictures.heads import (
    attention_of_pair,
    attention_of_text,
    draw_attention,
    draw_pair,
    draw_terms,
    label_of,
    terms_of_text,
    written_by,
)
from txl_programs.pictures.ideas import draw_masks, draw_positions, draw_shift, draw_wavelengths
from txl_programs.pictures.scaling import draw_scaling, read_figures
from txl_tf.data.lines import encoded
from txl_tf.data.pairs.parallel import START_ID, read_lines, without_ends
from txl_tf.data.text.datasets import is_by_character_in
from txl_tf.files import check_writable
from txl_tf.language.reading import nll_by_memory
from txl_tf.nn.positions import positional_encoding
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import metric_of
from txl_tf.runs.same_run import check_text, check_vocab
from txl_tf.runs.setup import corpus_of, encode_text
from txl_tf.vanilla.translator import Translator


def only_one(model_dirs):
    if len(model_dirs) > 1:
        raise ValueError(f"model_dir must be one run here, got {len(model_dirs)}: {', '.join(model_dirs)}")
    return model_dirs[0]


def check_index(name, value, n, lowest=0):
    if not lowest <= value < n:
        raise ValueError(f"{name} must lie between {lowest} and {n - 1}, got {value}")


def check_kind():
    """Refuses flags that the kind does not use."""
    for name in " ".join(USES.values()).split():
        kinds = [kind for kind, used in USES.items() if name in used.split()]
        check_used((name, FLAGS.kind in kinds, f"is for --kind={', '.join(kinds)}, got --kind={FLAGS.kind}"))


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
    return draw_attention(probs, labels[-n_key:], layer, FLAGS.head, lm.network.same_length)


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
    config = folder.read_config()
    layer = layer_and_head(config["model"]["n_layer"], config["model"]["n_head"])
    vocab = folder.load_vocab()
    given = FLAGS.text_path is not None
    ids = encode_text(FLAGS.text_path, vocab, config["data"])[0] if given else vocab.encode(FLAGS.text)
    tgt_len = min(TGT_LEN[FLAGS.kind], len(ids)) if FLAGS.tgt_len is None else FLAGS.tgt_len
    if not 1 <= tgt_len < len(ids) + 1:
        raise ValueError(f"tgt_len must lie between 1 and the {len(ids)} tokens of the text, got {tgt_len}")
    changes = {} if FLAGS.mem_len is None else {"mem_len": FLAGS.mem_len}
    return load_model(folder, **changes), ids, tgt_len, layer, labels_of(vocab, ids)


def attention_of_run_of_pairs(folder):
    for name in ("tgt_len", "mem_len"):
        if FLAGS[name].value is not None:
            raise ValueError(f"{name} is for language models, and the run in {folder} learned from pairs")
    given_text()
    model = folder.read_config()["model"]
    layer = layer_and_head(model["num_layers"], model["num_heads"])
    name = "text" if FLAGS.text_path is None else FLAGS.text_path
    lines = FLAGS.text.split("\n") if FLAGS.text_path is None else without_ends(read_lines(name))
    if len(lines) != 1:
        raise ValueError(f"{name} must be one line, the source, got {len(lines)}")
    vocabs = folder.load_vocabs()
    translator = Translator(load_model(folder), *vocabs)
    (source,) = encoded(lines, translator.encode, name)
    target = written_by(translator.model, source, translator.never)
    which = FLAGS.attention or "cross"
    weights = attention_of_pair(translator.model, source, target, which, layer)
    of_source, of_target = (labels_of(vocab, ids) for vocab, ids in zip(vocabs, (source, target), strict=True))
    queries = of_source if which == "encoder" else of_target
    keys = [label_of(vocabs[1].symbols[START_ID]), *of_target[:-1]] if which == "decoder" else of_source
    return draw_pair(weights, queries, keys, which, layer, FLAGS.head)


def layer_and_head(n_layer, n_head):
    """The layer, from 0, of checked flags."""
    check_index("layer", FLAGS.layer, n_layer, lowest=-1)
    if FLAGS.head is not None:
        check_index("head", FLAGS.head, n_head)
    return FLAGS.layer % n_layer


def labels_of(vocab, ids):
    labels = [label_of(vocab.symbols[i]) for i in ids]
    use_font(FLAGS.font, "".join(labels))
    return labels


def memory():
    folder = RunFolder(only_one(FLAGS.model_dir), "language_model")
    config, vocab = folder.read_config(), folder.load_vocab()
    changes = {} if FLAGS.mem_len is None else {"mem_len": FLAGS.mem_len}
    mem_len = {**config["model"], **changes}["mem_len"]
    tgt_len = FLAGS.tgt_len or config.get("training", {}).get("tgt_len")
    if mem_len < 1:
        raise ValueError(f"kind=memory needs a model with memory, got mem_len={mem_len} in {folder}")
    if tgt_len is None or tgt_len < 1:
        raise ValueError(f"tgt_len must be 1 or more, got {tgt_len}: the run in {folder} does not say what it was")
    if FLAGS.text is not None:
        return memory_along(folder, vocab, mem_len, tgt_len, changes)
    ids = held_out(folder, vocab)[: FLAGS.max_tokens]
    nll = nll_by_position(load_model(folder, **changes), ids, tgt_len)
    return draw_memory(nll, mem_len, metric_of(is_by_character_in(config["data"], vocab)))


def memory_along(folder, vocab, mem_len, tgt_len, changes):
    """The picture of one short text, token by token."""
    if FLAGS.text_path is not None:
        raise ValueError("text and text_path exclude each other")
    ids, kept = vocab.encode(FLAGS.text), (0, mem_len // 2, mem_len)
    if not 2 <= len(ids) <= MOST_ALONG:
        raise ValueError(f"text must have 2 to {MOST_ALONG} tokens for kind=memory, got {len(ids):,}")
    lm, labels = load_model(folder, **changes), labels_of(vocab, ids)
    nll = np.concatenate([some for _, some in nll_by_memory(lm, ids, tgt_len, kept)], 1)
    return draw_memory_along(nll, labels, kept, tgt_len)


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
        lm = load_model(folder, mem_len=max(span - step, 0))
        nll.append(nll_by_context(lm, ids, step, longest // step))
    metric = metric_of(is_by_character_in(configs[0]["data"], vocab))
    return draw_context(np.stack(nll), names_of(model_dirs), step, spans, metric)


def span_of(config):
    """The most keys a token attends to: of `--mem_len` and a step, or of the memory and segment it was trained with."""
    if FLAGS.mem_len is not None:
        return FLAGS.mem_len + FLAGS.context_step
    return config["model"]["mem_len"] + config.get("training", {}).get("tgt_len", 0)


def held_out(folder, vocab):
    """The ids of `text_path`, or of the run's valid split."""
    if FLAGS.text_path is not None:
        return encode_text(FLAGS.text_path, vocab, folder.read_config()["data"])[0]
    found = corpus_of(folder)
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
    "memory": memory,
    "context": context,
    "scaling": lambda: draw_scaling(read_figures(FLAGS.figures)),
    "masks": lambda: draw_masks(*lengths()),
    "shift": lambda: draw_shift(*lengths()),
    "positions": lambda: draw_positions(positional_encoding(FLAGS.positions, FLAGS.d_model).numpy()[0]),
    "wavelengths": lambda: draw_wavelengths(FLAGS.positions, FLAGS.d_model),
}


def main():
    if Figure is None:
        raise ValueError(MISSING)
    check_kind()
    check_writable(FLAGS.output)
    figure = DRAW[FLAGS.kind]()
    save(figure, FLAGS.output, FLAGS.dpi)
    print(f"{FLAGS.kind}: {FLAGS.output}")


if __name__ == "__main__":
    run(main)
