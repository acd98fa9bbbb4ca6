"""The signatures of a served tagger: text in, named entities out.

Shapes:
    B: batch      L: tokens of the longest text      T: items of a row, its characters and words
    C: tokens of all texts      N: most entities of a row
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from txl_tf.data.tagged.batches import END, PADDING, UNKNOWN_ID
from txl_tf.data.tagged.columns import BLANK
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError, brief
from txl_tf.serving.request import (
    Check,
    RequestLimits,
    StoredModel,
    checked,
    first_row_where,
    in_vocabulary,
    padded_at_the_end,
    same_rows,
    same_shape,
)
from txl_tf.serving.signatures import Served, serves
from txl_tf.serving.tables import (
    RaggedTensor,
    SymbolTable,
    Tokens,
    characters_of,
    check_utf8,
    forms_of,
    named_vocabs,
    words_of,
)
from txl_tf.taggers.tagger import Tagger

# A request with one text of max_tokens characters always fits if its lattice has at most ITEMS items (characters and
# words) for each character. Real text has 1.5 to 1.8.
ITEMS = 2


def tagger_vocabs(tagger: Tagger, vocabs: Sequence[Vocab] | None) -> dict[str, Vocab]:
    """Names the vocabularies that a tagger reads text with, and checks them.

    Args:
        tagger: the tagger. If its network is no `SentenceNetwork`, `vocabs` must be `None`.
        vocabs: the vocabulary of characters (for `Flat`, of characters and words) or of words; that of bigrams or
            forms; and for `Flat`, that of the words of the lexicon, if there is one. `None`: the tagger takes no text.

    Returns:
        `{name: vocabulary}`, empty if `vocabs` is `None`. The vocabulary of bigrams or forms is left out if the network
        does not read them.

    Raises:
        ParameterError: a vocabulary is not that of the model, or cannot be written as lines of a file; or the lexicon
            has no words, or one that is too short.
    """
    network: Any = tagger.network
    kind = type(network).__name__
    if vocabs is None:
        return {}
    if not tagger.reads_sentences:
        message = f"vocab must be None where the network of a tagger is no SentenceNetwork, but {kind}"
        raise ParameterError("vocab", vocabs, [None], message)
    sizes: dict[str, int | None] = {"vocab": network.n_token, "bigram_vocab": network.n_bigram or None}
    if tagger.reads_lattice and len(vocabs) != 2:  # two are those of a `Flat` without a lexicon
        sizes["lexicon"] = None
    named = named_vocabs(vocabs, sizes, kind)
    if not network.n_bigram:
        del named["bigram_vocab"]
    for name, vocab in named.items():
        if vocab.level != "word":
            raise ParameterError(name, vocab.level, "of level 'word'")
        bad_symbol = next((symbol for symbol in vocab.symbols if not symbol or re.search("[\r\n]", symbol)), None)
        if bad_symbol is not None:
            allowed = "symbols that are not empty and have no line ends"
            raise ParameterError(name, bad_symbol, allowed, f"{name} must hold {allowed}, got {brief(bad_symbol)}")
    if "lexicon" in named:
        Lexicon(named["lexicon"].symbols)  # raises an error if a word is too short
        if not named["lexicon"].symbols:
            raise ParameterError("lexicon", [], "words", "lexicon must have a word, got none")
    return named


class SentenceGraph(tf.Module):
    """A `SentenceEncoder` as a graph. It turns the tokens of texts into the inputs of the network, see `features`.

    Args:
        lattice: whether the network reads a lattice, as `Flat` does.
        max_tokens: most tokens of a text.
        vocab, bigram_vocab, lexicon: tables of symbols; the last two may be `None`. Without `bigram_vocab`, the ids of
            bigrams are 0.
        level: what the tokens are, "char" or "word".
    """

    def __init__(
        self, lattice: bool, max_tokens: int, vocab: SymbolTable, bigram_vocab: SymbolTable | None = None,
        lexicon: SymbolTable | None = None, level: str = "char",
    ):  # fmt: skip
        super().__init__()
        self.level = level
        self.lattice = lattice
        self.vocab = vocab
        self.bigram_vocab = bigram_vocab
        self.lexicon: Any = lexicon
        lengths = {len(word) for word in lexicon.vocab.symbols} if lexicon else ()
        self.word_lengths = tuple(sorted(n for n in lengths if n <= max_tokens))

    def features(self, chars: Any) -> dict[str, tf.Tensor]:
        """The inputs of the network by name, int32, see `Tener` and `Flat`.

        Args:
            chars: ragged string `[B, None]`, the tokens of each text: characters or words.
        """
        flat = chars.flat_values
        lengths = chars.row_lengths()
        if self.level == "char":  # a word contains no spaces
            flat = tf.where((flat == " ") | (flat == "\t"), BLANK, flat)
        positions: Any = tf.ragged.range(lengths).flat_values  # [C], the position of each token in its row
        n_left = tf.repeat(lengths, lengths) - positions  # [C], tokens from this one to the end of the row
        ids = self.vocab.ids(flat)
        following = tf.where(n_left == 1, END, tf.concat([flat, [END]], 0)[1:])  # [C], the next token of the row
        bigrams = tf.zeros_like(ids)
        if self.bigram_vocab:
            words = self.level == "word"
            bigrams = self.bigram_vocab.ids(forms_of(flat) if words else tf.strings.join([flat, following]))
        bigrams = _dense(chars.with_values(bigrams))
        if not self.lattice:
            return {"chars": _dense(chars.with_values(ids)), "bigrams": bigrams}
        begins, n_chars, word_ids = self._words(flat, n_left)
        # An item is its id, its first position and its last position.
        char_items = tf.stack([ids, positions, positions], 1)  # [C, 3]
        starts = tf.gather(positions, begins)
        word_items = tf.stack([word_ids, starts, starts + n_chars - 1], 1)  # [words in all texts, 3]
        # Sorts the items by rows. The sort is stable: in each row, characters come first, then words.
        rows = tf.concat([chars.value_rowids(), tf.gather(chars.value_rowids(), begins)], 0)
        items = tf.gather(tf.concat([char_items, word_items], 0), tf.argsort(rows, stable=True))
        n_items = tf.math.bincount(tf.cast(rows, tf.int32), minlength=tf.cast(chars.nrows(), tf.int32), dtype=tf.int64)
        items = _dense(RaggedTensor.from_row_lengths(items, n_items))  # [B, T, 3]
        features = dict(zip(("lattice", "pos_s", "pos_e"), tf.unstack(items, axis=2), strict=True))
        seq_len = tf.cast(lengths, tf.int32)
        lex_num = tf.cast(n_items, tf.int32) - seq_len
        return {**features, "bigrams": bigrams, "seq_len": seq_len, "lex_num": lex_num}

    def _words(self, flat: Any, n_left: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The words of the lexicon in texts, sorted by their starts and then by their ends.

        Args:
            flat: string `[C]`, the characters of all texts.
            n_left: int64 `[C]`, the number of characters from each to the end of its text.

        Returns:
            `(begins, n_chars, ids)`, each int64 `[words in all texts]`: the index in `flat` at which the word begins,
            its number of characters, and its id.
        """
        begins = tf.range(tf.size(flat, tf.int64))
        pieces = flat
        begins_of_words = [tf.zeros([0], tf.int64)]
        n_chars = [tf.zeros([0], tf.int64)]
        words = [tf.zeros([0], tf.string)]
        for n in range(2, max(self.word_lengths, default=0) + 1):
            # Lengthens the pieces to n characters. Drops those that would go beyond the end of their text.
            fitting = tf.where(tf.gather(n_left, begins) >= n)[:, 0]
            begins = tf.gather(begins, fitting)
            pieces = tf.strings.join([tf.gather(pieces, fitting), tf.gather(flat, begins + n - 1)])
            if n in self.word_lengths:
                hits = tf.where(self.lexicon.has(pieces))[:, 0]
                begins_of_words.append(tf.gather(begins, hits))
                n_chars.append(tf.fill([tf.size(hits)], tf.constant(n, tf.int64)))
                words.append(tf.gather(pieces, hits))
        begins = tf.concat(begins_of_words, 0)
        order = tf.argsort(begins, stable=True)  # keeps shorter words before longer ones
        ids = self.vocab.ids(tf.concat(words, 0))
        return tf.gather(begins, order), tf.gather(tf.concat(n_chars, 0), order), tf.gather(ids, order)


