"""Short convolution over rings and the forget gate, against transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate, causal_conv1d_fn

from sidestream.core.ring import plan_ring
from sidestream.ops.kda import gate, reference, short_conv
from tests.tolerances import BF16_OUTPUT, BF16_STEPS, FP32_ROUNDING

CHANNELS = 10


def oracle_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A whole sequence [T, C] at once."""
    return causal_conv1d_fn(x.t()[None], weight=weight, activation="silu")[0].t()


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    chunk=st.integers(1, 5),
    window=st.integers(1, 4),
    extra=st.integers(0, 2),
)
def test_sequences_in_chunks_equal_the_whole(lengths: list[int], chunk: int, window: int, extra: int) -> None:
    """Several sequences side by side, each step bringing up to ``chunk`` tokens of each; the ring starts as NaN."""
    torch.manual_seed(0)
    ring = max(window - 1 + extra, 1)
    inputs = [torch.randn(length, CHANNELS) for length in lengths]
    weight = torch.randn(CHANNELS, window)
    state = torch.full(((len(lengths) + 2) * ring, CHANNELS), float("nan"))
    got: list[list[torch.Tensor]] = [[] for _ in lengths]
    for start in range(0, max(lengths), chunk):
        live = [r for r in range(len(lengths)) if start < lengths[r]]
        sizes = [min(chunk, lengths[r] - start) for r in live]
        plan = plan_ring([start] * len(live), sizes, [r + 1 for r in live], window=window, ring_length=ring)
        x = torch.cat([inputs[r][start : start + size] for r, size in zip(live, sizes, strict=True)])
        out = short_conv(x, state, weight, plan=plan)
        for r, part in zip(live, out.split(sizes), strict=True):
            got[r].append(part)
    for r, x in enumerate(inputs):
        torch.testing.assert_close(torch.cat(got[r]), oracle_conv(x, weight), rtol=0, atol=4 * FP32_ROUNDING)
    assert bool(state[:ring].isnan().all()), "scratch was written without a padding row"
    assert bool(state[-ring:].isnan().all()), "a slot of nobody was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("starts", "lengths"), [([0], [600]), ([5, 9, 1], [1, 1, 1]), ([4, 0, 0, 300], [1, 1, 257, 260]), ([2], [256])]
)
def test_a_step_equals_the_formula_and_keeps_its_last_tokens(
    starts: list[int], lengths: list[int], dtype: torch.dtype
) -> None:
    slots = [3, 1, 4, 2][: len(starts)]
    plan = plan_ring(starts, lengths, slots, window=4, ring_length=4)
    x = torch.randn(sum(lengths), 2 * CHANNELS).to(dtype)[:, ::2]
    state = torch.randn(6 * 4, CHANNELS).to(dtype)
    for slot, start in zip(slots, starts, strict=True):
        if start == 0:
            state[slot * 4 : slot * 4 + 4] = float("nan")
    state[20:] = float("nan")
    weight = torch.randn(CHANNELS, 4)
    mine, truth = state.clone(), state.clone()
    got = short_conv(x, mine, weight, plan=plan)
    want = reference.short_conv(x, truth, weight, plan=plan)
    assert got.dtype == dtype
    assert got.is_contiguous()
    torch.testing.assert_close(
        got, want, rtol=2 * BF16_OUTPUT if dtype == torch.bfloat16 else 0, atol=4 * FP32_ROUNDING
    )
    assert torch.equal(mine.nan_to_num(9.0), truth.nan_to_num(9.0))
    assert not torch.equal(mine.nan_to_num(9.0), state.nan_to_num(9.0))


def test_bf16_stays_within_rounding_of_transformers() -> None:
    x, weight = torch.randn(40, CHANNELS).bfloat16(), torch.randn(CHANNELS, 4).bfloat16()
    plan = plan_ring([0], [40], [1], window=4, ring_length=3)
    got = short_conv(x, torch.full((6, CHANNELS), float("nan")).bfloat16(), weight, plan=plan)
    torch.testing.assert_close(got, oracle_conv(x, weight), rtol=BF16_STEPS, atol=BF16_STEPS)


def test_taking_tokens_back_is_setting_the_position_back() -> None:
    """Four tokens verified, two kept: the next step starts two positions earlier, in a ring of 3 + 3 rows."""
    torch.manual_seed(1)
    x, weight = torch.randn(9, CHANNELS), torch.randn(CHANNELS, 4)
    state = torch.full((12, CHANNELS), float("nan"))
    short_conv(x[:5], state, weight, plan=plan_ring([0], [5], [1], window=4, ring_length=6))
    guess = torch.cat([x[5:7], torch.full((2, CHANNELS), 1e3)])
    short_conv(guess, state, weight, plan=plan_ring([5], [4], [1], window=4, ring_length=6))
    got = short_conv(x[7:], state, weight, plan=plan_ring([7], [2], [1], window=4, ring_length=6))
    torch.testing.assert_close(got, oracle_conv(x, weight)[7:], rtol=0, atol=4 * FP32_ROUNDING)


@pytest.mark.parametrize("lower_bound", [-5.0, -0.3, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_equals_transformers(lower_bound: float | None, dtype: torch.dtype) -> None:
    config = Glm5NextTextConfig(
        hidden_size=16, linear_num_heads=3, linear_head_dim=6, linear_lower_bound=lower_bound, rms_norm_eps=1e-5
    )
    oracle = Glm5NextTextForgetGate(config)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.normal_()
        x = torch.randn(1, 30, 16) * 6
        f = oracle.f_b_proj(oracle.f_a_proj(x))[0].to(dtype)
        f[0, :3] = torch.tensor([60.0, -60.0, 19.99])  # both sides of the softplus threshold
        oracle.f_b_proj = torch.nn.Identity()
        oracle.f_a_proj = torch.nn.Identity()
        want = oracle(f[None])[0]
        got = gate(f, oracle.dt_bias, oracle.A_log, lower_bound=lower_bound)
        truth = reference.gate(f, oracle.dt_bias, oracle.A_log, lower_bound=lower_bound)
    assert got.dtype == torch.float32
    assert got.shape == (30, 3, 6)
    assert bool((got <= 0).all())
    torch.testing.assert_close(got, want, rtol=FP32_ROUNDING, atol=FP32_ROUNDING)
    torch.testing.assert_close(got, truth, rtol=FP32_ROUNDING, atol=FP32_ROUNDING)


def test_the_bound_is_a_sigmoid_and_not_a_clamp() -> None:
    f, zero = torch.tensor([[0.0]]), torch.zeros(1)
    assert gate(f, zero, zero, lower_bound=-5.0).item() == pytest.approx(-2.5)
    assert gate(f, zero, zero, lower_bound=None).item() == pytest.approx(-0.6931472)
    # A_log scales inside the sigmoid, outside the softplus
    two = torch.full((1,), 2.0).log()
    one = torch.ones(1, 1)
    assert gate(one, zero, two, lower_bound=-1.0).item() == pytest.approx(-0.8807971)
    assert gate(one, zero, two, lower_bound=None).item() == pytest.approx(-2.6265233)
