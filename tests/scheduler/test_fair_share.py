from hypothesis import given
from hypothesis import strategies as st

from sidestream.scheduler.fair_share import fair_shares


def test_the_remainder_goes_to_the_first_in_order() -> None:
    assert fair_shares([10, 10, 10], 7) == [3, 2, 2]
    assert fair_shares([10, 1, 10], 8) == [4, 1, 3]
    assert fair_shares([], 8) == []
    assert fair_shares([5, 5], 0) == [0, 0]


def test_what_a_short_one_leaves_goes_to_the_long_ones() -> None:
    assert fair_shares([10_000, 3], 64) == [61, 3]
    assert fair_shares([3, 10_000, 10_000], 63) == [3, 30, 30]


@given(st.lists(st.integers(1, 100), max_size=12), st.integers(0, 200))
def test_shares_are_fair_whole_and_within_needs(needs: list[int], budget: int) -> None:
    shares = fair_shares(needs, budget)
    assert sum(shares) == min(budget, sum(needs))
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    hungry = [share for share, need in zip(shares, needs, strict=True) if share < need]
    if hungry:  # nobody has more than one token over the least of those who wanted more
        assert max(shares) - min(hungry) <= 1
        assert min(hungry) >= budget // len(needs)
