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
        splits: parts of the depth, each a program's; their sums are added by a second kernel.
        early: start while the kernel before ends, and wait there before x is read.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    splits: int = 1
    early: bool = True


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
