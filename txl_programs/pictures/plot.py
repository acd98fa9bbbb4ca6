"""Draws pictures of runs and of the parts of their models, as PNG files.

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

curves       training and validation loss, learning rate and gradient norm, from log.csv.
attention    attention from each of the last tgt_len tokens of a text to memory and segment (equation 6), for one head
             or, without --head, for all heads of the layer. Earlier tokens fill the memory. For an encoder-decoder: the
             attention to the source while the model generates the target (--attention=cross), or the self-attention of
             the source (encoder) or the target (decoder).
terms        the four terms of the attention scores of one head of Transformer-XL, (a) to (d) in section 3.3 of the
             paper.
memory       the benefit of the memory: mean nll of a text by position in the segment, with and without memory. With
             --text: nll of every token of that text with no memory, half of it, and all of it.
context      mean nll of a text against the number of tokens that the model sees before the one it predicts; the gain
             from more context; and the paper's gain, which takes the better of two contexts for every token, with the
             relative effective context length (RECL), see `relative_gains` and `recl`. One run is compared with its own
             shorter contexts; several runs with one vocabulary form the paper's group of models. Segments have
             context_step tokens. The default memory is so long that a token sees as many keys as in training, mem_len +
             tgt_len.
scaling      the cost of a token against each argument, from `tools/benchmark.py --scaling --json=scaling.json`.
masks        the keys that a query of Transformer-XL sees: without memory, with memory, with same_length.
shift        how Transformer-XL moves scores from distances to keys (`rel_shift`; appendix B of the paper).
positions    the positions of the vanilla Transformer: the table, and the products of its rows, which show the distance
             but not its direction.
wavelengths  the wavelengths of these sinusoids, and the similarity of any two positions.

It needs matplotlib: pip install "txl_tf[plot]".
"""

from absl import flags

from txl_programs.flag_values import CKPT_HELP, FLAGS, check_not_both, check_used, unused
from txl_programs.opening import load_model, names_of
from txl_programs.program import read_flags, run

OF_RUNS = ("curves", "attention", "terms", "memory", "context")
KINDS = (*OF_RUNS, "scaling", "masks", "shift", "positions", "wavelengths")
# Kind -> the flag that it needs.
NEEDS = {**dict.fromkeys(OF_RUNS, "model_dir"), "scaling": "figures"}
_ATTENTION = ("model_dir", "ckpt_path", "text", "text_path", "layer", "head", "tgt_len", "mem_len", "font")
USES = {  # kind -> the flags that it uses, besides those that all kinds use
    "curves": ("model_dir",),
    "attention": (*_ATTENTION, "attention"),
    "terms": _ATTENTION,
    "memory": ("model_dir", "ckpt_path", "text", "text_path", "tgt_len", "mem_len", "max_tokens", "font"),
    "context": ("model_dir", "ckpt_path", "text_path", "mem_len", "max_context", "context_step", "max_tokens"),
    "scaling": ("figures",),
    "masks": ("tgt_len", "mem_len"),
    "shift": ("tgt_len", "mem_len"),
    "positions": ("positions", "d_model"),
    "wavelengths": ("positions", "d_model"),
}
# Kind -> the default of --tgt_len and of --mem_len, if it differs from that of the run.
TGT_LEN = {"attention": 32, "terms": 16, "masks": 5, "shift": 3}
MEM_LEN = {"masks": 4, "shift": 2}
MAX_LENGTH = 64  # largest tgt_len and mem_len for masks and shift
MOST_ALONG = 400  # most tokens of --text for kind=memory

