"""The gallery: a page with every picture of the other pages, and the commands that make the pictures."""

import posixpath
import re

from pages import links

PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+\.png)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
CODE = re.compile(r"^```.*?^```$", re.M | re.S)
INTRO = """# Gallery

Every picture of these pages, with the command that makes it and a link to the page that explains it.
"""


def page(texts, places):
    """The Markdown of the gallery.

    Args:
        texts: `{path in the repository: Markdown}` of all pages.
        places: `{path in the repository: path on the site}`.

    Raises:
        ValueError: a picture has no command on any page, or no heading before it.
    """
    cards = []
    seen = set()
    for origin, text in texts.items():
        for picture in PICTURE.finditer(text):
            path = links.path_from(origin, picture[2])
            if path in places and path not in seen:
                seen.add(path)
                alt = " ".join(picture[1].split())
                headings = headings_in(text[: picture.start()])
                if not headings:
                    raise ValueError(f"{origin}: there is no heading before {picture[2]}")
                command = command_of(posixpath.basename(path), texts.values())
                cards.append(card(alt, places[path], headings, places[origin], command))
    return INTRO + "\n" + "\n".join(cards)


def headings_in(text):
    """The headings of a Markdown text, without the comments in its blocks of code."""
    return HEADING.findall(CODE.sub("", text))


def command_of(name, texts):
    """The command of the picture `name` in some texts.

    It contains `--output=name`, in a block of code or in running text. Or it runs the program of all screenshots of a
    page: for `demo-read.png` and other names that begin with `demo-`, it runs `demo_screenshots.py`.

    Raises:
        ValueError: no text contains such a command.
    """
    output, page = re.escape(f"--output={name}"), re.escape(name.partition("-")[0])
    patterns = (
        rf"^(\S*python (?:[^\\\n]|\\\n)*{output})$",
        rf"`(python [^`]*{output})`",
        rf"^(\S*python \S*{page}_screenshots\.py .*)$",
    )
    for text in texts:
        for pattern in patterns:
            match = re.search(pattern, text, re.M)
            if match:
                return folded(match[1])
    raise ValueError(f"no page has a command with --output={name}")


def folded(command, width=88):
    """The command in lines of at most `width` characters (without the backslash), if its flags are short enough."""
    first, *flags = re.split(r" (?:\\\n +)?(?=--)", command)
    lines = [first]
    for flag in flags:
        if len(lines[-1]) + len(flag) < width:
            lines[-1] += f" {flag}"
        else:
            lines.append(f"  {flag}")
    return " \\\n".join(lines)


def card(alt, picture, headings, page, command):
    """The Markdown about a picture: a heading, the picture, a link to its place in its page, and its command.

    Args:
        alt: the text that stands for the picture.
        picture: its path on the site.
        headings: headings of its page up to the picture. The first is the title of the page.
        page: the path of the page on the site.
        command: the command.
    """
    title, heading = headings[0], headings[-1]
    slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    place = f"{page}#{slug}"
    return f"## {heading}\n\n[![{alt}]({picture})]({place})\n\n{alt}: [{title}]({place}).\n\n```bash\n{command}\n```\n"
