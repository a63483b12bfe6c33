"""How Triton attention over pool rows is cut into programs, and its two launches: runs, then their merge.

Predicted for an H200 (132 multiprocessors, 4.28 TB/s, 790 TFLOP/s in bf16), 64 heads, r = 512, 2,048 rows a token: a
token is 2.1 MB in bf16 (0.5 us of the whole device) and 0.27 GFLOP (0.34 us), so both floors are close and the kernel
must overlap gathers with products. One program holds 64 heads: [64, 512] of queries (64 KB), two to four tiles of keys,
and the fp32 result in registers of eight warps (128 a thread), so one program a multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from sidestream.ops.kv_rows.layout import KVRowLayout
from sidestream.ops.sparse_mla.triton_attend import attend, merge
from sidestream.ops.sparse_mla.triton_merge import merge_in_threads

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run on a CPU. numpy has no bf16, so operands of products are made fp32 there."""

_LOG2_E = 1.4426950408889634
_PROGRAMS = 132
"""Programs that run at once: one a multiprocessor of an H100 or H200, two with blocks of 16 heads."""
_START, _MERGE, _MERGE_RUN = 280, 64, 0.5
"""Costs in rows of one program, 28 of which take a microsecond: to start one (queries, first gathers), the merge's
launch, and its traffic a run of 64 heads. Measured: 64 rows take 2.1 us in bf16 and 2.6 in mxfp8, a program 10 more in
each wave, a merge of 128 runs adds 2 to a call of 8 tokens, 3.5 to 32 and 6 to 64."""
_FEW_BLOCKS, _FEW_FP8_BLOCKS = 2, 5
"""Blocks of 64 heads with rows named one by one, below which the plain kernel wins, and of ``fp8_ds_mla``: a program
with roles takes longer to start, and each has one tile only. 14.3 against 15.4 us for 3 tokens of ``mxfp8``, 14.7
against 15.8 in bf16."""
_SHORT_TILES = 2
"""Tiles of 64 rows a run, up to which tiles of 32 win with roles: more of them are under way when a program starts."""
_MERGED = (4, 16, 64, 128)
"""Runs that a merge is compiled for: few, so that steps of any size find theirs compiled."""
_GROUPS = (4, 16, 33)
"""Runs that a thread reads at once, likewise."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Sizes of one launch, named as in ``triton_attend.attend``.

    Attributes:
        pdl: the merge starts while the last runs end or, ``early``, once all have begun, to wait where there is room.
        roles: take ``triton_roles`` for blocks of 64 heads and tiles as ``role_tiles`` has them; ``stages``, ``warps``
            and ``parted`` have no meaning then.
        in_threads: runs are merged by ``triton_merge``, which exchanges nothing between threads.
    """

    splits: int
    block_h: int
    block_n: int
    stages: int
    warps: int
    parted: bool
    pdl: bool = True
    roles: bool = False
    in_threads: bool = False
    early: bool = False


