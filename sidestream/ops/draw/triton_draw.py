"""Drawing tokens in two Triton kernels: each part of a row gives its largest logit and its weight, then a program a row
finds the part, and in it the token.

Floor at 64 rows of 32,768 fp32: 8.4 MB that the head has just written, 2 us from memory and less from the L2 cache;
2.1 M exponentials in fp64 of 13 operations and a sum, 2 us. Expected: 5 us for the most likely tokens, 8 at a
temperature.

Weights of a part are relative to its own largest logit and are scaled when parts are added, so that logits are read
once. Their sums differ from the sequential ones of ``torch_impl`` by fp64 rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PART = 2048
"""Logits a program."""


def draw_tokens(logits: torch.Tensor, settings: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``torch_impl.draw_tokens``, for rows of adjacent logits."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, PART)
    pdl = isinstance(_parts, triton.JITFunction)
    device = logits.device
    best = torch.empty(rows, parts, dtype=torch.float32, device=device)
    place = torch.empty(rows, parts, dtype=torch.int32, device=device)
    weight = torch.empty(rows, parts, dtype=torch.float64, device=device) if settings is not None else best
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    peaks = torch.empty(rows, dtype=torch.float32, device=device)
    given = logits if settings is None else settings.contiguous()
    drawing = settings is not None
    _parts[(rows, parts)](
        logits, given, best, place, weight, vocab, logits.stride(0), PART=PART, DRAWING=drawing, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    _tokens[(rows,)](
        logits, given, best, place, weight, tokens, peaks, vocab, logits.stride(0), rows, parts, PART=PART,
        PARTS=triton.next_power_of_2(parts), DRAWING=drawing, PDL=pdl, num_warps=8 if drawing else 1, launch_pdl=pdl,
    )  # fmt: skip
    return tokens, peaks


@triton.jit  # type: ignore[untyped-decorator]
def _parts(
    logits: tl.tensor,
    settings: tl.tensor,
    best: tl.tensor,
    place: tl.tensor,
    weight: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    PART: tl.constexpr,
    DRAWING: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """best, place and weight [rows, parts]: a part's largest logit (NaN if it holds one), where, and its weight."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, PART)
    token = part * PART + lane
    logit = tl.load(logits + row * row_stride + token, mask=token < vocab, other=-float("inf"))
    if DRAWING:  # with the logits: behind a store it would be a trip of its own
        temperature = tl.load(settings + row)
    broken = tl.max((logit != logit).to(tl.int32), 0) > 0
    top = tl.max(logit, 0)
    at = row * tl.num_programs(1) + part
    tl.store(best + at, tl.where(broken, float("nan"), top))
    tl.store(place + at, part * PART + tl.min(tl.where(logit == top, lane, PART - 1), 0))
    if DRAWING:
        if temperature > 0.0:
            tl.store(weight + at, tl.sum(relative_weights(logit, top, temperature), 0))
        else:
            tl.store(weight + at, temperature * 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def relative_weights(logit: tl.tensor, top: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """exp((logit - top) / temperature) in fp64, to 1e-12 of itself; 0 for what is impossible and below some 1e-304.

    2 ** n * 2 ** f, where |f| <= 1/2: the polynomial of degree 9 that is 1 at 0 and differs least from 2 ** f, by 8e-14
    of it. Adding 1.5 * 2 ** 52 rounds to the integer n, which then are the lowest bits. Operations in fp64 are what a
    draw costs, so what is zero is told in fp32.
    """
    far = logit.to(tl.float64) - top.to(tl.float64)
    scale = 1.4426950408889634 / temperature
    shifted = far * scale + 6755399441055744.0
    f = far * scale - (shifted - 6755399441055744.0)
    series = f * 9.168123000972248e-08 + 1.3255182740764668e-06
    series = series * f + 1.5258493043374333e-05
    series = series * f + 0.00015403456036911954
    series = series * f + 0.0013333547331502897
    series = series * f + 0.00961812915917182
    series = series * f + 0.05550410873971191
    series = series * f + 0.2402265069581371
    series = series * f + 0.6931471805585505
    series = series * f + 1.0
    bits = series.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
    nothing = (logit == -float("inf")) | ((logit - top) * (scale * 0.6931471805599453).to(tl.float32) <= -700.0)
    return tl.where(nothing, 0.0, bits.to(tl.float64, bitcast=True))


@triton.jit(do_not_specialize=["rows", "parts"])  # type: ignore[untyped-decorator]
def _tokens(
    logits: tl.tensor,
    settings: tl.tensor,
    best: tl.tensor,
    place: tl.tensor,
    weight: tl.tensor,
    tokens: tl.tensor,
    peaks: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    parts: tl.tensor,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    DRAWING: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """tokens and peaks [rows], from what ``_parts`` found."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    tops = tl.load(best + row * parts + part, mask=part < parts, other=-float("inf"))
    if DRAWING:  # all at once, since each alone would be a trip
        temperature, share = tl.load(settings + row), tl.load(settings + rows + row)
        summed = tl.load(weight + row * parts + part, mask=part < parts, other=0.0)
    broken = tl.max((tops != tops).to(tl.int32), 0) > 0
    peak = tl.max(tops, 0)
    first = tl.min(tl.where(tops == peak, part, PARTS), 0)
    token = tl.load(place + row * parts + tl.minimum(first, parts - 1))
    if DRAWING:  # noqa: SIM102  # a constant, then a value
        if temperature > 0.0:
            summed = tl.where(summed > 0.0, summed * relative_weights(tops, peak, temperature), 0.0)
            reached = tl.cumsum(summed, 0)
            total = tl.sum(tl.where(part == PARTS - 1, reached, 0.0), 0)
            target = share * total
            last = tl.max(tl.where(summed > 0.0, part, 0), 0)
            own = tl.min(tl.where((reached > target) & (summed > 0.0), part, PARTS), 0)
            own = tl.minimum(own, last)
            before = tl.sum(tl.where(part == own - 1, reached, 0.0), 0)
            lane = tl.arange(0, PART)
            there = own * PART + lane < vocab
            logit = tl.load(logits + row * row_stride + own * PART + lane, mask=there, other=-float("inf"))
            weights = relative_weights(logit, peak, temperature)
            passed = (before + tl.cumsum(weights, 0) > target) & (weights > 0.0)
            found = tl.min(tl.where(passed, lane, PART), 0)
            # rounding may leave the part's own sum a little short of what the parts' sums promised
            found = tl.minimum(found, tl.max(tl.where(weights > 0.0, lane, 0), 0))
            token = own * PART + found
    tl.store(peaks + row, tl.where(broken, float("nan"), peak))
    tl.store(tokens + row, token.to(tl.int64))
