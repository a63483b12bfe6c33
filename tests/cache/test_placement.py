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


def test_blocks_come_back_while_there_is_room_to_spare() -> None:
    """Nine places, a watermark of one: blocks of the sequences that decode come back, four a step and one sequence
    after the other, as long as more than two places and one for each sequence stay free."""
    dead: set[int] = set()
    placement = BlockPlacement(num_device=10, num_host=8, block_size=BLOCK, watermark=1, is_dead=dead.__contains__)
    first, second = (1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13)
    placement.plan([chunk(first[:6], 0, 24)])
    placement.plan([chunk(second, 0, 24)])
    decodes = [chunk(first, 24, 1, decode=True)]
    placement.plan(decodes)
    hosted = [block for block in first if placement.table[block] < 0]
    assert len(hosted) >= 4
    assert placement.plan(decodes).back == ()  # the other one's blocks are there
    dead |= set(second)
    assert placement.plan([chunk(first, 24, 1), *decodes]).back == ()  # a prefill may need the room at once
    moves = placement.plan(decodes)
    assert (moves.now, moves.ahead) == ((), ())
    assert [-1 - placement.table[block] for block in hosted[:4]] == [back.host for back in moves.back]
    assert placement.on_host(hosted), "they are there for the step behind this one"
    placement.check_integrity()
    placement.plan(decodes)
    assert not placement.on_host(hosted[:4])
    assert placement.num_restored >= 4
    for _ in range(9):
        assert placement.plan(decodes).now == ()
    assert placement.num_free_device >= 3
    placement.check_integrity()


def test_each_sequence_has_its_turn_to_come_back() -> None:
    dead: set[int] = set()
    placement = BlockPlacement(num_device=20, num_host=30, block_size=BLOCK, is_dead=dead.__contains__)
    ones, others, more = tuple(range(1, 11)), tuple(range(11, 21)), tuple(range(21, 38))
    placement.plan([chunk(ones, 0, 37)])
    placement.plan([chunk(others, 0, 37)])
    placement.plan([chunk(more, 0, 68)])
    decodes = [chunk(ones, 37, 1, decode=True), chunk(others, 37, 1, decode=True)]
    placement.plan(decodes)
    dead |= set(more)
    back = [placement.plan(decodes).back for _ in range(4)]
    assert [len(moves) for moves in back[-2:]] == [4, 4]
    placement.plan(decodes)
    for blocks in (ones, others):
        assert sum(placement.table[block] > 0 for block in blocks) >= 5


def test_what_never_left_does_not_come_back() -> None:
    placement = BlockPlacement(num_device=9, num_host=3, block_size=BLOCK)
    placement.plan([chunk((1, 2), 0, 6)])
    assert placement.plan([chunk((1, 2), 6, 1, decode=True)]) == Moves()
    assert placement.table[3] == placement.nowhere
    assert not placement.on_host((3,))


@pytest.mark.parametrize("watermark", [0, 1])
def test_random_sequences_never_lose_a_block(watermark: int) -> None:
    """A model of the bytes: every block's rows are where the table says, whatever moved in between."""
    draw = random.Random(watermark)
    owned: dict[str, list[int]] = {}
    length: dict[str, int] = {}
    device_bytes: dict[int, tuple[str, int]] = {}
    host_bytes: dict[int, tuple[str, int]] = {}
    placement = BlockPlacement(
        num_device=11,
        num_host=20,
        block_size=BLOCK,
        watermark=watermark,
        is_dead=lambda block: all(block not in blocks for blocks in owned.values()),
    )
    free = list(range(1, 31))
    leaving = Moves()
    serial = restored = 0
    for _ in range(3000):
        if owned and draw.random() < (0.3 if len(free) < 4 else 0.05):
            gone = draw.choice(sorted(owned))
            free += owned.pop(gone)
            del length[gone]
        chunks = []
        budget = 3  # blocks of the device that a step may need beside those that are not full
        for name in [*sorted(owned), f"r{serial}"]:
            if name not in owned:
                if len(owned) == 3 or not free or (owned and draw.random() < 0.8):
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
        for spill in leaving.back:
            device_bytes[spill.device] = host_bytes[spill.host]
        for spill in (*leaving.ahead, *moves.now):
            host_bytes[spill.host] = device_bytes[spill.device]
        restored += len(moves.back)
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
        leaving = moves
        placement.check_integrity()
    assert placement.num_spilled > 100
    assert placement.num_restored == restored > 10
