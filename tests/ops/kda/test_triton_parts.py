"""Triton kernels of the short convolution, the gate and the recurrent step, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from sidestream.core.ring import plan_ring
from sidestream.ops.kda import reference, torch_impl, triton_conv, triton_recurrent
from tests.ops.kda.kernels_met import Met
from tests.ops.operator_case import map_tensors
from tests.ops.triton_mode import DEVICE
from tests.tolerances import BF16_OUTPUT, FP32_ROUNDING

CHANNELS = 10


def relative(dtype: torch.dtype) -> float:
    return 4 * FP32_ROUNDING if dtype == torch.float32 else 2 * BF16_OUTPUT  # one ulp: fp32 values may straddle a tie


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("starts", "lengths", "ring"),
    [([5, 0, 1], [1, 1, 1], 3), ([4, 0, 0, 30], [1, 1, 9, 6], 3), ([2, 7], [2, 4], 5), ([0], [2], 3)],
)
def test_short_conv_equals_the_formula(
    starts: list[int], lengths: list[int], ring: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several blocks of channels, with x a slice of wider rows and the taps transposed in memory."""
    monkeypatch.setattr(triton_conv, "CHANNELS", 8)
    slots = [3, 1, 4, 2][: len(starts)]
    plan = plan_ring(starts, lengths, slots, window=4, ring_length=ring)
    x = torch.randn(sum(lengths), CHANNELS + 3).to(dtype)[:, 1 : 1 + CHANNELS]
    state = torch.full((6, ring, CHANNELS), torch.nan)
    for slot, start in zip(slots, starts, strict=True):
        for back in range(1, min(start, 3) + 1):
            state[slot, (start - back) % ring] = torch.randn(CHANNELS)
    state = state.view(6 * ring, CHANNELS).to(dtype)
    weight = torch.randn(4, CHANNELS).t()
    mine = map_tensors({"x": x, "state": state, "weight": weight, "plan": plan}, lambda t: t.clone().to(DEVICE))
    got = triton_conv.short_conv(mine["x"], mine["state"], mine["weight"], plan=mine["plan"])
    want = reference.short_conv(x, state, weight, plan=plan)
    torch.testing.assert_close(got.cpu(), want, rtol=relative(dtype), atol=4 * FP32_ROUNDING)
    assert torch.equal(mine["state"].cpu().nan_to_num(7.0), state.nan_to_num(7.0))


def test_short_conv_keeps_only_the_end_of_a_long_chunk() -> None:
    """A ring of three rows takes the last three of nine tokens, each once."""
    plan = plan_ring([0], [9], [1], window=4, ring_length=3)
    x, state, weight = torch.randn(9, CHANNELS), torch.full((9, CHANNELS), torch.nan), torch.randn(CHANNELS, 4)
    mine = map_tensors({"x": x, "state": state, "weight": weight, "plan": plan}, lambda t: t.clone().to(DEVICE))
    triton_conv.short_conv(mine["x"], mine["state"], mine["weight"], plan=mine["plan"])
    assert torch.equal(mine["state"][3:6].cpu(), x[6:])
    assert bool(mine["state"][[0, 1, 2, 6, 7, 8]].isnan().all())


