"""The Triton linear of few rows against the formula, on the GPU or in the interpreter."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.linear import reference, triton_linear
from sidestream.ops.linear.launches import Launch, launch_for
from tests.ops.triton_mode import DEVICE
from tests.tolerances import BF16_OUTPUT, FP32_GEMM

LAUNCHES = {
    "one": Launch(1, 4, 64, 4, 1),
    "one, in stages": Launch(1, 8, 32, 4, 2),
    "some": Launch(16, 32, 32, 4, 3),
    "some, split": Launch(16, 16, 32, 4, 2, splits=3),
    "many": Launch(64, 64, 32, 4, 2, early=False),
}


def made(rows: int, out_features: int, in_features: int, bias: bool) -> tuple[torch.Tensor, ...]:
    x = torch.randn(rows, in_features + 32).bfloat16()[:, 16 : 16 + in_features]  # not contiguous
    weight = (torch.randn(out_features, in_features) / in_features**0.5).bfloat16()
    given = torch.randn(out_features).bfloat16() if bias else None
    return x, weight, given  # type: ignore[return-value]


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, launch: Launch) -> torch.Tensor:
    placed = None if bias is None else bias.to(DEVICE)
    wide = torch.full((x.shape[0], x.shape[1] + 16), torch.nan, dtype=x.dtype, device=DEVICE)
    wide[:, : x.shape[1]] = x.to(DEVICE)
    return triton_linear.linear(wide[:, : x.shape[1]], weight.to(DEVICE), placed, launch=launch).cpu()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 128), (70, 96), (3, 288), (130, 32)])
def test_equals_the_formula(name: str, bias: bool, out_features: int, in_features: int) -> None:
    """Widths that no block divides, and depths that are not powers of two."""
    launch = LAUNCHES[name]
    for rows in {1, min(5, launch.rows), launch.rows}:
        x, weight, given = made(rows, out_features, in_features, bias)
        got = run(x, weight, given, launch)
        assert got.dtype is torch.bfloat16
        want = reference.linear(x, weight, given)
        # the interpreter cuts bf16 off: a whole ulp, twice what rounding loses
        torch.testing.assert_close(got.float(), want, rtol=2 * BF16_OUTPUT, atol=FP32_GEMM)


@pytest.mark.parametrize("name", ["some", "some, split", "many"])
def test_a_row_depends_on_itself_alone(name: str) -> None:
    x, weight, _ = made(7, 70, 96, bias=False)
    want = run(x, weight, None, LAUNCHES[name])
    x[[0, 1, 2, 4, 5, 6]] = torch.nan
    assert torch.equal(run(x, weight, None, LAUNCHES[name])[3], want[3])
    assert torch.equal(run(x[3:4], weight, None, LAUNCHES[name])[0], want[3]), "nor on how many there are"


@pytest.mark.parametrize("name", LAUNCHES)
def test_wide_results_are_the_sums_themselves(name: str) -> None:
    """fp32 from bf16: nothing is rounded, so that rounding them gives the narrow results."""
    launch = LAUNCHES[name]
    x, weight, _ = made(launch.rows, 70, 96, bias=False)
    x, weight = x.to(DEVICE), weight.to(DEVICE)
    got = torch.full((launch.rows, 70), torch.nan, device=DEVICE)
    assert triton_linear.linear(x, weight, None, launch=launch, out=got) is got
    torch.testing.assert_close(got.cpu(), reference.linear(x.cpu(), weight.cpu(), None), rtol=0.0, atol=FP32_GEMM)


def test_which_products_are_taken() -> None:
    x, weight, _ = made(4, 64, 128, bias=False)
    assert triton_linear.takes(x, weight, None)
    assert not triton_linear.takes(x.float(), weight.float(), None)
    assert not triton_linear.takes(x, weight.t().contiguous().t(), None)
    assert not triton_linear.takes(x, weight.flatten()[3:-125].view(-1, 128), None), "rows at odd addresses"
    assert launch_for(4, 64, 100) is None, "no power of two worth a tile divides the depth"
    assert launch_for(0, 64, 128) is None
    assert launch_for(100_000, 64, 128) is None
    assert launch_for(1, 32_768, 16_384) is not None
    assert launch_for(2, 32_768, 4096) is None, "the library is as fast"
    for rows in (1, 2, 16, 17, 64):
        launch = launch_for(rows, 4096, 8192)
        assert launch is None or launch.rows >= rows
