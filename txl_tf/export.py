"""A SavedModel that scores, predicts and writes, ids or text, and runs without this library.

    export_saved_model(lm, "serving/my/1", vocab)       # TensorFlow Serving wants <name>/<version>/
    serve = tf.saved_model.load("serving/my/1").signatures
    state = serve["initial_state"](batch_size=tf.constant(2))["state"]
    serve["score"](tokens=tokens, labels=labels, state=state)           # {"nll": ..., "state": ...}

The memory is an argument and a result, so that a server keeps nothing between requests: what one returns continues the
text in the next. It is one float32 tensor `state` `[B, L, 2, H, M, D]`, keys and values in the order of time, in which
rows of different sessions can share a batch. Every argument and every result has the batch first; rows do not see each
other.

Shapes:
    B: batch      T: tokens of a request      L: n_layer      H: n_head      M: mem_len      D: d_head
    n: top_n      N: tokens of the longest row of a result
"""

import os
import re
import tempfile

import keras
import tensorflow as tf

from txl_tf.cache import cached_forward, fix_weights, initial_state, state_from
from txl_tf.folders import removed_on_error, writing
from txl_tf.generation import check_integer, generate_tokens

WEIGHT_TYPES = ("float32", "float16", "bfloat16")
MAX_ROWS = 1024  # of initial_state, which takes a number and makes memory of it
WARMUP_FILE = "tf_serving_warmup_requests"

# What str.split takes for white space and tf.strings.split does not.
UNICODE_SPACE = "[\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"


def export_saved_model(
    lm, directory, vocab=None, *, weights="float32", top_n=10, max_tokens=4096, start_token=None, warmup=True
):
    """Writes a SavedModel of signatures `score`, `next`, `generate`, `initial_state`, and of text where it has words.

    The signatures, by the names of their arguments and results:

        initial_state(batch_size) -> state
        score(tokens [B, T], labels [B, T], state) -> nll [B, T], state
        next(tokens [B, T], state) -> log_probs [B, n], ids [B, n], state
        generate(tokens [B, T]; lengths, number, temperature, top_k, top_p, seed [B]) -> tokens [B, N], lengths [B]
        score_text(text [B]) -> nll [B, N], symbols [B, N], lengths [B]
        generate_text(text, number, temperature, top_k, top_p, seed [B]) -> text [B]

    Ids and numbers are int32; nll and log-probabilities float32, nats. `generate` does what `lm.generate` does, row by
    row: `number` new tokens, `top_k` 0 for all, and zeros beyond `lengths`; a row of length 0 continues `start_token`,
    which is no part of the result. The nll of a text's first symbol, which nothing predicts, is 0. Strings are bytes;
    at byte level, where they need not be UTF-8, the results are called `text_bytes` and `symbols_bytes`, which makes
    TensorFlow Serving encode them in base64. A request out of range is an InvalidArgumentError that names the argument.

    Args:
        lm: `TransformerXLLM`.
        directory: new or empty folder; it appears whole.
        vocab: `Vocab` of the model; `None` leaves out the signatures of text.
        weights: type the weights are stored in, "float32", "float16" or "bfloat16"; computation stays as in `lm`.
        top_n: how many tokens `next` returns; all where the vocabulary has fewer.
        max_tokens: most tokens of a row of a request, and most new ones.
        start_token: id that an empty prompt stands for; by default the end of a line, 0 where there is none.
        warmup: whether to write the requests that TensorFlow Serving runs before it takes others.

    Raises:
        ValueError: an argument is out of range, or `directory` holds something.
        OSError: it cannot be written.
    """
    directory, n_token = os.fspath(directory), lm.network.n_token
    if weights not in WEIGHT_TYPES:
        raise ValueError(f"weights must be one of {', '.join(WEIGHT_TYPES)}, got {weights!r}")
    check_integer("top_n", top_n, 1)
    check_integer("max_tokens", max_tokens, 1)
    if vocab is not None and len(vocab) != n_token:
        raise ValueError(f"vocab must hold the model's n_token={n_token} symbols, got {len(vocab)}")
    if start_token is None:
        start_token = 0 if vocab is None else vocab.ids.get(vocab.eos or "\n", 0)
    check_integer("start_token", start_token, 0, n_token - 1)
    if tf.io.gfile.exists(directory) and (not tf.io.gfile.isdir(directory) or tf.io.gfile.listdir(directory)):
        raise ValueError(f"directory {directory} already exists: choose a new one")

    temporary = f"{directory.rstrip('/')}.{os.getpid()}.tmp"  # no version's name to a server that watches the folder
    with tempfile.TemporaryDirectory() as folder, writing(directory), removed_on_error(temporary):
        text = None
        if vocab is not None:
            path = os.path.join(folder, "vocab.txt")
            vocab.save(path)
            text = Text(vocab, path)
        served = Served(lm, weights, min(top_n, n_token), max_tokens, start_token, text)
        signatures = served.signatures()
        tf.saved_model.save(served.resources, temporary, signatures=signatures)
        if warmup:
            write_warmup(os.path.join(temporary, "assets.extra"), signatures)
        if tf.io.gfile.exists(directory):
            tf.io.gfile.rmtree(directory)
        tf.io.gfile.rename(temporary, directory)


