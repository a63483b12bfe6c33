"""Whether a kernel in Gluon does on a device what the plain one does: asked once, before it is used.

No interpreter runs Gluon, so a version of Triton or of ptxas that it was never tried with is met on a user's machine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from triton.errors import TritonError

from sidestream.core.ring import plan_ring
from sidestream.streams.backend import allocates_for_graph

_VERDICTS: dict[tuple[str, torch.device], bool] = {}
TOLERANCE = 2**-7
"""Relative and absolute, for values of order one: an ulp of bf16, to which both kernels round fp32 results once."""


def agree(
    name: str, device: torch.device, tried: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor]
) -> bool:
    """Run both on six rows, fresh, young, old and padding, and compare; a difference is a ``RuntimeWarning``.

    Args:
        name: of the kernel that is tried.
        tried, plain: ``decode_step`` with one kernel and the other.
    Returns:
        Whether outputs, states and rings are equal up to rounding. False while a graph is being captured, when nothing
        can be compared: ask before.
    """
    if (name, device) in _VERDICTS:
        return _VERDICTS[name, device]
    if allocates_for_graph(device):
        return False
    try:
        difference = _differ(_sample(device), tried, plain)
    except (RuntimeError, TritonError) as fault:
        difference = repr(fault)
    _VERDICTS[name, device] = not difference
    if difference:
        warnings.warn(f"KDA's {name} kernel is not used on {device}: {difference}", RuntimeWarning, stacklevel=2)
    return not difference


def _sample(device: torch.device) -> dict[str, Any]:
    gen = torch.Generator(device=device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=gen)

    heads, dim, starts, slots = 16, 128, [0, 1, 2, 3, 900, 0], [3, 1, 2, 5, 4, 0]
    width = heads * dim
    return {
        "projected": randn(6, 3 * width + 2 * dim + heads).bfloat16(),
        "conv_state": randn(18, 3 * width).bfloat16(),
        "state": randn(6, 1, heads, dim, dim),
        "conv_weight": randn(4, 3 * width).t(),
        "plan": plan_ring(starts, [1] * 6, slots, window=4, ring_length=3, device=device),
        "expand": (randn(2, width, dim) * dim**-0.5).bfloat16(),
        "dt_bias": randn(width),
        "A_log": randn(heads) * 0.3,
        "lower_bound": -5.0,
        "norm_weight": randn(dim).bfloat16(),
        "norm_eps": 1e-5,
        "slots": torch.tensor(slots, device=device),
        "start": torch.tensor(starts, device=device),
    }


def _differ(sample: dict[str, Any], tried: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor]) -> str:
    """What differs, or nothing."""
    results = []
    for step in (tried, plain):
        mine = {**sample, **{name: sample[name].clone() for name in ("state", "conv_state")}}
        out = step(**mine)
        results.append({"output": out, "state": mine["state"][1:], "ring": mine["conv_state"][3:]})
    pairs = [(name, tensor, results[1][name]) for name, tensor in results[0].items()]
    wrong = [name for name, a, b in pairs if not torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)]
    return f"{' and '.join(wrong)} of a sample differ" if wrong else ""
