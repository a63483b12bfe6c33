"""Ordering between streams, right in every capture mode. Usable alone: needs torch and ``sidestream.errors`` only."""

from sidestream.streams.backend import Event, Graph, Policy, PolicyReport, Stream, StreamBackend, choose_policy
from sidestream.streams.handoff import Handoff, WaitKind
from sidestream.streams.inline import InlineBackend
from sidestream.streams.runtime import Capture, Streams

__all__ = [
    "Capture",
    "Event",
    "Graph",
    "Handoff",
    "InlineBackend",
    "Policy",
    "PolicyReport",
    "Stream",
    "StreamBackend",
    "Streams",
    "WaitKind",
    "choose_policy",
]
