"""Long steps have no rows in the last layer, behind its mixer, that nobody asks for: tokens stay, caches too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.config.engine import EngineConfig
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine import runner as runner_module
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.core import EngineCore
from sidestream.engine.memory_probe import without_graphs
from sidestream.engine.runner import StepOutput
from sidestream.engine.scratch_steps import EVERYTHING, run_step, scratch_chunk
from tests.engine.harness import random_sequences
from tests.engine.sim.harness import MODELS, VOCAB, make_model, open_sim, sim_config
from tests.tolerances import PARITY_LOGPROB

LENGTHS, TOKENS, SHORTEST = (38, 5, 21), 4, 9
"""Prompts of three steps and more, alone and beside others and decodes; every step of 9 tokens is a long one here."""


class Run:
    """Three prompts to their ends: tokens and log-probabilities of each, and what every long step put out."""

    def __init__(self, built: BuiltEngine, params: SamplingParams) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.prompt_logprobs: dict[str, list[float]] = {}
        self.outputs: list[tuple[int, StepOutput]] = []
        core, real = EngineCore(built), built.runner.forward

        def forward(chunks: Any, token_ids: Any, **named: Any) -> StepOutput:
            output = real(chunks, token_ids, **named)
            if len(token_ids) >= SHORTEST:
                self.outputs.append((len(token_ids), output))
            return output

        built.runner.forward = forward  # type: ignore[method-assign]
        for i, prompt in enumerate(random_sequences(LENGTHS, vocab=VOCAB, seed=5)):
            core.add(Request(str(i), tuple(prompt), params, 0, TOKENS, frozenset(), ()))
        while core.has_work():
            for output in core.step():
                self._take(output)
        built.runner.forward = real  # type: ignore[method-assign]

    def _take(self, output: Any) -> None:
        name = output.request_id
        if output.token_id is not None:
            self.tokens.setdefault(name, []).append(output.token_id)
            self.logprobs.setdefault(name, []).append(output.logprobs[0][1])
        for each in output.prompt_logprobs:
            self.prompt_logprobs.setdefault(name, []).append(each[0][1])


def engine(folder: Path, mode: str) -> BuiltEngine:
    config: EngineConfig = sim_config(mode, graph_debug=False)
    return build_engine(folder, config, backend=open_sim())


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_is_asked_for_is_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(name, tmp_path)
    params = SamplingParams(temperature=0.0, logprobs=1)
    everything = Run(engine(tmp_path, "full_and_piecewise"), params)
    assert all(output.rows is None for _, output in everything.outputs)
    monkeypatch.setattr(runner_module, "ASKED_FROM", SHORTEST - 1)
    for mode in ("none", "full_and_piecewise"):
        asked = Run(engine(tmp_path, mode), params)
        assert asked.tokens == everything.tokens
        for request, values in everything.logprobs.items():
            assert asked.logprobs[request] == pytest.approx(values, abs=PARITY_LOGPROB)
        assert len(asked.outputs) >= 4
        for tokens, output in asked.outputs:
            assert output.rows is not None
            assert len(output.rows) < tokens
            assert output.hidden.shape[0] == 8, "a bucket of rows"


def test_a_prompt_whose_log_probabilities_are_wanted_has_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("glm5_next", tmp_path)
    monkeypatch.setattr(runner_module, "ASKED_FROM", SHORTEST - 1)
    run = Run(engine(tmp_path, "none"), SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1))
    assert run.outputs
    assert all(output.rows is None for _, output in run.outputs)
    assert [len(run.prompt_logprobs[str(i)]) for i in range(3)] == [length - 1 for length in LENGTHS]


def test_a_start_meets_such_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kernel they ask for is compiled then; steps that measure memory have all rows."""
    make_model("glm5_next", tmp_path)
    monkeypatch.setattr(runner_module, "ASKED_FROM", SHORTEST - 1)
    built = engine(tmp_path, "full_and_piecewise")
    real, rows = built.runner.forward, []

    def forward(*given: Any, **named: Any) -> StepOutput:
        output = real(*given, **named)
        rows.append(output.rows)
        return output

    monkeypatch.setattr(built.runner, "forward", forward)
    chunks = [scratch_chunk(built.config.block_size, 0, 12, decode=False)]
    with without_graphs(built.runner), built.runner.on_device():
        for params in (SamplingParams(temperature=0.0), EVERYTHING):
            run_step(built.runner, chunks, vocab_size=built.config.model.vocab_size, params=params)
    assert rows == [(11,), None]


def test_a_decode_whose_prompt_showed_its_log_probabilities_keeps_no_step_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("deepseek_v32", tmp_path)
    monkeypatch.setattr(runner_module, "ASKED_FROM", SHORTEST - 1)
    built = engine(tmp_path, "none")
    core, real, seen = EngineCore(built), built.runner.forward, []

    def forward(chunks: Any, token_ids: Any, **named: Any) -> StepOutput:
        output = real(chunks, token_ids, **named)
        seen.append((any(chunk.is_decode for chunk in chunks), len(token_ids) >= SHORTEST, output.rows is None))
        return output

    monkeypatch.setattr(built.runner, "forward", forward)
    shown = SamplingParams(temperature=0.0, prompt_logprobs=1)
    first, second = random_sequences((10, 12), vocab=VOCAB, seed=2)
    core.add(Request("shown", tuple(first), shown, 0, 6, frozenset(), ()))
    core.step()
    core.add(Request("long", tuple(second), SamplingParams(temperature=0.0), 0, 2, frozenset(), ()))
    while core.has_work():
        core.step()
    assert seen[0] == (False, True, True)
    assert (True, True, False) in seen


def test_a_row_that_was_not_asked_for_is_an_error(tmp_path: Path) -> None:
    make_model("deepseek_v32", tmp_path)
    built = engine(tmp_path, "none")
    with pytest.raises(AssertionError, match=r"rows \{2\} were not asked for"):
        built.runner.logits(StepOutput(torch.zeros(8, 64), rows=(3, 7)), [2])
