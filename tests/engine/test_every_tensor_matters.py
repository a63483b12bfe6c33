"""No tensor of a checkpoint is decoration: neutralising any single one must break parity with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sidestream.engine import build
from sidestream.weights import LoadReport, Shard, WeightSource
from tests.engine.harness import Harness, one_shot, oracle_logprobs, random_sequences
from tests.tiny_models import VARIANTS, build_oracle, save_checkpoint
from tests.tolerances import PARITY_LOGPROB

LENGTHS = (90, 50)
EXPERTS_PER_TOKEN = 4  # of 8, so that every expert is chosen by some token


class RecordingSource:
    """Remembers where each tensor went, so that it can be overwritten in place; neutralises those in ``dropped``."""

    def __init__(self, source: WeightSource, views: dict[str, torch.Tensor], dropped: set[str]) -> None:
        self.source, self.views, self.dropped = source, views, dropped

    def load(self, name: str, out: torch.Tensor, *, shard: Shard | None = None) -> None:
        self.source.load(name, out, shard=shard)
        self.views[name] = out
        if name in self.dropped:
            out.copy_(neutral(name, out))

    def finish(self) -> LoadReport:
        return self.source.finish()


def neutral(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What a default initialisation would hold: ones for norms and scales, zeros elsewhere."""
    ones = ("norm" in name and not name.endswith("bias")) or name.endswith("_scale")
    return torch.ones_like(tensor) if ones else torch.zeros_like(tensor)


@pytest.mark.parametrize("variant", ["next", "next_share", "dsa", "dsa_yarn_bias", "deepseek", "kimi", "kimi_q_lora"])
def test_dropping_any_tensor_breaks_parity(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, overrides = VARIANTS[variant]
    oracle = build_oracle(architecture, 8, **overrides, num_experts_per_tok=EXPERTS_PER_TOKEN)
    folder = save_checkpoint(oracle, tmp_path)
    sequences = random_sequences(LENGTHS, vocab=136, seed=1)
    expected = [oracle_logprobs(oracle, sequence) for sequence in sequences]
    views: dict[str, torch.Tensor] = {}
    dropped: set[str] = set()
    real = build.open_weights
    monkeypatch.setattr(build, "open_weights", lambda *a, **k: RecordingSource(real(*a, **k), views, dropped))
    harness = Harness(folder)

    def error(harness: Harness) -> float:
        got = harness.run(sequences, one_shot(LENGTHS))
        worst = max((a - b).abs().max().nan_to_num(float("inf")) for a, b in zip(got, expected, strict=True))
        return float(worst)

    assert error(harness) < PARITY_LOGPROB
    silent = {}
    for name, view in list(views.items()):
        kept = view.clone()
        with torch.inference_mode():
            view.copy_(neutral(name, kept))
            if (found := error(harness)) < PARITY_LOGPROB:
                silent[name] = found
            view.copy_(kept)
    assert error(harness) < PARITY_LOGPROB
    for name in list(silent):  # a tensor that loading multiplies into another shows only when it is loaded neutral
        dropped.add(name)
        if error(Harness(folder)) >= PARITY_LOGPROB:
            del silent[name]
        dropped.clear()
    assert not silent, f"{len(silent)} of {len(views)} tensors could be dropped unseen: {silent}"
