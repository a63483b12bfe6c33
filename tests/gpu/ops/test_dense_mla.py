"""Dense MLA of decodes on a GPU: ragged contexts on shuffled pages, padding rows, repeats, graphs."""

from __future__ import annotations

import math

import pytest
import torch

from sidestream.core.segment import Segment
from sidestream.ops.dense_mla import decode, dense_mla, dense_mla_decode, torch_impl, triton_mixed
from sidestream.ops.dense_mla.triton_decode import dense_mla_decode as launched
from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout, pack_rows
from sidestream.ops.sparse_mla.triton_launch import Launch
from tests.tolerances import BF16_STEPS

pytestmark = pytest.mark.gpu

BLOCK, LATENT, SCALE = 64, 512, 1 / math.sqrt(192)


class Step:
    """Contexts on pages in random order; NaN in every row behind one, block 0 included."""

    def __init__(self, lengths: list[int], layout: KVRowLayout, heads: int, columns: int) -> None:
        self.layout = layout
        self.context_lens = torch.tensor(lengths, device="cuda")
        used = [-(-length // BLOCK) for length in lengths]
        pages = torch.randperm(sum(used), device="cuda") + 1
        self.block_table = torch.zeros(len(lengths), columns, dtype=torch.int64, device="cuda")
        self.pool = torch.full(((sum(used) + 1) * BLOCK, layout.row_bytes), 0xFF, dtype=torch.uint8, device="cuda")
        self.pool = self.pool.view(layout.dtype)
        first = 0
        for row, (length, blocks) in enumerate(zip(lengths, used, strict=True)):
            own = pages[first : first + blocks]
            self.block_table[row, :blocks] = own
            place = (own[:, None] * BLOCK + torch.arange(BLOCK, device="cuda")).view(-1)[:length]
            rope = torch.randn(length, layout.rope_dim, device="cuda") if layout.rope_dim else None
            self.pool[place] = pack_rows(torch.randn(length, LATENT, device="cuda"), rope, layout)
            first += blocks
        self.q = torch.randn(len(lengths), heads, LATENT + layout.rope_dim, device="cuda").bfloat16()

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        return dense_mla_decode(
            self.q,
            self.pool,
            block_table=self.block_table,
            context_lens=self.context_lens,
            block_size=BLOCK,
            scale=SCALE,
            layout=self.layout,
        )

    def want(self) -> tuple[torch.Tensor, torch.Tensor]:
        return decode.dense_mla_decode(
            self.q.float(),
            self.pool,
            block_table=self.block_table,
            context_lens=self.context_lens,
            block_size=BLOCK,
            scale=SCALE,
            layout=self.layout,
        )


def layout_of(name: str, p: int) -> KVRowLayout:
    return kv_row_layout(name, latent_dim=LATENT, rope_dim=p, model_dtype=torch.bfloat16)


LENGTHS = [[5000], [0], [1, 0, 64, 65, 4097, 8000, 0], [700, 3, 0, 1500] * 12]


@pytest.mark.parametrize(("name", "p"), [("bf16", 64), ("bf16", 0), ("fp8_ds_mla", 64), ("mxfp8", 0)])
@pytest.mark.parametrize("heads", [4, 32, 128])
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_equals_fp32_and_repeats(name: str, p: int, heads: int, lengths: list[int]) -> None:
    step = Step(lengths, layout_of(name, p), heads, columns=130)
    out, lse = step.run()
    want, want_lse = step.want()
    row = want.norm(dim=2, keepdim=True).clamp_min(1e-30)
    assert ((out.float() - want) / row).norm(dim=2).max() <= BF16_STEPS
    empty = step.context_lens == 0
    assert not out[empty].any()
    assert torch.equal(lse[empty], want_lse[empty])
    assert not (lse - want_lse)[~empty].abs().gt(BF16_STEPS).any()
    for _ in range(20):
        again, again_lse = step.run()
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)


def test_in_a_graph() -> None:
    """Captured with empty contexts, replayed with long ones."""
    step = Step([3000, 1, 0, 777], layout_of("bf16", 64), 32, columns=60)
    want, _ = step.run()
    lengths = step.context_lens.clone()
    step.context_lens.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = step.run()
    step.context_lens.copy_(lengths)
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize(("name", "p"), [("bf16", 64), ("fp8_ds_mla", 64), ("mxfp8", 0)])
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_the_kernel_with_roles(name: str, p: int, splits: int, lengths: list[int]) -> None:
    step = Step(lengths, layout_of(name, p), 32, columns=130)
    want, want_lse = step.want()
    first: list[torch.Tensor] = []
    for _ in range(20):
        out, lse = launched(
            step.q,
            step.pool,
            block_table=step.block_table,
            context_lens=step.context_lens,
            block_size=BLOCK,
            scale=SCALE,
            layout=step.layout,
            launch=Launch(splits, 64, 64, 1, 8, parted=False, roles=True),
        )
        first = first or [out, lse]
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])
    row = want.norm(dim=2, keepdim=True).clamp_min(1e-30)
    assert ((first[0].float() - want) / row).norm(dim=2).max() <= BF16_STEPS
    some = step.context_lens > 0
    assert not (first[1] - want_lse)[some].abs().gt(BF16_STEPS).any()


