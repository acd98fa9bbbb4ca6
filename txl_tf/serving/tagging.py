"""The signatures of a served tagger: text in, named entities out.

Shapes:
    B: batch      L: tokens of the longest text      T: items of a row, its characters and words
    C: tokens of all texts      N: entities of the row with the most
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Sequence

import tensorflow as tf

from txl_tf.data.tagged.batches import END, PADDING, UNKNOWN_ID
from txl_tf.data.tagged.columns import BLANK
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.vocabulary import Vocab
from txl_tf.schema import brief
from txl_tf.serving.request import (
    Check,
    RequestLimits,
    StoredModel,
    checked,
    in_vocabulary,
    padded_at_the_end,
    same_rows,
    same_shape,
)
from txl_tf.serving.tables import (
    SymbolTable,
    Tokens,
    characters_of,
    check_utf8,
    forms_of,
    named_vocabs,
    words_of,
)
from txl_tf.taggers.flat import Flat
from txl_tf.taggers.tagger import Tagger
from txl_tf.taggers.tener import SentenceNetwork

ITEMS = 2  # of a lattice, for each character of a text that fits in any case: real text has 1.5 to 1.8


def tagger_vocabs(tagger: Tagger, vocabs: Sequence[Vocab] | None) -> dict[str, Vocab]:
    """`{name: vocabulary}` of the vocabularies that the text of `tagger` is read with.

    Args:
        tagger: `Tagger`; over a network that is no `SentenceNetwork`, there are no vocabularies.
        vocabs: of characters, with words for `Flat`, or of words; of bigrams, or forms, not read where the network has
            none; and perhaps, for `Flat`, of the lexicon's words.

    Raises:
        ValueError: a vocabulary that is not the model's or that no file of lines can hold.
    """
    network, kind = tagger.network, type(tagger.network).__name__
    if vocabs is None:
        return {}
    if not isinstance(network, SentenceNetwork):
        raise ValueError(f"vocab must be None where the network of a tagger is no SentenceNetwork, but {kind}")
    sizes = {"vocab": network.n_token, "bigram_vocab": network.n_bigram or None}
    if isinstance(network, Flat) and len(vocabs) != 2:
        sizes["lexicon"] = None
    named = named_vocabs(vocabs, sizes, kind)
    if not network.n_bigram:
        del named["bigram_vocab"]
    for name, vocab in named.items():
        if vocab.level != "word":
            raise ValueError(f"{name} must be of level 'word', got {vocab.level!r}")
        bad = next((symbol for symbol in vocab.symbols if not symbol or re.search("[\r\n]", symbol)), None)
        if bad is not None:
            raise ValueError(f"{name} must hold symbols that are not empty and have no line ends, got {brief(bad)}")
    if "lexicon" in named:
        Lexicon(named["lexicon"].symbols)  # raises where a word is too short
        if not named["lexicon"].symbols:
            raise ValueError("lexicon must have a word, got none")
    return named


class SentenceGraph(tf.Module):
    """`SentenceEncoder` and `features` of a text's tokens, as a graph.

    Args:
        lattice: whether the network is `Flat`.
        max_tokens: most tokens of a text.
        vocab, bigram_vocab, lexicon: `SymbolTable`s, or `None`; without bigrams, all of them are 0.
        level: what the tokens are, "char" or "word".
    """

    def __init__(
        self, lattice: bool, max_tokens: int, vocab: SymbolTable, bigram_vocab: SymbolTable | None = None,
        lexicon: SymbolTable | None = None, level: str = "char",
    ):  # fmt: skip
        super().__init__()
        self.level = level
        self.lattice, self.vocab, self.bigram_vocab, self.lexicon = lattice, vocab, bigram_vocab, lexicon
        found = {len(word) for word in lexicon.vocab.symbols} if lexicon else ()
        self.word_lengths = tuple(sorted(n for n in found if n <= max_tokens))

    def features(self, chars: tf.RaggedTensor) -> dict[str, tf.Tensor]:
        """The inputs of the network.

        Args:
            chars: string `[B, None]`, the characters of each text, or its words.
        """
        flat, lengths = chars.flat_values, chars.row_lengths()
        if self.level == "char":  # words have no spaces
            flat = tf.where((flat == " ") | (flat == "\t"), BLANK, flat)
        places = tf.ragged.range(lengths).flat_values  # [C], of each character in its row
        rest = tf.repeat(lengths, lengths) - places  # [C], characters from here to the end of the row
        ids = self.vocab.ids(flat)
        following = tf.where(rest == 1, END, tf.concat([flat, [END]], 0)[1:])
        bigrams = tf.zeros_like(ids)
        if self.bigram_vocab:
            words = self.level == "word"
            bigrams = self.bigram_vocab.ids(forms_of(flat) if words else tf.strings.join([flat, following]))
        bigrams = _dense(chars.with_values(bigrams))
        if not self.lattice:
            return {"chars": _dense(chars.with_values(ids)), "bigrams": bigrams}
        begins, n_chars, word_ids = self._words(flat, rest)
        of_chars = tf.stack([ids, places, places], 1)
        starts = tf.gather(places, begins)
        of_words = tf.stack([word_ids, starts, starts + n_chars - 1], 1)
        # Items by rows; `argsort` keeps the order of equal ones: characters first, then words.
        rows = tf.concat([chars.value_rowids(), tf.gather(chars.value_rowids(), begins)], 0)
        items = tf.gather(tf.concat([of_chars, of_words], 0), tf.argsort(rows, stable=True))
        sums = tf.math.bincount(tf.cast(rows, tf.int32), minlength=tf.cast(chars.nrows(), tf.int32), dtype=tf.int64)
        items = _dense(tf.RaggedTensor.from_row_lengths(items, sums))  # [B, T, 3]
        features = dict(zip(("lattice", "pos_s", "pos_e"), tf.unstack(items, axis=2), strict=True))
        seq_len, sums = tf.cast(lengths, tf.int32), tf.cast(sums, tf.int32)
        return {**features, "bigrams": bigrams, "seq_len": seq_len, "lex_num": sums - seq_len}

    def _words(self, flat: tf.Tensor, rest: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The words of the lexicon by start, then by end: int64 `(places in flat, numbers of characters, ids)`."""
        begins = tf.range(tf.size(flat, tf.int64))
        pieces, none = flat, tf.zeros([0], tf.int64)
        found, n_chars, words = [none], [none], [tf.zeros([0], tf.string)]
        for n in range(2, max(self.word_lengths, default=0) + 1):
            kept = tf.where(tf.gather(rest, begins) >= n)[:, 0]  # pieces of n characters end in their own row
            begins = tf.gather(begins, kept)
            pieces = tf.strings.join([tf.gather(pieces, kept), tf.gather(flat, begins + n - 1)])
            if n in self.word_lengths:
                hits = tf.where(self.lexicon.has(pieces))[:, 0]
                found.append(tf.gather(begins, hits))
                n_chars.append(tf.fill([tf.size(hits)], tf.constant(n, tf.int64)))
                words.append(tf.gather(pieces, hits))
        found, n_chars, words = (tf.concat(parts, 0) for parts in (found, n_chars, words))
        order = tf.argsort(found, stable=True)  # shorter words stand first
        return tuple(tf.gather(x, order) for x in (found, n_chars, self.vocab.ids(words)))


