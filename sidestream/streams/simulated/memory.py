"""Memory of the simulated device: blocks that are poisoned, freed and handed out again as a caching allocator does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from sidestream.streams.simulated.site import Site, here

if TYPE_CHECKING:
    from sidestream.streams.simulated.hazards import Access

_ROUND = 512
"""Bytes; requests are rounded up, so that tensors of nearly the same size share blocks, as on CUDA."""


@dataclass(slots=True, eq=False)
class Pool:
    """Free blocks by (stream, size). Graphs have pools of their own; ``private`` says so."""

    private: bool = False
    free: dict[tuple[object, int], list[Block]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Block:
    """A piece of memory and who used it.

    Attributes:
        data: [n] uint8, the memory itself.
        stream: that it was taken on; only work there may follow its release without waiting.
        poison: the byte that unwritten memory is filled with: NaN in every float format, about 2e9 as int32.
        tenant: grows with each owner.
        history: accesses that later ones must be checked against.
    """

    data: torch.Tensor
    pool: Pool | None
    stream: object
    poison: int
    taken: Site
    tenant: int = 0
    released: Site | None = None
    graph: object = None
    borrowed: bool = False
    """Used on a second stream by ``record_stream``: never handed out again."""
    history: list[Access] = field(default_factory=list)

    def fill_poison(self) -> None:
        self.data.fill_(self.poison)


class Storage:
    """One tenant of a block; tensors that share memory share it. The block is released with its last tensor."""

    __slots__ = ("_release", "block")

    def __init__(self, block: Block, release: Callable[[Block], None]) -> None:
        self.block = block
        self._release = release

    @property
    def allocator(self) -> object:
        """That the block came from: of one simulated device."""
        return self._release.__self__  # type: ignore[attr-defined]

    def __del__(self) -> None:
        self._release(self.block)


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of a strided view inside a block.

    Attributes:
        offset, end: of the first byte and behind the last one.
        dense: every byte between them belongs to the view.
        sizes, strides, itemsize: of the view, strides in elements.
    """

    offset: int
    end: int
    dense: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def mask(self, nbytes: int, rows: np.ndarray | None) -> np.ndarray:
        """[nbytes] bool; with ``rows``, only these rows of the first dimension."""
        mask = np.zeros(nbytes, dtype=bool)
        strides = tuple(s * self.itemsize for s in self.strides)
        view = np.lib.stride_tricks.as_strided(
            mask[self.offset :], (*self.sizes, self.itemsize), (*strides, 1), writeable=True
        )
        if rows is None:
            view[...] = True
        else:
            view[rows[(rows >= -self.sizes[0]) & (rows < self.sizes[0])]] = True
        return mask


def extent_of(tensor: torch.Tensor) -> Extent | None:
    """Of a CPU view of a block; None if it has no element."""
    sizes, strides, itemsize = tuple(tensor.shape), tensor.stride(), tensor.element_size()
    span, dense = _span(sizes, strides)
    if span == 0:
        return None
    offset = int(tensor.storage_offset()) * itemsize
    return Extent(offset, offset + span * itemsize, dense, sizes, strides, itemsize)


def whole_of(block: Block) -> Extent:
    """All bytes."""
    nbytes = block.data.numel()
    return Extent(0, nbytes, True, (nbytes,), (1,), 1)


@cache
def _span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, bool]:
    """Elements from the first to the last, and whether the view has all of them."""
    if 0 in sizes:
        return 0, True
    span, dense = 1, True
    for size, stride in sorted(zip(sizes, strides, strict=True), key=lambda pair: pair[1]):
        if size > 1:
            dense = dense and stride <= span
            span += (size - 1) * stride
    return span, dense


class Allocator:
    """Takes blocks from pools and gives them back.

    Releases are queued, since they happen whenever Python drops a tensor, and take effect at ``collect``.
    """

    def __init__(self) -> None:
        self.default = Pool()
        self._released: deque[tuple[Block, Site]] = deque()

    def take(self, nbytes: int, *, pool: Pool, stream: object, poison: int) -> tuple[Storage, bool]:
        """A storage and whether its block had a tenant before."""
        rounded = -(-max(nbytes, 1) // _ROUND) * _ROUND
        free = pool.free.get((stream, rounded))
        site = here()
        if free:
            block = free.pop()
            block.tenant += 1
            block.taken, block.released = site, None  # the caller sees to its poison
            return Storage(block, self._release), True
        with torch.inference_mode(False):
            data = torch.empty(rounded, dtype=torch.uint8)
        block = Block(data, pool, stream, poison, site)
        block.fill_poison()
        return Storage(block, self._release), False

    def take_host(self, nbytes: int, *, poison: int) -> Storage:
        """Page-locked host memory; never handed out twice."""
        with torch.inference_mode(False):
            data = torch.empty(max(nbytes, 1), dtype=torch.uint8)
        block = Block(data, None, None, poison, here())
        block.fill_poison()
        return Storage(block, self._release)

    def collect(self, poison: Callable[[Block, Site], None]) -> None:
        """Put released blocks back; ``poison`` issues the work that spoils what they held."""
        while self._released:
            block, site = self._released.popleft()
            block.released = site
            if block.pool is None or block.borrowed:
                continue
            poison(block, site)
            block.pool.free.setdefault((block.stream, block.data.numel()), []).append(block)

    def _release(self, block: Block) -> None:
        self._released.append((block, here()))
