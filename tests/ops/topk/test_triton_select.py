"""The Triton top-k in the interpreter or on the GPU: rows held whole, filtered by one program and by several."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sidestream.ops.topk import reference
from sidestream.ops.topk.triton_select import (
    MAX_BLOCK,
    MAX_SPLITS,
    SelectPlan,
    select_plan,
    select_rows,
    topk_ascending,
)
from tests.ops.triton_mode import DEVICE

INF, NAN = math.inf, math.nan
POISON = 0x7F7F7F7F
ONE = SelectPlan(small=256, merge=0, tile=0, sample=0, splits=1, warps=4)
LISTS = SelectPlan(small=16, merge=64, tile=32, sample=32, splits=1, warps=4)
SPLITS = replace(LISTS, splits=3)
EVERYTHING = replace(LISTS, sample=2, splits=2)
"""Of two entries no sample is large enough: the threshold is the lower one, and mostly more reach it than fit."""
PLANS = {"one": ONE, "lists": LISTS, "splits": SPLITS, "everything": EVERYTHING}


def select(scores: torch.Tensor, valid: torch.Tensor, k: int, plan: SelectPlan, *, ticket: bool = True) -> torch.Tensor:
    scores, valid = scores.to(DEVICE), valid.to(DEVICE)
    out = torch.full((scores.shape[0], k), POISON, dtype=torch.int32, device=DEVICE)
    tickets = torch.zeros(scores.shape[0], dtype=torch.int32, device=DEVICE) if ticket else None
    select_rows(scores, valid, out, picks=k, kpool=1, per_block=1, plan=plan, tickets=tickets)
    assert tickets is None or not tickets.any(), "the program that picks leaves the tickets at zero"
    return out.cpu()


def hard_scores(rows: int, size: int) -> torch.Tensor:
    """Rows with many ties, all equal, NaN of both signs, infinities, zeros of both signs, and one of extremes."""
    scores = torch.randn(rows, size).round(decimals=1)
    scores[0] = -0.0
    scores[0, ::5] = 0.0
    scores[1, ::3], scores[1, 1::3] = NAN, -NAN
    scores[2] = -INF
    scores[2, 5:60:9] = torch.tensor([INF, 1e-45, -1e-45, 3.4e38, -3.4e38, 0.0, INF])
    scores[3] = NAN
    scores[4] = torch.randn(size) * 1e6
    return scores


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_equals_the_reference(plan: SelectPlan) -> None:
    scores = hard_scores(9, 230)
    short, long = [0, 1, 11, 12, 13, 16, 17, 64, 65], [128, 192, 193, 229, 63, 230, 130, 66, 2]
    for k, valid, poison in ((12, short, NAN), (12, long, INF), (1, long, NAN)):
        lens = torch.tensor(valid)
        hidden = torch.arange(230) >= lens[:, None]
        got = select(scores.masked_fill(hidden, poison), lens, k, plan, ticket=k > 1)
        assert torch.equal(got, reference.topk_ascending(scores, lens, k)), (k, valid)


@pytest.mark.parametrize("value", [0.0, -INF, INF, NAN])
def test_all_equal_takes_the_lowest(value: float) -> None:
    for plan in PLANS.values():
        got = select(torch.full((2, 200), value), torch.tensor([200, 3]), 16, plan)
        assert got[0].tolist() == list(range(16))
        assert got[1].tolist() == [0, 1, 2, *[-1] * 13]


def test_rows_do_not_depend_on_each_other() -> None:
    scores, valid = hard_scores(6, 200), torch.tensor([200, 131, 70, 200, 199, 40])
    together = select(scores, valid, 8, SPLITS)
    alone = torch.cat([select(scores[i : i + 1], valid[i : i + 1], 8, ONE) for i in range(6)])
    assert torch.equal(together, alone)


def test_the_operator_with_strides_and_empty_shapes() -> None:
    wide = torch.randn(6, 90, device=DEVICE)
    scores, valid = wide[::2, ::3], torch.tensor([30, 9, 0, 7, 8, 9], device=DEVICE)[::2]
    want = reference.topk_ascending(scores.cpu(), valid.cpu(), 10)
    assert torch.equal(topk_ascending(scores, valid, 10).cpu(), want)
    column = torch.randn(50, 3, device=DEVICE).t()
    few = torch.tensor([50, 2, 9], device=DEVICE)
    assert torch.equal(topk_ascending(column, few, 60).cpu(), reference.topk_ascending(column.cpu(), few.cpu(), 60))
    none = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert topk_ascending(torch.randn(2, 0, device=DEVICE), none, 3).tolist() == [[-1] * 3] * 2
    assert topk_ascending(wide[:0], none[:0], 3).shape == (0, 3)
    assert topk_ascending(wide[:2], none, 0).shape == (2, 0)


def test_a_threshold_that_too_few_reach_is_noticed() -> None:
    """The sample takes the lowest of all scores for a high one: every place it looks at holds an infinity."""
    size, sample = 192, 64
    scores = torch.randn(3, size)
    step = torch.arange(sample)
    looked_at = step * size // sample + (((step * 40503) & 0xFFFF) * (size // sample) >> 16)
    assert len(looked_at.unique()) == sample
    scores[:, looked_at] = INF
    plan, valid = replace(SPLITS, sample=sample, merge=128), torch.full((3,), size)
    want = reference.topk_ascending(scores, valid, 100)
    assert torch.equal(select(scores, valid, 100, plan), want)
    assert int((want[0] >= 0).sum()) == 100


@pytest.mark.parametrize(("splits", "merge", "ticket"), [(1, 256, True), (3, 512, False), (10, 1024, True)])
def test_lists_of_all_lengths_are_joined_in_order(splits: int, merge: int, ticket: bool) -> None:
    """High scores lie in one part of the row, in two, in all: some lists are empty, and one is nearly all. Of 2,000
    entries some 100 to 150 reach a threshold for 24 (``key_of_sample``), which fits ``merge`` with 32 for each list."""
    scores = torch.randn(4, 2000)
    scores[0, 100:130] += 9
    scores[1, :9] += 9
    scores[1, 1980:] += 9
    scores[2, 1999] += 9
    valid = torch.tensor([2000, 2000, 2000, 1790])
    plan = SelectPlan(small=16, merge=merge, tile=128, sample=256, splits=splits, warps=4)
    assert torch.equal(select(scores, valid, 24, plan, ticket=ticket), reference.topk_ascending(scores, valid, 24))


@pytest.mark.parametrize(
    ("entries", "picks"), [(64, 512), (2048, 512), (8193, 512), (65536, 512), (65536, 2048), (1 << 20, 2048)]
)
@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_plans_hold_what_they_promise(entries: int, picks: int, rows: int) -> None:
    plan = select_plan(entries, picks, rows=rows)
    assert plan is not None
    assert 1 <= plan.warps <= 32
    if entries > plan.small:
        assert 2 * picks < plan.merge <= MAX_BLOCK
        assert 1 <= plan.splits <= min(MAX_SPLITS, entries // plan.tile + 1)
        assert plan.sample <= plan.small, "rows that are sampled are longer than a sample"
    else:
        assert plan.splits == 1


def test_what_no_program_can_hold_has_no_plan() -> None:
    assert select_plan(1 << 17, 1 << 14, rows=1) is None
    scores = torch.randn(1, 1 << 17, device=DEVICE)
    valid = torch.tensor([1 << 17], device=DEVICE)
    got = topk_ascending(scores, valid, 1 << 14)[0].cpu()
    assert set(got.tolist()) == set(scores[0].topk(1 << 14).indices.tolist())
