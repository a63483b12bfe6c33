"""GLM-5.3-Flash (``glm5_next``): KDA and k-pooled DSA layers joined by hyper-connections."""

from __future__ import annotations

import torch

from sidestream.config.model import ModelConfig
from sidestream.layers.loader import LayerLoader
from sidestream.layers.residual import HyperConnection
from sidestream.models.decoder import DecoderModel


def _residual(loader: LayerLoader, config: ModelConfig, norm: str, site: str) -> HyperConnection:
    return HyperConnection(loader, config, norm=norm, site=site)


class Glm5Next(DecoderModel):
    """The residual is ``hc_mult`` streams, all the embedding at first, averaged at the end."""

    def __init__(self, loader: LayerLoader, config: ModelConfig, max_positions: int) -> None:
        assert config.hyper_connection is not None
        self.streams = config.hyper_connection.mult
        super().__init__(loader, config, max_positions, make_residual=_residual)

    def enter(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.unsqueeze(1).expand(-1, self.streams, -1).contiguous()

    def leave(self, state: torch.Tensor) -> torch.Tensor:
        return state.mean(dim=1)
