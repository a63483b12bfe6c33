"""Triton pieces of an exact top-k: scores as ordered integers, the search for the threshold, places in index order.

The threshold is searched by counting: an interval of keys is cut in three by two thresholds whose counts come from one
reduction, until a threshold separates exactly k entries or the interval is one key wide. The first two lie close
around where mean and deviation put the wanted quantile of a normal variable, the others at thirds: about 6 rounds for
index scores instead of 11, and never more than 22.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
"""Key of NaN and of what a row does not see; no number has it."""
_HIGHEST = tl.constexpr(2**31 - 1)
_SPREAD = tl.constexpr(0.1)
"""Deviations that the first two thresholds lie off the guess."""


@triton.jit
def ordered_keys(scores):
    """int32 keys in the order of fp32 scores: -0.0 as 0.0, NaN below -inf."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores == scores, ordered, LOWEST)


@triton.jit
def _deviate(share):
    """How many deviations above the mean a normal variable is in ``share`` of the cases, to 0.003: Hastings' formula
    (Abramowitz and Stegun, 26.2.22)."""
    tail = tl.minimum(share, 1.0 - share)
    t = tl.sqrt(-2.0 * tl.log(tl.maximum(tail, 1e-9)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + (0.99229 + 0.04481 * t) * t)
    return tl.where(share < 0.5, z, -z)


@triton.jit
def _joined(low, high, total, square, other_low, other_high, other_total, other_square):
    return tl.minimum(low, other_low), tl.maximum(high, other_high), total + other_total, square + other_square


@triton.jit
def threshold_of(keys, seen, valid, least, most):
    """A key that at least ``least`` and, unless equal scores forbid it, at most ``most`` of ``keys`` reach.

    Args:
        keys: [BLOCK] int32, BLOCK at most 32,768; ``LOWEST`` where not ``seen``.
        seen: [BLOCK] bool.
        valid: number of seen keys.
        least, most: 1 to ``valid``.
    Returns:
        low, high, above: count(keys >= low) >= least > above = count(keys >= high). The first is at most ``most``, or
        high = low + 1. Keys that are not seen are not counted.
    """
    z = _deviate((least + most) * 0.5 / valid)
    values = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    values = tl.where(tl.abs(values) < 1e16, values, 0.0)  # neither NaN nor what has no square
    lows = tl.where(seen, keys, _HIGHEST)
    lowest, highest, total, square = tl.reduce((lows, keys, values, values * values), 0, _joined)
    mean = total / valid
    deviation = tl.sqrt(tl.maximum(square / valid - mean * mean, 0.0))
    low, high = lowest.to(tl.int64), highest.to(tl.int64) + 1
    first = ordered_keys(mean + (z - _SPREAD) * deviation).to(tl.int64)
    second = ordered_keys(mean + (z + _SPREAD) * deviation).to(tl.int64)
    guess = (first > low) & (first < second) & (second < high)
    count = valid
    above = valid * 0
    while (high - low > 1) & (count > most):
        width = high - low
        # About a third and two thirds; the upper one lies inside the interval whatever its width.
        third = tl.where(guess, first, low + ((width * 21845) >> 16))
        two_thirds = tl.where(guess, second, low + ((width * 43691) >> 16))
        guess = count < 0
        # Both counts in one word: neither passes 32,768.
        at_third = (keys >= third.to(tl.int32)).to(tl.int32)
        at_two = (keys >= two_thirds.to(tl.int32)).to(tl.int32)
        both = tl.sum(at_third + (at_two << 16), axis=0)
        lower, upper = both & 0xFFFF, (both >> 16) & 0xFFFF
        if upper >= least:
            low = two_thirds
            count = upper
        else:
            high = tl.where(lower >= least, two_thirds, third)
            above = tl.where(lower >= least, upper, lower)
            # At the lower end hidden entries may equal LOWEST: what is counted there is not the count of seen ones.
            count = tl.where((lower >= least) & (third > low), lower, count)
            low = tl.where(lower >= least, third, low)
    return low, high, above


@triton.jit
def places_of_best(keys, seen, valid, picks):
    """Which of ``keys`` are the ``picks`` highest, ties to the lowest index, and where they go in index order.

    Args:
        keys: [BLOCK] int32, BLOCK at most 32,768; ``LOWEST`` where not ``seen``.
        seen: [BLOCK] bool; a prefix, unless no key that is seen is ``LOWEST``.
        valid: number of seen entries.
        picks: 1 to ``valid``.
    Returns:
        chosen [BLOCK] bool and places [BLOCK] int32, which mean something where chosen.
    """
    low, high, above = threshold_of(keys, seen, valid, picks, picks)
    # All above the band are taken, and of the band the first: it is one key wide, or holds just as many as are needed.
    top = (high - 1).to(tl.int32)
    over = keys > top
    band = (keys >= low.to(tl.int32)) & (keys <= top)
    needed = picks - above
    ranks = tl.cumsum(over.to(tl.int32) + (band.to(tl.int32) << 16), axis=0)
    over_rank, band_rank = ranks & 0xFFFF, (ranks >> 16) & 0xFFFF
    chosen = over | (band & (band_rank <= needed))
    return chosen, over_rank + tl.minimum(band_rank, needed) - 1


@triton.jit
def key_of_sample(scores, scores_col, valid, picks, SAMPLE: tl.constexpr):
    """A key that, by a sample of the row, somewhat more than ``picks`` entries reach.

    The number of the ``picks`` best in a sample of SAMPLE has mean m = picks * SAMPLE / valid and at most the deviation
    sqrt(m). The key is reached by 5 sqrt(m) + 2 more of the sample than m, so fewer than ``picks`` of the row reach it
    about once in three million rows, and by a third more than that at most, unless equal scores forbid it.

    Args:
        scores: the row; ``scores_col`` its stride.
        valid: entries of the row; fewer than SAMPLE are sampled with repeats.
        picks: 1 to ``valid``.
    """
    step = tl.arange(0, SAMPLE).to(tl.int64)
    # One entry of each of SAMPLE equal parts, at a place in it that has no period.
    part = valid // SAMPLE
    place = step * valid // SAMPLE + (((step * 40503) & 0xFFFF) * part >> 16)
    keys = ordered_keys(tl.load(scores + place * scores_col))
    mean = picks * (SAMPLE * 1.0) / valid
    least = tl.minimum((mean + 5.0 * tl.sqrt(mean) + 2.0).to(tl.int32), SAMPLE)
    low, _, _ = threshold_of(keys, step >= 0, least * 0 + SAMPLE, least, least + least // 3)
    return low.to(tl.int32)
