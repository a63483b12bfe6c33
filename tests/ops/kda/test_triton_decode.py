"""The Triton kernel of a whole KDA decode step, interpreted where there is no GPU, against the formula."""

from __future__ import annotations

import pytest
import torch

from sidestream.core.ring import plan_ring
from sidestream.ops.kda import decode, reference, triton_decode
from sidestream.ops.kda.triton_decode import Launch
from tests.ops.kda.decode_step_case import decode_step_case, owned
from tests.ops.operator_case import map_tensors
from tests.ops.triton_mode import DEVICE
from tests.tolerances import BF16_STEPS, FP32_GEMM

LAUNCHES = [Launch(ordered=False, columns=16), Launch(ordered=False, rows=32, columns=8)]


@pytest.mark.parametrize("launch", LAUNCHES, ids=["whole", "by columns"])
@pytest.mark.parametrize(
    ("versions", "rollback", "bounded", "dtype"),
    [(1, 0, True, torch.float32), (3, 2, False, torch.float32), (2, 1, True, torch.bfloat16)],
)
def test_a_step_equals_the_formula(
    launch: Launch, versions: int, rollback: int, bounded: bool, dtype: torch.dtype
) -> None:
    case = decode_step_case(7, 2, 16, padding=2, versions=versions, rollback=rollback, bounded=bounded, dtype=dtype)
    truth = map_tensors(case, torch.clone)
    mine = map_tensors(case, lambda tensor: tensor.clone().to(DEVICE))
    got = triton_decode.decode_step(**mine, launch=launch).cpu()
    want = reference.decode_step(**truth)
    assert got.dtype == dtype
    assert bool(got.isfinite().all())
    bound = FP32_GEMM if dtype == torch.float32 else BF16_STEPS
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)
    torch.testing.assert_close(owned(mine["state"].cpu()), owned(truth["state"]), rtol=0, atol=bound)
    assert bool(mine["state"][0, 1 % versions].isfinite().all()), "scratch must stay finite where padding wrote it"
    length = case["plan"].length
    assert torch.equal(owned(mine["conv_state"].cpu(), length=length), owned(truth["conv_state"], length=length))


@pytest.mark.parametrize("launch", LAUNCHES, ids=["whole", "by columns"])
def test_rows_do_not_depend_on_their_neighbours(launch: Launch) -> None:
    """Other tokens, and garbage, in all rows but one: its bits stay."""
    case = decode_step_case(4, 2, 16, padding=0)
    other = map_tensors(case, torch.clone)
    other["projected"][[0, 1, 3]] = torch.nan
    outputs, states = [], []
    for arguments in (case, other):
        mine = map_tensors(arguments, lambda tensor: tensor.to(DEVICE))
        outputs.append(triton_decode.decode_step(**mine, launch=launch)[2].cpu())
        states.append(mine["state"][case["slots"][2]].cpu())
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(states[0], states[1])


def test_several_steps_carry_the_state_and_the_ring() -> None:
    """Five tokens of one sequence, its slot NaN before: the composition of torch operators gives the same."""
    steps = [decode_step_case(1, 2, 16, padding=0) for _ in range(5)]
    kept = {name: steps[0][name] for name in ("conv_state", "state")}
    own = map_tensors(kept, lambda tensor: tensor.clone().to(DEVICE))
    slots = torch.tensor([2])
    for position, step in enumerate(steps):
        plan = plan_ring([position], [1], [2], window=4, ring_length=3)
        arguments = {**step, "plan": plan, "slots": slots, "start": torch.tensor([position])}
        mine = {**map_tensors(arguments, lambda tensor: tensor.to(DEVICE)), **own}
        got = triton_decode.decode_step(**mine, launch=LAUNCHES[1]).cpu()
        want = decode.decode_step(**{**arguments, **kept})
        torch.testing.assert_close(got, want, rtol=FP32_GEMM, atol=FP32_GEMM)
    torch.testing.assert_close(own["state"][2].cpu(), kept["state"][2], rtol=0, atol=FP32_GEMM)
    assert torch.equal(own["conv_state"][6:9].cpu(), kept["conv_state"][6:9])


@pytest.mark.parametrize("right", [False, True])
def test_which_kernels_a_step_takes_on_hopper(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain one for some rows and where the others were wrong; those are tried whatever the rows."""
    asked: list[str] = []
    monkeypatch.setattr(triton_decode.first_use, "agree", lambda name, *_: asked.append(name) or right)
    sizes = (1, 2, 3, 8, 9, 16, 17, 64, 65, 256)
    chosen = {rows: triton_decode.launch_for(torch.device("cuda"), rows) for rows in sizes}
    assert asked == ["ordered", *(f"single, {launch}" for launch in triton_decode.SINGLE.values())] * len(sizes)
    ordered = [rows for rows in sizes if chosen[rows].ordered]
    assert ordered == ([1, 2, 9, 16, 17, 64, 65, 256] if right else [])
    assert [rows for rows in sizes if chosen[rows].parts] == ([1, 2] if right else [])
    assert [rows for rows in sizes if chosen[rows].early] == ([9, 16] if right else [])
    assert [rows for rows in sizes if chosen[rows].releases] == ([1, 2] if right else [])
    assert [rows for rows in sizes if chosen[rows].rows == 64] == ([65, 256] if right else [])


@pytest.mark.parametrize("agreeing", [(), ("ordered",), ("ordered", "single"), ("single",)])
def test_when_a_step_is_one_launch(agreeing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rows of its table, where it was right and can read them; of the others nothing changes."""
    one = Launch(ordered=True, parts=2)
    monkeypatch.setattr(triton_decode, "SINGLE", {1: one, 2: one})
    monkeypatch.setattr(triton_decode.first_use, "agree", lambda name, *_: name.split(",")[0] in agreeing)
    device = torch.device("cuda")
    chosen = [triton_decode.launch_for(device, rows) for rows in (1, 2, 9)]
    assert [launch.parts for launch in chosen] == ([2, 2, 0] if "single" in agreeing else [0, 0, 0])
    assert chosen[2].ordered == ("ordered" in agreeing)
    aside = triton_decode.launch_for(device, 1, singly=False)
    assert aside.parts == 0
    assert aside.ordered == ("ordered" in agreeing)


def test_what_one_launch_takes() -> None:
    rows = torch.empty(2, 48 + 16, dtype=torch.bfloat16)
    assert triton_decode.single_takes(rows)
    assert not triton_decode.single_takes(rows.float())
    assert not triton_decode.single_takes(torch.empty(2, 50, dtype=torch.bfloat16))


def test_what_the_kernel_takes() -> None:
    case = decode_step_case(2, 2, 16)
    names = ("projected", "conv_state", "state", "expand", "plan")
    assert triton_decode.takes(*(case[name] for name in names))
    odd = decode_step_case(2, 2, 24)
    assert not triton_decode.takes(*(odd[name] for name in names))
    for name, other in (("projected", case["projected"].bfloat16()), ("state", case["state"].transpose(3, 4))):
        assert not triton_decode.takes(*({**case, name: other}[argument] for argument in names))
