"""The inline backend: nothing waits, but the protocol of handoffs holds, and graphs are refused by name."""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

import sidestream.streams
from sidestream.errors import ConfigError, HandoffError, SidestreamError
from sidestream.streams import Handoff, InlineBackend, Policy, Stream, Streams, WaitKind, choose_policy


class NoExternal(InlineBackend):
    """A device of old."""

    external_events: str | None = "this torch has no external events"


@pytest.fixture
def streams() -> Streams:
    streams = Streams(InlineBackend())
    streams.begin_step()
    return streams


def topk(streams: Streams, *consumers: str) -> Handoff:
    return Handoff(streams, "topk_ready", producer="indexer of layer 3", consumers=consumers or ("conversion",))


def test_a_wait_follows_a_publish(streams: Streams) -> None:
    handoff = topk(streams)
    handoff.publish()
    handoff.wait()
    handoff.wait("conversion")
    assert handoff.waits == {WaitKind.EVENT: 2}


def test_a_wait_without_any_publish_names_both_sides(streams: Streams) -> None:
    with pytest.raises(HandoffError, match=r"'topk_ready' from 'indexer of layer 3' to 'conversion'.*never published"):
        topk(streams).wait()


def test_a_wait_on_an_earlier_step_names_both_steps(streams: Streams) -> None:
    handoff = topk(streams)
    handoff.publish()
    streams.begin_step()
    with pytest.raises(HandoffError, match=r"'indexer of layer 3' to 'conversion'.*not published in step 2.*in step 1"):
        handoff.wait()


def test_a_second_publish_is_refused(streams: Streams) -> None:
    handoff = topk(streams)
    handoff.publish()
    with pytest.raises(HandoffError, match=r"'indexer of layer 3' to 'conversion': published twice in step 1"):
        handoff.publish()
    streams.begin_step()
    handoff.publish()


def test_an_undeclared_consumer_is_refused(streams: Streams) -> None:
    handoff = topk(streams, "conversion", "spill")
    handoff.publish()
    handoff.wait("spill")
    with pytest.raises(HandoffError, match=r"to 'conversion' and 'spill': 'prefetch' waits, but is not one of"):
        handoff.wait("prefetch")
    with pytest.raises(HandoffError, match="several consumers"):
        handoff.wait()


def test_a_handoff_needs_a_consumer_and_a_name_of_its_own(streams: Streams) -> None:
    topk(streams)
    with pytest.raises(HandoffError, match="taken by producer 'indexer of layer 3'"):
        topk(streams)
    with pytest.raises(HandoffError, match="no consumer"):
        Handoff(streams, "other", producer="p", consumers=())
    assert issubclass(HandoffError, SidestreamError)


def test_graphs_are_refused_by_name(streams: Streams) -> None:
    with pytest.raises(ConfigError, match=r"'segment 0'.*simulated device or CUDA"), streams.capture("segment 0"):
        raise AssertionError("the block must not be entered")
    assert streams.open_capture is None
    topk(streams).publish()


def test_use_restores_the_stream(streams: Streams) -> None:
    backend, side = streams.backend, streams.new_stream("side")
    before = backend.current_stream()
    with contextlib.suppress(KeyError), backend.use(side):
        assert backend.current_stream() is side
        raise KeyError
    assert backend.current_stream() is before


def test_the_policy_is_chosen_with_a_reason() -> None:
    assert str(Streams(InlineBackend()).report) == (
        "stream waits: external (the inline CPU backend has external events)"
    )
    asked = choose_policy(InlineBackend(), Policy.STREAM)
    assert (asked.policy, asked.reason) == (Policy.STREAM, "asked for")
    fallen = choose_policy(NoExternal())
    assert (fallen.policy, fallen.reason) == (Policy.STREAM, "this torch has no external events")
    with pytest.raises(ConfigError, match="this torch has no external events"):
        choose_policy(NoExternal(), Policy.EXTERNAL)


def test_the_fallback_waits_for_the_producers_stream() -> None:
    waited = []

    class Logging(NoExternal):
        def wait_stream(self, stream: Stream) -> None:
            waited.append((stream, self.current_stream()))

    backend = Logging()
    streams = Streams(backend)
    assert waited == [(backend.current_stream(), streams.compute)]  # work queued before is carried over
    side = streams.new_stream("side")
    streams.begin_step()
    handoff = topk(streams)
    with backend.use(streams.compute):
        handoff.publish()
    with backend.use(side):
        handoff.wait()
    assert waited[1:] == [(streams.compute, side)]
    assert handoff.waits == {WaitKind.WHOLE_STREAM: 1}


def test_streams_import_nothing_of_the_engine() -> None:
    for path in Path(sidestream.streams.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module and module.startswith("sidestream"):
                assert module.startswith(("sidestream.streams", "sidestream.errors")), f"{path.name} imports {module}"
    code = (
        "import sys, sidestream.streams\n"
        "loaded = {n.split('.')[1] for n in sys.modules if n.startswith('sidestream.')}\n"
        "assert not loaded & {'ops', 'layers', 'models', 'attention', 'graphs', 'cache', 'scheduler', 'engine'}, loaded"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
