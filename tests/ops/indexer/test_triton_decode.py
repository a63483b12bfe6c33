"""The Triton selection of uniform decodes in the interpreter or on the GPU, against the reference.

Scores are small integers, which bf16 and fp32 products hold exactly, so that the selection must agree in every entry,
with as many ties as they have.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.ops.index_map import reference as index_map
from sidestream.ops.indexer import reference
from sidestream.ops.indexer.triton_decode import ScorePlan, score_plan, select_topk_decode, takes
from sidestream.ops.topk.triton_select import PhysicalRows, SelectPlan
from tests.ops.paged import PagedDecode, make_paged_decode
from tests.ops.triton_mode import DEVICE

HEADS, DIM, BLOCK = 16, 32, 8
POISON = 0x7F7F7F7F
SCORES = ScorePlan(block=16, splits=2, warps=4, stages=2)
ONE = SelectPlan(small=256, merge=0, tile=0, sample=0, splits=1, warps=4)
LISTS = SelectPlan(small=16, merge=64, tile=32, sample=16, splits=1, warps=4)
SPLITS = SelectPlan(small=16, merge=64, tile=32, sample=16, splits=4, warps=4)
LENGTHS = [100, 0, 1, 7, 8, 19, 16, 17, 20, 97, 33, 0]


class Call:
    """Integer queries, weights and keys; NaN in every key that no row sees, and in the padding rows' queries."""

    def __init__(self, lengths: list[int], *, kpool: int, topk: int, spare_columns: int = 0) -> None:
        self.step: PagedDecode = make_paged_decode(lengths, block_size=BLOCK, spare_columns=spare_columns)
        self.kpool, self.topk = kpool, topk
        rows = len(lengths)
        keys = self.step.paged.poisoned_keys(DIM, kpool)
        self.keys = torch.where(keys.isnan(), keys, torch.randint(-2, 3, keys.shape).float()).bfloat16()
        self.q = torch.randint(-2, 3, (rows, HEADS, DIM)).bfloat16()
        self.q[self.step.context_lens == 0] = torch.nan
        self.weights = torch.randint(-2, 3, (rows, HEADS)).float()
        self.rotation: dict[str, Any] = {}

    def run(
        self, selecting: SelectPlan | None = None, *, mapped: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, width = self.q.shape[0], self.topk + self.kpool - 1
        out = torch.full((rows, width), POISON, dtype=torch.int32, device=DEVICE)
        physical = torch.full((rows, width), POISON, dtype=torch.int64, device=DEVICE)
        counts = torch.full((rows,), POISON, dtype=torch.int32, device=DEVICE)
        table = self.step.block_table.to(DEVICE)
        select_topk_decode(
            self.q.to(DEVICE),
            self.weights.to(DEVICE),
            self.keys.to(DEVICE),
            block_table=table,
            context_lens=self.step.context_lens.to(DEVICE),
            topk=self.topk,
            kpool=self.kpool,
            scale=0.5,
            out=out,
            physical=PhysicalRows(table, physical, counts) if mapped else None,
            scoring=SCORES,
            selecting=selecting,
            **{name: value.to(DEVICE) if name != "interleaved" else value for name, value in self.rotation.items()},
        )
        return out.cpu(), physical.cpu(), counts.cpu()

    def truth(self) -> torch.Tensor:
        out = torch.full((self.q.shape[0], self.topk + self.kpool - 1), POISON, dtype=torch.int32)
        reference.select_topk_decode(
            self.q,
            self.weights,
            self.keys,
            block_table=self.step.block_table,
            context_lens=self.step.context_lens,
            topk=self.topk,
            kpool=self.kpool,
            scale=0.5,
            out=out,
            **self.rotation,
        )
        return out


@pytest.mark.parametrize("kpool", [1, 2, 4])
def test_equals_the_reference_at_every_length_that_matters(kpool: int) -> None:
    call = Call(LENGTHS, kpool=kpool, topk=16, spare_columns=2)
    want = call.truth()
    for row, length in zip(want, LENGTHS, strict=True):
        tail = length % kpool if kpool > 1 else 0
        assert int((row >= 0).sum()) == min(length - tail, 16) + tail
    for plan in (ONE, LISTS, SPLITS):
        assert torch.equal(call.run(plan)[0], want), plan
    seen = call.keys.isnan()
    call.keys = torch.where(
        seen, torch.randint(100, 200, seen.shape).bfloat16(), call.keys
    )  # NaN could pass for hidden
    assert torch.equal(call.run(SPLITS)[0], want)


@pytest.mark.parametrize("kpool", [1, 4])
@pytest.mark.parametrize("plan", [ONE, LISTS, SPLITS], ids=["one", "lists", "splits"])
def test_physical_rows_from_the_same_launch(kpool: int, plan: SelectPlan) -> None:
    call = Call([200, 0, 3, 19, 16, 130], kpool=kpool, topk=16)
    out, physical, counts = call.run(plan, mapped=True)
    assert torch.equal(out, call.truth())
    want, want_counts = torch.zeros_like(physical), torch.zeros_like(counts)
    index_map.logical_to_physical(
        out, call.step.block_table, token_rows=torch.arange(6), block_size=BLOCK, out=want, counts=want_counts
    )
    assert torch.equal(physical, want)
    assert torch.equal(counts, want_counts)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [4, 16])
