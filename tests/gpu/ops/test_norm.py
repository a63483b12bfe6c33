"""The norms on a GPU at the sizes of real models, from slices of wider rows, and in a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sidestream.ops.norm import add_rms_norm, gated_rms_norm, layer_norm, reference, rms_norm
from tests.tolerances import BF16_OUTPUT, FP32_ROUNDING

pytestmark = pytest.mark.gpu
SHAPES = [(1, 4096), (64, 6144), (3, 64, 128), (70_000, 128), (2, 16384), (2, 20_000), (0, 4096)]
"""The last but one is wider than the kernels take."""


def sliced(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A slice of wider rows whose neighbours are NaN."""
    wide = torch.full((*shape[:-1], shape[-1] + 24), torch.nan, dtype=dtype, device="cuda")
    x = wide[..., 8 : 8 + shape[-1]]
    return x.normal_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_equal_their_formulas(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gate = sliced(shape, dtype), sliced(shape, dtype)
    weight, bias = torch.randn(2, shape[-1], device="cuda").to(dtype).unbind(0)
    # One ulp of bf16, since fp32 values may straddle a tie; an RMS norm rounds twice.
    bound = 4 * FP32_ROUNDING if dtype == torch.float32 else 4 * BF16_OUTPUT
    pairs: list[tuple[Callable[[], torch.Tensor], torch.Tensor]] = [
        (lambda: rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)),
        (lambda: layer_norm(x, weight, bias, eps=1e-5), reference.layer_norm(x, weight, bias, eps=1e-5)),
        (lambda: gated_rms_norm(x, gate, weight, eps=1e-5), reference.gated_rms_norm(x, gate, weight, eps=1e-5)),
    ]
    if x.dim() == 2:
        other = sliced(shape, dtype)
        total, normed = reference.add_rms_norm(x, other, weight, 1e-5)
        pairs.append((lambda: add_rms_norm(x, other, weight, 1e-5)[0], total))
        pairs.append((lambda: add_rms_norm(x, other, weight, 1e-5)[1], normed))
    for run, want in pairs:
        got = run()
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=bound, atol=4 * FP32_ROUNDING)
        assert all(torch.equal(run(), got) for _ in range(20))


def test_in_a_graph() -> None:
    x, weight = sliced((16, 4096), torch.bfloat16), torch.randn(4096, device="cuda").bfloat16()
    rms_norm(x, weight, 1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rms_norm(x, weight, 1e-5)
    for _ in range(3):
        x.normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, rms_norm(x, weight, 1e-5))