MIXED = [
    ([(0, 700)], 0),
    ([(4000, 1), (63, 1), (0, 1), (900, 300), (0, 65)], 3),
    ([(5000, 3), (64, 3), (8000, 17)], 2),
]


@pytest.mark.parametrize(("name", "p"), [("bf16", 64), ("bf16", 0), ("fp8_ds_mla", 64), ("mxfp8", 0)])
@pytest.mark.parametrize("heads", [4, 32, 128])
@pytest.mark.parametrize(("spans", "num_decode"), MIXED, ids=["whole", "mixed", "verified"])
@pytest.mark.parametrize(
    "launch",
    [None, Launch(1, 64, 64, 1, 8, parted=False, roles=True), Launch(3, 64, 64, 1, 8, parted=False, roles=True)],
    ids=["chosen", "one", "three"],
)
def test_mixed_steps(
    name: str, p: int, heads: int, spans: list[tuple[int, int]], num_decode: int, launch: Launch | None
) -> None:
    """Chunks from the start and from the middle, decodes of one and of three tokens; the same bits every time."""
    layout = layout_of(name, p)
    step = Step([start + length for start, length in spans], layout, heads, columns=130)
    segments, first = [], 0
    for row, (start, length) in enumerate(spans):
        segments.append(Segment(first, length, row, start))
        first += length
    q = torch.randn(first, heads, LATENT + p, device="cuda").bfloat16()
    named = {
        "block_table": step.block_table,
        "segments": segments,
        "num_decode": num_decode,
        "block_size": BLOCK,
        "scale": SCALE,
        "layout": layout,
    }
    out, lse = triton_mixed.dense_mla(q, step.pool, **named, launch=launch)
    again, again_lse = triton_mixed.dense_mla(q, step.pool, **named, launch=launch)
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)
    want, want_lse = torch_impl.dense_mla(q.float(), step.pool, **named)
    row = want.norm(dim=2, keepdim=True)
    assert ((out.float() - want) / row).norm(dim=2).max() <= BF16_STEPS
    assert (lse - want_lse).abs().max() <= BF16_STEPS


@pytest.mark.parametrize(("name", "p"), [("bf16", 64), ("fp8_ds_mla", 64), ("mxfp8", 0)])
def test_real_sizes_never_run_in_torch(name: str, p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_impl, "dense_mla")
    monkeypatch.delattr(decode, "dense_mla_decode")
    layout = layout_of(name, p)
    step = Step([70, 3, 2000], layout, 32, columns=40)
    out, _ = step.run()
    assert out.isfinite().all()
    segments = [Segment(0, 1, 0, 69), Segment(1, 1, 1, 2), Segment(2, 1000, 2, 1000)]
    q = torch.randn(1002, 32, LATENT + p, device="cuda").bfloat16()
    named = {"block_table": step.block_table, "block_size": BLOCK, "scale": SCALE, "layout": layout}
    mixed, _ = dense_mla(q, step.pool, segments=segments, num_decode=2, **named)
    assert mixed.isfinite().all()
