"""Small programs, each right as it stands and wrong with ``broken=True``: the faults that engines of this kind had.

The two lines that a report must name carry the marks ``# first`` and ``# second``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.streams.programs import Machine

Program = Callable[[Machine, bool], None]


def missing_wait(m: Machine, broken: bool) -> None:
    ready, x, y = m.handoff(), m.buffer(8), m.buffer(8)
    with m.on_compute():
        x.fill_(1)  # first
        ready.publish()
    with m.on_side():
        if not broken:
            ready.wait()
        y.copy_(x)  # second


def missing_wait_back(m: Machine, broken: bool) -> None:
    ready, back, x, y = m.handoff(), m.handoff("back", ("attention",)), m.buffer(8), m.buffer(8)
    with m.on_compute():
        x.fill_(1)
        ready.publish()
    with m.on_side():
        ready.wait()
        y.copy_(x)  # first
        back.publish()
    with m.on_compute():
        if not broken:
            back.wait()
        y.add(1)  # second


def wait_on_the_wrong_side(m: Machine, broken: bool) -> None:
    ready, x, y = m.handoff(), m.buffer(8), m.buffer(8)
    with m.on_compute():
        x.fill_(1)  # first
        ready.publish()
    with m.on_compute() if broken else m.on_side():
        ready.wait()
    with m.on_side():
        y.copy_(x)  # second


def publish_too_early(m: Machine, broken: bool) -> None:
    ready, x, y = m.handoff(), m.buffer(8), m.buffer(8)
    with m.on_compute():
        x.fill_(1)
        if broken:
            ready.publish()
        x.add_(1)  # first
        if not broken:
            ready.publish()
    with m.on_side():
        ready.wait()
        y.copy_(x)  # second


def buffer_reused_across_steps(m: Machine, broken: bool) -> None:
    ready, used, x, y = m.handoff(), m.handoff("used", ("indexer of the next step",)), m.buffer(8), m.buffer(8)
    for step in range(2):
        with m.on_compute():
            if step and not broken:
                used.wait()
            m.streams.begin_step()
            x.fill_(step)  # second
            ready.publish()
        with m.on_side():
            ready.wait()
            y.copy_(x)  # first
            used.publish()


def third_consumer(m: Machine, broken: bool) -> None:
    ready, x, y, z = m.handoff(consumers=("conversion", "prefetch")), m.buffer(8), m.buffer(8), m.buffer(8)
    other = m.streams.new_stream("prefetch")
    with m.on_compute():
        x.fill_(1)  # first
        ready.publish()
    with m.on_side():
        ready.wait("conversion")
        y.copy_(x)
    with m.backend.use(other):
        if not broken:
            ready.wait("prefetch")
        z.copy_(x)  # second


def two_writers(m: Machine, broken: bool) -> None:
    ready, x = m.handoff(), m.buffer(8)
    with m.on_compute():
        x.fill_(1)  # first
        ready.publish()
    with m.on_side():
        if not broken:
            ready.wait()
        x.fill_(2)  # second


def missing_edge_in_a_capture(m: Machine, broken: bool) -> None:
    fork, ready, joined = m.handoff("fork"), m.handoff(), m.handoff("joined", ("attention",))
    x, y = m.buffer(8), m.buffer(8)
    with m.on_compute():
        with m.streams.capture("whole") as graph:
            fork.publish()
            x.fill_(1)  # first
            ready.publish()
            with m.on_side():
                fork.wait()
                if not broken:
                    ready.wait()
                y.copy_(x)  # second
                joined.publish()
            joined.wait()
        graph.replay()


def no_wait_in_the_break(m: Machine, broken: bool) -> None:
    ready, x, y = m.handoff(), m.buffer(8), m.buffer(8)
    with m.on_compute():
        with m.streams.capture("segment 0") as segment:
            x.fill_(1)  # first
            ready.publish()
        segment.replay()
    with m.on_side():
        if not broken:
            ready.wait()
        y.copy_(x)  # second


def break_before_the_replay(m: Machine, broken: bool) -> None:
    """A raw external event that nothing recorded yet: CUDA lets the wait pass."""
    x, y, event = m.buffer(8), m.buffer(8), m.backend.new_event(external=True)
    with m.on_compute(), m.streams.capture("segment 0") as segment:
        x.fill_(1)  # second
        m.backend.record(event)
    if not broken:
        with m.on_compute():
            segment.replay()
    with m.on_side():
        m.backend.wait(event)
        y.copy_(x)  # first
    if broken:
        with m.on_compute():
            segment.replay()


def stale_event_after_a_replay(m: Machine, broken: bool) -> None:
    """The break waits on the event of the first step, which the second step's graph does not record."""
    x, y = m.buffer(8), m.buffer(8)
    old, new = m.backend.new_event(external=True), m.backend.new_event(external=True)
    graphs = []
    with m.on_compute():
        for event in (old, new):
            with m.streams.capture("segment") as segment:
                x.add_(1)  # first
                m.backend.record(event)
            graphs.append(segment)
        graphs[0].replay()
        m.backend.synchronize()
        graphs[1].replay()
    with m.on_side():
        m.backend.wait(old if broken else new)
        y.copy_(x)  # second


