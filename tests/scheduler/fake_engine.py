"""A device that forgets nothing by itself: tokens live in blocks and slots only, so a wrong one changes the answer."""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

from sidestream.core.batch import ScheduledStep
from sidestream.core.outputs import TokenEvent
from sidestream.core.request import FinishReason, Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.scheduler.config import SchedulerConfig
from sidestream.scheduler.scheduler import Scheduler

VOCAB = 50


def make_config(**overrides: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 200,
        "block_size": 4,
        "num_blocks": 101,
        "num_slots": 5,
        "uses_blocks": True,
        "uses_slots": True,
        "prefill_quantum": 4,
    }
    return SchedulerConfig(**(values | overrides))  # type: ignore[arg-type]


def make_request(
    name: str,
    prompt: int | tuple[int, ...],
    *,
    max_tokens: int = 8,
    stop: tuple[int, ...] = (),
    min_tokens: int = 0,
) -> Request:
    if isinstance(prompt, int):
        prompt = tuple((zlib.crc32(name.encode()) + 7 * i) % VOCAB for i in range(prompt))
    params = SamplingParams(max_tokens=None, min_tokens=min_tokens)
    return Request(name, prompt, params, 0, max_tokens, frozenset(stop), stop)


def next_token(tokens: list[int] | tuple[int, ...]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCAB


def solo_run(request: Request, config: SchedulerConfig) -> tuple[list[int], FinishReason]:
    """What the request gives alone, straight from the definition."""
    tokens = list(request.prompt_token_ids)
    outputs: list[int] = []
    pool = (config.num_blocks - 1) * config.block_size + 1 if config.uses_blocks else config.max_model_len
    while True:
        outputs.append(next_token(tokens))
        tokens.append(outputs[-1])
        if outputs[-1] in request.stop_token_ids and len(outputs) >= request.params.min_tokens:
            return outputs, FinishReason.STOP
        if len(outputs) == request.max_tokens or len(tokens) == min(config.max_model_len, pool):
            return outputs, FinishReason.LENGTH


@dataclass
class FakeEngine:
    """Runs steps in order; commits them ``depth`` steps late."""

    config: SchedulerConfig
    depth: int = 0
    scheduler: Scheduler = field(init=False)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    states: dict[int, tuple[int, ...]] = field(default_factory=dict)
    steps: list[ScheduledStep] = field(default_factory=list)
    pending: deque[tuple[ScheduledStep, dict[str, int]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.tokens[request.request_id] = list(request.prompt_token_ids)
        self.prompts[request.request_id] = request.prompt_token_ids
        self.outputs[request.request_id] = []

    def abort(self, name: str) -> bool:
        found = self.scheduler.abort(name)
        self.reasons.setdefault(name, FinishReason.ABORT)
        return found

    def step(self) -> list[TokenEvent]:
        step = self.scheduler.schedule()
        if step is not None:
            self.steps.append(step)
            self.pending.append((step, self.execute(step)))
        self.scheduler.check_integrity()
        if not self.pending or (step is not None and len(self.pending) <= self.depth):
            return []
        events = self.scheduler.commit(*self.pending.popleft())
        for event in events:
            self.outputs[event.request_id].append(event.token_id)
            if event.finish_reason is not None:
                self.reasons[event.request_id] = event.finish_reason
        self.scheduler.check_integrity()
        return events

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"still {self.scheduler.num_running} running after {limit} steps")

    def execute(self, step: ScheduledStep) -> dict[str, int]:
        """The device: reads earlier tokens only through the chunk's blocks and slot."""
        assert 0 < step.num_tokens <= self.config.max_num_batched_tokens, step.num_tokens
        assert len({chunk.request_id for chunk in step.chunks}) == len(step.chunks)
        kinds = [chunk.is_decode for chunk in step.chunks]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        sampled = {}
        written: list[int] = []
        for copy in step.restores:
            self.states[copy.target] = self.states[copy.source]
        for chunk in step.chunks:
            known = self.tokens[chunk.request_id]
            own = known[chunk.start : chunk.end]
            assert len(own) == chunk.length, "a chunk runs past the known tokens"
            assert chunk.samples == (chunk.end == len(known)), chunk
            assert not chunk.is_decode or (chunk.length == 1 and chunk.start > 0), chunk
            committed = len(self.prompts[chunk.request_id]) + len(self.outputs[chunk.request_id])
            assert chunk.is_decode or chunk.end <= committed, "only a decode may run a token that is still unknown"
            history = tuple(known[: chunk.end])
            if self.config.uses_blocks:
                assert 0 not in chunk.block_ids, chunk
                size = self.config.block_size
                at = [chunk.block_ids[p // size] * size + p % size for p in range(chunk.end)]
                assert len(chunk.block_ids) == -(-chunk.end // size)
                self.rows.update(zip(at[chunk.start :], own, strict=True))
                history = tuple(self.rows[row] for row in at)
            if self.config.uses_slots:
                assert chunk.slot != 0, chunk
                before = self.states[chunk.slot] if chunk.start else ()
                self.states[chunk.slot] = before + tuple(own)
                assert self.states[chunk.slot] == history, f"slot and blocks of {chunk.request_id} disagree"
            assert not (chunk.is_decode and chunk.splits), chunk
            for split in chunk.splits:
                assert chunk.start < split.position < chunk.end, chunk
                written.append(split.slot)
                self.states[split.slot] = history[: split.position]
            if chunk.samples:
                sampled[chunk.request_id] = next_token(history)
        written += [copy.target for copy in step.snapshots]
        assert len(set(written)) == len(written), "two states of one step go to the same slot, in no order"
        for copy in step.snapshots:
            self.states[copy.target] = self.states[copy.source]
        for admission in step.admitted:
            self.cached[admission.request_id] = admission.cached_tokens
        for name, token in sampled.items():
            self.tokens[name].append(token)
        return sampled
