"""Drawing tokens: the most likely one of each row, or one drawn from its whole distribution at a temperature."""

from __future__ import annotations

import torch

from sidestream.ops.draw import torch_impl
from sidestream.ops.operator import operator

__all__ = ["draw_tokens"]

draw_tokens = operator("draw.draw_tokens", reads=("logits", "settings"))(torch_impl.draw_tokens)


@draw_tokens.register("cuda")
def _draw_tokens(logits: torch.Tensor, settings: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if logits.is_cuda and logits.dtype is torch.float32 and logits.stride(1) == 1 and logits.shape[0] > 0:
        from sidestream.ops.draw import triton_draw

        return triton_draw.draw_tokens(logits, settings)
    return torch_impl.draw_tokens(logits, settings)
