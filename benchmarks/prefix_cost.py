"""What the prefix cache costs the host: hashing, lookup and bookkeeping of one request, at 10,000 cached blocks.

    PYTHONPATH=. python benchmarks/prefix_cost.py --json benchmarks/results/prefix-cost-DATE.json

Everything that the cache does for a request from its arrival to its end, against prompts of several lengths: of which
nothing was cached before, a quarter (shared system prompt and history), or all. The pool is full: each block that is
handed out evicts one. What a pool without a cache takes for the same blocks is measured in turns, and left out.

Microseconds are a fixed part a request and a part a block; the last line of each kind says which, and how long a prompt
may be for 20 microseconds, with hashing (which reads each token once) and without.

With ``--phases TOKENS`` instead: one prompt alone that shares nothing goes through the scheduler, with a full cache and
without, in turns, and its step is laid out. Caches of the processor are emptied before each phase, as a model's step
would.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sidestream.attention.step_inputs import StepInputsBuilder
from sidestream.cache.block_hashes import BlockHashes, chain_root
from sidestream.cache.block_pool import BlockPool
from sidestream.cache.prefix_cache import PrefixCache
from sidestream.cache.prefix_stats import PrefixStats
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.scheduler.config import SchedulerConfig
from sidestream.scheduler.scheduler import Scheduler

BLOCK = 64
BAR_US = 20.0
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 16384)
SHARES = (0.0, 0.25, 1.0)
ROOT = chain_root(b"model", b"")


class Times:
    """Microseconds of each part, one entry a request."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}

    def add(self, part: str, begin: float) -> float:
        now = time.perf_counter()
        self.parts.setdefault(part, []).append((now - begin) * 1e6)
        return time.perf_counter()

    def medians(self) -> dict[str, float]:
        """By part; the tokens are hashed once within the others, as far as others have them by ``open``, then by
        ``publish``."""
        found = {part: statistics.median(values) for part, values in self.parts.items()}
        found["hashed within"] = -found["hash"]
        found["blocks without a cache"] *= -1
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached-blocks", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=300, help="prompts of up to 512 tokens; fewer longer ones")
    parser.add_argument("--phases", type=int, metavar="TOKENS", help="of a step, for one prompt of this length")
    parser.add_argument("--turns", type=int, default=100, help="of --phases")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.phases is not None:
        if args.phases < 1 or args.turns < 1:
            parser.error(f"--phases {args.phases} and --turns {args.turns} must be at least 1")
        phases = measure_phases(args.phases, args.turns)
        print(json.dumps(phases, indent=1))
        if args.json:
            args.json.write_text(json.dumps(phases, indent=1) + "\n")
        return
    print(f"median us a request at {args.cached_blocks} cached blocks of {BLOCK} tokens; hashing is listed apart")
    results: dict[str, object] = {"cached_blocks": args.cached_blocks, "block_size": BLOCK}
    for snapshots in (None, 64):
        for share in SHARES:
            kind = f"{'with snapshots' if snapshots else 'blocks alone'}, {share:.0%} cached"
            points: list[tuple[int, float, float]] = []  # blocks, hashing, all else
            for length in LENGTHS:
                cache, stem = filled(args.cached_blocks, length, snapshots)
                times = serve(cache, stem, length, share, max(args.requests * 512 // max(length, 512), 20))
                rest = sum(us for name, us in times.items() if name != "hash")
                points.append((length // BLOCK, times["hash"], rest))
                parts = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
                print(f"{kind}: {length} tokens: {rest:.1f} + {times['hash']:.1f} ({parts})", flush=True)
            results[kind] = summary(points)
            print(f"{kind}: {json.dumps(results[kind])}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n")


def summary(points: list[tuple[int, float, float]]) -> dict[str, float]:
    """Fixed us and us a block, by the shortest and the last but one of the prompts, and the tokens that fit the bar."""
    first, last = points[0], points[-2]
    found: dict[str, float] = {}
    for name, values in (
        ("bookkeeping", [(p[0], p[2]) for p in (first, last)]),
        ("with hashing", [(p[0], p[1] + p[2]) for p in (first, last)]),
    ):
        (few, low), (many, high) = values
        block = (high - low) / (many - few)
        fixed = low - few * block
        found[f"{name}, us a request"] = round(fixed, 1)
        found[f"{name}, us a block"] = round(block, 2)
        found[f"{name}, tokens in {BAR_US:.0f} us"] = int(max(BAR_US - fixed, 0.0) / block * BLOCK)
    return found


def filled(blocks: int, length: int, snapshots: int | None) -> tuple[PrefixCache, list[int]]:
    """A cache whose pool is full of published blocks, and a prompt of that length that it holds."""
    own = -(-(length + 1) // BLOCK)
    cache = PrefixCache(
        max(blocks, own) + 1,
        BLOCK,
        salt=b"model",
        snapshots=None if snapshots is None else (33, snapshots),
        snapshot_interval=None,
        stats=PrefixStats(),
    )
    rng = random.Random(1)
    while not cache.stats.blocks_evicted:
        run(cache, [rng.randrange(150_000) for _ in range(1024)], Times())
    stem = [rng.randrange(150_000) for _ in range(length)]
    run(cache, stem, Times())
    return cache, stem


def serve(cache: PrefixCache, stem: list[int], length: int, share: float, count: int) -> dict[str, float]:
    """Microseconds a request, by part."""
    rng = random.Random(2)
    times = Times()
    kept = int(length * share) // BLOCK * BLOCK if share < 1 else length
    prompts = [tuple(stem[:kept] + [rng.randrange(150_000) for _ in range(length - kept)]) for _ in range(count)]
    gc.collect()
    gc.freeze()  # the prompts lie here for the benchmark's sake; what the cache makes is collected as ever
    for prompt in prompts:
        run(cache, prompt, times)
    gc.unfreeze()
    return times.medians()


def run(cache: PrefixCache, tokens: tuple[int, ...] | list[int], times: Times) -> None:
    """One request: prefilled in one chunk, one token generated."""
    length = len(tokens)
    needed = -(-(length + 1) // BLOCK)
    plain = BlockPool(needed + 1, BLOCK)
    begin = time.perf_counter()
    plain.release(plain.allocate(needed) or [])
    begin = times.add("blocks without a cache", begin)
    BlockHashes(ROOT, BLOCK, tokens).make(length // BLOCK)
    begin = times.add("hash", begin)
    sequence = cache.open(tokens, num_prompt=length, salt="")
    begin = times.add("open", begin)
    hit = cache.find(sequence, length)
    cache.worth_waiting(sequence, hit, length)
    begin = times.add("find", begin)
    cache.claim(sequence, hit, length)
    cache.admit(sequence, hit)
    begin = times.add("admit", begin)
    blocks = list(hit.blocks) + (cache.blocks.allocate(needed - len(hit.blocks)) or [])
    begin = times.add("blocks", begin)
    cache.begin_step()
    cache.computed(sequence, length, blocks, decode=False)
    begin = times.add("plan", begin)
    cache.publish()
    cache.learn(sequence, 7, blocks)
    begin = times.add("publish", begin)
    cache.lose(sequence)
    cache.blocks.release(blocks)
    cache.close(sequence)
    times.add("close", begin)


def measure_phases(length: int, turns: int) -> dict[str, dict[str, float]]:
    """Median us of each phase with the cache and without, and by how much it is more, the median of pairs."""
    blocks = max(2600, 2 * length // BLOCK)
    limits = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=length,
        max_model_len=length + 64,
        block_size=BLOCK,
        num_blocks=blocks,
        num_slots=17,
        uses_blocks=True,
        uses_slots=True,
    )
    cached = replace(limits, prefix_caching=True, needs_snapshots=True, num_snapshots=48)
    schedulers = {"on": Scheduler(cached), "off": Scheduler(limits)}
    builder = StepInputsBuilder(block_size=BLOCK, conv_size=4, kpool=4, rollback=0, capturable=True)
    rng, spoil = random.Random(3), spoiler()

    def one(name: str, turn: int) -> Times:
        scheduler, times = schedulers[name], Times()
        prompt = tuple(rng.randrange(32_000) for _ in range(length))
        request = Request(f"{turn}", prompt, SamplingParams(temperature=0.0), 0, 1, frozenset(), ())

        def timed(phase: str, work: Callable[[], Any]) -> Any:
            spoil()
            begin = time.perf_counter()
            found = work()
            times.add(phase, begin)
            return found

        timed("enter", lambda: scheduler.add(request))
        step = timed("plan", scheduler.schedule)
        timed("lay out", lambda: builder.build(step.chunks, prompt, rows=length))
        timed("remember, behind the launch", scheduler.remember)
        timed("commit", lambda: scheduler.commit(step, {request.request_id: 1}))
        return times

    while not schedulers["on"].prefix_stats.blocks_evicted:
        one("on", 0)
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(turns):
        for name in ("on", "off")[:: 1 if turn % 2 else -1]:
            for phase, us in one(name, turn).parts.items():
                found.setdefault(phase, {}).setdefault(name, []).extend(us)
    medians = {phase: {name: statistics.median(us) for name, us in own.items()} for phase, own in found.items()}
    for phase, own in found.items():
        medians[phase]["more"] = statistics.median(on - off for on, off in zip(own["on"], own["off"], strict=True))
    return {phase: {name: round(us, 1) for name, us in own.items()} for phase, own in medians.items()}


def spoiler() -> Callable[[], None]:
    """Pushes data and code out of the processor's caches."""
    memory = array("q", bytes(64 << 20))
    names: dict[str, Any] = {}
    exec("".join(f"def f{i}(x): return [x + {i}, (x, {i}), {{'x': x * {i}}}]\n" for i in range(3000)), names)
    functions = [names[f"f{i}"] for i in range(3000)]

    def spoil() -> None:
        sum(memory[::8])
        for function in functions:
            function(3)

    return spoil


if __name__ == "__main__":
    main()
