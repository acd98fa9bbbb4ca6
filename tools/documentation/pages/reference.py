"""The pages of the API reference: which names each has. Griffe reads the library without importing it.

The public names are those in `__all__` of the packages that `extra.public` of mkdocs.yml lists. The pages of the
section Internals have the other classes and functions with a docstring, for developers. All other pages have only
public names.
"""

import re
from typing import NamedTuple

import griffe
from pages.docstrings import Docstrings, in_package

INTRO = """# Reference

The public interface, by topic: `txl_tf.__all__`, `txl_tf.layers` with the originals' functions and layers, and
`txl_tf.config` with the hyper-parameters. The pages have arguments, shapes, errors and papers. The section Internals is
for developers of the library.
"""

INTERNALS = "Internals"
PRIVATE = "For developers of the library: what is not public. It may change at any time until version 1.0.\n"
# The search of the site shows such a page after all others.
FOUND_LAST = """---
search:
  boost: 0.1
---
"""
PUBLIC = """::: {name}
    options:
      toc_label: {label}
      members: {members}
      inherited_members: {any}
"""
INSIDE = """::: {path}
    options:
      heading_level: 3
      show_root_full_path: false
      inherited_members: false
"""


class Topic(NamedTuple):
    """A page: its section and title in the navigation, and the paths of the modules whose names it has."""

    section: str
    title: str
    modules: list

    @property
    def src_uri(self):
        """The path of the page on the site."""
        section, title = (re.sub(r"\W+", "-", name.lower()) for name in (self.section, self.title))
        return f"reference/{section}/{title}.md"

    @property
    def internals(self):
        """The topic of the page with the names of the same modules that are not public."""
        return Topic(INTERNALS, f"{self.section}: {self.title}", self.modules)


def topics(config):
    """The topics of `extra.reference` of mkdocs.yml."""
    sections = config.extra["reference"].items()
    return [Topic(section, title, modules) for section, pages in sections for title, modules in pages.items()]


def package(names, root):
    """Reads packages in the folder `root`, and returns the last one, which imports names from the others."""
    extensions = griffe.load_extensions(Docstrings())
    loader = griffe.GriffeLoader(search_paths=[root], extensions=extensions, docstring_parser="google")
    return [loader.load(name) for name in names][-1]


def public(config, pkg):
    """The public names, `{path of the definition: path of the public name}`, by kind and in the order of `__all__`."""
    names = {}
    for path in config.extra["public"]:
        module = pkg if path == pkg.path else pkg[path.removeprefix(f"{pkg.path}.")]
        for name in module.exports:
            if not module[name].is_module:
                names[module[name].canonical_path] = f"{path}.{name}"
    return dict(sorted(names.items(), key=lambda paths: kind_of(pkg, paths[0])))


def kind_of(pkg, path):
    """A number for sorting: 0 for a class, 1 for a function and 2 for a constant."""
    member = in_package(pkg, path)
    return 0 if member.is_class else 1 if member.is_function else 2


def all_modules(pkg):
    """Yields all modules of all packages of the project. `pkg` is one of the packages."""
    for other in pkg.modules_collection.members.values():
        yield from modules_of(other)


def modules_of(pkg):
    """Yields a package and all modules in it."""
    yield pkg
    for module in pkg.modules.values():
        if not module.is_alias:
            yield from modules_of(module)


def topic_of(path, topics):
    """The topic of the object `path`: that of the innermost module that contains it.

    Raises:
        ValueError: no topic has such a module.
    """
    topic_by_length = {
        len(module): topic for topic in topics for module in topic.modules if f"{path}.".startswith(f"{module}.")
    }
    if not topic_by_length:
        raise ValueError(f"{path} belongs to no page of extra.reference in mkdocs.yml")
    return topic_by_length[max(topic_by_length)]


def inside(module, names):
    """The paths of the documented classes and functions of a module that are neither private nor in `names`."""
    members = [member for member in module.members.values() if not member.is_alias]
    return [
        member.path
        for member in members
        if (member.is_class or member.is_function) and member.docstring and not member.name.startswith("_")
        if member.path not in names
    ]


def pages(config, pkg):
    """The contents of all pages, those of the internals last.

    Returns:
        `{path on the site: (topic, public names, {module: paths of other names})}`. One of the latter two is empty.
    """
    all_topics, names = topics(config), public(config, pkg)
    of_users = {topic.src_uri: (topic, [], {}) for topic in all_topics}
    of_developers = {topic.internals.src_uri: (topic.internals, [], {}) for topic in all_topics}
    for path, name in names.items():
        of_users[topic_of(path, all_topics).src_uri][1].append(name)
    for module in all_modules(pkg):
        other_names = inside(module, names)
        if other_names:
            of_developers[topic_of(module.path, all_topics).internals.src_uri][2][module] = other_names
    return {uri: page for uri, page in (of_users | of_developers).items() if page[1] or page[2]}


