"""How a step runs: without graphs, in graph pieces with eager breaks between them, or as one graph."""

from __future__ import annotations

from enum import Enum


class CUDAGraphMode(Enum):
    """Of one step. The setting "full_and_piecewise" is none of these: it chooses one of them for each step."""

    NONE = "none"
    """Every operator is launched from Python."""
    PIECEWISE = "piecewise"
    """Captured segments, and eager breaks between them that Python runs at every replay."""
    FULL = "full"
    """One captured graph; no Python runs between its first operator and its last."""
