"""What the assembler makes of warpgroup products' matrix descriptors: no GPU is needed to see that one is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.ops.matrix_descriptors import asked_for, assembled

ROOT = Path(__file__).parents[2]
PTX = """
    mov.b32 %r1173, global_smem;
    bfe.u32 %r2212, %r1173, 4, 14;
    cvt.u64.u32 %rd129, %r2212;
    or.b64 %rd42, %rd129, -9223371899415822336;
    wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r1,%r2}, {%r3,%r4,%r5,%r6}, %rd42, 0, 1, 1, 1;
    add.s64 %rd43, %rd129, -9223371899415822272;
    wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r1,%r2}, {%r3,%r4,%r5,%r6}, %rd43, %p7, 1, 1, 1;
"""
"""Two products of 64 by 32 by 16, their second factors from the start of shared memory and 1,024 bytes behind it."""
BEFORE = """
    /*1040*/ S2UR UR4, SR_CgaCtaId ;
    /*1e10*/ UMOV UR5, 0x400 ;
    /*1e30*/ ULEA UR5, UR4, UR5, 0x18 ;
    /*84d0*/ USHF.R.U32.HI UR6, URZ, 0x4, UR5 ;
    /*84e0*/ USGXT.U32 UR6, UR6, 0xe ;
    /*b880*/ UMOV UR7, 0x80000020 ;
    /*b8a0*/ HGMMA.64x32x16.F32.BF16 R24, R40, gdesc[UR4].tnspB, RZ, !UPT ;
"""
WRONG = """
    /*b8b0*/ UIADD3 UR4, UP0, UR5, 0x40, URZ ;
    /*b8c0*/ UIADD3.X UR7, UR5, -0x7fffffe0, URZ, UP0, !UPT ;
    /*b8d0*/ UMOV UR6, UR4 ;
    /*b8e0*/ HGMMA.64x32x16.F32.BF16 R24, R44, gdesc[UR4].tnspB, R24 ;
"""
"""As ptxas 12.8.93 does it: ``UR5`` is where shared memory begins, neither the descriptor's low word nor nothing."""
RIGHT = """
    /*b8b0*/ UIADD3 UR6, UP0, UR6, 0x40, URZ ;
    /*b8c0*/ UIADD3.X UR7, URZ, -0x7fffffe0, URZ, UP0, !UPT ;
    /*b8e0*/ HGMMA.64x32x16.F32.BF16 R24, R44, gdesc[UR4].tnspB, R24 ;
"""


def test_a_descriptor_of_the_wrong_register_is_found() -> None:
    assert asked_for(PTX) == {0x8000002000000040, 0x8000002000000080}
    (first, _), (second, _) = assembled(BEFORE + WRONG)[0]
    assert (first, second) == (0x8000002000000040, 0x8000042000000440)
    found, hidden = assembled(BEFORE + RIGHT)
    assert ({value for value, _ in found}, hidden) == (asked_for(PTX), 0)


def test_a_descriptor_that_depends_on_the_grid_is_counted_as_hidden() -> None:
    found, hidden = assembled(
        "/*0000*/ S2UR UR6, SR_CTAID.X ;" + BEFORE.replace("USGXT.U32 UR6, UR6", "UMNMX UR6, UR5")
    )
    assert (found, hidden) == ([], 1)


def test_chunks_are_multiplied_with_the_descriptors_that_were_asked_for() -> None:
    """Of heads of 128, 64 and 32: by blocks at the first two alone, whose descriptors are all known."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.ops.compiled_products"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout)
    assert [kernel["name"] for kernel in kernels] == [
        "within_blocks",
        "_carry",
        "within_blocks",
        "_carry",
        "_within",
        "_carry",
    ]
    assert [kernel["wrong"] for kernel in kernels] == [[]] * 6
    assert all(kernel["known"] for kernel in kernels)
    assert not any(kernel["hidden"] for kernel in kernels if kernel["name"] == "within_blocks")
