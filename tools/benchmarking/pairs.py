"""Contestants that are encoder-decoders: the tutorial's layers under Keras's `fit`, tests/reference_transformer.py, and
the library.

A maker is a function `make(source, target, **arguments)` of a first batch and of the arguments of the model. It returns
`(model, batch, decode)`: a compiled model; the batch in the form that the model's `fit` takes; and a function
`decode(source, start, number)` that returns the ids of up to `number` symbols after the symbol `start`.
"""

import functools

import numpy as np
from benchmarking.shapes import REFERENCE
from benchmarking.work import Calls, Steps, padded, port, repeated

START, END = 1, 2  # ids of symbols; 0 is padding


def contestants(mode, jit=False):
    """The contestants: `{name: function of a shape that returns the work}`; with `jit` also one with XLA."""
    makers = {
        REFERENCE: tutorial_transformer(),
        "keras attention float32": tutorial_transformer(keras_attention=True),
        "reference bfloat16": tutorial_transformer("mixed_bfloat16"),
        "txl_tf float32": library_transformer(),
        "txl_tf bfloat16": library_transformer("mixed_bfloat16"),
    }
    if jit:
        makers["txl_tf float32 XLA"] = library_transformer(jit_compile=True)
    work = {"seq2seq": batch_work, "seq2seq_pairs": pairs_work, "seq2seq_decoding": decoding_work}[mode]
    return {name: functools.partial(work, name, make) for name, make in makers.items()}


def arguments_of(shape):
    """The arguments of `Transformer` and of `ReferenceTransformer`."""
    arguments = {"num_layers": shape["n_layer"], "dff": shape["d_inner"], "num_heads": shape["n_head"]}
    arguments |= {"d_model": shape["d_model"], "rate": shape["dropout"]}
    return arguments | dict.fromkeys(["input_vocab_size", "target_vocab_size"], shape["n_token"])


def tutorial_transformer(dtype="float32", keras_attention=False):
    """Returns the maker of the tutorial's model, with Keras's attention layer if `keras_attention`."""

    def make(source, target, **arguments):
        import keras

        reference = port("reference_transformer")
        keras.config.set_dtype_policy(dtype)
        model = reference.ReferenceTransformer(**arguments, keras_attention=keras_attention)
        model.compile(keras.optimizers.Adam(1e-3, 0.9, 0.98, epsilon=1e-9), loss=reference.masked_loss)
        batch = (source, target[:, :-1]), target[:, 1:]
        model.train_on_batch(*batch)  # builds it
        return model, batch, model.greedy

    return make


def library_transformer(dtype="float32", jit_compile=False):
    """Returns the maker of `txl_tf.Transformer`."""

    def make(source, target, **arguments):
        import txl_tf

        model = txl_tf.Transformer(**arguments, dtype=dtype)
        model.compile(txl_tf.make_optimizer(learning_rate=1e-3, clip=None), jit_compile=jit_compile)

        def decode(source, start, number):
            return model.generate(source, start=start, end=None, max_new_tokens=number)[0]

        return model, (source, target), decode

    return make


# ----------------------------------------------------------------------------------------------------------- works


def random_pair(shape):
    """Random sources `[batch, tgt_len]` and targets `[batch, tgt_len + 1]` of ids, without padding."""
    ids = np.random.default_rng(0).integers(END + 1, shape["n_token"], [2, shape["batch_size"], shape["tgt_len"] + 1])
    return ids[0, :, 1:].astype(np.int32), ids[1].astype(np.int32)


def batch_work(name, make, shape):
    """Trains on one batch."""
    model, batch, _ = make(*random_pair(shape), **arguments_of(shape))
    return Steps(model, repeated([batch]))


def decoding_work(name, make, shape):
    """Decodes a batch of sources greedily."""
    source, target = random_pair(shape)
    _, _, decode = make(source, target, **arguments_of(shape))
    return Calls(lambda: np.asarray(decode(source, START, shape["tgt_len"])))


def pairs_work(name, make, shape):
    """Trains on all pairs once: the library on batches of similar lengths, the tutorial in the given order."""
    batches = pair_batches(shape, by_length=name.startswith("txl_tf"))
    model, first, _ = make(*batches[0], **arguments_of(shape))
    if isinstance(first[0], tuple):  # Keras's (x, y)
        batches = [((source, target[:, :-1]), target[:, 1:]) for source, target in batches]
    return Steps(model, repeated(batches), steps=len(batches))


def word_pairs(number):
    """Random words of Python's manual as sources, and the same words reversed as targets.

    Returns:
        `[sources, targets]`: lists of `number` lists of ids, each with `END` at its end.
    """
    from pydoc_data.topics import topics

    words = set("\n".join(topics.values()).lower().split())
    words = sorted(word for word in words if word.isascii() and word.isalpha())
    chosen = np.random.default_rng(0).choice(words, number)
    # The id of "a" is 3, the first after padding, START and END.
    return [[[*(ord(c) - 94 for c in word[::step]), END] for word in chosen] for step in (1, -1)]


def pair_batches(shape, by_length):
    """Batches of source and target `[batch, longest]`, in a random order. Each target begins with the start symbol.

    Args:
        shape: sizes of the benchmark.
        by_length: whether sources of similar length share a batch.
    """
    sources, targets = word_pairs(shape["pairs"])
    order = np.random.default_rng(1).permutation(shape["pairs"])
    if by_length:
        order = order[np.argsort([len(sources[i]) for i in order], kind="stable")]
    starts = np.random.default_rng(2).permutation(range(0, len(order), shape["batch_size"]))
    batches = [order[start : start + shape["batch_size"]] for start in starts]  # indices of pairs
    return [(padded([sources[i] for i in batch]), padded([[START, *targets[i]] for i in batch])) for batch in batches]
