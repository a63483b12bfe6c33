"""How many experts the tokens of a step choose between them, layer by layer, in engines that run as they are timed.

A step's time hangs on it: each expert that anybody chose is read whole. Sequences that decode alike choose the same
few, so figures of two engines can be compared only where as many were chosen. The router's choice is copied to memory
of our own by one small kernel a layer, in every engine of a comparison alike, in graphs too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sidestream.layers import mlp as _mlp

mlp: Any = _mlp
REAL: Callable[..., tuple[torch.Tensor, torch.Tensor]] = mlp.route


class ChosenExperts:
    """Stands in for the router from now until ``close``.

    Args:
        rows: of the largest step that is looked at; larger ones leave nothing.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._ids: dict[int, torch.Tensor] = {}
        mlp.route = self._route

    def close(self) -> None:
        """Leave routers alone again, in engines captured from now on."""
        mlp.route = REAL

    def _route(self, x: torch.Tensor, weight: torch.Tensor, *args: Any, **named: Any) -> Any:
        weights, ids = REAL(x, weight, *args, **named)
        if len(ids) <= self._rows:
            if weight.data_ptr() not in self._ids:  # in the warm-up of a shape, not in its capture
                self._ids[weight.data_ptr()] = torch.full(
                    (self._rows, ids.shape[1]), -1, dtype=ids.dtype, device=ids.device
                )
            self._ids[weight.data_ptr()][: len(ids)].copy_(ids)
        return weights, ids

    @torch.inference_mode()
    def of_step(self, step: Callable[[], object]) -> list[torch.Tensor]:
        """What a step's tokens choose: [rows, top_k] of each layer on the host, -1 in rows that the step has not. On
        the stream that computes, for which it waits."""
        for ids in self._ids.values():
            ids.fill_(-1)
        step()
        chosen = [ids.cpu() for ids in self._ids.values()]
        return [ids for ids in chosen if int(ids.max()) >= 0]  # not those of engines that are gone


def different(ids: torch.Tensor) -> int:
    """How many experts were chosen."""
    return len(set(ids.flatten().tolist()) - {-1})
