"""Runs nodes of work in an order that is legal but as unfriendly as the seed makes it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from enum import Enum

import numpy as np

from sidestream.errors import ConfigError
from sidestream.streams.simulated.site import Site

Rows = dict[int, np.ndarray]
Run = Callable[[Rows], None]
"""The work itself; puts the rows that it touched under the number of the touch."""


class Order(Enum):
    """When issued work runs."""

    INLINE = "inline"
    """At once: the order of the program."""
    LAZY = "lazy"
    """Nothing before the host waits for it, and then only what it waits for."""
    RANDOM = "random"
    """Any ready node at any time."""
    STARVED = "starved"
    """One stream gets nothing before it must; all others run at once."""


class DeviceFaultError(RuntimeError):
    """Work failed on the simulated device, far behind the line that issued it."""


class Node:
    """One piece of issued work.

    Attributes:
        label, site, where: what it is, which line issued it, on which stream.
        deps: nodes that must run first; dropped once it ran.
        clock, timeline, tick: see ``hazards``.
        rows: rows touched through index tensors, once it ran.
    """

    __slots__ = (
        "clock",
        "deps",
        "done",
        "followers",
        "index",
        "label",
        "rows",
        "run",
        "site",
        "tick",
        "timeline",
        "unmet",
        "where",
    )

    def __init__(
        self,
        label: str,
        site: Site,
        where: str,
        *,
        run: Run | None,
        deps: Iterable[Node],
        clock: dict[int, int],
        timeline: int,
    ) -> None:
        self.label = label
        self.site = site
        self.where = where
        self.run = run
        self.deps = tuple(deps)
        self.clock = clock
        self.timeline = timeline
        self.tick = clock[timeline]
        self.rows: Rows = {}
        self.done = False
        self.followers: list[Node] = []
        self.unmet = 0
        self.index = 0


class Scheduler:
    """Takes nodes in issue order and runs them.

    Args:
        order: of execution.
        seed: of Order.RANDOM.
        starved: name of the stream that Order.STARVED holds back.
    """

    def __init__(self, order: Order, *, seed: int, starved: str | None) -> None:
        if (order is Order.STARVED) != (starved is not None):
            raise ConfigError(f"order {order} with starved={starved!r}: Order.STARVED, and no other, names a stream")
        self._order = order
        self._random = random.Random(seed)
        self._starved = starved
        self._ready: list[Node] = []
        self._pending: dict[int, Node] = {}
        self._count = 0

    def submit(self, node: Node) -> None:
        """Add a node; others may run now."""
        self._count += 1
        node.index = self._count
        for dep in node.deps:
            if not dep.done:
                dep.followers.append(node)
                node.unmet += 1
        self._pending[node.index] = node
        if node.unmet == 0:
            self._ready.append(node)
        if self._order is Order.INLINE:
            self._run(node)
        elif self._order is Order.RANDOM:
            while self._ready and self._random.random() < 0.4:
                self._run_any()
        elif self._order is Order.STARVED:
            eager = [n for n in self._ready if n.where != self._starved]
            while eager:
                self._run(eager[0])
                eager = [n for n in self._ready if n.where != self._starved]

    def finish(self, nodes: Iterable[Node]) -> None:
        """Run at least what these nodes need, and them."""
        targets = [node for node in nodes if not node.done]
        if self._order is Order.RANDOM:
            while any(not node.done for node in targets):
                self._run_any()
            return
        needed: dict[int, Node] = {}
        stack = targets
        while stack:
            node = stack.pop()
            if not node.done and node.index not in needed:
                needed[node.index] = node
                stack.extend(node.deps)
        for index in sorted(needed):
            self._run(needed[index])

    def finish_all(self) -> None:
        """Run everything."""
        self.finish(list(self._pending.values()))

    def _run_any(self) -> None:
        self._run(self._ready[self._random.randrange(len(self._ready))])

    def _run(self, node: Node) -> None:
        if node.done:
            return
        assert node.unmet == 0, f"{node.label} runs before {node.unmet} others that it needs"
        self._ready.remove(node)
        del self._pending[node.index]
        run, node.run, node.deps, node.done = node.run, None, (), True
        for follower in node.followers:
            follower.unmet -= 1
            if follower.unmet == 0:
                self._ready.append(follower)
        node.followers = []
        if run is not None:
            try:
                run(node.rows)
            except Exception as error:
                raise DeviceFaultError(f"{node.label} on {node.where}, issued at {node.site}: {error}") from error
