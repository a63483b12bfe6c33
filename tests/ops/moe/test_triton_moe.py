"""Triton's router, SwiGLU and experts against token by token, on the GPU or in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.ops.moe import reference, triton_grouped, triton_one_token, triton_plan, triton_route, triton_swiglu
from sidestream.ops.moe.triton_tiles import (
    EXPERT_TILES,
    MANY_TOKENS,
    ExpertTiles,
    RouterTiles,
    Tiles,
    dividing,
    expert_tiles,
    router_table,
    router_tiles,
)
from tests.ops.moe.test_moe import random_choice, random_experts, random_router, with_shared
from tests.ops.triton_mode import DEVICE
from tests.tolerances import BF16_OUTPUT, BF16_STEPS, FP32_GEMM, FP32_ROUNDING

ROOT = Path(__file__).parents[3]
ROUTERS: dict[str, Any] = {
    "lanes": RouterTiles(4, 4, 32, 2, 4, 1, dot=False),
    "dot": RouterTiles(16, 16, 32, 4, 4, 2, dot=True),
    "dot in two steps": RouterTiles(16, 16, 32, 1, 4, 2, dot=True),
    "lanes, counted": RouterTiles(4, 4, 32, 2, 4, 1, dot=False, counted=True),
    "dot, counted": RouterTiles(16, 16, 32, 2, 4, 1, dot=True, counted=True),
    "library": None,
}
SMALL = ExpertTiles(16, Tiles(16, 32, 4, 2), Tiles(32, 16, 4, 2))


def choice(num_groups: int, topk_groups: int, *, top_k: int = 4, norm: bool = True) -> dict[str, Any]:
    groups = {"num_groups": num_groups, "topk_groups": topk_groups}
    return {"top_k": top_k, **groups, "norm_topk_prob": norm, "scale": 2.5}


def routed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **named: Any) -> tuple[torch.Tensor, ...]:
    weights, ids = triton_route.route(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), **named)
    return weights.cpu(), ids.cpu()


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("num_groups", "topk_groups"), [(1, 1), (4, 2), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route_equals_a_sort(router: str, num_groups: int, topk_groups: int, dtype: torch.dtype) -> None:
    weight, bias = random_router(24, 64)
    x = torch.randn(5, 70).to(dtype)[:, 3:67]
    named = choice(num_groups, topk_groups, norm=num_groups != 3)
    weights, ids = routed(x, weight, bias, **named, tiles=ROUTERS[router])
    want_weights, want_ids = reference.route(x, weight, bias, **named)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=0, atol=FP32_ROUNDING)


@pytest.mark.parametrize("router", ROUTERS)
def test_ties_go_to_the_lowest_id_and_large_biases_select_as_fp32(router: str) -> None:
    tiles: dict[str, Any] = {"tiles": ROUTERS[router]}
    bias = torch.zeros(24)
    bias[5] = 1.0
    x = torch.randn(2, 64)
    _, ids = routed(x, torch.zeros(24, 64), bias, **choice(1, 1), **tiles)
    assert ids.tolist() == [[5, 0, 1, 2]] * 2
    _, ids = routed(x, torch.zeros(24, 64), torch.zeros(24), **choice(3, 2, top_k=10), **tiles)
    assert ids.tolist() == [list(range(10))] * 2
    weight, bias = torch.zeros(64, 64), 7 + torch.arange(64) * 1e-3
    weight[:, 0] = torch.linspace(-1e-4, 1e-4, 64).flip(0)
    weights, ids = routed(torch.ones(2, 64).bfloat16(), weight, bias, **choice(1, 1, top_k=8), **tiles)
    assert ids.tolist() == [list(range(63, 55, -1))] * 2
    torch.testing.assert_close(weights, torch.full((2, 8), 2.5 / 8), rtol=0, atol=1e-4)


def test_the_depth_is_split_as_it_divides() -> None:
    """288 = 9 * 32: three parts, though four are asked for."""
    weight, bias = random_router(8, 288)
    x = torch.randn(3, 288)
    weights, ids = routed(x, weight, bias, **choice(1, 1), tiles=replace(ROUTERS["dot"], splits=4))
    want_weights, want_ids = reference.route(x, weight, bias, **choice(1, 1))
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=0, atol=FP32_ROUNDING)


@pytest.mark.parametrize("router", ["lanes", "lanes, counted"])
def test_a_padding_row_chooses_nobody(router: str) -> None:
    weight, bias = random_router(24, 64)
    x, named = torch.randn(4, 64), {**choice(1, 1), "tiles": ROUTERS[router]}
    live = torch.tensor([1, 0, 5, 0], device=DEVICE)
    whole_weights, whole_ids = routed(x, weight, bias, **named)
    weights, ids = routed(x, weight, bias, **named, live=live)
    assert torch.equal(weights, whole_weights)
    assert torch.equal(ids[::2], whole_ids[::2])
    assert ids[1::2].tolist() == [[-1] * 4] * 2


def test_negative_scores_sort_downwards() -> None:
    """Biases far below zero: the keys of negative floats must not run backwards."""
    bias = -torch.arange(24) * 3.0
    bias[7] = float("-inf")
    named = choice(4, 2, top_k=12)
    x, weight = torch.randn(3, 64), torch.randn(24, 64) / 8
    for router in ("lanes", "lanes, counted"):
        _, ids = routed(x, weight, bias, **named, tiles=ROUTERS[router])
        assert torch.equal(ids, reference.route(x, weight, bias, **named)[1])


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # numpy interprets
@pytest.mark.parametrize("router", ["dot", "dot, counted"])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_garbage_row_names_experts_and_hurts_no_other(num_groups: int, router: str) -> None:
    weight, bias = random_router(24, 64)
    x = torch.randn(4, 64)
    named = {**choice(num_groups, 1), "tiles": ROUTERS[router]}
    clean_weights, clean_ids = routed(x, weight, bias, **named)
    for poison in (torch.nan, torch.inf, 1e38):
        x[1] = poison
        weights, ids = routed(x, weight, bias, **named)
        keep = [0, 2, 3]
        assert torch.equal(ids[keep], clean_ids[keep])
        assert torch.equal(weights[keep], clean_weights[keep])
        assert len(set(ids[1].tolist())) == 4
        assert bool(((ids >= 0) & (ids < 24)).all())


def inputs(
    tokens: int, dtype: torch.dtype, *, num_shared: int, limit: float | None = 0.7
) -> tuple[torch.Tensor, dict[str, Any]]:
    w13, w2 = with_shared(*random_experts(8, 64, 32, dtype), num_shared)
    weights, ids = random_choice(tokens, 8, 3)
    x = (torch.randn(tokens, 70) * 0.6).to(dtype)[:, :64]
    named = {"w13": w13, "w2": w2, "weights": weights, "ids": ids, "num_shared": num_shared, "swiglu_limit": limit}
    return x, named


def through(x: torch.Tensor, named: dict[str, Any], tiles: ExpertTiles = SMALL) -> torch.Tensor:
    there = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in named.items()}
    run = triton_one_token.experts if x.shape[0] == 1 else triton_grouped.experts
    return run(x.to(DEVICE), **there, tiles=tiles).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "num_shared", "limit"), [(1, 1, 0.7), (1, 0, None), (1, 2, 0.7), (2, 0, None)])
def test_few_tokens_equal_token_by_token(tokens: int, num_shared: int, limit: float | None, dtype: torch.dtype) -> None:
    x, named = inputs(tokens, dtype, num_shared=num_shared, limit=limit)
    got = through(x, named)
    assert got.dtype == dtype
    atol = FP32_GEMM if dtype == torch.float32 else BF16_STEPS
    torch.testing.assert_close(got, reference.experts(x, **named), rtol=0, atol=atol)


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize(("tokens", "num_shared"), [(7, 1), (20, 2), (70, 1)])  # 70: the partial sums are bf16
def test_grouped_tokens_equal_token_by_token(tokens: int, num_shared: int, described: bool) -> None:
    x, named = inputs(tokens, torch.bfloat16, num_shared=num_shared)
    named["ids"][: tokens - 2, 0] = 2  # more rows than one block holds, and a place that is not distinct any more
    named["ids"][: tokens - 2, 1:] = torch.tensor([6, 0])
    got = through(x, named, replace(SMALL, described=described))
    torch.testing.assert_close(got, reference.experts(x, **named), rtol=0, atol=BF16_STEPS)


@pytest.mark.parametrize(("tokens", "described"), [(1, False), (5, False), (5, True)])
def test_experts_that_nobody_chose_are_not_read(tokens: int, described: bool) -> None:
    x, named = inputs(tokens, torch.bfloat16, num_shared=1)
    named["ids"] = torch.tensor([[1, 4, 6]]).repeat(tokens, 1)
    tiles = replace(SMALL, described=described)
    clean = through(x, named, tiles)
    for expert in (0, 2, 3, 5, 7):
        named["w13"][expert], named["w2"][expert] = torch.nan, torch.nan
    assert torch.equal(through(x, named, tiles), clean)


@pytest.mark.parametrize("tokens", [1, 4])
def test_an_id_of_minus_one_takes_no_expert(tokens: int) -> None:
    x, named = inputs(tokens, torch.bfloat16, num_shared=1)
    clean = through(x, named)
    taken = named["ids"][: tokens - 1].clone()
    named["ids"][-1], named["weights"][-1] = -1, torch.nan
    for expert in set(range(1, 8)) - set(taken.flatten().tolist()):
        named["w13"][expert], named["w2"][expert] = torch.nan, torch.nan
    got = through(x, named)
    assert torch.equal(got[:-1], clean[:-1])
    named["ids"][-1], named["weights"][-1] = torch.arange(3), 0.0
    want = reference.experts(x, **{name: nonzero(value) for name, value in named.items()})
    torch.testing.assert_close(got[-1], want[-1], rtol=0, atol=BF16_STEPS)


def nonzero(value: Any) -> Any:
    return value.nan_to_num(0.0) if isinstance(value, torch.Tensor) else value


def test_bits_of_a_row_depend_on_the_row_alone() -> None:
    x, named = inputs(18, torch.bfloat16, num_shared=1)
    want = through(x, named)
    kept = torch.arange(0, 18, 5)
    moved = [t for t in range(18) if t % 5]
    noise = torch.full_like(x, torch.nan)
    noise[kept] = x[kept]
    named["ids"][moved] = torch.tensor([7, 0, 3])
    named["weights"][moved] = torch.nan
    got = through(noise, named)
    assert torch.equal(got[kept], want[kept])
    assert bool(got[moved].isnan().all())


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("pairs", "num_experts", "rows"), [(3, 8, 16), (41, 5, 16), (1300, 3, 32), (9217, 21, 192)])
def test_plan_places_every_pair_once(
    pairs: int, num_experts: int, rows: int, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_plan, "COUNTED_PAIRS", 0 if counted else pairs)
    empty = torch.empty

    def poisoned(*sizes: int, **named: Any) -> torch.Tensor:
        return empty(*sizes, **named).fill_(77_777_777)

    monkeypatch.setattr(torch, "empty", poisoned)
    ids = torch.randint(0, num_experts, (pairs, 1))
    ids[ids == 1] = 2  # one expert without pairs
    ids[1] = -1
    num_blocks = (pairs + min(num_experts, pairs) * (rows - 1)) // rows
    order, block_expert = triton_plan.plan(
        ids.to(DEVICE), num_experts=num_experts, rows=rows, blocks=num_blocks, pdl=False
    )
    want: list[tuple[int, list[int]]] = []
    for expert in range(num_experts):
        own = torch.nonzero(ids == expert)[:, 0].tolist()
        own += [-1] * (-len(own) % rows)
        want += [(expert, own[first : first + rows]) for first in range(0, len(own), rows)]
    got = list(zip(block_expert.tolist(), order.view(num_blocks, rows).tolist(), strict=True))
    assert got[: len(want)] == want
    assert [expert for expert, _ in got[len(want) :]] == [-1] * (num_blocks - len(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [None, 1.5])
def test_swiglu_equals_the_formula(dtype: torch.dtype, limit: float | None) -> None:
    gate_up = (torch.randn(3, 160, device=DEVICE)[:, ::2] * 3).to(dtype)
    gate_up[0, :4] = torch.tensor([-30.0, 30.0, 1.5, -1.5])
    gate_up[1, 0], gate_up[2, 41] = torch.nan, torch.nan
    got = triton_swiglu.swiglu(gate_up, limit=limit)
    relative = BF16_OUTPUT if dtype == torch.bfloat16 else FP32_ROUNDING
    want = reference.swiglu(gate_up, limit=limit)
    torch.testing.assert_close(got, want, rtol=2 * relative, atol=1e-6, equal_nan=True)
    assert bool(got[1, 0].isnan())
    assert bool(got[2, 1].isnan())


@pytest.mark.parametrize("num_experts", [8, 64, 65, 288, 512, 513, 1024])
def test_a_router_takes_the_row_of_its_number_of_experts(num_experts: int) -> None:
    """Places of few experts are counted, and what is held back for the sums of many fits the registers; fp32 shares no
    row that was timed in bf16 alone."""
    few, many = num_experts <= 64, 64 < num_experts <= 512
    for tokens in (1, 2, 4, 5, 8, 9, 16, 17, 64, 65, 128, 129, 256, 512):
        tiles = router_tiles(tokens, num_experts, torch.bfloat16)
        assert tiles is not None
        assert tiles.counted == (few and tokens <= 128)
        assert (tiles.choice_warps == 8) == (many and 4 < tokens <= 128)
        assert tiles.dot == (tokens > (1 if few else 4 if many else 16))
        assert tiles.rows >= min(tokens, 4)
        plain = router_tiles(tokens, num_experts, torch.float32)
        assert plain == (router_tiles(tokens, 1024, torch.bfloat16) if tokens <= 256 else None)
    assert router_tiles(513, num_experts, torch.bfloat16) is MANY_TOKENS
    for dtype in (torch.float32, torch.bfloat16):
        bounds = [most for most, _ in router_table(num_experts, dtype)]
        assert all(2 * a <= b for a, b in pairwise(bounds)), "a start runs powers of two, and meets all"


def test_a_routers_scores_and_choice_stay_in_registers() -> None:
    """By tensor cores, in groups, with as many experts as each table is for."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.ops.moe.compiled_routers"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = json.loads(done.stdout)
    assert sorted(one["function"].rpartition(".")[2] for one in compiled) == ["_choose"] * 5 + ["_scores"] * 4
    for one in compiled:
        assert not any(one["code"]["spilled"]), one["constants"]


