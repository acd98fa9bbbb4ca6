"""Which datasets count as shuffled, and that a model with memory refuses them."""

import numpy as np
import pytest
import tensorflow as tf

import txl_tf
from txl_tf.data.order import is_shuffled

pytestmark = pytest.mark.ci

Dataset = tf.data.Dataset
SEGMENTS = np.zeros([6, 2, 5], np.int32)  # six batches of two rows of five tokens


def split(ids):
    return ids[..., :-1], ids[..., 1:]


def segments():
    return Dataset.from_tensor_slices((SEGMENTS, SEGMENTS))


def rows():
    return Dataset.from_tensor_slices((SEGMENTS[0], SEGMENTS[0]))


def tokens():
    return Dataset.from_tensor_slices(np.zeros(200, np.int32))


def documents():
    """Of any length."""
    spec = tf.TensorSpec([None], tf.int32)
    return Dataset.from_generator(lambda: iter([np.zeros(9, np.int32)] * 4), output_signature=spec)


def cut(stream):
    """A stream of tokens as batches of a language model."""
    return stream.batch(6, drop_remainder=True).map(split).batch(2, drop_remainder=True)


def pair(*ids):
    return Dataset.from_tensors(ids)


SHUFFLED = {
    "segments": lambda: segments().shuffle(3),
    "txl_tf.segments": lambda: txl_tf.segments(np.zeros(99, np.int32), 2, 5).shuffle(100),
    "what follows": lambda: (
        segments().shuffle(3).map(lambda x, y: (x, y)).prefetch(2).cache().repeat(2).take(3).skip(1)
    ),
    "and more": lambda: segments().shuffle(3).filter(lambda x, y: True).shard(2, 0).enumerate().map(lambda i, s: s),
    "options": lambda: segments().shuffle(3).with_options(tf.data.Options()).take_while(lambda x, y: True),
    "interleave": lambda: segments().shuffle(3).interleave(pair, num_parallel_calls=2),
    "flat_map": lambda: segments().shuffle(3).flat_map(pair),
    "unbatch": lambda: segments().shuffle(3).unbatch().batch(2),
    "rebatch": lambda: segments().shuffle(3).rebatch(1),
    "zip": lambda: Dataset.zip(tuple(Dataset.from_tensor_slices(SEGMENTS).shuffle(3, seed=1) for _ in "xy")),
    "weights": lambda: Dataset.zip((segments(), tokens().shuffle(3))).map(lambda s, w: (*s, tf.fill([2], w))),
    "concatenate": lambda: segments().concatenate(segments().shuffle(3)),
    "rows": lambda: rows().shuffle(3).batch(2),
    "rows, interleaved": lambda: rows().shuffle(3).interleave(pair).batch(2),
    "chunks": lambda: tokens().batch(6, drop_remainder=True).shuffle(9).map(split).batch(2),
    "chunks, split before": lambda: tokens().batch(6, drop_remainder=True).map(split).shuffle(9).batch(2),
    "chunks, one by one": lambda: tokens().batch(6, True).shuffle(9).flat_map(lambda ids: pair(*split(ids))).batch(2),
    "windows": lambda: cut(tokens().window(6, shift=1).shuffle(9).flat_map(lambda window: window)),
    "windows, joined": lambda: tokens().window(6).flat_map(lambda w: w.batch(6, True)).shuffle(9).map(split).batch(2),
    "numbers": lambda: Dataset.range(6).shuffle(6).map(lambda i: (tf.gather(SEGMENTS, i),) * 2),
    "tokens": lambda: cut(tokens().shuffle(9)),
    "documents as rows": lambda: documents().shuffle(3).map(split).padded_batch(2),
    "by length": lambda: rows().bucket_by_sequence_length(lambda x, y: 2, [3], [2, 2]),
    "drawn": lambda: Dataset.sample_from_datasets([segments(), segments()], seed=1),
    "made within": lambda: Dataset.range(2).flat_map(lambda _: segments().shuffle(3)),
    "captured": lambda: (lambda shuffled: Dataset.range(2).interleave(lambda _: shuffled))(segments().shuffle(3)),
}
IN_ORDER = {
    "segments": segments,
    "txl_tf.segments": lambda: txl_tf.segments(np.zeros(99, np.int32), 2, 5, repeat=True),
    "a generator": lambda: Dataset.zip((documents().batch(2),) * 2),
    "flat_map": lambda: cut(documents().shuffle(4).flat_map(Dataset.from_tensor_slices)),
    "interleave": lambda: cut(documents().shuffle(4).interleave(Dataset.from_tensor_slices, cycle_length=1)),
    "unbatch": lambda: cut(documents().shuffle(4).unbatch()),
    "numbers": lambda: cut(Dataset.range(3).shuffle(3).flat_map(lambda i: tokens())),
    "texts": lambda: Dataset.range(3).shuffle(3).flat_map(lambda i: segments()),
    "strings": lambda: cut(
        Dataset.from_tensor_slices(["a b", "c"]).shuffle(2).flat_map(
            lambda text: Dataset.from_tensor_slices(tf.strings.unicode_decode(text, "UTF-8"))
        )
    ),
    "pairs": lambda: (
        documents().map(split).shuffle(3).flat_map(lambda *d: Dataset.from_tensor_slices(d)).batch(5).batch(2)
    ),
    "epochs": lambda: cut(
        Dataset.range(2).flat_map(lambda _: documents().shuffle(3).flat_map(Dataset.from_tensor_slices))
    ),
    "chosen": lambda: Dataset.choose_from_datasets([segments(), segments()], Dataset.range(2)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_what_is_shuffled_and_what_is_in_order():
    assert [name for name, make in SHUFFLED.items() if not is_shuffled(make())] == []
    assert [name for name, make in IN_ORDER.items() if is_shuffled(make())] == []


@pytest.fixture(scope="module")
def lm(small_lm):
    lm = small_lm(n_layer=1)
    lm.compile("sgd", run_eagerly=True)
    return lm


def test_shuffled_segments_are_refused_and_may_be_allowed(lm):
    shuffled, in_order = segments().shuffle(3).take(1), segments().take(1)
    for name, call in (
        ("x", lambda **options: lm.fit(shuffled, verbose=0, **options)),
        ("x", lambda **options: lm.evaluate(shuffled, verbose=0, **options)),
        ("validation_data", lambda **options: lm.fit(in_order, validation_data=shuffled, verbose=0, **options)),
    ):
        before = lm.get_weights()
        with pytest.raises(txl_tf.ParameterError) as caught:
            call()
        assert caught.value.name == name and caught.value.value is shuffled
        np.testing.assert_array_equal(
            np.concatenate([*map(np.ravel, lm.get_weights())]), np.concatenate([*map(np.ravel, before)])
        )
        call(allow_shuffled=True)
    with pytest.raises(txl_tf.ParameterError) as caught:
        lm.fit(shuffled, allow_shuffled="segments")
    assert (caught.value.name, caught.value.value) == ("allow_shuffled", "segments")


def test_a_model_without_memory_takes_them_in_any_order(small_lm):
    lm = small_lm(n_layer=1, mem_len=0)
    lm.compile("sgd", run_eagerly=True)
    lm.fit(segments().shuffle(3).take(1), validation_data=segments().shuffle(3).take(1), verbose=0)
    tokens = np.random.default_rng(0).integers(5, size=[3, 2, 5])
    in_order = Dataset.from_tensor_slices((tokens, tokens[..., ::-1]))
    expected = lm.evaluate(in_order, verbose=0)
    assert lm.evaluate(in_order.shuffle(3, seed=1), verbose=0) == pytest.approx(expected, rel=1e-5)
