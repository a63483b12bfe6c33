"""Multi-head latent attention with absorbed projections: queries meet cached latents, not expanded keys.

DeepSeek-V2 (arXiv 2405.04434), section 2.1; formulas as in the hub model ``deepseek_v3`` and its descendants.
"""

from __future__ import annotations

from functools import partial

import torch

from sidestream.config.model import IndexerKind, ModelConfig
from sidestream.core.forward_context import get_forward_context
from sidestream.core.padding import pad_rows, true_rows
from sidestream.layers.boundary import across_break
from sidestream.layers.indexer import Indexer
from sidestream.layers.linear import MergedLinear, Projection, RowLinear
from sidestream.layers.loader import LayerLoader
from sidestream.layers.rope import Rotation
from sidestream.ops.linear import by_head, by_head_into
from sidestream.ops.norm import rms_norm, rms_norm_pair
from sidestream.ops.rope import apply_rope_pair


class LatentAttention:
    """One MLA layer, sparse (leader or follower) or dense. Heads are split over the ranks.

    Args:
        loader: at ``self_attn``.
        layer: index of the decoder layer.
    """

    def __init__(self, loader: LayerLoader, config: ModelConfig, layer: int) -> None:
        self.mla = mla = config.mla
        self.layer = layer
        self.num_heads = loader.group.local("num_attention_heads", mla.num_heads)
        leads = config.layers[layer].indexer is IndexerKind.FULL
        self.indexer = Indexer(loader.at("indexer"), config, layer) if leads else None
        query = Projection("q_proj", mla.num_heads * mla.qk_head_dim)
        hidden_parts, resid_parts = [query], []
        if mla.q_lora_rank is not None:
            hidden_parts = [Projection("q_a_proj", mla.q_lora_rank, sharded=False, bias=mla.attention_bias)]
            resid_parts = [Projection("q_b_proj", query.out_features)]
            self.q_norm = loader.tensor("q_a_layernorm.weight", (mla.q_lora_rank,))
        latent = mla.kv_lora_rank + mla.qk_rope_head_dim
        hidden_parts.append(Projection("kv_a_proj_with_mqa", latent, sharded=False, bias=mla.attention_bias))
        if leads:
            hidden_parts += Indexer.hidden_projections(config)
            resid_parts.append(Indexer.query_projection(config))
        self.hidden_inputs = MergedLinear(loader, config.hidden_size, hidden_parts)
        self.resid_inputs = MergedLinear(loader, mla.q_lora_rank, resid_parts) if mla.q_lora_rank is not None else None
        self.kv_norm = loader.tensor("kv_a_layernorm.weight", (mla.kv_lora_rank,))
        expand = loader.tensor(
            "kv_b_proj.weight",
            (self.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
            shard=loader.shard(0),
        ).view(self.num_heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
        self.w_uk = expand[:, : mla.qk_nope_head_dim]  # [H, nope, r]
        self.w_uv = expand[:, mla.qk_nope_head_dim :].transpose(1, 2)  # [H, r, v]
        self.out = RowLinear(
            loader, "o_proj", mla.num_heads * mla.v_head_dim, config.hidden_size, bias=mla.attention_bias
        )

    def __call__(self, x: torch.Tensor, rotation: Rotation | None, asked: torch.Tensor | None = None) -> torch.Tensor:
        """x [Tp, hidden] -> [Tp, hidden], or of the rows ``asked`` for; ``rotation`` belongs to the rows of graph
        segments. Caches are written for all."""
        context = get_forward_context()
        rows, mla = context.inputs.segment_rows, self.mla
        query, compressed, *indexer_parts = self.hidden_inputs(x)
        compressed = true_rows(compressed, rows)
        latent = compressed[:, : mla.kv_lora_rank] if mla.qk_rope_head_dim else compressed
        if self.resid_inputs is None:
            latent = rms_norm(latent, self.kv_norm, mla.lora_norm_eps)
        else:
            q_resid, latent = rms_norm_pair(query, latent, self.q_norm, self.kv_norm, eps=mla.lora_norm_eps)
            query, *index_query = self.resid_inputs(q_resid)
            if self.indexer is not None:
                self.indexer(index_query[0], tuple(indexer_parts), rotation)
        query = true_rows(query, rows).view(rows, self.num_heads, mla.qk_head_dim)
        if mla.qk_rope_head_dim:
            absorbed, rope_key = self._absorb(query, compressed[:, mla.kv_lora_rank :], rotation)
        else:
            absorbed, rope_key = by_head(query, self.w_uk), None
        attended = across_break(
            f"attention of layer {self.layer}",
            "attention",
            partial(self._attend, asked=asked),
            absorbed,
            latent,
            rope_key,
            out=(rows, self.num_heads, mla.kv_lora_rank),
        )
        values = by_head(attended, self.w_uv).reshape(attended.shape[0], -1)
        return self.out(pad_rows(values, x.shape[0]) if asked is None else values)

    def _absorb(
        self, query: torch.Tensor, rope_key: torch.Tensor, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [S, H, nope + p] and keys [S, p] -> [S, H, r + p] and [S, p], their last p dimensions rotated."""
        mla = self.mla
        nope, rope_query = torch.split(query, [mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        absorbed = query.new_empty(query.shape[0], self.num_heads, mla.kv_lora_rank + mla.qk_rope_head_dim)
        by_head_into(nope, self.w_uk, out=absorbed[..., : mla.kv_lora_rank])
        turned = absorbed[..., mla.kv_lora_rank :]
        if rotation is None:
            turned.copy_(rope_query)
        else:
            rope_key = apply_rope_pair(rope_query, rope_key, *rotation, interleaved=True, out=turned)
        return absorbed, rope_key

    def _attend(
        self, query: torch.Tensor, latent: torch.Tensor, rope_key: torch.Tensor | None, *, asked: torch.Tensor | None
    ) -> torch.Tensor:
        """[S, H, r + p] queries -> [S, H, r], or of the rows asked for."""
        return get_forward_context().attention.attend(self.layer, query, latent, rope_key=rope_key, asked=asked)
