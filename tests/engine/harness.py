"""Drives a built engine's runner by hand: chosen chunks, shuffled pages, poisoned pools, logits of every row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from sidestream.config.engine import EngineConfig
from sidestream.core.batch import Chunk
from sidestream.engine import build
from sidestream.engine.build import BuiltEngine


@dataclass(frozen=True)
class Part:
    """``length`` more tokens of sequence ``sequence`` in one step."""

    sequence: int
    length: int
    is_decode: bool = False
    take_back: int = 0
    """Tokens of the sequence to forget again after the step."""


Schedule = Sequence[Sequence[Part]]
"""Steps, each with its parts; decodes first."""


class Harness:
    """One engine on tiny pools. Pools start as NaN, so that reading what was never written shows."""

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int = 8,
        num_blocks: int = 96,
        seed: int = 0,
        rollback: int = 0,
        **config: object,
    ) -> None:
        settings: dict[str, object] = {
            "device": "cpu",
            "dtype": "float32",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 4096,
            "max_model_len": 512,
        }
        user = EngineConfig(block_size=block_size, num_blocks=num_blocks, **(settings | config))  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:  # no user setting asks for rollback before there is speculation
            real = build.resolve
            patch.setattr(build, "resolve", lambda *a, **k: replace(real(*a, **k), rollback=rollback))
            self.built: BuiltEngine = build.build_engine(folder, user)
        self.built.pools.poison()
        self.block_size = block_size
        self.free_blocks = list(range(1, num_blocks + 1))
        self.free_slots = list(range(1, self.built.num_slots))
        rng = random.Random(seed)
        rng.shuffle(self.free_blocks)
        rng.shuffle(self.free_slots)

    def run(
        self, sequences: Sequence[Sequence[int]], schedule: Schedule, *, wrong_guess: int = 3
    ) -> list[torch.Tensor]:
        """Log-probabilities [length, vocab] of each sequence's rows; its blocks and slots are free again after.

        Tokens that a part takes back are run as ``wrong_guess`` first, as speculation would have it.
        """
        blocks: list[list[int]] = [[] for _ in sequences]
        slots = [self.free_slots.pop() for _ in sequences]
        done = [0] * len(sequences)
        rows: list[list[torch.Tensor]] = [[] for _ in sequences]
        for step in schedule:
            chunks, ids = [], []
            for part in step:
                start, end = done[part.sequence], done[part.sequence] + part.length
                own = blocks[part.sequence]
                while len(own) * self.block_size < end:
                    own.append(self.free_blocks.pop())
                chunks.append(
                    Chunk(
                        request_id=str(part.sequence),
                        start=start,
                        length=part.length,
                        block_ids=tuple(own),
                        slot=slots[part.sequence],
                        is_decode=part.is_decode,
                        samples=False,
                    )
                )
                kept = sequences[part.sequence][start : end - part.take_back]
                ids += [*kept, *[wrong_guess] * part.take_back]
                done[part.sequence] = end
            hidden = self.built.runner.forward(chunks, ids)
            logits = self.built.runner.logits(hidden, range(len(ids)))
            for part, piece in zip(step, logits.split([part.length for part in step]), strict=True):
                rows[part.sequence].append(piece[: part.length - part.take_back].log_softmax(-1))
                done[part.sequence] -= part.take_back
        self.free_slots += slots
        for own in blocks:
            self.free_blocks += own
        return [torch.cat(pieces) for pieces in rows]


def one_shot(lengths: Sequence[int]) -> Schedule:
    """Each sequence alone, whole."""
    return [[Part(i, length)] for i, length in enumerate(lengths)]


def chunked(lengths: Sequence[int], size: int) -> Schedule:
    """Every sequence in chunks of ``size``, all of them in the same steps."""
    steps = []
    for start in range(0, max(lengths), size):
        steps.append([Part(i, min(size, length - start)) for i, length in enumerate(lengths) if start < length])
    return steps


def decoded(lengths: Sequence[int], prompt: int) -> Schedule:
    """A prefill of ``prompt`` tokens each, then decode steps of one token."""
    steps = [[Part(i, prompt) for i in range(len(lengths))]]
    for position in range(prompt, max(lengths)):
        steps.append([Part(i, 1, is_decode=True) for i, length in enumerate(lengths) if position < length])
    return steps


def oracle_logprobs(model: torch.nn.Module, sequence: Sequence[int]) -> torch.Tensor:
    """[length, vocab] fp32 of the transformers model, one shot."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(sequence)]), use_cache=False).logits
    return logits[0].float().log_softmax(-1)


def random_sequences(lengths: Sequence[int], *, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]
