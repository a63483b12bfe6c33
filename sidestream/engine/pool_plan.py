"""What the caches of an engine come to within its memory budget, with a host pool and without."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sidestream.cache.groups import CacheGroups
from sidestream.cache.hosted_rows import HostedSizes
from sidestream.cache.pools import SNAPSHOTS
from sidestream.config.resolved import ResolvedConfig
from sidestream.engine.hosting import hosted_sizes, require_working_room
from sidestream.engine.pool_sizes import count_snapshots, size_pools
from sidestream.errors import CapacityError


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Sizes that fit beside the weights.

    Attributes:
        hosted: of what a host pool needs; None without one.
        places: KV blocks on the device, scratch included.
        num_slots: of state, scratch included.
        num_snapshots: slots behind those.
        max_model_len: longest sequence.
        beside: what counts against the budget beside weights, places and slots: name -> bytes.
    """

    hosted: HostedSizes | None
    places: int
    num_slots: int
    num_snapshots: int
    max_model_len: int
    beside: Mapping[str, int]

    @property
    def num_blocks(self) -> int:
        """On the device and in the host pool, scratch included."""
        return self.places + (self.hosted.host_blocks if self.hosted is not None else 0)


def plan_pools(config: ResolvedConfig, groups: CacheGroups, *, weights: int, beside: Mapping[str, int]) -> PoolPlan:
    """Sizes of everything. With a host pool and a length that may shrink, the longest that fits beside hot slots,
    tables and staging places of that length.

    Args:
        beside: what counts against the budget beside weights and caches: name -> bytes.
    Raises:
        CapacityError: naming what does not fit and the knobs.
    """
    if not (config.host_memory and config.shrink_max_model_len):
        return _planned(config, groups, weights=weights, beside=beside)

    def of_length(blocks: int, *, shrink: bool) -> ResolvedConfig:
        length = min(blocks * config.block_size, config.max_model_len)
        return replace(config, max_model_len=length, shrink_max_model_len=shrink)

    def fits(blocks: int) -> bool:
        try:
            _planned(of_length(blocks, shrink=False), groups, weights=weights, beside=beside)
        except CapacityError:
            return False
        return True

    longest = -(-config.max_model_len // config.block_size)
    fitting = bisect_left(range(1, longest + 1), True, key=lambda blocks: not fits(blocks))
    return _planned(of_length(max(fitting, 1), shrink=True), groups, weights=weights, beside=beside)


def _planned(config: ResolvedConfig, groups: CacheGroups, *, weights: int, beside: Mapping[str, int]) -> PoolPlan:
    hosted, beside = hosted_sizes(config, groups), dict(beside)
    if hosted is not None:
        beside |= hosted.bytes_by_kind(groups)
    num_snapshots = count_snapshots(config, groups, weights=weights, beside=sum(beside.values()))
    if num_snapshots:
        beside[SNAPSHOTS] = num_snapshots * groups.bytes_per_slot
    places, num_slots, max_model_len = size_pools(
        config,
        groups,
        weights=weights,
        beside=beside,
        host_blocks=hosted.host_blocks if hosted is not None else 0,
    )
    if hosted is not None:
        require_working_room(config, places, max_model_len=max_model_len)
    return PoolPlan(hosted, places, num_slots, num_snapshots, max_model_len, beside)
