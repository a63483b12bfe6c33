"""Helpers: what a model must ask for, hand-made safetensors folders, and a block quantiser."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from sidestream.config.model import AttentionKind, IndexerKind, MlpKind, ModelConfig

Shapes = dict[str, tuple[int, ...]]


def expected_tensors(config: ModelConfig) -> Shapes:
    """Canonical name to shape of every tensor of a model, written down independently of the loader."""
    hidden = config.hidden_size
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    for i, layer in enumerate(config.layers):
        prefix = f"model.layers.{i}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if config.hyper_connection is not None:
            streams = config.hyper_connection.mult
            for site in ("attn", "ffn"):
                shapes[f"{prefix}.hc_{site}_fn"] = ((2 + streams) * streams, streams * hidden)
                shapes[f"{prefix}.hc_{site}_base"] = ((2 + streams) * streams,)
                shapes[f"{prefix}.hc_{site}_scale"] = (3,)
        mixer = _kda(config) if layer.attention is AttentionKind.KDA else _mla(config, layer.indexer)
        shapes |= {f"{prefix}.self_attn.{name}": shape for name, shape in mixer.items()}
        shapes |= {f"{prefix}.mlp.{name}": shape for name, shape in _mlp(config, layer.mlp).items()}
    return shapes


def _kda(config: ModelConfig) -> Shapes:
    kda, hidden = config.kda, config.hidden_size
    assert kda is not None
    width = kda.num_heads * kda.head_dim
    shapes: Shapes = {"A_log": (kda.num_heads,), "dt_bias": (width,), "o_norm.weight": (kda.head_dim,)}
    for part in "qkv":
        shapes[f"{part}_proj.weight"] = (width, hidden)
        shapes[f"{part}_conv1d.weight"] = (width, kda.conv_size)
    shapes["b_proj.weight"] = (kda.num_heads, hidden)
    shapes["o_proj.weight"] = (hidden, width)
    for gate in "fg":
        shapes[f"{gate}_a_proj.weight"] = (kda.head_dim, hidden)
        shapes[f"{gate}_b_proj.weight"] = (width, kda.head_dim)
    return shapes


def _mla(config: ModelConfig, kind: IndexerKind) -> Shapes:
    mla, hidden = config.mla, config.hidden_size
    shapes: Shapes = {
        "kv_a_proj_with_mqa.weight": (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
        "kv_a_layernorm.weight": (mla.kv_lora_rank,),
        "kv_b_proj.weight": (mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "o_proj.weight": (hidden, mla.num_heads * mla.v_head_dim),
    }
    if mla.q_lora_rank is None:
        shapes["q_proj.weight"] = (mla.num_heads * mla.qk_head_dim, hidden)
    else:
        shapes["q_a_proj.weight"] = (mla.q_lora_rank, hidden)
        shapes["q_a_layernorm.weight"] = (mla.q_lora_rank,)
        shapes["q_b_proj.weight"] = (mla.num_heads * mla.qk_head_dim, mla.q_lora_rank)
    if mla.attention_bias:
        shapes["kv_a_proj_with_mqa.bias"] = (mla.kv_lora_rank + mla.qk_rope_head_dim,)
        shapes["o_proj.bias"] = (hidden,)
        if mla.q_lora_rank is not None:
            shapes["q_a_proj.bias"] = (mla.q_lora_rank,)
    if kind is IndexerKind.FULL:
        indexer = config.indexer
        assert indexer is not None
        assert mla.q_lora_rank is not None
        shapes["indexer.wq_b.weight"] = (indexer.num_heads * indexer.head_dim, mla.q_lora_rank)
        shapes["indexer.wk.weight"] = (indexer.head_dim, hidden)
        shapes["indexer.k_norm.weight"] = (indexer.head_dim,)
        shapes["indexer.k_norm.bias"] = (indexer.head_dim,)
        shapes["indexer.weights_proj.weight"] = (indexer.num_heads, hidden)
        if indexer.kpool > 1:
            shapes["indexer.index_kpool_compress_ape"] = (indexer.kpool, indexer.head_dim)
            shapes["indexer.index_kpool_compress_gate"] = (indexer.head_dim, hidden)
    return shapes


def _mlp(config: ModelConfig, kind: MlpKind) -> Shapes:
    def gated(prefix: str, width: int) -> Shapes:
        inner, outer = (width, config.hidden_size), (config.hidden_size, width)
        return {
            f"{prefix}gate_proj.weight": inner,
            f"{prefix}up_proj.weight": inner,
            f"{prefix}down_proj.weight": outer,
        }

    if kind is MlpKind.DENSE:
        return gated("", config.intermediate_size)
    moe = config.moe
    assert moe is not None
    shapes = {"gate.weight": (moe.num_experts, config.hidden_size), "gate.e_score_correction_bias": (moe.num_experts,)}
    shapes |= gated("shared_experts.", moe.intermediate_size * moe.num_shared_experts)
    for expert in range(moe.num_experts):
        shapes |= gated(f"experts.{expert}.", moe.intermediate_size)
    return shapes


def write(folder: Path, tensors: dict[str, torch.Tensor], *, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    return folder


def quantise(weight: torch.Tensor, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values and one fp32 scale a block, block by block; edge blocks may be partial."""
    height, width = weight.shape
    stored = torch.empty(height, width, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-height // rows), -(-width // cols))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols))
            scales[i, j] = weight[block].abs().max() / 448.0
            stored[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return stored, scales


def dequantise(stored: torch.Tensor, scales: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    values = torch.empty(stored.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols))
            values[block] = stored[block].to(torch.float32) * scales[i, j]
    return values
