"""Fewest milliseconds a decode step can take: bytes that it must touch once, over the device's read rate.

Counted: every weight but the embedding table and the experts nobody chose (as many are touched as an even router would
choose on average), the selected KV rows, all index keys, recurrent states in and out. Activations stay in the caches.

    python benchmarks/floor.py benchmarks/configs/glm5-next-slice-a.json --batch 1 8 32 64 --context 8192
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from sidestream.config.engine import EngineConfig
from sidestream.config.model import AttentionKind, IndexerKind, MlpKind, ModelConfig
from sidestream.config.resolved import resolve
from sidestream.engine.build import weight_bytes
from sidestream.ops.kv_rows import kv_row_layout

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


def decode_floor(model: ModelConfig, *, batch: int, context: int, kv_cache_dtype: str = "bf16") -> Floor:
    """Of a bf16 model that decodes one token for each of ``batch`` sequences with ``context`` tokens."""
    user = EngineConfig(device="cpu", dtype="bfloat16")
    config = resolve(user, model, cuda_available=False, device_memory=1 << 50)
    everything = weight_bytes(config, torch.bfloat16)
    embedding = 0 if model.tie_word_embeddings else 2 * model.vocab_size * model.hidden_size
    moe, moe_layers = model.moe, sum(layer.mlp is MlpKind.SPARSE for layer in model.layers)
    expert = touched = 0.0
    if moe is not None:
        expert = 2.0 * 3 * model.hidden_size * moe.intermediate_size
        touched = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** batch)
    all_experts = moe_layers * expert * (moe.num_experts if moe is not None else 0)

    layout = kv_row_layout(
        kv_cache_dtype,
        latent_dim=model.mla.kv_lora_rank,
        rope_dim=model.mla.qk_rope_head_dim,
        model_dtype=torch.bfloat16,
    )
    sparse, dense = (model.layers_of(kind) for kind in (AttentionKind.SPARSE_MLA, AttentionKind.DENSE_MLA))
    selected = context if model.indexer is None else min(context, model.indexer.topk + model.indexer.kpool - 1)
    rows = batch * layout.row_bytes * (len(sparse) * selected + len(dense) * context)
    keys = 0
    if model.indexer is not None:
        leaders = sum(layer.indexer is IndexerKind.FULL for layer in model.layers)
        keys = batch * leaders * (context // model.indexer.kpool) * model.indexer.head_dim * 2
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[8192])
    parser.add_argument("--kv-cache-dtype", default="bf16")
    args = parser.parse_args()
    model = ModelConfig.from_hf(args.config)
    print(f"{'batch':>6} {'context':>8} {'ms':>7}   GB: dense  experts     rows     keys   states")
    for batch in args.batch:
        for context in args.context:
            floor = decode_floor(model, batch=batch, context=context, kv_cache_dtype=args.kv_cache_dtype)
            parts = (floor.dense, floor.experts, floor.rows, floor.index_keys, floor.states)
            print(f"{batch:6} {context:8} {floor.ms():7.2f}   " + " ".join(f"{part / 1e9:8.3f}" for part in parts))


if __name__ == "__main__":
    main()
