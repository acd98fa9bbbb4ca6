"""A hook of MkDocs. It adds the pages that are no files of docs/, and changes links to files outside docs/.

- Pages that lie elsewhere in the repository, such as the README, which is the front page (`extra.included`).
- The API reference (`pages/reference.py`).
- The gallery: every picture of the pages, with its command (`pages/gallery.py`).
- The text of every file of the library, and of every file that a page links to (`pages/sources.py`).
"""

from pathlib import Path

from mkdocs.structure.files import File
from pages import gallery, links, notebook, reference, sources

STYLE = Path(__file__).with_name("site.css")
# Set at every build:
READ = []  # the package, as Griffe reads it
NAMES = {}  # `{name in code: (page of the reference, anchor)}`
PLACES = {}  # `{path in the repository: path on the site}`, see `links.rewritten`


def on_config(config):
    """Adds the pages of the reference to the navigation, and the link to the repository. MkDocs calls it."""
    READ.clear()
    READ.append(reference.package(config.extra["packages"], Path(config.config_file_path).parent))
    config.nav = [with_reference(config, entry) for entry in config.nav]
    if config.extra["repository"]:
        config.extra["social"] = [{"icon": "material/git", "link": config.extra["repository"], "name": "Repository"}]
    return config


def with_reference(config, entry):
    """Returns an entry of the navigation; the entry of the reference with its sections and pages."""
    if entry != {"Reference": ["reference/index.md"]}:
        return entry
    sections = {}
    for topic, _, _ in reference.pages(config, READ[0]).values():
        sections.setdefault(topic.section, []).append({topic.title: topic.src_uri})
    return {"Reference": ["reference/index.md", *({section: pages} for section, pages in sections.items())]}


def on_files(files, config):
    """Adds the pages outside docs/, the generated pages and the style sheet to the site. Sets `PLACES`.

    MkDocs calls it.
    """
    root = Path(config.config_file_path).parent
    PLACES.clear()
    PLACES.update({path: uri for uri, path in config.extra["included"].items()})
    PLACES.update({f"docs/{file.src_uri}": file.src_uri for file in files})

    pages = [path for path, uri in PLACES.items() if uri.endswith(".md")]
    texts = {path: notebook.to_markdown(root / path) for path in pages if path.endswith(".ipynb")}
    texts |= {path: (root / path).read_text() for path in pages if path not in texts}
    generated = {uri: texts[path] for uri, path in config.extra["included"].items()}
    generated["gallery.md"] = gallery.page(texts, PLACES)
    generated["assets/site.css"] = STYLE.read_text()
    generated |= reference_pages(config)

    linked = {path for origin, text in texts.items() for path in links.targets(text, origin)}
    for path in sources.paths(root, config.extra["packages"], linked - {*PLACES}):
        PLACES[path] = f"source:{path}"
        generated[sources.src_uri(path)] = sources.page(root, path)
    for uri, content in generated.items():
        files.append(File.generated(config, uri, content=content))
    return files


def reference_pages(config):
    """Makes the pages of the reference, `{path on the site: Markdown}`. Sets NAMES to the names in them."""
    pkg = READ[0]
    topics = reference.pages(config, pkg)
    NAMES.clear()
    NAMES.update(reference.names_in_code(topics))
    # Classes whose members are not repeated on the pages of their subclasses.
    shown_elsewhere = {*reference.public(config, pkg), *config.extra["bases"]}
    pages = {uri: reference.page(pkg, shown_elsewhere, config.extra["methods"], *page) for uri, page in topics.items()}
    return pages | {"reference/index.md": reference.overview(config, pkg, topics)}


def on_page_markdown(markdown, page, **kwargs):
    """Changes the links of a page for its place on the site. MkDocs calls it."""
    origins = {uri: path for path, uri in PLACES.items()}
    uri = page.file.src_uri
    return links.rewritten(markdown, origins[uri], uri, PLACES) if uri in origins else markdown


def on_page_content(html, page, files, **kwargs):
    """Adds links to sources and to names of the reference to the HTML of a page. MkDocs calls it."""

    def url(uri):
        return files.get_file_from_path(uri).url_relative_to(page.file)

    if page.file.src_uri.startswith("source/"):
        return html
    html = links.with_whole_flags(html)
    html = links.with_sources(html, lambda path: url(sources.src_uri(path)))
    return links.names_linked(html, {name: f"{url(uri)}#{anchor}" for name, (uri, anchor) in NAMES.items()})
