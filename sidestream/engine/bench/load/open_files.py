"""The limit of open files, of which every connection is one."""

from __future__ import annotations

import resource

SPARE = 64
"""Files that are open anyway."""


def allow_connections(count: int) -> int:
    """Raise this process's limit where it stands in the way of so many connections, as far as the system allows.

    Returns:
        Connections that there is room for, up to ``count``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = count + SPARE
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == unlimited else max(0, min(count, soft - SPARE))
