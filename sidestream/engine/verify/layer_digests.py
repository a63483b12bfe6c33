"""A few numbers of every layer's output at every position: enough to say which layer differs first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sidestream.config.model import ModelConfig
from sidestream.core.batch import Chunk

ROWS_AT_ONCE = 2048
"""Rows digested at once: the temporaries take as much memory as that many rows in fp32."""


@dataclass(frozen=True, slots=True)
class LayerDigest:
    """Of one row behind each layer.

    Attributes:
        bits: sums of the row's bit patterns times fixed odd numbers; a row with one other bit has another sum.
        projection: the row times a fixed vector of signs.
        norm: Euclidean.
    """

    bits: tuple[int, ...]
    projection: tuple[float, ...]
    norm: tuple[float, ...]


class LayerDigests:
    """Implements ``core.protocols.LayerObserver``: graphs that were captured with it write its memory at each replay.

    Args:
        max_rows: of a step, padding included.
        device: of the engine.
    Attributes:
        seen: (request id, position) -> digest; a position that is computed again replaces the first.
    """

    def __init__(self, model: ModelConfig, *, max_rows: int, device: torch.device) -> None:
        streams = model.hyper_connection.mult if model.hyper_connection is not None else 1
        width = streams * model.hidden_size
        generator = torch.Generator().manual_seed(0)
        factors = torch.randint(0, 2**30, (width,), generator=generator, dtype=torch.int32) * 2 + 1
        signs = torch.randint(0, 2, (width,), generator=generator).float() * 2 - 1
        self._factors, self._signs = factors.to(device), signs.to(device)
        shape = (model.num_layers, max_rows)
        self._bits = torch.zeros(shape, dtype=torch.int64, device=device)
        self._projection = torch.zeros(shape, dtype=torch.float32, device=device)
        self._norm = torch.zeros(shape, dtype=torch.float32, device=device)
        self.seen: dict[tuple[str, int], LayerDigest] = {}

    def see(self, layer: int, state: torch.Tensor) -> None:
        rows = state.reshape(state.shape[0], -1)
        pattern = torch.int32 if rows.dtype.itemsize == 4 else torch.int16
        for start in range(0, rows.shape[0], ROWS_AT_ONCE):
            part = rows[start : start + ROWS_AT_ONCE]
            place = slice(start, start + part.shape[0])
            self._bits[layer, place].copy_((part.view(pattern).to(torch.int32) * self._factors).sum(dim=-1))
            values = part.float()
            self._projection[layer, place].copy_((values * self._signs).sum(dim=-1))
            self._norm[layer, place].copy_(values.square().sum(dim=-1).sqrt())

    def end_step(self, chunks: Sequence[Chunk]) -> None:
        count = sum(chunk.length for chunk in chunks)
        bits = self._bits[:, :count].tolist()
        projection = self._projection[:, :count].tolist()
        norm = self._norm[:, :count].tolist()
        positions = ((chunk.request_id, p) for chunk in chunks for p in range(chunk.start, chunk.end))
        by_row = zip(zip(*bits, strict=True), zip(*projection, strict=True), zip(*norm, strict=True), strict=True)
        for key, numbers in zip(positions, by_row, strict=True):
            self.seen[key] = LayerDigest(*numbers)


def first_other_bits(
    left: Mapping[tuple[str, int], LayerDigest], right: Mapping[tuple[str, int], LayerDigest], request_id: str
) -> tuple[int, int] | None:
    """(position, layer) of a request's first digest with other bits, positions before layers; None if all are equal.

    A row depends on no later position and no later layer, so this is where the difference began.
    """
    for position in _common_positions(left, right, request_id):
        a, b = left[request_id, position].bits, right[request_id, position].bits
        for layer, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                return position, layer
    return None


def first_apart(
    left: Mapping[tuple[str, int], LayerDigest],
    right: Mapping[tuple[str, int], LayerDigest],
    request_id: str,
    *,
    bound: float,
) -> tuple[int, int] | None:
    """As ``first_other_bits`` for runs whose rounding differs: projections further apart than ``bound`` times the norm.

    Errors that are independent from element to element move a projection on signs by about their own norm.
    """
    for position in _common_positions(left, right, request_id):
        a, b = left[request_id, position], right[request_id, position]
        for layer, (x, y, norm) in enumerate(zip(a.projection, b.projection, a.norm, strict=True)):
            if not abs(x - y) <= bound * norm:  # NaN is apart from everything
                return position, layer
    return None


def _common_positions(
    left: Mapping[tuple[str, int], LayerDigest], right: Mapping[tuple[str, int], LayerDigest], request_id: str
) -> list[int]:
    return sorted(position for name, position in left.keys() & right.keys() if name == request_id)
