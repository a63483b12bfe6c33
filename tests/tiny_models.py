"""Tiny random models of the four architectures: the oracle's config, its model with every value re-drawn, a checkpoint.

Default initialisation is blind: norms of one, biases of zero and a zero ``A_log`` or pool ``ape`` hide a forgotten
tensor. ``build_oracle`` re-draws every parameter and every buffer that a checkpoint stores with values that matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

ARCHITECTURES = ("glm5_next", "glm_moe_dsa", "deepseek_v32", "kimi_linear")

_CLASSES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "glm5_next": (Glm5NextConfig, Glm5NextForConditionalGeneration),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "kimi_linear": (KimiLinearConfig, KimiLinearForCausalLM),
}

_LAYER_LETTERS = {"K": "linear_attention", "D": "deepseek_sparse_attention", "S": "deepseek_sparse_attention"}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
"""Factor 32 from a context of 64, ``mscale`` unlike ``mscale_all_dim`` so that cos and sin are scaled as well."""

_COMMON: dict[str, Any] = {
    "vocab_size": 144,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_INDEXER: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 8, "q_lora_rank": 48}
_KDA: dict[str, Any] = {"linear_head_dim": 16, "linear_num_heads": 6, "linear_conv_kernel_dim": 4}


def next_layers(letters: str) -> dict[str, Any]:
    """``layer_types`` and ``indexer_types`` of a glm5_next model: K = KDA, D = DSA leader, S = DSA follower."""
    return {
        "num_hidden_layers": len(letters),
        "layer_types": [_LAYER_LETTERS[letter] for letter in letters],
        "indexer_types": ["shared" if letter == "S" else "full" for letter in letters],
        "mlp_layer_types": ["dense"] + ["sparse"] * (len(letters) - 1),
    }


_DEFAULTS: dict[str, dict[str, Any]] = {
    "glm5_next": {
        **_COMMON,
        **_INDEXER,
        **_KDA,
        **next_layers("KKDKKD"),
        "qk_rope_head_dim": 0,
        "n_routed_experts": 8,
        "index_kpool": 4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "linear_lower_bound": -5.0,
        "swiglu_limit": 1.0,  # low enough to bite on random activations
    },
    "glm_moe_dsa": {
        **_COMMON,
        **_INDEXER,
        "num_hidden_layers": 4,
        "qk_rope_head_dim": 16,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "indexer_types": ["full", "shared", "full", "shared"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "deepseek_v32": {
        **_COMMON,
        **_INDEXER,
        "num_hidden_layers": 4,
        "qk_rope_head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "rope_parameters": YARN,
    },
    "kimi_linear": {
        **_COMMON,
        **_KDA,
        "num_hidden_layers": 4,
        "q_lora_rank": None,
        "qk_rope_head_dim": 16,
        "num_local_experts": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("glm5_next", {}),
    "next_share": ("glm5_next", next_layers("KDSKDD")),
    "next_softplus_gate": ("glm5_next", {"linear_lower_bound": None}),
    "dsa": ("glm_moe_dsa", {}),
    "dsa_long_groups": ("glm_moe_dsa", {"num_hidden_layers": 5, "indexer_types": None, "index_topk_pattern": "FFSSS"}),
    "dsa_yarn_bias": ("glm_moe_dsa", {"rope_parameters": YARN, "attention_bias": True}),
    "deepseek": ("deepseek_v32", {}),
    "deepseek_plain_rope": (
        "deepseek_v32",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}, "n_group": 2, "topk_group": 1},
    ),
    "kimi": ("kimi_linear", {}),
    "kimi_q_lora": ("kimi_linear", {"q_lora_rank": 48, "n_group": 2, "topk_group": 1}),
}
"""Name to ``(architecture, overrides)``: every branch of the four architectures that changes the maths."""

_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "intermediate_size": 16,
    "projection_intermediate_size": 16,
}


def tiny_config(architecture: str, **overrides: Any) -> PreTrainedConfig:
    """The transformers config of a tiny model; ``overrides`` are text-model fields of that config class."""
    fields = {**_DEFAULTS[architecture], **overrides}
    if fields.get("rope_parameters") is not None:
        fields["rope_parameters"] = dict(fields["rope_parameters"])  # transformers completes it in place
    if architecture == "glm5_next":
        tied = bool(fields["tie_word_embeddings"])
        return Glm5NextConfig(
            text_config=fields,
            vision_config={**_VISION, "out_hidden_size": fields["hidden_size"]},
            tie_word_embeddings=tied,
            image_token_id=140,
            video_token_id=141,
            image_start_token_id=136,
            image_end_token_id=137,
            video_start_token_id=138,
            video_end_token_id=139,
        )
    return _CLASSES[architecture][0](**fields)


def build_oracle(architecture: str, seed: int, **overrides: Any) -> PreTrainedModel:
    """A float32 model in eval mode, eager attention, every stored parameter and buffer re-drawn from ``seed``."""
    config = tiny_config(architecture, **overrides)
    config._attn_implementation = "eager"
    model = _CLASSES[architecture][1](config).to(torch.float32).eval()
    redraw(model, seed)
    return model


def redraw(model: PreTrainedModel, seed: int) -> None:
    """Give every tensor of the state dict a value that changes the output when it is ignored."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        seen: set[int] = set()
        for name, tensor in model.state_dict().items():
            if tensor.data_ptr() in seen:  # a tied head is drawn once
                continue
            seen.add(tensor.data_ptr())
            tensor.copy_(_draw(name, torch.randn(tensor.shape, generator=generator)))


def _draw(name: str, noise: torch.Tensor) -> torch.Tensor:
    leaf = name.rsplit(".", 1)[-1]
    if "norm" in name:
        return 0.3 * noise if leaf == "bias" else 1.0 + 0.2 * noise
    if leaf == "e_score_correction_bias":
        return 0.1 * noise
    if leaf == "scale":
        return 1.0 + 0.3 * noise
    if leaf in ("A_log", "dt_bias", "base", "index_kpool_compress_ape"):
        return 0.5 * noise
    if leaf == "bias":
        return 0.2 * noise
    if "embed_tokens" in name:
        return noise
    if "conv1d" in name:
        return 0.5 * noise
    if leaf == "fn":
        return noise * noise.shape[-1] ** -0.5
    return noise * 0.85 * noise.shape[-1] ** -0.5  # by fan-in; a gain of 1.2 made the oracle differ from itself by 8e-5


def save_checkpoint(model: PreTrainedModel, folder: str | Path, **kw: Any) -> Path:
    """``save_pretrained`` (hub names, safetensors); ``kw`` go to it, e.g. ``max_shard_size="50KB"``."""
    folder = Path(folder)
    model.save_pretrained(folder, **kw)
    return folder
