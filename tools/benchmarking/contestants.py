"""What the benchmark measures: shapes, and for each contestant a function that does one step of the work.

The reference is tests/reference_model.py, time-major and without a cache. The library is called by the functions that
`fit`, `evaluate` and `generate` call. It is imported late, so that a process can first choose which checkout's.
"""

import functools
import importlib.util
from pathlib import Path

import numpy as np
import tensorflow as tf
from benchmarking.shapes import CONTINUED, EVALUATION, NETWORK, PROMPT, READING, REFERENCE, ROUNDED, WRITING


@functools.cache
def port(name):
    """A plain port of an original program as a module: tests/reference_model.py is `port("reference_model")`."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "tests" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_tagging(mode):
    return mode.startswith(("tener", "flat"))


def is_training(mode):
    return mode.startswith(("training", "softmax"))


def model_arguments(shape):
    """The arguments of `TransformerXLLM` and of `ReferenceModel`."""
    return {**{name: shape[name] for name in [*NETWORK, "mem_len"]}, "d_embed": shape["d_model"]}


def frequencies(n_token):
    """Shares of words `[n_token]`, word i about 1 / i as frequent as the first."""
    share = 1 / np.arange(1, n_token + 1)
    return share / share.sum()


def random_batch(shape):
    """Tokens and labels `[batch, tgt_len]`, as frequent as `frequencies`."""
    size = [shape["batch_size"], shape["tgt_len"] + 1]
    draws = np.random.default_rng(0).choice(shape["n_token"], size, p=frequencies(shape["n_token"]))
    return tf.constant(draws[:, :-1], tf.int32), tf.constant(draws[:, 1:], tf.int32)


def carrying(function, carried):
    """A step without arguments of `function(carried) -> (result, carried)`, which waits for the result."""

    def step():
        nonlocal carried
        result, carried = function(carried)
        return result.numpy()

    return step


def reference_step(mode, shape):
    """A function that trains the reference on a batch, or evaluates a segment, or generates one token."""
    model = port("reference_model").ReferenceModel(**model_arguments(shape))
    tokens, labels = map(tf.transpose, random_batch(shape))
    mems = model.initial_mems(shape["batch_size"])
    if is_training(mode):
        model.compile(learning_rate=1e-3, train_steps=10000)
        return carrying(lambda mems: model.train_step(tokens, labels, mems)[::3], mems)
    if mode == "evaluation":
        nll = tf.function(model.nll)
        return carrying(lambda mems: nll(tokens, labels, mems), mems)

    @tf.function
    def next_token(carried):
        log_probs, mems = reference_next(model, *carried)
        token = tf.random.categorical(log_probs, 1, tf.int32)[None, :, 0]
        return token, (token, mems)

    return carrying(next_token, (tokens[:1], mems))


def reference_next(model, tokens, mems):
    """Log-probabilities `[batch, n_token]` of the token after `tokens` `[tgt_len, batch]`, and the new memory."""
    hidden, mems = model._hidden(tokens, mems, is_training=False)
    return port("reference_model").full_log_probs(hidden[-1:], **model._softmax_args())[0], mems


def library_step(mode, shape, dtype="float32", jit_compile=False, recompute=False, matmul_precision=None):
    """As `reference_step`, but generates a text of `tgt_len`. Only the public interface, for checkouts of any age."""
    import txl_tf

    if matmul_precision:
        txl_tf.set_matmul_precision(matmul_precision)
    lm = txl_tf.TransformerXLLM(**model_arguments(shape), dtype=dtype, recompute=recompute)
    tokens, labels = random_batch(shape)
    if is_training(mode):
        lm.compile(txl_tf.make_optimizer(learning_rate=1e-3, train_steps=10000), jit_compile=jit_compile)
        lm.optimizer.build(lm.trainable_variables)
        lm.make_train_function()  # compiles forward and backward pass, if asked to
        train_step = tf.function(lm.train_step, autograph=False)

        def train(mems):
            logs, mems = train_step((tokens, labels), mems)
            return logs["loss"], mems

        return carrying(train, lm.initial_mems(shape["batch_size"]))
    if mode == "evaluation":
        evaluation_nll = tf.function(lm.evaluation_nll, autograph=False)
        first = lm.start_evaluation(shape["batch_size"], shape["tgt_len"])
        return carrying(lambda carried: evaluation_nll(tokens, labels, carried)[::2], first)
    return lambda: lm.generate(tokens[:, :1], max_new_tokens=shape["tgt_len"], seed=0).numpy()


def continuing_step(shape, dtype, read=1):
    """A function that continues a text by `tgt_len` tokens, where `lm.generate` would begin anew.

    Its first `read` tokens are read before.
    """
    import txl_tf
    from txl_tf.models.decoding.session import Session

    session = Session(txl_tf.TransformerXLLM(**model_arguments(shape), dtype=dtype), shape["batch_size"])
    session.read(np.zeros([shape["batch_size"], read], int))
    return lambda: session.write(shape["tgt_len"])


def writing_step(shape, rows=1, prompt=1, tokens=None, **sampling):
    """A function that continues `rows` prompts by `tokens` tokens, by default `tgt_len`."""
    import txl_tf

    lm = txl_tf.TransformerXLLM(**model_arguments(shape))
    prompts = np.random.default_rng(0).integers(shape["n_token"], size=[rows, prompt])
    return lambda: lm.generate(prompts, max_new_tokens=tokens or shape["tgt_len"], seed=0, **sampling).numpy()


def bytes_of_token(shape, size):
    """Bytes that a token reads, its numbers of `size` bytes: kernels, keys, values, position keys, and the softmax."""
    width, d_model, positions = shape["n_head"] * shape["d_head"], shape["d_model"], shape["mem_len"] + 1
    layer = d_model * (4 * width + 2 * shape["d_inner"]) + positions * width * (2 * shape["batch_size"] + 1)
    return size * (shape["n_layer"] * layer + shape["n_token"] * d_model)


def reading_step(shape, size):
    """A function that reads the bytes of `tgt_len` tokens, one token's after the other's, on all cores."""
    numbers = tf.random.normal([bytes_of_token(shape, size) // 4])
    largest = tf.function(lambda: tf.reduce_max(numbers))

    def step():
        for _ in range(shape["tgt_len"]):
            largest().numpy()

    return step


def seq2seq_arguments(shape):
    """The arguments of `Transformer` and of `ReferenceTransformer`."""
    arguments = {"num_layers": shape["n_layer"], "dff": shape["d_inner"], "num_heads": shape["n_head"]}
    arguments |= {"d_model": shape["d_model"], "rate": shape["dropout"]}
    return arguments | dict.fromkeys(["input_vocab_size", "target_vocab_size"], shape["n_token"])


def seq2seq_step(mode, shape, make):
    """A function that trains an encoder-decoder on a batch by what `fit` calls, or decodes one greedily.

    `make(**arguments)` gives `(model, dataset of a batch, decode(source, start, number))`.
    """
    ids = np.random.default_rng(0).integers(3, shape["n_token"], [2, shape["batch_size"], shape["tgt_len"] + 1])
    source, target = ids[0, :, 1:].astype(np.int32), ids[1].astype(np.int32)
    model, batch, decode = make(source, target, **seq2seq_arguments(shape))
    if mode == "seq2seq_decoding":
        return lambda: np.asarray(decode(source, 1, shape["tgt_len"]))
    batches = iter(tf.data.Dataset.from_tensors(batch).repeat())
    model.make_train_function()
    return lambda: float(model.train_function(batches)["loss"])


def word_pairs(number):
    """Words of Python's manual, and the same backwards: `Pairs` of ids, as long as words are."""
    from txl_tf.data.pairs.parallel import END, Lines, Pairs
    from txl_tf.data.text_files import pydoc_text

    words = sorted(word for word in set(pydoc_text().lower().split()) if word.isascii() and word.isalpha())
    chosen = np.random.default_rng(0).choice(words, number)
    ends = np.cumsum([len(word) + 1 for word in chosen])
    sides = [np.concatenate([[*(ord(c) - 94 for c in word[::step]), END] for word in chosen]) for step in (1, -1)]
    return Pairs(*(Lines(ids.astype(np.int32), ends) for ids in sides))


