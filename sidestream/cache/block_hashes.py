"""Content hashes of full blocks: what a block holds, as 16 bytes over everything that it depends on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

DIGEST_BYTES = 16
TOKEN_BYTES = 4


def chain_root(*parts: bytes) -> bytes:
    """Start of a chain: whatever the content depends on beside the tokens (model, row format, a tenant's salt)."""
    root = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        root.update(len(part).to_bytes(8, "little") + part)
    return root.digest()


class BlockHashes:
    """Hashes of a sequence's full blocks, each over the one before it and its own tokens; grows with the tokens.

    Tokens are below 2**31.

    Attributes:
        hashes: one a full block, in order.
    """

    __slots__ = ("_block_size", "_last", "_rest", "hashes")

    def __init__(self, root: bytes, block_size: int, token_ids: Sequence[int] = ()) -> None:
        self._block_size = block_size
        self._last = root
        self._rest: list[int] = []
        self.hashes: list[bytes] = []
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take tokens that became known."""
        tokens = [*self._rest, *token_ids] if self._rest else token_ids
        whole = len(tokens) // self._block_size * self._block_size
        self._rest = list(tokens[whole:])
        if not whole:
            return
        packed = struct.pack(f"<{len(tokens)}i", *tokens)  # six times as fast as an array
        last, hashes, size = self._last, self.hashes, self._block_size * TOKEN_BYTES
        for start in range(0, whole * TOKEN_BYTES, size):
            last = hashlib.blake2b(last + packed[start : start + size], digest_size=DIGEST_BYTES).digest()
            hashes.append(last)
        self._last = last

    def append(self, token_id: int) -> bool:
        """Take one token; whether it completed a block."""
        self._rest.append(token_id)
        if len(self._rest) < self._block_size:
            return False
        self.extend(())
        return True


def block_hashes(token_ids: Sequence[int], block_size: int, *, salt: bytes = b"") -> list[bytes]:
    """Content hash of each full block of a sequence whose tokens are all known."""
    return BlockHashes(chain_root(salt), block_size, token_ids).hashes
