"""Server-sent events out of bytes that come in pieces cut anywhere."""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventParser:
    """Collects the data of events (HTML standard, 9.2.6); other fields and comments are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that this piece completes. Bytes are whole lines' then, so no character is cut."""
        text = self._rest + piece
        held = text.endswith(b"\r")  # the next piece may begin with the other half of a line's end
        lines = _LINE_END.split(text[:-1] if held else text)
        self._rest = lines.pop() + (b"\r" if held else b"")
        return [data for line in lines if (data := self._line(line)) is not None]

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None
