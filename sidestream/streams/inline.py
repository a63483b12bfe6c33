"""The plain CPU backend: work runs at once, streams and events are bookkeeping, graphs do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from sidestream.errors import ConfigError
from sidestream.streams.backend import Event, Graph, Stream


class _Current:
    """Makes a stream the current one of a block; a generator would take three times as long, in every step."""

    __slots__ = ("_backend", "_before", "_stream")

    def __init__(self, backend: InlineBackend, stream: Stream) -> None:
        self._backend = backend
        self._stream = stream

    def __enter__(self) -> None:
        self._before, self._backend._current = self._backend._current, self._stream

    def __exit__(self, *error: object) -> None:
        self._backend._current = self._before


class InlineBackend:
    """Implements ``StreamBackend`` where the host runs everything in program order.

    Nothing needs to wait here, yet handoffs keep their protocol: a wait without a publish in the same step is an
    error on this backend as on all others.
    """

    name = "the inline CPU backend"
    device = torch.device("cpu")
    external_events: str | None = None

    def __init__(self) -> None:
        self._current = Stream("default")

    def new_stream(self, name: str) -> Stream:
        return Stream(name)

    def current_stream(self) -> Stream:
        return self._current

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        return _Current(self, stream)

    def new_event(self, *, external: bool) -> Event:
        return Event(external)

    def record(self, event: Event) -> None:
        pass

    def wait(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def event_done(self, event: Event) -> bool:
        return True

    def synchronize_event(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        pass

    def host_buffer(self, shape: Sequence[int], *, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def new_pool(self) -> Any:
        return None

    def begin_capture(self, name: str, pool: Any) -> NoReturn:
        raise ConfigError(
            f"graph {name!r} cannot be captured on {self.name}: work runs at once there; "
            "use the simulated device or CUDA, or switch graphs off"
        )

    def end_capture(self, graph: Graph) -> None:
        raise AssertionError("no capture can be open on the inline backend")

    def abort_capture(self, graph: Graph) -> None:
        raise AssertionError("no capture can be open on the inline backend")

    def is_capturing(self) -> bool:
        return False

    def replay(self, graph: Graph) -> None:
        raise AssertionError("no graph can exist on the inline backend")
