"""Lists the kernels that Triton made ready in this process: compiled, or read from its cache on disk.

The first launch of a kernel with arguments of a new kind takes milliseconds if Triton's cache on disk has it compiled
(``TRITON_CACHE_DIR``, else ``~/.triton/cache``), and up to seconds if not: too long for a request to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import knobs

_SEEN: list[str] = []
_WATCHED: list[Callable[..., bool | None]] = []
"""The hook, once it is in place."""


def watch() -> None:
    """List kernels from here on; what else listens to Triton goes on doing so."""
    if _WATCHED:
        return
    before = knobs.runtime.jit_post_compile_hook

    def compiled(**found: Any) -> bool | None:
        _SEEN.append(f"{found['repr']} with {found['compile']['constants']}")
        return before(**found) if before is not None else None

    _WATCHED.append(compiled)
    knobs.runtime.jit_post_compile_hook = compiled


def seen() -> tuple[str, ...]:
    """Kernels in order of their first launch, each with what it was specialised for."""
    return tuple(_SEEN)
