"""Ring plans against a model that keeps every token in a dictionary by slot and position."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.core.batch import Split
from sidestream.core.ring import plan_ring


def check(starts: list[int], lengths: list[int], slots: list[int], *, window: int, ring_length: int) -> None:
    plan = plan_ring(starts, lengths, slots, window=window, ring_length=ring_length)
    tokens = sum(lengths)
    carry = plan.carry_rows.tolist()
    assert len(carry) == len(starts) * (window - 1)
    # What each row of the source stands for: the zero row, the step's tokens, then what the ring holds.
    own = [(r, starts[r] + i) for r in range(len(starts)) for i in range(lengths[r])]
    carried = [(r, starts[r] - window + 1 + j) for r in range(len(starts)) for j in range(window - 1)]
    source: list[tuple[int, int] | None] = [None, *own, *carried]
    for (r, position), row in zip(carried, carry, strict=True):
        assert row == (slots[r] * ring_length + position % ring_length if position >= 0 else 0)
    assert plan.window_rows.shape == (tokens, window)
    for (r, position), rows in zip(own, plan.window_rows.tolist(), strict=True):
        wanted = [(r, p) if p >= 0 else None for p in range(position - window + 1, position + 1)]
        assert [source[row] for row in rows] == wanted
    kept = dict(zip(plan.keep_rows.tolist(), plan.keep_tokens.tolist(), strict=True))
    last: dict[int, int] = {}
    for token, (r, position) in enumerate(own):
        if ring_length:
            last[slots[r] * ring_length + position % ring_length] = token
    assert kept == last
    assert len(kept) == plan.keep_rows.shape[0], "a ring row is written twice"


@pytest.mark.parametrize("rollback", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 2, 4])
@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4))
def test_mixed_steps(window: int, rollback: int, parts: list[tuple[int, int]]) -> None:
    slots = [5 - i for i in range(len(parts))]
    check([s for s, _ in parts], [n for _, n in parts], slots, window=window, ring_length=window - 1 + rollback)


@pytest.mark.parametrize("rollback", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 2, 4])
@settings(max_examples=30, deadline=None)
@given(starts=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_one_token_each(window: int, rollback: int, starts: list[int]) -> None:
    slots = [7 - i for i in range(len(starts))]
    check(starts, [1] * len(starts), slots, window=window, ring_length=window - 1 + rollback)


@pytest.mark.parametrize("rollback", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 2, 4])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_kept_states_have_rings_of_their_own(window: int, rollback: int, data: st.DataObject) -> None:
    """What each slot holds behind the step, by carrying it out on (sequence, position) pairs."""
    parts = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=3))
    starts, lengths = [s for s, _ in parts], [n for _, n in parts]
    slots, free = [len(parts) - r for r in range(len(parts))], count(len(parts) + 1)
    kept = [
        tuple(Split(p, next(free)) for p in sorted(data.draw(st.sets(st.integers(s + 1, s + n), max_size=3))))
        for s, n in parts
    ]
    length = window - 1 + rollback
    plain = plan_ring(starts, lengths, slots, window=window, ring_length=length)
    plan = plain.with_kept(starts, lengths, slots, kept)
    assert plan.tensors[:2] == plain.tensors[:2]
    own = [(r, s + i) for r, (s, n) in enumerate(parts) for i in range(n)]
    ring: dict[int, tuple[int, int]] = {}
    for r, s in enumerate(starts):
        ring |= {slots[r] * length + p % length: (r, p) for p in range(max(s - length, 0), s)}
    if plan.copy_from is not None and plan.copy_to is not None:
        assert len(plan.tensors) == 6
        before = dict(ring)
        ring |= {to: before[at] for at, to in zip(plan.copy_from.tolist(), plan.copy_to.tolist(), strict=True)}
    ring |= {to: own[t] for t, to in zip(plan.keep_tokens.tolist(), plan.keep_rows.tolist(), strict=True)}
    expected: dict[int, tuple[int, int]] = {}
    for r, (s, n) in enumerate(parts):
        expected |= {slots[r] * length + p % length: (r, p) for p in range(max(s + n - length, 0), s + n)}
        for split in kept[r]:
            near = range(max(split.position - window + 1, 0), split.position)
            expected |= {split.slot * length + p % length: (r, p) for p in near}
    assert ring == expected
    assert not plan.keeps_all
    assert plain.keeps_all == (plain.keep_tokens.tolist() == list(range(sum(lengths))))
