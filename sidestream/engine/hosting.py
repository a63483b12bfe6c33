"""HiSparse for one engine: how many hot slots, staging places and host blocks, and the runtime over them."""

from __future__ import annotations

from sidestream.cache.groups import CacheGroups
from sidestream.cache.hisparse import HiSparseRuntime
from sidestream.cache.hosted_rows import HostedSizes
from sidestream.cache.placement import BlockPlacement
from sidestream.cache.pools import CachePools
from sidestream.config.model import IndexerKind
from sidestream.config.resolved import ResolvedConfig
from sidestream.errors import CapacityError
from sidestream.streams import Streams

STAGED_SEQUENCES = 2
"""Prefills of so many of the longest sequences can be staged at once, unless the user says otherwise."""


def hosted_sizes(config: ResolvedConfig, groups: CacheGroups) -> HostedSizes | None:
    """Sizes that follow from the settings; None without a host pool.

    Hot slots are never fewer than a step of one sequence selects, and no more than the longest sequence has rows. A
    prefill may read every host block of its sequence, so those of the longest can be staged whatever the setting.

    Raises:
        CapacityError: the host pool would hold no block, or hot slots or staging places are less than a step needs.
    """
    if not config.host_memory:
        return None
    indexer = config.model.indexer
    assert indexer is not None, "without an indexer there is no sparse layer"
    host_blocks = config.host_memory // groups.kv.bytes_per_block
    if not host_blocks:
        raise CapacityError(
            f"a host pool of {config.host_memory} bytes holds no KV block of {groups.kv.bytes_per_block} bytes; raise "
            "hisparse_host_memory"
        )
    needed = indexer.topk * (1 + config.rollback)
    if config.hot_factor * indexer.topk < needed:
        raise CapacityError(
            f"a step of one sequence selects up to {needed} rows, and hisparse_hot_factor {config.hot_factor} gives it "
            f"{config.hot_factor * indexer.topk} hot slots; raise it"
        )
    longest = -(-config.max_model_len // config.block_size)
    if config.staged_tokens is None:
        staged = STAGED_SEQUENCES * longest
    else:
        staged = -(-config.staged_tokens // config.block_size)
    if staged < min(longest, host_blocks):
        raise CapacityError(
            f"hisparse_staged_tokens {config.staged_tokens} is less than the {min(longest, host_blocks)} KV blocks of "
            f"{config.block_size} that one sequence of max_model_len {config.max_model_len} may have in the host pool "
            "and its prefill may read; raise it, or lower max_model_len"
        )
    return HostedSizes(
        seats=config.max_num_seqs + 1,
        slots=min(config.hot_factor * indexer.topk, longest * config.block_size),
        host_blocks=host_blocks,
        staged=min(host_blocks, config.max_num_seqs * longest, staged),
        max_blocks=longest,
        groups=sum(layer.indexer is IndexerKind.FULL for layer in config.model.layers),
    )


def require_working_room(config: ResolvedConfig, places: int, *, max_model_len: int) -> None:
    """Check that any step finds places for what it writes.

    Raises:
        CapacityError: naming the knobs.
    """
    tokens = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
    # A step begins blocks for its tokens, one more for each sequence; each sequence has one that is not full.
    needed = -(-tokens // config.block_size) + 2 * config.max_num_seqs
    needed = min(needed, config.max_num_seqs * -(-max_model_len // config.block_size))
    if places - 1 < needed:
        raise CapacityError(
            f"{places - 1} KV blocks on the device are less than the {needed} that one step may write to with "
            f"max_num_batched_tokens {config.max_num_batched_tokens} and max_num_seqs {config.max_num_seqs}; raise "
            "num_blocks or memory_limit, or lower those"
        )


def open_hisparse(
    config: ResolvedConfig, pools: CachePools, streams: Streams, *, max_blocks: int
) -> HiSparseRuntime | None:
    """The runtime over the pools' memory, if they have a host pool; nothing is anywhere yet."""
    rows = pools.hosted
    if rows is None:
        return None
    assert max_blocks == rows.sizes.max_blocks, f"tables of {rows.sizes.max_blocks} blocks for {max_blocks}"
    placement = BlockPlacement(
        num_device=rows.places,
        num_host=rows.sizes.host_blocks,
        block_size=config.block_size,
        watermark=int(config.watermark * (rows.places - 1)),
    )
    return HiSparseRuntime(
        placement,
        rows,
        layers=pools.groups.kv.layers,
        streams=streams,
        max_seqs=config.max_num_seqs,
        max_blocks=max_blocks,
    )
