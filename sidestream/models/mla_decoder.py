"""Models with the plain residual: what sets them apart is in their layers' config alone.

``deepseek_v32`` (DSA at token granularity, half-split index rotation), ``glm_moe_dsa`` (the same with IndexShare and
interleaved index rotation), ``kimi_linear`` (KDA and dense MLA, no rotation).
"""

from __future__ import annotations

from sidestream.config.model import ModelConfig
from sidestream.layers.loader import LayerLoader
from sidestream.layers.residual import PlainResidual
from sidestream.models.decoder import DecoderModel


def _residual(loader: LayerLoader, config: ModelConfig, norm: str, site: str) -> PlainResidual:
    return PlainResidual(loader, config, norm=norm)


class PlainDecoder(DecoderModel):
    def __init__(self, loader: LayerLoader, config: ModelConfig, max_positions: int) -> None:
        super().__init__(loader, config, max_positions, make_residual=_residual)
