"""Content hashes of full blocks: what a block holds, as 16 bytes over everything that it depends on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial

DIGEST_BYTES = 16
hash_block = partial(hashlib.blake2b, digest_size=DIGEST_BYTES)


def chain_root(*parts: bytes) -> bytes:
    """Start of a chain: whatever the content depends on beside the tokens (model, row format, a tenant's salt)."""
    root = hash_block()
    for part in parts:
        root.update(len(part).to_bytes(8, "little") + part)
    return root.digest()


@cache
def _packer(block_size: int) -> Callable[..., bytes]:
    """Packs the tokens of a block; six times as fast as an array."""
    return struct.Struct(f"<{block_size}i").pack


class BlockHashes:
    """Hashes of a sequence's full blocks, each over the one before it and its own tokens; made when they are asked for.

    Tokens are below 2**31.

    Args:
        token_ids: those known so far; read later, so they must not change.

    Attributes:
        hashes: one a full block, in order, as far as they are made.
        num_full: blocks whose tokens are all known.
    """

    __slots__ = ("_block_size", "_first", "_own", "_pack", "_root", "_tokens", "hashes", "num_full")

    def __init__(self, root: bytes, block_size: int, token_ids: Sequence[int] = ()) -> None:
        self._block_size = block_size
        self._pack = _packer(block_size)
        self._root = root
        self._tokens = token_ids
        self._own: list[int] | None = None  # the same once they grow
        self._first = 0  # number of the block that begins with the first of them
        self.hashes: list[bytes] = []
        self.num_full = len(token_ids) // block_size

    def make(self, count: int) -> list[bytes]:
        """``hashes``, with those of the first ``count`` blocks made, of ``num_full`` at most."""
        hashes, size, pack = self.hashes, self._block_size, self._pack
        for block in range(len(hashes), count):
            start = (block - self._first) * size
            content = (hashes[-1] if hashes else self._root) + pack(*self._tokens[start : start + size])
            hashes.append(hash_block(content).digest())
        return hashes

    def append(self, token_id: int) -> bool:
        """Take one token that became known; whether it completed a block."""
        own, done = self._own, len(self.hashes)
        if own is None or self._first < done:
            own = self._own = list(self._tokens[(done - self._first) * self._block_size :])
            self._tokens, self._first = own, done
        own.append(token_id)
        full = self._first + len(own) // self._block_size
        completed = full > self.num_full
        self.num_full = full
        return completed


def block_hashes(token_ids: Sequence[int], block_size: int, *, salt: bytes = b"") -> list[bytes]:
    """Content hash of each full block of a sequence whose tokens are all known."""
    hashes = BlockHashes(chain_root(salt), block_size, token_ids)
    return hashes.make(hashes.num_full)
