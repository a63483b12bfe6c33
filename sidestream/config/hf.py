"""``ModelConfig`` from a hub ``config.json`` of one of the four supported model types.

Field names and defaults follow the transformers 5.17 configuration classes; where these fill a field from another one,
so does this module.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from sidestream.config.fields import Fields
from sidestream.config.hub_keys import (
    ALIASES,
    DEFAULTS,
    INDEXER_KEYS,
    IRRELEVANT,
    KDA_KEYS,
    MOE_KEYS,
    REQUIRED_VALUES,
    TOKEN_DEFAULTS,
)
from sidestream.config.layer_patterns import read_layers
from sidestream.config.model import (
    Architecture,
    AttentionKind,
    Fp8BlockConfig,
    HyperConnectionConfig,
    IndexerConfig,
    KdaConfig,
    MlaConfig,
    MlpKind,
    ModelConfig,
    MoeConfig,
)
from sidestream.config.rope import read_rope
from sidestream.errors import ConfigError

_MODEL_TYPES = {
    "glm5_next": Architecture.GLM5_NEXT,
    "glm5_next_text": Architecture.GLM5_NEXT,
    "glm_moe_dsa": Architecture.GLM_MOE_DSA,
    "deepseek_v32": Architecture.DEEPSEEK_V32,
    "kimi_linear": Architecture.KIMI_LINEAR,
}
_DTYPES = ("float32", "bfloat16", "float16")
_MODULE_NORM_EPS = 1e-6
"""Default of the norm classes; the latent norms of all but glm5_next are built without the config's epsilon."""
MAX_SINKHORN_ITERS = 1000
_KNOB = "pass allow_unknown=True to ModelConfig.from_hf"


def read_model_config(
    source: str | os.PathLike[str] | Mapping[str, object], *, allow_unknown: bool = False
) -> ModelConfig:
    """See ``ModelConfig.from_hf``."""
    values, where, generation_eos = _read_source(source)
    model_type = values.get("model_type")
    architecture = _MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        raise ConfigError(f"{where}: model_type {model_type!r} is not supported, only {', '.join(_MODEL_TYPES)}")
    outer = Fields(values, where, ALIASES[architecture])
    fields = _text_fields(outer, architecture)
    for key, (only, why) in REQUIRED_VALUES[architecture].items():
        fields.require(key, only, why)

    layers = read_layers(architecture, fields)
    max_position_embeddings = _number(fields, architecture, "max_position_embeddings")
    rms_norm_eps = fields.real("rms_norm_eps", float(DEFAULTS[architecture]["rms_norm_eps"]))
    mla = _read_mla(fields, architecture, rms_norm_eps, max_position_embeddings)
    attention = {layer.attention for layer in layers}
    sparse_mla, kda = AttentionKind.SPARSE_MLA in attention, AttentionKind.KDA in attention
    sparse_mlp = any(layer.mlp is MlpKind.SPARSE for layer in layers)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        layers=layers,
        rms_norm_eps=rms_norm_eps,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=_tied(outer, fields),
        swiglu_limit=fields.real("swiglu_limit", 10.0) if architecture is Architecture.GLM5_NEXT else None,
        mla=mla,
        indexer=_read_indexer(fields, architecture, mla) if sparse_mla else None,
        kda=_read_kda(fields, architecture, rms_norm_eps) if kda else None,
        moe=_read_moe(fields, architecture) if sparse_mlp else None,
        hyper_connection=_read_hyper_connection(fields) if architecture is Architecture.GLM5_NEXT else None,
        quantization=_read_quantization(outer, fields),
        dtype=_dtype(outer, fields),
        bos_token_id=_token(outer, fields, "bos_token_id", architecture),
        eos_token_ids=_eos(outer, fields, architecture, generation_eos),
        pad_token_id=_token(outer, fields, "pad_token_id", architecture),
    )
    if not allow_unknown:
        unused = [*(() if sparse_mla else INDEXER_KEYS), *(() if kda else KDA_KEYS), *(() if sparse_mlp else MOE_KEYS)]
        for level in (outer, fields):
            level.refuse_unread(IRRELEVANT[architecture].union(unused), knob=_KNOB)
    return config


def _read_source(source: str | os.PathLike[str] | Mapping[str, object]) -> tuple[Mapping[str, object], str, object]:
    """Contents, their name for errors, and the end-of-sequence ids of a ``generation_config.json`` beside them."""
    if isinstance(source, Mapping):
        return source, "config", None
    path = Path(source)
    if not path.is_dir():
        return _read_json(path), str(path), None
    generation = path / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    return _read_json(path / "config.json"), str(path / "config.json"), eos


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # broken JSON, bytes that are not UTF-8, brackets without end
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a JSON object, got {type(values).__name__}")
    return values


