"""Checkpoint tensors by canonical name, one in flight at a time."""

from sidestream.weights.source import LoadReport, Shard, WeightSource

__all__ = ["LoadReport", "Shard", "WeightSource"]
