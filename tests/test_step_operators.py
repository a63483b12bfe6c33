"""What a decode runs on a GPU besides our own kernels: products of the library, and no copies between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "benchmarks" / "configs" / "glm5-next-slice-a.json"
PRODUCTS = {
    "aten.mm.default of ops/linear/torch_impl.py",
    "aten.mm.dtype_out of ops/linear/torch_impl.py",
    "aten.bmm.out of ops/linear/torch_impl.py",
}
COPIES = {
    "aten.copy_.default of streams/upload.py",  # the step's integers
    "aten.copy_.default of graphs/static_buffers.py",  # hidden states
}


def test_no_kernel_of_torch_stands_between_products() -> None:
    """Each would be a launch that cannot start early. Found by tensors that have shapes and no memory."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.rehearsed_step", str(CONFIG)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert set(found) <= PRODUCTS | COPIES
    assert set(found) >= COPIES, "the list sees copies"
    assert found["aten.copy_.default of graphs/static_buffers.py"] == 2, "one each time that the step ran"
