"""The engine core: plans a step, runs it, samples, commits. Requests and outputs are plain data, no text in between."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sidestream.cache.block_hashes import chain_root
from sidestream.core.batch import Chunk, ScheduledStep
from sidestream.core.outputs import EngineOutput, TopLogprobs
from sidestream.core.request import Request
from sidestream.engine.build import BuiltEngine
from sidestream.engine.logprobs import PROMPT_LOGIT_ROWS, top_logprobs
from sidestream.engine.runner import StepOutput
from sidestream.engine.sampled_tokens import PendingTokens, SampledTokens
from sidestream.engine.sampler import Sampler, SamplingRow
from sidestream.engine.step_clock import StepClock
from sidestream.engine.token_masks import NoMasks, TokenMasks
from sidestream.engine.unfinished import Posted, RequestState, Unfinished
from sidestream.scheduler.config import DEFAULT_SHARED_PREFIX_WAIT, PACED_SHARED_PREFIX_WAIT, SchedulerConfig
from sidestream.scheduler.prefill_pacer import PrefillPacer
from sidestream.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose tokens were not read yet.

    Attributes:
        sampled: the requests it samples for, in the order of the rows.
        ended: when the host saw its end, if it waited for that before anything else.
    """

    step: ScheduledStep
    sampled: tuple[tuple[str, RequestState], ...]
    pending: PendingTokens | None
    logprobs: dict[str, TopLogprobs]
    ended: float | None = None


