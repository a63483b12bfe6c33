"""Inter-token latency and prefill of the whole engine on a GPU, for a model of real shapes with dummy weights.

What ``sidestream bench latency`` measures, without the packages of a command line, for the cases that DESIGN names.
vLLM's figures for slice A were measured on the same kind of GPU.

    PYTHONPATH=. python benchmarks/decode_gpu.py --json benchmarks/results/decode-h200-DATE.json
    PYTHONPATH=. python benchmarks/decode_gpu.py --config benchmarks/configs/kimi-linear-48b.json --case 1 8192
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from sidestream.config.engine import EngineConfig
from sidestream.engine.bench.latency import Decoding
from sidestream.engine.bench.run import LatencySettings, measure, open_engine
from sidestream.engine.build import BuiltEngine

SLICE_A = Path(__file__).parent / "configs" / "glm5-next-slice-a.json"
CASES = {(1, 2048): 2.61, (1, 32768): 2.77, (8, 8192): 4.86, (32, 8192): 7.01, (64, 8192): 8.03}
"""(batch, context) -> milliseconds that vLLM 0.33.0 takes for slice A."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=SLICE_A)
    parser.add_argument("--case", type=int, nargs=2, action="append", metavar=("BATCH", "CONTEXT"))
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--mode", default="full")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--memory-limit", default="120GiB")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-capture-tokens", type=int, default=640)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="write a table of GPU kernels of a few steps of each case")
    args = parser.parse_args()
    settings = LatencySettings(
        cases=tuple((batch, context) for batch, context in args.case or CASES),
        prefills=tuple(args.prefill),
        steps=args.steps,
        repeats=args.repeats,
    )
    user = EngineConfig(
        device="cuda",
        cudagraph_mode=args.mode,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_capture_tokens=args.max_capture_tokens,
        memory_limit=args.memory_limit,
    )
    built = open_engine(args.config, user, settings)
    print(f"ready after {sum(built.startup.values()):.1f} s: {phases(built)}")
    print(built.ledger, flush=True)
    command = ["python", *sys.argv]
    report = measure(
        built, settings, model=args.config.name, command=command, on_row=lambda row: print(row, flush=True)
    )
    results = report.as_json() | {"commit": args.commit}
    if args.config == SLICE_A:
        for row in results["decode"]:
            row["vllm_ms"] = CASES.get((row["batch"], row["context"]))
    print(f"{len(results['compiled_after_ready'])} kernels compiled after ready")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    for batch, context in settings.cases if args.profile else ():
        profile(built, batch, context, args.profile.with_suffix(f".{batch}x{context}.txt"))


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
    path.write_text(recorded.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=60))


if __name__ == "__main__":
    main()
