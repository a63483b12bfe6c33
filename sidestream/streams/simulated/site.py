"""Where in the source something happened: the innermost frame outside of torch and of this package."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_SKIPPED = (
    # As imported, not resolved: frames carry the same, also where a folder is a link.
    f"{Path(__file__).parent.parent}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    contextlib.__file__,
)


@dataclass(frozen=True, slots=True)
class Site:
    """One line of the source."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


_NOWHERE = Site("?", 0, "?")


def here() -> Site:
    """The place that caused what runs now."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_SKIPPED):
            return Site(code.co_filename, frame.f_lineno, code.co_name)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return _NOWHERE
