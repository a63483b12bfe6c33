"""Steps with chunks of prompts in them, in torch and Triton (interpreted without a GPU), against the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.core.ring import plan_ring
from sidestream.ops.kda import fla_chunked, mixed, reference, torch_chunked, torch_impl, triton_decode, triton_mixed
from sidestream.ops.kda.torch_impl import ForgetGate
from tests.ops.kda.mixed_step_case import mixed_step_case
from tests.ops.operator_case import map_tensors
from tests.ops.triton_mode import DEVICE
from tests.tolerances import BF16_STEPS, FP32_GEMM, FP32_RECURRENCE

SHAPES = {
    "a fresh prompt": ([0], [9], 0),
    "decodes beside chunks": ([7, 2, 0, 5], [1, 1, 6, 3], 2),
    "one token of a prompt": ([4, 0], [1, 1], 1),
    "decodes of two tokens": ([7, 2, 0], [2, 2, 5], 2),
    "several prompts": ([0, 3, 0], [1, 7, 2], 0),
    "decodes of two tokens alone": ([7, 2], [2, 2], 2),
}


def clean(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().float().nan_to_num(7.0)


@pytest.mark.parametrize(("starts", "lengths", "decodes"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("versions", "bound"), [(1, -5.0), (3, None)])
@pytest.mark.parametrize("function", [mixed.mixed_step, triton_mixed.mixed_step], ids=["torch", "triton"])
def test_a_step_equals_the_formula(
    function: Any, starts: list[int], lengths: list[int], decodes: int, versions: int, bound: float | None
) -> None:
    """Two rows of padding behind; slots that nobody owns, and what fresh prompts find in theirs, stay unread."""
    choice = {"decodes": decodes, "padding": 2, "versions": versions, "rollback": versions - 1, "lower_bound": bound}
    case = mixed_step_case(starts, lengths, 2, 16, **choice)
    truth, mine = map_tensors(case, torch.clone), map_tensors(case, lambda tensor: tensor.clone().to(DEVICE))
    got = function(**mine).cpu()
    want = reference.mixed_step(**truth)
    assert got.shape == (sum(lengths), 32)
    torch.testing.assert_close(got, want, rtol=FP32_GEMM, atol=FP32_RECURRENCE)
    torch.testing.assert_close(clean(mine["state"]), clean(truth["state"]), rtol=0, atol=FP32_RECURRENCE)
    assert torch.equal(clean(mine["conv_state"]), clean(truth["conv_state"]))


def test_a_bf16_step_is_near_the_formula() -> None:
    case = mixed_step_case([7, 0, 5], [1, 6, 3], 2, 16, decodes=1, dtype=torch.bfloat16)
    truth, mine = map_tensors(case, torch.clone), map_tensors(case, lambda tensor: tensor.clone().to(DEVICE))
    got = triton_mixed.mixed_step(**mine).cpu()
    torch.testing.assert_close(got, reference.mixed_step(**truth), rtol=BF16_STEPS, atol=2 * BF16_STEPS)


def test_decodes_have_the_bits_of_a_decode_step() -> None:
    """Whatever prompts stand beside them."""
    case = mixed_step_case([7, 2, 0], [1, 1, 6], 2, 16, decodes=2)
    other = map_tensors(case, torch.clone)
    other["projected"][2:] = torch.nan
    mine, theirs, alone = (map_tensors(x, lambda tensor: tensor.clone().to(DEVICE)) for x in (case, other, case))
    got = triton_mixed.mixed_step(**mine)[:2]
    assert bool(got.isfinite().all())
    assert torch.equal(triton_mixed.mixed_step(**theirs)[:2], got)
    plan = plan_ring([7, 2], [1, 1], alone["host_slots"][:2], window=4, ring_length=3)
    alone["plan"] = plan.moved([tensor.to(DEVICE) for tensor in plan.tensors])
    alone |= {name: alone[name][:2] for name in ("projected", "slots", "start")}
    for name in ("host_slots", "starts", "lengths", "decodes"):
        del alone[name]
    assert torch.equal(triton_decode.decode_step(**alone), got)


def stand_in(seen: list[dict[str, Any]]) -> Any:
    """What fla-core documents of ``chunk_kda``, in torch: states [sequences, H, K, V], gates before their functions."""

    def chunk_kda(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        initial_state: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        lower_bound: float | None,
        cu_seqlens: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(options)
        decay = torch_impl.gate(g[0].flatten(1), dt_bias, A_log, lower_bound=lower_bound)
        sequences, states = range(len(cu_seqlens) - 1), initial_state.unsqueeze(1).clone()
        rest = {"slots": list(sequences), "starts": [1] * len(sequences), "lengths": cu_seqlens.diff().tolist()}
        out = torch_chunked.chunked(q[0], k[0], v[0], g=decay, beta=beta[0].sigmoid(), state=states, **rest)
        return out.unsqueeze(0), states.squeeze(1)

    return chunk_kda


@pytest.mark.parametrize("bound", [-5.0, -9.0, None])
@pytest.mark.parametrize("versions", [1, 3])
def test_states_go_to_and_from_fla_core(monkeypatch: pytest.MonkeyPatch, bound: float | None, versions: int) -> None:
    """K and V differ; two continuing sequences and a fresh one whose slot is poisoned."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(fla_chunked, "_chunk_kda", lambda: stand_in(seen))
    heads, size_k, size_v, starts, lengths, slots = 2, 8, 12, [5, 0, 9], [3, 6, 1], [4, 2, 1]
    q, k = torch.nn.functional.normalize(torch.randn(2, 10, heads, size_k), dim=-1).unbind(0)
    v, forget, beta = torch.randn(10, heads, size_v), torch.randn(10, heads, size_k), torch.randn(10, heads)
    dt_bias, A_log = torch.randn(heads * size_k), torch.randn(heads)
    state = torch.full((6, versions, heads, size_k, size_v), torch.nan)
    for slot, start in ((4, 5), (1, 9)):
        state[slot, start % versions] = torch.randn(heads, size_k, size_v)
    truth, where = state.clone(), {"slots": slots, "starts": starts, "lengths": lengths}
    gate = ForgetGate(dt_bias, A_log, bound)
    got = fla_chunked.chunked(q, k, v, forget=forget, beta=beta, gate=gate, state=state, **where)
    decay = reference.gate(forget.flatten(1), dt_bias, A_log, lower_bound=bound)
    want = reference.chunked(q, k, v, g=decay, beta=beta.sigmoid(), state=truth, **where)
    torch.testing.assert_close(got, want, rtol=0, atol=FP32_RECURRENCE)
    torch.testing.assert_close(clean(state), clean(truth), rtol=0, atol=FP32_RECURRENCE)
    assert [options["safe_gate"] for options in seen] == [bound == -5.0], "blocks of 16 would overflow below -5"


