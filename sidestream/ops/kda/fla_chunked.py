"""Chunks of prompts through fla-core's ``chunk_kda``, which the GPU extra brings. Never imported on a CPU.

Its states are [sequences, H, K, V] fp32, as ours are. Its gate is ours: ``-exp(A_log) * softplus(f + dt_bias)``, or
with a bound ``bound * sigmoid(exp(A_log) * (f + dt_bias))``. Bounds down to -5 let it take tensor cores within blocks
of 16 tokens, where no product of decays can overflow; without a bound it goes token by token there.

It times several launches of each of its kernels at first use and keeps the fastest, so that two processes may differ in
bits. ``pin`` leaves each kernel one launch: the same bits everywhere, and nothing to time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from sidestream.ops.kda.torch_impl import ForgetGate

SAFE_BOUND = -5.0
"""The lowest log decay a token for which fla-core multiplies blocks of 16 tokens on tensor cores."""
LAUNCHES: dict[str, tuple[str, dict[str, int], int, int]] = {}
"""Kernel -> (module, keyword arguments, warps, stages), as swept on an H200."""


@cache
def available() -> bool:
    """Whether fla-core is installed, and its launches known: timing them would take a minute."""
    return bool(LAUNCHES) and find_spec("fla") is not None and find_spec("fla.ops.kda") is not None


@cache
def _chunk_kda() -> Any:
    """fla-core's function, its kernels pinned. It is imported when the first prompt comes."""
    function = import_module("fla.ops.kda").chunk_kda
    for name, (module, keywords, num_warps, num_stages) in LAUNCHES.items():
        pin(getattr(import_module(module), name), keywords, num_warps, num_stages)
    return function


def pin(kernel: Any, keywords: dict[str, int], num_warps: int, num_stages: int) -> None:
    """Leave an autotuned kernel the one of its launches that is named; it must be among them."""
    while not hasattr(kernel, "configs"):
        kernel = kernel.fn
    named = [
        config
        for config in kernel.configs
        if config.kwargs == keywords and (config.num_warps, config.num_stages) == (num_warps, num_stages)
    ]
    assert len(named) == 1, f"{len(named)} launches of {kernel} are {keywords}, {num_warps} warps, {num_stages} stages"
    kernel.configs = named


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    forget: torch.Tensor,
    beta: torch.Tensor,
    gate: ForgetGate,
    state: torch.Tensor,
    slots: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
) -> torch.Tensor:
    """Chunks of several sequences, flat one behind the other, as ``torch_chunked.chunked``; bf16 products inside.

    Args:
        q, k: [T, H, K] of unit length, v: [T, H, V], contiguous.
        forget: [T, H, K], beta: [T, H], both before their gates.
        state: [slots, versions, H, K, V] fp32, contiguous; read and written as ``torch_chunked.chunked`` says.
    Returns:
        [T, H, V] in ``v.dtype``.
    """
    versions = state.shape[1]
    memory = state.view(-1, *state.shape[2:])
    rows = [[slot * versions + at % versions for slot, at in zip(slots, starts, strict=True)]]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    rows.append([slot * versions + at % versions for slot, at in zip(slots, ends, strict=True)])
    before, after = torch.tensor(rows).to(q.device, non_blocking=True)
    initial = memory.index_select(0, before)
    fresh = [r for r, start in enumerate(starts) if start == 0]
    if fresh:
        initial[fresh] = 0.0
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    out, final = _chunk_kda()(
        q=q.unsqueeze(0),
        k=k.unsqueeze(0),
        v=v.unsqueeze(0),
        g=forget.unsqueeze(0),
        beta=beta.unsqueeze(0),
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        A_log=gate.A_log,
        dt_bias=gate.dt_bias,
        safe_gate=gate.lower_bound is not None and SAFE_BOUND <= gate.lower_bound < 0,
        lower_bound=gate.lower_bound,
        cu_seqlens=bounds.to(q.device),
        cu_seqlens_cpu=bounds,
    )
    memory.index_copy_(0, after, final)
    result: torch.Tensor = out.squeeze(0)
    return result
