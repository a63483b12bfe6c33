"""Selections of a chosen overlap from step to step, put in the place of what the indexer selects.

Random weights select at chance, which no trained model does. The indexer runs as ever; behind it the step's selection
is replaced by the next of a fixed series, with a handful of small kernels that every engine of a comparison runs alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sidestream.layers import indexer as _indexer

SELECTIONS = 96
"""Of a series; behind the last the first comes again."""
indexer: Any = _indexer
REAL: tuple[Callable[..., None], Callable[..., None]] = (indexer.select_topk_decode, indexer.select_topk)


class ReplayedSelections:
    """Stands in for the indexer's selections from now until ``close``.

    A series is a window that moves over a random order of a row's pools of ``kpool`` tokens: what leaves it does not
    come back for as long as the order lasts, so a hot buffer finds what the last step selected, and no more.

    Args:
        context: positions below this are selected.
        kpool: tokens that are always selected together.
    """

    def __init__(self, context: int, *, kpool: int, device: str) -> None:
        self._context, self._kpool, self._device = context, kpool, device
        self._series: dict[tuple[int, int], torch.Tensor] = {}
        self._turns: dict[int, torch.Tensor] = {}
        with torch.inference_mode():
            self._on = torch.zeros((), dtype=torch.bool, device=device)
        indexer.select_topk_decode = self._uniform
        indexer.select_topk = self._any_mix

    def close(self) -> None:
        """Let the indexer select again, in engines captured from now on."""
        indexer.select_topk_decode, indexer.select_topk = REAL

    def _uniform(self, *args: Any, out: torch.Tensor, **named: Any) -> None:
        REAL[0](*args, out=out, **named)
        self._replace(out)

    def _any_mix(self, *args: Any, out: torch.Tensor, num_decode: int, **named: Any) -> None:
        REAL[1](*args, out=out, num_decode=num_decode, **named)
        if num_decode == len(named["segments"]):
            self._replace(out[: sum(segment.length for segment in named["segments"])])

    def _replace(self, out: torch.Tensor) -> None:
        rows, width = out.shape
        if (rows, width) not in self._series:  # in the warm-up of a shape, not in its capture
            self._series[rows, width] = torch.full(
                (SELECTIONS, rows, width), -1, dtype=torch.int32, device=self._device
            )
        if out.data_ptr() not in self._turns:
            self._turns[out.data_ptr()] = torch.zeros(1, dtype=torch.int64, device=self._device)
        series, turn = self._series[rows, width], self._turns[out.data_ptr()]
        replaced = self._on & (out[:, :1] >= 0)  # not in rows of padding
        out.copy_(torch.where(replaced, series.index_select(0, turn % SELECTIONS)[0], out))
        turn.add_(1)

    @torch.inference_mode()
    def use(self, overlap: float | None) -> None:
        """From the next step on, with graphs as they are; None leaves what the indexer selects. On the stream that
        computes."""
        share = 1.0 if overlap is None else overlap
        self._on.fill_(overlap is not None)
        for turn in self._turns.values():
            turn.zero_()
        for (rows, width), series in () if overlap is None else self._series.items():
            pools, chosen = self._context // self._kpool, (width - self._kpool + 1) // self._kpool
            chosen = min(chosen, pools)
            order = torch.rand(rows, pools, device=self._device).argsort(dim=1)
            for i in range(SELECTIONS):
                window = order.roll(-round(i * (1 - share) * chosen), dims=1)[:, :chosen].sort(dim=1).values
                tokens = window[:, :, None] * self._kpool + torch.arange(self._kpool, device=self._device)
                series[i, :, : chosen * self._kpool] = tokens.flatten(1).int()