def _dense(rows: tf.RaggedTensor) -> tf.Tensor:
    return tf.cast(rows.to_tensor(PADDING), tf.int32)


def limits_of(tagger: Tagger, max_rows: int | None, max_tokens: int) -> RequestLimits:
    """`RequestLimits` of a tagger. A row has as many items as the longest one; the tokens of `row_bytes` are items.

    Of a network that is no `SentenceNetwork`, only the width of its hidden states is known.
    """
    network, n_label, lattice = tagger.network, len(tagger.labels), isinstance(tagger.network, Flat)
    if not isinstance(network, SentenceNetwork):
        width = tagger.out_fc.kernel.shape[0]
        return RequestLimits(
            lambda tokens, _=0: 12 * n_label**2 + tokens * 4 * (8 * width + 10 * n_label), max_rows, max_tokens,
            row="{} elements",
        )  # fmt: skip
    # Of FLAT, each pair of items has a position of its own, as wide as the model, and four distances, int64.
    of_pair = 4 * (network.d_model + 8 * network.n_head + 16) if lattice else 4 * 10 * network.n_head
    widths = network.d_embed + network.d_bigram + 8 * network.d_model + 2 * network.d_inner + 10 * n_label

    def row_bytes(items, new_tokens=0):
        return 12 * n_label**2 + items * (4 * widths + items * of_pair)

    if lattice:
        return RequestLimits(row_bytes, max_rows, max_tokens, ITEMS * max_tokens, "{} characters and words")
    return RequestLimits(
        row_bytes, max_rows, max_tokens, row="{} words" if tagger.token_level == "word" else "{} characters"
    )


