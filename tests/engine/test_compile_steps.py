"""Steps that compile kernels are legal steps, run on scratch memory only, and are of every kind."""

from __future__ import annotations

import pytest

from sidestream.config.engine import EngineConfig
from sidestream.core.batch import SCRATCH_BLOCK, SCRATCH_SLOT
from sidestream.engine.build import build_engine
from sidestream.engine.compile_steps import SAMPLINGS, compile_steps
from sidestream.engine.llm import bundled_model
from sidestream.engine.scratch_steps import run_step

LIMITS = [(8, 512, 300), (1, 64, 2048), (4, 2048, 2048), (3, 3, 2), (2, 2, 2), (40, 100, 7)]


@pytest.mark.parametrize(("sequences", "tokens", "longest"), LIMITS)
def test_steps_are_legal_and_of_every_kind(sequences: int, tokens: int, longest: int) -> None:
    user = EngineConfig(
        device="cpu", max_num_seqs=sequences, max_num_batched_tokens=tokens, max_model_len=longest, num_blocks=400
    )
    built = build_engine(bundled_model(), user)
    block_size = built.config.block_size
    sizes, kinds, sampled = set(), set(), set()
    for step, params in compile_steps(built.config, longest=longest):
        total = sum(chunk.length for chunk in step)
        assert 0 < total <= tokens
        assert 0 < len(step) <= sequences
        decodes = [chunk.is_decode for chunk in step]
        assert decodes == sorted(decodes, reverse=True)
        for chunk in step:
            assert chunk.start >= 0
            assert chunk.end <= longest
            assert chunk.slot == SCRATCH_SLOT
            assert set(chunk.block_ids) == {SCRATCH_BLOCK}
            assert len(chunk.block_ids) * block_size >= chunk.end
        sizes.add(total)
        kinds.add((any(decodes), all(decodes), len(step) > 1))
        sampled.add((SAMPLINGS.index(params), len(step) > 1))
    assert max(sizes) == min(tokens, sequences * longest)
    assert 1 in sizes
    assert {(True, True, False), (False, False, False)} <= kinds
    if sequences > 2:
        assert {(True, True, True), (True, False, True), (False, False, True)} <= kinds
        assert sampled == {(i, several) for i in range(len(SAMPLINGS)) for several in (False, True)}


def test_steps_run_and_touch_scratch_memory_only() -> None:
    user = EngineConfig(device="cpu", max_num_seqs=4, max_num_batched_tokens=40, max_model_len=100, num_blocks=9)
    built = build_engine(bundled_model(), user)
    built.pools.poison()
    pools = (*built.pools.kv.values(), *built.pools.index_keys.values(), *built.pools.recurrent.values())
    slots = built.num_slots + built.num_snapshots
    scratch = [pool.shape[0] // (slots if pool.dim() > 3 else built.num_blocks) for pool in pools]
    for rows, pool in zip(scratch, pools, strict=True):
        pool[:rows] = 0
    for pool in (*built.pools.conv.values(), *built.pools.index_tail.values()):
        pool.zero_()
    for step, params in compile_steps(built.config, longest=100):
        run_step(built.runner, step, vocab_size=built.config.model.vocab_size, params=params)
    for rows, pool in zip(scratch, pools, strict=True):
        assert pool[:rows].isfinite().all()
        assert pool[rows:].isnan().all()
