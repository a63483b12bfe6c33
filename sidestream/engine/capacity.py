"""How many tokens and requests fit a machine, with and without a host pool, from a model's config alone.

KV rows are the only memory that a host pool takes from the device. Index keys grow with the context there, the state of
linear attention and hot slots with the sequences.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from sidestream.cache.groups import plan_cache_groups
from sidestream.config.engine import EngineConfig
from sidestream.config.model import AttentionKind, IndexerKind, ModelConfig
from sidestream.config.resolved import DTYPES, resolve
from sidestream.engine.hosting import STAGED_SEQUENCES
from sidestream.engine.load import weight_bytes
from sidestream.errors import ConfigError
from sidestream.ops.kv_rows import kv_row_layout

GIB = 1 << 30
BUS_BYTES_PER_S = 53e9
"""Pinned copies from the host to an H200, measured."""
OVERLAPS = (0.8, 0.9, 0.95, 0.99)
"""Shares of a selection that the step before selected too."""
WORKING_BYTES = 6 * GIB
"""Set aside for the CUDA context, activations and graphs; an engine measures its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySettings:
    """What fits is asked of one device.

    Args:
        device_memory: bytes.
        host_memory: bytes of the host pool; 0 is none.
        context: tokens of every request.
        devices: weights are split evenly over so many; caches are not, each device holds all of them.
        dtype, kv_cache_dtype, block_size, hot_factor: as in ``EngineConfig``.
    """

    device_memory: int = 141 * 10**9
    host_memory: int = 256 * GIB
    context: int = 32768
    devices: int = 1
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    block_size: int = 64
    hot_factor: int = 2


@dataclass(frozen=True, slots=True)
class Fit:
    """Requests of the asked context, and tokens in all, that fit at once; what ends first."""

    requests: int
    tokens: int
    limit: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes a token, a sequence, and what fits.

    Attributes:
        weights: bytes a device.
        least_devices: over which the weights must be split to leave any memory; 0 if no number is enough.
        kv_per_token, index_keys_per_token: on the device, over all layers.
        state_per_sequence, hot_per_sequence: of linear attention and unfinished index pools; of hot slots.
        resident, hosted: None for ``hosted`` without a host pool, and where a layer reads its whole context.
        bus_ms: overlap -> milliseconds that one request's missing rows take on the bus in a decode step.
    """

    weights: int
    least_devices: int
    kv_per_token: float
    index_keys_per_token: float
    state_per_sequence: int
    hot_per_sequence: int
    resident: Fit
    hosted: Fit | None
    bus_ms: dict[float, float]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def capacity(model: ModelConfig, settings: CapacitySettings) -> Capacity:
    """Count.

    Raises:
        ConfigError: a context longer than the model's, a format that does not suit it.
    """
    if not 0 < settings.context <= model.max_position_embeddings:
        raise ConfigError(
            f"context {settings.context} is not between 1 and the model's max_position_embeddings "
            f"{model.max_position_embeddings}"
        )
    if settings.dtype not in DTYPES:
        raise ConfigError(f"dtype is {settings.dtype!r}, allowed are {', '.join(map(repr, DTYPES))}")
    for name in ("device_memory", "devices", "hot_factor"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"{name} is {getattr(settings, name)}, at least 1 is needed")
    if settings.host_memory < 0:
        raise ConfigError(f"host_memory is {settings.host_memory}, at least 0 is needed")
    user = EngineConfig(
        device="cpu",
        dtype=settings.dtype,
        load_format="dummy",
        block_size=settings.block_size,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    config = resolve(user, model, cuda_available=False, device_memory=settings.device_memory)
    dtype = getattr(torch, settings.dtype)
    layout = kv_row_layout(
        settings.kv_cache_dtype,
        latent_dim=model.mla.kv_lora_rank,
        rope_dim=model.mla.qk_rope_head_dim,
        model_dtype=dtype,
    )
    groups = plan_cache_groups(
        model,
        block_size=settings.block_size,
        row_elems=layout.row_elems,
        row_dtype=layout.dtype,
        model_dtype=dtype,
    )
    all_weights = weight_bytes(config, dtype)
    weights = -(-all_weights // settings.devices)
    room = settings.device_memory - WORKING_BYTES
    kv = groups.kv.bytes_per_block / settings.block_size
    keys = groups.bytes_per_block / settings.block_size - kv
    sparse = not model.layers_of(AttentionKind.DENSE_MLA) and model.indexer is not None
    pooled = sparse and settings.host_memory > 0
    topk = min(model.indexer.topk, settings.context) if model.indexer is not None else 0
    slots = min(settings.hot_factor * topk, settings.context)
    hot = slots * kv if pooled else 0
    free = room - weights
    state = groups.bytes_per_slot
    resident = _fit(free, settings.context, a_sequence=state, a_token=kv + keys)
    hosted = None
    if pooled:
        # Prefills may stage the host blocks of a few sequences, a layer at a time; each group knows where every row is.
        staged = STAGED_SEQUENCES * settings.context * kv / len(groups.kv.layers)
        leaders = sum(layer.indexer is IndexerKind.FULL for layer in model.layers)
        tables = leaders * (4 * settings.context + 32 * slots)
        on_device = _fit(free - staged, settings.context, a_sequence=int(state + hot + tables), a_token=keys)
        in_host = _fit(settings.host_memory, settings.context, a_sequence=0, a_token=kv, limit="host memory")
        hosted = min(on_device, in_host, key=lambda fit: fit.requests)
    return Capacity(
        weights=weights,
        least_devices=all_weights // room + 1 if room > 0 else 0,
        kv_per_token=kv,
        index_keys_per_token=keys,
        state_per_sequence=state,
        hot_per_sequence=int(hot),
        resident=resident,
        hosted=hosted,
        bus_ms={overlap: 1e3 * (1 - overlap) * topk * kv / BUS_BYTES_PER_S for overlap in OVERLAPS} if pooled else {},
    )


def _fit(free: float, context: int, *, a_sequence: int, a_token: float, limit: str = "device memory") -> Fit:
    if free <= 0:
        return Fit(0, 0, "weights, and 6 GiB to work with")
    each = a_sequence + context * a_token
    requests = max(int(free // each), 0)
    return Fit(requests, requests * context, limit)
