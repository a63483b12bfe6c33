"""What shows that a place which orders work is gone: one entry for each, so that a new place needs one too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sidestream.errors import HandoffError
from sidestream.streams import Policy
from tests.engine.mutations import crossings
from tests.engine.mutations.crossings import (
    Program,
    from_eager_code_into_a_capture,
    inside_an_open_capture,
    replayed_twice_in_a_step,
)
from tests.engine.mutations.fault import (
    ATTENDED_EARLY,
    BOTH,
    CONVERT,
    FULL,
    GROUP,
    HANDOFF_OF_LEADER,
    NONE,
    PIECES,
    PUBLISHED,
    READ_EARLY,
    REWRITTEN,
)
from tests.engine.mutations.findings import Finding, LostOverlap, Refused, Unordered
from tests.engine.mutations.sites import Edit
from tests.engine.mutations.subject import Workload


@dataclass(frozen=True, slots=True)
class Removal:
    """Without the place, the run reports this."""

    work: Workload
    finding: Finding


STREAM_POLICY = Workload("none", policy="stream")
RESOLVES = f"{GROUP} {CONVERT}"
NEVER_PUBLISHED = Removal(PIECES, Refused(HandoffError, (*HANDOFF_OF_LEADER, "it was never published")))
NOT_REPLAYED = Removal(PIECES, Refused(HandoffError, (*HANDOFF_OF_LEADER, "was not replayed since")))
PUBLISHED_TWICE = Refused(HandoffError, (*HANDOFF_OF_LEADER, "published twice"))
NO_ROWS = Removal(NONE, Refused(AssertionError, ("counts of (0,) for 4 tokens",)))
UNWRITTEN = Refused(AssertionError, ("not finite",))
ON_DEFAULT_STREAM = Removal(NONE, Unordered("write after write", "wire_runner", "_assemble"))
READ_EARLY_EAGERLY = Removal(NONE, READ_EARLY)
POOLS_UNWRITTEN = Removal(NONE, Unordered("read after write", "_blocks", "_scores"))

HOSTED = Workload("none", hisparse=True)
HISPARSE = "cache/hisparse.py HiSparseRuntime"
BEGINS = f"{HISPARSE}.begin_step"
NO_SPILL = Refused(HandoffError, ("KV rows of the last step", "copies of blocks that move", "never published"))
UNHOSTED = Refused(AssertionError, ("rows of blocks", "are nowhere"))
UNREAD = Removal(NONE, Unordered("read after write", "keep", "read"))

REMOVALS: dict[str, Removal] = {
    "attention/index_group.py SparseMLAIndexGroup.set_logical_topk_ready: self.logical_topk_ready.publish()": (
        NEVER_PUBLISHED
    ),
    f"{RESOLVES}: self._streams.backend.use(self._side)": Removal(NONE, LostOverlap("physical_topk_ready of layer 0")),
    f"{RESOLVES}: self.logical_topk_ready.wait()": Removal(PIECES, READ_EARLY),
    f"{RESOLVES}: self.physical_topk_ready.publish()": Removal(
        NONE, Refused(HandoffError, ("conversion for layers (0, 1)", "attention of layers (0, 1)", "never published"))
    ),
    f"{RESOLVES}: self.physical_topk_ready.wait()": Removal(PIECES, ATTENDED_EARLY),
    "attention/latent.py PagedLatentAttention.begin_step: group.begin_step(rows)": NO_ROWS,
    "attention/latent.py PagedLatentAttention.set_logical_topk_ready: self._leader(layer).set_logical_topk_ready()": (
        NEVER_PUBLISHED
    ),
    "engine/build.py start_runner: backend.use(streams.compute)": ON_DEFAULT_STREAM,
    "engine/core.py EngineCore.__init__: self._runner.on_device()": Removal(
        NONE, Unordered("write after write", "__init__", "keep")
    ),
    "engine/core.py EngineCore._step: self._runner.on_device()": ON_DEFAULT_STREAM,
    "engine/sampled_tokens.py PendingTokens.read: self.streams.backend.synchronize_event(self.slot.copied)": UNREAD,
    "engine/sampled_tokens.py SampledTokens.keep: self._streams.backend.record(slot.copied)": UNREAD,
    "engine/runner.py ModelRunner.on_device: self.streams.backend.use(self.streams.compute)": ON_DEFAULT_STREAM,
    "engine/runner.py ModelRunner.forward: self.streams.begin_step()": Removal(NONE, PUBLISHED_TWICE),
    "engine/runner.py ModelRunner._scratch: self.streams.begin_step()": Removal(PIECES, PUBLISHED_TWICE),
    "engine/runner.py ModelRunner._context: self.attention.begin_step(inputs.mixer_rows)": NO_ROWS,
    "graphs/breakable.py BreakableCUDAGraphCapture._end_segment: segment.replay()": NOT_REPLAYED,
    "graphs/breakable.py BreakableCUDAGraphCapture.replay: part.replay()": Removal(BOTH, UNWRITTEN),
    "graphs/runner.py GraphRunner._capture_full: graph.replay()": Removal(BOTH, Unordered("read before replay")),
    "graphs/runner.py GraphRunner.replay: captured.capture.replay()": Removal(FULL, UNWRITTEN),
    "graphs/runner.py GraphRunner.replay: captured.replay(inputs.static_tensors() if self.debug else None)": (
        Removal(PIECES, UNWRITTEN)
    ),
    f"{GROUP} SparseMLAIndexGroup._fetch_ahead: ready.publish()": Removal(
        HOSTED, Refused(HandoffError, ("copies for layer 0", "attention of layer 0", "never published"))
    ),
    f"{RESOLVES}: self.rows_ready[layer].wait()": Removal(HOSTED, Unordered("read after write", "copy_rows")),
    f"{BEGINS}: self._rows_written.publish()": Removal(HOSTED, NO_SPILL),
    f"{BEGINS}: self._streams.backend.use(self._side or self._streams.compute)": Removal(
        HOSTED, LostOverlap("blocks that moved")
    ),
    f"{BEGINS}: self._rows_written.wait()": Removal(HOSTED, Unordered("read after write", "", "_copy_out")),
    f"{BEGINS}: self._moved.publish()": Removal(
        HOSTED, Refused(HandoffError, ("blocks that moved", "never published"))
    ),
    f"{HISPARSE}.end_step: self._moved.wait()": Removal(HOSTED, Unordered("write after read", "_copy_out")),
    "engine/runner.py ModelRunner.forward: self.hisparse.begin_step(chunks)": Removal(HOSTED, UNHOSTED),
    "layers/indexer.py Indexer._select: context.index_sink.set_logical_topk_ready(self.layer)": NEVER_PUBLISHED,
    "streams/handoff.py Handoff.publish: backend.record(mark)": READ_EARLY_EAGERLY,
    "streams/handoff.py Handoff.publish: backend.record(mark) #2": Removal(PIECES, READ_EARLY),
    "streams/handoff.py Handoff.publish: backend.record(edge)": Removal(
        FULL, Unordered("read after write", "_assemble", "logical_to_physical")
    ),
    "streams/handoff.py Handoff.publish: source.add_publish(_CapturedPublish(self, source, mark))": NOT_REPLAYED,
    "streams/handoff.py Handoff.wait: backend.wait_stream(last.stream)": Removal(STREAM_POLICY, READ_EARLY),
    "streams/handoff.py Handoff.wait: backend.wait(event)": READ_EARLY_EAGERLY,
    "streams/runtime.py Capture.replay: streams.backend.replay(self._graph)": Removal(FULL, UNWRITTEN),
    "streams/runtime.py Capture.replay: publish.after_replay()": NOT_REPLAYED,
    "streams/runtime.py Streams.__init__: backend.use(self.compute)": POOLS_UNWRITTEN,
    "streams/runtime.py Streams.__init__: backend.wait_stream(before)": POOLS_UNWRITTEN,
    "streams/upload.py PackedUpload.place: self._backend.synchronize_event(copied)": Removal(NONE, REWRITTEN),
    "streams/upload.py PackedUpload.place: self._backend.record(copied)": Removal(NONE, REWRITTEN),
}
"""``str`` of a place to what its removal brings about."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """Without the place, the program reports this; the engine's own steps would not show it."""

    program: Program
    policy: Policy
    finding: Finding


