"""Random numbers without state: the n-th number of a seed's stream is a function of the seed and n alone.

So what a request draws depends neither on its neighbours nor on how often it was preempted.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits: number ``index`` of the stream of ``seed``.

    SplitMix64 (Steele, Lea, Flood 2014), its state jumped to: the seed is mixed once so that the streams of
    neighbouring seeds do not overlap.
    """
    start = _mix(seed + _GOLDEN & _MASK)
    return (_mix(start + (index + 1) * _GOLDEN & _MASK) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """Finaliser of SplitMix64: a bijection of 64-bit integers."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
