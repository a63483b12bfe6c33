"""The latency benchmark measures what it says: uncomputed prompts, real decodes, every sequence in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.config.engine import EngineConfig
from sidestream.core.forward_context import get_forward_context
from sidestream.engine.bench.latency import Decoding, fill_caches, prefill_times
from sidestream.engine.build import BuiltEngine, build_engine, row_layout
from sidestream.engine.llm import bundled_model
from sidestream.ops.kv_rows import unpack_rows


@pytest.fixture(scope="module")
def built() -> BuiltEngine:
    return build_engine(
        bundled_model(), EngineConfig(device="cpu", max_num_seqs=4, max_num_batched_tokens=64, num_blocks=40)
    )


def test_decodes_are_real_and_prompts_are_not(built: BuiltEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[tuple[int, int]]] = []
    forward = built.runner._model.forward

    def seen() -> Any:
        inputs = get_forward_context().inputs
        batches.append([(segment.length, segment.start_position) for segment in inputs.segments])
        return forward()

    monkeypatch.setattr(built.runner._model, "forward", seen)
    fill_caches(built)
    decoding = Decoding(built, 3, 200, room=100)
    assert all(length == 1 for batch in batches for length, _ in batch)
    batches.clear()
    times = decoding.times(7)
    assert len(times) == 7
    assert all(time > 0 for time in times)
    assert {len(batch) for batch in batches} == {3}
    assert all(context >= 200 for batch in batches for _, context in batch)
    decoding.close()
    assert not decoding.core.has_work()


def test_prefills_are_computed(built: BuiltEngine) -> None:
    found = prefill_times(built, 150, repeats=2)
    assert len(found.seconds) == 2
    assert found.tokens_per_s > 0


@pytest.mark.parametrize("rows", ["auto", "fp8_ds_mla", "mxfp8"])
def test_rows_of_filled_caches_are_as_large_as_attention_passes_on(rows: str) -> None:
    """Were they next to nothing, every sequence would go on as any other with the same token."""
    user = EngineConfig(device="cpu", kv_cache_dtype=rows, max_num_seqs=4, max_num_batched_tokens=64, num_blocks=40)
    built = build_engine(bundled_model(), user)
    built.pools.poison()
    fill_caches(built)
    layout = row_layout(built.config)
    for kv in built.pools.kv.values():
        found = unpack_rows(kv, layout, dtype=torch.float32)
        assert found.std(dim=1).min() > 0.25
        assert found.std(dim=0).max() < 0.6
    decoding = Decoding(built, 4, 200, room=60)
    steps = [tuple(output.token_id for output in decoding.core.step()) for _ in range(8)]
    assert len(set(zip(*steps, strict=True))) == 4


def test_filled_caches_are_finite(built: BuiltEngine) -> None:
    built.pools.poison()
    fill_caches(built)
    assert all(tensor.isfinite().all() for tensor in built.pools.tensors())
    assert all(tensor.float().std() > 0 for tensor in built.pools.tensors())
