"""What the scheduler knows of one sequence: counts and ownership, never a token's value."""

from __future__ import annotations

from sidestream.cache.cached_sequence import CachedSequence, Hit
from sidestream.core.batch import SCRATCH_SLOT
from sidestream.core.outputs import CacheReason
from sidestream.core.request import FinishReason, Request

NO_HIT = Hit(reason=CacheReason.DISABLED)
"""Nothing is taken over."""


class Sequence:
    """A request on its way through the engine.

    Attributes:
        arrival: order of arrival.
        max_tokens: the request's own, and no more than the room.
        num_outputs: committed tokens.
        num_in_flight: tokens that planned steps will sample, not yet committed.
        num_computed: positions that planned steps have computed or will.
        prefill_target: tokens known when it was admitted: the prompt, after a preemption the generated tokens too.
            Up to there it is prefilling.
        block_ids: the blocks it owns, covering the computed positions.
        prefix: what the prefix cache knows of it; None without one.
        hit: what it can take over, while it is about to be admitted.
        restore_from: the snapshot that its first chunk continues from, until that is planned.
        waited: steps for which it waited for a prefix that another one computes.
        served_step: last step that served its prefill, or before which it arrived.
    """

    __slots__ = (
        "arrival",
        "block_ids",
        "finished",
        "hit",
        "max_tokens",
        "num_computed",
        "num_in_flight",
        "num_outputs",
        "preempted",
        "prefill_target",
        "prefix",
        "request",
        "restore_from",
        "running",
        "served_step",
        "slot",
        "waited",
    )

    def __init__(self, request: Request, *, arrival: int, max_tokens: int, served_step: int) -> None:
        self.request = request
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.served_step = served_step
        self.num_outputs = 0
        self.num_in_flight = 0
        self.num_computed = 0
        self.prefill_target = len(request.prompt_token_ids)
        self.block_ids: tuple[int, ...] = ()
        self.slot = SCRATCH_SLOT
        self.running = False
        self.finished = False
        self.preempted = False
        self.prefix: CachedSequence | None = None
        self.hit = NO_HIT
        self.restore_from: int | None = None
        self.waited = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_known(self) -> int:
        """Tokens of the sequence, those in flight included."""
        return len(self.request.prompt_token_ids) + self.num_outputs + self.num_in_flight

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_target

    @property
    def prefill_start(self) -> int:
        """Where its next prefill chunk begins: behind what it has, or would take over."""
        return self.num_computed if self.running else self.hit.num_tokens

    @property
    def can_decode(self) -> bool:
        """Its next token can be planned: the prompt is done and the length limit, which needs no value, not reached."""
        return not self.is_prefilling and self.num_outputs + self.num_in_flight < self.max_tokens

    def finish_reason(self, token: int, *, stopped: bool) -> FinishReason | None:
        """Whether this token, already counted, is its last; ``stopped`` by a string."""
        request = self.request
        if stopped or (token in request.stop_token_ids and self.num_outputs >= request.params.min_tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_outputs >= self.max_tokens else None

    def restart(self) -> None:
        """Forget what was computed: its memory is gone, its tokens are kept."""
        self.num_computed = 0
        self.prefill_target = self.num_known
        self.block_ids = ()
        self.slot = SCRATCH_SLOT
        self.running = False
        self.hit = NO_HIT
        self.restore_from = None


def by_arrival(sequence: Sequence) -> int:
    """Sort key of the queues."""
    return sequence.arrival
