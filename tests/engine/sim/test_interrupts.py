"""An interrupt anywhere in a step: nothing is lost, nothing is given twice, nothing is left running beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sidestream import LLM
from sidestream.config.engine import EngineConfig
from sidestream.engine.build import build_engine
from sidestream.engine.core import EngineCore
from sidestream.engine.unfinished import Unfinished
from sidestream.streams import Handoff
from sidestream.streams.simulated import DeviceError, Order, SimulatedBackend
from tests.engine.sim.harness import make_model
from tests.engine.sim.test_pipeline import SETTINGS, check, request, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("dsa")
    make_model("glm_moe_dsa", made)
    return made


def core_of(folder: Path, device: str, mode: str = "none", **settings: Any) -> EngineCore:
    config = EngineConfig(device=device, cudagraph_mode=mode, max_capture_tokens=4, **(SETTINGS | settings))
    backend = SimulatedBackend(Order.LAZY) if device == "sim" else None
    return EngineCore(build_engine(folder, config, backend=backend))


def interrupted(core: EngineCore, requests: list[Any]) -> dict[str, list[int]]:
    """``run``, going on behind each interrupt."""
    tokens: dict[str, list[int]] = {asked.request_id: [] for asked in requests}
    for asked in requests:
        core.add(asked)
    interrupts = 0
    while core.has_work():
        try:
            outputs = core.step()
        except KeyboardInterrupt:
            interrupts += 1
            continue
        for output in outputs:
            if output.token_id is not None:
                tokens[output.request_id].append(output.token_id)
    assert interrupts == 1
    return tokens


def raise_at(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, at: int, *, after: bool, only: str = ""
) -> None:
    real, calls = getattr(owner, method), [0]

    def call(self: Any, *args: Any, **named: Any) -> Any:
        counts = only in str(getattr(self, "name", ""))
        calls[0] += counts
        if counts and calls[0] == at and not after:
            raise KeyboardInterrupt
        result = real(self, *args, **named)
        if counts and calls[0] == at:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, method, call)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["publish", "wait"])
@pytest.mark.parametrize("mode", ["none", "piecewise"])
def test_a_conversion_that_nobody_waits_for_does_not_outlive_its_step(
    folder: Path, mode: str, method: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [request("a", 9, max_tokens=5), request("b", 4, max_tokens=6)]
    expected = run(core_of(folder, "cpu"), asked)
    core = core_of(folder, "sim", mode)
    raise_at(monkeypatch, Handoff, method, 3, after=after, only="physical_topk_ready")
    assert interrupted(core, asked) == expected
    check(core)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("at", [2, 5])
@pytest.mark.parametrize("after", [False, True])
def test_a_token_is_put_out_once(
    folder: Path, device: str, at: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [request("a", 3, max_tokens=4, logprobs=1), request("b", 6, max_tokens=3)]
    expected = run(core_of(folder, "cpu"), asked)
    core = core_of(folder, device)
    raise_at(monkeypatch, Unfinished, "tell", at, after=after)
    assert interrupted(core, asked) == expected


@pytest.mark.parametrize("mode", ["piecewise", "full_and_piecewise"])
def test_a_captured_size_may_be_larger_than_the_longest_sequence(folder: Path, mode: str) -> None:
    """Rotary tables end at ``max_model_len``; scratch steps must not look behind it."""
    settings = {"max_model_len": 12, "max_num_batched_tokens": 64, "num_blocks": 12}
    asked = [request("a", 9, max_tokens=3), request("b", 11, max_tokens=1), request("c", 1, max_tokens=8)]
    config = EngineConfig(device="sim", cudagraph_mode=mode, max_capture_tokens=64, **(SETTINGS | settings))  # type: ignore[arg-type]
    core = EngineCore(build_engine(folder, config, backend=SimulatedBackend(Order.RANDOM)))
    assert core._runner.graphs is not None
    assert max(plan.key.tokens for plan in core._runner.graphs.runner.captured) == 36
    assert run(core, asked) == run(core_of(folder, "cpu", **settings), asked)
    check(core)


def test_an_engine_whose_simulated_device_was_replaced_says_so(folder: Path) -> None:
    settings = SETTINGS | {"device": "sim", "cudagraph_mode": "none"}
    first, second = (LLM(folder, **settings) for _ in range(2))  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="replaced by a later one: one is active at a time"):
        first.generate([{"prompt_token_ids": [5, 6, 7]}])
    assert second.generate([{"prompt_token_ids": [5, 6, 7]}])[0].outputs[0].token_ids
