"""The benchmark beside peers runs both engines on the same cut, and keeps each part."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers_gpu

CONFIG = Path(__file__).parents[1] / "sidestream" / "assets" / "glm5-next-tiny" / "config.json"
SMALL = ["--device", "cpu", "--dtype", "float32", "--config", str(CONFIG), "--layers", "3", "--context", "12"]
SMALL += ["--batch", "1", "2", "--prefill", "20", "--steps", "2", "--peer-steps", "2", "--repeats", "1"]
SMALL += ["--memory-limit", "4GiB"]


def test_both_engines_run_the_same_cut_and_a_failing_part_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts: list[dict[str, Any]] = []
    real_ours, real_peer = peers_gpu.open_engine, peers_gpu.Peer

    def open_engine(path: Path, *others: Any) -> Any:
        cuts.append(json.loads(path.read_text()))
        return real_ours(path, *others)

    def peer(config: dict[str, Any], *others: Any) -> Any:
        cuts.append(config)
        return real_peer(config, *others)

    def broken(args: Any) -> Any:
        raise RuntimeError("no operator today")

    monkeypatch.setattr(peers_gpu, "open_engine", open_engine)
    monkeypatch.setattr(peers_gpu, "Peer", peer)
    monkeypatch.setattr(peers_gpu, "operators", broken)
    path = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["peers_gpu.py", *SMALL, "--json", str(path)])
    assert peers_gpu.main() == 1
    found = json.loads(path.read_text())
    assert "no operator today" in found["operators"]["failed"]
    assert [row["batch"] for row in found["ours"]["decode"]] == [1, 2]
    assert [row["batch"] for row in found["transformers"]["decode"]] == [1, 2]
    assert found["ours"]["prefill"][0]["tokens"] == found["transformers"]["prefill"][0]["tokens"] == 20
    assert cuts[0] == cuts[1]
    assert len(cuts[0]["layer_types"]) == cuts[0]["num_hidden_layers"] == 3


def test_operators_are_timed_on_both_sides() -> None:
    rows = peers_gpu.operators(argparse.Namespace(device="cpu", dtype="float32"))
    assert {row["name"] for row in rows} == {"sparse attention", "linear", "rms norm", "top-k"}
    assert all(row["us"] > 0 and row["torch_us"] > 0 for row in rows)


def test_a_cut_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--layers is 99, .* has 1 to"):
        peers_gpu.cut_config(CONFIG, 99)
    other = tmp_path / "config.json"
    other.write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type is 'llama'"):
        peers_gpu.cut_config(other, 1)
