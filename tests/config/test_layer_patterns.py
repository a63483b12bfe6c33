"""Fault 10 of docs/faults.md: index-sharing patterns in every form, and the patterns that have no meaning."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GlmMoeDsaConfig

from sidestream.config.model import AttentionKind, IndexerKind, MlpKind, ModelConfig
from sidestream.errors import ConfigError
from tests.config.test_hf import tiny
from tests.tiny_models import next_layers


def letters(config: ModelConfig) -> str:
    names = {IndexerKind.FULL: "F", IndexerKind.SHARED: "S", IndexerKind.NONE: "-"}
    return "".join(names[layer.indexer] for layer in config.layers)


def dsa(num_layers: int, **changes: Any) -> dict[str, Any]:
    return tiny(
        "glm_moe_dsa",
        num_hidden_layers=num_layers,
        **{"layer_types": None, "mlp_layer_types": None, "indexer_types": None, **changes},
    )


@pytest.mark.parametrize("pattern", ["FFFSSSF", "FSSS", "F", "FF", "FSFSFS"])
def test_letters_and_lists(pattern: str) -> None:
    words = [{"F": "full", "S": "shared"}[letter] for letter in pattern]
    for form in ({"index_topk_pattern": pattern}, {"index_topk_pattern": words}, {"indexer_types": words}):
        values = dsa(len(pattern), **form)
        assert letters(ModelConfig.from_hf(values)) == pattern
        values.pop("model_type")
        assert GlmMoeDsaConfig(**values).indexer_types == words


@pytest.mark.parametrize("offset", [None, 0, 1, 2, 3, 5])
@pytest.mark.parametrize("frequency", [None, 0, 1, 2, 4])
def test_frequency_and_offset(frequency: int | None, offset: int | None) -> None:
    values = dsa(11, index_topk_freq=frequency, index_skip_topk_offset=offset)
    oracle = GlmMoeDsaConfig(**{k: v for k, v in values.items() if k != "model_type"}).indexer_types
    expected = "".join({"full": "F", "shared": "S"}[kind] for kind in oracle)
    if expected[0] == "S":
        with pytest.raises(ConfigError, match="layer 0 is the first sparse attention layer"):
            ModelConfig.from_hf(values)
    else:
        assert letters(ModelConfig.from_hf(values)) == expected


def test_types_win_over_pattern_and_pattern_over_frequency() -> None:
    both = dsa(2, indexer_types=["full", "full"], index_topk_pattern="FS", index_topk_freq=2)
    assert letters(ModelConfig.from_hf(both)) == "FF"
    assert letters(ModelConfig.from_hf(dsa(3, index_topk_pattern="FSF", index_topk_freq=3))) == "FSF"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk_pattern": "SFFF"}, "layer 0 is the first sparse attention layer"),
        ({"indexer_types": ["shared"] * 4}, "layer 0 is the first sparse attention layer"),
        ({"index_topk_pattern": "FFF"}, "index_topk_pattern has 3 entries, num_hidden_layers is 4"),
        ({"index_topk_pattern": ["full"] * 5}, "index_topk_pattern has 5 entries"),
        ({"index_topk_pattern": "FFXF"}, r"index_topk_pattern\[2\] is 'X'"),
        ({"index_topk_pattern": ["F", "S", "F", "F"]}, r"index_topk_pattern\[0\] is 'F', allowed are full, shared"),
        ({"indexer_types": ["full", "none", "full", "full"]}, r"indexer_types\[1\] is 'none'"),
        ({"indexer_types": "FFFF"}, "indexer_types is 'FFFF', it must be a list"),
        ({"indexer_types": ["full", 1, "full", "full"]}, "must be a list of strings"),
        ({"index_topk_freq": -1}, "index_topk_freq is -1"),
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types has 3 entries"),
        ({"mlp_layer_types": ["dense", "moe", "sparse", "sparse"]}, r"mlp_layer_types\[1\] is 'moe'"),
        ({"layer_types": ["deepseek_sparse_attention"] * 3}, "layer_types has 3 entries"),
        ({"layer_types": ["full_attention"] * 4}, r"layer_types\[0\] is 'full_attention'"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    ],
)
def test_meaningless_patterns_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(dsa(4, **changes))


def test_sharing_between_adjacent_sparse_layers_of_glm5_next() -> None:
    assert letters(ModelConfig.from_hf(tiny("glm5_next", **next_layers("KDSKDD")))) == "-FS-FF"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("KDKS", "layer 3 shares the indexer of a layer before the KDA layer 2"),
        ("KDSKS", "layer 4 shares the indexer of a layer before the KDA layer 3"),
        ("KSKD", "layer 1 is the first sparse attention layer"),
        ("SD", "layer 0 is the first sparse attention layer"),
    ],
)
def test_sharing_without_an_adjacent_leader_is_refused(layers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(tiny("glm5_next", **next_layers(layers)))


def test_the_indexer_type_of_a_kda_layer_means_nothing() -> None:
    values = tiny("glm5_next", **{**next_layers("KDKD"), "indexer_types": ["shared", "full", "shared", "full"]})
    assert letters(ModelConfig.from_hf(values)) == "-F-F"


def test_glm5_next_without_layer_types_has_one_sparse_layer_in_four() -> None:
    values = tiny("glm5_next", num_hidden_layers=9, layer_types=None, indexer_types=None, mlp_layer_types=None)
    config = ModelConfig.from_hf(values)
    assert config.layers_of(AttentionKind.SPARSE_MLA) == (3, 7)
    assert [layer.mlp for layer in config.layers[:4]] == [MlpKind.DENSE] * 3 + [MlpKind.SPARSE]


@pytest.mark.parametrize(
    ("kda", "full", "message"),
    [
        ([0, 1], [3], "each of the 4 layers once, counted from 1"),
        ([1, 2], [2, 3], "each of the 4 layers once"),
        ([1, 2, 3], [4, 5], "each of the 4 layers once"),
        ([1, 2, 3], None, "must be stated together"),
        ([1, 2, 3], [4], "contradict each other at layer 2"),
    ],
)
def test_wrong_layer_lists_are_refused(kda: list[int], full: list[int] | None, message: str) -> None:
    linear = {"kda_layers": kda, "full_attn_layers": full}
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(tiny("kimi_linear", linear_attn_config=linear))
