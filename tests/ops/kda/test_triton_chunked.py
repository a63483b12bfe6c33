"""The Triton kernels of chunked KDA, interpreted where there is no GPU, against the formula. K and V differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.ops.kda import reference, triton_blocks, triton_chunked
from sidestream.ops.kda.torch_impl import ForgetGate
from tests.ops.kda.kernels_met import Met
from tests.ops.triton_mode import DEVICE, INTERPRETED
from tests.tolerances import FP32_DIFFERENCE, FP32_RECURRENCE

HEADS, K, V = 2, 16, 32
BLOCKS = triton_chunked.Launch(blocks=True)
HALVES = triton_chunked.Launch(blocks=False)


def inputs(tokens: int, *, shift: float = 0.0) -> dict[str, torch.Tensor]:
    """``shift`` moves the forget gate: large ones let it close."""
    q, k = torch.nn.functional.normalize(torch.randn(2, tokens, HEADS, K), dim=-1).unbind(0)
    v, beta = torch.randn(tokens, HEADS, V), torch.randn(tokens, HEADS + 3)[:, 1 : 1 + HEADS]
    return {"q": q, "k": k, "v": v, "forget": torch.randn(tokens, HEADS, K) + shift, "beta": beta}


def new_gate(bound: float | None) -> ForgetGate:
    return ForgetGate(torch.randn(HEADS * K), torch.rand(HEADS), bound)


def run(
    made: dict[str, torch.Tensor],
    gate: ForgetGate,
    state: torch.Tensor,
    launch: triton_chunked.Launch | None = None,
    **where: Any,
) -> torch.Tensor:
    """Updates ``state``."""
    moved = {name: tensor.to(DEVICE) for name, tensor in made.items()}
    theirs = ForgetGate(gate.dt_bias.to(DEVICE), gate.A_log.to(DEVICE), gate.lower_bound)
    states = state.to(DEVICE)
    out = triton_chunked.chunked(**moved, gate=theirs, state=states, launch=launch, **where).cpu()
    state.copy_(states)
    return out


def formula(made: dict[str, torch.Tensor], gate: ForgetGate, state: torch.Tensor, **where: Any) -> torch.Tensor:
    rest = {name: made[name] for name in ("q", "k", "v")}
    g = reference.gate(made["forget"].flatten(1), gate.dt_bias, gate.A_log, lower_bound=gate.lower_bound)
    return reference.chunked(**rest, g=g, beta=made["beta"].sigmoid(), state=state, **where)


def rounding(made: dict[str, torch.Tensor], gate: ForgetGate) -> float:
    """Absolute bound of values of order one. A factor is the power of a difference of two sums of log decays, of up to
    a chunk each; numpy adds one by one, so what two sums have in common is rounded alike, and a GPU adds in a tree."""
    if INTERPRETED:
        return FP32_RECURRENCE
    g = reference.gate(made["forget"].flatten(1), gate.dt_bias, gate.A_log, lower_bound=gate.lower_bound)
    sums = g.clamp(min=triton_chunked.LEAST.value).abs().cumsum(dim=0)
    earlier = torch.nn.functional.pad(sums, (0, 0, 0, 0, triton_chunked.CHUNK, 0))[: sums.shape[0]]
    return max(FP32_RECURRENCE, float((sums - earlier).max()) * FP32_DIFFERENCE)


def close(got: torch.Tensor, want: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(got.nan_to_num(7.0), want.nan_to_num(7.0), rtol=0, atol=atol)


@pytest.mark.parametrize(("bound", "launch"), [(-5.0, BLOCKS), (-5.0, HALVES), (None, HALVES)])
@pytest.mark.parametrize("shift", [0.0, 8.0])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
def test_a_fresh_prompt_equals_the_formula(
    tokens: int, shift: float, bound: float | None, launch: triton_chunked.Launch
) -> None:
    """Its slot holds NaN. Without a bound a shift of 8 forgets e**-8 and more a token."""
    made, gate = inputs(tokens, shift=shift), new_gate(bound)
    state = torch.full((3, 1, HEADS, K, V), torch.nan)
    truth, where = state.clone(), {"slots": [1], "starts": [0], "lengths": [tokens]}
    got = run(made, gate, state, launch, **where)
    close(got, formula(made, gate, truth, **where), rounding(made, gate))
    close(state, truth, rounding(made, gate))


@pytest.mark.parametrize("bound", [-40.0, -5.01, None])
def test_a_gate_that_forgets_more_than_blocks_hold_goes_by_halves(bound: float | None) -> None:
    """Blocks would take exponents that overflow, and make NaN of infinities times nothing."""
    made, gate = inputs(40, shift=30.0), new_gate(bound)
    assert not triton_blocks.gentle(gate)
    state = torch.full((2, 1, HEADS, K, V), torch.nan)
    truth, where = state.clone(), {"slots": [1], "starts": [0], "lengths": [40]}
    got = run(made, gate, state, BLOCKS, **where)
    close(got, formula(made, gate, truth, **where), rounding(made, gate))
    close(state, truth, rounding(made, gate))


@pytest.mark.parametrize(("size_k", "size_v"), [(128, 128), (32, 32), (64, 64), (64, 128), (128, 64)])
def test_which_kernel_takes_a_chunk(size_k: int, size_v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks only at the size that a GPU has run, unless they are asked for."""
    met: list[str] = []
    for name in ("within_blocks", "_within", "_carry"):
        monkeypatch.setattr(triton_chunked, name, Met(name, met))
    q, v, beta = torch.empty(5, HEADS, size_k), torch.empty(5, HEADS, size_v), torch.empty(5, HEADS)
    gate = ForgetGate(torch.empty(HEADS * size_k), torch.empty(HEADS), -5.0)
    state = torch.empty(2, 1, HEADS, size_k, size_v)
    where: dict[str, Any] = {"slots": [1], "starts": [0], "lengths": [5]}
    for launch in (None, BLOCKS, HALVES):
        triton_chunked.chunked(q, q, v, forget=q, beta=beta, gate=gate, state=state, launch=launch, **where)
    usual = "within_blocks" if (size_k, size_v) == (128, 128) else "_within"
    assert met == [usual, "_carry", "within_blocks", "_carry", "_within", "_carry"]


