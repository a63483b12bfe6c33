"""The Triton kernels of index keys in the interpreter or on the GPU: token by token against whole sequences' pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.core.ring import RingPlan, plan_ring
from sidestream.ops.indexer import reference
from sidestream.ops.indexer.triton_keys import KeysPlan, write_keys, write_normed_keys, write_pools
from sidestream.ops.indexer.triton_pools import pool_keys
from tests.ops.triton_mode import DEVICE, INTERPRETED
from tests.tolerances import BF16_OUTPUT, FP32_ROUNDING

DIM = 16


def to_device(plan: RingPlan) -> RingPlan:
    return plan.moved([tensor.to(DEVICE) for tensor in plan.tensors])


def rounding_of(dtype: torch.dtype) -> dict[str, float]:
    """The interpreter cuts off what does not fit bf16, which is up to a whole step instead of half of one."""
    step = BF16_OUTPUT * (2 if INTERPRETED else 1)
    return {"rtol": step if dtype is torch.bfloat16 else 0.0, "atol": FP32_ROUNDING}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kpool", "rollback"), [(4, 0), (4, 3), (3, 1)])
def test_pools_of_growing_sequences(dtype: torch.dtype, kpool: int, rollback: int) -> None:
    """Sequences of other lengths on shuffled slots, and a padding row, whose slot and entry are scratch and NaN."""
    steps, starts, slots = 9, [0, 4, 2, 0], [3, 1, 2, 0]
    lengths = [start + steps for start in starts[:3]]
    k, gate = [torch.randn(4, max(lengths), DIM).to(dtype) for _ in range(2)]
    ape, ring = torch.randn(kpool, DIM), kpool - 1 + rollback
    tail = torch.full((5 * ring, 2 * DIM), torch.nan, dtype=dtype)
    keys = torch.full((1 + 3 * 8, DIM), torch.nan, dtype=dtype)
    for row in range(3):  # what earlier steps left
        for position in range(max(starts[row] - ring, 0), starts[row]):
            tail[slots[row] * ring + position % ring] = torch.cat([k[row, position], gate[row, position]])
    untouched = tail[4 * ring :].clone()
    tail, keys = tail.to(DEVICE), keys.to(DEVICE)
    for step in range(steps):
        positions = [start + step for start in starts[:3]] + [0]
        plan = plan_ring(positions, [1] * 4, slots, window=kpool, ring_length=ring)
        done = [(p + 1) % kpool == 0 for p in positions[:3]]
        entries = [1 + 8 * r + positions[r] // kpool if done[r] else 0 for r in range(3)] + [0]
        own = [torch.stack([x[r, positions[r]] for r in range(4)]).to(DEVICE) for x in (k, gate)]
        wide = torch.full((4, 3 * DIM), torch.nan, dtype=dtype, device=DEVICE)  # a part of a merged product
        wide[:, DIM : 2 * DIM] = own[1]
        where = torch.tensor(entries, device=DEVICE)
        own_gate = wide[:, DIM : 2 * DIM]
        write_pools(own[0], own_gate, ape.to(DEVICE), tail=tail, plan=to_device(plan), keys_flat=keys, entries=where)
        kept = tail.cpu()[plan.keep_rows[:3]]
        assert torch.equal(kept, torch.cat([own[0], own_gate], dim=1)[:3].cpu())
    for row in range(3):
        want = reference.pooled_keys(k[row, : lengths[row]].float(), gate[row, : lengths[row]].float(), ape)
        got = keys[1 + 8 * row : 1 + 8 * row + len(want)].cpu().float()
        first = -(-starts[row] // kpool) if starts[row] % kpool else starts[row] // kpool
        whole = (
            starts[row] // kpool
        )  # the pool begun before the first step completes in it: its members are in the ring
        assert len(want) > first >= whole
        torch.testing.assert_close(got[whole:], want[whole:], **rounding_of(dtype))
        assert got[:whole].isnan().all()
        assert keys[1 + 8 * row + len(want) : 9 + 8 * row].isnan().all()
    assert torch.equal(tail[4 * ring :].isnan().cpu(), untouched.isnan())
    assert keys[0].isfinite().all(), "the padding row's key stays finite"


@pytest.mark.parametrize("normed", [False, True])
def test_equals_the_reference_for_one_step(normed: bool) -> None:
    plan = plan_ring([7, 5, 0], [1] * 3, [2, 1, 0], window=4, ring_length=3)
    k, gate, ape = torch.randn(3, DIM) * 3 + 1, torch.randn(3, DIM), torch.randn(4, DIM)
    norm: dict[str, Any] = {"norm_weight": torch.randn(DIM), "norm_bias": torch.randn(DIM)} if normed else {}
    tail, entries = torch.randn(9, 2 * DIM), torch.tensor([4, 0, 0])
    keys = torch.full((6, DIM), torch.nan)
    want_tail, want_keys = tail.clone(), keys.clone()
    want: dict[str, Any] = {"tail": want_tail, "plan": plan, "keys_flat": want_keys, "entries": entries}
    reference.write_pools(k, gate, ape, **want, norm_eps=1e-3, **norm)
    tail, keys = tail.to(DEVICE), keys.to(DEVICE)
    inputs = [tensor.to(DEVICE) for tensor in (k, gate, ape)]
    norm = {name: tensor.to(DEVICE) for name, tensor in norm.items()}
    got: dict[str, Any] = {"tail": tail, "plan": to_device(plan), "keys_flat": keys, "entries": entries.to(DEVICE)}
    write_pools(*inputs, **got, norm_eps=1e-3, **norm)
    torch.testing.assert_close(tail.cpu(), want_tail, rtol=0.0, atol=FP32_ROUNDING if normed else 0.0)
    torch.testing.assert_close(keys[4].cpu(), want_keys[4], rtol=0.0, atol=FP32_ROUNDING)
    assert keys[[1, 2, 3, 5]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kpool", "rollback"), [(4, 0), (4, 3), (3, 1), (2, 0)])
def test_pools_of_chunks(dtype: torch.dtype, kpool: int, rollback: int) -> None:
    """Chunks of other lengths on shuffled slots, whose rings hold NaN at first, against whole sequences' pools."""
    lengths, cuts = (29, 9, 14), ((0, 7, 8, 29), (0, 1, 6, 9), (0, 4, 14, 14))
    slots, ring = [3, 1, 2], kpool - 1 + rollback
    k, gate = [torch.randn(3, 29, DIM).to(dtype) for _ in range(2)]
    ape, tail = torch.randn(kpool, DIM), torch.full((4 * ring, 2 * DIM), torch.nan, dtype=dtype, device=DEVICE)
    got: list[list[torch.Tensor]] = [[], [], []]
    for step in range(3):
        spans = [(r, cuts[r][step], cuts[r][step + 1]) for r in range(3) if cuts[r][step] < cuts[r][step + 1]]
        starts, sizes = [first for _, first, _ in spans], [last - first for _, first, last in spans]
        plan = plan_ring(starts, sizes, [slots[r] for r, _, _ in spans], window=kpool, ring_length=ring)
        positions = torch.cat([torch.arange(first, last) for _, first, last in spans])
        ends = torch.nonzero((positions + 1) % kpool == 0).flatten()
        own, wide = (torch.cat([x[r, first:last] for r, first, last in spans]) for x in (k, gate))
        merged = torch.full((len(wide), 3 * DIM), torch.nan, dtype=dtype, device=DEVICE)  # a part of a merged product
        merged[:, DIM : 2 * DIM] = wide
        own_gate = merged[:, DIM : 2 * DIM]
        named: dict[str, Any] = {"tail": tail, "plan": to_device(plan), "pools": ends.to(DEVICE)}
        pooled = pool_keys(own.to(DEVICE), own_gate, ape.to(DEVICE), **named).cpu()
        for (r, first, last), part in zip(
            spans, pooled.split([last // kpool - first // kpool for _, first, last in spans]), strict=True
        ):
            got[r].append(part)
            kept = torch.arange(max(first, last - ring), last)
            assert torch.equal(tail.cpu()[slots[r] * ring + kept % ring], torch.cat([k[r, kept], gate[r, kept]], dim=1))
    for r, length in enumerate(lengths):
        want = reference.pooled_keys(k[r, :length].float(), gate[r, :length].float(), ape)
        torch.testing.assert_close(torch.cat(got[r]).float(), want, **rounding_of(dtype))
    assert tail[:ring].isnan().all(), "another slot's ring was written"


@pytest.mark.parametrize("count", [1, 5, 300])
def test_write_keys(count: int) -> None:
    holder = torch.full((400, 40), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    keys, rows = holder[:, 4:28], torch.randperm(400)[: 2 * count : 2].to(DEVICE)
    count = rows.shape[0]
    k = torch.randn(24, count, device=DEVICE).bfloat16().float().t()
    write_keys(keys, rows, k, launch=KeysPlan(warps=1))
    assert torch.equal(keys[rows], k.bfloat16())
    others = torch.ones(400, dtype=torch.bool, device=DEVICE)
    others[rows] = False
    assert holder[others].isnan().all()
    assert holder[:, :4].isnan().all()
    assert holder[:, 28:].isnan().all()
    write_keys(keys, rows[:0], k[:0])
    assert torch.equal(keys[rows], k.bfloat16())


@pytest.mark.parametrize("pairs", [0, 3, 8])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("count", [1, 300])
def test_write_normed_keys(count: int, interleaved: bool, pairs: int) -> None:
    """A weight of zero where only the bias and the rotation are left shows each of them."""
    keys, rows = torch.full((400, DIM), torch.nan, device=DEVICE), torch.randperm(400)[:count]
    k, weight, bias = torch.randn(count, 2 * DIM)[:, ::2] * 3 + 1, torch.randn(DIM), torch.randn(DIM)
    weight[::5] = 0.0
    angles = torch.rand(count, pairs) * 6
    cos, sin = (angles.cos(), angles.sin()) if pairs else (None, None)
    want = reference.normed_keys(k, weight, bias, 1e-3, cos, sin, interleaved=interleaved)
    moved = {"cos": cos, "sin": sin, "norm_weight": weight, "norm_bias": bias}
    named: dict[str, Any] = {name: t.to(DEVICE) if t is not None else None for name, t in moved.items()}
    write_normed_keys(keys, rows.to(DEVICE), k.to(DEVICE), **named, norm_eps=1e-3, interleaved=interleaved)
    torch.testing.assert_close(keys.cpu()[rows], want, rtol=FP32_ROUNDING, atol=FP32_ROUNDING)
    assert int(keys.isnan().any(dim=1).sum()) == 400 - count
