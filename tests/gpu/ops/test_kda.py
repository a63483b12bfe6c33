"""KDA kernels on a GPU at the sizes of real models: right, poisoned, repeated, captured, in large pools."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from sidestream.core.ring import plan_ring
from sidestream.ops.kda import (
    decode_step,
    gate,
    mixed,
    mixed_step,
    recurrent,
    reference,
    short_conv,
    torch_impl,
    triton_chunked,
    triton_decode,
    triton_mixed,
)
from tests.ops.kda import decode_step_case as case_module
from tests.ops.kda.decode_step_case import decode_step_case, owned
from tests.ops.kda.mixed_step_case import mixed_step_case
from tests.ops.operator_case import call, map_tensors, overwrite
from tests.tolerances import BF16_OUTPUT, BF16_STEPS, FP32_GEMM, FP32_RECURRENCE

pytestmark = pytest.mark.gpu
HEADS, DIM = 64, 128


def to_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    return map_tensors(arguments, lambda tensor: tensor.to("cuda", copy=True))


def step(arguments: dict[str, Any]) -> torch.Tensor:
    return call(decode_step, arguments)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, HEADS, DIM), (6, HEADS, DIM), (9, 8, DIM), (5, 3, 32)])
def test_decode_step_equals_the_formula(rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    """One row and many of heads of 128 in one kernel, few and smaller heads in the other; fresh, continuing and padding
    rows."""
    padding = min(2, rows - 1)
    for versions, rollback, bounded in ((1, 0, True), (3, 2, False)):
        choice = {"padding": padding, "versions": versions, "rollback": rollback, "bounded": bounded}
        case = decode_step_case(rows, heads, dim, dtype=dtype, **choice)
        mine = to_gpu(case)
        got = step(mine).cpu()
        want = reference.decode_step(**case)
        assert bool(got.isfinite().all())
        bound = FP32_RECURRENCE if dtype == torch.float32 else BF16_STEPS
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)
        torch.testing.assert_close(owned(mine["state"].cpu()), owned(case["state"]), rtol=bound, atol=bound)
        length = case["plan"].length
        assert torch.equal(owned(mine["conv_state"].cpu(), length=length), owned(case["conv_state"], length=length))


@pytest.mark.parametrize("rows", [1, 4, 21])
def test_an_ordered_step_equals_the_formula(rows: int) -> None:
    """Whether the dispatcher uses it or not; five times the same bits."""
    launch = triton_decode.Launch(ordered=True, early=True, releases=True)
    for versions, rollback, bounded in ((1, 0, True), (3, 2, False)):
        choice = {"padding": rows // 4, "versions": versions, "rollback": rollback, "bounded": bounded}
        case = decode_step_case(rows, HEADS, DIM, dtype=torch.bfloat16, **choice)
        results = []
        for _ in range(5):
            mine = to_gpu(case)
            torch.cuda.synchronize()  # no projection stands between these copies and the step
            results.append((triton_decode.decode_step(**mine, launch=launch), mine["state"], mine["conv_state"]))
        got, state, ring = (tensor.cpu() for tensor in results[0])
        assert all(torch.equal(got, other[0].cpu()) for other in results[1:])
        assert all(torch.equal(owned(state), owned(other[1].cpu())) for other in results[1:])
        want = reference.decode_step(**case)
        torch.testing.assert_close(got, want, rtol=BF16_STEPS, atol=BF16_STEPS)
        torch.testing.assert_close(owned(state), owned(case["state"]), rtol=BF16_STEPS, atol=BF16_STEPS)
        length = case["plan"].length
        assert torch.equal(owned(ring, length=length), owned(case["conv_state"], length=length))


@pytest.mark.parametrize("launch", triton_decode.SINGLE.values(), ids=lambda launch: f"{launch.parts}")
@pytest.mark.parametrize("window", [4, 3, 2])
def test_a_step_in_one_launch_equals_the_formula(
    window: int, launch: triton_decode.Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of rows; five times the same bits, and the same for a row by itself."""
    monkeypatch.setattr(case_module, "WINDOW", window)
    for rows, versions, rollback, bounded in ((2, 1, 0, True), (6, 3, 2, False)):
        choice = {"padding": rows // 4, "versions": versions, "rollback": rollback, "bounded": bounded}
        case = decode_step_case(rows, HEADS, DIM, dtype=torch.bfloat16, **choice)
        results = []
        for _ in range(5):
            mine = to_gpu(case)
            torch.cuda.synchronize()
            results.append((triton_decode.decode_step(**mine, launch=launch), mine["state"], mine["conv_state"]))
        got, state, ring = (tensor.cpu() for tensor in results[0])
        assert all(torch.equal(got, other[0].cpu()) for other in results[1:])
        assert all(torch.equal(owned(state), owned(other[1].cpu())) for other in results[1:])
        alone = to_gpu(case)
        alone |= {name: alone[name][1:2].clone() for name in ("projected", "slots", "start")}
        assert torch.equal(triton_decode.decode_step(**alone, launch=launch)[0].cpu(), got[1])
        want = reference.decode_step(**case)
        torch.testing.assert_close(got, want, rtol=BF16_STEPS, atol=BF16_STEPS)
        torch.testing.assert_close(owned(state), owned(case["state"]), rtol=BF16_STEPS, atol=BF16_STEPS)
        length = case["plan"].length
        assert torch.equal(owned(ring, length=length), owned(case["conv_state"], length=length))


@pytest.mark.parametrize("rows", [1, 4, 64, 65])
def test_decode_step_gives_the_same_bits_every_time(rows: int) -> None:
    case = to_gpu(decode_step_case(rows, HEADS, DIM, padding=rows // 4, dtype=torch.bfloat16))
    outputs, states = [], []
    for _ in range(20):
        mine = map_tensors(case, torch.clone)
        outputs.append(step(mine))
        states.append(owned(mine["state"]))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    assert all(torch.equal(states[0], other) for other in states[1:])


def test_decode_step_of_a_row_does_not_depend_on_its_neighbours() -> None:
    """The last true row, beside other tokens and garbage."""
    case = to_gpu(decode_step_case(16, HEADS, DIM, padding=2, dtype=torch.bfloat16))
    other = map_tensors(case, torch.clone)
    other["projected"][:13] = torch.nan
    assert torch.equal(step(other)[13], step(case)[13])


@pytest.mark.parametrize("batches", [(5, 8), (9, 16, 64), (65, 80, 96)], ids=["plain", "ordered", "many"])
def test_decode_step_of_a_row_depends_on_the_size_of_the_batch_only_in_the_choice_of_kernel(
    batches: tuple[int, ...],
) -> None:
    """The same bits among few rows, among more, and among many."""
    kinds = {(rows in triton_decode.PLAIN_ROWS, rows > triton_decode.NARROW_ROWS) for rows in batches}
    assert len(kinds) == 1
    case = to_gpu(decode_step_case(max(batches), HEADS, DIM, padding=0, dtype=torch.bfloat16))
    outputs = []
    for rows in batches:
        mine = map_tensors(case, torch.clone)
        starts, slots = mine["start"][:rows].tolist(), mine["slots"][:rows].tolist()
        mine["plan"] = plan_ring(starts, [1] * rows, slots, window=4, ring_length=3, device=torch.device("cuda"))
        mine |= {name: mine[name][:rows] for name in ("projected", "slots", "start")}
        outputs.append(step(mine)[4])
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("rows", [2, 32])
def test_decode_step_in_a_graph(rows: int) -> None:
    """Replays over other tokens, states, slots and positions in the same memory."""
    cases = [to_gpu(decode_step_case(rows, HEADS, DIM, padding=1, dtype=torch.bfloat16)) for _ in range(2)]
    wanted = []
    for case in cases:
        mine = map_tensors(case, torch.clone)
        wanted.append((step(mine), owned(mine["state"])))
    buffers = map_tensors(cases[0], torch.clone)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(buffers)
    for which in (1, 0, 1):
        overwrite(buffers, cases[which])
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted[which][0])
        assert torch.equal(owned(buffers["state"]), wanted[which][1])


def test_states_beyond_two_gigabytes() -> None:
    """600 slots of 4.2 MB: the last one lies beyond 2 ** 31 bytes and 2 ** 29 elements."""
    case = decode_step_case(3, HEADS, DIM, padding=0, dtype=torch.bfloat16)
    mine = to_gpu(case)
    slots = torch.tensor([599, 3, 1], device="cuda")
    states = torch.full((600, 1, HEADS, DIM, DIM), torch.nan, device="cuda")
    ring = torch.full((600 * 3, 3 * HEADS * DIM), torch.nan, device="cuda", dtype=torch.bfloat16)
    states[slots] = mine["state"][mine["slots"]]
    ring.view(600, 3, -1)[slots] = mine["conv_state"].view(-1, 3, 3 * HEADS * DIM)[mine["slots"]]
    starts = mine["start"].tolist()
    plan = plan_ring(starts, [1] * 3, slots.tolist(), window=4, ring_length=3, device=torch.device("cuda"))
    moved = {**mine, "state": states, "conv_state": ring, "plan": plan, "slots": slots}
    assert torch.equal(step(moved), step(mine))
    assert torch.equal(states[slots], mine["state"][mine["slots"]])


@pytest.mark.parametrize(("tokens", "versions"), [(1, 1), (1, 3), (4, 6)])
@pytest.mark.parametrize(("size_k", "size_v"), [(128, 128), (64, 128), (32, 16)])
def test_recurrent_equals_torch(tokens: int, versions: int, size_k: int, size_v: int) -> None:
    requests, heads = 5, 16
    slots, starts = torch.tensor([4, 2, 7, 0, 0], device="cuda"), torch.tensor([900, 0, 5, 0, 0], device="cuda")
    shape = (requests, tokens, heads)
    values = torch.randn(requests, tokens, 3, heads, max(size_k, size_v), device="cuda").bfloat16()
    q, k, v = values.unbind(2)
    q, k, v = q[..., :size_k], k[..., :size_k], v[..., :size_v]
    state = torch.full((9, versions, heads, size_k, size_v), torch.nan, device="cuda")
    for request in (0, 2):
        state[slots[request], starts[request] % versions] = torch.randn(heads, size_k, size_v, device="cuda")
    rest = {"g": -torch.rand(*shape, size_k, device="cuda"), "beta": torch.rand(*shape, device="cuda")}
    rest |= {"slots": slots, "start": starts}
    theirs = state.clone()
    got = recurrent(q, k, v, **rest, state=state)
    want = torch_impl.recurrent(q.float(), k.float(), v.float(), **rest, state=theirs)
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got.float(), want, rtol=BF16_OUTPUT, atol=FP32_RECURRENCE)
    torch.testing.assert_close(owned(state), owned(theirs), rtol=FP32_GEMM, atol=FP32_RECURRENCE)


@pytest.mark.parametrize("lengths", [[8192], [1, 3000, 1, 77], [1] * 300], ids=["one", "mixed", "decodes"])
def test_short_conv_and_gate_equal_torch(lengths: list[int]) -> None:
    channels, device = 3 * 8 * DIM, torch.device("cuda")
    starts = [0 if i % 3 == 0 else 5 + i for i in range(len(lengths))]
    slots = [len(lengths) - i for i in range(len(lengths))]
    plan = plan_ring(starts, lengths, slots, window=4, ring_length=4, device=device)
    x = torch.randn(sum(lengths), channels + 100, device=device).bfloat16()[:, :channels]
    state = torch.randn((len(lengths) + 1) * 4, channels, device=device).bfloat16()
    state[:4] = torch.nan
    weight, theirs = torch.randn(4, channels, device=device).t(), state.clone()
    got = short_conv(x, state, weight, plan=plan)
    want = torch_impl.short_conv(x, theirs, weight, plan=plan)
    torch.testing.assert_close(got, want, rtol=2 * BF16_OUTPUT, atol=FP32_GEMM)
    assert torch.equal(state.nan_to_num(7.0), theirs.nan_to_num(7.0))
    bias, rate = torch.randn(8 * DIM, device=device), torch.randn(8, device=device)
    for bound in (-5.0, None):
        f = x[:, : 8 * DIM]
        got, want = (run(f, bias, rate, lower_bound=bound) for run in (gate, torch_impl.gate))
        torch.testing.assert_close(got, want, rtol=FP32_GEMM, atol=FP32_GEMM)


def mixed_run(arguments: dict[str, Any]) -> torch.Tensor:
    return call(mixed_step, arguments)[0]


def near(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    """In norm: where values are many, the largest of their roundings says little."""
    assert bool(got.isfinite().all())
    assert float((got.float() - want.float()).norm() / want.float().norm()) < bound


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 32), (torch.bfloat16, DIM)])
@pytest.mark.parametrize(
    ("starts", "lengths", "decodes"),
    [
        ([7, 2, 0, 5, 9], [1, 1, 130, 65, 1], 2),
        ([0, 3, 0, 70, 0, 0], [1, 3, 63, 64, 65, 2], 0),
        ([7, 2, 0], [2, 2, 64], 2),
        ([7, 9], [3, 3], 2),
    ],
    ids=["mixed", "prompts", "verified", "verified alone"],
)
def test_mixed_step_equals_the_formula(
    starts: list[int], lengths: list[int], decodes: int, dtype: torch.dtype, dim: int
) -> None:
    """Rows of NaN behind, slots that hold NaN, rings of three versions or one, with and without a bound."""
    for versions, bound in ((1, -5.0), (3, None)):
        choice = {"decodes": decodes, "padding": 3, "versions": versions, "rollback": versions - 1}
        case = mixed_step_case(starts, lengths, 3, dim, lower_bound=bound, dtype=dtype, **choice)
        mine = to_gpu(case)
        got, want = mixed_run(mine).cpu(), reference.mixed_step(**case)
        state, truth = mine["state"].cpu().nan_to_num(7.0), case["state"].nan_to_num(7.0)
        if dtype == torch.float32:
            torch.testing.assert_close(got, want, rtol=FP32_RECURRENCE, atol=FP32_RECURRENCE)
            torch.testing.assert_close(state, truth, rtol=0, atol=FP32_RECURRENCE)
        else:
            near(got, want, BF16_STEPS)
            near(state, truth, BF16_STEPS)
        assert torch.equal(mine["conv_state"].cpu().nan_to_num(7.0), case["conv_state"].nan_to_num(7.0))


