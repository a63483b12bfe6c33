"""Run by ``test_compiled_products.py`` in a process of its own: it pretends there is a GPU, and compiles for it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from importlib import import_module
from typing import Any

import torch
import triton

from benchmarks.precompile import begin
from benchmarks.rehearsal import kernels_met, pretended_device
from sidestream.ops.kda import triton_chunked
from sidestream.ops.kda.torch_impl import ForgetGate
from tests.ops.matrix_descriptors import asked_for, assembled

SIZES = ((128, 128, None), (64, 64, True), (32, 32, True))
"""K, V and whether chunks go by blocks, see ``Launch``."""


def launch(size_k: int, size_v: int, blocks: bool | None) -> None:
    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    heads = 4
    gate = ForgetGate(made(heads * size_k, dtype=torch.float32), made(heads, dtype=torch.float32), -5.0)
    state = made(2, 1, heads, size_k, size_v, dtype=torch.float32)
    q, v, beta = made(5, heads, size_k), made(5, heads, size_v), made(5, heads)
    where: dict[str, Any] = {"slots": [1], "starts": [0], "lengths": [5]}
    how = triton_chunked.Launch(blocks=blocks)
    triton_chunked.chunked(q, q, v, forget=q, beta=beta, gate=gate, state=state, launch=how, **where)


def listing(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    size = ""
    with pretended_device(), kernels_met(lambda: size) as met:
        for size_k, size_v, blocks in SIZES:
            size = f"{size_k} {size_v} {blocks}"
            launch(size_k, size_v, blocks)
    begin()
    found = []
    for kernel in met.values():
        module, _, name = kernel.name.rpartition(".")
        compiled = getattr(import_module(module), name).preload(kernel.data)
        asked, (products, hidden) = asked_for(compiled.asm["ptx"]), assembled(listing(compiled.asm["cubin"]))
        wrong = [f"{descriptor:#x}: {line}" for descriptor, line in products if descriptor not in asked]
        found.append({"name": name, "size": kernel.stage, "known": len(products), "hidden": hidden, "wrong": wrong})
    print(json.dumps(found))


if __name__ == "__main__":
    import_module("tests.ops.compiled_products").main()  # kernels are found again by the name of their module
