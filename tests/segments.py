"""What language models with memory must do, whatever their variant: cached segments, prompts, padding, documents."""

import numpy as np
import tensorflow as tf
from helpers import SMALL

from txl_tf.transformer_xl.cache import cached_forward, initial_state, precompute, state_from
from txl_tf.transformer_xl.inference import writable_copy

END = 1  # where it is the token that resets the memory


def words(rows=3, n=21, borders=()):
    """int32 `[rows, n]`, with `END` at the `borders` of each row and nowhere else, if there are any."""
    text = np.random.default_rng(0).integers(2, SMALL["n_token"], [rows, n]).astype(np.int32)
    for row, places in zip(text, borders, strict=False):
        row[list(places)] = END
    return text


def close(found, expected, tolerance=1e-5):
    found, expected = np.asarray(found), np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def state_of(network, mems, max_segment=1):
    """The state of a cache that continues a text from the hidden states `mems`, a list with `[B, M, E]` per layer."""
    width = network.n_head * network.d_head

    def keys_and_values(mem, attn):
        """Keys and values of a layer's memory, `[B, H, M, D]` each, not turned."""
        kernel = tf.cast(attn.kernel("qkv_kernel"), network.compute_dtype)
        heads = tf.matmul(attn.memory_of(tf.cast(mem, network.compute_dtype)), kernel[:, width:])
        heads = tf.reshape(heads, [-1, network.mem_len, 2, network.n_head, network.d_head])
        k, v = tf.unstack(tf.transpose(heads, [2, 0, 3, 1, 4]))
        zeros = attn.zeros(kernel)
        return (k, v) if zeros is None else (k - zeros.k, v - zeros.v)

    layers = zip(mems, network.decoder_layers, strict=True)
    keys, values = zip(*(keys_and_values(mem, layer.rel_attn) for mem, layer in layers), strict=True)
    count = ()
    if network.scheme.turns:
        keys = [network.scheme.turn(key, tf.range(network.mem_len)) for key in keys]
        count = tf.fill([mems[0].shape[0]], network.mem_len)
    return state_from(keys, values, max_segment, count)


def assert_cached_segments_are_those_of(network):
    """Segments of many lengths, which go round the ring of mem_len + 6 slots."""
    text = words(3, 31, borders=[(0, 6, 8, 9, 17), (5, 11, 22, 30), (7,)])
    weights, state, mems = precompute(network, 6), writable_copy(initial_state(network, 3, 6)), None
    start = 0
    for tgt_len in (5, 1, 6, 1, 4, 2, 6, 6):
        tokens = tf.constant(text[:, start : start + tgt_len])
        expected, mems = network(tokens, mems)
        hidden, state = cached_forward(network, weights, tokens, state, in_place=True)
        close(hidden, expected)
        start += tgt_len


def assert_a_cache_continues_hidden_states(network):
    text = words(2, 20)
    _, mems = network(text[:, :9])
    state, weights = state_of(network, mems, 6), precompute(network, 6)
    for start in (9, 14):
        tokens = tf.constant(text[:, start : start + 5])
        expected, mems = network(tokens, mems)
        hidden, state = cached_forward(network, weights, tokens, state)
        close(hidden, expected)


def assert_prompts_of_unequal_length_get_what_they_get_alone(network):
    text, lengths = words(3, 12, borders=[(0, 3), (1, 2, 8), (0, 2, 5)]), [4, 6, 1]
    weights, state = precompute(network, 6), initial_state(network, 3, 6)
    hidden, state = cached_forward(network, weights, text[:, :6], state, lengths=lengths)
    after, _ = cached_forward(network, weights, text[:, 6:], state)
    for b, length in enumerate(lengths):
        expected, mems = network(text[b : b + 1, 6 - length : 6])
        close(hidden[b, -length:], expected[0])
        close(after[b], network(text[b : b + 1, 6:], mems)[0][0])


def assert_padding_changes_nothing(network, text):
    """`text` is int32 `[2, 12]`."""
    shown = np.array([[1, 1, 0, 1, 1, 1], [0, 1, 1, 0, 0, 1]], bool)
    hidden, mems = network(np.where(shown, text[:, :6], END), padding_mask=tf.constant(shown))
    after, _ = network(text[:, 6:], mems)
    for b in range(2):
        expected, own_mems = network(text[b : b + 1, :6][:, shown[b]])
        close(hidden[b][shown[b]], expected[0])
        close(after[b], network(text[b : b + 1, 6:], own_mems)[0][0])


def assert_documents_get_what_they_get_alone(lm, alone):
    """`lm` resets its memory at `END`; `alone` is the same model without resets. Returns the text and its nll."""
    text, expected = words(1, 21, borders=[(4, 9, 10, 16)]), []
    for start, end in ((0, 4), (4, 9), (9, 10), (10, 16), (16, 20)):
        cuts = [start, *(cut for cut in (5, 10, 15) if start < cut < end), end]
        mems = None
        for a, b in zip(cuts, cuts[1:], strict=False):
            nll, mems = alone.score(text[:, a:b], text[:, a + 1 : b + 1], mems)
            expected.append(nll)
    expected, mems, found = np.concatenate(expected, 1), None, []
    for start in (0, 5, 10, 15):
        nll, mems = lm.score(text[:, start : start + 5], text[:, start + 1 : start + 6], mems)
        found.append(nll)
    close(np.concatenate(found, 1), expected)
    return text, expected
