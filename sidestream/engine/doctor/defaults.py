"""What the engine will do here if it is told nothing, by the function that decides it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import psutil
import torch

from sidestream.config.engine import EngineConfig
from sidestream.config.memory_size import DEFAULT_SHARE
from sidestream.config.model import ModelConfig
from sidestream.config.resolved import ResolvedConfig, resolve
from sidestream.engine.doctor.machine import GIB
from sidestream.engine.doctor.report import Finding, Probe
from sidestream.engine.doctor.target import Target
from sidestream.engine.llm import bundled_model
from sidestream.streams import Streams

SECTION = "engine"
GRAPH_MODES = {
    "full": "one graph a step",
    "piecewise": "graphs between the eager breaks",
    "full_and_piecewise": "one graph for uniform decode steps, graphs between the eager breaks for others",
}


def probes(target: Target) -> list[Probe]:
    """Questions about the engine's defaults on the target."""
    asks = {
        "device": device,
        "dtype": dtype,
        "graph_mode": graph_mode,
        "stream_policy": stream_policy,
        "memory_budget": memory_budget,
    }
    return [Probe(SECTION, name, partial(ask, target)) for name, ask in asks.items()]


def device(target: Target) -> Finding:
    return Finding(_resolved(target).device, target.reason)


def dtype(target: Target) -> Finding:
    config = _resolved(target)
    if config.device == "cpu":
        return Finding(config.dtype, "the default on a CPU, whatever the checkpoint holds")
    return Finding(config.dtype, "of a bfloat16 checkpoint: weights keep the checkpoint's dtype")


def graph_mode(target: Target) -> Finding:
    """The default ``cudagraph_mode``."""
    config = _resolved(target)
    mode = config.cudagraph_mode
    if config.device == "cpu":
        return Finding(mode, "a CPU has no graphs")
    return Finding(mode, GRAPH_MODES.get(mode, "the default of this version: every step is issued kernel by kernel"))


def stream_policy(target: Target) -> Finding:
    report = Streams(target.make_engine_backend()).report
    at_once = "" if target.on_gpu else "; work runs at once there, so no wait holds anything up"
    return Finding(report.policy.value, report.reason + at_once)


def memory_budget(target: Target) -> Finding:
    """Bytes that the engine keeps within, by the default ``memory_limit``."""
    budget = _resolved(target).memory_budget
    whole = "the GPU's memory" if target.on_gpu else "the host's memory"
    what = "everything in use on it" if target.on_gpu else "weights and caches together"
    reason = f"{DEFAULT_SHARE:.0%} of {whole}, for {what}; memory_limit moves it"
    return Finding(round(budget / GIB, 2), reason, "GiB")


def _resolved(target: Target) -> ResolvedConfig:
    """The defaults for a bfloat16 checkpoint; no answer here depends on anything else of the model."""
    model = replace(ModelConfig.from_hf(bundled_model()), dtype="bfloat16")
    user, there = EngineConfig(device="cuda" if target.on_gpu else "cpu"), torch.cuda.is_available()
    total = torch.cuda.mem_get_info()[1] if target.on_gpu and there else psutil.virtual_memory().total
    return resolve(user, model, cuda_available=there, device_memory=int(total))
