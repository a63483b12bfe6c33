"""The Triton rotation against the plain formulas, on the GPU or in the interpreter."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.rope import reference, triton_launch, triton_rope
from tests.ops.triton_mode import DEVICE
from tests.tolerances import BF16_OUTPUT, FP32_ROUNDING


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    angles = torch.rand(shape[0], shape[-1] // 2) * 6
    return torch.randn(shape).to(DEVICE, dtype), angles.cos().to(DEVICE), angles.sin().to(DEVICE)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 12), (3, 70, 64)])
def test_equals_the_formulas(interleaved: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, cos, sin = inputs(shape, dtype)
    got = triton_rope.apply_rope(x, cos, sin, interleaved=interleaved)
    assert got.dtype == dtype
    assert got.is_contiguous()
    want = reference.apply_rope(x, cos, sin, interleaved=interleaved)
    relative = 0.0 if dtype == torch.float32 else 2 * BF16_OUTPUT
    torch.testing.assert_close(got, want, rtol=relative, atol=FP32_ROUNDING)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_slice_of_a_wider_row_is_rotated_alone(interleaved: bool) -> None:
    """Also where an element's neighbours in memory, the token's and the angles', are not its own."""
    value, cos, sin = inputs((3, 5, 12), torch.float32)
    whole = torch.full((5, 3, 31), torch.nan, device=DEVICE).transpose(0, 1)
    x = whole[..., 5:29:2]
    x.copy_(value)
    wide = torch.full((2, 3, 9), torch.nan, device=DEVICE)
    wide[0, :, :6], wide[1, :, :6] = cos, sin
    got = triton_rope.apply_rope(x, wide[0, :, :6], wide[1, :, :6], interleaved=interleaved)
    torch.testing.assert_close(
        got, reference.apply_rope(value, cos, sin, interleaved=interleaved), rtol=0, atol=FP32_ROUNDING
    )
    assert int(whole.isnan().sum()) == whole.numel() - x.numel(), "the input was changed"


@pytest.mark.skipif(DEVICE != "cpu", reason="a CPU's tensors, whatever else there is")
def test_a_cpu_takes_torch() -> None:
    x, cos, sin = inputs((3, 5, 12), torch.bfloat16)
    want = reference.apply_rope(x, cos, sin, interleaved=True)
    got = triton_launch.apply_rope(x, cos, sin, interleaved=True)
    torch.testing.assert_close(got, want, rtol=2 * BF16_OUTPUT, atol=FP32_ROUNDING)
