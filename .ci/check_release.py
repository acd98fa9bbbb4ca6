#!/usr/bin/env python3
"""Whether everything has the version of a tag; prints what CHANGELOG.md says of it.

python .ci/check_release.py v0.1.0
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def versions():
    """`{file: version}` of the files that name the version."""
    found = {}
    for name, pattern in {
        "txl_tf/__init__.py": r'^__version__ = "(.*)"$',
        "CITATION.cff": r"^version: (.*)$",
        "CHANGELOG.md": r"^## (\d\S*)",  # the newest; "Unreleased" stands above it
    }.items():
        match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.M)
        found[name] = match[1] if match else "none"
    return found


def notes(version):
    """The section of CHANGELOG.md about a version."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)}\b.*?\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return found[1].strip() if found else ""


def main(tag):
    version = tag.removeprefix("v")
    wrong = {name: found for name, found in versions().items() if found != version}
    if wrong:
        return "; ".join(f"{name} must have version {version}, got {found}" for name, found in wrong.items())
    print(notes(version))
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else __doc__)
