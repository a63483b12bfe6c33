"""What the prefix cache saves and costs on a GPU: time to first token, copies of state, throughput with nothing shared.

    PYTHONPATH=. python benchmarks/prefix_gpu.py --json benchmarks/results/prefix-h200-DATE.json

Slice A by default (``benchmarks/configs``), with dummy weights. All times are of ``EngineCore``, text left out.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sidestream.config.engine import EngineConfig
from sidestream.core.batch import SlotCopy
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.core import EngineCore

SLICE_A = Path(__file__).parent / "configs" / "glm5-next-slice-a.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=SLICE_A)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--shared", type=int, default=31744)
    parser.add_argument("--budget", type=int, default=8192, help="tokens a step")
    parser.add_argument("--mode", default="none", help="cudagraph_mode; prefills run without graphs in any")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--crowd", type=int, default=16, help="prompts of the workload with nothing shared")
    parser.add_argument("--crowd-prompt", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    begin = time.perf_counter()
    built = open_engine(args)
    results: dict[str, Any] = {
        "config": args.config.name,
        "torch": torch.__version__,
        "prompt": args.prompt,
        "shared": args.shared,
        "tokens_a_step": args.budget,
        "snapshots": built.num_snapshots,
        "snapshot_bytes": built.pools.groups.bytes_per_slot,
    }
    print(f"built in {time.perf_counter() - begin:.1f} s: {results}", flush=True)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "first_token_s": lambda: first_tokens(built, args),
        "copies": lambda: copies(built),
        "first_token_s_every_2048": lambda: first_tokens(with_interval(built, 2048), args),
        "nothing_shared_s": lambda: nothing_shared(built, args),
    }
    for name, measure in parts.items():  # each is shown and kept at once
        results[name] = measure()
        print(f"{time.perf_counter() - begin:.1f} s {name}: {json.dumps(results[name])}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")


def open_engine(args: argparse.Namespace) -> BuiltEngine:
    longest = args.prompt + 64
    config = EngineConfig(
        device=args.device,
        load_format="dummy",
        cudagraph_mode=args.mode,
        max_num_seqs=args.crowd,
        max_num_batched_tokens=args.budget,
        max_model_len=longest,
        num_blocks=(4 * longest + args.crowd * (args.crowd_prompt + 128)) // 64,
        memory_limit="8GiB" if args.device == "cpu" else "60GiB",
        num_prefix_snapshots=48,
    )
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(args.config, Path(folder) / "config.json")
        return build_engine(folder, config)


def with_interval(built: BuiltEngine, tokens: int) -> BuiltEngine:
    """The same engine with a snapshot every so many tokens."""
    return replace(built, config=replace(built.config, snapshot_interval=max(tokens // built.config.block_size, 1)))


def first_tokens(built: BuiltEngine, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token: of a prompt that shares nothing, of the first that shares, of those after it."""
    rng = random.Random(7)
    core = EngineCore(built)
    times: dict[str, list[float]] = {"nothing shared": [], "first to share": [], "later": []}
    cached: dict[str, int] = {}
    for turn in range(args.repeats + 1):
        stem = draw(rng, args.shared)
        for kind in ("nothing shared", "first to share", "later", "later"):
            prompt = stem + draw(rng, args.prompt - args.shared)
            took, tokens = serve(core, f"{turn} {kind} {len(times[kind])}", prompt)
            cached[kind] = tokens
            if turn:  # the first turn compiles
                times[kind].append(took)
    median = {kind: statistics.median(values) for kind, values in times.items()}
    stats = core.scheduler.prefix_stats
    return {
        "median": median,
        "cached_tokens": cached,
        "shorter": {kind: median["nothing shared"] / value for kind, value in median.items()},
        "all": times,
        "snapshots_taken": stats.snapshots_taken,
        "snapshots_restored": stats.snapshots_restored,
    }


def nothing_shared(built: BuiltEngine, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds for a crowd of prompts that share nothing, 16 tokens each, with the cache and without; in turns."""
    rng = random.Random(8)
    off = replace(built, config=replace(built.config, prefix_caching=False))
    times: dict[str, list[float]] = {"on": [], "off": []}
    for turn in range(args.repeats + 1):
        for name, engine in (("on", built), ("off", off)):
            core = EngineCore(engine)
            begin = time.perf_counter()
            for i in range(2 * args.crowd):
                core.add(make_request(str(i), draw(rng, args.crowd_prompt), max_tokens=16))
            while core.has_work():
                core.step()
            built.runner.settle()
            if turn:
                times[name].append(time.perf_counter() - begin)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {"median": median, "on over off": median["on"] / median["off"], "all": times}


def copies(built: BuiltEngine) -> dict[str, float]:
    """Copies of state, one slot and eight slots a call: microseconds on the device, and bytes read and written."""
    if built.config.device != "cuda" or built.num_snapshots < 16:
        return {}
    found: dict[str, float] = {}
    first = built.num_slots
    with built.runner.on_device():
        for count in (1, 8):
            pairs = [SlotCopy(first + i, first + count + i) for i in range(count)]
            for _ in range(3):
                built.pools.copy_slots(pairs)
            built.runner.settle()
            begin = time.perf_counter()
            for _ in range(20):
                built.pools.copy_slots(pairs)
            launched = time.perf_counter()
            built.runner.settle()
            seconds = (time.perf_counter() - begin) / 20
            found[f"{count} slots, us"] = seconds * 1e6
            found[f"{count} slots, us to launch"] = (launched - begin) / 20 * 1e6
            found[f"{count} slots, GB/s read and written"] = (
                2 * count * built.pools.groups.bytes_per_slot / seconds / 1e9
            )
    return found


def serve(core: EngineCore, name: str, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token of a request alone, and what it took over."""
    core.add(make_request(name, prompt, max_tokens=2))
    begin, took, cached = time.perf_counter(), 0.0, 0
    while core.has_work():
        for output in core.step():
            if output.cache_reason is not None:
                took, cached = time.perf_counter() - begin, output.cached_tokens
    return took, cached


def make_request(name: str, prompt: Sequence[int], *, max_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0)
    return Request(name, tuple(prompt), params, 0, max_tokens, frozenset(), ())


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(5, 140) for _ in range(count)]


if __name__ == "__main__":
    main()
