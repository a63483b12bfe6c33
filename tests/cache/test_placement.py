"""Where blocks lie: pressure, order, content that begins anew, and 3,000 random steps recounted."""

from __future__ import annotations

import random

import pytest

from sidestream.cache.placement import BlockPlacement, Moves, Spill
from sidestream.core.batch import Chunk
from sidestream.errors import CapacityError

BLOCK = 4


def chunk(blocks: tuple[int, ...], start: int, length: int, *, decode: bool = False) -> Chunk:
    return Chunk("r", start, length, blocks, 0, decode, samples=True)


def test_nothing_is_copied_while_there_is_room() -> None:
    placement = BlockPlacement(num_device=5, num_host=3, block_size=BLOCK)
    assert placement.plan([chunk((1, 2, 3), 0, 12)]) == Moves()
    assert placement.plan([chunk((1, 2, 3, 4), 12, 1, decode=True)]) == Moves()
    assert not placement.on_host((1, 2, 3, 4))
    assert sorted(placement.table[1:5]) == [1, 2, 3, 4]


def test_the_block_written_longest_ago_leaves_for_a_new_one() -> None:
    placement = BlockPlacement(num_device=4, num_host=3, block_size=BLOCK)
    placement.plan([chunk((1, 2, 3), 0, 12)])
    oldest = int(placement.table[1])
    moves = placement.plan([chunk((1, 2, 3, 4), 12, 1, decode=True)])
    assert moves == Moves(now=(Spill(oldest, 0),))
    assert placement.table[1] == -1
    assert placement.table[4] == oldest
    placement.check_integrity()


def test_spills_ahead_free_their_places_one_step_later() -> None:
    placement = BlockPlacement(num_device=4, num_host=3, block_size=BLOCK, watermark=1)
    moves = placement.plan([chunk((1, 2, 3), 0, 9)])
    assert moves.now == ()
    assert moves.ahead == ()  # the step writes to every block it has
    moves = placement.plan([chunk((1, 2, 3), 9, 1, decode=True)])
    assert [spill.host for spill in moves.ahead] == [0]
    assert not placement.on_host((1, 2, 3))
    assert placement.num_free_device == 0
    assert placement.plan([chunk((1, 2, 3), 10, 1, decode=True)]).now == ()
    assert placement.on_host((1,))
    assert placement.num_free_device == 1


def test_a_block_that_begins_anew_is_forgotten_wherever_it_was() -> None:
    placement = BlockPlacement(num_device=3, num_host=2, block_size=BLOCK)
    placement.plan([chunk((1, 2), 0, 8)])
    placement.plan([chunk((1, 2, 3), 8, 1, decode=True)])
    assert placement.table[1] == -1
    assert placement.num_free_host == 1
    placement.plan([chunk((1,), 0, 1)])  # another request got block 1
    assert placement.table[1] > 0
    assert placement.on_host((2,))
    placement.check_integrity()


def test_scratch_stays_where_it_is() -> None:
    placement = BlockPlacement(num_device=2, num_host=2, block_size=BLOCK)
    assert placement.plan([chunk((0, 0, 0), 0, 12), chunk((0,), 3, 1, decode=True)]) == Moves()
    assert placement.table[0] == 0
    placement.check_integrity()


def test_dead_blocks_give_their_places_without_a_copy() -> None:
    dead: set[int] = set()
    placement = BlockPlacement(num_device=4, num_host=3, block_size=BLOCK, is_dead=dead.__contains__)
    placement.plan([chunk((1, 2, 3), 0, 12)])
    dead |= {1, 2, 3}
    assert placement.plan([chunk((4, 5), 0, 8)]) == Moves()
    placement.check_integrity()


def test_a_step_that_writes_to_more_blocks_than_the_device_has_is_refused() -> None:
    placement = BlockPlacement(num_device=3, num_host=9, block_size=BLOCK)
    with pytest.raises(CapacityError, match=r"3 new KV blocks.*room for 2.*max_num_batched_tokens.*num_blocks"):
        placement.plan([chunk((1, 2, 3), 0, 12)])


@pytest.mark.parametrize("watermark", [0, 2])
def test_random_sequences_never_lose_a_block(watermark: int) -> None:
    """A model of the bytes: every block's rows are where the table says, whatever moved in between."""
    draw = random.Random(watermark)
    owned: dict[str, list[int]] = {}
    length: dict[str, int] = {}
    device_bytes: dict[int, tuple[str, int]] = {}
    host_bytes: dict[int, tuple[str, int]] = {}
    placement = BlockPlacement(
        num_device=8,
        num_host=12,
        block_size=BLOCK,
        watermark=watermark,
        is_dead=lambda block: all(block not in blocks for blocks in owned.values()),
    )
    free = list(range(1, 20))
    leaving: tuple[Spill, ...] = ()
    serial = 0
    for _ in range(3000):
        if owned and draw.random() < 0.08:
            gone = draw.choice(sorted(owned))
            free += owned.pop(gone)
            del length[gone]
        chunks = []
        budget = 3  # blocks of the device that a step may need beside those that are not full
        for name in [*sorted(owned), f"r{serial}"]:
            if name not in owned:
                if len(owned) == 3 or not free:
                    continue
                owned[name], length[name], serial = [], 0, serial + 1
            grow = draw.randrange(1, 6)
            start, end = length[name], length[name] + grow
            more = -(-end // BLOCK) - len(owned[name])
            if more > min(len(free), budget):
                continue
            budget -= more
            owned[name] += [free.pop(draw.randrange(len(free))) for _ in range(more)]
            length[name] = end
            chunks.append(Chunk(name, start, grow, tuple(owned[name]), 0, start > 0, samples=True))
        moves = placement.plan(chunks)
        for spill in (*leaving, *moves.now):
            host_bytes[spill.host] = device_bytes[spill.device]
        for one in chunks:
            for index in range(one.start // BLOCK, -(-one.end // BLOCK)):
                place = int(placement.table[one.block_ids[index]])
                assert place > 0, "a step writes to the device"
                if index * BLOCK < one.start:
                    assert device_bytes[place] == (one.request_id, index)
                device_bytes[place] = (one.request_id, index)
        for one in chunks:
            for index, block in enumerate(one.block_ids):
                place = int(placement.table[block])
                held = device_bytes[place] if place >= 0 else host_bytes[-1 - place]
                assert held == (one.request_id, index)
        leaving = moves.ahead
        placement.check_integrity()
    assert placement.num_spilled > 100