@pytest.mark.parametrize("size", [1, 3, 63, 64, 65])
def test_a_prompt_in_pieces_equals_the_whole(size: int) -> None:
    """Of 131 tokens, at the heads of a real model; its slot and its ring hold NaN before."""
    whole = to_gpu(mixed_step_case([0], [131], HEADS, DIM, dtype=torch.bfloat16))
    kept = {name: whole[name].clone() for name in ("state", "conv_state")}
    want, got = mixed_run(whole), []
    for at in range(0, 131, size):
        length = min(size, 131 - at)
        plan = plan_ring([at], [length], [1], window=4, ring_length=3, device=torch.device("cuda"))
        piece = {**whole, **kept, "plan": plan, "starts": [at], "lengths": [length]}
        piece |= {"projected": whole["projected"][at : at + length], "start": torch.tensor([at], device="cuda")}
        got.append(mixed_run(piece))
    near(torch.cat(got), want, BF16_STEPS)
    near(kept["state"][1], whole["state"][1], BF16_STEPS)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 32), (torch.bfloat16, DIM)])
def test_states_that_are_kept_equal_the_formula(dtype: torch.dtype, dim: int) -> None:
    """At ends of chunks and between, one to three tokens in and at the end; rings are equal bit for bit."""
    starts, lengths = [7, 0, 62, 3], [1, 130, 70, 5]
    kept = [[], [1, 2, 64, 100, 128], [64, 67, 132], [8]]
    for versions, rollback in ((1, 0), (3, 2)):
        choice = {"decodes": 1, "padding": 3, "versions": versions, "rollback": rollback, "kept": kept}
        case = mixed_step_case(starts, lengths, 3, dim, dtype=dtype, **choice)
        mine = to_gpu(case)
        got, want = mixed_run(mine).cpu(), reference.mixed_step(**case)
        state, truth = mine["state"].cpu().nan_to_num(7.0), case["state"].nan_to_num(7.0)
        if dtype == torch.float32:
            torch.testing.assert_close(got, want, rtol=FP32_RECURRENCE, atol=FP32_RECURRENCE)
            torch.testing.assert_close(state, truth, rtol=0, atol=FP32_RECURRENCE)
        else:
            near(got, want, BF16_STEPS)
            for split in (split for own in case["kept"] for split in own):
                near(state[split.slot], truth[split.slot], BF16_STEPS)
            near(state, truth, BF16_STEPS)
        assert torch.equal(mine["conv_state"].cpu().nan_to_num(7.0), case["conv_state"].nan_to_num(7.0))


