"""The pictures: what is drawn is what the run logged and what the model computes; one clear error for bad input."""

import json
import math
import shutil

import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from helpers import SMALL, mentions, program, raises_naming, raises_parameter, randomise, run_here
from small_runs import make_tagger

from txl_programs.pictures import context, drawing, heads, ideas
from txl_tf.data.vocabulary import Vocab
from txl_tf.language.reading import memory_after, nll_by_memory
from txl_tf.language.transformer_lm import TransformerLM
from txl_tf.nn.positions import (
    inverse_frequencies,
    positional_embedding,
    positional_encoding,
    relative_positions,
)
from txl_tf.runs.folder import RunFolder
from txl_tf.transformer_xl.attention import create_mask
from txl_tf.vanilla.transformer import Transformer
from txl_tf.vanilla.translator import Translator

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("opened_once")]
LETTERS = "abcdefghijklmnopqrstuv "  # n_token of SMALL


@pytest.fixture(scope="module", autouse=True)
def plot():
    pytest.importorskip("matplotlib")
    yield from program("tools/plot.py")


@pytest.fixture
def main(plot):
    """Runs the program with a list of flags."""

    def run(*arguments):
        flags.FLAGS.unparse_flags()
        flags.FLAGS(["plot.py", *arguments])
        plot.main()

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_lm):
    """The folder of a run of 23 letters, with a log."""
    vocab = Vocab(level="char", special=list(LETTERS))
    vocab.build()
    folder = tmp_path_factory.mktemp("plot") / "run"
    model = {**SMALL, "mem_len": 4}
    RunFolder(folder).create({"by_character": True}, model, [vocab], small_lm(), step=1)
    (folder / "log.csv").write_text(
        "epoch,bpc,grad_norm,learning_rate,loss,step,tokens_per_second,val_bpc,val_loss\n"
        "0,4.0,1.5,0.1,3.0,10,100.0,NA,NA\n1,3.0,1.0,0.2,2.0,20,100.0,3.5,2.5\n"
        "2,9.0,9.0,0.9,9.0,30,100.0,9.0,9.0\n2,2.0,0.5,0.1,1.0,30,100.0,2.5,1.5\n"  # step 30 was done again
    )
    return folder


PAIRS = {
    "num_layers": 2, "d_model": 8, "num_heads": 2, "dff": 8, "max_len": 12, "input_vocab_size": 6,
    "target_vocab_size": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def pairs_run(tmp_path_factory):
    """The folder of a run that writes A and B for a, b and c, with random weights."""
    vocabs = [Vocab(level="char", special=["<pad>", "<s>", "\n", *letters]) for letters in ("abc", "AB")]
    for vocab in vocabs:
        vocab.build()
    model = Transformer(**PAIRS)
    randomise(model)
    folder = tmp_path_factory.mktemp("plot_pairs") / "run"
    RunFolder(folder).create({}, PAIRS, vocabs, model, step=1)
    return folder


# ---------------------------------------- training curves


def test_curves_are_the_log_s_with_repeated_steps_once_and_validations_where_there_were_any(plot, run):
    log = plot.read_log(run)
    figure = plot.draw_curves({"a": log, "b": log})
    loss, rate, norm = (
        [np.transpose(line.get_data()).tolist() for line in axes.get_lines()[: len(axes.get_lines()) // 2]]
        for axes in figure.axes
    )
    assert loss == [[[10, 4], [20, 3], [30, 2]], [[20, 3.5], [30, 2.5]]]
    assert rate == [[[10, 0.1], [20, 0.2], [30, 0.1]]] and norm == [[[10, 1.5], [20, 1], [30, 0.5]]]
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == ["a: training", "a: validation (best 2.5)", "b: training", "b: validation (best 2.5)"]


def test_the_validation_after_the_last_step_of_an_old_log_is_that_of_the_best_weights(plot, run, tmp_path):
    """Logs were written without it until 2026-11-23."""
    folder = shutil.copytree(run, tmp_path / "old")
    log = (folder / "log.csv").read_text().replace("2.5,1.5", "NA,NA")
    (folder / "log.csv").write_text(log)
    assert np.isnan(plot.read_log(folder)["val_bpc"][-1])
    (folder / "best").mkdir()
    (folder / "best" / "best.json").write_text('{"step": 30, "val_loss": 1.4}')
    assert plot.read_log(folder)["val_loss"].tolist()[1:] == [2.5, 1.4]
    label = plot.draw_curves({"a": plot.read_log(folder)}).axes[0].get_legend().get_texts()[1].get_text()
    assert label == f"a: validation (best {1.4 / math.log(2):.4g})"


@pytest.mark.parametrize("lost", ["val_bpc", "val_loss", "learning_rate", "grad_norm"])
def test_a_log_without_a_column_is_refused(plot, run, tmp_path, lost):
    folder = shutil.copytree(run, tmp_path / "lost")
    log = (folder / "log.csv").read_text()
    (folder / "log.csv").write_text(log.replace(lost, "another", 1))
    with raises_parameter("model_dir"):
        plot.read_log(folder)


def test_a_tagger_s_best_is_its_f1(plot, run):
    log = {name: column for name, column in plot.read_log(run).items() if not name.endswith("bpc")}
    figure = plot.draw_curves({"a": {**log, "val_f1": np.array([np.nan, 0.5, 0.9123])}})
    assert figure.axes[0].get_legend().get_texts()[1].get_text() == "a: validation (best F1 91.23%)"
    assert figure.axes[0].get_ylabel() == "loss, nats a sentence"


def test_runs_of_different_measures_are_refused(plot, run):
    log = plot.read_log(run)
    words = {name.replace("bpc", "ppl"): column for name, column in log.items()}
    plot.draw_curves({"words": words})
    with raises_parameter("model_dir"):
        plot.draw_curves({"a": log, "words": words})


# ---------------------------------------- attention


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"untie_r": True, "same_length": True, "clamp_len": 3}],
    ids=str,
)
def test_probabilities_times_values_are_what_the_layer_computes(small_lm, options, batch):
    """Of the second layer, with four heads: from three on, an optimised product went wrong for one row."""
    network = small_lm(n_head=4, **options).network
    rng = np.random.default_rng(0)
    tokens = tf.constant(rng.integers(0, 23, [batch, 5]), tf.int32)
    mems = [tf.constant(rng.normal(size=[batch, 19, 8]), tf.float32) for _ in range(2)]
    probs = network.attention_probs(tokens, mems, layer=1)
    np.testing.assert_allclose(tf.reduce_sum(probs, -1), np.ones([4, batch, 5]), rtol=1e-5)
    future = create_mask(5, 19, network.same_length).numpy() > 0
    assert not probs.numpy()[:, :, future].any() and (probs.numpy()[:, :, ~future] > 0).all()

    r = positional_embedding(relative_positions(24, network.clamp_len), inverse_frequencies(8))
    biases = [[b[i] if network.untie_r else b for b in (network.r_w_bias, network.r_r_bias)] for i in range(2)]
    mask = create_mask(5, 19, network.same_length)
    w = network.decoder_layers[0](network.embedding(tokens), r, *biases[0], mask, mems[0])
    attn = network.decoder_layers[1].rel_attn
    values = tf.reshape(tf.concat([mems[1], w], 1) @ attn.qkv_kernel[:, 24:], [batch, 24, 4, 3])
    attended = np.reshape(np.einsum("hbtk,bkhd->bthd", probs, values), [batch, 5, 12])
    expected = attn(w, r, *biases[1], mask, mems[1])
    np.testing.assert_allclose(attn.layer_norm(w + attended @ attn.o_kernel), expected, rtol=1e-4, atol=1e-5)


