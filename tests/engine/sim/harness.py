"""One engine on the simulated device: a chosen order of work, poisoned pools, graphs captured, hazards checked."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from sidestream.attention.index_group import SparseMLAIndexGroup
from sidestream.config.engine import EngineConfig
from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.runner import StepGraphs
from sidestream.graphs import dispatch
from sidestream.graphs.breakable import BreakableCUDAGraphCapture
from sidestream.graphs.dispatch import GraphKey, StepPlan
from sidestream.streams import Capture
from sidestream.streams.simulated import Order, SimulatedBackend
from tests.engine.harness import Harness, Part, Schedule
from tests.tiny_models import build_oracle, next_layers, save_checkpoint

SETTINGS = ("none", "piecewise", "full", "full_and_piecewise")
VOCAB = 136

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm5_next": ("glm5_next", next_layers("KDS")),
    "glm_moe_dsa": ("glm_moe_dsa", {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}),
    "deepseek_v32": ("deepseek_v32", {"num_hidden_layers": 2}),
    "kimi_linear": (
        "kimi_linear",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
}
"""The four architectures with as few layers as hold every kind, since each operator is simulated."""


def make_model(name: str, folder: Path, *, seed: int = 17, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Write the checkpoint of ``MODELS[name]``; returns its oracle."""
    architecture, overrides = MODELS[name]
    oracle = build_oracle(architecture, seed, **overrides)
    save_checkpoint(oracle.to(dtype), folder)
    return oracle


def open_sim(order: Order = Order.RANDOM, *, seed: int = 0, starved: str | None = None) -> SimulatedBackend:
    """A simulated device; it replaces the one before, whose engines must not run any more."""
    return SimulatedBackend(order, seed=seed, starved=starved)


def sim_config(mode: str, **settings: Any) -> EngineConfig:
    """Of a tiny engine that captures few sizes: decodes of 1, 2, 4 sequences, mixed batches of 1, 2, 4, 8 tokens."""
    defaults: dict[str, Any] = {
        "device": "sim",
        "dtype": "float32",
        "cudagraph_mode": mode,
        "graph_debug": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_capture_tokens": 8,
        "max_model_len": 128,
        "block_size": 8,
        "num_blocks": 40,
        "memory_limit": "4GiB",
    }
    return EngineConfig(**(defaults | settings))


@contextmanager
def captured_sizes(*sizes: int) -> Iterator[None]:
    """Engines built in the block capture, and pad to, the given ascending sizes and the largest that can occur."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "capture_sizes", lambda limit: (*(s for s in sizes if s < limit), limit))
        yield


class SimHarness(Harness):
    """``Harness`` on the simulated device; log-probabilities come back to the host, and hazards are errors.

    Args:
        folder: of the checkpoint.
        mode: the setting ``cudagraph_mode``.
        backend: None makes one of random order.
    """

    def __init__(
        self, folder: Path, mode: str, *, backend: SimulatedBackend | None = None, seed: int = 0, **settings: Any
    ) -> None:
        config = sim_config(mode, **settings)
        assert config.num_blocks is not None
        self.backend = backend or open_sim()
        self.built: BuiltEngine = build_engine(folder, config, backend=self.backend)
        with self.built.runner.on_device():
            self.built.pools.poison()
        self.block_size = config.block_size
        self.free_blocks = list(range(1, config.num_blocks + 1))
        self.free_slots = list(range(1, self.built.num_slots))
        rng = random.Random(seed)
        rng.shuffle(self.free_blocks)
        rng.shuffle(self.free_slots)

    @property
    def graphs(self) -> StepGraphs:
        graphs = self.built.runner.graphs
        assert graphs is not None
        return graphs

    @property
    def groups(self) -> tuple[SparseMLAIndexGroup, ...]:
        return self.built.runner.attention.groups

    def run(
        self, sequences: Sequence[Sequence[int]], schedule: Iterable[Sequence[Part]], *, wrong_guess: int = 3
    ) -> list[torch.Tensor]:
        """As ``Harness.run``, on the compute stream; results on the host.

        A generator as ``schedule`` can look at the engine between its steps.
        """
        steps = cast(Schedule, schedule)  # only iterated over
        with self.built.runner.on_device():
            rows = [row.cpu() for row in super().run(sequences, steps, wrong_guess=wrong_guess)]
        self.backend.check()
        return rows

    def pieces(self, tokens: int, *, uniform: bool) -> BreakableCUDAGraphCapture:
        """The PIECEWISE capture of a shape."""
        capture = self.graphs.runner.capture_of(_plan(CUDAGraphMode.PIECEWISE, tokens, uniform=uniform))
        assert isinstance(capture, BreakableCUDAGraphCapture)
        return capture

    def full_graph(self, tokens: int) -> Capture:
        """The FULL graph of a uniform decode."""
        capture = self.graphs.runner.capture_of(_plan(CUDAGraphMode.FULL, tokens, uniform=True))
        assert isinstance(capture, Capture)
        return capture


def _plan(mode: CUDAGraphMode, tokens: int, *, uniform: bool) -> StepPlan:
    return StepPlan(mode, GraphKey(tokens, 1 if uniform else 0))


def decodes(*sequences: int) -> list[Part]:
    """One decode token of each."""
    return [Part(sequence, 1, is_decode=True) for sequence in sequences]


def every_kind_of_step() -> Schedule:
    """Of three sequences of 26, 15 and 11 tokens: a chunk beyond the largest captured size, chunks of two prompts,
    a decode beside chunks, a first chunk of one token, then decodes of 3 (of a bucket of 4), 2 and 1 sequences."""
    return [
        [Part(0, 12)],
        [Part(0, 5), Part(1, 3)],
        [*decodes(0), Part(1, 5), Part(2, 1)],
        [*decodes(0, 1), Part(2, 5)],
        *[decodes(0, 1, 2)] * 5,
        decodes(0, 1),
        decodes(0),
    ]


LENGTHS = (26, 15, 11)
"""Of the sequences of ``every_kind_of_step``; each outgrows ``index_topk``."""
