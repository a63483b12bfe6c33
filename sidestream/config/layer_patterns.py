"""What each layer is: token mixer, indexer and MLP kinds from every form in which hub configs state them.

Defaults are those of the transformers 5.17 configuration classes. Indices in ``linear_attn_config`` count from 0 for
glm5_next and from 1 for kimi_linear.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidestream.config.fields import Fields
from sidestream.config.model import Architecture, AttentionKind, IndexerKind, LayerConfig, MlpKind

_KDA, _SPARSE, _DENSE = AttentionKind.KDA, AttentionKind.SPARSE_MLA, AttentionKind.DENSE_MLA

_LAYER_TYPES: dict[Architecture, dict[str, AttentionKind]] = {
    Architecture.GLM5_NEXT: {
        "linear_attention": _KDA,
        "deepseek_sparse_attention": _SPARSE,
        "full_attention": _SPARSE,
    },
    Architecture.GLM_MOE_DSA: {"deepseek_sparse_attention": _SPARSE},
    Architecture.DEEPSEEK_V32: {"deepseek_sparse_attention": _SPARSE},
    Architecture.KIMI_LINEAR: {"linear_attention": _KDA, "full_attention": _DENSE},
}
_INDEXER_TYPES = {"full": IndexerKind.FULL, "shared": IndexerKind.SHARED}
_INDEXER_LETTERS = {"F": IndexerKind.FULL, "S": IndexerKind.SHARED}
_MLP_TYPES = {"dense": MlpKind.DENSE, "sparse": MlpKind.SPARSE}


def read_layers(architecture: Architecture, fields: Fields) -> tuple[LayerConfig, ...]:
    """One entry a layer.

    Raises:
        ConfigError: for patterns of a wrong length or with unknown words, and for a follower without a leader.
    """
    num_layers = fields.integer("num_hidden_layers")
    attention = _attention_kinds(architecture, fields, num_layers)
    indexers = _indexer_kinds(architecture, fields, attention)
    mlps = _mlp_kinds(architecture, fields, num_layers)
    return tuple(LayerConfig(*kinds) for kinds in zip(attention, indexers, mlps, strict=True))


def _attention_kinds(architecture: Architecture, fields: Fields, num_layers: int) -> list[AttentionKind]:
    words = fields.words("layer_types")
    listed = _listed_kinds(architecture, fields, num_layers)
    if words is not None:
        allowed = _LAYER_TYPES[architecture]
        _check_pattern(fields, "layer_types", words, num_layers, allowed=sorted(allowed))
        stated = [allowed[word] for word in words]
        if listed is not None and listed != stated:
            wrong = next(i for i in range(num_layers) if listed[i] != stated[i])
            raise fields.error(f"layer_types and linear_attn_config contradict each other at layer {wrong}")
        return stated
    if listed is not None:
        return listed
    if architecture is Architecture.GLM5_NEXT:
        return [_SPARSE if i % 4 == 3 else _KDA for i in range(num_layers)]
    if architecture is Architecture.KIMI_LINEAR:
        return [_DENSE if i and i % 4 == 0 else _KDA for i in range(num_layers)]
    return [_SPARSE] * num_layers


def _listed_kinds(architecture: Architecture, fields: Fields, num_layers: int) -> list[AttentionKind] | None:
    """Kinds from the layer lists of ``linear_attn_config``, None if it has none."""
    if architecture not in (Architecture.GLM5_NEXT, Architecture.KIMI_LINEAR):
        return None
    linear = fields.nested("linear_attn_config")
    if linear is None:
        return None
    base = 1 if architecture is Architecture.KIMI_LINEAR else 0
    full = _DENSE if architecture is Architecture.KIMI_LINEAR else _SPARSE
    kda_layers, full_layers = linear.integers("kda_layers"), linear.integers("full_attn_layers")
    if kda_layers is None and full_layers is None:
        return None
    if kda_layers is None or full_layers is None:
        raise linear.error("kda_layers and full_attn_layers must be stated together")
    if sorted((*kda_layers, *full_layers)) != list(range(base, base + num_layers)):
        raise linear.error(
            f"kda_layers and full_attn_layers must name each of the {num_layers} layers once, counted from {base}; "
            f"got {sorted(kda_layers)} and {sorted(full_layers)}"
        )
    return [_KDA if i + base in kda_layers else full for i in range(num_layers)]


def _indexer_kinds(architecture: Architecture, fields: Fields, attention: Sequence[AttentionKind]) -> list[IndexerKind]:
    if _SPARSE not in attention:
        return [IndexerKind.NONE] * len(attention)
    stated = _stated_indexers(fields, len(attention))
    kinds = [s if a is _SPARSE else IndexerKind.NONE for s, a in zip(stated, attention, strict=True)]
    if architecture is Architecture.DEEPSEEK_V32 and IndexerKind.SHARED in kinds:
        raise fields.error(
            f"layer {kinds.index(IndexerKind.SHARED)} shares its indexer, which deepseek_v32 does not do "
            "(glm_moe_dsa does)"
        )
    for i, kind in enumerate(kinds):
        if kind is not IndexerKind.SHARED:
            continue
        if not any(k is IndexerKind.FULL for k in kinds[:i]):
            raise fields.error(
                f"layer {i} is the first sparse attention layer and its indexer is 'shared': no layer before it "
                "selects anything, it must be 'full'"
            )
        if attention[i - 1] is not _SPARSE:
            raise fields.error(
                f"layer {i} shares the indexer of a layer before the KDA layer {i - 1}: sharing across a KDA layer "
                "is not supported"
            )
    return kinds


def _stated_indexers(fields: Fields, num_layers: int) -> list[IndexerKind]:
    """``indexer_types``, else ``index_topk_pattern`` (letters or a list), else a schedule of frequency and offset."""
    types = fields.words("indexer_types")
    pattern = fields.raw("index_topk_pattern")
    frequency = max(fields.integer("index_topk_freq", 1, minimum=0), 1)
    offset = fields.integer("index_skip_topk_offset", 2, minimum=0)
    if types is not None:
        _check_pattern(fields, "indexer_types", types, num_layers, allowed=sorted(_INDEXER_TYPES))
        return [_INDEXER_TYPES[word] for word in types]
    if isinstance(pattern, str):
        _check_pattern(fields, "index_topk_pattern", pattern, num_layers, allowed=sorted(_INDEXER_LETTERS))
        return [_INDEXER_LETTERS[letter] for letter in pattern]
    if pattern is not None:
        words = fields.words("index_topk_pattern") or ()
        _check_pattern(fields, "index_topk_pattern", words, num_layers, allowed=sorted(_INDEXER_TYPES))
        return [_INDEXER_TYPES[word] for word in words]
    return [
        IndexerKind.FULL if max(i - offset + 1, 0) % frequency == 0 else IndexerKind.SHARED for i in range(num_layers)
    ]


def _mlp_kinds(architecture: Architecture, fields: Fields, num_layers: int) -> list[MlpKind]:
    words = fields.words("mlp_layer_types")
    dense = fields.integer("first_k_dense_replace", 1 if architecture is Architecture.KIMI_LINEAR else 3, minimum=0)
    if words is None:
        return [MlpKind.DENSE if i < dense else MlpKind.SPARSE for i in range(num_layers)]
    _check_pattern(fields, "mlp_layer_types", words, num_layers, allowed=sorted(_MLP_TYPES))
    return [_MLP_TYPES[word] for word in words]


def _check_pattern(fields: Fields, key: str, words: Sequence[str], num_layers: int, *, allowed: Sequence[str]) -> None:
    if len(words) != num_layers:
        raise fields.error(f"{key} has {len(words)} entries, num_hidden_layers is {num_layers}")
    for i, word in enumerate(words):
        if word not in allowed:
            raise fields.error(f"{key}[{i}] is {word!r}, allowed are {', '.join(allowed)}")