flags.DEFINE_enum("kind", "curves", KINDS, "The picture.")
flags.DEFINE_list("model_dir", None, "Folders of runs, separated by commas.")
flags.DEFINE_string("output", None, "Picture to write: a .png, .pdf or .svg file.")
flags.DEFINE_string("ckpt_path", None, f"{CKPT_HELP} For a single run.")
flags.DEFINE_string("text", None, "Text for attention, terms and memory. For an encoder-decoder: the source.")
flags.DEFINE_string(
    "text_path",
    None,
    "UTF-8 file with this text, or with the text for memory and context. Default for these two: the valid split.",
)
flags.DEFINE_enum("attention", None, ("encoder", "decoder", "cross"), "For an encoder-decoder. Default: cross.")
flags.DEFINE_integer("layer", -1, "Layer for attention and terms, from 0; -1 is the last.")
flags.DEFINE_integer("head", None, "Head, from 0. Default for attention: all heads.")
flags.DEFINE_integer(
    "tgt_len",
    None,
    f"Tokens of a segment. Default: {TGT_LEN}, or all tokens of a shorter text; for memory, as in training.",
)
flags.DEFINE_integer(
    "mem_len",
    None,
    f"Length of the memory in positions. Default: {MEM_LEN}, else as in the run. For context, see above.",
)
flags.DEFINE_integer(
    "max_context", None, "Longest context in tokens. Default: twice the number of keys that a token sees."
)
flags.DEFINE_integer("context_step", 16, "Tokens from one context length to the next.")
flags.DEFINE_integer(
    "max_tokens", 20000, "Most tokens of the text for context and, without --text, memory.", lower_bound=1
)
flags.DEFINE_string("figures", None, "For scaling: JSON file of tools/benchmark.py --scaling.")
flags.DEFINE_integer("positions", 100, "For positions and wavelengths: number of positions.", lower_bound=2)
flags.DEFINE_integer("d_model", 128, "For positions and wavelengths: width of a position.", lower_bound=2)
flags.DEFINE_string("font", None, "Font file for the labels of attention, terms and, with --text, memory.")
flags.DEFINE_integer("dpi", 150, "Dots per inch.", lower_bound=20, upper_bound=600)
flags.mark_flag_as_required("output")
flags.register_multi_flags_validator(
    ["kind", "model_dir", "figures"],
    lambda given: bool(given[NEEDS[given["kind"]]]) if given["kind"] in NEEDS else True,
    "kind=scaling needs --figures; curves, attention, terms, memory and context need --model_dir",
)

read_flags(__name__)

import numpy as np

from txl_config.errors import ParameterError
from txl_programs.pictures.context import (
    draw_context,
    draw_memory,
    draw_memory_along,
    nll_by_context,
    nll_by_position,
)
from txl_programs.pictures.curves import draw_curves, read_log
from txl_programs.pictures.drawing import check_matplotlib, check_picture, save, use_font
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
from txl_tf.config.checks import check_integer
from txl_tf.data.lines import encoded
from txl_tf.data.pairs.parallel import START_ID, read_lines, without_ends
from txl_tf.data.text.datasets import is_by_character_in
from txl_tf.language.reading import nll_by_memory
from txl_tf.nn.positions import positional_encoding
from txl_tf.runs.folder import RunFolder
from txl_tf.runs.metrics import metric_of
from txl_tf.runs.same_run import check_text, check_vocab
from txl_tf.runs.setup import encode_text, open_corpus_of_run
from txl_tf.vanilla.translator import Translator


def only_one(model_dirs):
    """Returns the only run of --model_dir. Raises ParameterError if there are several."""
    if len(model_dirs) > 1:
        message = f"model_dir must be only one run, got {len(model_dirs)}: {', '.join(model_dirs)}"
        raise ParameterError("model_dir", model_dirs, "one run", message)
    return model_dirs[0]


def check_index(name, value, n, lowest=0):
    """Raises ParameterError unless the value of the flag `name` is at least `lowest` and less than n."""
    if not lowest <= value < n:
        allowed = f"lie between {lowest} and {n - 1}"
        raise ParameterError(name, value, allowed, f"{name} must {allowed}, got {value}")


def check_kind():
    """Raises ParameterError if a flag is given that the kind of picture does not use."""
    for name in dict.fromkeys(name for used in USES.values() for name in used):
        kinds = [kind for kind, used in USES.items() if name in used]
        check_used(((name,), FLAGS.kind in kinds, f"is for --kind={', '.join(kinds)}, got --kind={FLAGS.kind}"))


