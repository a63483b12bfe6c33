"""Triton pieces of an exact top-k: scores as ordered integers, the search for the threshold, places in index order.

The threshold is searched by counting: an interval of keys is cut in three by two thresholds whose counts come from one
reduction, until a threshold separates exactly k entries or the interval is one key wide. At most 21 rounds, about 12
for scores without ties, and no round depends on how the scores are distributed, as buckets of a histogram would.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
"""Key of NaN and of what a row does not see; no number has it."""
_HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def ordered_keys(scores):
    """int32 keys in the order of fp32 scores: -0.0 as 0.0, NaN below -inf."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores == scores, ordered, LOWEST)


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
    # Invariant: count(keys >= low) = count >= picks > above = count(keys >= high).
    low = tl.min(tl.where(seen, keys, _HIGHEST), axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64) + 1
    count = valid
    above = valid * 0
    while (high - low > 1) & (count != picks):
        width = high - low
        # About a third and two thirds; the upper one lies inside the interval whatever its width.
        third = low + ((width * 21845) >> 16)
        two_thirds = low + ((width * 43691) >> 16)
        # Both counts in one word: neither passes 32,768.
        at_third = (keys >= third.to(tl.int32)).to(tl.int32)
        at_two = (keys >= two_thirds.to(tl.int32)).to(tl.int32)
        both = tl.sum(at_third + (at_two << 16), axis=0)
        lower, upper = both & 0xFFFF, (both >> 16) & 0xFFFF
        if upper >= picks:
            low = two_thirds
            count = upper
        else:
            high = tl.where(lower >= picks, two_thirds, third)
            above = tl.where(lower >= picks, upper, lower)
            # At the lower end hidden entries may equal LOWEST: what is counted there is not the count of seen ones.
            count = tl.where((lower >= picks) & (third > low), lower, count)
            low = tl.where(lower >= picks, third, low)
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
        valid: at least SAMPLE or a sample with repeats.
        picks: 1 to ``valid``.
    """
    step = tl.arange(0, SAMPLE).to(tl.int64)
    # One entry of each of SAMPLE equal parts, at a place in it that has no period.
    part = valid // SAMPLE
    place = step * valid // SAMPLE + (((step * 40503) & 0xFFFF) * part >> 16)
    keys = ordered_keys(tl.load(scores + place * scores_col))
    mean = picks * (SAMPLE * 1.0) / valid
    least = (mean + 5.0 * tl.sqrt(mean) + 2.0).to(tl.int32)
    most = least + least // 3
    low = tl.min(keys, axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64) + 1
    count = least * 0 + SAMPLE
    while (high - low > 1) & (count > most):
        width = high - low
        third = low + ((width * 21845) >> 16)
        two_thirds = low + ((width * 43691) >> 16)
        at_third = (keys >= third.to(tl.int32)).to(tl.int32)
        at_two = (keys >= two_thirds.to(tl.int32)).to(tl.int32)
        both = tl.sum(at_third + (at_two << 16), axis=0)
        lower, upper = both & 0xFFFF, (both >> 16) & 0xFFFF
        if upper >= least:
            low = two_thirds
            count = upper
        else:
            high = tl.where(lower >= least, two_thirds, third)
            count = tl.where((lower >= least) & (third > low), lower, count)
            low = tl.where(lower >= least, third, low)
    return low.to(tl.int32)
