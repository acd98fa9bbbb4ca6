"""Limits for the requests of visitors, and a store for the objects that the page keeps for them."""

import collections
import dataclasses
import secrets
import threading
from typing import Any

from txl_programs.demo.language import Refusal, said

CHARACTERS_OF_A_TOKEN = 20  # a text with more characters for each of `max_tokens` is refused before it is encoded


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a request. The checks raise ParameterError with a sentence for the page."""

    max_tokens: int = 2000  # most tokens of a text to read
    max_new_tokens: int = 500  # most tokens to generate
    max_rows: int = 4  # most samples of a text
    visitors: int = 4  # requests that are answered at the same time
    examples: bool = True  # whether a page that is opened shows the answers to its example texts

    @property
    def waiting(self) -> int:
        """Most requests that wait at the same time. Further requests get an error message."""
        return 8 * self.visitors

    @property
    def most_bytes(self) -> int:
        """Most bytes of a request: the longest text, with up to six bytes for a character in JSON, and 64 KiB."""
        return 6 * CHARACTERS_OF_A_TOKEN * self.max_tokens + 2**16

    @property
    def sessions(self) -> int:
        """Most visitors whose last requests the page keeps. Beyond, it forgets who has been away longest."""
        return 4 * (self.visitors + self.waiting)

    @property
    def streams(self) -> int:
        """Most open streams: an open page needs one, and another one while it waits for an answer."""
        return 96

    def check_text(self, text: Any, name: str = "The text") -> str:
        """Returns `text`. Raises ParameterError, which calls it `name`, if it is empty, too long, or no text."""
        if not isinstance(text, str) or not text:
            raise Refusal(name, text, "not empty", "{name} is empty. Type or paste a text.", name=said(name))
        max_characters = CHARACTERS_OF_A_TOKEN * self.max_tokens
        if len(text) > max_characters:
            sentence = "{name} has {number:,} characters. This page accepts at most {most:,}."
            allowed = f"at most {max_characters} characters"
            raise Refusal(name, text, allowed, sentence, name=said(name), number=len(text), most=max_characters)
        return text

    def check_tokens(self, number: int, name: str = "The text") -> None:
        """Raises ParameterError if a text, which the message calls `name`, has too many tokens: `number`."""
        if number > self.max_tokens:
            sentence = "{name} has {number:,} tokens. This page accepts at most {most:,}."
            values = {"name": said(name), "number": number, "most": self.max_tokens}
            raise Refusal(name, number, f"at most {self.max_tokens} tokens", sentence, **values)

    def check_number(self, name: str, value: Any, most: int) -> int:
        """Returns `value`, an integer from 1 to `most` or a float such as 3.0, as int. Else raises ParameterError."""
        if not isinstance(value, (int, float)) or not float(value).is_integer() or not 1 <= value <= most:
            sentence = "{name} must be a whole number from 1 to {most:,}, got {value}."
            values = {"name": said(name), "most": most, "value": repr(value)}
            raise Refusal(name, value, f"a whole number from 1 to {most:,}", sentence, **values)
        return int(value)


class Shelf:
    """Keeps a few objects that visitors may need again, by keys that cannot be guessed.

    If it has more than `most` objects, it forgets the one that was stored or returned least recently.
    """

    def __init__(self, most: int):
        self.most = most
        self._things = collections.OrderedDict()
        self._lock = threading.Lock()

    def put(self, thing: Any) -> str:
        """Keeps an object, and returns its key."""
        key = secrets.token_urlsafe(16)
        with self._lock:
            self._things[key] = thing
            while len(self._things) > self.most:
                self._things.popitem(last=False)
        return key

    def get(self, key: Any) -> Any:
        """Returns the object with this key; `None` if the key is unknown or the object is forgotten."""
        with self._lock:
            if key in self._things:
                self._things.move_to_end(key)
            return self._things.get(key)
