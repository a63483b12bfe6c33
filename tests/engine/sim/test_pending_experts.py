"""Experts' sums that hyper-connections make on the way: the same bits as sums of their own, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.layers import mlp
from sidestream.ops.moe import ExpertSum, settled, swiglu
from tests.engine.harness import Part, random_sequences
from tests.engine.sim.harness import VOCAB, SimHarness, captured_sizes, decodes, make_model


def unsummed(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_shared: int,
    swiglu_limit: float | None,
) -> ExpertSum:
    """As Triton leaves it on a GPU, every row through every expert; what nobody chose is no number."""
    num_experts = w13.shape[0] - num_shared
    results = torch.stack(
        [swiglu(x @ one.T, limit=swiglu_limit) @ other.T for one, other in zip(w13.unbind(), w2.unbind(), strict=True)]
    )
    index = ids.clamp_min(0).unsqueeze(2).expand(-1, -1, x.shape[1])
    chosen = results[:num_experts].transpose(0, 1).gather(1, index)
    chosen = chosen.masked_fill((ids < 0).unsqueeze(2), torch.nan)
    partial = torch.cat([chosen.reshape(-1, x.shape[1]), results[num_experts:].reshape(-1, x.shape[1])])
    return ExpertSum(partial, weights.contiguous(), ids.contiguous(), num_shared, x.dtype)


@pytest.mark.parametrize("setting", ["none", "piecewise", "full"])
def test_sums_on_the_way_are_those_apart(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts and decodes, with padding rows, which have no expert where graphs cover them and no sum elsewhere."""
    make_model("glm5_next", tmp_path)
    left: list[ExpertSum] = []

    def run(apart: bool) -> list[torch.Tensor]:
        def experts(x: torch.Tensor, *parts: torch.Tensor, **named: Any) -> torch.Tensor | ExpertSum:
            pending = unsummed(x, *parts, **named)
            left.append(pending)
            return settled(pending) if apart else pending

        monkeypatch.setattr(mlp, "unsummed_experts", experts)
        with captured_sizes(4):
            harness = SimHarness(tmp_path, setting, max_num_seqs=4, max_num_batched_tokens=8, max_capture_tokens=8)
        steps = [[Part(0, 4)], [*decodes(0), Part(1, 2)], decodes(0, 1), decodes(0, 1)]
        return harness.run(random_sequences((7, 5), vocab=VOCAB, seed=8), steps)

    for got, want in zip(run(False), run(True), strict=True):
        assert torch.isfinite(got).all()
        assert torch.equal(got, want)
    assert left


def test_nothing_is_left_pending_where_no_streams_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("kimi_linear", tmp_path)
    monkeypatch.setattr(mlp, "unsummed_experts", None)
    with captured_sizes(4):
        harness = SimHarness(tmp_path, "full", max_num_seqs=4, max_num_batched_tokens=8, max_capture_tokens=8)
    harness.run(random_sequences((5,), vocab=VOCAB, seed=8), [[Part(0, 4)], decodes(0)])
