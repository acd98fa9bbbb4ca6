"""Links of Markdown and HTML from one place of the repository to another, on the site."""

import posixpath
import re

FENCE = re.compile(r"(^ *```.*?^ *```)", re.M | re.S)
LINK = re.compile(r"(?<=\]\()([^)\s#]*)(#[^)\s]*)?(?=\))")
ELSEWHERE = re.compile(r"\[?!\[[^\]]*\]\(https?://[^)]*\)(?:\]\([^)]*\))?\n?")  # pictures of other machines
NOT_IN_TEXT = re.compile(r"(<a\b.*?</a>|<autoref\b.*?</autoref>|<pre\b.*?</pre>|<h\d\b.*?</h\d>)", re.S)


def outside_fences(change, markdown):
    """`markdown` with `change(text)` in the place of everything but blocks of code."""
    parts = FENCE.split(markdown)
    return "".join(part if FENCE.match(part) else change(part) for part in parts)


def targets(markdown, origin):
    """The paths in the repository that a page links to; `origin` is its own."""
    link_targets = []
    outside_fences(lambda text: link_targets.extend(match[1] for match in LINK.finditer(text)) or text, markdown)
    return {path_from(origin, target) for target in link_targets if target and "://" not in target}


def path_from(origin, target):
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def rewritten(markdown, origin, src_uri, places):
    """A page whose links, written for its place in the repository, fit its place on the site.

    Args:
        markdown: the page.
        origin: its path in the repository.
        src_uri: its path on the site.
        places: `{path in the repository: path on the site}` of all that may be linked to. That of a file with a page
            of its text is `source:` and its path in the repository, which `with_sources` resolves in the HTML: MkDocs
            does not know the anchors of lines.
    """

    def place_of(match):
        """The target of a link on the site, or the link as it is if it leads elsewhere."""
        path, fragment = match[1], match[2] or ""
        place = places.get(path_from(origin, path)) if path and "://" not in path else None
        if place is None:
            return match[0]
        if place.startswith("source:"):
            return place + fragment
        return posixpath.relpath(place, posixpath.dirname(src_uri) or ".") + fragment

    return outside_fences(lambda text: LINK.sub(place_of, ELSEWHERE.sub("", text)), markdown)


def with_sources(html, address):
    """HTML whose `source:` links have the addresses of pages and lines: `address(path)`."""

    def link(match):
        line = f"#__span-0-{match[2]}" if match[2] else ""
        return f'href="{address(match[1])}{line}"'

    return re.sub(r'href="source:([^"#]+)(?:#L(\d+))?"', link, html)


def with_whole_flags(html):
    """HTML whose flags have a class, so that no line breaks after their dashes."""
    return re.sub(r"<code>(--[\w=.,-]{1,40})</code>", r'<code class="flag">\1</code>', html)


def names_linked(html, addresses):
    """HTML whose code in running text links to the reference where it is a public name.

    Args:
        html: of a page.
        addresses: `{name: address}`.
    """

    def link(match):
        address = addresses.get(match[1])
        return f'<a class="name" href="{address}">{match[0]}</a>' if address else match[0]

    parts = NOT_IN_TEXT.split(html)
    return "".join(part if NOT_IN_TEXT.match(part) else re.sub(r"<code>([\w.]+)</code>", link, part) for part in parts)
