"""The Triton norms, interpreted where there is no GPU, against their formulas."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.norm import reference, triton_norms
from tests.ops.triton_mode import DEVICE, INTERPRETED
from tests.tolerances import BF16_OUTPUT, BF16_STEPS, FP32_ROUNDING

BF16 = BF16_STEPS if INTERPRETED else 2 * BF16_OUTPUT
"""One ulp, since fp32 values may straddle a tie; the interpreter cuts off, up to two ulp in two roundings."""
SHAPES = [(1, 8), (5, 3, 12), (2, 5120), (0, 16), (40, 100)]
pytestmark = [
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
    pytest.mark.parametrize("shape", SHAPES, ids=str),
]


def sliced(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A slice of wider rows whose neighbours are NaN."""
    wide = torch.full((*shape[:-1], shape[-1] + 5), torch.nan, dtype=dtype)
    wide[..., 2 : 2 + shape[-1]] = torch.randn(shape).to(dtype) * 3
    return wide.to(DEVICE)[..., 2 : 2 + shape[-1]]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    bound = 2 * FP32_ROUNDING if want.dtype == torch.float32 else BF16
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=bound, atol=FP32_ROUNDING)


def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = sliced(shape, dtype), torch.randn(shape[-1]).to(DEVICE, dtype)
    assert triton_norms.takes(x, weight)
    close(triton_norms.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, output = (sliced((shape[0], shape[-1]), dtype) for _ in range(2))
    weight = torch.randn(shape[-1]).to(DEVICE, dtype)
    total, normed = triton_norms.add_rms_norm(x, output, weight, 1e-5)
    want, _ = reference.add_rms_norm(x, output, weight, 1e-5)
    close(total, want)
    close(normed, reference.rms_norm(total, weight, 1e-5))


def test_rms_norm_pair(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Two slices, of which either may have more rows or wider ones."""
    x, other = sliced((shape[0], shape[-1]), dtype), sliced((3, 20), dtype)
    weight, other_weight = torch.randn(shape[-1]).to(DEVICE, dtype), torch.randn(20).to(DEVICE, dtype)
    got = triton_norms.rms_norm_pair(x, other, weight, other_weight, eps=1e-5)
    close(got[0], reference.rms_norm(x, weight, 1e-5))
    close(got[1], reference.rms_norm(other, other_weight, 1e-5))
    assert all(
        torch.equal(a, triton_norms.rms_norm(b, w, 1e-5))
        for a, b, w in zip(got, (x, other), (weight, other_weight), strict=True)
    )


def test_mean_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """From every other of twice as many streams, whose mean bf16 holds exactly: one rounding less to allow for."""
    streams = sliced((shape[0], 8, shape[-1]), dtype)[:, ::2]
    streams.copy_(torch.randint(-60, 61, streams.shape))
    weight = torch.randn(shape[-1]).to(DEVICE, dtype)
    assert triton_norms.takes(streams, weight)
    close(triton_norms.mean_rms_norm(streams, weight, 1e-5), reference.mean_rms_norm(streams, weight, 1e-5))


def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, (weight, bias) = sliced(shape, dtype), torch.randn(2, shape[-1]).to(DEVICE, dtype).unbind(0)
    assert triton_norms.takes(x, weight, bias)
    close(triton_norms.layer_norm(x, weight, bias, eps=1e-5), reference.layer_norm(x, weight, bias, eps=1e-5))


def test_gated_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gate = sliced(shape, dtype), sliced(shape, dtype)[..., :]
    weight = torch.randn(shape[-1]).to(DEVICE, dtype)
    assert triton_norms.takes(x, gate, weight)
    want = reference.gated_rms_norm(x, gate, weight, eps=1e-5)
    close(triton_norms.gated_rms_norm(x, gate, weight, eps=1e-5), want)


def test_garbage_in_one_row_stays_there(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(DEVICE, dtype), torch.ones(shape[-1], device=DEVICE, dtype=dtype)
    want = triton_norms.rms_norm(x, weight, 1e-5)
    x[1::2] = torch.nan
    assert torch.equal(triton_norms.rms_norm(x, weight, 1e-5)[::2], want[::2])
    assert not triton_norms.takes(x.transpose(0, -1), weight) or shape[0] == 1
