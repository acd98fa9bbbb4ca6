"""Pages with the text of a file, so that a link to a line of code stays on the site and is of the same version."""

from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound

PAGE = """---
search:
  exclude: true
hide: [navigation, toc]
---

# {path} {{ .path }}

````{lexer} linenums="1"
{text}
````
"""


def paths(root, packages, linked):
    """The files that have a page: those of the packages, and those of `linked` that are files outside docs/."""
    package_files = {str(path.relative_to(root)) for package in packages for path in (root / package).rglob("*.py")}
    return sorted(package_files | {path for path in linked if not path.startswith("docs/") and (root / path).is_file()})


def src_uri(path):
    """The path on the site of the page of a file."""
    return f"source/{path}.md"


def page(root, path):
    """The Markdown of the page of a file."""
    text = (root / path).read_text()
    try:
        lexer = get_lexer_for_filename(path).aliases[0]
    except ClassNotFound:
        lexer = "bash" if text.startswith("#!") else "text"
    return PAGE.format(path=path, lexer=lexer, text=text.rstrip("\n"))
