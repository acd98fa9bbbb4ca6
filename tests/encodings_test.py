"""Texts that are not UTF-8: the probable encoding, and the command that converts them."""

import gzip
import subprocess

import pytest
from helpers import mentions, write_text

from txl_tf.data.encodings import conversion_advice, probable_encoding, without_wrong_advice
from txl_tf.data.lines import as_json, text_of
from txl_tf.data.pairs.parallel import PairReader
from txl_tf.data.tagged.lexicon import Lexicon
from txl_tf.data.tagged.sentences import read_tagged
from txl_tf.data.tagged.word_vectors import read_vectors
from txl_tf.data.text import corpus
from txl_tf.data.text_files import numbered_lines
from txl_tf.data.vocabulary import Vocab
from txl_tf.errors import ParameterError

CHINESE = "高勇先生，1956年出生，中国国籍，无境外居留权，硕士研究生学历。\n人工智能是计算机科学的一个分支。\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。\nどこで生れたかとんと見当がつかぬ。\n"
TAGGED = "长 B-LOC\n江 E-LOC\n大 O\n桥 O\n\n我 O\n们 O\n"
TEXTS = {
    "gbk": (CHINESE, "gb18030"),
    "gb18030": (CHINESE + "㐂", "gb18030"),
    "big5": ("人工智慧是電腦科學的一個分支，它企圖了解智慧的實質。\n", "big5"),
    "shift_jis": (JAPANESE, "shift_jis"),
    "euc_jp": (JAPANESE, "euc-jp"),
    "euc_kr": ("인공지능은 컴퓨터 과학의 한 분야이다. 우리는 오늘 학교에 갔다.\n", "euc-kr"),
    "latin-1": ("L'été dernier, nous sommes allés à la mer.\nÜber die Straße.\n", "latin1"),
    "cp1252": ("Plain words in “quotes” – and so on.\n", "windows-1252"),
    "cp1251": ("Искусственный интеллект - это раздел информатики.\n", "windows-1251"),
    "koi8_r": ("Искусственный интеллект - это раздел информатики.\n", "koi8-r"),
    "utf-16": (CHINESE, "utf-16"),
    "utf-16-le": ("Plain English lines.\n" * 3, "utf-16le"),
    "utf-16-be": (CHINESE, "utf-16be"),
    "utf-32": (CHINESE, "utf-32"),
}


@pytest.mark.parametrize("codec", TEXTS)
def test_the_encoding_is_recognised_and_iconv_knows_it(codec):
    text, name = TEXTS[codec]
    data = text.encode(codec)
    assert probable_encoding(data) == name
    assert probable_encoding(data * 50) == name and probable_encoding(TAGGED.encode("gbk")) == "gb18030"
    found = subprocess.run(["iconv", "-f", name, "-t", "utf-8"], input=data, capture_output=True, check=True).stdout
    assert found.decode().removeprefix("\ufeff") == text


@pytest.mark.parametrize(
    "data",
    [b"ab\xff", "Ein schöner Tag, über Köln\xff".encode() + b"\xff", CHINESE.encode()[:-2], bytes(range(256)) * 4],
    ids=["one byte", "damaged", "cut", "binary"],
)
def test_damaged_utf8_and_binary_files_have_no_other_encoding(data):
    assert probable_encoding(data) is None


def test_packed_files_are_recognised_by_their_beginning():
    assert probable_encoding(gzip.compress(b"text")) == "packed by gzip"
    for magic, name in {b"PK\3\4": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}.items():
        assert probable_encoding(magic + b"\xff\x00" * 9) == f"packed by {name}"


READERS = {
    "text": lambda path: corpus.build_corpus("text", path),
    "text in blocks": lambda path: corpus.build_corpus("text", path, level="word"),
    "pairs": lambda path: PairReader().read(path),
    "tagged": read_tagged,
    "lexicon": Lexicon.load,
    "vectors": lambda path: read_vectors(path, []),
    "vocabulary": Vocab.load,
}


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("codec", ["gbk", "utf-16", "shift_jis", "latin-1", "gzip"])
def test_every_kind_of_file_names_the_encoding_and_a_way_that_works(tmp_path, codec, what):
    if (codec, what) == ("gzip", "vectors"):
        pytest.skip("vectors are unpacked")
    text, name = TEXTS.get(codec, (CHINESE, "packed by gzip"))
    data = gzip.compress(text.encode()) if codec == "gzip" else text.encode(codec)
    path = write_text(tmp_path / "a file", data)
    with pytest.raises(ParameterError) as caught:
        READERS[what](path)
    assert (caught.value.name, caught.value.value) == (path, name)
    message = str(caught.value)
    assert ("level='byte'" in message) == what.startswith("text")
    command = message.partition(f"{name}: ")[2].partition(" converts it")[0].replace("NEW_FILE", f"{tmp_path}/new")
    subprocess.run(command, shell=True, check=True)
    assert (tmp_path / "new").read_text().removeprefix("\ufeff") == text


def test_lines_have_the_way_out_as_a_note():
    for codec in ("gbk", "shift_jis", "latin-1", "utf-16"):
        text, name = TEXTS[codec]
        with pytest.raises(ParameterError) as caught:
            text_of(text.encode(codec))
        assert caught.value.value == name and f"iconv -f {name} -t utf-8" in caught.value.__notes__[0]


def test_the_lines_of_a_packed_file_have_no_other_encoding():
    packed = conversion_advice(b"\x1f\x8b\x08")
    others = ["a note", conversion_advice("naïve café".encode("latin-1"))]
    assert without_wrong_advice([*others, packed]) == ["a note", packed] and others[1].endswith("converts it.")
    assert without_wrong_advice(others) == others


def test_the_place_behind_a_megabyte_of_utf8_is_damage_and_behind_ascii_an_encoding(tmp_path):
    for before, name in (("äöü\n" * 200_000, None), ("abc\n" * 300_000, "gb18030")):
        path = write_text(tmp_path / "a.txt", before.encode() + CHINESE.encode("gbk") * 9)
        with pytest.raises(ParameterError) as caught:
            corpus.build_corpus("text", path)
        assert caught.value.value == name and mentions(str(caught.value), len(before.encode()))


def test_json_never_has_half_of_a_surrogate_pair():
    line = as_json({"text": "é\udcff\udc80 \ud83d 🎉", "tokens": [["\udce2", 1.5]]})
    assert line == '{"text": "é\\\\xff\\\\x80 \ufffd 🎉", "tokens": [["\\\\xe2", 1.5]]}\n'
    line.encode("utf-8")


@pytest.mark.parametrize("text", ["ab\tx\na\0b\ty\n", "a b c\n" * 4000 + "a\0b\n", "\0", "na\u00efve\tx\na\0b\n"])
def test_text_with_a_zero_byte_is_not_utf_16_and_its_line_has_a_number(text, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    line = text[: text.index("\0")].count("\n") + 1
    with pytest.raises(ParameterError, match=rf"\b{line}$") as caught:
        list(numbered_lines(str(path)))
    assert caught.value.value is None
    assert "UTF-8" not in caught.value.allowed


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    "text",
    [
        "plain words\tand more\n",
        "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440\n",
        "\u4f60\u597d\uff0c\u4e16\u754c\n\u7684\u662f\n",
    ],
)
def test_utf_16_without_a_mark_is_still_recognised(codec, text):
    assert probable_encoding((text * 9).encode(codec)) == codec.replace("16-", "16")
