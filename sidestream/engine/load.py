"""Constructs a model: from its checkpoint, from dummy weights, or from zeros to see what it takes."""

from __future__ import annotations

from pathlib import Path

import torch

from sidestream.config.resolved import ResolvedConfig
from sidestream.engine.held_bytes import bytes_of
from sidestream.layers.loader import LayerLoader
from sidestream.layers.parallel import SINGLE
from sidestream.layers.weight_format import DenseFormat
from sidestream.models.decoder import DecoderModel
from sidestream.models.registry import MODELS
from sidestream.weights import LoadReport, Shard, WeightSource, open_weights


def load_model(
    folder: Path, config: ResolvedConfig, *, device: torch.device, dtype: torch.dtype
) -> tuple[DecoderModel, LoadReport]:
    """Construct the model from its checkpoint, or from seeded dummy weights."""
    source = open_weights(folder, config.model, load_format=config.load_format, seed=config.seed)
    return construct(source, config, device=device, dtype=dtype), source.finish()


class Zeros:
    """A source of nothing: every weight is zero."""

    def load(self, name: str, out: torch.Tensor, *, shard: Shard | None = None) -> None:
        out.zero_()

    def finish(self) -> LoadReport:
        return LoadReport((), (), {})


def weight_bytes(config: ResolvedConfig, dtype: torch.dtype) -> int:
    """Bytes that the loaded model will take: it is constructed without memory, and counted."""
    return bytes_of(construct(Zeros(), config, device=torch.device("meta"), dtype=dtype))


def construct(
    source: WeightSource, config: ResolvedConfig, *, device: torch.device, dtype: torch.dtype
) -> DecoderModel:
    loader = LayerLoader(
        source=source, prefix="", dtype=dtype, device=device, format=DenseFormat(dtype, device), group=SINGLE
    )
    return MODELS[config.model.architecture](loader, config.model, config.max_model_len)
