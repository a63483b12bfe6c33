"""Inter-token latency and prefill of the whole engine on a GPU, for a model of real shapes with dummy weights.

What ``sidestream bench latency`` measures, without the packages of a command line, for the cases that DESIGN names.
vLLM's figures for slice A were measured on the same kind of GPU. The file is written after the start and again after
each case, so that a run which is cut off leaves what it had; a case that fails is named in it, and the others run.

    PYTHONPATH=. python benchmarks/decode_gpu.py --json benchmarks/results/decode-h200-DATE.json
    PYTHONPATH=. python benchmarks/decode_gpu.py --config sidestream/assets/configs/kimi-linear-48b.json --case 1 8192
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.power import described, watched
from sidestream.config.engine import EngineConfig
from sidestream.config.model import ModelConfig
from sidestream.config.resolved import resolve
from sidestream.engine import compilations
from sidestream.engine.bench.latency import Decoding, prefill_times
from sidestream.engine.bench.run import LatencySettings, measure, open_engine
from sidestream.engine.build import BuiltEngine
from sidestream.errors import SidestreamError

SLICE_A = Path(__file__).parent / "configs" / "glm5-next-slice-a.json"
CASES = {(1, 2048): 2.61, (1, 32768): 2.77, (8, 8192): 4.86, (32, 8192): 7.01, (64, 8192): 8.03}
"""(batch, context) -> milliseconds that vLLM 0.33.0 takes for slice A."""


def arguments_of(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Everything that can be wrong with them is said before an engine is built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=SLICE_A)
    parser.add_argument("--case", type=int, nargs=2, action="append", default=[], metavar=("BATCH", "CONTEXT"))
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try the script")
    parser.add_argument("--mode", default="full")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--memory-limit", default="120GiB")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-capture-tokens", type=int, default=640)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="write a table of GPU kernels of a few steps of each case")
    parser.add_argument(
        "--mark-steps",
        type=int,
        default=0,
        metavar="N",
        help="time nothing: mark N steps of each case for a profiler that waits for cudaProfilerStart",
    )
    args = parser.parse_args(given)
    if not args.case and not args.prefill:
        args.case = [list(case) for case in CASES]
    if not args.config.is_file():
        parser.error(f"--config: there is no file {args.config}")
    for name, path in (("--json", args.json), ("--profile", args.profile)):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{name}: there is no folder {path.parent}")
    try:
        settings_of(args)
        resolve(engine_of(args), ModelConfig.from_hf(args.config), cuda_available=True, device_memory=141 << 30)
    except SidestreamError as error:
        parser.error(str(error))
    return args


def settings_of(args: argparse.Namespace) -> LatencySettings:
    """What is measured."""
    return LatencySettings(
        cases=tuple((batch, context) for batch, context in args.case),
        prefills=tuple(args.prefill),
        steps=args.steps,
        repeats=args.repeats,
    )


def engine_of(args: argparse.Namespace) -> EngineConfig:
    """The engine, but for what follows from what is measured."""
    return EngineConfig(
        device=args.device,
        cudagraph_mode=args.mode,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_capture_tokens=args.max_capture_tokens,
        memory_limit=args.memory_limit,
    )


def main() -> int:
    args = arguments_of()
    settings = settings_of(args)
    compilations.watch()
    built = open_engine(args.config, engine_of(args), settings)
    made, read = compilations.compiled(), compilations.read_back()
    print(f"ready after {sum(built.startup.values()):.1f} s: {phases(built)}")
    print(f"{len(made)} kernels compiled in {sum(made.values()):.1f} s, {read} read from Triton's cache")
    print(built.ledger, flush=True)
    results: dict[str, Any] = {
        "config": args.config.name,
        "command": " ".join(["python", *sys.argv]),
        "commit": args.commit,
        "startup_s": dict(built.startup),
        "ledger": built.ledger_now().as_json(),
        "kernels": {"compiled_s": made, "read": read},
        "decode": [],
        "prefill": [],
        "failed": [],
    }

    def write() -> None:
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")

    write()
    if args.mark_steps:
        for batch, context in settings.cases:
            mark(built, batch, context, args.mark_steps)
        return 0
    for each in one_by_one(settings):
        try:
            with watched() as power:
                report = measure(
                    built,
                    each,
                    model=args.config.name,
                    command=["python", *sys.argv],
                    on_row=lambda row: print(row, flush=True),
                )
        except (RuntimeError, ValueError, SidestreamError) as error:  # out of memory, for one
            traceback.print_exc()
            results["failed"].append({"cases": each.cases, "prefills": each.prefills, "error": repr(error)})
        else:
            print(f"    {described(power)}", flush=True)
            add(results, report.as_json(), power, slice_a=args.config == SLICE_A)
        write()
    print(f"{len(built.compiled_after_ready())} kernels compiled after ready")
    for batch, context in settings.cases if args.profile else ():
        profile(built, batch, context, args.profile.with_suffix(f".{batch}x{context}.txt"))
    for tokens in settings.prefills if args.profile else ():
        profile_prefill(built, tokens, args.profile.with_suffix(f".prefill{tokens}.txt"))
    return int(bool(results["failed"]))


def one_by_one(settings: LatencySettings) -> list[LatencySettings]:
    """Each case and each prompt on its own."""
    cases = [replace(settings, cases=(case,), prefills=()) for case in settings.cases]
    return cases + [replace(settings, cases=(), prefills=(tokens,)) for tokens in settings.prefills]


def add(results: dict[str, Any], found: dict[str, Any], power: dict[str, Any], *, slice_a: bool) -> None:
    """Join what one case gave, and ``power`` drew meanwhile, to what those before it gave; everything but the rows is
    as of the last."""
    for row in (*found["decode"], *found["prefill"]):
        row["power"] = power
    decode, prefill = [*results["decode"], *found["decode"]], [*results["prefill"], *found["prefill"]]
    for row in decode if slice_a else ():
        row["vllm_ms"] = CASES.get((row["batch"], row["context"]))
    results |= {**found, "commit": results["commit"], "decode": decode, "prefill": prefill}


def phases(built: BuiltEngine) -> str:
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in built.startup.items())


def profile(built: BuiltEngine, batch: int, context: int, path: Path) -> None:
    """Kernels of ten steps, by time."""
    decoding = Decoding(built, batch, context, room=40)
    decoding.times(5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(10):
            decoding.core.step()
        torch.cuda.synchronize()
    decoding.close()
    path.write_text(table(recorded))


def profile_prefill(built: BuiltEngine, tokens: int, path: Path) -> None:
    """Kernels of three prompts, by time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        prefill_times(built, tokens, repeats=2)
        torch.cuda.synchronize()
    path.write_text(table(recorded))


def table(recorded: torch.profiler.profile) -> str:
    return recorded.key_averages().table(sort_by="cuda_time_total", row_limit=60, max_name_column_width=90)


def mark(built: BuiltEngine, batch: int, context: int, steps: int) -> None:
    """Run some steps between a profiler's marks, and those before them outside."""
    decoding = Decoding(built, batch, context, room=steps + 2 * batch + 40)
    decoding.times(5)
    torch.cuda.profiler.start()
    for _ in range(steps):
        decoding.core.step()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    decoding.close()
    print(f"marked {steps} steps of batch {batch} at {context}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
