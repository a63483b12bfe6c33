"""Which class runs which architecture."""

from __future__ import annotations

from collections.abc import Callable

from sidestream.config.model import Architecture, ModelConfig
from sidestream.layers.loader import LayerLoader
from sidestream.models.decoder import DecoderModel
from sidestream.models.glm5_next import Glm5Next
from sidestream.models.mla_decoder import PlainDecoder

MODELS: dict[Architecture, Callable[[LayerLoader, ModelConfig, int], DecoderModel]] = {
    Architecture.GLM5_NEXT: Glm5Next,
    Architecture.GLM_MOE_DSA: PlainDecoder,
    Architecture.DEEPSEEK_V32: PlainDecoder,
    Architecture.KIMI_LINEAR: PlainDecoder,
}
