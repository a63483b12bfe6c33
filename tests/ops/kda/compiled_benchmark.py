"""Run by ``test_benchmark.py`` in a process of its own: it pretends that there is a GPU, and launches what the
benchmark of KDA launches, first where its processes compile, then where it is timed. Prints both, a set of names and
specialisations each, and what the ordered kernel and that of one launch compile to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.kernel_resources import resources_of
from benchmarks.kernels import bench_kda as bench
from benchmarks.precompile import begin
from benchmarks.rehearsal import kernels_met, pretended_device
from sidestream.core.ring import plan_ring


def once(calls: dict[str, Callable[[Any], object]], sets: list[Any]) -> dict[str, float]:
    for call in calls.values():
        call(sets[0])
    return dict.fromkeys(calls, 1.0)


def main() -> None:
    met = []
    fakes: dict[str, Any] = {
        "plan_ring": lambda *args, device, **sizes: plan_ring(*args, **sizes),
        "on_cpu": lambda made: made,
        "reference": SimpleNamespace(decode_step=lambda **_: None),
        "error": lambda got, want: 0.0,
        "timed": once,
    }
    with mock.patch.multiple(bench, **fakes), mock.patch.object(torch, "equal", return_value=True):
        with pretended_device(), kernels_met(lambda: "") as found:
            for task in (*bench.steps_of(bench.BATCHES), *bench.BATCHES):
                assert bench.first_run(task) == (0.0, ""), task
        met.append(sorted(found))
        with pretended_device(), kernels_met(lambda: "") as found:
            for rows in bench.BATCHES:
                bench.time_step(bench.usual_launch(rows), rows)
        met.append(sorted(found))
        with pretended_device(), kernels_met(lambda: "") as found:
            bench.decode_step(**bench.arguments(64, seed=0), launch=bench.usual_launch(64))
        with pretended_device(), kernels_met(lambda: "") as singles:
            bench.decode_step(**bench.arguments(1, seed=0), launch=bench.usual_launch(1))
    begin()
    (single,) = singles.values()
    (ordered,) = (kernel for kernel in found.values() if kernel.name.endswith(".advance"))
    print(json.dumps([*met, asdict(resources_of(ordered)), asdict(resources_of(single))]))


if __name__ == "__main__":
    main()
