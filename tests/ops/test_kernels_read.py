"""Triton reads every kernel that the operators' cases ask for: no GPU is needed to see that one does not compile.

The interpreter takes what the compiler does not: one name with other shapes in the branches of a condition, packed
assembly for fewer elements than it packs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
READ_ON_THE_HOST = {"moe.experts", "moe.unsummed_experts", "sparse_mla.sparse_mla", "dense_mla.dense_mla_decode"}
"""Operators with cases that a device without memory cannot run; their kernels are compiled in tests of their own
(``compiled_roles``, ``test_kernel_resources``)."""


def test_every_kernel_is_read() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.ops.read_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["faults"] == []
    assert {name.partition("[")[0] for name in found["left"]} == READ_ON_THE_HOST
    assert {"_rotate_pair", "_finish", "_mix", "_carry", "_select_kernel"} <= {
        name.rpartition(".")[2] for name in found["kernels"]
    }
    assert len(found["kernels"]) >= 33
