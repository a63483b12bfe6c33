"""Sampled tokens: how a step takes the tokens of the step before it without the host knowing them."""

from __future__ import annotations

import torch

from sidestream.ops.operator import operator
from sidestream.ops.sampled_tokens import torch_impl

__all__ = ["fill_sampled"]

fill_sampled = operator(
    "sampled_tokens.fill_sampled", reads=("token_ids", "sources", "sampled"), writes=("token_ids",)
)(torch_impl.fill_sampled)


@fill_sampled.register("cuda")
def _fill_sampled(token_ids: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor) -> None:
    if token_ids.is_cuda and all(tensor.is_contiguous() for tensor in (token_ids, sources, sampled)):
        from sidestream.ops.sampled_tokens import triton_fill

        triton_fill.fill_sampled(token_ids, sources, sampled)
        return
    torch_impl.fill_sampled(token_ids, sources, sampled)
