"""Feed-forward blocks: dense SwiGLU, and a mixture of experts with shared experts beside it."""

from __future__ import annotations

from typing import Any

import torch

from sidestream.config.model import ModelConfig
from sidestream.core.forward_context import get_forward_context
from sidestream.core.padding import pad_rows
from sidestream.layers.linear import MergedLinear, Projection, RowLinear
from sidestream.layers.loader import LayerLoader
from sidestream.ops.moe import ExpertSum, experts, route, swiglu, unsummed_experts


class DenseMlp:
    """down(silu(gate x) * up x), gate and up clamped where the model says so."""

    def __init__(self, loader: LayerLoader, config: ModelConfig, intermediate_size: int) -> None:
        self.limit = config.swiglu_limit
        self.gate_up = MergedLinear(
            loader,
            config.hidden_size,
            [Projection("gate_proj", intermediate_size), Projection("up_proj", intermediate_size)],
        )
        self.down = RowLinear(loader, "down_proj", intermediate_size, config.hidden_size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate_up = self.gate_up.weight.linear(x, None)
        return self.down(swiglu(gate_up, limit=self.limit))


class MoeMlp:
    """Routed experts and shared experts of one layer. The router is fp32 whatever the model's dtype."""

    def __init__(self, loader: LayerLoader, config: ModelConfig) -> None:
        assert config.moe is not None
        self.moe = moe = config.moe
        self.limit = config.swiglu_limit
        self.group = loader.group
        self.sums_later = config.hyper_connection is not None and loader.group.size == 1
        hidden, local = config.hidden_size, loader.group.local("moe_intermediate_size", moe.intermediate_size)
        gate = loader.at("gate")
        self.router = gate.tensor("weight", (moe.num_experts, hidden), dtype=torch.float32)
        self.bias = gate.tensor("e_score_correction_bias", (moe.num_experts,), dtype=torch.float32)
        total = moe.num_experts + moe.num_shared_experts
        self.w13 = torch.empty(total, 2 * local, hidden, dtype=loader.dtype, device=loader.device)
        self.w2 = torch.empty(total, hidden, local, dtype=loader.dtype, device=loader.device)
        for expert in range(moe.num_experts):
            name = f"{loader.prefix}experts.{expert}"
            loader.source.load(f"{name}.gate_proj.weight", self.w13[expert, :local], shard=loader.shard(0))
            loader.source.load(f"{name}.up_proj.weight", self.w13[expert, local:], shard=loader.shard(0))
            loader.source.load(f"{name}.down_proj.weight", self.w2[expert], shard=loader.shard(1))
        # A shared expert n times as wide as a routed one is the sum of n of that width.
        shared, width = loader.at("shared_experts"), local * moe.num_shared_experts
        gate_rows = shared.tensor("gate_proj.weight", (width, hidden), shard=loader.shard(0))
        up_rows = shared.tensor("up_proj.weight", (width, hidden), shard=loader.shard(0))
        down_columns = shared.tensor("down_proj.weight", (hidden, width), shard=loader.shard(1))
        self.w13[moe.num_experts :, :local] = gate_rows.view(-1, local, hidden)
        self.w13[moe.num_experts :, local:] = up_rows.view(-1, local, hidden)
        self.w2[moe.num_experts :] = down_columns.view(hidden, -1, local).transpose(0, 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | ExpertSum:
        """x [Tp, hidden] -> [Tp, hidden]; zeros behind the true tokens. Where hyper-connections follow, and nothing of
        other ranks or of padding is to join first, the experts' sum may be left to them."""
        moe = self.moe
        inputs = get_forward_context().inputs
        real = x[: inputs.segment_rows]
        weights, ids = route(
            real,
            self.router,
            self.bias,
            top_k=moe.top_k,
            num_groups=moe.num_groups,
            topk_groups=moe.topk_groups,
            norm_topk_prob=moe.norm_topk_prob,
            scale=moe.routed_scaling_factor,
            live=inputs.context_lens,
        )
        named: dict[str, Any] = {"num_shared": moe.num_shared_experts, "swiglu_limit": self.limit}
        if self.sums_later and real.shape == x.shape:
            return unsummed_experts(real, self.w13, self.w2, weights=weights, ids=ids, **named)
        out = experts(real, self.w13, self.w2, weights=weights, ids=ids, **named)
        return pad_rows(self.group.all_reduce(out), x.shape[0])
