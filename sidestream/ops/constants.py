"""Small tensors of constants, made once a device and kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Concatenate, ParamSpec, TypeVar

import torch

from sidestream.streams.backend import allocates_for_graph

P = ParamSpec("P")
R = TypeVar("R")


def constant(make: Callable[Concatenate[torch.device, P], R]) -> Callable[Concatenate[torch.Tensor, P], R]:
    """Decorator: ``make(device, ...)`` becomes ``get(like, ...)``, which keeps what it made for the device of ``like``.

    CPUs and CUDA devices live as long as the process. Others do not (each simulated device has memory of its own), so
    there the tensors are made anew by every call. ``make`` must therefore fill them on the device, without a copy from
    the host: then it may also run inside a capture.
    """

    @lru_cache(maxsize=64)
    def keep(device: torch.device, *args: P.args, **kwargs: P.kwargs) -> R:
        capturing = allocates_for_graph(device)
        # Such a tensor would be filled by that graph's replays only, and everybody else would read garbage.
        assert not capturing, f"{make.__qualname__} is first needed inside a capture: run the step eagerly before"
        with torch.inference_mode(False):
            return make(device, *args, **kwargs)

    def get(like: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if like.is_cpu or like.is_cuda:
            return keep(like.device, *args, **kwargs)  # type: ignore[arg-type]  # hashable, or it raises
        with torch.inference_mode(False):
            return make(like.device, *args, **kwargs)

    return get
