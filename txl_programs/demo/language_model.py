"""Texts that a language model generates or reads, and the benefit of its memory, as HTML.

A visitor can click every token but the first. The data of the click is the index of the token, for `alternatives` and
`look`. The buttons and boxes around the texts are in language_model_page.py.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from markupsafe import Markup

from txl_programs.demo.language import Refusal, said
from txl_programs.demo.limits import Limits
from txl_programs.demo.pieces import (
    PAGE_WIDTH,
    Place,
    bars,
    choices,
    element,
    facts,
    figure,
    legend,
    matrix,
    short,
    tokens,
)
from txl_programs.demo.runs import OpenRun, other_click, picked
from txl_tf.data.subwords import SubwordVocab
from txl_tf.data.text.datasets import is_by_character_in
from txl_tf.data.vocabulary import Vocab
from txl_tf.language.reading import look_back, nll_by_memory, read_text
from txl_tf.language.sampling import check_sampling, seeds_of_sequences
from txl_tf.language.session import Session
from txl_tf.language.stopping import check_stops
from txl_tf.language.text_generator import TextStream, encode_prompt, stops_of
from txl_tf.runs.metrics import metric_of, to_metric

READ_AT_ONCE = 512  # tokens of a prompt
ALTERNATIVES = 10  # most likely tokens to show
MAX_SURPRISE = 8.0  # bits of a token that has the strongest colour
MAX_HELP = 4.0  # bits that the memory saves for a token that has the strongest colour
MOST_ROWS = 48  # most heads in a picture; if a model has more, the picture shows those of one layer
ABOUT_SEGMENTS = (
    "The model reads {number} tokens at a time: a blue bar stands before the first that such a segment predicts. "
    "The memory is what the model keeps of the segments before."
)
ABOUT_SEGMENTS_ALONE = (
    "The model reads {number} tokens at a time: a blue bar stands before the first that such a segment predicts."
)
DEFAULT_TGT_LEN = 64  # tokens of a segment, if the run does not say how it was trained


@dataclasses.dataclass
class Sample:
    """A generated text, which may be continued."""

    session: Session
    stream: TextStream  # turns new tokens into text
    seed: int
    text: str = ""  # without the prompt
    tokens: int = 0  # number of tokens in `text`
    ended: bool = False  # whether a stop string or a stop token has ended it


class LanguageModelView:
    """What the page shows of a run of a language model.

    Args:
        run: `OpenRun`.
        limits: `Limits`.
    """

    def __init__(self, run: OpenRun, limits: Limits):
        self.run = run
        self.limits = limits
        self.lm = run.model
        (self.vocab,) = run.vocabs
        self.mem_len = self.lm.network.mem_len
        self.tgt_len = run.config.get("training", {}).get("tgt_len") or DEFAULT_TGT_LEN
        self.new_session = Session(self.lm)  # copies share its graphs
        self.metric = metric_of(is_by_character_in(run.config["data"], self.vocab))

    # --------------------------------------------------------------------------------------------------------- write

    def start(self, prompt: str, rows: int, options: dict) -> list[Sample]:
        """Reads a prompt. Returns `rows` samples without new tokens, for `write`.

        Args:
            prompt: text.
            rows: number of samples.
            options: dictionary with the keys "sampling", arguments of `check_sampling`, and "stops", arguments of
                `stops_of`. With a seed, the samples are the same as with `lm.generate`, for a prompt of up to
                `READ_AT_ONCE` tokens.

        Raises:
            ParameterError: the prompt is empty, too long or not encodable, or an option is wrong.
        """
        ids = self.encode(prompt, "The prompt")
        self.check(options)
        seeds = seeds_of_sequences(options["sampling"].get("seed"), rows)
        session = self.new_session.copy()
        stream = TextStream(self.vocab)
        with self.run.lock:
            for start in range(0, len(ids), READ_AT_ONCE):
                session.read(ids[None, start : start + READ_AT_ONCE])
        stream.push(ids)
        return [Sample(session.copy(), stream.copy(), seed) for seed in seeds]

    def check(self, options: dict) -> None:
        """Raises ValueError if an option is out of range, or if the vocabulary cannot encode a stop string."""
        check_sampling(1, **options["sampling"])
        check_stops(len(self.vocab), None, **stops_of(self.vocab, **options["stops"]), vocab=self.vocab)

    def write(self, samples: list[Sample], number: int, options: dict) -> Iterator[None]:
        """Generates `number` more tokens of every sample, or fewer if a sample ends. Changes the samples.

        It yields `None` after each round of tokens, one for every sample that has not ended. It returns early if all
        samples have ended.
        """
        stops = stops_of(self.vocab, **options["stops"])
        for _ in range(number):
            for sample in samples:
                if not sample.ended:
                    self._write_one(sample, {**options["sampling"], **stops, "seed": sample.seed})
            if all(sample.ended for sample in samples):
                return
            yield

    def _write_one(self, sample, options):
        """Generates the next token of a sample, and adds it to its text."""
        with self.run.lock:
            ids, _ = sample.session.write(1, vocab=self.vocab, **options)
        sample.text += sample.stream.push(ids[0], sample.session.excess)
        sample.tokens += ids.shape[1]
        sample.ended = sample.session.ended

    def show_written(self, prompt: str, samples: list[Sample], writing: bool = False) -> Markup:
        """Returns the samples, one below the other, each after the prompt.

        Args:
            prompt: text.
            samples: the samples.
            writing: whether the generation is still running; then a cursor stands after each sample that has not ended.
        """
        blocks = []
        for i, sample in enumerate(samples):
            is_growing = writing and not sample.ended
            cursor = element("span", class_="cursor") if is_growing else Markup("")
            facts_of = "{number} tokens, seed {seed}, ended" if sample.ended else "{number} tokens, seed {seed}"
            head = said(facts_of, number=sample.tokens, seed=sample.seed)
            written = sample.text if is_growing else sample.text + sample.stream.copy().end()
            text = element("div", element("span", prompt, class_="prompt"), written, cursor, class_="written")
            head = said("Sample {i}: {rest}", i=i + 1, rest=head) if len(samples) > 1 else head
            blocks.append(element("div", element("p", head, class_="note"), text))
        return element("div", *blocks, class_="samples")

    # ---------------------------------------------------------------------------------------------------------- read

    def encode(self, text: str, name: str = "The text") -> np.ndarray:
        """Returns the ids of a text, int32 `[n]`. Raises ParameterError if it is empty, too long or not encodable."""
        ids = encode_prompt(self.vocab, self.limits.check_text(text, name), name)
        self.limits.check_tokens(len(ids), name)
        return ids

    def encode_two(self, text: str) -> np.ndarray:
        """Returns the ids of a text as `encode` does. Also raises ParameterError if there is only one token."""
        ids = self.encode(text)
        if len(ids) < 2:
            sentence = "The text has one token only. No token before it can predict it."
            raise Refusal("text", text, "at least two tokens", sentence)
        return ids

    def read(self, text: str) -> Iterator[tuple[int, int, Markup | None]]:
        """Reads a text, and shows it coloured by nll.

        Yields:
            `(number of tokens that were read, number of all tokens, None)` after each segment. At the end, the third
            value is the picture.
        """
        ids = self.encode_two(text)
        nll = []
        for start, (values,) in self._locked(nll_by_memory(self.lm, ids, self.tgt_len, [self.mem_len])):
            nll.append(values)
            yield start + len(values), len(ids), None
        yield len(ids), len(ids), self._show_read(ids, np.concatenate(nll))

    def _locked(self, steps):
        """Yields the steps of an iterator. The run is locked while a step is computed, but not between two steps.

        Between two steps, the steps for another visitor can be computed.
        """
        while True:
            with self.run.lock:
                step = next(steps, None)
            if step is None:
                return
            yield step

    def _show_read(self, ids, nll):
        """Returns the text, coloured by nll, with the number of predicted tokens and the mean nll.

        Args:
            ids: int32 `[n]`, the text.
            nll: float32 `[n - 1]`, nats of the tokens from the second on.
        """
        first, *labels = self._labels(ids)
        places = [Place(first, classes="first", title=said("nothing predicts the first token"))]
        for i, (label, value) in enumerate(zip(labels, nll, strict=True), 1):
            bits = to_metric(value, "bpc")
            sentence = "{token}: {bits:.3f} bits, probability {prob:.3g}"
            title = said(sentence, token=short(label), bits=bits, prob=math.exp(-value))
            places.append(Place(label, bits / MAX_SURPRISE, title, str(i)))
        mean = float(nll.mean(dtype=np.float64))
        means = {said("bits per token"): f"{to_metric(mean, 'bpc'):.4f}"}
        if self.metric == "ppl":
            means[said("perplexity")] = f"{to_metric(mean, 'ppl'):.3f}"
        scale = legend(said("expected"), said("a surprise of {bits:.0f} bits or more", bits=MAX_SURPRISE))
        return element("div", facts(**{said("tokens"): f"{len(nll):,}"}, **means), tokens(places), scale)

    def alternatives(self, text: str, pick: str) -> Markup:
        """Returns bars of the most likely tokens at the clicked position, and of the actual token.

        Args:
            text: the text.
            pick: data of the click: the index of the clicked token, as text.

        Raises:
            ParameterError: the text is not as `encode_two` needs it, or `pick` names no token that can be clicked.
        """
        ids = self.encode_two(text)
        (place,) = picked(pick, 1)
        self._check_place(place, ids)
        number = min(ALTERNATIVES, self.lm.network.n_token)
        *_, reading = self._locked(read_text(self.lm, ids[: place + 1], self.tgt_len, number))
        likeliest = reading.ids[-1].tolist()
        probs = np.exp(reading.log_probs[-1]).tolist()
        if ids[place] not in likeliest:
            likeliest = [*likeliest, int(ids[place])]
            probs = [*probs, math.exp(-reading.nll[-1])]
        names = map(short, self._labels(likeliest))
        rows = [(name, prob, percent(prob)) for name, prob in zip(names, probs, strict=True)]
        actual = likeliest.index(ids[place])
        note = said("Probabilities of the most likely tokens; the token of the text is outlined.")
        return figure(said("Alternatives for token {place}", place=place), bars(rows, chosen=actual), note=note)

    def _check_place(self, place, ids):
        """Raises ParameterError unless `place` is the index of a token of the text that can be clicked."""
        if not 1 <= place < len(ids):
            raise other_click(place, "text", "Score the text again.")

    # ------------------------------------------------------------------------------------------------------ remember

    @property
    def kept(self) -> tuple[int, int, int]:
        """The lengths of memory to compare, in positions: none, half, all."""
        return 0, self.mem_len // 2, self.mem_len

    def remember(self, text: str) -> Iterator[tuple[int, int, Markup | None]]:
        """Reads a text as `read` does, and shows it coloured by the benefit of the memory for each token."""
        ids = self.encode_two(text)
        values = []
        for start, nll in self._locked(nll_by_memory(self.lm, ids, self.tgt_len, self.kept)):
            values.append(nll)
            yield start + nll.shape[1], len(ids), None
        yield len(ids), len(ids), self._show_remembered(ids, np.concatenate(values, 1))

    def _show_remembered(self, ids, nll):
        """Returns the text, coloured by the bits that the memory saves or costs, and the mean nll.

        Args:
            ids: int32 `[n]`, the text.
            nll: float32 `[3, n - 1]`, nats with none, half and all of the memory.
        """
        places = []
        for i, label in enumerate(self._labels(ids)):
            classes = "first" if i == 0 else ""
            saved = to_metric(nll[0, i - 1] - nll[2, i - 1], "bpc") if i else 0.0  # without minus with all memory
            classes += " segment" if i > 1 and (i - 1) % self.tgt_len == 0 else ""  # the first that a segment predicts
            title = self._worth_of_memory(short(label), nll[:, i - 1], saved) if i else None
            classes += "" if not self.mem_len else " help" if saved > 0 else " harm"
            places.append(Place(label, abs(saved) / MAX_HELP, title, str(i) if i else None, classes))
        means = [float(row.mean(dtype=np.float64)) for row in nll]
        names = (
            "bits per token without memory", "with {kept} positions of memory", "with all {kept} positions of memory",
        )  # fmt: skip
        named = [said(name, kept=kept) for name, kept in zip(names, self.kept, strict=True)]
        bits = [f"{to_metric(mean, 'bpc'):.3f}" for mean in means]
        shown = dict(zip(named, bits, strict=True))
        if not self.mem_len:
            shown = {said("bits per token"): bits[0], said("memory of this model"): said("no")}
        parts = [facts(**shown), tokens(places)]
        if self.mem_len:
            saves = legend(said("memory saves 0"), said("{bits:.0f} bits or more", bits=MAX_HELP), "help")
            parts.append(element("div", saves, legend(said("costs"), "", "harm"), class_="legends"))
        note = said(ABOUT_SEGMENTS if self.mem_len else ABOUT_SEGMENTS_ALONE, number=self.tgt_len)
        return element("div", *parts, element("p", note, class_="note"))

    def _worth_of_memory(self, token, nll, saved):
        """Returns the sentence about a token: what the memory saves or costs; without memory, its nll.

        Args:
            token: label of the token.
            nll: float32 `[3]`, see `_show_remembered`.
            saved: bits that the memory saves, negative if it costs some.
        """
        if not self.mem_len:
            bits = to_metric(nll[0], "bpc")
            sentence = "{token}: {bits:.3f} bits, probability {prob:.3g}"
            return said(sentence, token=token, bits=bits, prob=math.exp(-nll[0]))
        if saved < 0:
            return said("{token}: memory costs {bits:.2f} bits", token=token, bits=-saved)
        return said("{token}: memory saves {bits:.2f} bits", token=token, bits=saved)

    def look(self, text: str, pick: str, width: int = PAGE_WIDTH) -> Markup:
        """Returns the attention when the model predicts the clicked token, and the nll with none, half, all memory.

        Args:
            text: the text.
            pick: "place", the index of the clicked token, for the mean of all heads; or "place:layer:head".
            width: width of the picture in pixels.

        Raises:
            ParameterError: the text is empty, too long, has one token only or cannot be encoded; or the click belongs
                to another page, text or model.
        """
        ids = self.encode_two(text)
        place, *layer_and_head = picked(pick, 1, 3)
        layer, head = layer_and_head or (None, None)
        self._check_place(place, ids)
        if layer_and_head and not (layer < self.lm.network.n_layer and head < self.lm.network.n_head):
            raise other_click(pick, "model", "Score the text again.")
        with self.run.lock:
            back = look_back(self.lm, ids, place, self.tgt_len)
        labels = self._labels(ids)
        sentence = "Token {place}, {token}: where the model looks to predict it"
        title = said(sentence, place=place, token=short(labels[place]))
        parts = [self._show_worth(back), self._show_looks(labels, place, back, layer, head)]
        return figure(title, *parts, self._show_heads(labels, place, back, layer, head, width))

    def _show_worth(self, back):
        """Returns bars with the nll of the token in `back`, a `LookBack`, with none, half and all of the memory.

        For a model without memory, it returns a sentence that says so.
        """
        if not self.mem_len:
            return element("p", said("This model has no memory."), class_="note")
        names = "no memory", "half: {kept}", "all: {kept}"
        named = [said(name, kept=kept) for name, kept in zip(names, back.kept, strict=True)]
        values = [to_metric(nll, "bpc") for nll in back.nll.tolist()]
        full_bar = max(MAX_SURPRISE, *values)
        rows = [
            (name, value / full_bar, said("{bits:.3f} bits", bits=value))
            for name, value in zip(named, values, strict=True)
        ]
        return bars(rows, "help")

    def _show_looks(self, labels, place, back, layer, head):
        """Returns the tokens that the model sees when it predicts the clicked token, coloured by its attention to them.

        It is the attention of one head, or the mean of all heads. The clicked token comes last, without a colour.

        Args:
            labels: labels of all tokens of the text.
            place: index of the clicked token.
            back: its `LookBack`.
            layer, head: the head; `None` for the mean of all heads.
        """
        probs = back.probs.mean((0, 1)) if layer is None else back.probs[layer, head]  # [keys]
        zeros = max(0, -back.first_key)  # number of keys before the text
        memory_share = float(probs[: back.segment - back.first_key].sum())
        places = []
        for i in range(max(0, back.first_key), place):
            prob = float(probs[i - back.first_key])
            classes = "memory" if i < back.segment else "segment" if i == back.segment else ""
            sentence = "{token}: {prob:.3f} of the attention, {back} back"
            title = said(sentence, token=short(labels[i]), prob=prob, back=place - i)
            places.append(Place(labels[i], prob**0.5, title, None, classes))
        places.append(Place(labels[place], classes="asked"))
        template = "the mean of all heads" if layer is None else "layer {layer}, head {head}"
        heads = said(template, layer=layer, head=head)
        sentence = "{which}: {share:.0%} of the attention goes to the memory, which is underlined"
        note = said(sentence, which=heads, share=memory_share)
        if zeros:
            zeros_share = float(probs[:zeros].sum())
            note += said("; {share:.0%} of all attention to the zeros before the text", share=zeros_share)
        return element("div", tokens(places), element("p", note, class_="note"))

    def _show_heads(self, labels, place, back, layer, head, width):
        """Returns a matrix of the attention of all heads, below buttons that choose what is shown.

        If the model has more than `MOST_ROWS` heads in all layers, the matrix has those of one layer. A click on
        the name of a head shows the text coloured by its attention. Arguments: see `_show_looks` and `look`.
        """
        n_layer, n_head, n_key = back.probs.shape
        layers = range(n_layer) if n_layer * n_head <= MOST_ROWS else [layer or 0]
        n_zeros = max(0, -back.first_key)  # keys before the text
        rows = [
            Place(
                said("layer {layer} head {head}", layer=i, head=j), pick=f"{place}:{i}:{j}",
                classes="chosen" if (i, j) == (layer, head) else "",
            )
            for i in layers for j in range(n_head)
        ]  # fmt: skip
        values = [back.probs[i, j, n_zeros:] for i in layers for j in range(n_head)]
        columns = [short(label) for label in labels[max(0, back.first_key) : place]]
        bar = back.segment - max(0, back.first_key)  # column at which the segment begins
        parts = [matrix(values, rows, columns, width, bar if 0 < bar < n_key - n_zeros else None, classes="at-end")]
        if len(layers) < n_layer:
            picks = [(str(i), f"{place}:{i}:0") for i in range(n_layer)]
            parts.insert(0, choices(said("Layer"), picks, f"{place}:{layers[0]}:0"))
        picks = [(said("mean of all heads"), str(place))]
        parts.insert(0, choices(said("Shown above:"), picks, str(place) if layer is None else ""))
        return element("div", *parts)

    def _labels(self, ids):
        """The labels of tokens, see `labels_of`."""
        return labels_of(self.vocab, ids)


def percent(prob: float) -> str:
    """Returns a probability as text: "12.3%"; "<0.1%" if it would be rounded to 0."""
    return "<0.1%" if prob < 0.0005 else f"{prob:.1%}"


def labels_of(vocab: Vocab, ids: np.ndarray) -> list[str]:
    """Returns the labels of tokens on the page: the text of each; for words, with a space after it.

    The word for the end of a line becomes a newline. Bytes that are not UTF-8 are written like \\xff. A subword without
    text, such as the end of a document, has its symbol as the label.
    """
    if isinstance(vocab, SubwordVocab):
        return [vocab.token_bytes[i].decode("utf-8", "backslashreplace") or vocab.symbols[i] for i in ids]
    symbols = [vocab.symbols[i].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for i in ids]
    if vocab.level != "word":
        return symbols
    return ["\n" if symbol == vocab.eos else f"{symbol} " for symbol in symbols]
