"""Lists the kernels that Triton made ready in this process: compiled, or read from its cache on disk.

The first launch of a kernel with arguments of a new kind takes milliseconds if Triton's cache on disk has it compiled
(``TRITON_CACHE_DIR``, else ``~/.triton/cache``), and up to seconds if not: too long for a request to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import knobs

_SEEN: list[str] = []
_SECONDS: dict[str, float] = {}
_READ: list[str] = []
_WATCHED: list[Callable[..., Any]] = []
"""The hooks, once they are in place."""


def watch() -> None:
    """List kernels from here on; what else listens to Triton goes on doing so."""
    if _WATCHED:
        return
    ready_before, compiled_before = knobs.runtime.jit_post_compile_hook, knobs.compilation.listener

    def ready(**found: Any) -> bool | None:
        _SEEN.append(f"{found['repr']} with {found['compile']['constants']}")
        return ready_before(**found) if ready_before is not None else None

    def compiled(**found: Any) -> None:
        if found["cache_hit"]:
            _READ.append(found["src"].name)
        else:
            name = f"{len(_SECONDS)} {found['src'].name}"
            _SECONDS[name] = round(found["times"].total / 1e6, 3)
        if compiled_before is not None:
            compiled_before(**found)

    _WATCHED.extend((ready, compiled))
    knobs.runtime.jit_post_compile_hook = ready
    knobs.compilation.listener = compiled


def seen() -> tuple[str, ...]:
    """Kernels in order of their first launch, each with what it was specialised for."""
    return tuple(_SEEN)


def compiled() -> dict[str, float]:
    """Seconds that the compiler took for each of those that the cache lacked, in order, numbered."""
    return dict(_SECONDS)


def read_back() -> int:
    """How many the cache had."""
    return len(_READ)