def check_text_given():
    """Raises ParameterError unless exactly one of --text and --text_path is given."""
    if (FLAGS.text is None) == (FLAGS.text_path is None):
        raise ParameterError("text", FLAGS.text, "given, or text_path", "give either --text or --text_path")


def attention():
    """Returns the figure for kind=attention: of a layer of a language model, or of an encoder-decoder."""
    folder = RunFolder(only_one(FLAGS.model_dir))
    if folder.family.task == "encoder_decoder":
        return encoder_decoder_attention(folder)
    if folder.family.task == "tagger":
        message = f"kind=attention is for language models and encoder-decoders, but {folder} contains "
        message += f"{folder.family.described}: use txl-plot-ner"
        raise ParameterError("kind", "attention", "that of txl-plot-ner for a tagger", message)
    if FLAGS.attention is not None:
        raise unused("attention", f"is for encoder-decoders, and {folder} contains {folder.family.described}")
    lm, ids, tgt_len, layer, labels = text_of_run(RunFolder(folder, "language_model"))
    probs, n_key = attention_of_text(lm, ids, tgt_len, layer)
    return draw_attention(probs, labels[-n_key:], layer, FLAGS.head, lm.network.same_length)


def terms():
    """Returns the figure for kind=terms: the four terms of a head's scores."""
    folder = RunFolder(only_one(FLAGS.model_dir), "language_model")
    family = folder.family.name
    if family != "transformer_xl":
        message = f"kind=terms is for relative positions, which the family={family} in {folder} does not have"
        raise ParameterError("kind", "terms", "another one for this run", message)
    if FLAGS.head is None:
        raise ParameterError("head", None, "given for kind=terms", "kind=terms draws one head: give --head")
    lm, ids, tgt_len, layer, labels = text_of_run(folder)
    parts, probs, n_key = terms_of_text(lm, ids, tgt_len, layer, FLAGS.head)
    return draw_terms(parts, probs, labels[-n_key:], layer, FLAGS.head, lm.network.same_length)


def text_of_run(folder):
    """Opens a language model, and reads the text that the flags name.

    Returns:
        `(lm, ids, tgt_len, layer, labels)`: the model, the ids of the text, the number of last tokens whose attention
        is drawn, the index of the layer, and the labels of the ids.

    Raises:
        ParameterError: a flag does not fit the model or the text.
    """
    check_text_given()
    config = folder.read_config()
    layer = checked_layer(config["model"]["n_layer"], config["model"]["n_head"])
    vocab = folder.load_vocab()
    has_file = FLAGS.text_path is not None
    if has_file:
        ids, _ = encode_text(FLAGS.text_path, vocab, config["data"], argument="text_path")
    else:
        ids = vocab.encode(FLAGS.text)
    tgt_len = min(TGT_LEN[FLAGS.kind], len(ids)) if FLAGS.tgt_len is None else FLAGS.tgt_len
    if not 1 <= tgt_len < len(ids) + 1:
        message = f"tgt_len must lie between 1 and the {len(ids)} tokens of the text, got {tgt_len}"
        raise ParameterError("tgt_len", tgt_len, f"between 1 and {len(ids)}", message)
    changes = {} if FLAGS.mem_len is None else {"mem_len": FLAGS.mem_len}
    return load_model(folder, **changes), ids, tgt_len, layer, labels_of(vocab, ids)


