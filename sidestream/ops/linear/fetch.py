"""Weights asked for ahead of their product: the L2 cache takes their first bytes while small kernels run before it."""

from __future__ import annotations

import torch

from sidestream.ops.linear.launches import fetched_bytes


def fetch_ahead(weight: torch.Tensor, rows: int) -> None:
    """Ask for the beginning of a contiguous ``weight`` that the current stream will soon multiply ``rows`` rows with.

    Nothing depends on it: no value changes, and elsewhere than on a CUDA device nothing happens.
    """
    size = min(fetched_bytes(rows), weight.numel() * weight.element_size())
    if size and weight.is_cuda and weight.is_contiguous() and weight.data_ptr() % 16 == 0:
        from sidestream.ops.linear import triton_fetch

        triton_fetch.fetch(weight, size)