def require(condition, message, found):
    """An op that fails with an InvalidArgumentError unless all of `condition` holds; `found` is what it then shows."""
    return tf.debugging.Assert(tf.reduce_all(condition), [f"{message}, got", tf.strings.as_string(found)])


class Text(tf.Module):
    """A `Vocab` as a graph.

    Args:
        vocab: `Vocab`.
        path: file that it was saved to, which becomes an asset.
    """

    def __init__(self, vocab, path):
        super().__init__()
        self.vocab = vocab
        self.asset = tf.saved_model.Asset(path)
        self.ids = tf.lookup.StaticHashTable(self._initializer(path, by_symbol=True), -1)
        self.symbols = tf.lookup.StaticHashTable(self._initializer(path, by_symbol=False), "")

    def _initializer(self, path, by_symbol):
        line, number = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
        if self.vocab.level == "word":
            key, value = ((tf.string, line), (tf.int64, number))[:: 1 if by_symbol else -1]
            return tf.lookup.TextFileInitializer(path, *key, *value)
        symbols = [symbol.encode("utf-8", "surrogateescape") for symbol in self.vocab.symbols]  # newlines among them
        ids = tf.range(len(symbols), dtype=tf.int64)
        return tf.lookup.KeyValueTensorInitializer(*(symbols, ids)[:: 1 if by_symbol else -1])

    def encode(self, text):
        """`Vocab.encode` of every string of `text` `[B]`: int32 ragged `[B, None]`."""
        symbols = self._tokenize(text)
        ids = tf.cast(self.ids.lookup(symbols.flat_values), tf.int32)
        unk = self.vocab.ids.get(self.vocab.unk)
        if unk is not None:
            return symbols.with_flat_values(tf.where(ids < 0, unk, ids))
        unknown = tf.boolean_mask(symbols.flat_values, ids < 0)[:1]
        message = f"text must be made of the {len(self.vocab)} symbols of the vocabulary"
        with tf.control_dependencies([require(ids >= 0, message, unknown)]):
            return symbols.with_flat_values(tf.identity(ids))

    def _tokenize(self, text):
        """The symbols of every string: ragged `[B, None]`."""
        vocab, replace = self.vocab, tf.strings.regex_replace
        if vocab.level == "byte":
            return tf.strings.bytes_split(text)
        if vocab.lower_case:
            text = tf.strings.lower(text, "utf-8")
        if vocab.level == "char":
            return tf.strings.unicode_split(text, "UTF-8")
        if vocab.bos:
            lines = replace(tf.strings.join([f"{vocab.bos} ", text]), "\n", _rewrite(f"\n{vocab.bos} "))
            lines = replace(lines, f"\n{re.escape(vocab.bos)} \\z", "\n")
            text = tf.where(text == "", text, lines)
        if vocab.eos:
            text = replace(text, "\n", _rewrite(f" {vocab.eos} "))
        return tf.strings.split(replace(text, UNICODE_SPACE, " "))

    def decode(self, ids, lengths):
        """`Vocab.decode` of every row of `ids` `[B, N]` up to its length: string `[B]`, at byte level any bytes."""
        vocab, replace = self.vocab, tf.strings.regex_replace
        symbols = tf.RaggedTensor.from_tensor(self.spell(ids), lengths)
        if vocab.level != "word":
            return tf.strings.reduce_join(symbols, -1)
        if vocab.eos:
            words = symbols.flat_values
            symbols = symbols.with_flat_values(tf.where(words == vocab.eos, "\n", words))
        text = replace(tf.strings.reduce_join(symbols, -1, separator=" "), " ?\n ?", "\n")
        if vocab.bos and vocab.bos == vocab.eos:
            return replace(replace(text, "\n+", "\n"), "^\n", "")
        return replace(text, f"(?m)^(?:{re.escape(vocab.bos)}(?: |$))+", "") if vocab.bos else text

    def spell(self, ids):
        """The symbols of `ids`, of any shape."""
        return self.symbols.lookup(tf.cast(ids, tf.int64))


