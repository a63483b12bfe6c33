"""An interrupt anywhere while a request ends: it ends all the same, and nobody else notices."""

from __future__ import annotations

from typing import Any

import pytest

from sidestream import LLM, SamplingParams
from sidestream.core.outputs import EngineOutput
from sidestream.core.request import FinishReason, Request
from sidestream.engine.token_masks import NoMasks
from sidestream.engine.unfinished import Posted, Unfinished
from tests.engine.harness import random_sequences
from tests.engine.interrupts import InterruptAt
from tests.engine.llm_fixtures import make_checkpoint

STAYS, ENDS, LATER = random_sequences((19, 21, 12), vocab=136, seed=12)
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=0)
BOOKKEEPING = ("/scheduler/", "/cache/", "/engine/core.py", "/engine/unfinished.py", "/engine/llm.py")
"""What keeps states that must fit each other; layers and operators keep none between steps."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("next_share")
    make_checkpoint("next_share", folder)
    settings: dict[str, Any] = {"block_size": 8, "num_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    made = LLM(folder, max_model_len=96, **settings)
    made.built.pools.poison()
    return made


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[int]:
    return llm.generate(STAYS, PARAMS)[0].outputs[0].token_ids


def check_idle(llm: LLM) -> None:
    """Nothing is left of anybody."""
    llm.core.has_work()
    llm.core.scheduler.check_integrity()
    if llm.core.outbox:  # outputs that were on their way when their iterator was closed go with the next step
        assert not llm.core.scheduler.has_work()
        llm.generate([5], SamplingParams(temperature=0, max_tokens=1))
    assert not llm.core.has_work()
    assert not list(llm.core._unfinished)
    assert not llm._inboxes
    assert not llm._left
    assert not llm._outputs._prompts
    assert not llm._outputs._by_request
    assert llm.core.scheduler.num_free_blocks == 40
    assert llm.core.scheduler.num_free_slots == 4


@pytest.mark.parametrize("steps", [0, 2])
def test_an_iterator_that_is_closed_ends_its_request(llm: LLM, alone: list[int], steps: int) -> None:
    """While its request prefills or decodes. What the interrupt left ends with the next step of another one."""
    number = 0
    while True:
        other, ending = llm.stream(STAYS, PARAMS), llm.stream(ENDS, PARAMS)
        next(other)
        next(ending)
        for _ in range(steps):
            next(other)
        with InterruptAt(number) as interrupt:
            try:
                ending.close()  # type: ignore[attr-defined]
            except KeyboardInterrupt:
                assert interrupt.reached
        *_, delta = other
        assert delta.output.outputs[0].token_ids == alone, number
        assert delta.output.prompt_logprobs is not None
        assert len(delta.output.prompt_logprobs) == len(STAYS)
        check_idle(llm)
        if not interrupt.reached:
            break
        number += 1
    assert number > 40


def test_an_abort_that_is_interrupted_twice_is_carried_out(llm: LLM, alone: list[int]) -> None:
    """Once more while the engine puts right what the first interrupt left."""
    doubly = 0
    for number in range(0, 60, 6):
        for again in range(0, 400, 23):
            other, ending = llm.stream(STAYS, PARAMS), llm.stream(ENDS, PARAMS)
            next(other)
            next(ending)
            name = next(reversed(llm._inboxes))
            real = llm.core._recover
            second = InterruptAt(again)

            def recover(real: Any = real, second: InterruptAt = second) -> None:
                with second:
                    real()

            llm.core._recover = recover  # type: ignore[method-assign]
            with InterruptAt(number) as first:
                try:
                    llm.core.abort(name)
                except KeyboardInterrupt:
                    assert first.reached
            del llm.core._recover  # type: ignore[method-assign]
            doubly += second.reached
            ending.close()  # type: ignore[attr-defined]
            *_, delta = other
            assert delta.output.outputs[0].token_ids == alone, (number, again)
            check_idle(llm)
            if not second.reached:
                break
    assert doubly > 20


@pytest.mark.parametrize("start", range(4))
def test_a_step_interrupted_anywhere_loses_nothing(llm: LLM, alone: list[int], start: int) -> None:
    """One in which a request ends, another begins and a third goes on, at every 29th point of the bookkeeping."""
    number, interrupted = start * 7, 0
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    while True:
        other, ending = llm.stream(STAYS, PARAMS), llm.stream(ENDS, short)
        tokens = [next(other)]
        next(ending)
        later = llm.stream(LATER, short)
        with InterruptAt(number, BOOKKEEPING) as interrupt:
            try:
                next(later)
            except KeyboardInterrupt:
                assert interrupt.reached
        tokens += other
        assert tokens[-1].output.outputs[0].token_ids == alone, number
        assert len(tokens) == len(alone), number
        assert len(list(ending)) == 1, number
        later.close()  # type: ignore[attr-defined]
        check_idle(llm)
        if not interrupt.reached:
            break
        interrupted += 1
        number += 29
    assert interrupted > 10


class CountingMasks(NoMasks):
    """Follows requests as a list of tokens each; fails at one of them, before or after it took it."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.at, self.after = at, after
        self.told: dict[str, list[int]] = {}

    def add(self, request: Request) -> None:
        self.told[request.request_id] = []

    def accept(self, request_id: str, token: int) -> None:
        self.at -= 1
        if self.at == 0 and not self.after:
            raise KeyboardInterrupt
        self.told[request_id].append(token)
        if self.at == 0:
            raise KeyboardInterrupt

    def drop(self, request_id: str) -> None:
        self.told.pop(request_id, None)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_form_is_told_of_every_token_once(at: int, after: bool) -> None:
    masks = CountingMasks(at, after=after)
    unfinished = Unfinished(masks)
    unfinished.add(Request("a", (1, 2), SamplingParams(), 0, 9, frozenset(), ()))
    outbox = []
    for i, token in enumerate((7, 8, 9)):
        outbox.append(Posted(EngineOutput("a", token, None), 2 + i, 1))
        try:
            unfinished.tell(outbox[-1])
        except KeyboardInterrupt:
            assert i == at - 1
            unfinished.rewind(outbox, aborted=())
            assert masks.told == {"a": unfinished["a"].generated}
    assert masks.told == {"a": [7, 8, 9]}
    unfinished.rewind(outbox, aborted=())
    assert masks.told == {"a": [7, 8, 9]}
    unfinished.tell(Posted(EngineOutput("a", 4, FinishReason.STOP), 5, 1))
    assert not masks.told