def test_the_text_before_the_segment_is_the_memory_and_zeros_are_before_the_text(plot, small_lm, eager):
    lm = small_lm()
    ids = np.random.default_rng(0).integers(0, 23, 14).astype(np.int32)
    mems = lm.initial_mems(1)
    for part in (ids[:3], ids[3:6], ids[6:9], ids[9:11]):
        _, mems = lm.network(part[None], mems)
    expected = lm.network.attention_probs(tf.constant(ids[None, 11:]), mems, 1)[:, 0]
    got, n_key = plot.attention_of_text(lm, ids, tgt_len=3, layer=1)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert n_key == 7 and plot.attention_of_text(lm, ids[:5], 3, 1)[1] == 5


@pytest.mark.parametrize("same_length", [False, True])
def test_the_picture_of_the_terms_is_the_terms_their_sum_and_its_softmax(small_lm, same_length):
    lm = small_lm(same_length=same_length)
    ids = np.random.default_rng(0).integers(0, 23, 9).astype(np.int32)
    terms, probs, n_key = heads.terms_of_text(lm, ids, tgt_len=3, layer=1, head=1)
    mems = memory_after(lm, ids[:-3], 3)
    expected = [term[1, 0] for term in lm.network.attention_terms(ids[None, -3:], mems, 1)]
    np.testing.assert_allclose(terms, expected, rtol=1e-5)
    mask = create_mask(3, 4, same_length).numpy()
    np.testing.assert_allclose(tf.nn.softmax(terms.sum(0) - 1e30 * mask), probs, rtol=1e-4, atol=1e-6)
    assert n_key == 7

    axes = heads.draw_terms(terms, probs, list("abcdefg"), 1, 1, same_length).axes
    panels = [panel.images[0].get_array() for panel in axes if panel.images]
    for shown, values in zip(panels, [*terms, terms.sum(0), np.sqrt(probs)], strict=True):
        np.testing.assert_array_equal(shown.mask, mask > 0)
        np.testing.assert_allclose(shown.data[mask == 0], values[mask == 0], rtol=1e-5)
    assert [label.get_text() for label in axes[0].get_yticklabels()] == list("efg")


