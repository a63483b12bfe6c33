"""What the prefix cache saves and costs on a GPU: time to first token, snapshots of state, what unshared prompts pay.

    PYTHONPATH=. python benchmarks/prefix_gpu.py --json benchmarks/results/prefix-h200-DATE.json
    PYTHONPATH=. python benchmarks/prefix_gpu.py --case alone --case copies
    PYTHONPATH=. python benchmarks/prefix_gpu.py --device cpu --config sidestream/assets/glm5-next-tiny/config.json \
        --prompt 1024 --shared 960 --budget 256 --crowd 4 --crowd-prompt 200

Slice A by default (``benchmarks/configs``), with dummy weights. All times are of ``EngineCore``, text left out. Cases
run in order of importance, and the file is written anew after each request or turn, so that a run may be cut off at any
time; a turn that would probably end behind ``--seconds`` is not begun. What is not measured is not compiled: the start
leaves out the steps that compile every kernel ahead, and the first turn of each case, which is listed apart, compiles.
On a CPU seconds are those of the processor, which others on the machine do not lengthen.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sidestream.config.engine import EngineConfig
from sidestream.core.batch import SlotCopy
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine import build
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.core import EngineCore

SLICE_A = Path(__file__).parent / "configs" / "glm5-next-slice-a.json"
SHORTER_BAR = 10.0
NOTHING_SHARED_BAR = 1.01
INTERVAL_TOKENS = 2048
PROFILED = 6
"""Turns of each kind."""
PHASES = ("to add", "to begin the model", "to launch", "to the first token")
"""From a request's arrival."""


