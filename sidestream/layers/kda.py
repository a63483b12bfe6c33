"""Kimi Delta Attention: short convolution, gated delta rule over a recurrent state, gated norm.

Kimi Linear (arXiv 2510.26692); formulas as in the hub models ``kimi_linear`` and ``glm5_next``.
"""

from __future__ import annotations

import torch

from sidestream.config.model import ModelConfig
from sidestream.core.forward_context import get_forward_context
from sidestream.core.layer_cache import LayerCache
from sidestream.core.padding import pad_rows
from sidestream.core.step_inputs import StateRound, StepInputs
from sidestream.layers.boundary import across_break
from sidestream.layers.linear import MergedLinear, Projection, RowLinear
from sidestream.layers.loader import LayerLoader
from sidestream.ops.kda import decode_step, mixed_step
from sidestream.ops.slot_copy import copy_slots


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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [Tp, hidden] -> [Tp, hidden]. State is read and written for the true tokens only."""
        projected = self.inputs.weight.linear(x, None)
        width = self.num_heads * self.head_dim
        mixed = across_break(f"KDA of layer {self.layer}", "KDA", self._attend, projected, out=(x.shape[0], width))
        return self.out(mixed)

    def _attend(self, projected: torch.Tensor) -> torch.Tensor:
        """[Tp, ..] projections -> [Tp, H * V], zeros behind the rows of the step."""
        context = get_forward_context()
        inputs, cache = context.inputs, context.caches[self.layer]
        if inputs.uniform:
            return self._decode(projected, inputs=inputs, cache=cache)
        mixed = self._mix(projected, inputs=inputs, cache=cache)
        return pad_rows(mixed, projected.shape[0])

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
        """``_attend`` of a step with chunks of prompts in it, padding rows left out: one operator, too. [T, H * V]."""
        assert inputs.conv is not None, "the step was laid out without a convolution"
        if inputs.rounds:
            return self._mix_in_rounds(projected, inputs=inputs, cache=cache)
        pieces = StateRound(
            rows=slice(0, inputs.num_tokens),
            conv=inputs.conv,
            slots=inputs.slots,
            starts=inputs.starts,
            host_slots=inputs.host_slots,
            host_starts=tuple(segment.start_position for segment in inputs.segments),
            lengths=tuple(segment.length for segment in inputs.segments),
            num_decode=inputs.num_decode,
            kept=(),
        )
        return self._mix_pieces(projected, pieces, cache=cache)

    def _mix_in_rounds(self, projected: torch.Tensor, *, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        """``_mix`` where states inside chunks are kept: one operator a round, and copies of the slots behind it."""
        assert cache.conv is not None, f"layer {self.layer} has no convolution state"
        assert cache.recurrent is not None, f"layer {self.layer} has no recurrent state"
        conv = cache.conv.view(cache.recurrent.shape[0], -1, cache.conv.shape[-1])
        out = projected.new_empty(inputs.num_tokens, self.num_heads * self.head_dim)
        for pieces in inputs.rounds:
            if isinstance(pieces.rows, slice):
                out[pieces.rows].copy_(self._mix_pieces(projected[pieces.rows], pieces, cache=cache))
            else:
                own = projected.index_select(0, pieces.rows)
                out.index_copy_(0, pieces.rows, self._mix_pieces(own, pieces, cache=cache))
            to, taken = [copy.target for copy in pieces.kept], [copy.source for copy in pieces.kept]
            for memory in (conv, cache.recurrent) if to else ():
                copy_slots(memory, memory, to=to, taken=taken)
        return out

    def _mix_pieces(self, projected: torch.Tensor, pieces: StateRound, *, cache: LayerCache) -> torch.Tensor:
        """[T or more, ..] projections of the pieces' rows -> [T, H * V]."""
        assert cache.conv is not None, f"layer {self.layer} has no convolution state"
        assert cache.recurrent is not None, f"layer {self.layer} has no recurrent state"
        return mixed_step(
            projected,
            cache.conv,
            cache.recurrent,
            conv_weight=self.conv,
            plan=pieces.conv,
            expand=self.expand,
            dt_bias=self.dt_bias,
            A_log=self.a_log,
            lower_bound=self.lower_bound,
            norm_weight=self.norm,
            norm_eps=self.norm_eps,
            slots=pieces.slots,
            start=pieces.starts,
            host_slots=pieces.host_slots,
            starts=pieces.host_starts,
            lengths=pieces.lengths,
            decodes=pieces.num_decode,
        )
