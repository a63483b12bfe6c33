"""How a sub-layer's output joins the residual: plainly, or through manifold-constrained hyper-connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sidestream.config.model import ModelConfig
from sidestream.layers.loader import LayerLoader
from sidestream.ops.hyper_connection import hyper_connection_post, hyper_connection_post_pre, hyper_connection_pre
from sidestream.ops.moe import ExpertSum
from sidestream.ops.moe import settled as summed
from sidestream.ops.norm import add_rms_norm, rms_norm

Sublayer = Callable[[torch.Tensor], torch.Tensor | ExpertSum]


@dataclass(frozen=True, slots=True)
class PendingStreams:
    """Streams [T, S, hidden] that a sub-layer's output [T, hidden] has yet to join, which the next sub-layer does on
    its way: the arguments of ``hyper_connection_post``."""

    streams: torch.Tensor
    output: torch.Tensor | ExpertSum
    post: torch.Tensor
    mix: torch.Tensor


@dataclass(frozen=True, slots=True)
class PendingSum:
    """x and a sub-layer's output, [T, hidden] each, that are yet to be added."""

    x: torch.Tensor
    output: torch.Tensor


ResidualState = torch.Tensor | PendingStreams | PendingSum
"""[T, hidden], or [T, S, hidden] with hyper-connections, whose last change may be pending."""


def settled(state: ResidualState) -> torch.Tensor:
    """The state with nothing pending."""
    if isinstance(state, torch.Tensor):
        return state
    if isinstance(state, PendingSum):
        return state.x + state.output
    return hyper_connection_post(state.streams, state.output, state.post, mix=state.mix)


def at_rows(state: ResidualState, rows: torch.Tensor) -> ResidualState:
    """What of a state, whose output is already that of some rows [N] int64 alone, belongs to these."""
    if isinstance(state, PendingStreams):
        streams, post, mix = (each.index_select(0, rows) for each in (state.streams, state.post, state.mix))
        return PendingStreams(streams, state.output, post, mix)
    assert isinstance(state, PendingSum), "a state without a pending output has all rows"
    return PendingSum(state.x.index_select(0, rows), state.output)


class PlainResidual:
    """x + f(norm(x)).

    Args:
        loader: at the decoder layer.
        norm: name of the sub-layer's input norm.
    """

    def __init__(self, loader: LayerLoader, config: ModelConfig, *, norm: str) -> None:
        self.weight = loader.tensor(f"{norm}.weight", (config.hidden_size,))
        self.eps = config.rms_norm_eps

    def __call__(self, state: ResidualState, sublayer: Sublayer) -> ResidualState:
        """[T, hidden] -> [T, hidden], the sub-layer's output pending."""
        if isinstance(state, PendingSum):
            x, normed = add_rms_norm(state.x, state.output, self.weight, self.eps)
        else:
            x = settled(state)
            normed = rms_norm(x, self.weight, self.eps)
        return PendingSum(x, summed(sublayer(normed)))


class HyperConnection:
    """S residual streams: collapse them for the sub-layer, then mix and expand.

    mHC (Xie et al., 2026); formula as in the hub model ``glm5_next``.

    Args:
        loader: at the decoder layer.
        norm: name of the sub-layer's input norm.
        site: "attn" or "ffn".
    """

    def __init__(self, loader: LayerLoader, config: ModelConfig, *, norm: str, site: str) -> None:
        hc = config.hyper_connection
        assert hc is not None
        parts = [hc.mult, hc.mult, hc.mult**2]
        rows = sum(parts)
        self.hc = hc
        self.norm_weight = torch.ones(2, config.hidden_size, dtype=loader.dtype, device=loader.device)
        loader.source.load(f"{loader.prefix}{norm}.weight", self.norm_weight[0])
        self.norm_eps = config.rms_norm_eps
        self.fn = loader.tensor(f"hc_{site}_fn", (rows, hc.mult * config.hidden_size), dtype=torch.float32)
        self.base = loader.tensor(f"hc_{site}_base", (rows,), dtype=torch.float32)
        scale = loader.tensor(f"hc_{site}_scale", (3,), dtype=torch.float32)
        for part, factor in zip(torch.split(self.fn, parts), scale, strict=True):
            part.mul_(factor)  # a product less in every step

    def __call__(self, state: ResidualState, sublayer: Sublayer) -> ResidualState:
        """[T, S, hidden] -> [T, S, hidden], the sub-layer's output pending."""
        settings: dict[str, Any] = {
            "norm_weight": self.norm_weight,
            "norm_eps": self.norm_eps,
            "eps": self.hc.eps,
            "iters": self.hc.sinkhorn_iters,
        }
        if isinstance(state, PendingStreams):
            streams, normed, post, mix = hyper_connection_post_pre(
                state.streams, state.output, state.post, self.fn, self.base, mix=state.mix, **settings
            )
        else:
            streams = settled(state)
            normed, post, mix = hyper_connection_pre(streams, self.fn, self.base, **settings)
        return PendingStreams(streams, sublayer(normed), post, mix)
