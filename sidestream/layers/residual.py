"""How a sub-layer's output joins the residual: plainly, or through manifold-constrained hyper-connections."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sidestream.config.model import ModelConfig
from sidestream.layers.loader import LayerLoader
from sidestream.ops.hyper_connection import hyper_connection_post, hyper_connection_pre
from sidestream.ops.norm import rms_norm

Sublayer = Callable[[torch.Tensor], torch.Tensor]


class PlainResidual:
    """x + f(norm(x)).

    Args:
        loader: at the decoder layer.
        norm: name of the sub-layer's input norm.
    """

    def __init__(self, loader: LayerLoader, config: ModelConfig, *, norm: str) -> None:
        self.weight = loader.tensor(f"{norm}.weight", (config.hidden_size,))
        self.eps = config.rms_norm_eps

    def __call__(self, x: torch.Tensor, sublayer: Sublayer) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return x + sublayer(rms_norm(x, self.weight, self.eps))


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
        mix = (2 + hc.mult) * hc.mult
        self.hc = hc
        self.weight = loader.tensor(f"{norm}.weight", (config.hidden_size,))
        self.norm_eps = config.rms_norm_eps
        self.fn = loader.tensor(f"hc_{site}_fn", (mix, hc.mult * config.hidden_size), dtype=torch.float32)
        self.base = loader.tensor(f"hc_{site}_base", (mix,), dtype=torch.float32)
        self.scale = loader.tensor(f"hc_{site}_scale", (3,), dtype=torch.float32)

    def __call__(self, streams: torch.Tensor, sublayer: Sublayer) -> torch.Tensor:
        """streams [T, S, hidden] -> [T, S, hidden]."""
        collapsed, post, comb = hyper_connection_pre(
            streams,
            self.fn,
            self.base,
            scale=self.scale,
            norm_eps=self.norm_eps,
            eps=self.hc.eps,
            iters=self.hc.sinkhorn_iters,
        )
        output = sublayer(rms_norm(collapsed, self.weight, self.norm_eps))
        return hyper_connection_post(streams, output, post, comb=comb)
