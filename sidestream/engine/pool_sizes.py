"""How many KV blocks and state slots fit a memory budget beside everything else."""

from __future__ import annotations

from collections.abc import Mapping

from sidestream.cache.groups import CacheGroups
from sidestream.config.resolved import ResolvedConfig
from sidestream.errors import CapacityError

KNOBS = "raise memory_limit or lower max_num_seqs"
MEASURED_KNOBS = (
    "raise memory_limit, or lower max_num_batched_tokens (for activations), max_capture_tokens (for graphs) or "
    "max_num_seqs (for state slots)"
)


SNAPSHOTS_A_SEQUENCE = 2
"""One at the end of its prompt, one where prompts part or at the end of what it generated."""
SNAPSHOT_SHARE = 10
"""One part in so many of the memory left for caches may hold snapshots."""


def count_snapshots(config: ResolvedConfig, groups: CacheGroups, *, weights: int, beside: int) -> int:
    """Slots for snapshots of state: as set, or ``SNAPSHOTS_A_SEQUENCE`` of each running sequence, or as fit."""
    if not (config.prefix_caching and config.needs_snapshots):
        return 0
    if config.num_snapshots is not None:
        return config.num_snapshots
    left = config.memory_budget - weights - beside - (config.max_num_seqs + 1) * groups.bytes_per_slot
    room = left // SNAPSHOT_SHARE
    if config.num_blocks is not None:
        room = min(room, left - (config.num_blocks + 1) * groups.bytes_per_block)
    return min(SNAPSHOTS_A_SEQUENCE * config.max_num_seqs, max(room, 0) // groups.bytes_per_slot)


def size_pools(
    config: ResolvedConfig,
    groups: CacheGroups,
    *,
    weights: int,
    beside: Mapping[str, int] | None = None,
    host_blocks: int = 0,
) -> tuple[int, int, int]:
    """Blocks, slots (scratch included) and the longest sequence that fit the budget beside the weights.

    Blocks are as many as all ``max_num_seqs`` sequences of ``max_model_len`` could fill, or as fit.

    Args:
        beside: what else counts against the budget: name -> bytes.
        host_blocks: that a sequence may have beside those of the device.
    Raises:
        CapacityError: naming what does not fit and the knobs.
    """
    budget, others = config.memory_budget, sum((beside or {}).values())
    if weights > budget:
        raise CapacityError(
            f"the weights take {weights} bytes, more than the memory budget of {budget} bytes; raise memory_limit"
        )
    num_slots = config.max_num_seqs + 1
    left = budget - weights - others - num_slots * groups.bytes_per_slot
    longest = -(-config.max_model_len // config.block_size)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks + 1
    elif groups.bytes_per_block:
        num_blocks = min(config.max_num_seqs * longest + 1, max(left, 0) // groups.bytes_per_block)
    else:
        num_blocks = 1
    if left < num_blocks * groups.bytes_per_block or (config.uses_blocks and num_blocks < 2):
        needed = weights + others + num_slots * groups.bytes_per_slot + max(num_blocks, 2) * groups.bytes_per_block
        listed = "".join(f", {name} ({size} bytes)" for name, size in (beside or {}).items())
        raise CapacityError(
            f"weights ({weights} bytes){listed}, {num_slots} state slots ({num_slots * groups.bytes_per_slot} bytes) "
            f"and {max(num_blocks, 2)} KV blocks of {groups.bytes_per_block} bytes need {needed} bytes, more than the "
            f"memory budget of {budget} bytes; {MEASURED_KNOBS if beside else KNOBS}"
        )
    room = (num_blocks - 1 + host_blocks) * config.block_size if config.uses_blocks else config.max_model_len
    if room < config.max_model_len and not config.shrink_max_model_len:
        raise CapacityError(
            f"one sequence of max_model_len {config.max_model_len} needs {longest} KV blocks of {config.block_size} "
            f"tokens, and there are {num_blocks - 1 + host_blocks}; lower max_model_len, or raise num_blocks or "
            "memory_limit"
        )
    return num_blocks, num_slots, min(config.max_model_len, room)
