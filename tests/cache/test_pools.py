from dataclasses import replace

import pytest
import torch

from sidestream.cache.groups import CacheKind, plan_cache_groups
from sidestream.cache.pools import POISON_BYTE, CachePools
from sidestream.config.model import (
    Architecture,
    AttentionKind,
    IndexerConfig,
    IndexerKind,
    KdaConfig,
    LayerConfig,
    MlaConfig,
    MlpKind,
    ModelConfig,
)
from sidestream.errors import ConfigError

KDA = LayerConfig(AttentionKind.KDA, IndexerKind.NONE, MlpKind.DENSE)
LEADER = LayerConfig(AttentionKind.SPARSE_MLA, IndexerKind.FULL, MlpKind.DENSE)
FOLLOWER = LayerConfig(AttentionKind.SPARSE_MLA, IndexerKind.SHARED, MlpKind.DENSE)
DENSE = LayerConfig(AttentionKind.DENSE_MLA, IndexerKind.NONE, MlpKind.DENSE)


def make_config(*layers: LayerConfig, kpool: int = 4) -> ModelConfig:
    sparse = any(layer.indexer is IndexerKind.FULL for layer in layers)
    return ModelConfig(
        architecture=Architecture.GLM5_NEXT,
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        layers=layers,
        rms_norm_eps=1e-6,
        max_position_embeddings=1_000,
        tie_word_embeddings=False,
        swiglu_limit=None,
        mla=MlaConfig(2, None, 24, 16, 0, 16, 0.25, 1e-6, False, None),
        indexer=IndexerConfig(16, 8, 8, kpool, True) if sparse else None,
        kda=KdaConfig(3, 10, 4, None, 1e-6) if KDA in layers else None,
        moe=None,
        hyper_connection=None,
        quantization=None,
        dtype=None,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
    )


def make_pools(config: ModelConfig, *, rollback: int = 0, dtype: torch.dtype = torch.float32) -> CachePools:
    groups = plan_cache_groups(
        config, block_size=8, row_elems=24, row_dtype=dtype, model_dtype=torch.bfloat16, rollback=rollback
    )
    return CachePools(groups, 5, 3, device="cpu")


def test_each_layer_keeps_what_its_kind_needs() -> None:
    pools = make_pools(make_config(KDA, KDA, LEADER, FOLLOWER, KDA, LEADER))
    shapes = {
        kind: {layer: tuple(t.shape) for layer, t in getattr(pools, kind).items()} for kind in map(str, CacheKind)
    }
    assert shapes == {
        "kv": dict.fromkeys((2, 3, 5), (5 * 8, 24)),
        "index_keys": dict.fromkeys((2, 5), (5, 2, 8)),
        "index_tail": dict.fromkeys((2, 5), (3 * 3, 16)),
        "conv": dict.fromkeys((0, 1, 4), (3 * 3, 90)),
        "recurrent": dict.fromkeys((0, 1, 4), (3, 1, 3, 10, 10)),
    }
    assert pools.recurrent[0].dtype is torch.float32
    assert pools.conv[0].dtype is pools.index_keys[2].dtype is pools.index_tail[2].dtype is torch.bfloat16
    assert pools.layer(2).kv is pools.kv[2]
    assert pools.layer(2).recurrent is None
    assert pools.layer(3).index_keys is None
    assert pools.layer(4).conv is pools.conv[4]


def test_rollback_lengthens_rings_and_adds_versions() -> None:
    pools = make_pools(make_config(KDA, LEADER), rollback=2)
    assert pools.conv[0].shape == (3 * 5, 90)
    assert pools.index_tail[1].shape == (3 * 5, 16)
    assert pools.recurrent[0].shape == (3, 3, 3, 10, 10)


def test_token_granularity_has_no_tail_and_one_key_a_token() -> None:
    pools = make_pools(make_config(LEADER, FOLLOWER, kpool=1))
    assert pools.index_keys[0].shape == (5, 8, 8)
    assert not pools.index_tail
    assert not pools.groups.slots


def test_linear_attention_never_makes_a_block_larger() -> None:
    with_kda = make_pools(make_config(KDA, DENSE)).groups
    without = make_pools(make_config(DENSE)).groups
    assert with_kda.bytes_per_block == without.bytes_per_block == 8 * 24 * 4
    assert with_kda.bytes_per_slot == 3 * 90 * 2 + 3 * 10 * 10 * 4
    assert without.bytes_per_slot == 0


@pytest.mark.parametrize("rollback", [0, 3])
def test_bytes_planned_are_bytes_taken(rollback: int) -> None:
    for layers in ((KDA, LEADER, FOLLOWER), (DENSE,), (KDA, KDA), (KDA, DENSE)):
        pools = make_pools(make_config(*layers), rollback=rollback)
        assert pools.bytes_total() == pools.groups.bytes_total(5, 3)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in pools.tensors()}
        assert pools.bytes_total() == sum(storages.values())


def test_only_scratch_is_initialised_and_poison_reaches_everything() -> None:
    pools = make_pools(make_config(KDA, LEADER, FOLLOWER))
    assert not pools.kv[1][:8].any()
    assert not pools.index_keys[1][0].any()
    assert not pools.index_tail[1][:3].any()
    assert not pools.conv[0][:3].any()
    assert not pools.recurrent[0][0].any()
    pools.poison()
    assert all(bool(torch.isnan(tensor).all()) for tensor in pools.tensors())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_byte_rows_are_poisoned_with_bytes(dtype: torch.dtype) -> None:
    pools = make_pools(make_config(DENSE), dtype=dtype)
    pools.poison()
    assert bool((pools.kv[0].view(torch.uint8) == POISON_BYTE).all())


def test_a_block_must_hold_whole_index_pools() -> None:
    config = make_config(LEADER, kpool=3)
    with pytest.raises(ConfigError, match="block_size 8 is not a multiple of index_kpool 3"):
        make_pools(config)
    assert make_pools(replace(config, indexer=replace(config.indexer, kpool=2)))  # type: ignore[type-var,arg-type]