class Run:
    """The results so far and the time that is left.

    Args:
        seconds: from the start of the process.
    """

    def __init__(self, path: Path | None, seconds: float) -> None:
        self.results: dict[str, Any] = {}
        self._path = path
        self._end = seconds
        self._begin = time.perf_counter() - time.process_time()  # imports, which are the process's own time, included

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def write(self) -> None:
        """As it stands, in one piece: a reader never sees half a file."""
        self.results["elapsed_s"] = round(self.elapsed, 1)
        if self._path is not None:
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self.results, indent=1) + "\n")
            os.replace(part, self._path)

    def turns(self, case: dict[str, Any], count: int) -> Iterator[int]:
        """0, which compiles, up to ``count``; fewer if the time is up, which ``case`` then says."""
        longest = 0.0
        for turn in range(count + 1):
            if turn > 1 and self.elapsed + longest > self._end:
                case["cut off behind turn"] = turn - 1
                return
            begin = self.elapsed
            yield turn
            longest = self.elapsed - begin if turn else 0.0
            case.setdefault("seconds a turn", []).append(round(self.elapsed - begin, 2))
            self.write()

    def has_time(self) -> bool:
        return self.elapsed < self._end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=SLICE_A, help="of the model, as JSON (default: slice A)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--case", action="append", choices=list(CASES), help="may be given more than once; all without")
    parser.add_argument("--prompt", type=int, default=32768, help="tokens (default: 32768)")
    parser.add_argument("--shared", type=int, default=31744, help="of them, from the front (default: 31744)")
    parser.add_argument("--budget", type=int, default=8192, help="tokens a step (default: 8192)")
    parser.add_argument("--mode", default="none", help="cudagraph_mode; long prefills run without graphs in any")
    parser.add_argument("--repeats", type=int, default=5, help="turns behind the first one (default: 5)")
    parser.add_argument("--crowd", type=int, default=16, help="prompts at a time with nothing shared (default: 16)")
    parser.add_argument("--crowd-prompt", type=int, default=2000, help="tokens of each (default: 2000)")
    parser.add_argument("--seconds", type=float, default=100.0, help="no turn is begun that would end later")
    parser.add_argument("--full-start", action="store_true", help="compile everything ahead, as a server does")
    parser.add_argument("--json", type=Path, help="where results go")
    args = parser.parse_args()
    check(parser, args)
    run = Run(args.json, args.seconds)
    run.results |= {
        "command": " ".join(sys.argv),
        "config": args.config.name,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or args.device,
        "torch": torch.__version__,
        "prompt": args.prompt,
        "shared": args.shared,
        "tokens_a_step": args.budget,
        "mode": args.mode,
        "clock": clock_of(args.device).__name__,
    }
    run.write()
    begin = run.elapsed
    built = open_engine(args)
    run.results |= {
        "imports_s": round(begin, 1),
        "built_s": round(run.elapsed - begin, 1),
        "snapshots": built.num_snapshots,
        "snapshot_bytes": built.pools.groups.bytes_per_slot,
    }
    run.write()
    print(json.dumps(run.results), flush=True)
    for name in args.case or CASES:
        if not run.has_time():
            run.results[name] = "not begun: the time was up"
            continue
        case: dict[str, Any] = {}
        run.results[name] = case
        CASES[name](run, built, args, case)
        run.write()
        print(f"{run.elapsed:.1f} s {name}: {json.dumps(case)}", flush=True)
    run.write()


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Complain before anything is loaded."""
    if not args.config.is_file():
        parser.error(f"--config {args.config} is no file")
    if not 0 < args.shared < args.prompt:
        parser.error(f"--shared is {args.shared}; it must be above 0 and below --prompt {args.prompt}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, and torch sees no GPU; --device cpu runs the same cases, slowly")
    if min(args.repeats, args.crowd, args.crowd_prompt, args.budget) < 1:
        parser.error("--repeats, --crowd, --crowd-prompt and --budget must be at least 1")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")


def open_engine(args: argparse.Namespace) -> BuiltEngine:
    longest = max(args.prompt, args.crowd_prompt) + 64
    config = EngineConfig(
        device=args.device,
        load_format="dummy",
        cudagraph_mode=args.mode,
        max_num_seqs=args.crowd,
        max_num_batched_tokens=max(args.budget, args.crowd),
        max_model_len=longest,
        num_blocks=-(-(4 * longest + args.crowd * (args.crowd_prompt + 128)) // 64),
        memory_limit="8GiB" if args.device == "cpu" else "60GiB",
        num_prefix_snapshots=48,
    )
    before = build.compile_steps
    if not args.full_start:
        build.compile_steps = lambda config, *, longest: iter(())
    try:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(args.config, Path(folder) / "config.json")
            return build_engine(folder, config)
    finally:
        build.compile_steps = before


def first_token(run: Run, built: BuiltEngine, args: argparse.Namespace, case: dict[str, Any]) -> None:
    """Seconds to the first token: of a prompt that shares nothing, of the first that shares, of one after it."""
    rng, core, vocab = random.Random(7), EngineCore(built), built.config.model.vocab_size
    kinds = ("nothing shared", "first to share", "later")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    case |= {"compiling turn": {}, "all": times, "cached_tokens": {}, "median": {}, "shorter": {}}
    stats = core.scheduler.prefix_stats
    for turn in run.turns(case, args.repeats):
        stem = draw(rng, args.shared, vocab)
        taken = stats.snapshots_taken
        for kind in kinds:
            prompt = stem + draw(rng, args.prompt - args.shared, vocab)
            served = serve(core, f"{turn} {kind}", prompt, clock_of(args.device))
            took, case["cached_tokens"][kind] = served.seconds, served.cached_tokens
            if not turn:
                case["compiling turn"][kind] = took
                run.write()
                continue
            times[kind].append(took)
            case["median"][kind] = median = statistics.median(times[kind])
            case["shorter"][kind] = statistics.median(times["nothing shared"]) / median
            case |= {"bar, later": SHORTER_BAR, "met": case["shorter"].get("later", 0.0) >= SHORTER_BAR}
            run.write()
        case["snapshots"] = {
            "taken in a turn": stats.snapshots_taken - taken,
            "bytes copied in a turn": (stats.snapshots_taken - taken) * built.pools.groups.bytes_per_slot,
            "restored in all": stats.snapshots_restored,
        }


def every_interval(run: Run, built: BuiltEngine, args: argparse.Namespace, case: dict[str, Any]) -> None:
    """``first_token`` with a snapshot every 2,048 tokens: the first to share takes over as much as the later ones."""
    interval = max(INTERVAL_TOKENS // built.config.block_size, 1)
    first_token(run, replace(built, config=replace(built.config, snapshot_interval=interval)), args, case)


def alone(run: Run, built: BuiltEngine, args: argparse.Namespace, case: dict[str, Any]) -> None:
    """Seconds to the first token of a prompt alone that shares nothing, with the cache and without, in turns."""
    cores = in_turns(built)
    rng, vocab, clock = random.Random(9), built.config.model.vocab_size, clock_of(args.device)
    phases: dict[str, dict[str, list[float]]] = {phase: {name: [] for name in cores} for phase in PHASES}
    model = built.runner._model
    real, begun = model.forward, list[float]()

    def marked() -> torch.Tensor:
        begun.append(clock())
        return real()

    def one(name: str, turn: int) -> float:
        begun.clear()
        served = serve(cores[name], str(turn), draw(rng, args.crowd_prompt, vocab), clock)
        ends = (served.added, begun[0] - served.begin, served.launch, served.seconds)
        for phase, end in zip(PHASES, ends, strict=True):
            phases[phase][name].append(end)
        return served.seconds

    model.forward = marked  # type: ignore[method-assign]
    try:
        compare(run, case, 2 * args.repeats, {name: partial(one, name) for name in cores})
        for phase, ends in phases.items():
            pairs = [(on - off) * 1e6 for on, off in zip(ends["on"][1:], ends["off"][1:], strict=True)]
            found = {name: statistics.median(own[1:]) * 1e6 for name, own in ends.items()}
            case[f"median us {phase}"] = found | {"of pairs, more": statistics.median(pairs)}
        run.write()
        turns = {name: Counter[str]() for name in cores}
        for turn in range(PROFILED):  # in turns, as clocks and temperature drift
            for name in list(cores)[:: 1 if turn % 2 else -1]:
                for kernel, us in operator_times(partial(one, name, turn), args.device).items():
                    turns[name][kernel] += us / PROFILED
    finally:
        model.forward = real  # type: ignore[method-assign]
    case["us of operators a turn"] = {name: sum(found.values()) for name, found in turns.items()}
    more = {name: turns["on"][name] - turns["off"][name] for name in {**turns["on"], **turns["off"]}}
    case["us more, of those that differ most"] = dict(sorted(more.items(), key=lambda item: -abs(item[1]))[:8])


def operator_times(turn: Callable[[], float], device: str) -> dict[str, float]:
    """Microseconds of each kernel in a turn, on a CPU of each operator, by torch's profiler."""
    on_gpu = device == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as recorded:
        turn()
        if on_gpu:
            torch.cuda.synchronize()
    found = recorded.key_averages()
    return {each.key: each.self_device_time_total if on_gpu else each.self_cpu_time_total for each in found}


