"""What breakable graphs cost and what handoffs hide, on a GPU.

Four measurements; every figure is a ratio, or stands beside another of the same run:

- overlap: steps of 8 index groups in pieces, each with a top-k, other work behind it in the segment, and a conversion
  on the side stream, under stream policy ``external`` against ``stream``, without any conversion, and as one full
  graph. What a conversion costs is what it adds under ``stream``, its launches included; of that, as much can be hidden
  as there is work behind the top-k;
- breaks: what an eager break adds to a step, in wall time while the GPU is the bottleneck, and in host time;
- capture: time and memory of 35 sizes of a model of real shapes with dummy weights;
- decode: a step of that model in each graph mode.

    python benchmarks/streams_gpu.py --json benchmarks/results/streams-h200-DATE.json
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from sidestream import __version__
from sidestream.attention.index_group import SparseMLAIndexGroup
from sidestream.config.engine import EngineConfig
from sidestream.core.batch import Chunk
from sidestream.core.eager_break import eager_break_during_capture
from sidestream.core.step_inputs import StepInputs
from sidestream.engine.build import BuiltEngine, build_engine, in_graph_mode, wire_runner
from sidestream.engine.doctor.break_cost import gpu_bound, host_bound
from sidestream.engine.doctor.report import DeviceChoice
from sidestream.engine.doctor.target import choose_target
from sidestream.graphs.breakable import BreakableCUDAGraphCapture
from sidestream.graphs.dispatch import StepPlan
from sidestream.streams import Policy, Streams
from sidestream.streams.cuda import CudaBackend

SLICE_A = Path(__file__).parent / "configs" / "glm5-next-slice-a.json"
GROUPS = 8
TOPK_US = 10.0
CONVERSIONS_US = (10.0, 50.0, 200.0)
BEHIND_US = (50.0, 100.0, 200.0)
STEPS, ROUNDS = 10, 15


def spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def cycles_per_us() -> float:
    """Of the clock that ``spin`` counts."""
    spin(1_000_000)
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        spin(20_000_000)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 20.0 / statistics.median(times)


def wall_us(step: Callable[[], None]) -> float:
    """Microseconds a step, of steps issued one behind the other."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - started) / STEPS


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
    """One step of ``GROUPS`` index groups: top-k, publish, other work; then resolve and attend."""

    def __init__(self, backend: CudaBackend, policy: Policy, *, topk: int, behind: int, conversion: int | None) -> None:
        self.streams = Streams(backend, policy=policy)
        side = self.streams.new_stream("side")
        self.topk, self.behind, self.converts = topk, behind, conversion is not None
        self.groups = [
            SparseMLAIndexGroup(
                (2 * i, 2 * i + 1),
                streams=self.streams,
                side=side,
                width=64,
                decode_rows=8,
                resolver=SpinningResolver(conversion or 0),
            )
            for i in range(GROUPS)
        ]
        self.seen = torch.zeros(8, 64, dtype=torch.int64, device=backend.device)
        torch.cuda.synchronize()

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
            torch.cuda.synchronize()
            self.begin()
            if full:
                with self.streams.capture("step", closed=True) as graph:
                    self.forward()
                replay: Callable[[], None] = graph.replay
            else:
                with BreakableCUDAGraphCapture(self.streams, "step") as pieces:
                    self.forward()
                replay = pieces.replay

        def step() -> None:
            with self.streams.backend.use(self.streams.compute):
                self.begin()
                replay()

        return step


