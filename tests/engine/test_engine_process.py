"""The loop of the engine's own process: commands between steps, outputs after each, an end when it is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sidestream.config.engine import EngineConfig
from sidestream.core.outputs import EngineOutput
from sidestream.core.request import FinishReason, Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import build_engine
from sidestream.engine.core import EngineCore
from sidestream.engine.engine_process import EngineProcess
from sidestream.engine.llm import bundled_model
from sidestream.engine.token_masks import NoMasks
from sidestream.engine.wire import (
    Abort,
    Add,
    Command,
    EngineState,
    Event,
    Refused,
    Shutdown,
    StepDone,
    decode_command,
    decode_event,
    encode,
)

PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=50, logit_bias={3: 1}, stop="x")


class Script:
    """A channel that hands out the commands of each turn, and keeps what is sent, both through the real encoding."""

    def __init__(self, turns: list[list[Command]]) -> None:
        self._turns = iter(turns)
        self.sent: list[Event] = []
        self.sent_in_turn: list[int] = []

    def send(self, event: Event) -> None:
        self.sent.append(decode_event(encode(event)))

    def commands(self, *, patience_ms: int) -> Iterator[Command]:
        self.sent_in_turn.append(len(self.sent))
        for command in next(self._turns):
            yield decode_command(encode(command))

    def orphaned(self) -> bool:
        return False


def request(name: str, length: int, max_tokens: int = 50) -> Request:
    return Request(name, (5,) * length, PARAMS, 2**63 + 7, max_tokens, frozenset(), ())


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return EngineCore(
        build_engine(bundled_model(), EngineConfig(device="cpu", max_num_seqs=4, max_num_batched_tokens=16))
    )


def run(core: EngineCore, turns: list[list[Command]]) -> Script:
    script = Script([*turns, [Shutdown()]])
    EngineProcess(script, _built(core), core, NoMasks()).run()  # type: ignore[arg-type]
    return script


def _built(core: EngineCore) -> Any:
    class Built:
        runner = core._runner

        def __init__(self) -> None:
            self.kernels = ["met by the warm-up"]

        def compiled_after_ready(self) -> tuple[str, ...]:
            return tuple(self.kernels)

    return Built()


def tokens_of(script: Script, name: str) -> list[EngineOutput]:
    steps = [event for event in script.sent if isinstance(event, StepDone)]
    return [output for step in steps for output in step.outputs if output.request_id == name]


def test_an_abort_takes_effect_before_the_next_step(core: EngineCore) -> None:
    """In a decode, in a chunked prefill and in the queue alike: the turn it arrives in gives the request nothing."""
    turns: list[list[Command]] = [[Add((request("decode", 2), request("prefill", 400), request("queued", 400)))]]
    turns += [[], [], [Abort(("decode", "prefill", "queued", "nobody"))], []]
    script = run(core, turns)
    assert len(tokens_of(script, "decode")) == 3
    assert not tokens_of(script, "prefill")
    assert script.sent_in_turn[-1] == len(script.sent)
    last = script.sent[-1]
    assert isinstance(last, StepDone)
    assert last.state is not None
    assert (last.state.running, last.state.waiting) == (0, 0)
    core.scheduler.check_integrity()


def test_a_request_that_can_never_run_is_refused_and_the_others_run(core: EngineCore) -> None:
    turns: list[list[Command]] = [[Add((request("long", 40000), request("fine", 3, max_tokens=2)))], []]
    script = run(core, turns)
    (refusal,) = [event for event in script.sent if isinstance(event, Refused)]
    assert (refusal.request_id, refusal.kind) == ("long", "RequestError")
    assert "max_model_len" in refusal.message
    outputs = tokens_of(script, "fine")
    assert [output.finish_reason for output in outputs] == [None, FinishReason.LENGTH]


def test_the_state_is_reported_when_nothing_is_left(core: EngineCore) -> None:
    script = run(core, [[Add((request("one", 3, max_tokens=1),))]])
    last = script.sent[-1]
    assert isinstance(last, StepDone)
    assert isinstance(last.state, EngineState)
    assert last.state.free_blocks == core.scheduler.num_free_blocks
    assert last.outputs[0].finish_reason is FinishReason.LENGTH


def test_kernels_that_were_compiled_while_requests_ran_are_counted(core: EngineCore) -> None:
    built = _built(core)
    process = EngineProcess(Script([]), built, core, NoMasks())  # type: ignore[arg-type]
    assert process.state().late_compilations == 0
    built.kernels += ["of a request", "of another"]
    assert process.state().late_compilations == 2
