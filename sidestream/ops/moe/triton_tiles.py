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

from dataclasses import dataclass, replace

import torch


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
    ``pdl``: kernels are launched while those before them still run, and wait there (programmatic dependent launch).
    ``roles``: warps with roles make both products (``triton_expert_roles``), in tiles of their own."""

    rows: int
    gate_up: Tiles
    down: Tiles
    described: bool = False
    pdl: bool = False
    roles: bool = False


@dataclass(frozen=True, slots=True)
class RouterTiles:
    """Router product: a program takes ``rows`` tokens, ``experts`` experts and one of ``splits`` parts of the depth.

    ``dot`` multiplies by ``tl.dot``, which wants 16 rows; otherwise products are summed lane by lane. ``choice_warps``
    compare one token's scores: with ``counted``, each with every other, since a search for the best a place is a chain
    of ``top_k`` searches.
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
    counted: bool = False


ONE_TOKEN = ExpertTiles(1, Tiles(4, 1024, 4, 1), Tiles(4, 2048, 4, 1), pdl=True)
"""A single token needs no tile of rows: products are sums of rows times the token."""

EXPERT_TILES = (
    (6, ExpertTiles(16, Tiles(32, 128, 4, 4), Tiles(64, 128, 4, 4), pdl=True)),
    (12, ExpertTiles(32, Tiles(64, 128, 4, 3), Tiles(128, 128, 4, 3), pdl=True)),
    (24, ExpertTiles(32, Tiles(64, 128, 4, 3), Tiles(128, 128, 4, 3), described=True, pdl=True)),
    (48, ExpertTiles(64, Tiles(64, 64, 4, 4), Tiles(128, 64, 4, 4))),
    (600, ExpertTiles(128, Tiles(128, 64, 8, 4), Tiles(256, 64, 8, 3), described=True)),
)
"""(most rows an expert on average, tiles), in order; swept on an H200 with 64 experts. torch's ``grouped_mm`` takes 1.5
times as long at 512 rows and at 8,192."""
MANY_ROWS = ExpertTiles(128, Tiles(128, 64, 8, 3), Tiles(256, 64, 8, 3))
ROLES = replace(MANY_ROWS, roles=True)
"""In place of ``MANY_ROWS`` on Hopper GPUs, for sizes that they suit. With 64 experts on an H200 they take 8 to 12 %
less at 8,192 tokens (1,024 rows an expert), and 2 to 9 % more than the table's at 4,096 (512). A bound of their own
would make a class of sizes so narrow that no start may meet it, and then compile when a prompt comes."""

ROUTER_TILES = (
    (1, RouterTiles(1, 2, 1024, 4, 4, 1, dot=False, pdl=True)),
    (4, RouterTiles(4, 4, 256, 4, 4, 1, dot=False, pdl=True)),
    (16, RouterTiles(8, 4, 128, 8, 4, 1, dot=False, pdl=True)),
    (64, RouterTiles(64, 16, 64, 32, 4, 3, dot=True, pdl=True)),
    (512, RouterTiles(64, 16, 64, 8, 4, 3, dot=True, pdl=True)),
)
"""(most tokens, tiles), in order; swept on an H200 with 64 and 288 experts of depth 4,096. In fp32, and beyond
``MANY_EXPERTS``, all of them; else those that the next two leave."""
FEW_EXPERTS = 64
"""Places are counted up to here: pairs of scores grow with the square."""
FEW_EXPERTS_TILES = (
    (1, RouterTiles(1, 2, 1024, 4, 4, 1, dot=False, pdl=True, counted=True)),
    (8, RouterTiles(16, 16, 128, 32, 4, 1, dot=True, pdl=True, counted=True)),
    (16, RouterTiles(16, 32, 64, 64, 4, 1, dot=True, pdl=True, counted=True)),
    (64, RouterTiles(64, 16, 128, 32, 4, 1, dot=True, pdl=True, counted=True)),
    (128, RouterTiles(64, 16, 64, 8, 4, 3, dot=True, pdl=True, counted=True)),
)
"""In bf16, up to ``FEW_EXPERTS``; timed with 64 of depth 4,096 at 1, 4, 8, 16, 32, 64 and 128 tokens
(``benchmarks/results/route-h200-2026-12-01-second.json``). With one stage a program's share of such a depth is one
step, whose weights it loads before it waits for tokens; three stages win at 128 tokens, 7.2 us of 10.1."""
MANY_EXPERTS = 512
"""Up to here eight warps keep a token's 64 parts in registers; beyond, they spill."""
MANY_EXPERTS_TILES = (
    *ROUTER_TILES[:2],
    (16, RouterTiles(16, 32, 64, 64, 4, 1, dot=True, choice_warps=8, pdl=True)),
    (128, RouterTiles(64, 16, 128, 32, 4, 1, dot=True, choice_warps=8, pdl=True)),
)
"""In bf16, from there up to ``MANY_EXPERTS``; timed with 288 at the same sizes: 0.65 to 0.88 of ``ROUTER_TILES``' time
from 8 tokens on, 1.3 at 4. Tensor cores take weights as three terms; in fp32 nothing was timed."""
MANY_TOKENS = RouterTiles(128, 64, 64, 4, 8, 3, dot=True, pdl=True)
FP32_DOT_TOKENS = 256
"""Tokens in fp32 beyond which the product is the library's."""


def mean_rows(tokens: int, top_k: int, num_experts: int) -> int:
    """Pairs an expert on average, rounded up."""
    return -(-tokens * top_k // num_experts)


def expert_tiles(tokens: int, top_k: int, num_experts: int) -> ExpertTiles:
    """Depends on sizes alone, never on who chose what."""
    if tokens == 1:
        return ONE_TOKEN
    mean = mean_rows(tokens, top_k, num_experts)
    return next((tiles for most, tiles in EXPERT_TILES if mean <= most), MANY_ROWS)


def router_table(num_experts: int, dtype: torch.dtype) -> tuple[tuple[int, RouterTiles], ...]:
    """(most tokens, tiles), in order, before ``MANY_TOKENS``; the first that holds counts."""
    if dtype is not torch.bfloat16 or num_experts > MANY_EXPERTS:
        return ROUTER_TILES
    first = FEW_EXPERTS_TILES if num_experts <= FEW_EXPERTS else MANY_EXPERTS_TILES
    return first + tuple(row for row in ROUTER_TILES if row[0] > first[-1][0])


def router_tiles(tokens: int, num_experts: int, dtype: torch.dtype) -> RouterTiles | None:
    """None: the library's product is faster."""
    if dtype is not torch.bfloat16 and tokens > FP32_DOT_TOKENS:
        return None
    table = router_table(num_experts, dtype)
    return next((tiles for most, tiles in table if tokens <= most), MANY_TOKENS)


def dividing(size: int, at_most: int) -> int:
    """The largest power of two up to ``at_most`` that divides ``size``."""
    return min(at_most, size & -size)