def _rewrite(text):
    """`text` for a place where a backslash begins a group's number."""
    return text.replace("\\", "\\\\")


class Served:
    """The weights as they are stored, and the signatures. See `export_saved_model` for the arguments.

    Attributes:
        resources: `tf.Module`, what the signatures refer to, and so what is saved. It does not hold the model.
    """

    def __init__(self, lm, weights, top_n, max_tokens, start_token, text=None):
        self.lm = lm
        self.top_n = top_n
        self.max_tokens = max_tokens
        self.start_token = start_token
        self.text = text
        network = lm.network
        self.memory = [network.n_layer, 2, network.n_head, network.mem_len, network.d_head]  # of a row
        self.stored = [tf.Variable(tf.cast(weight, weights), trainable=False) for weight in lm.weights]
        # Those that `next` needs for a single token, which would otherwise take the most time.
        klen = lm.network.mem_len + 1
        self.position_keys = [
            tf.Variable(tf.cast(fixed.position_keys[:, :klen], weights), trainable=False)
            for fixed in fix_weights(lm.network)
        ]
        self.resources = tf.Module()
        self.resources.weights = self.stored, self.position_keys
        self.resources.text = text

    def _as_stored(self):
        """A scope in which the weights of `lm` are the stored ones."""
        pairs = zip(self.lm.weights, self.stored, strict=True)
        return keras.StatelessScope([(weight, tf.cast(stored, weight.dtype)) for weight, stored in pairs])

    def signatures(self):
        """dict of concrete functions."""
        segment = tf.TensorSpec([None, None], tf.int32)
        state = tf.TensorSpec([None, *self.memory], tf.float32)
        numbers, floats = tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.float32)
        sampling = {"number": numbers, "temperature": floats, "top_k": numbers, "top_p": floats, "seed": numbers}
        arguments = {
            self.initial_state: {"batch_size": tf.TensorSpec(None, tf.int32)},
            self.score: {"tokens": segment, "labels": segment, "state": state},
            self.next: {"tokens": segment, "state": state},
            self.generate: {"tokens": segment, "lengths": numbers, **sampling},
        }
        if self.text is not None:
            text = tf.TensorSpec([None], tf.string)
            arguments |= {self.score_text: {"text": text}, self.generate_text: {"text": text, **sampling}}

        def concrete(function, specs):
            def call(**tensors):
                with self._as_stored():  # ensure_shape: a server passes on whatever shape a client sends
                    return function(**{name: tf.ensure_shape(x, specs[name].shape) for name, x in tensors.items()})

            specs = {name: tf.TensorSpec(spec.shape, spec.dtype, name) for name, spec in specs.items()}
            return tf.function(call, autograph=False).get_concrete_function(**specs)

        return {function.__name__: concrete(function, specs) for function, specs in arguments.items()}

    # ------------------------------------------------------------------------------------------------ signatures

    def initial_state(self, batch_size):
        rows = tf.reduce_sum(batch_size)  # a 1 for every row, rather than one number, is what a server can batch
        valid = tf.reduce_all(batch_size >= 0) & (rows <= MAX_ROWS)
        with tf.control_dependencies([require(valid, f"batch_size must lie between 0 and {MAX_ROWS}", batch_size)]):
            rows = tf.identity(rows)
        return {"state": self._pack(initial_state(self.lm.network, rows))}

    def score(self, tokens, labels, state):
        same = tf.reduce_all(tf.shape(tokens) == tf.shape(labels))
        with tf.control_dependencies([require(same, "labels must have the shape of tokens", tf.shape(labels))]):
            tokens, state = self._check_segment(tokens, state)
        labels = self._check_ids("labels", labels)
        hidden, state = self._read(tokens, state)
        return {"nll": self.lm.softmax.nll(hidden, labels, self.lm.network.embedding), "state": state}

    def next(self, tokens, state):
        tokens, state = self._check_segment(tokens, state)
        hidden, state = tf.cond(
            tf.shape(tokens)[1] == 1, lambda: self._read_one(tokens, state), lambda: self._read(tokens, state)
        )
        log_probs = self.lm.softmax(hidden[:, -1:], embedding=self.lm.network.embedding)
        top = tf.math.top_k(log_probs[:, 0], self.top_n)
        return {"log_probs": top.values, "ids": top.indices, "state": state}

    def generate(self, tokens, lengths, number, temperature, top_k, top_p, seed):
        batch, n = tf.unstack(tf.shape(tokens))
        most = self.max_tokens
        vectors = {"lengths": lengths, "number": number, "temperature": temperature}
        vectors |= {"top_k": top_k, "top_p": top_p, "seed": seed}
        shapes = [require(batch > 0, "tokens must be [batch, n], batch at least 1", tf.shape(tokens))]
        shapes += [require(n <= most, f"tokens must be at most {most} a row", n)]
        shapes += [
            require(tf.shape(vector)[0] == batch, f"{name} must be [batch], as tokens are", tf.shape(vector))
            for name, vector in vectors.items()
        ]
        with tf.control_dependencies(shapes):
            tokens = tf.identity(tokens)
            finite = temperature < float("inf")
            values = [
                require((lengths >= 0) & (lengths <= n), "lengths must lie between 0 and those of tokens", lengths),
                require((number >= 0) & (number <= most), f"number must lie between 0 and {most}", number),
                require((temperature >= 0) & finite, "temperature must be 0 or more", temperature),
                require(top_k >= 0, "top_k must be 1 or more, or 0 for all", top_k),
                require((top_p > 0) & (top_p <= 1), "top_p must lie in (0, 1]", top_p),
            ]
        with tf.control_dependencies(values):  # before a number becomes the size of anything
            lengths, number, *sampling = map(tf.identity, vectors.values())
        prompt = self._check_ids("tokens", tf.where(tf.sequence_mask(lengths, n), tokens, 0))

        empty = lengths == 0
        prompt = tf.pad(prompt, [[0, 0], [0, tf.cast(n == 0, tf.int32)]])
        first = tf.where(empty, self.start_token, prompt[:, 0])
        prompt = tf.concat([first[:, None], prompt[:, 1:]], 1)
        longest = tf.reduce_max(number)
        written = generate_tokens(self.lm, prompt, tf.maximum(lengths, 1), longest, *sampling, tf.constant(-1))
        written = tf.where(empty[:, None], tf.roll(written, -1, 1), written)[:, : n + longest]
        lengths += number
        return {"tokens": tf.where(tf.sequence_mask(lengths, n + longest), written, 0), "lengths": lengths}

    def score_text(self, text):
        network = self.lm.network
        ids, lengths = self._encode(text)
        batch, n = tf.unstack(tf.shape(ids))
        tokens = tf.pad(ids, [[0, 0], [0, tf.maximum(2 - n, 0)]])  # at least one to read and one to predict
        room = tf.shape(tokens)[1] - 1
        hidden, _ = cached_forward(
            network, fix_weights(network, room), tokens[:, :-1], initial_state(network, batch, room)
        )
        nll = tf.pad(self.lm.softmax.nll(hidden, tokens[:, 1:], network.embedding), [[0, 0], [1, 0]])[:, :n]
        inside = tf.sequence_mask(lengths, n)
        symbols = tf.where(inside, self.text.spell(ids), "")
        return {"nll": tf.where(inside, nll, 0), self._named("symbols"): symbols, "lengths": lengths}

    def generate_text(self, text, number, temperature, top_k, top_p, seed):
        written = self.generate(*self._encode(text), number, temperature, top_k, top_p, seed)
        return {self._named("text"): self.text.decode(written["tokens"], written["lengths"])}

    # ------------------------------------------------------------------------------------------------- their parts

    def _named(self, result):
        return f"{result}_bytes" if self.text.vocab.level == "byte" else result

    def _encode(self, text):
        """Ids `[B, N]`, filled up with zeros, and lengths `[B]`."""
        ids = self.text.encode(text)
        lengths = tf.cast(ids.row_lengths(), tf.int32)
        message = f"text must be at most {self.max_tokens} tokens long"
        with tf.control_dependencies([require(lengths <= self.max_tokens, message, lengths)]):
            return ids.to_tensor(0), tf.identity(lengths)

    def _check_ids(self, name, ids):
        n_token = self.lm.network.n_token
        valid = (ids >= 0) & (ids < n_token)
        found = tf.boolean_mask(ids, ~valid)[:1]
        with tf.control_dependencies([require(valid, f"{name} must hold ids between 0 and {n_token - 1}", found)]):
            return tf.identity(ids)

    def _check_segment(self, tokens, state):
        batch, n = tf.unstack(tf.shape(tokens))
        length = require((n >= 1) & (n <= self.max_tokens), f"tokens must be 1 to {self.max_tokens} a row", n)
        rows = tf.shape(state)[0]
        with tf.control_dependencies([length, require(rows == batch, "state must have as many rows as tokens", rows)]):
            return self._check_ids("tokens", tokens), tf.identity(state)

    def _unpack(self, state, room):
        _, n_layer, _, *memory = state.shape
        state = tf.reshape(tf.cast(state, self.lm.compute_dtype), [tf.shape(state)[0], 2 * n_layer, *memory])
        rings = tf.unstack(state, axis=1)  # keys and values in turn
        return state_from(rings[::2], rings[1::2], room)

    def _pack(self, cached):
        """The state whose `_unpack` is `cached`, which has read nothing or as much as its room: it begins at slot 0."""
        rings = [ring for pair in zip(cached.keys, cached.values, strict=True) for ring in pair]
        room = tf.shape(rings[0])[2] - self.lm.network.mem_len
        state = tf.cast(tf.stack([ring[:, :, room:] for ring in rings], 1), tf.float32)
        return tf.reshape(state, [tf.shape(state)[0], *self.memory])

    def _read(self, tokens, state):
        """Hidden states `[B, T, d_model]` and the state after the segment."""
        network, room = self.lm.network, tf.shape(tokens)[1]
        hidden, cached = cached_forward(network, fix_weights(network, room), tokens, self._unpack(state, room))
        return hidden, self._pack(cached)

    def _read_one(self, tokens, state):
        """`_read` of a single token, with the position keys that are stored."""
        network = self.lm.network
        fixed = [  # the token goes to the last slot, for which the table need not be rotated, nor be longer
            layer._replace(position_keys=tf.cast(keys, layer.qkv.dtype))
            for layer, keys in zip(fix_weights(network), self.position_keys, strict=True)
        ]
        tokens = tf.ensure_shape(tokens, [None, 1])
        hidden, cached = cached_forward(network, fixed, tokens, self._unpack(state, room=1))
        return hidden, self._pack(cached)