def test_without_memory_the_pictures_show_none(small_lm):
    lm = small_lm(mem_len=0)
    ids = np.random.default_rng(0).integers(0, 23, 5).astype(np.int32)
    probs, n_key = heads.attention_of_text(lm, ids, tgt_len=3, layer=1)
    axes = heads.draw_attention(probs, list("abcde")[-n_key:], 1).axes
    assert [panel.get_title() for panel in axes if panel.images] == ["layer 1, head 0", "layer 1, head 1"]
    terms, probs, n_key = heads.terms_of_text(lm, ids, tgt_len=3, layer=1, head=1)
    axes += heads.draw_terms(terms, probs, list("abcde")[-n_key:], 1, 1).axes
    assert {panel.get_xlabel() for panel in axes if panel.images} == {"keys", ""}
    assert not any(panel.lines for panel in axes if panel.images)


def test_the_spread_is_over_the_keys_that_a_query_sees():
    scores = np.ma.masked_array([[1.0, 3.0, 99.0], [2.0, 2.0, 2.0]], [[0, 0, 1], [0, 0, 0]])
    assert heads.spread(scores) == pytest.approx(0.5**0.5)  # variances 1 and 0


# ---------------------------------------- attention of encoder-decoders


@pytest.mark.slow
def test_what_is_written_is_what_the_translator_writes(pairs_run):
    vocabs, model = RunFolder(pairs_run).load_vocabs(), RunFolder(pairs_run).load_model()
    translator = Translator(model, *vocabs)
    for text in ("abc", "b", "cabcab"):
        target = heads.written_by(model, translator.encode(text))
        assert translator.decode(target) == translator.translate([text])[0][0].text
        assert (target[-1] in (0, 2) or len(target) == PAIRS["max_len"]) and not np.isin(target[:-1], (0, 2)).any()


def test_the_attention_of_a_pair_is_that_of_every_step_of_writing(pairs_run):
    """Row t of cross-attention is the last row of a call with the start symbol and the t symbols before it."""
    model = RunFolder(pairs_run).load_model()
    source, target = np.array([3, 4, 5, 2]), np.array([4, 3, 3, 2])
    cross, decoder, encoder = (
        heads.attention_of_pair(model, source, target, w, 1) for w in ("cross", "decoder", "encoder")
    )
    assert cross.shape == decoder.shape == encoder.shape == (2, 4, 4)
    for t in range(4):
        _, weights = model.forward((source[None], np.array([[1, *target[:t]]])))
        np.testing.assert_allclose(cross[:, t], weights["decoder_layer1_block2"][0, :, -1], rtol=1e-4)
        np.testing.assert_allclose(decoder[:, t, : t + 1], weights["decoder_layer1_block1"][0, :, -1], rtol=1e-4)
        np.testing.assert_allclose(encoder, weights["encoder_layer1"][0], rtol=1e-4)
    assert not np.triu(decoder, 1).any()


def test_a_translator_knows_what_its_attention_is_between(pairs_run):
    model, vocabs = RunFolder(pairs_run).load_model(), RunFolder(pairs_run).load_vocabs()
    translator = Translator(model, *vocabs)
    symbols = {"cross": (["B", "\n"], ["a", "c", "\n"]), "decoder": (["B", "\n"], ["<s>", "B"])}
    symbols["encoder"] = (["a", "c", "\n"],) * 2
    for which, (queries, keys) in symbols.items():
        found = translator.attention("ac", "B", which)
        assert (found.queries, found.keys) == (queries, keys)
        expected = [heads.attention_of_pair(model, np.array([3, 5, 2]), np.array([4, 2]), which, i) for i in (0, 1)]
        np.testing.assert_allclose(found.weights, expected, rtol=1e-6)
    empty = translator.attention("ac", "")
    assert empty.queries == ["\n"]
    np.testing.assert_allclose(empty.weights, translator.attention("ac", "B").weights[:, :, :1], rtol=1e-4)
    assert translator.attention("a", 12 * "B").queries == 12 * ["B"]  # the longest translation has no end symbol
    with raises_parameter("target", 13 * "B", limit="max_len=12"):
        translator.attention("a", 13 * "B")


@pytest.mark.parametrize("which, keys, queries", [
    ("cross", ["a", "␣", r"\n"], ["A", r"\n"]),
    ("decoder", ["<s>", "A"], ["A", r"\n"]),
    ("encoder", ["a", "␣", r"\n"], ["a", "␣", r"\n"]),
])  # fmt: skip
def test_pictures_of_pairs_have_the_symbols_at_their_sides(which, keys, queries):
    weights = np.random.default_rng(0).random([2, len(queries), len(keys)])
    figure = heads.draw_pair(weights, queries, keys, which, layer=0)
    for head, axes in enumerate(figure.axes[:2]):
        shown = axes.images[0].get_array()
        np.testing.assert_allclose(
            shown.filled(0) ** 2, np.tril(weights[head]) if which == "decoder" else weights[head]
        )
        assert [label.get_text() for label in axes.get_xticklabels()] == keys
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == queries


