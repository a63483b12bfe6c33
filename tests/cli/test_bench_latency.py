"""``sidestream bench latency`` as a user calls it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sidestream.engine.bench.comparison import compare
from sidestream.engine.llm import bundled_model

SMALL = ("--device", "cpu", "--steps", "3", "--repeats", "2")


def run(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sidestream.cli.main", "bench", "latency", *args]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Of the bundled checkpoint's config alone, and what was printed."""
    folder = tmp_path_factory.mktemp("bench")
    config = shutil.copy(bundled_model() / "config.json", folder / "alone.json")
    out = folder / "report.json"
    cases = ("--batch", "1", "--batch", "3", "--context", "40", "--context", "100", "--prefill", "96")
    return out, run(str(config), *cases, *SMALL, "--ledger", "--json", str(out)).stdout


def test_a_config_alone_is_measured(report: tuple[Path, str]) -> None:
    path, text = report
    found = json.loads(path.read_text())
    assert [(row["batch"], row["context"]) for row in found["decode"]] == [(1, 40), (1, 100), (3, 40), (3, 100)]
    for row in found["decode"]:
        assert row["floor"] > 0
        assert 0 < row["median"] <= row["p90"]
        assert len(row["medians"]) == 2
        assert row["to_floor"] == pytest.approx(row["median"] / row["floor"])
        assert f"batch {row['batch']:3} context {row['context']:6}" in text
    (prefill,) = found["prefill"]
    assert prefill["tokens"] == 96
    assert prefill["tokens_per_s"] > 0
    assert found["startup_s"].keys() >= {"imports", "config", "weights"}
    assert found["compiled_after_ready"] == []
    assert found["ledger"]["parts"]["weights"]["measured"] > 0
    assert "memory_limit" in text
    assert found["kind"] == "latency"
    assert found["command"].startswith("sidestream bench latency ")
    assert found["versions"].keys() == {"sidestream", "torch", "python"}


def test_a_report_is_compared_with_itself(report: tuple[Path, str]) -> None:
    found = json.loads(report[0].read_text())
    ratios = {row.name: row for row in compare(found, found).ratios}
    assert len(ratios) == 9, "medians and means of four decodes, one prefill"
    assert ratios["batch 3, context 100"].first == found["decode"][3]["median"]
    assert ratios["prefill of 96"].second == found["prefill"][0]["tokens_per_s"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--batch", "0"), "batch must be a positive integer, got 0"),
        (("--steps", "-1"), "steps must be a positive integer, got -1"),
        (("--context", "1000000"), "max_position_embeddings"),
        (("--json", "no/such/folder/a.json"), "cannot write the report no/such/folder/a.json"),
    ],
)
def test_mistakes_are_named(args: tuple[str, ...], message: str) -> None:
    assert message in run(*args, "--device", "cpu", code=2).stderr