def _dense(rows: Any) -> tf.Tensor:
    """A ragged tensor as a dense tensor of int32, padded with `PADDING`."""
    return tf.cast(rows.to_tensor(PADDING), tf.int32)


def limits_of(tagger: Tagger, max_rows: int | None, max_tokens: int) -> RequestLimits:
    """The largest request to a tagger. Its size is an estimate of the arrays that its rows take.

    If the network reads a lattice, `row_bytes` takes the number of its items, characters and words, in place of tokens.
    If the network is no `SentenceNetwork`, only the width of its hidden states is known, and the estimate is rough.
    """
    network: Any = tagger.network
    n_label = len(tagger.labels)
    lattice = tagger.reads_lattice
    if not tagger.reads_sentences:
        width = tagger.out_fc.kernel.shape[0]
        return RequestLimits(
            lambda tokens, _=0: 12 * n_label**2 + tokens * 4 * (8 * width + 10 * n_label), max_rows, max_tokens,
            row="{} elements",
        )  # fmt: skip
    n_head = getattr(network, "n_head", 0)  # a network without attention has neither heads nor feed-forward nets
    d_inner = getattr(network, "d_inner", 0)
    # In a lattice, each pair of items has a position vector, as wide as the model, 8 numbers for each head, four
    # distances (int64, 32 bytes), and as many bytes for the numbers of pairs that `distinct_pairs` computes from them.
    pair_bytes = 4 * (network.d_model + 8 * n_head + 16) if lattice else 4 * 10 * n_head
    widths = network.d_embed + network.d_bigram + 8 * network.d_model + 2 * d_inner + 10 * n_label

    def row_bytes(items: Any, new_tokens: Any = 0) -> Any:
        return 12 * n_label**2 + items * (4 * widths + items * pair_bytes)

    if lattice:
        return RequestLimits(row_bytes, max_rows, max_tokens, ITEMS * max_tokens, "{} characters and words")
    row = "{} words" if tagger.token_level == "word" else "{} characters"
    return RequestLimits(row_bytes, max_rows, max_tokens, row=row)


