"""A new engine's own requests go through every captured shape, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from sidestream.config.engine import EngineConfig
from sidestream.engine.build import build_engine
from sidestream.engine.core import EngineCore
from sidestream.engine.startup_clock import PhaseProgress, StartupClock
from sidestream.engine.warm_up import warm_up
from sidestream.graphs.dispatch import StepPlan
from sidestream.graphs.runner import GraphRunner
from tests.engine.sim.harness import make_model


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> tuple[set[StepPlan], set[StepPlan], EngineCore]:
    """Shapes captured, shapes replayed by the warm-up, and the engine."""
    built = build_engine(folder, EngineConfig(max_model_len=64, block_size=8, **settings))  # type: ignore[arg-type]
    core = EngineCore(built)
    replayed: list[StepPlan] = []
    if built.runner.graphs is not None:
        replay = GraphRunner.replay

        def noted(self: GraphRunner, plan: StepPlan, *rest: object) -> object:
            replayed.append(plan)
            return replay(self, plan, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(GraphRunner, "replay", noted)
    told: list[PhaseProgress] = []
    batches = warm_up(built, core, clock=StartupClock(tell=told.append))
    assert {(progress.name, progress.total) for progress in told[1:]} == {("warm-up", batches)}
    assert (told[1].done, told[-1].done) == (0, batches)
    captured = set() if built.runner.graphs is None else set(built.runner.graphs.dispatcher.captures())
    return captured, set(replayed), core


@pytest.mark.parametrize("mode", ["full_and_piecewise", "piecewise", "full"])
def test_every_captured_shape_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    make_model("glm5_next", tmp_path)
    captured, replayed, core = run(
        tmp_path, monkeypatch, device="sim", cudagraph_mode=mode, max_num_seqs=4, max_num_batched_tokens=16
    )
    assert captured
    assert replayed == captured
    assert not core.has_work()


def test_a_cpu_runs_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("glm5_next", tmp_path)
    steps: list[int] = []
    step = EngineCore.step

    def noted(self: EngineCore) -> Sequence[object]:
        outputs = step(self)
        steps.append(len(outputs))
        return outputs

    monkeypatch.setattr(EngineCore, "step", noted)
    run(tmp_path, monkeypatch, device="cpu", max_num_seqs=2)
    assert steps == [1, 1], "a prefill that gives a token, and a decode"
