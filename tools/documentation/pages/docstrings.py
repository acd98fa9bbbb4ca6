"""A Griffe extension. It adds to the docstrings what the API reference needs and the library writes in other places.

- The fields of a group of hyper-parameters: their help texts, defaults and checks.
- Methods that are functions of another module (`generate = generation.generate`).
- Sections of docstrings that Griffe does not know, such as "Call arguments:", are changed to sections that it knows.
"""

import ast
import copy
import re
import textwrap

import griffe


class Docstrings(griffe.Extension):
    """The extension."""

    def on_package(self, *, pkg, **kwargs):
        """Changes the docstrings of a package. Griffe calls it when it has read the package."""
        objects = list(objects_of(pkg))
        classes = [item for item in objects if item.is_class]
        for cls in classes:
            take_over_functions(pkg, cls)
        for cls in classes:
            describe_fields(pkg, cls)
        for item in objects:
            if item.is_module and item.docstring:
                # Griffe has removed the indentation that all lines after the first share. It may mark code, so keep it.
                item.docstring.value = ast.get_docstring(ast.parse(item.source), clean=False).strip()
            if item.docstring:
                item.docstring.value = known_sections(item.docstring.value)


def objects_of(parent):
    """All modules, classes, functions and attributes of a package, without what files import."""
    for member in parent.members.values():
        if member.is_alias:
            continue
        yield member
        if member.is_module or member.is_class:
            yield from objects_of(member)


def in_package(pkg, path):
    """The object with a dotted path in any package of the project. If the path is an import, the imported object.

    Returns `None` if there is no such object. `pkg` is one of the packages.
    """
    packages = pkg.modules_collection
    if path.partition(".")[0] not in packages:
        return None
    try:
        item = packages[path]
    except KeyError:
        return None
    return item.final_target if item.is_alias else item


def take_over_functions(pkg, cls):
    """Turns attributes of a class whose values are functions into methods: their first parameter becomes `self`."""
    for name, member in list(cls.members.items()):
        if member.is_attribute and isinstance(member.value, griffe.ExprName | griffe.ExprAttribute):
            function = in_package(pkg, member.value.canonical_path)
            if function is not None and function.is_function:
                method = copy.copy(function)
                method.parameters = griffe.Parameters(griffe.Parameter("self"), *list(function.parameters)[1:])
                cls.set_member(name, griffe.Alias(name, method, parent=cls, lineno=member.lineno))


# ---------------------------------------------------------------------------------------- groups of hyper-parameters


def fields_of(group):
    """`{name: attribute}` of the fields of a group and of its base classes, without those that a subclass replaces."""
    fields = {}
    for cls in [*reversed(group.mro()), group]:
        for name, member in cls.members.items():
            fields.pop(name, None)
            if member.is_attribute and str(getattr(member.value, "function", "")) == "option":
                fields[name] = member
    return fields


def options_of(field):
    """The arguments of a field's `option(...)`, `{name: expression}`; `None` for those that are not given."""
    options = dict.fromkeys(["help", "check", "default", "flag", "free"])
    names = iter(list(options))
    for argument in field.value.arguments:
        if isinstance(argument, griffe.ExprKeyword):
            options[argument.name] = argument.value
        else:
            options[next(names)] = argument
    return options


def describe_fields(pkg, cls):
    """Adds a section "Attributes:" to the docstring of a group of hyper-parameters. Other classes are not changed."""
    if cls.docstring is None or "group" not in [str(decorator.value) for decorator in cls.decorators]:
        return
    lines = [f"    {field.name}: {description(pkg, field)}" for field in fields_of(cls).values()]
    if lines:
        cls.docstring.value += "\n\nAttributes:\n" + "\n".join(lines)


