"""Whose hot slots are whose: who stays, who goes, and who finds them empty."""

from __future__ import annotations

import random

from sidestream.cache.seats import Seats
from sidestream.core.batch import Chunk


def decode(name: str, start: int) -> Chunk:
    return Chunk(name, start, 1, (1,), 1, is_decode=True, samples=True)


def prefill(name: str, start: int = 0) -> Chunk:
    return Chunk(name, start, 4, (1,), 1, is_decode=False, samples=False)


def test_a_sequence_that_decodes_on_keeps_its_seat_and_what_is_in_it() -> None:
    seats = Seats(3)
    (a, b), fresh = seats.assign([decode("a", 4), decode("b", 9)])
    assert sorted((a, b)) == sorted(fresh) == [1, 2]
    assert seats.assign([decode("a", 5), decode("b", 10)]) == ([a, b], [])
    assert seats.assign([decode("b", 11), decode("a", 6)]) == ([b, a], [])
    assert seats.assign([decode("a", 8)]) == ([a], [a])  # not where it stopped: somebody else's rows may be meant


def test_a_finished_request_leaves_its_seat_to_whoever_comes() -> None:
    """Two seats: "a" is gone for longer than "b" when "c" comes."""
    seats = Seats(3)
    (a, b), _ = seats.assign([decode("a", 4), decode("b", 4)])
    seats.assign([decode("b", 5)])
    assert seats.assign([decode("c", 7)]) == ([a], [a])
    assert seats.assign([decode("b", 6), decode("c", 8)]) == ([b, a], [])


def test_a_step_never_takes_a_seat_from_whom_it_runs() -> None:
    """The new one stands before the one that was idle for longest, and both run."""
    seats = Seats(3)
    (a, b), _ = seats.assign([decode("a", 4), decode("b", 4)])
    seats.assign([decode("b", 5)])
    assert seats.assign([decode("new", 3), decode("a", 5)]) == ([b, a], [b])


def test_an_id_used_again_finds_nothing_of_the_one_before() -> None:
    """Every request begins with a prefill, which gives the seat back, even where it decodes from the same position."""
    seats = Seats(2)
    assert seats.assign([decode("a", 4)]) == ([1], [1])
    assert seats.assign([prefill("a")]) == ([0], [])
    assert seats.assign([decode("a", 5)]) == ([1], [1])


def test_however_many_come_and_go_those_that_decode_keep_their_seats() -> None:
    """Three old sequences beside one guest after the other, some of whom are prefilled again: nobody of the old ones
    ever finds its slots cleared."""
    draw = random.Random(3)
    seats = Seats(5)
    names = ["x", "y", "z"]
    at = dict.fromkeys(names, 10)
    first, _ = seats.assign([decode(name, at[name]) for name in names])
    mine = dict(zip(names, first, strict=True))
    for turn in range(200):
        guest = f"guest {turn // draw.randrange(1, 4)}"
        chunks = [decode(name, at[name] + 1 + turn) for name in names]
        draw.shuffle(chunks)
        chunks.append(decode(guest, turn) if draw.random() < 0.7 else prefill(guest))
        given, fresh = seats.assign(chunks)
        assert not set(fresh) & set(mine.values())
        assert {c.request_id: s for c, s in zip(chunks, given, strict=True) if c.request_id in mine} == mine
        assert 0 not in given[:-1]


def test_after_a_reset_everybody_is_new() -> None:
    seats = Seats(3)
    seats.assign([decode("a", 4), decode("b", 4)])
    seats.reset()
    given, fresh = seats.assign([decode("a", 5), decode("b", 5)])
    assert sorted(given) == sorted(fresh) == [1, 2]
