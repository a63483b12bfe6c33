"""On a device the next step is launched before the last one's tokens are read: same tokens, and seen to be ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidestream.config.engine import EngineConfig
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import build_engine
from sidestream.engine.core import EngineCore
from sidestream.streams.simulated import Order, SimulatedBackend
from tests.tiny_models import build_oracle, save_checkpoint

SETTINGS = {
    "dtype": "float32",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "block_size": 8,
    "num_blocks": 20,
    "memory_limit": "2GiB",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(build_oracle("kimi_linear", 0), tmp_path_factory.mktemp("kimi"))


def on_device(folder: Path, mode: str = "none", order: Order = Order.LAZY) -> EngineCore:
    config = EngineConfig(device="sim", cudagraph_mode=mode, max_capture_tokens=4, **SETTINGS)  # type: ignore[arg-type]
    return EngineCore(build_engine(folder, config, backend=SimulatedBackend(order)))


def on_cpu(folder: Path) -> EngineCore:
    return EngineCore(build_engine(folder, EngineConfig(device="cpu", **SETTINGS)))  # type: ignore[arg-type]


def request(
    name: str, length: int, *, max_tokens: int = 6, stop: frozenset[int] = frozenset(), **params: object
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(5 + (7 * i + length) % 90 for i in range(length)),
        params=SamplingParams(**({"temperature": 0.0} | params)),  # type: ignore[arg-type]
        seed=3,
        max_tokens=max_tokens,
        stop_token_ids=stop,
        mask_token_ids=(),
    )


def run(core: EngineCore, requests: list[Request]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {asked.request_id: [] for asked in requests}
    for asked in requests:
        core.add(asked)
    while core.has_work():
        for output in core.step():
            if output.token_id is not None:
                tokens[output.request_id].append(output.token_id)
    core.scheduler.check_integrity()
    return tokens


def check(core: EngineCore) -> None:
    backend = core._runner.streams.backend
    assert isinstance(backend, SimulatedBackend)
    backend.check()


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
def test_unread_tokens_reach_the_next_step(folder: Path, mode: str) -> None:
    asked = [request("a", 3), request("b", 19), request("c", 7, max_tokens=9), request("d", 4)]
    core = on_device(folder, mode)
    assert run(core, asked) == run(on_cpu(folder), asked)
    assert not core.waits
    check(core)


def test_a_step_is_launched_before_the_last_is_read(folder: Path) -> None:
    core = on_device(folder)
    core.add(request("a", 4, max_tokens=3))
    seen = []
    while core.has_work():
        seen.append([output.token_id is not None for output in core.step()])
    assert seen[0] == [], "the first step was read before the second was launched"
    assert sum(map(len, seen)) == 3


def test_drawn_tokens_and_masks_follow_their_own_streams(folder: Path) -> None:
    asked = [
        request("a", 3, temperature=0.9, top_k=7),
        request("b", 9, temperature=1.1, top_p=0.8, min_p=0.01),
        request("c", 5),
        request("d", 6, temperature=0.7, logit_bias={9: 4.0}),
    ]
    core = on_device(folder)
    assert run(core, asked) == run(on_cpu(folder), asked)
    assert not core.waits
    check(core)


@pytest.mark.parametrize(
    ("params", "reason"),
    [({"repetition_penalty": 1.3}, "penalties"), ({"logprobs": 2}, "log-probabilities")],
)
def test_what_the_host_must_know_is_waited_for_and_counted(
    folder: Path, params: dict[str, object], reason: str
) -> None:
    asked = [request("a", 3, **params), request("b", 6)]
    core = on_device(folder)
    assert run(core, asked) == run(on_cpu(folder), asked)
    ((counted, steps),) = core.waits.items()
    assert reason in counted
    assert steps >= 5
    check(core)


def test_a_sequence_that_ends_early_costs_others_nothing(folder: Path) -> None:
    """Its end is known one step late; what that step computed for it is dropped."""
    plain = run(on_cpu(folder), [request("a", 3, max_tokens=8), request("b", 9, max_tokens=8)])
    stop = frozenset({plain["a"][3]})
    asked = [request("a", 3, max_tokens=8, stop=stop), request("b", 9, max_tokens=8)]
    core = on_device(folder, "full_and_piecewise")
    got = run(core, asked)
    assert got == run(on_cpu(folder), asked)
    assert got["b"] == plain["b"]
    check(core)


def test_an_abort_in_flight_and_its_name_used_again(folder: Path) -> None:
    core = on_device(folder)
    core.add(request("a", 5, max_tokens=8))
    core.add(request("b", 4, max_tokens=8))
    for _ in range(4):
        core.step()
    assert core.abort("a")
    again = request("a", 11, max_tokens=4)
    core.add(again)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    while core.has_work():
        for output in core.step():
            if output.token_id is not None:
                tokens[output.request_id].append(output.token_id)
    assert tokens["a"] == run(on_cpu(folder), [again])["a"]
    core.scheduler.check_integrity()
    check(core)


def test_preemption_with_tokens_in_flight(folder: Path) -> None:
    asked = [request(name, 20, max_tokens=30) for name in "abc"]
    small = SETTINGS | {"num_blocks": 12}
    config = EngineConfig(device="sim", cudagraph_mode="none", **small)  # type: ignore[arg-type]
    core = EngineCore(build_engine(folder, config, backend=SimulatedBackend(Order.LAZY)))
    got = run(core, asked)
    assert core.scheduler.num_preemptions > 0
    assert got == run(on_cpu(folder), asked)
    check(core)
