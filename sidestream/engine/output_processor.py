"""Turns the engine core's tokens into what a user sees: text, stop strings, log-probabilities, finished outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sidestream.core.outputs import CompletionOutput, EngineOutput, Logprob, RequestOutput, TopLogprobs
from sidestream.core.request import FinishReason, Request
from sidestream.engine.detokenizer import IncrementalDetokenizer
from sidestream.engine.input_processor import ProcessedPrompt


@dataclass(slots=True)
class _Completion:
    request: Request
    output: CompletionOutput
    detokenizer: IncrementalDetokenizer | None


@dataclass(slots=True)
class _Prompt:
    output: RequestOutput
    completions: list[_Completion] = field(default_factory=list)


class OutputProcessor:
    """Keeps the visible state of every unfinished request.

    Args:
        tokenizer: a transformers tokenizer; None leaves every text empty.
        eos_token_ids: reported as a plain stop, without ``stop_reason``.
    """

    def __init__(self, tokenizer: Any | None, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._prompts: dict[str, _Prompt] = {}
        self._by_request: dict[str, tuple[_Prompt, _Completion]] = {}

    def add(self, prompt: ProcessedPrompt) -> RequestOutput:
        """Start following a prompt's requests."""
        params = prompt.params
        output = RequestOutput(prompt.request_id, prompt.text, list(prompt.token_ids))
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        self._prompts[prompt.request_id] = state = _Prompt(output)
        for index, request in enumerate(prompt.requests):
            completion = CompletionOutput(index, "", [], logprobs=[] if params.logprobs is not None else None)
            detokenizer = None
            if self._tokenizer is not None:
                detokenizer = IncrementalDetokenizer(self._tokenizer, params, prompt_token_ids=request.prompt_token_ids)
            state.completions.append(_Completion(request, completion, detokenizer))
            output.outputs.append(completion)
            self._by_request[request.request_id] = (state, state.completions[-1])
        return output

    def follows(self, request_id: str) -> bool:
        """The request is unfinished; later tokens of one that a stop string ended are to be dropped."""
        return request_id in self._by_request

    def push(self, event: EngineOutput) -> bool:
        """Take one token of one request. Returns True if a stop string ended it: the core must then abort it."""
        state, completion = self._by_request[event.request_id]
        output, detokenizer, params = completion.output, completion.detokenizer, completion.request.params
        if event.cache_reason is not None and output.index == 0:
            state.output.cached_tokens, state.output.cache_reason = event.cached_tokens, event.cache_reason
        if event.prompt_logprobs and state.output.prompt_logprobs is not None and output.index == 0:
            state.output.prompt_logprobs.extend(self._logprobs(row) for row in event.prompt_logprobs)
        if event.token_id is None:
            return False
        output.token_ids.append(event.token_id)
        if output.logprobs is not None and event.logprobs is not None:
            output.logprobs.append(self._logprobs(event.logprobs))
        reason = event.finish_reason
        if reason is FinishReason.STOP and event.token_id not in self._eos:
            output.stop_reason = event.token_id
        stopped = False
        if detokenizer is not None:
            if reason is not FinishReason.STOP or params.include_stop_str_in_output:
                output.text += detokenizer.push(event.token_id)
            if reason is not None:
                output.text += detokenizer.finish(reason)
            if detokenizer.stop_string is not None:  # completed by this token, or by bytes held back until now
                stopped = reason is None
                reason, output.stop_reason = FinishReason.STOP, detokenizer.stop_string
        if reason is not None:
            self._close(completion, reason)
        return stopped

    def abort(self, request_id: str) -> list[str]:
        """Close the unfinished completions of a prompt; returns the core's ids that must be aborted."""
        state = self._prompts.get(request_id)
        if state is None:
            return []
        open_ones = [c for c in state.completions if not c.output.finished]
        for completion in open_ones:
            if completion.detokenizer is not None:
                completion.output.text += completion.detokenizer.finish(FinishReason.ABORT)
            self._close(completion, FinishReason.ABORT)
        return [completion.request.request_id for completion in open_ones]

    def forget(self, request_id: str) -> None:
        """Stop following a prompt, whatever is left of it; its output stays as it is."""
        state = self._prompts.get(request_id)
        if state is not None:
            for completion in state.completions:
                self._by_request.pop(completion.request.request_id, None)
            self._prompts.pop(request_id, None)

    def _close(self, completion: _Completion, reason: FinishReason) -> None:
        completion.output.finish_reason = reason
        self._by_request.pop(completion.request.request_id, None)

    def _logprobs(self, row: TopLogprobs) -> dict[int, Logprob]:
        return {
            token: Logprob(logprob, rank, None if self._tokenizer is None else self._tokenizer.decode([token]))
            for token, logprob, rank in row
        }