def description(pkg, field):
    """The text about a field of a group: its help, its default values and its check."""
    options = options_of(field)
    sentences = [ast.literal_eval(str(options["help"])).replace("<", "&lt;")]
    if options["default"] is None:
        sentences.append("Required.")
    elif "Default:" not in sentences[0]:
        sentences.append(f"Default: `{options['default']}`.")
    if options["flag"] is not None:
        sentences.append(f"The flag's default: `{options['flag']}`.")
    if options["check"] is not None:
        sentences.append(f"It must {allowed(pkg, options['check'])}.")
    return " ".join(sentences)


def allowed(pkg, check):
    """What the check of a hyper-parameter demands: words that follow "must".

    Args:
        pkg: a package of the project.
        check: expression: the name of a function whose docstring contains these words, the name of a constant, or a
            call such as `at_least(1)`.
    """
    if isinstance(check, griffe.ExprName):
        item = in_package(pkg, check.canonical_path)
        if item.is_function:
            return re.search(r"must ([^.]*)\.", item.docstring.value)[1]
        return allowed(pkg, item.value)
    name, arguments = str(check.function), check.arguments
    if name == "all_of":
        return ", and ".join(allowed(pkg, argument) for argument in arguments)
    if name == "satisfies":
        return ast.literal_eval(str(arguments[1]))
    if name == "one_of":
        return "be one of " + ", ".join(f"`{choice}`" for choice in choices(pkg, arguments[0]))
    if name == "one_of_or_initializer":
        return f"be {' or '.join(f'`{choice}`' for choice in choices(pkg, arguments[0]))}, or a Keras initializer"
    least, *upper_bounds = (number(argument) for argument in arguments)
    return f"be at least {least}" + "".join(f" and at most {bound}" for bound in upper_bounds)


def choices(pkg, expression):
    """The choices in an expression, as a list.

    They are the elements of a tuple or list, the keys of a dictionary, or one string. A name, also one after `*`,
    stands for the value of its constant.
    """
    if isinstance(expression, griffe.ExprName):
        return choices(pkg, in_package(pkg, expression.canonical_path).value)
    if isinstance(expression, griffe.ExprVarPositional):
        return choices(pkg, expression.value)
    if isinstance(expression, griffe.ExprDict):
        return [ast.literal_eval(key) for key in expression.keys]
    if isinstance(expression, griffe.ExprTuple | griffe.ExprList):
        return [choice for element in expression.elements for choice in choices(pkg, element)]
    return [ast.literal_eval(str(expression))]


def number(expression):
    """The value of an expression such as `10_000`, `1 << 20` or `(1 << 31) - 1`, as text with commas."""
    text = re.sub(r"\(?1 << (\d+)\)?", lambda power: str(2 ** int(power.group(1))), str(expression)).replace("_", "")
    first, _, rest = text.partition(" - ")
    return f"{int(first) - int(rest or 0):,}"


# -------------------------------------------------------------------------------------------------------- docstrings


def known_sections(text):
    """A docstring with only sections that Griffe knows.

    Call arguments become a section "Other Args" with this title. "Args: see ..." becomes a sentence. "Returns" becomes
    paragraphs, because Griffe would look for a type in each line.
    """
    text = re.sub(r"^Call arguments:$", "Other Args: Call arguments:", text, flags=re.M)
    text = re.sub(r"^Args: (.*, and|.*; and)\n(?= )", r"**Parameters:** \1\n\nArgs:\n", text, flags=re.M)
    text = re.sub(r"^Args: (?=\S)", "**Parameters:** ", text, flags=re.M)
    text = re.sub(r"^(Returns|Raises|Call arguments, returns): (?=\S)", r"**\1:** ", text, flags=re.M)
    text = re.sub(r"^(Shapes):\n(?=    )", r"\1:\n\n", text, flags=re.M)  # a table of letters, in lines
    return re.sub(r"^(Returns|Yields):\n((?:(?:    .*)?(?:\n|$))+)", as_prose, text, flags=re.M)


def as_prose(section):
    """The Markdown of a matched section: its name in bold, and its text as paragraphs."""
    return f"**{section[1]}:**\n\n{textwrap.dedent(section[2])}\n"
