"""Run by ``test_kernels_read.py`` in a process of its own: it pretends that there is a GPU, calls the cases of every
operator there, and has Triton read each kernel that they ask for, as the first stage of a compilation does."""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend

from benchmarks.rehearsal import Kernel, kernels_met, pretended_device
from sidestream.ops.operator import OPERATORS
from tests.ops.operator_case import call, map_tensors
from tests.ops.operator_cases import CASES


class SourceRead(BaseException):
    """Ends a compilation once the source was read."""


def read(src: Any, *, target: Any, options: dict[str, Any]) -> Any:
    """In the place of ``triton.compile``."""
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(dict(options))
    module = src.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    assert module.verify(), "what was read is not valid"
    raise SourceRead


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(0, dtype=tensor.dtype, device="cuda")
    return made.new_empty_strided(tuple(tensor.shape), tensor.stride())


def kernels() -> tuple[list[Kernel], list[str]]:
    """Those that the cases ask for, and cases that could not be called here, with the reason."""
    left: list[str] = []
    arguments = [(case, case.make(0)) for case in CASES]
    with pretended_device(), kernels_met(lambda: "") as found:
        for case, made in arguments:
            try:
                call(OPERATORS[case.operator], map_tensors(made, on_device))
            except Exception as error:  # noqa: BLE001  # what reads tensors on the host, for one
                left.append(f"{case.name}: {type(error).__name__}: {str(error)[:200]}")
    return list(found.values()), left


def reason(kernel: Kernel) -> str | None:
    """Why it cannot be read."""
    module, _, name = kernel.name.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    function.compile = read
    try:
        function.preload(kernel.data)
    except SourceRead:
        return None
    except Exception as error:  # noqa: BLE001  # whatever it is, the kernel does not compile
        return f"{kernel.name}: {error}"[-1500:]
    raise AssertionError(f"{kernel.name} was compiled before")


def main() -> None:
    began = time.monotonic()
    found, left = kernels()
    called = time.monotonic()
    faults = [fault for fault in map(reason, found) if fault is not None]
    seconds = [round(called - began, 1), round(time.monotonic() - called, 1)]
    print(json.dumps({"kernels": sorted({k.name for k in found}), "faults": faults, "left": left, "count": len(found)}))
    print(seconds, file=sys.stderr)


if __name__ == "__main__":
    main()