@serves("tagger", "a tagger")
def served_tagger(tagger: Tagger, vocabs: Sequence[Vocab] | None) -> Served:
    """Returns how a tagger is served. For the arguments, see `tagger_vocabs`.

    Raises:
        ParameterError: a vocabulary is wrong.
    """
    longest = getattr(tagger.network, "max_seq_len", None)
    return Served(TaggingSignatures, tagger_vocabs(tagger, vocabs), SymbolTable, longest)


class TaggingSignatures(StoredModel):
    """The signatures of a served tagger.

        tag_text(text [B]) -> kinds, starts, ends, entities, probs [B, N], numbers [B]
        tag_characters(text [B]) -> tags [B, L], lengths [B]
        tag_words(text [B]) -> words, tags [B, L], lengths [B]       if tokens are words, in place of tag_characters
        tag(inputs of the network [B, ...]) -> tags, ends, starts, kinds, probs [B, L]: see `Tagger.entities`

    A text is one line of UTF-8, or empty. `kinds`, `entities`, words and the tags of texts are strings. `starts` and
    `ends` count characters, `ends` exclusive. `numbers` has the number of entities of each row; in the scheme "none",
    every token is an entity. After the entities, or tokens, of a row, the results are "" and 0. Without vocabularies,
    and for a network that is no `SentenceNetwork`, `tag` is the only signature.

    Args:
        tagger: the tagger.
        tables: `{name: table}`, with the names of `tagger_vocabs`; `None` for ids alone.
        weights, max_tokens, max_rows: see `export_saved_model`.

    Attributes:
        named: whether the network takes a dictionary of inputs, rather than one tensor.
        max_items: most characters and words of a request with a single row, for a network that reads a lattice.
    """

    warmup_values = {"text": "a", "chars": UNKNOWN_ID, "lattice": UNKNOWN_ID, "bigrams": UNKNOWN_ID, "seq_len": 1}

    def __init__(
        self, tagger: Tagger, tables: dict[str, SymbolTable] | None = None, *, weights: str = "float32",
        max_tokens: int | None = None, max_rows: int | None = None,
    ):  # fmt: skip
        tagger.refuse_unused("decode")
        self.network: Any = tagger.network
        self.lattice = tagger.reads_lattice
        self.reads_sentences = tagger.reads_sentences
        self.by_words = tagger.token_level == "word"
        signature: Any = tagger.build_for_export()
        self.named = isinstance(signature, dict)
        specs = signature if self.named else {"inputs": signature}
        self.inputs = {name: tf.TensorSpec(spec.shape, spec.dtype) for name, spec in specs.items()}
        super().__init__(tagger, weights)
        self.limits = limits_of(tagger, max_rows, max_tokens or self.network.max_seq_len)
        self.max_items = bisect.bisect_right(range(2**31), self.limits.max_bytes, key=self.limits.row_bytes) - 1
        self.graph: Any = None
        if tables:
            self.graph = SentenceGraph(self.lattice, self.limits.max_tokens, **tables, level=tagger.token_level)
        self.resources.graph = self.graph
        self._entities = self.shared(self._entities_of_any_length, self.inputs)

    def signatures(self) -> dict[str, Any]:
        """The graphs of the signatures, `{name: graph}`. Without vocabularies, `tag` is the only one."""
        arguments: dict[Any, dict[str, tf.TensorSpec]] = {self.tag: self.inputs}
        if self.graph is not None:
            text = {"text": tf.TensorSpec([None], tf.string)}
            arguments |= {self.tag_text: text, self.tag_words if self.by_words else self.tag_characters: text}
        return self.concrete(arguments)

    # ------------------------------------------------------------------------------------------------ signatures

    def tag(self, **inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        """The tags and entities for the inputs of the network, after their checks, see `Tagger.entities`."""
        if not self.reads_sentences:
            name, first = next(iter(inputs.items()))
            checked_inputs = checked([*self.limits.size_checks(name, first)], inputs)
            return self.model.entities(checked_inputs if self.named else checked_inputs[name])
        if self.lattice:  # shapes are checked first, because the other checks compare the tensors element by element
            inputs = checked(self._shape_checks(**inputs), inputs)
            checks = self._lattice_checks(**inputs)
        else:
            checks = [*self.limits.size_checks("chars", inputs["chars"]), padded_at_the_end("chars", inputs["chars"])]
            if "bigrams" in inputs:
                checks.append(same_shape("bigrams", inputs["bigrams"], "chars", inputs["chars"]))
        name = "lattice" if self.lattice else "chars"
        checks.append(in_vocabulary(name, inputs[name], self.network.n_token))
        if self.network.n_bigram:
            checks.append(in_vocabulary("bigrams", inputs["bigrams"], self.network.n_bigram))
        return self._entities(checked(checks, inputs))

    def tag_text(self, text: tf.Tensor) -> dict[str, tf.Tensor]:
        """The entities of texts: kinds, starts and ends in characters, strings and probabilities; and their numbers."""
        entities, tokens = self._entities_and_tokens(text)
        last_tokens = tf.where(entities["ends"])  # [entities of all rows, 2]: the row and the last token of each
        rows = last_tokens[:, 0]
        batch = tf.shape(entities["ends"], tf.int64)[0]
        starts = tf.gather_nd(entities["starts"], last_tokens)
        kinds = tf.gather_nd(entities["kinds"], last_tokens)
        probs = tf.gather_nd(entities["probs"], last_tokens)
        ends = tf.cast(last_tokens[:, 1], tf.int32) + 1
        if self.by_words:  # from indices of words to indices of characters
            ends = tf.gather_nd(tokens.ends.to_tensor(), last_tokens)
            starts = tf.gather_nd(tokens.starts.to_tensor(), tf.stack([rows, tf.cast(starts, tf.int64)], 1))
        parts = {
            "kinds": tf.gather(tf.constant(self.model.kinds, tf.string), kinds),
            "starts": starts,
            "ends": ends,
            "entities": tf.strings.substr(tf.gather(text, rows), starts, ends - starts, "UTF8_CHAR"),
            "probs": probs,
        }
        by_row = {name: RaggedTensor.from_value_rowids(x, rows, batch, validate=False) for name, x in parts.items()}
        numbers = tf.reduce_sum(tf.cast(entities["ends"], tf.int32), 1)
        return {**{name: x.to_tensor() for name, x in by_row.items()}, "numbers": numbers}

    def tag_characters(self, text: tf.Tensor) -> dict[str, tf.Tensor]:
        """The tag of every token of texts, "" after the last token of a text, and the number of tokens of each."""
        entities, tokens = self._entities_and_tokens(text)
        lengths = tf.cast(tokens.strings.row_lengths(), tf.int32)
        tags = tf.gather(tf.constant(self.model.labels), entities["tags"])
        is_token = tf.sequence_mask(lengths, tf.shape(tags)[1])
        return {"tags": tf.where(is_token, tags, ""), "lengths": lengths}

    def tag_words(self, text: tf.Tensor) -> dict[str, tf.Tensor]:
        """The words of texts, the tag of each, and the number of words of each text."""
        return {"words": words_of(text).strings.to_tensor(), **self.tag_characters(text)}

    # ------------------------------------------------------------------------------------------------- their parts

    def _entities_and_tokens(self, text: tf.Tensor) -> tuple[dict[str, tf.Tensor], Tokens]:
        """The entities of texts, see `Tagger.entities`, and the tokens of the texts.

        Adds the checks of the texts to the graph.
        """
        limits = self.limits
        max_tokens = limits.max_tokens
        rows = tf.shape(text)[0]
        text = limits.checked_text("text", text)
        has_newline = tf.strings.regex_full_match(text, r"(?s).*\n.*")
        found = tf.strings.join(["a line end in row ", first_row_where(has_newline)])
        one_line = Check(tf.logical_not(has_newline), "text must be one line in every row", found)
        text = checked([check_utf8("text", text), one_line], text)
        tokens = words_of(text) if self.by_words else characters_of(text)
        longest = tf.reduce_max(tf.cast(tokens.strings.row_lengths(), tf.int32))
        unit = "words" if self.by_words else "characters"
        too_long = "a text is longer than max_tokens of the export, send its sentences one by one"
        message = f"{too_long}: text must be at most {max_tokens} {unit} a row"
        short = Check(longest <= max_tokens, message, longest)
        inputs = self.graph.features(checked([short, limits.size_check("text", rows, longest)], tokens.strings))
        if self.lattice:
            inputs = checked(self._item_checks("text", rows, tf.shape(inputs["lattice"])[1]), inputs)
        return self._entities({name: inputs[name] for name in self.inputs}), tokens

    def _entities_of_any_length(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The results of `Tagger.entities` for inputs of any length.

        `Tagger.entities` needs at least one token. So inputs without tokens get one token of padding, which is removed
        from the results.
        """
        length = tf.shape(inputs["bigrams" if self.lattice else "chars"])[1]
        padded = {}
        for name, x in inputs.items():
            padded[name] = x
            if len(x.shape) == 2:
                paddings: Any = [[0, 0], [0, tf.maximum(1 - tf.shape(x)[1], 0)]]
                padded[name] = tf.pad(x, paddings)
        return {name: x[:, :length] for name, x in self.model.entities(padded).items()}

    def _item_checks(self, name: str, rows: tf.Tensor, items: Any) -> list[Check]:
        """Checks of the number of items of a row, and of the size of the request."""
        message = f"{name} must have at most {self.max_items} characters and words a row"
        return [Check(items <= self.max_items, message, items), self.limits.size_check(name, rows, items)]

    def _shape_checks(
        self, lattice: Any, bigrams: Any, seq_len: Any, lex_num: Any, pos_s: Any, pos_e: Any
    ) -> list[Check]:
        """Checks of the shapes of the inputs of a network that reads a lattice, and of the size of the request."""
        rows, items = tf.unstack(tf.shape(lattice))
        length = tf.shape(bigrams)[1]
        max_tokens = self.limits.max_tokens
        return [
            *self.limits.row_checks("lattice", rows),
            Check((length >= 1) & (length <= max_tokens), f"bigrams must be 1 to {max_tokens} a row", length),
            Check(items >= length, "lattice must be at least as long as bigrams", items),
            *self._item_checks("lattice", rows, items),
            same_rows("bigrams", bigrams, "lattice", lattice),
            same_shape("pos_s", pos_s, "lattice", lattice),
            same_shape("pos_e", pos_e, "lattice", lattice),
            same_rows("seq_len", seq_len, "lattice", lattice),
            same_rows("lex_num", lex_num, "lattice", lattice),
        ]

    def _lattice_checks(
        self, lattice: Any, bigrams: Any, seq_len: Any, lex_num: Any, pos_s: Any, pos_e: Any
    ) -> list[Check]:
        """Checks of the lengths and positions in a lattice."""
        items = tf.shape(lattice)[1]
        length = tf.shape(bigrams)[1]
        last = self.limits.max_tokens - 1
        return [
            Check((seq_len >= 0) & (seq_len <= length), "seq_len must lie between 0 and that of bigrams", seq_len),
            Check((lex_num >= 0) & (lex_num <= items - seq_len), "seq_len + lex_num must fit into lattice", lex_num),
            Check((pos_e >= 0) & (pos_e <= last), f"pos_e must lie between 0 and {last}", lambda: _extremes(pos_e)),
            Check((pos_s >= 0) & (pos_s <= pos_e), "pos_s must lie between 0 and pos_e", lambda: _extremes(pos_s)),
        ]


def _extremes(x: tf.Tensor) -> tf.Tensor:
    """The smallest and the largest number of `x`, `[2]`, to report instead of all numbers."""
    return tf.stack([tf.reduce_min(x), tf.reduce_max(x)])
