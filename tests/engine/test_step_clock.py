"""Which time belongs to which step, where one is launched while another runs: on a device made of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sidestream.config.engine import EngineConfig
from sidestream.core.batch import ScheduledStep
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.core import EngineCore
from sidestream.engine.sampled_tokens import PendingTokens, SampledTokens
from sidestream.engine.step_clock import StepClock
from tests.engine.sim.harness import make_model


class Device:
    """A time line: steps run one after the other, each as long as its tokens say, and a read waits for its step's end.

    Attributes:
        ran: (decodes, prefill tokens, seconds) of each step, in order.
        told: the same, as the pacer was told.
    """

    def __init__(self, *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.time = 100.0
        self.free_at = 0.0
        self.ran: list[tuple[int, int, float]] = []
        self.told: list[tuple[int, int, float]] = []
        self.ends: list[tuple[PendingTokens, float]] = []

    def launch(self, step: ScheduledStep) -> None:
        decodes = sum(chunk.is_decode for chunk in step.chunks)
        tokens = step.num_tokens - decodes
        seconds = 10.0 + decodes + 0.5 * tokens + 0.001 * len(self.ran)
        self.time += 0.25  # the host's own
        self.free_at = max(self.time, self.free_at) + seconds
        self.ran.append((decodes, tokens, seconds))
        if not self.overlaps:
            self.time = self.free_at

    def read(self, pending: PendingTokens) -> None:
        (end,) = [end for known, end in self.ends if known is pending]
        self.time = max(self.time, end)

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        self.told.append((num_decodes, num_prefill_tokens, seconds))

    def budget(self, num_decodes: int, num_prompts: int, *, longest: int) -> int:
        return 1000


@pytest.fixture(scope="module", params=["cpu", "sim"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltEngine:
    folder: Path = tmp_path_factory.mktemp("model")
    make_model("kimi_linear", folder)
    settings: dict[str, Any] = {"device": request.param, "cudagraph_mode": "none", "prefill_pacing": True}
    return build_engine(
        folder, EngineConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, block_size=8, **settings)
    )


@pytest.fixture
def device(built: BuiltEngine, monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(overlaps=built.config.device != "cpu")
    launch, read, keep = EngineCore._launch, PendingTokens.read, SampledTokens.keep

    def on_launch(core: EngineCore, step: ScheduledStep) -> Any:
        device.launch(step)
        return launch(core, step)

    def on_keep(sampled: SampledTokens, choice: Any) -> PendingTokens:
        pending = keep(sampled, choice)
        device.ends.append((pending, device.free_at))
        return pending

    def on_read(pending: PendingTokens) -> list[int]:
        device.read(pending)
        return read(pending)

    monkeypatch.setattr(EngineCore, "_launch", on_launch)
    monkeypatch.setattr(SampledTokens, "keep", on_keep)
    monkeypatch.setattr(PendingTokens, "read", on_read)
    return device


def run(built: BuiltEngine, device: Device, requests: dict[int, list[Request]]) -> None:
    """Step until all are done, adding requests before the steps with these numbers."""
    core = EngineCore(built, clock=StepClock(lambda: device.time))
    assert core._pacer is not None
    core._pacer = core.scheduler._pacer = device  # type: ignore[assignment]
    step = 0
    while core.has_work() or any(at >= step for at in requests):
        for request in requests.get(step, ()):
            core.add(request)
        core.step()
        step += 1
    core.scheduler.check_integrity()


def request(name: str, length: int, max_tokens: int, **params: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)
    return Request(name, tuple(range(3, 3 + length)), sampling, 0, max_tokens, frozenset(), ())


def check(device: Device, *, unknown: int) -> None:
    """Every step was told with its own time, up to the host's, but for so many."""
    told = list(device.told)
    for ran in device.ran:
        if told and told[0][:2] == ran[:2] and abs(told[0][2] - ran[2]) < 0.6:
            told.pop(0)
        else:
            unknown -= 1
    assert not told, f"{told} were told, none of {device.ran} took so long"
    assert unknown == 0, (device.ran, device.told)


def test_each_step_is_told_with_its_own_time(built: BuiltEngine, device: Device) -> None:
    """Decodes, a prompt beside them in chunks, another, a pause, and again."""
    requests = {
        0: [request("a", 3, 30)],
        4: [request("b", 29, 4)],
        9: [request("c", 20, 3)],
        60: [request("d", 5, 6)],
    }
    run(built, device, requests)
    assert {(1, 7), (2, 6)} <= {(decodes, tokens) for decodes, tokens, _ in device.ran}
    check(device, unknown=0)


def test_log_probabilities_are_waited_for_at_once(built: BuiltEngine, device: Device) -> None:
    run(built, device, {0: [request("a", 3, 12, logprobs=1), request("b", 4, 12)], 5: [request("c", 15, 3)]})
    check(device, unknown=0)


def test_tokens_that_the_next_step_needs_are_waited_for(built: BuiltEngine, device: Device) -> None:
    run(built, device, {0: [request("a", 3, 12, frequency_penalty=0.5)], 5: [request("c", 15, 3)]})
    check(device, unknown=0)


def test_what_nobody_waits_for_is_not_told(built: BuiltEngine, device: Device) -> None:
    """A long prompt alone: only its last chunk gives a token, and the step after it is the first with a start."""
    run(built, device, {0: [request("a", 37, 5)]})
    chunks = sum(decodes == 0 for decodes, _, _ in device.ran)
    assert chunks == 5
    check(device, unknown=chunks if device.overlaps else 0)


def test_a_step_that_failed_leaves_no_time_behind(
    built: BuiltEngine, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(built, clock=StepClock(lambda: device.time))
    core._pacer = core.scheduler._pacer = device  # type: ignore[assignment]
    core.add(request("a", 3, 12))
    for _ in range(4):
        core.step()
    with monkeypatch.context() as broken:
        broken.setattr(EngineCore, "_sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            core.step()
    device.time += 1000.0
    while core.has_work():
        core.step()
    assert all(seconds < 20 for _, _, seconds in device.told)
