"""How much longer a step of decodes takes because it also prefills."""

from __future__ import annotations

from collections import deque
from math import sqrt
from typing import NamedTuple

KEPT = 3
"""Last steps of which the one in the middle is learnt from: a single odd one never is."""
SAME_SIZE = 1.25
"""Factor within which two chunks are of one size."""
APART = 2.0
"""Factor by which the two sizes differ at least that tell fixed time from time a token."""
GROWTH = 2.0
"""So many times the larger size is as far as is thought to be known."""
NOISE = 0.5
"""Share of a step of decodes by which that itself may vary: a smaller difference says little about a chunk."""
LEAST = 0.01
"""Of that step, what any chunk adds at least."""
FLATTEST = 0.1
"""Of what a token adds on average, what one more adds at least."""


class Point(NamedTuple):
    """What a chunk of so many tokens added to a step."""

    tokens: int
    seconds: float


class ChunkTimes:
    """A fixed time and a time a token, as a line through two points: a smaller chunk and a larger one.

    Times change while chunks stay of one size (contexts grow, machines get busy), which says nothing about the line's
    slope: then both points move alike. A chunk of another size takes the place of the nearer point.

    Attributes:
        fixed: seconds that any prefill adds to a step.
        per_token: seconds that each of its tokens adds; 0 as long as nothing is known.
    """

    def __init__(self) -> None:
        self.fixed = 0.0
        self.per_token = 0.0
        self._recent: deque[Point] = deque(maxlen=KEPT)
        self._small = self._large = Point(0, 0.0)

    @property
    def known(self) -> bool:
        return self.per_token > 0

    def observe(self, tokens: int, seconds: float, *, alone: float) -> None:
        """A step took so long with so many tokens of prefill, and would have taken ``alone`` without."""
        recent = self._recent
        recent.append(Point(tokens, max(seconds - alone, LEAST * alone)))
        if len(recent) < KEPT:
            return
        if self.known:
            noise = NOISE * alone
            fixed, per_token = self.fixed + noise, self.per_token
            changes = [((added + noise) / (fixed + per_token * n), n, added) for n, added in recent]
            change, n, added = sorted(changes)[KEPT // 2]
            self._learn(Point(n, added), change=sqrt(change))
        else:
            self._small = self._large = sorted(recent, key=lambda point: point.seconds / point.tokens)[KEPT // 2]
        self._fit()

    def expected(self, tokens: int) -> float:
        """Seconds that so many tokens add."""
        return self.fixed + self.per_token * tokens

    def tokens_within(self, seconds: float) -> int:
        """Tokens that add no more than that, as far as larger chunks have been seen; 0 if any adds more."""
        tokens = max(0.0, (seconds - self.fixed) / self.per_token)
        return int(min(tokens, GROWTH * self._large.tokens))

    def worthwhile_tokens(self) -> int:
        """Tokens that add as much as any prefill does, and not many times more than the last steps had."""
        usual = sorted(self._recent)[KEPT // 2].tokens
        return int(min(self.fixed / self.per_token, GROWTH * usual))

    def _learn(self, point: Point, *, change: float) -> None:
        """Take a point in, or move both by a factor."""
        smaller = point.tokens < sqrt(self._small.tokens * self._large.tokens)
        near, other = (self._small, self._large) if smaller else (self._large, self._small)
        same_size = near.tokens <= point.tokens * SAME_SIZE and point.tokens <= near.tokens * SAME_SIZE
        apart = max(point.tokens, other.tokens) >= APART * min(point.tokens, other.tokens)
        if apart and not same_size:
            self._small, self._large = sorted((point, other))
        else:
            self._small = Point(self._small.tokens, self._small.seconds * change)
            self._large = Point(self._large.tokens, self._large.seconds * change)

    def _fit(self) -> None:
        """The line through both points, as far as it rises neither too little nor from below nothing."""
        small, large = self._small, self._large
        steepest = large.seconds / large.tokens
        slope = steepest
        if small.tokens < large.tokens:
            slope = (large.seconds - small.seconds) / (large.tokens - small.tokens)
        self.per_token = min(max(slope, FLATTEST * steepest), steepest)
        self.fixed = max(0.0, large.seconds - self.per_token * large.tokens)