def overlap(backend: CudaBackend) -> list[dict[str, float]]:
    rate = cycles_per_us()
    rows = []
    for conversion in CONVERSIONS_US:
        for behind in BEHIND_US:
            sizes: dict[str, Any] = {
                "topk": int(TOPK_US * rate),
                "behind": int(behind * rate),
                "conversion": int(conversion * rate),
            }
            steps = {
                "external": GroupSteps(backend, Policy.EXTERNAL, **sizes).captured(full=False),
                "stream": GroupSteps(backend, Policy.STREAM, **sizes).captured(full=False),
                "full": GroupSteps(backend, Policy.EXTERNAL, **sizes).captured(full=True),
                "without": GroupSteps(backend, Policy.EXTERNAL, **(sizes | {"conversion": None})).captured(full=False),
            }
            times: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(ROUNDS):
                for name, step in steps.items():
                    times[name].append(wall_us(step))
            medians = {f"{name}_us": statistics.median(values) for name, values in times.items()}
            hidden = (medians["stream_us"] - medians["external_us"]) / GROUPS
            can = min((medians["stream_us"] - medians["without_us"]) / GROUPS, behind)
            row = {"conversion_us": conversion, "behind_us": behind, **medians}
            rows.append(
                row | {"can_be_hidden_us": can, "hidden_us_a_group": hidden, "of_what_can_be_hidden": hidden / can}
            )
            print(
                f"  conversion {conversion:5.0f} us, behind the top-k {behind:5.0f} us: external "
                f"{medians['external_us']:7.0f}, stream {medians['stream_us']:7.0f}, full {medians['full_us']:7.0f} us "
                f"a step; hidden {hidden:5.1f} us of {can:5.1f} us a group: {100 * hidden / can:5.1f} %",
                flush=True,
            )
    return rows


def breaks() -> dict[str, Any]:
    target = choose_target(DeviceChoice.CUDA)
    rows: dict[str, Any] = {}
    for name, measure in (("gpu_bound", gpu_bound), ("host_bound", host_bound)):
        for handoff in (False, True):
            found = measure(target, handoff=handoff)
            key = f"{name}{'_with_handoff' if handoff else ''}"
            rows[key] = {"us": found.value, "reason": found.reason, **dict(found.detail or {})}
            print(f"  {key:24} {found.value} us a break ({found.reason})", flush=True)
    return rows


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
            weight_bytes=built.ledger.weights,
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
    from dataclasses import replace

    return replace(built.config, cudagraph_mode=mode)


def decode(built: BuiltEngine, batches: Sequence[int], context: int) -> list[dict[str, Any]]:
    """Milliseconds of a decode step, logits included, by graph mode."""
    rows: list[dict[str, Any]] = []
    for mode in ("none", "piecewise", "full"):
        engine = in_graph_mode(built, mode)
        for batch in batches:
            times, hosts = [], []
            for step in range(12):
                start = context + step
                per = -(-(context + 12) // built.config.block_size)
                chunks = [
                    Chunk(str(i), start, 1, tuple(range(1 + i * per, 1 + (i + 1) * per)), i + 1, True, True)
                    for i in range(batch)
                ]
                torch.cuda.synchronize()
                begun = time.perf_counter()
                with engine.runner.on_device():
                    engine.runner.logits(engine.runner.forward(chunks, [7] * batch), range(batch))
                issued = time.perf_counter()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begun)
                hosts.append(issued - begun)
            row = {
                "mode": mode,
                "batch": batch,
                "context": context,
                "ms": 1e3 * statistics.median(times[2:]),
                "host_ms": 1e3 * statistics.median(hosts[2:]),
            }
            rows.append(row)
            print(f"  {mode:10} batch {batch:3}: {row['ms']:7.2f} ms, host {row['host_ms']:6.2f} ms", flush=True)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--only", choices=["overlap", "breaks", "model"])
    args = parser.parse_args()
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
        section("breaks", breaks)
    if args.only in (None, "overlap"):
        section("overlap", lambda: overlap(backend))
    if args.only in (None, "model"):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            built = slice_engine(Path(folder), 64)
            print(f"slice A loaded in {time.perf_counter() - started:.1f} s")
            section("capture", lambda: capture(built))
            gc.collect()
            torch.cuda.empty_cache()
            section("decode", lambda: decode(built, (1, 8, 32), 2048))


if __name__ == "__main__":
    main()
