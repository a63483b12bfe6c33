"""Asks this machine everything, and keeps going whatever it answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sidestream.engine.doctor import bandwidth, break_cost, crossing, defaults, machine
from sidestream.engine.doctor.report import DeviceChoice, Finding, Probe, Report, Status, ask_all
from sidestream.engine.doctor.target import Target, choose_target

COSTS = "costs"


def diagnose(choice: DeviceChoice = DeviceChoice.AUTO) -> Report:
    """Probe the chosen device. A probe that raises shows its error in its own row.

    ``usable`` is False only if nothing at all runs on the device.
    """
    return report_on(choose_target(choice))


def report_on(target: Target) -> Report:
    """As ``diagnose``, for a target made elsewhere."""
    works = Probe("device", "works", partial(crossing.device_works, target), simulated=target.device == "sim")
    rows = ask_all([*machine.probes(), works, *crossing.probes(target), *costs(target), *defaults.probes(target)])
    usable = all(row.finding.status is not Status.FAILED for row in rows if row.section == works.section)
    return Report(target.device, usable, rows)


def costs(target: Target) -> list[Probe]:
    """What only a clock can tell; all but the host's own memory needs a GPU."""
    asks: dict[str, Callable[[], Finding]] = {
        "break_gpu_bound": partial(break_cost.gpu_bound, target, handoff=False),
        "break_host_bound": partial(break_cost.host_bound, target, handoff=False),
        "break_with_handoff_gpu_bound": partial(break_cost.gpu_bound, target, handoff=True),
        "break_with_handoff_host_bound": partial(break_cost.host_bound, target, handoff=True),
        "host_to_device_copy": partial(bandwidth.host_to_device, target),
        "device_to_host_copy": partial(bandwidth.device_to_host, target),
        "device_copy": partial(bandwidth.device_copy, target),
    }
    if not target.on_gpu:
        asks = dict.fromkeys(asks, lambda: Finding(None, "needs a GPU", status=Status.SKIPPED))
    asks["host_memory_copy"] = bandwidth.host_copy
    return [Probe(COSTS, name, ask) for name, ask in asks.items()]
