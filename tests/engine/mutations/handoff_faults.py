"""Faults of the index groups and their handoffs: what is published, resolved and awaited where."""

from __future__ import annotations

from sidestream.errors import HandoffError
from sidestream.streams.simulated import DeviceError
from tests.engine.mutations.fault import (
    ATTENDED_EARLY,
    CONVERT,
    FULL,
    GROUP,
    HANDOFF_OF_LEADER,
    IN_CONVERT,
    INDEXER,
    NONE,
    PIECES,
    PUBLISHED,
    READ_EARLY,
    Fault,
)
from tests.engine.mutations.findings import LostOverlap, Refused, StrayIndices, Unordered
from tests.engine.mutations.sites import Edit
from tests.engine.mutations.subject import Workload

RESOLVE = "self.resolver.resolve(logical, inputs, physical=physical, counts=counts)"
EARLY = "self.physical_topk_ready.publish()"
IN_SIDE = "\n                "
BEHIND_SIDE = "\n            "


def _convert(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit(GROUP, CONVERT, old, new),)


CONVERSION = (
    Fault(
        "conversion before its wait",
        _convert(f"self.logical_topk_ready.wait(){IN_SIDE}{RESOLVE}", f"{RESOLVE}; self.logical_topk_ready.wait()"),
        PIECES,
        READ_EARLY,
    ),
    Fault(
        "wait on the wrong side",
        _convert(
            f"with self._streams.backend.use(self._side):{IN_SIDE}self.logical_topk_ready.wait()",
            f"self.logical_topk_ready.wait(){BEHIND_SIDE}with self._streams.backend.use(self._side):",
        ),
        PIECES,
        READ_EARLY,
    ),
    Fault(
        "physical rows published before they are resolved",
        (
            *_convert(f"self.logical_topk_ready.wait(){IN_SIDE}", f"self.logical_topk_ready.wait(){IN_SIDE}{EARLY}; "),
            *_convert(f"{IN_SIDE}    self.physical_topk_ready.publish()", f"{IN_SIDE}    pass"),
        ),
        PIECES,
        ATTENDED_EARLY,
    ),
    Fault(
        "physical rows published on the compute stream",
        (
            *_convert(f"{IN_SIDE}    self.physical_topk_ready.publish()", f"{IN_SIDE}    pass"),
            *_convert("self.physical_topk_ready.wait()", f"{EARLY}; self.physical_topk_ready.wait()"),
        ),
        PIECES,
        ATTENDED_EARLY,
    ),
    Fault(
        "attention waits before the publish",
        _convert(
            "with self._streams.backend.use(self._side):",
            f"self.physical_topk_ready.wait(){BEHIND_SIDE}with self._streams.backend.use(self._side):",
        ),
        NONE,
        Refused(HandoffError, ("conversion for layers (0, 1)", "attention of layers (0, 1)", "it was never published")),
    ),
    Fault(
        "a consumer that was not declared",
        _convert("self.physical_topk_ready.wait()", "self.physical_topk_ready.wait('prefetch')"),
        NONE,
        Refused(HandoffError, ("conversion for layers (0, 1)", "prefetch", "declare it")),
    ),
    Fault(
        "work behind the publish on the side stream of a full graph",
        _convert(
            "self.physical_topk_ready.publish()", "self.physical_topk_ready.publish(); self.lengths = counts.clone()"
        ),
        FULL,
        Refused(DeviceError, ("unjoined work",), (IN_CONVERT, "_capture_full")),
    ),
    Fault(
        "conversion at the publish, inside the segment",
        (
            Edit(
                GROUP,
                PUBLISHED,
                "self.logical_topk_ready.publish()",
                "self.logical_topk_ready.publish()\n    with self._streams.backend.use(self._side):\n"
                "        self.logical_topk_ready.wait(); self._step[2].zero_()",
            ),
        ),
        PIECES,
        Refused(DeviceError, ("unjoined work",), ("set_logical_topk_ready", "_end_segment")),
    ),
    Fault(
        "conversion of a copy made behind the publish",
        _convert("if not self._resolved:", "logical = logical.clone()\n    if not self._resolved:"),
        PIECES,
        Unordered("read after write", IN_CONVERT, "logical_to_physical"),
    ),
    Fault(
        "selection read on the side stream behind the join",
        _convert(
            "self._resolved = True",
            "self._resolved = True\n        with self._streams.backend.use(self._side): logical.sum()",
        ),
        NONE,
        Unordered("write after read", IN_CONVERT, "write_positions"),
    ),
    Fault(
        "block table read on the side stream while the next step uploads",
        _convert(
            "self._resolved = True",
            "self._resolved = True\n        with self._streams.backend.use(self._side): inputs.block_table.sum()",
        ),
        NONE,
        Unordered("write after read", IN_CONVERT, "_assemble"),
    ),
    Fault(
        "selection of the last step taken for this one's",
        (Edit(GROUP, "SparseMLAIndexGroup.begin_step", "self._resolved = False", "pass"),),
        NONE,
        StrayIndices(),
    ),
    Fault(
        "buffers of a group made anew each step under a full graph",
        (
            Edit(
                GROUP,
                "SparseMLAIndexGroup.begin_step",
                "elif rows != self._rows:",
                "else:\n        self._decode_buffers = self._buffers(2)",
            ),
        ),
        FULL,
        Unordered("released memory in a graph", "logical_to_physical", "begin_step"),
    ),
)

