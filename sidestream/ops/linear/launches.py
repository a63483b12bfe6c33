"""Launch parameters of the Triton linear, by how many rows there are. Imports no Triton.

Floor: the weight once at 4.28 TB/s, so 47.7 us for the widest projection of GLM-5.3-Flash and 4.5 us for its narrowest.
A launch alone leaves some 2 us at each end at which memory idles; kernels that start while those before them end
(programmatic dependent launch) take one of them back.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launch:
    """How a product is cut into programs.

    Attributes:
        rows: of x in a program, all there are: 1 (sums of products on plain units), or a power of two from 16 on.
        columns: weight rows a program multiplies.
        depth: elements of each at a time, reduced to a power of two that divides the depth of the weight.
        warps, stages: of a program; stages of loads in flight.
        splits: parts of the depth, each a program's; their sums are added by a second kernel,
        joined: or by the program of a block of columns that is through last, in the order of the parts all the same.
        early: start while the kernel before ends, and wait there before x is read.
        turned: weights times x, whose rows are the narrow side of the matrix units' tile, from 64 columns on: then both
            come from shared memory without passing through registers.
        ahead: bytes of each weight row that the L2 cache is asked for before that wait.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    splits: int = 1
    early: bool = True
    ahead: int = 0
    joined: bool = False
    turned: bool = False


def launch_for(rows: int, out_features: int, in_features: int) -> Launch | None:
    """Depends on sizes alone; None: the library's product is as fast. Swept on an H200."""
    if in_features % 32 or not 0 < rows <= 16:
        return None
    if rows == 1:
        if in_features in (4096, 8192):
            return Launch(1, 2, 4096, 8, 1)
        return Launch(1, 8, 512, 4, 3 if in_features > 8192 else 1)
    if in_features >= 16384 or out_features >= 32768:
        return None
    return Launch(16, 64, 128, 4, 4, splits=4 if out_features <= 8192 else 1)


@dataclass(frozen=True, slots=True)
class Direct:
    """Whether products of the library leave what comes next as it reads it, instead of to a kernel that copies.

    Attributes:
        logits: fp32 sums as they are, not rounded and widened again.
        by_head: heads' products in their tokens' rows.
    """

    logits: bool
    by_head: bool


DIRECT = Direct(logits=False, by_head=False)


def fetched_bytes(rows: int) -> int:
    """Of a weight, to be asked for before the small kernels in front of its product: 0 is none."""
    return 0
