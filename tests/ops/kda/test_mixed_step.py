"""Steps with chunks of prompts in them, in torch and Triton (interpreted without a GPU), against the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.core.ring import plan_ring
from sidestream.ops.kda import mixed, reference, triton_chunked, triton_decode, triton_mixed
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


@pytest.mark.parametrize("decodes", [0, 1, 2])
@pytest.mark.parametrize("function", [mixed.mixed_step, triton_mixed.mixed_step], ids=["torch", "triton"])
def test_rows_behind_the_sequences_are_zeros(function: Any, decodes: int) -> None:
    """And the others have the bits that they have alone."""
    case = mixed_step_case([7, 4, 5], [1, 1, 3], 2, 16, decodes=decodes, padding=4)
    padded, alone = (map_tensors(case, lambda tensor: tensor.clone().to(DEVICE)) for _ in range(2))
    got, want = function(**padded, rows=9), function(**alone)
    assert got.shape == (9, 32)
    assert torch.equal(got[:5], want)
    assert torch.equal(got[5:], torch.zeros_like(got[5:]))


def test_nothing_is_joined_or_padded_behind_the_kernels() -> None:
    """Decodes and the chunk are written where the result is read."""
    case = mixed_step_case([7, 0], [1, 6], 2, 16, decodes=1, padding=1)
    mine = map_tensors(case, lambda tensor: tensor.clone().to(DEVICE))
    with torch.profiler.profile() as profile:
        triton_mixed.mixed_step(**mine, rows=8)
    found = {event.name for event in profile.events()}
    assert "aten::zero_" in found, "operators are seen"
    assert not found & {"aten::cat", "aten::pad", "aten::constant_pad_nd"}


@pytest.mark.parametrize("walk", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_a_prompt_equals_the_formula_in_each_form_that_is_asked_for(tokens: int, blocks: bool, walk: bool) -> None:
    """At heads smaller than those for which either is chosen, fresh and behind tokens of its own."""
    case = mixed_step_case([0, 6], [tokens, 3], 2, 16, padding=2)
    truth, mine = map_tensors(case, torch.clone), map_tensors(case, lambda tensor: tensor.clone().to(DEVICE))
    got = triton_mixed.mixed_step(**mine, walk=walk, launch=triton_chunked.Launch(blocks=blocks)).cpu()
    torch.testing.assert_close(got, reference.mixed_step(**truth), rtol=FP32_GEMM, atol=FP32_RECURRENCE)
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
    for name in ("host_slots", "starts", "lengths", "decodes", "kept"):
        del alone[name]
    assert torch.equal(triton_decode.decode_step(**alone), got)


@pytest.mark.parametrize("function", [mixed.mixed_step, triton_mixed.mixed_step], ids=["torch", "triton"])
def test_rows_may_lie_within_a_larger_tensor(function: Any) -> None:
    """The same bits as on their own, and nothing beside them is read."""
    case = mixed_step_case([7, 0, 5], [1, 6, 3], 2, 16, decodes=1)
    alone, within = (map_tensors(case, lambda tensor: tensor.clone().to(DEVICE)) for _ in range(2))
    beside = torch.full_like(within["projected"][:3], torch.nan)
    within["projected"] = torch.cat((beside, within["projected"], beside))[3:-3]
    assert torch.equal(function(**within), function(**alone))
    for name in ("conv_state", "state"):
        assert torch.equal(clean(within[name]), clean(alone[name]))
