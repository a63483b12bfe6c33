"""The DSA indexer of an index-producing layer: writes its keys, scores what a token may see, publishes the top-k.

Formulas as in the hub models ``deepseek_v32`` (token granularity, half-split rotation), ``glm_moe_dsa`` (interleaved)
and ``glm5_next`` (pools of ``index_kpool`` tokens, no rotation). The indexer is whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch

from sidestream.config.model import ModelConfig
from sidestream.core.forward_context import get_forward_context
from sidestream.core.layer_cache import LayerCache
from sidestream.core.step_inputs import StepInputs
from sidestream.layers.boundary import break_without_result
from sidestream.layers.linear import Projection
from sidestream.layers.loader import LayerLoader
from sidestream.layers.rope import Rotation
from sidestream.ops.indexer import (
    pool_keys,
    select_topk,
    select_topk_decode,
    write_keys,
    write_normed_keys,
    write_pools,
)
from sidestream.ops.norm import layer_norm
from sidestream.ops.rope import apply_rope


class Indexer:
    """Its projections are merged into the attention layer's own GEMMs, whose results it is called with.

    Args:
        loader: at ``self_attn.indexer``.
        layer: index of the decoder layer.
    """

    def __init__(self, loader: LayerLoader, config: ModelConfig, layer: int) -> None:
        assert config.indexer is not None
        self.config = indexer = config.indexer
        self.layer = layer
        self.rope_dim = config.mla.qk_rope_head_dim if config.mla.rope is not None else 0
        self.norm_weight = loader.tensor("k_norm.weight", (indexer.head_dim,))
        self.norm_bias = loader.tensor("k_norm.bias", (indexer.head_dim,))
        self.ape = (
            loader.tensor("index_kpool_compress_ape", (indexer.kpool, indexer.head_dim), dtype=torch.float32)
            if indexer.kpool > 1
            else None
        )

    @staticmethod
    def hidden_projections(config: ModelConfig) -> list[Projection]:
        """Of the layer's input: key, head weights and, for pools, the pooling gate."""
        indexer = config.indexer
        assert indexer is not None
        projections = [
            Projection("indexer.wk", indexer.head_dim, sharded=False),
            Projection("indexer.weights_proj", indexer.num_heads, sharded=False),
        ]
        if indexer.kpool > 1:
            name = "indexer.index_kpool_compress_gate"
            projections.append(Projection(name, indexer.head_dim, sharded=False, suffix=""))
        return projections

    @staticmethod
    def query_projection(config: ModelConfig) -> Projection:
        """Of the normalised low-rank query."""
        assert config.indexer is not None
        return Projection("indexer.wq_b", config.indexer.num_heads * config.indexer.head_dim, sharded=False)

    def __call__(self, query: torch.Tensor, hidden_parts: tuple[torch.Tensor, ...], rotation: Rotation | None) -> None:
        """Write this step's keys and publish the selection: inside the graph segment in a uniform decode, else as an
        eager break.

        Args:
            query: [Tp, Hi * D] from ``query_projection``.
            hidden_parts: [Tp, ...] from ``hidden_projections``.
            rotation: of the rows of graph segments; None without rope.
        """
        cos, sin = rotation if self.rope_dim and rotation is not None else (None, None)
        gate = hidden_parts[2] if self.ape is not None else None
        arguments = (query, hidden_parts[0], hidden_parts[1], gate, cos, sin)
        if get_forward_context().inputs.uniform:
            self._select(*arguments)
        else:
            break_without_result(f"indexer of layer {self.layer}", "indexer", self._select, *arguments)

    def _select(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        weights: torch.Tensor,
        gate: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
    ) -> None:
        context = get_forward_context()
        inputs, cache, indexer = context.inputs, context.caches[self.layer], self.config
        assert cache.index_keys is not None
        rows = inputs.mixer_rows
        query = query[:rows].view(rows, indexer.num_heads, indexer.head_dim)
        turn: dict[str, Any] = {"cos": None, "sin": None, "interleaved": self.config.rope_interleaved}
        if cos is not None and sin is not None:
            turn |= {"cos": cos[:rows], "sin": sin[:rows]}
        self._write(inputs, cache, key[:rows], gate[:rows] if gate is not None else None, turn)
        selected = context.index_sink.logical_topk_indices(self.layer)
        topk = selected.shape[1] - indexer.kpool + 1  # the model's, or all of the longest sequence if that is less
        if inputs.uniform:
            assert inputs.context_lens is not None
            select_topk_decode(
                query,
                weights[:rows],
                cache.index_keys,
                block_table=inputs.block_table,
                context_lens=inputs.context_lens,
                topk=topk,
                kpool=indexer.kpool,
                scale=indexer.head_dim**-0.5,
                out=selected,
                **turn,
            )
        else:
            select_topk(
                query,
                weights[:rows],
                cache.index_keys,
                block_table=inputs.block_table,
                positions=inputs.positions[:rows],
                segments=inputs.segments,
                num_decode=inputs.num_decode,
                topk=topk,
                kpool=indexer.kpool,
                scale=indexer.head_dim**-0.5,
                out=selected,
                **turn,
            )
        context.index_sink.set_logical_topk_ready(self.layer)

    def _write(
        self,
        inputs: StepInputs,
        cache: LayerCache,
        key: torch.Tensor,
        gate: torch.Tensor | None,
        turn: dict[str, Any],
    ) -> None:
        """Normalise, rotate, pool and store this step's keys."""
        indexer = self.config
        assert cache.index_keys is not None
        flat_keys = cache.index_keys.view(-1, indexer.head_dim)
        norm: dict[str, Any] = {"norm_weight": self.norm_weight, "norm_bias": self.norm_bias}
        norm["norm_eps"] = indexer.key_norm_eps
        if gate is None or self.ape is None:
            write_normed_keys(flat_keys, inputs.key_mapping[: key.shape[0]], key, **norm, **turn)
            return
        assert inputs.pools is not None
        assert cache.index_tail is not None
        ring: dict[str, Any] = {"tail": cache.index_tail, "plan": inputs.pools.ring}
        if turn["cos"] is not None or not inputs.uniform:
            key = layer_norm(key, self.norm_weight, self.norm_bias, eps=indexer.key_norm_eps)
            if turn["cos"] is not None:
                rotated = apply_rope(key[:, : self.rope_dim], turn["cos"], turn["sin"], interleaved=turn["interleaved"])
                key = torch.cat([rotated, key[:, self.rope_dim :]], dim=-1)
            norm |= {"norm_weight": None, "norm_bias": None}
        if inputs.uniform:
            entries = inputs.pools.entries
            write_pools(key, gate, self.ape, keys_flat=flat_keys, entries=entries, **norm, **ring)
        else:
            pooled = pool_keys(key, gate, self.ape, pools=inputs.pools.ends, **ring)
            write_keys(flat_keys, inputs.pools.entries, pooled)
