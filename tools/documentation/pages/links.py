"""Changes links of Markdown and HTML, which are written for the repository, so that they work on the site."""

import posixpath
import re

FENCE = re.compile(r"(^ *```.*?^ *```)", re.M | re.S)
LINK = re.compile(r"(?<=\]\()([^)\s#]*)(#[^)\s]*)?(?=\))")
ELSEWHERE = re.compile(r"\[?!\[[^\]]*\]\(https?://[^)]*\)(?:\]\([^)]*\))?\n?")  # pictures on other servers
# Parts of HTML that are not running text: links, blocks of code and headings.
NOT_IN_TEXT = re.compile(r"(<a\b.*?</a>|<autoref\b.*?</autoref>|<pre\b.*?</pre>|<h\d\b.*?</h\d>)", re.S)


def outside_fences(change, markdown):
    """`markdown` with `change(text)` in place of every text between blocks of code."""
    parts = FENCE.split(markdown)
    return "".join(part if FENCE.match(part) else change(part) for part in parts)


def targets(markdown, origin):
    """The paths in the repository that a page links to. `origin` is the page's own path."""
    link_targets = []
    # The function changes no text. It only collects targets.
    outside_fences(lambda text: link_targets.extend(match[1] for match in LINK.finditer(text)) or text, markdown)
    return {path_from(origin, target) for target in link_targets if target and "://" not in target}


def path_from(origin, target):
    """The path in the repository to which the link `target` of the file `origin` leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def rewritten(markdown, origin, src_uri, places):
    """Returns a page with links for its place on the site. It removes pictures that are on other servers.

    Args:
        markdown: the page, with links for its place in the repository.
        origin: its path in the repository.
        src_uri: its path on the site.
        places: `{path in the repository: path on the site}` of all files with a page. For a page with the text of a
            file, the value is `source:` and the path in the repository. `with_sources` replaces it in the HTML, because
            MkDocs does not know the anchors of lines.
    """

    def place_of(match):
        """The link on the site to a match of `LINK`; the link as it is if it leads to no page."""
        path, fragment = match[1], match[2] or ""
        place = places.get(path_from(origin, path)) if path and "://" not in path else None
        if place is None:
            return match[0]
        if place.startswith("source:"):
            return place + fragment
        return posixpath.relpath(place, posixpath.dirname(src_uri) or ".") + fragment

    return outside_fences(lambda text: LINK.sub(place_of, ELSEWHERE.sub("", text)), markdown)


def with_sources(html, address):
    """Replaces the `source:` links of HTML by addresses of pages and lines.

    `address` is a function of a path in the repository that returns the address of the page with the file's text.
    """

    def link(match):
        line = f"#__span-0-{match[2]}" if match[2] else ""
        return f'href="{address(match[1])}{line}"'

    return re.sub(r'href="source:([^"#]+)(?:#L(\d+))?"', link, html)


def with_whole_flags(html):
    """Gives flags in HTML, such as `--mem_len`, a CSS class, so that no line breaks after their dashes."""
    return re.sub(r"<code>(--[\w=.,-]{1,40})</code>", r'<code class="flag">\1</code>', html)


def names_linked(html, addresses):
    """Links names in HTML to the reference: code in running text that is one of the names in `addresses`.

    Args:
        html: HTML of a page.
        addresses: `{name: address in the reference}`.
    """

    def link(match):
        address = addresses.get(match[1])
        return f'<a class="name" href="{address}">{match[0]}</a>' if address else match[0]

    parts = NOT_IN_TEXT.split(html)
    return "".join(part if NOT_IN_TEXT.match(part) else re.sub(r"<code>([\w.]+)</code>", link, part) for part in parts)
