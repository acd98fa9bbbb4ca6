"""Pages with the text of a file. So a link to a line of code stays on the site, and shows the same version."""

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
    """The paths of the files that get a page: all files of the packages, and files of `linked` outside docs/."""
    package_files = {str(path.relative_to(root)) for package in packages for path in (root / package).rglob("*.py")}
    return sorted(package_files | {path for path in linked if not path.startswith("docs/") and (root / path).is_file()})


def src_uri(path):
    """The path on the site of the page with the text of the file `path`."""
    return f"source/{path}.md"


def page(root, path):
    """The Markdown of the page with the text of the file `path` in the repository `root`."""
    text = (root / path).read_text()
    try:
        lexer = get_lexer_for_filename(path).aliases[0]
    except ClassNotFound:
        lexer = "bash" if text.startswith("#!") else "text"
    return PAGE.format(path=path, lexer=lexer, text=text.rstrip("\n"))
