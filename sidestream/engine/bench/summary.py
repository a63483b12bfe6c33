"""A sample of measured values in few figures: mean, percentiles, and how far repeats lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Of at least one value, in the unit of the values."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary | None:
        """None where there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(len(ordered), statistics.fmean(ordered), ordered[0], p50, p90, p99, ordered[-1])

    def as_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Spread:
    """The same figure of several repeats."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of an ascending sample lies, linear between neighbours (numpy's default)."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
