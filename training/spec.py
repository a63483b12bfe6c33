"""Sizes of the model, and the hub config that they stand for."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Spec:
    """`layers` has a letter a layer: K = KDA, D = sparse MLA with an indexer, S = sparse MLA that shares its top-k."""

    layers: str = "KKDSKD"
    vocab_size: int = 1536
    hidden: int = 192
    intermediate: int = 384
    moe_intermediate: int = 128
    experts: int = 8
    top_experts: int = 2
    heads: int = 8
    head_dim: int = 32
    latent: int = 64
    q_latent: int = 96
    index_heads: int = 16
    index_dim: int = 32
    index_topk: int = 64
    kpool: int = 4
    kda_heads: int = 4
    kda_dim: int = 32
    conv_width: int = 4
    streams: int = 4
    sinkhorn_iters: int = 20
    routed_scale: float = 1.0
    lower_bound: float = -5.0
    limit: float = 10.0
    eps: float = 1e-5
    hc_eps: float = 1e-6

    def text_config(self) -> dict[str, Any]:
        """The hub's `text_config`."""
        count = len(self.layers)
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.moe_intermediate,
            "num_hidden_layers": count,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.top_experts,
            "n_shared_experts": 1,
            "routed_scaling_factor": self.routed_scale,
            "kv_lora_rank": self.latent,
            "q_lora_rank": self.q_latent,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": 0,
            "v_head_dim": self.head_dim,
            "index_topk": self.index_topk,
            "index_head_dim": self.index_dim,
            "index_n_heads": self.index_heads,
            "index_kpool": self.kpool,
            "linear_head_dim": self.kda_dim,
            "linear_num_heads": self.kda_heads,
            "linear_conv_kernel_dim": self.conv_width,
            "linear_lower_bound": self.lower_bound,
            "hc_mult": self.streams,
            "hc_eps": self.hc_eps,
            "hc_sinkhorn_iters": self.sinkhorn_iters,
            "rms_norm_eps": self.eps,
            "swiglu_limit": self.limit,
            "max_position_embeddings": 32768,
            "mlp_layer_types": ["dense"] + ["sparse"] * (count - 1),
            "layer_types": ["linear_attention" if c == "K" else "deepseek_sparse_attention" for c in self.layers],
            "indexer_types": ["shared" if c == "S" else "full" for c in self.layers],
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
