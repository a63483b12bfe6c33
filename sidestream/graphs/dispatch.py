"""Chooses how each step runs and how far it is padded, and counts why a step did not get the graph it asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.errors import ConfigError
from sidestream.graphs.sizes import capture_sizes, padded_size

CUDAGRAPH_SETTINGS: dict[str, tuple[CUDAGraphMode, CUDAGraphMode]] = {
    "none": (CUDAGraphMode.NONE, CUDAGraphMode.NONE),
    "piecewise": (CUDAGraphMode.PIECEWISE, CUDAGraphMode.PIECEWISE),
    "full": (CUDAGraphMode.FULL, CUDAGraphMode.NONE),
    "full_and_piecewise": (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE),
}
"""Setting -> mode of a uniform decode, mode of any other batch."""

NOT_UNIFORM = "the batch is not a uniform decode, and a full graph holds only those"
TOO_LARGE = "the batch is larger than the largest captured size"


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """What a captured shape is known by.

    Attributes:
        tokens: rows, padding included.
        query_length: tokens of each sequence in a uniform decode; 0 for a batch of any mix.
    """

    tokens: int
    query_length: int

    @property
    def uniform(self) -> bool:
        return self.query_length > 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """``mode`` is NONE, or there is a graph for ``key``; the padding follows ``key`` in every mode, so that modes
    give the same bits."""

    mode: CUDAGraphMode
    key: GraphKey


class GraphDispatcher:
    """Pure bookkeeping; captures nothing.

    Args:
        setting: a key of ``CUDAGRAPH_SETTINGS``.
        max_num_seqs: sequences a step.
        max_num_batched_tokens: tokens a step.
        max_capture_tokens: largest size captured for mixed batches; None captures up to the step's own limit.

    Attributes:
        largest_mixed: tokens of a mixed batch beyond which none is captured, whatever the setting.
        steps: how many steps were planned in each mode.
        fallbacks: reason -> steps that ran without the graph which the setting asks for.
    """

    def __init__(
        self,
        setting: str,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_capture_tokens: int | None = None,
    ) -> None:
        if setting not in CUDAGRAPH_SETTINGS:
            allowed = ", ".join(map(repr, CUDAGRAPH_SETTINGS))
            raise ConfigError(f"cudagraph_mode is {setting!r}, allowed are {allowed}")
        self.setting = setting
        self._decode_mode, self._mixed_mode = CUDAGRAPH_SETTINGS[setting]
        self.decode_sizes = capture_sizes(max_num_seqs)
        self.mixed_sizes = capture_sizes(max_num_batched_tokens)
        self.largest_mixed = max_num_batched_tokens if max_capture_tokens is None else max_capture_tokens
        self.steps: Counter[CUDAGraphMode] = Counter()
        self.fallbacks: Counter[str] = Counter()

    def captures(self) -> tuple[StepPlan, ...]:
        """Every shape to capture, largest first, so that all others fit into the memory of the first."""
        plans = []
        if self._decode_mode is not CUDAGraphMode.NONE:
            plans += [StepPlan(self._decode_mode, GraphKey(size, 1)) for size in self.decode_sizes]
        if self._mixed_mode is not CUDAGraphMode.NONE:
            sizes = [size for size in self.mixed_sizes if size <= self.largest_mixed]
            plans += [StepPlan(self._mixed_mode, GraphKey(size, 0)) for size in sizes]
        return tuple(sorted(plans, key=lambda plan: plan.key, reverse=True))

    def plan(self, tokens: int, *, uniform: bool) -> StepPlan:
        """How a step of ``tokens`` runs; ``uniform``: one decode token of each sequence."""
        sizes = self.decode_sizes if uniform else self.mixed_sizes
        padded = padded_size(tokens, sizes)
        assert padded is not None, f"a step of {tokens} tokens was scheduled, the limit is {sizes[-1]}"
        mode, reason = self._decode_mode if uniform else self._mixed_mode, None
        if not uniform and mode is CUDAGraphMode.NONE and self._decode_mode is not CUDAGraphMode.NONE:
            reason = NOT_UNIFORM
        elif not uniform and mode is not CUDAGraphMode.NONE and padded > self.largest_mixed:
            mode, reason = CUDAGraphMode.NONE, TOO_LARGE
        if reason is not None:
            self.fallbacks[reason] += 1
        self.steps[mode] += 1
        return StepPlan(mode, GraphKey(padded, 1 if uniform else 0))
