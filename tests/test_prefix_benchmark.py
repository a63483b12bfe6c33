"""``benchmarks/prefix_gpu.py`` on a CPU: every case gives figures, and what was measured survives what was not."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prefix_gpu
from sidestream.engine import build
from sidestream.engine.bundled import bundled_model

SMALL = (
    *("--device", "cpu", "--config", str(bundled_model() / "config.json"), "--prompt", "300", "--shared", "256"),
    *("--budget", "150", "--crowd", "2", "--crowd-prompt", "70", "--repeats", "2"),
    *("--seconds", "1000000"),  # counted from the start of the process, which here is that of all tests
)


def run(patch: pytest.MonkeyPatch, *arguments: str) -> None:
    patch.setattr(sys, "argv", ["prefix_gpu.py", *SMALL, *arguments])
    prefix_gpu.main()


def test_every_case_gives_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, before = tmp_path / "prefix.json", build.compile_steps
    run(monkeypatch, "--json", str(path))
    found = json.loads(path.read_text())
    first = found["first-token"]
    assert first["cached_tokens"] == {"nothing shared": 0, "first to share": 256, "later": 256}
    assert {kind: len(times) for kind, times in first["all"].items()} == dict.fromkeys(first["cached_tokens"], 2)
    assert first["shorter"]["nothing shared"] == 1.0
    assert first["snapshots"]["taken in a turn"] > 0
    assert first["snapshots"]["restored in all"] == 6
    assert found["copies"]["1 slot"]["bytes"] == found["snapshot_bytes"]
    assert found["copies"]["8 slots"]["bytes"] == 8 * found["snapshot_bytes"]
    for case, turns in (("alone", 4), ("nothing-shared", 2)):
        assert [len(times) for times in found[case]["all"].values()] == [turns, turns]
        assert found[case]["on over off"] > 0.0
    for name in ("on", "off"):
        ends = [found["alone"][f"median us {phase}"][name] for phase in prefix_gpu.PHASES]
        assert 0.0 < ends[0] < ends[1] < ends[2] < ends[3]
    assert min(found["alone"]["us of operators a turn"].values()) > 0.0
    assert len(found["alone"]["us more, of those that differ most"]) == 8
    assert set(prefix_gpu.CASES) <= set(found)
    assert build.compile_steps is before


def test_what_was_measured_survives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prefix.json"

    def fails(run: Any, built: Any, args: Namespace, case: dict[str, Any]) -> None:
        case["half"] = 1
        run.write()
        raise RuntimeError("the device is gone")

    monkeypatch.setitem(prefix_gpu.CASES, "alone", fails)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(monkeypatch, "--json", str(path), "--case", "copies", "--case", "alone", "--case", "nothing-shared")
    found = json.loads(path.read_text())
    assert found["copies"]["1 slot"]["us"] > 0
    assert found["alone"] == {"half": 1}
    assert "nothing-shared" not in found
    assert list(tmp_path.iterdir()) == [path]


def test_no_case_is_begun_when_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prefix.json"
    run(monkeypatch, "--json", str(path), "--seconds", "0")
    found = json.loads(path.read_text())
    assert {found[name] for name in prefix_gpu.CASES} == {"not begun: the time was up"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shared", "300"), "--shared is 300; it must be above 0 and below --prompt 300"),
        (("--config", "nowhere.json"), "--config nowhere.json is no file"),
        (("--json", "nowhere/prefix.json"), "there is no folder nowhere"),
        (("--repeats", "0"), "must be at least 1"),
        (("--case", "all"), "invalid choice"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_loaded(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prefix_gpu, "open_engine", None)
    with pytest.raises(SystemExit):
        run(monkeypatch, *arguments)
    assert message in capsys.readouterr().err
