"""The one place that turns ``load_format`` into a source of weights."""

from __future__ import annotations

import os

from sidestream.config.model import ModelConfig
from sidestream.errors import ConfigError
from sidestream.weights.dummy_source import DummySource
from sidestream.weights.safetensors_source import SafetensorsSource
from sidestream.weights.source import WeightSource

LOAD_FORMATS = ("auto", "dummy")


def open_weights(
    folder: str | os.PathLike[str], config: ModelConfig, *, load_format: str = "auto", seed: int = 0
) -> WeightSource:
    """The source of a model's weights.

    Args:
        folder: with ``*.safetensors``; not looked at for ``dummy``.
        load_format: ``auto`` reads the folder, ``dummy`` draws random weights.
        seed: of dummy weights.
    Raises:
        ConfigError: another ``load_format``.
        CheckpointError: a file of the folder is missing, truncated or of another format.
    """
    if load_format == "dummy":
        return DummySource(config, seed)
    if load_format == "auto":
        return SafetensorsSource(folder, config)
    raise ConfigError(f"load_format is {load_format!r}, allowed are {', '.join(LOAD_FORMATS)}")