def test_the_table_covers_every_size() -> None:
    for tokens in range(1, 3000, 7):
        tiles = expert_tiles(tokens, 8, 64)
        assert (tiles.rows == 1) == (tokens == 1)
        assert expert_tiles(tokens, 8, 288).rows <= tiles.rows
    bounds = [most for most, _ in EXPERT_TILES]
    assert all(2 * few <= many for few, many in pairwise([*bounds, 10**9])), "a start runs powers of two, and meets all"
    assert [dividing(size, 128) for size in (4096, 2304, 96, 1024, 32)] == [128, 128, 32, 128, 32]


def test_a_cpu_never_imports_triton() -> None:
    code = """
import sys, torch
from sidestream.ops import moe, rope
x, w = torch.randn(3, 64).bfloat16(), torch.randn(8, 64)
named = {"num_groups": 1, "topk_groups": 1, "norm_topk_prob": True, "scale": 1.0}
for which in ("cpu", "cuda"):
    weights, ids = moe.route.implementations[which](x, w, torch.zeros(8), top_k=2, **named)
    experts = torch.randn(8, 64, 64).bfloat16(), torch.randn(8, 64, 32).bfloat16()
    chosen = {"weights": weights, "ids": ids, "num_shared": 0, "swiglu_limit": None}
    moe.experts.implementations[which](x, *experts, **chosen)
    moe.swiglu.implementations[which](x, limit=None)
    rope.apply_rope.implementations[which](x, torch.ones(3, 32), torch.ones(3, 32), interleaved=True)
assert "triton" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
