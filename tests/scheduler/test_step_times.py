"""What is made of the times of steps: of decodes alone, and of chunks beside them."""

from __future__ import annotations

import random

import pytest

from sidestream.scheduler.chunk_times import ChunkTimes
from sidestream.scheduler.decode_times import DecodeTimes


def decode_times(*steps: tuple[int, float]) -> DecodeTimes:
    times = DecodeTimes()
    for num_decodes, seconds in steps:
        times.observe(num_decodes, seconds)
    return times


def chunk_times(*steps: tuple[int, float], alone: float = 1.0) -> ChunkTimes:
    times = ChunkTimes()
    for tokens, added in steps:
        times.observe(tokens, alone + added, alone=alone)
    return times


def test_a_size_that_was_not_seen_is_not_known() -> None:
    times = decode_times((8, 2.0))
    assert times.expected(7) is None
    assert times.expected(16) is None
    assert times.expected(8) == times.expected(15) == 2.0


def test_sizes_between_two_that_were_seen_lie_on_a_line() -> None:
    times = decode_times((12, 2.0), (20, 4.0))
    assert times.expected(12) == 2.0
    assert times.expected(14) == 2.5
    assert times.expected(18) == 3.5
    assert times.expected(31) == 4.0, "the other neighbour is not known"
    assert times.expected(9) == 2.0


def test_the_median_of_the_last_steps_counts() -> None:
    times = decode_times(*[(4, seconds) for seconds in (1.0, 50.0, 1.2, 0.9, 1.1)])
    assert times.expected(4) == 1.1
    for seconds in (3.0, 3.2):
        times.observe(4, seconds)
    assert times.expected(4) == 1.2
    times.observe(4, 3.1)
    assert times.expected(4) == 3.0


def test_of_two_steps_the_shorter_is_believed() -> None:
    assert decode_times((4, 80.0), (5, 1.0)).expected(4) == 1.0
    assert decode_times((4, 1.0), (5, 80.0)).expected(4) == 1.0


@pytest.mark.parametrize(
    ("seconds", "settled"),
    [
        ((1.0, 1.0), False),
        ((1.0, 1.0, 1.0), True),
        ((1.0, 1.0, 1.0, 1.4), True),
        ((1.0, 1.0, 1.0, 1.6), False),
        ((1.0, 1.0, 1.0, 0.6), False),
        ((1.0, 1.0, 9.0, 1.0), True),
    ],
)
def test_times_are_settled_while_steps_agree(seconds: tuple[float, ...], settled: bool) -> None:
    times = decode_times(*[(6, s) for s in seconds])
    assert times.settled(6) == times.settled(4) == settled
    assert not times.settled(8)


def test_nothing_is_known_of_chunks_before_the_third() -> None:
    times = chunk_times((32, 0.4), (32, 9.0))
    assert not times.known
    times.observe(32, 1.5, alone=1.0)
    assert times.known
    assert times.expected(32) == pytest.approx(0.5)
    assert times.fixed == 0


def test_two_sizes_tell_fixed_time_from_time_a_token() -> None:
    """Whatever comes in between: short ends of prompts, chunks of other sizes."""
    rng = random.Random(5)
    steps = [(tokens, 0.3 + 0.004 * tokens) for tokens in (32, 32, 32, 64, 64, 128, 128)]
    steps += [(tokens, 0.3 + 0.004 * tokens) for tokens in (rng.randint(16, 300) for _ in range(200))]
    times = chunk_times(*steps)
    assert times.fixed == pytest.approx(0.3, rel=0.05)
    assert times.per_token == pytest.approx(0.004, rel=0.05)
    assert times.tokens_within(1.1) == pytest.approx(200, rel=0.03)


def test_a_change_at_one_size_is_a_change_at_all() -> None:
    times = chunk_times(*[(tokens, 0.1 + 0.001 * tokens) for tokens in (32, 32, 32, 64, 64, 256, 256, 256)])
    before = times.expected(32), times.expected(256)
    for _ in range(20):
        times.observe(250, 1.0 + 4 * (0.1 + 0.001 * 250), alone=1.0)
    assert times.expected(256) == pytest.approx(4 * before[1], rel=0.02)
    assert times.expected(32) == pytest.approx(4 * before[0], rel=0.02)


def test_one_odd_step_changes_nothing() -> None:
    steady = [(64, 0.5)] * 6
    times, with_odd = chunk_times(*steady, *steady), chunk_times(*steady, (64, 900.0), *steady)
    assert with_odd.expected(64) == pytest.approx(times.expected(64), rel=1e-6)


def test_no_more_is_known_than_twice_the_largest_chunk() -> None:
    times = chunk_times(*[(32, 0.25)] * 3)
    assert times.tokens_within(100.0) == 64
    assert times.tokens_within(0.125) == 16


def test_no_chunk_is_free_and_none_costs_less_than_a_smaller_one() -> None:
    """Noise of the decodes can be larger than what a chunk adds, and have any sign."""
    rng = random.Random(3)
    for _ in range(200):
        times = chunk_times(*[(rng.randint(16, 400), rng.gauss(0.0, 0.4)) for _ in range(rng.randint(3, 30))])
        assert times.per_token > 0
        assert times.fixed >= 0
        assert times.expected(16) < times.expected(1000)
        assert 0 <= times.tokens_within(0.5) <= 800


def test_steps_shorter_than_their_decodes_do_not_make_chunks_free() -> None:
    steady = [(20, 0.1), (20, 0.1), (20, 0.1), (40, 0.2), (40, 0.2)]
    times = chunk_times(*steady, (40, -0.3), (40, -0.3))
    assert times.expected(40) > 0.1, "a chunk that adds little, beside decodes that vary, says little"


def test_chunks_that_are_worth_their_fixed_time_grow_step_by_step() -> None:
    cost = {tokens: 5.0 + 0.01 * tokens for tokens in range(2000)}
    times = chunk_times(*[(16, cost[16])] * 3)
    assert times.worthwhile_tokens() == 0, "nothing is known of the fixed time yet"
    times = chunk_times(*[(tokens, cost[tokens]) for tokens in (16, 16, 16, 32, 32)])
    assert times.worthwhile_tokens() == 64
    for tokens in (64, 64, 128, 128, 256, 256, 512, 512):
        times.observe(tokens, 1.0 + cost[tokens], alone=1.0)
    assert times.worthwhile_tokens() == pytest.approx(500, rel=0.05)
