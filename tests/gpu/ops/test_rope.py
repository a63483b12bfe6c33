"""The rotation on a GPU at the sizes of real models, from slices of wider rows, and in a graph."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.rope import apply_rope, torch_impl
from tests.tolerances import BF16_OUTPUT, FP32_ROUNDING

pytestmark = pytest.mark.gpu


def angles(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turned = torch.rand(tokens, half, device="cuda") * 6
    return turned.cos(), turned.sin()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "dim"),
    [(1, 64, 256, 64), (64, 128, 192, 64), (8192, 32, 128, 64), (70_000, 1, 64, 64)],
)
def test_equals_torch(interleaved: bool, dtype: torch.dtype, tokens: int, heads: int, width: int, dim: int) -> None:
    whole = torch.full((tokens, heads, width), torch.nan, dtype=dtype, device="cuda")
    x = whole[..., width - dim :]
    x.normal_()
    cos, sin = angles(tokens, dim // 2)
    got = apply_rope(x, cos, sin, interleaved=interleaved)
    assert got.is_contiguous()
    want = torch_impl.apply_rope(x, cos, sin, interleaved=interleaved)
    relative = 2 * BF16_OUTPUT if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(got, want, rtol=relative, atol=FP32_ROUNDING)
    assert all(torch.equal(apply_rope(x, cos, sin, interleaved=interleaved), got) for _ in range(20))


@pytest.mark.parametrize("interleaved", [True, False])
def test_in_a_graph(interleaved: bool) -> None:
    x = torch.randn(16, 192, device="cuda").bfloat16()[:, 128:]
    cos, sin = angles(16, 32)
    apply_rope(x, cos, sin, interleaved=interleaved)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = apply_rope(x, cos, sin, interleaved=interleaved)
    for _ in range(3):
        x.normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, apply_rope(x, cos, sin, interleaved=interleaved))
