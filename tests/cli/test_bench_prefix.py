"""``sidestream bench shared-prefix`` and ``multi-turn`` as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sidestream.engine.bench.comparison import compare
from sidestream.engine.bench.prefix import p99_of

COMMON = ("--device", "cpu", "--seed", "3", "--answer", "4", "--concurrency", "2", "--max-num-batched-tokens", "256")


def test_p99_needs_samples() -> None:
    assert p99_of([float(i) for i in range(99)]) is None
    assert p99_of([float(i) for i in reversed(range(101))]) == 99.0


@pytest.mark.parametrize(
    ("workload", "options", "requests", "prompt_tokens", "cached"),
    [
        # the second comes with the first and waits for it, so do those behind them
        ("shared-prefix", ("--requests", "4", "--shared", "128", "--tail", "70"), 4, 4 * 198, 3 * 128),
        # 128 tokens of the system prompt once, then of 140, 154: 128 each in both
        ("multi-turn", ("--chats", "2", "--turns", "3", "--system", "130", "--message", "10"), 6, 2 * 462, 5 * 128),
    ],
)
def test_both_ways_are_measured(
    tmp_path: Path, workload: str, options: tuple[str, ...], requests: int, prompt_tokens: int, cached: int
) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "sidestream.cli.main", "bench", workload, *options, *COMMON, "--json", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "cache off" in result.stdout
    assert "cache on" in result.stdout
    found = json.loads(out.read_text())
    assert found["kind"] == workload
    assert found["command"].startswith(f"sidestream bench {workload} ")
    off, on = found["rows"]
    for row in (off, on):
        assert (row["requests"], row["prompt_tokens"]) == (requests, prompt_tokens)
        assert 0 < row["first_token_ms"] <= row["first_token_p90_ms"]
        assert row["first_token_mean_ms"] > 0
        assert row["first_token_p99_ms"] is None, "so few requests have none"
    assert found["workload"]["dataset"] == "random-ids"
    assert found["workload"]["seed"] == 3
    assert (off["cache"], off["cached_tokens"]) == (False, 0)
    assert (on["cache"], on["cached_tokens"]) == (True, cached)
    ratios = compare(found, found).ratios
    assert [row.slower for row in ratios] == [1.0] * 8
