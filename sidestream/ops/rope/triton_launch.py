"""Which rotations on a CUDA device are Triton's; it is imported when the first of them comes."""

from __future__ import annotations

import torch

from sidestream.ops.rope import torch_impl

MOST_ANGLES = 512


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """``torch_impl.apply_rope``, in one launch."""
    if not _takes(x, cos, sin):
        return torch_impl.apply_rope(x, cos, sin, interleaved=interleaved)
    from sidestream.ops.rope import triton_rope

    return triton_rope.apply_rope(x, cos, sin, interleaved=interleaved)


def apply_rope_pair(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """``torch_impl.apply_rope_pair``, in one launch."""
    function = torch_impl.apply_rope_pair
    if _takes(query, cos, sin) and _takes(key, cos, sin) and out.stride(-1) == 1:
        from sidestream.ops.rope import triton_rope

        function = triton_rope.apply_rope_pair
    return function(query, key, cos, sin, interleaved=interleaved, out=out)


def _takes(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    half = cos.shape[-1]
    angles = all(table.dtype is torch.float32 and table.stride(-1) == 1 for table in (cos, sin))
    known = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.dim() in (2, 3)
    return x.is_cuda and angles and known and x.numel() > 0 and half <= MOST_ANGLES and x.shape[-1] == 2 * half
