"""Starts that are rehearsed are those that a plan's jobs will make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import decode_gpu
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
