"""Content hashes of full blocks: what a block holds, as 16 bytes over everything that it depends on."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

DIGEST_BYTES = 16


def chain_root(*parts: bytes) -> bytes:
    """Start of a chain: whatever the content depends on beside the tokens (model, row format, a tenant's salt)."""
    root = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        root.update(len(part).to_bytes(8, "little") + part)
    return root.digest()


class BlockHashes:
    """Hashes of a sequence's full blocks, each over the one before it and its own tokens; grows with the tokens.

    Attributes:
        hashes: one a full block, in order.
    """

    __slots__ = ("_block_size", "_last", "_rest", "hashes")

    def __init__(self, root: bytes, block_size: int, token_ids: Sequence[int] = ()) -> None:
        self._block_size = block_size
        self._last = root
        self._rest = array("q")
        self.hashes: list[bytes] = []
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Take tokens that became known."""
        self._rest.extend(token_ids)
        if len(self._rest) < self._block_size:
            return
        tokens, last, hashes = self._rest.tobytes(), self._last, self.hashes
        size = self._block_size * self._rest.itemsize
        whole = len(tokens) // size * size
        for start in range(0, whole, size):
            last = hashlib.blake2b(last + tokens[start : start + size], digest_size=DIGEST_BYTES).digest()
            hashes.append(last)
        self._last = last
        del self._rest[: whole // self._rest.itemsize]

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
