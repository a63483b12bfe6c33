"""Top-k on a GPU at real shapes: ties, NaN, ragged rows, every way to share a row, repeats, graphs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sidestream.ops.topk import reference, topk_ascending, torch_impl
from sidestream.ops.topk.triton_select import SelectPlan, select_plan, select_rows

pytestmark = pytest.mark.gpu

POISON = 0x7F7F7F7F
SHAPES = [(1, 2048, 512), (64, 2048, 512), (7, 8192, 2048), (64, 32768, 512), (4, 131072, 2048), (3, 163840, 2048)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def draw(rows: int, size: int) -> torch.Tensor:
    """Rows in turn: without ties, with many, with NaN, of infinities, all equal."""
    scores = torch.randn(rows, size, device="cuda")
    scores[1::5] = scores[1::5].round(decimals=1)
    scores[2::5, ::3] = math.nan
    scores[3::5] = scores[3::5].sign() * math.inf
    scores[4::5] = 0.0
    scores[4::5, ::2] = -0.0
    return scores


def lengths(rows: int, size: int, k: int) -> torch.Tensor:
    some = [size, size - 1, k + 1, k, k - 1, 0, 1, min(8193, size), min(16385, size), size // 2]
    return torch.tensor((some * (rows // len(some) + 1))[:rows], device="cuda")


@pytest.mark.parametrize(("rows", "size", "k"), SHAPES)
def test_equals_torch_twenty_times(rows: int, size: int, k: int) -> None:
    scores, valid = draw(rows, size), lengths(rows, size, k)
    want = torch_impl.topk_ascending(scores.cpu(), valid.cpu(), k)
    hidden = torch.arange(size, device="cuda") >= valid[:, None]
    for poison in (math.nan, math.inf):
        scores.masked_fill_(hidden, poison)
        for _ in range(10):
            assert torch.equal(topk_ascending(scores, valid, k).cpu(), want)


def test_equals_the_reference() -> None:
    scores, valid = draw(10, 20000), lengths(10, 20000, 512)
    want = reference.topk_ascending(scores.cpu(), valid.cpu(), 512)
    assert torch.equal(topk_ascending(scores, valid, 512).cpu(), want)


@pytest.mark.parametrize(("rows", "size", "k"), [(64, 32768, 512), (4, 131072, 2048), (300, 40000, 512)])
@pytest.mark.parametrize("splits", [1, 8, 32])
@pytest.mark.parametrize("warps", [8, 16])
def test_every_way_to_share_a_row(rows: int, size: int, k: int, splits: int, warps: int) -> None:
    scores, valid = draw(rows, size), lengths(rows, size, k)
    want = torch_impl.topk_ascending(scores, valid, k)
    usual = select_plan(size, k, rows=rows)
    assert usual is not None
    assert usual.merge
    plan = replace(usual, warps=warps, splits=splits)
    tickets = torch.zeros(rows, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")

    def run(plan: SelectPlan, *, ticket: bool = True) -> torch.Tensor:
        out.fill_(POISON)
        named = {"picks": k, "kpool": 1, "per_block": 1}
        select_rows(scores, valid, out, plan=plan, tickets=tickets if ticket else None, **named)
        return out

    for _ in range(20):
        assert torch.equal(run(plan), want)
        assert not tickets.any(), "the program that picks leaves the tickets at zero"
        assert torch.equal(run(plan, ticket=False), want)
    assert torch.equal(run(replace(plan, pdl=False)), want)
    assert torch.equal(run(replace(plan, sample=2)), want), "the whole row is gone through where too many are kept"


def test_a_graph_follows_lengths_and_scores() -> None:
    rows, size, k = 8, 65536, 512
    variants = [(draw(rows, size), lengths(rows, size, k)), (torch.randn(rows, size).cuda(), lengths(rows, size, 3))]
    scores, valid = variants[0][0].clone(), variants[0][1].clone()
    topk_ascending(scores, valid, k)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = topk_ascending(scores, valid, k)
    for some, some_valid in (*variants, variants[0]):
        scores.copy_(some)
        valid.copy_(some_valid)
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out, topk_ascending(some, some_valid, k))


def test_more_rows_than_a_grid_has_in_y() -> None:
    scores, valid = torch.randn(70000, 64, device="cuda"), torch.full((70000,), 64, device="cuda")
    assert torch.equal(topk_ascending(scores, valid, 8), torch_impl.topk_ascending(scores, valid, 8))