def test_torch_steps_in_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_chunked, "available", lambda: False)
    triton_mixed.FALLBACKS.clear()
    for dtype in (torch.float32, torch.bfloat16, torch.bfloat16):
        case = mixed_step_case([0], [5], 1, 16, dtype=dtype)
        triton_mixed.mixed_step(**map_tensors(case, lambda tensor: tensor.to(DEVICE)))
    assert triton_mixed.FALLBACKS == {"fp32 model": 1, "fla-core is not installed": 2}


def test_a_pinned_kernel_has_the_one_launch_that_is_named() -> None:
    class Config:
        def __init__(self, kwargs: dict[str, int], num_warps: int, num_stages: int) -> None:
            self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages

    class Tuned:
        def __init__(self) -> None:
            self.configs = [Config({"BK": size}, warps, 3) for size in (32, 64) for warps in (2, 4)]

    class Heuristics:
        def __init__(self, fn: Tuned) -> None:
            self.fn = fn

    tuned = Tuned()
    fla_chunked.pin(Heuristics(tuned), {"BK": 64}, 2, 3)
    assert [(config.kwargs, config.num_warps) for config in tuned.configs] == [({"BK": 64}, 2)]
    with pytest.raises(AssertionError, match="0 launches"):
        fla_chunked.pin(tuned, {"BK": 16}, 2, 3)