def nothing_shared(run: Run, built: BuiltEngine, args: argparse.Namespace, case: dict[str, Any]) -> None:
    """Seconds for a crowd of prompts that share nothing, 16 tokens each, with the cache and without, in turns."""
    rng, vocab, clock = random.Random(8), built.config.model.vocab_size, clock_of(args.device)

    def crowd(core: EngineCore) -> float:
        begin = clock()
        for i in range(2 * args.crowd):
            core.add(make_request(str(i), draw(rng, args.crowd_prompt, vocab), max_tokens=16))
        while core.has_work():
            core.step()
        built.runner.settle()
        return clock() - begin

    cores = in_turns(built)
    compare(run, case, args.repeats, {name: lambda turn, core=core: crowd(core) for name, core in cores.items()})


def in_turns(built: BuiltEngine) -> dict[str, EngineCore]:
    """One core with the cache and one without, on the same pools: only one of them has work at a time, and what they
    leave in each other's blocks does not matter where nothing is shared."""
    off = replace(built, config=replace(built.config, prefix_caching=False))
    return {"on": EngineCore(built), "off": EngineCore(off)}


def compare(run: Run, case: dict[str, Any], repeats: int, measured: dict[str, Callable[[int], float]]) -> None:
    """Both in each turn, the one that begins changing; medians, and the ratio of each turn's pair."""
    times: dict[str, list[float]] = {name: [] for name in measured}
    case["all"] = times
    for turn in run.turns(case, repeats):
        for name in list(measured)[:: 1 if turn % 2 else -1]:
            took = measured[name](turn)
            if turn:
                times[name].append(took)
            else:
                case[f"compiling turn, {name}"] = took
        if turn:
            case["median"] = {name: statistics.median(values) for name, values in times.items()}
            ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
            case["on over off"] = statistics.median(ratios)
            case |= {"bar": NOTHING_SHARED_BAR, "met": case["on over off"] <= NOTHING_SHARED_BAR}


