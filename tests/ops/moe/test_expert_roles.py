"""Products of the experts by warps with roles, as far as there is no GPU: what they compile to, and who takes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.ops.moe import device_impl, triton_grouped
from sidestream.ops.moe.triton_tiles import MANY_ROWS, ROLES, ExpertTiles, expert_tiles

ROOT = Path(__file__).parents[3]
SHARED = 227 << 10
"""Bytes that a program can have on compute capability 9.0."""


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """Both products with a limit and without, for a hidden size of 4,096 and an inner size of 2,048."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.ops.moe.compiled_roles"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_nothing_spills_and_all_is_copied_in_lines(compiled: list[dict[str, Any]]) -> None:
    """Feeding threads have 56 registers; of the 224 of others 128 hold results. Each of the two groups waits once a
    depth, with none of its four products open behind that."""
    assert len(compiled) == 4
    for one in compiled:
        counts, gated = one["code"]["counts"], "gated=True" in one["constants"]
        assert not any(one["code"]["spilled"]), one["constants"]
        assert one["shared"] <= SHARED, one["constants"]
        assert one["warps"] == 12, one["constants"]
        assert counts["wgmma"] == [2 * 4] * 2, one["constants"]
        assert one["waits"] == ["0"] * 2, one["constants"]
        assert counts["bulk copy"][0] == (2 if gated else 4), one["constants"]
        assert counts.get("LDGSTS.128", [0])[0] == (8 if gated else 0), one["constants"]
        assert not {"LDGSTS.32", "LDGSTS.64", "STG.16", "STG.32"} & set(counts), counts


def test_who_takes_them_follows_from_sizes_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [expert_tiles(tokens, 8, 64) is MANY_ROWS for tokens in (1, 4800, 4801, 8192)] == [False] * 2 + [True] * 2
    assert expert_tiles(8192, 8, 288) is not MANY_ROWS

    def suits(hidden: int, inner: int, *, stride: int = 512) -> bool:
        x = torch.empty(8192, stride, device="meta")[:, :hidden]
        return device_impl._suits_roles(x, torch.empty(1, hidden, inner))

    monkeypatch.setattr(device_impl, "_is_hopper", lambda device: True)
    assert suits(512, 256)
    assert suits(256, 128)
    assert not suits(384, 256)
    assert not suits(512, 192)
    assert not suits(512, 256, stride=1 << 18)  # 2 ** 31 elements from the first row to behind the last
    monkeypatch.setattr(device_impl, "_is_hopper", lambda device: False)
    assert not suits(512, 256)


def test_a_prompt_goes_to_them_in_blocks_of_128_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """301 tokens with 2 of 1 expert and of 2: 602 rows an expert, and 301."""
    seen: list[ExpertTiles] = []

    def run(x: torch.Tensor, *args: Any, tiles: ExpertTiles, **named: Any) -> torch.Tensor:
        seen.append(tiles)
        return x

    monkeypatch.setattr(device_impl, "_is_hopper", lambda device: True)
    monkeypatch.setattr(device_impl, "_suits_triton", lambda x, w13, w2: True)
    monkeypatch.setattr(triton_grouped, "experts", run)
    x, ids, weights = torch.empty(301, 256), torch.zeros(301, 2, dtype=torch.int64), torch.ones(301, 2)
    chosen: dict[str, Any] = {"weights": weights, "ids": ids, "num_shared": 1, "swiglu_limit": None}
    for num_experts in (1, 2):
        w13, w2 = torch.empty(num_experts + 1, 512, 256), torch.empty(num_experts + 1, 256, 256)
        device_impl.grouped_where_possible(x, w13, w2, **chosen)
    assert seen[0] is ROLES
    assert ROLES.rows == 128
    assert not seen[1].roles
