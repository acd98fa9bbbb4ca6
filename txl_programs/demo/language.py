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

_language: ContextVar[str] = ContextVar("language", default="en")
# Type of a component -> names of properties that are labels in this type. In other types, "value" is a visitor's text.
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
    """Returns the language of a visitor: "en" or "zh", whichever has the larger weight in Accept-Language.

    It is English if the header names neither of them, or if there is no header.
    """
    best = "en"
    largest_weight = 0.0
    pattern = re.compile(r"\s*(zh|en)(?:-[\w-]*)?\s*(?:;\s*q\s*=\s*([\d.]{1,6}))?\s*", re.IGNORECASE | re.ASCII)
    for part in (header or "")[:1000].split(","):
        if match := pattern.fullmatch(part):
            with contextlib.suppress(ValueError):
                weight = float(match[2] or 1)
                if weight > largest_weight:
                    best = match[1].lower()
                    largest_weight = weight
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
    """Returns a sentence of the page in the visitor's language, with the `values` in place of the names in braces.

    A sentence that the catalogue does not contain stays English.
    """
    translated = SENTENCES.get(sentence, sentence) if _language.get() == "zh" else sentence
    return translated.format(**values) if values else translated


def explained(error: Exception) -> str:
    """Returns the message of an error in the visitor's language.

    A message of the library without a translation is quoted in English, in a sentence of the visitor's language.
    """
    message = str(error)
    if isinstance(error, Refusal) or _language.get() == "en":
        return message
    for pattern, sentence in MESSAGES.items():
        if match := re.fullmatch(pattern, message, re.DOTALL):
            values = match.groupdict()
            return sentence.format(**{name: SENTENCES.get(value, value) for name, value in values.items()})
    return OTHER.format(message=message)


def labels_in(config: dict[str, Any], page_labels: Mapping[str, str]) -> dict[str, Any]:
    """Returns Gradio's configuration of a page with labels in the visitor's language.

    Args:
        config: configuration of `gr.Blocks`; it is not changed.
        page_labels: `{English label: Chinese label}` of labels that only this page has, such as those with names of
            runs.
    """
    if _language.get() == "en":
        return config
    chinese = {**LABELS, **page_labels}
    return {**config, "components": [_labelled(component, chinese) for component in config.get("components", [])]}


def _labelled(component, chinese):
    """Returns a component of Gradio's configuration with its labels in Chinese; without a translation, in English.

    Args:
        component: the component, a dictionary.
        chinese: `{English label: Chinese label}`.
    """
    props = component.get("props", {})
    names = ("label", "info", "placeholder", *_LABEL_OF.get(component.get("type"), ()))
    english = {name: props[name] for name in names if isinstance(props.get(name), str)}
    return {**component, "props": {**props, **{name: chinese.get(text, text) for name, text in english.items()}}}
