"""Result files of benchmarks: JSON objects, checked for a place before anything is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sidestream.errors import ConfigError


def check_place(path: Path | None) -> None:
    """See that a report can be written there later, so that no measurement is lost.

    Raises:
        ConfigError: it cannot.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"cannot write the report {path}: it must be a file in a folder that is there")


def write(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report, if it was asked for."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """A report that was written before.

    Raises:
        ConfigError: it is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the report {path}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a report of `sidestream bench`: it holds no JSON object")
    return found
