"""Index groups: a leader's top-k and the followers that reuse it, turned into physical rows once a step.

The leader's indexer writes ``logical_topk_indices`` (token positions of its own sequence) and publishes them; the
first layer of the group that attends resolves them to physical rows of the KV pools, and the others find them done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sidestream.core.step_inputs import StepInputs
from sidestream.errors import ConfigError
from sidestream.ops.index_map import logical_to_physical


class TopKResolver(Protocol):
    """Maps token positions to KV rows."""

    def resolve(
        self, logical: torch.Tensor, inputs: StepInputs, *, physical: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Fill ``physical`` [T, W] int64 (-1 = none, valid prefix) and ``counts`` [T] int32 from ``logical`` [T, W]."""
        ...


class BlockTableResolver:
    """Every KV row is on the device: a position's row follows from the block table."""

    def resolve(
        self, logical: torch.Tensor, inputs: StepInputs, *, physical: torch.Tensor, counts: torch.Tensor
    ) -> None:
        logical_to_physical(
            logical,
            inputs.block_table,
            token_rows=inputs.token_rows[: logical.shape[0]],
            block_size=inputs.block_size,
            out=physical,
            counts=counts,
        )


class SparseMLAIndexGroup:
    """One leader, its followers, and the group's own buffers.

    Args:
        layers: the leader first, then its followers.
        width: entries of a top-k row.
        decode_rows: rows of the persistent buffers; a step with more tokens gets buffers of its own.
    """

    def __init__(
        self, layers: Sequence[int], *, width: int, decode_rows: int, resolver: TopKResolver, device: torch.device
    ) -> None:
        self.layers = tuple(layers)
        self._width = width
        self._resolver = resolver
        self._device = device
        self._decode_buffers = self._buffers(decode_rows)
        self._step = self._decode_buffers
        self._tokens = 0
        self._ready = False
        self._resolved = False

    def _buffers(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = (rows, self._width)
        return (
            torch.full(shape, -1, dtype=torch.int32, device=self._device),
            torch.full(shape, -1, dtype=torch.int64, device=self._device),
            torch.zeros(rows, dtype=torch.int32, device=self._device),
        )

    def begin_step(self, tokens: int) -> None:
        """Forget the last step's selection."""
        fits = tokens <= self._decode_buffers[0].shape[0]
        self._step = self._decode_buffers if fits else self._buffers(tokens)
        self._tokens = tokens
        self._ready = self._resolved = False

    @property
    def logical_topk_indices(self) -> torch.Tensor:
        """[T, W] int32 for this step's tokens."""
        return self._step[0][: self._tokens]

    def set_logical_topk_ready(self) -> None:
        """The leader has issued everything that fills ``logical_topk_indices``."""
        assert not self._ready, f"layer {self.layers[0]} published its top-k twice in one step"
        self._ready = True

    def convert_logical_to_physical_topk(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Physical rows [T, W] int64 and counts [T] int32, resolved by the first caller of a step."""
        logical, physical, counts = (buffer[: self._tokens] for buffer in self._step)
        if not self._resolved:
            assert self._ready, f"layers {self.layers} attend before layer {self.layers[0]} published its top-k"
            self._resolver.resolve(logical, inputs, physical=physical, counts=counts)
            self._resolved = True
        return physical, counts


class SparseMLAIndexGroupBuilder:
    """Collects layers in order: an index-producing layer opens a group, the sparse layers behind it share it."""

    def __init__(self) -> None:
        self._groups: list[list[int]] = []

    def register_layer(self, layer: int, *, is_index_producing_layer: bool) -> None:
        """Add a sparse MLA layer."""
        if is_index_producing_layer:
            self._groups.append([layer])
        elif self._groups:
            self._groups[-1].append(layer)
        else:
            raise ConfigError(f"layer {layer} shares a top-k, but no layer before it produces one")

    def build(
        self, *, width: int, decode_rows: int, resolver: TopKResolver, device: torch.device
    ) -> tuple[SparseMLAIndexGroup, ...]:
        return tuple(
            SparseMLAIndexGroup(layers, width=width, decode_rows=decode_rows, resolver=resolver, device=device)
            for layers in self._groups
        )
