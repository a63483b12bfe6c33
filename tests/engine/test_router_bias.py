"""A bf16 engine keeps the router's bias as the checkpoint has it: rounded to bf16, 7 and 7.007 are one number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.layers import mlp
from tests.engine.harness import Harness, one_shot, random_sequences
from tests.tiny_models import ARCHITECTURES, build_oracle, save_checkpoint


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_experts_are_chosen_by_the_bias_of_the_checkpoint(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {"n_group": 1, "topk_group": 1} if architecture == "deepseek_v32" else {}
    oracle = build_oracle(architecture, 3, **groups)
    with torch.no_grad():
        for name, tensor in oracle.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(7 + torch.arange(len(tensor)) * 1e-3)
            elif name.endswith("mlp.gate.weight"):
                tensor.zero_()  # all scores are equal: the bias alone decides
    save_checkpoint(oracle, tmp_path)
    chosen: list[torch.Tensor] = []
    real = mlp.route

    def route(*arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = real(*arguments, **named)
        chosen.append(ids)
        return weights, ids

    monkeypatch.setattr(mlp, "route", route)
    Harness(tmp_path, dtype="bfloat16").run(random_sequences((40, 3), vocab=136, seed=1), one_shot((40, 3)))
    assert chosen
    for ids in chosen:
        assert ids.tolist() == [[7, 6]] * len(ids)
