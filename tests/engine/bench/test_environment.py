"""What a report tells of where it comes from, and the limit of open files."""

from __future__ import annotations

import resource
import shlex
from collections.abc import Iterator

import pytest

from sidestream.engine.bench.environment import command, device_name, origin
from sidestream.engine.bench.load.open_files import SPARE, allow_connections
from sidestream.engine.doctor.machine import probes


def test_a_command_can_be_repeated_and_holds_no_key() -> None:
    words = ["bench", "serve", "--extra-body", '{"a": 1}', "--api-key", "secret", "--api-key=secret", "--json", "a b"]
    found = command(words)
    assert "secret" not in found
    assert shlex.split(found) == ["sidestream", *words[:5], "...", "--api-key=...", *words[7:]]


def test_origin() -> None:
    assert origin().keys() == {"command", "date", "versions", "machine"}


def test_the_device_is_called_what_doctor_calls_it() -> None:
    rows = {probe.name: probe.ask().value for probe in probes() if probe.name in ("cpu", "cpu_cores")}
    for device in ("cpu", "sim"):
        assert device_name(device) == f"{rows['cpu']}, {rows['cpu_cores']} cores"


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The process's own, put back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_room_for_connections(limits: tuple[int, int]) -> None:
    _, hard = limits
    low = SPARE + 136
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    assert allow_connections(136) == 136
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (low, hard), "nothing stood in the way"
    assert allow_connections(150) == 150
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 150 + SPARE
    if hard != resource.RLIM_INFINITY:
        assert allow_connections(hard) == hard - SPARE
