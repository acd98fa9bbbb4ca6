"""Made-up sentences about people and places, for training without a file. Order and a list of words decide the tags.

    高山昨天在听说白石住。       高山 is a person and 白石 a place: the name after 在 is the place
    在银星高山散步的是明月。     银星, next to 在, is a place, 高山 is not a name; 明月, after 是, is a person
    金龙市长江大桥通车了。       a town, 金龙市, and a bridge, 长江大桥
    金龙市长江大桥生病了。       a town, 金龙, its mayor (市长), and a person, 江大桥

Any word may be a person, a place or no name, and all words consist of the same few characters. So only the side of 在
or 是 on which a word is decides its kind, even across other text; and only a list of words shows where a word ends.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

CHARACTERS = "山水林木云雨风月星花草石玉金银龙凤马春夏秋冬东西南北安高明白黄青红"
SURNAMES = "江河沙城海湖"  # after 长, they are places: 长江, 长城, ...
GIVEN = ("大桥", "大海", "平原", "高原", "天路", "宽街")
BETWEEN = ("", "", "昨天", "也许", "听说", "其实", "好像又", "不一会儿")
VERBS = ("住", "散步", "唱歌", "睡觉", "看书", "画画")
OF_THINGS = ("通车了", "很宽", "修好了", "没有灯")
OF_PEOPLE = ("说话了", "很忙", "生病了", "没有钱")
N_WORDS = 600
N_SEEN = 400  # words in the training sentences

Piece = tuple[str, str]  # a text, perhaps empty, and the kind of its entity; "" if it is no entity


def words() -> list[str]:
    """Returns `N_WORDS` words of two or three characters. Training sentences have only the first `N_SEEN`."""
    rng = random.Random(0)
    words_in_order = {}
    while len(words_in_order) < N_WORDS:
        words_in_order["".join(rng.sample(CHARACTERS, rng.choice((2, 3))))] = None
    return list(words_in_order)


def lexicon() -> list[str]:
    """Returns the words, towns, such as 金龙市, 市长, bridges, such as 长江大桥, their parts, and plain words."""
    rivers = [f"长{name}" for name in SURNAMES]
    bridges = [river + given for river in rivers for given in GIVEN]
    known = words()
    towns = [f"{word}市" for word in known]
    plain = [text for text in dict.fromkeys(BETWEEN + VERBS) if len(text) > 1]
    return [*known, *towns, "市长", *rivers, *GIVEN, *bridges, *plain]


def _name(known: Sequence[str], kind: str, rng: random.Random) -> list[Piece]:
    """Draws the pieces to the left of 在 or 是: perhaps another word, then a name, then perhaps text of `BETWEEN`.

    In reverse order, they are the pieces to the right of 在 or 是. Words and names are drawn from `known`.
    """
    other = rng.choice(known) if rng.random() < 0.5 else ""
    return [(other, ""), (rng.choice(known), kind), (rng.choice(BETWEEN), "")]


def _clause(known: Sequence[str], rng: random.Random) -> list[Piece]:
    """Draws the pieces of a clause: about persons, places and things, or about a town and a bridge or its mayor.

    Words, persons and places, also towns, are drawn from `known`.
    """

    def name(kind: str) -> list[Piece]:
        """Draws a name with the pieces around it, see `_name`."""
        return _name(known, kind, rng)

    def predicate(texts: Sequence[str]) -> list[Piece]:
        """Returns the piece at the end of a clause: one of `texts`, perhaps after text of `BETWEEN`."""
        return [(rng.choice(BETWEEN) + rng.choice(texts), "")]

    form = rng.randrange(4)
    bridge = rng.choice(SURNAMES) + rng.choice(GIVEN)
    if form == 0:
        return [*name("PER"), ("在", ""), *reversed(name("LOC")), (rng.choice(VERBS), "")]
    if form == 1:
        return [("在", ""), *reversed(name("LOC")), (f"{rng.choice(VERBS)}的是", ""), *reversed(name("PER"))]
    if form == 2:
        return [*name(""), ("是", ""), *reversed(name("PER")), (rng.choice(("画的", "送的")), "")]
    town = rng.choice(known)
    if rng.random() < 0.5:
        return [(f"{town}市", "LOC"), (f"长{bridge}", "LOC"), *predicate(OF_THINGS)]
    return [(town, "LOC"), ("市长", ""), (bridge, "PER"), *predicate(OF_PEOPLE)]


def _tags(text: str, kind: str) -> list[str]:
    """Returns the tags of the characters of a piece: an entity of two characters or more; with the kind "", none."""
    if not kind:
        return ["O"] * len(text)
    return [f"{prefix}-{kind}" for prefix in ("B" + "M" * (len(text) - 2) + "E")]


def make_sentences(n_sentences: int, seed: int = 0) -> dict[str, list[tuple[list[str], list[str]]]]:
    """Makes sentences `(characters, tags)` by split: `n_sentences` for `"train"`, 500 each for `"valid"` and `"test"`.

    Tags are B-, M- and E- with the kind of the entity, and O. A third of the words of the last two splits is not in the
    training sentences.
    """
    rng = random.Random(seed)
    everything = words()
    splits = {}
    for split, number in {"train": n_sentences, "valid": 500, "test": 500}.items():
        known = everything[:N_SEEN] if split == "train" else everything
        splits[split] = []
        for _ in range(number):
            clauses = [_clause(known, rng) for _ in range(rng.choice((1, 2)))]
            pieces = [piece for clause in clauses for piece in [*clause, ("，", "")]][:-1] + [("。", "")]
            characters = [character for text, _ in pieces for character in text]
            splits[split].append((characters, [tag for piece in pieces for tag in _tags(*piece)]))
    return splits
