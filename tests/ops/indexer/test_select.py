"""Selection over shuffled, poisoned pages: fast path against the reference, tails, batches, splits, strides."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sidestream.ops.indexer import index_scores, reference, select_topk
from tests.ops.paged import Paged, make_paged
from tests.tolerances import FP32_GEMM

pytestmark = pytest.mark.usefixtures("either_library")
HEADS, DIM, TOPK, SCALE = 16, 12, 8, 0.3
POISON = 0x7F7F7F7F


def run(
    paged: Paged,
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    *,
    num_decode: int,
    kpool: int,
    scratch_bytes: int = 4 << 20,
    extra_rows: int = 0,
    topk: int = TOPK,
) -> torch.Tensor:
    out = torch.full((paged.num_tokens + extra_rows, topk + kpool - 1), POISON, dtype=torch.int32)
    select_topk(
        q,
        weights,
        keys,
        block_table=paged.block_table,
        positions=paged.positions,
        segments=paged.segments,
        num_decode=num_decode,
        topk=topk,
        kpool=kpool,
        scale=SCALE,
        out=out,
        scratch_bytes=scratch_bytes,
    )
    return out


def truth(paged: Paged, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, *, kpool: int) -> torch.Tensor:
    out = torch.full((paged.num_tokens, TOPK + kpool - 1), POISON, dtype=torch.int32)
    reference.select_topk(
        q,
        weights,
        keys,
        block_table=paged.block_table,
        positions=paged.positions,
        segments=paged.segments,
        num_decode=0,
        topk=TOPK,
        kpool=kpool,
        scale=SCALE,
        out=out,
    )
    return out


def check_form(selected: torch.Tensor, positions: torch.Tensor, *, kpool: int, topk: int = TOPK) -> None:
    """What every row promises, whatever the scores are."""
    for row, position in zip(selected.tolist(), positions.tolist(), strict=True):
        count = sum(1 for x in row if x >= 0)
        chosen = row[:count]
        assert row[count:] == [-1] * (len(row) - count), row
        assert chosen == sorted(set(chosen)), row
        visible = (position + 1) // kpool
        tail = list(range(visible * kpool, position + 1))
        assert len(tail) == (position + 1) % kpool
        assert chosen[len(chosen) - len(tail) :] == tail, (row, position)
        whole = chosen[: len(chosen) - len(tail)]
        assert len(whole) == min(visible, topk // kpool) * kpool
        pools = [x // kpool for x in whole[::kpool]]
        assert whole == [pool * kpool + i for pool in pools for i in range(kpool)], row
        assert all(pool < visible for pool in pools)


def draw(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, HEADS, DIM), torch.randn(tokens, HEADS)


BATCHES: list[tuple[Sequence[tuple[int, int]], int]] = [
    ([(0, 40)], 0),
    ([(13, 30), (0, 3), (0, 9), (37, 5)], 0),
    ([(0, 1), (0, 2)], 0),
    ([(17, 1), (50, 1), (3, 1), (8, 1)], 4),
    ([(17, 2), (50, 2), (3, 2), (0, 21), (24, 8)], 3),
    ([(5, 3), (6, 3), (7, 3)], 3),
    ([(34, 1), (52, 1), (41, 1)], 3),
    ([(34, 2), (35, 2), (60, 2)], 3),
]


@pytest.mark.parametrize("kpool", [1, 2, 4])
@pytest.mark.parametrize(("spans", "num_decode"), BATCHES)
def test_equals_the_reference(spans: Sequence[tuple[int, int]], num_decode: int, kpool: int) -> None:
    paged = make_paged(spans, block_size=8)
    keys = paged.poisoned_keys(DIM, kpool)
    q, weights = draw(paged.num_tokens)
    want = truth(paged, q, weights, keys, kpool=kpool)
    check_form(want, paged.positions, kpool=kpool)
    for scratch_bytes in (1, 9000, 4 << 20):
        got = run(paged, q, weights, keys, num_decode=num_decode, kpool=kpool, scratch_bytes=scratch_bytes)
        assert torch.equal(got, want), scratch_bytes
    loud = torch.where(keys.isnan(), torch.randn_like(keys) * 1e3, keys)  # NaN alone could pass for hidden
    for decodes in (num_decode, 0):
        assert torch.equal(run(paged, q, weights, keys, num_decode=decodes, kpool=kpool), want)
        assert torch.equal(run(paged, q, weights, loud, num_decode=decodes, kpool=kpool), want)


@pytest.mark.parametrize("length", range(1, 22))
@pytest.mark.parametrize("decode", [False, True])
def test_tail_of_every_length(length: int, decode: bool) -> None:
    paged = make_paged([(length - 1, 1) if decode else (0, length)], block_size=4)
    keys = paged.poisoned_keys(DIM, 4)
    q, weights = draw(paged.num_tokens)
    got = run(paged, q, weights, keys, num_decode=int(decode), kpool=4)
    check_form(got, paged.positions, kpool=4)
    last = [x for x in got[-1].tolist() if x >= 0]
    assert len(last) <= TOPK + 3
    assert last[len(last) - length % 4 :] == list(range(length - length % 4, length))
    assert torch.equal(got, truth(paged, q, weights, keys, kpool=4))


def test_two_requests_in_one_batch_equal_their_solo_runs() -> None:
    for start in (0, 11):
        paged = make_paged([(start, 3), (start, 5)], block_size=8)
        keys = paged.poisoned_keys(DIM, 4)
        q, weights = draw(8)
        both = run(paged, q, weights, keys, num_decode=0, kpool=4)
        for row, part in ((0, slice(0, 3)), (1, slice(3, 8))):
            segment = paged.segments[row]
            solo = Paged(
                block_size=8,
                num_blocks=paged.num_blocks,
                segments=(type(segment)(0, segment.length, row, start),),
                block_table=paged.block_table,
                positions=paged.positions[part],
                token_rows=paged.token_rows[part],
            )
            alone = run(solo, q[part], weights[part], keys, num_decode=0, kpool=4)
            assert torch.equal(both[part], alone)


def test_rows_behind_the_tokens_are_cleared() -> None:
    paged = make_paged([(20, 1), (0, 5)], block_size=8)
    q, weights = draw(6)
    out = run(paged, q, weights, paged.poisoned_keys(DIM, 4), num_decode=1, kpool=4, extra_rows=3)
    assert (out[6:] == -1).all()
    check_form(out[:6], paged.positions, kpool=4)


def test_output_and_inputs_with_strides() -> None:
    paged = make_paged([(33, 1), (26, 1), (0, 30)], block_size=8)
    keys, (q, weights) = paged.poisoned_keys(DIM, 4), draw(32)
    want = run(paged, q, weights, keys, num_decode=2, kpool=4)
    holder = torch.full((64, 2 * want.shape[1]), POISON, dtype=torch.int32)
    wide_table = torch.cat([paged.block_table, torch.full((3, 7), 10**9)], dim=1)
    wide_keys = torch.full((paged.num_blocks, 2, 2 * DIM), torch.nan)
    wide_keys[:, :, :DIM] = keys
    select_topk(
        q.transpose(0, 1).contiguous().transpose(0, 1),
        weights.t().contiguous().t(),
        wide_keys[:, :, :DIM],
        block_table=wide_table.to(torch.int32)[:, : paged.block_table.shape[1]],
        positions=paged.positions.repeat_interleave(2)[::2],
        segments=paged.segments,
        num_decode=2,
        topk=TOPK,
        kpool=4,
        scale=SCALE,
        out=holder[::2, 1 : 1 + want.shape[1]],
    )
    assert torch.equal(holder[::2, 1 : 1 + want.shape[1]], want)
    assert (holder[1::2] == POISON).all()
    assert (holder[:, 1 + want.shape[1] :] == POISON).all()


def test_every_wrong_choice_would_show() -> None:
    """The selection follows the scores: moving one pool's score over the threshold swaps exactly that pool in."""
    paged = make_paged([(63, 1)], block_size=8)
    keys, (q, weights) = paged.poisoned_keys(DIM, 4), draw(1)
    weights = weights.abs()
    before = set(run(paged, q, weights, keys, num_decode=1, kpool=4)[0].tolist())
    loser = next(pool for pool in range(16) if 4 * pool not in before)
    row = paged.entry_rows(0, torch.tensor([loser]), 4)
    keys.view(-1, DIM)[row] = q[0].mean(dim=0) * 1e3
    after = set(run(paged, q, weights, keys, num_decode=1, kpool=4)[0].tolist())
    assert {4 * loser + i for i in range(4)} <= after
    assert len(after - before) == 4


