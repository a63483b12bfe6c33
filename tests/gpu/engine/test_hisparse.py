"""HiSparse on a GPU: the bits of an engine that keeps all rows there, in every mode and with few and many hot slots."""

from __future__ import annotations

import pytest

from sidestream.engine.build import in_graph_mode
from tests.engine.hisparse import restored_blocks
from tests.engine.hisparse.spilled_rows import check_spilled_rows, settings_for
from tests.gpu.engine.machine import bundled, prompts, run

pytestmark = pytest.mark.gpu

PLACES, HOST_BYTES = 24, 1 << 27
SHORT_OF_ROOM = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "num_blocks": PLACES, "max_model_len": 1536}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_in_every_mode(dtype: str) -> None:
    """Eight prompts of up to 1,450 tokens, of which the device holds a tenth."""
    asked = prompts(8, 1450, seed=8, vocab=250)
    resident = bundled("none", **SHORT_OF_ROOM | {"num_blocks": 400}, dtype=dtype)
    want = run(resident, asked, max_tokens=40)
    for factor in (1, 4):
        hosted = bundled(
            "none", **SHORT_OF_ROOM, dtype=dtype, hisparse_host_memory=HOST_BYTES, hisparse_hot_factor=factor
        )
        for mode in ("none", "piecewise", "full"):
            built = hosted if mode == "none" else in_graph_mode(hosted, mode)
            assert run(built, asked, max_tokens=40) == want, (factor, mode)
            runtime = built.runner.hisparse
            assert runtime is not None
            stats = runtime.stats()
            assert stats.spilled_blocks > 50
            assert stats.missed_rows > 0
            runtime.placement.check_integrity()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla", "mxfp8"])
@pytest.mark.parametrize("mode", ["none", "piecewise", "full"])
def test_spilled_rows_are_what_they_were_on_the_device(mode: str, kv_cache_dtype: str) -> None:
    """Fault 7 of docs/faults.md, in blocks of 16 tokens."""
    prompt = 700
    built = bundled(
        mode,
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        hisparse_host_memory=HOST_BYTES,
        **settings_for(prompt, 16, chunk=256),
    )
    check_spilled_rows(built, prompt)


@pytest.mark.parametrize("mode", ["none", "piecewise", "full"])
def test_blocks_come_back_when_there_is_room_again(mode: str) -> None:
    plain = {"dtype": "bfloat16"}
    hosted = bundled(mode, **plain, **restored_blocks.settings_for(16, 12), hisparse_host_memory=HOST_BYTES)
    resident = bundled("none", **plain, **restored_blocks.settings_for(16, 80))
    restored_blocks.check_restores(hosted, resident, restored_blocks.asked_of(16))
