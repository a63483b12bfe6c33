"""The engine on a GPU gives the same bits in every graph mode, and what a CPU gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sidestream.attention import step_inputs
from sidestream.config.engine import EngineConfig
from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.engine.build import build_engine, in_graph_mode
from sidestream.engine.llm import bundled_model
from sidestream.graphs.breakable import BreakableCUDAGraphCapture
from sidestream.streams import WaitKind
from tests.gpu.engine.machine import SLICE_A, Tokens, bundled, bundled_prompts, dummy_folder, prompts, run

pytestmark = pytest.mark.gpu

GRAPH_MODES = ("piecewise", "full", "full_and_piecewise")
MARGIN = 0.02
"""Between the two best tokens: under it a CPU and a GPU may choose differently in fp32."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_model_gives_the_same_bits_in_every_mode(dtype: str) -> None:
    built = bundled("none", dtype=dtype)
    asked = bundled_prompts()
    expected = run(built, asked, max_tokens=24)
    for mode in GRAPH_MODES:
        assert run(in_graph_mode(built, mode), asked, max_tokens=24) == expected, mode


@pytest.mark.parametrize("policy", ["external", "stream"])
def test_both_stream_policies_give_the_same_bits(policy: str) -> None:
    asked = prompts(6, 300, seed=1, vocab=1536)
    built = bundled("piecewise", stream_policy=policy, max_num_seqs=4)
    assert run(built, asked, max_tokens=16) == run(in_graph_mode(built, "none"), asked, max_tokens=16)
    group = built.runner.attention.groups[0]
    kinds = set(group.logical_topk_ready.waits)
    if policy == "stream":
        assert kinds == {WaitKind.WHOLE_STREAM}
    else:
        assert WaitKind.EXTERNAL_EVENT in kinds
        assert WaitKind.WHOLE_STREAM not in kinds


def test_the_gpu_gives_what_the_cpu_gives() -> None:
    asked = bundled_prompts()
    user = EngineConfig(device="cpu", dtype="float32", max_num_seqs=8, max_num_batched_tokens=256, max_model_len=4096)
    torch.set_num_threads(8)
    expected = run(build_engine(bundled_model(), user), asked, max_tokens=16)
    got = run(bundled("full_and_piecewise"), asked, max_tokens=16)
    compared = sum(_agree(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
    assert compared > len(asked) * 8, f"only {compared} steps before the first close call"


def test_a_block_table_that_travels_without_unused_columns_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of all lengths come and go, so tables grow and shrink between steps of one captured size."""
    asked = prompts(12, 700, seed=5, vocab=1536)
    expected = run(bundled("full_and_piecewise", max_num_seqs=4), asked, max_tokens=24)
    monkeypatch.setattr(step_inputs, "WIDE_TABLE", 1)
    assert run(bundled("full_and_piecewise", max_num_seqs=4), asked, max_tokens=24) == expected


def _agree(mine: Tokens, theirs: Tokens) -> int:
    """Steps until the first in which the chosen tokens differ, all others being close; the first may not be sure."""
    for step, ((token, logprob), (other, expected)) in enumerate(zip(mine, theirs, strict=True)):
        assert abs(logprob - expected) < MARGIN, f"step {step}: {logprob} against {expected}"
        if token != other:
            return step
        assert abs(logprob - expected) < 1e-3, f"step {step}: {logprob} against {expected}"
    return len(mine)


def test_a_uniform_decode_breaks_at_kda_and_attention_only() -> None:
    built = bundled("piecewise", max_num_seqs=2, max_num_batched_tokens=8)
    assert built.runner.graphs is not None
    runner = built.runner.graphs.runner
    for plan in runner.captured:
        pieces = runner.capture_of(plan)
        assert isinstance(pieces, BreakableCUDAGraphCapture)
        indexers = [name for name in pieces.breaks if name.startswith("indexer")]
        published = [name for segment in pieces.segments for name in segment.published]
        if plan.key.uniform:
            assert not indexers
            assert [name.split()[0] for name in published] == ["logical_topk_ready"] * 2
        else:
            assert indexers == ["indexer of layer 2", "indexer of layer 5"]
            assert not published
        assert plan.mode is CUDAGraphMode.PIECEWISE


def test_a_slice_of_real_shapes_gives_the_same_tokens_in_every_mode(tmp_path: Path) -> None:
    folder = dummy_folder(SLICE_A, tmp_path)
    user = EngineConfig(
        device="cuda",
        cudagraph_mode="none",
        load_format="dummy",
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        max_capture_tokens=64,
        max_model_len=4096,
        memory_limit="130GiB",
        graph_debug=True,
    )
    built = build_engine(folder, user)
    asked = prompts(8, 2600, seed=2, vocab=32768)
    expected = run(built, asked, max_tokens=12)
    for mode in GRAPH_MODES:
        assert run(in_graph_mode(built, mode), asked, max_tokens=12) == expected, mode
    again = run(built, asked, max_tokens=12)
    assert again == expected, "the same schedule gave other bits"
