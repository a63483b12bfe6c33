"""Weights without a checkpoint: random, repeatable, with finite activations and evenly used experts."""

from __future__ import annotations

import math
import zlib

import torch

from sidestream.config.model import ModelConfig
from sidestream.weights.names import EMBEDDING, LM_HEAD
from sidestream.weights.source import LoadReport, Shard, full_shape

_CHUNK_ELEMENTS = 1 << 22
"""Elements drawn at once: 16 MiB of integers, so that they stay in an H200's cache."""
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
_ONES = {"hc_attn_scale", "hc_ffn_scale"}


class DummySource:
    """``WeightSource`` that draws each tensor from ``seed`` and its name.

    Values depend neither on the order of loading, nor on sharding, nor on the destination's type (beyond its
    rounding) or device: they are hashes of their place, in integer arithmetic, drawn where the destination lies.
    Weights are close to normal (sums of four uniform numbers) with a standard deviation of 0.02, norms and
    hyper-connection scales one, biases, ``A_log``, ``dt_bias``, pool ``ape`` and hyper-connection bases zero: tiny
    uniform weights would send every token to the same experts.
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

        device = out.device if out.device.type == "cuda" else torch.device("cpu")
        for first in firsts:
            last = min(first + chunk_rows, shape[0])
            key = zlib.crc32(f"{self._seed}/{name}/{first}".encode())
            chunk = _normal((last - first) * math.prod(shape[1:]), key, device).view(last - first, *shape[1:])
            if dim == 0:
                low, high = max(first, start), min(last, stop)
                local[low - start : high - start].copy_(chunk[low - first : high - first])
            else:
                local[first:last].copy_(chunk.narrow(dim, start, stop - start))

    def finish(self) -> LoadReport:
        return LoadReport(tuple(self._loaded), (), {})


def _normal(count: int, key: int, device: torch.device) -> torch.Tensor:
    """[count] fp32, mean 0, deviation 0.02, the same on every device: the four 16-bit halves of two hashes, added."""
    assert count < 2**31, f"{count} elements are numbered in 32 bits"
    places = _mixed(torch.arange(count, dtype=torch.int32, device=device))  # else close keys gave shifted sequences
    first = _mixed(places.bitwise_xor_(_signed(key)))
    second = _mixed(first + _signed(0x9E3779B9))
    total = (first & 0xFFFF).add_((first >> 16) & 0xFFFF).add_(second & 0xFFFF).add_((second >> 16) & 0xFFFF)
    return (total - 2 * 0xFFFF).to(torch.float32).mul_(_STD / math.sqrt(4 * (2**32 - 1) / 12))


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser, of int32 in place; shifts are of unsigned numbers, so the sign is masked off."""
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(0x85EBCA6B)
    x ^= (x >> 13) & 0x7FFFF
    x *= _signed(0xC2B2AE35)
    x ^= (x >> 16) & 0xFFFF
    return x


def _signed(value: int) -> int:
    """The int32 with the same bits."""
    return value - (value >> 31 << 32)


def _constant(name: str) -> float | None:
    parent, _, leaf = name.rpartition(".")
    if leaf in _ZEROS:
        return 0.0
    if leaf in _ONES or (leaf == "weight" and parent.endswith("norm")):
        return 1.0
    return None
