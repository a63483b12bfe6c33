"""What a device must offer for work on several streams, and the policy for waits that is chosen from it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from sidestream.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """A queue of device work; ``raw`` is the backend's own object."""

    name: str
    raw: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """A marker in a stream.

    ``external``: recorded or awaited inside a capture, it becomes a node of its own in the graph, so that the other
    side may stand outside that graph. Otherwise it becomes an edge, which exists inside one capture only.
    """

    external: bool
    raw: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Recorded work that can be launched again and again."""

    name: str
    raw: Any = None


class StreamBackend(Protocol):
    """Streams, events and graphs of one device.

    Events are recorded and awaited on the *current* stream only: torch decides from the current stream's capture
    state whether an external event becomes a node, so a call naming another stream could not be trusted.

    Attributes:
        name: for reports.
        device: where tensors live.
        external_events: None if external events work, else the reason why they do not.
    """

    name: str
    device: torch.device
    external_events: str | None

    def new_stream(self, name: str) -> Stream:
        """A stream that runs beside all others, the default stream included."""
        ...

    def current_stream(self) -> Stream:
        """The stream that work issued now goes to; the same object for the same stream."""
        ...

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Issue work to ``stream`` inside the block."""
        ...

    def new_event(self, *, external: bool) -> Event:
        """An event that was not recorded yet."""
        ...

    def record(self, event: Event) -> None:
        """Mark the end of all work issued to the current stream so far."""
        ...

    def wait(self, event: Event) -> None:
        """Hold the current stream's later work back until the mark is reached."""
        ...

    def wait_stream(self, stream: Stream) -> None:
        """Hold the current stream's later work back until all work issued to ``stream`` so far is done."""
        ...

    def event_done(self, event: Event) -> bool:
        """Whether the mark was reached; the host does not wait."""
        ...

    def synchronize_event(self, event: Event) -> None:
        """Block the host until the mark is reached; afterwards the host may read what came before it."""
        ...

    def synchronize(self) -> None:
        """Block the host until all work on the device is done."""
        ...

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of ``tensor`` from reuse until work issued to ``stream`` before its release is done."""
        ...

    def host_buffer(self, shape: Sequence[int], *, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory, page-locked where the device has that: copies to and from it are asynchronous."""
        ...

    def new_pool(self) -> Any:
        """A memory pool that graphs can share."""
        ...

    def begin_capture(self, name: str, pool: Any) -> Graph:
        """From here on, work on the current stream, and on streams that fork from it, is recorded and does not run."""
        ...

    def end_capture(self, graph: Graph) -> None:
        """Close the recording; every forked stream must have joined again."""
        ...

    def abort_capture(self, graph: Graph) -> None:
        """Close the recording after an error and drop it; raises nothing of its own."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is being recorded. For assertions: what a handoff does never depends on it."""
        ...

    def replay(self, graph: Graph) -> None:
        """Launch the recorded work on the current stream."""
        ...


def allocates_for_graph(device: torch.device) -> bool:
    """Whether memory taken now, on the current stream of a CUDA device, belongs to a graph that is being recorded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Policy(Enum):
    """How a wait crosses the boundary of a capture."""

    EXTERNAL = "external"
    """External events: a wait covers what came before the publish, no more."""
    STREAM = "stream"
    """Whole-stream waits: right everywhere, but whatever was issued behind the publish is waited for too."""


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Which policy runs, and why, in words for a user."""

    policy: Policy
    reason: str

    def __str__(self) -> str:
        return f"stream waits: {self.policy.value} ({self.reason})"


def choose_policy(backend: StreamBackend, requested: Policy | str | None = None) -> PolicyReport:
    """Choose once, at start.

    Args:
        requested: a policy or its name; None takes the best that the backend can do.
    Raises:
        ConfigError: EXTERNAL was asked for and the backend cannot do it; there is no such policy.
    """
    if isinstance(requested, str):
        names = [policy.value for policy in Policy]
        if requested not in names:
            raise ConfigError(f"stream policy is {requested!r}, allowed are {', '.join(map(repr, names))}")
        requested = Policy(requested)
    missing = backend.external_events
    if requested is Policy.STREAM:
        return PolicyReport(Policy.STREAM, "asked for")
    if missing is None:
        asked = "asked for, and " if requested is Policy.EXTERNAL else ""
        return PolicyReport(Policy.EXTERNAL, f"{asked}{backend.name} has external events")
    if requested is Policy.EXTERNAL:
        raise ConfigError(
            f"stream policy 'external' needs external events, but {missing}; leave the policy unset or say 'stream'"
        )
    return PolicyReport(Policy.STREAM, missing)
