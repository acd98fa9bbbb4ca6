"""Dates as people write them, and in ISO 8601: made-up pairs for training without a file.

Sat the 21st of Nov 2026    2026-11-21
11/21/'26                   2026-11-21
"""

from __future__ import annotations

import datetime
import random

# A hundred years, so that two digits of a year are enough.
FIRST = datetime.date(1950, 1, 1)
LAST = datetime.date(2049, 12, 31)
_FORMS = (
    "{weekday} the {ordinal} of {month} {year}", "{weekday}, {month} {ordinal}, {year}",
    "the {ordinal} of {month}, {year}", "{weekday}, {day}. {month} {year}", "{weekday} {day} {month} {year}",
    "{day} {month} {year}", "{month} {day}, {year}", "{month} {ordinal} {year}", "{year} {month} {day}",
    "{day}-{short}-{year}", "{day}.{number}.{year}", "{day:02d}.{number:02d}.{year}", "{number}/{day}/{year}",
    "{number:02d}/{day:02d}/{year}", "{year}/{number:02d}/{day:02d}",
)  # fmt: skip


def write_date(date: datetime.date, rng: random.Random) -> str:
    """Writes a date in a random form: one of `_FORMS`, with long or short names, in any case, and 2026 or '26.

    With slashes, numbers are month/day/year or year/month/day; with dots, day.month.year.
    """
    names = {"weekday": date.strftime("%A"), "month": date.strftime("%B")}
    short = rng.random() < 0.5
    if short:
        names = {name: text[:3] for name, text in names.items()}
    tens, ones = divmod(date.day, 10)
    ordinal = f"{date.day}{'th' if tens == 1 else {1: 'st', 2: 'nd', 3: 'rd'}.get(ones, 'th')}"
    year = date.strftime("%Y") if rng.random() < 0.8 else date.strftime("'%y")
    values = {**names, "ordinal": ordinal, "year": year, "day": date.day, "number": date.month}
    text = rng.choice(_FORMS).format(**values, short=date.strftime("%b"))
    return rng.choice([text, text, text.lower(), text.upper()])


def make_dates(n_pairs: int, seed: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Makes pairs `(written, ISO)` by split: `n_pairs` for `"train"`, 1,000 each for `"valid"` and `"test"`.

    No date is in two splits. With more than 34,525 pairs, a date of the training split occurs several times. The dates
    in `"valid"` and `"test"` do not depend on `n_pairs`, but how they are written does.
    """
    rng = random.Random(seed)
    days = list(range((LAST - FIRST).days + 1))
    rng.shuffle(days)
    days_of = {"valid": days[:1000], "test": days[1000:2000], "train": days[2000:]}
    pairs = {}
    for split, number in {"train": n_pairs, "valid": 1000, "test": 1000}.items():
        days_of_split = days_of[split]
        dates = (FIRST + datetime.timedelta(days_of_split[i % len(days_of_split)]) for i in range(number))
        pairs[split] = [(write_date(date, rng), date.isoformat()) for date in dates]
    return pairs
