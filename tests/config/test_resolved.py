"""Cross-checks between the user's settings, the checkpoint and the machine."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from sidestream.config.engine import EngineConfig
from sidestream.config.model import ModelConfig
from sidestream.config.resolved import check, resolve
from sidestream.errors import ConfigError
from tests.tiny_models import tiny_config

GIB = 2**30
NEXT = ModelConfig.from_hf(tiny_config("glm5_next").to_dict())
DSA = ModelConfig.from_hf(tiny_config("glm_moe_dsa").to_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"load_format": "pickle"}, "load_format is 'pickle'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype is 'int4'"),
        ({"cudagraph_mode": "full"}, "cudagraph_mode is 'full'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer, got 0"),
        ({"max_num_seqs": 1.5}, "got 1.5"),
        ({"block_size": -4}, "got -4"),
        ({"block_size": True}, "got True"),
        ({"block_size": 6}, "block_size 6 is not a multiple of the model's index_kpool 4"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 32},
            "max_num_batched_tokens 32 is smaller than max_num_seqs 64",
        ),
        ({"max_model_len": 4096}, "max_model_len 4096 is larger than the model's max_position_embeddings 2048"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"memory_limit": "lots"}, "memory_limit is 'lots'"),
        ({"memory_limit": "120%"}, "share"),
        ({"memory_limit": 0}, "memory_limit is 0, which is 0 bytes"),
        ({"memory_limit": "20GiB"}, "memory_limit is '20GiB', which is 21474836480 bytes"),
        ({"memory_limit": True}, "True"),
        ({"memory_limit": "9" * 400 + "GB"}, "memory_limit"),
        ({"cudagraph_mode": None}, "cudagraph_mode"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(EngineConfig(**settings), NEXT, cuda_available=False, device_memory=16 * GIB)


def test_mxfp8_needs_rows_without_rope() -> None:
    resolve(EngineConfig(kv_cache_dtype="mxfp8"), NEXT, cuda_available=False, device_memory=GIB)
    with pytest.raises(ConfigError, match="qk_rope_head_dim 16"):
        resolve(EngineConfig(kv_cache_dtype="mxfp8"), DSA, cuda_available=False, device_memory=GIB)


def test_defaults_follow_machine_and_model() -> None:
    config = resolve(EngineConfig(), NEXT, cuda_available=False, device_memory=10 * GIB)
    assert (config.device, config.dtype, config.max_model_len, config.kpool) == ("cpu", "float32", 2048, 4)
    assert config.shrink_max_model_len
    assert config.memory_budget == 6 * GIB
    assert resolve(EngineConfig(), DSA, cuda_available=False, device_memory=GIB).uses_slots is False
    for named, chosen in (
        (None, "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
        ("float16", "bfloat16"),
    ):
        model = replace(NEXT, dtype=named)
        assert resolve(EngineConfig(), model, cuda_available=True, device_memory=GIB).dtype == chosen


def test_what_no_machine_takes_is_refused_without_one() -> None:
    for settings, message in (
        ({"block_size": 6}, "block_size 6 is not a multiple"),
        ({"memory_limit": "lots"}, "memory_limit is 'lots'"),
        ({"memory_limit": "9000TB", "device": "cpu"}, "memory_limit is '9000TB', which is"),
        ({"cudagraph_mode": "full", "device": "cpu"}, "cudagraph_mode is 'full', but device is 'cpu'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(EngineConfig(**settings), NEXT)
    for settings in ({"cudagraph_mode": "full"}, {"device": "cuda"}, {"memory_limit": "9000TB"}, {"device": "sim"}):
        check(EngineConfig(**settings), NEXT)
