"""``sidestream doctor`` as a user calls it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sidestream.cli.doctor import table
from sidestream.cli.main import app
from sidestream.engine.doctor import diagnose as diagnosis
from sidestream.engine.doctor.diagnose import diagnose
from sidestream.engine.doctor.report import DeviceChoice, Finding, Report, Row, Status


def run(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sidestream.cli.main", *args]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result


def lines_of(report: Report) -> list[tuple[str, ...]]:
    """Cells of the table's body as they are printed."""
    out = io.StringIO()
    Console(file=out, width=1000).print(table(report))
    return [
        tuple(cell.strip() for cell in line.split("│")[1:-1])
        for line in out.getvalue().splitlines()
        if line.startswith("│")
    ]


def lines_from_json(report: Any) -> list[tuple[str, str, str]]:
    """The same cells, from the JSON alone."""
    lines = []
    for section, rows in report["sections"].items():
        lines.append((section, "", ""))
        for name, row in rows.items():
            label = name.replace("_", " ") + (" (simulated)" if row["simulated"] else "")
            value = row["status"] if row["value"] is None else str(row["value"])
            figures = ", ".join(f"{figure} {number}" for figure, number in row["detail"].items())
            why = "; ".join(text for text in (row["reason"], figures) if text)
            lines.append((label, f"{value} {row['unit'] or ''}".strip(), why))
    return lines


def test_table_and_json_say_the_same() -> None:
    report = diagnose(DeviceChoice.CPU)
    assert lines_of(report) == lines_from_json(json.loads(json.dumps(report.as_json())))


def test_table_and_json_say_the_same_of_unusual_rows() -> None:
    rows = (
        Row("costs", "a_break", Finding(3.25, "measured", "us", detail={"wall_us": 900.0, "segments": 45})),
        Row("costs", "a_copy", Finding(None, "RuntimeError: [bold]no[/bold] memory", status=Status.FAILED), True),
        Row("engine", "graphs", Finding("none", status=Status.OK)),
    )
    report = Report("cuda", True, rows)
    lines = lines_of(report)
    assert lines == lines_from_json(json.loads(json.dumps(report.as_json())))
    assert ("a break", "3.25 us", "measured; wall_us 900.0, segments 45") in lines
    assert ("a copy (simulated)", "failed", "RuntimeError: [bold]no[/bold] memory") in lines


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_json_on_the_command_line(device: str) -> None:
    result = run("doctor", "--device", device, "--json")
    report = json.loads(result.stdout)
    assert (report["device"], report["usable"]) == (device, True)
    assert report["sections"]["events"]["internal_event_across_capture"]["value"] == "refused"
    assert report["sections"]["engine"]["graph_mode"]["value"] == "none"
    assert report["sections"]["device"]["works"]["simulated"] == (device == "sim")
    assert result.stderr == ""


def test_the_table_on_the_command_line() -> None:
    text = run("doctor", "--device", "cpu").stdout
    for word in ("machine", "python", "events", "refused", "(simulated)", "costs", "needs a GPU", "memory budget"):
        assert word in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu() -> None:
    assert json.loads(run("doctor", "--json").stdout)["device"] == "cpu"
    report = json.loads(run("doctor", "--device", "cuda", "--json", code=1).stdout)
    assert (report["device"], report["usable"]) == ("cuda", False)
    assert "torch sees no CUDA device" in report["sections"]["engine"]["dtype"]["reason"]
    assert report["sections"]["machine"]["python"]["status"] == "ok"
    assert "failed" in run("doctor", "--device", "cuda", code=1).stdout


def test_a_failed_probe_alone_is_no_failed_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise OSError("no such thing")

    monkeypatch.setattr(diagnosis.bandwidth, "host_copy", broken)
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)["sections"]["costs"]["host_memory_copy"]
    assert (found["status"], found["reason"]) == ("failed", "OSError: no such thing")


def test_an_unknown_device_is_refused() -> None:
    assert "'tpu' is not one of" in " ".join(run("doctor", "--device", "tpu", code=2).stderr.split())


def test_help_teaches() -> None:
    text = " ".join(run("doctor", "--help").stdout.split())
    for word in ("--device", "--json", "Examples", "exit code is 1"):
        assert word in text
    assert "doctor" in run("--help").stdout


def test_the_command_line_loads_no_torch() -> None:
    code = "import sys, sidestream.cli.main; assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
