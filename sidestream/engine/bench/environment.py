"""Where a result comes from: versions, device, day, and the command to repeat it."""

from __future__ import annotations

import platform
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sidestream import __version__

SECRETS = ("--api-key",)
"""Options whose values no report holds."""


def versions() -> dict[str, str]:
    """Of what decides speed."""
    return {"sidestream": __version__, "torch": _version("torch"), "python": platform.python_version()}


def origin() -> dict[str, Any]:
    """Command, date and versions of this process, for a report."""
    return {
        "command": command(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "machine": platform.machine(),
    }


def command(arguments: Sequence[str]) -> str:
    """As a shell takes it; keys are left out."""
    words = list(arguments)
    for i, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name in SECRETS and equals:
            words[i] = f"{name}=..."
        elif i and words[i - 1] in SECRETS:
            words[i] = "..."
    return shlex.join(["sidestream", *words])


def device_name(device: str) -> str:
    """Of the GPU; of the processor, as ``doctor`` has it, with the cores that this process may use."""
    if device != "cuda":
        from sidestream.engine.doctor.machine import cpu_cores, cpu_name

        return f"{cpu_name()}, {cpu_cores().value} cores"
    import torch

    return torch.cuda.get_device_name()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
