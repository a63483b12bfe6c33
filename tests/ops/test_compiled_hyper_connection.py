"""Kernels of hyper-connections compile for a GPU at every width that they take: no GPU is needed to see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """Name, size, and how many instructions of either kind round to bf16, of every compilation."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.ops.compiled_hyper_connection"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels: list[dict[str, Any]] = json.loads(done.stdout)
    return kernels


def test_a_lone_number_is_rounded_by_itself(compiled: list[dict[str, Any]]) -> None:
    """A compiler refuses to take the elements of a tile in pairs if there is one."""
    found = [(kernel["pairs"], kernel["singles"]) for kernel in compiled if kernel["name"] == "narrow"]
    assert found == [(0, 1), (1, 0), (1, 0)]


def test_the_narrowest_streams_have_kernels(compiled: list[dict[str, Any]]) -> None:
    """A model of 64 columns has one in each of the 64 shares of a single token, which did not compile."""
    by_size: dict[str, set[str]] = {}
    for kernel in compiled:
        by_size.setdefault(kernel["size"], set()).add(kernel["name"])
    assert "_mix_and_multiply" in by_size["1 64"] & by_size["1 128"]
    assert "_mix" in by_size["3 64"]
    assert "_mix_and_multiply_rows" in by_size["3 512"]


def test_numbers_of_a_real_model_are_rounded_in_pairs(compiled: list[dict[str, Any]]) -> None:
    found = {kernel["name"]: (kernel["pairs"], kernel["singles"]) for kernel in compiled if kernel["size"] == "1 4096"}
    assert set(found) == {"_mix_and_multiply", "_products", "_finish"}
    assert all(singles == 0 for _, singles in found.values())
    assert found["_mix_and_multiply"][0] > 0
    assert found["_finish"][0] > 0


def test_sums_of_experts_fit_beside_what_reads_them(compiled: list[dict[str, Any]]) -> None:
    found = {
        (kernel["size"], kernel["name"]): kernel["spilled"] for kernel in compiled if kernel["spilled"] is not None
    }
    assert found == {
        ("sums of 2", "_sum"): [0, 0],  # one for all numbers of tokens
        ("sums of 2", "_mix_and_multiply"): [0, 0],
        ("sums of 8", "_mix_and_multiply_rows"): [0, 0],
        ("sums of 64", "_mix"): [0, 0],
    }
