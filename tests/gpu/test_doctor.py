"""``sidestream doctor`` on real CUDA: the events answer as they should, and every row has an answer."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from sidestream.cli.main import app
from sidestream.engine.doctor import break_cost, crossing
from sidestream.engine.doctor.diagnose import diagnose
from sidestream.engine.doctor.report import DeviceChoice, Finding, Report, Status
from sidestream.engine.doctor.target import choose_target
from sidestream.streams.cuda import CudaBackend

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def report() -> Report:
    return diagnose(DeviceChoice.AUTO)


def finding(report: Report, section: str, name: str) -> Finding:
    (found,) = (row.finding for row in report.rows if (row.section, row.name) == (section, name))
    return found


def test_the_gpu_is_chosen_and_works(report: Report) -> None:
    assert (report.device, report.usable) == ("cuda", True)
    assert finding(report, "engine", "device") == Finding("cuda", "torch sees a GPU")


def test_no_probe_fails_or_is_skipped(report: Report) -> None:
    wrong = {row.name: row.finding for row in report.rows if row.finding.status in (Status.FAILED, Status.SKIPPED)}
    assert wrong == {}
    assert not any(row.simulated for row in report.rows)


def test_events_across_a_capture(report: Report) -> None:
    refused = finding(report, "events", "internal_event_across_capture")
    assert refused.value == "refused"
    assert "invalid argument" in refused.reason
    assert finding(report, "events", "external_event_across_capture").value == "works"
    assert finding(report, "events", "wait_covers").value == "what came before the publish"
    assert finding(report, "events", "stream_policy").value == "external"


def test_facts_of_the_gpu(report: Report) -> None:
    facts = torch.cuda.get_device_properties(0)
    assert finding(report, "machine", "gpu").value == facts.name
    assert finding(report, "machine", "gpu_sms").value == facts.multi_processor_count
    assert finding(report, "machine", "gpu_capability").value == f"{facts.major}.{facts.minor}"
    driver = str(finding(report, "machine", "cuda_driver").value)
    runtime = str(finding(report, "machine", "cuda_runtime").value)
    assert int(driver.split(".")[0]) >= int(runtime.split(".")[0])


def test_costs_are_numbers(report: Report) -> None:
    for row in report.rows:
        if row.section == "costs":
            assert isinstance(row.finding.value, float), row
            assert all(figure > 0 for figure in row.finding.detail.values()), row
            if row.finding.unit == "GB/s":
                assert row.finding.value > 0, row


@pytest.mark.parametrize("handoff", [False, True])
def test_pieces_and_the_whole_graph_do_the_same_work(handoff: bool) -> None:
    backend = CudaBackend()
    kernels = break_cost.Kernels.on(backend, lambda: choose_target(DeviceChoice.CUDA).spin(break_cost.BUSY))
    with backend.use(kernels.streams.compute):
        pieces = break_cost.capture_pieces(kernels, handoff=handoff)
        done = break_cost.SEGMENTS  # pieces have run once when they are captured
        whole = break_cost.capture_whole(kernels, handoff=handoff)
        for step in (pieces, whole, pieces):
            step()
            done += break_cost.SEGMENTS
            backend.synchronize()
            assert (kernels.x == done).all()
            assert (kernels.y == done - 1).all()


def test_the_device_stays_usable_after_a_refused_event() -> None:
    target = choose_target(DeviceChoice.CUDA)
    assert crossing.internal_event(target).value == "refused"
    assert crossing.external_event(target).value == "works"
    assert crossing.internal_event(target).value == "refused"


def test_the_command() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["usable"]
