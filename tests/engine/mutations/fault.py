"""A seeded fault of the engine, and what several of them share.

In the models, layer 0 of "DS" and "DSD" leads and layer 1 follows; in "KD", layer 0 is linear attention and layer 1
leads.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.engine.mutations.findings import Finding, Unordered
from tests.engine.mutations.sites import Edit
from tests.engine.mutations.subject import Workload


@dataclass(frozen=True, slots=True)
class Fault:
    """Attributes:
    name: what was done wrong.
    edits: that make the fault.
    work: the run that shows it.
    finding: what the run must report.
    """

    name: str
    edits: tuple[Edit, ...]
    work: Workload
    finding: Finding

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


GROUP, INDEXER = "attention/index_group.py", "layers/indexer.py"
CONVERT = "SparseMLAIndexGroup.convert_logical_to_physical_topk"
IN_CONVERT = "convert_logical_to_physical_topk"
PUBLISHED = "SparseMLAIndexGroup.set_logical_topk_ready"

NONE, PIECES, FULL, BOTH = (Workload(mode) for mode in ("none", "piecewise", "full", "full_and_piecewise"))
READ_EARLY = Unordered("read after write", "write_positions", "logical_to_physical")
ATTENDED_EARLY = Unordered("read after write", "logical_to_physical", "_attend")
REWRITTEN = Unordered("write after read", "_assemble", "_assemble")
HANDOFF_OF_LEADER = ("handoff 'logical_topk_ready of layer 0'", "indexer of layer 0", "conversion for layers (0, 1)")
