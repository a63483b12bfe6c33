"""Blocks that come back to a device with room again: one body for every device and mode."""

from __future__ import annotations

import random
from typing import Any

from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import BuiltEngine
from sidestream.engine.core import EngineCore

Asked = tuple[tuple[int, int], ...]
"""Prompt length and tokens to generate, of each request."""


def settings_for(block_size: int, places: int) -> dict[str, Any]:
    return {
        "block_size": block_size,
        "num_blocks": places,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 4 * block_size,
        "max_model_len": 20 * block_size,
        "hisparse_watermark": 0.05,
        "enable_prefix_caching": False,
    }


def asked_of(block_size: int) -> Asked:
    """One that stays, whose first blocks leave for two that do not."""
    return (5 * block_size, 8 * block_size), (9 * block_size, 4), (9 * block_size + 3, 4)


def check_restores(hosted: BuiltEngine, resident: BuiltEngine, asked: Asked) -> None:
    """Both give the same tokens and log-probabilities; some blocks left, and some of them came back."""
    runtime = hosted.runner.hisparse
    assert runtime is not None
    assert _served(hosted, asked) == _served(resident, asked)
    with hosted.runner.on_device():
        stats = runtime.stats()
    assert stats.spilled_blocks > 2
    assert 2 < stats.restored_blocks <= stats.spilled_blocks
    assert stats.restored_bytes == stats.restored_blocks * hosted.pools.groups.kv.bytes_per_block
    runtime.placement.check_integrity()


def _served(built: BuiltEngine, asked: Asked) -> dict[str, list[Any]]:
    core, draw = EngineCore(built), random.Random(3)
    results: dict[str, list[Any]] = {}
    for i, (length, max_tokens) in enumerate(asked):
        ids = tuple(draw.randrange(5, 130) for _ in range(length))
        params = SamplingParams(temperature=0.0, logprobs=1)
        core.add(Request(str(i), ids, params, 0, max_tokens, frozenset(), ()))
        results[str(i)] = []
    while core.has_work():
        for output in core.step():
            results[output.request_id].append((output.token_id, output.logprobs))
    return results