def test_the_lowest_picture_of_each_column_has_labels_below():
    figure = heads.draw_pair(np.ones([3, 2, 2]) / 2, ["A", "B"], ["a", "b"], "cross", layer=0)
    has_labels = [axes.xaxis.get_tick_params()["labelbottom"] for axes in figure.axes[:3]]
    assert [bool(axes.get_xlabel()) for axes in figure.axes[:3]] == has_labels == [False, True, True]


# ---------------------------------------- context


def test_every_token_is_scored_given_c_c_plus_step_and_so_on_tokens_alone(plot, small_lm):
    """With a memory that holds everything, against one segment for each token and each context."""
    lm = small_lm(mem_len=12)
    ids = np.random.default_rng(0).integers(0, 23, 26).astype(np.int32)
    nll = plot.nll_by_context(lm, ids, step=4, n_context=3)
    empty = [tf.zeros([1, 0, 8])] * 2
    expected = np.zeros([3, 8])
    for j in range(3):
        for i in range(8):  # tokens 9 ... 16: the windows start at 0, 4, 8, 12
            context = 1 + i % 4 + 4 * j
            window = ids[None, 9 + i - context : 10 + i]
            expected[j, i] = lm.score(window[:, :-1], window[:, 1:], empty)[0][0, -1]
    np.testing.assert_allclose(nll, expected, rtol=1e-4)


def test_the_shortest_text_for_contexts(plot, small_lm, eager):
    lm = small_lm(mem_len=12)
    assert plot.nll_by_context(lm, np.zeros(21, np.int32), step=4, n_context=3).shape == (3, 4)
    with raises_parameter("text", 20, limit="21"):
        plot.nll_by_context(lm, np.zeros(20, np.int32), step=4, n_context=3)


def test_relative_gains_are_the_paper_s_formula(plot):
    rng = np.random.default_rng(0)
    nll = rng.gamma(1.0, 2.0, [2, 3, 10])
    for model in (0, 1):
        for hard, n_hard in ((1.0, 10), (0.3, 3)):
            expected = []
            for c in (0, 1):
                baseline = [min(nll[0, c, t], nll[1, c, t]) for t in range(10)]
                hardest = sorted(range(10), key=lambda t, b=baseline: -b[t])[:n_hard]
                f_short = sum(min(baseline[t], nll[model, c, t]) for t in hardest) / n_hard
                f_long = sum(min(baseline[t], nll[model, c + 1, t]) for t in hardest) / n_hard
                expected.append((math.exp(f_short) - math.exp(f_long)) / math.exp(f_short))
            np.testing.assert_allclose(context.relative_gains(nll, model, hard), expected, rtol=1e-6)


def test_what_context_saves_is_of_the_perplexity_of_all_tokens_and_may_be_less_than_nothing(plot):
    """Two tokens trade places: the paper's gain takes the better context of each, though nothing is saved."""
    nll = np.array([[1.0, 3.0], [3.0, 1.0], [2.0, 1.0], [2.0, 2.0]])
    np.testing.assert_allclose(context.savings(nll), [0, 1 - math.exp(-0.5), 1 - math.exp(0.5)], atol=1e-12)
    np.testing.assert_allclose(context.relative_gains(nll[None], 0)[0], 1 - math.exp(-1))
    axes = context.draw_context(nll[None], ["a"], 16, [32], "bpc").axes[1]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), 100 * context.savings(nll), atol=1e-9)
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names[0].startswith("a: ") and mentions(names[1], "a", "RECL 48")


