"""Which tensors a checkpoint folder holds, with everything checked that can be before a byte of them is read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from sidestream.errors import CheckpointError
from sidestream.weights.safetensors_file import StoredTensor, read_header

_SINGLE = "model.safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_SHARD_NAME = re.compile(r"(.*-)\d{5}-of-(\d{5})\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def scan_folder(folder: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Every tensor of a folder by its own name: one file, an index with its shards, or several files without index.

    Raises:
        CheckpointError: naming the file, for anything missing, truncated, contradictory or not safetensors.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is not a folder with a checkpoint")
    index = _read_index(folder)
    files = sorted(set(index.values())) if index is not None else _unindexed_files(folder)
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        for tensor in read_header(folder / name):
            other = tensors.get(tensor.name)
            if other is not None:
                raise CheckpointError(f"{folder / name}: tensor {tensor.name} is also in {other.file.name}")
            tensors[tensor.name] = tensor
    for tensor_name, name in (index or {}).items():
        if tensor_name not in tensors or tensors[tensor_name].file.name != name:
            raise CheckpointError(f"{folder / name}: has no tensor {tensor_name}, which the index puts there")
    return tensors


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name to file name, None if the folder has no index."""
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(_INDEX_SUFFIX))
    if not paths:
        return None
    if len(paths) > 1 or (folder / _SINGLE).exists():
        found = [p.name for p in paths] + ([_SINGLE] if (folder / _SINGLE).exists() else [])
        raise CheckpointError(f"{folder}: holds more than one checkpoint ({', '.join(found)}); remove all but one")
    try:
        content = json.loads(paths[0].read_text(encoding="utf-8"))
        weight_map = content["weight_map"]
        if not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
            raise ValueError("weight_map is empty or not a map to file names")
    except OSError as error:
        raise CheckpointError(f"{paths[0]}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{paths[0]}: is not a safetensors index: {error!r}") from error
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{paths[0]}: names the file {name!r}, which is not a safetensors file beside it")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: is missing, {paths[0].name} names it")
    return dict(weight_map)


def _unindexed_files(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir())
    if _SINGLE in names:
        return [_SINGLE]
    files = [name for name in names if name.endswith(".safetensors")]
    if not files:
        pickles = [name for name in names if name.endswith(_PICKLES)]
        found = f", only {', '.join(pickles)}, which may run code when opened" if pickles else ""
        raise CheckpointError(f"{folder}: has no *.safetensors file{found}; only safetensors are read")
    for name in files:
        numbered = _SHARD_NAME.fullmatch(name)
        if numbered is None:
            continue
        wanted = [f"{numbered[1]}{i:05d}-of-{numbered[2]}.safetensors" for i in range(1, int(numbered[2]) + 1)]
        missing = [shard for shard in wanted if shard not in files]
        if missing:
            raise CheckpointError(f"{folder}: shards are missing: {', '.join(missing)}")
    return files
