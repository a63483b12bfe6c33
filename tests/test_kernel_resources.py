"""What is read out of a kernel's binary, and what the binaries of some kernels must say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernel_resources import read_code, residency

ROOT = Path(__file__).parents[1]

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                       /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;             /* 0x0000000602047981 */
        /*0020*/                   STL.64 [R1], R4 ;                            /* 0x0000000401007387 */
        /*0030*/                   LDG.E.U16 R4, desc[UR6][R2.64] ;             /* 0x0000000602047981 */
        /*0040*/                   LDL.LU R4, [R1+0x4] ;                        /* 0x0000040001047387 */
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R4, RZ ;         /* 0x000000040804723c */
        /*0060*/              @!P1 BRA 0x30 ;                                   /* 0xfffffffc00781947 */
        /*0070*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0080*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
        /*0090*/                   BRA 0x10 ;                                   /* 0xfffffffc00781947 */
        /*00a0*/                   EXIT ;                                       /* 0x000000000000794d */
        /*00b0*/                   BRA 0x40 ;                                   /* 0xfffffffc00781947 */
        /*00b4*/                   STG.E desc[UR6][R2.64], R4 ;
        /*00b8*/                   IADD3 R4, R4, R4, RZ ;
        /*00bc*/                   LDG.E R4, desc[UR6][R2.64] ;
        /*00c0*/                   BRA 0xc0;                                    /* 0xfffffffc00fc7947 */
        /*00d0*/                   NOP;                                         /* 0x0000000000007918 */
"""


def test_instructions_are_counted_by_width_and_by_whether_they_stand_in_a_loop() -> None:
    """Neither a loop over changes of registers nor a way back from behind the end is one."""
    code = read_code(LISTING)
    assert code.counts == {
        "LDG.128": (1, 0),
        "LDG.16": (1, 1),
        "LDG.32": (1, 0),
        "LDL.32": (1, 1),
        "STG.32": (1, 0),
        "STL.64": (1, 0),
        "mma": (1, 1),
        "wgmma": (1, 0),
    }
    assert code.spilled == (8, 4)
    assert (code.instructions, code.in_loops, code.turns) == (16, 4, 1)


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "expected"),
    [
        (255, 0, 8, (1, "registers")),
        (128, 16384, 8, (2, "registers")),
        (56, 41216, 4, (5, "shared memory")),
        (16, 0, 4, (16, "warps")),
        (16, 0, 1, (32, "programs")),
        (33, 0, 4, (12, "registers")),
        (128, 230496, 16, (1, "registers")),
    ],
)
def test_what_a_multiprocessor_holds(registers: int, shared: int, warps: int, expected: tuple[int, str]) -> None:
    """By NVIDIA's occupancy rules for compute capability 9.0: registers go to warps by 256, 1 KB a program is taken."""
    assert residency(registers, shared, warps) == expected


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Of some kernels whose code was once worse than it had to be, by name."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.compiled_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["_swiglu", "_rotate", "_gate_up_one", "_scores_kernel"])
def test_adjacent_elements_are_read_as_vectors(compiled: dict[str, Any], name: str) -> None:
    counts = compiled[name]["code"]["counts"]
    assert counts["LDG.128"][0] > 0
    assert not {"LDG.8", "LDG.16"} & set(counts), counts


def test_unpacking_rows_spills_in_no_loop(compiled: dict[str, Any]) -> None:
    """Loads and stores of spilled registers in loops: 12 with scales in registers, too."""
    counts = compiled["attend_roles"]["code"]["counts"]
    assert sum(counts[kind][1] for kind in counts if kind.startswith(("LDL", "STL"))) == 0


def test_products_run_on_the_units_that_are_meant(compiled: dict[str, Any]) -> None:
    assert compiled["attend_roles"]["code"]["counts"]["wgmma"][0] > 30
    assert compiled["attend_roles"]["warps"] == 16  # eight of them added by the kernel
    assert compiled["attend_roles"]["resident"] == 1