def test_kept_states_at_ends_of_chunks_change_no_bit_and_are_where_a_prompt_goes_on() -> None:
    """At the heads of a real model: what is kept behind 128 of 300 tokens goes on as the prompt did."""
    case = mixed_step_case([0], [300], HEADS, DIM, kept=[[64, 128, 256]], dtype=torch.bfloat16)
    keeping = to_gpu(case)
    plain = {**to_gpu(case), "kept": ()}
    want = mixed_run(plain)
    assert torch.equal(mixed_run(keeping), want)
    assert torch.equal(keeping["state"][1], plain["state"][1])
    slot = keeping["kept"][0][1].slot
    plan = plan_ring([128], [172], [slot], window=4, ring_length=3, device=torch.device("cuda"))
    rest = {**keeping, "plan": plan, "projected": keeping["projected"][128:300], "kept": ()}
    rest |= {"host_slots": [slot], "starts": [128], "lengths": [172]}
    rest |= {name: torch.tensor([value], device="cuda") for name, value in (("slots", slot), ("start", 128))}
    near(mixed_run(rest), want[128:], BF16_STEPS)
    near(rest["state"][slot], plain["state"][1], BF16_STEPS)


def test_a_long_prompt_equals_torch_in_fp32() -> None:
    case = to_gpu(mixed_step_case([9, 0], [1, 4500], 8, DIM, decodes=1, dtype=torch.bfloat16))
    exact = {
        name: value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value
        for name, value in map_tensors(case, torch.clone).items()
    }
    near(mixed_run(case), mixed.mixed_step(**exact), BF16_STEPS)
    near(case["state"][1:3], exact["state"][1:3], BF16_STEPS)


