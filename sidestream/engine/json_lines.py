"""JSON Lines files: one value a line, each with its place for whoever complains of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sidestream.errors import RequestError


def read_json_lines(path: Path, *, of: str, text: str | None = None) -> Iterator[tuple[str, Any]]:
    """Place and value of each line that is not blank.

    Args:
        of: what the values are.
        text: of the file, if it was read already.
    Raises:
        RequestError: the file cannot be read or has no such line, or the line named is not JSON.
    """
    try:
        lines = (path.read_text(encoding="utf-8-sig") if text is None else text).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}") from error
    blank = True
    for number, line in enumerate(lines, start=1):
        if line.strip():
            blank = False
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{path} line {number} is not JSON: {error}") from None
            yield f"{path} line {number}", value
    if blank:
        raise RequestError(f"{path} holds no {of}")
