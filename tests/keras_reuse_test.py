"""The network as a layer of other Keras models: fine-tuning as examples/classify.py does it, and padding."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import SMALL, mentions, program, raises_naming, raises_parameter

import txl_tf
from txl_tf.data.vocabulary import Vocab
from txl_tf.runs.folder import RunFolder

LETTERS = "abcdefghijklmnopqrstuv "


@pytest.fixture(scope="module")
def classify():
    yield from program("examples/classify.py")


@pytest.fixture
def texts():
    """Two texts, of the first and of the last of 23 symbols."""
    return {"low": np.arange(200, dtype=np.int32) % 12, "high": 11 + np.arange(230, dtype=np.int32) % 12}


def weights(layer):
    return [variable.numpy() for variable in layer.weights]  # the states of seeds are none


def same(arrays, others):
    return [np.array_equal(array, other) for array, other in zip(arrays, others, strict=True)]


# ---------------------------------------- fine-tuning


def test_passages_are_balanced_follow_one_another_and_every_fifth_is_held_out(classify, texts):
    (tokens, labels), (held_out, held_out_labels) = classify.passages(texts, 20)
    low = texts["low"].reshape(10, 20)
    np.testing.assert_array_equal(tokens[:8], low[[0, 1, 2, 3, 5, 6, 7, 8]])
    np.testing.assert_array_equal(held_out[:2], low[[4, 9]])
    np.testing.assert_array_equal(tokens[8], texts["high"][:20])
    assert labels.tolist() == [0] * 8 + [1] * 8 and held_out_labels.tolist() == [0, 0, 1, 1]


@pytest.mark.slow
def test_the_head_learns_while_the_network_is_frozen_and_then_all_of_it_does(classify, texts, small_lm, capsys):
    network = small_lm(dropout=0.1).network
    train, held_out = classify.passages(texts, 10)
    train, held_out = classify.batches(*train, shuffle_seed=0), classify.batches(*held_out)
    classifier = classify.make_classifier(network, 2)
    head = classifier.layers[-1]

    network.trainable = False
    classifier.summary()
    printed = capsys.readouterr().out
    assert "(TransformerXL)" in printed and "Trainable params: 18 " in printed
    before, before_head = weights(network), weights(head)
    classify.fit(classifier, train, held_out, epochs=2, learning_rate=0.01)
    assert all(same(weights(network), before)) and not any(same(weights(head), before_head))

    network.trainable = True
    accuracy = classify.fit(classifier, train, held_out, epochs=15, learning_rate=0.01)
    assert accuracy == 1 and not any(same(weights(network), before))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [pytest.param("float32", marks=pytest.mark.slow), "mixed_bfloat16"])
def test_a_classifier_from_a_keras_file_predicts_a_pipeline_as_the_one_that_was_saved(
    classify, texts, small_lm, tmp_path, policy
):
    classifier = classify.make_classifier(small_lm(dtype=policy).network, 2)
    (tokens, labels), _ = classify.passages(texts, 10)
    classifier.save(tmp_path / "classifier.keras")
    loaded = keras.saving.load_model(tmp_path / "classifier.keras")
    logits = loaded.predict(classify.batches(tokens, labels), verbose=0)
    assert logits.shape == (len(tokens), 2) and logits.dtype == np.float32
    np.testing.assert_array_equal(logits, classifier.predict(classify.batches(tokens, labels), verbose=0))
    single = classify.make_classifier(small_lm().network, 2)
    single.layers[-1].set_weights(weights(classifier.layers[-1]))
    np.testing.assert_allclose(logits, single(tokens), rtol=0, atol=1e-5 if policy == "float32" else 0.05)


@pytest.fixture
def run(tmp_path, small_lm):
    vocab = Vocab(level="char", special=list(LETTERS))
    vocab.build()
    RunFolder(tmp_path / "run").create({}, {**SMALL, "mem_len": 4}, [vocab], small_lm(), step=1)
    return str(tmp_path / "run")


@pytest.mark.slow
def test_the_program_fine_tunes_a_run_on_files(classify, run, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("up.txt", "down.txt")]
    for path, text in zip(files, (LETTERS, LETTERS[::-1]), strict=True):
        (tmp_path / path).write_text(text * 20)
    output = str(tmp_path / "classifier.keras")
    classify.classify(run, files, None, output, 10, 1, 0.01, "bfloat16", False, 0)
    printed = capsys.readouterr().out
    assert re.search(r"\b[01]\.\d{3}\b.*\b[01]\.\d{3}\b", printed) and mentions(printed, files[1])
    network = keras.saving.load_model(output).get_layer("transformer")
    assert network.dtype_policy.name == "mixed_bfloat16" and network.mem_len == 0

    with raises_naming(ValueError, "data_path", "up.txt"):
        classify.classify(run, files[:1], None, None, 10, 1, 0.01, "float32", False, 0)
    with raises_naming(ValueError, "up.txt", 100, 460):
        classify.classify(run, files, None, None, 100, 1, 0.01, "float32", False, 0)


# ---------------------------------------- padding


def segments_with_padding(texts, lengths, tgt_len, side):
    """Yields (tokens, padding_mask) of the next segment of each text, of the `lengths` of one segment after another."""
    rng = np.random.default_rng(0)
    begin = [0] * len(texts)
    for segment in lengths:
        tokens = np.full([len(texts), tgt_len], -1, np.int32)  # no id at all: it must not be looked up
        mask = np.zeros(tokens.shape, bool)
        for row, n in enumerate(segment):
            if side == "between":
                places = np.sort(rng.choice(tgt_len, n, replace=False))
            else:
                places = np.arange(n) + (tgt_len - n if side == "left" else 0)
            tokens[row, places] = texts[row][begin[row] : begin[row] + n]
            mask[row, places] = True
            begin[row] += n
        yield tokens, mask


@pytest.mark.parametrize(
    "side, options",
    [
        ("left", {}),
        pytest.param("right", {"mem_len": 0}, marks=pytest.mark.slow),
        pytest.param("between", {"mem_len": 9, "untie_r": True}, marks=pytest.mark.slow),
        ("between", {"same_length": True, "clamp_len": 3}),
    ],
    ids=str,
)
def test_every_row_gets_what_its_tokens_alone_would(small_lm, side, options):
    """Over three segments: what was padding stays unseen as memory. Row 2 begins with padding alone."""
    network = small_lm(**options).network
    texts = np.random.default_rng(0).integers(0, 23, [3, 12]).astype(np.int32)
    lengths = [(5, 2, 0), (4, 5, 3), (3, 0, 6)]
    begin, alone, mems = [0] * 3, [network.initial_mems(1) for _ in range(3)], None
    for segment, (tokens, mask) in zip(lengths, segments_with_padding(texts, lengths, 7, side), strict=True):
        hidden, mems = network(tokens, mems, padding_mask=mask)
        for row, n in enumerate(segment):
            if n:
                expected, alone[row] = network(texts[row, None, begin[row] : begin[row] + n], alone[row])
                np.testing.assert_allclose(hidden[row][mask[row]], expected[0], rtol=1e-5, atol=1e-5)
            for mem, expected in zip(mems, alone[row], strict=True):
                np.testing.assert_allclose(mem[row], expected[0], rtol=1e-5, atol=1e-5)
            begin[row] += n
        np.testing.assert_array_equal(hidden.numpy()[~mask], 0)


@pytest.mark.slow
def test_padding_in_a_functional_model_under_xla_and_in_training(small_lm, tmp_path):
    network = small_lm().network
    tokens, mask = next(segments_with_padding(np.ones([2, 5], int), [(2, 5)], 6, "left"))
    types = {"tokens": "int32", "mask": "bool"}
    inputs = {name: keras.Input([None], dtype=dtype, name=name) for name, dtype in types.items()}
    hidden, _ = network(inputs["tokens"], padding_mask=inputs["mask"])
    pooled = keras.layers.GlobalAveragePooling1D()(hidden, mask=inputs["mask"])
    model = keras.Model(inputs, keras.layers.Dense(1)(pooled))
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    batch = {"tokens": tf.constant(tokens), "mask": tf.constant(mask)}
    alone = [network(np.ones([1, n], int))[0][0].numpy().mean(0) for n in (2, 5)]
    expected = model.layers[-1](np.stack(alone))
    for call in (model, loaded, tf.function(model, jit_compile=True, autograph=False)):
        np.testing.assert_allclose(call(batch), expected, rtol=1e-5, atol=1e-5)

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(batch) ** 2)
    gradients = tape.gradient(loss, network.trainable_variables)
    with tf.GradientTape() as tape:
        pooled = tf.concat([tf.reduce_mean(network(np.ones([1, n], int))[0], 1) for n in (2, 5)], 0)
        loss = tf.reduce_sum(model.layers[-1](pooled) ** 2)
    for got, wanted in zip(gradients, tape.gradient(loss, network.trainable_variables), strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(got), tf.convert_to_tensor(wanted), rtol=1e-4, atol=1e-5)


def test_a_network_that_was_saved_frozen_is_loaded_frozen_and_can_be_freed(small_lm, tmp_path):
    network, tokens = small_lm().network, keras.Input([None], dtype="int32")
    model = keras.Model(tokens, keras.layers.Dense(2)(network(tokens)[0]))
    network.trainable = False
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert len(loaded.trainable_variables) == len(model.trainable_variables) == 2
    loaded.layers[1].trainable = True
    assert len(loaded.trainable_variables) == len(model.weights)


def test_a_part_that_was_saved_frozen_is_loaded_frozen_with_the_state_of_the_optimizer(small_lm, tmp_path):
    network, tokens = small_lm(n_layer=2).network, keras.Input([3], dtype="int32")
    model = keras.Model(tokens, keras.layers.Dense(2)(network(tokens)[0]))
    network.embedding.trainable = network.decoder_layers[0].weights[0].trainable = False
    model.compile("adam", "mse", run_eagerly=True)
    batch = np.ones([2, 3], int), np.ones([2, 3, 2])
    model.train_on_batch(*batch)
    model.save(tmp_path / "m.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert len(loaded.trainable_variables) == len(model.trainable_variables) < len(model.weights)
    assert loaded.train_on_batch(*batch) == model.train_on_batch(*batch)
    for found, expected in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_mask_of_all_tokens_changes_nothing_and_none_adds_nothing_to_the_graph(small_lm):
    network = small_lm().network
    tokens = np.random.default_rng(0).integers(0, 23, [2, 5]).astype(np.int32)
    plain, masked = network(tokens), network(tokens, padding_mask=np.ones([2, 5], bool))
    for got, expected in zip(tf.nest.flatten(masked), tf.nest.flatten(plain), strict=True):
        np.testing.assert_array_equal(got, expected)
    graph = tf.function(network, autograph=False).get_concrete_function(tf.constant(tokens)).graph
    assert not {"TopKV2", "Cumsum", "GatherV2"} & {op.type for op in graph.get_operations() if "embed" not in op.name}


def test_a_padding_mask_of_numbers_says_what_bool_says(small_lm):
    network, tokens = small_lm().network, np.arange(10).reshape(2, 5)
    mask = np.arange(5) < [[5], [3]]
    expected, mems = network(tokens, padding_mask=mask)
    for dtype in (np.int32, np.float32):
        hidden, new_mems = network(tokens, padding_mask=mask.astype(dtype))
        np.testing.assert_array_equal(hidden, expected)
        np.testing.assert_array_equal(new_mems, mems)
        np.testing.assert_array_equal(hidden._keras_mask, mask)


def test_bad_padding_masks_are_named(small_lm):
    network, tokens = small_lm().network, np.ones([2, 5], int)
    for wrong in (np.ones([2, 3], bool), np.full([2, 5], 2), np.full([2, 5], -1e9), np.full([2, 5], "a")):
        with pytest.raises(txl_tf.ParameterError) as caught:
            network(tokens, padding_mask=wrong)
        assert caught.value.name == "padding_mask" and caught.value.value.shape == wrong.shape
    with raises_parameter("mems"):
        network(tokens, [np.zeros([2, 2, 8], np.float32)] * 2, padding_mask=np.ones([2, 5], bool))
