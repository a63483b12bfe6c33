"""What the prefix cache costs the host: hashing, lookup and bookkeeping of one request, at 10,000 cached blocks.

    PYTHONPATH=. python benchmarks/prefix_cost.py --json benchmarks/results/prefix-cost-DATE.json

Everything that the cache does for a request from its arrival to its end, against prompts of several lengths: of which
nothing was cached before, a quarter (shared system prompt and history), or all. The pool is full: each block that is
handed out evicts one. What a pool without a cache takes for the same blocks is measured in turns, and left out.

Microseconds are a fixed part a request and a part a block; the last line of each kind says which, and how long a prompt
may be for 20 microseconds, with hashing (which reads each token once) and without.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path

from sidestream.cache.block_hashes import BlockHashes, chain_root
from sidestream.cache.block_pool import BlockPool
from sidestream.cache.prefix_cache import PrefixCache
from sidestream.cache.prefix_stats import PrefixStats

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
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
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


if __name__ == "__main__":
    main()