def test_blocks_that_forget_all_they_can_then_nothing() -> None:
    """At the bound for 20 tokens, e**-100, behind and before tokens that forget next to nothing."""
    made, gate = inputs(64, shift=-30.0), ForgetGate(torch.zeros(HEADS * K), torch.zeros(HEADS), -5.0)
    made["forget"][13:33] = 90.0
    made["forget"][50:58, :, ::2] = 90.0
    state = torch.full((2, 1, HEADS, K, V), torch.nan)
    truth, where = state.clone(), {"slots": [1], "starts": [0], "lengths": [64]}
    got = run(made, gate, state, BLOCKS, **where)
    close(got, formula(made, gate, truth, **where), rounding(made, gate))
    close(state, truth, rounding(made, gate))


def test_a_gate_that_closes_and_opens_within_a_chunk() -> None:
    made, gate = inputs(70, shift=-3.0), new_gate(None)
    for token in (0, 5, 31, 32, 63, 64):
        made["forget"][token, 1] = 1e4
    made["forget"][40:50, 0, ::2] = 90.0
    state = torch.full((2, 1, HEADS, K, V), torch.nan)
    truth, where = state.clone(), {"slots": [1], "starts": [0], "lengths": [70]}
    got = run(made, gate, state, **where)
    bound = triton_chunked.CHUNK * 104 * 2**-24  # see LEAST: values and what is left of them are of order one
    torch.testing.assert_close(got, formula(made, gate, truth, **where), rtol=0, atol=bound)
    torch.testing.assert_close(state[1], truth[1], rtol=0, atol=bound)


@pytest.mark.parametrize("launch", [BLOCKS, HALVES])
@pytest.mark.parametrize("lengths", [[1, 70, 3], [65], [3, 1, 64, 5]])
def test_a_mixed_batch_equals_each_alone(
    lengths: list[int], launch: triton_chunked.Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh and continuing sequences, slots out of order, rings of three versions, heads one by one."""
    monkeypatch.setattr(triton_chunked, "MAX_BYTES", 1)
    R = len(lengths)
    made, gate = inputs(sum(lengths)), new_gate(-5.0)
    starts, slots = [0 if r % 2 else 4 + 7 * r for r in range(R)], [R - r for r in range(R)]
    state = torch.full((R + 2, 3, HEADS, K, V), torch.nan)
    for slot, start in zip(slots, starts, strict=True):
        if start:
            state[slot, start % 3] = torch.randn(HEADS, K, V)
    truth, where = state.clone(), {"slots": slots, "starts": starts, "lengths": lengths}
    got = run(made, gate, state, launch, **where)
    close(got, formula(made, gate, truth, **where), rounding(made, gate))
    close(state, truth, rounding(made, gate))


@pytest.mark.parametrize("launch", [BLOCKS, HALVES])
def test_garbage_in_one_sequence_stays_there(launch: triton_chunked.Launch) -> None:
    made, gate, lengths = inputs(14), new_gate(-5.0), [5, 4, 5]
    where = {"slots": [1, 2, 3], "starts": [0, 0, 0], "lengths": lengths}
    clean, dirty = (torch.zeros(4, 1, HEADS, K, V) for _ in range(2))
    want = run(made, gate, clean, launch, **where)
    for tensor in made.values():
        tensor[5:9] = torch.nan
    got = run(made, gate, dirty, launch, **where)
    keep = [*range(5), *range(9, 14)]
    assert torch.equal(got[keep], want[keep])
    assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])