def _text_fields(outer: Fields, architecture: Architecture) -> Fields:
    """The level that describes the text model: nested under ``text_config`` in multimodal configs."""
    text = outer.raw("text_config")
    if text is None:
        return outer
    if architecture is not Architecture.GLM5_NEXT or not isinstance(text, Mapping):
        raise outer.error(f"text_config is {text!r}, it must be a dictionary and belongs to glm5_next only")
    nested_type = text.get("model_type", "glm5_next_text")
    if nested_type not in ("glm5_next_text", "glm5_next"):
        raise outer.error(f"text_config.model_type {nested_type!r} is not supported, only glm5_next_text")
    return Fields(text, f"{outer.where}: text_config", ALIASES[architecture])


def _number(fields: Fields, architecture: Architecture, key: str) -> int:
    return fields.integer(key, int(DEFAULTS[architecture].get(key, 1)))


def _tied(outer: Fields, fields: Fields) -> bool:
    # transformers decides at the outer level; a nested value alone still says what the author meant.
    return outer.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", False))


def _read_mla(fields: Fields, architecture: Architecture, rms_norm_eps: float, max_positions: int) -> MlaConfig:
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_kv_heads != num_heads:
        raise fields.error(f"num_key_value_heads is {num_kv_heads}, MLA needs num_attention_heads = {num_heads}")
    rotates = architecture in (Architecture.GLM_MOE_DSA, Architecture.DEEPSEEK_V32)
    nope = fields.integer("qk_nope_head_dim")
    rope_dim = fields.integer("qk_rope_head_dim", minimum=1 if rotates else 0)
    if architecture is Architecture.GLM5_NEXT and rope_dim:
        raise fields.error(f"qk_rope_head_dim is {rope_dim}, glm5_next has no rotation: only 0 is supported")
    rope, softmax_factor = None, 1.0
    if rotates:
        if rope_dim % 2:
            raise fields.error(f"qk_rope_head_dim is {rope_dim}, rotation needs an even number")
        rope, softmax_factor = read_rope(fields, max_position_embeddings=max_positions)
    else:
        fields.require("rope_scaling", {}, f"{architecture} has no rotation to scale")
    q_lora_rank = fields.optional_integer("q_lora_rank", minimum=1)
    if q_lora_rank is None and architecture is not Architecture.KIMI_LINEAR:
        raise fields.error("q_lora_rank is missing or null: the indexer's queries are made from that latent")
    return MlaConfig(
        num_heads=num_heads,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        softmax_scale=(nope + rope_dim) ** -0.5 * softmax_factor,
        lora_norm_eps=rms_norm_eps if architecture is Architecture.GLM5_NEXT else _MODULE_NORM_EPS,
        attention_bias=fields.flag("attention_bias", False),
        rope=rope,
    )


def _read_indexer(fields: Fields, architecture: Architecture, mla: MlaConfig) -> IndexerConfig:
    topk, head_dim = fields.integer("index_topk"), fields.integer("index_head_dim")
    kpool = fields.integer("index_kpool", 16) if architecture is Architecture.GLM5_NEXT else 1
    if topk % kpool:
        raise fields.error(f"index_topk {topk} is not a multiple of index_kpool {kpool}: whole pools are selected")
    if head_dim < mla.qk_rope_head_dim:
        raise fields.error(f"index_head_dim {head_dim} is smaller than its rotated part, {mla.qk_rope_head_dim}")
    return IndexerConfig(
        num_heads=fields.integer("index_n_heads"),
        head_dim=head_dim,
        topk=topk,
        kpool=kpool,
        rope_interleaved=architecture is Architecture.GLM_MOE_DSA,
    )


def _read_kda(fields: Fields, architecture: Architecture, rms_norm_eps: float) -> KdaConfig:
    """``linear_attn_config`` overrides the flat fields, as in transformers."""
    glm = architecture is Architecture.GLM5_NEXT
    lower_bound: float | None = None
    if glm and not fields.stated("linear_lower_bound"):
        lower_bound = -5.0
    elif glm and fields.raw("linear_lower_bound") is not None:
        lower_bound = fields.real("linear_lower_bound", positive=False)
    num_heads = fields.integer("linear_num_heads", 64 if glm else 32)
    head_dim = fields.integer("linear_head_dim", 128)
    conv_size = fields.integer("linear_conv_kernel_dim", 4)
    linear = fields.nested("linear_attn_config")
    if linear is not None:
        num_heads = linear.integer("num_heads", num_heads)
        head_dim = linear.integer("head_dim", head_dim)
        conv_size = linear.integer("short_conv_kernel_size", conv_size)
        if glm:
            if linear.stated("gate_lower_bound"):
                null = linear.raw("gate_lower_bound") is None
                lower_bound = None if null else linear.real("gate_lower_bound", positive=False)
            if linear.flag("safe_gate", True) and lower_bound is None:
                lower_bound = -5.0
        linear.refuse_unread(["kda_layers", "full_attn_layers"], knob="remove them from linear_attn_config")
    if lower_bound is not None and lower_bound >= 0:
        raise fields.error(f"the lower bound of the KDA gate is {lower_bound}, it must be below 0: gates are decays")
    return KdaConfig(num_heads, head_dim, conv_size, lower_bound, rms_norm_eps)


