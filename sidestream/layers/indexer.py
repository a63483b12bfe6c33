"""The DSA indexer of an index-producing layer: writes its keys, scores what a token may see, publishes the top-k.

Formulas as in the hub models ``deepseek_v32`` (token granularity, half-split rotation), ``glm_moe_dsa`` (interleaved)
and ``glm5_next`` (pools of ``index_kpool`` tokens, no rotation). The indexer is whole on every rank.
"""

from __future__ import annotations

import torch

from sidestream.config.model import ModelConfig
from sidestream.core.forward_context import get_forward_context
from sidestream.layers.linear import Projection
from sidestream.layers.loader import LayerLoader
from sidestream.layers.rope import Rotation
from sidestream.ops.indexer import pool_keys, select_topk, write_keys
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
        """Write this step's keys and publish the selection.

        Args:
            query: [Tp, Hi * D] from ``query_projection``.
            hidden_parts: [Tp, ...] from ``hidden_projections``.
            rotation: of the T true tokens; None without rope.
        """
        context = get_forward_context()
        inputs, cache = context.inputs, context.caches[self.layer]
        assert cache.index_keys is not None
        tokens, indexer = inputs.num_tokens, self.config
        key = layer_norm(hidden_parts[0][:tokens], self.norm_weight, self.norm_bias, eps=indexer.key_norm_eps)
        query = query[:tokens].view(tokens, indexer.num_heads, indexer.head_dim)
        if self.rope_dim:
            assert rotation is not None
            key, query = self._rotate(key, rotation), self._rotate(query, rotation)
        weights = hidden_parts[1][:tokens].float() * indexer.num_heads**-0.5
        flat_keys = cache.index_keys.view(-1, indexer.head_dim)
        if self.ape is None:
            write_keys(flat_keys, inputs.slot_mapping[:tokens], key)
        else:
            assert inputs.pools is not None
            assert cache.index_tail is not None
            pooled = pool_keys(
                key,
                hidden_parts[2][:tokens],
                self.ape,
                tail=cache.index_tail,
                plan=inputs.pools.ring,
                pools=inputs.pools.ends,
            )
            write_keys(flat_keys, inputs.pools.entries, pooled)
        selected = context.index_sink.logical_topk_indices(self.layer)
        select_topk(
            query,
            weights,
            cache.index_keys,
            block_table=inputs.block_table,
            positions=inputs.positions[:tokens],
            segments=inputs.segments,
            num_decode=inputs.num_decode,
            topk=selected.shape[1] - indexer.kpool + 1,  # the model's, or all of the longest sequence if that is less
            kpool=indexer.kpool,
            scale=indexer.head_dim**-0.5,
            out=selected,
        )
        context.index_sink.set_logical_topk_ready(self.layer)

    def _rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        rotated = apply_rope(x[..., : self.rope_dim], *rotation, interleaved=self.config.rope_interleaved)
        return torch.cat([rotated, x[..., self.rope_dim :]], dim=-1)
