"""Files that are not UTF-8: guesses their encoding, and the command that converts them.

```python
probable_encoding("你好，世界".encode("gbk"))    # "gb18030"
```
"""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Callable

from txl_tf.errors import ParameterError

_SAMPLE = 1 << 14  # bytes that the guess uses
_ADVICE = "The text seems to be "  # beginning of `conversion_advice`
_PACKED_BY = "packed by "
_LEAST = 0.3  # smallest score at which `_by_characters` believes a guess

# First bytes of a file -> its format, and the command that unpacks it to the standard output.
_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip -c"),
    b"PK\x03\x04": ("zip", "unzip -p"),
    b"BZh": ("bzip2", "bunzip2 -c"),
    b"\xfd7zXZ": ("xz", "xz -dc"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"),
}
# Byte order mark -> encoding.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, because it begins with the mark of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# The most frequent characters of a language.
_CHINESE = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然"
    "家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心本前开但因只从想实日军者意无力它与长把机"
)
_TRADITIONAL = (
    "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年過發後作裡用道行所然"
    "家種事成方多經麼去法學如都同現當沒動面起看定天分還進好小部其些主樣理心本前開但因只從想實日軍者意無力它與長把機"
)
_KOREAN = (
    "이다는에의을를가은도로고하한지기사인서리나자어시대라그해일으있아수정니것들게부보만제장면원구전여과주년상스성요"
    "와동세무소모신안위우비오공거내게화선유연분방적경생조마관국산문용등할했된되"
)
_RUSSIAN = "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэф"
_ACCENTED = "éèêëàâäáãåçîïíìñôöóòõøœùûüúßæÉÈÀÇÖÄÜÅÑÓÍ°§«»¿¡£€–—“”‘’„…·\xa0"
_PUNCTUATION = "，。、；：？！“”‘’（）《》「」『』·…—　"


def not_utf8(
    name: str,
    data: bytes,
    position: int,
    where: str,
    is_utf8: bool = False,
    begins: bool = True,
    advice: str = "",
    path: str | None = None,
) -> ParameterError:
    """Returns the error for a text that is not UTF-8. Its value is the probable encoding, or `None`.

    Args:
        name: name of the text, for the message.
        data: some bytes of the text.
        position: index of the wrong byte in `data`.
        where: the position of the wrong byte in the whole text, for the message, such as "byte 3".
        is_utf8: whether text before `data` shows that the rest is UTF-8.
        begins: whether `data` is the beginning of the file.
        advice: further advice for the message.
        path: path of the file that has the text; `None`: the name is the path.
    """
    # The sample must contain the wrong byte: it begins with the line of this byte if the byte is far from the start.
    start = 0 if position < _SAMPLE else data.rfind(b"\n", 0, position) + 1
    encoding, command = (None, None) if is_utf8 else _guess(data[start : start + _SAMPLE], begins and not start)
    if encoding is None and data[position] == 0:
        message = f"{name} has a zero byte (NUL), which no text contains: see {where}"
        message += f". {advice}" if advice else ""
        return ParameterError(path or name, None, "text without zero bytes", message)
    ways = [advice] if advice else []
    if command:
        ways.append(f"It seems to be {encoding}: {command} {shlex.quote(path or name)} > NEW_FILE converts it")
    message = f"{name} is not UTF-8 text: see {where}" + (f". {'. '.join(ways)}" if ways else "")
    return ParameterError(path or name, encoding, "UTF-8 text", message)


def conversion_advice(data: bytes) -> str | None:
    """Returns a sentence on how to convert a text that begins with `data`; `None` if its encoding is not clear."""
    encoding, command = _guess(data[:_SAMPLE], begins=True)
    return command and f"{_ADVICE}{encoding}: {command} OLD_FILE > NEW_FILE converts it."


def without_wrong_advice(notes: list[str]) -> list[str]:
    """Returns notes about the lines of a text. If one says that it is packed, other `conversion_advice` is left out.

    The first bytes show that a text is packed. Each of its other lines looks like some encoding, by chance.
    """
    packed = next((note for note in notes if note.startswith(f"{_ADVICE}{_PACKED_BY}")), None)
    return [note for note in notes if packed in (None, note) or not note.startswith(_ADVICE)]


def probable_encoding(data: bytes, begins: bool = True) -> str | None:
    """Returns the encoding of bytes that are not UTF-8, by its name in `iconv`; or a text such as "packed by gzip".

    Returns `None` if the encoding is not clear.

    Args:
        data: a few thousand bytes.
        begins: whether the bytes are the beginning of a file.
    """
    return _guess(data[:_SAMPLE], begins)[0]


def _guess(data: bytes, begins: bool) -> tuple[str | None, str | None]:
    """Returns `(encoding, command)` as in `probable_encoding`; the command converts the file whose name follows it."""
    if begins:
        for magic, (kind, command) in _PACKED.items():
            if data.startswith(magic):
                return f"{_PACKED_BY}{kind}", command
    marked = next((name for mark, name in _MARKS.items() if begins and data.startswith(mark)), None)
    encoding = marked or (None if _is_mostly_utf8(data) or _is_text_with_zeros(data) else _by_characters(data))
    return encoding, encoding and f"iconv -f {encoding} -t utf-8"


def _is_mostly_utf8(data: bytes) -> bool:
    """Whether `data` has more UTF-8 characters that are not ASCII than bytes that are not UTF-8.

    Then the text is UTF-8 with some damage.
    """
    not_ascii = [c for c in data.decode("utf-8", "surrogateescape") if not c.isascii()]
    n_undecodable = sum("\udc80" <= c <= "\udcff" for c in not_ascii)
    return len(not_ascii) - n_undecodable > n_undecodable


