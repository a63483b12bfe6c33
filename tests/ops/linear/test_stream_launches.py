"""How linears of 2 to 64 rows are cut into programs, what these compile to, and which products go there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.config.model import ModelConfig
from sidestream.engine.load import Zeros
from sidestream.layers.loader import LayerLoader
from sidestream.layers.parallel import SINGLE
from sidestream.layers.weight_format import DenseFormat, LinearWeight
from sidestream.models.registry import MODELS
from sidestream.ops import linear as operator
from sidestream.ops.linear import triton_linear
from sidestream.ops.linear.launches import Stream, launch_for, stream_for
from tests.ops.linear.compiled_stream import LAUNCHES

triton_stream = pytest.importorskip("sidestream.ops.linear.triton_stream")

ROOT = Path(__file__).parents[3]
CONFIGS = [
    *sorted((ROOT / "benchmarks/configs").glob("*.json")),
    ROOT / "sidestream/assets/configs/kimi-linear-48b.json",
]
SHARED = 227 << 10
"""Bytes that a program can have on compute capability 9.0."""
ROWS = (2, 8, 16, 17, 32, 33, 64)


class Noted(DenseFormat):
    """Weights without memory, whose sizes are kept."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16, torch.device("meta"))
        object.__setattr__(self, "sizes", set())

    def empty(self, rows: int, cols: int) -> LinearWeight:
        self.sizes.add((rows, cols))  # type: ignore[attr-defined]
        return super().empty(rows, cols)


def sizes_of(config: Path) -> set[tuple[int, int]]:
    """[out, in] of all linears of a model and of its head."""
    model = ModelConfig.from_hf(json.loads(config.read_text()))
    model, noted = replace(model, layers=tuple(dict.fromkeys(model.layers))), Noted()
    loader = LayerLoader(Zeros(), "", noted.dtype, noted.device, noted, SINGLE)
    MODELS[model.architecture](loader, model, 4096)
    return {*noted.sizes, (model.vocab_size, model.hidden_size)}  # type: ignore[attr-defined]


def shared_bytes(launch: Stream) -> int:
    """What comes in, two barriers a stage, and results on their way out; the compiler keeps 12 bytes for roles."""
    return launch.stages * ((64 * launch.groups + launch.rows) * 128 + 16) + launch.rows * 64 * 4 + 12


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_cuts_of_real_models(config: Path) -> None:
    found = 0
    for N, K in sizes_of(config):
        for rows in ROWS:
            launch = stream_for(rows, N, K)
            if launch is None:
                continue
            found += 1
            assert rows <= launch.rows < max(2 * rows, 17)
            assert launch.steps * launch.splits * 64 == K, "parts leave some of the depth out, or have it twice"
            programs = -(-N // (64 * launch.groups)) * launch.splits
            assert 66 <= programs <= 132, f"{programs} programs for {rows} rows of {N} x {K}"
            assert shared_bytes(launch) <= SHARED, launch
            assert launch.stages == launch.steps or launch.stages >= 2, "a stage is given back during the next one"
    assert found >= 20


def test_edges_of_the_table() -> None:
    assert stream_for(1, 4096, 4096) is None, "a single row has a kernel of its own"
    assert stream_for(0, 4096, 4096) is None
    assert stream_for(65, 4096, 4096) is None
    assert stream_for(8, 4096, 4128) is None, "a step is 64 deep"
    assert stream_for(8, 512, 4096) is None, "too few weight rows for half of the multiprocessors"
    assert stream_for(8, 0, 4096) is None
    assert [stream_for(rows, 33_792, 4096) is None for rows in (2, 17, 64)] == [False] * 3
    assert [stream_for(rows, 33_793, 4096) for rows in (2, 17, 64)] == [None] * 3, "more than a program each"
    assert stream_for(64, 4096, 4096 + 64) is None, "64 programs, of a depth that two cannot share"
    heights = [(rows, stream.rows) for rows in ROWS if (stream := stream_for(rows, 4096, 8192)) is not None]
    assert heights == [(2, 16), (8, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64)]


@pytest.mark.parametrize("rows", ROWS)
def test_all_rows_of_a_height_have_one_cut(rows: int) -> None:
    """A row's bits depend on whether there are 1, up to 16, 32 or 64 rows, or more: nowhere in between."""
    most = next(height for height in (16, 32, 64) if rows <= height)
    for N, K in set().union(*map(sizes_of, CONFIGS)):
        assert stream_for(rows, N, K) == stream_for(most, N, K)
        assert launch_for(rows, N, K) == launch_for(most, N, K)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that say their names, on a pretended Hopper GPU."""
    monkeypatch.setattr(triton_stream, "_is_hopper", lambda device: True)
    monkeypatch.setattr(triton_stream, "linear", lambda *args, launch, out: f"stream of {launch.rows}")
    monkeypatch.setattr(triton_linear, "linear", lambda *args, launch, out: f"tile of {launch.rows}")


def test_who_takes_a_product_follows_from_sizes_alignment_and_the_device(
    ways: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.empty(2304 * 4096 + 8, dtype=torch.bfloat16)

    def way(rows: int, *, apart: int = 4096, first: int = 0, weight_first: int = 0, **how: Any) -> object:
        x = torch.empty(64 * 4200, **{"dtype": torch.bfloat16, **how}).as_strided((rows, 4096), (apart, 1), first)
        return operator._by_kernel(x, weight[weight_first:][: 2304 * 4096].view(2304, 4096), None)

    assert [way(rows) for rows in (1, 2, 16)] == ["tile of 1", "stream of 16", "stream of 16"]
    assert [way(rows) for rows in (17, 33, 64)] == ["stream of 32", "stream of 64", "stream of 64"]
    assert way(8, apart=4104, first=8) == "stream of 16"
    assert way(8, apart=4100) == "tile of 16", "rows at 8 bytes"
    assert way(8, first=4) == "tile of 16", "the first at 8 bytes"
    assert way(8, apart=0) == "tile of 16", "one row several times"
    assert way(64, apart=4100) is None
    assert way(8, weight_first=4) is None, "a weight at 8 bytes"
    assert way(8, dtype=torch.float32) is None
    monkeypatch.setattr(triton_stream, "_is_hopper", lambda device: False)
    assert [way(rows) for rows in (8, 32)] == ["tile of 16", None]


def test_programs_stream_and_multiply_without_spills() -> None:
    """Compiled for sm_90: products stand in the loop, all copies are the copy engine's, all stores 16 bytes wide."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.ops.linear.compiled_stream"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = json.loads(done.stdout)
    for launch, one in zip(LAUNCHES, compiled, strict=True):
        counts = one["code"]["counts"]
        assert (one["code"]["spilled"], one["stack"]) == ([0, 0], 0), launch
        assert (one["shared"], one["warps"]) == (shared_bytes(launch), 8), launch
        assert counts["wgmma"] == [4 * launch.groups] * 2, launch
        a_step = launch.groups + 1
        assert counts["bulk copy"] == [launch.stages * a_step + a_step, a_step], launch
        stores = {kind: count for kind, (count, _) in counts.items() if kind.startswith("STG")}
        assert stores == {"STG.128": launch.groups * launch.rows // 16 * (1 if launch.splits == 1 else 2)}, launch
        assert not any(kind.startswith("LDGSTS") for kind in counts), launch
