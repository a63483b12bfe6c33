"""Launch parameters of linears' kernels, by how many rows there are. Imports no Triton.

A row's bits follow from its launch: they may change where there are 1, up to 16, up to 32, up to 64 rows, or more, and
nowhere in between but in products that are the library's.

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


@dataclass(frozen=True, slots=True)
class Stream:
    """How ``triton_stream`` cuts a product.

    Attributes:
        rows: of x in a program, all there are: 16, 32 or 64.
        groups: of 64 weight rows a program has, up to 4.
        steps: of 64 elements of the depth a program takes.
        splits: parts of the depth, each a program's; their sums are added by a second kernel.
        early: start while the kernel before ends, ask for weights, and wait there before x is read.
    """

    rows: int
    groups: int
    steps: int
    splits: int = 1
    early: bool = True

    @property
    def stages(self) -> int:
        """Steps that are on their way at once, as many as shared memory has room for."""
        return min(self.steps, _ROOM // ((64 * self.groups + self.rows) * 128))


_ROOM = 204_800
"""Bytes of shared memory; what is left of 227 KiB is for results on their way out."""
_PROCESSORS = 132
"""Multiprocessors of an H100 or H200; each has one program."""


def stream_for(rows: int, out_features: int, in_features: int) -> Stream | None:
    """Depends on sizes alone; None: ``launch_for`` says what is faster, or there are too few weight rows.

    Timed on an H200 at the shapes of GLM-5.3-Flash, 8, 32 and 64 rows
    (``benchmarks/results/linear-h200-2026-12-01-streams.json``).
    """
    if in_features % 64 or not 2 <= rows <= 64:
        return None
    height, steps = max(16, 1 << (rows - 1).bit_length()), in_features // 64
    if out_features > 8192:
        groups = next((n for n in range(1, 5) if -(-out_features // (64 * n)) <= _PROCESSORS), None)
        if groups is None or (rows <= 16 and in_features >= 4096 and groups < 4) or (rows > 32 and in_features < 4096):
            return None
        return Stream(height, groups, steps)
    # x is read from the L2 cache once a program: many of its rows take as much as the weight if depths are short
    groups, most = (1, 2) if rows > 32 and out_features >= 4096 else (2, 4)
    tiles = -(-out_features // (64 * groups))
    splits = max((n for n in range(1, most + 1) if tiles * n <= _PROCESSORS and steps % n == 0), default=0)
    return Stream(height, groups, steps // splits, splits) if tiles * splits >= _PROCESSORS // 2 else None