def event_recorded_by_two_graphs(m: Machine, broken: bool) -> None:
    one, x = m.backend.new_event(external=True), m.buffer(8)
    other = one if broken else m.backend.new_event(external=True)
    with m.on_compute():
        with m.streams.capture("small"):
            x.add_(1)
            m.backend.record(one)  # first
        with m.streams.capture("large"):
            x.add_(1)
            m.backend.record(other)  # second


def temporary_baked_in(m: Machine, broken: bool) -> None:
    y, keep = m.buffer(8), []
    with m.on_compute():
        scale = torch.full((8,), 3.0, device="sim")
        m.backend.synchronize()
        if not broken:
            keep.append(scale)
        with m.streams.capture("whole") as graph:
            y.copy_(scale)  # first
        del scale  # second
        graph.replay()


def released_while_another_stream_reads(m: Machine, broken: bool) -> None:
    ready, y = m.handoff(), m.buffer(8)
    with m.on_compute():
        x = torch.full((8,), 3.0, device="sim")
        ready.publish()
    with m.on_side():
        ready.wait()
        y.copy_(x)  # first
    if not broken:
        m.backend.record_stream(x, m.side)
    del x  # second
    with m.on_compute():
        torch.full((8,), 4.0, device="sim")


def released_in_a_capture_while_a_side_stream_reads(m: Machine, broken: bool) -> None:
    ready, joined, y = m.handoff(), m.handoff("joined", ("attention",)), m.buffer(8)
    with m.on_compute():
        with m.streams.capture("whole") as graph:
            x = torch.full((8,), 3.0, device="sim")
            ready.publish()
            with m.on_side():
                ready.wait()
                y.copy_(x)  # first
                joined.publish()
            if not broken:
                joined.wait()
            del x  # second
            torch.full((8,), 4.0, device="sim")
            if broken:
                joined.wait()
        graph.replay()


def captured_output_read_before_its_replay(m: Machine, broken: bool) -> None:
    y = m.buffer(8)
    with m.on_compute():
        with m.streams.capture("segment 0") as segment:
            out = torch.full((8,), 3.0, device="sim")  # first
        if not broken:
            segment.replay()
        y.copy_(out)  # second


def graph_beside_a_graph(m: Machine, broken: bool) -> None:
    ready, x, y = m.handoff(), m.buffer(8), m.buffer(8)
    with m.on_compute():
        with m.streams.capture("writer") as writer:
            x.fill_(1)  # first
            ready.publish()
        writer.replay()
    m.backend.synchronize()
    with m.on_side(), m.streams.capture("reader") as reader:
        if not broken:
            ready.wait()
        y.copy_(x)  # second
    m.streams.begin_step()
    with m.on_compute():
        writer.replay()
    with m.on_side():
        reader.replay()