def test_queries_are_rotated(interleaved: bool, pairs: int) -> None:
    """By quarter turns, which keep integers integers."""
    call = Call([70, 0, 41, 12], kpool=1, topk=16)
    unturned = call.run(LISTS)[0]
    turns = torch.randint(0, 4, (4, pairs)) * torch.pi / 2
    wide = torch.full((2, 4, pairs + 3), torch.nan)
    wide[0, :, :pairs], wide[1, :, :pairs] = turns.cos().round(), turns.sin().round()
    call.rotation = {"cos": wide[0, :, :pairs], "sin": wide[1, :, :pairs], "interleaved": interleaved}
    got = call.run(LISTS)[0]
    assert torch.equal(got, call.truth())
    assert not torch.equal(got, unturned)


@pytest.mark.parametrize("kpool", [1, 4])
def test_tables_too_small_for_more_than_is_taken(kpool: int) -> None:
    call = Call([16, 1, 2, 0, 13], kpool=kpool, topk=16)
    out, physical, counts = call.run(mapped=True)
    assert torch.equal(out, call.truth())
    assert counts.tolist() == [16, 1, 2, 0, 13]
    assert ((physical >= 0) == (out >= 0)).all()


def test_a_visible_nan_is_taken_last() -> None:
    call = Call([40, 8, 0], kpool=1, topk=16)
    for row, length in ((0, 40), (1, 8)):
        call.keys.view(-1, DIM)[call.step.paged.entry_rows(row, torch.arange(0, length, 7), 1)] = torch.nan
    got = call.run()[0]
    assert torch.equal(got, call.truth())
    assert not {0, 7, 14, 21, 28, 35} & set(got[0].tolist())


def test_rows_do_not_depend_on_their_neighbours() -> None:
    call = Call([150, 80, 61], kpool=2, topk=8)
    together = call.run(LISTS)[0]
    for row in range(3):
        alone = Call([4], kpool=2, topk=8)
        alone.q, alone.weights, alone.keys = call.q[row : row + 1], call.weights[row : row + 1], call.keys
        step = call.step
        alone.step = PagedDecode(step.paged, step.context_lens[row : row + 1], step.block_table[row : row + 1])
        assert torch.equal(alone.run(SPLITS)[0], together[row : row + 1])


def test_what_the_kernels_take() -> None:
    q, weights = torch.zeros(2, 32, 128, dtype=torch.bfloat16), torch.zeros(2, 32)
    keys, table = torch.zeros(4, 16, 128, dtype=torch.bfloat16), torch.zeros(2, 200, dtype=torch.int64)
    assert takes(q, weights, keys, table, 512)
    assert not takes(q.float(), weights, keys, table, 512)
    assert not takes(q, weights, keys.float(), table, 512)
    assert not takes(q[:, :24], weights[:, :24], keys, table, 512)
    assert not takes(q, weights, keys, table.repeat(1, 100), 1 << 14)


@pytest.mark.parametrize("heads", [32, 64, 128])
def test_score_programs_fill_whole_waves(heads: int) -> None:
    held = 132 * (5 if heads <= 32 else 2)
    for rows in (1, 8, 32, 64, 100):
        for entries in (100, 2048, 65536):
            plan = score_plan(rows, entries, heads)
            tiles = -(-entries // plan.block)
            assert 1 <= plan.splits <= tiles
            waves = -(-rows * plan.splits // held)
            if plan.splits < tiles:
                assert rows * plan.splits > 0.7 * held * waves, (rows, entries, plan)
        assert len({score_plan(rows, entries, heads).block for entries in (1, 2048, 65536)}) == 1