class EngineCore:
    """Continuous batching over one built engine. A core begins with an empty prefix cache, and is not to be used again
    after another one has used the same pools.

    On a device that runs beside the host, step n + 1 is planned and launched before the tokens of step n are read:
    they go from one step to the next on the device. A step that needs them on the host (penalties, log-probabilities)
    waits, which ``waits`` counts.

    Args:
        masks: follow requests whose text must have a given form; None refuses those.
        clock: what steps take, for the pacer; None is the machine's.

    Attributes:
        waits: reason -> steps that the host waited for before it launched the next.
        outbox: what steps put out, for whoever calls ``advance``.
        step_sizes: power of two -> steps of so many tokens, or fewer but more than half.
        num_tokens: of all steps.
        scheduler: its counters say what happened.
    """

    def __init__(self, built: BuiltEngine, *, masks: TokenMasks | None = None, clock: StepClock | None = None) -> None:
        config = built.config
        self._masks: TokenMasks = NoMasks() if masks is None else masks
        self._runner = built.runner
        self._pools = built.pools
        self._sampler = Sampler(config.model.vocab_size)
        self._depth = 1 if config.device == "cpu" else 2
        with self._runner.on_device():
            self._sampled = SampledTokens(self._runner.streams, config.max_num_seqs, depth=self._depth)
        self._launched: deque[_Launched] = deque()
        self.waits: Counter[str] = Counter()
        self.step_sizes: Counter[int] = Counter()
        self.num_tokens = 0
        self._unfinished = Unfinished(self._masks)
        self._changing = False
        self._half_done = False
        self._aborts: deque[str] = deque()
        self.outbox: deque[Posted] = deque()
        self._pacer = PrefillPacer() if config.prefill_pacing else None
        self._clock = StepClock() if clock is None else clock
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
                prefix_caching=config.prefix_caching,
                needs_snapshots=config.needs_snapshots,
                num_snapshots=built.num_snapshots,
                snapshot_interval=config.snapshot_interval,
                max_prefill_context=None if built.pools.hosted is None else built.pools.hosted.sizes.context_limit,
                shared_prefix_wait=DEFAULT_SHARED_PREFIX_WAIT if self._pacer is None else PACED_SHARED_PREFIX_WAIT,
                prefix_salt=chain_root(repr((config.model, config.dtype, config.kv_cache_dtype)).encode()),
            ),
            pacer=self._pacer,
        )

        if self._runner.hisparse is not None:
            self._runner.hisparse.placement.is_dead = self.scheduler.is_dead_block

    def add(self, request: Request) -> None:
        """Queue a request; RequestError or CapacityError if it can never run. If it fails, by an interrupt for example,
        nothing has changed."""
        self._change(lambda: self._add(request))

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; whether there was one.

        While something else changes (a collected iterator may call from within a step) the request ends right after it.
        If this is interrupted, the request ends with the next call of anything, unless it was there untouched.
        """
        known = request_id in self._unfinished
        if known:
            self._aborts.append(request_id)
            if not self._changing:
                self._change(lambda: None)
        return known

    def has_work(self) -> bool:
        """Some request is unfinished, or something was put out that no call of ``step`` has returned."""
        if (self._half_done or self._aborts) and not self._changing:
            self._change(lambda: None)
        return self.scheduler.has_work() or bool(self.outbox)

    def step(self) -> list[EngineOutput]:
        """Run one step; what it gave each request that got something."""
        self.advance()
        outputs, self.outbox = [posted.output for posted in self.outbox], deque()
        return outputs

    def advance(self) -> None:
        """Run one step; what it gave is in ``outbox``, whose content is the caller's to take.

        If it fails, by an interrupt for example, the error goes to the caller and no request is lost: the steps after
        it compute all of them anew, from the tokens they have.
        """
        self._change(self._step)

    def _change(self, work: Callable[[], None]) -> None:
        """Do what changes more than one thing at a time, and then what was asked for meanwhile.

        An interrupt may come anywhere. What it leaves half done is begun again, from the tokens that requests have; if
        that is interrupted too, with the next call.
        """
        assert not self._changing, "a request was added, or a step started, within a step"
        try:
            self._changing = True
            if self._half_done:
                self._recover()
            self._end_aborted()
            self._half_done = True
            work()
            self._half_done = False
        finally:
            try:
                if self._half_done:
                    self._recover()
                self._end_aborted()
            finally:
                self._changing = False

    def _add(self, request: Request) -> None:
        name = request.request_id
        known = name in self._unfinished
        try:
            self.scheduler.add(request)
            self._unfinished.add(request)
            self._half_done = False
        except BaseException:
            if not known:
                self._unfinished.drop(name)
                self.scheduler.abort(name)
            self._half_done = False
            raise

    def _end_aborted(self) -> None:
        while self._aborts:
            self._half_done = True
            name = self._aborts[0]
            self._unfinished.drop(name)
            self.scheduler.abort(name)
            self._half_done = False
            self._aborts.popleft()

    def _step(self) -> None:
        done = False
        self._clock.begin()
        try:
            with self._runner.on_device():
                self._wait_where_needed()
                if (step := self.scheduler.schedule()) is not None:
                    self._launched.append(self._launch(step))
                    self.scheduler.remember()  # while the device is at work
                while len(self._launched) >= (self._depth if step is not None else 1):
                    self._finish(self._launched.popleft())
            done = self.scheduler.has_work()
        finally:
            if not done:
                self._clock.pause()

    @torch.inference_mode()
    def _launch(self, step: ScheduledStep) -> _Launched:
        """Forward and sample; nothing is read on the host but what a request asks to see."""
        for admission in step.admitted:
            self._unfinished[admission.request_id].admit(admission)
        token_ids, sources = self._token_ids(step)
        self.step_sizes[1 << (len(token_ids) - 1).bit_length()] += 1
        self.num_tokens += len(token_ids)
        self._pools.copy_slots(step.restores)
        output = self._runner.forward(
            step.chunks, token_ids, sources=sources, sampled=self._sampled.device, asked=self._asked_rows(step)
        )
        self._pools.copy_slots(step.snapshots)
        self._collect_prompt_logprobs(step, output)
        return self._sample(step, output)

    def _wait_where_needed(self) -> None:
        """Read what was launched before the next step is planned, if that step needs it on the host."""
        params = [state.request.params for _, state in self._launched[-1].sampled] if self._launched else []
        reason = None
        if any(p.has_penalties for p in params):
            reason = "penalties count the tokens so far"
        elif any(p.structured_outputs is not None for p in params):
            reason = "what may follow depends on the tokens so far"
        if reason is not None:
            self.waits[reason] += 1
            while self._launched:
                self._finish(self._launched.popleft())

    def _finish(self, launched: _Launched) -> None:
        """Read a step's tokens, commit them, put them out."""
        tokens: list[int] = launched.pending.read() if launched.pending is not None else []
        self._time(launched)
        sampled: dict[str, int] = {}
        for (name, state), token in zip(launched.sampled, tokens, strict=True):
            sampled[name] = token
            state.unread -= 1
        for event in self.scheduler.commit(launched.step, sampled):
            state = self._unfinished[event.request_id]
            output = EngineOutput(
                event.request_id,
                event.token_id,
                event.finish_reason,
                launched.logprobs.get(event.request_id),
                tuple(state.pending_prompt_logprobs),
                *state.beginning(),
            )
            self.outbox.append(Posted(output, len(state.tokens), state.prompt_logprobs_done))
            self._unfinished.tell(self.outbox[-1])

    def _time(self, launched: _Launched) -> None:
        """Tell the pacer what a step took that has just ended."""
        ended = launched.ended
        if ended is None and (launched.pending is not None or self._depth == 1):
            ended = self._clock.now()
        seconds = self._clock.end(ended)
        if self._pacer is not None and seconds is not None:
            num_decodes = sum(chunk.is_decode for chunk in launched.step.chunks)
            self._pacer.observe(num_decodes, launched.step.num_tokens - num_decodes, seconds)

    def _recover(self) -> None:
        """Begin again with what every unfinished request has, what was put out before the error included."""
        with contextlib.suppress(RuntimeError):  # a broken device says so again; the error being handled comes first
            self._runner.settle()
        self._launched.clear()
        if self._runner.hisparse is not None:
            self._runner.hisparse.reset()
        self._unfinished.rewind(self.outbox, aborted=tuple(self._aborts))
        self.scheduler.restart((state.request, state.generated) for state in self._unfinished)
        self._half_done = False

    def _token_ids(self, step: ScheduledStep) -> tuple[list[int], list[int] | None]:
        """The step's tokens; 0 where the last step sampled one that was not read, and then the rows of those too."""
        ids: list[int] = []
        unread: dict[int, int] = {}
        for chunk in step.chunks:
            state = self._unfinished[chunk.request_id]
            ids += state.tokens[chunk.start : chunk.end]
            if chunk.end > len(state.tokens):
                assert chunk.end == len(state.tokens) + state.unread == len(state.tokens) + 1, f"{chunk} is ahead"
                unread[len(ids)] = state.row
                ids.append(0)
        return ids, [unread.get(i, -1) for i in range(len(ids))] if unread else None

    def _asked_rows(self, step: ScheduledStep) -> list[int] | None:
        """Rows of the step that are read from: where sequences end, or any row where a prompt's log-probabilities are
        wanted."""
        for chunk in step.chunks:
            params = self._unfinished[chunk.request_id].request.params
            if params.prompt_logprobs is not None and not chunk.is_decode:
                return None
        return _ends(step)[1] or [0]

    def _sample(self, step: ScheduledStep, output: StepOutput) -> _Launched:
        """Sample the next token of every chunk that reaches the end of its sequence."""
        chunks, last_rows = _ends(step)
        if not chunks:
            return _Launched(step, (), None, {})
        rows = [self._sampling_row(chunk) for chunk in chunks]
        logits = self._runner.logits(output, last_rows)
        bitmask = self._masks.bitmask([chunk.request_id for chunk in chunks])
        if bitmask is not None:
            bitmask = bitmask.to(logits.device)
        pending = self._sampled.keep(self._sampler.choose(logits, rows, bitmask=bitmask))
        sampled = tuple((chunk.request_id, self._unfinished[chunk.request_id]) for chunk in chunks)
        logprobs: dict[str, TopLogprobs] = {}
        ended = None
        if any(row.params.logprobs is not None for row in rows):
            tokens, ended = pending.read(), self._clock.now()
            found = self._sampler.logprobs(logits, rows, tokens)
            logprobs = {chunk.request_id: top for chunk, top in zip(chunks, found, strict=True) if top is not None}
            if self._depth > 1:
                self.waits["log-probabilities were asked for"] += 1
        for place, (_, state) in enumerate(sampled):
            state.unread += 1
            state.row = place
        return _Launched(step, sampled, pending, logprobs, ended)

    def _sampling_row(self, chunk: Chunk) -> SamplingRow:
        state = self._unfinished[chunk.request_id]
        request, prompt = state.request, len(state.request.prompt_token_ids)
        assert not (request.params.has_penalties and state.unread), f"{request.request_id} has a token yet to be read"
        return SamplingRow(
            params=request.params,
            seed=request.seed,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=state.tokens[prompt:] if request.params.has_penalties else (),
            mask_token_ids=request.mask_token_ids,
            num_outputs=len(state.tokens) - prompt + state.unread,
        )

    def _collect_prompt_logprobs(self, step: ScheduledStep, output: StepOutput) -> None:
        """Row t of a prompt gives the log-probability of prompt token t + 1; recomputed rows give none again."""
        row = 0
        for chunk in step.chunks:
            state = self._unfinished[chunk.request_id]
            wanted = state.request.params.prompt_logprobs
            prompt = state.request.prompt_token_ids
            if wanted is not None:
                first, last = max(chunk.start + 1, state.prompt_logprobs_done), min(chunk.end + 1, len(prompt))
                for start in range(first, last, PROMPT_LOGIT_ROWS):
                    stop = min(start + PROMPT_LOGIT_ROWS, last)
                    rows = range(row + start - 1 - chunk.start, row + stop - 1 - chunk.start)
                    state.pending_prompt_logprobs += top_logprobs(
                        self._runner.logits(output, rows), prompt[start:stop], wanted
                    )
                state.prompt_logprobs_done = max(last, state.prompt_logprobs_done)
            row += chunk.length


def _ends(step: ScheduledStep) -> tuple[list[Chunk], list[int]]:
    """Chunks that reach the end of their sequence, and the last row of each in the step."""
    chunks: list[Chunk] = []
    rows: list[int] = []
    row = 0
    for chunk in step.chunks:
        row += chunk.length
        if chunk.samples:
            chunks.append(chunk)
            rows.append(row - 1)
    return chunks, rows