HANDOFF = "handoff 'topk_ready' from 'indexer' to 'conversion'"
UNAWAITED = Crossing(
    from_eager_code_into_a_capture,
    Policy.STREAM,
    Unordered("read after write", root=Path(crossings.__file__)),
)

CROSSINGS: dict[str, Crossing] = {
    "streams/handoff.py Handoff.publish: backend.record(edge) #2": Crossing(
        inside_an_open_capture,
        Policy.EXTERNAL,
        Refused(HandoffError, ("'indexer'", "'attention'", "which Capture('segment') does not record")),
    ),
    "streams/handoff.py Handoff.wait: here.add_wait(_CrossingWait(self, here, source, consumer))": UNAWAITED,
    "streams/handoff.py _CrossingWait.before_replay: handoff._streams.backend.wait_stream(last.stream)": UNAWAITED,
    "streams/runtime.py Capture.replay: wait.before_replay()": UNAWAITED,
}


@dataclass(frozen=True, slots=True)
class Guard:
    """A place that holds nothing back but refuses a fault, which without it goes on.

    Attributes:
        work: a workload under ``edits``, or a program that is wrong by itself.
        finding: what the guard says.
    """

    work: Workload | Program
    finding: Refused
    edits: Sequence[Edit] = ()


GUARDS: dict[str, Guard] = {
    f"{RESOLVES}: self.logical_topk_ready.require_published()": Guard(
        NONE,
        Refused(HandoffError, (*HANDOFF_OF_LEADER, "never published"), raised_in="require_published"),
        (Edit(GROUP, PUBLISHED, "self.logical_topk_ready.publish()", "pass"),),
    ),
    "streams/runtime.py Capture.replay: publish.before_replay()": Guard(
        replayed_twice_in_a_step, Refused(HandoffError, (HANDOFF, "published twice"))
    ),
}

SETTLES = "engine/runner.py ModelRunner.settle: self.streams.backend.synchronize()"
"""Matters behind an interrupt only, so it has a test of its own."""
