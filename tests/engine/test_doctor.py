"""The doctor's probes give the right answers, on devices that are sound and on ones that are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from sidestream.config.memory_size import DEFAULT_SHARE
from sidestream.engine.doctor import bandwidth, break_cost, crossing, defaults, machine
from sidestream.engine.doctor.diagnose import costs, diagnose, report_on
from sidestream.engine.doctor.report import DeviceChoice, Finding, Probe, Report, Row, Status, ask_all
from sidestream.engine.doctor.target import Target, choose_target
from sidestream.streams import Event, InlineBackend, StreamBackend
from sidestream.streams.simulated import Order, SimulatedBackend

ROWS = {
    "machine": (
        "python",
        "torch",
        "cuda_runtime",
        "cuda_driver",
        "triton",
        "transformers",
        "cpu",
        "cpu_cores",
        "host_memory_total",
        "host_memory_free",
        "gpu",
        "gpu_capability",
        "gpu_sms",
        "gpu_memory_total",
        "gpu_memory_free",
    ),
    "device": ("works",),
    "events": ("internal_event_across_capture", "external_event_across_capture", "wait_covers", "stream_policy"),
    "costs": (
        "break_gpu_bound",
        "break_host_bound",
        "break_with_handoff_gpu_bound",
        "break_with_handoff_host_bound",
        "host_to_device_copy",
        "device_to_host_copy",
        "device_copy",
        "host_memory_copy",
    ),
    "engine": ("device", "dtype", "graph_mode", "stream_policy", "memory_budget"),
}
"""Every section with its rows: scripts read these names."""


def target_on(make: Callable[[], StreamBackend]) -> Target:
    """A device that the probes of events and costs use, without a GPU."""
    return Target("sim", "a test", make, InlineBackend, lambda cycles: None)


def simulated(external_events: str | None = None) -> Target:
    return target_on(lambda: SimulatedBackend(Order.LAZY, external_events=external_events))


class LeakyEvents(SimulatedBackend):
    """Lets internal events out of their captures, silently."""

    def wait(self, event: Event) -> None:
        if event.external or self.is_capturing():
            super().wait(event)


class DeafToExternalEvents(SimulatedBackend):
    """Waits on external events hold nothing back."""

    def wait(self, event: Event) -> None:
        if not event.external:
            super().wait(event)


class WholeStreamWaits(SimulatedBackend):
    """Waits on external events wait for all that the device was given."""

    def wait(self, event: Event) -> None:
        self.synchronize()
        super().wait(event)


@pytest.fixture(scope="module")
def cpu_report() -> Report:
    return diagnose(DeviceChoice.CPU)


def row(report: Report, section: str, name: str) -> Row:
    (found,) = (row for row in report.rows if (row.section, row.name) == (section, name))
    return found


def test_every_row_is_there_once_and_in_order(cpu_report: Report) -> None:
    sections: dict[str, tuple[str, ...]] = {}
    for found in cpu_report.rows:
        sections[found.section] = (*sections.get(found.section, ()), found.name)
    assert sections == ROWS
    assert list(sections) == list(ROWS)


def test_the_json_is_pinned(cpu_report: Report) -> None:
    report: Any = cpu_report.as_json()
    assert list(report) == ["device", "usable", "sections"]
    assert (report["device"], report["usable"]) == ("cpu", True)
    assert {name: tuple(rows) for name, rows in report["sections"].items()} == ROWS
    for rows in report["sections"].values():
        for found in rows.values():
            assert list(found) == ["value", "unit", "reason", "status", "simulated", "detail"]
            assert isinstance(found["value"], str | int | float | None)
            assert found["status"] in ("ok", "missing", "skipped", "failed")
            assert (found["value"] is not None) == (found["status"] == "ok")


def test_a_sound_machine_has_no_failed_row(cpu_report: Report) -> None:
    assert [row for row in cpu_report.rows if row.finding.status is Status.FAILED] == []
    assert cpu_report.usable


def test_what_a_cpu_cannot_answer_says_so(cpu_report: Report) -> None:
    for name in ROWS["costs"][:-1]:
        assert row(cpu_report, "costs", name).finding == Finding(None, "needs a GPU", status=Status.SKIPPED)
    copied = row(cpu_report, "costs", "host_memory_copy").finding
    assert isinstance(copied.value, float)
    assert copied.value > 0
    assert copied.unit == "GB/s"


def test_only_the_events_are_simulated_on_a_cpu(cpu_report: Report) -> None:
    assert {row.section for row in cpu_report.rows if row.simulated} == {"events"}
    assert all(row.simulated for row in cpu_report.rows if row.section == "events")
    assert row(cpu_report, "events", "wait_covers").cells()[0] == "wait covers (simulated)"


def test_facts_of_the_machine(cpu_report: Report) -> None:
    assert row(cpu_report, "machine", "torch").finding.value == torch.__version__
    total = row(cpu_report, "machine", "host_memory_total").finding
    assert (total.value, total.unit) == (round(psutil.virtual_memory().total / 2**30, 2), "GiB")


def test_where_compiled_kernels_are_kept_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/else")
    assert machine.triton().reason == "keeps compiled kernels in /somewhere/else"


def test_a_missing_triton_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(machine.importlib, "import_module", absent)
    found = machine.triton()
    assert found.status is Status.MISSING
    assert "'triton'" in found.reason


# Events across a capture


def test_events_with_external_ones() -> None:
    target = simulated()
    refused = crossing.internal_event(target)
    assert refused.value == "refused"
    assert refused.reason.startswith("CUDA error: invalid argument")
    assert crossing.external_event(target).value == "works"
    assert crossing.wait_covers(target).value == "what came before the publish"
    policy = crossing.stream_policy(target)
    assert (policy.value, policy.reason) == ("external", "the simulated device has external events")


def test_events_without_external_ones() -> None:
    target = simulated(external_events="an old torch has none")
    assert crossing.internal_event(target).value == "refused"
    assert crossing.external_event(target) == Finding(None, "an old torch has none", status=Status.MISSING)
    assert crossing.wait_covers(target) == Finding("the whole stream", "policy stream")
    policy = crossing.stream_policy(target)
    assert (policy.value, policy.reason) == ("stream", "an old torch has none")


def test_an_internal_event_that_gets_out_is_not_called_refused() -> None:
    assert crossing.internal_event(target_on(LeakyEvents)).value == "accepted"


def test_an_external_event_that_holds_nothing_back_is_found() -> None:
    target = target_on(lambda: DeafToExternalEvents(Order.STARVED, starved="compute"))
    assert crossing.external_event(target).value == "wrong values"
    assert crossing.wait_covers(target).value == "nothing"


def test_a_wait_that_covers_too_much_is_found() -> None:
    found = crossing.wait_covers(target_on(lambda: WholeStreamWaits(Order.LAZY)))
    assert found == Finding("the whole stream", "in 3 tries the segment ended first")


# Costs


@pytest.mark.parametrize("order", [Order.INLINE, Order.LAZY, Order.RANDOM])
@pytest.mark.parametrize("external_events", [None, "none here"])
@pytest.mark.parametrize("handoff", [False, True])
def test_pieces_and_the_whole_graph_do_the_same_work(order: Order, external_events: str | None, handoff: bool) -> None:
    """What is compared by the clock is the same kernels, and every pair of accesses is ordered."""
    backend = SimulatedBackend(order, external_events=external_events)
    kernels = break_cost.Kernels.on(backend, lambda: None)
    with backend.use(kernels.streams.compute):
        pieces = break_cost.capture_pieces(kernels, handoff=handoff)
        done = break_cost.SEGMENTS  # pieces have run once when they are captured
        whole = break_cost.capture_whole(kernels, handoff=handoff)
        for step in (pieces, whole, pieces):
            step()
            done += break_cost.SEGMENTS
            backend.synchronize()
            assert (kernels.x.cpu() == done).all()
            assert (kernels.y.cpu() == done - 1).all()
    backend.check()


def test_the_cost_of_a_break_is_the_difference_by_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    times = (break_cost.StepTimes(host=100.0, wall=940.0), break_cost.StepTimes(host=12.0, wall=500.0))
    monkeypatch.setattr(break_cost, "measure", lambda *args, **kwargs: times)
    on_gpu, on_host = break_cost.gpu_bound(simulated(), handoff=True), break_cost.host_bound(simulated(), handoff=True)
    assert (on_gpu.value, on_host.value) == (10.0, 2.0)
    assert on_gpu.unit == on_host.unit == "us"
    assert "not GPU-bound" not in on_gpu.reason
    assert on_gpu.detail == {
        "segments": 45,
        "pieces_wall_us": 940.0,
        "pieces_host_us": 100.0,
        "one_graph_wall_us": 500.0,
        "one_graph_host_us": 12.0,
    }


def test_a_host_that_cannot_keep_ahead_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    times = (break_cost.StepTimes(host=930.0, wall=940.0), break_cost.StepTimes(host=12.0, wall=500.0))
    monkeypatch.setattr(break_cost, "measure", lambda *args, **kwargs: times)
    assert break_cost.gpu_bound(simulated(), handoff=True).reason.startswith("not GPU-bound")


def test_the_measurement_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(break_cost, "ROUNDS", 4)
    spins: list[int] = []
    target = replace(simulated(), spin=spins.append)
    assert isinstance(break_cost.gpu_bound(target, handoff=True).value, float)
    assert spins
    assert set(spins) == {break_cost.BUSY}
    spins.clear()
    assert isinstance(break_cost.host_bound(target, handoff=True).value, float)
    assert spins == []


def test_bandwidth_counts_what_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "HOST_BYTES", 2**20)
    monkeypatch.setattr(bandwidth, "median_seconds", lambda backend, work: 1e-3)
    one_way = bandwidth.significant(4 * 2**20 / 1e-3 / 1e9)
    assert bandwidth.host_to_device(simulated()).value == one_way == 4.19
    assert bandwidth.device_to_host(simulated()).value == one_way
    assert bandwidth.host_copy().value == bandwidth.significant(8 * 2**20 / 1e-3 / 1e9)


@pytest.mark.parametrize("copy", [bandwidth.host_to_device, bandwidth.device_to_host])
def test_copies_over_the_bus_are_ordered(copy: Callable[[Target], Finding], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "HOST_BYTES", 2**10)
    backend = SimulatedBackend(Order.RANDOM)
    assert copy(target_on(lambda: backend)).unit == "GB/s"
    backend.check()


# What the engine will do


def test_defaults_on_a_cpu(cpu_report: Report) -> None:
    found = {name: row(cpu_report, "engine", name).finding for name in ROWS["engine"]}
    budget = round(DEFAULT_SHARE * psutil.virtual_memory().total / 2**30, 2)
    assert {name: one.value for name, one in found.items()} == {
        "device": "cpu",
        "dtype": "float32",
        "graph_mode": "none",
        "stream_policy": "external",
        "memory_budget": budget,
    }
    assert all(one.reason for one in found.values())
    assert found["graph_mode"].reason == "a CPU has no graphs"


def test_defaults_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7 * 2**30, 100 * 2**30))
    target = choose_target(DeviceChoice.AUTO)
    assert defaults.device(target) == Finding("cuda", "torch sees a GPU")
    assert defaults.dtype(target).value == "bfloat16"
    assert defaults.memory_budget(target).value == 60.0


@pytest.mark.parametrize(("mode", "reason"), [("none", "kernel by kernel"), ("full_and_piecewise", "uniform decode")])
def test_the_graph_mode_is_the_resolved_one(mode: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = defaults._resolved(choose_target(DeviceChoice.CPU))
    monkeypatch.setattr(defaults, "_resolved", lambda target: replace(on_cpu, device="cuda", cudagraph_mode=mode))
    found = defaults.graph_mode(choose_target(DeviceChoice.CUDA))
    assert found.value == mode
    assert reason in found.reason


# Failures


def test_a_probe_that_raises_is_contained(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(target: Target) -> Finding:
        raise RuntimeError("CUDA error: unspecified launch failure\nadvice that nobody needs")

    monkeypatch.setattr(crossing, "external_event", broken)
    report = report_on(simulated())
    failed = [row for row in report.rows if row.finding.status is Status.FAILED]
    assert [row.name for row in failed] == ["external_event_across_capture"]
    assert failed[0].finding == Finding(
        None, "RuntimeError: CUDA error: unspecified launch failure", status=Status.FAILED
    )
    assert [row.name for row in report.rows if row.section == "events"] == list(ROWS["events"])
    assert report.usable


def test_the_user_can_still_interrupt() -> None:
    def interrupted() -> Finding:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_all([Probe("a", "b", interrupted)])


def test_a_device_that_cannot_be_had_is_not_usable() -> None:
    def absent() -> StreamBackend:
        raise RuntimeError("it is gone")

    report = report_on(target_on(absent))
    assert not report.usable
    assert row(report, "device", "works").finding.reason == "RuntimeError: it is gone"
    assert row(report, "machine", "torch").finding.status is Status.OK
    assert row(report, "engine", "dtype").finding.value == "float32"


def test_costs_are_asked_of_a_gpu_only() -> None:
    gpu = replace(simulated(), device="cuda")
    assert [probe.name for probe in costs(gpu)] == list(ROWS["costs"])
    assert len({probe.ask for probe in costs(gpu)}) == len(ROWS["costs"])
