"""The language of the page: English, or Chinese for a browser that prefers it (Accept-Language).

The code writes English. `said("The text is empty.")` gives the sentence in the visitor's language, by the catalogue in
chinese.py. Labels of components are English, too, and `labels_in` translates them in the page's configuration.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from txl_config.errors import ParameterError
from txl_programs.demo.chinese import LABELS, MESSAGES, OTHER, SENTENCES

LANGUAGES = ("en", "zh")
_language: ContextVar[str] = ContextVar("language", default="en")
# Type of a component -> those of its properties that are labels only in this type. Other values are texts of visitors.
_LABEL_OF = {"markdown": ("value",), "button": ("value",)}


class Refusal(ParameterError):
    """An error whose message is a sentence of the page, in the visitor's language.

    Args:
        parameter, found, allowed: name, value and allowed values, see `ParameterError`.
        sentence, **values: arguments of `said`.
    """

    def __init__(self, parameter: str, found: Any, allowed: Any, sentence: str, /, **values: Any):
        super().__init__(parameter, found, allowed, said(sentence, **values))


def preferred(header: str | None) -> str:
    """The language of a visitor: the one of `LANGUAGES` with the largest weight in an Accept-Language header.

    It is English if the header names neither of them, or if there is no header.
    """
    best, largest_weight = "en", 0.0
    pattern = re.compile(r"\s*(zh|en)(?:-[\w-]*)?\s*(?:;\s*q\s*=\s*([\d.]{1,6}))?\s*", re.IGNORECASE | re.ASCII)
    for part in (header or "")[:1000].split(","):
        if match := pattern.fullmatch(part):
            with contextlib.suppress(ValueError):
                weight = float(match[2] or 1)
                if weight > largest_weight:
                    best, largest_weight = match[1].lower(), weight
    return best


@contextlib.contextmanager
def speaking(language: str) -> Iterator[None]:
    """In the block, `said`, `explained` and `labels_in` use the language `language`."""
    token = _language.set(language)
    try:
        yield
    finally:
        _language.reset(token)


def said(sentence: str, **values: Any) -> str:
    """A sentence of the page in the visitor's language, with the `values` inserted for the names in braces.

    A sentence that the catalogue lacks stays English.
    """
    translated = SENTENCES.get(sentence, sentence) if _language.get() == "zh" else sentence
    return translated.format(**values) if values else translated


def explained(error: Exception) -> str:
    """The message of an error in the visitor's language. A message of the library that has no translation is quoted."""
    message = str(error)
    if isinstance(error, Refusal) or _language.get() == "en":
        return message
    for pattern, sentence in MESSAGES.items():
        if match := re.fullmatch(pattern, message, re.DOTALL):
            values = match.groupdict()
            return sentence.format(**{name: SENTENCES.get(value, value) for name, value in values.items()})
    return OTHER.format(message=message)


def labels_in(config: dict[str, Any], page_labels: Mapping[str, str]) -> dict[str, Any]:
    """Gradio's configuration of a page with labels in the visitor's language.

    Args:
        config: configuration of `gr.Blocks`; it is not changed.
        page_labels: `{English label: Chinese label}` of this page, for labels that the catalogue cannot have, such as
            those with names of runs.
    """
    if _language.get() == "en":
        return config
    chinese = {**LABELS, **page_labels}
    return {**config, "components": [_labelled(component, chinese) for component in config.get("components", [])]}


def _labelled(component, chinese):
    """A component of Gradio's configuration with its texts in Chinese, where there is a translation."""
    props = component.get("props", {})
    names = ("label", "info", "placeholder", *_LABEL_OF.get(component.get("type"), ()))
    english = {name: props[name] for name in names if isinstance(props.get(name), str)}
    return {**component, "props": {**props, **{name: chinese.get(text, text) for name, text in english.items()}}}