def _read_moe(fields: Fields, architecture: Architecture) -> MoeConfig:
    experts, top_k = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")
    groups = _number(fields, architecture, "n_group")
    topk_groups = _number(fields, architecture, "topk_group")
    if groups > 1:
        fields.require("use_grouped_topk", True, f"n_group is {groups}")
    else:
        fields.flag("use_grouped_topk", True)
    if experts % groups or experts // groups < 2:
        raise fields.error(f"n_group {groups} must divide {experts} experts into groups of at least 2")
    if topk_groups > groups:
        raise fields.error(f"topk_group {topk_groups} is more than n_group {groups}")
    if top_k > topk_groups * experts // groups:
        raise fields.error(
            f"num_experts_per_tok {top_k} is more than the {topk_groups * experts // groups} experts of "
            f"topk_group {topk_groups} groups"
        )
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        num_groups=groups,
        topk_groups=topk_groups,
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        routed_scaling_factor=fields.real(
            "routed_scaling_factor", float(DEFAULTS[architecture]["routed_scaling_factor"])
        ),
        num_shared_experts=fields.integer("n_shared_experts", 1),
        intermediate_size=fields.integer("moe_intermediate_size"),
    )


def _read_hyper_connection(fields: Fields) -> HyperConnectionConfig:
    iters = fields.integer("hc_sinkhorn_iters", 20)
    if iters > MAX_SINKHORN_ITERS:
        raise fields.error(f"hc_sinkhorn_iters is {iters}, at most {MAX_SINKHORN_ITERS} are run")
    return HyperConnectionConfig(
        mult=fields.integer("hc_mult", 4),
        eps=fields.real("hc_eps", 1e-6),
        sinkhorn_iters=iters,
    )


def _read_quantization(outer: Fields, fields: Fields) -> Fp8BlockConfig | None:
    inner = fields.nested("quantization_config")
    settings = outer.nested("quantization_config") or inner
    if settings is None:
        return None
    why = "weights may be stored as fp8 in blocks with one scale each, and nothing else"
    settings.require("quant_method", "fp8", why)
    if settings.raw("quant_method") is None:
        raise settings.error("required key quant_method is missing")
    settings.require("fmt", "e4m3", why)
    settings.require("activation_scheme", "dynamic", why)
    blocks = settings.integers("weight_block_size")
    if blocks is None or len(blocks) != 2 or min(blocks) < 1:
        raise settings.error(f"weight_block_size is {blocks}, it must be two positive integers such as [128, 128]")
    settings.refuse_unread(
        ["modules_to_not_convert", "modules_to_convert", "scale_fmt", "dequantize"],
        knob="remove them from quantization_config",
    )
    return Fp8BlockConfig(*blocks)


def _dtype(outer: Fields, fields: Fields) -> str | None:
    inner, whole = fields.raw("dtype"), outer.raw("dtype")
    value = whole if inner is None else inner
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.error(f"dtype is {value!r}, allowed are {', '.join(_DTYPES)}")
    return name


def _token(outer: Fields, fields: Fields, key: str, architecture: Architecture) -> int | None:
    """The text level's own value, else the outer one, else the architecture's default."""
    outer_value, inner_value = outer.optional_integer(key), fields.optional_integer(key)
    if fields.stated(key):
        return inner_value
    return outer_value if outer.stated(key) else TOKEN_DEFAULTS[architecture][key]


def _eos(outer: Fields, fields: Fields, architecture: Architecture, generation_eos: object) -> tuple[int, ...]:
    """Ids of the config, then those that ``generation_config.json`` adds; each once, in order.

    Ids beyond the vocabulary are left out: a cut model keeps its family's default, and can never generate it.
    """
    ids: tuple[int, ...] = ()
    if fields.stated("eos_token_id") or outer.stated("eos_token_id"):
        ids = fields.integers("eos_token_id") or outer.integers("eos_token_id") or ()
    elif (default := TOKEN_DEFAULTS[architecture]["eos_token_id"]) is not None:
        ids = (default,)
    generation = Fields({"eos_token_id": generation_eos}, f"{outer.where} (generation_config.json)", {})
    for level in (outer, fields):
        level.raw("eos_token_id")
    ids = (*ids, *(generation.integers("eos_token_id") or ()))
    if ids and min(ids) < 0:
        raise fields.error(f"eos_token_id {min(ids)} is negative, token ids begin at 0")
    vocab_size = fields.integer("vocab_size")
    return tuple(dict.fromkeys(token for token in ids if token < vocab_size))
