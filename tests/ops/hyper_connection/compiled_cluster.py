"""Run by ``test_compiled_cluster.py`` in a process of its own: it pretends that there is a GPU, and compiles for it."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.kernel_resources import resources_of
from benchmarks.precompile import begin
from benchmarks.rehearsal import kernels_met, pretended_device
from sidestream.ops.hyper_connection.launches import Cluster
from sidestream.ops.moe import ExpertSum

LAUNCHES = {
    "4 rows": Cluster(rows=4),
    "8 rows": Cluster(),
    "8 rows, factors behind": Cluster(ahead=False),
    "8 rows, two terms": Cluster(terms=2),
    "8 rows, held": Cluster(warps=8, held=True),
    "8 rows, held, two terms": Cluster(warps=8, held=True, terms=2),
    "8 rows, late": Cluster(late=True),
    "16 rows": Cluster(rows=16),
}
_EVENTS = {
    "barrier": r"bar\.sync",
    "arrive": r"barrier\.cluster\.arrive\.release\.aligned",
    "meet": r"barrier\.cluster\.wait\.acquire\.aligned",
    "load": r"ld\.global\.cg",
    "store": r"st\.global",
    "wait": r"griddepcontrol\.wait",
    "other": r"barrier\.cluster|mapa|shared::cluster",
}


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def call(rows: int, hidden: int, launch: Cluster, pending: bool) -> None:
    from sidestream.ops.hyper_connection import triton_cluster

    output = made(rows, hidden)
    if pending:
        partial, weights = made(rows * 9, hidden, dtype=torch.float32), made(rows, 8, dtype=torch.float32)
        output = ExpertSum(partial, weights, made(rows, 8, dtype=torch.int64), 1, torch.bfloat16)
    fn, base = made(24, 4 * hidden, dtype=torch.float32), made(24, dtype=torch.float32)
    post, mix = made(rows, 4, 1, dtype=torch.float32), made(rows, 4, 4, dtype=torch.float32)
    settings: dict[str, Any] = {"norm_weight": made(2, hidden), "norm_eps": 1e-5, "eps": 1e-6, "iters": 20}
    triton_cluster.hyper_connection_post_pre(
        made(rows, 4, hidden), output, post, fn, base, mix=mix, **settings, launch=launch
    )


def events(ptx: str) -> list[str]:
    """What happens in the order of the code, runs of a kind once."""
    found: list[str] = []
    for line in ptx.splitlines():
        kind = next((kind for kind, pattern in _EVENTS.items() if re.search(pattern, line)), None)
        if kind is not None and ".loc" not in line and ".file" not in line and found[-1:] != [kind]:
            found.append(kind)
    return found


def meetings(cubin: bytes) -> list[str]:
    """Instructions of barriers across a cluster, and those that order memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"\b(UCGABAR_ARV|UCGABAR_WAIT|MEMBAR\.\w+\.\w+|CCTL\.IVALL)\b", listing)


def main() -> None:
    stage = ""
    with pretended_device(), kernels_met(lambda: stage) as met:
        for name, launch in LAUNCHES.items():
            for pending in (False, True):
                stage = name + (", sums of experts" if pending else "")
                call(64, 4096, launch, pending)
        stage = "half as wide"
        call(64, 2048, Cluster(warps=8), pending=False)
    begin()
    compiled = {}
    for kernel in met.values():
        module, _, name = kernel.name.rpartition(".")
        asm = getattr(import_module(module), name).preload(kernel.data).asm
        found = resources_of(kernel)
        compiled[kernel.stage] = {
            "events": events(asm["ptx"]),
            "meetings": meetings(asm["cubin"]),
            "spilled": found.code.spilled,
            "registers": found.registers,
            "shared": found.shared,
        }
    print(json.dumps(compiled))


if __name__ == "__main__":
    import_module("tests.ops.hyper_connection.compiled_cluster").main()  # kernels are found again by their module
