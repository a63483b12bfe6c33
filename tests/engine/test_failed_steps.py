"""A step that fails, and iterators that vanish while it runs: no request is lost, the engine goes on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidestream import LLM, RequestOutput, SamplingParams, SidestreamError
from sidestream.engine.core import EngineCore
from sidestream.engine.llm import TextDelta
from tests.engine.harness import random_sequences
from tests.engine.llm_fixtures import check_greedy, make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=0)


@pytest.fixture(scope="module", params=["next_share", "kimi"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_checkpoint(request.param, folder)


def small(folder: Path, **kw: Any) -> LLM:
    settings = {"block_size": 8, "num_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 96}
    llm = LLM(folder, **(settings | kw))
    llm.built.pools.poison()
    return llm


class Failing:
    """Fails at chosen calls, before or after the real work."""

    def __init__(self, real: Callable[..., Any], at: int, *, after: bool, error: type[BaseException]) -> None:
        self.real, self.at, self.after, self.error = real, at, after, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.at -= 1
        if self.at == 0 and not self.after:
            raise self.error
        result = self.real(*args, **kwargs)
        if self.at == 0:
            raise self.error
        return result


def exhaust(stream: Iterator[TextDelta]) -> RequestOutput:
    """Run an iterator to its end; its finished output."""
    *_, last = stream
    assert last.output.finished
    return last.output


@pytest.mark.parametrize(
    ("place", "after"),
    [("forward", False), ("forward", True), ("logits", True), ("choose", False), ("choose", True), ("commit", False)],
)
@pytest.mark.parametrize("at", [1, 3, 9])
def test_a_failed_step_loses_no_request(checkpoint: tuple[Path, Any], place: str, after: bool, at: int) -> None:
    """One iterator is interrupted wherever the step was; the other's tokens and log-probabilities do not change."""
    folder, oracle = checkpoint
    prompts = random_sequences((23, 30), vocab=136, seed=7)
    llm = small(folder)
    owner: Any = {
        "forward": llm.core._runner,
        "logits": llm.core._runner,
        "choose": llm.core._sampler,
        "commit": llm.core.scheduler,
    }[place]
    other = llm.stream(prompts[0], GREEDY)
    next(other)
    setattr(owner, place, Failing(getattr(owner, place), at, after=after, error=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts[1], GREEDY)
    delattr(owner, place)
    output = exhaust(other)
    made = output.outputs[0]
    check_greedy(oracle, prompts[0], made.token_ids)
    assert made.logprobs is not None
    assert output.prompt_logprobs is not None
    assert len(made.logprobs) == len(made.token_ids) == 20
    assert len(output.prompt_logprobs) == len(prompts[0])
    again = llm.generate(prompts[1], GREEDY)[0].outputs[0].token_ids
    check_greedy(oracle, prompts[1], again)
    assert not llm.core.has_work()
    llm.core.scheduler.check_integrity()


def test_both_iterators_running_when_a_step_fails(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    prompts = random_sequences((23, 30), vocab=136, seed=8)
    llm = small(folder)
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    for stream in streams:
        for _ in range(5):
            next(stream)
    runner: Any = llm.core._runner
    runner.forward = Failing(runner.forward, 1, after=True, error=RuntimeError)
    with pytest.raises(RuntimeError):
        exhaust(streams[0])
    del runner.forward
    made = exhaust(streams[1]).outputs[0].token_ids
    assert len(made) == 20
    check_greedy(oracle, prompts[1], made)
    assert not llm.core.has_work()


def test_an_iterator_collected_during_a_step_ends_after_it(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    llm = small(folder)
    prompt = random_sequences((23,), vocab=136, seed=9)[0]

    class Holder:
        pass

    def leak() -> None:
        holder: Any = Holder()
        holder.stream = llm.stream([9, 8, 7], GREEDY)
        holder.me = holder
        next(holder.stream)

    runner: Any = llm.core._runner
    forward = runner.forward
    gc.disable()
    try:
        leak()
        assert llm.core.scheduler.num_running == 1
        runner.forward = lambda *args, **named: (gc.collect(), forward(*args, **named))[1]
        made = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    finally:
        gc.enable()
        del runner.forward
    check_greedy(oracle, prompt, made)
    assert not llm.core.has_work()
    llm.core.scheduler.check_integrity()


def test_a_second_thread_is_refused_and_changes_nothing(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    llm = small(folder)
    prompt = random_sequences((23,), vocab=136, seed=9)[0]
    advance = EngineCore.advance
    refused: list[str] = []

    def step_with_a_visitor(core: EngineCore) -> None:
        import threading

        def visit() -> None:
            try:
                llm.generate([5, 6], GREEDY)
            except SidestreamError as error:
                refused.append(str(error))

        if not refused:
            thread = threading.Thread(target=visit)
            thread.start()
            thread.join()
        advance(core)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCore, "advance", step_with_a_visitor)
        made = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    assert refused == ["another thread is running a step of this LLM; one thread must drive it"]
    check_greedy(oracle, prompt, made)
    assert not llm.core.has_work()