@lru_cache(maxsize=4096)
def splits_for(
    blocks: int, tiles: int, block_n: int, limit: int, *, programs: int = _PROGRAMS, run_cost: float = _MERGE_RUN
) -> int:
    """Runs a token: the cheapest number by whole waves of programs, from shapes alone (the padded row count).

    Args:
        blocks: programs without splitting, tokens times blocks of heads.
        tiles: of ``block_n`` rows, that a token may have at most.
        programs: that run at once.
        run_cost: of one program's result in the merge, in rows.
    """

    def cost(splits: int) -> float:
        waves = -(-blocks * splits // programs)
        runs = waves * (_START + -(-tiles // splits) * block_n)
        return runs + (_MERGE + blocks * splits * run_cost if splits > 1 else 0)

    return min(range(1, max(1, min(limit, tiles)) + 1), key=cost)


@lru_cache(maxsize=4096)
def choose_launch(
    tokens: int, heads: int, places: int, layout: KVRowLayout, limit: int, *, paged: bool = False, in_line: bool = False
) -> Launch:
    """Sizes for ``tokens`` (padded) rows with up to ``places`` pool rows each, named by a block table if ``paged``; at
    most ``limit`` runs a token. ``in_line``: a block's queries may be those of several tokens of one sequence."""
    across = tokens * heads if in_line else heads
    full_blocks = -(-across // 64) * (1 if in_line else tokens)
    few = not paged and full_blocks < (_FEW_FP8_BLOCKS if layout.name == "fp8_ds_mla" else _FEW_BLOCKS)
    one = not paged and full_blocks == 1
    # What unpacks rows does so once for all heads.
    block_h = 16 if one and not (layout.tile and across > 32) else min(64, max(16, triton.next_power_of_2(across)))
    roles = roles_support(layout) and block_h > 16 and not few
    if roles:
        block_h, block_n, stages, warps, parted = 64, 64, 1, 8, False
    elif block_h < 64:
        block_n, stages, warps, parted = 32, 5, 4 if block_h == 16 else 8, False
    elif layout.tile:
        block_n, stages, warps, parted = 64, 3 if layout.rope_dim or one else 5, 8, True
    else:
        block_n, stages, warps, parted = (32, 5, 8, True) if layout.rope_dim else (64, 3, 8, True)
    blocks = -(-across // block_h) * (1 if in_line else tokens)
    programs = 2 * _PROGRAMS if block_h == 16 else _PROGRAMS
    tiles = -(-places // block_n)
    splits = splits_for(blocks, tiles, block_n, limit, programs=programs, run_cost=_MERGE_RUN * block_h / 64)
    short = splits > 1 and -(-tiles // splits) <= _SHORT_TILES
    if roles and not paged and short and 32 in role_tiles(layout):
        block_n = 32
    # Few merges end sooner spread over threads, and more runs than a group take another turn.
    in_threads = tokens * heads > 64 and 1 < splits <= _GROUPS[-1]
    early = roles and not in_threads
    return Launch(splits, block_h, block_n, stages, warps, parted, roles=roles, in_threads=in_threads, early=early)


def supported(q: torch.Tensor, pool: torch.Tensor, layout: KVRowLayout) -> bool:
    """Whether the kernels do this: bf16 queries over bf16 or quantised rows, with sizes that products can take."""
    latent, rope = layout.latent_dim, layout.rope_dim
    sizes = latent >= 16 and latent & (latent - 1) == 0 and latent <= 512
    sizes = sizes and (rope == 0 or (rope in (16, 32, 64) and latent >= rope))
    if not sizes or not pool.is_contiguous() or 0 in q.shape:
        return False
    if INTERPRETED:
        return True
    return q.is_cuda and q.dtype is torch.bfloat16 and layout.dtype in (torch.bfloat16, torch.uint8)


@lru_cache(maxsize=64)
def roles_support(layout: KVRowLayout) -> bool:
    """Whether ``triton_roles`` can run: on a Hopper GPU, with the sizes that it has thread layouts for."""
    if INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    return layout.latent_dim == 512 and layout.rope_dim in (0, 64)


def role_tiles(layout: KVRowLayout) -> tuple[int, ...]:
    """Rows a tile may have with roles: quantised ones, which come by quarters of 16, 64."""
    return (64,) if layout.tile else (64, 32)


def run(
    q: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    *,
    lengths: torch.Tensor,
    block_size: int,
    scale: float,
    layout: KVRowLayout,
    launch: Launch,
    chunk_start: int | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend; the scratch of several runs, [T, splits, H, r] of q's dtype, is made here. Rounding runs to bf16 before
    they are merged adds to the error what rounding the result does, and spares half of the merge's traffic.

    Args:
        rows: [T, W] pool rows, or [T, B] blocks where ``block_size`` is not 0.
        lengths: [T] rows of each token, 0 for none.
        chunk_start: the tokens are a chunk of one sequence from this position on, ``rows`` [1, B] its blocks; each
            sees all rows up to its own, and ``lengths`` is not read.
        into: dense tensors to take as result.
    Returns:
        out [T, H, r] of q's dtype and lse [T, H] fp32.
    """
    tokens, heads, _ = q.shape
    latent, rope, splits = layout.latent_dim, layout.rope_dim, launch.splits
    q = q if q.stride(2) == 1 else q.contiguous()
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    values, scales, ropes = _views(pool, layout)
    out, lse = into or (
        torch.empty(tokens, heads, latent, dtype=q.dtype, device=q.device),
        torch.empty(tokens, heads, dtype=torch.float32, device=q.device),
    )
    assert out.is_contiguous()
    assert lse.is_contiguous()
    parts, part_lse = out, lse
    if splits > 1:
        parts = torch.empty(tokens, splits, heads, latent, dtype=q.dtype, device=q.device)
        part_lse = torch.empty(tokens, splits, heads, dtype=torch.float32, device=q.device)
    pdl = launch.pdl and splits > 1 and not INTERPRETED
    head_blocks, causal = -(-heads // launch.block_h), chunk_start is not None
    grid = (-(-tokens * heads // launch.block_h) if causal else tokens * head_blocks, splits)
    arguments = (q, values, scales, ropes, rows, lengths.contiguous(), parts, part_lse)
    numbers = (q.stride(0), q.stride(1), rows.stride(0), scale * _LOG2_E, heads, head_blocks, block_size, splits)
    chunk = (tokens, chunk_start or 0)
    kinds = {
        "latent": latent,
        "rope": rope,
        "row_elems": values.shape[1],
        "rope_elems": ropes.shape[1],
        "tile": layout.tile,
        "mx": layout.name == "mxfp8",
        "single": splits == 1,
        "paged": block_size > 0,
        "pdl": pdl,
        "early": launch.early and pdl,
    }
    if launch.roles:
        assert roles_support(layout), f"no kernel with roles for {layout}"
        tiles = role_tiles(layout)
        sizes = launch.block_h == 64 and launch.block_n in tiles
        assert sizes, f"with roles {layout.name} has blocks of 64 heads and tiles of {tiles} rows: {launch}"
        from sidestream.ops.sparse_mla import triton_roles  # for Hopper alone

        words = (q, pool.view(torch.int32) if layout.tile else pool, *arguments[2:])
        kinds |= {"causal": causal, "block_n": launch.block_n}
        triton_roles.attend_roles[grid](*words, *numbers, *chunk, **kinds, num_warps=triton_roles.WARPS)
    else:
        attend[grid](
            *arguments,
            *numbers,
            *chunk,
            **kinds,
            causal=causal,
            block_h=launch.block_h,
            block_n=launch.block_n,
            stages=launch.stages,
            parted=launch.parted,
            dtype=tl.float32 if INTERPRETED else tl.bfloat16,
            num_warps=launch.warps,
            num_stages=launch.stages,
        )
    if splits > 1:
        merge_runs(parts, part_lse, out, lse, sparing=block_size > 0, launch=launch, pdl=pdl)
    return out, lse


def merge_runs(
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    sparing: bool,
    launch: Launch,
    pdl: bool,
) -> None:
    """``parts`` [T, splits, H, r] and ``part_lse`` [T, splits, H] into ``out`` and ``lse``, as the kernels say."""
    tokens, splits, heads, latent = parts.shape
    kinds = {"latent": latent, "sparing": sparing, "pdl": pdl}
    together = {"launch_pdl": True} if pdl else {}
    if not launch.in_threads:
        block_s = next(size for size in _MERGED if size >= splits)
        block_r = min(latent, max(64, 4096 // block_s))
        grid = (tokens * heads, latent // block_r)
        sizes = {"block_s": block_s, "block_r": block_r, "num_warps": 4}
        merge[grid](parts, part_lse, out, lse, heads, splits, **sizes, **kinds, **together)
        return
    # A thread has 8 elements of each run.
    few = tokens * heads * latent < 128 * 2048
    block_r = min(latent, 256) if few else latent
    block_h = max(1, (256 if few else 2048) // block_r)
    group = next((size for size in _GROUPS if size >= splits), _GROUPS[-1])
    grid = (-(-tokens * heads // block_h), latent // block_r)
    sizes = {"group": group, "block_h": block_h, "block_r": block_r, "num_warps": max(1, block_h * block_r // 256)}
    merge_in_threads[grid](parts, part_lse, out, lse, tokens, heads, splits, **sizes, **kinds, **together)


def _views(pool: torch.Tensor, layout: KVRowLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One pool as values, scales and rope keys, each [N, elements of a row]."""
    if not layout.tile:
        return pool, pool, pool
    values = pool.view(torch.float8_e4m3fn)
    ropes = pool.view(torch.bfloat16) if layout.rope_dim else pool
    return values, pool if layout.name == "mxfp8" else pool.view(torch.float32), ropes
