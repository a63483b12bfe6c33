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
