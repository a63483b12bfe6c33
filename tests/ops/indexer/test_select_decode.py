"""Selection of uniform decodes: against the reference and against ``select_topk``, over every length that matters."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.indexer import reference, select_topk, select_topk_decode
from tests.ops.indexer.test_select import DIM, HEADS, POISON, SCALE, TOPK
from tests.ops.paged import PagedDecode, make_paged_decode

pytestmark = pytest.mark.usefixtures("either_library")


def run(
    step: PagedDecode,
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    *,
    kpool: int,
    scratch_bytes: int | None = None,
) -> torch.Tensor:
    out = torch.full((q.shape[0], TOPK + kpool - 1), POISON, dtype=torch.int32)
    select_topk_decode(
        q,
        weights,
        keys,
        block_table=step.block_table,
        context_lens=step.context_lens,
        topk=TOPK,
        kpool=kpool,
        scale=SCALE,
        out=out,
        scratch_bytes=scratch_bytes,
    )
    return out


def truth(step: PagedDecode, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, *, kpool: int) -> torch.Tensor:
    out = torch.full((q.shape[0], TOPK + kpool - 1), POISON, dtype=torch.int32)
    reference.select_topk_decode(
        q,
        weights,
        keys,
        block_table=step.block_table,
        context_lens=step.context_lens,
        topk=TOPK,
        kpool=kpool,
        scale=SCALE,
        out=out,
    )
    return out


def by_select_topk(
    step: PagedDecode, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, *, kpool: int
) -> torch.Tensor:
    """The true rows, which stand before the padding."""
    out = torch.full((step.paged.num_tokens, TOPK + kpool - 1), POISON, dtype=torch.int32)
    select_topk(
        q[: out.shape[0]],
        weights[: out.shape[0]],
        keys,
        block_table=step.paged.block_table,
        positions=step.paged.positions,
        segments=step.paged.segments,
        num_decode=len(step.paged.segments),
        topk=TOPK,
        kpool=kpool,
        scale=SCALE,
        out=out,
    )
    return out


def draw(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, HEADS, DIM), torch.randn(rows, HEADS)


@pytest.mark.parametrize("kpool", [1, 2, 4])
@pytest.mark.parametrize("longest", [TOPK + 1, 61])
def test_equals_the_reference_at_every_length_that_matters(kpool: int, longest: int) -> None:
    lengths = [longest, 0, 1, kpool - 1, kpool, TOPK - 1, TOPK, TOPK + 1, TOPK + kpool, longest - 1, 0]
    step = make_paged_decode([min(length, longest) for length in lengths], block_size=8, spare_columns=2)
    keys, (q, weights) = step.paged.poisoned_keys(DIM, kpool), draw(len(lengths))
    want = truth(step, q, weights, keys, kpool=kpool)
    for row, length in zip(want, step.context_lens.tolist(), strict=True):
        tail = length % kpool if kpool > 1 else 0
        assert int((row >= 0).sum()) == min(length - tail, TOPK) + tail
    for scratch_bytes in (1, 9000, None):
        assert torch.equal(run(step, q, weights, keys, kpool=kpool, scratch_bytes=scratch_bytes), want), scratch_bytes
    loud = torch.where(keys.isnan(), torch.randn_like(keys) * 1e3, keys)  # NaN alone could pass for hidden
    assert torch.equal(run(step, q, weights, loud, kpool=kpool), want)
    q[step.context_lens == 0] = torch.nan
    assert torch.equal(run(step, q, weights, keys, kpool=kpool), want)


@pytest.mark.parametrize("kpool", [1, 4])
@pytest.mark.parametrize("longest", [3, TOPK])
def test_tables_too_small_for_more_than_is_taken(kpool: int, longest: int) -> None:
    step = make_paged_decode([longest, 1, 2, 0], block_size=8)
    keys, (q, weights) = step.paged.poisoned_keys(DIM, kpool), draw(4)
    got = run(step, q, weights, keys, kpool=kpool)
    assert torch.equal(got, truth(step, q, weights, keys, kpool=kpool))
    assert [int((row >= 0).sum()) for row in got] == [longest, 1, 2, 0]


def test_a_table_with_room_for_one_entry_more_than_is_taken() -> None:
    step = make_paged_decode([16, 16, 16, 9, 0], block_size=8)
    keys, (q, weights) = step.paged.poisoned_keys(DIM, 8), draw(5)
    keys.view(-1, DIM)[step.paged.entry_rows(0, torch.tensor([0]), 8)] = 0.0
    weights, q = weights.abs(), q.abs()
    keys.view(-1, DIM)[step.paged.entry_rows(0, torch.tensor([1]), 8)] = 1.0
    got = run(step, q, weights, keys, kpool=8)
    assert torch.equal(got, truth(step, q, weights, keys, kpool=8))
    assert got[0].tolist() == [*range(8, 16), *[-1] * 7]


@pytest.mark.parametrize("kpool", [1, 2, 4])
@pytest.mark.parametrize("equal", [False, True])
def test_equals_select_topk_where_scores_are_exact(kpool: int, equal: bool) -> None:
    """Scores are small integers, all distinct or all equal, so that no product can round them apart."""
    step = make_paged_decode([200, 64, 9, 1, 33, 100, 0, 0], block_size=8)
    keys = torch.full_like(step.paged.poisoned_keys(DIM, kpool), torch.nan)
    flat = keys.view(-1, DIM)
    for segment in step.paged.segments:
        count = segment.end_position // kpool
        rows = step.paged.entry_rows(segment.sequence_row, torch.arange(count), kpool)
        flat[rows] = 0.0
        if not equal:
            flat[rows, 0] = torch.randperm(count).float() + 1
    q, weights = torch.zeros(8, 1, DIM), torch.ones(8, 1)
    q[:, :, 0] = 1.0
    got = run(step, q, weights, keys, kpool=kpool, scratch_bytes=3000)
    assert torch.equal(got[:6], by_select_topk(step, q, weights, keys, kpool=kpool))
    assert (got[6:] == -1).all()
    if equal:
        tail = 200 % kpool
        assert got[0].tolist() == [*range(TOPK), *range(200 - tail, 200), *[-1] * (kpool - 1 - tail)]


def test_a_visible_nan_is_taken_last() -> None:
    step = make_paged_decode([40, 8, 0], block_size=8)
    keys, (q, weights) = step.paged.poisoned_keys(DIM, 1), draw(3)
    for row, length in ((0, 40), (1, 8)):
        keys.view(-1, DIM)[step.paged.entry_rows(row, torch.arange(0, length, 7), 1)] = torch.nan
    got = run(step, q, weights, keys, kpool=1)
    assert torch.equal(got[:2], by_select_topk(step, q, weights, keys, kpool=1))
    assert not {0, 7, 14, 21, 28, 35} & set(got[0].tolist())
    assert got[1].tolist() == list(range(8))


def test_strides_and_short_integers() -> None:
    step = make_paged_decode([33, 26, 0], block_size=8)
    keys, (q, weights) = step.paged.poisoned_keys(DIM, 4), draw(3)
    want = run(step, q, weights, keys, kpool=4)
    holder = torch.full((6, 2 * want.shape[1]), POISON, dtype=torch.int32)
    wide = torch.full((*keys.shape[:2], 2 * DIM), torch.nan)
    wide[:, :, :DIM] = keys
    select_topk_decode(
        q.transpose(0, 1).contiguous().transpose(0, 1),
        weights.t().contiguous().t(),
        wide[:, :, :DIM],
        block_table=step.block_table.to(torch.int32),
        context_lens=step.context_lens.repeat_interleave(2)[::2],
        topk=TOPK,
        kpool=4,
        scale=SCALE,
        out=holder[::2, 1 : 1 + want.shape[1]],
    )
    assert torch.equal(holder[::2, 1 : 1 + want.shape[1]], want)
    assert (holder[1::2] == POISON).all()
    assert (holder[:, 1 + want.shape[1] :] == POISON).all()


def test_bf16_keys_and_queries_score_in_fp32() -> None:
    step = make_paged_decode([200, 140], block_size=8)
    keys, (q, weights) = step.paged.poisoned_keys(DIM, 4).bfloat16(), draw(2)
    got = run(step, q.bfloat16(), weights, keys, kpool=4)
    assert torch.equal(got, run(step, q.bfloat16().float(), weights, keys.float(), kpool=4))


def test_wrong_widths_are_noticed() -> None:
    step = make_paged_decode([20], block_size=8)
    keys, (q, weights) = step.paged.poisoned_keys(DIM, 1), draw(2)
    with pytest.raises(AssertionError, match="context lengths"):
        run(step, q, weights, keys, kpool=1)
    with pytest.raises(AssertionError, match="no whole number of pools"):
        run(step, q[:1], weights[:1], keys, kpool=3)