def pairs_step(shape, make, by_length):
    """A function that trains an encoder-decoder on all pairs once, in batches of like lengths or as they come."""
    from txl_tf.data.pairs.parallel import pair_batches

    pairs, size = word_pairs(shape["pairs"]), shape["batch_size"]
    batches = pair_batches(pairs, size, seed=0)
    if not by_length:
        batches.rows = rows_as_they_come(shape["pairs"], size)
    arrays = [batches.batch(i) for i in range(shape["pairs"] // size)]
    model, first, _ = make(*arrays[0], **seq2seq_arguments(shape))
    if isinstance(first[0], tuple):  # Keras's (x, y)
        arrays = [((source, target[:, :-1]), target[:, 1:]) for source, target in arrays]
    return epoch_step(model, arrays)


def rows_as_they_come(number, size):
    """The rows of batches in a random order: a function of the batch's number."""
    return np.random.default_rng(1).permutation(number).reshape(-1, size).__getitem__


def epoch_step(model, arrays):
    """A function that trains a Keras model once on each of some batches."""
    specs = tf.nest.map_structure(lambda x: tf.TensorSpec([None] * x.ndim, tf.int32), arrays[0])
    iterator = iter(tf.data.Dataset.from_generator(lambda: arrays, output_signature=specs).repeat().prefetch(2))
    model.make_train_function()
    return lambda: float([model.train_function(iterator) for _ in arrays][-1]["loss"])


def documents_transformer(dtype="float32", own_attention=False):
    def make(source, target, **arguments):
        import keras

        reference = port("reference_transformer")
        keras.config.set_dtype_policy(dtype)
        model = reference.ReferenceTransformer(**arguments, own_attention=own_attention)
        model.compile(keras.optimizers.Adam(1e-3, 0.9, 0.98, epsilon=1e-9), loss=reference.masked_loss)
        batch = (source, target[:, :-1]), target[:, 1:]
        model.train_on_batch(*batch)  # builds it
        return model, batch, model.greedy

    return make


def library_transformer(dtype="float32", jit_compile=False):
    def make(source, target, **arguments):
        import txl_tf

        model = txl_tf.Transformer(**arguments, dtype=dtype)
        model.compile(txl_tf.make_optimizer(learning_rate=1e-3, clip=None), jit_compile=jit_compile)
        model.train_on_batch(source, target)

        def decode(source, start, number):
            return model.generate(source, start=start, end=None, max_new_tokens=number)[0]

        return model, (source, target), decode

    return make


def random_split(shape):
    """Sentences as long as those of Resume, or `tgt_len` characters each, with words in them: `TaggedSplit`."""
    from txl_tf.data.tagged.batches import Encoded, TaggedSplit

    rng, sentences = np.random.default_rng(0), []
    for _ in range(shape["sentences"]):
        n = shape["tgt_len"] or int(np.clip(rng.lognormal(3.2, 0.75), 2, 180))
        starts = np.sort(rng.integers(0, n, n // 2))  # half as many words as characters
        ends = np.minimum(starts + rng.choice([1, 2, 3], len(starts), p=[0.75, 0.17, 0.08]), n - 1)
        ids = rng.integers(2, shape["n_token"], n + len(starts))
        places = [np.concatenate([np.arange(n), some]) for some in (starts, ends)]
        bigrams = rng.integers(2, shape["n_bigram"], n)
        sentences.append(Encoded(*(x.astype(np.int32) for x in (ids, bigrams, *places)), n))
    tags = [rng.integers(0, shape["n_tag"], sentence.n).astype(np.int32) for sentence in sentences]
    return TaggedSplit(sentences, tags)


def tagging_step(mode, shape, make, by_length):
    """A function that trains on, or tags, all sentences once, in batches of like lengths or as they come."""
    from txl_tf.data.tagged.batches import tagged_batches

    lattice, size = mode.startswith("flat"), shape["batch_size"]
    batches = tagged_batches(random_split(shape), lattice, size, seed=0)
    if not by_length:
        batches.rows = rows_as_they_come(shape["sentences"], size)
    arrays = [batches.batch(i) for i in range(len(batches))]
    model, tag = make(lattice, shape)
    model(arrays[0][0])  # builds it
    if mode.endswith("tagging"):
        return lambda: [np.asarray(tag(inputs)) for inputs, _ in arrays]
    return epoch_step(model, arrays)


_TAGGER_SIZES = "n_token n_bigram d_embed d_model n_head d_inner dropout embed_dropout".split()


def plain_tagger(lattice, shape):
    import keras

    reference = port("reference_tagger")
    sizes = {name: shape[name] for name in _TAGGER_SIZES}
    network = reference.PlainFlat(**sizes, fusion=shape["fusion"], most=200) if lattice else None
    network = network or reference.PlainTener(**sizes, n_layer=shape["n_layer"])
    model = reference.PlainTagger(network, shape["n_tag"], rate=0.3)
    model.compile(keras.optimizers.SGD(8e-4, 0.9))
    return model, model.tag


def tagging_network(lattice, shape, dtype="float32"):
    import txl_tf

    sizes = {name: shape[name] for name in [*_TAGGER_SIZES, "n_layer"]} | {"d_bigram": shape["d_embed"]}
    own = {"fusion": shape["fusion"], "k_proj": False, "residual": "own"} if lattice else {"dropatt": 0.15}
    return (txl_tf.Flat if lattice else txl_tf.Tener)(**sizes, **own, dtype=dtype)


def library_tagger(dtype="float32"):
    def make(lattice, shape):
        import txl_tf

        network = tagging_network(lattice, shape, dtype)
        labels = ["O", *(f"{prefix}-{kind}" for kind in range(8) for prefix in "BMES")]
        model = txl_tf.Tagger(network, labels, start_end=False, constraints=False, output_dropout=0.3, dtype=dtype)
        model.compile(txl_tf.make_optimizer(8e-4, clip=None, clip_value=5.0, optimizer="sgd"))
        return model, tf.function(lambda inputs: model.decode(inputs)[0], reduce_retracing=True)

    return make


def random_lines(shape):
    """Lines of words of the lengths of sentences, without their ends, 22 words or so; and their vocabulary."""
    from txl_tf.data.vocabulary import Vocab

    rng, n_word = np.random.default_rng(0), shape["n_token"] - 1
    vocab = Vocab(special=["<eos>", *(f"w{i}" for i in range(n_word))], eos="<eos>")
    vocab.build()
    lengths = rng.lognormal(3.1, 0.6, shape["lines"]).clip(2, 200).astype(int)
    draws = (rng.choice(n_word, n, p=frequencies(n_word)) for n in lengths)
    return [" ".join(f"w{i}" for i in ids) for ids in draws], vocab


def line_by_line(lm, vocab, lines):
    """The nll of lines, one after the other, with `lm.score` alone."""
    for line in lines:
        ids = vocab.encode(f"\n{line}\n")[None]
        yield lm.score(ids[:, :-1], ids[:, 1:])[0].numpy().sum(dtype=np.float64)


def scoring_step(shape, by_length):
    """A function that scores all lines once: in batches by length, or one line at a time."""
    import txl_tf
    from txl_tf.runs.scoring import Scorer

    lines, vocab = random_lines(shape)
    lm = txl_tf.TransformerXLLM(**model_arguments(shape))
    if not by_length:
        return lambda: list(line_by_line(lm, vocab, lines))
    scorer = Scorer(lm, vocab)
    return lambda: [score.nll for scores in scorer.score([lines]) for score in scores]


def make_contestants(mode, jit=False):
    """Functions from shape to step, by name, the reference first."""
    if mode == "scoring":
        return {
            "one line at a time": lambda shape: scoring_step(shape, by_length=False),
            "txl_tf float32": lambda shape: scoring_step(shape, by_length=True),
            EVALUATION: lambda shape: library_step("evaluation", shape),
        }
    if is_tagging(mode):
        makers = {REFERENCE: (plain_tagger, False)}
        makers |= {"txl_tf float32 as they come": (library_tagger(), False), "txl_tf float32": (library_tagger(), True)}
        makers |= {"txl_tf bfloat16": (library_tagger("mixed_bfloat16"), True)}
        return {name: lambda shape, some=some: tagging_step(mode, shape, *some) for name, some in makers.items()}
    if mode.startswith("seq2seq"):
        makers = {
            REFERENCE: documents_transformer(),
            "keras attention float32": documents_transformer(own_attention=True),
            "reference bfloat16": documents_transformer("mixed_bfloat16"),
            "txl_tf float32": library_transformer(),
            "txl_tf bfloat16": library_transformer("mixed_bfloat16"),
        }
        if jit:
            makers["txl_tf float32 XLA"] = library_transformer(jit_compile=True)
        if mode == "seq2seq_pairs":
            steps = {name: (make, name.startswith("txl_tf")) for name, make in makers.items()}
            return {name: lambda shape, some=some: pairs_step(shape, *some) for name, some in steps.items()}
        return {name: lambda shape, make=make: seq2seq_step(mode, shape, make) for name, make in makers.items()}
    if mode == "writing":
        makers = {name: functools.partial(writing_step, **options) for name, options in WRITING.items()}
        return makers | {CONTINUED: functools.partial(continuing_step, dtype="float32", read=PROMPT)}
    options = {"txl_tf float32": {}, "txl_tf bfloat16": {"dtype": "mixed_bfloat16"}}
    if jit and is_training(mode):
        options |= {f"{name} XLA": {**some, "jit_compile": True} for name, some in options.items()}
    if is_training(mode):
        options[ROUNDED] = {"matmul_precision": "bfloat16"}
    if mode == "training":
        options["txl_tf float32 recompute"] = {"recompute": True}
    makers = {REFERENCE: lambda shape: reference_step(mode, shape)}
    makers |= {name: lambda shape, some=some: library_step(mode, shape, **some) for name, some in options.items()}
    if mode == "generation":
        for dtype, size in (("float32", 4), ("bfloat16", 2)):
            makers[f"{READING} {dtype}"] = functools.partial(reading_step, size=size)
    return makers


def check_shape(mode, shape):
    """Raises ValueError unless the library's network of a shape can be made. Large ones are made without weights."""
    import txl_tf

    if is_tagging(mode):
        tagging_network(mode.startswith("flat"), shape)
    elif mode.startswith("seq2seq"):
        txl_tf.Transformer(**seq2seq_arguments(shape))
    elif "div_val" in shape:
        txl_tf.TransformerXL(**model_arguments(shape))


def tokens_of_step(mode, name, shape):
    if mode == "seq2seq_pairs":
        return len(word_pairs(shape["pairs"]).targets.ids)
    if mode == "scoring" and name != EVALUATION:
        return sum(len(line.split()) + 1 for line in random_lines(shape)[0])
    if mode == "writing":
        options = WRITING.get(name, {})
        return options.get("rows", 1) * (PROMPT if "prompt" in options else shape["tgt_len"])
    if is_tagging(mode):
        return sum(sentence.n for sentence in random_split(shape).sentences)
    return shape["batch_size"] * (1 if mode == "generation" and name == REFERENCE else shape["tgt_len"])


def training_operations(shape):
    """Floating-point operations of the matrix products that a training step cannot do without.

    The backward pass has two products for every one of the forward pass, of memory and positions only one.
    """
    rows, tgt_len, mem_len, d_model = (shape[name] for name in ("batch_size", "tgt_len", "mem_len", "d_model"))
    tokens, klen, width = rows * tgt_len, mem_len + tgt_len, shape["n_head"] * shape["d_head"]
    layer = tokens * d_model * (4 * width + 2 * shape["d_inner"])  # queries, keys, values, output; feed-forward
    layer += 3 * tokens * klen * width  # scores of keys and of positions; values
    inputs = (2 * rows * mem_len + klen) * d_model * width  # keys and values of the memory; position keys
    ends = [*shape["cutoffs"], shape["n_token"]]
    softmax = tokens * d_model * (ends[0] + len(ends) - 1)
    labels = random_batch(shape)[1].numpy()
    for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False), 1):
        softmax += ((labels >= start) & (labels < end)).sum() * (end - start) * (d_model // shape["div_val"] ** i)
    return int(2 * (3 * (shape["n_layer"] * layer + softmax) + 2 * shape["n_layer"] * inputs))
