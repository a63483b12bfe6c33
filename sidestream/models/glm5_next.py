"""GLM-5.3-Flash (``glm5_next``): KDA and k-pooled DSA layers joined by hyper-connections."""

from __future__ import annotations

import torch

from sidestream.config.model import ModelConfig
from sidestream.layers.loader import LayerLoader
from sidestream.layers.residual import HyperConnection, ResidualState, settled
from sidestream.models.decoder import DecoderModel
from sidestream.ops.norm import mean_rms_norm


def _residual(loader: LayerLoader, config: ModelConfig, norm: str, site: str) -> HyperConnection:
    return HyperConnection(loader, config, norm=norm, site=site)


class Glm5Next(DecoderModel):
    """The residual is ``hc_mult`` streams, all the embedding at first, averaged at the end."""

    def __init__(self, loader: LayerLoader, config: ModelConfig, max_positions: int) -> None:
        assert config.hyper_connection is not None
        self.streams = config.hyper_connection.mult
        super().__init__(loader, config, max_positions, make_residual=_residual)

    def enter(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding.streams(token_ids, self.streams)

    def leave(self, state: ResidualState) -> torch.Tensor:
        return mean_rms_norm(settled(state), self.norm, self.config.rms_norm_eps)
