"""Reading of the safetensors format: headers are checked before anything is loaded, data is read in small pieces.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the tensors without gaps).
Data is read with ``pread`` into a small buffer rather than mapped: mapped pages count as the process's own memory.
"""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sidestream.errors import CheckpointError
from sidestream.weights.rows import RowSlice

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Types that weights may have."""
_ITEM_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
_ITEM_BITS |= {"BOOL": 8, "I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64}
_MAX_HEADER = 100_000_000  # the format's own limit
_MIN_RUN = 4096
"""Shorter pieces of a row are cut out of whole rows: a system call costs more than the bytes."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: ``offset`` is in bytes from the start of the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BITS[self.dtype] // 8


def read_header(path: Path) -> list[StoredTensor]:
    """Every tensor of a file.

    Raises:
        CheckpointError: naming the file, if it cannot be read, is truncated, or its header does not describe it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(f"{path}: is truncated or not safetensors: {size} bytes, header of {length}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text, object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError(f"the header is a {type(header).__name__}")
        tensors = [_entry(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested without end
        raise CheckpointError(f"{path}: has no valid safetensors header: {error}") from error
    end = 8 + length
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset != end:
            raise CheckpointError(f"{path}: tensor {tensor.name} starts at byte {tensor.offset}, expected {end}")
        end += tensor.num_bytes
    if end != size:
        raise CheckpointError(f"{path}: is truncated or damaged: {size} bytes, its header describes {end}")
    return tensors


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = dict(pairs)
    if len(names) != len(pairs):
        twice = sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"twice in the header: {', '.join(twice)}")
    return names


def _entry(path: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"entry of {name} is {entry!r}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    integers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in integers) or len(offsets) != 2:
        raise ValueError(f"entry of {name} is {entry!r}")
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise ValueError(f"tensor {name} has the unknown type {dtype!r}")
    tensor = StoredTensor(path, name, dtype, tuple(shape), data_start + offsets[0])
    if offsets[1] - offsets[0] != tensor.num_bytes:
        raise ValueError(f"tensor {name} of {dtype} {shape} does not take {offsets[1] - offsets[0]} bytes")
    return tensor


def read_rows(
    tensor: StoredTensor, piece: RowSlice, chunk_rows: int, *, first_rows: int | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read a slice in chunks of rows through one reused buffer.

    Args:
        chunk_rows: rows a chunk, and
        first_rows: of the first one, at most as many, so that later chunks start at block bounds.
    Yields:
        The first row of a chunk (counted from ``row_start``) and the chunk [n, col_stop - col_start] in the stored
        type. It is overwritten by the next one.
    Raises:
        CheckpointError: the file is gone or ends early.
    """
    dtype = DTYPES[tensor.dtype]
    item = dtype.itemsize
    width, stride = piece.num_cols * item, piece.cols * item
    whole_rows = width == stride or width < _MIN_RUN
    buffer = torch.empty(chunk_rows * (stride if whole_rows else width), dtype=torch.uint8)
    memory = buffer.numpy().data
    with _open(tensor.file) as file:
        row = piece.row_start
        count = first_rows or chunk_rows
        while row < piece.row_stop:
            count = min(count, piece.row_stop - row)
            start = tensor.offset + row * stride
            if whole_rows:
                _read_exactly(file, memory[: count * stride], start, tensor)
                chunk = buffer[: count * stride].view(dtype).view(count, piece.cols)
                yield row - piece.row_start, chunk[:, piece.col_start : piece.col_stop]
            else:
                for i in range(count):
                    run = start + i * stride + piece.col_start * item
                    _read_exactly(file, memory[i * width : (i + 1) * width], run, tensor)
                yield row - piece.row_start, buffer[: count * width].view(dtype).view(count, -1)
            row += count
            count = chunk_rows


def _open(path: Path) -> io.FileIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _read_exactly(file: io.FileIO, memory: memoryview, offset: int, tensor: StoredTensor) -> None:
    try:
        file.seek(offset)
        done = 0
        while done < len(memory):
            read = file.readinto(memory[done:])
            if not read:
                raise CheckpointError(f"{tensor.file}: ends inside tensor {tensor.name}")
            done += read
    except OSError as error:
        raise CheckpointError(f"{tensor.file}: cannot be read: {error.strerror}") from error
