"""What is known about hub config keys: spellings, values that must hold, defaults, and keys that change nothing.

Defaults and spellings are those of the transformers 5.17 configuration classes of the four model types.
"""

from __future__ import annotations

from sidestream.config.model import Architecture


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALIASES: dict[Architecture, dict[str, tuple[str, ...]]] = {
    Architecture.GLM5_NEXT: {"n_routed_experts": ("num_local_experts",), "dtype": ("torch_dtype",)},
    Architecture.GLM_MOE_DSA: {"n_routed_experts": ("num_local_experts", "num_experts"), "dtype": ("torch_dtype",)},
    Architecture.DEEPSEEK_V32: {"n_routed_experts": ("num_local_experts", "num_experts"), "dtype": ("torch_dtype",)},
    Architecture.KIMI_LINEAR: {
        "max_position_embeddings": ("model_max_length",),
        "norm_topk_prob": ("moe_renormalize",),
        "n_group": ("num_expert_group",),
        "n_routed_experts": ("num_experts", "num_local_experts"),
        "num_experts_per_tok": ("num_experts_per_token",),
        "n_shared_experts": ("num_shared_experts",),
        "dtype": ("torch_dtype",),
    },
}
"""Canonical key to its other spellings."""

_ROUTER = {
    "scoring_func": ("sigmoid", "expert scores are sigmoids"),
    "topk_method": ("noaux_tc", "experts are chosen by score plus correction bias within the best groups"),
    "moe_router_dtype": ("float32", "the router runs in float32"),
    "moe_layer_freq": (1, "every layer after the dense ones is a mixture of experts"),
}
_COMMON_REQUIRED: dict[str, tuple[object, str]] = {
    "hidden_act": ("silu", "no other activation is implemented"),
    "mlp_bias": (False, "MLP projections have no bias"),
    **_ROUTER,
}

REQUIRED_VALUES: dict[Architecture, dict[str, tuple[object, str]]] = {
    Architecture.GLM5_NEXT: {
        **_COMMON_REQUIRED,
        "mhc": (True, "residual streams are mixed by hyper-connections"),
        "mla_use_nope": (True, "attention of this architecture has no rotation"),
        "index_kpool_compress": (True, "the indexer scores compressed pools"),
        "index_kpool_always_select_tail": (True, "without the tail the selection is not causal"),
    },
    Architecture.GLM_MOE_DSA: {
        **_COMMON_REQUIRED,
        "indexer_rope_interleave": (True, "the indexer of glm_moe_dsa rotates interleaved pairs"),
        "rope_interleave": (True, "MLA rotates interleaved pairs"),
    },
    Architecture.DEEPSEEK_V32: {
        **_COMMON_REQUIRED,
        "indexer_rope_interleave": (False, "the indexer of deepseek_v32 rotates half-split pairs"),
        "rope_interleave": (True, "MLA rotates interleaved pairs"),
    },
    Architecture.KIMI_LINEAR: {
        **_COMMON_REQUIRED,
        "mla_use_nope": (True, "attention of this architecture has no rotation"),
        "moe_router_activation_func": ("sigmoid", "expert scores are sigmoids"),
    },
}
"""Key to the only supported value and the reason; an absent key is fine."""

DEFAULTS: dict[Architecture, dict[str, int | float]] = {
    Architecture.GLM5_NEXT: {"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "max_position_embeddings": 1048576},
    Architecture.GLM_MOE_DSA: {"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "max_position_embeddings": 202752},
    Architecture.DEEPSEEK_V32: {
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840,
        "n_group": 8,
        "topk_group": 4,
    },
    Architecture.KIMI_LINEAR: {
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446,
        "max_position_embeddings": 1048576,
    },
}
"""Defaults that differ between architectures. Sizes have none: a checkpoint that leaves one out is refused."""

TOKEN_DEFAULTS: dict[Architecture, dict[str, int | None]] = {
    Architecture.GLM5_NEXT: {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 154820},
    Architecture.GLM_MOE_DSA: {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None},
    Architecture.DEEPSEEK_V32: {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None},
    Architecture.KIMI_LINEAR: {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839},
}

_BOOKKEEPING = _keys("""
    architectures model_type transformers_version auto_map name_or_path _name_or_path _commit_hash
    id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix
    output_hidden_states output_attentions output_router_logits return_dict chunk_size_feed_forward torchscript
    attn_implementation _attn_implementation _attn_implementation_autoset experts_implementation
    is_encoder_decoder is_decoder add_cross_attention tie_encoder_decoder cross_attention_hidden_size
    decoder_start_token_id sep_token_id use_cache use_bfloat16 tf_legacy_loss pruned_heads
    do_sample temperature top_k top_p typical_p min_length max_length num_beams num_beam_groups num_return_sequences
    early_stopping length_penalty repetition_penalty diversity_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size encoder_repetition_penalty bad_words_ids suppress_tokens begin_suppress_tokens
    forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty epsilon_cutoff eta_cutoff output_scores
    return_dict_in_generate remove_invalid_values num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold assistant_lookbehind target_lookbehind
""")

_TRAINING = _keys("""
    initializer_range attention_dropout aux_loss_alpha router_aux_loss_coef seq_aux ep_size pretraining_tp
""")

_DERIVED = _keys("head_dim qk_head_dim")
"""Restated sums: transformers sets them from ``qk_nope_head_dim`` and ``qk_rope_head_dim`` whatever they say."""

_SPECULATION = _keys("num_nextn_predict_layers index_share_for_mtp_iteration")
"""Multi-token-prediction layers: their weights are skipped by name, see ``weights.names``."""

_MULTIMODAL = _keys("""
    vision_config image_token_id video_token_id image_start_token_id image_end_token_id video_start_token_id
    video_end_token_id
""")
"""The text path takes no images, so what only an image reaches changes nothing."""

_ROTATION_OF_OTHERS = _keys("rope_theta rope_parameters indexer_rope_interleave")
"""Stated by habit in configs of models that rotate nothing."""

MOE_KEYS = _keys(
    """moe_intermediate_size n_routed_experts num_local_experts num_experts n_shared_experts num_shared_experts n_group
    num_expert_group topk_group num_experts_per_tok num_experts_per_token norm_topk_prob moe_renormalize
    routed_scaling_factor use_grouped_topk"""
)
"""Irrelevant in a model whose MLPs are all dense."""
INDEXER_KEYS = _keys(
    """index_topk index_head_dim index_n_heads index_kpool indexer_types index_topk_pattern index_topk_freq
    index_skip_topk_offset"""
)
"""Irrelevant in a model without sparse attention layers."""
KDA_KEYS = _keys("linear_head_dim linear_num_heads linear_conv_kernel_dim linear_lower_bound linear_attn_config")
"""Irrelevant in a model without KDA layers."""

_EVERYWHERE = _BOOKKEEPING.union(_TRAINING, _DERIVED, _SPECULATION)

IRRELEVANT: dict[Architecture, frozenset[str]] = {
    Architecture.GLM5_NEXT: _EVERYWHERE.union(_MULTIMODAL, _ROTATION_OF_OTHERS),
    Architecture.GLM_MOE_DSA: _EVERYWHERE,
    Architecture.DEEPSEEK_V32: _EVERYWHERE,
    Architecture.KIMI_LINEAR: _EVERYWHERE.union(_ROTATION_OF_OTHERS),
}
"""Keys that may be there and change nothing that this engine computes."""
