"""True and False are no numbers: as sizes, lengths and rates they are refused by name, and do not count as 1 and 0."""

import numpy as np
import pytest

import txl_tf
from txl_tf import layers
from txl_tf.errors import ParameterError

SEGMENT = {"d_model": 8, "n_head": 2, "d_head": 4}
NETWORK = {**SEGMENT, "n_token": 20, "n_layer": 1, "d_embed": 8, "d_inner": 8, "mem_len": 3}
SENTENCES = {"n_token": 20, "n_bigram": 9, "n_layer": 1, "d_model": 8, "n_head": 2, "d_inner": 8}
PAIRS = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 8, "input_vocab_size": 9, "target_vocab_size": 9}
BINS = {"n_token": 20, "d_embed": 8, "d_proj": 8}

MADE = [
    (layers.Embeddings, {"vocab": 20, "d_model": 8}, ""),
    (layers.AdaptiveEmbedding, BINS, "div_val"),
    (layers.AdaptiveSoftmax, BINS, "div_val"),
    (layers.PositionalEncoding, {"d_model": 8}, "max_len rate"),
    (layers.PositionEmbedding, {"d_model": 8}, "max_len rate"),
    (layers.PositionWiseFFN, {"ffn_num_hiddens": 8, "ffn_num_outputs": 8}, "rate"),
    (layers.PositionwiseFF, {"d_model": 8, "d_inner": 8}, "dropout layer_norm_epsilon"),
    (layers.LayerNorm, {}, "epsilon"),
    (layers.RMSNorm, {}, "epsilon"),
    (layers.MultiHeadAttention, {"d_model": 8, "num_heads": 2}, "rate"),
    (layers.EncoderLayer, {"d_model": 8, "num_heads": 2, "dff": 8}, "rate dropatt dropact"),
    (layers.DecoderLayer, {"d_model": 8, "num_heads": 2, "dff": 8}, "rate dropatt dropact"),
    (layers.RelMultiHeadAttn, SEGMENT, "dropout dropatt layer_norm_epsilon"),
    (layers.MultiHeadAttn, SEGMENT, "dropout dropatt layer_norm_epsilon"),
    (layers.TransformerXLLayer, {**SEGMENT, "d_inner": 8}, "dropout dropatt layer_norm_epsilon"),
    (layers.TransformerLMLayer, {**SEGMENT, "d_inner": 8}, "dropout dropatt layer_norm_epsilon"),
    (layers.TenerAttn, {"d_model": 8, "n_head": 2}, "dropatt"),
    (layers.TenerLayer, {"d_model": 8, "n_head": 2, "d_inner": 8}, "dropout dropatt"),
    (layers.LatticeAttn, {"d_model": 8, "n_head": 2}, "dropatt"),
    (layers.FlatLayer, {"d_model": 8, "n_head": 2, "d_inner": 8}, "dropout attention"),
    (layers.PositionFusion, {"d_model": 8}, ""),
    (layers.CRF, {"n_tag": 3}, ""),
    (txl_tf.TransformerXL, NETWORK, "dropout dropatt clamp_len div_val init_std layer_norm_epsilon reset_token"),
    (txl_tf.Tener, SENTENCES, "d_embed d_bigram max_seq_len dropout dropatt embed_dropout token_dropout"),
    (txl_tf.Flat, SENTENCES, "dropout embed_dropout"),
    (txl_tf.Transformer, PAIRS, "max_len rate dropatt label_smoothing"),
    (txl_tf.make_optimizer, {"train_steps": 9}, "learning_rate warmup_steps min_lr_ratio clip clip_value ema beta_2"),
    (txl_tf.segments, {"tokens": np.arange(99), "batch_size": 2, "tgt_len": 3}, "start"),
    (layers.create_mask, {"qlen": 3, "mlen": 2}, ""),
    (layers.create_look_ahead_mask, {"size": 3}, ""),
    (layers.inverse_frequencies, {"d_model": 8}, ""),
    (layers.relative_positions, {"klen": 3}, "clamp_len"),
    (layers.positional_encoding, {"position": 3, "d_model": 8}, ""),
    (layers.dropout, {"x": np.ones([2, 3], np.float32), "dropout_key": [1, 2, 0]}, "rate"),
]


@pytest.mark.parametrize("make, arguments, more", [pytest.param(*case, id=case[0].__name__) for case in MADE])
def test_a_boolean_is_no_size_and_no_rate(make, arguments, more):
    names = {*arguments, *more.split()} - {"tokens", "x", "dropout_key"}
    for name in sorted(names):
        for value in (True, False, np.True_):
            with pytest.raises(ParameterError) as caught:
                make(**{**arguments, name: value})
            assert caught.value.name == name and caught.value.value is value


@pytest.mark.parametrize("cutoffs", [[True, 9], [3, np.True_]])
def test_a_boolean_is_no_end_of_a_cluster(cutoffs):
    for make in (layers.AdaptiveEmbedding, layers.AdaptiveSoftmax):
        with pytest.raises(ParameterError) as caught:
            make(**BINS, cutoffs=cutoffs)
        assert caught.value.name == "cutoffs"


def test_methods_refuse_booleans(small_lm):
    lm, translator = small_lm(), txl_tf.Transformer(**PAIRS)
    source, two_more = {"source": [[1, 2]], "start": 1, "end": 2}, {"prompt": [[1, 2]], "max_new_tokens": 2}
    calls = [
        (lm.generate, {"prompt": [[1, 2]]}, ["max_new_tokens"]),
        (lm.generate, two_more, ["num_return_sequences", "top_k", "repetition_window", "stop_strings"]),
        (lm.generate, two_more, ["temperature", "top_p", "min_p"]),
        (translator.generate, source, ["max_new_tokens", "beam_size", "length_penalty", "start"]),
        (lm.initial_mems, {}, ["batch_size"]),
        (lm.alternatives, {"tokens": np.array([[1, 2]])}, ["number"]),
        (lm.compile, {"optimizer": "sgd"}, ["steps_per_execution", "gradient_accumulation_steps"]),
        (translator.compile, {"optimizer": "sgd"}, ["steps_per_execution"]),
    ]
    for call, arguments, names in calls:
        for name in names:
            with pytest.raises(ValueError, match=rf"\b{name} must"):
                call(**{**arguments, name: True})


def test_class_weights_have_no_booleans():
    tagger = txl_tf.Tagger(txl_tf.Tener(**SENTENCES), ["O", "B-X", "I-X"])
    tagger.compile("sgd")
    inputs = {"chars": np.ones([2, 3], np.int32), "bigrams": np.ones([2, 3], np.int32)}
    for wrong in ({True: 2.0}, {1: True}):
        with pytest.raises(ParameterError) as caught:
            tagger.fit(inputs, np.zeros([2, 3], np.int32), class_weight=wrong, verbose=0)
        assert caught.value.name == "class_weight"
