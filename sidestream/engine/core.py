"""The engine core: plans a step, runs it, samples, commits. Requests and outputs are plain data, no text in between."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sidestream.core.batch import Chunk, ScheduledStep
from sidestream.core.request import FinishReason, Request
from sidestream.engine.build import BuiltEngine
from sidestream.engine.logprobs import TopLogprobs, top_logprobs
from sidestream.engine.sampler import Sampler, SamplingRow
from sidestream.scheduler.config import SchedulerConfig
from sidestream.scheduler.scheduler import Scheduler

PROMPT_LOGIT_ROWS = 256
"""Rows of prompt logits held at once."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one step gave one request: a token, or log-probabilities of a prompt chunk, or both."""

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    logprobs: TopLogprobs | None = None
    prompt_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(slots=True)
class _Tokens:
    """A request with the tokens it has so far."""

    request: Request
    tokens: list[int]
    prompt_logprobs_done: int = 1
    """Prompt tokens whose log-probability was computed; the first has none."""
    prompt_logprobs_given: int = 1
    """Those of them that were put out; the others wait for the first token."""
    pending_prompt_logprobs: list[TopLogprobs] = field(default_factory=list)


class EngineCore:
    """Continuous batching over one built engine.

    Attributes:
        scheduler: its counters say what happened.
    """

    def __init__(self, built: BuiltEngine) -> None:
        config = built.config
        self._runner = built.runner
        self._sampler = Sampler(config.model.vocab_size)
        self._tokens: dict[str, _Tokens] = {}
        self._stepping = False
        self._aborts: list[str] = []
        self._outbox: list[EngineOutput] = []
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=built.max_model_len,
                block_size=config.block_size,
                num_blocks=built.num_blocks,
                num_slots=built.num_slots,
                uses_blocks=config.uses_blocks,
                uses_slots=config.uses_slots,
            )
        )

    def add(self, request: Request) -> None:
        """Queue a request; RequestError or CapacityError if it can never run."""
        self.scheduler.add(request)
        self._tokens[request.request_id] = _Tokens(request, list(request.prompt_token_ids))

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; whether there was one.

        While a step runs (a collected iterator may call from within it) the request ends right after the step.
        """
        if self._stepping:
            self._aborts.append(request_id)
            return request_id in self._tokens
        self._tokens.pop(request_id, None)
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[EngineOutput]:
        """Run one step; what it gave each request that got something.

        If it fails, by an interrupt for example, the error goes to the caller and no request is lost: the steps after
        it compute all of them anew, from the tokens they have.
        """
        assert not self._stepping, "a step was started within a step"
        self._stepping, done = True, False
        try:
            if (step := self.scheduler.schedule()) is not None:
                with self._runner.on_device():
                    self._run(step)
            done = True
        finally:
            if not done:
                self._recover()
            self._stepping = False
            while self._aborts:
                self.abort(self._aborts.pop())
        outputs, self._outbox = self._outbox, []
        return outputs

    @torch.inference_mode()
    def _run(self, step: ScheduledStep) -> None:
        """Forward, sample, commit."""
        hidden = self._runner.forward(step.chunks, self._token_ids(step))
        self._collect_prompt_logprobs(step, hidden)
        sampled, logprobs = self._sample(step, hidden)
        for event in self.scheduler.commit(step, sampled):
            state = self._tokens[event.request_id]
            output = EngineOutput(
                event.request_id,
                event.token_id,
                event.finish_reason,
                logprobs.get(event.request_id),
                tuple(state.pending_prompt_logprobs),
            )
            state.pending_prompt_logprobs.clear()
            state.prompt_logprobs_given = state.prompt_logprobs_done
            self._outbox.append(output)
            state.tokens.append(event.token_id)
            if event.finish_reason is not None:
                del self._tokens[event.request_id]

    def _recover(self) -> None:
        """Begin again with what every unfinished request has."""
        for state in self._tokens.values():
            state.pending_prompt_logprobs.clear()
            state.prompt_logprobs_done = state.prompt_logprobs_given
        states = self._tokens.values()
        self.scheduler.restart((s.request, len(s.tokens) - len(s.request.prompt_token_ids)) for s in states)

    def _token_ids(self, step: ScheduledStep) -> list[int]:
        ids: list[int] = []
        for chunk in step.chunks:
            ids += self._tokens[chunk.request_id].tokens[chunk.start : chunk.end]
        return ids

    def _sample(self, step: ScheduledStep, hidden: torch.Tensor) -> tuple[dict[str, int], dict[str, TopLogprobs]]:
        """Sample the next token of every chunk that reaches the end of its sequence."""
        chunks: list[Chunk] = []
        last_rows: list[int] = []
        row = 0
        for chunk in step.chunks:
            row += chunk.length
            if chunk.samples:
                chunks.append(chunk)
                last_rows.append(row - 1)
        if not chunks:
            return {}, {}
        rows = [self._sampling_row(chunk.request_id) for chunk in chunks]
        result = self._sampler.sample(self._runner.logits(hidden, last_rows), rows)
        names = [chunk.request_id for chunk in chunks]
        logprobs = {name: row for name, row in zip(names, result.logprobs, strict=True) if row is not None}
        return dict(zip(names, result.token_ids, strict=True)), logprobs

    def _sampling_row(self, request_id: str) -> SamplingRow:
        state = self._tokens[request_id]
        prompt = len(state.request.prompt_token_ids)
        return SamplingRow(
            params=state.request.params,
            seed=state.request.seed,
            prompt_token_ids=state.request.prompt_token_ids,
            output_token_ids=state.tokens[prompt:],
            mask_token_ids=state.request.mask_token_ids,
        )

    def _collect_prompt_logprobs(self, step: ScheduledStep, hidden: torch.Tensor) -> None:
        """Row t of a prompt gives the log-probability of prompt token t + 1; recomputed rows give none again."""
        row = 0
        for chunk in step.chunks:
            state = self._tokens[chunk.request_id]
            wanted = state.request.params.prompt_logprobs
            prompt = state.request.prompt_token_ids
            if wanted is not None:
                first, last = max(chunk.start + 1, state.prompt_logprobs_done), min(chunk.end + 1, len(prompt))
                for start in range(first, last, PROMPT_LOGIT_ROWS):
                    stop = min(start + PROMPT_LOGIT_ROWS, last)
                    rows = range(row + start - 1 - chunk.start, row + stop - 1 - chunk.start)
                    state.pending_prompt_logprobs += top_logprobs(
                        self._runner.logits(hidden, rows), prompt[start:stop], wanted
                    )
                state.prompt_logprobs_done = max(last, state.prompt_logprobs_done)
            row += chunk.length