def test_mixed_step_gives_the_same_bits_whatever_stands_beside_a_prompt() -> None:
    case = to_gpu(mixed_step_case([7, 0, 5], [1, 100, 70], 16, DIM, decodes=1, dtype=torch.bfloat16))
    other = map_tensors(case, torch.clone)
    other["projected"][101:] = torch.nan
    outputs = [mixed_run(map_tensors(made, torch.clone))[:101] for made in (*[case] * 10, other)]
    assert all(torch.equal(outputs[0], out) for out in outputs[1:])


SMALL = [([0], [1]), ([0], [5]), ([0], [70]), ([3], [5]), ([0, 7, 0], [1, 70, 5])]
"""Starts and lengths of prompts."""


@pytest.mark.parametrize(("starts", "lengths"), SMALL)
def test_prompts_of_a_small_model_equal_the_formula(starts: list[int], lengths: list[int]) -> None:
    """Heads of the bundled model: 4 of 32."""
    for bound in (-5.0, None):
        torch.manual_seed(0)
        case = mixed_step_case(starts, lengths, 4, 32, padding=3, lower_bound=bound, dtype=torch.bfloat16)
        assert small_error(case, {}) < BF16_STEPS


@pytest.mark.parametrize("walk", [False, True], ids=["tiles", "walks"])
@pytest.mark.parametrize("blocks", [False, True], ids=["halves", "blocks"])
@pytest.mark.parametrize(("heads", "dim"), [(4, 32), (3, 64), (4, 128)])
def test_each_form_of_prompts_equals_the_formula_at_small_sizes(heads: int, dim: int, blocks: bool, walk: bool) -> None:
    """Asked for, whether it is chosen or not; in a process of its own, since an illegal access ends all in it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(errors_of_form, heads, dim, blocks, walk).result() < BF16_STEPS


def errors_of_form(heads: int, dim: int, blocks: bool, walk: bool) -> float:
    """The largest of ``SMALL`` and gates with a gentle bound, each waited for."""
    torch.manual_seed(0)
    form = {"walk": walk, "launch": triton_chunked.Launch(blocks=blocks)}
    cases = [mixed_step_case(*where, heads, dim, padding=3, dtype=torch.bfloat16) for where in SMALL]
    return max(small_error(case, form) for case in cases)


def small_error(case: dict[str, Any], form: dict[str, Any]) -> float:
    """Of output and states in norm, the larger; infinity if one is not finite, or what nobody owns was written."""
    mine = to_gpu(case)
    got = (triton_mixed.mixed_step(**mine, **form) if form else mixed_run(mine)).cpu().float()
    want = reference.mixed_step(**case).float()
    state, ring, truth = mine["state"].cpu(), mine["conv_state"].cpu(), case["state"]
    same_ring = torch.equal(ring.nan_to_num(7.0), case["conv_state"].nan_to_num(7.0))
    if not same_ring or not torch.equal(state.isnan(), truth.isnan()):
        return float("inf")
    pairs = ((got, want), (state.nan_to_num(0.0), truth.nan_to_num(0.0)))
    return max(float(((a - b).norm() / b.norm()).nan_to_num(float("inf"))) for a, b in pairs)