def test_ties_go_to_the_lowest_pools() -> None:
    paged = make_paged([(0, 50), (60, 1)], block_size=8)
    keys = torch.zeros(paged.num_blocks, 2, DIM)
    q, weights = draw(51)
    out = run(paged, q, weights, keys, num_decode=0, kpool=4)
    check_form(out, paged.positions, kpool=4)
    assert out[-1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 60, -1, -1]
    assert torch.equal(run(paged, q, weights, keys, num_decode=0, kpool=4), out)


def test_scores_equal_the_reference_and_isolate_nan() -> None:
    q, weights = draw(5)
    keys = torch.randn(30, DIM)
    want = reference.index_scores(q, weights, keys, scale=SCALE)
    torch.testing.assert_close(index_scores(q, weights, keys, scale=SCALE), want, rtol=0, atol=FP32_GEMM)
    keys[7] = torch.nan
    got = index_scores(q, weights, keys, scale=SCALE)
    assert got[:, 7].isnan().all()
    others = [i for i in range(30) if i != 7]
    torch.testing.assert_close(got[:, others], want[:, others], rtol=0, atol=FP32_GEMM)


def test_bf16_keys_and_queries_score_in_fp32() -> None:
    paged = make_paged([(200, 1), (100, 40)], block_size=8)
    keys = paged.poisoned_keys(DIM, 4).bfloat16()
    q, weights = draw(41)
    q = q.bfloat16()
    got = run(paged, q, weights, keys, num_decode=1, kpool=4)
    assert torch.equal(got, run(paged, q.float(), weights, keys.float(), num_decode=1, kpool=4))


def test_wrong_widths_are_noticed() -> None:
    paged = make_paged([(0, 4)], block_size=8)
    q, weights = draw(4)
    with pytest.raises(AssertionError, match="no whole number of pools"):
        run(paged, q, weights, paged.poisoned_keys(DIM, 4), num_decode=0, kpool=4, topk=10)
