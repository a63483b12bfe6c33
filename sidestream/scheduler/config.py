"""Limits that the scheduler keeps."""

from __future__ import annotations

from dataclasses import dataclass

from sidestream.errors import ConfigError

DEFAULT_PREFILL_QUANTUM = 64


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

    def __post_init__(self) -> None:
        least = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2, "prefill_quantum": 1}
        least |= {"block_size": 1, "num_blocks": 2} if self.uses_blocks else {}
        least |= {"num_slots": 2} if self.uses_slots else {}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise ConfigError(f"{name} is {getattr(self, name)}, at least {limit} is needed")
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
