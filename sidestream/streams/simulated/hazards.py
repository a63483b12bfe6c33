"""Hazard checker: finds pairs of accesses to the same bytes that nothing orders, whatever order they ran in.

Every node of work carries a vector clock: for each timeline (the host, each stream, each stream of each graph) how far
it had come before the node. An access ``a`` comes before ``b`` exactly if ``b``'s clock has reached ``a``'s tick on
``a``'s timeline. Two accesses that touch a common byte, one of them writing, must be ordered.

Bounds are compared first; an exact mask of bytes is made for unordered pairs whose bounds overlap, so that columns and
strided rows are told apart. Rows chosen by an index tensor are known once the node has run; such pairs are settled by
``settle``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sidestream.streams.simulated.memory import Block, Extent
from sidestream.streams.simulated.schedule import Node
from sidestream.streams.simulated.site import Site


class HazardError(AssertionError):
    """The program is wrong on some schedule; each hazard names two places in the source."""


@dataclass(frozen=True, slots=True)
class Touch:
    """What an operator does to a block. ``by_rows``: only rows that ``Node.rows[by_rows]`` lists after the run."""

    block: Block
    extent: Extent
    write: bool
    tenant: int
    by_rows: int | None = None


@dataclass(slots=True, eq=False)
class Access:
    """A touch by one node."""

    touch: Touch
    node: Node

    def mask(self) -> np.ndarray:
        touch = self.touch
        rows = None if touch.by_rows is None else self.node.rows.get(touch.by_rows)
        return touch.extent.mask(touch.block.data.numel(), rows)


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two places in the source that conflict."""

    kind: str
    first: Site
    second: Site
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}\n  first:  {self.first}\n  second: {self.second}"


class HazardLog:
    """Checks accesses as they are issued and keeps what it found.

    Args:
        host: the host's clock; accesses that the host has waited for can conflict with nothing later and are forgotten.
    """

    def __init__(self, host: dict[int, int]) -> None:
        self._host = host
        self._found: dict[tuple[str, Site, Site], Hazard] = {}
        self._suspects: list[tuple[Access, Access]] = []

    def access(self, node: Node, touch: Touch) -> None:
        """Check one access against those before it."""
        new = Access(touch, node)
        extent, clock, host = touch.extent, node.clock, self._host
        start, end = extent.offset, extent.end
        covers = touch.by_rows is None and extent.dense
        kept = []
        for old in touch.block.history:
            before, it = old.node, old.touch
            if host.get(before.timeline, 0) >= before.tick:
                continue
            lo, hi = it.extent.offset, it.extent.end
            if clock.get(before.timeline, 0) >= before.tick:
                same = covers and start <= lo and hi <= end
                if same and (touch.write or not it.write):
                    continue  # whatever conflicts with the old one conflicts with the new one too
            elif (it.write or touch.write) and lo < end and start < hi:
                self._suspect(old, new)
            kept.append(old)
        kept.append(new)
        touch.block.history = kept

    def report(self, hazard: Hazard) -> None:
        """Keep a hazard once a pair of places."""
        self._found.setdefault((hazard.kind, hazard.first, hazard.second), hazard)

    def settle(self) -> tuple[Hazard, ...]:
        """Everything found so far; pairs that depend on index tensors are decided for nodes that have run."""
        waiting = []
        for old, new in self._suspects:
            if old.node.done and new.node.done:
                self._decide(old, new)
            else:
                waiting.append((old, new))
        self._suspects = waiting
        return tuple(self._found.values())

    def _suspect(self, old: Access, new: Access) -> None:
        if old.touch.by_rows is not None or new.touch.by_rows is not None:
            self._suspects.append((old, new))
        else:
            self._decide(old, new)

    def _decide(self, old: Access, new: Access) -> None:
        exact = old.touch.by_rows is None and new.touch.by_rows is None
        if not (exact and old.touch.extent.dense and new.touch.extent.dense) and not (old.mask() & new.mask()).any():
            return
        names = {
            (True, True): "write after write",
            (True, False): "read after write",
            (False, True): "write after read",
        }
        kind = f"unordered {names[old.touch.write, new.touch.write]}"
        detail = (
            f"{new.node.label} on {new.node.where} does not wait for {old.node.label} on {old.node.where}; "
            f"both touch the memory taken at {new.touch.block.taken}"
        )
        self.report(Hazard(kind, old.node.site, new.node.site, detail))
