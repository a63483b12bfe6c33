"""What kernels' sums compile to for a GPU, as far as its rounding is the compiler's: no GPU is needed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_BF16 = {
    "hyper_connection/triton_post_pre.py": {"_mix_and_multiply_rows"},
    "hyper_connection/triton_pre.py": {"multiplied"},
    "indexer/triton_decode.py": {"_score_tile"},
    "indexer/triton_prefill.py": {"_score_tile"},
    "kda/triton_blocks.py": {"product"},
    "kda/triton_decode.py": {"_expand"},
    "linear/triton_linear.py": {"_some_rows"},
    "moe/triton_route.py": {"_scores"},
}
"""Functions with products that need not ask for all bits of fp32: on a GPU their factors are bf16, by what the operator
takes or by a constant of the compilation."""


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[str]]:
    """PTX of every compilation, by the name of the kernel."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.ops.compiled_sums"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[str]] = {}
    for name, ptx in json.loads(done.stdout):
        found.setdefault(name, []).append(ptx)
    return found


def fused_across_threads(ptx: str) -> list[str]:
    """Additions of another thread's product to this thread's own unrounded one. The other thread does the same, so the
    two get different sums; a layout conversion has both store theirs to one place of shared memory."""
    products, theirs, found = set(), {}, []
    for line in ptx.splitlines():
        operation, _, rest = line.strip().rstrip(";").partition(" ")
        operands = [operand.strip() for operand in rest.split(",")]
        if operation in ("mul.f32", "mul.ftz.f32"):  # without .rn: the assembler may fuse it too
            products.add(operands[0])
        elif operation.startswith("shfl.sync.bfly"):
            theirs[operands[0].partition("|")[0]] = operands[1]
        elif operation.startswith(("fma", "add")) and any(theirs.get(one) in products for one in operands[1:]):
            found.append(line.strip())
    return found


def test_a_bare_product_is_found(compiled: dict[str, list[str]]) -> None:
    [ptx] = compiled["bare_products"]
    assert fused_across_threads(ptx)


@pytest.mark.parametrize(("kernel", "ways"), [("_scores", 4), ("_pool_kernel", 1), ("_write_pools_kernel", 1)])
def test_threads_agree_on_a_sum_that_all_of_them_store(kernel: str, ways: int, compiled: dict[str, list[str]]) -> None:
    """racecheck reported the router's: 32 threads store a score, and 16 of them had another rounding of it."""
    assert len(compiled[kernel]) == ways
    for ptx in compiled[kernel]:
        assert "shfl.sync.bfly" in ptx
        assert not fused_across_threads(ptx)


@pytest.mark.parametrize("kernel", ["_gate_up", "_down"])
def test_fp32_products_of_experts_keep_all_their_bits(kernel: str, compiled: dict[str, list[str]]) -> None:
    """Tensor cores would take 10 bits of each factor's significand."""
    for ptx in compiled[kernel]:
        assert "tf32" not in ptx
        assert "fma.rn.f32" in ptx


def test_products_ask_for_all_bits_of_fp32() -> None:
    """``tl.dot`` takes fp32 as tf32 unless it is asked not to."""
    found: dict[str, set[str]] = {}
    ops = ROOT / "sidestream" / "ops"
    for path in sorted(ops.rglob("triton_*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            dots = [call for call in calls if ast.unparse(call.func) == "tl.dot"]
            if any("input_precision='ieee'" not in map(ast.unparse, dot.keywords) for dot in dots):
                found.setdefault(path.relative_to(ops).as_posix(), set()).add(function.name)
    assert found == OF_BF16
