"""Sizes as users write them, and what is said of those that are none."""

from __future__ import annotations

import re

import pytest

from sidestream.config.memory_size import parse_memory, parse_size
from sidestream.errors import ConfigError

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8589934592", 2**33),
        ("512B", 512),
        ("1KiB", 2**10),
        ("2MiB", 2**21),
        ("8GiB", 2**33),
        ("2TiB", 2**41),
        ("1.5TiB", 3 * 2**39),
        ("1KB", 10**3),
        ("500MB", 5 * 10**8),
        ("141GB", 141 * 10**9),
        ("2TB", 2 * 10**12),
        (" 0.5 tb ", 5 * 10**11),
        (".5gib", 2**29),
        ("8.GiB", 2**33),
        ("0", 0),
        ("0GB", 0),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, knob="memory") == size
    if size:
        assert parse_memory(text, 2**60) == size


@pytest.mark.parametrize(
    "text", ["", "lots", "60%", "0.5", "-1GB", "+1GB", "8 Gi B", "8G", "1PB", "1e9", "1,5GB", "٣GB"]
)
def test_what_is_no_size_is_named_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"memory (--memory) is {text!r}; give bytes")) as caught:
        parse_size(text, knob="memory (--memory)")
    for unit in ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"):
        assert re.search(rf"\b{unit}\b", str(caught.value))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("25%", 4 * GIB),
        (" 12.5 % ", 2 * GIB),
        (0.5, 8 * GIB),
        ("0.25", 4 * GIB),
        (GIB, GIB),
        ("1024", 1024),
        (1.0, 16 * GIB),
    ],
)
def test_shares_and_plain_numbers(limit: int | float | str, expected: int) -> None:
    assert parse_memory(limit, 16 * GIB) == expected


def test_nothing_is_the_default_share() -> None:
    assert parse_memory(None, 1000) == 600


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        (
            "1TiB",
            "host is '1TiB', which is 1099511627776 bytes; it must be from 1 byte to all that is there, 17179869184",
        ),
        ("0GB", "host is '0GB', which is 0 bytes"),
        (-5, "host is -5, which is -5 bytes"),
        ("120%", "host is '120%'; a share must be above 0 and at most 1"),
        (0.0, "host is 0.0; a share must be"),
        (float("nan"), "host is nan; a share must be"),
        ("8G", "host is '8G'; give bytes"),
        (True, "host is True; give bytes"),
        ([1], "host is [1]; give bytes"),
    ],
)
def test_limits_out_of_range_name_value_and_limit(limit: object, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_memory(limit, 16 * GIB, name="host")  # type: ignore[arg-type]
