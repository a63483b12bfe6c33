"""Starts that are rehearsed are those that a plan's jobs will make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import decode_gpu, precompile
from benchmarks.batch import read_plan
from benchmarks.precompile import SCRIPT, starts_of
from sidestream.config.engine import EngineConfig
from sidestream.engine.bench import run

PLAN = Path(__file__).parents[1] / "benchmarks" / "plans" / "whole-engine.json"


class BuiltError(Exception):
    """An engine was about to be built."""


def built_with(given: list[str], monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """The settings with which ``decode_gpu.py`` would build its engine."""
    seen: list[EngineConfig] = []

    def build(folder: Any, user: EngineConfig) -> None:
        seen.append(user)
        raise BuiltError

    monkeypatch.setattr(run, "build_engine", build)
    args = decode_gpu.arguments_of(given)
    with pytest.raises(BuiltError):
        run.open_engine(args.config, decode_gpu.engine_of(args), decode_gpu.settings_of(args))
    return seen[0]


def test_a_start_is_rehearsed_with_the_settings_that_it_will_have(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = {
        (start.config, start.user.cudagraph_mode, start.user.kv_cache_dtype): start for start in starts_of([PLAN])
    }
    jobs = [job for job in read_plan(PLAN) if SCRIPT in job.command]
    assert len(jobs) > 7
    for job in jobs:
        given = [part.replace("{out}", ".") for part in job.command[job.command.index(SCRIPT) + 1 :]]
        wanted = built_with(given, monkeypatch)
        config = decode_gpu.arguments_of(given).config
        start = starts[config, wanted.cudagraph_mode, wanted.kv_cache_dtype]
        at_least = {"max_num_seqs": wanted.max_num_seqs, "max_model_len": wanted.max_model_len}
        assert all(getattr(start.user, name) >= value for name, value in at_least.items()), job.name
        assert replace(start.user, num_blocks=wanted.num_blocks, **at_least) == wanted, job.name


def test_equal_starts_are_rehearsed_once(tmp_path: Path) -> None:
    jobs = [
        {"name": name, "command": ["{python}", SCRIPT, "--case", batch, "64"], "limit": 9, "estimate": 9}
        for name, batch in (("a", "2"), ("b", "7"))
    ]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"jobs": jobs}))
    (start,) = starts_of([plan])
    assert start.user.max_num_seqs == 7


def test_a_second_run_on_a_machine_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless something failed, or the sources are others; what the first run found is reported again."""
    ran: list[bool] = []

    def compile_all(starts: Any, *, workers: int) -> dict[str, Any]:
        ran.append(True)
        failed = [{"kernel": "k", "error": "e"}] if len(ran) == 1 else []
        return {"starts": {}, "functions": {}, "failed": failed, "kernels": len(ran), "seconds": 1.0}

    sources, report = tmp_path / "sources", tmp_path / "report.json"
    sources.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(precompile, "SOURCES", sources)
    monkeypatch.setattr(precompile, "precompile", compile_all)
    monkeypatch.setattr("sys.argv", ["precompile.py", str(PLAN), "--json", str(report)])
    assert [precompile.main() for _ in range(3)] == [1, 0, 0]
    assert len(ran) == json.loads(report.read_text())["kernels"] == 2
    assert "compiled before" in capsys.readouterr().out
    (sources / "kernel.py").write_text("changed = 1")
    assert precompile.main() == 0
    assert len(ran) == 3
