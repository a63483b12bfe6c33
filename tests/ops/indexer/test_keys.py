"""Index keys: pooling in any chunks gives what one look at the whole sequence gives, and slots keep to themselves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sidestream.core.ring import plan_ring
from sidestream.ops.indexer import pool_keys, reference, write_keys
from tests.tolerances import BF16_OUTPUT, FP32_ROUNDING

KPOOL, DIM = 4, 6


class TailRing:
    """One ring tensor for a few slots, NaN where nothing was written."""

    def __init__(self, slots: int, *, rollback: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.length = KPOOL - 1 + rollback
        self.tail = torch.full((slots * self.length, 2 * DIM), torch.nan, dtype=dtype)

    def step(
        self,
        k: Sequence[torch.Tensor],
        gate: Sequence[torch.Tensor],
        ape: torch.Tensor,
        *,
        starts: Sequence[int],
        slots: Sequence[int],
    ) -> list[torch.Tensor]:
        """Pooled keys a sequence, in order; k and gate [n, DIM] a sequence."""
        lengths = [part.shape[0] for part in k]
        plan = plan_ring(starts, lengths, slots, window=KPOOL, ring_length=self.length)
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        ends = torch.nonzero((positions + 1) % KPOOL == 0).flatten()
        pooled = pool_keys(torch.cat(list(k)), torch.cat(list(gate)), ape, tail=self.tail, plan=plan, pools=ends)
        counts = [(s + n) // KPOOL - s // KPOOL for s, n in zip(starts, lengths, strict=True)]
        return list(pooled.split(counts))


def draw(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(length, DIM), torch.randn(length, DIM) * 3


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 21, 64])
@pytest.mark.parametrize("rollback", [0, 2])
def test_chunks_do_not_matter(chunk: int, rollback: int) -> None:
    (k, gate), ape = draw(46), torch.randn(KPOOL, DIM)
    want = reference.pooled_keys(k, gate, ape)
    ring, got = TailRing(3, rollback=rollback), []
    for start in range(0, 46, chunk):
        part = slice(start, start + chunk)
        got += ring.step([k[part]], [gate[part]], ape, starts=[start], slots=[2])
    torch.testing.assert_close(torch.cat(got), want, rtol=0, atol=FP32_ROUNDING)
    assert ring.tail[: 2 * ring.length].isnan().all(), "another slot's ring was written"


@pytest.mark.parametrize("length", range(1, 22))
def test_every_length_then_decode(length: int) -> None:
    (k, gate), ape = draw(length + 6), torch.randn(KPOOL, DIM)
    ring = TailRing(2)
    got = ring.step([k[:length]], [gate[:length]], ape, starts=[0], slots=[1])
    for t in range(length, length + 6):
        got += ring.step([k[t : t + 1]], [gate[t : t + 1]], ape, starts=[t], slots=[1])
    want = reference.pooled_keys(k, gate, ape)
    torch.testing.assert_close(torch.cat(got), want, rtol=0, atol=FP32_ROUNDING)


def test_requests_of_three_and_five_tokens_share_a_batch() -> None:
    (k1, g1), (k2, g2), ape = draw(12), draw(14), torch.randn(KPOOL, DIM)
    ring = TailRing(4)
    both = [ring.step([k1[:3], k2[:5]], [g1[:3], g2[:5]], ape, starts=[0, 0], slots=[3, 1])]
    for i in range(9):
        a, b = slice(3 + i, 4 + i), slice(5 + i, 6 + i)
        both.append(ring.step([k2[b], k1[a]], [g2[b], g1[a]], ape, starts=[5 + i, 3 + i], slots=[1, 3])[::-1])
    got1, got2 = torch.cat([pair[0] for pair in both]), torch.cat([pair[1] for pair in both])
    torch.testing.assert_close(got1, reference.pooled_keys(k1, g1, ape), rtol=0, atol=FP32_ROUNDING)
    torch.testing.assert_close(got2, reference.pooled_keys(k2, g2, ape), rtol=0, atol=FP32_ROUNDING)


def test_a_reused_slot_forgets_its_owner() -> None:
    (k, gate), ape = draw(9), torch.randn(KPOOL, DIM)
    ring = TailRing(2)
    ring.tail.fill_(1e30)
    got = [ring.step([k[:1]], [gate[:1]], ape, starts=[0], slots=[1])[0]]
    got.append(ring.step([k[1:]], [gate[1:]], ape, starts=[1], slots=[1])[0])
    torch.testing.assert_close(torch.cat(got), reference.pooled_keys(k, gate, ape), rtol=0, atol=FP32_ROUNDING)


def test_rolled_back_tokens_leave_no_trace() -> None:
    (k, gate), ape = draw(12), torch.randn(KPOOL, DIM)
    wrong_k, wrong_gate = draw(3)
    ring = TailRing(1, rollback=2)
    got = ring.step([k[:5]], [gate[:5]], ape, starts=[0], slots=[0])
    ring.step([torch.cat([k[5:6], wrong_k[:2]])], [torch.cat([gate[5:6], wrong_gate[:2]])], ape, starts=[5], slots=[0])
    got += ring.step([k[6:]], [gate[6:]], ape, starts=[6], slots=[0])  # the two wrong tokens are taken back
    torch.testing.assert_close(torch.cat(got), reference.pooled_keys(k, gate, ape), rtol=0, atol=FP32_ROUNDING)


def test_every_input_matters() -> None:
    (k, gate), ape = draw(8), torch.randn(KPOOL, DIM)
    base = reference.pooled_keys(k, gate, ape)
    for name, other in (
        ("ape", TailRing(1).step([k], [gate], ape * 0, starts=[0], slots=[0])[0]),
        ("gate", TailRing(1).step([k], [gate * 0], ape, starts=[0], slots=[0])[0]),
        ("k", TailRing(1).step([k + 0.1], [gate], ape, starts=[0], slots=[0])[0]),
    ):
        assert (other - base).abs().max() > 1e-2, name


def test_large_gates_do_not_overflow() -> None:
    k, gate = draw(8)
    pooled = TailRing(1).step([k], [gate * 1e4], torch.randn(KPOOL, DIM), starts=[0], slots=[0])[0]
    assert pooled.isfinite().all()
    assert (pooled.abs() <= k.abs().amax(dim=0) * (1 + FP32_ROUNDING)).all()


def test_bf16_computes_in_fp32() -> None:
    (k, gate), ape = draw(8), torch.randn(KPOOL, DIM)
    k, gate = k.bfloat16(), gate.bfloat16()
    pooled = TailRing(1, dtype=torch.bfloat16).step([k], [gate], ape, starts=[0], slots=[0])[0]
    assert pooled.dtype == torch.bfloat16
    want = reference.pooled_keys(k.float(), gate.float(), ape)
    torch.testing.assert_close(pooled.float(), want, rtol=BF16_OUTPUT, atol=FP32_ROUNDING)


def test_write_keys_touches_its_rows_only() -> None:
    keys, rows, k = torch.full((9, DIM), torch.nan), torch.tensor([7, 0, 4]), torch.randn(3, 2 * DIM)[:, ::2]
    write_keys(keys, rows, k)
    assert torch.equal(keys[rows], k)
    assert keys[[1, 2, 3, 5, 6, 8]].isnan().all()
    write_keys(keys, rows[:0], k[:0])
    short = torch.full((9, DIM), torch.nan, dtype=torch.bfloat16)
    write_keys(short, rows, k)
    assert torch.equal(short[rows], k.bfloat16())
