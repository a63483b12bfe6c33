"""Unfinished requests and the tokens that they have: what an engine begins again with after a step failed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sidestream.core.batch import Admission
from sidestream.core.outputs import CacheReason, EngineOutput, TopLogprobs
from sidestream.core.request import Request
from sidestream.engine.token_masks import TokenMasks


@dataclass(slots=True)
class RequestState:
    """A request with the tokens it has so far."""

    request: Request
    tokens: list[int]
    unread: int = 0
    """Tokens that were sampled and not read yet: at most one, in ``row`` of the last step's sampled tokens."""
    row: int = -1
    prompt_logprobs_done: int = 1
    """Prompt tokens whose log-probability was computed; the first has none."""
    prompt_logprobs_given: int = 1
    """Those of them that were put out; the others wait for the first token."""
    pending_prompt_logprobs: list[TopLogprobs] = field(default_factory=list)
    admission: Admission | None = None
    """The first one; later ones, after a preemption, take over what it computed itself."""
    added: float = field(default_factory=time.monotonic)
    queued: float | None = None
    """Seconds from then to the first admission."""
    mask_follows: bool = True
    """Its form, if its text must have one, was told of every token; False while it is being told."""

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt_token_ids) :]

    def admit(self, admission: Admission) -> None:
        """It begins to run."""
        self.admission = self.admission or admission
        if self.queued is None:
            self.queued = time.monotonic() - self.added

    def beginning(self) -> tuple[int, CacheReason | None, float]:
        """What the first output alone says: of the prefix cache, and of the queue."""
        if self.admission is None or len(self.tokens) > len(self.request.prompt_token_ids):
            return 0, None, 0.0
        return self.admission.cached_tokens, self.admission.reason, self.queued or 0.0


@dataclass(frozen=True, slots=True)
class Posted:
    """An output, put out, with what its request must know of that.

    Attributes:
        position: of its token in the sequence.
        prompt_logprobs: how many are given with it and before it.
    """

    output: EngineOutput
    position: int
    prompt_logprobs: int


class Unfinished:
    """Requests by their ids. Whatever is interrupted within here, ``rewind`` puts right.

    Args:
        masks: follow requests whose text must have a given form.
    """

    def __init__(self, masks: TokenMasks) -> None:
        self._masks = masks
        self._states: dict[str, RequestState] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def __getitem__(self, request_id: str) -> RequestState:
        return self._states[request_id]

    def __iter__(self) -> Iterator[RequestState]:
        """In the order in which they came."""
        return iter(self._states.values())

    def add(self, request: Request) -> None:
        """A request came; RequestError if its form cannot be followed."""
        self._masks.add(request)
        self._states[request.request_id] = RequestState(request, list(request.prompt_token_ids))

    def drop(self, request_id: str) -> None:
        """A request has ended, or never was."""
        self._masks.drop(request_id)
        self._states.pop(request_id, None)

    def tell(self, posted: Posted) -> None:
        """Tell a request what was put out for it; a second time changes nothing."""
        output, state = posted.output, self._states.get(posted.output.request_id)
        if state is None:
            return
        if posted.prompt_logprobs > state.prompt_logprobs_given:
            state.prompt_logprobs_given = posted.prompt_logprobs
            state.pending_prompt_logprobs.clear()
        if output.token_id is not None and len(state.tokens) == posted.position:
            state.mask_follows = False
            state.tokens.append(output.token_id)
            self._masks.accept(output.request_id, output.token_id)
            state.mask_follows = True
        if output.finish_reason is not None:
            self.drop(output.request_id)

    def rewind(self, outbox: Iterable[Posted], *, aborted: Iterable[str]) -> None:
        """Keep what was put out, and nothing else of the steps that were on their way."""
        for name in aborted:
            self.drop(name)
        for posted in outbox:
            self.tell(posted)
        for state in self:
            if not state.mask_follows:
                self._follow_anew(state)
            state.pending_prompt_logprobs.clear()
            state.prompt_logprobs_done = state.prompt_logprobs_given
            state.unread = 0
            state.admission = None

    def _follow_anew(self, state: RequestState) -> None:
        """Whether its form was told of its last token is not known."""
        name = state.request.request_id
        self._masks.drop(name)
        self._masks.add(state.request)
        for token in state.generated:
            self._masks.accept(name, token)
        state.mask_follows = True
