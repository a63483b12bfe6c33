"""Limits that the scheduler keeps."""

from __future__ import annotations

from dataclasses import dataclass

from sidestream.cache.prefix_cache import FIRST_GUESS_TOKENS
from sidestream.core.request import Request
from sidestream.errors import CapacityError, ConfigError, RequestError

DEFAULT_PREFILL_QUANTUM = 64
DEFAULT_SHARED_PREFIX_WAIT = 256
PACED_SHARED_PREFIX_WAIT = 4096
"""With a pacer, whose chunks are small: a prompt may take so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Args:
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens a step. Never more sequences run than this, so each running sequence gets at
            least its decode token in every step.
        max_model_len: tokens of a sequence, prompt and completion.
        block_size, num_blocks: of the block pool, scratch block included; ignored unless ``uses_blocks``.
        num_slots: state slots, scratch slot included; ignored unless ``uses_slots``.
        prefill_quantum: a prefilling sequence gets at least that many tokens in a step that serves it (less only if it
            needs less, or the budget is smaller). With more prefilling sequences than that leaves room for, they take
            turns: chunks of a token or two would waste a step on overhead.
        watermark: share of the blocks that must stay free after a sequence is admitted beside others, so that running
            sequences can grow a little before one must be preempted.
        prefix_caching: let sequences take over computed prefixes; needs blocks.
        needs_snapshots: some layer has state that blocks do not hold, so a prefix needs a snapshot too.
        num_snapshots: slots for them, behind the ``num_slots`` others.
        snapshot_interval: blocks between snapshots within a prompt; None takes them only where prompts end or part.
        first_guess: tokens of the shortest prefix that is guessed to be shared: a snapshot is taken behind it, and
            behind each of twice the length.
        prefix_salt: what cached content depends on beside the tokens.
        shared_prefix_wait: steps that a sequence waits at most for one that computes the same prefix.
        max_prefill_context: full blocks, in all, that the prefills of a step may have behind them; one sequence may
            always. None is no limit.
    Raises:
        ConfigError: naming the value and the limit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_slots: int
    uses_blocks: bool
    uses_slots: bool
    prefill_quantum: int = DEFAULT_PREFILL_QUANTUM
    watermark: float = 0.01
    prefix_caching: bool = False
    needs_snapshots: bool = False
    num_snapshots: int = 0
    snapshot_interval: int | None = None
    first_guess: int = FIRST_GUESS_TOKENS
    prefix_salt: bytes = b""
    shared_prefix_wait: int = DEFAULT_SHARED_PREFIX_WAIT
    max_prefill_context: int | None = None

    def __post_init__(self) -> None:
        least = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2, "prefill_quantum": 1}
        least |= {"block_size": 1, "num_blocks": 2} if self.uses_blocks else {}
        least |= {"num_slots": 2} if self.uses_slots else {}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise ConfigError(f"{name} is {getattr(self, name)}, at least {limit} is needed")
        if self.prefix_caching and not self.uses_blocks:
            raise ConfigError("prefix_caching is on, but no layer keeps KV blocks that could be shared")
        apart = min(self.snapshot_interval or 1, self.first_guess)
        if self.num_snapshots < 0 or self.shared_prefix_wait < 0 or apart < 1:
            raise ConfigError(
                f"num_snapshots {self.num_snapshots} and shared_prefix_wait {self.shared_prefix_wait} must be at least "
                f"0, snapshot_interval {self.snapshot_interval} and first_guess {self.first_guess} at least 1"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark is {self.watermark}, allowed is a share from 0 to below 1")

    @property
    def max_running(self) -> int:
        """Sequences that can run at once."""
        running = min(self.max_num_seqs, self.max_num_batched_tokens)
        return min(running, self.num_slots - 1) if self.uses_slots else running

    @property
    def pool_tokens(self) -> int | None:
        """Tokens that the block pool can hold for one sequence; None without blocks."""
        return (self.num_blocks - 1) * self.block_size if self.uses_blocks else None

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.num_blocks) if self.uses_blocks else 0

    def room(self, num_prompt_tokens: int) -> int:
        """Most tokens that can be generated after such a prompt; the last one is never computed, so needs no block."""
        room = self.max_model_len - num_prompt_tokens
        return room if self.pool_tokens is None else min(room, self.pool_tokens + 1 - num_prompt_tokens)


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Refuse what could never run.

    Raises:
        RequestError: the prompt is empty or too long for ``max_model_len``.
        CapacityError: the block pool could never hold the prompt.
    """
    name, prompt = request.request_id, len(request.prompt_token_ids)
    if prompt == 0:
        raise RequestError(f"request {name!r} has an empty prompt; at least one token is needed")
    if request.max_tokens < 1:
        raise RequestError(f"request {name!r} asks for max_tokens {request.max_tokens}, at least 1 is needed")
    if prompt + 1 > config.max_model_len:
        raise RequestError(
            f"request {name!r} has a prompt of {prompt} tokens; with one generated token it passes max_model_len "
            f"{config.max_model_len}; shorten the prompt or raise max_model_len"
        )
    if config.room(prompt) < 1:
        raise CapacityError(
            f"request {name!r} has a prompt of {prompt} tokens; the KV block pool holds {config.pool_tokens} "
            f"({config.num_blocks - 1} blocks of {config.block_size}); raise num_blocks or memory_limit"
        )
