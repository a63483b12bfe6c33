"""Pacing in the engine: it changes schedules and no answer, and it is on where streams are served."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch

from sidestream import LLM, ConfigError, SamplingParams
from sidestream.config.engine import EngineConfig
from sidestream.core.batch import ScheduledStep
from sidestream.engine import core
from sidestream.engine.core import EngineCore
from sidestream.engine.engine_process import for_service
from sidestream.engine.step_clock import StepClock
from sidestream.scheduler.config import DEFAULT_SHARED_PREFIX_WAIT
from sidestream.scheduler.prefill_pacer import PrefillPacer
from tests.engine.harness import oracle_logprobs, random_sequences
from tests.engine.llm_fixtures import check_greedy, make_checkpoint
from tests.tolerances import PARITY_LOGPROB

Checkpoint = tuple[Path, torch.nn.Module]


@pytest.fixture(scope="module", params=["next", "deepseek"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_checkpoint(request.param, folder)


def paced(folder: Path, patch: pytest.MonkeyPatch, *, seed: int) -> LLM:
    """An engine whose clock runs as it likes, so that chunks are of all sizes, those of short prompts too."""
    patch.setattr(core, "PrefillPacer", partial(PrefillPacer, short_prompt=0))
    llm = LLM(folder, prefill_pacing=True, block_size=8, max_num_seqs=6, max_model_len=400, num_blocks=150)
    draws, time = random.Random(seed), [0.0]

    def now() -> float:
        time[0] += draws.choice([0.01, 0.012, 0.03, 0.08])
        return time[0]

    llm.core = EngineCore(llm.built, clock=StepClock(now))
    return llm


@pytest.mark.parametrize("seed", [1, 2])
def test_answers_are_the_oracle_s_whatever_the_chunks(
    checkpoint: Checkpoint, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, oracle = checkpoint
    llm = paced(folder, monkeypatch, seed=seed)
    llm.built.pools.poison()
    chunks: set[int] = set()
    schedule = llm.core.scheduler.schedule

    def noted() -> object:
        step = schedule()
        if step is not None:
            chunks.update(chunk.length for chunk in step.chunks if not chunk.is_decode)
        return step

    llm.core.scheduler.schedule = noted  # type: ignore[assignment, method-assign]
    prompts = random_sequences((3, 4, 200, 150, 90, 31, 180), vocab=136, seed=seed)
    lengths = (60, 60, 8, 8, 8, 8, 8)
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=1, prompt_logprobs=0)
        for length in lengths
    ]
    outputs = llm.generate(prompts, params)
    assert llm.core.scheduler.num_paced_steps > 0
    assert len(chunks) > 6, chunks
    for prompt, output in zip(prompts, outputs, strict=True):
        made = output.outputs[0]
        check_greedy(oracle, prompt, made.token_ids)
        expected = oracle_logprobs(oracle, [*prompt, *made.token_ids])
        assert output.prompt_logprobs is not None
        assert made.logprobs is not None
        for position, row in enumerate([*output.prompt_logprobs, *made.logprobs]):
            for token, entry in (row or {}).items():
                assert abs(entry.logprob - float(expected[position - 1, token])) < PARITY_LOGPROB
    llm.core.scheduler.check_integrity()


def test_others_wait_for_a_shared_prefix_however_many_steps_it_takes(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a decode whose steps are short, prefill is so dear that the prefix takes hundreds of steps."""
    folder, _ = checkpoint
    llm = LLM(folder, prefill_pacing=True, block_size=8, max_num_seqs=6, max_model_len=800, num_blocks=500)
    time, steps = [0.0], [0]
    llm.core = EngineCore(llm.built, clock=StepClock(lambda: time[0]))
    plan = llm.core.scheduler.schedule

    def timed() -> ScheduledStep | None:
        step = plan()
        if step is not None:
            steps[0] += 1
            time[0] += 0.001 + 0.05 * sum(chunk.length for chunk in step.chunks if not chunk.is_decode)
        return step

    monkeypatch.setattr(llm.core.scheduler, "schedule", timed)
    prefix = random_sequences((640,), vocab=136, seed=3)[0]
    begins, *asks = [[5, 6, 7], [*prefix, 9], [*prefix, 11]]
    stream = llm.stream(begins, SamplingParams(temperature=0, max_tokens=790, ignore_eos=True))
    next(stream)
    outputs = llm.generate(asks, SamplingParams(temperature=0, max_tokens=1))
    assert steps[0] > DEFAULT_SHARED_PREFIX_WAIT
    assert [output.cached_tokens for output in outputs] == [0, 640]
    stream.close()


def test_it_is_on_in_service_and_off_elsewhere_unless_asked_for(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint
    assert for_service(EngineConfig()).prefill_pacing is True
    assert for_service(EngineConfig(prefill_pacing=False)).prefill_pacing is False
    for asked, paces in ((None, False), (False, False), (True, True)):
        llm = LLM(folder, prefill_pacing=asked, block_size=8, num_blocks=20, max_num_seqs=2, max_model_len=64)
        assert llm.built.config.prefill_pacing is paces
        assert (llm.core._pacer is not None) is paces
    with pytest.raises(ConfigError, match="prefill_pacing must be True, False or None, got 'yes'"):
        LLM(folder, prefill_pacing="yes")  # type: ignore[arg-type]
