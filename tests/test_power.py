"""What is said of power and clock, from ``nvidia-smi``'s own lines and from a program in its place."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import power

LINES = [
    "1980, 648.81, 700.00, 52, 0x0000000000000000\n",
    "1635, 690.60, 700.00, 52, 0x0000000000000004\n",
    "1965, 696.08, 700.00, 53, 0x0000000000000006\n",
    "[N/A], 12.0, 700.00, 53, 0x0\n",
    "1980, 64",
]


def test_lines_with_all_numbers_count() -> None:
    found = power.summary(LINES)
    assert found == {
        "samples": 3,
        "sm_mhz": [1635, 1965, 1980],
        "watts": [690.60, 696.08],
        "limit_watts": 700,
        "celsius": 53,
        "held_by_power": 0.667,
    }
    said = power.described(found)
    assert said == "691 W, at most 696 of 700; 1965 MHz, at least 1635; held down by power in 67% of 3 samples"
    assert power.described(power.summary(["No devices were found"])) == "power and clock are not known"


def test_a_program_is_asked_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "smi.py"
    script.write_text(f"print({LINES[1]!r}, end='')")
    monkeypatch.setattr(power, "PROGRAM", (sys.executable, str(script)))
    monkeypatch.setattr(power, "PERIOD_S", 0.01)
    asked, run = [], power.subprocess.run

    def counted(*args: Any, **how: Any) -> Any:
        asked.append(args)
        return run(*args, **how)

    monkeypatch.setattr(power.subprocess, "run", counted)
    with power.watched() as found:
        assert found == {}
        while len(asked) < 3:
            time.sleep(0.01)
    assert found["samples"] == len(asked)
    assert found["held_by_power"] == 1


def test_without_the_program_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "PROGRAM", ("no-such-program",))
    monkeypatch.setattr(power, "PERIOD_S", 0.01)
    with power.watched() as found:
        time.sleep(0.05)
    assert found == {}
