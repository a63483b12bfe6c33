"""Checkpoint tensors by canonical name, one in flight at a time."""

from sidestream.weights.dummy_source import DummySource
from sidestream.weights.open_weights import LOAD_FORMATS, open_weights
from sidestream.weights.safetensors_source import SafetensorsSource
from sidestream.weights.source import LoadReport, Shard, WeightSource

__all__ = ["LOAD_FORMATS", "DummySource", "LoadReport", "SafetensorsSource", "Shard", "WeightSource", "open_weights"]
