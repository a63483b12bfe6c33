"""What a user may ask of a verification, and what follows from it for the engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sidestream.config.engine import DEFAULT_BLOCK_SIZE, EngineConfig
from sidestream.config.model import ModelConfig
from sidestream.errors import ConfigError
from sidestream.graphs.sizes import capture_sizes, padded_size

DEFAULT_MARGINS = {"float32": 1e-3, "bfloat16": 0.125}
"""In nats, by dtype: rounding of another schedule moves log-probabilities by less. A logit of 16 whose last factor is
rounded once to bf16 is up to 0.06 off; up to 0.079 between schedules was seen with the bundled model on an H200."""
SMALL_BLOCK = 16
"""Tokens a block away from a GPU, where prompts are short: several blocks a sequence, so that paging matters."""
LEAST = {"tokens": 1, "prompts": 2, "max_num_seqs": 2, "seed": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """Options of ``sidestream verify``.

    Args:
        device: "auto" takes a GPU if there is one, else the simulated device; "cuda", "sim", "cpu" (no graphs there).
        dtype, load_format: as in ``EngineConfig``.
        tokens: generated behind each prompt, greedily.
        prompts: how many.
        max_num_seqs: prompts that run at once where they are batched.
        margin: in nats; None is the dtype's in ``DEFAULT_MARGINS``.
        seed: of prompts and dummy weights.
        hisparse: run every mode with a host pool too.
    Raises:
        ConfigError: naming the value and the limit.
    """

    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    tokens: int = 64
    prompts: int = 16
    max_num_seqs: int = 4
    margin: float | None = None
    seed: int = 0
    hisparse: bool = False

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, at least {least} is needed")
        if self.margin is not None and not 0 < self.margin < math.inf:
            raise ConfigError(f"margin is {self.margin}, it must be a finite number of nats above 0")

    @property
    def chosen_device(self) -> str:
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "sim"

    def bound(self, dtype: str) -> float:
        """The margin for engines of ``dtype``."""
        return DEFAULT_MARGINS[dtype] if self.margin is None else self.margin

    def chunk(self, longest: int) -> int:
        """Tokens a step under chunked prefill: the longest prompt takes four steps or more. Odd, so that chunks end
        inside blocks and index pools."""
        return max(longest // 4, self.max_num_seqs, 2) | 1

    def hosted_engine(self, model: ModelConfig, prompts: Sequence[Sequence[int]], *, device: str) -> EngineConfig:
        """The same with a host pool, and a device that no full block stays on any longer than a step writes to it."""
        resident = self.engine(model, prompts, device=device)
        blocks = self.max_num_seqs * -(-(resident.max_model_len or 0) // resident.block_size)
        row = (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim) * 4  # bytes, in no format more
        step = -(-resident.max_num_batched_tokens // resident.block_size) + 2 * self.max_num_seqs
        return replace(
            resident,
            num_blocks=step,
            hisparse_host_memory=blocks * resident.block_size * model.num_layers * row,
            hisparse_watermark=1.0,
            hisparse_staged_tokens=blocks * resident.block_size,  # as many prefills a step as beside all of it
        )

    def engine(self, model: ModelConfig, prompts: Sequence[Sequence[int]], *, device: str) -> EngineConfig:
        """The engine without graphs: a step holds as many whole prompts as run at once.

        Batches of any mix are captured up to the longest prompt; larger ones run without a graph.
        """
        longest = max(len(prompt) for prompt in prompts)
        budget = max(self.max_num_seqs * longest, self.chunk(longest))
        kpool = model.indexer.kpool if model.indexer is not None else 1
        return EngineConfig(
            device=device,
            dtype=self.dtype,
            load_format=self.load_format,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=longest + self.tokens,
            block_size=math.lcm(DEFAULT_BLOCK_SIZE if device == "cuda" else SMALL_BLOCK, kpool),
            cudagraph_mode="none",
            max_capture_tokens=padded_size(longest, capture_sizes(budget)),
            graph_debug=True,
            enable_prefix_caching=False,  # every schedule is to be computed
            seed=self.seed,
        )
