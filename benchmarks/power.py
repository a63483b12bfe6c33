"""What a GPU draws and how fast its multiprocessors run while something is measured, by ``nvidia-smi``.

A board that has reached the power it may draw lowers its clock, and steps that were not bound by it become so: without
these figures two machines that read memory at one rate cannot be told apart.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

PROGRAM: Sequence[str] = ("nvidia-smi",)
PERIOD_S = 0.2
ASKED = "clocks.sm,power.draw,power.limit,temperature.gpu,clocks_event_reasons.active"
HELD_BY_POWER = 0x4
"""Of the reasons for a lower clock, NVML's ``nvmlClocksEventReasonSwPowerCap``."""


@contextmanager
def watched(gpu: int = 0) -> Iterator[dict[str, Any]]:
    """What ``summary`` says of the time inside; empty until the end, and for good where ``nvidia-smi`` says nothing."""
    found: dict[str, Any] = {}
    lines: list[str] = []
    over = threading.Event()

    def ask() -> None:
        command = [*PROGRAM, f"--id={gpu}", f"--query-gpu={ASKED}", "--format=csv,noheader,nounits"]
        while not over.wait(PERIOD_S):
            try:
                lines.append(subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout)
            except (OSError, subprocess.SubprocessError):
                return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        yield found
    finally:
        over.set()
        asking.join()
        found |= summary(lines)


def summary(lines: Iterable[str]) -> dict[str, Any]:
    """Of lines as ``nvidia-smi`` prints them: samples; least, median and most MHz; median and most W, and the limit;
    degrees C; share of samples in which power held the clock down. Lines without numbers do not count; empty without
    any that does."""
    whole = []
    for each in lines:
        row = [part.strip() for part in each.split(",")]
        try:
            clock, draw, limit, heat = map(float, row[:4])
            reasons = int(row[4], 16)
        except (ValueError, IndexError):
            continue
        whole.append((clock, draw, limit, heat, bool(reasons & HELD_BY_POWER)))
    if not whole:
        return {}
    clocks, draws, limits, heats, held = zip(*whole, strict=True)
    return {
        "samples": len(whole),
        "sm_mhz": [min(clocks), median(clocks), max(clocks)],
        "watts": [median(draws), max(draws)],
        "limit_watts": limits[-1],
        "celsius": max(heats),
        "held_by_power": round(sum(held) / len(held), 3),
    }


def described(found: dict[str, Any]) -> str:
    """In words."""
    if not found:
        return "power and clock are not known"
    low, middle, _ = found["sm_mhz"]
    return (
        f"{found['watts'][0]:.0f} W, at most {found['watts'][1]:.0f} of {found['limit_watts']:.0f}; {middle:.0f} MHz, "
        f"at least {low:.0f}; held down by power in {found['held_by_power']:.0%} of {found['samples']} samples"
    )
