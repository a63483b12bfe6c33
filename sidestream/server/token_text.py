"""How single tokens are shown: their text, and their bytes where these are no whole characters."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CACHED_TOKENS = 65536


class TokenText:
    """Text and bytes of a tokenizer's tokens.

    Byte-level vocabularies spell each byte as one character, others have tokens such as ``<0xE2>``; a token's bytes
    follow from that spelling, so a part of a character is shown as what it is.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._added = set(tokenizer.get_added_vocab().values()) if tokenizer is not None else set()
        self._byte_level = tokenizer is not None and _is_byte_level(tokenizer)
        self._bytes_of = _byte_of_character() if self._byte_level else {}
        self.token_bytes = lru_cache(CACHED_TOKENS)(self._token_bytes)

    def text(self, token: int) -> str:
        """The token's text; ``bytes:\\xe2\\x82`` for a part of a character, as OpenAI writes it."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        whole = self.token_bytes(token)
        try:
            return whole.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in whole)

    def _token_bytes(self, token: int) -> bytes:
        if self._tokenizer is None:
            return b""
        if token not in self._added:
            spelling = self._tokenizer.convert_ids_to_tokens(token)
            if isinstance(spelling, str):
                if self._byte_level and all(char in self._bytes_of for char in spelling):
                    return bytes(self._bytes_of[char] for char in spelling)
                if match := BYTE_FALLBACK.fullmatch(spelling):
                    return bytes([int(match[1], 16)])
        return str(self._tokenizer.decode([token])).encode()


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 bytes are their own characters, the others follow from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
