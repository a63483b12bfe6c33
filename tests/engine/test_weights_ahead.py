"""Weights that layers ask for ahead: each is multiplied after it was asked for, and none is asked for in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.layers import mla, mlp, weight_format
from tests.engine.harness import Harness, Part
from tests.tiny_models import build_oracle, save_checkpoint

Event = tuple[str, int, int]
"""("asked" or "used", where a weight's memory begins, its bytes)."""


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    found: list[Event] = []

    def event(kind: str, weight: torch.Tensor) -> None:
        found.append((kind, weight.data_ptr(), weight.numel() * weight.element_size()))

    def note(module: Any, name: str) -> None:
        """Calls of a product, whose second argument is a weight."""
        real = getattr(module, name)

        def call(x: torch.Tensor, weight: torch.Tensor, *others: Any, **named: Any) -> Any:
            event("used", weight)
            return real(x, weight, *others, **named)

        monkeypatch.setattr(module, name, call)

    for module in (weight_format, mlp, mla):
        monkeypatch.setattr(module, "fetch_ahead", lambda weight, rows: event("asked", weight))
    note(weight_format, "linear")
    note(mlp, "experts")
    note(mla, "by_head")
    return found


@pytest.mark.parametrize("architecture", ["glm5_next", "deepseek_v32", "kimi_linear"])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_asked_for_is_soon_multiplied(
    architecture: str, rows: int, events: list[Event], tmp_path: Path
) -> None:
    save_checkpoint(build_oracle(architecture, 1), tmp_path)
    harness = Harness(tmp_path)
    prompts = [[Part(i, 4) for i in range(rows)], [Part(i, 1, is_decode=True) for i in range(rows)]]
    events.clear()
    harness.run([[5, 6, 7, 8, 9]] * rows, prompts)
    asked = [(at, weight) for at, (kind, weight, _) in enumerate(events) if kind == "asked"]
    assert len(asked) >= 2 * 2 * harness.built.config.model.num_layers
    for at, weight in asked:
        following = [(begin, begin + size) for kind, begin, size in events[at:] if kind == "used"][:3]
        assert any(begin <= weight < end for begin, end in following), f"event {at} of {len(events)}: in vain"
