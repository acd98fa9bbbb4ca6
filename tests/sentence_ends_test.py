"""Where sentences end, in characters and in words."""

import pytest

from txl_tf.data.tagged.sentence_ends import split_at_ends


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("", []),
        ("没有句号", ["没有句号"]),
        ("他来了。我走！真的？好；完…", ["他来了。", "我走！", "真的？", "好；", "完…"]),
        ("他说：“好！！？”）走……\u3000嗯", ["他说：“好！！？”）", "走……\u3000", "嗯"]),
        ("他说。\"好。\"我说'不。'走", ["他说。", '"好。"', "我说'不。'", "走"]),
        ("毕业.现任 3.14 www.x.com v1.2. J. Smith left.", ["毕业.", "现任 3.14 www.x.com v1.2. ", "J. Smith left."]),
        ("Dr. Who met St. John. It rained; then... no! OK",
         ["Dr. Who met St. John. ", "It rained; ", "then... ", "no! ", "OK"]),
        ("。。", ["。。"]),
        (" 。a", [" 。", "a"]),
    ],
)  # fmt: skip
def test_sentences_of_characters(text, pieces):
    assert split_at_ends(text) == pieces
    assert ["".join(piece) for piece in split_at_ends(list(text))] == pieces


def test_sentences_of_words():
    words = "the U.S. offer . '' Dr. No ?! 3.5 % ... ok".split()
    pieces = [" ".join(piece) for piece in split_at_ends(words, by_words=True)]
    assert pieces == ["the U.S. offer . ''", "Dr. No ?!", "3.5 % ...", "ok"]