def encoder_decoder_attention(folder):
    """Returns the figure of the attention of an encoder-decoder while it translates one line."""
    check_used((("tgt_len", "mem_len"), False, f"is for language models, and {folder} contains an encoder-decoder"))
    check_text_given()
    model = folder.read_config()["model"]
    layer = checked_layer(model["num_layers"], model["num_heads"])
    name = "text" if FLAGS.text_path is None else FLAGS.text_path
    lines = FLAGS.text.split("\n") if FLAGS.text_path is None else without_ends(read_lines(name))
    if len(lines) != 1:
        message = f"{name} must be one line, the source, got {len(lines)}"
        raise ParameterError(name, len(lines), "one line", message)
    vocabs = folder.load_vocabs()
    translator = Translator(load_model(folder), *vocabs)
    (source,) = encoded(lines, translator.encode, name)
    target = written_by(translator.model, source, translator.never)
    which = FLAGS.attention or "cross"
    weights = attention_of_pair(translator.model, source, target, which, layer)
    source_labels, target_labels = (labels_of(vocab, ids) for vocab, ids in zip(vocabs, (source, target), strict=True))
    queries = source_labels if which == "encoder" else target_labels
    keys = [label_of(vocabs[1].symbols[START_ID]), *target_labels[:-1]] if which == "decoder" else source_labels
    return draw_pair(weights, queries, keys, which, layer, FLAGS.head)


def checked_layer(n_layer, n_head):
    """Returns the index of the layer of --layer, where -1 is the last one.

    Raises ParameterError if the model does not have the layer or the head of the flags.
    """
    check_index("layer", FLAGS.layer, n_layer, lowest=-1)
    if FLAGS.head is not None:
        check_index("head", FLAGS.head, n_head)
    return FLAGS.layer % n_layer


def labels_of(vocab, ids):
    """Returns the labels of ids, and makes Matplotlib use --font. Raises ParameterError if a character is not in it."""
    labels = [label_of(vocab.symbols[i]) for i in ids]
    use_font(FLAGS.font, "".join(labels))
    return labels


def memory():
    """Returns the figure for kind=memory: nll by position in a segment or, with --text, along a text, by memory."""
    check_used(
        (("max_tokens",), FLAGS.text is None, f"has no effect: --text may have up to {MOST_ALONG} tokens"),
        (("font",), FLAGS.text is not None, "is for --text, whose tokens are labels"),
    )
    folder = RunFolder(only_one(FLAGS.model_dir), "language_model")
    config = folder.read_config()
    vocab = folder.load_vocab()
    changes = {} if FLAGS.mem_len is None else {"mem_len": FLAGS.mem_len}
    mem_len = {**config["model"], **changes}["mem_len"]
    tgt_len = config.get("training", {}).get("tgt_len") if FLAGS.tgt_len is None else FLAGS.tgt_len
    if mem_len < 1:
        message = f"kind=memory needs a model with memory, got mem_len={mem_len} in {folder}"
        raise ParameterError("mem_len", mem_len, "at least 1", message)
    if tgt_len is None or tgt_len < 1:
        message = f"tgt_len must be 1 or more, got {tgt_len}: give --tgt_len if the run in {folder} does not record it"
        raise ParameterError("tgt_len", tgt_len, "at least 1", message)
    if FLAGS.text is not None:
        return memory_along(folder, vocab, mem_len, tgt_len, changes)
    ids = held_out(folder, vocab)[: FLAGS.max_tokens]
    nll = nll_by_position(load_model(folder, **changes), ids, tgt_len)
    return draw_memory(nll, mem_len, metric_of(is_by_character_in(config["data"], vocab)))


