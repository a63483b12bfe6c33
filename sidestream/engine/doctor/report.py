"""A diagnosis as plain data, without torch: what may be asked for, and the rows that table and JSON are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

Value = str | int | float | None


class DeviceChoice(StrEnum):
    """What a user may ask for."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    SIM = "sim"


class Status(StrEnum):
    """How a row came about."""

    OK = "ok"
    MISSING = "missing"
    """Not there, which is no fault."""
    SKIPPED = "skipped"
    """Needs what this device does not have."""
    FAILED = "failed"
    """The probe raised; the reason is its error."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe answers.

    Attributes:
        value: None if there is none.
        reason: why it is so, or how it was measured; may be empty.
        unit: of the value.
        detail: further figures, each name ending in its unit.
    """

    value: Value
    reason: str = ""
    unit: str | None = None
    status: Status = Status.OK
    detail: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probe:
    """A question to the machine.

    Attributes:
        ask: may raise anything; that is the answer then.
        simulated: asked of the simulated device.
    """

    section: str
    name: str
    ask: Callable[[], Finding]
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A probe with its finding."""

    section: str
    name: str
    finding: Finding
    simulated: bool = False

    def cells(self) -> tuple[str, str, str]:
        """Label, value and reason as a reader sees them."""
        found = self.finding
        label = self.name.replace("_", " ") + (" (simulated)" if self.simulated else "")
        value = found.status.value if found.value is None else str(found.value)
        figures = ", ".join(f"{name} {figure}" for name, figure in found.detail.items())
        return label, f"{value} {found.unit or ''}".rstrip(), "; ".join(filter(None, (found.reason, figures)))

    def as_json(self) -> dict[str, object]:
        found = self.finding
        return {
            "value": found.value,
            "unit": found.unit,
            "reason": found.reason,
            "status": found.status.value,
            "simulated": self.simulated,
            "detail": dict(found.detail),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """All rows, in the order of their probes.

    Attributes:
        device: "cpu", "cuda" or "sim".
        usable: whether that device works at all.
    """

    device: str
    usable: bool
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, object]:
        """``{"device", "usable", "sections": {section: {name: row}}}``."""
        sections: dict[str, dict[str, object]] = {}
        for row in self.rows:
            sections.setdefault(row.section, {})[row.name] = row.as_json()
        return {"device": self.device, "usable": self.usable, "sections": sections}


def ask_all(probes: Sequence[Probe]) -> tuple[Row, ...]:
    """Ask one after another; one that raises does not keep the others from being asked."""
    return tuple(Row(probe.section, probe.name, _contained(probe.ask), probe.simulated) for probe in probes)


def _contained(ask: Callable[[], Finding]) -> Finding:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001  whatever a broken machine answers is what the reader wants to see
        return Finding(None, f"{type(error).__name__}: {first_line(error)}", status=Status.FAILED)


def first_line(error: BaseException) -> str:
    """An error's message without the advice that torch adds below it."""
    return (str(error).strip() or "no message").splitlines()[0]