def _is_text_with_zeros(data: bytes) -> bool:
    """Whether `data` is UTF-8 text with some zero bytes. UTF-16 has more of them, or bytes that are not such a text."""
    zeros = data.count(b"\0")
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    readable = sum(c.isprintable() or c.isspace() for c in text)
    return 0 < zeros < 0.4 * len(text) and readable + zeros > 0.95 * len(text)


def _by_characters(data: bytes) -> str | None:
    """Returns the encoding in which most characters are usual ones of its language, by `_score`.

    If no candidate scores at least `_LEAST`, returns an encoding of one byte per character, or `None`: see `_latin`.
    """
    scores = {name: _score(data, codec, test) for name, (codec, test) in _CANDIDATES.items()}
    best = max(scores, key=scores.__getitem__)
    if scores[best] >= _LEAST:
        return best
    return _latin(data)


def _score(data: bytes, codec: str, test: Callable[[str], float]) -> float:
    """Returns the mean of `test` over the characters that are not ASCII; 0 if the bytes are not in the encoding.

    In UTF-16, it is the mean over all characters, and a readable ASCII character counts as 1: wrongly decoded bytes
    seldom are such a character.
    """
    if codec.startswith("utf-16") and b"\0" not in data:
        return 0.0  # almost every text has a newline or a space, and each of these has a zero byte in UTF-16
    try:
        text = codecs.getincrementaldecoder(codec)().decode(data)  # the last character may be cut
    except UnicodeDecodeError:
        return 0.0
    not_ascii = [c for c in text if not c.isascii()][:2000]
    if codec.startswith("utf-16"):
        plain = sum(c.isascii() and (c.isprintable() or c.isspace()) for c in text)
        return (plain + sum(map(test, not_ascii))) / max(len(text), 1)
    return sum(map(test, not_ascii)) / max(len(not_ascii), 1)


def _characters(common: str, codec: str, first: int, last: int) -> Callable[[str], float]:
    """Returns a test of a character: 0.5 if it is in the first part of a character set, plus 0.5 if it is frequent.

    Args:
        common: the frequent characters of the language.
        codec: Python's codec of the character set.
        first, last: first bytes of the characters in the first part.
    """
    frequent = frozenset(common + _PUNCTUATION)

    def test(c: str) -> float:
        encoded = c.encode(codec, "ignore")
        in_first_part = len(encoded) == 2 and first <= encoded[0] <= last
        return 0.5 * in_first_part + 0.5 * (c in frequent)

    return test


def _is_kana(c: str) -> float:
    """A test for Japanese: 1 for hiragana, katakana and punctuation of East Asia."""
    return float("\u3041" <= c <= "\u30fe" or c in _PUNCTUATION)


def _japanese(c: str) -> float:
    """A test for Japanese: 1 for what `_is_kana` accepts, 0.3 for frequent kanji (the first part of JIS X 0208)."""
    encoded = c.encode("euc_jp", "ignore")
    return 0.3 * (len(encoded) == 2 and 0xB0 <= encoded[0] <= 0xCF) + _is_kana(c)


def _letters(common: str) -> Callable[[str], float]:
    """Returns a test of a character: 1 for a letter in `common`, 0 for another letter, -0.5 for no letter."""
    return lambda c: float(c in common) - 0.5 * (not c.isalpha())


def _wide(c: str) -> float:
    """A test for UTF-16: 1 for the scripts of East Asia, and for Cyrillic, Greek and accented letters."""
    return float("\u4e00" <= c <= "\u9fff" or "\u3000" <= c <= "\u30ff" or "\uac00" <= c <= "\ud7a3" or c <= "\u04ff")


# Encoding, as iconv calls it -> Python's codec, and a test of a character in it.
_CANDIDATES = {
    "utf-16le": ("utf-16-le", _wide),
    "utf-16be": ("utf-16-be", _wide),
    "gb18030": ("gb18030", _characters(_CHINESE, "gb2312", 0xB0, 0xD7)),
    "big5": ("big5", _characters(_TRADITIONAL, "big5", 0xA4, 0xC6)),
    "shift_jis": ("cp932", _japanese),
    "euc-jp": ("euc_jp", _japanese),
    "euc-kr": ("cp949", _characters(_KOREAN, "euc_kr", 0xB0, 0xC8)),
}
_CYRILLIC = {"windows-1251": "cp1251", "koi8-r": "koi8_r"}


def _latin(data: bytes) -> str | None:
    """Returns an encoding of one byte per character: Cyrillic or Latin; `None` if neither is probable.

    In Cyrillic, whole words consist of bytes above 127; in Latin scripts, only single letters do.
    """
    high = [i for i, byte in enumerate(data) if byte >= 0x80]
    if not high or b"\0" in data:
        return None
    all_high = set(high)
    alone = sum(i - 1 not in all_high and i + 1 not in all_high for i in high) / len(high)  # fraction of `high`
    if alone < 0.3:
        scores = {name: _score(data, codec, _letters(_RUSSIAN)) for name, codec in _CYRILLIC.items()}
        best = max(scores, key=scores.__getitem__)
        return best if scores[best] > 0.6 else None
    if alone < 0.6 or _score(data, "cp1252", lambda c: float(c in _ACCENTED)) < 0.5:
        return None
    return "windows-1252" if any(0x80 <= data[i] < 0xA0 for i in high) else "latin1"
