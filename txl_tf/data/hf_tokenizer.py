"""A `tokenizer.json` of Hugging Face in the place of a SentencePiece model: `SubwordVocab` reads both.

The tokens of a text are those of `tokenizers.Tokenizer.encode(text, add_special_tokens=False)`. Truncation and padding,
which the file may ask for, are switched off, because they would change a text.

The bytes of a token depend on the decoder of the file:

    decoder                 token       bytes
    ByteLevel (GPT-2)       Ġthe        " the"
    Metaspace (Llama)       ▁the        " the"
    ByteFallback            <0x0A>      the byte 10
    WordPiece (BERT)        ##ing       "ing", and " the" for a token without ##
    none                    the         " the"
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from typing import Any

from txl_tf.errors import ParameterError

SPACE = "\u2581"  # ▁, the mark for a space
# Special tokens that may end a document. The first one that a tokenizer has is used.
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")


def is_tokenizer(data: bytes) -> bool:
    """Whether the content of a file begins as JSON does: a tokenizer.json and not a SentencePiece model."""
    return data.lstrip()[:1] == b"{"


def _tokenizers() -> Any:
    """Returns the package, which the extra `tokenizers` installs. Raises ParameterError if it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        message = "a tokenizer.json needs the package tokenizers, which is not installed: pip install tokenizers"
        allowed = "a SentencePiece model, or a tokenizer.json with the package tokenizers installed"
        raise ParameterError("vocab_path", None, allowed, message) from error
    return tokenizers


class TokenizerProcessor:
    """A tokenizer with the methods of `sentencepiece.SentencePieceProcessor` that `SubwordVocab` calls.

    Args:
        data: content of a tokenizer.json.
        path: its path, for messages.

    Attributes:
        token_bytes: list of bytes, the text of each id; empty for special tokens.
        end: the token that may end a document, or `None`.
        symbols: list of str, the token of each id.
        unk: the token for unknown characters, or `None`.

    Raises:
        ParameterError: `data` is not a tokenizer.json, an id has no token, or the tokenizer would lose characters that
            it does not know, because it has neither bytes nor an unknown token; or the package tokenizers is not
            installed.
    """

    def __init__(self, data: bytes, path: str | os.PathLike[str]) -> None:
        package = _tokenizers()
        try:
            self.tokenizer = package.Tokenizer.from_buffer(data)
            described = json.loads(data)
        except Exception as error:  # the package raises Exception itself
            message = f"{path} is not a tokenizer.json of Hugging Face: {error}"
            raise ParameterError(os.fspath(path), None, "a tokenizer.json", message) from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {i for i, token in added.items() if token.special}
        self.symbols = [self.tokenizer.id_to_token(i) for i in range(self.size)]
        if None in self.symbols:
            message = f"{path} has no token with the id {self.symbols.index(None)}: ids must be 0 to {self.size - 1}"
            raise ParameterError(os.fspath(path), self.symbols.index(None), f"ids from 0 to {self.size - 1}", message)
        self.end = next((end for end in ENDS if end in self.symbols), None)
        kinds = _kinds(described)
        self.kind = next((kind for kind in ("ByteLevel", "Metaspace", "WordPiece") if kind in kinds), None)
        model = described.get("model") or {}
        self.unk = model.get("unk_token") if isinstance(model.get("unk_token"), str) else None
        if self.unk is None and model.get("unk_id") is not None:  # a unigram model has an id in place of the token
            self.unk = self.symbols[model["unk_id"]]
        if self.kind != "ByteLevel" and not model.get("byte_fallback") and self.unk is None:
            message = f"{path} has neither bytes nor an unknown token: it would lose characters that it does not know"
            raise ParameterError(os.fspath(path), None, "a tokenizer that reads every text", message)
        added_as_text = added.keys() - self.special  # ids of added tokens that are spelled as their text is
        self.token_bytes = [self._bytes_of(i, i in added_as_text) for i in range(self.size)]

    def _bytes_of(self, i: int, is_text: bool) -> bytes:
        """Returns the bytes of the token with id `i`. With `is_text`, the token is the text, unless it is special."""
        symbol = self.symbols[i]
        if i in self.special:
            return b""
        if is_text:
            return symbol.encode()
        if len(symbol) == 6 and symbol.startswith("<0x") and self.kind != "ByteLevel":
            return bytes([int(symbol[3:5], 16)])
        if self.kind == "ByteLevel":
            table = byte_of_character()
            known = all(character in table for character in symbol)
            return bytes(table[character] for character in symbol) if known else symbol.encode()
        if self.kind == "Metaspace":
            return symbol.replace(SPACE, " ").encode()
        if self.kind == "WordPiece" and symbol.startswith("##"):
            return symbol[2:].encode()
        return f" {symbol}".encode()

    # ------------------------------------------------------------------------------- as a SentencePieceProcessor

    def get_piece_size(self) -> int:
        return self.size

    def id_to_piece(self, i: int) -> str:
        return self.symbols[i]

    def encode(self, texts: str | Sequence[str], out_type: type = int) -> Any:
        """The ids, or with `out_type=str` the tokens, of a text or of each text of a list."""
        several = [texts] if isinstance(texts, str) else list(texts)
        found = self.tokenizer.encode_batch(several, add_special_tokens=False)
        results = [encoding.tokens if out_type is str else encoding.ids for encoding in found]
        return results[0] if isinstance(texts, str) else results

    def adds_space(self) -> bool:
        """Whether the tokens of a text begin with a space that the text itself does not have.

        It encodes one text to find out: the first token of ASCII letters and digits, or "a" if there is none.
        """
        text = next((data.decode(errors="replace").strip() for data in self.token_bytes if data.strip().isalnum()), "a")
        ids = self.encode(text)
        return bool(ids) and self.token_bytes[ids[0]].startswith(b" ")


def _kinds(described: dict[str, Any]) -> set[str]:
    """Returns the types of the decoder and of its parts; without a decoder, the types of the pre-tokenizer.

    Args:
        described: content of a tokenizer.json.
    """
    found: set[str] = set()

    def collect(part: Any) -> None:
        """Adds the types of a decoder or pre-tokenizer and of its parts to `found`."""
        if isinstance(part, dict):
            found.add(str(part.get("type")))
            for inner in (*(part.get("decoders") or []), *(part.get("pretokenizers") or [])):
                collect(inner)
            pattern = part.get("pattern")
            if isinstance(pattern, dict) and pattern.get("String") == SPACE:  # replaces ▁ by a space, as in Llama
                found.add("Metaspace")

    collect(described.get("decoder") or described.get("pre_tokenizer"))
    return found


@functools.cache
def byte_of_character() -> dict[str, int]:
    """Returns `{character: byte}` of ByteLevel, which writes every byte as a printable character.

    A printable byte is written as the character with the same code. The other bytes are written, in order, as the
    characters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