def static_input_rewritten_during_a_replay(m: Machine, broken: bool) -> None:
    done, n, y = m.handoff("done", ("inputs of the next step",)), m.buffer(8), m.buffer(8)
    with m.on_compute():
        with m.streams.capture("whole") as graph:
            y.copy_(n)  # first
            done.publish()
        graph.replay()
    with m.on_side():
        if not broken:
            done.wait()
        n.fill_(2)  # second


def pinned_input_rewritten_before_its_copy_ran(m: Machine, broken: bool) -> None:
    staging, n = m.backend.host_buffer((8,), dtype=torch.float32), m.buffer(8)
    copied = m.backend.new_event(external=False)
    staging.fill_(1)
    with m.on_compute():
        n.copy_(staging, non_blocking=True)  # first
        m.backend.record(copied)
    if not broken:
        m.backend.synchronize_event(copied)
    staging.fill_(2)  # second


def pinned_output_read_before_its_copy_ran(m: Machine, broken: bool) -> None:
    tokens, x = m.backend.host_buffer((8,), dtype=torch.float32), m.buffer(8)
    copied = m.backend.new_event(external=False)
    with m.on_compute():
        x.fill_(1)
        tokens.copy_(x, non_blocking=True)  # first
        m.backend.record(copied)
    if not broken:
        m.backend.synchronize_event(copied)
    tokens.tolist()  # second


def pinned_input_of_a_graph_rewritten(m: Machine, broken: bool) -> None:
    staging, n = m.backend.host_buffer((8,), dtype=torch.float32), m.buffer(8)
    copied = m.backend.new_event(external=True)
    with m.on_compute():
        with m.streams.capture("whole") as graph:
            n.copy_(staging, non_blocking=True)  # first
            m.backend.record(copied)
        for step in range(2):
            if step and not broken:
                m.backend.synchronize_event(copied)
            staging.fill_(step)  # second
            graph.replay()


def columns_overlap(m: Machine, broken: bool) -> None:
    x = m.buffer(6, 8)
    with m.on_compute():
        x[:, :4].fill_(1)  # first
    with m.on_side():
        x[:, 3 if broken else 4 :].fill_(2)  # second


def rows_overlap(m: Machine, broken: bool) -> None:
    """A paged pool: one stream writes rows by number while another gathers rows by number."""
    pool, new = m.buffer(16, 4), m.buffer(2, 4, value=1)
    written = torch.tensor([3, 9], device="sim")
    gathered = torch.tensor([0, 9 if broken else 8, 15], device="sim")
    m.backend.synchronize()
    with m.on_compute():
        pool.index_put_((written,), new)  # first
    with m.on_side():
        pool.index_select(0, gathered)  # second


def rows_overlap_under_inference_mode(m: Machine, broken: bool) -> None:
    pool, new = m.buffer(16, 4), m.buffer(2, 4, value=1)
    written = torch.tensor([3, 9], device="sim")
    gathered = torch.tensor([0, -7 if broken else -8, 15], device="sim")
    m.backend.synchronize()
    with torch.inference_mode():
        with m.on_side():
            pool[gathered] @ new.t()  # first
        with m.on_compute():
            pool[written] = new  # second


def kernel_that_torch_cannot_see(m: Machine, broken: bool) -> None:
    ready, x, y = m.handoff(), m.buffer(8), m.buffer(8)

    def double(source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source * 2)

    with m.on_compute():
        x.fill_(1)  # first
        ready.publish()
    with m.on_side():
        if not broken:
            ready.wait()
        m.backend.launch("double", double, reads=(x,), writes=(y,))  # second


def padded_row_unwritten(m: Machine, broken: bool) -> None:
    with m.on_compute():
        out = torch.empty(8, 4, device="sim")  # first
        out[:5].fill_(1)
        if not broken:
            out[5:].zero_()
        m.backend.expect_written(out)  # second


def queued_before_the_stream_existed(m: Machine, broken: bool) -> None:
    weights = torch.zeros(8, device="sim")
    m.backend.synchronize()
    weights.fill_(5)  # first
    default, late = m.backend.current_stream(), m.backend.new_stream("late")
    with m.backend.use(late):
        if not broken:
            m.backend.wait_stream(default)
        weights.add(1)  # second


