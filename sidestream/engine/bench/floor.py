"""Fewest milliseconds a decode step can take: bytes that it must touch once, over the device's read rate.

Counted: every weight but the embedding table and the experts nobody chose (as many are touched as an even router would
choose on average), the selected KV rows, all index keys, recurrent states in and out. Activations stay in the caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sidestream.config.engine import EngineConfig
from sidestream.config.model import AttentionKind, IndexerKind, MlpKind, ModelConfig
from sidestream.config.resolved import resolve
from sidestream.engine.doctor.bandwidth import COPIES, DEVICE_BYTES, HOST_BYTES, median_seconds
from sidestream.engine.load import weight_bytes
from sidestream.ops.kv_rows import kv_row_layout
from sidestream.streams import StreamBackend

BYTES_PER_S = 4.28e12
"""Device copy rate of an H200."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes of one decode step, by kind."""

    dense: float
    experts: float
    rows: float
    index_keys: float
    states: float

    @property
    def total(self) -> float:
        return self.dense + self.experts + self.rows + self.index_keys + self.states

    def ms(self, bytes_per_s: float = BYTES_PER_S) -> float:
        return 1e3 * self.total / bytes_per_s


def decode_floor(
    model: ModelConfig, *, batch: int, context: int, kv_cache_dtype: str = "auto", dtype: str = "bfloat16"
) -> Floor:
    """Of a model that decodes one token for each of ``batch`` sequences with ``context`` tokens.

    Args:
        dtype: of weights, index keys and, by default, KV rows.
    """
    user = EngineConfig(device="cpu", dtype=dtype)
    config = resolve(user, model, cuda_available=False, device_memory=1 << 50)
    element: torch.dtype = getattr(torch, dtype)
    everything = weight_bytes(config, element)
    embedding = 0 if model.tie_word_embeddings else element.itemsize * model.vocab_size * model.hidden_size
    moe, moe_layers = model.moe, sum(layer.mlp is MlpKind.SPARSE for layer in model.layers)
    expert = touched = 0.0
    if moe is not None:
        expert = float(element.itemsize) * 3 * model.hidden_size * moe.intermediate_size
        touched = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** batch)
    all_experts = moe_layers * expert * (moe.num_experts if moe is not None else 0)

    layout = kv_row_layout(
        kv_cache_dtype,
        latent_dim=model.mla.kv_lora_rank,
        rope_dim=model.mla.qk_rope_head_dim,
        model_dtype=element,
    )
    sparse, dense = (model.layers_of(kind) for kind in (AttentionKind.SPARSE_MLA, AttentionKind.DENSE_MLA))
    selected = context if model.indexer is None else min(context, model.indexer.topk + model.indexer.kpool - 1)
    rows = batch * layout.row_bytes * (len(sparse) * selected + len(dense) * context)
    keys = 0
    if model.indexer is not None:
        leaders = sum(layer.indexer is IndexerKind.FULL for layer in model.layers)
        keys = batch * leaders * (context // model.indexer.kpool) * model.indexer.head_dim * element.itemsize
    states = 0
    if model.kda is not None:
        layers = len(model.layers_of(AttentionKind.KDA))
        states = 2 * batch * layers * model.kda.num_heads * model.kda.head_dim**2 * 4
    return Floor(
        dense=everything - embedding - all_experts,
        experts=moe_layers * expert * touched,
        rows=rows,
        index_keys=keys,
        states=states,
    )


def read_rate(backend: StreamBackend) -> float:
    """Bytes a second that this device reads and writes when it copies, measured now."""
    on_gpu = backend.device.type == "cuda"
    size = min(DEVICE_BYTES, torch.cuda.mem_get_info()[0] // 8) if on_gpu else HOST_BYTES
    source = torch.ones(size, dtype=torch.uint8, device=backend.device if on_gpu else "cpu")
    out = torch.empty_like(source)

    def copies() -> None:
        for _ in range(COPIES):
            out.copy_(source, non_blocking=True)

    return COPIES * 2 * size / median_seconds(backend, copies)
