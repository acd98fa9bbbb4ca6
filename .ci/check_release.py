#!/usr/bin/env python3
"""Checks that all files that name the version have that of a tag. Then prints the version's section of CHANGELOG.md.

python .ci/check_release.py v0.1.0
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def versions():
    """The version in each file that names it: `{file: version}`; "none" if it was not found."""
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
    """The text of the section of CHANGELOG.md about a version; empty if there is none."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)}\b.*?\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return found[1].strip() if found else ""


def main(tag):
    """Prints the section about the version of a tag. Returns an error message if a file has another version."""
    version = tag.removeprefix("v")
    wrong = {name: found for name, found in versions().items() if found != version}
    if wrong:
        return "; ".join(f"{name} must have version {version}, got {found}" for name, found in wrong.items())
    print(notes(version))
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else __doc__)