ORDERING: tuple[Program, ...] = (
    missing_wait,
    missing_wait_back,
    wait_on_the_wrong_side,
    publish_too_early,
    buffer_reused_across_steps,
    third_consumer,
    two_writers,
    missing_edge_in_a_capture,
    no_wait_in_the_break,
    break_before_the_replay,
    stale_event_after_a_replay,
    event_recorded_by_two_graphs,
    temporary_baked_in,
    released_while_another_stream_reads,
    released_in_a_capture_while_a_side_stream_reads,
    captured_output_read_before_its_replay,
    graph_beside_a_graph,
    static_input_rewritten_during_a_replay,
    pinned_input_rewritten_before_its_copy_ran,
    pinned_output_read_before_its_copy_ran,
    pinned_input_of_a_graph_rewritten,
    columns_overlap,
    rows_overlap,
    rows_overlap_under_inference_mode,
    kernel_that_torch_cannot_see,
    padded_row_unwritten,
    queued_before_the_stream_existed,
)
"""Found by the checker, on every schedule."""


def founding_fault(m: Machine, broken: bool) -> None:
    event, x, y = m.backend.new_event(external=not broken), m.buffer(8), m.buffer(8)
    with m.on_compute():
        with m.streams.capture("segment 0") as segment:
            x.fill_(1)
            m.backend.record(event)  # first
        segment.replay()
    with m.on_side():
        m.backend.wait(event)  # second
        y.copy_(x)


def plain_eager_event_in_a_capture(m: Machine, broken: bool) -> None:
    event, x = m.backend.new_event(external=not broken), m.buffer(8)
    with m.on_side():
        x.fill_(1)
        m.backend.record(event)  # first
    with m.on_compute():
        with m.streams.capture("reader") as reader:
            m.backend.wait(event)  # second
            x.add(1)
        reader.replay()


def unjoined_side_stream(m: Machine, broken: bool) -> None:
    ready, joined, x, y = m.handoff(), m.handoff("joined", ("attention",)), m.buffer(8), m.buffer(8)
    with m.on_compute(), m.streams.capture("whole"):  # first
        x.fill_(1)
        ready.publish()
        with m.on_side():
            ready.wait()
            joined.publish()
            y.copy_(x) if broken else None  # second
        joined.wait()


def host_read_in_a_capture(m: Machine, broken: bool) -> None:
    x = m.buffer(8)
    with m.on_compute(), m.streams.capture("whole"):  # first
        total = x.sum()
        if broken:
            total.item()  # second


def mask_index_in_a_capture(m: Machine, broken: bool) -> None:
    x = m.buffer(8)
    with m.on_compute(), m.streams.capture("whole"):  # first
        y = torch.zeros(8, device="sim")
        if broken:
            y[x > 0]  # second


def pageable_copy_in_a_capture(m: Machine, broken: bool) -> None:
    x, host = m.buffer(8), torch.ones(8) if broken else m.backend.host_buffer((8,), dtype=torch.float32)
    with m.on_compute(), m.streams.capture("whole"):  # first
        x.copy_(host, non_blocking=True)  # second


def synchronize_in_a_capture(m: Machine, broken: bool) -> None:
    x = m.buffer(8)
    with m.on_compute(), m.streams.capture("whole"):  # first
        x.fill_(1)
        if broken:
            m.backend.synchronize()  # second


def replay_in_a_capture(m: Machine, broken: bool) -> None:
    x = m.buffer(8)
    with m.on_compute():
        inner = m.backend.begin_capture("inner", None)
        x.fill_(1)
        m.backend.end_capture(inner)
        outer = m.backend.begin_capture("outer", None)  # first
        if broken:
            m.backend.replay(inner)  # second
        m.backend.end_capture(outer)


REFUSED: tuple[Program, ...] = (
    founding_fault,
    plain_eager_event_in_a_capture,
    unjoined_side_stream,
    host_read_in_a_capture,
    mask_index_in_a_capture,
    pageable_copy_in_a_capture,
    synchronize_in_a_capture,
    replay_in_a_capture,
)
"""Raise at once, as on CUDA."""
