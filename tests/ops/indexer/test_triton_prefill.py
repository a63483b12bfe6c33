"""The Triton selection of prefills and mixed steps in the interpreter or on the GPU, against the reference.

Scores are small integers, which bf16 and fp32 products hold exactly, so that the selection must agree in every entry,
with as many ties as they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sidestream.core.segment import Segment
from sidestream.ops.indexer import reference
from sidestream.ops.indexer.triton_prefill import PrefillPlan, cut_runs, mixed_select_plan, select_topk
from sidestream.ops.topk.triton_select import SelectPlan
from tests.ops.paged import make_paged
from tests.ops.triton_mode import DEVICE

HEADS, DIM, BLOCK, TOPK = 16, 32, 8, 8
POISON = 0x7F7F7F7F
WHOLE = SelectPlan(small=128, merge=0, tile=0, sample=0, splits=1, warps=4)
LISTS = SelectPlan(small=16, merge=32, tile=16, sample=16, splits=1, warps=4)
SPLITS = SelectPlan(small=16, merge=32, tile=16, sample=16, splits=3, warps=4)


class Call:
    """Integer queries, weights and keys; NaN in every key that no query sees."""

    def __init__(self, spans: Sequence[tuple[int, int]], num_decode: int, *, kpool: int) -> None:
        self.paged, self.num_decode, self.kpool = make_paged(spans, block_size=BLOCK), num_decode, kpool
        tokens = self.paged.num_tokens
        keys = self.paged.poisoned_keys(DIM, kpool)
        self.keys = torch.where(keys.isnan(), keys, torch.randint(-2, 3, keys.shape).float()).bfloat16()
        self.q = torch.randint(-2, 3, (tokens, HEADS, DIM)).bfloat16()
        self.weights = torch.randint(-2, 3, (tokens, HEADS)).bfloat16()
        self.rotation: dict[str, Any] = {}

    def run(
        self, selecting: SelectPlan | None = WHOLE, *, columns: int = 32, scratch_bytes: int = 1 << 20, extra: int = 0
    ) -> torch.Tensor:
        paged = self.paged
        out = torch.full((paged.num_tokens + extra, TOPK + self.kpool - 1), POISON, dtype=torch.int32, device=DEVICE)
        select_topk(
            self.q.to(DEVICE),
            self.weights.to(DEVICE),
            self.keys.to(DEVICE),
            block_table=paged.block_table.to(DEVICE),
            positions=paged.positions.to(DEVICE),
            segments=paged.segments,
            num_decode=self.num_decode,
            topk=TOPK,
            kpool=self.kpool,
            scale=0.5,
            out=out,
            scratch_bytes=scratch_bytes,
            scoring=PrefillPlan(columns=columns, block=16, warps=4, stages=2),
            selecting=selecting,
            **{name: value.to(DEVICE) if name != "interleaved" else value for name, value in self.rotation.items()},
        )
        return out.cpu()

    def truth(self) -> torch.Tensor:
        paged = self.paged
        out = torch.full((paged.num_tokens, TOPK + self.kpool - 1), POISON, dtype=torch.int32)
        reference.select_topk(
            self.q,
            self.weights.float(),
            self.keys,
            block_table=paged.block_table,
            positions=paged.positions,
            segments=paged.segments,
            num_decode=self.num_decode,
            topk=TOPK,
            kpool=self.kpool,
            scale=0.5,
            out=out,
            **self.rotation,
        )
        return out


BATCHES: list[tuple[Sequence[tuple[int, int]], int]] = [
    ([(0, 40)], 0),
    ([(13, 20), (0, 3), (0, 9), (37, 5)], 0),
    ([(0, 1), (0, 2)], 0),
    ([(17, 1), (90, 1), (3, 1), (8, 1)], 4),
    ([(17, 2), (50, 2), (3, 2), (0, 13), (24, 8)], 3),
]


@pytest.mark.parametrize("kpool", [1, 2, 4])
@pytest.mark.parametrize(("spans", "num_decode"), BATCHES)
def test_equals_the_reference(spans: Sequence[tuple[int, int]], num_decode: int, kpool: int) -> None:
    call = Call(spans, num_decode, kpool=kpool)
    want = call.truth()
    for selecting, scratch_bytes in ((LISTS, 1 << 20), (SPLITS, 3000)):
        assert torch.equal(call.run(selecting, scratch_bytes=scratch_bytes), want), selecting
    hidden = call.keys.isnan()  # NaN could pass for hidden
    call.keys = torch.where(hidden, torch.randint(100, 200, hidden.shape).bfloat16(), call.keys)
    assert torch.equal(call.run(LISTS, columns=64), want)


@pytest.mark.parametrize("length", range(1, 22))
def test_tail_of_every_length(length: int) -> None:
    call = Call([(30, length)], 0, kpool=4)
    got = call.run()
    assert torch.equal(got, call.truth())
    for row, position in zip(got.tolist(), call.paged.positions.tolist(), strict=True):
        tail = (position + 1) % 4
        assert row[TOPK : TOPK + tail] == list(range(position + 1 - tail, position + 1))


def test_the_usual_plan_and_rows_behind_the_tokens() -> None:
    call = Call([(20, 1), (0, 30)], 1, kpool=2)
    got = call.run(None, extra=3)
    assert torch.equal(got[:31], call.truth())
    assert (got[31:] == -1).all()


def test_chunks_select_what_the_whole_prompt_selects() -> None:
    call = Call([(0, 60)], 0, kpool=4)
    whole = call.run()
    for first, last in ((0, 7), (7, 30), (30, 31), (31, 60)):
        part = Call([(first, last - first)], 0, kpool=4)
        part.q, part.weights, part.keys = call.q[first:last], call.weights[first:last], call.keys
        part.paged = type(call.paged)(
            BLOCK,
            call.paged.num_blocks,
            (Segment(0, last - first, 0, first),),
            call.paged.block_table,
            call.paged.positions[first:last],
            call.paged.token_rows[first:last],
        )
        assert torch.equal(part.run(), whole[first:last])


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_are_rotated(interleaved: bool) -> None:
    """By quarter turns, which keep integers integers; decodes as well as prefills."""
    call = Call([(33, 1), (20, 9)], 1, kpool=1)
    unturned = call.run()
    turns = torch.randint(0, 4, (10, 4)) * torch.pi / 2
    call.rotation = {"cos": turns.cos().round(), "sin": turns.sin().round(), "interleaved": interleaved}
    got = call.run()
    assert torch.equal(got, call.truth())
    assert not torch.equal(got[1:], unturned[1:])
    assert not torch.equal(got[0], unturned[0])


def test_a_visible_nan_is_taken_last() -> None:
    call = Call([(0, 40)], 0, kpool=1)
    call.keys.view(-1, DIM)[call.paged.entry_rows(0, torch.arange(0, 40, 7), 1)] = torch.nan
    got = call.run()
    assert torch.equal(got, call.truth())
    assert not {0, 7, 14, 21, 28, 35} & set(got[39].tolist())


def test_runs_fit_the_scratch() -> None:
    segments = [Segment(5, 30, 0, 100), Segment(35, 2, 1, 0), Segment(37, 50, 2, 7)]
    for scratch in (1, 1000, 5000, 1 << 20):
        runs = list(cut_runs(segments, kpool=4, row_bytes=64, entry_bytes=4, scratch_bytes=scratch))
        pieces = [piece for run in runs for piece in run]
        token = 5
        for piece in pieces:
            assert piece.token_start == token
            source = segments[piece.sequence_row]
            assert piece.start_position - source.start_position == token - source.token_start
            token += piece.length
        assert token == 87
        for run in runs:
            tokens = sum(piece.length for piece in run)
            wide = max(piece.end_position // 4 for piece in run)
            assert tokens == 1 or tokens * (64 + 4 * wide) <= scratch
    assert len(runs) == 1


def test_few_kinds_of_selections_for_all_contexts() -> None:
    found = {
        (plan.small, plan.merge, plan.tile, plan.sample, plan.splits > 1, plan.warps)
        for entries in (0, 1, 500, 2000, 2048, 2049, 9000, 65536, 262144)
        for rows in (1, 7, 300, 8192)
        for plan in [mixed_select_plan(entries, 512, rows=rows)]
    }
    assert len(found) == 3
