"""Constructs a model: from its checkpoint, from dummy weights, or from zeros to see what it takes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sidestream.config.resolved import ResolvedConfig
from sidestream.engine.held_bytes import bytes_of
from sidestream.layers.loader import LayerLoader
from sidestream.layers.parallel import SINGLE
from sidestream.layers.weight_format import DenseFormat
from sidestream.models.decoder import DecoderModel
from sidestream.models.registry import MODELS
from sidestream.weights import LoadReport, Shard, WeightSource


def load_model(
    source: WeightSource,
    config: ResolvedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_bytes: Callable[[int], None] = lambda filled: None,
) -> tuple[DecoderModel, LoadReport]:
    """Construct the model from a source, which is finished then; ``on_bytes`` hears how much is filled."""
    return construct(_Counted(source, on_bytes), config, device=device, dtype=dtype), source.finish()


class _Counted:
    """A source that tells how many bytes of parameters it has filled."""

    def __init__(self, inner: WeightSource, tell: Callable[[int], None]) -> None:
        self._inner = inner
        self._tell = tell
        self._filled = 0

    def load(self, name: str, out: torch.Tensor, *, shard: Shard | None = None) -> None:
        self._inner.load(name, out, shard=shard)
        self._filled += out.nbytes
        self._tell(self._filled)

    def finish(self) -> LoadReport:
        return self._inner.finish()


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
