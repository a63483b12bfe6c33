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

from sidestream.ops.moe import device_impl, triton_tiles
from sidestream.ops.moe.triton_tiles import MANY_ROWS, Roles, expert_roles

ROOT = Path(__file__).parents[3]
SHARED = 227 << 10
"""Bytes that a program can have on compute capability 9.0."""


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """Both products of every way, for a hidden size of 4,096 and an inner size of 2,048."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.ops.moe.compiled_roles"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_nothing_spills_and_all_is_copied_in_lines(compiled: list[dict[str, Any]]) -> None:
    """Three groups have 160 registers a thread, 128 of which hold results."""
    assert len(compiled) == 6  # the second product does not depend on who gathers
    for one in compiled:
        counts = one["code"]["counts"]
        groups = 3 if "groups=3" in one["constants"] else 2
        assert not any(one["code"]["spilled"]), one["constants"]
        assert one["shared"] <= SHARED, one["constants"]
        assert one["warps"] == 4 * groups + 4, one["constants"]
        assert counts["wgmma"][0] == {2: 2 * 4, 3: 3 * 8}[groups], one["constants"]
        assert counts["bulk copy"][0] == (2 if "gathered=True" in one["constants"] else groups + 2), one["constants"]
        assert counts.get("LDGSTS.128", [0])[0] == (4 * groups if "gathered=True" in one["constants"] else 0)
        assert not {"LDGSTS.32", "LDGSTS.64", "STG.16", "STG.32"} & set(counts), counts


def test_who_takes_them_follows_from_sizes_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_tiles, "ROLES", ((100, Roles(2, 4)), (400, Roles(3, 3))))
    assert [expert_roles(tokens, 8, 64) for tokens in (64, 792, 793, 3192, 3193, 8192)] == [
        None,
        None,
        Roles(2, 4),
        Roles(2, 4),
        Roles(3, 3),
        Roles(3, 3),
    ]
    assert MANY_ROWS.with_roles(Roles(3, 3)).rows == 192
    monkeypatch.setattr(device_impl, "_is_hopper", lambda device: True)
    fits = [device_impl._suits_roles(torch.empty(1, *sizes)) for sizes in ((512, 128), (384, 128), (512, 192))]
    assert fits == [True, False, False]
    monkeypatch.setattr(device_impl, "_is_hopper", lambda device: False)
    assert not device_impl._suits_roles(torch.empty(1, 512, 128))
