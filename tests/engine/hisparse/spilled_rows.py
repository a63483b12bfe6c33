"""Rows that left the device are the very bytes that were there: one body for every device, mode and row format."""

from __future__ import annotations

import random
from typing import Any

import torch

from sidestream.cache.hisparse import HiSparseRuntime
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import BuiltEngine
from sidestream.engine.core import EngineCore

BEFORE, DECODED = 20, 100
"""Decode steps until blocks must leave, and all of them."""


def settings_for(prompt: int, block_size: int, *, chunk: int) -> dict[str, Any]:
    """Of an engine with room for the prompt and ``BEFORE`` tokens, and no watermark: the step behind those spills."""
    places = -(-(prompt + BEFORE) // block_size)
    step = -(-chunk // block_size) + 2
    assert places >= step, f"a step of {chunk} tokens writes to {step} blocks, and {places} are to be full then"
    return {
        "block_size": block_size,
        "num_blocks": places,
        "max_num_seqs": 1,
        "max_num_batched_tokens": chunk,
        "max_model_len": prompt + DECODED + 1,
        "hisparse_watermark": 0.0,
        "enable_prefix_caching": False,
    }


def check_spilled_rows(built: BuiltEngine, prompt: int) -> None:
    """Decode, keep the bytes of every block when it is full, and compare them with what the host pool holds in the end;
    then have a row asked for whose copy was left out."""
    runtime = built.runner.hisparse
    assert runtime is not None
    core = EngineCore(built)
    core.add(_request(prompt))
    kept: dict[int, torch.Tensor] = {}
    decoded = 0
    while core.has_work():
        core.step()
        built.runner.settle()
        if not core.scheduler.num_running:
            break
        (sequence,) = core.scheduler._running
        decoded = max(decoded, sequence.num_outputs)
        if decoded < BEFORE - 1:
            assert runtime.placement.num_spilled == 0, f"a block left after {decoded} steps"
        for block in sequence.block_ids[: sequence.num_computed // built.config.block_size]:
            if block not in kept:
                assert runtime.placement.table[block] > 0, "a block left before it was looked at"
                kept[block] = rows_of(runtime, block)
    left = [block for block in kept if runtime.placement.table[block] < 0]
    assert len(left) >= (DECODED - BEFORE) // built.config.block_size - 1
    assert runtime.placement.num_spilled == len(left)
    for block in left:
        assert torch.equal(rows_of(runtime, block), kept[block]), f"block {block} is not what it was on the device"
        assert kept[block].any(), "a block of zeros shows nothing"
    assert len({bytes(kept[block].flatten().tolist()) for block in left}) == len(left), "blocks hold the same"
    _ask_for_what_was_never_copied(built, runtime, prompt)


def rows_of(runtime: HiSparseRuntime, block: int) -> torch.Tensor:
    """[layers, bytes] of a block, wherever it is."""
    place, size = int(runtime.placement.table[block]), runtime.placement.block_size
    pieces = []
    for layer in runtime.layers:
        pool = runtime.arena.layer(layer) if place >= 0 else runtime.host.layer(layer)
        first = (place if place >= 0 else -1 - place) * size
        pieces.append(pool[first : first + size].cpu().contiguous().view(torch.uint8).flatten())
    return torch.stack(pieces)


def _ask_for_what_was_never_copied(built: BuiltEngine, runtime: HiSparseRuntime, prompt: int) -> None:
    """What a graph does that replays no copies: blocks leave, and nothing is written to the host pool."""
    core = EngineCore(built)
    core.add(_request(prompt, max_tokens=BEFORE + 2 * built.config.block_size))
    real, error = runtime._copy_out, None
    runtime._copy_out = lambda spills: None  # type: ignore[method-assign]
    try:
        while core.has_work():
            core.step()
    except AssertionError as raised:
        error = raised
    finally:
        runtime._copy_out = real  # type: ignore[method-assign]
    assert "are asked for, and are nowhere" in str(error)
    while core.has_work():  # the request is computed anew, with copies
        core.step()
    runtime.placement.check_integrity()


def _request(prompt: int, max_tokens: int = DECODED) -> Request:
    draw = random.Random(prompt)
    ids = tuple(draw.randrange(5, 130) for _ in range(prompt))
    params = SamplingParams(temperature=0.0)
    return Request("long", ids, params, 0, max_tokens, frozenset(), ())
