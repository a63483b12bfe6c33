"""Folders and files that are refused before anything is loaded, each by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sidestream.errors import CheckpointError
from sidestream.weights.checkpoint_folder import scan_folder
from tests.weights.checkpoints import write

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def sharded(folder: Path, *, weight_map: dict[str, str] | None = None) -> Path:
    write(folder, {"a": torch.ones(3)}, file=A)
    write(folder, {"b": torch.ones(2), "c": torch.ones(1)}, file=B)
    content = {"metadata": {}, "weight_map": weight_map or {"a": A, "b": B, "c": B}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return folder


def rewrite_header(path: Path, header: object, *, data: bytes = bytes(8)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_one_file_an_index_and_loose_files(tmp_path: Path) -> None:
    single = scan_folder(write(tmp_path / "single", {"a": torch.ones(3, 2), "b": torch.ones(1)}))
    assert {name: tensor.shape for name, tensor in single.items()} == {"a": (3, 2), "b": (1,)}
    assert set(scan_folder(sharded(tmp_path / "index"))) == {"a", "b", "c"}
    loose = sharded(tmp_path / "loose")
    (loose / "model.safetensors.index.json").unlink()
    assert set(scan_folder(loose)) == {"a", "b", "c"}


def test_a_tensor_that_the_index_forgot_is_still_seen(tmp_path: Path) -> None:
    assert set(scan_folder(sharded(tmp_path, weight_map={"a": A, "b": B}))) == {"a", "b", "c"}


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    folder = sharded(tmp_path)
    content = (folder / B).read_bytes()
    (folder / B).write_bytes(content[:-cut])
    with pytest.raises(CheckpointError, match=f"{B}: "):
        scan_folder(folder)


@pytest.mark.parametrize("size", [0, 3, 8, 20])
def test_a_file_cut_inside_its_header_is_named(tmp_path: Path, size: int) -> None:
    folder = sharded(tmp_path)
    (folder / A).write_bytes((folder / A).read_bytes()[:size])
    with pytest.raises(CheckpointError, match=f"{A}: is truncated or not safetensors"):
        scan_folder(folder)


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": torch.ones(3)})
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is truncated or damaged"):
        scan_folder(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff\xfe broken", "no valid safetensors header"),
        ([], "the header is a list"),
        (b"[" * 100000, "no valid safetensors header"),
        ({"a": 3}, "entry of a is 3"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "entry of a is"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "entry of a is"),
        ({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, "entry of a is"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, "entry of a is"),
        ({"a": {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]}}, "unknown type 'F3'"),
        ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, "unknown type"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "does not take 8 bytes"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "starts at byte"),
        (
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
            },
            "starts at byte",
        ),
        (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 0}',
            "twice in the header: a",
        ),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path: Path, header: object, message: str) -> None:
    rewrite_header(tmp_path / "model.safetensors", {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    assert set(scan_folder(tmp_path)) == {"a"}
    rewrite_header(tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        scan_folder(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    write(folder, {"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(1)}, file=B)
    with pytest.raises(CheckpointError, match=f"{B}: tensor a is also in {A}"):
        scan_folder(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": A, "b": B, "d": B}, f"{B}: has no tensor d"),
        ({"a": B, "b": B, "c": A}, f"{B}: has no tensor a"),
        ({"a": A, "b": "model-00003-of-00002.safetensors"}, "model-00003-of-00002.safetensors: is missing"),
        ({"a": "../x.safetensors"}, "names the file '../x.safetensors'"),
        ({"a": "x.bin"}, "names the file 'x.bin'"),
        ({"a": 3}, "is not a safetensors index"),
        ([], "is not a safetensors index"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, weight_map: object, message: str) -> None:
    folder = sharded(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        scan_folder(folder)


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    for text in ("{", "{}", "[]"):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: is not a safetensors index"):
            scan_folder(folder)


def test_two_checkpoints_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = write(sharded(tmp_path), {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"more than one checkpoint .*model\.safetensors"):
        scan_folder(folder)


def test_shards_that_are_missing_without_an_index_are_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    (folder / B).unlink()
    with pytest.raises(CheckpointError, match=f"shards are missing: {B}"):
        scan_folder(folder)


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        scan_folder(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors file; only safetensors are read"):
        scan_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin, which may run code"):
        scan_folder(tmp_path)