def memory_along(folder, vocab, mem_len, tgt_len, changes):
    """Returns the figure of the nll of each token of --text with no memory, half of it and all of it.

    Args:
        folder: `RunFolder`.
        vocab: vocabulary of the run.
        mem_len: length of the memory.
        tgt_len: tokens of a segment.
        changes: hyper-parameters of the model that differ from those of the run.
    """
    check_not_both("text", "text_path")
    ids = vocab.encode(FLAGS.text)
    kept = (0, mem_len // 2, mem_len)
    if not 2 <= len(ids) <= MOST_ALONG:
        message = f"text must have 2 to {MOST_ALONG} tokens for kind=memory, got {len(ids):,}"
        raise ParameterError("text", FLAGS.text, f"2 to {MOST_ALONG} tokens", message)
    lm = load_model(folder, **changes)
    labels = labels_of(vocab, ids)
    nll = np.concatenate([values for _, values in nll_by_memory(lm, ids, tgt_len, kept)], 1)
    return draw_memory_along(nll, labels, kept, tgt_len)


def context():
    """Returns the figure for kind=context: the mean nll of a text against the number of tokens that each run sees."""
    model_dirs = FLAGS.model_dir
    step = FLAGS.context_step
    if FLAGS.ckpt_path:
        only_one(model_dirs)
    folders = [RunFolder(model_dir, "language_model") for model_dir in model_dirs]
    configs = [folder.read_config() for folder in folders]
    vocab = folders[0].load_vocab()
    for folder in folders[1:]:
        difference = vocab.difference(folder.load_vocab())
        if difference:
            message = f"the vocabulary of model_dir {folder} differs from that of {model_dirs[0]}: {difference}"
            raise ParameterError("model_dir", folder.path, "runs with one vocabulary", message)
    spans = [span_of(config) for config in configs]
    longest = 2 * max(spans) if FLAGS.max_context is None else FLAGS.max_context
    check_integer("context_step", step, 1)
    if longest < 2 * step:
        message = f"max_context must be at least twice context_step={step}, got {longest}"
        raise ParameterError("max_context", longest, f"at least {2 * step}", message)
    ids = held_out(folders[0], vocab)[: FLAGS.max_tokens]
    nll = []
    for folder, span in zip(folders, spans, strict=True):
        lm = load_model(folder, mem_len=max(span - step, 0))  # memory and a segment of `step` tokens have `span` keys
        nll.append(nll_by_context(lm, ids, step, longest // step))
    metric = metric_of(is_by_character_in(configs[0]["data"], vocab))
    return draw_context(np.stack(nll), names_of(model_dirs), step, spans, metric)


def span_of(config):
    """Returns the largest number of keys that a token sees.

    With --mem_len, the keys are a memory of this length and a segment of --context_step tokens. Otherwise they are the
    memory and the segment of the training, from `config`, the content of config.json.
    """
    if FLAGS.mem_len is not None:
        check_integer("mem_len", FLAGS.mem_len, 0)
        return FLAGS.mem_len + FLAGS.context_step
    return config["model"]["mem_len"] + config.get("training", {}).get("tgt_len", 0)


def held_out(folder, vocab):
    """Returns the ids of the text in --text_path or, without it, the first --max_tokens ids of the run's valid split.

    Without --text_path, raises ParameterError if the vocabulary or the valid split is not that of the run.
    """
    if FLAGS.text_path is not None:
        return encode_text(FLAGS.text_path, vocab, folder.read_config()["data"], argument="text_path")[0]
    corpus = open_corpus_of_run(folder)
    check_vocab(folder, [corpus.vocab], "Give a text_path")
    check_text(folder, {"valid": corpus.fingerprint("valid")}, "give a text_path")
    return np.asarray(corpus.splits["valid"][: FLAGS.max_tokens])


def lengths():
    """Returns `(tgt_len, mem_len)` for pictures without a run. Raises ParameterError if one is out of range."""
    tgt_len = TGT_LEN[FLAGS.kind] if FLAGS.tgt_len is None else FLAGS.tgt_len
    mem_len = MEM_LEN[FLAGS.kind] if FLAGS.mem_len is None else FLAGS.mem_len
    check_index("tgt_len", tgt_len, MAX_LENGTH + 1, 1)
    check_index("mem_len", mem_len, MAX_LENGTH + 1)
    return tgt_len, mem_len


def curves():
    """Returns the figure for kind=curves: the logs of the runs in --model_dir."""
    logs = [read_log(model_dir) for model_dir in FLAGS.model_dir]
    return draw_curves(dict(zip(names_of(FLAGS.model_dir), logs, strict=True)))


DRAW = {  # kind -> function that returns the figure for the flags
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
    check_matplotlib()
    check_kind()
    check_picture(FLAGS.output)
    figure = DRAW[FLAGS.kind]()
    save(figure, FLAGS.output, FLAGS.dpi)
    print(f"{FLAGS.kind}: {FLAGS.output}")


if __name__ == "__main__":
    run(main)
