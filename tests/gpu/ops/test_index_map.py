"""The index map on a GPU at real shapes: every count, padding rows, repeats, graphs, rows beyond 32 bits."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.index_map import logical_to_physical, torch_impl

pytestmark = pytest.mark.gpu

POISON, BLOCK, COLUMNS = 0x7F7F7F7F, 64, 512


class Step:
    def __init__(self, tokens: int, width: int, seed: int) -> None:
        gen = torch.Generator(device="cuda").manual_seed(seed)

        def integers(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(0, high, shape, device="cuda", generator=gen)

        self.table = integers(2**27, tokens + 1, COLUMNS)  # rows beyond 32 bits
        self.token_rows = integers(tokens, tokens)
        self.logical = integers(BLOCK * COLUMNS, tokens, width).sort(dim=1).values.int()
        counts = integers(width + 1, tokens)
        special = torch.tensor([0, 1, width - 1, width, 511, 512, 513, 1024], device="cuda").clamp_max(width)
        counts[:8] = special[:tokens]
        self.logical[torch.arange(width, device="cuda") >= counts[:, None]] = -1
        self.out = torch.full((tokens, width), POISON, dtype=torch.int64, device="cuda")
        self.counts = torch.full((tokens,), POISON, dtype=torch.int32, device="cuda")

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.out.fill_(POISON)
        self.counts.fill_(POISON)
        named = {"token_rows": self.token_rows, "out": self.out, "counts": self.counts}
        logical_to_physical(self.logical, self.table, block_size=BLOCK, **named)
        return self.out, self.counts

    def want(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, counts = self.out.cpu(), self.counts.cpu()
        named = {"token_rows": self.token_rows.cpu(), "out": out, "counts": counts}
        torch_impl.logical_to_physical(self.logical.cpu(), self.table.cpu(), block_size=BLOCK, **named)
        return out, counts


@pytest.mark.parametrize(("tokens", "width"), [(1, 2051), (8, 2048), (64, 2051), (300, 2051), (70000, 9)])
def test_equals_torch(tokens: int, width: int) -> None:
    step = Step(tokens, width, 0)
    want, want_counts = step.want()
    for _ in range(20):
        out, counts = step.run()
        assert torch.equal(out.cpu(), want)
        assert torch.equal(counts.cpu(), want_counts)


def test_a_graph_follows_its_inputs() -> None:
    step, other = Step(64, 2051, 0), Step(64, 2051, 1)
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for name in ("table", "token_rows", "logical"):
        getattr(step, name).copy_(getattr(other, name))
    graph.replay()
    want, want_counts = other.want()
    assert torch.equal(step.out.cpu(), want)
    assert torch.equal(step.counts.cpu(), want_counts)
