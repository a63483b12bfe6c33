"""The prefix cache on a GPU: the same bits in every graph mode, and what an engine without a cache gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import BuiltEngine, in_graph_mode
from sidestream.engine.core import EngineCore
from tests.gpu.engine.machine import Tokens, bundled, prompts
from tests.gpu.host_waits import host_waits_raise

pytestmark = pytest.mark.gpu

MARGIN = 0.02
"""Log-probability under which other chunks may choose another token, in fp32: as in ``test_modes``."""


def serve(built: BuiltEngine) -> tuple[list[Tokens], list[int]]:
    """A stem of 200 tokens: alone, then three that part behind it at once, then the next turn of one of them."""
    core = EngineCore(built)
    stem, *tails = prompts(4, 200, seed=3, vocab=1536)[::-1]
    answers: dict[str, Tokens] = {}
    cached: dict[str, int] = {}

    def run(asked: dict[str, tuple[int, ...]]) -> None:
        for name, prompt in asked.items():
            answers[name] = []
            params = SamplingParams(temperature=0.0, logprobs=1)
            core.add(Request(name, prompt, params, 0, 24, frozenset(), ()))
        while core.has_work():
            for output in core.step():
                if output.cache_reason is not None:
                    cached[output.request_id] = output.cached_tokens
                if output.token_id is not None:
                    assert output.logprobs is not None
                    answers[output.request_id].append((output.token_id, output.logprobs[0][1]))
            core.scheduler.check_integrity()

    run({"stem": stem})
    run({str(i): (*stem, *tail[:70]) for i, tail in enumerate(tails)})
    history = (*stem, *tails[0][:70], *(token for token, _ in answers["0"]))
    run({"turn": (*history, 9, 8, 7)})
    return list(answers.values()), list(cached.values())


def test_every_mode_has_the_bits_of_eager_steps_and_the_tokens_of_no_cache() -> None:
    built = bundled("none")
    expected, cached = serve(built)
    assert cached[0] == 0
    assert sum(hit >= 192 for hit in cached) >= 4, cached
    for mode in ("piecewise", "full_and_piecewise"):
        assert serve(in_graph_mode(built, mode)) == (expected, cached), mode
    off = replace(built, config=replace(built.config, prefix_caching=False))
    alone, nothing = serve(off)
    assert not any(nothing)
    for mine, theirs in zip(expected, alone, strict=True):
        for (token, logprob), (other, known) in zip(mine, theirs, strict=True):
            if token != other:
                assert abs(logprob - known) < MARGIN
                break
            assert abs(logprob - known) < MARGIN


def test_launching_prompts_that_leave_states_makes_the_host_wait_for_nothing() -> None:
    """A wait within a prompt's step leaves the device idle until the host has caught up again."""
    core = EngineCore(bundled("none"))
    params = SamplingParams(temperature=0.0)
    for prompt in prompts(3, 500, seed=4, vocab=1536)[1:]:  # the first compiles, and makes constants
        core.add(Request(str(len(prompt)), prompt, params, 0, 1, frozenset(), ()))
        with core._runner.on_device():
            step = core.scheduler.schedule()
            assert step is not None
            assert step.chunks[0].splits
            if len(prompt) == 500:
                with host_waits_raise():
                    launched = core._launch(step)
            else:
                launched = core._launch(step)
            core._finish(launched)
