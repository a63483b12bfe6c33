"""What a step runs on a GPU besides our own kernels: products of the library, and no copies between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "benchmarks" / "configs"
PRODUCTS = {
    "aten.mm.default of ops/linear/torch_impl.py",
    "aten.mm.dtype_out of ops/linear/torch_impl.py",
    "aten.bmm.out of ops/linear/torch_impl.py",
    "aten.bmm.default of ops/kda/triton_mixed.py",
}
UPLOAD = "aten.copy_.default of streams/upload.py"
"""Of the step's integers."""
HIDDEN = "aten.copy_.default of graphs/static_buffers.py"
"""Hidden states, which leave a graph."""
ANGLES = "aten.index_select.default of layers/rope.py"
FILLED = {"aten.zero_.default of ops/kda/triton_mixed.py", "aten.zero_.default of ops/sparse_mla/triton_impl.py"}
"""Rows behind those of the sequences."""
INDEXER = "aten.add.Tensor of ops/indexer/triton_prefill.py"
"""Positions to lengths."""
ROTATED = "aten.cat.default of ops/indexer/triton_prefill.py"
"""Queries of the indexer, where they rotate."""


@pytest.mark.parametrize(
    ("config", "leaders"), [("glm5-next-slice-a", 0), ("deepseek-v32-slice-b", 2), ("glm-moe-dsa-slice-c", 2)]
)
def test_no_kernel_of_torch_stands_between_products(config: str, leaders: int) -> None:
    """Each would be a launch that cannot start early, and copies move what kernels could have written in place. Found
    by tensors that have shapes and no memory. ``leaders``: layers whose indexers rotate, of one layer of each kind."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.rehearsed_step", str(CONFIGS / f"{config}.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    decode, prompt = ({name: n for name, n in found[step].items() if name not in PRODUCTS} for step in found)
    angles = int(leaders > 0)
    runs = 2  # of a decode that is captured
    assert decode == {UPLOAD: runs, HIDDEN: runs} | ({ANGLES: runs} if angles else {})
    expected = {UPLOAD: 1, INDEXER: leaders or 1} | ({ANGLES: 1, ROTATED: leaders} if angles else {})
    assert {name: n for name, n in prompt.items() if name not in FILLED} == expected
    assert set(prompt) & FILLED, "the step is padded"
