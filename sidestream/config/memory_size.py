"""Amounts of memory as users write them: bytes, plain or with a unit, or a share of what is there."""

from __future__ import annotations

import re

from sidestream.errors import ConfigError

DEFAULT_SHARE = 0.6
UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for suffix, base in (("b", 1000), ("ib", 1024))
    for power, letter in enumerate("kmgt", start=1)
}
"""Bytes of each, by its name in small letters."""
FORMS = (
    "bytes ('8589934592'), or a number with one of B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of "
    "1024), such as '8GiB' or '1.5TB'"
)
MOST = 1 << 62
"""Bytes that a size is cut to; no machine has them."""
_NUMBER = re.compile(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([a-zA-Z]*)\s*")
_SHARE = re.compile(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*%\s*")


def parse_size(text: str, *, knob: str) -> int:
    """Bytes of "8GiB", "1.5 TB" or "8589934592".

    Args:
        knob: what the user calls the setting.
    Raises:
        ConfigError: naming the value and the forms.
    """
    size = _size(text)
    if size is None:
        raise ConfigError(f"{knob} is {text!r}; give {FORMS}")
    return size


def parse_memory(limit: int | float | str | None, there: int, *, name: str = "memory_limit") -> int:
    """Bytes of a ``memory_limit``: "8GiB", "60%", 0.6, 8589934592; None is the default share.

    Args:
        there: bytes that a share is of, and the most that may be asked for.
    Raises:
        ConfigError: naming the value and the forms, or the limit.
    """
    share = _share(DEFAULT_SHARE if limit is None else limit)
    if share is not None:
        if not 0 < share <= 1:
            raise ConfigError(f"{name} is {limit!r}; a share must be above 0 and at most 1 (100%)")
        return int(share * there)
    size = _size(limit) if isinstance(limit, str) else limit
    if isinstance(size, bool) or not isinstance(size, int):
        raise ConfigError(f"{name} is {limit!r}; give {FORMS}, or a share ('60%', 0.6)")
    if not 0 < size <= there:
        raise ConfigError(
            f"{name} is {limit!r}, which is {size} bytes; it must be from 1 byte to all that is there, "
            f"{there} bytes ({there / 2**30:.2f} GiB)"
        )
    return size


def _size(text: str) -> int | None:
    """Bytes; None if the text is no size."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in UNITS or (not match[2] and "." in match[1]):
        return None
    return int(min(float(match[1]) * UNITS[match[2].lower()], MOST))


def _share(limit: object) -> float | None:
    """Of what is there; None if it is no share."""
    if isinstance(limit, float):
        return limit
    if not isinstance(limit, str):
        return None
    if match := _SHARE.fullmatch(limit):
        return float(match[1]) / 100
    match = _NUMBER.fullmatch(limit)
    return float(match[1]) if match is not None and not match[2] and "." in match[1] else None