def test_places_in_a_segment_are_scored_with_the_memory_of_the_segments_before_and_without(plot, small_lm):
    lm = small_lm(mem_len=6)
    ids = np.random.default_rng(0).integers(0, 23, 32).astype(np.int32)
    without, with_memory = context.nll_by_position(lm, ids, tgt_len=5, rows=2)
    assert without.shape == with_memory.shape == (4, 5)
    for i, start in enumerate((5, 10, 20, 25)):  # rows of three segments begin at 0 and 15
        window = ids[None, start : start + 6]
        alone = lm.score(window[:, :-1], window[:, 1:], [tf.zeros([1, 0, 8])] * 2)[0][0]
        np.testing.assert_allclose(without[i], alone, rtol=1e-4)
        mems = None
        for before in range(start // 15 * 15, start, 5):
            _, mems = lm.score(ids[None, before : before + 5], ids[None, before + 1 : before + 6], mems)
        np.testing.assert_allclose(with_memory[i], lm.score(window[:, :-1], window[:, 1:], mems)[0][0], rtol=1e-4)
    axes = context.draw_memory(np.stack([without, with_memory]), 6, "ppl").axes[0]
    for line, values in zip(axes.lines, (without, with_memory), strict=True):
        np.testing.assert_allclose(line.get_data(), [range(1, 6), np.exp(values.mean(0))], rtol=1e-6)
    assert mentions(axes.lines[0].get_label(), f"{np.exp(without.mean()):.2f}")
    with raises_parameter("text", 20, "at least 21 tokens"):
        context.nll_by_position(lm, ids[:20], tgt_len=5, rows=2)


def test_recl_is_the_first_context_that_more_tokens_do_not_help(plot):
    assert context.recl(np.array([0.2, 0.01, 0.009, 0.3]), step=16) == 48
    assert context.recl(np.array([0.001, 0.2]), step=16) == 16
    assert context.recl(np.array([0.2, 0.1]), step=16) == 48  # at least


# ---------------------------------------- scaling


def cost(mode, argument, contestant, value, microseconds):
    common = {"mode": mode, "argument": argument, "contestant": contestant}
    return {**common, "value": value, "microseconds_per_token": microseconds}


COSTS = [
    cost("training", "mem_len", "a", 0, 3.0),
    cost("training", "mem_len", "a", 8, 4.0),
    cost("training", "mem_len", "b", 0, 5.0),
    cost("training", "mem_len", "b", 8, 9.0),
    cost("generation", "tokens_before", "b", 10, 7.0),
    cost("generation", "tokens_before", "b", 1000, 7.0),
]


def test_costs_have_a_panel_an_argument_from_zero_on(plot):
    figure = plot.draw_scaling(COSTS)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    lines = [
        {line.get_label(): np.transpose(line.get_data()).tolist() for line in axes.get_lines() if len(line.get_xdata())}
        for axes in panels
    ]
    assert lines == [{"a": [[0, 3], [8, 4]], "b": [[0, 5], [8, 9]]}, {"b": [[10, 7], [1000, 7]]}]
    assert [axes.get_xlabel() for axes in panels] == ["mem_len", "tokens_before"]
    assert [axes.get_xscale() for axes in panels] == ["linear", "log"]
    assert all(axes.get_ylim()[0] == 0 for axes in panels)
    assert panels[0].get_lines()[1].get_color() == panels[1].get_lines()[1].get_color()


def test_the_program_draws_the_benchmark_s_figures(main, tmp_path, capsys):
    path, output = tmp_path / "figures.json", tmp_path / "picture.png"
    path.write_text(json.dumps({"rows": COSTS}))
    main("--kind=scaling", f"--figures={path}", f"--output={output}")
    assert output.read_bytes().startswith(b"\x89PNG")
    path.write_text(json.dumps({"rows": [{"mode": "training"}]}))
    with raises_parameter("figures"):
        main("--kind=scaling", f"--figures={path}", f"--output={output}")
    for other in ("# A README", "[]", '{"columns": []}', '{"rows": null}'):
        path.write_text(other)
        with raises_parameter("figures"):
            main("--kind=scaling", f"--figures={path}", f"--output={output}")
    with raises_naming(flags.IllegalFlagValueError, "kind=scaling", "--figures"):
        main("--kind=scaling", f"--output={output}")


# ---------------------------------------- the program


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kind=curves"],
        pytest.param(["--kind=attention", "--text=a bad cab", "--tgt_len=4"], marks=pytest.mark.slow),
        pytest.param(
            ["--kind=attention", "--text=a bad cab", "--tgt_len=4", "--layer=0", "--head=1"], marks=pytest.mark.slow
        ),
        ["--kind=terms", "--text=a bad cab", "--tgt_len=4", "--layer=0", "--head=1"],
        pytest.param(["--kind=context", "--context_step=4", "--mem_len=8"], marks=pytest.mark.slow),
        pytest.param(["--kind=memory", "--tgt_len=8"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_program_writes_a_png_file(main, run, tmp_path, capsys, arguments):
    (tmp_path / "text.txt").write_text("a bad cab is a fad " * 10)
    output = tmp_path / "picture.png"
    if arguments[0] in ("--kind=context", "--kind=memory"):
        arguments = [*arguments, f"--text_path={tmp_path / 'text.txt'}"]
    main(f"--model_dir={run}", f"--output={output}", *arguments)
    assert output.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{arguments[0].removeprefix('--kind=')}: {output}\n"


@pytest.mark.parametrize(
    "arguments, name, value",
    [
        (["--model_dir=nowhere"], "model_dir", "nowhere"),
        (["--kind=attention"], "text", None),
        (["--kind=attention", "--text=abc", "--layer=2"], "layer", 2),
        (["--kind=attention", "--text=abc", "--head=-1"], "head", -1),
        (["--kind=attention", "--text=abc", "--tgt_len=4"], "tgt_len", 4),
        (["--kind=attention", "--text=abc", "--model_dir=a,b"], "model_dir", ["a", "b"]),
        (["--kind=attention", "--text=abc", "--attention=cross"], "attention", "cross"),
        (["--kind=terms", "--text=abc"], "head", None),
        (["--kind=terms", "--text=abc", "--head=2"], "head", 2),
        (["--kind=terms", "--head=0"], "text", None),
        (["--kind=context", "--max_context=8"], "max_context", 8),
        (["--kind=context", "--context_step=0"], "context_step", 0),
        (["--kind=memory"], "tgt_len", None),
        (["--kind=memory", "--mem_len=0"], "mem_len", 0),
        (["--kind=memory", "--text=abc", "--max_tokens=1"], "max_tokens", 1),
        (["--kind=memory", "--font=log.csv"], "font", "log.csv"),
        (["--kind=context", "--mem_len=-5"], "mem_len", -5),
        (["--kind=attention", "--text=abc", "--font=log.csv"], "font", "log.csv"),
    ],
    ids=str,
)
def test_a_bad_flag_is_an_error_with_its_name(main, run, tmp_path, arguments, name, value):
    with raises_parameter(name, value):
        main(f"--model_dir={run}", f"--output={tmp_path / 'picture.png'}", *arguments)
    assert not (tmp_path / "picture.png").exists()


def test_sinusoids_need_no_text(main, tmp_path):
    """A text for absolute positions alone is refused; next to a run with relative positions, it has an effect."""
    make_tagger(tmp_path / "relative")
    make_tagger(tmp_path / "absolute", attn_type="transformer", pos_embed="sin")
    (tmp_path / "text.txt").write_text("abc\ncab\n")
    with raises_parameter("kind", "attention"):
        main(f"--model_dir={tmp_path / 'absolute'}", "--kind=attention", "--text=a", f"--output={tmp_path / 'a.png'}")
    for plot_ner in program("tools/plot_ner.py"):

        def draw(*names, plot_ner=plot_ner):
            runs = ",".join(str(tmp_path / name) for name in names)
            options = [f"--text_path={tmp_path / 'text.txt'}", "--distance=2", f"--output={tmp_path / 'b.png'}"]
            return run_here(plot_ner, f"--model_dir={runs}", *options)

        with raises_parameter("text_path"):
            draw("absolute")
        assert not (tmp_path / "b.png").exists()
        draw("absolute", "relative")
        assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, named",
    [(["--kind=attention", "--text_path=no.txt"], "no.txt")],
    ids=str,
)
def test_bad_input_is_one_clear_error(main, run, tmp_path, arguments, named):
    with raises_naming((ValueError, OSError), named):
        main(f"--model_dir={run}", f"--output={tmp_path / 'picture.png'}", *arguments)
    assert not (tmp_path / "picture.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "which",
    [
        [],
        pytest.param(["--attention=decoder", "--head=1"], marks=pytest.mark.slow),
        pytest.param(["--attention=encoder", "--layer=0"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_program_draws_runs_of_pairs(main, pairs_run, tmp_path, which):
    output = tmp_path / "picture.png"
    main("--kind=attention", f"--model_dir={pairs_run}", "--text=abc", f"--output={output}", *which)
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, name",
    [
        ([], "text"),
        (["--text=abc", "--tgt_len=4"], "tgt_len"),
        (["--text=abc", "--mem_len=4"], "mem_len"),
        (["--text=abc", "--layer=2"], "layer"),
        (["--text=abc", "--head=2"], "head"),
        (["--text=abc\nab"], "text"),
    ],
    ids=str,
)
def test_a_bad_flag_for_runs_of_pairs_is_an_error_with_its_name(main, pairs_run, tmp_path, arguments, name):
    with raises_parameter(name):
        main("--kind=attention", f"--model_dir={pairs_run}", f"--output={tmp_path / 'picture.png'}", *arguments)
    assert not (tmp_path / "picture.png").exists()


@pytest.mark.parametrize(
    "arguments, facts",
    [
        (["--text="], ["text", 1]),
        (["--text=abd"], ["text", 1, "'d'"]),
        (["--kind=terms", "--text=abc", "--head=0"], ["family", "'transformer'"]),
    ],
    ids=str,
)
def test_bad_input_for_runs_of_pairs_is_one_clear_error(main, pairs_run, tmp_path, arguments, facts):
    with raises_naming(ValueError, *facts):
        main("--kind=attention", f"--model_dir={pairs_run}", f"--output={tmp_path / 'picture.png'}", *arguments)
    assert not (tmp_path / "picture.png").exists()


@pytest.mark.slow
def test_a_source_may_come_from_a_file_of_one_line(main, pairs_run, tmp_path):
    path, output = tmp_path / "source.txt", tmp_path / "picture.png"
    path.write_text("abc\nab\n")
    arguments = ["--kind=attention", f"--model_dir={pairs_run}", f"--text_path={path}", f"--output={output}"]
    with raises_parameter(str(path), 2):
        main(*arguments)
    path.write_text("abc\n")
    main(*arguments)
    assert output.exists()


def test_absolute_positions_have_no_terms_to_draw(main, tmp_path):
    vocab = Vocab(level="char", special=list(LETTERS))
    vocab.build()
    model = {**SMALL, "mem_len": 0}
    RunFolder(tmp_path / "run").create({}, model, [vocab], TransformerLM(**model), step=1)
    arguments = ["--kind=terms", f"--model_dir={tmp_path / 'run'}", "--text=abc", "--head=0", "--output=no.png"]
    with raises_parameter("kind", "terms"):
        main(*arguments)


@pytest.mark.parametrize(
    "name, beginning", [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml"), ("a", b"\x89PNG")]
)
def test_a_picture_has_the_format_of_its_ending(main, tmp_path, name, beginning):
    main("--kind=masks", "--tgt_len=2", "--mem_len=0", f"--output={tmp_path / name}")
    assert (tmp_path / name).read_bytes().startswith(beginning)


def test_another_ending_is_refused_with_those_that_are_allowed(main, tmp_path):
    with raises_parameter("output", str(tmp_path / "a.jpg"), limit=".png, .pdf, .svg"):
        main("--kind=masks", f"--output={tmp_path / 'a.jpg'}")
    assert not (tmp_path / "a.jpg").exists()


def test_a_text_shorter_than_the_segment_is_all_of_it(plot, run, monkeypatch):
    """B1: 18 subwords, and an error that asked for 32."""
    flags.FLAGS.unparse_flags()
    flags.FLAGS(["plot.py", "--kind=attention", f"--model_dir={run}", "--text=abc", "--output=a.png"])
    assert plot.text_of_run(RunFolder(run, "language_model"))[2] == 3


def test_a_font_without_glyphs_for_a_text_is_refused_rather_than_drawn_as_boxes(tmp_path, monkeypatch):
    monkeypatch.setitem(drawing.rcParams, "font.monospace", [*drawing.rcParams["font.monospace"]])
    drawing.use_font(None, "abc ␣é")
    with raises_naming(ValueError, "DejaVuSans.ttf", "'南'", "'京'", "--font"):
        drawing.use_font(None, "南京南", "sans-serif")
    file = drawing.font_manager.findfont("DejaVu Serif")
    drawing.use_font(file, "abc")
    assert drawing.rcParams["font.monospace"][0] == "DejaVu Serif"
    with raises_parameter("font", file):
        drawing.use_font(file, "南")


def test_a_missing_matplotlib_is_named_with_its_extra(main, plot, run, monkeypatch):
    monkeypatch.setattr(drawing, "Figure", None)
    with raises_naming(ValueError, "txl_tf[plot]"):
        main(f"--model_dir={run}", "--output=picture.png")


# ---------------------------------------- ideas, without a run


def test_masks_are_those_of_create_mask():
    figure = ideas.draw_masks(3, 2)
    causal, memory, same_length = (axes.images[0].get_array() for axes in figure.axes)
    np.testing.assert_array_equal(causal, [[0, 1, 1], [0, 0, 1], [0, 0, 0]])
    np.testing.assert_array_equal(memory, [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(same_length, [[0, 0, 0, 1, 1], [1, 0, 0, 0, 1], [1, 1, 0, 0, 0]])
    assert [text.get_text() for text in figure.axes[0].texts] == list("011001000")
    assert mentions(figure.axes[2].get_title(), "same_length", 3)


def test_the_shift_moves_every_score_to_the_key_at_its_distance():
    before, padded, reshaped, after = ideas.shift_steps(2, 1)
    np.testing.assert_array_equal(before, [[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(padded, [[0, 1, 2, 3], [0, 4, 5, 6]])
    np.testing.assert_array_equal(reshaped, [[0, 1], [2, 3], [0, 4], [5, 6]])
    np.testing.assert_array_equal(after, [[2, 3, 0], [4, 5, 6]])
    np.testing.assert_array_equal(after.ravel(), reshaped[1:].ravel())
    words = [text.get_text() for text in ideas.draw_shift(2, 1).axes[3].texts]
    assert words == ["r1", "r0", "0", "r2", "r1", "r0"]

    qlen, mlen = 4, 3
    *_, after = ideas.shift_steps(qlen, mlen)
    for i in range(qlen):
        for j in range(mlen + i + 1):
            assert after[i, j] == 1 + i * 7 + (6 - (mlen + i - j))  # column of the distance, farthest first


def test_positions_shows_table_and_products_and_that_they_are_blind_to_direction():
    table = positional_encoding(21, 8).numpy()[0]
    axes = ideas.draw_positions(table).axes
    np.testing.assert_array_equal(axes[0].images[0].get_array(), table)
    np.testing.assert_allclose(axes[1].images[0].get_array(), table @ table.T, rtol=1e-5)
    forwards, backwards = ({*map(tuple, np.round(line.get_xydata(), 4))} for line in axes[2].lines)
    assert forwards == backwards and len(forwards) == 21


def test_the_products_of_positions_are_not_monotone():
    """As docs/pictures.md says."""
    np.testing.assert_array_equal(ideas.rises(np.array([5.0, 4, 3, 3.5, 3.5, 2, 9])), [2, 5])
    products = np.cos(np.arange(101)[:, None] / 10000 ** (np.arange(64) / 64)).sum(1)  # of d_model 128
    rises = ideas.rises(products)
    assert rises[0] == 11 and len(rises) == 35
    title = ideas.draw_positions(positional_encoding(201, 128).numpy()[0]).axes[2].get_title()
    assert mentions(title, 35, 100, 11)


@pytest.mark.parametrize("d_model, first, rising", [(64, 5, 39), (512, 43, 14)])
def test_wider_positions_fall_for_longer(d_model, first, rising):
    table = positional_encoding(101, d_model).numpy()[0].astype(float)
    rises = ideas.rises(table @ table[0])
    assert rises[0] == first and len(rises) == rising


def test_wavelengths_are_periods_of_the_table():
    periods = ideas.wavelengths(8)
    np.testing.assert_allclose(periods, 2 * np.pi * np.array([1, 10, 100, 1000]), rtol=1e-6)
    assert ideas.wavelengths(128)[-1] == pytest.approx(54410, rel=1e-4)
    axes = ideas.draw_wavelengths(50, 8).axes
    np.testing.assert_allclose(axes[0].lines[0].get_ydata(), periods)
    assert mentions(axes[0].get_title(), 1, 4, 50)
    positions, sines = axes[1].lines[1].get_data()
    np.testing.assert_allclose(sines, np.sin(positions / 10), atol=1e-6)


@pytest.mark.parametrize("d_model, nearest", [(64, 1.47), (128, 1.95), (512, 3.71)])
def test_2000_positions_are_all_different(d_model, nearest):
    found = ideas.gaps(2000, d_model)
    table = positional_encoding(2000, d_model).numpy()[0].astype(float)
    np.testing.assert_allclose(found, np.linalg.norm(table[1:] - table[0], axis=1), rtol=1e-3)
    np.testing.assert_allclose(found[:100], np.linalg.norm(table[1001:1101] - table[1000], axis=1), rtol=1e-3)
    assert np.argmin(found) == 0 and found[0] == pytest.approx(nearest, abs=0.005)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kind=masks"],
        ["--kind=shift", "--tgt_len=2", "--mem_len=1"],
        pytest.param(["--kind=positions", "--positions=21", "--d_model=8"], marks=pytest.mark.slow),
        ["--kind=wavelengths", "--positions=21", "--d_model=8", "--dpi=50"],
    ],
    ids=str,
)
def test_the_program_draws_ideas_without_a_run(main, tmp_path, capsys, arguments):
    main(*arguments, f"--output={tmp_path / 'picture.png'}")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith(f"{arguments[0].removeprefix('--kind=')}: ")


@pytest.mark.parametrize(
    "arguments, facts",
    [
        (["--kind=masks", "--tgt_len=0"], ["tgt_len", 1, 64, 0]),
        (["--kind=shift", "--mem_len=-1"], ["mem_len", 0, 64, -1]),
        (["--kind=wavelengths", "--d_model=7"], ["d_model", 7]),
        (["--kind=masks", "--layer=7"], ["--layer", "--kind=attention, terms", "--kind=masks"]),
        (["--kind=shift", "--model_dir=x"], ["--model_dir", "--kind=curves, attention", "--kind=shift"]),
        (["--kind=curves", "--model_dir=x", "--text=a"], ["--text", "--kind=attention, terms, memory"]),
        (["--kind=terms"], ["terms", "--model_dir"]),
        (["--kind=memory", "--model_dir=x", "--max_tokens=-100"], ["max_tokens", -100]),
    ],
    ids=str,
)
def test_bad_flags_of_ideas_are_named(main, tmp_path, arguments, facts):
    with raises_naming((ValueError, flags.IllegalFlagValueError), *facts):
        main(*arguments, f"--output={tmp_path / 'picture.png'}")
    assert not (tmp_path / "picture.png").exists()


def test_the_picture_along_a_text_has_none_half_and_all_of_the_memory(main, run, plot, tmp_path, monkeypatch):
    text, drawn = "abc def ghi", []
    monkeypatch.setattr(plot, "save", lambda figure, path, dpi: drawn.append(figure))
    main("--kind=memory", f"--model_dir={run}", f"--text={text}", "--tgt_len=5", f"--output={tmp_path / 'a.png'}")
    folder = RunFolder(run)
    lm, ids = folder.load_model(folder.find_checkpoint()), folder.load_vocab().encode(text)  # the program's model
    expected = np.concatenate([nll for _, nll in nll_by_memory(lm, ids, 5, (0, 2, 4))], 1) / math.log(2)
    (axes,) = drawn[0].axes
    lines, starts = axes.lines[:3], axes.lines[3:]
    for line, values in zip(lines, expected, strict=True):
        np.testing.assert_allclose(line.get_data(), [range(1, 11), values], rtol=1e-4)
    assert [line.get_xdata()[0] for line in starts] == [0.5, 5.5]
    assert [label.get_text() for label in axes.get_xticklabels()] == [*"bc␣def␣ghi"]
    with raises_parameter("text", "a"):
        main("--kind=memory", f"--model_dir={run}", "--text=a", "--tgt_len=5", f"--output={tmp_path / 'a.png'}")
