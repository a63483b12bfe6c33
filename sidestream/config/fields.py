"""Typed, named reading of a hub config: every complaint names the key, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sidestream.errors import ConfigError

MAX_INTEGER = 2**31 - 1
MAX_REAL = 1e30
"""No field of a real model is beyond them; torch or a conversion to float32 would fail in its own words."""


class Fields:
    """A mapping of hub keys that remembers which of them were read.

    Args:
        values: the hub config, or a dictionary nested in it.
        where: what to call it in errors, e.g. the path of the file.
        aliases: canonical key to the other spellings it may have; two spellings with different values are refused.

    A key whose value is null reads as absent; ``stated`` tells the two apart.
    """

    def __init__(self, values: Mapping[str, object], where: str, aliases: Mapping[str, Collection[str]]) -> None:
        self._values = values
        self._aliases = aliases
        self._read: set[str] = set()
        self.where = where

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.where}: {message}")

    def stated(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return any(spelling in self._values for spelling in self._spellings(key))

    def raw(self, key: str) -> object:
        """The value under any spelling; None if absent or null."""
        found = {s: self._values[s] for s in self._spellings(key) if self._values.get(s) is not None}
        self._read.update(self._spellings(key))
        if len(found) > 1 and any(value != next(iter(found.values())) for value in found.values()):
            raise self.error(f"two spellings of one field contradict each other: {found}")
        return next(iter(found.values()), None)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least ``minimum``; required if there is no default."""
        value = self.raw(key)
        if value is None:
            if default is None:
                raise self.error(f"required key {key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_INTEGER:
            raise self.error(f"{key} is {value!r}, it must be an integer from {minimum} to {MAX_INTEGER}")
        return value

    def optional_integer(self, key: str, default: int | None = None, *, minimum: int = 0) -> int | None:
        """An integer, or None if the key is null; ``default`` if it is not stated."""
        if not self.stated(key):
            self.raw(key)
            return default
        return None if self.raw(key) is None else self.integer(key, minimum=minimum)

    def real(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite number, above zero if ``positive``; required if there is no default."""
        value = self.raw(key)
        if value is None:
            if default is None:
                raise self.error(f"required key {key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_REAL <= value <= MAX_REAL:
            raise self.error(f"{key} is {value!r}, it must be a finite number")
        if positive and value <= 0:
            raise self.error(f"{key} is {value!r}, it must be above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}, it must be true or false")
        return value

    def words(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Collection) or not all(isinstance(v, str) for v in value):
            raise self.error(f"{key} is {value!r}, it must be a list of strings")
        return tuple(str(v) for v in value)

    def integers(self, key: str) -> tuple[int, ...] | None:
        """An integer or a list of integers as a tuple, or None."""
        value = self.raw(key)
        if value is None:
            return None
        values = [value] if isinstance(value, int) else value
        if not isinstance(values, list | tuple) or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise self.error(f"{key} is {value!r}, it must be an integer or a list of integers")
        return tuple(values)

    def nested(self, key: str) -> Fields | None:
        """A dictionary under a key, or None."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{key} is {value!r}, it must be a dictionary")
        return Fields(value, f"{self.where}: {key}", {})

    def require(self, key: str, only: object, why: str) -> None:
        """Refuse any stated value but ``only``."""
        value = self.raw(key)
        if value is not None and value != only:
            raise self.error(f"{key} = {value!r} is not supported, only {only!r}: {why}")

    def refuse_unread(self, irrelevant: Iterable[str], *, knob: str) -> None:
        """Raise for keys that are neither read nor known to be irrelevant; null values say nothing and pass."""
        known = self._read.union(irrelevant)
        unknown = sorted(key for key, value in self._values.items() if value is not None and key not in known)
        if unknown:
            raise self.error(
                f"unknown keys {', '.join(unknown)}: they might change what the model computes. If they do not, {knob}"
            )

    def _spellings(self, key: str) -> tuple[str, ...]:
        return (key, *self._aliases.get(key, ()))
