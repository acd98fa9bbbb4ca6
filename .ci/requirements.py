#!/usr/bin/env python3
"""Prints requirements of pyproject.toml, one a line.

    python .ci/requirements.py [--only-extras] [--without=NAME,NAME] [EXTRA...]

It prints the requirements of the library, unless --only-extras is given, and those of the extras, but not those of the
packages in --without. Scripts that cannot install the library itself use it, so that versions are written in one place.
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]


def of_extra(extra):
    """Yields the requirements of an extra. It may name other extras, such as `txl_tf[lint,plot]`: theirs, too."""
    for requirement in PROJECT["optional-dependencies"][extra]:
        own = re.fullmatch(rf"{PROJECT['name']}\[(.*)\]", requirement)
        if own:
            for name in own[1].split(","):
                yield from of_extra(name.strip())
        else:
            yield requirement


def main(arguments):
    """Prints the requirements that the arguments of the command ask for."""
    without = [a.removeprefix("--without=").split(",") for a in arguments if a.startswith("--without=")]
    left_out = {name for names in without for name in names}
    extras = [a for a in arguments if not a.startswith("--")]
    found = list(PROJECT["dependencies"]) if "--only-extras" not in arguments else []
    for extra in extras:
        found += of_extra(extra)
    for requirement in dict.fromkeys(found):
        if re.match(r"[\w.-]+", requirement)[0] not in left_out:
            print(requirement)


if __name__ == "__main__":
    main(sys.argv[1:])
