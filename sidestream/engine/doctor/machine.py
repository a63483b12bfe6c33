"""What stands in this machine: versions, processor, memory, GPU."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
from importlib import metadata
from pathlib import Path

import psutil
import torch

from sidestream.engine.doctor.report import Finding, Probe, Status

SECTION = "machine"
GIB = 2**30


def probes() -> list[Probe]:
    """Questions about the machine; none of them depends on the device chosen."""
    asks = {
        "python": lambda: Finding(platform.python_version(), platform.platform()),
        "torch": lambda: Finding(torch.__version__),
        "cuda_runtime": cuda_runtime,
        "cuda_driver": cuda_driver,
        "triton": triton,
        "transformers": lambda: Finding(metadata.version("transformers")),
        "cpu": lambda: Finding(cpu_name()),
        "cpu_cores": cpu_cores,
        "host_memory_total": lambda: gib(psutil.virtual_memory().total),
        "host_memory_free": lambda: gib(psutil.virtual_memory().available, "what can be had without swapping"),
        "gpu": lambda: gpu_fact("name"),
        "gpu_capability": gpu_capability,
        "gpu_sms": lambda: gpu_fact("multi_processor_count"),
        "gpu_memory_total": lambda: gpu_memory(1),
        "gpu_memory_free": lambda: gpu_memory(0),
    }
    return [Probe(SECTION, name, ask) for name, ask in asks.items()]


def gib(count: int, reason: str = "") -> Finding:
    """Bytes in GiB, to two places."""
    return Finding(round(count / GIB, 2), reason, "GiB")


def cuda_runtime() -> Finding:
    """The CUDA or ROCm that torch was built for."""
    if torch.version.hip is not None:
        return Finding(torch.version.hip, "torch is built for ROCm")
    if torch.version.cuda is None:
        return Finding(None, "torch is built for the CPU only", status=Status.MISSING)
    return Finding(torch.version.cuda, "torch is built for it")


def cuda_driver() -> Finding:
    """The newest CUDA that the driver knows."""
    if not torch.cuda.is_available():
        return no_gpu()
    if torch.version.hip is not None:
        return Finding(None, "ROCm has its own", status=Status.MISSING)
    version = ctypes.c_int()
    answer = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    if answer:
        raise RuntimeError(f"cuDriverGetVersion answers {answer}")
    return Finding(f"{version.value // 1000}.{version.value % 1000 // 10}", "the newest CUDA that the driver knows")


def triton() -> Finding:
    """Imported, since an installed Triton may still not load."""
    try:
        module = importlib.import_module("triton")
    except ImportError as error:
        return Finding(None, f"{error}; only a GPU needs it", status=Status.MISSING)
    return Finding(str(module.__version__), f"keeps compiled kernels in {module.knobs.cache.dir}")


def cpu_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    listing = Path("/proc/cpuinfo")
    for line in listing.read_text().splitlines() if listing.exists() else ():
        key, _, name = line.partition(":")
        if key.strip() == "model name":
            return name.strip()
    return platform.processor() or platform.machine()


def cpu_cores() -> Finding:
    """Logical cores that this process may use."""
    logical = psutil.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return Finding(usable, f"of {logical} in the machine; threads of torch: {torch.get_num_threads()}")


def gpu_fact(name: str) -> Finding:
    """An attribute of the GPU's properties."""
    return Finding(getattr(torch.cuda.get_device_properties(0), name)) if torch.cuda.is_available() else no_gpu()


def gpu_capability() -> Finding:
    if not torch.cuda.is_available():
        return no_gpu()
    return Finding(".".join(map(str, torch.cuda.get_device_capability(0))))


def gpu_memory(place: int) -> Finding:
    """``place`` 0: bytes free, 1: bytes in all."""
    return gib(torch.cuda.mem_get_info(0)[place]) if torch.cuda.is_available() else no_gpu()


def no_gpu() -> Finding:
    return Finding(None, "torch sees no GPU", status=Status.MISSING)