class TaggingSignatures(StoredModel):
    """The signatures of a served tagger.

        tag_text(text [B]) -> kinds, starts, ends, entities, probs [B, N], numbers [B]
        tag_characters(text [B]) -> tags [B, L], lengths [B]
        tag_words(text [B]) -> words, tags [B, L], lengths [B]       where tokens are words, and no tag_characters
        tag(inputs of the network [B, ...]) -> tags, ends, starts, kinds, probs [B, L]: see `Tagger.entities`

    A text is one line of UTF-8, or empty. `kinds`, `entities`, words and their tags are strings; `starts` and `ends`
    count characters, `ends` exclusive; `numbers` says how many entities a row has, of the scheme "none" every token.
    Beyond the entities, and tokens, of a row are "" and 0. Without vocabularies there is `tag` alone.

    Args:
        tagger: `Tagger`; over a network that is no `SentenceNetwork` with `tag` alone.
        tables: `SymbolTable`s by the names of `tagger_vocabs`; nothing for ids alone.
        weights, max_tokens, max_rows: see `export_saved_model`.

    Attributes:
        max_items: most characters and words of a row by itself.
    """

    warmup_values = {"text": "a", "chars": UNKNOWN_ID, "lattice": UNKNOWN_ID, "bigrams": UNKNOWN_ID, "seq_len": 1}

    def __init__(
        self, tagger: Tagger, tables: dict[str, SymbolTable] | None = None, *, weights: str = "float32",
        max_tokens: int | None = None, max_rows: int | None = None,
    ):  # fmt: skip
        self.network, self.lattice = tagger.network, isinstance(tagger.network, Flat)
        self.by_words = tagger.token_level == "word"
        signature = tagger.build_for_export()
        self.named = isinstance(signature, dict)
        specs = signature if self.named else {"inputs": signature}
        self.inputs = {name: tf.TensorSpec(spec.shape, spec.dtype) for name, spec in specs.items()}
        super().__init__(tagger, weights)
        self.limits = limits_of(tagger, max_rows, max_tokens or tagger.network.max_seq_len)
        self.max_items = bisect.bisect_right(range(2**31), self.limits.max_bytes, key=self.limits.row_bytes) - 1
        self.graph = None
        if tables:
            self.graph = SentenceGraph(self.lattice, self.limits.max_tokens, **tables, level=tagger.token_level)
        self.resources.graph = self.graph
        self._entities = self.shared(self._found_in, self.inputs)

    def signatures(self) -> dict[str, Callable]:
        arguments = {self.tag: self.inputs}
        if self.graph is not None:
            text = {"text": tf.TensorSpec([None], tf.string)}
            arguments |= {self.tag_text: text, self.tag_words if self.by_words else self.tag_characters: text}
        return self.concrete(arguments)

    # ------------------------------------------------------------------------------------------------ signatures

    def tag(self, **inputs: tf.Tensor) -> dict:
        if not isinstance(self.network, SentenceNetwork):
            name, first = next(iter(inputs.items()))
            checked_inputs = checked([*self.limits.check_ids(name, first)], inputs)
            return self.model.entities(checked_inputs if self.named else checked_inputs[name])
        if self.lattice:  # first what the other checks compare
            inputs = checked(self._shape_checks(**inputs), inputs)
            checks = self._lattice_checks(**inputs)
        else:
            checks = [*self.limits.check_ids("chars", inputs["chars"]), padded_at_the_end("chars", inputs["chars"])]
            if "bigrams" in inputs:
                checks.append(same_shape("bigrams", inputs["bigrams"], "chars", inputs["chars"]))
        name = "lattice" if self.lattice else "chars"
        checks.append(in_vocabulary(name, inputs[name], self.network.n_token))
        if self.network.n_bigram:
            checks.append(in_vocabulary("bigrams", inputs["bigrams"], self.network.n_bigram))
        return self._entities(checked(checks, inputs))

    def tag_text(self, text: tf.Tensor) -> dict:
        found, tokens = self._read(text)
        places = tf.where(found["ends"])  # [entities of all rows, 2]
        rows, (size, _) = places[:, 0], tf.unstack(tf.shape(found["ends"], tf.int64))
        starts, kinds, probs = (tf.gather_nd(found[name], places) for name in ("starts", "kinds", "probs"))
        ends = tf.cast(places[:, 1], tf.int32) + 1
        if self.by_words:
            ends = tf.gather_nd(tokens.ends.to_tensor(), places)
            starts = tf.gather_nd(tokens.starts.to_tensor(), tf.stack([rows, tf.cast(starts, tf.int64)], 1))
        parts = {
            "kinds": tf.gather(tf.constant(self.model.kinds, tf.string), kinds),
            "starts": starts,
            "ends": ends,
            "entities": tf.strings.substr(tf.gather(text, rows), starts, ends - starts, "UTF8_CHAR"),
            "probs": probs,
        }
        by_row = {name: tf.RaggedTensor.from_value_rowids(x, rows, size, validate=False) for name, x in parts.items()}
        numbers = tf.reduce_sum(tf.cast(found["ends"], tf.int32), 1)
        return {**{name: x.to_tensor() for name, x in by_row.items()}, "numbers": numbers}

    def tag_characters(self, text: tf.Tensor) -> dict:
        found, tokens = self._read(text)
        lengths = tf.cast(tokens.strings.row_lengths(), tf.int32)
        tags = tf.gather(tf.constant(self.model.labels), found["tags"])
        visible = tf.sequence_mask(lengths, tf.shape(tags)[1])
        return {"tags": tf.where(visible, tags, ""), "lengths": lengths}

    def tag_words(self, text: tf.Tensor) -> dict:
        return {"words": words_of(text).strings.to_tensor(), **self.tag_characters(text)}

    # ------------------------------------------------------------------------------------------------- their parts

    def _read(self, text: tf.Tensor) -> tuple[dict, Tokens]:
        """`Tagger.entities` of texts, and their tokens."""
        limits, most, rows = self.limits, self.limits.max_tokens, tf.shape(text)[0]
        text = limits.checked_text("text", text)
        ends = tf.strings.regex_full_match(text, r"(?s).*\n.*")
        of_row = tf.strings.join(["a line end in row ", tf.strings.as_string(tf.where(ends)[:1, 0])])
        text = checked([check_utf8("text", text), Check(~ends, "text must be one line in every row", of_row)], text)
        tokens = words_of(text) if self.by_words else characters_of(text)
        longest = tf.reduce_max(tf.cast(tokens.strings.row_lengths(), tf.int32))
        unit = "words" if self.by_words else "characters"
        too_long = "a text is longer than max_tokens of the export, send its sentences one by one"
        message = f"{too_long}: text must be at most {most} {unit} a row"
        short = Check(longest <= most, message, longest)
        inputs = self.graph.features(checked([short, limits.check_size("text", rows, longest)], tokens.strings))
        if self.lattice:
            inputs = checked(self._item_checks("text", rows, tf.shape(inputs["lattice"])[1]), inputs)
        return self._entities({name: inputs[name] for name in self.inputs}), tokens

    def _found_in(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """`Tagger.entities`, which must have a place, of as many as there are, even none."""
        length = tf.shape(inputs["bigrams" if self.lattice else "chars"])[1]
        padded = {}
        for name, x in inputs.items():
            by_place = len(x.shape) == 2
            padded[name] = tf.pad(x, [[0, 0], [0, tf.maximum(1 - tf.shape(x)[1], 0)]]) if by_place else x
        return {name: x[:, :length] for name, x in self.model.entities(padded).items()}

    def _item_checks(self, name: str, rows: tf.Tensor, items: tf.Tensor) -> list[Check]:
        message = f"{name} must have at most {self.max_items} characters and words a row"
        return [Check(items <= self.max_items, message, items), self.limits.check_size(name, rows, items)]

    def _shape_checks(self, lattice, bigrams, seq_len, lex_num, pos_s, pos_e) -> list[Check]:
        (rows, items), length, most = tf.unstack(tf.shape(lattice)), tf.shape(bigrams)[1], self.limits.max_tokens
        return [
            *self.limits.check_rows("lattice", rows),
            Check((length >= 1) & (length <= most), f"bigrams must be 1 to {most} a row", length),
            Check(items >= length, "lattice must be at least as long as bigrams", items),
            *self._item_checks("lattice", rows, items),
            same_rows("bigrams", bigrams, "lattice", lattice),
            same_shape("pos_s", pos_s, "lattice", lattice),
            same_shape("pos_e", pos_e, "lattice", lattice),
            same_rows("seq_len", seq_len, "lattice", lattice),
            same_rows("lex_num", lex_num, "lattice", lattice),
        ]

    def _lattice_checks(self, lattice, bigrams, seq_len, lex_num, pos_s, pos_e) -> list[Check]:
        items, length, most = tf.shape(lattice)[1], tf.shape(bigrams)[1], self.limits.max_tokens - 1
        return [
            Check((seq_len >= 0) & (seq_len <= length), "seq_len must lie between 0 and that of bigrams", seq_len),
            Check((lex_num >= 0) & (lex_num <= items - seq_len), "seq_len + lex_num must fit into lattice", lex_num),
            Check((pos_e >= 0) & (pos_e <= most), f"pos_e must lie between 0 and {most}", lambda: _extremes(pos_e)),
            Check((pos_s >= 0) & (pos_s <= pos_e), "pos_s must lie between 0 and pos_e", lambda: _extremes(pos_s)),
        ]


def _extremes(x: tf.Tensor) -> tf.Tensor:
    return tf.stack([tf.reduce_min(x), tf.reduce_max(x)])
