"""Weights of a checkpoint folder: one tensor in flight, read in chunks of rows straight into its destination."""

from __future__ import annotations

import os

import torch

from sidestream.config.model import Fp8BlockConfig, ModelConfig
from sidestream.errors import CheckpointError
from sidestream.weights.checkpoint_folder import scan_folder
from sidestream.weights.names import EMBEDDING, LM_HEAD, SCALE_SUFFIX, Skipped, canonical_name
from sidestream.weights.rows import RowSlice, row_slice, whole
from sidestream.weights.safetensors_file import DTYPES, StoredTensor, read_rows
from sidestream.weights.source import LoadReport, Shard, full_shape

_CHUNK_ELEMENTS = 1 << 20
"""A chunk takes 1 to 8 MiB of host memory; of an fp8 tensor, a row of blocks and the same in float32."""


class SafetensorsSource:
    """``WeightSource`` over files, which are all checked when this is made and are open only while read.

    Args:
        folder: holds ``model.safetensors``, an index with shards, or several ``*.safetensors``.
        config: names the layers that run, the ties and the fp8 blocks.
    Raises:
        CheckpointError: naming the file that is missing, truncated, contradictory or of another format.
    """

    def __init__(self, folder: str | os.PathLike[str], config: ModelConfig) -> None:
        self._folder = os.fspath(folder)
        self._config = config
        self._stored: dict[str, StoredTensor] = {}
        self._skipped: dict[str, str] = {}
        self._loaded: list[str] = []
        self._missing: list[str] = []
        self._used: set[str] = set()
        for raw, tensor in scan_folder(folder).items():
            name = canonical_name(raw, config)
            if isinstance(name, Skipped):
                self._skipped[raw] = name.reason
            elif name in self._stored:
                raise CheckpointError(f"{tensor.file}: {raw} and {self._stored[name].name} are the same tensor, {name}")
            else:
                self._stored[name] = tensor

    def load(self, name: str, out: torch.Tensor, *, shard: Shard | None = None) -> None:
        stored = self._find(name)
        if stored is None:
            self._missing.append(name)
            return
        if stored.dtype not in DTYPES:
            raise CheckpointError(f"{stored.file}: {stored.name} has type {stored.dtype}, allowed are {list(DTYPES)}")
        shape = full_shape(out, shard)
        if [n for n in stored.shape if n != 1] != [n for n in shape if n != 1]:
            raise CheckpointError(
                f"{stored.file}: {stored.name} has shape {list(stored.shape)}, the config asks for {list(shape)}"
            )
        self._used.add(stored.name)
        self._loaded.append(name)
        if out.numel() == 0:
            return
        piece, rows = row_slice(out, shard)
        if stored.dtype == "F8_E4M3":
            self._dequantise(name, stored, rows, piece)
            return
        for row, chunk in read_rows(stored, piece, _chunk_rows(piece)):
            rows[row : row + len(chunk)].copy_(chunk)

    def finish(self) -> LoadReport:
        if self._missing:
            raise CheckpointError(f"{self._folder}: {len(self._missing)} tensors are missing: {_listed(self._missing)}")
        skipped = dict(self._skipped)
        unexpected = {t.name for t in self._stored.values()} - self._used
        head, embedding = self._stored.get(LM_HEAD), self._stored.get(EMBEDDING)
        if self._config.tie_word_embeddings and head is not None and head.name in unexpected:
            if embedding is not None and not _same_content(head, embedding):
                raise CheckpointError(
                    f"{head.file}: {head.name} differs from {embedding.name}, though the config says that they are "
                    "tied; set tie_word_embeddings to false in config.json if the head is its own"
                )
            unexpected.remove(head.name)
            skipped[head.name] = "tied to the embedding, which holds the same values"
        return LoadReport(tuple(self._loaded), tuple(sorted(unexpected)), skipped)

    def _find(self, name: str) -> StoredTensor | None:
        found = self._stored.get(name)
        if found is None and self._config.tie_word_embeddings and name in (LM_HEAD, EMBEDDING):
            found = self._stored.get(EMBEDDING if name == LM_HEAD else LM_HEAD)
        return found

    def _dequantise(self, name: str, stored: StoredTensor, rows: torch.Tensor, piece: RowSlice) -> None:
        """value = E4M3 value * scale of its block, in float32; the last blocks of rows and columns may be partial."""
        blocks = self._config.quantization or Fp8BlockConfig()
        scales = self._scales(name, stored, blocks)
        first_block = piece.col_start // blocks.block_cols
        skip_cols = piece.col_start - first_block * blocks.block_cols
        scales = scales[:, first_block : -(-piece.col_stop // blocks.block_cols)]
        # One chunk a row of blocks: a scale is then a number a column.
        to_bound = blocks.block_rows - piece.row_start % blocks.block_rows
        for row, chunk in read_rows(stored, piece, blocks.block_rows, first_rows=to_bound):
            scale = scales[(piece.row_start + row) // blocks.block_rows]
            by_column = scale.repeat_interleave(blocks.block_cols)[skip_cols : skip_cols + piece.num_cols]
            rows[row : row + len(chunk)].copy_(chunk.to(torch.float32).mul_(by_column))

    def _scales(self, name: str, stored: StoredTensor, blocks: Fp8BlockConfig) -> torch.Tensor:
        """[block rows, block cols] float32, whole: 1/16384 of the weight's size."""
        if self._config.quantization is None:
            raise CheckpointError(f"{stored.file}: {stored.name} is fp8, but config.json has no quantization_config")
        # A tied head borrows the embedding's tensor, and so its scales.
        canonical = next((n for n in (name, EMBEDDING, LM_HEAD) if self._stored.get(n) is stored), name)
        scale = self._stored.get(canonical + SCALE_SUFFIX)
        if scale is None:
            raise CheckpointError(
                f"{stored.file}: {stored.name} is fp8 and has no scales, {stored.name + SCALE_SUFFIX} is missing"
            )
        rows, cols = stored.shape if len(stored.shape) == 2 else (0, 0)
        shape = (-(-rows // blocks.block_rows), -(-cols // blocks.block_cols))
        if scale.dtype != "F32" or scale.shape != shape or len(stored.shape) != 2:
            raise CheckpointError(
                f"{scale.file}: {scale.name} is {scale.dtype} {list(scale.shape)}, it must be F32 {list(shape)} for "
                f"{stored.name} {list(stored.shape)} in blocks of {blocks.block_rows} x {blocks.block_cols}"
            )
        self._used.add(scale.name)
        return torch.cat([chunk.clone() for _, chunk in read_rows(scale, whole(shape), shape[0])])


def _chunk_rows(piece: RowSlice) -> int:
    return max(1, min(piece.num_rows, _CHUNK_ELEMENTS // piece.cols))


def _same_content(a: StoredTensor, b: StoredTensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype not in DTYPES:
        return False
    piece = whole(a.shape)
    pairs = zip(read_rows(a, piece, _chunk_rows(piece)), read_rows(b, piece, _chunk_rows(piece)), strict=True)
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for (_, x), (_, y) in pairs)


def _listed(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names))
