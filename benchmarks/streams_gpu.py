"""What breakable graphs cost and what handoffs hide, on a GPU.

Four measurements; every figure is a ratio, or stands beside another of the same run:

- overlap: steps of 8 index groups in pieces, each with a top-k, other work behind it in the segment, and a conversion
  on the side stream, under stream policy ``external`` against ``stream``, without any conversion, and as one full
  graph. What a conversion costs is what it adds under ``stream``, its launches included; of that, as much can be hidden
  as there is work behind the top-k;
- breaks: what an eager break with none, one and two handoffs adds to a step, in wall time while the GPU is the
  bottleneck, and in host time, which is split into the parts of a break;
- capture: time and memory of 35 sizes of a model of real shapes with dummy weights;
- decode: a step of that model in each graph mode.

    PYTHONPATH=. python benchmarks/streams_gpu.py --json benchmarks/results/streams-h200-DATE.json
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.breaks_gpu import breaks
from benchmarks.gpu_steps import STEPS, captured, cycles_per_us, spin, wall_us
from sidestream import __version__
from sidestream.attention.index_group import SparseMLAIndexGroup
from sidestream.config.engine import EngineConfig
from sidestream.core.batch import Chunk
from sidestream.core.eager_break import eager_break_during_capture
from sidestream.core.step_inputs import StepInputs
from sidestream.engine.build import BuiltEngine, build_engine, in_graph_mode, wire_runner
from sidestream.graphs.dispatch import StepPlan
from sidestream.streams import Policy, Stream, Streams
from sidestream.streams.cuda import CudaBackend

SLICE_A = Path(__file__).parent / "configs" / "glm5-next-slice-a.json"
GROUPS = 8
TOPK_US = 10.0
CONVERSIONS_US = (10.0, 50.0, 200.0)
BEHIND_US = (50.0, 100.0, 200.0)
ROUNDS = 12


@dataclass(frozen=True, slots=True)
class SpinningResolver:
    """Takes as long as a conversion would."""

    cycles: int

    def resolve(
        self, logical: torch.Tensor, inputs: StepInputs, *, physical: torch.Tensor, counts: torch.Tensor
    ) -> None:
        if self.cycles:
            spin(self.cycles)
        physical.copy_(logical)


class GroupSteps:
    """One step of ``GROUPS`` index groups: top-k, publish, other work; then resolve and attend.

    Args:
        streams, side: shared by all steps of one policy.
        first_layer: of the first group; no two steps of the same streams share a layer.
        topk, behind: clock cycles; ``conversion`` too, or None for no conversion at all.
    """

    def __init__(
        self,
        streams: Streams,
        side: Stream,
        first_layer: int,
        *,
        topk: int,
        behind: int,
        conversion: int | None,
    ) -> None:
        self.streams = streams
        self.topk, self.behind, self.converts = topk, behind, conversion is not None
        self.groups = [
            SparseMLAIndexGroup(
                (first_layer + 2 * i, first_layer + 2 * i + 1),
                streams=streams,
                side=side,
                width=64,
                decode_rows=8,
                resolver=SpinningResolver(conversion or 0),
            )
            for i in range(GROUPS)
        ]
        self.seen = torch.zeros(8, 64, dtype=torch.int64, device=streams.backend.device)
        streams.backend.synchronize()

    def forward(self) -> None:
        for group in self.groups:
            spin(self.topk)
            group.logical_topk_indices.add_(1)
            group.set_logical_topk_ready()
            spin(self.behind)
            eager_break_during_capture(self.attend)(group)

    def attend(self, group: SparseMLAIndexGroup) -> None:
        if self.converts:
            rows, _ = group.convert_logical_to_physical_topk(cast(StepInputs, None))
            self.seen.copy_(rows)
        else:
            self.seen.copy_(group.logical_topk_indices)

    def begin(self) -> None:
        self.streams.begin_step()
        for group in self.groups:
            group.begin_step(8)

    def captured(self, *, full: bool) -> Callable[[], None]:
        with self.streams.backend.use(self.streams.compute):
            self.begin()
            self.forward()
            self.streams.backend.synchronize()
            self.begin()
            replay = captured(self.streams, self.forward, full=full)

        def step() -> None:
            with self.streams.backend.use(self.streams.compute):
                self.begin()
                replay()

        return step


@torch.inference_mode()
def overlap(backend: CudaBackend) -> list[dict[str, float]]:
    """All cells are captured before the first is measured, and measured in turns, so that none finds colder caches or
    other clocks than the rest."""
    rate = cycles_per_us()
    streams = {policy: Streams(backend, policy=policy) for policy in Policy}
    sides = {policy: of.new_stream("side") for policy, of in streams.items()}
    layers = count(0, 2 * GROUPS)

    def step(policy: Policy, *, behind: float, conversion: float | None, full: bool = False) -> Callable[[], None]:
        cycles = None if conversion is None else int(conversion * rate)
        made = GroupSteps(
            streams[policy],
            sides[policy],
            next(layers),
            topk=int(TOPK_US * rate),
            behind=int(behind * rate),
            conversion=cycles,
        )
        return made.captured(full=full)

    steps: dict[tuple[str, float, float], Callable[[], None]] = {}
    for behind in BEHIND_US:
        steps["without", 0.0, behind] = step(Policy.EXTERNAL, behind=behind, conversion=None)
        for us in CONVERSIONS_US:
            steps["external", us, behind] = step(Policy.EXTERNAL, behind=behind, conversion=us)
            steps["stream", us, behind] = step(Policy.STREAM, behind=behind, conversion=us)
            steps["full", us, behind] = step(Policy.EXTERNAL, behind=behind, conversion=us, full=True)
    times: dict[tuple[str, float, float], list[float]] = {key: [] for key in steps}
    for _ in range(ROUNDS):
        for key, run in steps.items():
            run()  # clocks and caches of this step, not of the one before it
            times[key].append(wall_us(run))
    return [
        _cell(us, behind, {key: statistics.median(taken) for key, taken in times.items()})
        for us in CONVERSIONS_US
        for behind in BEHIND_US
    ]


def _cell(conversion: float, behind: float, medians: dict[tuple[str, float, float], float]) -> dict[str, float]:
    external, stream, full = (medians[name, conversion, behind] for name in ("external", "stream", "full"))
    without = medians["without", 0.0, behind]
    hidden = (stream - external) / GROUPS
    can = min((stream - without) / GROUPS, behind)
    print(
        f"  conversion {conversion:5.0f} us, behind the top-k {behind:5.0f} us: external {external:7.0f}, stream "
        f"{stream:7.0f}, full {full:7.0f} us a step; hidden {hidden:5.1f} us of {can:5.1f} us a group: "
        f"{100 * hidden / can:5.1f} %",
        flush=True,
    )
    return {
        "conversion_us": conversion,
        "behind_us": behind,
        "external_us": external,
        "stream_us": stream,
        "full_us": full,
        "without_us": without,
        "can_be_hidden_us": can,
        "hidden_us_a_group": hidden,
        "of_what_can_be_hidden": hidden / can,
    }


def slice_engine(folder: Path, max_num_seqs: int) -> BuiltEngine:
    shutil.copy(SLICE_A, folder / "config.json")
    return build_engine(
        folder,
        EngineConfig(
            device="cuda",
            cudagraph_mode="none",
            load_format="dummy",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=1024,
            max_capture_tokens=640,
            max_model_len=8192,
            memory_limit="80GiB",
        ),
    )


def capture(built: BuiltEngine) -> dict[str, Any]:
    """Every shape of ``full_and_piecewise``, one by one."""
    gc.collect()
    torch.cuda.empty_cache()
    streams = Streams(built.runner.streams.backend)
    config = in_mode(built, "full_and_piecewise")
    shapes: list[dict[str, Any]] = []
    free = started = 0.0

    def note(plan: StepPlan) -> None:
        nonlocal free, started
        torch.cuda.synchronize()
        now, left = time.perf_counter(), torch.cuda.mem_get_info()[0]
        shapes.append(
            {
                "mode": plan.mode.value,
                "tokens": plan.key.tokens,
                "uniform": plan.key.uniform,
                "seconds": round(now - started, 4),
                "bytes": int(free - left),
            }
        )
        free, started = left, now

    with built.runner.streams.backend.use(streams.compute):
        runner = wire_runner(
            built.model,
            config,
            built.pools,
            streams=streams,
            max_model_len=built.max_model_len,
            weight_bytes=built.weight_bytes,
        )
        torch.cuda.synchronize()
        free, started = torch.cuda.mem_get_info()[0], time.perf_counter()
        runner.capture(on_captured=note)
    assert runner.graphs is not None
    seconds, used = sum(s["seconds"] for s in shapes), sum(s["bytes"] for s in shapes)
    print(
        f"  {len(shapes)} sizes in {seconds:.1f} s, {used / 2**20:.0f} MiB of the driver's memory, first size included"
    )
    print("  " + ", ".join(f"{s['mode'][:1]}{s['tokens']}: {s['seconds']:.2f}s" for s in shapes))
    return {
        "sizes": len(shapes),
        "seconds": seconds,
        "bytes": used,
        "static_buffer_bytes": runner.graphs.runner.buffers.nbytes,
        "shapes": shapes,
    }


def in_mode(built: BuiltEngine, mode: str) -> Any:
    return replace(built.config, cudagraph_mode=mode)


def decode(built: BuiltEngine, batches: Sequence[int], context: int) -> list[dict[str, Any]]:
    """Milliseconds of a decode step, logits included, by graph mode: in a row, each launched while the one before it
    runs, as the engine core does; and alone, from an idle device, which adds the host's time up to the first kernels.
    Sizes up to the largest batch are captured, and of mixed batches one."""
    config = replace(built.config, max_capture_tokens=1, max_num_seqs=max(batches))
    rows: list[dict[str, Any]] = []
    for mode in ("none", "piecewise", "full"):
        engine = in_graph_mode(replace(built, config=config), mode)
        for batch in batches:
            rows.append(_decode_row(engine, mode, batch, context))
            print(f"  {rows[-1]}", flush=True)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    full = {row["batch"]: row for row in rows if row["mode"] == "full"}
    for row in rows:
        for key in ("ms", "alone_ms"):
            row[f"{key}_to_full"] = row[key] / full[row["batch"]][key]
        print(
            f"  {row['mode']:9} batch {row['batch']:2}: in a row {row['ms']:7.3f} ms ({row['ms_to_full']:5.3f} x), "
            f"alone {row['alone_ms']:7.3f} ms ({row['alone_ms_to_full']:5.3f} x full), host {row['host_ms']:6.3f} ms",
            flush=True,
        )
    return rows


def decode_step(engine: BuiltEngine, batch: int, context: int) -> Callable[[], None]:
    """A step of ``batch`` sequences that decode, logits included; launched, not waited for. Their tokens differ, or all
    would choose the same experts."""
    per = -(-(context + 1) // engine.config.block_size)
    blocks = [tuple(range(1 + i * per, 1 + (i + 1) * per)) for i in range(batch)]
    chunks = [Chunk(str(i), context, 1, own, i + 1, True, True) for i, own in enumerate(blocks)]

    def step() -> None:
        with engine.runner.on_device():
            engine.runner.logits(engine.runner.forward(chunks, range(7, 7 + batch)), range(batch))

    return step


def _decode_row(engine: BuiltEngine, mode: str, batch: int, context: int) -> dict[str, Any]:
    step = decode_step(engine, batch, context)
    for _ in range(STEPS):
        step()
    alone, hosts = [], []
    for _ in range(3 * STEPS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
        alone.append(time.perf_counter() - begun)
    return {
        "mode": mode,
        "batch": batch,
        "context": context,
        "ms": 1e-3 * statistics.median(wall_us(step) for _ in range(ROUNDS)),
        "alone_ms": 1e3 * statistics.median(alone),
        "host_ms": 1e3 * statistics.median(hosts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--only", choices=["overlap", "breaks", "model", "decode"])
    args = parser.parse_args()
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    backend = CudaBackend()
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "versions": {"sidestream": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }

    def section(name: str, measured: Callable[[], Any]) -> None:
        print(name, flush=True)
        results[name] = measured()
        if args.json:  # what was measured is kept if a later part fails
            args.json.write_text(json.dumps(results, indent=1) + "\n")

    if args.only in (None, "breaks"):
        section("breaks", lambda: breaks(backend))
    if args.only in (None, "overlap"):
        section("overlap", lambda: overlap(backend))
    if args.only in (None, "model", "decode"):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            built = slice_engine(Path(folder), 64)
            print(f"slice A loaded in {time.perf_counter() - started:.1f} s")
            section("decode", lambda: decode(built, (1, 8, 32), 2048))
            if args.only != "decode":
                section("capture", lambda: capture(built))


if __name__ == "__main__":
    main()
