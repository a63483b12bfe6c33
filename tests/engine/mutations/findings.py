"""What shows a fault, and that it names both sides."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sidestream.streams.simulated.schedule import DeviceFaultError
from sidestream.streams.simulated.site import Site
from tests.engine.mutations.sites import PACKAGE
from tests.engine.mutations.subject import Outcome


class Finding(Protocol):
    """An expected report."""

    def seen_in(self, outcome: Outcome, clean: Outcome) -> bool:
        """Whether the mutated engine's outcome has it; ``clean``: the same run of the engine as it is."""
        ...


@dataclass(frozen=True, slots=True)
class Unordered:
    """A hazard.

    Attributes:
        first, second: functions whose lines it names; "" for any of them.
        root: file or folder that both stand in.
    """

    kind: str
    first: str = ""
    second: str = ""
    root: Path = PACKAGE

    def seen_in(self, outcome: Outcome, clean: Outcome) -> bool:
        return any(
            self.kind in hazard.kind
            and _is_at(hazard.first, self.first, self.root)
            and _is_at(hazard.second, self.second, self.root)
            for hazard in outcome.hazards
        )


@dataclass(frozen=True, slots=True)
class Refused:
    """An error, and what it must say.

    Attributes:
        places: functions of the package; a line in each must be named.
        words: parts of the message: producer and consumer of a handoff, for one.
        raised_in: a function that it must come through.
    """

    error: type[BaseException]
    words: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    raised_in: str = ""

    def seen_in(self, outcome: Outcome, clean: Outcome) -> bool:
        text = "\n".join([str(outcome.error), *getattr(outcome.error, "__notes__", ())])
        named = all(re.search(rf"{re.escape(str(PACKAGE))}/\S+:\d+ \({place}\)", text) for place in self.places)
        return (
            isinstance(outcome.error, self.error)
            and named
            and all(word in text for word in self.words)
            and (not self.raised_in or self.raised_in in _functions_of(outcome.error))
        )


@dataclass(frozen=True, slots=True)
class OtherTokens:
    """Tokens or log-probabilities differ by a bit or more."""

    def seen_in(self, outcome: Outcome, clean: Outcome) -> bool:
        return outcome.error is None and outcome.tokens != clean.tokens


@dataclass(frozen=True, slots=True)
class StrayIndices:
    """What nobody wrote is taken as indices: they lie outside of what they point into, or give other tokens."""

    def seen_in(self, outcome: Outcome, clean: Outcome) -> bool:
        if outcome.error is None:
            return outcome.tokens != clean.tokens
        return isinstance(outcome.error, DeviceFaultError) and bool(
            re.search("out of (range|bounds)", str(outcome.error))
        )


@dataclass(frozen=True, slots=True)
class LostOverlap:
    """A handoff was published on another stream, or a wait became another kind: right values, but later."""

    handoff: str

    def seen_in(self, outcome: Outcome, clean: Outcome) -> bool:
        theirs = [entry for entry in outcome.handoffs if entry[0] == self.handoff]
        return bool(theirs) and theirs != [entry for entry in clean.handoffs if entry[0] == self.handoff]


def _is_at(site: Site, function: str, root: Path) -> bool:
    return site.file.startswith(str(root)) and site.line > 0 and function in ("", site.function)


def _functions_of(error: BaseException) -> set[str]:
    return {frame.name for frame in traceback.extract_tb(error.__traceback__)}
