"""Where sentences end, in characters and in words."""

import pytest

from txl_tf.data.tagged.sentence_ends import LineSizes, split_at_ends


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


def test_sizes_of_lines_leave_out_the_hundredth_with_the_most_sentences():
    lines = ["好。"] * 190 + ["好。好！"] * 9 + ["好。" * 9]
    assert LineSizes.of(lines) == (18, 1, 2) and LineSizes.of(lines[-1:]) == (18, 9, 9)
    assert LineSizes.of([["the", "offer", ";", "no", "."], ["U.S."]], by_words=True) == (5, 2, 2)
    assert LineSizes.of([""]) == (0, 1, 1)


def test_sentences_of_words():
    words = "the U.S. offer . '' Dr. No ?! 3.5 % ... ok".split()
    pieces = [" ".join(piece) for piece in split_at_ends(words, by_words=True)]
    assert pieces == ["the U.S. offer . ''", "Dr. No ?!", "3.5 % ...", "ok"]
