"""Which numbers of rows expand and collapse in one launch of clusters (``triton_cluster``), and how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cluster:
    """How ``triton_cluster`` is launched.

    Attributes:
        rows: of a cluster, 4, 8 or 16, and no more than it has processors.
        processors: of a cluster; each has a share of the columns.
        warps: of each processor.
        terms: of a factor, whose products with bf16 are exact: 3 of bf16 for all of its 24 bits, or 2 of TF32 for 22,
            which takes a third of the instructions.
        held: factors wait in shared memory, not in registers; always ``ahead``.
        ahead: read ``fn`` before the kernel in front has ended; else behind the loads of streams, which come sooner so
            where a cluster finds its place only when that kernel is gone.
        late: let the next kernel start when new streams are written, not once the one in front has ended.
    """

    rows: int = 8
    processors: int = 16
    warps: int = 16
    terms: int = 3
    held: bool = False
    ahead: bool = True
    late: bool = False


CLUSTER_ROWS: dict[range, Cluster] = {}
"""What is not in any range takes two or three launches, as does what ``triton_cluster.takes`` refuses. Not measured
yet, so empty."""


def cluster_for(rows: int) -> Cluster | None:
    return next((launch for taken, launch in CLUSTER_ROWS.items() if rows in taken), None)
