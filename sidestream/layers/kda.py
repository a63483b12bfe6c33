"""Kimi Delta Attention: short convolution, gated delta rule over a recurrent state, gated norm.

Kimi Linear (arXiv 2510.26692); formulas as in the hub models ``kimi_linear`` and ``glm5_next``.
"""

from __future__ import annotations

import torch

from sidestream.config.model import ModelConfig
from sidestream.core.forward_context import get_forward_context
from sidestream.core.layer_cache import LayerCache
from sidestream.core.step_inputs import StepInputs
from sidestream.layers.boundary import across_break
from sidestream.layers.linear import MergedLinear, Projection, RowLinear
from sidestream.layers.loader import LayerLoader
from sidestream.ops.kda import decode_step, mixed_step


class KimiDeltaAttention:
    """One KDA layer; heads are split over the ranks, the two low-rank projections are whole on each.

    Args:
        loader: at ``self_attn``.
        layer: index of the decoder layer.
    """

    def __init__(self, loader: LayerLoader, config: ModelConfig, layer: int) -> None:
        kda = config.kda
        assert kda is not None
        self.layer = layer
        self.head_dim = kda.head_dim
        self.num_heads = loader.group.local("linear_num_heads", kda.num_heads)
        self.lower_bound = kda.gate_lower_bound
        self.norm_eps = kda.norm_eps
        width = kda.num_heads * kda.head_dim
        local = self.num_heads * kda.head_dim
        self.inputs = MergedLinear(
            loader,
            config.hidden_size,
            [
                Projection("q_proj", width),
                Projection("k_proj", width),
                Projection("v_proj", width),
                Projection("f_a_proj", kda.head_dim, sharded=False),
                Projection("g_a_proj", kda.head_dim, sharded=False),
                Projection("b_proj", kda.num_heads),
            ],
        )
        # The two low-rank projections stand side by side and are expanded by one batched product.
        self.expand = torch.empty(2, local, kda.head_dim, dtype=loader.dtype, device=loader.device)
        for i, part in enumerate(("f_b_proj", "g_b_proj")):
            loader.source.load(f"{loader.prefix}{part}.weight", self.expand[i], shard=loader.shard(0))
        self.dt_bias = loader.tensor("dt_bias", (local,), dtype=torch.float32, shard=loader.shard(0))
        self.a_log = loader.tensor("A_log", (self.num_heads,), dtype=torch.float32, shard=loader.shard(0))
        # [C, taps] over memory of [taps, C]: the order in which the operator multiplies
        self.conv = torch.empty(kda.conv_size, 3 * local, dtype=torch.float32, device=loader.device).t()
        for i, part in enumerate(("q", "k", "v")):
            rows = self.conv[i * local : (i + 1) * local]
            loader.source.load(f"{loader.prefix}{part}_conv1d.weight", rows, shard=loader.shard(0))
        self.norm = loader.tensor("o_norm.weight", (kda.head_dim,))
        self.out = RowLinear(loader, "o_proj", width, config.hidden_size)

    def __call__(self, x: torch.Tensor, asked: torch.Tensor | None = None) -> torch.Tensor:
        """x [Tp, hidden] -> [Tp, hidden], or of the rows ``asked`` for. State is read and written for the true tokens
        only, and for all of them."""
        projected = self.inputs.weight.linear(x, None)
        width = self.num_heads * self.head_dim
        mixed = across_break(f"KDA of layer {self.layer}", "KDA", self._attend, projected, out=(x.shape[0], width))
        return self.out(mixed if asked is None else mixed.index_select(0, asked))

    def _attend(self, projected: torch.Tensor) -> torch.Tensor:
        """[Tp, ..] projections -> [Tp, H * V], zeros behind the rows of the step."""
        context = get_forward_context()
        inputs, cache = context.inputs, context.caches[self.layer]
        if inputs.uniform:
            return self._decode(projected, inputs=inputs, cache=cache)
        return self._mix(projected, inputs=inputs, cache=cache)

    def _decode(self, projected: torch.Tensor, *, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        """``_attend`` of a step in which each row is a sequence of its own, padding too: one operator."""
        assert cache.conv is not None, f"layer {self.layer} has no convolution state"
        assert cache.recurrent is not None, f"layer {self.layer} has no recurrent state"
        assert inputs.conv is not None, "the step was laid out without a convolution"
        return decode_step(
            projected,
            cache.conv,
            cache.recurrent,
            conv_weight=self.conv,
            plan=inputs.conv,
            expand=self.expand,
            dt_bias=self.dt_bias,
            A_log=self.a_log,
            lower_bound=self.lower_bound,
            norm_weight=self.norm,
            norm_eps=self.norm_eps,
            slots=inputs.slots,
            start=inputs.starts,
        )

    def _mix(self, projected: torch.Tensor, *, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        """``_attend`` of a step with chunks of prompts in it, padding rows left out: one operator, too."""
        assert cache.conv is not None, f"layer {self.layer} has no convolution state"
        assert cache.recurrent is not None, f"layer {self.layer} has no recurrent state"
        assert inputs.conv is not None, "the step was laid out without a convolution"
        return mixed_step(
            projected,
            cache.conv,
            cache.recurrent,
            conv_weight=self.conv,
            plan=inputs.conv,
            expand=self.expand,
            dt_bias=self.dt_bias,
            A_log=self.a_log,
            lower_bound=self.lower_bound,
            norm_weight=self.norm,
            norm_eps=self.norm_eps,
            slots=inputs.slots,
            start=inputs.starts,
            host_slots=inputs.host_slots,
            starts=tuple(segment.start_position for segment in inputs.segments),
            lengths=tuple(segment.length for segment in inputs.segments),
            decodes=inputs.num_decode,
            kept=inputs.kept,
            rows=projected.shape[0],
        )