PUBLISH = "streams/handoff.py"
OWN_EVENTS = "mark, edge = backend.new_event(external=True), backend.new_event(external=False)"

PUBLISHING = (
    Fault(
        "top-k published before it is written",
        (
            Edit(
                INDEXER,
                "Indexer._select",
                "\n    context.index_sink.set_logical_topk_ready(self.layer)",
                "",
            ),
            Edit(
                INDEXER,
                "Indexer._select",
                "topk = selected.shape[1]",
                "context.index_sink.set_logical_topk_ready(self.layer); topk = selected.shape[1]",
            ),
        ),
        PIECES,
        READ_EARLY,
    ),
    Fault(
        "top-k published twice",
        (Edit(GROUP, PUBLISHED, ".publish()", ".publish(); self.logical_topk_ready.publish()"),),
        FULL,
        Refused(HandoffError, (*HANDOFF_OF_LEADER, "published twice")),
    ),
    Fault(
        "top-k published in the break instead of the segment",
        (
            Edit(GROUP, PUBLISHED, "self.logical_topk_ready.publish()", "pass"),
            *_convert("if not self._resolved:", "if not self._resolved:\n        self.logical_topk_ready.publish()"),
        ),
        PIECES,
        LostOverlap("logical_topk_ready of layer 0"),
    ),
    Fault(
        "a follower resolves again",
        _convert("if not self._resolved:", "if True:"),
        NONE,
        Refused(HandoffError, ("conversion for layers (0, 1)", "attention of layers (0, 1)", "published twice")),
    ),
    Fault(
        "one handoff for two groups",
        (
            Edit(
                GROUP,
                "SparseMLAIndexGroup.__init__",
                "self._streams = streams",
                "self._streams = streams\n"
                "    self.logical_topk_ready = vars(streams).setdefault('shared', self.logical_topk_ready)",
            ),
        ),
        Workload("none", "DSD"),
        Refused(HandoffError, (*HANDOFF_OF_LEADER, "published twice")),
    ),
    Fault(
        "one name for the handoffs of two groups",
        (
            Edit(
                GROUP,
                "SparseMLAIndexGroup.__init__",
                'f"logical_topk_ready of layer {leader}"',
                '"logical_topk_ready"',
            ),
        ),
        Workload("none", "DSD"),
        Refused(HandoffError, ("'indexer of layer 0'", "'indexer of layer 2'", "taken")),
    ),
    Fault(
        "one external event for the captures of all shapes",
        (
            Edit(
                PUBLISH,
                "Handoff.publish",
                OWN_EVENTS,
                "mark, edge = self._eager, backend.new_event(external=False)",
            ),
        ),
        PIECES,
        Unordered("event recorded by two graphs", "set_logical_topk_ready", "set_logical_topk_ready"),
    ),
    Fault(
        "a plain event recorded in a segment and awaited in the break",
        (
            Edit(
                PUBLISH,
                "Handoff.publish",
                OWN_EVENTS,
                "mark, edge = backend.new_event(external=False), backend.new_event(external=False)",
            ),
        ),
        PIECES,
        Refused(DeviceError, ("invalid argument",), ("set_logical_topk_ready", IN_CONVERT)),
    ),
    Fault(
        "a plain event recorded before a capture and awaited in it",
        (
            Edit(
                GROUP,
                "SparseMLAIndexGroup.begin_step",
                "self._resolved = False",
                "self._resolved = False\n    self.begun = self._streams.backend.new_event(external=False)\n"
                "    self._streams.backend.record(self.begun)",
            ),
            *_convert(
                "self.logical_topk_ready.wait()",
                "self.logical_topk_ready.wait(); self._streams.backend.wait(self.begun)",
            ),
        ),
        FULL,
        Refused(DeviceError, ("uncaptured work",), ("begin_step", IN_CONVERT)),
    ),
)
