"""What the server does, said now and then: tokens a second, requests, memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sidestream.server.service import Service

SECONDS = 10.0


class LoadLog:
    """Makes a line of each stretch of time in which requests ran, and one of that in which the last ended.

    Args:
        say: told each line.
    """

    def __init__(self, service: Service, say: Callable[[str], None]) -> None:
        self._service = service
        self._say = say
        self._tokens = (0, 0)
        self._prefix = (0, 0)
        self._busy = False

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(SECONDS)
            self.note(SECONDS)

    def note(self, seconds: float) -> None:
        """So many seconds have passed since the last time."""
        report = self._service.report()
        if report is None:
            return
        ready, state = report
        tokens, prefix = self._service.metrics.tokens(), (state.prefix_hits, state.prefix_queries)
        prompt, generated = (now - then for now, then in zip(tokens, self._tokens, strict=True))
        hits, queries = (now - then for now, then in zip(prefix, self._prefix, strict=True))
        busy = state.running + state.waiting > 0
        if busy or self._busy or prompt or generated:
            used = 1 - state.free_blocks / ready.num_blocks if ready.num_blocks else 0.0
            self._say(
                f"{'' if busy else 'idle; '}prompt {prompt / seconds:.1f} tokens/s, "
                f"generated {generated / seconds:.1f} tokens/s, running {state.running}, waiting {state.waiting}, "
                f"KV {used:.1%}, prefix hits {f'{hits / queries:.1%}' if queries else '-'}"
            )
        self._tokens, self._prefix, self._busy = tokens, prefix, busy
