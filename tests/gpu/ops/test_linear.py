"""Linear layers of few rows on a GPU at the sizes of real models: right, repeatable, captured, row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sidestream.ops.linear import linear, triton_linear
from sidestream.ops.linear.launches import Launch, launch_for
from tests.tolerances import BF16_OUTPUT

pytestmark = pytest.mark.gpu

SIZES = [(24896, 4096), (4096, 8192), (2336, 4096), (20480, 1536), (4096, 16384), (1000, 96)]
ROWS = [1, 2, 5, 8, 16, 17, 33, 64]


def draw(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, spread)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(6)


def check(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Against fp64. Matrix units add 16 products at a time and cut each sum, of at most 4 here, by one fp32 ulp; then
    bf16 rounds once, or to the other side of a tie."""
    want = x.double() @ weight.double().T
    want = want if bias is None else want + bias.double()
    cut = x.shape[1] / 16 * 4 * 2**-23
    torch.testing.assert_close(got.double(), want, rtol=2 * BF16_OUTPUT, atol=cut)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_equals_fp64(out_features: int, in_features: int, rows: int, bias: bool) -> None:
    """Sums of thousands of products of order 1 / sqrt(depth): fp32's rounding of them, then bf16's."""
    wide, weight = draw(rows, in_features + 64), draw(out_features, in_features, spread=in_features**-0.5)
    x, given = wide[:, 64:], draw(out_features) if bias else None
    got = linear(x, weight, given)
    check(got, x, weight, given)


@pytest.mark.parametrize("ways", [{"early": False}, {"early": True}, {"stages": 2}])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_every_way_of_launching_in_a_chain(rows: int, ways: dict[str, Any]) -> None:
    """Each product reads what the one before it wrote, in a graph: a kernel that reads too early shows."""
    weights = [draw(4096, 4096, spread=4096**-0.5) for _ in range(6)]
    x = draw(rows, 4096)
    launch = launch_for(rows, 4096, 4096)
    assert launch is not None
    launches = [replace(launch, **ways), replace(launch, splits=1, **ways)]

    def run() -> torch.Tensor:
        y = x
        for i, weight in enumerate(weights):
            y = triton_linear.linear(y, weight, None, launch=launches[i % 2])
        return y

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        x.normal_()
        want = x
        for i, weight in enumerate(weights):
            want = triton_linear.linear(want, weight, None, launch=replace(launches[i % 2], early=False))
            torch.cuda.synchronize()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize("rows", [2, 8, 16])
@pytest.mark.parametrize(("out_features", "in_features"), [size for size in SIZES if launch_for(2, *size) is not None])
def test_a_row_depends_on_itself_alone(out_features: int, in_features: int, rows: int) -> None:
    x, weight = draw(rows, in_features), draw(out_features, in_features, spread=in_features**-0.5)
    want = linear(x, weight, None)
    assert all(torch.equal(linear(x, weight, None), want) for _ in range(10))
    assert torch.equal(linear(x.flip(0), weight, None).flip(0), want)
    x[torch.arange(rows, device="cuda") != 1] = torch.nan
    assert torch.equal(linear(x, weight, None)[1], want[1])


def test_a_weight_beyond_2_to_the_31_elements() -> None:
    weight = draw(140_000, 16384, spread=16384**-0.5)
    for launch in (Launch(1, 8, 512, 4, 3), Launch(16, 64, 128, 4, 4)):
        x = draw(min(launch.rows, 4), 16384)
        got = triton_linear.linear(x, weight, None, launch=launch)
        check(got[:, -64:], x, weight[-64:])
