"""Triton pieces of an exact top-k: scores as ordered integers, the search for the threshold, places in index order.

The threshold is searched by counting: an interval of keys is cut in three by two thresholds whose counts come from one
reduction, until a threshold separates exactly k entries or the interval is one key wide. Thresholds are guessed, first
from mean and deviation, as if scores were normal, then by interpolation between the ends; a guess that does not pay is
followed by a round of equal thirds, so that 42 rounds are enough whatever the scores are. Normal ones take 5.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
"""Key of NaN and of what a row does not see; no number has it."""
_HIGHEST = tl.constexpr(0x7F800001)
"""Above every key: that of infinity is one less."""
_SPREAD = tl.constexpr(0.1)
"""Deviations that a quantile may lie off the normal distribution's, for the first guess to hold it."""


@triton.jit
def ordered_keys(scores):
    """int32 keys in the order of fp32 scores: -0.0 as 0.0, NaN below -inf."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores == scores, ordered, LOWEST)


@triton.jit
def _value(keys):
    """What has these keys, and whether it is a number that can be squared and summed; 0.0 where it is not."""
    bits = keys ^ ((keys >> 31) & 0x7FFFFFFF)
    values = bits.to(tl.float32, bitcast=True)
    usable = tl.abs(values) < 1e16
    return tl.where(usable, values, 0.0), usable


@triton.jit
def _deviate(share):
    """How many deviations above the mean a normal variable is in ``share`` of the cases, to 0.003: Hastings' formula
    (Abramowitz and Stegun, 26.2.22)."""
    tail = tl.minimum(share, 1.0 - share)
    t = tl.sqrt(-2.0 * tl.log(tl.maximum(tail, 1e-9)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + (0.99229 + 0.04481 * t) * t)
    return tl.where(share < 0.5, z, -z)


@triton.jit
def threshold_of(keys, valid, least, most):
    """A key that at least ``least`` and, unless equal scores forbid it, at most ``most`` of ``keys`` reach.

    Args:
        keys: [BLOCK] int32, BLOCK at most 32,768; ``LOWEST`` where not seen.
        valid: number of seen keys.
        least, most: 1 to ``valid``.
    Returns:
        low, high, count, above: count(keys >= low) = count >= least > above = count(keys >= high), where ``count``
        leaves out keys that are not seen; either count is at most ``most``, or high = low + 1.
    """
    values, _ = _value(keys)
    mean = tl.sum(values, axis=0) / valid
    deviation = tl.sqrt(tl.maximum(tl.sum(values * values, axis=0) / valid - mean * mean, 0.0))
    wanted = (least + most) * 0.5
    z = _deviate(wanted / valid)
    first = ordered_keys(mean + (z - _SPREAD) * deviation).to(tl.int64)
    second = tl.maximum(ordered_keys(mean + (z + _SPREAD) * deviation).to(tl.int64), first + 1)
    low = valid.to(tl.int64) * 0 + LOWEST
    high = low - LOWEST + _HIGHEST
    count = valid
    above = valid * 0
    guess = count > 0
    while (high - low > 1) & (count > most):
        width = high - low
        guess = guess & (first > low) & (second < high)
        # Else about a third and two thirds; the upper one lies inside the interval whatever its width.
        first = tl.where(guess, first, low + ((width * 21845) >> 16))
        second = tl.where(guess, second, low + ((width * 43691) >> 16))
        # Both counts in one word: neither passes 32,768.
        at_first = (keys >= first.to(tl.int32)).to(tl.int32)
        at_second = (keys >= second.to(tl.int32)).to(tl.int32)
        both = tl.sum(at_first + (at_second << 16), axis=0)
        lower, upper = both & 0xFFFF, (both >> 16) & 0xFFFF
        # At the lower end hidden entries may equal LOWEST: what is counted there is not the count of seen ones.
        count = tl.where(upper >= least, upper, tl.where((lower >= least) & (first > low), lower, count))
        above = tl.where(upper >= least, above, tl.where(lower >= least, upper, lower))
        high = tl.where(upper >= least, high, tl.where(lower >= least, second, first))
        low = tl.where(upper >= least, second, tl.where(lower >= least, first, low))
        guess = (guess == 0) | ((high - low) * 3 < width)
        # Where the wanted count lies between the ends, give or take about the deviation of counts as they are there.
        inside = (count - above).to(tl.float32)
        at, margin = (count - wanted) / inside, 0.5 / tl.sqrt(inside)
        bottom, has_bottom = _value(low.to(tl.int32))
        top, has_top = _value(high.to(tl.int32))
        lower_guess = bottom + (top - bottom) * (at - margin)
        upper_guess = bottom + (top - bottom) * (at + margin)
        # An end that is no number: on from the other.
        lower_guess = tl.where(has_top, lower_guess, bottom + 0.5 * deviation)
        upper_guess = tl.where(has_top, upper_guess, bottom + 2.0 * deviation)
        lower_guess = tl.where(has_bottom, lower_guess, top - 2.0 * deviation)
        upper_guess = tl.where(has_bottom, upper_guess, top - 0.5 * deviation)
        first, second = ordered_keys(lower_guess).to(tl.int64), ordered_keys(upper_guess).to(tl.int64)
        # Between ends of one sign keys are nearly logarithms, which suits long tails.
        alike = has_bottom & has_top & ((low < 0) == (high < 0))
        size = (high - low).to(tl.float32)
        first = tl.where(alike, low + (size * (at - margin)).to(tl.int64), first)
        second = tl.where(alike, low + (size * (at + margin)).to(tl.int64), second)
        first = tl.maximum(first, low + 1)
        second = tl.maximum(tl.minimum(second, high - 1), first + 1)
    return low, high, count, above


@triton.jit
def places_of_best(keys, seen, valid, picks):
    """Which of ``keys`` are the ``picks`` highest, ties to the lowest index, and where they go in index order.

    Args:
        keys: [BLOCK] int32, BLOCK at most 32,768; ``LOWEST`` where not ``seen``.
        seen: [BLOCK] bool, a prefix.
        valid: number of seen entries.
        picks: 1 to ``valid``.
    Returns:
        chosen [BLOCK] bool and places [BLOCK] int32, which mean something where chosen.
    """
    low, high, _, above = threshold_of(keys, valid, picks, picks)
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
    low, _, _, _ = threshold_of(keys, least * 0 + SAMPLE, least, least + least // 3)
    return low.to(tl.int32)
