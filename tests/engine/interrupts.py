"""Interrupts wherever CPython lets one in: it handles signals behind calls, on entering a function and in loops."""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any


@cache
def _points(code: CodeType) -> dict[int, frozenset[int]]:
    """Offset of an instruction -> those of instructions before it, behind which an interrupt may come first."""
    instructions = list(dis.get_instructions(code))
    points: dict[int, set[int]] = {}
    for here, behind in pairwise(instructions):
        if here.opname in ("RESUME", "CALL", "CALL_FUNCTION_EX"):
            points.setdefault(behind.offset, set()).add(here.offset)
        elif "JUMP_BACKWARD" in here.opname and "NO_INTERRUPT" not in here.opname:
            points.setdefault(here.argval, set()).add(here.offset)
    return {offset: frozenset(before) for offset, before in points.items()}


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th point within the package, or these parts of it, that this block reaches.

    Attributes:
        reached: whether there are so many.
    """

    def __init__(self, number: int, parts: Sequence[str] = ("/sidestream/",)) -> None:
        self._left = number
        self._parts = parts
        self._last: dict[FrameType, int] = {}
        self.reached = False

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        if "/tests/" in path or not any(part in path for part in self._parts):
            return None
        frame.f_trace_opcodes = True
        return self._within

    def _within(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        if event != "opcode":
            return self._within
        before, self._last[frame] = self._last.get(frame, -1), frame.f_lasti
        if before in _points(frame.f_code).get(frame.f_lasti, ()):
            self._left -= 1
            if self._left < 0:
                self.reached = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._within

    def __enter__(self) -> InterruptAt:
        self._before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 traces none unless a frame wants them by now
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        self._last.clear()
