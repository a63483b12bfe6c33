"""Router in Triton: scores of parts of the depth, then their sum, the sigmoid and the choice. fp32 throughout.

Floor: the weights once, 4 * E * H bytes (4.7 MB, 1.1 us, at 288 experts and H = 4,096; 1 MB, 0.25 us, at 64), so two
launches of about 2 us each are what there is to pay; predicted 5 us at 1 token, 6 at 16, 12 at 64 (302 MFLOP in fp32
at 288 experts).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.moe.triton_tiles import RouterTiles, dividing
from sidestream.ops.triton_rounding import bf16_terms, lone_product, not_before

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""The interpreter multiplies bf16 wrongly."""


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    norm_topk_prob: bool,
    scale: float,
    live: torch.Tensor | None = None,
    tiles: RouterTiles | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch_impl.route`` for at least one token; NaN counts as the worst score and still names experts.

    A token's bits depend on the token, on the number of tokens and on ``tiles``; without ``tiles`` the product is the
    library's, and may depend on the batch as any GEMM's.
    """
    T, H = x.shape
    E = weight.shape[0]
    pdl = tiles is not None and tiles.pdl and not INTERPRETED
    if tiles is None:
        parts = torch.nn.functional.linear(x.float(), weight).unsqueeze(0)
    else:
        depth = dividing(H, tiles.depth)
        splits = max(splits for splits in range(1, tiles.splits + 1) if H // depth % splits == 0)
        parts = torch.empty(splits, T, E, dtype=torch.float32, device=x.device)
        _scores[(triton.cdiv(E, tiles.experts), splits, triton.cdiv(T, tiles.rows))](
            x,
            weight,
            parts,
            T,
            E,
            x.stride(0),
            H=H,
            ROWS=tiles.rows,
            EXPERTS=tiles.experts,
            DEPTH=depth,
            STEPS=H // depth // splits,
            DOT=tiles.dot,
            STAGES=tiles.stages,
            SPLIT=tiles.dot and x.dtype is torch.bfloat16 and not INTERPRETED,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=tiles.warps,
        )
    weights = torch.empty(T, top_k, dtype=torch.float32, device=x.device)
    ids = torch.empty(T, top_k, dtype=torch.int64, device=x.device)
    size = E // num_groups
    groups, width = triton.next_power_of_2(num_groups), triton.next_power_of_2(size)
    _choose[(T,)](
        parts,
        bias,
        ids if live is None else live,
        weights,
        ids,
        T,
        E,
        size,
        num_groups,
        float(scale),
        int(live is not None),
        SPLITS=parts.shape[0],
        TOP_K=top_k,
        KEPT=topk_groups,
        ALL_KEPT=topk_groups == num_groups,
        NORMALISED=norm_topk_prob,
        GROUPS=groups,
        SIZE=width,
        PLACES=triton.next_power_of_2(top_k),
        COUNTED=tiles is not None and tiles.counted,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1 if tiles is None else tiles.choice_warps,
    )
    return weights, ids


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _scores(
    x: tl.tensor,
    weight: tl.tensor,
    parts: tl.tensor,
    tokens: tl.tensor,
    num_experts: tl.tensor,
    x_stride: tl.tensor,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """parts [splits, tokens, num_experts]: x times weight over STEPS * DEPTH of the depth a split.

    With ``SPLIT`` fp32 weights are three bf16 terms (24 bits), whose products with bf16 tokens are exact: matrix units
    then add in fp32.
    """
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    split = tl.program_id(1)
    token = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    k = split * (STEPS * DEPTH) + tl.arange(0, DEPTH)
    known, real = expert < num_experts, token < tokens
    x_row = tl.minimum(token, tokens - 1).to(tl.int64) * x_stride
    weight_row = tl.minimum(expert, num_experts - 1) * H
    if DOT and STEPS == 1:
        if PDL:
            gdc_launch_dependents()
        x_at, weight_at = x + x_row[:, None] + k[None, :], weight + weight_row[None, :] + k[:, None]
        factor = tl.load(weight_at)  # weights never change, so they need not wait for the kernel before
        if PDL:
            gdc_wait()
        row = tl.load(x_at)
        nothing = tl.zeros([ROWS, EXPERTS], tl.float32)
        if SPLIT:
            high, middle, low = bf16_terms(not_before(factor))
            total = tl.dot(row, low, nothing) + tl.dot(row, middle, nothing) + tl.dot(row, high, nothing)
        else:
            total = tl.dot(row.to(tl.float32), factor, nothing, input_precision="ieee")
    elif DOT:
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        x_at, weight_at = x + x_row[:, None] + k[None, :], weight + weight_row[None, :] + k[:, None]
        total = tl.zeros([ROWS, EXPERTS], tl.float32)
        for step in tl.range(0, STEPS, num_stages=STAGES):
            row, factor = tl.load(x_at + step * DEPTH), tl.load(weight_at + step * DEPTH)
            if SPLIT:
                high, middle, low = bf16_terms(factor)
                total = tl.dot(row, low, total)
                total = tl.dot(row, middle, total)
                total = tl.dot(row, high, total)
            else:
                total = tl.dot(row.to(tl.float32), factor, total, input_precision="ieee")
    else:
        x_at = x + x_row[:, None, None] + k[None, None, :]
        weight_at = weight + weight_row[None, :, None] + k[None, None, :]
        ahead = tl.load(weight_at)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        lanes = lone_product(tl.load(x_at).to(tl.float32), ahead)
        for step in tl.range(1, STEPS, num_stages=STAGES):
            lanes += tl.load(x_at + step * DEPTH).to(tl.float32) * tl.load(weight_at + step * DEPTH)
        total = tl.sum(lanes, 2)
    at = parts + (split.to(tl.int64) * tokens + token[:, None]) * num_experts + expert[None, :]
    tl.store(at, total, mask=real[:, None] & known[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _rank(value: tl.tensor, number: tl.tensor, there: tl.tensor) -> tl.tensor:
    """int64 keys that sort as (value up, number down); what is not there is below all. NaN counts as -inf. The number
    is -key modulo 65,536.

    The bits of a float, read as an integer, sort as the float does if those of negative ones are flipped.
    """
    value = tl.where(value == value, value, -float("inf"))
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(there, ordered * 65536 - number, -0x7FFFFFFFFFFFFFFF)


@triton.jit(do_not_specialize=["tokens", "padded"], do_not_specialize_on_alignment=["live"])  # type: ignore[untyped-decorator]
def _choose(
    parts: tl.tensor,
    bias: tl.tensor,
    live: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    tokens: tl.tensor,
    num_experts: tl.tensor,
    size: tl.tensor,
    num_groups: tl.tensor,
    scale: float,
    padded: tl.tensor,
    SPLITS: tl.constexpr,
    TOP_K: tl.constexpr,
    KEPT: tl.constexpr,
    ALL_KEPT: tl.constexpr,
    NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One token: experts lie as [GROUPS, SIZE], so that a group's best two are maxima over an axis. ``live`` counts if
    ``padded``."""
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    there = (group[:, None] < num_groups) & (member[None, :] < size)
    expert = group[:, None] * size + member[None, :]
    added = tl.load(bias + expert, mask=there, other=0.0)  # never changes
    own, share = parts + token * num_experts, num_experts.to(tl.int64) * tokens
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    alive = tl.load(live + token, mask=padded != 0, other=1) > 0
    logit = tl.zeros([GROUPS, SIZE], tl.float32)
    for split in tl.static_range(SPLITS):
        logit += tl.load(own + split * share + expert, mask=there, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logit))
    biased = score + added
    biased = tl.where(biased == biased, biased, -float("inf"))
    if not ALL_KEPT:
        key = _rank(biased, expert, there)
        best = tl.max(key, 1)
        first = tl.max(tl.where(there, biased, -float("inf")), 1)
        others = there & (key != best[:, None])
        second = tl.max(tl.where(others, biased, -float("inf")), 1)
        worth = tl.where(size > 1, first + second, first)
        group_key = _rank(worth, group, group < num_groups)
        kept = group < 0
        for _ in tl.static_range(KEPT):
            taken = group_key == tl.max(group_key, 0)
            kept = kept | taken
            group_key = tl.where(taken, -0x7FFFFFFFFFFFFFFF, group_key)
        there = there & kept[:, None]
    key = _rank(biased, expert, there)
    if COUNTED:
        keys, score = key.reshape(GROUPS * SIZE), score.reshape(GROUPS * SIZE)
        place = tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), 0)
        taken = place < TOP_K
        chosen = tl.where(taken, score, 0.0)
        chosen_ids = -keys & 0xFFFF
    else:
        place = tl.arange(0, PLACES)
        taken = place < TOP_K
        chosen_ids = tl.zeros([PLACES], tl.int64)
        for i in tl.static_range(TOP_K):
            best_key = tl.max(tl.max(key, 1), 0)
            chosen_ids = tl.where(place == i, -best_key & 0xFFFF, chosen_ids)
            key = tl.where(key == best_key, -0x7FFFFFFFFFFFFFFF, key)
        # Read again rather than picked from the tile, which would cost a reduction a place: the same sum and bits.
        chosen_logit = tl.zeros([PLACES], tl.float32)
        for split in tl.static_range(SPLITS):
            chosen_logit += tl.load(own + split * share + chosen_ids)
        chosen = tl.where(taken, 1.0 / (1.0 + tl.exp(-chosen_logit)), 0.0)
    if NORMALISED:
        chosen = chosen / (tl.sum(chosen, 0) + 1e-20)
    chosen_ids = tl.where(alive, chosen_ids, -1)
    at = token * TOP_K + place
    tl.store(weights + at, chosen * scale, mask=taken)
    tl.store(ids + at, chosen_ids, mask=taken)
