"""Launch parameters of the Triton kernels: one table, chosen by how many rows there are. Imports no Triton.

The floor of ``experts`` is the weights of every expert with a row, once: 3 * H * I * 2 bytes each (50.3 MB at
H = 4,096, I = 2,048), or 6 * H * I operations a pair of token and expert, over 4.28 TB/s and 790 TFLOP/s. With 64
experts, top-8 and a shared one, distinct experts of a uniform choice, predicted as floor + 5 % + 3 us a launch:

| tokens | experts read | floor, us | predicted, us |
| --- | --- | --- | --- |
| 1 | 9 | 106 | 117 |
| 2 | 16 | 188 | 209 |
| 8 | 43 | 505 | 542 |
| 16 | 57 | 670 | 715 |
| 32 to 128 | 64 to 65 | 753 to 764 | 805 to 815 |
| 512 | 65 | 764 (bytes; 294 by operations) | 850 |
| 1,024 | 65 | 764 (bytes; 587 by operations) | 1,000 |
| 8,192 | 65 | 4,700 (operations) | 7,000 |
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """One matrix product: weight rows a program makes, depth of one step, warps, pipeline stages."""

    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """``rows`` pairs of one expert share a program of both products. ``described``: weights and activations that lie
    as they are needed come by the copy engine (tensor descriptors), which costs the host a few us a launch.
    ``pdl``: kernels are launched while those before them still run, and wait there (programmatic dependent launch)."""

    rows: int
    gate_up: Tiles
    down: Tiles
    described: bool = False
    pdl: bool = False


@dataclass(frozen=True, slots=True)
class RouterTiles:
    """Router product: a program takes ``rows`` tokens, ``experts`` experts and one of ``splits`` parts of the depth.

    ``dot`` multiplies by ``tl.dot``, which wants 16 rows; otherwise products are summed lane by lane. ``choice_warps``
    compare one token's scores.
    """

    rows: int
    experts: int
    depth: int
    splits: int
    warps: int
    stages: int
    dot: bool
    choice_warps: int = 2
    pdl: bool = False


ONE_TOKEN = ExpertTiles(1, Tiles(8, 512, 4, 1), Tiles(8, 512, 4, 4))
"""A single token needs no tile of rows: products are sums of rows times the token. Down has four programs of 8 columns
a multiprocessor at H = 4,096, so bytes in flight (20 a cycle are wanted) come from its stages."""

EXPERT_TILES = (
    (10, ExpertTiles(16, Tiles(32, 128, 4, 4), Tiles(64, 128, 4, 4))),
    (24, ExpertTiles(32, Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 4))),
    (48, ExpertTiles(64, Tiles(64, 64, 4, 4), Tiles(128, 64, 4, 4))),
)
"""(most rows an expert on average, tiles), in order."""
MANY_ROWS = ExpertTiles(128, Tiles(128, 64, 8, 3), Tiles(256, 64, 8, 3))

LIBRARY_ROWS = 96
"""Rows an expert on average from which the library's grouped product is faster."""

ROUTER_TILES = (
    (1, RouterTiles(1, 4, 512, 4, 4, 1, dot=False)),
    (4, RouterTiles(4, 4, 256, 4, 4, 1, dot=False)),
    (256, RouterTiles(16, 16, 64, 8, 4, 3, dot=True)),
)
"""(most tokens, tiles), in order; beyond them the product is the library's."""


def mean_rows(tokens: int, top_k: int, num_experts: int) -> int:
    """Pairs an expert on average, rounded up."""
    return -(-tokens * top_k // num_experts)


def expert_tiles(tokens: int, top_k: int, num_experts: int) -> ExpertTiles:
    """Depends on sizes alone, never on who chose what."""
    if tokens == 1:
        return ONE_TOKEN
    mean = mean_rows(tokens, top_k, num_experts)
    return next((tiles for most, tiles in EXPERT_TILES if mean <= most), MANY_ROWS)


def router_tiles(tokens: int) -> RouterTiles | None:
    """None: the library's product is faster."""
    return next((tiles for most, tiles in ROUTER_TILES if tokens <= most), None)


def dividing(size: int, at_most: int) -> int:
    """The largest power of two up to ``at_most`` that divides ``size``."""
    return min(at_most, size & -size)
