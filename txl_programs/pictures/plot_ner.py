"""Draws pictures of taggers: the direction in which a head looks, and the attention of FLAT's characters and words.

    txl-plot-ner --kind=direction --model_dir=runs/tener_resume,runs/absolute --output=direction.png
    txl-plot-ner --kind=lattice --model_dir=runs/flat_resume --text="南京市长江大桥" --head=0 \\
        --font=NotoSansCJKsc-Regular.otf --output=lattice.png

direction  the part of a head's scores that depends on positions, against the distance key minus query: the mean over
           the characters of --text_path. TENER distinguishes left from right. Absolute sinusoids (a run with
           --attn_type=transformer --pos_embed=sin) do not: their products, drawn next to it, are the same for both
           directions. After the learned projections of queries and keys, a head knows a distance only roughly.
lattice    the attention of each character and word of a sentence to all others: one head, or the mean of all heads.

It needs matplotlib: pip install "txl_tf[plot]". Chinese labels need a font with Chinese characters: name its
file by --font.
"""

from absl import flags

from txl_programs.flag_values import CKPT_HELP, FLAGS, check_used, unused
from txl_programs.opening import load_model, names_of
from txl_programs.program import read_flags, run

KINDS = ("direction", "lattice")
USES = {"direction": ("text_path", "distance"), "lattice": ("text", "head", "font")}  # besides the flags of both

flags.DEFINE_enum("kind", "direction", KINDS, "The picture.")
flags.DEFINE_list("model_dir", None, "Folders of runs, separated by commas.")
flags.DEFINE_string("output", None, "Picture to write: a .png, .pdf or .svg file.")
flags.DEFINE_string("ckpt_path", None, CKPT_HELP)
flags.DEFINE_string("text", None, "For lattice: the sentence.")
flags.DEFINE_string("text_path", None, "For direction: file of sentences, one on each line. Default: positions alone.")
flags.DEFINE_integer("layer", 0, "Layer, from 0.")
flags.DEFINE_integer("head", None, "Head, from 0. Default: the mean of all heads.")
flags.DEFINE_integer("distance", 20, "For direction: largest distance in characters.", lower_bound=1)
flags.DEFINE_string("font", None, "Font file for the labels.")
flags.mark_flags_as_required(["model_dir", "output"])

read_flags(__name__)

import numpy as np
import tensorflow as tf

from txl_config.errors import ParameterError
from txl_programs.pictures.drawing import Figure, check_matplotlib, check_picture, save, use_font
from txl_tf.data.pairs.parallel import read_lines, without_ends
from txl_tf.data.tagged.batches import features
from txl_tf.data.tagged.sentences import encoder_of
from txl_tf.nn.positions import positional_embedding, tensor2tensor_frequencies
from txl_tf.runs.folder import RunFolder
from txl_tf.taggers.tener_layers import two_way_positions
from txl_tf.taggers.text_tagger import TextTagger


def open_tagger(model_dir, family="tener"):
    """Returns `(tagger, encoder)` of a run: the `Tagger`, and the encoder of its sentences.

    Raises ParameterError if the run has another family, or if its network lacks the layer or the head of the flags.
    """
    folder = RunFolder(model_dir, "tagger")
    family_of_run = folder.family.name
    if family_of_run != family:
        message = f"model_dir {folder} must contain a run of family={family}, got family={family_of_run}"
        raise ParameterError("model_dir", folder.path, f"a run of family={family}", message)
    vocab, bigram_vocab, *lexicon = folder.load_vocabs()
    tagger = load_model(folder)
    check_layer_and_head(tagger.network)
    return tagger, encoder_of(vocab, bigram_vocab, lexicon[0] if lexicon else None)


def check_layer_and_head(network):
    """Raises ParameterError if the network does not have the layer and the head of the flags."""
    for name, value, number in (("layer", FLAGS.layer, network.n_layer), ("head", FLAGS.head, network.n_head)):
        if value is not None and not 0 <= value < number:
            allowed = f"in [0, {number})"
            raise ParameterError(name, value, allowed, f"{name} must lie {allowed}, got {value}")


