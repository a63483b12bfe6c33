"""HiSparse under pressure on a GPU: decode with a quarter of the requests' KV on the device, against all of it there.

    PYTHONPATH=. python benchmarks/hisparse_gpu.py --json benchmarks/results/hisparse-h200-DATE.json

Slice A by default, dummy weights, prompts not computed. Random weights select at chance, so each step's selection is
replaced behind the indexer: from one step to the next the stated share of it stays. Everything else is the real path:
residency, copies, attention, in FULL graphs. Floor of the copies: missed rows over the bus at 53 GB/s.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sidestream.config.engine import EngineConfig
from sidestream.engine.bench.latency import Decoding, fill_caches
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.layers import indexer

SLICE_A = Path(__file__).parent / "configs" / "glm5-next-slice-a.json"
SELECTIONS = 160
"""Different ones, in turn."""
BUS_BYTES_PER_S = 53e9


class Replayed:
    """Stands behind ``select_topk_decode`` and replaces what it selected.

    Attributes:
        overlap: of one selection with the last; None leaves the indexer's own.
    """

    def __init__(self, context: int) -> None:
        self.overlap: float | None = None
        self._context = context
        self._real: Callable[..., None] = indexer.select_topk_decode
        self._sets: dict[tuple[int, int], torch.Tensor] = {}
        self._turns: dict[int, torch.Tensor] = {}
        with torch.inference_mode():
            self._on = torch.zeros((), dtype=torch.bool, device="cuda")
        indexer.select_topk_decode = self  # type: ignore[assignment]

    def __call__(self, *args: Any, out: torch.Tensor, topk: int, **named: Any) -> None:
        self._real(*args, out=out, topk=topk, **named)
        rows, width = out.shape
        if (rows, width) not in self._sets:  # in the warm-up of a shape, not in its capture
            self._sets[rows, width] = torch.full((SELECTIONS, rows, width), -1, dtype=torch.int32, device="cuda")
        if out.data_ptr() not in self._turns:
            self._turns[out.data_ptr()] = torch.zeros(1, dtype=torch.int64, device="cuda")
        sets, turn = self._sets[rows, width], self._turns[out.data_ptr()]
        out.copy_(torch.where(self._on & (out[:, :1] >= 0), sets.index_select(0, turn % SELECTIONS)[0], out))
        turn.add_(1)

    @torch.inference_mode()
    def use(self, overlap: float | None) -> None:
        """From the next step on; graphs stay as they are."""
        self.overlap = overlap
        self._on.fill_(overlap is not None)
        if overlap is None:
            return
        for (rows, width), sets in self._sets.items():
            topk = width - width % 64 if width > 64 else width
            order = torch.rand(rows, self._context - 64, device="cuda").argsort(dim=1)
            for i in range(SELECTIONS):
                first = round(i * (1 - overlap) * topk) % order.shape[1]
                chosen = order.roll(-first, dims=1)[:, :topk]
                sets[i, :, :topk] = chosen.sort(dim=1).values.int()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=SLICE_A)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--hot-factor", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--overlaps", type=float, nargs="*", default=[0.8, 0.9, 0.95])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    replayed = Replayed(args.context)
    room = args.steps + 2 * args.batch + 40
    blocks = args.batch * -(-(args.context + room) // 64)
    rows: list[dict[str, Any]] = []
    for name, share, hosted in (("all on the device", 1.0, False), ("no pressure", 1.0, True), ("pressed", 0.25, True)):
        user = EngineConfig(
            device="cuda",
            cudagraph_mode="full",
            dtype="bfloat16",
            kv_cache_dtype=args.kv_cache_dtype,
            load_format="dummy",
            max_num_seqs=args.batch,
            max_num_batched_tokens=8192,
            max_model_len=args.context + room,
            num_blocks=int(blocks * share),
            enable_prefix_caching=False,
            max_capture_tokens=8,
            memory_limit="130GiB",
            hisparse_host_memory="24GiB" if hosted else None,
            hisparse_hot_factor=args.hot_factor,
        )
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(args.config, Path(folder) / "config.json")
            built = build_engine(folder, user)
        fill_caches(built)
        for overlap in [*args.overlaps, None] if name != "no pressure" else args.overlaps[:1]:
            replayed.use(overlap)
            rows.append({"engine": name, "overlap": overlap, **measure(built, args)})
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
        if built.pools.hosted is not None:
            built.pools.hosted.host.close()
        del built
        torch.cuda.empty_cache()
    if args.json:
        found = {"device": torch.cuda.get_device_name(), "config": args.config.name, "batch": args.batch, "rows": rows}
        args.json.write_text(json.dumps(found | {"context": args.context, "hot_factor": args.hot_factor}, indent=1))


def measure(built: BuiltEngine, args: argparse.Namespace) -> dict[str, Any]:
    decoding = Decoding(built, args.batch, args.context, room=args.steps + 2 * args.batch + 40)
    decoding.times(5)
    hisparse = built.runner.hisparse
    before = hisparse.stats() if hisparse is not None else None
    times = sorted(decoding.times(args.steps))
    after = hisparse.stats() if hisparse is not None else None
    decoding.close()
    found: dict[str, Any] = {"ms": statistics.median(times), "p90": times[int(0.9 * len(times))]}
    if before is not None and after is not None:
        steps = args.steps + 5  # those behind which the times begin count too
        missed = (after.missed_rows - before.missed_rows) / steps
        selected = (after.selected_rows - before.selected_rows) / steps
        bytes_a_row = built.pools.groups.kv.bytes_per_block / 64 / len(built.runner.attention.groups)
        found |= {
            "hit_rate": 1 - missed / selected if selected else 1.0,
            "missed_rows_a_step": missed,
            "bus_ms_a_step": 1e3 * missed * bytes_a_row / BUS_BYTES_PER_S,
            "spilled_blocks": after.spilled_blocks,
        }
    return found


if __name__ == "__main__":
    main()
