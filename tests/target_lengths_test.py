"""How long translations may become, by the lengths of the training's targets: in Python and when served."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import mentions, raises_naming, randomise

import txl_tf
from txl_tf.config import SearchConfig, TransformerConfig
from txl_tf.data.pairs.lengths import group_ends, longest_targets, merged_lengths, target_limits
from txl_tf.data.pairs.parallel import Lines, Pairs
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError
from txl_tf.serving import export
from txl_tf.serving import request as request_module
from txl_tf.serving.tables import GraphTokenizer
from txl_tf.serving.translation import TranslationSignatures
from txl_tf.vanilla.translator import Translation, Translator, did_not_end, most_symbols

pytestmark = pytest.mark.ci


def pairs_of(sources, targets):
    """Pairs of these lengths."""
    return Pairs(*(Lines(np.zeros(sum(side), np.int32), np.cumsum(side)) for side in (sources, targets)))


def test_the_longest_target_of_every_group_of_sources_is_recorded():
    sources, targets = [3, 16, 17, 40, 64, 30], [9, 5, 30, 70, 11, 20]
    expected = [max(t for s, t in zip(sources, targets, strict=True) if s <= end) for end in (16, 32, 64)]
    assert longest_targets(pairs_of(sources, targets)) == expected == [9, 30, 70]
    assert longest_targets(pairs_of([40, 100], [7, 5])) == [7, 7, 7, 7]  # none has up to 16 or 32 symbols
    assert merged_lengths(None, [1, 5]) == [1, 5] and merged_lengths([4, 5, 9], [6, 7]) == [6, 7, 9]
    assert merged_lengths([6, 7], [4, 5, 9]) == [6, 7, 9]


def test_every_target_of_the_training_can_end_half_as_long_again_and_further_sources_have_longer_ones():
    rng = np.random.default_rng(0)
    sources, targets = rng.integers(1, 120, 500), rng.integers(1, 300, 500)
    limits, ends = target_limits(longest_targets(pairs_of(sources, targets)), 4000), group_ends(4000)
    for source, target in zip(sources, targets, strict=True):
        assert limits[next(k for k, end in enumerate(ends) if source <= end)] >= 1.5 * target
    assert limits[0] <= limits[3] == 464  # 299 symbols, half as many again and 10, as a multiple of 16
    assert ends[:6] == [16, 32, 64, 128, 256, 512] and limits[4] == 912 and limits[5] == 1808
    assert target_limits([9, 30], 50) == [50, 50, 50] and target_limits([9], 10) == [10]


def model_of(target_lengths, max_len=200, symbols=7):
    model = txl_tf.Transformer(
        num_layers=1, d_model=8, num_heads=2, dff=8, input_vocab_size=symbols, target_vocab_size=symbols, rate=0.0,
        max_len=max_len, target_lengths=target_lengths,
    )  # fmt: skip
    randomise(model)
    return model


@pytest.mark.parametrize("target_lengths, max_new_tokens", [([9, 30], None), (None, None), ([9], 50), (None, 50)])
def test_the_message_about_cut_off_targets_advises_no_more_symbols_than_the_model_has(target_lengths, max_new_tokens):
    search = SearchConfig(max_new_tokens=max_new_tokens)
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 8, "target_lengths": target_lengths}
    model = TransformerConfig(max_len=50, **sizes)
    message = did_not_end(2, 7, search, model)
    assert mentions(message, 2, 7, 50) and not mentions(message, "max_new_tokens")
    message = did_not_end(2, 7, search, TransformerConfig(max_len=80, **sizes))
    assert mentions(message, 2, 7, 80, "max_new_tokens")


def vocab_of(letters="abc"):
    names = ["<pad>", "<s>", "\n", "<unk>"]
    vocab = Vocab(level="char", special=names, unk="<unk>")
    vocab.count(letters)
    vocab.build()
    return vocab


class Spelt:
    """What the signatures of ids need of a table."""

    def __init__(self, vocab):
        self.vocab = vocab


def endless(model):
    """Makes the end the least likely symbol."""
    bias = np.zeros(model.target_vocab_size)
    bias[2], bias[4] = -50.0, 3.0
    model.final_layer.bias.assign(bias)


@pytest.mark.parametrize("search", [pytest.param({}, marks=pytest.mark.slow), {"beam_size": 2}], ids=str)
def test_translations_that_do_not_end_have_their_most_symbols_and_say_so(search):
    model, vocab = model_of([20, 30]), vocab_of()
    endless(model)
    sources = ["abc", "a" * 20, "abd"]
    found = [best for best, *_ in Translator(model, vocab, vocab, SearchConfig(**search)).translate(sources)]
    assert [len(translation.text) for translation in found] == [64, 64, 64]
    assert [translation.ended for translation in found] == [False] * 3
    assert [translation.unknown for translation in found] == [0, 0, 1]
    text, score = found[0]
    assert found[0] == Translation(text, score) == (text, score)
    (((short, _),),) = Translator(model, vocab, vocab, SearchConfig(max_new_tokens=5, **search)).translate(["abc"])
    assert len(short) == 5
    assert int(most_symbols(SearchConfig(**search), 4, model_of(None))) == 66
    served = TranslationSignatures(model, search=SearchConfig(**search))
    assert served.translate(tf.constant([vocab.encode("abc\n")]))["lengths"].numpy().tolist() == [[64]]
    with pytest.raises(ValueError) as caught:
        Translator(model, vocab, vocab, SearchConfig(max_new_tokens=201))
    assert caught.value.name == "max_new_tokens" and caught.value.value == 201


def test_limits_of_tensors_are_those_of_numbers():
    model, lengths = model_of([9, 30, 70], max_len=300), [1, 16, 17, 32, 33, 100, 300]
    limits = [int(most_symbols(SearchConfig(), n, model)) for n in lengths]
    assert most_symbols(SearchConfig(), tf.constant(lengths), model).numpy().tolist() == limits
    assert limits == [64, 64, 128, 128, 128, 224, 300]
    assert int(most_symbols(SearchConfig(), 5, model_of([4], max_len=10))) == 10


def test_symbols_that_are_no_text_are_written_if_they_are_allowed():
    model, vocab = model_of([4]), vocab_of()
    model.final_layer.bias.assign([0, 90, -90, 99, 0, 0, 0])
    for search in ({}, {"beam_size": 3}):
        (((text, _),),) = Translator(model, vocab, vocab, SearchConfig(**search)).translate(["abc"])
        assert (text or search) and set(text) <= set("abc")  # a search ends at once: every other symbol is unlikely
        allowed = SearchConfig(allow_special=True, max_new_tokens=2, **search)
        (((text, _),),) = Translator(model, vocab, vocab, allowed).translate(["abc"])
        assert text == "<unk><unk>"
    served = TranslationSignatures(model, {"source": Spelt(vocab), "target": Spelt(vocab)})
    assert set(served.translate(tf.constant([[4, 5, 2]]))["ids"].numpy().ravel()) <= {0, 2, 4, 5, 6}
    with pytest.raises(ValueError, match="beam_size"):
        Translator(model, vocab, vocab, SearchConfig(beam_size=5))


@pytest.mark.parametrize(
    "by_text, options, never",
    [
        (True, {}, [1, 3]),
        (False, {}, [1]),
        (False, {"suppress_tokens": [3, 1]}, [1, 3]),
        (True, {"search": {"allow_special": True}}, []),
    ],
)
def test_ids_alone_are_served_without_what_no_text_has(by_text, options, never, monkeypatch, tmp_path):
    """Also where the text of a vocabulary cannot be served, as that of subwords without tensorflow-text."""
    model, vocab, found = model_of([4]), vocab_of(), []

    def write(serve, *rest):
        found.append(serve({}).never)

    monkeypatch.setattr(export, "_write", write)
    monkeypatch.setattr(export, "_can_serve_text", lambda directory, vocabs: False)
    txl_tf.export_saved_model(model, tmp_path / "1", [vocab, vocab] if by_text else None, **options)
    assert found == [never]


@pytest.mark.parametrize(
    "options", [{"suppress_tokens": [2]}, {"suppress_tokens": [1], "search": {"allow_special": True}}]
)
def test_ids_that_cannot_be_suppressed_are_refused(options, tmp_path):
    with pytest.raises(ParameterError) as caught:
        txl_tf.export_saved_model(model_of([4]), tmp_path / "1", **options)
    assert (caught.value.name, caught.value.value) == ("suppress_tokens", options["suppress_tokens"])


def test_the_logits_of_all_symbols_of_a_scored_target_count_in_the_size_of_a_request(tmp_path, monkeypatch, eager):
    """With 1,000 symbols, logits take most of the memory: 4,000 bytes for each symbol of a target."""
    monkeypatch.setattr(request_module, "REQUEST_BYTES", 4_000 * 200)
    vocab = vocab_of("".join(map(chr, range(0x4E00, 0x4E00 + 996))))
    vocab.save(tmp_path / "vocab")
    tables = {name: GraphTokenizer(vocab, str(tmp_path / "vocab")) for name in ("source", "target")}
    model = model_of(None, 100, symbols=len(vocab))
    served = TranslationSignatures(model, tables, search=SearchConfig(beam_size=1), max_tokens=50, max_rows=8)
    source = ["\u4e00\u4e01"] * 8

    def score(target):
        return served.score(*(tf.constant([vocab.encode(text + "\n") for text in texts]) for texts in (source, target)))

    def score_text(target):
        return served.score_text(tf.constant(source), tf.constant(target))

    for scored in (score, score_text):
        assert scored(["\u4e02" * 19] * 8)["nll"].shape == [8, 20]
        with raises_naming(tf.errors.InvalidArgumentError, 7, 25):
            scored(["\u4e02" * 24] * 8)
