"""The benchmark of whole engines: what is wrong with its arguments comes first, and what it had stays."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import decode_gpu
from sidestream.engine.bench.run import LatencySettings

CONFIG = Path(__file__).parents[1] / "sidestream" / "assets" / "glm5-next-tiny" / "config.json"
SMALL = ["--device", "cpu", "--mode", "none", "--dtype", "float32", "--memory-limit", "4GiB", "--steps", "2"]
SMALL += ["--config", str(CONFIG), "--repeats", "1", "--max-num-batched-tokens", "64"]


def test_a_case_that_fails_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "out.json", []
    real = decode_gpu.measure

    def measure(built: Any, settings: LatencySettings, **named: Any) -> Any:
        seen.append(json.loads(path.read_text()))
        if settings.cases == ((2, 30),):
            raise RuntimeError("out of memory")
        return real(built, settings, **named)

    monkeypatch.setattr(decode_gpu, "measure", measure)
    cases = ["--case", "1", "20", "--case", "2", "30", "--case", "2", "40", "--prefill", "30"]
    monkeypatch.setattr(sys, "argv", ["decode_gpu.py", *SMALL, *cases, "--json", str(path)])
    assert decode_gpu.main() == 1
    found = json.loads(path.read_text())
    assert [(row["batch"], row["context"]) for row in found["decode"]] == [(1, 20), (2, 40)]
    assert [row["tokens"] for row in found["prefill"]] == [30]
    assert all("power" in row for row in (*found["decode"], *found["prefill"]))
    assert "out of memory" in found["failed"][0]["error"]
    assert [len(kept["decode"]) for kept in seen] == [0, 1, 1, 2], "the file is written after each case"
    assert all(kept["startup_s"] and kept["ledger"] for kept in seen)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--config", "/no/such.json"], "there is no file /no/such.json"),
        (["--case", "0", "5"], "batch must be a positive integer, got 0"),
        (["--steps", "0"], "steps must be a positive integer, got 0"),
        (["--mode", "fast"], "fast"),
    ],
)
def test_wrong_arguments_are_said_before_an_engine_is_built(
    given: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        decode_gpu.arguments_of(given)
    assert ended.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_without_cases_those_of_slice_a_are_measured() -> None:
    assert tuple(map(tuple, decode_gpu.arguments_of([]).case)) == tuple(decode_gpu.CASES)
    assert decode_gpu.arguments_of(["--prefill", "8"]).case == []
