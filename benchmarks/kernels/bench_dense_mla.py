"""Dense MLA decode (Kimi-Linear: 32 heads, bf16 rows of 512 + 64) and KV row writes on a GPU, against their floors.

    PYTHONPATH=. python benchmarks/kernels/bench_dense_mla.py OUT.json

Each variant is compared with fp32 torch on ragged contexts first. Times are medians of replays of a graph whose calls
rotate over row sets; contexts share one pool, which is larger than the L2 cache.

Predicted: a context of 8,192 tokens is 9.4 MB, 2.2 us of the device, and products of 32 heads padded to 64 take 1.4 us
at the full rate, so gathers bound it: 1.1 x the floor at batch 128, 17 us at batch 1 (start, 2 tiles, merge). A chunk's
blocks are full (two tokens of 32 heads), so it takes what a tile takes, 1.4 us, for every 64 rows of 64 queries: 65 %
of the rate of products. Writing 128 rows: one launch, 3 us.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.results import keep, only_file
from sidestream.core.segment import Segment
from sidestream.ops.dense_mla import decode, triton_mixed
from sidestream.ops.dense_mla.triton_decode import MAX_SPLITS, dense_mla_decode
from sidestream.ops.kv_rows import kv_row_layout, pack_rows, write_rows
from sidestream.ops.sparse_mla.triton_launch import Launch, choose_launch

BYTES_PER_S, FLOPS_PER_S = 4.28e12, 790e12
HEADS, LATENT, ROPE, BLOCK, SCALE = 32, 512, 64, 64, 192**-0.5
LAYOUT = kv_row_layout("bf16", latent_dim=LATENT, rope_dim=ROPE, model_dtype=torch.bfloat16)
SHAPES = ((1, 8192), (1, 131_072), (8, 8192), (32, 8192), (64, 8192), (128, 8192))
POOL_BLOCKS = 16_385
CHUNKS = ((8192, 0), (2048, 30_720), (64, 8128), (16, 131_056))
"""Tokens and the position they start at."""


def call(step: dict[str, torch.Tensor], launch: Launch | None) -> tuple[torch.Tensor, torch.Tensor]:
    return dense_mla_decode(
        step["q"],
        step["pool"],
        block_table=step["block_table"],
        context_lens=step["context_lens"],
        block_size=BLOCK,
        scale=SCALE,
        layout=LAYOUT,
        launch=launch,
    )


def make_step(pool: torch.Tensor, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Contexts on random blocks, shared between sequences where the pool is too small."""
    columns, rows = -(-max(lengths) // BLOCK), len(lengths)
    table = torch.randint(1, pool.shape[0] // BLOCK, (rows, columns), device="cuda")
    q = torch.randn(rows, HEADS, LATENT + ROPE, device="cuda").bfloat16()
    return {"q": q, "pool": pool, "block_table": table, "context_lens": torch.tensor(lengths, device="cuda")}


def check(launch: Launch) -> tuple[Launch, float, str]:
    """Relative error on ragged contexts; compiles the variant."""
    try:
        torch.manual_seed(1)
        pool = torch.randn(200 * BLOCK, LATENT + ROPE, device="cuda").bfloat16()
        step = make_step(pool, [5000, 0, 1, 64, 700])
        out, _ = call(step, launch)
        want, _ = decode.dense_mla_decode(
            step["q"].float(),
            pool,
            block_table=step["block_table"],
            context_lens=step["context_lens"],
            block_size=BLOCK,
            scale=SCALE,
            layout=LAYOUT,
        )
        worst = (out.float() - want).norm(dim=2) / want.norm(dim=2).clamp_min(1e-30)
        return launch, worst.max().item() if out.isfinite().all() else float("nan"), ""
    except Exception as failure:  # noqa: BLE001  a variant that does not fit or compile is a result
        return launch, float("nan"), f"{type(failure).__name__}: {str(failure)[:150]}"


def time_us(run: Callable[[int], Any], calls: int = 20) -> float:
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i)
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return sorted(times)[len(times) // 2]


def variants(rows: int, context: int) -> list[Launch]:
    """The table's choice, fewer runs, and blocks of 32 heads."""
    chosen = choose_launch(rows, HEADS, context, LAYOUT, MAX_SPLITS, paged=True)
    found = [chosen, Launch(chosen.splits, 32, 64, 3, 8, False)]
    if chosen.splits > 1:
        found.append(replace(chosen, splits=-(-chosen.splits // 2)))
        found.append(replace(chosen, in_threads=not chosen.in_threads))
    if chosen.roles:
        found += [replace(one, block_n=32) for one in found if one.roles]
    return list(dict.fromkeys(found))


def time_chunks(pool: torch.Tensor) -> list[dict[str, Any]]:
    """Chunks of one sequence: microseconds of each way to launch, the table's choice first."""
    results = []
    for tokens, start in CHUNKS:
        blocks = -(-(start + tokens) // BLOCK)
        table = torch.randperm(pool.shape[0] // BLOCK - 1, device="cuda")[None, :blocks] + 1
        q = torch.randn(tokens, HEADS, LATENT + ROPE, device="cuda").bfloat16()
        pairs = tokens * start + tokens * (tokens + 1) / 2
        floor = 2 * pairs * HEADS * (2 * LATENT + ROPE) / FLOPS_PER_S * 1e6
        chosen = choose_launch(tokens, HEADS, blocks * BLOCK, LAYOUT, MAX_SPLITS, paged=True, in_line=True)
        for launch in dict.fromkeys([chosen, replace(chosen, splits=1), replace(chosen, splits=2 * chosen.splits)]):

            def run(i: int, q: Any = q, table: Any = table, start: Any = start, launch: Any = launch) -> None:
                segments = [Segment(0, q.shape[0], 0, start)]
                triton_mixed.dense_mla(
                    q,
                    pool,
                    block_table=table,
                    segments=segments,
                    num_decode=0,
                    block_size=BLOCK,
                    scale=SCALE,
                    layout=LAYOUT,
                    launch=launch,
                )

            us = time_us(run, calls=3)
            sizes = f"splits={launch.splits} roles={launch.roles}"
            print(
                f"chunk of {tokens} from {start}: {us:.1f} us, floor {floor:.1f} ({floor / us:.2f}), {sizes}",
                flush=True,
            )
            results.append({"tokens": tokens, "start": start, "us": us, "floor": floor, **asdict(launch)})
    return results


def time_writes() -> list[dict[str, Any]]:
    results = []
    for name, rope in (("bf16", ROPE), ("bf16", 0), ("fp8_ds_mla", ROPE), ("mxfp8", 0)):
        layout = kv_row_layout(name, latent_dim=LATENT, rope_dim=rope, model_dtype=torch.bfloat16)
        for tokens in (1, 128, 8192):
            pool = torch.zeros(200_000, layout.row_elems, dtype=layout.dtype, device="cuda")
            rows = [torch.randperm(200_000, device="cuda")[:tokens] for _ in range(4)]
            latent = torch.randn(tokens, LATENT, device="cuda").bfloat16()
            keys = torch.randn(tokens, rope, device="cuda").bfloat16() if rope else None
            write_rows(pool, rows[0], latent, rope=keys, layout=layout)
            right = torch.equal(
                pool[rows[0]].cpu().view(torch.uint8),
                pack_rows(latent.cpu(), None if keys is None else keys.cpu(), layout).view(torch.uint8),
            )

            def run(
                i: int, pool: Any = pool, rows: Any = rows, latent: Any = latent, keys: Any = keys, layout: Any = layout
            ) -> None:
                write_rows(pool, rows[i % 4], latent, rope=keys, layout=layout)

            us = time_us(run)
            floor = tokens * (2 * (LATENT + rope) + layout.row_bytes) / BYTES_PER_S * 1e6
            print(f"write_rows {name} p={rope} T={tokens}: {us:.2f} us, floor {floor:.2f}, bytes right: {right}")
            results.append({"layout": name, "rope": rope, "tokens": tokens, "us": us, "floor": floor, "right": right})
    return results


def main(path: Path) -> None:
    began = time.time()
    plan = {shape: variants(*shape) for shape in SHAPES}
    jobs = {(launch.splits > 1, replace(launch, splits=1)): launch for many in plan.values() for launch in many}
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as workers:
        checked = dict(zip(jobs, workers.map(check, jobs.values()), strict=True))
    wrong = {key for key, (_, error, _) in checked.items() if not error <= 2**-6}
    for key in wrong:
        print(f"WRONG {checked[key]}")
    print(f"checked {len(jobs)} variants in {time.time() - began:.0f} s, {len(wrong)} wrong")
    pool = torch.randn(POOL_BLOCKS * BLOCK, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
    times: list[dict[str, Any]] = []
    for (rows, context), launches in plan.items():
        steps = [make_step(pool, [context] * rows) for _ in range(20 if rows * context < 100_000 else 2)]
        timed = []
        for launch in launches:
            if (launch.splits > 1, replace(launch, splits=1)) not in wrong:

                def run(i: int, steps: Any = steps, launch: Any = launch) -> None:
                    call(steps[i % len(steps)], launch)

                timed.append((time_us(run), launch))
        moved = rows * context * LAYOUT.row_bytes / BYTES_PER_S
        done = 2 * rows * context * HEADS * (2 * LATENT + ROPE) / FLOPS_PER_S
        floor = max(moved, done) * 1e6
        default = next((us for us, one in timed if one == launches[0]), float("nan"))
        print(f"dense rows={rows} context={context}: floor {floor:.1f}, default {default:.1f} us", flush=True)
        for us, one in sorted(timed, key=lambda pair: pair[0])[:4]:
            print(
                f"    {us:8.1f} us  splits={one.splits} h={one.block_h} n={one.block_n} stages={one.stages} "
                f"warps={one.warps} parted={one.parted} roles={one.roles} in_threads={one.in_threads}"
            )
        times += [{"rows": rows, "context": context, "floor": floor, "us": us, **asdict(one)} for us, one in timed]
        keep(path, {"dense": times})
    found: dict[str, Any] = {"dense": times, "chunks": time_chunks(pool)}
    keep(path, found)
    keep(path, found | {"writes": time_writes()})
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main(only_file(__doc__))
