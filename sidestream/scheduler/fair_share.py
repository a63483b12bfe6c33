"""How a token budget is split among prefilling sequences."""

from __future__ import annotations

from collections.abc import Sequence


def fair_shares(needs: Sequence[int], budget: int) -> list[int]:
    """Max-min fair split: everyone gets an equal share, or its need where that is less; what one leaves goes to others.

    So no share depends on how large another need is, beyond the equal share. Tokens that do not divide evenly go one
    each to the first in order. The whole budget is given out unless all needs are met.

    Args:
        needs: what each could use, in order of arrival.
    Returns:
        One share each, at most its need; their sum is min(budget, sum(needs)).
    """
    shares = list(needs)
    left = budget
    by_need = sorted(range(len(needs)), key=needs.__getitem__)
    for rank, i in enumerate(by_need):
        sharing = len(needs) - rank
        if needs[i] * sharing > left:
            level, extra = divmod(left, sharing)
            for place, j in enumerate(sorted(by_need[rank:])):
                shares[j] = level + (place < extra)
            break
        left -= needs[i]
    return shares


def shares_by_turn(needs: Sequence[int], budget: int, *, quantum: int) -> list[int]:
    """Serve as many from the front as get at least ``quantum`` tokens, or all they need; the first in any case.

    Args:
        needs: what each could use, at least 1, in the order of turns.
    Returns:
        One share for each that is served.
    """
    left, served = budget, 0
    for need in needs:
        least = min(need, quantum)
        if left == 0 or (served and least > left):
            break
        left -= min(least, left)
        served += 1
    return fair_shares(needs[:served], budget)


def within_limit(sizes: Sequence[int], *, ahead: Sequence[bool], limit: int) -> list[int]:
    """Choose, in the order of turns, as many as fit a limit together; the first in any case. One that does not fit lets
    those behind it by.

    Args:
        ahead: whether one may go ahead of others that were left out; all others keep their order.
    Returns:
        Their indices.
    """
    chosen: list[int] = []
    left, blocked = limit, False
    for i, size in enumerate(sizes):
        if (chosen and size > left) or (blocked and not ahead[i]):
            blocked = blocked or not ahead[i]
            continue
        left -= size
        chosen.append(i)
    return chosen
