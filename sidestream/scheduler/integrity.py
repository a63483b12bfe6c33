"""Recounts what the scheduler keeps: queues, blocks and tokens in flight. A difference is a bug, and is named."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sidestream.cache.block_pool import BlockPool
from sidestream.scheduler.sequence import Sequence


def check_queues(
    *,
    running: Collection[Sequence],
    waiting: Collection[Sequence],
    known: Collection[Sequence],
    in_flight: Iterable[tuple[Sequence, ...]],
) -> None:
    """Every known sequence stands in one queue, in order of arrival, and its tokens in flight are those of the steps.

    Args:
        in_flight: of each step in flight, the sequences that it samples.
    """
    queued = [*running, *waiting]
    steps = list(in_flight)
    assert {id(s) for s in queued} == {id(s) for s in known}, "queues and requests differ"
    assert len(queued) == len(known), "a sequence is queued twice"
    for queue in (running, waiting):
        arrivals = [s.arrival for s in queue]
        assert arrivals == sorted(arrivals), f"sequences are out of order: {arrivals}"
    for sequence in running:
        assert sequence.running, f"{sequence.request_id} is running, its mark says it waits"
    for sequence in waiting:
        owns = sequence.running or sequence.block_ids or sequence.slot or sequence.num_computed
        assert not owns, f"{sequence.request_id} waits and still owns memory"
    for sequence in queued:
        counted = sum(sampling.count(sequence) for sampling in steps)
        assert counted == sequence.num_in_flight, (
            f"{sequence.request_id} counts {sequence.num_in_flight} tokens in flight, the steps hold {counted}"
        )


def check_blocks(pool: BlockPool, running: Collection[Sequence]) -> None:
    """Each running sequence owns the blocks of its computed tokens, and the pool agrees."""
    owned = {s.request_id: s.block_ids for s in running}
    for sequence in running:
        need = pool.blocks_for(sequence.num_computed)
        assert len(sequence.block_ids) == need, (
            f"{sequence.request_id} owns {len(sequence.block_ids)} blocks for {sequence.num_computed} tokens"
        )
    pool.check_integrity(owned)
