"""The Triton rotation against the plain formulas, on the GPU or in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.ops.rope import reference, torch_impl, triton_launch, triton_rope
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


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 3, 70])
@pytest.mark.parametrize("function", [torch_impl.apply_rope_pair, triton_rope.apply_rope_pair], ids=["torch", "triton"])
def test_a_pair_has_the_bits_of_its_parts(function: Any, heads: int, dtype: torch.dtype, interleaved: bool) -> None:
    """The query written to a part of wider heads, the key new; angles lie side by side, as a step has them."""
    x, cos, sin = inputs((3, heads, 12), dtype)
    key = torch.randn(3, 30).to(DEVICE, dtype)[:, 7:19]
    cos, sin = torch.cat((cos, sin), dim=1).chunk(2, dim=1)
    alone = torch_impl.apply_rope if function is torch_impl.apply_rope_pair else triton_rope.apply_rope
    whole = torch.full((3, heads, 20), torch.nan, device=DEVICE, dtype=dtype)
    got = function(x, key, cos, sin, interleaved=interleaved, out=whole[..., 8:])
    assert torch.equal(whole[..., 8:], alone(x, cos, sin, interleaved=interleaved))
    assert torch.equal(got, alone(key, cos, sin, interleaved=interleaved))
    assert bool(whole[..., :8].isnan().all()), "what lies beside was written"


@pytest.mark.skipif(DEVICE != "cpu", reason="a CPU's tensors, whatever else there is")
def test_a_cpu_takes_torch() -> None:
    x, cos, sin = inputs((3, 5, 12), torch.bfloat16)
    want = reference.apply_rope(x, cos, sin, interleaved=True)
    got = triton_launch.apply_rope(x, cos, sin, interleaved=True)
    torch.testing.assert_close(got, want, rtol=2 * BF16_OUTPUT, atol=FP32_ROUNDING)
