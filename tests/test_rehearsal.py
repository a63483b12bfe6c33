"""What a start compiles, counted without a GPU: all that a load needs, nothing twice, and under Triton's own names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "sidestream" / "assets" / "glm5-next-tiny" / "config.json"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the bundled model with graphs, and 60 steps of service behind it. It selects as many rows as published models,
    so that contexts of some length are selected from as theirs are."""
    config = json.loads(CONFIG.read_text())
    config["text_config"]["index_topk"] = 2048
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(config))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.rehearsed_start", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_load_compiles_nothing_that_the_start_did_not(start: dict[str, Any]) -> None:
    assert start["late"] == []
    assert start["stages"]["captures"] > 30
    assert start["counts"]["_copy_slot"] == 1  # which a prefix that is shared needs, and no step


def test_steps_of_every_kind_are_needed(start: dict[str, Any]) -> None:
    """Captures and the largest steps do not meet all kernels, so the test above could fail."""
    assert start["stages"]["largest steps"] > 0
    assert start["stages"]["steps of every kind"] > 0


def test_what_is_compiled_ahead_is_what_a_launch_looks_for(start: dict[str, Any]) -> None:
    assert start["unlike"] == []


def test_nothing_is_compiled_again_for_how_pointers_lie_or_whether_rows_are_padding(start: dict[str, Any]) -> None:
    """Each of these took seconds a time."""
    most = {"_select_kernel": 4, "_pick_kernel": 1, "_choose": 3, "_map_kernel": 1, "_finish": 4, "attend": 3}
    for name, count in most.items():
        assert start["counts"].get(name, 0) <= count, name
    assert sum(start["counts"].values()) <= 77


def test_the_pretence_asks_no_real_device() -> None:
    """Torch's fake tensors allocate on the device that they stand for where torch says that it is there, which it does
    on a GPU machine, whose devices a rehearsal does not see."""
    code = """
from unittest import mock
import torch
from benchmarks.rehearsal import DEVICE, pretended_device
said = mock.patch.object(torch.cuda, "is_available", return_value=True)
with said, mock.patch.object(torch.accelerator, "current_accelerator", return_value="cuda"), pretended_device():
    print(torch.zeros(3, device=DEVICE).device)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "cuda:0\n"), done.stderr[-2000:]
