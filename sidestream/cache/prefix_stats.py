"""What the prefix cache did, in numbers that only grow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sidestream.core.outputs import CacheReason


@dataclass(slots=True)
class PrefixStats:
    """Counted when a sequence is admitted, once more after each preemption.

    Attributes:
        requests, hits: admitted, and those of them that took something over.
        known_tokens, cached_tokens: of admitted sequences, and those of them that were taken over.
        unused_tokens: by reason, tokens that were cached but could not be taken over.
        reasons: admitted sequences by the reason that nothing longer was taken over.
        waited, wait_steps, gave_up: sequences that waited for a prefix in flight, for how many steps in all, and those
            that waited in vain until the bound.
        snapshots_taken, snapshots_restored, snapshots_evicted: copies of state, and copies given up for others.
        snapshots_guessed: of those taken, the ones that nobody had asked for.
        snapshots_failed: wanted when every slot for them was being written.
        blocks_evicted: published blocks that were handed out for other content.
    """

    requests: int = 0
    hits: int = 0
    known_tokens: int = 0
    cached_tokens: int = 0
    unused_tokens: Counter[CacheReason] = field(default_factory=Counter)
    reasons: Counter[CacheReason] = field(default_factory=Counter)
    waited: int = 0
    wait_steps: int = 0
    gave_up: int = 0
    snapshots_taken: int = 0
    snapshots_guessed: int = 0
    snapshots_restored: int = 0
    snapshots_evicted: int = 0
    snapshots_failed: int = 0
    blocks_evicted: int = 0