# ------------------------------------------------------------------------------------------------------------ warm-up


def write_warmup(folder, signatures):
    """Writes a request for every signature, and what is run first for it is compiled and allocated: a TFRecord.

    The records are `PredictionLog`s of TensorFlow Serving. Of their fields few are needed, so they are encoded here
    rather than with `tensorflow-serving-api`, which is then no requirement.
    """
    values = {"number": 1, "top_p": 1, "batch_size": 1, "text": ""}
    tf.io.gfile.makedirs(folder)
    with tf.io.TFRecordWriter(os.path.join(folder, WARMUP_FILE)) as writer:
        for signature, function in signatures.items():
            inputs = {}
            for name, spec in function.structured_input_signature[1].items():
                inputs[name] = tf.make_tensor_proto(values.get(name, 0), spec.dtype)  # one value for all places
                shape = [1 if size is None else size for size in spec.shape] if spec.shape.rank else []
                inputs[name].tensor_shape.CopyFrom(tf.TensorShape(shape).as_proto())
            writer.write(prediction_log(signature, inputs))


def prediction_log(signature, inputs):
    """The bytes of a `PredictionLog` of one request.

    Args:
        signature: its name.
        inputs: dict of `TensorProto`.
    """
    request = _field(1, _field(3, signature.encode()))  # model_spec.signature_name
    for name, proto in inputs.items():
        entry = _field(1, name.encode()) + _field(2, proto.SerializeToString())
        request += _field(2, entry)  # of the map inputs
    return _field(6, _field(1, request))  # predict_log.request


def _field(number, payload):
    """A field of a protocol buffer whose value is bytes: tag, length, value."""
    size, length = len(payload), b""
    while size > 127:
        length += bytes([size % 128 + 128])
        size //= 128
    return bytes([number * 8 + 2]) + length + bytes([size]) + payload
