"""Sidestream: an inference engine for sparse-MLA language models, on Hopper GPUs, whole on a CPU too."""

from typing import TYPE_CHECKING, Any

from sidestream.config.model import ModelConfig
from sidestream.core.outputs import CompletionOutput, Logprob, RequestOutput
from sidestream.core.sampling_params import SamplingParams
from sidestream.errors import CapacityError, CheckpointError, ConfigError, RequestError, SidestreamError

if TYPE_CHECKING:
    from sidestream.engine.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "Logprob",
    "ModelConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SidestreamError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the engine, and with it torch, only when it is used."""
    if name == "LLM":
        from sidestream.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'sidestream' has no attribute {name!r}")