def file_of(module):
    """The path of a module's file in Markdown, as in the docs: without `txl_tf/` at its beginning."""
    path = str(module.relative_package_filepath)
    return f"`{path.removeprefix('txl_tf/')}`"


def members_of(cls, elsewhere, methods):
    """The names of the documented members, own and inherited, that the page shows of a class.

    Args:
        cls: the class.
        elsewhere: paths of classes whose members are not repeated for their subclasses.
        methods: `extra.methods` of mkdocs.yml: the members that are shown, in this order. A member such as
            `Vocab.encode` is shown only for `Vocab`.
    """
    documented = set()
    for base in [cls, *cls.mro()]:
        if base is cls or base.path not in elsewhere:
            documented |= {name for name, member in base.members.items() if member.docstring}
    shown = [path.rpartition(".") for path in methods]
    return [name for owner, _, name in shown if name in documented and owner in ("", cls.name)]


def page(pkg, shown, methods, topic, names, other_names):
    """The Markdown of a page.

    Args:
        pkg: a package of the project.
        shown: paths of classes whose members are not repeated, `elsewhere` of `members_of`.
        methods: see `members_of`.
        topic, names, other_names: the contents, see `pages`.
    """
    lines = [*([FOUND_LAST] if other_names else []), f"# {topic.title}", ""]
    for name in names:
        member = in_package(pkg, name)
        members = members_of(member, shown, methods) if member.is_class else []
        lines += [
            PUBLIC.format(name=name, label=name.rpartition(".")[2], members=members or "false", any=bool(members))
        ]
    if other_names:
        lines.append(PRIVATE)
    for module, paths in other_names.items():
        lines += [f"## {file_of(module)} {{ .module }}", "", module.docstring.value, ""]
        lines += [INSIDE.format(path=path) for path in paths]
    return "\n".join(lines)


def names_in_code(pages):
    """The names that become links, `{name in code: (page, anchor)}`: full paths, and last parts with only one meaning.

    For example, `dropout` is not among them, because it is an argument more often than the function, and `History` may
    be Keras's. A last part that several objects share leads to the public one. But the name of a class must be its
    own: another class of this name is something else, while functions of one name compute the same.
    """
    paths = [
        (path, uri) for uri, (_, _, other_names) in pages.items() for paths in other_names.values() for path in paths
    ]
    names = [(name, uri) for uri, (_, names, _) in pages.items() for name in names]
    by_last_part = {}
    for path, uri in paths:
        last = path.rpartition(".")[2]
        # If two objects that are not public have one name, it links to neither.
        by_last_part[last] = None if last in by_last_part else (uri, path)
    # Of the names that are not public, only names with an underscore or in camel case are surely no ordinary words.
    short = {name: place for name, place in by_last_part.items() if place and re.search(r"_|[A-Z].*[a-z].*[A-Z]", name)}
    public_names = {name.rpartition(".")[2]: (uri, name) for name, uri in names}
    short |= {name: place for name, place in public_names.items() if "_" in name or name != name.lower()}
    for name in public_names.keys() & by_last_part.keys():
        if name[0].isupper():
            short.pop(name, None)
    return short | {name: (uri, name) for name, uri in paths + names}


def overview(config, pkg, pages):
    """The first page: all public names with the first lines of their docstrings, by topic."""
    lines = [INTRO]
    for section in config.extra["reference"]:
        lines += [f"## {section}", ""]
        for topic, names, _ in pages.values():
            if topic.section == section:
                relative = topic.src_uri.removeprefix("reference/")
                lines += [f"### [{topic.title}]({relative})", "", *rows(pkg, names), ""]
    lines += [f"## {INTERNALS}", ""]
    for topic, _, other_names in pages.values():
        if topic.section == INTERNALS:
            files = ", ".join(map(file_of, other_names))
            lines.append(f"- [{topic.title}]({topic.src_uri.removeprefix('reference/')}): {files}")
    return "\n".join([*lines, ""])


def rows(pkg, names):
    """The lines of a table of public names and the first paragraphs of their docstrings; none without names."""
    if not names:
        return []
    lines = ["| name | what it is |", "|---|---|"]
    for name in names:
        member = in_package(pkg, name)
        docstring = member.docstring.value if member.docstring else f"`{member.value}`"
        text = docstring.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        lines.append(f"| [`{name}`][{name}] | {text} |")
    return lines
