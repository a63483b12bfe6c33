"""Weights without a checkpoint: random, repeatable, with finite activations and evenly used experts."""

from __future__ import annotations

import math
import zlib
from concurrent.futures import ThreadPoolExecutor

import torch

from sidestream.config.model import ModelConfig
from sidestream.weights.names import EMBEDDING, LM_HEAD
from sidestream.weights.source import LoadReport, Shard, full_shape

_CHUNK_ELEMENTS = 1 << 20
_STD = 0.02
_ZEROS = {
    "bias",
    "A_log",
    "dt_bias",
    "e_score_correction_bias",
    "index_kpool_compress_ape",
    "hc_attn_base",
    "hc_ffn_base",
}
_THREADS = ThreadPoolExecutor(thread_name_prefix="dummy-weights")
"""Draws chunks of a tensor beside each other; torch lets go of the interpreter while it draws."""
_AHEAD = 64
"""Chunks drawn before they are copied: 256 MiB."""
_ONES = {"hc_attn_scale", "hc_ffn_scale"}


class DummySource:
    """``WeightSource`` that draws each tensor from ``seed`` and its name.

    Values depend neither on the order of loading, nor on sharding, nor on the destination's type (beyond its
    rounding) or device. Weights are normal with a standard deviation of 0.02, norms and hyper-connection scales one,
    biases, ``A_log``, ``dt_bias``, pool ``ape`` and hyper-connection bases zero: tiny uniform weights would send
    every token to the same experts.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._tied = config.tie_word_embeddings
        self._seed = seed
        self._loaded: list[str] = []

    def load(self, name: str, out: torch.Tensor, *, shard: Shard | None = None) -> None:
        self._loaded.append(name)
        if self._tied and name == LM_HEAD:
            name = EMBEDDING
        constant = _constant(name)
        if constant is not None:
            out.fill_(constant)
            return
        shape = full_shape(out, shard) or (1,)
        local = out.unsqueeze(0) if out.dim() == 0 else out
        dim, start = (0, 0) if shard is None else (shard.dim, shard.rank * local.shape[shard.dim])
        stop = start + local.shape[dim]
        chunk_rows = max(1, _CHUNK_ELEMENTS // max(1, math.prod(shape[1:])))
        firsts = range(0, shape[0], chunk_rows)
        if dim == 0:  # every chunk has a seed of its own, so those of other ranks need not be drawn
            firsts = range(start // chunk_rows * chunk_rows, stop, chunk_rows)

        def draw(first: int) -> tuple[int, torch.Tensor]:
            last = min(first + chunk_rows, shape[0])
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/{name}/{first}".encode()))
            chunk = torch.empty(last - first, *shape[1:]).normal_(0.0, _STD, generator=generator)
            if dim == 0:
                low, high = max(first, start), min(last, stop)
                return low - start, chunk[low - first : high - first].to(out.dtype)
            return first, chunk.narrow(dim, start, stop - start).to(out.dtype)

        for batch in (firsts[i : i + _AHEAD] for i in range(0, len(firsts), _AHEAD)):
            for place, rows in map(draw, batch) if len(batch) < 2 else _THREADS.map(draw, batch):
                local[place : place + rows.shape[0]].copy_(rows)

    def finish(self) -> LoadReport:
        return LoadReport(tuple(self._loaded), (), {})


def _constant(name: str) -> float | None:
    parent, _, leaf = name.rpartition(".")
    if leaf in _ZEROS:
        return 0.0
    if leaf in _ONES or (leaf == "weight" and parent.endswith("norm")):
        return 1.0
    return None
