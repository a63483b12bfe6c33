"""Hub configs against the transformers configuration objects, and everything that is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV32Config, Glm5NextConfig, GlmMoeDsaConfig, KimiLinearConfig, PreTrainedConfig
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

from sidestream.config.model import Architecture, AttentionKind, Fp8BlockConfig, IndexerKind, MlpKind, ModelConfig
from sidestream.engine.bundled import known_configs
from sidestream.errors import ConfigError
from tests.tiny_models import ARCHITECTURES, VARIANTS, build_oracle, tiny_config

SLICES = Path(__file__).parents[2] / "benchmarks" / "configs"
CLASSES: dict[str, type[PreTrainedConfig]] = {
    "glm5_next": Glm5NextConfig,
    "glm5_next_text": Glm5NextTextConfig,
    "glm_moe_dsa": GlmMoeDsaConfig,
    "deepseek_v32": DeepseekV32Config,
    "kimi_linear": KimiLinearConfig,
}


def oracle_of(values: dict[str, Any]) -> PreTrainedConfig:
    return CLASSES[values["model_type"]](**{k: v for k, v in values.items() if k != "model_type"})


def tiny(architecture: str, **changes: Any) -> dict[str, Any]:
    """The JSON of a tiny model as save_pretrained writes it; a change to None removes the key."""
    values = json.loads(tiny_config(architecture).to_json_string())
    text = values.get("text_config", values)
    for key, value in changes.items():
        text[key] = value
        if value is None:
            del text[key]
    return values


def assert_equal(config: ModelConfig, oracle: PreTrainedConfig) -> None:
    """Every field that ModelConfig takes from the hub config, as transformers resolves it."""
    text = oracle.get_text_config()
    assert config.vocab_size == text.vocab_size
    assert config.hidden_size == text.hidden_size
    assert config.intermediate_size == text.intermediate_size
    assert config.num_layers == text.num_hidden_layers
    assert config.rms_norm_eps == text.rms_norm_eps
    assert config.max_position_embeddings == text.max_position_embeddings
    assert config.tie_word_embeddings == oracle.tie_word_embeddings
    assert config.swiglu_limit == getattr(text, "swiglu_limit", None)
    assert config.bos_token_id == text.bos_token_id
    assert config.pad_token_id == text.pad_token_id
    eos = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    assert config.eos_token_ids == tuple(t for t in eos if t is not None and t < text.vocab_size)

    mixers = {
        "linear_attention": AttentionKind.KDA,
        "deepseek_sparse_attention": AttentionKind.SPARSE_MLA,
        "full_attention": AttentionKind.DENSE_MLA,
    }
    assert [layer.attention for layer in config.layers] == [mixers[t] for t in text.layer_types]
    assert [layer.mlp for layer in config.layers] == [MlpKind(t) for t in text.mlp_layer_types]
    types = getattr(text, "indexer_types", ["full"] * config.num_layers)
    for layer, indexer in zip(config.layers, types, strict=True):
        sparse = layer.attention is AttentionKind.SPARSE_MLA
        assert layer.indexer == (IndexerKind(indexer) if sparse else IndexerKind.NONE)

    mla = config.mla
    assert (mla.num_heads, mla.q_lora_rank, mla.kv_lora_rank) == (
        text.num_attention_heads,
        text.q_lora_rank,
        text.kv_lora_rank,
    )
    assert (mla.qk_nope_head_dim, mla.qk_rope_head_dim) == (text.qk_nope_head_dim, text.qk_rope_head_dim)
    assert mla.qk_head_dim == text.qk_head_dim
    assert (mla.v_head_dim, mla.attention_bias) == (text.v_head_dim, text.attention_bias)
    if config.indexer is not None:
        indexer = config.indexer
        assert (indexer.num_heads, indexer.head_dim) == (text.index_n_heads, text.index_head_dim)
        assert (indexer.topk, indexer.kpool) == (text.index_topk, getattr(text, "index_kpool", 1))
    if config.kda is not None:
        kda = config.kda
        assert (kda.num_heads, kda.head_dim) == (text.linear_num_heads, text.linear_head_dim)
        assert (kda.conv_size, kda.norm_eps) == (text.linear_conv_kernel_dim, text.rms_norm_eps)
        assert kda.gate_lower_bound == getattr(text, "linear_lower_bound", None)
    if config.moe is not None:
        moe = config.moe
        assert (moe.num_experts, moe.top_k) == (text.num_local_experts, text.num_experts_per_tok)
        assert (moe.num_groups, moe.topk_groups) == (text.n_group, text.topk_group)
        assert (moe.norm_topk_prob, moe.routed_scaling_factor) == (text.norm_topk_prob, text.routed_scaling_factor)
        assert (moe.num_shared_experts, moe.intermediate_size) == (text.n_shared_experts, text.moe_intermediate_size)
    if config.hyper_connection is not None:
        hc = config.hyper_connection
        assert (hc.mult, hc.eps, hc.sinkhorn_iters) == (text.hc_mult, text.hc_eps, text.hc_sinkhorn_iters)


@pytest.mark.parametrize(
    "path", [*known_configs().values(), *sorted(SLICES.glob("*.json"))], ids=lambda path: path.stem
)
def test_real_configs_read_as_transformers_reads_them(path: Path) -> None:
    values = json.loads(path.read_text())
    config = ModelConfig.from_hf(path)
    assert_equal(config, oracle_of(values))
    assert ModelConfig.from_hf(values) == config
    assert config.quantization == (Fp8BlockConfig(128, 128) if "quantization_config" in values else None)
    assert config.dtype == values.get("dtype")


def test_configs_of_every_architecture_ship() -> None:
    found = {ModelConfig.from_hf(path).architecture for path in known_configs().values()}
    assert found == set(Architecture)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_configs_read_as_transformers_reads_them(variant: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[variant]
    oracle = tiny_config(architecture, **overrides)
    oracle.save_pretrained(tmp_path)
    config = ModelConfig.from_hf(tmp_path)
    assert_equal(config, oracle)
    assert ModelConfig.from_hf(str(tmp_path / "config.json")) == config
    assert ModelConfig.from_hf(oracle.to_dict()) == config


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    """Only what has no default is stated; the rest is left to both sides."""
    stated = {
        *("model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
        *("num_attention_heads", "num_key_value_heads", "num_experts_per_tok", "num_experts_per_token"),
        *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("index_topk", "index_n_heads", "index_head_dim"),
    }
    text = tiny(architecture)
    text = text.get("text_config", text)
    bare = {key: value for key, value in text.items() if key in stated}
    bare["num_hidden_layers"] = 9
    bare["index_topk"] = 64 if "index_topk" in bare else None
    experts = "num_experts" if architecture == "kimi_linear" else "n_routed_experts"
    bare[experts] = 32
    bare = {key: value for key, value in bare.items() if value is not None}
    config = ModelConfig.from_hf(bare)
    assert_equal(config, oracle_of(bare))
    assert {layer.mlp for layer in config.layers} == set(MlpKind)


@pytest.mark.parametrize("variant", VARIANTS)
def test_norm_epsilons_and_scales_are_those_of_the_modules(variant: str) -> None:
    architecture, overrides = VARIANTS[variant]
    model = build_oracle(architecture, 0, **overrides)
    config = ModelConfig.from_hf(model.config.to_dict())
    text = model.model.language_model if architecture == "glm5_next" else model.model
    seen = 0
    for layer in text.layers:
        attention = layer.self_attn
        if not hasattr(attention, "kv_a_layernorm"):
            assert config.kda is not None
            assert attention.o_norm.variance_epsilon == config.kda.norm_eps
            continue
        seen += 1
        assert attention.kv_a_layernorm.variance_epsilon == config.mla.lora_norm_eps
        if attention.q_a_layernorm is not None:
            assert attention.q_a_layernorm.variance_epsilon == config.mla.lora_norm_eps
        assert config.mla.softmax_scale == pytest.approx(attention.scaling, rel=1e-12)
        if getattr(attention, "indexer", None) is not None:
            assert config.indexer is not None
            assert attention.indexer.k_norm.eps == config.indexer.key_norm_eps
    assert seen
    rope = config.mla.rope
    assert (rope is None) == (not hasattr(text, "rotary_emb"))
    if rope is not None:
        assert rope.attention_factor == pytest.approx(text.rotary_emb.attention_scaling, rel=1e-12)


def test_indexer_rotation_is_that_of_the_oracle() -> None:
    """glm_moe_dsa rotates interleaved pairs in its indexer, deepseek_v32 halves; a config that says otherwise lies."""
    for architecture, interleaved in (("glm_moe_dsa", True), ("deepseek_v32", False)):
        for stated in (None, interleaved):
            config = ModelConfig.from_hf(tiny(architecture, indexer_rope_interleave=stated))
            assert config.indexer is not None
            assert config.indexer.rope_interleaved is interleaved
        with pytest.raises(ConfigError, match="indexer_rope_interleave"):
            ModelConfig.from_hf(tiny(architecture, indexer_rope_interleave=not interleaved))


def test_nested_and_bare_text_configs_are_the_same_model() -> None:
    nested = tiny("glm5_next")
    bare = dict(nested["text_config"])
    renamed = {**bare, "model_type": "glm5_next"}
    config = ModelConfig.from_hf(nested)
    assert replace(ModelConfig.from_hf(bare), dtype=config.dtype) == config
    assert replace(ModelConfig.from_hf(renamed), dtype=config.dtype) == config


def test_the_outer_level_decides_about_tied_embeddings() -> None:
    values = tiny("glm5_next")
    values["tie_word_embeddings"] = True
    assert not values["text_config"]["tie_word_embeddings"]
    assert ModelConfig.from_hf(values).tie_word_embeddings


def test_kimi_hub_spelling_counts_layers_from_one() -> None:
    values = tiny("kimi_linear", layer_types=None, mlp_layer_types=None, linear_head_dim=None, linear_num_heads=None)
    values |= {"first_k_dense_replace": 2, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"}
    values |= {"use_grouped_topk": True, "mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None}
    values["linear_attn_config"] = {
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4],
        "head_dim": 24,
        "num_heads": 2,
        "short_conv_kernel_size": 3,
    }
    config = ModelConfig.from_hf(values)
    assert_equal(config, oracle_of(values))
    assert config.layers_of(AttentionKind.DENSE_MLA) == (2,)
    assert config.kda is not None
    assert (config.kda.head_dim, config.kda.num_heads, config.kda.conv_size) == (24, 2, 3)


def test_glm_hub_spelling_counts_layers_from_zero() -> None:
    values = tiny("glm5_next", layer_types=None)
    linear = {"kda_layers": [0, 1, 3, 4], "full_attn_layers": [2, 5], "head_dim": 16, "num_heads": 6}
    values["text_config"]["linear_attn_config"] = {**linear, "gate_lower_bound": -4.0}
    config = ModelConfig.from_hf(values)
    assert config.layers_of(AttentionKind.SPARSE_MLA) == (2, 5)
    assert config.kda is not None
    assert config.kda.gate_lower_bound == -4.0


def test_safe_gate_of_the_hub_dictionary() -> None:
    for safe, expected in ((True, -5.0), (False, None)):
        values = tiny("glm5_next")
        values["text_config"]["linear_attn_config"] = {"gate_lower_bound": None, "safe_gate": safe}
        config = ModelConfig.from_hf(values)
        assert_equal(config, oracle_of(values))
        assert config.kda is not None
        assert config.kda.gate_lower_bound == expected


def test_generation_config_adds_end_of_sequence_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny("glm_moe_dsa", eos_token_id=[2, 5])))
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == (2, 5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9], "temperature": 0.7}))
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == (2, 5, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == (2, 5, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        ModelConfig.from_hf(tmp_path)


def test_a_null_end_of_sequence_is_not_the_default() -> None:
    values = tiny("deepseek_v32")
    values["eos_token_id"] = None
    assert ModelConfig.from_hf(values).eos_token_ids == ()


def test_unknown_keys_raise_unless_allowed() -> None:
    values = tiny("glm_moe_dsa", attention_temperature=0.5)
    with pytest.raises(ConfigError, match=r"attention_temperature.*allow_unknown=True"):
        ModelConfig.from_hf(values)
    assert ModelConfig.from_hf(values, allow_unknown=True) == ModelConfig.from_hf(tiny("glm_moe_dsa"))
    values["attention_temperature"] = None
    ModelConfig.from_hf(values)
    nested = tiny("glm5_next")
    nested["outer_extra"] = 1
    with pytest.raises(ConfigError, match="outer_extra"):
        ModelConfig.from_hf(nested)


def test_a_model_without_experts_needs_none_of_their_keys() -> None:
    values = tiny("glm_moe_dsa", mlp_layer_types=["dense"] * 4, n_routed_experts=None, moe_intermediate_size=None)
    assert ModelConfig.from_hf(values).moe is None


_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("glm5_next", {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
    ("glm5_next", {"index_kpool_compress": False}, "index_kpool_compress"),
    ("glm5_next", {"mhc": False}, "mhc"),
    ("glm5_next", {"mla_use_nope": False}, "mla_use_nope"),
    ("glm5_next", {"index_topk": 10}, "index_topk 10 is not a multiple of index_kpool 4"),
    ("glm5_next", {"qk_rope_head_dim": 16}, "qk_rope_head_dim is 16"),
    ("glm5_next", {"hc_mult": 0}, "hc_mult is 0"),
    ("glm5_next", {"linear_lower_bound": 5.0}, "lower bound of the KDA gate is 5.0"),
    ("glm5_next", {"swiglu_limit": -1.0}, "swiglu_limit is -1.0"),
    ("glm5_next", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling"),
    ("glm_moe_dsa", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("glm_moe_dsa", {"mlp_bias": True}, "mlp_bias"),
    ("glm_moe_dsa", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    ("glm_moe_dsa", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
    ("glm_moe_dsa", {"moe_router_dtype": "bfloat16"}, "moe_router_dtype"),
    ("glm_moe_dsa", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
    ("glm_moe_dsa", {"q_lora_rank": None}, "q_lora_rank is missing"),
    ("glm_moe_dsa", {"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15"),
    ("glm_moe_dsa", {"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0"),
    ("glm_moe_dsa", {"index_head_dim": 8}, "index_head_dim 8"),
    ("glm_moe_dsa", {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ("glm_moe_dsa", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ("glm_moe_dsa", {"dtype": "int8"}, "dtype is 'int8'"),
    ("glm_moe_dsa", {"attention_bias": 1}, "attention_bias is 1"),
    ("glm_moe_dsa", {"num_experts": 16}, "contradict each other"),
    ("glm_moe_dsa", {"text_config": {}}, "text_config"),
    ("deepseek_v32", {"n_group": 3}, "n_group 3 must divide 8 experts"),
    ("deepseek_v32", {"n_group": 8}, "groups of at least 2"),
    ("deepseek_v32", {"topk_group": 5}, "topk_group 5 is more than n_group 4"),
    ("deepseek_v32", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than the 4 experts"),
    ("deepseek_v32", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek_v32", {"indexer_types": ["full", "shared", "full", "full"]}, "layer 1 shares"),
    ("deepseek_v32", {"n_shared_experts": 0}, "n_shared_experts is 0"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
    ("kimi_linear", {"linear_attn_config": {"num_heads": 2, "gate_lower_bound": -5.0}}, "gate_lower_bound"),
    ("kimi_linear", {"num_expert_group": 2, "use_grouped_topk": False}, "use_grouped_topk"),
]


@pytest.mark.parametrize(("architecture", "changes", "message"), _REFUSED)
def test_what_is_not_supported_is_refused_by_name(architecture: str, changes: dict[str, Any], message: str) -> None:
    ModelConfig.from_hf(tiny(architecture))
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(tiny(architecture, **changes))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_missing_and_non_positive_sizes_are_named(architecture: str) -> None:
    sizes = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "moe_intermediate_size"),
    )
    for key in sizes:
        with pytest.raises(ConfigError, match=f"required key {key} is missing"):
            ModelConfig.from_hf(tiny(architecture, **{key: None}))
        for wrong in (0, -4, 2.5, "8", True):
            with pytest.raises(ConfigError, match=f"{key} is {wrong!r}"):
                ModelConfig.from_hf(tiny(architecture, **{key: wrong}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method = 'gptq'"),
        ({"quant_method": None}, "quant_method is missing"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"weight_block_size": [128]}, "weight_block_size"),
        ({"weight_block_size": [0, 128]}, "weight_block_size"),
        ({"bits": 4}, "bits"),
    ],
)
def test_other_quantisation_is_refused(changes: dict[str, Any], message: str) -> None:
    good = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [64, 32]}
    assert ModelConfig.from_hf(tiny("deepseek_v32", quantization_config=good)).quantization == Fp8BlockConfig(64, 32)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(tiny("deepseek_v32", quantization_config={**good, **changes}))


def test_unreadable_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ConfigError, match=r"config\.json: is not JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        ModelConfig.from_hf(tmp_path)
    with pytest.raises(ConfigError, match="model_type 'llama' is not supported"):
        ModelConfig.from_hf({"model_type": "llama"})
    with pytest.raises(ConfigError, match="model_type None"):
        ModelConfig.from_hf({})


def test_keys_stated_on_both_levels_are_read_on_both() -> None:
    """Multimodal configs repeat dtype and token ids outside ``text_config``; neither copy is unknown."""
    config = json.loads(known_configs()["glm-5.3-flash"].read_text())
    for level in (config, config["text_config"]):
        level |= {"dtype": "bfloat16", "bos_token_id": 3, "pad_token_id": 4, "eos_token_id": [5, 6]}
    read = ModelConfig.from_hf(config)
    assert (read.dtype, read.bos_token_id, read.pad_token_id, read.eos_token_ids) == ("bfloat16", 3, 4, (5, 6))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", 10**12, "vocab_size"),
        ("hidden_size", 10**30, "hidden_size"),
        ("index_topk", 10**12, "index_topk"),
        ("rms_norm_eps", 10**400, "rms_norm_eps"),
        ("hc_sinkhorn_iters", 10**9, "hc_sinkhorn_iters is 1000000000, at most 1000"),
        ("eos_token_id", -1, "eos_token_id -1 is negative"),
    ],
)
def test_values_beyond_any_real_model_are_refused(key: str, value: int, message: str) -> None:
    config = json.loads(known_configs()["glm-5.3-flash"].read_text())
    config["text_config"][key] = value
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(config)


def test_end_of_sequence_ids_beyond_the_vocabulary_are_left_out() -> None:
    config = json.loads(known_configs()["kimi-linear-48b"].read_text()) | {"vocab_size": 300}
    assert ModelConfig.from_hf(config).eos_token_ids == ()
    assert ModelConfig.from_hf(config | {"eos_token_id": [4, 300, 5]}).eos_token_ids == (4, 5)