# --------------------------------------------------------------------------------------------------------- direction


def tener_curves(network, inputs, max_distance):
    """Returns the part of TENER's scores that depends on positions, by distance d: key minus query.

    It is `(q + v) . R_d + k . R_{-d}`, where q and k are the means over all characters. The last term is left out if
    the model does not have it (`key_position_term`).

    Args:
        network: `Tener`.
        inputs: features of sentences, by name; `None` for q = k = 0.
        max_distance: largest distance in characters.

    Returns:
        `[n_head, 2 * max_distance + 1]`, for the distances d from `-max_distance` up.
    """
    attention = network.stacked[FLAGS.layer].self_attn
    q, k = mean_queries_and_keys(network, inputs)
    r = two_way_positions(max_distance + 1, q.shape[-1]).numpy()[1:]  # -max_distance ... max_distance
    scores = (q + attention.r_w_bias.numpy()) @ r.T
    return scores + k @ r[::-1].T if attention.key_position_term else scores


def mean_queries_and_keys(network, inputs):
    """Returns the mean query and the mean key of each head of the layer of --layer, `[n_head, d_head]` each.

    They are zeros if `inputs`, see `tener_curves`, is `None`.
    """
    attention = network.stacked[FLAGS.layer].self_attn
    if inputs is None:
        return np.zeros([2, attention.n_head, attention.d_model // attention.n_head])
    mask = network.mask_of(inputs)
    x = network.embed(inputs)
    for before in network.stacked[: FLAGS.layer]:
        x = before(x, mask)
    q, k, *_ = attention.parts(x if network.after_norm else network.stacked[FLAGS.layer].norm1(x))
    bias = 0 if attention.attn_type == "transformer" else attention.r_r_bias.numpy()  # `parts` has added it to q
    by_character = [tf.transpose(part, [1, 2, 0, 3]) for part in (q, k)]  # [B, T, H, D]
    means = [tf.reduce_mean(tf.boolean_mask(part, mask), 0).numpy() for part in by_character]  # [H, D]
    return means[0] - bias, means[1]


def absolute_curves(network, max_distance):
    """Returns the products of absolute positions by distance, averaged over 100 positions.

    Args:
        network: `Tener` with absolute sinusoids.
        max_distance: largest distance in characters.

    Returns:
        `(plain, projected)`: `[2 * max_distance + 1]`, the products of the sinusoids; and
        `[n_head, 2 * max_distance + 1]`, the products after the projections of queries and keys of each head.
    """
    attention = network.stacked[FLAGS.layer].self_attn
    places = np.arange(1, 101 + 2 * max_distance, dtype="float32")
    # p: [100 + 2 * max_distance, d_model]: each of the 100 queries has `max_distance` keys on both sides.
    p = positional_embedding(places, tensor2tensor_frequencies(network.d_model))[0].numpy()
    q, k, _ = np.split(p @ attention.qkv_kernel.numpy(), 3, 1)
    split = [x.reshape(len(p), attention.n_head, -1).transpose(1, 0, 2) for x in (q, k)]  # [n_head, positions, d_head]
    tables = [p @ p.T, *(split[0] @ split[1].transpose(0, 2, 1))]
    queries = np.arange(max_distance, max_distance + 100)
    curves = [[table[queries, queries + d].mean() for d in range(-max_distance, max_distance + 1)] for table in tables]
    return np.array(curves[0]), np.array(curves[1:])


def draw_direction(runs, max_distance):
    """Returns a figure of the curves of all heads by signed distance, with a panel for each run.

    A run with absolute positions has two panels: one for the sinusoids, one for its heads.

    Args:
        runs: `{name of a run: (tagger, inputs)}`, see `tener_curves` for the inputs.
        max_distance: largest distance in characters.
    """
    panels = []  # `(title, curves)` each
    for name, (tagger, inputs) in runs.items():
        if is_absolute(tagger):
            plain, projected = absolute_curves(tagger.network, max_distance)
            panels += [("sinusoids: p(i) . p(i + d)", plain[None]), (f"{name}: after the projections", projected)]
        else:
            panels.append((f"{name}: by direction", tener_curves(tagger.network, inputs, max_distance)))
    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for head, curve in enumerate(curves):
            axes.plot(
                range(-max_distance, max_distance + 1),
                curve - curve.mean(),
                label=f"head {head}" if len(curves) > 1 else None,
            )
        axes.axvline(0, color="0.7", linewidth=0.8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("distance d, key minus query")
        axes.set_ylabel("score, less its mean")
        if len(curves) > 1:
            axes.legend(fontsize=8, frameon=False)
    return figure


def with_inputs(model_dir):
    """Returns `(tagger, inputs)` of a run for `draw_direction`: the sentences of --text_path; `None` without the flag.

    Raises ParameterError if the run has neither relative positions nor sinusoids, or if the file has no sentences.
    """
    tagger, encoder = open_tagger(model_dir)
    if is_absolute(tagger) and tagger.network.pos_embed != "sin":
        message = f"model_dir {model_dir} must have pos_embed=sin, got {tagger.network.pos_embed}"
        raise ParameterError("model_dir", model_dir, "a run with pos_embed=sin", message)
    if not FLAGS.text_path:
        return tagger, None
    text_tagger = TextTagger(tagger, encoder)
    sentences = [text_tagger.split(line) for line in without_ends(read_lines(FLAGS.text_path))]
    if not any(sentences):
        message = f"text_path {FLAGS.text_path} has no sentences"
        raise ParameterError("text_path", FLAGS.text_path, "a file with sentences", message)
    encoded = text_tagger.encode([tokens for tokens in sentences if tokens])
    arrays = features(encoded, lattice=tagger.reads_lattice)
    return tagger, {name: tf.constant(array) for name, array in arrays.items()}


def is_absolute(tagger):
    """Whether the attention of a tagger is the vanilla Transformer's, whose positions are absolute."""
    return tagger.network.attn_type == "transformer"


# ----------------------------------------------------------------------------------------------------------- lattice


def draw_lattice(tagger, encoder, text):
    """Returns a figure of the attention between the items of a sentence: its characters, then words of the lexicon.

    It is the attention of --head in --layer or, without --head, the mean over the heads of the layer.
    """
    items, probs = TextTagger(tagger, encoder).attention(list(text))
    words = [item.text for item in items]
    use_font(FLAGS.font, text, "sans-serif")
    probs = probs[FLAGS.layer].mean(0) if FLAGS.head is None else probs[FLAGS.layer, FLAGS.head]
    size = 1.5 + 0.28 * len(words)
    figure = Figure(figsize=(size + 0.6, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(probs, cmap="Blues", vmin=0)
    for line in (axes.axhline, axes.axvline):
        line(len(text) - 0.5, color="0.5", linewidth=0.8)
    axes.set_xticks(range(len(words)), words, rotation=90)
    axes.set_yticks(range(len(words)), words)
    axes.set_xlabel("attended to: characters, then words")
    axes.set_ylabel("item that attends")
    figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def main():
    check_matplotlib()
    check_used(*((names, kind == FLAGS.kind, f"is for --kind={kind}") for kind, names in USES.items()))
    check_picture(FLAGS.output)
    if FLAGS.kind == "lattice":
        if not FLAGS.text or len(FLAGS.model_dir) > 1:
            raise ParameterError("text", FLAGS.text, "given, with one run", "kind=lattice needs --text and one run")
        figure = draw_lattice(*open_tagger(FLAGS.model_dir[0], "flat"), FLAGS.text)
    else:
        names = names_of(FLAGS.model_dir)
        runs = {name: with_inputs(model_dir) for name, model_dir in zip(names, FLAGS.model_dir, strict=True)}
        if FLAGS.text_path and all(is_absolute(tagger) for tagger, _ in runs.values()):
            raise unused("text_path", "is for runs with relative positions: curves of sinusoids need no text")
        figure = draw_direction(runs, FLAGS.distance)
    save(figure, FLAGS.output, 120)
    print(FLAGS.output)


if __name__ == "__main__":
    run(main)
