"""Serves requests one step at a time and keeps, for every computed position, the log-probabilities behind it.

What a request took over from the cache was computed by others; its ``Recipe`` says by whom and in which chunks, read
off blocks and slots, so that an engine without a cache can run the very same schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sidestream.config.engine import EngineConfig
from sidestream.core.batch import Chunk, SlotCopy, Split
from sidestream.core.outputs import CacheReason
from sidestream.core.request import FinishReason, Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import build_engine
from sidestream.engine.core import EngineCore
from sidestream.engine.runner import StepOutput
from sidestream.streams import StreamBackend

BLOCK = 16
VOCAB = 136


@dataclass(frozen=True)
class Computed:
    """Positions from ``start`` of these tokens, in one step of their own; at ``splits`` states were kept."""

    tokens: tuple[int, ...]
    start: int
    is_decode: bool
    splits: tuple[int, ...]


@dataclass(eq=False)
class Recipe:
    """How a sequence came about.

    Attributes:
        blocks: whose block, and which of that one's, stands at each of its first places.
        state: whose state, behind so many tokens, its own chunks began with; None for none.
        own: its chunks.
    """

    blocks: list[tuple[Recipe, int]] = field(default_factory=list)
    state: tuple[Recipe, int] | None = None
    own: list[Computed] = field(default_factory=list)

    @property
    def end(self) -> int:
        return len(self.own[-1].tokens) if self.own else -1


@dataclass
class Served:
    """What became of one request.

    Attributes:
        rows: position -> log-probabilities [vocab] behind it, for every position that it computed itself, last time.
    """

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    reason: CacheReason | None = None
    finish_reason: FinishReason | None = None
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    recipe: Recipe = field(default_factory=Recipe)

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.tokens]


class Serving:
    """An engine core on a CPU, or on the device of ``backend``.

    Args:
        recorded: keep log-probabilities and recipes; for that the host waits for every step.
    """

    def __init__(
        self, folder: Path, *, backend: StreamBackend | None = None, recorded: bool = True, **settings: Any
    ) -> None:
        defaults: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float32",
            "max_num_seqs": 4,
            "max_num_batched_tokens": 256,
            "block_size": BLOCK,
            "num_blocks": 60,
            "num_prefix_snapshots": 8,
            "memory_limit": "2GiB",
        }
        self.built = build_engine(folder, EngineConfig(**(defaults | settings)), backend=backend)
        with self.built.runner.on_device():
            self.built.pools.poison()
        self.core = EngineCore(self.built)
        self.served: dict[str, Served] = {}
        self._blocks: dict[int, tuple[Recipe, int]] = {}
        self._slots: dict[int, tuple[Recipe, int]] = {}
        self.forward = self.built.runner.forward
        self._copy_slots = self.built.pools.copy_slots
        if recorded:
            self.built.runner.forward = self._recorded_forward  # type: ignore[method-assign]
            self.built.pools.copy_slots = self._recorded_copies  # type: ignore[method-assign]

    def add(self, name: str, prompt: Iterable[int], *, max_tokens: int = 4, salt: str = "", **params: Any) -> Served:
        """Queue a greedy request."""
        served = self.served[name] = Served(tuple(prompt))
        self.core.add(
            Request(
                request_id=name,
                prompt_token_ids=served.prompt,
                params=SamplingParams(**({"temperature": 0.0} | params)),
                seed=0,
                max_tokens=max_tokens,
                stop_token_ids=frozenset(),
                mask_token_ids=(),
                cache_salt=salt,
            )
        )
        return served

    def step(self) -> None:
        for output in self.core.step():
            served = self.served[output.request_id]
            if output.cache_reason is not None:
                served.cached_tokens, served.reason = output.cached_tokens, output.cache_reason
            if output.token_id is not None:
                served.tokens.append(output.token_id)
            served.finish_reason = output.finish_reason or served.finish_reason
        self.core.scheduler.check_integrity()

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.core.has_work():
            self.step()

    def serve(self, name: str, prompt: Iterable[int], **settings: Any) -> Served:
        """One request alone, from beginning to end."""
        served = self.add(name, prompt, **settings)
        self.run()
        return served

    def _recorded_copies(self, copies: Sequence[SlotCopy]) -> None:
        self._copy_slots(copies)
        for copy in copies:
            self._slots[copy.target] = self._slots[copy.source]

    def _recorded_forward(self, chunks: Sequence[Chunk], token_ids: Sequence[int], **kw: Any) -> StepOutput:
        output = self.forward(chunks, token_ids, **kw)
        rows = self.built.runner.logits(output, range(len(token_ids))).float().log_softmax(-1).cpu()
        row = 0
        for chunk in chunks:
            served = self.served[chunk.request_id]
            if served.recipe.end != chunk.start:
                served.rows.clear()
                taken_over = [self._blocks[block] for block in chunk.block_ids[: chunk.start // BLOCK]]
                served.recipe = Recipe(taken_over, self._slots.get(chunk.slot) if chunk.start else None)
            tokens = (*served.sequence[: chunk.start], *token_ids[row : row + chunk.length])
            splits = tuple(split.position for split in chunk.splits)
            served.recipe.own.append(Computed(tokens, chunk.start, chunk.is_decode, splits))
            for place in range(chunk.start // BLOCK, len(chunk.block_ids)):
                self._blocks[chunk.block_ids[place]] = served.recipe, place
            self._slots[chunk.slot] = served.recipe, chunk.end
            self._slots.update({split.slot: (served.recipe, split.position) for split in chunk.splits})
            served.rows.update({chunk.start + i: rows[row + i] for i in range(chunk.length)})
            row += chunk.length
        return output


class Replay:
    """Runs recipes on an engine without a prefix cache: every sequence once, with blocks and a slot of its own.

    Where another one continues from a state within it, that state is put aside by plain copies of tensors.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._engine = Serving(folder, enable_prefix_caching=False, num_blocks=600, max_num_seqs=250, **settings)
        self._blocks: dict[Recipe, list[int]] = {}
        self._rows: dict[Recipe, dict[int, torch.Tensor]] = {}
        self._states: dict[tuple[Recipe, int], int] = {}
        self._num_blocks = self._num_slots = 0

    def rows(self, recipe: Recipe) -> dict[int, torch.Tensor]:
        """Log-probabilities behind every position of the recipe's own chunks."""
        self._run(recipe)
        return self._rows[recipe]

    def _run(self, recipe: Recipe) -> None:
        """What there is of a recipe that was not run yet: all of it, or the chunks that came since."""
        rows = self._rows.setdefault(recipe, {})
        if recipe not in self._blocks:
            for other, _ in recipe.blocks:
                self._run(other)
            self._blocks[recipe] = [self._blocks[other][place] for other, place in recipe.blocks]
            self._states[recipe, -1] = self._begin(recipe)
        blocks, slot = self._blocks[recipe], self._states[recipe, -1]
        for computed in recipe.own:
            if computed.start in rows:
                continue
            tokens = computed.tokens[computed.start :]
            while len(blocks) * BLOCK < len(computed.tokens):
                self._num_blocks += 1
                blocks.append(self._num_blocks)
            splits = tuple(Split(position, self._new_slot()) for position in computed.splits)
            chunk = Chunk("", computed.start, len(tokens), tuple(blocks), slot, computed.is_decode, False, splits)
            output = self._engine.forward([chunk], tokens)
            logits = self._engine.built.runner.logits(output, range(len(tokens))).log_softmax(-1)
            rows.update({computed.start + i: logits[i] for i in range(len(tokens))})
            self._states.update({(recipe, split.position): split.slot for split in splits})
            if chunk.end % BLOCK == 0:
                self._states[recipe, chunk.end] = self._copied(slot)

    def _begin(self, recipe: Recipe) -> int:
        """A slot for its own chunks."""
        if recipe.state is None or not self._engine.built.pools._states:
            return self._new_slot()
        other, end = recipe.state
        self._run(other)
        return self._copied(self._states[other, end])

    def _copied(self, slot: int) -> int:
        to = self._new_slot()
        for state in self._engine.built.pools._states:
            state[:, to] = state[:, slot]
        return to

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots
