"""The table of what Nsight Compute measured, from a piece of its own text."""

from __future__ import annotations

import pytest

from benchmarks.ncu_table import kernels_of

HEAD = (
    '"ID","Process ID","Kernel Name","Block Size","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def row(place: int, kernel: str, name: str, unit: str, value: str) -> str:
    return f'"{place}","7","{kernel}","(128, 1, 1)","(4, 1, 1)","a section","{name}","{unit}","{value}"'


def test_launches_of_one_kernel_are_averaged_and_the_longest_stand_first() -> None:
    found = kernels_of(
        [
            "==PROF== Connected to process 7",
            HEAD,
            row(0, "short", "Duration", "ns", "3,424"),
            row(0, "short", "DRAM Throughput", "%", "9.96"),
            row(1, "long", "Duration", "us", "500.5"),
            row(2, "short", "Duration", "us", "4.0"),
            row(2, "short", "DRAM Throughput", "%", "10.04"),
        ]
    )
    assert [(one["kernel"], one["launches"], one["us"]) for one in found] == [("long", 1, 500.5), ("short", 2, 3.71)]
    assert found[1]["memory_%"] == 10.0
    assert "memory_%" not in found[0]


def test_what_has_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        kernels_of(["==WARNING== No kernels were profiled."])
