"""With `reset_token`, every document of a text gets what it gets as a text by itself, wherever its borders lie."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, eagerly, mentions, raises_naming, raises_parameter, randomise, train_run
from segments import state_of

import txl_tf
from txl_tf.language.session import Session
from txl_tf.language.sliding_window import sliding_window_nll
from txl_tf.language.transformer_lm import AbsoluteTransformer
from txl_tf.serving.language_model import LanguageModelSignatures
from txl_tf.serving.writing import DEFAULTS
from txl_tf.transformer_xl import inference, ring
from txl_tf.transformer_xl.attention import create_mask, rel_multihead_attn
from txl_tf.transformer_xl.cache import cached_forward, initial_state, memory_of, precompute
from txl_tf.transformer_xl.documents import BEFORE, content_mask, document_starts, mask_far_zeros, of_last_document
from txl_tf.transformer_xl.inference import writable_copy

END = 1
CUTS = (0, 5, 10, 15, 20)  # segments of the 20 tokens that are read
# Places of END: first of all, twice in a row, at the first and last place of segments, one for several segments.
BORDERS = [(0, 7, 9, 10, 13), (5, 6, 13, 14, 20), (2,)]
LENGTHS = [
    pytest.param({"mem_len": 0}, marks=pytest.mark.slow),
    {"mem_len": 3, "clamp_len": 4},
    pytest.param({"mem_len": 5, "same_length": True, "untie_r": True}, marks=pytest.mark.slow),
    pytest.param({"mem_len": 12, "untie_r": True, "cutoffs": [5, 12], "div_val": 2}, marks=pytest.mark.slow),
    pytest.param({"mem_len": 12, "same_length": True, "clamp_len": 4}, marks=pytest.mark.slow),
]
EAGER_OR_NOT = pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)])


def rows(n=21, borders=BORDERS, seed=0):
    """int32 `[rows, n]`, END at the `borders` of each row and nowhere else."""
    text = np.random.default_rng(seed).integers(2, SMALL["n_token"], [len(borders), n]).astype(np.int32)
    for row, places in zip(text, borders, strict=True):
        row[list(places)] = END
    return text


def segments(text, cuts=CUTS):
    """`(tokens, labels)` of each segment of `[rows, n + 1]`."""
    return [(text[:, a:b], text[:, a + 1 : b + 1]) for a, b in zip(cuts, cuts[1:], strict=False)]


def pieces(row, cuts=CUTS):
    """The documents of a row as `[(start, end), ...]` each, cut where the segments end."""
    ends = [0, *(i for i in range(1, cuts[-1]) if row[i] == END), cuts[-1]]
    documents = []
    for start, end in zip(ends, ends[1:], strict=False):
        places = [start, *(cut for cut in cuts if start < cut < end), end]
        documents.append(list(zip(places, places[1:], strict=False)))
    return documents


def each_alone(lm, text, cuts=CUTS, method="score"):
    """What `lm.score` or `lm.log_probs` gives for every document as a text by itself: `[rows, n, ...]`."""
    with eagerly():
        return np.stack([np.concatenate([*_of_row(lm, row, cuts, method)]) for row in text])


def _of_row(lm, row, cuts, method):
    for document in pieces(row, cuts):
        mems = None
        for a, b in document:
            labels = [row[None, a + 1 : b + 1]] if method == "score" else []
            result, mems = getattr(lm, method)(row[None, a:b], *labels, mems)
            yield result[0]


def dataset(text, cuts=CUTS):
    tokens, labels = zip(*segments(text, cuts), strict=True)
    return tf.data.Dataset.from_tensor_slices((np.stack(tokens), np.stack(labels)))


@pytest.fixture(scope="module")
def pair():
    """Makes a model that resets at END, and one of the same weights that does not; what stands before counts much."""

    def make(**options):
        models = [
            txl_tf.TransformerXLLM(**{**SMALL, "dropout": 0.0, "reset_token": token, **options})
            for token in (END, None)
        ]
        for lm in models:
            randomise(lm, scale=0.7)
        return models

    return make


# ---------------------------------------- masks

ROWS_OF_TWO = np.array([[7, 7, END, 7], [END, END, 7, 7]], np.int32)


def test_a_document_starts_at_its_reset_token():
    np.testing.assert_array_equal(document_starts(ROWS_OF_TWO, END), [[BEFORE, BEFORE, 2, 2], [0, 1, 1, 1]])
    counted = tf.constant([[True, True, False, True], [True, False, True, True]])
    found = document_starts(tf.cast(ROWS_OF_TWO, tf.int64), END, counted)
    np.testing.assert_array_equal(found, [[BEFORE] * 4, [0, 0, 0, 0]])


def test_masks_are_these_matrices():
    starts = document_starts(ROWS_OF_TWO, END)
    content, attn_mask = content_mask(starts, 2), mask_far_zeros(create_mask(4, 2), starts)
    np.testing.assert_array_equal(
        content[0], [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]]
    )
    np.testing.assert_array_equal(
        content[1], [[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]]
    )
    np.testing.assert_array_equal(
        attn_mask[0], [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
        attn_mask[1], [[0, 0, 0, 1, 1, 1], [1, 0, 0, 0, 1, 1], [1, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0]]
    )


def test_what_is_kept_of_the_memory_is_of_the_last_document():
    starts = document_starts(ROWS_OF_TWO, END)
    np.testing.assert_array_equal(of_last_document(starts, 4, 3)[..., 0], [[0, 1, 1], [1, 1, 1]])
    np.testing.assert_array_equal(of_last_document(starts, 4, 5)[..., 0], [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]])
    found = of_last_document(tf.constant([[BEFORE] * 4, [0, 1, 1, 1]]), tf.constant([1, 3]), 3)
    np.testing.assert_array_equal(found[..., 0], [[1, 1, 1], [0, 1, 1]])


def one_query(i, first, w, mems, r, u, v, w_q, w_k, w_v, w_r):
    """The head's vector of the query at place i, whose document begins at place `first`: the paper's equation."""
    score_of, value_of = {}, {}
    places = range(-len(mems), i + 1) if first is None else range(first - len(mems), i + 1)
    for place in places:
        hidden = mems[place] if place < 0 else w[place]
        if first is not None and place < first:
            hidden = np.zeros_like(w[0])
        q, k = w[i] @ w_q, hidden @ w_k
        distance = r[len(r) - 1 - (i - place)]
        score_of[place] = ((q + u) @ k + (q + v) @ (distance @ w_r)) / np.sqrt(len(u))
        value_of[place] = hidden @ w_v
    total = sum(np.exp(score) for score in score_of.values())
    return sum(np.exp(score_of[place]) / total * value_of[place] for place in places)


@pytest.mark.parametrize("mlen", [0, 3, 6])
def test_attention_is_a_loop_over_the_paper_s_equation_with_zeros_before_the_document(mlen):
    rng, firsts = np.random.default_rng(0), [[None, None, 2, 2, 4], [0, 1, 1, 1, 1]]
    w, mems, r = (rng.normal(size=shape) for shape in ([2, 5, 4], [2, mlen, 4], [1, mlen + 5, 4]))
    u, v, qkv, r_kernel = (rng.normal(size=shape) for shape in ([2, 3], [2, 3], [4, 3, 2, 3], [4, 2, 3]))
    expected = np.zeros([2, 5, 2, 3])
    for row, head, i in np.ndindex(2, 2, 5):
        kernels = [*qkv[:, :, head].transpose(1, 0, 2), r_kernel[:, head]]
        expected[row, i, head] = one_query(i, firsts[row][i], w[row], mems[row], r[0], u[head], v[head], *kernels)
    starts = tf.constant([[BEFORE if first is None else first for first in row] for row in firsts])
    attn_mask, content = mask_far_zeros(create_mask(5, mlen), starts), content_mask(starts, mlen)
    tensors = [tf.constant(x, tf.float32) for x in (w, r, u, v, attn_mask, mems, qkv, r_kernel)]
    *given, qkv, r_kernel = tensors
    found = rel_multihead_attn(
        *given, tf.reshape(qkv, [4, -1]), tf.reshape(r_kernel, [4, -1]), tf.eye(6), content_mask=content
    )
    np.testing.assert_allclose(found, expected.reshape(2, 5, 6), rtol=0, atol=1e-5)


# ---------------------------------------- scores


@pytest.mark.slow
@EAGER_OR_NOT
@pytest.mark.parametrize("options", LENGTHS, ids=str)
def test_scores_and_evaluation_are_those_of_each_document_by_itself(pair, options, eager):
    (lm, without), text = pair(**options), rows()
    expected, mems, found = each_alone(without, text), None, []
    with eagerly() if eager else contextlib.nullcontext():
        for tokens, labels in segments(text):
            nll, mems = lm.score(tokens, labels, mems)
            found.append(nll)
    np.testing.assert_allclose(np.concatenate(found, 1), expected, rtol=0, atol=1e-5)
    for static_shapes in (False, True):
        lm.compile(static_shapes=static_shapes, run_eagerly=eager)
        np.testing.assert_allclose(lm.evaluate(dataset(text), verbose=0), expected.mean(), rtol=0, atol=3e-6)
    without.compile(run_eagerly=eager)
    assert abs(without.evaluate(dataset(text), verbose=0) - expected.mean()) > 1e-4  # or nothing was tested


def test_log_probs_and_memory_are_those_of_each_document_by_itself(eager, pair):
    (lm, without), text = pair(mem_len=7), rows()
    mems, found = None, []
    for a, b in zip(CUTS, CUTS[1:], strict=False):
        log_probs, mems = lm.log_probs(text[:, a:b], mems)
        found.append(log_probs)
    np.testing.assert_allclose(
        np.concatenate(found, 1), each_alone(without, text, method="log_probs"), rtol=0, atol=1e-5
    )
    for b, (row, places) in enumerate(zip(text, BORDERS, strict=True)):  # 7 positions: all but the first 13 tokens
        last = max(place for place in places if place < 20)
        own = None
        for start, end in pieces(row)[-1]:
            _, own = without.score(row[None, start:end], row[None, start:end], own)
        zeros = max(last - 13, 0)
        for mem, alone in zip(mems, own, strict=True):
            np.testing.assert_allclose(mem[b], alone[0], rtol=0, atol=1e-6)
            assert not mem[b, :zeros].numpy().any() and mem[b, zeros:].numpy().any(1).all()


@pytest.mark.slow
def test_half_precision_resets_as_well(pair):
    (lm, without), text = pair(mem_len=5, dtype="mixed_bfloat16"), rows()
    mems, found = None, []
    for tokens, labels in segments(text):
        nll, mems = lm.score(tokens, labels, mems)
        found.append(nll)
    assert mems[0].dtype == tf.bfloat16
    expected = each_alone(without, text)
    np.testing.assert_allclose(np.concatenate(found, 1), expected, rtol=0, atol=0.08)
    lm.compile()
    np.testing.assert_allclose(lm.evaluate(dataset(text), verbose=0), expected.mean(), rtol=0, atol=0.02)


@pytest.mark.slow
def test_a_sliding_window_resets_too(pair):
    (lm, without), text = pair(mem_len=3), rows(borders=[(9,)])[0]
    found = sliding_window_nll(lm, text, window=6)
    np.testing.assert_allclose(found[9:], sliding_window_nll(without, text[9:], window=6), rtol=0, atol=1e-5)
    np.testing.assert_allclose(found[:9], sliding_window_nll(without, text[:10], window=6), rtol=0, atol=1e-5)


def test_attention_pictures_show_zeros_by_their_distance_alone(pair):
    (lm, without), text = pair(mem_len=3), rows(6, [(2,)])
    for layer in (0, 1):
        found = lm.network.attention_probs(text, lm.initial_mems(1), layer)
        np.testing.assert_allclose(tf.reduce_sum(found, -1), np.ones([2, 1, 6]), rtol=0, atol=1e-6)
        before, after = text[:, :2], text[:, 2:]
        alone = without.network.attention_probs(before, lm.initial_mems(1), layer)
        np.testing.assert_allclose(found[:, :, :2, :5], alone, rtol=0, atol=1e-6)
        alone = without.network.attention_probs(after, lm.initial_mems(1), layer)
        np.testing.assert_allclose(found[:, :, 2:, 2:], alone, rtol=0, atol=1e-6)  # 3 zeros, then the document
        assert not found[:, :, 2:, :2].numpy().any()


# ---------------------------------------- padding


def test_padding_is_no_border_and_borders_may_stand_between(pair):
    (lm, _), text = pair(mem_len=4, reset_token=0), rows(12, [(0, 3), (2, 7), (5, 6)])
    text[text == END] = 0  # also the id that stands in for padding
    shown = np.array([[1, 1, 0, 1, 1, 1], [1, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 1]], bool)
    padded = np.where(shown, text[:, :6], 0).astype(np.int32)  # of which none counts
    hidden, mems = lm.network(padded, lm.initial_mems(3), padding_mask=tf.constant(shown))
    after, _ = lm.network(text[:, 6:], mems)
    for b in range(3):
        own = text[b : b + 1, :6][:, shown[b]]
        expected, own_mems = lm.network(own)
        np.testing.assert_allclose(hidden[b][shown[b]], expected[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(after[b], lm.network(text[b : b + 1, 6:], own_mems)[0][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("same_length", [pytest.param(False, marks=pytest.mark.slow), True])
def test_prompts_of_unequal_length_with_a_border_inside(pair, same_length):
    lm, _ = pair(mem_len=4, same_length=same_length)
    text, lengths = rows(12, [(3,), (1, 2, 8), (0, 5)]), [4, 6, 1]
    text[0, 0] = text[2, 2] = END  # in what is to be ignored
    weights = precompute(lm.network, 6)
    state = initial_state(lm.network, 3, 6)
    hidden, state = cached_forward(lm.network, weights, text[:, :6], state, lengths=lengths)
    after, _ = cached_forward(lm.network, weights, text[:, 6:], state)
    for b, length in enumerate(lengths):
        expected, mems = lm.network(text[b : b + 1, 6 - length : 6])
        np.testing.assert_allclose(hidden[b, -length:], expected[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(after[b], lm.network(text[b : b + 1, 6:], mems)[0][0], rtol=0, atol=1e-5)


# ---------------------------------------- cached inference


OF_ANY_LENGTH = [{"mem_len": 9}, {"mem_len": 3, "same_length": True, "clamp_len": 2}]


@pytest.mark.parametrize(
    "options, blocks, in_place",
    [
        (OF_ANY_LENGTH[0], False, True),
        (OF_ANY_LENGTH[1], True, True),
        (OF_ANY_LENGTH[0], True, False),
        (OF_ANY_LENGTH[1], False, False),
    ],
    ids=str,
)
@pytest.mark.slow
def test_cached_segments_of_any_length_are_those_of_the_network(pair, options, blocks, in_place, monkeypatch):
    if blocks:  # queries in blocks, rows in a loop
        monkeypatch.setattr(ring, "QUERY_BLOCK", 2)
        monkeypatch.setattr(inference, "MAX_UNROLLED_ROWS", 1)
        monkeypatch.setattr(inference, "FEW_ROWS", 1)
    network = pair(**options)[0].network
    text = rows(34, [(0, 6, 8, 9, 17), (5, 11, 12, 19, 22, 33), (7,), ()])
    weights, state, mems = precompute(network, 6), writable_copy(initial_state(network, 4, 6)), None
    forward = tf.function(cached_forward, autograph=False)
    start = 0
    for tgt_len in (5, 1, 6, 1, 4, 2, 1, 1, 1, 6, 6):  # goes round the ring of mem_len + 6 slots
        tokens = tf.constant(text[:, start : start + tgt_len])
        expected, mems = network(tokens, mems)
        hidden, state = forward(network, weights, tokens, state, in_place=in_place)
        np.testing.assert_allclose(hidden, expected, rtol=0, atol=1e-5)
        found, projected = memory_of(network, state), memory_of(network, state_of(network, mems))
        for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(projected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
        start += tgt_len


def test_a_state_that_is_not_written_in_place_stays_as_it_is(pair):
    network = pair(mem_len=4)[0].network
    weights = precompute(network, 2)
    _, state = cached_forward(network, weights, rows(2, [()]), initial_state(network, 1, 2))
    before = tf.nest.map_structure(lambda tensor: tensor.numpy().copy(), state)
    for tokens in ([[END]], [[5, END]]):
        _, after = cached_forward(network, weights, tf.constant(tokens), state)
        tf.nest.map_structure(np.testing.assert_array_equal, state, before)
        assert not np.array_equal(after.keys[0], before.keys[0])


# ---------------------------------------- generation


@pytest.mark.slow
def test_a_prompt_counts_from_its_last_document_on(pair):
    (lm, without), text = pair(mem_len=6, n_layer=1), rows(9, [(2, 5), (5,)] * 32)
    for model in (lm, without):  # END is never written: `lm` would reset once more
        model.softmax.biases[0].assign_add(-30 * tf.one_hot(END, 23))
    padded = np.pad(text, [(0, 0), (0, 3)], constant_values=END)
    for sampling in ({"temperature": 0.0}, {"temperature": 1.5, "top_p": 0.9, "seed": np.arange(64)}):
        expected = without.generate(text[:, 5:], 12, **sampling).numpy()
        np.testing.assert_array_equal(lm.generate(text, 12, **sampling)[:, 5:], expected)
        np.testing.assert_array_equal(lm.generate(padded, 12, lengths=[9] * 64, **sampling)[:, 5:21], expected)
        assert END not in expected[:, 4:]
    assert (without.generate(text, 12, **sampling).numpy()[:, 9:] != expected[:, 4:]).any()


@pytest.mark.slow
def test_a_reset_token_that_is_written_starts_a_text_anew(pair):
    (lm, without), prompt, n = pair(mem_len=5), rows(4, [(), (1,)]), 40
    for model in (lm, without):  # so that END comes now and then
        model.softmax.biases[0].assign_add(16 * tf.one_hot(END, 23))
    sampling = {"temperature": 8.0, "seed": [4, 13]}
    session = Session(lm, 2)
    session.read(prompt)
    written, nll = session.write(n, with_nll=True, **sampling)
    text = np.concatenate([prompt, written], 1)
    for row, found in zip(written, nll, strict=True):  # token by token
        start, *others = np.flatnonzero(row == END)
        assert others and start < n - 9, row
        expected = each_alone(without, row[None, start:], range(n - start))
        np.testing.assert_allclose(found[start + 1 :], expected[0], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(lm.generate(prompt, n, **sampling), text)


@pytest.mark.slow
def test_with_static_shapes_a_reset_token_that_is_written_does_the_same(pair):
    (lm, _), prompt = pair(mem_len=5), rows(4, [(), (1,)] * 16)
    sampling = {"temperature": 2.0, "seed": np.arange(32)}
    expected = lm.generate(prompt, 40, **sampling).numpy()
    assert END in expected[:, 4:30]  # of 832 symbols
    lm.compile(static_shapes=True)
    np.testing.assert_array_equal(lm.generate(prompt, 40, **sampling), expected)


# ---------------------------------------- training


def sums_and_gradients(lm, text, cuts=CUTS):
    """The nll of all labels and its gradients, over segments with their memory."""
    mems, total = lm.initial_mems(len(text)), 0.0
    with tf.GradientTape() as tape:
        for tokens, labels in segments(text, cuts):
            nll, _, mems = lm.segment_nll(tf.constant(tokens), tf.constant(labels), mems, training=True)
            total += tf.reduce_sum(nll)
    return total, tape.gradient(total, lm.trainable_variables)


@pytest.mark.parametrize(
    "options",
    [
        {"n_layer": 1, "mem_len": 3, "clamp_len": 4},
        pytest.param({"mem_len": 7, "same_length": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loss_and_gradients_are_the_sums_over_documents(pair, options):
    (lm, without), text = pair(**options), rows()
    total, gradients = sums_and_gradients(lm, text)
    expected, sums = 0.0, [0.0] * len(gradients)
    for row in text:
        for document in pieces(row):
            start, end = document[0][0], document[-1][1]
            cuts = [0, *(b - start for _, b in document)]
            nll, of_document = sums_and_gradients(without, row[None, start : end + 1], cuts)
            expected += nll
            sums = [a + tf.convert_to_tensor(b) for a, b in zip(sums, of_document, strict=True)]
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    for found, array in zip(gradients, sums, strict=True):
        np.testing.assert_allclose(found, array, rtol=0, atol=2e-5 * np.abs(array).max())
    _, other = sums_and_gradients(without, text)
    assert max(np.abs(a - tf.convert_to_tensor(b)).max() for a, b in zip(sums, other, strict=True)) > 0.1


TRAINING = {
    "dynamic": ({}, {}),
    "recompute": ({"recompute": True}, {}),
    "static": ({}, {"static_shapes": True}),
    "two replicas": ({}, {}),
    "xla": ({}, {"jit_compile": True}),
    "static and recompute": ({"recompute": True}, {"static_shapes": True}),
    "parts": ({}, {"gradient_accumulation_steps": 2}),
}
SLOW = ("static", "static and recompute", "parts", "two replicas", "xla", "recompute")


@pytest.fixture(scope="module")
def trained(small_lm, two_replicas):
    """Weights, memory and losses after four steps with dropout, in one of the ways of `TRAINING`."""

    def train(way):
        options, compiled = TRAINING[way]
        strategy = two_replicas if way == "two replicas" else tf.distribute.get_strategy()
        with strategy.scope():
            sizes = {"mem_len": 7, "n_layer": 2, "dropout": 0.2, "dropatt": 0.2}
            lm = small_lm(reset_token=END, **sizes, **options)
            lm.seed = 3
            lm.compile(keras.optimizers.SGD(0.05), **compiled)
        text = rows(borders=[*BORDERS, (3, 16)])
        losses = []
        record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))
        lm.fit(dataset(text), verbose=0, callbacks=[record])
        return [v.numpy() for v in lm.trainable_variables], lm.carried_arrays()["mems"], losses

    expected = train("dynamic")
    return lambda way: (train(way), expected)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in TRAINING if way != "dynamic"]
)
def test_every_way_of_training_resets_alike(trained, way):
    (weights, mems, losses), (expected, expected_mems, expected_losses) = trained(way)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6)
    np.testing.assert_allclose(mems, expected_mems, rtol=0, atol=1e-5)
    assert not mems[:, 1, :1].any() and not mems[:, 3, :3].any()  # before 14 and 16; the memory is of 13 to 19
    assert mems[:, 1, 1:].any(-1).all() and mems[:, 3, 3:].any(-1).all()
    for found, array in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, array, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_xla_evaluates_and_writes_the_same(pair):
    (lm, _), text = pair(mem_len=7, n_layer=1), rows()
    lm.compile(static_shapes=True)
    step, carried, mems = tf.function(lm.test_step, jit_compile=True), lm.start_evaluation(3, 5), None
    for tokens, labels in segments(text):
        nll, mems = lm.score(tokens, labels, mems)
        logs, carried = step((tf.constant(tokens), tf.constant(labels)), carried)
        np.testing.assert_allclose(logs["loss"], np.mean(nll), rtol=1e-5)
    cache = lm.decoding_cache(static_shapes=True)
    read_prompt = tf.function(cache.read_prompt, jit_compile=True, autograph=False)
    read_token = tf.function(cache.read_token, jit_compile=True, autograph=False)
    lengths = tf.constant([9, 3, 7])
    hidden, state = read_prompt(tf.constant(text[:, :9]), lengths)
    found, written = [hidden], [7, END, 5, END]
    for i in range(4):
        hidden, state = read_token(cache.precompute(), tf.fill([3], written[i]), state)
        found.append(hidden)
    for b, length in enumerate(lengths):
        expected, mems = lm.network(text[b : b + 1, :length])
        np.testing.assert_allclose(found[0][b], expected[0, -1], rtol=0, atol=1e-5)
        for i in range(4):
            expected, mems = lm.network(tf.constant([[written[i]]]), mems)
            np.testing.assert_allclose(found[1 + i][b], expected[0, 0], rtol=0, atol=1e-5)


# ---------------------------------------- files, serving, runs


def test_a_keras_file_and_a_config_keep_it(pair, tmp_path, eager):
    (lm, _), text = pair(mem_len=5), rows()
    lm.save(tmp_path / "lm.keras")
    loaded = keras.saving.load_model(tmp_path / "lm.keras")
    assert loaded.network.reset_token == loaded.get_config()["reset_token"] == END
    for found, expected in zip(loaded.log_probs(text)[0], lm.log_probs(text)[0], strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_a_served_model_resets(pair):
    (lm, _), text = pair(mem_len=4), rows()
    served = LanguageModelSignatures(lm, top_n=3, max_tokens=50)
    state, mems = np.zeros([3, 2, 2, 2, 4, 3], np.float32), None
    for a, b in ((0, 5), (5, 6), (6, 7), (7, 16)):
        tokens, labels = text[:, a:b], text[:, a + 1 : b + 1]
        found = served.next(tf.constant(tokens), tf.constant(state))
        scored = served.score(tf.constant(tokens), tf.constant(labels), tf.constant(state))
        with eagerly():
            log_probs, _ = lm.log_probs(tokens, mems)
            expected, mems = lm.score(tokens, labels, mems)
        best = tf.math.top_k(log_probs[:, -1], 3)
        np.testing.assert_allclose(found["log_probs"], best.values, rtol=0, atol=1e-5)
        np.testing.assert_allclose(scored["nll"], expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(found["state"], scored["state"], rtol=0, atol=1e-5)
        state = scored["state"].numpy()
    given = {"max_new_tokens": np.int32(9), "temperature": np.float32(1), "top_k": np.int32(0), "top_p": np.float32(1)}
    options = {name: tf.constant(value) for name, value in DEFAULTS.items() if name != "stop"}
    options |= {name: tf.fill([3], value) for name, value in {**given, "seed": np.int32(5)}.items()}
    lengths = np.array([7, 9, 3], np.int32)
    found = served.generate(tokens=tf.constant(text[:, :9]), lengths=tf.constant(lengths), **options)
    np.testing.assert_array_equal(found["tokens"], lm.generate(text[:, :9], 9, seed=[5] * 3, lengths=lengths))


@pytest.mark.slow
def test_a_run_resets_and_a_warm_start_may_change_it(tmp_path, text_file, capsys):
    train_run(tmp_path / "first", text_file)
    warm = {"warm_start_path": str(tmp_path / "first" / "ckpt-12"), "train_steps": 3}
    capsys.readouterr()
    found = train_run(tmp_path / "second", text_file, model={"reset_token": 1}, training=warm)
    assert mentions(capsys.readouterr().out, f"{tmp_path}/first", "reset_token=None", "reset_token=1")
    config = txl_tf.runs.folder.RunFolder(tmp_path / "second").read_config()
    assert config["model"]["reset_token"] == 1 and np.isfinite(found["valid"])
    with raises_naming(ValueError, "model.reset_token", 1, None):
        train_run(tmp_path / "second", text_file, training={"train_steps": 6})


# ---------------------------------------- errors


@pytest.mark.parametrize(
    "value, allowed",
    [(-1, "at least 0"), (23, "at most 22"), (1.5, "an integer"), ("END", "an integer")],
    ids=str,
)
def test_a_bad_reset_token_is_named(value, allowed):
    with raises_parameter("reset_token", value, allowed):
        txl_tf.TransformerXLLM(**SMALL, mem_len=4, reset_token=value)


def test_absolute_positions_have_none():
    with raises_parameter("reset_token", END):
        AbsoluteTransformer(**SMALL, reset_token=END)
    with raises_parameter("reset_token", END):
        txl_tf.TransformerLM(**SMALL, reset_token=END)
    assert "reset_token" not in txl_tf.TransformerLM(**SMALL).get_config()
