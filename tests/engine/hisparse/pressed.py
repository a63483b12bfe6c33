"""Engines whose device holds a few blocks of what the host pool holds, and schedules that press them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from sidestream.config.model import ModelConfig
from sidestream.engine.build import BuiltEngine
from tests.engine.harness import Harness, Part
from tests.engine.sim.harness import SimHarness

BLOCK = 8
PRESSED: dict[str, Any] = {
    "block_size": BLOCK,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "max_model_len": 200,
    "num_blocks": 9,
}
"""Places for 72 tokens, of which a step may need eight."""


def host_memory(folder: Path, blocks: int = 80) -> int:
    """Bytes of so many blocks in fp32."""
    config = ModelConfig.from_hf(folder)
    row = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    layers = sum(layer.attention.value.endswith("mla") for layer in config.layers)
    return blocks * layers * BLOCK * row * 4


def open_blocks(harness: Harness | SimHarness, seed: int) -> None:
    """Let the harness use every block there is, in random order."""
    harness.free_blocks = list(range(1, harness.built.num_blocks))
    random.Random(seed).shuffle(harness.free_blocks)


def placement_of(built: BuiltEngine) -> Any:
    assert built.runner.hisparse is not None
    return built.runner.hisparse.placement


def long_and_short(lengths: list[int], prompt: int, chunk: int = 13) -> list[list[Part]]:
    """Prompts in chunks, the second beside decodes of the first, then all decode, the longest last."""
    steps = []
    for i, length in enumerate(lengths):
        goal = min(prompt, length - 2)
        for start in range(0, goal, chunk):
            decoding = [Part(j, 1, is_decode=True) for j in range(i)]
            steps.append([*decoding, Part(i, min(chunk, goal - start))])
    done = [0] * len(lengths)
    kept = []
    for step in steps:  # decodes that began too early would run past a sequence's end
        parts = [part for part in step if done[part.sequence] + part.length <= lengths[part.sequence]]
        for part in parts:
            done[part.sequence] += part.length
        kept.append(parts)
    while any(have < length for have, length in zip(done, lengths, strict=True)):
        parts = [Part(i, 1, is_decode=True) for i, length in enumerate(lengths) if done[i] < length]
        for part in parts:
            done[part.sequence] += 1
        kept.append(parts)
    return kept
