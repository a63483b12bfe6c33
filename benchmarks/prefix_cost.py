"""What the prefix cache costs the host: hashing, lookup and bookkeeping of one request, at 10,000 cached blocks.

    PYTHONPATH=. python benchmarks/prefix_cost.py

Everything that the cache does for a request from its arrival to its end, against prompts of several lengths: of which a
quarter was cached before (shared system prompt and history), nothing was, or all was. Hashing reads each token once,
which tokenising did before it; the rest is by block.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from sidestream.cache.block_hashes import BlockHashes, chain_root
from sidestream.cache.prefix_cache import PrefixCache
from sidestream.cache.prefix_stats import PrefixStats

BLOCK = 64


class Times:
    """Microseconds of each part, one entry a request."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}

    def add(self, part: str, begin: float) -> float:
        now = time.perf_counter()
        self.parts.setdefault(part, []).append((now - begin) * 1e6)
        return time.perf_counter()

    def medians(self) -> dict[str, float]:
        """By part; a path entered is what ``open`` does beside hashing the tokens once more."""
        found = {part: statistics.median(values) for part, values in self.parts.items()}
        found["enter"] = max(found.pop("open") - found.pop("hash again"), 0.0)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached-blocks", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=300)
    args = parser.parse_args()
    print(f"median us a request at {args.cached_blocks} cached blocks of {BLOCK} tokens, hashing left out")
    for snapshots in (None, 64):
        for length in (256, 512, 1024, 4096, 32768):
            for share in (0.0, 0.25, 1.0):
                cache, stem = filled(args.cached_blocks, length, snapshots)
                times = serve(cache, stem, length, share, max(args.requests * 512 // max(length, 512), 20))
                kind = "with snapshots" if snapshots else "blocks alone"
                parts = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
                total = sum(times.values())
                print(f"{kind}: {length} tokens, {share:.0%} cached: {total - times['hash']:.1f} ({parts})")


def filled(blocks: int, length: int, snapshots: int | None) -> tuple[PrefixCache, list[int]]:
    """A cache with so many published blocks, and a prompt of that length that it holds."""
    cache = PrefixCache(
        blocks + 4096,
        BLOCK,
        salt=b"model",
        snapshots=None if snapshots is None else (33, snapshots),
        snapshot_interval=None,
        stats=PrefixStats(),
    )
    rng = random.Random(1)
    stem = [rng.randrange(150_000) for _ in range(length)]
    run(cache, stem, Times())
    while len(cache.tree.nodes) < blocks:
        run(cache, [rng.randrange(150_000) for _ in range(1024)], Times())
    return cache, stem


def serve(cache: PrefixCache, stem: list[int], length: int, share: float, count: int) -> dict[str, float]:
    """Microseconds a request, by part."""
    rng = random.Random(2)
    times = Times()
    kept = int(length * share) // BLOCK * BLOCK if share < 1 else length
    prompts = [stem[:kept] + [rng.randrange(150_000) for _ in range(length - kept)] for _ in range(count)]
    for prompt in prompts:
        run(cache, prompt, times)
    return times.medians()


def run(cache: PrefixCache, prompt: list[int], times: Times) -> None:
    """One request: prefilled in as many chunks as boundaries ask for, one token generated."""
    tokens, length = tuple(prompt), len(prompt)
    begin = time.perf_counter()
    BlockHashes(chain_root(b"model", b""), BLOCK, tokens)
    begin = times.add("hash", begin)
    BlockHashes(chain_root(b"model", b""), BLOCK, tokens)
    begin = times.add("hash again", begin)
    sequence = cache.open(tokens, num_prompt=length, salt="")
    begin = times.add("open", begin)
    hit = cache.find(sequence, length)
    cache.worth_waiting(sequence, hit, length)
    begin = times.add("find", begin)
    cache.claim(sequence, hit, length)
    cache.admit(sequence, hit)
    begin = times.add("admit", begin)
    blocks = list(hit.blocks) + (cache.blocks.allocate(-(-(length + 1) // BLOCK) - len(hit.blocks)) or [])
    begin = times.add("allocate", begin)
    done = hit.num_tokens
    while done < length:
        done = cache.chunk_end(sequence, done, length)
        cache.computed(sequence, done, blocks, decode=False)
    cache.learn(sequence, 7, blocks)
    begin = times.add("publish", begin)
    cache.lose(sequence)
    cache.blocks.release(blocks)
    cache.close(sequence)
    times.add("close", begin)


if __name__ == "__main__":
    main()
