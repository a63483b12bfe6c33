"""Linear layers of few rows on a GPU at the sizes of real models: right, repeatable, captured, row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sidestream.ops.linear import linear, per_head, triton_linear
from sidestream.ops.linear.launches import launch_for
from tests.tolerances import BF16_OUTPUT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

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
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_a_row_depends_on_itself_alone(out_features: int, in_features: int, rows: int) -> None:
    x, weight = draw(rows, in_features), draw(out_features, in_features, spread=in_features**-0.5)
    want = linear(x, weight, None)
    assert all(torch.equal(linear(x, weight, None), want) for _ in range(10))
    assert torch.equal(linear(x.flip(0), weight, None).flip(0), want)
    x[torch.arange(rows, device="cuda") != 1] = torch.nan
    assert torch.equal(linear(x, weight, None)[1], want[1])


def test_a_weight_beyond_2_to_the_31_elements() -> None:
    weight = draw(140_000, 16384, spread=16384**-0.5)
    for rows in (1, 4):
        x = draw(rows, 16384)
        got = linear(x, weight, None)
        check(got[:, -64:], x, weight[-64:])


@pytest.mark.parametrize("rows", [1, 5, 16, 40])
@pytest.mark.parametrize(
    ("heads", "depth", "columns"), [(64, 256, 512), (64, 512, 256), (128, 128, 512), (32, 512, 128)]
)
@pytest.mark.parametrize("turned", [False, True])
def test_heads_equal_fp64_and_replay(heads: int, depth: int, columns: int, rows: int, turned: bool) -> None:
    """From a slice whose neighbours are NaN, in a graph behind the kernel that writes it."""
    shape = (heads, columns, depth) if turned else (heads, depth, columns)
    weight = draw(*shape, spread=depth**-0.5)
    weight = weight.transpose(1, 2) if turned else weight
    wide = torch.full((rows, heads, depth + 64), torch.nan, dtype=torch.bfloat16, device="cuda")
    source, x = draw(rows, heads, depth), wide[..., :depth]

    def run() -> torch.Tensor:
        x.copy_(source)
        return per_head(per_head(x, weight), weight.transpose(1, 2))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(5):
        source.normal_()
        want = run()
        torch.cuda.synchronize()
        once = per_head(x, weight)
        for head in (0, heads - 1):
            check(once[:, head], x[:, head], weight[head].T)
            check(want[:, head], once[:, head], weight[head])
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
        alone = per_head(x[:1], weight)
        assert rows > 16 or torch.equal(alone[0], once[0]), "a row depends on itself alone"