@pytest.mark.parametrize("walk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("starts", "lengths", "first"),
    [([0], [70], 0), ([5, 0], [1, 140], 1), ([9, 3, 0, 2, 40], [1, 1, 33, 1, 100], 2), ([8], [41], 0)],
)
def test_heads_conv_equals_the_formula(
    starts: list[int], lengths: list[int], first: int, walk: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs with a sequence's start in them and without, over several blocks of channels of 16 with heads of 8."""
    monkeypatch.setattr(triton_conv, "WALK_CHANNELS", 16)
    monkeypatch.setattr(triton_conv, "HEAD_CHANNELS", 16)
    heads, dim, tokens, slots = 3, 8, sum(lengths), [6 - r for r in range(len(starts))]
    plan = plan_ring(starts, lengths, slots, window=4, ring_length=3)
    x = torch.full((tokens + 2, 3 * heads * dim + 5), torch.nan)
    x[:tokens, : 3 * heads * dim] = torch.randn(tokens, 3 * heads * dim)
    state = torch.full((7, 3, 3 * heads * dim), torch.nan)
    for slot, start in zip(slots, starts, strict=True):
        for back in range(1, min(start, 3) + 1):
            state[slot, (start - back) % 3] = torch.randn(3 * heads * dim)
    x, state = x[:, : 3 * heads * dim].to(dtype), state.view(21, -1).to(dtype)
    weight = torch.randn(4, 3 * heads * dim).t()
    mine = map_tensors({"x": x, "state": state, "weight": weight, "plan": plan}, lambda t: t.clone().to(DEVICE))
    got = triton_conv.heads_conv(**mine, tokens=tokens, first=first, dim=dim, walk=walk).float().cpu()
    truth = state.float().clone()
    summed = reference.short_conv(x[:tokens].float(), truth, weight, plan=plan)[first:]
    want = summed.view(-1, 3, heads, dim).transpose(0, 1).clone()
    want[:2] *= torch.rsqrt(want[:2].square().sum(-1, keepdim=True) + torch_impl.L2_EPS)
    torch.testing.assert_close(got, want, rtol=relative(dtype), atol=4 * FP32_ROUNDING)
    for slot in slots[:first]:  # whose rings are left to another kernel
        truth[3 * slot : 3 * slot + 3] = state[3 * slot : 3 * slot + 3].float()
    assert torch.equal(mine["state"].float().cpu().nan_to_num(7.0), truth.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("heads", "dim", "window", "usual"),
    [
        (8, 128, 4, "_walk"),
        (64, 128, 4, "_walk"),
        (4, 128, 4, "_convolve"),
        (12, 128, 4, "_convolve"),
        (4, 32, 4, "_convolve"),
        (32, 32, 4, "_convolve"),
        (8, 128, 3, "_convolve"),
    ],
)
def test_which_kernel_convolves_heads(
    heads: int, dim: int, window: int, usual: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Walks only at the size that a GPU has run, unless they are asked for."""
    met: list[str] = []
    for name in ("_walk", "_convolve", "_keep"):
        monkeypatch.setattr(triton_conv, name, Met(name, met))
    plan, width = plan_ring([0], [5], [1], window=window, ring_length=3), 3 * heads * dim
    x, state, weight = torch.empty(5, width), torch.empty(6, width), torch.empty(width, window)
    for walk in (None, True, False):
        triton_conv.heads_conv(x, state, weight, plan=plan, tokens=5, first=0, dim=dim, walk=walk)
    asked = "_walk" if window == 4 else "_convolve"
    assert [name for name in met if name != "_keep"] == [usual, asked, "_convolve"]


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_equals_the_formula(bound: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_conv, "CHANNELS", 16)
    f = (torch.randn(4, 40) * 8).to(dtype)[:, 3:33]
    dt_bias, a_log = torch.randn(30), torch.randn(3)
    got = triton_conv.gate(f.to(DEVICE), dt_bias.to(DEVICE), a_log.to(DEVICE), lower_bound=bound).cpu()
    want = reference.gate(f, dt_bias, a_log, lower_bound=bound)
    torch.testing.assert_close(got, want, rtol=4 * FP32_ROUNDING, atol=FP32_ROUNDING)


@pytest.mark.parametrize(("tokens", "versions"), [(1, 1), (1, 3), (3, 4), (2, 2)])
def test_recurrent_equals_the_formula(tokens: int, versions: int) -> None:
    """K and V differ; a fresh request, padding rows of slot 0, and NaN in whatever nobody owns."""
    heads, size_k, size_v = 2, 8, 64
    slots, starts = torch.tensor([3, 1, 0, 0]), torch.tensor([9, 0, 0, 0])
    shape = (4, tokens, heads)
    q, k = torch.randn(2, 4, heads, tokens, size_k).transpose(2, 3).unbind(0)
    values = {"q": q, "k": k, "v": torch.randn(*shape, size_v)}
    state = torch.full((5, versions, heads, size_k, size_v), torch.nan)
    state[3, 9 % versions] = torch.randn(heads, size_k, size_v)
    rest = {"g": -torch.rand(*shape, size_k), "beta": torch.rand(*shape), "slots": slots, "start": starts}
    mine = map_tensors({**values, **rest, "state": state}, lambda t: t.clone().to(DEVICE))
    mine["q"] = q.to(DEVICE)
    assert triton_recurrent.takes(mine["q"], mine["k"], mine["v"], mine["state"])
    got = triton_recurrent.recurrent(**mine).cpu()
    assert bool(got.isfinite().all())
    for implementation in (reference.recurrent, torch_impl.recurrent):
        theirs = state.clone()
        want = implementation(**values, **rest, state=theirs)
        torch.testing.assert_close(got, want, rtol=0, atol=4 * FP32_ROUNDING)
        torch.testing.assert_close(
            mine["state"][1:].cpu().nan_to_num(7.0), theirs[1:].nan_to_num(7.0), rtol=0, atol=2 * FP32_ROUNDING
        )