def copies(run: Run, built: BuiltEngine, args: argparse.Namespace, case: dict[str, Any]) -> None:
    """Copies of state: a whole slot, and eight of them; on the device, and to launch."""
    pools, first = built.pools, built.num_slots
    if built.num_snapshots < 16 or not pools.recurrent:
        case["not measured"] = f"{built.num_snapshots} snapshots, {len(pools.recurrent)} layers with state"
        return

    def whole(count: int) -> Callable[[], None]:
        pairs = [SlotCopy(first + i, first + count + i) for i in range(count)]
        return lambda: pools.copy_slots(pairs)

    kinds: dict[str, tuple[Callable[[], None], int]] = {
        "1 slot": (whole(1), pools.groups.bytes_per_slot),
        "8 slots": (whole(8), 8 * pools.groups.bytes_per_slot),
    }
    with built.runner.on_device(), torch.inference_mode():
        for name, (copy, size) in kinds.items():
            for _ in range(3):
                copy()
            built.runner.settle()
            begin = time.perf_counter()
            for _ in range(20):
                copy()
            launched = time.perf_counter()
            built.runner.settle()
            seconds = (time.perf_counter() - begin) / 20
            case[name] = {
                "us": seconds * 1e6,
                "us to launch": (launched - begin) / 20 * 1e6,
                "bytes": size,
                "GB/s read and written": 2 * size / seconds / 1e9,
            }
            run.write()


CASES: dict[str, Callable[[Run, BuiltEngine, argparse.Namespace, dict[str, Any]], None]] = {
    "first-token": first_token,
    "copies": copies,
    "alone": alone,
    "nothing-shared": nothing_shared,
    "first-token-every-2048": every_interval,
}


def clock_of(device: str) -> Callable[[], float]:
    return time.process_time if device == "cpu" else time.perf_counter


@dataclass(frozen=True, slots=True)
class Served:
    """Seconds from the arrival of a request alone, at ``begin``, to its first token, until it was added, and until its
    first step was launched (on a CPU: was done)."""

    begin: float
    seconds: float
    added: float
    launch: float
    cached_tokens: int


def serve(core: EngineCore, name: str, prompt: Sequence[int], clock: Callable[[], float]) -> Served:
    begin, took, launch, cached = clock(), 0.0, 0.0, 0
    core.add(make_request(name, prompt, max_tokens=2))
    added = clock() - begin
    while core.has_work():
        outputs = core.step()
        launch = launch or clock() - begin
        for output in outputs:
            if output.cache_reason is not None:
                took, cached = clock() - begin, output.cached_tokens
    assert took > 0.0, f"request {name!r} gave no token"
    return Served(begin, took, added, launch, cached)


def make_request(name: str, prompt: Sequence[int], *, max_tokens: int) -> Request:
    return Request(name, tuple(prompt), SamplingParams(temperature=0.0), 0, max_tokens, frozenset(), ())


def draw(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]


if __name__ == "__main__":
    main()
