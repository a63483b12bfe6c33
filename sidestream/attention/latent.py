"""Latent attention over paged rows: writes a step's rows, then attends to selected rows or to the whole context."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidestream.attention.index_group import SparseMLAIndexGroup
from sidestream.core.forward_context import get_forward_context
from sidestream.core.padding import pad_rows, true_rows
from sidestream.core.step_inputs import StepInputs
from sidestream.ops.dense_mla import dense_mla, dense_mla_decode
from sidestream.ops.kv_rows import KVRowLayout, write_rows
from sidestream.ops.sparse_mla import sparse_mla


class PagedLatentAttention:
    """Implements ``MLAttention`` and ``IndexSink`` for one model.

    Args:
        layout: how a KV row is stored.
        scale: of the softmax.
        groups: index groups; a layer in none of them attends densely.
    """

    def __init__(self, *, layout: KVRowLayout, scale: float, groups: Sequence[SparseMLAIndexGroup]) -> None:
        self._layout = layout
        self._scale = scale
        self._groups = tuple(groups)
        self._group_of = {layer: group for group in groups for layer in group.layers}

    @property
    def groups(self) -> tuple[SparseMLAIndexGroup, ...]:
        return self._groups

    def begin_step(self, rows: int) -> None:
        """Forget the last step's selections; ``rows``: ``StepInputs.mixer_rows`` of this one."""
        for group in self._groups:
            group.begin_step(rows)

    def logical_topk_indices(self, layer: int) -> torch.Tensor:
        return self._leader(layer).logical_topk_indices

    def set_logical_topk_ready(self, layer: int) -> None:
        self._leader(layer).set_logical_topk_ready()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        latent: torch.Tensor,
        *,
        rope_key: torch.Tensor | None,
        asked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        context = get_forward_context()
        inputs, pool = context.inputs, context.caches[layer].kv
        assert pool is not None, f"layer {layer} has no KV rows"
        given, rows = query.shape[0], inputs.mixer_rows
        query, latent = true_rows(query, rows), true_rows(latent, rows)
        rope_key = None if rope_key is None else true_rows(rope_key, rows)
        write_rows(pool, inputs.slot_mapping[:rows], latent, rope=rope_key, layout=self._layout)
        group = self._group_of.get(layer)
        if group is None:
            out = self._dense(query, pool, inputs)
            return pad_rows(out, given) if asked is None else out.index_select(0, asked)
        return self._sparse(group, layer, query, pool, inputs, size=given, asked=asked)

    def _sparse(
        self,
        group: SparseMLAIndexGroup,
        layer: int,
        query: torch.Tensor,
        pool: torch.Tensor,
        inputs: StepInputs,
        *,
        size: int,
        asked: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, counts = group.convert_logical_to_physical_topk(inputs, layer)
        if asked is not None:
            query, rows, counts = (each.index_select(0, asked) for each in (query, rows, counts))
            size = query.shape[0]
        scale, layout = self._scale, self._layout
        out, _ = sparse_mla(query, pool, rows, counts=counts, scale=scale, layout=layout, with_lse=False, out_rows=size)
        return out

    def _dense(self, query: torch.Tensor, pool: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        if inputs.uniform:
            assert inputs.context_lens is not None
            out, _ = dense_mla_decode(
                query,
                pool,
                block_table=inputs.block_table,
                context_lens=inputs.context_lens,
                block_size=inputs.block_size,
                scale=self._scale,
                layout=self._layout,
            )
            return out
        out, _ = dense_mla(
            query,
            pool,
            block_table=inputs.block_table,
            segments=inputs.segments,
            num_decode=inputs.num_decode,
            block_size=inputs.block_size,
            scale=self._scale,
            layout=self._layout,
        )
        return out

    def _leader(self, layer: int) -> SparseMLAIndexGroup:
        group = self._group_of[layer]
        assert group.layers[0] == layer, f"layer {layer} follows layer {group.layers[0]} and produces no top-k"
        return group
