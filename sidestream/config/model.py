"""What a checkpoint is: the frozen, architecture-neutral description of a model.

Every field that changes the maths of a supported model is here under one name, whatever its hub config calls it.
``sidestream.config.hf`` builds it from a hub ``config.json``; nothing below reads a hub config.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Architecture(StrEnum):
    """Model families, by their hub ``model_type``."""

    GLM5_NEXT = "glm5_next"
    GLM_MOE_DSA = "glm_moe_dsa"
    DEEPSEEK_V32 = "deepseek_v32"
    KIMI_LINEAR = "kimi_linear"


class AttentionKind(StrEnum):
    """What a layer's token mixer is."""

    KDA = "kda"
    """Kimi Delta Attention: linear attention with conv and recurrent state, no KV rows."""
    SPARSE_MLA = "sparse_mla"
    """Multi-head latent attention over the rows that an indexer selected (DSA)."""
    DENSE_MLA = "dense_mla"
    """Multi-head latent attention over every row of the context."""


class IndexerKind(StrEnum):
    """Whether a layer selects its own rows."""

    FULL = "full"
    """Leader: runs its own indexer."""
    SHARED = "shared"
    """Follower: reuses the top-k of the nearest leader before it."""
    NONE = "none"
    """No indexer: a KDA or dense MLA layer."""


class MlpKind(StrEnum):
    DENSE = "dense"
    SPARSE = "sparse"
    """Mixture of experts."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    attention: AttentionKind
    indexer: IndexerKind
    mlp: MlpKind


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the ``qk_rope_head_dim`` slice. ``factor`` and what follows matter for ``yarn`` only."""

    rope_type: str  # "default" or "yarn"
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class MlaConfig:
    num_heads: int
    q_lora_rank: int | None  # None: one full-rank q_proj
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # width of the shared key slice; rotated only if ``rope`` is set
    v_head_dim: int
    softmax_scale: float  # qk_head_dim ** -0.5, yarn's mscale**2 included
    lora_norm_eps: float  # of q_a_layernorm and kv_a_layernorm
    attention_bias: bool
    rope: RopeConfig | None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    num_heads: int
    head_dim: int
    topk: int  # tokens selected (whole pools only, the tail not counted)
    kpool: int  # tokens a pool; 1 = token granularity
    rope_interleaved: bool  # pairing of the indexer's own rotation
    key_norm_eps: float = 1e-6

    def topk_width(self, longest: int) -> int:
        """Entries of a ``logical_topk_indices`` row: the top-k or all ``longest`` tokens, and an unfinished pool."""
        return min(self.topk, -(-longest // self.kpool) * self.kpool) + self.kpool - 1


@dataclass(frozen=True, slots=True)
class KdaConfig:
    num_heads: int
    head_dim: int  # of keys and of values: checkpoints tie them
    conv_size: int  # taps of the short convolution
    gate_lower_bound: float | None  # None: softplus gate
    norm_eps: float


@dataclass(frozen=True, slots=True)
class MoeConfig:
    num_experts: int
    top_k: int
    num_groups: int
    topk_groups: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_shared_experts: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class HyperConnectionConfig:
    mult: int  # residual streams
    eps: float
    sinkhorn_iters: int


@dataclass(frozen=True, slots=True)
class Fp8BlockConfig:
    """Weights stored as E4M3 with one fp32 ``weight_scale_inv`` a block."""

    block_rows: int = 128
    block_cols: int = 128


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of dense MLPs
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    swiglu_limit: float | None  # gate clamped above, up clamped on both sides; None: not clamped
    mla: MlaConfig
    indexer: IndexerConfig | None
    kda: KdaConfig | None
    moe: MoeConfig | None
    hyper_connection: HyperConnectionConfig | None
    quantization: Fp8BlockConfig | None
    dtype: str | None  # the checkpoint's own, "bfloat16" or "float32" ...
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    @classmethod
    def from_hf(
        cls, source: str | os.PathLike[str] | Mapping[str, object], *, allow_unknown: bool = False
    ) -> ModelConfig:
        """Describe the model of a hub config.

        Args:
            source: a checkpoint folder (its ``generation_config.json`` may add end-of-sequence ids), the path of a
                ``config.json``, or its contents.
            allow_unknown: accept keys that this engine does not know; without it they raise, since they might
                change what the model computes.
        Raises:
            ConfigError: naming the file, the key, its value and what is supported.
        """
        from sidestream.config.hf import read_model_config  # here, because hf builds this class

        return read_model_config(source, allow_unknown=allow_unknown)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def layers_of(self, *kinds: AttentionKind) -> tuple[int, ...]:
        """Indices of the layers whose token mixer is one of ``kinds``, ascending."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.attention in kinds)
