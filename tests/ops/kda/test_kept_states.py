"""States that chunks leave in other slots on their way, in torch and Triton (interpreted without a GPU)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.core.batch import Split
from sidestream.core.ring import plan_ring
from sidestream.ops.kda import mixed, reference, torch_chunked, torch_impl, triton_chunked, triton_conv, triton_mixed
from sidestream.ops.kda.kept_states import by_sequence, runs_of
from sidestream.ops.kda.torch_impl import ForgetGate
from tests.ops.kda.mixed_step_case import mixed_step_case
from tests.ops.operator_case import Arguments, map_tensors
from tests.ops.triton_mode import DEVICE
from tests.tolerances import BF16_STEPS, FP32_GEMM, FP32_RECURRENCE

HEADS, K, V = 2, 16, 32
STEPS = [mixed.mixed_step, triton_mixed.mixed_step]
BOTH = pytest.mark.parametrize("function", STEPS, ids=["torch", "triton"])

PLACES: dict[str, tuple[list[int], list[int], list[list[int]]]] = {
    "one token in": ([0], [70], [[1]]),
    "one token into what goes on": ([9], [5], [[10]]),
    "two tokens in": ([5], [70], [[7]]),
    "three tokens in": ([61], [70], [[64]]),
    "at the end": ([4], [66], [[70]]),
    "the only token": ([3], [1], [[4]]),
    "at ends of chunks": ([0], [150], [[64, 128]]),
    "a token apart": ([2], [12], [[3, 4, 5, 7, 14]]),
    "odd places of several": ([0, 70, 3, 0], [70, 3, 130, 5], [[1, 33, 69], [], [5, 6, 66, 133], [5]]),
    "none of the first": ([7, 0], [65, 64], [[], [63, 64]]),
}
"""Starts, lengths, and the positions whose states are kept."""
places = pytest.mark.parametrize(("starts", "lengths", "kept"), PLACES.values(), ids=PLACES)


def clean(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().float().nan_to_num(7.0)


def here(arguments: Arguments) -> Arguments:
    return map_tensors(arguments, lambda tensor: tensor.clone().to(DEVICE))


@places
@pytest.mark.parametrize("versions", [1, 3])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_chunked_rule_equals_the_formula(
    starts: list[int], lengths: list[int], kept: list[list[int]], versions: int, grouped: bool, monkeypatch: Any
) -> None:
    """K and V differ; all heads at once and one by one. Slots that nothing is left in stay as they were."""
    if grouped:
        monkeypatch.setattr(torch_chunked, "MAX_ELEMENTS", 1)
        monkeypatch.setattr(triton_chunked, "MAX_BYTES", 1)
    tokens, R = sum(lengths), len(lengths)
    q, k = torch.nn.functional.normalize(torch.randn(2, tokens, HEADS, K), dim=-1).unbind(0)
    v, forget, beta = torch.randn(tokens, HEADS, V), torch.randn(tokens, HEADS, K), torch.randn(tokens, HEADS)
    gate = ForgetGate(torch.randn(HEADS * K), torch.rand(HEADS), -5.0)
    slots = [R - r for r in range(R)]
    splits = [[Split(p, R + 2 + 6 * r + i) for i, p in enumerate(own)] for r, own in enumerate(kept)]
    state = torch.full((6 * R + 9, versions, HEADS, K, V), torch.nan)
    for slot, start in zip(slots, starts, strict=True):
        if start:
            state[slot, start % versions] = torch.randn(HEADS, K, V)
    where: dict[str, Any] = {"slots": slots, "starts": starts, "lengths": lengths, "kept": splits}
    g, gained = torch_impl.gate(forget.flatten(1), gate.dt_bias, gate.A_log, lower_bound=-5.0), beta.sigmoid()
    truth, by_torch, by_triton = state.clone(), state.clone(), state.clone().to(DEVICE)
    want = reference.chunked(q, k, v, g=g, beta=gained, state=truth, **where)
    got = torch_chunked.chunked(q, k, v, g=g, beta=gained, state=by_torch, **where)
    torch.testing.assert_close(got, want, rtol=0, atol=FP32_RECURRENCE)
    torch.testing.assert_close(clean(by_torch), clean(truth), rtol=0, atol=FP32_RECURRENCE)
    gate = ForgetGate(gate.dt_bias.to(DEVICE), gate.A_log.to(DEVICE), -5.0)
    made = (tensor.to(DEVICE) for tensor in (q, k, v))
    ours = triton_chunked.chunked(
        *made, forget=forget.to(DEVICE), beta=beta.to(DEVICE), gate=gate, state=by_triton, **where
    )
    torch.testing.assert_close(ours.cpu(), want, rtol=0, atol=FP32_RECURRENCE)
    torch.testing.assert_close(clean(by_triton), clean(truth), rtol=0, atol=FP32_RECURRENCE)
    for own in splits:
        for split in own:
            assert bool(truth[split.slot, split.position % versions].isfinite().all())


@places
@pytest.mark.parametrize(("versions", "rollback"), [(1, 0), (3, 2)])
@BOTH
def test_a_step_equals_the_formula(
    function: Any, starts: list[int], lengths: list[int], kept: list[list[int]], versions: int, rollback: int
) -> None:
    """Behind a decode, with padding; rings are equal bit for bit, and hold NaN where no input belongs."""
    shape = ([6, *starts], [1, *lengths], 2, 16)
    choice: dict[str, Any] = {"decodes": 1, "padding": 2, "versions": versions, "rollback": rollback}
    case = mixed_step_case(*shape, **choice, kept=[[], *kept])
    truth, mine = map_tensors(case, torch.clone), here(case)
    got, want = function(**mine).cpu(), reference.mixed_step(**truth)
    torch.testing.assert_close(got, want, rtol=FP32_GEMM, atol=FP32_RECURRENCE)
    torch.testing.assert_close(clean(mine["state"]), clean(truth["state"]), rtol=0, atol=FP32_RECURRENCE)
    assert torch.equal(clean(mine["conv_state"]), clean(truth["conv_state"]))


@places
@BOTH
def test_who_continues_from_a_kept_state_goes_on_as_the_sequence_did(
    function: Any, starts: list[int], lengths: list[int], kept: list[list[int]]
) -> None:
    """State and ring of a place are all that is needed there, one token behind it or many."""
    case = here(mixed_step_case(starts, lengths, 2, 16, kept=kept))
    whole, first = function(**case), 0
    for start, length, own in zip(starts, lengths, case["kept"], strict=True):
        for split in own:
            done, end = split.position - start, min(length, split.position - start + 40)
            if done == length:
                continue
            plan = plan_ring([split.position], [end - done], [split.slot], window=4, ring_length=3)
            rest = {
                **map_tensors(case, torch.clone),
                "plan": plan.moved([tensor.to(DEVICE) for tensor in plan.tensors]),
                "projected": case["projected"][first + done : first + end],
                "slots": torch.tensor([split.slot], device=DEVICE),
                "start": torch.tensor([split.position], device=DEVICE),
                "host_slots": [split.slot],
                "starts": [split.position],
                "lengths": [end - done],
                "kept": (),
            }
            bound = {"rtol": FP32_GEMM, "atol": FP32_RECURRENCE}
            torch.testing.assert_close(function(**rest), whole[first + done : first + end], **bound)
        first += length


@BOTH
def test_kept_states_at_ends_of_chunks_change_no_bit(function: Any) -> None:
    """So nothing that a prompt gives depends on whether others may take it over."""
    plain = here(mixed_step_case([0, 64], [200, 100], 2, 16, kept=[[], []]))
    keeping = {**here(plain), "kept": ((Split(64, 4), Split(192, 5)), (Split(128, 6),))}
    for made in (plain, keeping):
        made["state"] = torch.cat((made["state"], torch.full_like(made["state"], torch.nan)))
    assert torch.equal(function(**keeping), function(**plain))
    assert torch.equal(clean(keeping["state"][:4]), clean(plain["state"][:4]))
    assert bool(keeping["state"][4:7].isfinite().all())
    assert bool(keeping["state"][7:].isnan().all())


def test_a_bf16_step_is_near_the_formula() -> None:
    case = mixed_step_case([7, 0, 5], [1, 6, 3], 2, 16, decodes=1, kept=[[], [1, 4], [6]], dtype=torch.bfloat16)
    truth, mine = map_tensors(case, torch.clone), here(case)
    got = triton_mixed.mixed_step(**mine).cpu()
    torch.testing.assert_close(got, reference.mixed_step(**truth), rtol=BF16_STEPS, atol=2 * BF16_STEPS)
    torch.testing.assert_close(clean(mine["state"]), clean(truth["state"]), rtol=BF16_STEPS, atol=BF16_STEPS)
    assert torch.equal(clean(mine["conv_state"]), clean(truth["conv_state"]))


@pytest.mark.parametrize("tokens", [9, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ring", [3, 5])
def test_short_convolutions_leave_the_rings_of_kept_states(tokens: int, dtype: torch.dtype, ring: int) -> None:
    """Few tokens are numpy's in fp32; of a ring of three the sequence itself overwrites what is copied. As many tokens
    are kept as there are, in another order."""
    starts, lengths, slots = [5, 0], [tokens - 3, 3], [2, 1]
    kept = ((Split(6, 3), Split(7, 4), Split(tokens + 2, 5)), (Split(1, 6), Split(3, 7)))
    plan = plan_ring(starts, lengths, slots, window=4, ring_length=ring).with_kept(starts, lengths, slots, kept)
    x, weight = torch.randn(tokens, 12).to(dtype), torch.randn(12, 4)
    state = torch.full((9, ring, 12), torch.nan)
    for back in (1, 2, 3):
        state[2, (5 - back) % ring] = torch.randn(12)
    state = state.view(9 * ring, 12).to(dtype)
    case: Arguments = {"x": x, "state": state, "weight": weight, "plan": plan}
    truth = map_tensors(case, torch.clone)
    want = reference.short_conv(truth["x"], truth["state"], truth["weight"], plan=truth["plan"])
    for function in (torch_impl.short_conv, triton_conv.short_conv):
        mine = here(case)
        got = function(mine["x"], mine["state"], mine["weight"], plan=mine["plan"]).cpu()
        torch.testing.assert_close(got.float(), want.float(), rtol=BF16_STEPS, atol=FP32_GEMM)
        assert torch.equal(clean(mine["state"]), clean(truth["state"]))
    left = truth["state"].view(9, ring, 12)
    assert torch.equal(left[3, 5 % ring], x[0]), "the token before the place"
    assert torch.equal(left[3, 4 % ring], state.view(9, ring, 12)[2, 4 % ring]), "and the one that a step before left"
    assert bool(left[6, 1].isnan().all()), "nothing before the start of a sequence"


@pytest.mark.parametrize("positions", [[4], [3], [15], [9, 8], [9, 9]])
def test_places_outside_a_chunk_or_out_of_order_are_refused(positions: list[int]) -> None:
    """Of ten tokens from position 4 on."""
    with pytest.raises(AssertionError, match="not in order within the chunk of 10 tokens at 4"):
        runs_of(4, 10, [Split(position, 9) for position in positions])


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_tables_begin_at_16_bytes_however_many_chunks_there_are(chunks: int) -> None:
    """Else a kernel would be compiled anew for one that does not."""
    for table in triton_chunked._tables((1,), (0,), (64 * chunks,), ((),), 1, torch.device(DEVICE)):
        assert table.data_ptr() % 16 == 0


def test_there_is_an_entry_for_each_sequence_or_none() -> None:
    assert by_sequence((), 2) == ((), ())
    with pytest.raises(AssertionError, match="3 sequences are kept, there are 2"):
        by_sequence(((), (), ()), 2)
