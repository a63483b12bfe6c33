"""Whatever requests come, their kernels were compiled before the engine was ready."""

from __future__ import annotations

import pytest

from sidestream.config.engine import EngineConfig
from sidestream.engine import build
from sidestream.engine.build import build_engine
from sidestream.engine.compile_steps import compile_steps
from sidestream.engine.llm import bundled_model
from tests.gpu.engine.mixed_load import serve

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["full_and_piecewise", "none"])
def test_a_mixed_load_compiles_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compile_steps", compile_steps)  # other tests go without
    user = EngineConfig(
        device="cuda",
        cudagraph_mode=mode,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=512,
        memory_limit="8GiB",
    )
    built = build_engine(bundled_model(), user)
    assert built.kernels_at_ready > 20
    load = serve(built, 4.0)
    assert load["steps"] > 50
    assert built.compiled_after_ready() == ()
    ledger = built.ledger_now()
    assert ledger.in_use <= ledger.budget
