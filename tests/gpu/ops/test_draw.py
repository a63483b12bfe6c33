"""Drawn tokens on a GPU at the sizes of real vocabularies: torch's tokens, in a graph too."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.draw import draw_tokens, torch_impl

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "vocab"), [(1, 32768), (64, 32768), (7, 154_880), (300, 5000)])
def test_tokens_are_torchs(rows: int, vocab: int) -> None:
    """Whose sums are other by fp64 rounding: 1e-13 of a token's weight at most, which no draw meets."""
    torch.manual_seed(rows)
    for _ in range(5):
        logits = torch.randn(rows, vocab, device="cuda") * 4
        settings = torch.rand(2, rows, dtype=torch.float64, device="cuda")
        settings[0, ::3] = 0.0
        for given in (settings, None):
            tokens, peaks = draw_tokens(logits, given)
            want, want_peaks = torch_impl.draw_tokens(logits, given)
            assert torch.equal(tokens, want)
            assert torch.equal(peaks, want_peaks)


def test_a_token_depends_on_its_row_alone_and_replays() -> None:
    torch.manual_seed(1)
    logits = torch.randn(64, 32768, device="cuda") * 4
    settings = torch.rand(2, 64, dtype=torch.float64, device="cuda") + 0.01
    want, _ = draw_tokens(logits, settings)
    alone = [int(draw_tokens(logits[i : i + 1], settings[:, i : i + 1])[0]) for i in range(64)]
    assert want.tolist() == alone
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = draw_tokens(logits, settings)
    for _ in range(10):
        logits.normal_().mul_(4)
        want, _ = draw_tokens(logits, settings)
        tokens.fill_(-7)
        graph.replay()
        assert torch.equal(tokens, want)
