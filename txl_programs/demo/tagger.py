"""The entities that a tagger finds, its lattice, its attention, and the effect of a word of the lexicon, as HTML."""

from collections.abc import Collection

import numpy as np
from markupsafe import Markup

from txl_programs.demo.language import Refusal, said
from txl_programs.demo.limits import Limits
from txl_programs.demo.pieces import (
    ITEM,
    LEAST_ITEM,
    PAGE_WIDTH,
    Place,
    Span,
    choices,
    element,
    figure,
    lattice,
    legend,
    marked,
)
from txl_programs.demo.runs import OpenRun, other_click, picked
from txl_tf.data.tagged.sentences import encoder_of
from txl_tf.runs.families.pipeline import line_sizes
from txl_tf.taggers.text_tagger import TextTagger

MOST_DRAWN = 200  # most tokens of a sentence that gets a picture
OF_ATTENTION = "{text}: {share:.3f} of the attention"
WORD = 90  # width in pixels of a token that is a word


class TaggerView:
    """What the page shows of a run of a tagger.

    Args:
        run: `OpenRun`.
        limits: `Limits`.
    """

    def __init__(self, run: OpenRun, limits: Limits):
        self.run = run
        self.limits = limits
        max_seq_len = run.model.network.max_seq_len
        sizes = line_sizes(run.folder)
        window = min(sizes.longest if sizes else max_seq_len, max_seq_len)
        vocab, bigram_vocab, *lexicon = run.vocabs
        encoder = encoder_of(vocab, bigram_vocab, lexicon[0] if lexicon else None)
        self.tagger = TextTagger(run.model, encoder, window=window, sizes=sizes)
        self.network = run.model.network

    def split(self, text: str) -> list[str]:
        """Returns the tokens of a sentence. Raises ParameterError if it is empty, too long, or has several lines."""
        text = self.limits.check_text(text, "The sentence").strip("\n")
        if "\n" in text:
            sentence = "The sentence has several lines. This page tags one line."
            raise Refusal("sentence", text, "one line", sentence)
        tokens = self.tagger.split(text)
        if not tokens:
            sentence = "{name} is empty. Type or paste a text."
            raise Refusal("sentence", text, "not empty", sentence, name=said("The sentence"))
        self.limits.check_tokens(len(tokens), "The sentence")
        return tokens

    def entities(self, text: str, left_out: Collection[str] = ()) -> list[Span]:
        """Returns the entities of a sentence, with positions in characters.

        Args:
            text: a sentence.
            left_out: words to remove from the lexicon.
        """
        tokens = self.split(text)
        with self.run.lock:
            (tagged,) = self.tagger.tag_in_sentences([tokens], left_out, split=None)
        rows = self.tagger.describe(text.strip("\n"), tagged)["entities"]
        return [Span(row["start"], row["end"], row["kind"], row["prob"]) for row in rows]

    def show(self, text: str, left_out: Collection[str] = (), pick: str = "", width: int = PAGE_WIDTH) -> Markup:
        """Returns the entities, and a picture of the input of the network: tokens and words of the lexicon.

        Args:
            text: a sentence.
            left_out: words to remove from the lexicon. The entities with all words are shown, too.
            pick: data of a click: "item", an index, for the mean of all heads, or "item:layer:head". Items are coloured
                by the attention of this item to them. Empty: no item was clicked.
            width: width of the picture in pixels.
        """
        spans = self.entities(text)
        kinds = self.run.model.kinds
        parts = [figure(said("Entities"), marked(text.strip("\n"), spans, kinds))]
        if left_out:
            without = self.entities(text, left_out)
            words = ", ".join(sorted(left_out))
            title = said("Without {words}: {change}", words=words, change=changed(spans, without))
            parts.append(figure(title, marked(text.strip("\n"), without, kinds)))
        return element("div", *parts, self._show_items(text, left_out, pick, width))

    def _show_items(self, text, left_out, pick, width):
        """Returns the tokens and the words of the lattice, coloured by attention, with buttons. Arguments: see `show`.

        If the network has no attention, or the sentence is too long for a picture, it returns a note that says so.
        """
        tokens = self.split(text)
        if not hasattr(self.network, "attention_probs"):
            return element("p", said("No picture of attention: this network has none."), class_="note")
        max_tokens = min(MOST_DRAWN, self.tagger.window_size)
        if len(tokens) > max_tokens:
            sentence = "No picture: the sentence has {number:,} tokens, and a picture at most {most}."
            return element("p", said(sentence, number=len(tokens), most=max_tokens), class_="note")
        with self.run.lock:
            items, probs = self.tagger.attention(tokens, left_out)
        item, layer, head = self._picked(pick, len(items))
        shares = np.zeros([len(items)])
        if item is not None:
            # probs: [layers, heads, items, items]; shares: [items], the attention of the clicked item
            shares = (probs.mean((0, 1)) if layer is None else probs[layer, head])[item]
        places = [
            Place(part.text, float(shares[i]) ** 0.5, said(OF_ATTENTION, text=part.text, share=shares[i]), str(i),
                  "asked" if i == item else "hot")
            for i, part in enumerate(items)
        ]  # fmt: skip
        n = len(tokens)
        words = [(word.start, word.end, place) for word, place in zip(items[n:], places[n:], strict=True)]
        cell_width = min(ITEM, max(LEAST_ITEM, width / n)) if self.run.model.token_level == "char" else WORD
        drawn = [lattice(places[:n], words, cell_width), *self._heads(item, layer, head)]
        title = "The lattice: characters, and the words that the lexicon finds" if words else "What the network reads"
        note = said("Click a character or a word: what it attends to is coloured.")
        return figure(said(title), *drawn, self._words(tokens, left_out), note=note)

    def _picked(self, pick, n_items):
        """Returns `(item, layer, head)` of a click, such as "5:0:1", with `None` for each that the click does not name.

        A click on an item also counts for later lattices of the sentence. If such a lattice has fewer words, because
        words were taken out of the lexicon, it may not have the item: then the click is ignored.
        """
        if not pick:
            return None, None, None
        item, *layer_and_head = picked(pick, 1, 3)  # "item" or "item:layer:head"
        layer, head = layer_and_head or (None, None)
        if item >= n_items:
            return None, None, None
        if layer_and_head and not (layer < self.network.n_layer and head < self.network.n_head):
            raise other_click(pick, "model", "Tag the sentence again.")
        return item, layer, head

    def _heads(self, item, layer, head):
        """A legend of the colours, and buttons: one for the mean of all heads, and a row for the heads of each layer.

        The list of them is empty if no item was clicked. Arguments: see the result of `_picked`.
        """
        if item is None:
            return []
        clicked = str(item) if layer is None else f"{item}:{layer}:{head}"
        n_head = self.network.n_head
        heads = [
            choices(said("Layer {layer}, head", layer=m), [(str(h), f"{item}:{m}:{h}") for h in range(n_head)], clicked)
            for m in range(self.network.n_layer)
        ]
        mean = choices(said("Attention"), [(said("mean of all heads"), str(item))], clicked)
        return [legend(said("none"), said("most of the attention")), mean, *heads]

    def _words(self, tokens, left_out):
        """Returns buttons that remove words of the sentence from the lexicon, and buttons that put words back.

        Without words of the lexicon in the sentence, it returns nothing.
        """
        words = list(dict.fromkeys(match.word for match in self.tagger.encoder.matches(tokens)))
        if not words:
            return Markup("")
        inside = [(f"{word} ✕", f"out:{word}") for word in words if word not in left_out]
        outside = [(f"{word} ↺", f"in:{word}") for word in words if word in left_out]
        rows = [choices(said("Take out of the lexicon"), inside, "")] if inside else []
        return element("div", *rows, *([choices(said("Put back"), outside, "")] if outside else []))

    def toggled(self, text: str, left_out: frozenset, pick: str) -> frozenset:
        """Returns the words that are left out after a click on "out:word" or "in:word": only words in the sentence.

        Args:
            text: the sentence.
            left_out: words that were left out before.
            pick: data of the click.
        """
        action, _, word = pick.partition(":")
        known = {match.word for match in self.tagger.encoder.matches(self.split(text))}
        return (left_out | {word} if action == "out" else left_out - {word}) & known


def changed(before: list[Span], after: list[Span]) -> str:
    """Returns the difference between two lists of entities as a sentence."""
    (old, new) = ({(span.start, span.end, span.kind): span.prob for span in spans} for spans in (before, after))
    if set(old) != set(new):
        gone = len(set(old) - set(new))
        come = len(set(new) - set(old))
        return said("{gone} of {number} entities disappear, {come} are new", gone=gone, number=len(old), come=come)
    largest_change = max((abs(old[key] - new[key]) for key in old), default=0.0)
    return said("the same entities, probabilities change by at most {most:.3f}", most=largest_change)
